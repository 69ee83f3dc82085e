"""`tvb inspect RECIPE` refuses what merges refuse, in the same words, and reads what they take."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
import yaml
from click.testing import CliRunner
from commands import merge, tvb
from safetensors.torch import load_file, save_file
from test_faults import ALL, OF_FILES, RECIPES, Case, prepare, recipe, slices, snapshot
from torch import Tensor

from tvb_mergekit.cli.commands import main
from tvb_mergekit.errors import MergeRefused, UserError, refusing
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.output import StagedFolder, check_output_folder

# What only writing shows, or what is about another command or its output.
NOT_CHECKED = {"overflow"}
CASES: dict[str, Case] = {
    **{f"recipe: {name}": case for name, case in RECIPES.items()},
    **OF_FILES,
}
OTHER_WORDS = {
    "recipe: list": "recipe.yml: expected one recipe",
    "recipe: near method": "did you mean `basis_ta`",
}


@pytest.mark.parametrize("name", sorted(set(CASES) - NOT_CHECKED))
def test_inspect(name, tmp_path, tiny_models, monkeypatch, caplog):
    case = CASES[name]
    prepare(tmp_path / "work", tiny_models, case)
    monkeypatch.chdir(tmp_path / "work")
    environment = {"HF_HUB_OFFLINE": "1", **case.env}
    before = snapshot(tmp_path)
    with mock.patch.dict(os.environ, environment):
        done = CliRunner().invoke(main, ["inspect", "recipe.yml", *case.args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert snapshot(tmp_path) == before
    if case.ok:
        assert done.exit_code == 0, done.stderr
        for want in case.wants:
            assert re.search(want, caplog.text + done.stdout), caplog.text
        return
    assert done.exit_code == 1, done.stdout
    assert re.fullmatch(r"Error: [^\n]+\n", done.stderr), done.stderr
    for want in (OTHER_WORDS[name],) if name in OTHER_WORDS else case.wants:
        assert re.search(want, done.stderr), done.stderr


@pytest.fixture
def here(tmp_path: Path, tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path / "work", tiny_models, Case())
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "work"


def inspect(document: Mapping[str, Any], code: int = 0) -> str:
    Path("recipe.yml").write_text(yaml.safe_dump(dict(document)))
    done = tvb("inspect", "recipe.yml", "--quiet", code=code)
    return str(done.stdout if code == 0 else done.stderr)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    """Change the tensors of a model, whose file is a link to that of other tests."""
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    file.unlink()
    save_file(state, file, {"format": "pt"})
    return state


ONLY_MERGES = {"slices": slices(ALL, ALL), "union": recipe(tokenizer={"source": "union"})}


@pytest.mark.parametrize("document", ONLY_MERGES.values(), ids=ONLY_MERGES)
def test_what_a_merge_takes_and_a_build_does_not(
    document: dict[str, Any], here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "Retained energy" in inspect(document)
    assert "not for `tvb build`: `" in caplog.text
    assert "`" in tvb("build", "recipe.yml", "store", code=1).stderr
    merge(document, here / "out")


def test_excluded_tensors_of_a_merge_with_slices(here: Path) -> None:
    document = slices(ALL, ALL)
    document["parameters"] = {"exclude": "lm_head"}
    said = " ".join(inspect(document).split())
    assert "1 tensor left to the base, excluded by the recipe: lm_head.weight" in said
    rewrite(here / "base", lambda state: state["lm_head.weight"][0].fill_(torch.nan))
    assert "32 NaN" in inspect(document, code=1)


def test_output_folders(here: Path) -> None:
    for out, want in {"base": "is the input", "a/x": "lies in", "recipe.yml": "is a file"}.items():
        with pytest.raises(UserError, match=want):
            check_output_folder(out, ["base", "a"])
    Path("mine").mkdir()
    staged = StagedFolder("mine")
    for folder in (staged.path, Path("mine")):
        (folder / "added_tokens.json").write_text(str(folder))
    with pytest.raises(UserError, match=r"already holds added_tokens\.json"):
        staged.publish()
    staged.discard()
    assert Path("mine/added_tokens.json").read_text() == "mine"
    Path("mine/vocab.json").touch()
    with pytest.raises(UserError, match=r"already holds vocab\.json"):
        check_output_folder("mine")
    with mock.patch("os.access", lambda path, mode: mode != os.W_OK):  # root may write anywhere
        with pytest.raises(UserError, match="is not writable"):
            check_output_folder("new/folder")


def test_a_shard_in_a_folder_is_read_from_there(tmp_path: Path) -> None:
    """Not from a file of its name beside the index."""
    base, _ = tiny.family(tmp_path, tasks=())
    wanted, weights = tiny.load(base), base / "model.safetensors"
    (base / "w").mkdir()
    weights.rename(base / "w" / weights.name)
    save_file({name: 0 * value for name, value in wanted.items()}, weights)
    places = {name: f"./w/{weights.name}" for name in wanted}
    (base / f"{weights.name}.index.json").write_text(json.dumps({"weight_map": places}))
    opened = Checkpoint.open(base)
    assert all(opened.tensor(name).equal(value) for name, value in wanted.items())


def test_memory_that_torch_cannot_get_is_a_line() -> None:
    with pytest.raises(MergeRefused, match=r"allocate memory.*; use fewer bases"), refusing():
        torch.empty(10**15)
    with pytest.raises(RuntimeError, match=r"^mine$"), refusing():
        raise RuntimeError("mine")
