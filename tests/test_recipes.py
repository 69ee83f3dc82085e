"""Every recipe is valid, and does what its comments promise (merges: test_golden.py)."""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from mergekit.scripts import run_yaml
from safetensors.torch import load_file

from tvb_mergekit.core.settings import resolve_settings

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
QUICKSTART = RECIPES / "quickstart"
SHIPPED = ["base", "copy", "reverse", "sort", "upper", "shift", "max", "double", "sum"]

# M, if it is not half of T
BASES = {"quickstart-forget": 6, "mergebench-llama3.2-3b-forget": 3, "mistral-7b-qlora": 5}
NAMES = sorted(path.name for path in RECIPES.glob("*.yml"))


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((RECIPES / name).read_text())


def options(name: str) -> list[str]:
    """The options of the mergekit-yaml command in the recipe's comments."""
    text = (RECIPES / name).read_text().replace("\\\n#", "")
    command = re.search(rf"^# +mergekit-yaml recipes/{re.escape(name)} \./merged(.*)$", text, re.M)
    assert command, "the recipe's comments give the command that runs it"
    return shlex.split(command[1])


# The files themselves


def test_every_recipe_is_known_here_and_in_the_readme() -> None:
    """Those of models on the Hub are merged with small models by test_golden.py."""
    readme = (RECIPES / "README.md").read_text()
    assert [name for name in NAMES if f"[{name}]({name})" not in readme] == []
    for name in NAMES:
        said = read(name)
        own = [(model.get("parameters", {}), model["model"]) for model in said["models"]]
        tasks = [keys.get("task") or Path(model).name for keys, model in own]
        settings = resolve_settings(said["merge_method"], said["parameters"], tasks)
        assert settings.bases_of(len(tasks)) == BASES.get(name[:-4], len(tasks) // 2)
        run_yaml.main.make_context("mergekit-yaml", [str(RECIPES / name), "out", *options(name)])


def test_the_recipe_of_a_real_model_lists_the_shipped_adapters() -> None:
    """Its base has to be downloaded, so `evals/real` measured the merge."""
    said = read("smollm2/merge.yml")
    adapters = sorted((RECIPES / "smollm2/adapters").iterdir())
    listed = [Path(model["model"].split("+")[1]) for model in said["models"]]
    assert sorted(ROOT / folder for folder in listed) == adapters and len(adapters) == 8
    settings = resolve_settings(said["merge_method"], said["parameters"], [p.name for p in listed])
    assert (settings.basis, settings.num_bases, settings.flow_time) == ("groups", 4, 30)
    for folder in adapters:
        weights = load_file(folder / "adapter_model.safetensors")
        assert all(t.isfinite().all() and t.any() for t in weights.values())
        assert len(weights) == 2 * 7 * 30


# What the quickstart ships


def test_held_out_items_are_right_and_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(QUICKSTART)
    made = importlib.import_module("make_models")
    assert list(made.TASKS) == SHIPPED[1:]
    for task, functions in made.TASKS.items():
        for split, suffix, count in (("test", "", 200), ("val", ".val", 100)):
            file = QUICKSTART / "eval" / "data" / f"{task}{suffix}.jsonl"
            items = [json.loads(line) for line in file.read_text().splitlines()]
            texts = [item["prompt"].removeprefix(f"{task}:").removesuffix("=") for item in items]
            assert len(set(texts)) == count
            assert {made.split_of(text) for text in texts} == {split}  # none is trained on
            assert [item["answer"] for item in items] == [functions.right(text) for text in texts]
