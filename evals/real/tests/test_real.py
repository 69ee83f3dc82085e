"""Training and the study on a model of a few thousand parameters; the metrics; the page."""

import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import get_data
import numpy as np
import pytest
import real.study
import torch
import yaml
from click.testing import CliRunner
from real import cells, plan, tables, tasks
from real import model as one_pass
from real import train as training
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REAL = Path(real.study.__file__).parent
FOUR = ("sst2", "semeval2010_task8", "nl2bash", "geoquery_sql")  # exact, exact, graded, queries


def small() -> tuple[Any, Any]:
    """A Llama of a few thousand parameters, and a tokenizer with a token per character."""
    vocabulary = {c: i for i, c in enumerate(["<end>", "<unk>", "\n", *map(chr, range(32, 123))])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<end>", unk_token="<unk>"
    )
    return LlamaForCausalLM(config).bfloat16(), tokenizer


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Ten items a split of each task, and the base."""
    for task in FOUR:
        folder = tmp_path / "data" / task
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            items = [{"prompt": f"{split} {i}:", "response": " yes"} for i in range(10)]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
    (tmp_path / "data" / tasks.DATABASE).parent.mkdir()
    sqlite3.connect(tmp_path / "data" / tasks.DATABASE).close()
    text = tmp_path / "data/subj/raw/data__raw__subj.objective"
    text.parent.mkdir(parents=True)
    text.write_text("some plain words\nand others\n")
    for part in small():
        part.save_pretrained(tmp_path / "out/base")
    return tmp_path


def call(command: Any, world: Path, *more: str) -> str:
    words = ["--data", str(world / "data"), "--out", str(world / "out"), "--device", "cpu", *more]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


@pytest.mark.slow
def test_the_study_measures_each_kind_of_cell_once(world, monkeypatch):
    monkeypatch.setattr(plan, "MODELS", {"full": ("full", FOUR)})
    for module in (real.study, tables):
        monkeypatch.setattr(module, "MODELS", plan.MODELS)
    for name, grid in {"LAMBDAS": [0.3, 0.65, 1.4], "SMALLER": [], "LARGER": []}.items():
        monkeypatch.setattr(plan, name, grid)
    monkeypatch.setattr(tables, "picture", lambda *given: given)
    chosen = {"merges": "wudi_30 wudi_30_summed", "few": "groups", "paper": "ties",
              "learned": "fisher", "routers": "wemoe_wudi_30", "flows": "wudi_auto",
              "kept": "lossless keep_0.05 bases",
              "forgetting": "none sample rand_proj", "online": "ae rand_select",
              "routed": "templates common", "routed_apart": "answers long"}  # fmt: skip
    every = plan.parts(4)

    def parts(count: int) -> dict[str, list[Any]]:
        """A cell or a few of each part."""
        found = {}
        for part, some in every.items():
            wanted = {cell.get(key): cell for key in ("basis", "how") for cell in some[::-1]
                      if cell.get("budget") != 1}  # fmt: skip
            names = chosen[part].split() if part in chosen else ()
            found[part] = [wanted[name] for name in names] or some
        found["theory"][0]["steps"] = 1
        return found

    monkeypatch.setattr(real.study, "parts", parts)
    for task in FOUR:
        call(training.main, world, "--task", task, "--examples", "16")
    kept, page = world / "cells.jsonl", world / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in tables.TABLES))
    words = ["--cells", str(kept), "--page", str(page), *(f"--part={part}" for part in every)]
    call(real.study.main, world, *words)
    records = cells.read(kept)
    assert {r["cell"]["kind"] for r in records} == {*plan.KINDS}
    text = page.read_text()
    titles = "others summed; rand_proj, M = 2; WEMoE on; Fisher; a sample of 5 %"
    for title in (*titles.split("; "), "lambda_(M+1)", "random buffer"):
        assert title in text, title
    (lossless,) = [r["result"] for r in records if r["cell"].get("how") == "lossless"]
    assert lossless["error"] < 1e-3
    files = {file: file.stat().st_mtime_ns for file in world.glob("out/seed0/cells/full/*")}
    call(real.study.main, world, *words)
    assert files == {file: file.stat().st_mtime_ns for file in files}
    assert page.read_text() == text and cells.read(kept) == records


def test_tables_are_means_of_shares_and_paired_tests() -> None:
    own = {"a": [1.0, 1.0, 0.0, 0.0], "b": [1.0] * 4}

    def record(seed: int, items: dict[str, list[float]], **cell: Any) -> dict[str, Any]:
        packed = {task: cells.packed(each) for task, each in items.items()}
        return {"models": "full", "seed": seed, "cell": cell, "result": {"items": packed}}

    records = [record(seed, own, kind="reference") for seed in (0, 1)]
    merged = [
        {"a": [1.0, 0.0, 0.0, 0.0], "b": [0.5, 0.0, 1.0, 0.25]},
        {"a": [0.0] * 4, "b": [0.0] * 4},
    ]
    made = [record(seed, items, kind="merge") for seed, items in enumerate(merged)]
    study = tables.Study([*records, *made])
    kept = (0.25 / 0.5 + 0.4375) / 2
    assert [study.tuned(r) for r in made] == pytest.approx([kept, 0])
    column = {"kept": tables.Column(study.tuned), "one": tables.Column(study.tuned, {"kind": "no"})}
    line = tables.grid(["row"], column, [(("x",), made)]).splitlines()[-1]
    assert line == f"| x | {kept / 2:.3f} ± {kept / math.sqrt(2):.3f} | 2 | 0, 1 |"
    right = np.array([1.0] * 9 + [-1.0] * 2)  # McNemar's mid-p of 9 against 2
    mid = 2 * sum(math.comb(11, k) for k in range(3)) / 2**11 - math.comb(11, 2) / 2**11
    assert tables.sign_flip(right) == pytest.approx(mid, abs=0.01)
    assert tables.sign_flip(np.zeros(4)) == 1.0
    for scores in ([0.0, 1.0, 1.0, 0.0, 0.0], [0.0] * 75, [0.1234, 1.0]):
        assert cells.unpacked(json.loads(json.dumps(cells.packed(scores)))) == scores


def test_the_page_has_the_tables_of_the_cells(tmp_path: Path, monkeypatch) -> None:
    page, records = tmp_path / "RESULTS.md", cells.read(REAL / "cells.jsonl")
    page.write_bytes((REAL.parent / "RESULTS.md").read_bytes())
    tables.report(records, page)
    assert page.read_bytes() == (REAL.parent / "RESULTS.md").read_bytes()
    assert (tmp_path / "kept.svg").exists() and (REAL.parent / "kept.svg").exists()
    assert all(f"<!-- {name} -->" in page.read_text() for name in tables.TABLES)
    assert cells.write(tmp_path / "again.jsonl", reversed(records)) == records
    assert (tmp_path / "again.jsonl").read_bytes() == (REAL / "cells.jsonl").read_bytes()


def test_one_pass_finds_what_greedy_decoding_would() -> None:
    model, tokenizer = small()
    model.float().eval()
    prompts = [f"question {i} is {'longer ' * (i % 3)}:" for i in range(8)]
    items = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        said = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        items.append(tasks.Item(prompt, "".join(tokenizer.convert_ids_to_tokens(said))[:2]))
    examples = one_pass.encode(tokenizer, items)
    shares, value = one_pass.evaluate(model, examples, torch.arange(len(tokenizer)))
    assert shares == [1.0] * 8
    none, _ = one_pass.evaluate(model, examples, torch.tensor([], dtype=torch.long))
    assert none == [2 / 3] * 8  # two tokens, and an end that is none
    wrong = one_pass.encode(tokenizer, [items[0]._replace(response="~~"), *items[1:]])
    shares, _ = one_pass.evaluate(model, wrong, torch.arange(len(tokenizer)))
    assert shares[0] < 1 and shares[1:] == [1.0] * 7
    single = [one_pass.loss(model, [example]).item() for example in examples]
    assert value == pytest.approx(sum(single) / 8, rel=1e-2)
    tokenizer.pad_token = tokenizer.eos_token
    said = one_pass.answers(model, tokenizer, prompts, torch.tensor([0]), 2)
    assert ["".join(text.split()) for text in said] == [item.response for item in items]
    assert {tokenizer.eos_token_id, 2} <= set(one_pass.endings(tokenizer).tolist())


def test_metrics(tmp_path: Path) -> None:
    database = tmp_path / tasks.DATABASE
    database.parent.mkdir(parents=True)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE city (name TEXT, people INT)")
        rows = [(f"c{i}", i) for i in range(200)]
        connection.executemany("INSERT INTO city VALUES (?, ?)", rows)
    connection.close()
    score = tasks.metric(tmp_path, "geoquery_sql")
    right = ' SELECT name FROM city WHERE people = 2 OR name = "c1" ;'
    before = database.read_bytes()
    assert score("select name from city where people in (2, 1) order by people desc", right) == 1.0
    for wrong in (
        "", "select name from city where people = 2", "DROP TABLE city",
        f"ATTACH '{tmp_path / 'other'}' AS other", "SELECT randomblob(1000000000)",
        "SELECT count(*) FROM city a, city b, city c, city d", "SELECT 1 FROM city a, city b",
    ):  # fmt: skip
        assert score(wrong, right) == 0.0, wrong
    assert score("select 1 where 0", "select 2 where 0") == 0.0  # both empty: texts are compared
    assert score("SELECT > ALL", " SELECT > ALL") == 1.0
    assert database.read_bytes() == before and not (tmp_path / "other").exists()
    chrf = tasks.metric(tmp_path, "multi30k_en_de")
    assert chrf(" Ein Mann.", "Ein Mann.") == 1.0 and 0 < chrf("Ein", "Ein Mann.") < 0.6
    assert tasks.metric(tmp_path, "trec")("a  b\n", " a b") == 1.0


def test_the_table_has_the_sets_of_the_benchmark() -> None:
    table = yaml.safe_load(get_data.TABLE.read_text())
    assert list(get_data.SETS) == list(table) == [*tasks.TASKS, *tasks.OUTSIDE]
