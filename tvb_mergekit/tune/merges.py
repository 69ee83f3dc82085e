"""A recipe along its coefficient: lambda, or alpha of `basis_negate`.

Our methods are linear in the coefficient: the merged model is start + fl(scale * direction), and
`draw` writes both.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration

from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.core.settings import METHODS, VARYING_KEYS
from tvb_mergekit.errors import UserError, refusing
from tvb_mergekit.plugin.document import from_mapping, parse, unknown_method
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.plugin.planner import input_folders, planned
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.plugin.run import merge
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.store.recipes import templates, times, with_paths
from tvb_mergekit.store.store import base_of, is_store, read_store_facts
from tvb_mergekit.tensors.checkpoint import weight_files
from tvb_mergekit.tensors.merging import merge_items
from tvb_mergekit.tensors.stream import Engine
from tvb_mergekit.tensors.writing import FoldersSink, FolderWriter, plan_shards

SHARD = 10**9  # bytes of written files


@dataclass(frozen=True)
class TunedRecipe:
    """A recipe file, and its coefficient."""

    document: Mapping[str, Any]  # the recipe as plain objects
    text: str  # the recipe as written
    key: str  # `lambda` or `alpha`
    factor: bool  # the coefficient multiplies layer gradients or filters of the recipe
    recipe: Recipe
    options: Options

    @property
    def method(self) -> str:
        return str(self.document["merge_method"])

    @property
    def share(self) -> float:
        """M / T for M bases instead of T task vectors: the share of validation items to use."""
        if self.recipe.store is not None:
            bases = self.recipe.store
            return bases.num_bases / len(bases.tasks)
        total = len(self.recipe.tasks)
        return (self.recipe.settings.bases_of(total) or total) / total

    def at(self, point: float) -> dict[str, Any]:
        """Return the recipe of one point, as plain objects."""
        document = copy.deepcopy(dict(self.document))
        document["parameters"] = root = document.get("parameters") or {}
        if not self.factor:
            root[self.key] = point
            return document
        elsewhere = VARYING_KEYS[self.key].default_for(self.method)
        if elsewhere is not None:
            root.setdefault(self.key, elsewhere)
        for parameters in _sections(document):
            if self.key in parameters:
                parameters[self.key] = times(parameters[self.key], point)
        return document

    def check(self, points: Sequence[float]) -> None:
        """Raise UserError or MergeRefused if the recipe does not allow one of the points."""
        for point in points:
            from_mapping(self.at(point))

    def _planned(self, point: float) -> AbstractContextManager[Plan]:
        return planned(from_mapping(self.at(point)), self.options)

    def _models(self) -> set[ModelReference]:
        return set(MergeConfiguration.model_validate(self.document).referenced_models())

    def output_bytes(self) -> int:
        """Return the bytes of the merged model; raise here, early, if it cannot be merged."""
        with self._planned(1.0) as plan:
            return plan.output_bytes

    def inputs(self) -> list[str]:
        """The folders of the models, in which nothing may be written."""
        return [*input_folders(self.recipe)]

    def base(self) -> Path:
        base = MergeConfiguration.model_validate(self.document).base_model
        assert base is not None  # `read_tuned` refuses a recipe without one
        return self._folders(base)[0]

    def identity(self) -> dict[str, Any]:
        """Return the facts that decide the merged models, except the point, for kept scores."""
        document = copy.deepcopy(dict(self.document))
        if not self.factor:
            (document.get("parameters") or {}).pop(self.key, None)
        with refusing(planning=True):
            models = sorted(self._models(), key=str)
            files = {str(model): [_stamps(f) for f in self._folders(model)] for model in models}
        return {"recipe": document, "checkpoints": files}

    def _folders(self, model: ModelReference) -> list[Path]:
        cache = self.options.transformers_cache
        parts = [ModelReference(model=part) for part in (model.model, model.lora) if part]
        return [Path(part.local_path(cache)) for part in parts]

    def write(self, point: float, out: str | os.PathLike[str], quiet: bool = True) -> None:
        """Merge one point into a folder, as `mergekit-yaml` does."""
        document = self.at(point)
        options = self.options.model_copy(update={"out_shard_size": SHARD, "quiet": quiet})
        source = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        merge(from_mapping(document, source), os.fspath(out), options)

    def draw(self, start: Path, direction: Path, progress: Progress = silent) -> float:
        """Write start and direction of every tensor that moves as two models.

        Returns:
            The scale of the direction at coefficient 1.
        """
        with self._planned(1.0) as plan:
            return self._draw(plan, start, direction, progress)

    def _draw(self, plan: Plan, start: Path, direction: Path, progress: Progress) -> float:
        basis = plan.build()
        negation = bool(basis.settings.forget)
        moving = [item for item in plan.items() if item.tunables]
        directions = [replace(item, out=torch.float32) for item in moving]
        starts = []
        for item in moving:
            assert item.base is not None and item.tunables is not None
            if negation and item.tunables.lambda_ != 0:
                tunables = Tunables(item.tunables.lambda_)
                starts.append(replace(item, out=torch.float32, tunables=tunables))
                continue
            starts.append(replace(item, inputs=(), out=item.base.dtype, tunables=None))
        engine = Engine(progress=progress)
        for folder, items in ((start, starts), (direction, directions)):
            writer = FolderWriter(folder, plan_shards(items), {"format": "pt"})
            sink, alone = FoldersSink([writer]), folder == direction
            merge_items(basis, items, sink, engine, alone=alone)
            writer.finish()
        return -1.0 if negation else basis.scale

    def coefficients(self, point: float, names: Sequence[str]) -> dict[str, float]:
        """Return the coefficient of each tensor at a point; gradients make them differ."""
        if not self.factor:
            return dict.fromkeys(names, point)
        with self._planned(point) as plan:
            found = {item.name: item.tunables for item in plan.items() if item.tunables}
            return {n: t.alpha if self.key == "alpha" else t.lambda_ for n, t in found.items()}

    def tuned(self, point: float) -> str:
        """Return the recipe of a point as text: the user's with another number, if possible."""
        wanted = self.at(point)
        line = re.compile(rf"^(\s*{self.key}\s*:).*", re.MULTILINE)
        text, found = line.subn(rf"\1 {point!r}  # found by tvb tune", self.text)
        with suppress(yaml.YAMLError):  # the number had more than one line
            if found == 1 and yaml.safe_load(text) == wanted:
                return text
        return str(yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True))


