"""The study of the encoder on a BERT of a few thousand parameters, by its one command."""

import itertools
import json
from pathlib import Path

import encoder.study as study
import pytest
import torch
from click.testing import CliRunner
from transformers import BertConfig, BertModel, BertTokenizer


@pytest.mark.slow
def test_a_seed_is_trained_and_measured_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for task, split in itertools.product(study.TASKS, ("train", "test")):
        items = [{"prompt": split[1] + " b" * (i % 9) + " a" * i, "response": str(i % 3)}
                 for i in range(60)]  # fmt: skip
        Path("data", task).mkdir(parents=True, exist_ok=True)
        Path("data", task, f"{split}.jsonl").write_text("\n".join(map(json.dumps, items)))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    torch.manual_seed(0)  # with some weights no specialist is better than the base
    BertModel(BertConfig(vocab_size=8, num_hidden_layers=1, **sizes)).save_pretrained("given")
    BertTokenizer({w: i for i, w in enumerate("[PAD] [UNK] [CLS] [SEP] [MASK] a b".split())}
                  ).save_pretrained("given")  # fmt: skip
    Path("page.md").write_text("".join(f"<!-- {t} -->\n<!-- end -->\n" for t in study.TABLES))
    every = study.plan()
    some = [*every[:3], *(cell for cell in every if cell["basis"] in ("pca", "ae"))]
    given = {"TESTED": 10, "CELLS": Path("cells.jsonl"), "PAGE": Path("page.md"),
             "EXAMPLES": dict.fromkeys(study.TASKS, 48), "plan": lambda: some}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setattr(study, name, value)
    for words in (["--given", "given"], []):  # the second time nothing is made
        done = CliRunner().invoke(study.main, ["--data", "data", "--out", "out", *words])
        assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
        assert len(Path("cells.jsonl").read_text().splitlines()) == len(some)
        assert "| ae, M = 4 | " in Path("page.md").read_text()
        monkeypatch.setattr(study, "measure", None)
        monkeypatch.setattr(study.Encoder, "train", None)
    run = study.Encoder(Path("out"), Path("data"), 0)
    for how in ("ta", "ties", "tsvm", "wudi_30"):  # by mergekit's command, and by the library
        theirs = study.added(run, {"how": how, "basis": "none"})
        ours = study.direction(run, run.built({"basis": "none"}), how)
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
        assert any(each.any() for each in ours.values())


def test_the_page_has_the_tables_of_the_cells(tmp_path, monkeypatch):
    page, given = tmp_path / "page.md", study.PAGE.read_bytes()
    page.write_bytes(given)
    monkeypatch.setattr(study, "PAGE", page)
    assert CliRunner().invoke(study.main, []).exit_code == 0
    assert page.read_bytes() == given
