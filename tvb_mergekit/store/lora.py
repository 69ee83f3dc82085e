"""LoRA adapters in place of models: of the tasks or bases of a store, or of any model.

`tensors/factoring.py` writes the factors. `docs/serving.md` describes the use of the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError, megabytes
from tvb_mergekit.settings import resolve_settings
from tvb_mergekit.store.api import open_model
from tvb_mergekit.store.bits import KINDS_OF_TENSORS, OTHER, group_of, slugs
from tvb_mergekit.store.export import combine, items_of, task_column
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tables import Sheet, escaped, markdown_table
from tvb_mergekit.tensors.adapter import CONFIG, PREFIX, WEIGHTS, kinds_of_biased
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.factoring import (
    AdapterFile,
    Factored,
    Target,
    Truncation,
    choose_ranks,
    norms_pass,
    shapes_of,
    write_factors,
)
from tvb_mergekit.tensors.output import StagedFolder, check_disk, check_new_folder
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.taskset import match

REPORT, TASKS = "lora.json", "tasks.json"
KINDS = (*KINDS_OF_TENSORS, OTHER)
HEAD = ("tensors", "rank", "norm^2 %", "energy %", "error", "bytes")


class NewAdapter(NamedTuple):
    """An adapter to write: the inputs of each item, weighted by `column` and added."""

    folder: str
    title: str
    column: Tensor


class AdapterPlan(NamedTuple):
    """The adapters of one export.

    Attributes:
        sums: Further adapters, each an exact sum of `updates`. Then there is one update for each
            input, so that `column` weights both.
        tasks: The content of `tasks.json`; empty without the file.
    """

    updates: Sequence[NewAdapter]
    sums: Sequence[NewAdapter] = ()
    tasks: Mapping[str, Sequence[Mapping[str, object]]] = {}


class AdapterReport(NamedTuple):
    """The errors of an adapter."""

    title: str
    tensors: Sequence[Factored]

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """Numbers of each group of tensors, of the tensors with factors, and of all."""
        groups = {group: [t for t in self.tensors if group_of(t.name) == group] for group in KINDS}
        groups |= {"with factors": [t for t in self.tensors if t.rank], "all": [*self.tensors]}
        whole = math.fsum(each.square for each in self.tensors)
        found = {}
        for name, group in groups.items():
            square = math.fsum(each.square for each in group)
            lost = math.fsum(each.error for each in group) / (square or 1.0)
            ranks = [each.rank for each in group]
            found[name] = {
                "tensors": len(group),
                "ranks": sorted({min(ranks), max(ranks)}) if ranks else [],
                "share": square / (whole or 1.0),
                "energy": 1 - lost,
                "relative_error": math.sqrt(lost),
                "bytes": sum(each.nbytes for each in group),
            }
        return {name: numbers for name, numbers in found.items() if numbers["tensors"]}

    @property
    def sheet(self) -> Sheet:
        rows = [(name, *cells(numbers)) for name, numbers in self.groups.items()]
        return Sheet(self.title, ("", *HEAD), rows)


def cells(numbers: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of HEAD for one of `AdapterReport.groups`."""
    return (
        str(numbers["tensors"]),
        "-".join(map(str, numbers["ranks"])),
        f"{100 * numbers['share']:.2f}",
        f"{100 * numbers['energy']:.2f}",
        f"{numbers['relative_error']:.3g}",
        megabytes(numbers["bytes"]),
    )


