"""Merging commands as users type them: what they print, refuse and leave behind."""

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from commands import Result, assert_same, merge, recipe, refused, run, write
from safetensors.torch import load_file, save_file
from tiny import TASKS
from worlds import FAMILIES, World
from yaml.reader import Reader

import tvb_mergekit
from tvb_mergekit.tensors import checkpoint

BALANCED = {"basis": "balanced", "num_bases": 2}


# Whole commands (`mergekit-yaml` runs recipes in test_recipes.py)


@pytest.mark.parametrize("command", ["tvb merge", "mergekit-multi"])
def test_commands(command: str, world: World, tmp_path: Path) -> None:
    out, document = tmp_path / "out", world("llama").recipe(**BALANCED)
    words = [*command.split(), str(write(document, out)), str(out)]
    if command == "mergekit-multi":
        words[-1:] = ["-I", str(tmp_path), "--out-path", str(out), "--lazy-unpickle"]
    done = processes.run(words, tmp_path)
    assert done.code == 0, done.err
    for text in ("Cosines", "Encoder weights", "Retained energy", "Written to", *TASKS):
        assert text in done.out
    told = "--lazy-unpickle: without effect on our methods" in done.err
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
        listed = [store / "basis-000", store / "basis-001"]
    parsed, read = [], []
    parse, header = Reader.__init__, checkpoint._read_safetensors_header

    def parsing(self: Reader, stream: Any) -> None:
        text = stream if isinstance(stream, str) else ""
        parsed.extend(["recipe"] * ("merge_method" in text))
        parse(self, stream)

    def reading(path: Path) -> Any:
        read.append(Path(path).parent)
        return header(path)

    monkeypatch.setattr(Reader, "__init__", parsing)
    monkeypatch.setattr(checkpoint, "_read_safetensors_header", reading)
    merge(recipe("basis_ta", base, listed, **({} if stored else BALANCED)), tmp_path / "out")
    assert len(parsed) == 2  # by us and by mergekit
    assert sorted(read) == sorted([base, *listed])


def test_mergekit_pytorch_in_two_processes(tmp_path: Path) -> None:
    """mergekit collects the tensor names in a set, whose order differs between processes."""
    made = FAMILIES["pt"](tmp_path / "models")
    keys = {"basis": "rand_proj", "num_bases": 2, "forget": "code.pt", "alpha": 1}
    document = recipe("basis_negate", made.base, made.listed, **keys)
    out, cache = tmp_path / "out", tmp_path / "cache"
    words = ["mergekit-pytorch", str(write(document, out)), str(out), "--quiet"]
    done = run(words, out, cache, {"PYTHONHASHSEED": "1"})
    assert done.returncode == 0, done.stderr
    here = merge(document, tmp_path / "here", command="mergekit-pytorch", cache=cache)
    assert here.facts["gram_cached"] is True
    assert_same(here, Result(out))


def test_tensors_that_not_all_files_have(tmp_path: Path) -> None:
    """An intersection lacks them, a union keeps the base's, and needs the base to have them."""
    base = {"w": torch.randn(40, 8), "b": torch.ones(3), "steps": torch.tensor([5])}
    paths = [tmp_path / f"{name}.safetensors" for name in ("base", "math", "code")]
    for number, path in enumerate(paths):
        state = {"w": base["w"] + number, "steps": base["steps"]}
        save_file(base if not number else state, path)
    document = recipe("basis_ta", paths[0], paths[1:], dtype="bfloat16", basis="none")

    def merged(*options: str, **keys: Any) -> Result:
        out = tmp_path / "out" / str(len(options))
        return merge(document, out, *options, command="mergekit-pytorch", **keys)

    assert "tensor `b` is not in" in merged(fails=True).output
    assert set(merged("--tensor-intersection").tensors) == {"w", "steps"}
    union = Result(tmp_path / "union")
    merge(document, union.folder, "--tensor-union", command="mergekit-pytorch")
    assert torch.equal(union.tensors["w"], (base["w"] + 0.4 * 3).bfloat16())
    assert torch.equal(union.tensors["b"], base["b"].bfloat16())
    assert torch.equal(union.tensors["steps"], base["steps"])
    assert union.facts["left_out"]["b"].startswith("missing in")
    save_file({**load_file(paths[1]), "z": torch.ones(3)}, paths[1])
    told = merge(
        document, tmp_path / "no", "--tensor-union", command="mergekit-pytorch", fails=True
    )
    assert "Error: tensor `z` is not in the base" in told.output


def test_buffers_that_are_no_floats(tmp_path: Path) -> None:
    """Complex and unsigned ones go into safetensors; what safetensors lack is said before."""
    made = FAMILIES["pt"](tmp_path)
    others = {"c": torch.randn(3, dtype=torch.complex64), "u": torch.arange(4).to(torch.uint16)}
    wide = {"wide": torch.randn(3, dtype=torch.complex128)}
    document = recipe("basis_ta", made.base, made.listed, made.own, **BALANCED)
    for more in (others, others | wide):
        for path, state in zip((made.base, *made.listed), made.states, strict=True):
            torch.save({**state, **more}, path)
        if more is others:
            found = merge(document, tmp_path / "out", command="mergekit-pytorch").tensors
            assert all(torch.equal(found[name], tensor) for name, tensor in others.items())
    told = merge(document, tmp_path / "no", command="mergekit-pytorch", fails=True).output
    assert "tensor `wide`: safetensors hold no torch.complex128" in told
    merge(document, tmp_path / "bin", "--no-safe-serialization", command="mergekit-pytorch")


# Refusals

REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "no memory": ({}, ("--memory", "many"), "500MB or 2GB"),
    "no size": ({}, ("--out-shard-size", "5 apples"), "500M or 5B"),
    "little memory": ({}, ("--memory", "20KB"), "too little for 5 models at a time"),
    "little for a matrix": (
        {"method": "basis_tsvm"},
        ("--memory", "10MB"),
        "`model.layers.0.mlp.down_proj.weight`, 32 x 64, takes 16",
    ),
    "little for Trim": ({"method": "basis_ties"}, ("--memory", "60MB"), "a histogram of 2 bases"),
    "overflow": ({"lambda": 1e9, "dtype": "float16"}, (), "overflow float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_nothing(name: str, world: World, tmp_path: Path) -> None:
    given, options, message = REFUSED[name]
    out = tmp_path / "out"
    keys = {**BALANCED, **given}
    method = keys.pop("method", "basis_ta")
    file = write(world("llama").recipe(method, **keys), out)
    before = set(tmp_path.iterdir())
    assert message in refused("merge", file, out, "--quiet", *options)
    assert set(tmp_path.iterdir()) == before


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
