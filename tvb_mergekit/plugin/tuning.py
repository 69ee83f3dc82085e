"""A recipe along its coefficient: lambda, or alpha of `basis_negate`, as mergekit plans it.

`basis_ta`, `basis_ties`, `basis_negate` and mergekit's generalized task arithmetic (but for its
methods that draw at random) are linear in it: the merged model is start + fl(scale * direction),
and `draw` writes both. For all others `write` merges point by point.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import mergekit.merge
import torch
import yaml
from mergekit import merge_methods
from mergekit.common import ImmutableMap, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.merge_methods.generalized_task_arithmetic import GeneralizedTaskArithmeticMerge
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.sparsify import SparsificationMethod
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.basis import Combination
from tvb_mergekit.checkpoints import Checkpoint, weight_files
from tvb_mergekit.engine import Job, Tunables, merge_items
from tvb_mergekit.errors import UserError
from tvb_mergekit.layout import MEMORY
from tvb_mergekit.plugin.files import check_model, check_tokenizer_source
from tvb_mergekit.plugin.inputs import (
    Options,
    from_mapping,
    load_document,
    plan_only,
    planned,
    stock_tasks,
)
from tvb_mergekit.plugin.loaders import fresh_loaders
from tvb_mergekit.plugin.planning import Plan
from tvb_mergekit.plugin.reading import Recipe, check_unknown_keys
from tvb_mergekit.plugin.running import registered, unknown_method
from tvb_mergekit.plugin.streaming import streaming
from tvb_mergekit.plugin.tasks import MergeTensor
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.recipe import METHODS, VARYING_KEYS, ratio_to_bases
from tvb_mergekit.refusals import refusing
from tvb_mergekit.store import is_store
from tvb_mergekit.stream import Sink
from tvb_mergekit.tuning.line import DIRECTION, START, Point
from tvb_mergekit.writing import FoldersSink, FolderWriter, plan_shards

RANDOM = (SparsificationMethod.random, SparsificationMethod.della_magprune)
SHARD = 10**9  # bytes, of what is written: mergekit holds a shard in memory
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TunedRecipe:
    """A recipe file, and its coefficient.

    Attributes:
        document: the recipe as plain objects.
        text: the recipe as it was written.
        key: `lambda` or `alpha`.
        factor: the recipe has layer gradients or filters for it, which the coefficient multiplies.
        recipe: for our methods.
        linear: whether the merged model is linear in the coefficient.
        seed: of mergekit, for methods that draw at random.
        memory: bytes that a pass over our methods' models may allocate.
    """

    document: Mapping[str, Any]
    text: str
    key: str
    factor: bool
    recipe: Recipe | None
    linear: bool
    options: Options
    seed: int
    memory: int = MEMORY

    @property
    def method(self) -> str:
        return str(self.document["merge_method"])

    @property
    def share(self) -> float:
        """M / T: what of the validation items is for M bases in the place of T task vectors.

        Raises:
            UserError: M is known only once the bases are built.
        """
        if self.recipe is None:
            return 1.0
        settings = self.recipe.settings
        if self.recipe.store is not None:
            bases = self.recipe.store.bases
            return bases.num_bases / len(bases.tasks)
        total = len(self.recipe.tasks)
        if settings.basis == "none":
            return 1.0
        if settings.energy is not None:
            raise UserError(
                "--subsample needs M, which `energy` leaves open until the bases are built: give "
                "`num_bases`"
            )
        return (settings.num_bases or ratio_to_bases(settings.basis_ratio or 1, total)) / total

    @property
    def num_bases(self) -> int:
        """How many bases have a coefficient of their own.

        Raises:
            UserError: the recipe cannot say a coefficient for each.
        """
        models = self.document.get("models")  # of slices each model may be listed several times
        if self.recipe is None or self.recipe.store is None or self.key != "lambda" or not models:
            raise UserError(
                "--per-basis needs a recipe over the bases of a store, each of which has a "
                "`weight` there: tvb build RECIPE STORE, then tune STORE/recipes/add.yml"
            )
        return len(models)

    def at(self, point: Point) -> dict[str, Any]:
        """The recipe of one point, as plain objects."""
        document = copy.deepcopy(dict(self.document))
        if self.factor:
            for parameters in _sections(document):
                if self.key in parameters:
                    parameters[self.key] = _scaled(parameters[self.key], point.value)
        document["parameters"] = root = document.get("parameters") or {}
        if not self.factor:
            root[self.key] = point.value
        elif self.key not in root and (default := self._default) is not None:
            root[self.key] = default * point.value
        for model, weight in zip(document.get("models") or (), point.weights, strict=False):
            model["parameters"] = own = model.get("parameters") or {}
            own["weight"] = float(own.get("weight", 1.0)) * weight
        return document

    @property
    def _default(self) -> float | None:
        """What the coefficient is where the recipe says nothing of it."""
        if self.recipe is not None:
            return VARYING_KEYS[self.key].default_for(self.method)  # type: ignore[no-any-return]
        return 1.0

    def check(self, points: Sequence[Point]) -> None:
        """Raise UserError or MergeRefused where the recipe cannot take one of the points."""
        for point in points:
            with refusing(planning=lambda: True):
                self._read(point)

    def _read(self, point: Point) -> Any:
        document = self.at(point)
        if self.recipe is not None:
            return from_mapping(document)
        return MergeConfiguration.model_validate(document)

    def output_bytes(self) -> int:
        """Of the merged model; what stops the merge is raised here, before it starts."""
        if self.recipe is not None:
            return plan_only(self._read(self._any), self.options).output_bytes
        config = self._read(self._any)
        base = config.base_model
        with refusing(planning=lambda: True), fresh_loaders():
            for model in sorted(config.referenced_models(), key=lambda m: (m != base, str(m))):
                check_model(model, base, self.options.mergekit)
            check_tokenizer_source(config)
            stock_tasks(copy.deepcopy(config), self.options)
        return max(_open(model, self.options).nbytes for model in config.referenced_models())

    @property
    def _any(self) -> Point:
        return Point(1.0)

    def identity(self) -> dict[str, Any]:
        """What decides the merged models besides the point: for results that are kept."""
        config = self._read(self._any)
        config = config.config if self.recipe is not None else config
        document = copy.deepcopy(dict(self.document))
        if not self.factor:
            (document.get("parameters") or {}).pop(self.key, None)
        files = {}
        with refusing(planning=lambda: True):
            for model in sorted(config.referenced_models(), key=str):
                files[str(model)] = _stamp(model, self.options)
        return {"recipe": document, "checkpoints": files, "mergekit's seed": self.seed}

    def write(self, point: Point, out: str | os.PathLike[str], quiet: bool = True) -> None:
        """Merge one point into a folder, to what `mergekit-yaml` writes."""
        document = self.at(point)
        options = self.options.mergekit.model_copy(
            update={"out_shard_size": SHARD, "quiet": quiet, "random_seed": self.seed}
        )
        source = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        config = MergeConfiguration.model_validate(document)
        with nullcontext() if self.recipe is None else streaming(self.memory):
            mergekit.merge.run_merge(config, os.fspath(out), options, config_source=source)

    @contextmanager
    def _merging(self, point: Point) -> Iterator[tuple[Plan, Combination, dict[str, Job]]]:
        """mergekit's plan of a point, what it combines, and how each tensor that moves is merged,
        in the order in which they lie on the disk."""
        with planned(self._read(point), self.options) as (plan, tasks):
            plan.memory = self.memory
            merged = {w.name: task for w, task in tasks if isinstance(task, MergeTensor)}
            jobs = {
                name: Job(merged[name].counted_as, merged[name].tunables)
                for name in plan.outputs
                if name in merged
            }
            yield plan, plan.build(), jobs

    def merge_into(self, point: Point, sink: Sink, dtypes: Mapping[str, torch.dtype]) -> None:
        """Give `sink` the merged tensors of one point that have a dtype here; ours only."""
        with self._merging(point) as (plan, basis, jobs):
            items = [
                replace(plan.outputs[name].item(), out=dtypes[name])
                for name in jobs
                if name in dtypes
            ]
            merge_items(basis, items, jobs, sink, budget=self.memory)

    def draw(self, folder: Path, progress: Progress = silent) -> float:
        """Write start and direction of every tensor that moves, as two models below `folder`.

        Needs `linear`.

        Returns:
            What the coefficient is multiplied by to give the scale of the direction.
        """
        if self.recipe is None:
            self._draw_stock(folder)
            return 1.0
        with self._merging(self._any) as (plan, basis, jobs):
            negation = bool(basis.settings.forget)
            starts, directions, fixed = [], [], {}
            for name, job in jobs.items():
                output, lambda_ = plan.outputs[name], job.tunables.lambda_
                item = output.item()
                directions.append(replace(item, out=torch.float32))
                if negation and lambda_ != 0:
                    fixed[name] = replace(job, tunables=Tunables(lambda_))
                    starts.append(replace(output.item(), out=torch.float32))
                elif output.whole is None:
                    starts.append(replace(item, inputs=()))
                else:  # what is loaded all at once is dropped when all of it has been read
                    starts.append(output.item())
            alone = {name: replace(job, alone=True) for name, job in jobs.items()}
            for kind, items, how in ((START, starts, fixed), (DIRECTION, directions, alone)):
                writer = FolderWriter(folder / kind, plan_shards(items), {"format": "pt"})
                sink = FoldersSink([writer])
                merge_items(basis, items, how, sink, budget=self.memory, progress=progress)
                writer.finish()
            return -1.0 if negation else basis.scale

    def _draw_stock(self, folder: Path) -> None:
        places: dict[str, dict[str, str]] = {START: {}, DIRECTION: {}}
        for kind in places:
            (folder / kind).mkdir(parents=True)
        with fresh_loaders():
            with refusing(planning=lambda: True):
                tasks = stock_tasks(self._read(self._any), self.options)
            targets = [StockSplit(name=w.name, merge=t) for w, t in tasks]
            for number, (task, pair) in enumerate(Executor(targets, CPU, CPU).run(quiet=True)):
                for (kind, names), tensor in zip(places.items(), pair or (), strict=False):
                    names[task.name] = f"{number}.safetensors"
                    save_file({task.name: tensor.contiguous()}, folder / kind / names[task.name])
        for kind, names in places.items():
            index = json.dumps({"metadata": {}, "weight_map": names})
            (folder / kind / "model.safetensors.index.json").write_text(index)

    def coefficients(self, point: Point, names: Sequence[str]) -> dict[str, float]:
        """The coefficient of each tensor at a point; they differ where there are gradients."""
        if not self.factor:
            return dict.fromkeys(names, point.value)
        if self.recipe is None:
            with refusing(planning=lambda: True), fresh_loaders():
                stock = stock_tasks(self._read(point), self.options)
            return {w.name: dict(t.parameters.items())[self.key] for w, t in stock}
        with planned(self._read(point), self.options) as (_plan, tasks):
            given = {w.name: t.tunables for w, t in tasks if isinstance(t, MergeTensor)}
        return {n: t.alpha if self.key == "alpha" else t.lambda_ for n, t in given.items()}

    def tuned(self, point: Point) -> str:
        """The recipe of a point as text: the user's own with the number changed, if that is all."""
        wanted = self.at(point)
        lines = self.text.splitlines(keepends=True)
        for place, line in enumerate(lines):
            head, colon, _ = line.partition(":")
            if colon and head.strip() == self.key:
                changed = f"{head}: {point.value!r}  # found by tvb tune\n"
                text = "".join([*lines[:place], changed, *lines[place + 1 :]])
                with suppress(yaml.YAMLError):  # it was more than one line
                    if yaml.safe_load(text) == wanted:
                        return text
        return str(yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True))