@dataclass(frozen=True)
class AdapterExport:
    """Adapters for one base.

    Attributes:
        items: The tensors of the task vectors, each once, under the base's names.
        base_name, base_folder: The base in the adapters' configurations, and its folder.
        dtype: The dtype of the factors.
        complete: Store embeddings and norms completely, as PEFT's `modules_to_save`.
    """

    items: Sequence[Item]
    base: Weights
    base_name: str
    base_folder: Path | None
    size: Truncation
    dtype: torch.dtype = torch.float32
    complete: bool = False
    engine: Engine = Engine()

    def write(self, plan: AdapterPlan, out: str, inputs: Sequence[str] = ()) -> list[AdapterReport]:
        """Write the adapters of a plan into their folders below `out`, which is in no input.

        Raises:
            UserError: `out` holds something, no room on the disk or in memory, nothing to write.
        """
        check_new_folder(out, inputs)
        stage = StagedFolder(out)
        try:
            reports = [self._write(update, stage.path) for update in plan.updates]
            folders = [stage.path / update.folder for update in plan.updates]
            for each in plan.sums:
                scales = zip(each.column.tolist(), folders, strict=True)
                reports.append(self._write(each, stage.path, [of for of in scales if of[0]]))
            if plan.tasks:
                _write_json(stage.path / TASKS, plan.tasks)
            stage.publish()
        finally:
            stage.discard()
        return reports

    def _write(
        self, update: NewAdapter, place: Path, parts: Sequence[tuple[float, Path]] = ()
    ) -> AdapterReport:
        """Write one adapter. `parts` are scales and folders of adapters that it adds up."""
        folder, column = place / update.folder, update.column[update.column != 0]
        items = self._items(update.column)
        targets = {i.name: self._target(i) for i in items if not self._why_not(i)}
        files = [(scale, Checkpoint.open(path / WEIGHTS)) for scale, path in parts]
        plan = [*targets.values()]
        if not plan or not len(column):
            raise UserError(f"{update.title}: no tensor is a matrix of a module; nothing to write")
        ranks = choose_ranks(plan, column, self.size, self.dtype, files, self.engine)
        saved = [self._saved(item) for item in items if self._is_saved(item)]
        most = shapes_of(plan, ranks, self.dtype)
        most |= {item.name: (item.out, item.shape) for item in saved}
        check_disk(folder, sum(math.prod(shape) * dtype.itemsize for dtype, shape in most.values()))
        file = AdapterFile(folder / WEIGHTS, most)
        found = [*write_factors(file, plan, column, ranks, self.dtype, files, self.engine)]
        if not any(each.rank for each in found):
            raise UserError(f"{update.title}: no matrix differs from the base's; nothing to write")
        combine(saved, column[:, None], file, self.engine)
        file.close()
        rest = [item for item in items if item.name not in targets]
        for item, square in zip(rest, norms_pass(rest, column, self.engine), strict=True):
            size, error, reason = 0, square, self._why_not(item)
            if self._is_saved(item):
                size, error, reason = self.base.tensors[item.name].nbytes, 0.0, "complete"
            found.append(Factored(item.name, 0, size, square, error, reason))
        kept = {targets[each.name]: each.rank for each in found if each.rank}
        modules = sorted({item.name[len(PREFIX) :].rpartition(".")[0] for item in saved})
        _write_json(folder / CONFIG, self._configuration(kept, modules))
        return self._report(folder, AdapterReport(update.title, found))

    @cached_property
    def _config(self) -> dict[str, Any]:
        """The base's config.json; empty without one."""
        file = Path("" if self.base_folder is None else self.base_folder) / "config.json"
        if self.base_folder is None or not file.is_file():
            return {}
        try:
            return dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{file}: not a JSON object ({error}); restore it") from error

    @cached_property
    def _tied(self) -> bool:
        """Whether the output layer is the embeddings, by config.json or by the tensors."""
        groups = {group_of(item.name) for item in self.items}
        both = groups >= {"embeddings", "output layer"}
        return bool(self._config.get("tie_word_embeddings", not both))

    @cached_property
    def _conv1d(self) -> set[bool]:
        return kinds_of_biased(self.base.tensors)

    def _items(self, column: Tensor) -> list[Item]:
        """The items with the inputs that a column uses, and with the base if they need it."""
        used = column.nonzero()[:, 0].tolist()
        found = [replace(i, inputs=tuple(i.inputs[k] for k in used)) for i in self.items]
        needed = {part.holds for item in found for part in item.inputs} != {"delta"}
        return found if needed else [replace(item, base=None) for item in found]

    def _why_not(self, item: Item) -> str:
        """The reason why a tensor gets no factors; empty if it gets them."""
        group, square = group_of(item.name), len(set(item.shape)) == 1
        if len(item.shape) != 2:
            return "no matrix"
        if group == "embeddings":
            return group
        if group == "output layer" and self._tied:
            return "tied to the embeddings"
        if not item.name.endswith(".weight") or not item.numel:
            return "not the weight of a module"
        if square and self._bias(item) is not None and len(self._conv1d) > 1:
            return "square, in a model of Linear and Conv1D"
        return ""

    def _bias(self, item: Item) -> tuple[int, ...] | None:
        info = self.base.tensors.get(item.name.removesuffix("weight") + "bias")
        return None if info is None else info.shape

    def _target(self, item: Item) -> Target:
        (rows, columns), bias = item.shape, self._bias(item)
        transposed = bias is not None and bias != (rows,)
        if rows == columns and bias is not None:
            transposed = self._conv1d == {True}
        return Target(item, self._module(item.name), transposed)

    def _module(self, name: str) -> str:
        """PEFT's name of a module. GPT-2 and BLOOM are on the Hub without the first part."""
        bare = any(each.startswith("h.") for each in self.base.tensors)
        return ("transformer." if bare else "") + name.rpartition(".")[0]

    def _is_saved(self, item: Item) -> bool:
        """Whether a tensor is stored completely. PEFT would untie tied embeddings."""
        kinds = ("norms",) if self._tied else ("norms", "embeddings")
        known = item.name.endswith((".weight", ".bias"))
        return self.complete and known and group_of(item.name) in kinds

    def _saved(self, item: Item) -> Item:
        """A tensor that is stored completely, under PEFT's name."""
        name = f"{PREFIX}{self._module(item.name)}.{item.name.rpartition('.')[2]}"
        dtype = self.base.tensors[item.name].dtype
        return replace(item, name=name, out=dtype, base=Part.of(self.base, item.name))

    def _configuration(self, ranks: Mapping[Target, int], saved: list[str]) -> dict[str, Any]:
        """adapter_config.json. The scale alpha / r is 1 in every module."""
        most, modules = max(ranks.values()), {target.module for target in ranks}
        names = [self._module(name) for name in self.base.tensors if name.endswith(".weight")]
        last = {module.rpartition(".")[2] for module in modules}
        alike = {module for module in names if module.rpartition(".")[2] in last}
        pattern = {f"^{each.module}": rank for each, rank in ranks.items() if rank != most}
        architecture = str([*(self._config.get("architectures") or []), ""][0])
        causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if causal else None,
            "base_model_name_or_path": self.base_name,
            "r": most,
            "lora_alpha": most,
            "rank_pattern": pattern,
            "alpha_pattern": pattern,
            "target_modules": sorted(last if alike == modules else modules),
            "modules_to_save": saved or None,
            "fan_in_fan_out": any(target.transposed for target in ranks),
            "lora_dropout": 0.0,
            "bias": "none",
            "init_lora_weights": True,
            "inference_mode": True,
        }

    def _report(self, folder: Path, report: AdapterReport) -> AdapterReport:
        """Write the report as `lora.json` and as the model card."""
        tensors = {each.name: each.as_json() for each in report.tensors}
        said = {"what": report.title, "base_model": self.base_name, "groups": report.groups}
        _write_json(folder / REPORT, {**said, "tensors": tensors})
        rows = [report.sheet.head, *report.sheet.rows]
        card = (
            f"---\nbase_model: {json.dumps(self.base_name)}\nlibrary_name: peft\n"
            f"tags: [lora, tvb-mergekit]\n---\n# {escaped(report.title)}\n\n"
            "A LoRA adapter of a difference from the base model, written by "
            "[tvb-mergekit](https://pypi.org/project/tvb-mergekit/). `lora.json` has all tensors.\n"
            "Error: relative, in the Frobenius norm. Energy: 1 - error^2.\n\n"
        )
        (folder / "README.md").write_text(card + markdown_table(rows) + "\n", encoding="utf-8")
        return report


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def items_of_store(bases: Bases, base: Weights) -> list[Item]:
    """The tensors that a store changes, each once."""
    tied = bases.facts.store.twins
    return [
        item
        for item in items_of(bases, base, None, bases.sources)
        if item.inputs and item.name not in tied
    ]


