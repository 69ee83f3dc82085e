"""A recipe along its coefficient: lambda, or alpha of `basis_negate`.

Our methods are linear in the coefficient, and so is mergekit's generalized task arithmetic without
random draws: the merged model is start + fl(scale * direction), and `draw` writes both. For all
other methods `write` merges point by point.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import mergekit.merge
import torch
import yaml
from mergekit import merge_methods
from mergekit.architecture import WeightInfo
from mergekit.common import ImmutableMap, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.merge_methods.generalized_task_arithmetic import GeneralizedTaskArithmeticMerge
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.sparsify import SparsificationMethod
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.document import (
    check_unknown_keys,
    from_mapping,
    parse,
    registered,
    unknown_method,
)
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.plugin.planner import (
    check_model,
    check_tokenizer_source,
    input_folders,
    planned,
    planned_by_mergekit,
)
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.plugin.run import merge
from tvb_mergekit.plugin.sources import fresh_loaders
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.refusals import refusing
from tvb_mergekit.settings import METHODS, VARYING_KEYS
from tvb_mergekit.store.recipes import times
from tvb_mergekit.store.store import is_store
from tvb_mergekit.tensors.checkpoint import Checkpoint, weight_files
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import MEMORY
from tvb_mergekit.tensors.merging import merge_items, most_bases
from tvb_mergekit.tensors.writing import FoldersSink, FolderWriter, plan_shards

RANDOM = (SparsificationMethod.random, SparsificationMethod.della_magprune)
SHARD = 10**9  # bytes of written files: mergekit holds a shard in memory
CPU = torch.device("cpu")

Tasks = Sequence[tuple[WeightInfo, Task[Any]]]


@dataclass(frozen=True)
class TunedRecipe:
    """A recipe file, and its coefficient."""

    document: Mapping[str, Any]  # the recipe as plain objects
    text: str  # the recipe as written
    key: str  # `lambda` or `alpha`
    factor: bool  # the coefficient multiplies layer gradients or filters of the recipe
    recipe: Recipe | None  # None for mergekit's own methods
    linear: bool  # the merged model is linear in the coefficient
    options: Options
    seed: int  # mergekit's, for methods that draw at random
    memory: int = MEMORY  # bytes that a pass over our methods' models may allocate

    @property
    def method(self) -> str:
        return str(self.document["merge_method"])

    @property
    def share(self) -> float:
        """M / T for M bases instead of T task vectors: the share of validation items to use."""
        if self.recipe is None:
            return 1.0
        if self.recipe.store is not None:
            bases = self.recipe.store
            return bases.num_bases / len(bases.tasks)
        if self.recipe.settings.energy is not None:
            raise UserError("--subsample needs M, which `energy` leaves open: give `num_bases`")
        total = len(self.recipe.tasks)
        return most_bases(self.recipe.settings, total) / total

    def at(self, point: float) -> dict[str, Any]:
        """Return the recipe of one point, as plain objects."""
        document = copy.deepcopy(dict(self.document))
        document["parameters"] = root = document.get("parameters") or {}
        if not self.factor:
            root[self.key] = point
            return document
        elsewhere = VARYING_KEYS[self.key].default_for(self.method) if self.recipe else 1.0
        if elsewhere is not None:
            root.setdefault(self.key, elsewhere)
        for parameters in _sections(document):
            if self.key in parameters:
                parameters[self.key] = times(parameters[self.key], point)
        return document

    def check(self, points: Sequence[float]) -> None:
        """Raise UserError or MergeRefused if the recipe does not allow one of the points."""
        read = MergeConfiguration.model_validate if self.recipe is None else from_mapping
        for point in points:
            with refusing(planning=True):
                read(self.at(point))

    @contextmanager
    def _planned(self, point: float) -> Iterator[Plan | Tasks]:
        """Plan a point. For mergekit's own methods, the plan is a task for each tensor.

        The plan may be run within the context.
        """
        document = self.at(point)
        if self.recipe is not None:
            with planned(from_mapping(document), self.options, self.memory) as plan:
                yield plan
            return
        with fresh_loaders():
            with refusing(planning=True):
                config = MergeConfiguration.model_validate(document)
                base = config.base_model
                for model in sorted(self._models(), key=lambda m: (m != base, str(m))):
                    check_model(model, base, self.options)
                check_tokenizer_source(config)
                tasks = planned_by_mergekit(config, self.options)._tensors
            yield tasks

    def _models(self) -> set[ModelReference]:
        return set(MergeConfiguration.model_validate(self.document).referenced_models())

    def output_bytes(self) -> int:
        """Return the bytes of the merged model; raise here, early, if it cannot be merged."""
        with self._planned(1.0) as plan:
            if isinstance(plan, Plan):
                return plan.output_bytes
        return max(Checkpoint.open(self._folders(model)[0]).nbytes for model in self._models())

    def inputs(self) -> list[str]:
        """The folders of the models, in which nothing may be written."""
        if self.recipe is not None:
            return [*input_folders(self.recipe)]
        return [os.fspath(folder) for each in self._models() for folder in self._folders(each)]

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
        fused = self.options.lora_merge_dtype
        made = {"mergekit's seed": self.seed, "lora_merge_dtype": fused}
        return {"recipe": document, "checkpoints": files, **made}

    def _folders(self, model: ModelReference) -> list[Path]:
        cache = self.options.transformers_cache
        parts = [ModelReference(model=part) for part in (model.model, model.lora) if part]
        return [Path(part.local_path(cache)) for part in parts]

    def write(self, point: float, out: str | os.PathLike[str], quiet: bool = True) -> None:
        """Merge one point into a folder, as `mergekit-yaml` does."""
        document = self.at(point)
        changed = {"out_shard_size": SHARD, "quiet": quiet, "random_seed": self.seed}
        options = self.options.model_copy(update=changed)
        source = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        if self.recipe is None:
            config = MergeConfiguration.model_validate(document)
            mergekit.merge.run_merge(config, os.fspath(out), options, config_source=source)
            return
        merge(from_mapping(document, source), os.fspath(out), options, self.memory)

    def draw(self, start: Path, direction: Path, progress: Progress = silent) -> float:
        """Write start and direction of every tensor that moves as two models; needs `linear`.

        Returns:
            The scale of the direction at coefficient 1.
        """
        with self._planned(1.0) as plan:
            if not isinstance(plan, Plan):
                _draw_stock(plan, start, direction)
                return 1.0
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
            # A tensor that is loaded at once is freed after a complete read.
            inputs = item.inputs if item.base.held else ()
            starts.append(replace(item, inputs=inputs, out=item.base.dtype, tunables=None))
        engine = Engine(memory=self.memory, progress=progress)
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
            if not isinstance(plan, Plan):
                return {w.name: float(dict(t.parameters.items())[self.key]) for w, t in plan}
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


def read_tuned(path: str, options: Options, seed: int = 0, memory: int = MEMORY) -> TunedRecipe:
    """Read the recipe in a file, or `recipes/add.yml` of a store; it needs a coefficient."""
    if os.path.isdir(path):
        if not is_store(path):
            raise UserError(f"{path}: a folder, but not a store; name a recipe, or a store")
        path = str(Path(path) / "recipes" / "add.yml")
    file = parse(path)
    document, text = file.single(), file.text.removeprefix("\ufeff")
    method = document.get("merge_method")
    found = from_mapping(document) if method in METHODS else None
    linear = found is not None or _check_stock(path, document)
    recipe = None if found is None else found.recipe
    key = "alpha" if method == "basis_negate" else "lambda"
    root = document.get("parameters") or {}
    given = [section for section in _sections(document) if key in section]
    factor = any(s is not root or isinstance(s[key], list | dict) for s in given)
    return TunedRecipe(document, text, key, factor, recipe, linear, options, seed, memory)


def _check_stock(path: str, document: Mapping[str, Any]) -> bool:
    """Return whether one of mergekit's own methods is linear in lambda; raise if it has none."""
    name = document.get("merge_method")
    known = {method.spec.name: method for method in merge_methods.registered_methods()}
    if not isinstance(name, str) or name not in known:
        raise unknown_method(path, name, registered())
    able = [n for n, m in known.items() if any(p.name == "lambda" for p in m.spec.parameters)]
    if name not in able:
        raise UserError(f"{path}: {name} has no `lambda`: {', '.join(sorted(able))} have")
    with refusing(planning=True):
        check_unknown_keys(document, MergeConfiguration)
        config = MergeConfiguration.model_validate(document)
    if config.base_model is None:
        raise UserError(f"`base_model` is missing: {name} needs the models' common base")
    method = known[name]
    arithmetic = isinstance(method, GeneralizedTaskArithmeticMerge)
    return arithmetic and method.sparsification_method not in RANDOM


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