def read_tuned(path: str, options: Options) -> TunedRecipe:
    """Read the recipe in a file, or that of `tvb merge STORE --method add`."""
    if os.path.isdir(path):
        if not is_store(path):
            raise UserError(f"{path}: a folder, but not a store; name a recipe, or a store")
        facts, place = read_store_facts(Path(path)), Path(os.path.abspath(path))
        document = with_paths(templates(facts, str(place), base_of(facts, place))["add"])
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    else:
        file = parse(path)
        document, text = file.single(), file.text.removeprefix("\ufeff")
    method = document.get("merge_method")
    if method not in METHODS:
        raise unknown_method(path, method, list(METHODS))
    found = from_mapping(document)
    key = "alpha" if method == "basis_negate" else "lambda"
    root = document.get("parameters") or {}
    given = [section for section in _sections(document) if key in section]
    factor = any(s is not root or isinstance(s[key], list | dict) for s in given)
    return TunedRecipe(document, text, key, factor, found.recipe, options)


def _sections(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every `parameters` of the recipe, except those of single models.

    YAML's anchors make several of them one object.
    """
    seen = set[int]()
    for part in (document, *(document.get("modules") or {}).values()):
        for place in (part, *(part.get("slices") or ())):
            found = place.get("parameters")
            if isinstance(found, dict) and id(found) not in seen:
                seen.add(id(found))
                yield found


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Return size and time of the weights, the configuration and the tokenizer of a model."""
    patterns = ("*.json", "*.jinja", "*.model", "*.txt")
    others = (file.name for pattern in patterns for file in folder.glob(pattern))
    names = {*weight_files(folder), *others}
    stats = {name: (folder / name).stat() for name in sorted(names)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