def items_of_model(base: Weights, model: str) -> tuple[list[Item], Sequence[str]]:
    """The tensors of a model and its base, and a note about tensors that only one of them has."""
    settings = resolve_settings("basis_ta", {"basis": "none"}, [model])
    found = match(base, [open_model(model)], [model], settings)
    return found.items, found.notes


def plan_of_all(bases: Bases, sums: bool) -> AdapterPlan:
    """The adapters of all tasks, or of all bases (and PCA's mean), and their scales for each task.

    The scales have the form of the adapters of llama.cpp's server.

    Args:
        sums: Also write each task of a store of bases as one adapter.
    """
    folders, tasks = bases.facts.store.folders, bases.tasks
    columns = [task_column(bases, task)[:, 0] for task in tasks]
    ones = torch.eye(len(bases.sources), dtype=torch.float64)
    scales = ones if bases.keeps_tasks else columns
    lists = {
        task: [
            {"id": place, "path": folders[place], "scale": scale}
            for place, scale in enumerate(of.tolist())
            if scale
        ]
        for task, of in zip(tasks, scales, strict=True)
    }
    titles = [f"{label} of {bases.path}" for label in bases.labels]
    updates = [*map(NewAdapter, folders, titles, columns if bases.keeps_tasks else ones)]
    places = [f"tasks/{name}" for name in slugs(tasks)]
    joined = map(NewAdapter, places, tasks, columns) if sums and not bases.keeps_tasks else ()
    return AdapterPlan(updates, [*joined], lists)


def overview(reports: Sequence[AdapterReport]) -> Sheet:
    """A table of all adapters."""
    rows = [(report.title, *cells(report.groups["all"])) for report in reports]
    return Sheet("Adapters", ("", *HEAD), rows)
