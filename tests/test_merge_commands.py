"""Merging commands as users type them: what they print, refuse and leave behind."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from commands import Result, assert_close, assert_same, merge, recipe, refused, write
from mergekit import merge_methods
from reference import Dense, expect
from safetensors.torch import save_file
from tiny import TASKS, family, llama, load
from worlds import FAMILIES, World
from yaml.reader import Reader

import tvb_mergekit
from tvb_mergekit.tensors import checkpoint

BALANCED = {"basis": "balanced", "num_bases": 2}


# Whole commands (`mergekit-yaml` runs recipes in test_recipes.py)


@pytest.mark.parametrize("command", ["tvb merge", "mergekit-multi"])
def test_commands(command: str, world: World, tmp_path: Path) -> None:
    out, document = tmp_path / "out", world("llama").recipe("basis_ties", **BALANCED)
    words = [*command.split(), str(write(document, out)), str(out)]
    if command == "mergekit-multi":
        words[-1:] = ["-I", str(tmp_path), "--out-path", str(out), "--lazy-unpickle"]
        words += ["--lora-merge-cache", str(tmp_path / "cache")]
    done = processes.run(words, tmp_path)
    assert done.code == 0, done.err
    for text in ("Cosines", "Encoder weights", "Retained energy", "Written to", *TASKS):
        assert text in done.out
    told = "--lazy-unpickle, --lora-merge-cache: without effect on our methods" in done.err
    assert told == ("--lazy-unpickle" in words)
    assert "\r" not in done.err and "Merged model: 100%" in done.err  # no terminal
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.yml"}
    assert_same(Result(out), merge(document, tmp_path / "same"))


@pytest.mark.parametrize("stored", [False, True])
def test_recipe_is_parsed_and_headers_are_read_once(stored, world, tmp_path, monkeypatch):
    base, listed = world("llama").base, world("llama").listed
    if stored:
        store = tmp_path / "store"
        tvb_mergekit.build(base, world("llama").models, store, **BALANCED)
        listed = [store]
    parsed, read = [], []
    parse, header = Reader.__init__, checkpoint._read_safetensors_header

    def parsing(self: Reader, stream: Any) -> None:
        text = stream if isinstance(stream, str) else ""
        parsed.extend(["recipe"] * ("merge_method" in text))
        parse(self, stream)

    def reading(folder: Path, shard: str) -> Any:
        read.append(folder)
        return header(folder, shard)

    monkeypatch.setattr(Reader, "__init__", parsing)
    monkeypatch.setattr(checkpoint, "_read_safetensors_header", reading)
    merge(recipe("basis_ta", base, listed, **({} if stored else BALANCED)), tmp_path / "out")
    assert len(parsed) == 2  # by us and by mergekit
    vectors = [store / "vectors"] * 2 if stored else listed
    assert sorted(read) == sorted([base, *vectors])


# Refusals


def test_mergekit_pytorch_and_tensors_in_memory(tmp_path: Path) -> None:
    """Refused before a file is read: each tensor would get a basis of its own."""
    document = recipe("basis_ta", Path("base.pt"), ["a.pt"])
    told = merge(document, tmp_path / "out", command="mergekit-pytorch", fails=True).output
    assert told.startswith("Error: basis_ta needs all tensors") and told.count("\n") == 1
    states, tensors = [{"w": torch.ones(2)}] * 2, [torch.ones(2)] * 2
    for call in (
        partial(merge_methods.merge_state_dicts, states, "basis_ta", base=0),
        partial(merge_methods.merge_tensors, tensors, "basis_ta", base_index=0, name="w"),
    ):
        with pytest.raises(RuntimeError, match=r"use mergekit-yaml, or tvb_mergekit\.merge"):
            call()


def test_what_is_refused_leaves_nothing(world, tmp_path):
    out = tmp_path / "out"
    file = write(world("llama").recipe("basis_ta", **BALANCED), out)
    said = refused("merge", file, out, "--quiet", "--out-shard-size", "5 apples")
    assert "500M or 5B" in said and list(tmp_path.iterdir()) == [file]


def test_new_tokens_of_a_union(tmp_path: Path) -> None:
    """The base has no weights for them."""
    made = FAMILIES["two more tokens"](tmp_path / "models")
    document = recipe(
        "basis_ta", made.base, made.listed, extra={"tokenizer_source": "union"}, basis="none"
    )
    told = merge(document, tmp_path / "out", fails=True).output
    assert told.count("Error: ") == 1 and "2 tokens that the base lacks" in told
    tokens = {"source": "base", "tokens": {"new": {"source": {"kind": "zero"}}}}
    added = recipe("basis_ta", made.base, made.listed, extra={"tokenizer": tokens}, basis="none")
    assert "lacks (such as 'new')" in merge(added, tmp_path / "out", fails=True).output
    document["parameters"]["exclude"] = "embed_tokens|lm_head"
    assert merge(document, tmp_path / "left").tensors["lm_head.weight"].shape == (98, 32)


# Several merges in one process, and inputs that change between them: nothing may be stale


THREE = TASKS[:3]
PCA: dict[str, Any] = {"basis": "pca", "num_bases": 2}


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, list[Path]]:
    """Tensors of more elements than a fingerprint samples."""
    return family(tmp_path / "models", partial(llama, vocab_size=512), THREE, tokenizer=False)


def change_unsampled(folder: Path) -> None:
    """New values where no fingerprint samples; same path, size and modification time."""
    path = folder / "model.safetensors"
    before = path.stat()
    state = {name: tensor.clone() for name, tensor in load(folder).items()}
    state["model.embed_tokens.weight"].view(-1)[2000:5000] += 0.5
    save_file(state, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def test_mergekit_multi_merges_what_it_has_merged(inputs, tmp_path):
    base, models = inputs
    for number in range(2):
        inter = tmp_path / f"inter{number}"
        first = {"name": "first"} | recipe("basis_ta", base, models, **PCA)
        second = {"name": "second"} | recipe("basis_ties", Path("first"), models, **PCA)
        own = {0: {"weight": 1.0}}
        third = recipe("task_arithmetic", base, ["second"], own, normalize=False, lambda_=0.5)
        words = ("-I", str(inter))
        documents = [first, second, third]
        out = merge(documents, tmp_path / f"out{number}", *words, command="mergekit-multi")
        one, two = Result(inter / "first"), Result(inter / "second")
        want = expect(Dense.of(base, models), "basis_ta", PCA, one.basis, THREE)
        assert_close(one.tensors, want.tensors, load(base))
        dense = Dense.of(one.folder, models)
        want = expect(dense, "basis_ties", PCA, two.basis, THREE)
        assert_close(two.tensors, want.tensors, dense.base, want.boundary)
        dense = Dense.of(base, [two.folder])
        assert_close(out.tensors, dense.split(dense.theta + 0.5 * dense.tau[:, 0]), dense.base)
        change_unsampled(base)
        change_unsampled(models[2])
