"""Running mergekit's commands and `tvb` for the tests, and reading what they wrote."""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import click.testing
import numpy as np
import torch
import yaml
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.torch import load_file
from tiny import load
from torch import Tensor

from tvb_mergekit.cli import commands as cli
from tvb_mergekit.plugin.ways import recipe_of
from tvb_mergekit.store.store import load as load_store

MODULES = {
    "mergekit-yaml": "mergekit.scripts.run_yaml",
    "mergekit-multi": "mergekit.scripts.multimerge",
    "mergekit-pytorch": "mergekit.scripts.merge_raw_pytorch",
}


def recipe(
    method: str,
    base: Path,
    models: Sequence[Path | str],
    own: Mapping[int, Mapping[str, Any]] | None = None,
    dtype: str | None = "float32",
    extra: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """A `models` recipe; `own` gives the parameters of single models, `extra` top-level keys."""
    listed: list[dict[str, Any]] = [{"model": str(model)} for model in models]
    for index, values in (own or {}).items():
        listed[index]["parameters"] = dict(values)
    made: dict[str, Any] = {"merge_method": method, "base_model": str(base), "models": listed}
    if parameters:
        made["parameters"] = {key.rstrip("_"): value for key, value in parameters.items()}
    if dtype:
        made["dtype"] = dtype
    return made | dict(extra or {})


def slices(
    base: Path | str,
    models: Sequence[Path | str],
    ranges: Sequence[tuple[int, int]],
    own: Mapping[int, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The key `slices` of a recipe over these layers; `own` as for `recipe`."""
    listed = [
        {"model": str(model)} | ({"parameters": dict(own[n])} if own and n in own else {})
        for n, model in enumerate((*models, base))
    ]
    parts = [{"sources": [{**source, "layer_range": list(s)} for source in listed]} for s in ranges]
    return {"slices": parts}


@dataclass
class Result:
    """The output folder of a merge."""

    folder: Path
    output: str = ""

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load(self.folder)

    @property
    def facts(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.folder / "basis" / "basis.json").read_text())
        return read

    @property
    def basis(self) -> dict[str, NDArray[np.float64]]:
        held = load_file(self.folder / "basis" / "basis.safetensors")
        assert all(tensor.dtype == torch.float64 for tensor in held.values())
        return {name: tensor.numpy() for name, tensor in held.items()}


def write(recipes: Mapping[str, Any] | Sequence[Mapping[str, Any]], out: Path) -> Path:
    """The recipe (several: YAML documents) in a file beside the output folder."""
    path = out.with_name(f"{out.name}.yml")
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = [recipes] if isinstance(recipes, Mapping) else list(recipes)
    path.write_text(yaml.safe_dump_all([dict(d) for d in documents], sort_keys=False))
    return path


def ready(store: Path, name: str) -> dict[str, Any]:
    """The recipe of `tvb merge STORE --method NAME`, to be changed and written elsewhere."""
    bases = load_store(store)
    return recipe_of(bases.facts, name, str(store), bases.base_name)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, which need not exist."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def merge(
    recipes: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    out: Path,
    *args: str,
    command: str = "mergekit-yaml",
    env: Mapping[str, str] | None = None,
    fails: bool = False,
) -> Result:
    """Run a command's `main` with its arguments within this process."""
    main = importlib.import_module(MODULES[command]).main
    where = ["--out-path"] * (command == "mergekit-multi") + [str(out)]
    words = [str(write(recipes, out)), *where, "--quiet", *args]
    with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1", **(env or {})):
        done = CliRunner().invoke(main, words, prog_name=command)
    if fails:
        assert done.exit_code == 1, f"exit code {done.exit_code}: {done.output}"
        assert not out.exists()
    elif done.exit_code:
        raise AssertionError(f"{command} failed: {done.output}") from done.exception
    return Result(out, done.output)


def tvb(*words: object, code: int = 0) -> click.testing.Result:
    """Run `tvb` within this process."""
    with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        done = CliRunner().invoke(cli.main, [str(word) for word in words], prog_name="tvb")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done


def refused(*words: object) -> str:
    """The one line of an error of `tvb`."""
    done = tvb(*words, code=1)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("Error: "), done.stderr
    return str(done.stderr)


def assert_same(one: Result, other: Result) -> None:
    """The same tensors to the bit."""
    assert set(one.tensors) == set(other.tensors)
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name


def assert_close(
    merged: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    skip: Mapping[str, Tensor] | None = None,
    strict: float = 2e-6,
) -> None:
    """float32 weights against float64 ones: 1e-6 of their norm, and the delta `strict` of its own
    beside the rounding of the weights, 2^-24 of their norm, which no float32 result can avoid.

    `strict` covers the float32 task vectors and the Gram matrix of float32 products (3e-7).
    Entries where `skip` is true are left out.
    """
    error = weights = delta = 0.0
    for name, want in expected.items():
        found, start = merged[name].double(), base[name].double()
        assert found.shape == want.shape, name
        if not want.numel():
            continue
        mask = torch.ones_like(want) if skip is None else (~skip[name]).double()
        off = (found - want) * mask
        assert float(off.abs().max()) <= 1e-5 * float(want.abs().max() or 1), name
        error += float(off.square().sum())
        weights += float((want * mask).square().sum())
        delta += float(((want - start) * mask).square().sum())
    error, weights, delta = error**0.5, weights**0.5, delta**0.5
    assert error <= 1e-6 * weights, error / weights
    assert error <= strict * delta + 2.0**-24 * weights, (error / delta, error / weights)