def read_tuned(path: str, options: Options, seed: int = 0, memory: int = MEMORY) -> TunedRecipe:
    """The recipe in a file; of a store, its `recipes/add.yml`.

    Raises:
        UserError, MergeRefused: no recipe, a mistake in it, or nothing to tune in it.
    """
    if os.path.isdir(path):
        if not is_store(path):
            raise UserError(f"{path}: a folder, and no store; name a recipe, or a store")
        path = str(Path(path) / "recipes" / "add.yml")
    document = load_document(path)
    text = Path(path).read_text(encoding="utf-8-sig")
    method = document.get("merge_method")
    recipe = None
    linear = True
    if method in METHODS:
        found = from_mapping(document)
        if found.raw:
            raise UserError(
                f"{path}: its models are weight files, which lm-eval cannot load; list folders"
            )
        recipe = found.recipe
    else:
        linear = _check_stock(path, document)
    key = "alpha" if method == "basis_negate" else "lambda"
    given = [s[key] for s in _sections(document) if key in s]
    root = document.get("parameters") or {}
    factor = len(given) > (key in root) or any(not _plain(setting) for setting in given)
    return TunedRecipe(document, text, key, factor, recipe, linear, options, seed, memory)


def _check_stock(path: str, document: Mapping[str, Any]) -> bool:
    """Whether one of mergekit's own methods is linear in lambda.

    Raises:
        UserError: it has no lambda, or no base.
    """
    name = document.get("merge_method")
    known = {method.spec.name: method for method in merge_methods.registered_methods()}
    if not isinstance(name, str) or name not in known:
        raise unknown_method(path, name, registered())
    method = known[name]
    if not any(parameter.name == "lambda" for parameter in method.spec.parameters):
        able = [n for n, m in known.items() if any(p.name == "lambda" for p in m.spec.parameters)]
        raise UserError(
            f"{path}: {name} has no coefficient `lambda` to tune: {', '.join(sorted(able))} have"
        )
    with refusing(planning=lambda: True):
        check_unknown_keys(document, MergeConfiguration)
        config = MergeConfiguration.model_validate(document)
    if config.base_model is None:
        raise UserError(
            f"`base_model` is missing: {name} needs the model that all others are fine-tuned from"
        )
    return (
        isinstance(method, GeneralizedTaskArithmeticMerge)
        and method.sparsification_method not in RANDOM
    )


