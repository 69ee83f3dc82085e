"""Output folders, full disks, interruptions, and mergekit's other commands."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import FULL, INTERRUPT, little_disk, on_call, on_change, unprivileged
from test_faults import Case, check, recipe, tiny_models  # noqa: F401
from test_faults_files import MLP, WEIGHTS, edited, rewrite

from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.output import check_output_folder


def multi(other: str) -> str:
    first = recipe({"num_bases": 1}, models=("./a", "./b")) | {"name": "first"}
    return yaml.safe_dump_all([first, recipe(models=("first", other))])


RAW, MULTI = "mergekit-pytorch", "mergekit-multi"
FILES = [{"model": f"./{name}/{WEIGHTS}", "parameters": {"task": name}} for name in "abc"]
RAW_RECIPE = recipe(models=FILES, base_model=f"./base/{WEIGHTS}")
CASES = {
    # the output
    "output of an unset variable": Case(out="", wants=("is empty", "name a file or a folder")),
    "output holds weights": Case(
        out="old",
        setup=lambda f: rewrite(f / "old/model-00003-of-00004.safetensors", b"mine"),
        wants=("old", "model-00003-of-00004.safetensors", "delete"),
    ),
    "unwritable": Case(out="/proc/nope/out", wants=("/proc/nope",)),
    "disk": Case(fault=little_disk, wants=("out", "MB", "free")),
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
    # a mount, as in a container: it cannot be removed, and what is beside it is another disk
    "only the output is writable": Case(
        out="shut/out",
        ok=True,
        fault=unprivileged,
        setup=lambda f: [(f / "shut/out").mkdir(parents=True), (f / "shut").chmod(0o555)],
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
        env={"TVB_MERGEKIT_BLOCK_MB": "lots"}, wants=("TVB_MERGEKIT_BLOCK_MB", "`lots`")
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
    "raw": Case(RAW_RECIPE, command=RAW, ok=True),
    "raw tensor lost": Case(
        RAW_RECIPE, (MLP, "b/"), edited("b", lambda t: t.pop(MLP)), command=RAW
    ),
    "raw disk full": Case(
        RAW_RECIPE,
        ("No space left", r"\bout\b"),
        command=RAW,
        fault=partial(on_change, ".", FULL, 4),
    ),
    "multi": Case(multi("./c"), command=MULTI, leaves="between", ok=True),
    "multi path": Case(
        multi("./nope"),
        (r"\./nope", "no such"),
        command=MULTI,
        leaves="between",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_output(name: str, tmp_path: Path, tiny_models: Path) -> None:  # noqa: F811
    check(tmp_path / "work", tiny_models, CASES[name])


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("a/", "is the input a; name another folder"),
        ("link", "is the input base"),
        ("a/new", "lies in the input a"),
        (".", "holds the input ./lone.bin"),
        ("file", "is a file; name a folder"),
        ("file/out", "is a file; name a folder"),
    ],
)
def test_folders_of_others(out: str, told: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "a"):
        Path(name).mkdir()
    Path("link").symlink_to("base")
    for name in ("file", "lone.bin"):
        Path(name).touch()
    with pytest.raises(UserError, match=told):
        check_output_folder(out, ["base", "a", "./lone.bin"])