def _draw_stock(tasks: Tasks, start: Path, direction: Path) -> None:
    """Do the work of `draw` for mergekit's own methods, for the tensors that they merge."""
    merges: dict[Any, list[tuple[str, Any]]] = {}  # a layer may be there twice
    for weight, task in tasks:
        merges.setdefault(task.gather_tensors, []).append((weight.name, task))
    files: dict[str, str] = {}
    for folder in (start, direction):
        folder.mkdir(parents=True)
    for gathering, tensors in Executor(list(merges), CPU, CPU).run(quiet=True):
        for name, task in merges[gathering]:
            if (pair := _split(task, tensors)) is not None:
                files[name] = f"{len(files)}.safetensors"
                for folder, tensor in zip((start, direction), pair, strict=True):
                    save_file({name: tensor.contiguous()}, folder / files[name])
    index = json.dumps({"metadata": {}, "weight_map": files})
    for folder in (start, direction):
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _split(
    task: ExecuteMergeMethodTask, tensors: Mapping[ModelReference, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return start and direction of one tensor, by mergekit's own code; None if it is not merged.

    mergekit computes base + lambda * f(models - base) in the inputs' dtype. With a base of zeros
    and the differences instead of the models, the result is f alone.
    """
    base = task.base_model
    start = tensors.get(base)
    models = {  # an optional tensor is merged from those that have it
        model: tensor
        for model in task.model_order
        if model != base and (tensor := tensors.get(model)) is not None
    }
    if start is None or not models or not start.is_floating_point():
        return None
    dtypes = [tensor.dtype for tensor in models.values()]
    start = start.to(reduce(torch.promote_types, dtypes, start.dtype))
    moved = {model: tensor.to(start.dtype) - start for model, tensor in models.items()}
    given = dict(task.parameters.items()) | {"lambda": 1.0}
    alone = task.model_copy(update={"parameters": ImmutableMap(data=given)})
    return start, alone.execute({**moved, base: torch.zeros_like(start)})
