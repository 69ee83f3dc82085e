"""Output folders, full disks, interruptions, odd but right settings, and the other commands."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import FULL, INTERRUPT, little_disk, on_call, on_change, unprivileged
from test_faults import Case, check, recipe, tiny_models  # noqa: F401
from test_faults_files import (
    MLP,
    WEIGHTS,
    Setup,
    both,
    edited,
    rewrite,
)


def made(*names: str) -> Setup:
    def setup(folder: Path) -> None:
        for name in names:
            rewrite(folder / name, b"mine")

    return setup


def linked(name: str, target: str) -> Setup:
    return lambda folder: (folder / name).symlink_to(target)


def raw(parameters: dict[str, Any] | None = None, models: Any = None, **top: Any) -> dict[str, Any]:
    files = models or [
        {"model": f"./{name}/{WEIGHTS}", "parameters": {"task": name}} for name in "abc"
    ]
    sizes = {"num_bases": min(2, len(files))} | (parameters or {})
    return recipe(sizes, models=files, base_model=f"./base/{WEIGHTS}", **top)


def multi(*documents: dict[str, Any]) -> str:
    return yaml.safe_dump_all(documents)


RAW, MULTI = "mergekit-pytorch", "mergekit-multi"
FIRST = recipe({"num_bases": 1}, models=("./a", "./b")) | {"name": "first"}
CASES = {
    # the output
    "output is an input": Case(out="a/", wants=("output", "a/", "input ./a", "another folder")),
    "output is the base": Case(
        out="link", setup=linked("link", "base"), wants=("link", "input ./base")
    ),
    "output of an unset variable": Case(out="", wants=("is empty", "name a file or a folder")),
    "output holds weights": Case(
        out="old",
        setup=made("old/model-00003-of-00004.safetensors", "old/notes.txt"),
        wants=("old", "model-00003-of-00004.safetensors", "delete"),
    ),
    "output is a file": Case(out="recipe.yml", wants=("recipe.yml", "is a file", "folder")),
    "output below a file": Case(
        out="recipe.yml/out", wants=("recipe.yml", "[Nn]ot a directory|is a file")
    ),
    "output is no UTF-8": Case(out="bad\udcff", wants=("codec can't encode",)),
    "unwritable": Case(out="/proc/nope/out", wants=("/proc/nope",)),
    "disk": Case(fault=little_disk, wants=("out", "MB", "free")),
    # what safetensors raises when a write fails; a limit on the size of files stands for the disk
    "no graphics card": Case(args=("--quiet", "--cuda"), wants=("[Cc][Uu][Dd][Aa]",)),
    "interrupted in the Gram pass": Case(
        fault=partial(on_call, "tvb_mergekit.core.gram.GramSums.plus", INTERRUPT, 3),
        wants=("Aborted!$",),
        foreign=True,
    ),
    # other settings that work
    "unicode": Case(
        recipe(
            {"forget": "数学, é", "alpha": 1, "num_bases": 2},
            method="basis_negate",
            models=(
                {"model": "./a", "parameters": {"task": "数学"}},
                {"model": "./b", "parameters": {"task": "é"}},
                "./c",
            ),
        ),
        ok=True,
    ),
    "one model": Case(recipe({"num_bases": 1}, models=("./a",)), ok=True),
    "link to empty": Case(
        out="link", setup=both(lambda f: (f / "far").mkdir(), linked("link", "far")), ok=True
    ),
    # a mount, as in a container: it cannot be removed, and what is beside it is another disk
    "only the output is writable": Case(
        out="shut/out",
        ok=True,
        fault=unprivileged,
        setup=lambda f: [(f / "shut/out").mkdir(parents=True), (f / "shut").chmod(0o555)],
    ),
    "shut parent": Case(
        out="shut/out",
        fault=unprivileged,
        wants=("shut", "Permission denied"),
        setup=lambda f: (f / "shut").mkdir(mode=0o555),
    ),
    "secret input": Case(
        fault=unprivileged,
        wants=(f"b/{WEIGHTS}", "Permission denied"),
        setup=lambda f: [
            rewrite(f / "b" / WEIGHTS, (f / "b" / WEIGHTS).read_bytes()),
            (f / "b" / WEIGHTS).chmod(0),
        ],
    ),
    "tokenizer of a base without": Case(
        recipe(tokenizer_source="base"),
        ("base", "tokenizer"),
        lambda f: [x.unlink() for x in f.glob("*/token*")],
    ),
    "block budget": Case(
        env={"TVB_MERGEKIT_BLOCK_MB": "lots"},
        wants=("TVB_MERGEKIT_BLOCK_MB", "`lots`"),
    ),
    "cache full": Case(
        ok=True,
        leaves="cache",
        env={"TVB_MERGEKIT_CACHE": "cache"},
        fault=partial(on_change, "cache", FULL, 1),
    ),
    "stale": Case(
        setup=lambda f: (f / "out.partial-x").mkdir(), wants=("out.partial-x", "delete"), ok=True
    ),
    "two runs": Case(  # another merge finishes first
        fault=partial(on_change, ".", partial(shutil.copytree, "a", "out"), 3),
        wants=("out", "weight files", WEIGHTS),
        leaves="out",
    ),
    # mergekit-pytorch
    "raw": Case(raw(), command=RAW, ok=True),
    "raw misspelt": Case(raw({"lamda": 0.5}), ("`lamda`", r"`lambda`\?"), command=RAW),
    "raw missing": Case(
        raw(models=("./a/model.safetensors", "./a/nope.bin")),
        ("a/nope.bin", "no such file"),
        command=RAW,
    ),
    "raw tensor lost": Case(raw(), (MLP, "b/"), edited("b", lambda t: t.pop(MLP)), command=RAW),
    "raw disk full": Case(
        raw(),
        ("No space left", r"\bout\b"),
        command=RAW,
        fault=partial(on_change, ".", FULL, 4),
    ),
    "raw interrupted": Case(
        raw(),
        ("Aborted!$",),
        command=RAW,
        foreign=True,
        fault=partial(on_change, ".", INTERRUPT, 3),
    ),
    # mergekit-multi
    "multi": Case(
        multi(FIRST, recipe(models=("first", "./c"))), command=MULTI, leaves="between", ok=True
    ),
    "multi misspelt": Case(
        multi(FIRST, recipe({"lamda": 1})), ("`lamda`", r"`lambda`\?"), command=MULTI
    ),
    "multi path": Case(
        multi(FIRST, recipe(models=("first", "./nope"))),
        (r"\./nope", "no such"),
        command=MULTI,
        leaves="between",
    ),
    "multi output": Case(
        multi(FIRST, recipe(models=("first", "./c"))),
        ("old", "x.safetensors"),
        made("old/x.safetensors"),
        out="old",
        command=MULTI,
        leaves="between",
    ),
}


if torch.cuda.is_available():
    del CASES["no graphics card"]


@pytest.mark.parametrize("name", CASES)
def test_output(name: str, tmp_path: Path, tiny_models: Path) -> None:  # noqa: F811
    check(tmp_path / "work", tiny_models, CASES[name])
