"""Models with extra tokens: aligned to the base's vocabulary, or refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_close, merge, recipe, run, write
from reference import Dense, expect
from safetensors.torch import save_file
from tiny import TASKS, family, llama, load, save_tokenizer
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

THREE = TASKS[:3]
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
EXTRA = ("<think>", "</think>")


def grown(folder: Path, model: Path) -> dict[str, torch.Tensor]:
    """Give a checkpoint two tokens more; returns it cut back to the first 96."""
    state = load(model)
    for name in VOCABULARY:
        state[name] = torch.cat([state[name], torch.randn(2, 32)])
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = 98
    (model / "config.json").write_text(json.dumps(config))
    save_tokenizer(model, 96, EXTRA)
    return {name: t[:96] if name in VOCABULARY else t for name, t in state.items()}


@pytest.mark.parametrize("form", ["tokenizer_source", "tokenizer"])
@pytest.mark.parametrize("method", ["basis_ta", "basis_ties", "basis_negate"])
def test_tokenizer_of_the_base(method: str, form: str, tmp_path: Path) -> None:
    base, models = family(tmp_path, llama, THREE)
    states = [load(base), load(models[0]), grown(tmp_path, models[1]), load(models[2])]
    dense = Dense(states[0], states[1:], list(states[0]))
    keys: dict[str, Any] = {"basis": "pca", "num_bases": 2}
    if method == "basis_negate":
        keys |= {"forget": "code", "alpha": 1}
    source = (
        {"tokenizer_source": "base"}
        if form == "tokenizer_source"
        else {"tokenizer": {"source": "base"}}
    )
    result = merge(recipe(method, base, models, extra=source, **keys), tmp_path / "out")
    want = expect(dense, method, keys, result.basis, THREE)
    assert_close(result.tensors, want.tensors, dense.base, want.boundary)
    assert result.facts["num_parameters"] == len(dense.theta)
    assert result.tensors["lm_head.weight"].shape == (96, 32)
    again = merge(recipe(method, base, models, extra=source, **keys), tmp_path / "again")
    assert again.facts["gram_cached"] is True
    assert all(torch.equal(again.tensors[n], result.tensors[n]) for n in result.tensors)


def test_a_tokenizer_in_another_order(tmp_path: Path) -> None:
    """The base's order counts: the rows of a model whose tokenizer is permuted are moved."""
    base, tuned = family(tmp_path, llama, THREE)
    states = [load(path) for path in (base, *tuned)]
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    inner = Tokenizer(WordLevel({f"t{int(t)}": i for i, t in enumerate(order)}, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t0").save_pretrained(tuned[1])
    moved = {n: t[order] if n in VOCABULARY else t for n, t in states[2].items()}
    save_file(moved, tuned[1] / "model.safetensors", metadata={"format": "pt"})
    dense = Dense(states[0], states[1:], list(states[0]))
    keys = {"basis": "pca", "num_bases": 2}
    made = recipe("basis_ta", base, tuned, extra={"tokenizer_source": "base"}, **keys)
    result = merge(made, tmp_path / "out")
    want = expect(dense, "basis_ta", keys, result.basis, THREE)
    assert_close(result.tensors, want.tensors, dense.base)


def test_union_without_new_tokens_is_the_base_s(tmp_path: Path) -> None:
    base, models = family(tmp_path, llama, THREE)
    plain = merge(recipe("basis_ta", base, models, basis="none"), tmp_path / "plain")
    made = recipe("basis_ta", base, models, basis="none", extra={"tokenizer_source": "union"})
    union = merge(made, tmp_path / "union")
    assert all(torch.equal(union.tensors[n], plain.tensors[n]) for n in plain.tensors)


def test_union_with_new_tokens_is_refused_in_one_line(tmp_path: Path) -> None:
    base, models = family(tmp_path, llama, THREE)
    grown(tmp_path, models[1])
    made = recipe("basis_ta", base, models, extra={"tokenizer_source": "union"})
    out = tmp_path / "out"
    words = [sys.executable, "-m", "mergekit.scripts.run_yaml", str(write(made, out)), str(out)]
    done = run([*words, "--quiet"], out)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and "2 tokens that the base lacks" in errors[0]
    assert "Traceback" not in done.stderr
    assert not out.exists()
    made = recipe(
        "basis_ta",
        base,
        models,
        extra={"tokenizer_source": "union"},
        exclude="embed_tokens|lm_head",
    )
    assert merge(made, tmp_path / "left").tensors["lm_head.weight"].shape == (98, 32)