def _sections(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every `parameters` of the recipe that is not one model's own."""
    parts = [document, *(document.get("modules") or {}).values()]
    for part in parts:
        for place in (part, *(part.get("slices") or ())):
            if isinstance(place.get("parameters"), dict):
                yield place["parameters"]


def _plain(setting: object) -> bool:
    return isinstance(setting, int | float | str)


def _scaled(setting: Any, by: float) -> Any:
    if isinstance(setting, list):
        return [_scaled(item, by) for item in setting]
    if isinstance(setting, dict):
        return {**setting, "value": _scaled(setting["value"], by)}
    return float(setting) * by


def _open(model: ModelReference, options: Options) -> Checkpoint:
    whole = ModelReference(model=model.model)
    return Checkpoint.open(whole.local_path(options.transformers_cache))


def _stamp(model: ModelReference, options: Options) -> list[Any]:
    """Changes with the weights, the configuration and the tokenizer of a model."""
    folders = [ModelReference(model=part) for part in (model.model, model.lora) if part]
    found: list[Any] = []
    for part in folders:
        folder = Path(part.local_path(options.transformers_cache))
        for file in [folder / name for name in weight_files(folder)]:
            stat = file.stat()
            found.append([file.name, stat.st_size, stat.st_mtime_ns])
        for file in sorted(folder.glob("*.json")):
            found.append([file.name, hashlib.sha256(file.read_bytes()).hexdigest()])
    if model.lora is None:
        found.append(_open(model, options).fingerprint())
    return found


class StockSplit(Task[tuple[Tensor, Tensor] | None]):
    """start and direction in the place of a tensor of mergekit's generalized task arithmetic, by
    its own code; None for one that it does not merge.

    It computes base + lambda * f(models - base) in the inputs' dtype. With a base of zeros and the
    differences in the place of the models, that is f alone.
    """

    name: str
    merge: ExecuteMergeMethodTask

    def arguments(self) -> dict[str, Task]:
        found: dict[str, Task] = self.merge.arguments()
        return found

    def group_label(self) -> str | None:
        label: str | None = self.merge.group_label()
        return label

    def execute(
        self, tensors: dict[ModelReference, Tensor], **_kwargs: Any
    ) -> tuple[Tensor, Tensor] | None:
        merge, start = self.merge, tensors.get(self.merge.base_model)
        models = {  # an optional tensor is merged from those that have it
            model: tensor
            for model in merge.model_order
            if model != merge.base_model and (tensor := tensors.get(model)) is not None
        }
        if start is None or not models or not start.is_floating_point():
            return None
        dtypes = [tensor.dtype for tensor in models.values()]
        start = start.to(reduce(torch.promote_types, dtypes, start.dtype))
        moved = {model: tensor.to(start.dtype) - start for model, tensor in models.items()}
        given = dict(merge.parameters.items()) | {"lambda": 1.0}
        alone = merge.model_copy(update={"parameters": ImmutableMap(data=given)})
        return start, alone.execute({**moved, merge.base_model: torch.zeros_like(start)})
