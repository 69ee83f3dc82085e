"""Output folders, full disks, interruptions, and mergekit's other commands."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from processes import FULL, INTERRUPT, little_disk, on_call, on_change, unprivileged
from test_faults import Case, check, recipe
from test_faults_files import WEIGHTS, rewrite

RAW, MULTI = "mergekit-pytorch", "mergekit-multi"
FILES = [{"model": f"./{name}/{WEIGHTS}", "parameters": {"task": name}} for name in "abc"]
FIRST = recipe({"num_bases": 1}, models=("./a", "./b")) | {"name": "first"}
DOCUMENTS = (FIRST, recipe(models=("first", "./c")))
RAW_RECIPE = recipe(models=FILES, base_model=f"./base/{WEIGHTS}")
CASES = {
    # the output
    "output of an unset variable": Case(out="", wants=("is empty", "name a file or a folder")),
    "output holds weights": Case(
        out="old",
        setup=lambda f: rewrite(f / "old/model-00003-of-00004.safetensors", b"mine"),
        wants=("old", "model-00003-of-00004.safetensors", "delete"),
    ),
    "disk": Case(fault=little_disk, wants=("out", "MB", "free")),
    "interrupted in the Gram pass": Case(
        fault=partial(on_call, "tvb_mergekit.core.gram.GramSums.plus", INTERRUPT, 3),
        wants=("Aborted!$",),
        foreign=True,
    ),
    # other settings that work
    # a mount, as in a container: it cannot be removed, and what is beside it is another disk
    "only the output is writable": Case(
        out="shut/out",
        ok=True,
        fault=unprivileged,
        setup=lambda f: [(f / "shut/out").mkdir(parents=True), (f / "shut").chmod(0o555)],
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
    "raw disk full": Case(
        RAW_RECIPE,
        ("No space left", r"\bout\b"),
        command=RAW,
        fault=partial(on_change, ".", FULL, 4),
    ),
    "multi": Case(
        yaml.safe_dump_all(DOCUMENTS),
        command=MULTI,
        leaves="between",
        ok=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_output(name: str, tmp_path: Path, tiny_models: Path) -> None:
    check(tmp_path / "work", tiny_models, CASES[name])
