"""LoRA adapters in place of models: of the tasks or bases of a store, or of any model.

`tensors/factoring.py` writes the factors. `docs/serving.md` describes the use of the files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tvb_mergekit.core.lora import Factors
from tvb_mergekit.errors import UserError, megabytes
from tvb_mergekit.settings import resolve_settings
from tvb_mergekit.store.api import open_model
from tvb_mergekit.store.export import items_of, task_column
from tvb_mergekit.store.forms import KINDS_OF_TENSORS, OTHER, group_of, slugs
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tables import Sheet
from tvb_mergekit.tensors.adapter import CONFIG, WEIGHTS, kinds_of_biased
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.factoring import Change, Factored, Target, Truncation, added, joined
from tvb_mergekit.tensors.output import StagedFolder, check_new_folder
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item
from tvb_mergekit.tensors.taskset import match

REPORT, TASKS = "lora.json", "tasks.json"
HEAD = ("", "tensors", "rank", "norm^2 %", "energy %", "error", "bytes")
CLASSIFIER = re.compile(r"(^|\.)(score|classifier)\.")  # tied to nothing
EMBEDDED = re.compile(r"(^|\.)shared\.weight$|relative_attention_bias")  # of BART and T5
RANKS = (4, 8, 16, 32, 64, 128, 256)  # of `tvb inspect --lora`
Scales = Mapping[str, Sequence[Mapping[str, Any]]]  # the content of tasks.json


class NewAdapter(NamedTuple):
    """An adapter to write: the inputs of each item, weighted by `column` and added.

    Attributes:
        parts: Scales and folders of adapters, written before: the adapter is their exact sum.
            Without parts it is truncated.
    """

    folder: str
    title: str
    column: Tensor
    parts: Sequence[tuple[float, str]] = ()


class AdapterReport(NamedTuple):
    """The errors of an adapter."""

    title: str
    tensors: Sequence[Factored]

    @property
    def sheet(self) -> Sheet:
        """A table of groups of tensors, of the tensors with factors, and of all."""
        kinds = (*KINDS_OF_TENSORS, OTHER)
        groups = {kind: [t for t in self.tensors if group_of(t.name) == kind] for kind in kinds}
        groups |= {"with factors": [t for t in self.tensors if t.rank], "all": [*self.tensors]}
        rows = [_row(name, group, self.tensors) for name, group in groups.items() if group]
        return Sheet(self.title, HEAD, rows)


def overview(reports: Sequence[AdapterReport]) -> Sheet:
    """A table of all adapters."""
    rows = [_row(report.title, report.tensors, report.tensors) for report in reports]
    return Sheet("Adapters", HEAD, rows)


def _row(name: str, group: Sequence[Factored], every: Sequence[Factored]) -> tuple[str, ...]:
    total, square = added(name, group), added("all", every).square
    return (
        name,
        str(len(group)),
        str(total.rank),
        f"{100 * total.square / (square or 1.0):.2f}",
        f"{100 * (1 - total.relative_error**2):.2f}",
        f"{total.relative_error:.3g}",
        megabytes(total.nbytes),
    )


@dataclass(frozen=True)
class AdapterExport:
    """Adapters for one base.

    Attributes:
        items: The tensors of the task vectors, each once, under the base's names.
        inputs: Names of the inputs of each item, for messages.
        base_name, base_folder: The base in the adapters' configurations, and its folder.
        dtype: The dtype of the factors.
        known: The factors of each matrix, as the base stores it, if they need no truncation.
    """

    items: Sequence[Item]
    inputs: Sequence[str]
    base: Weights
    base_name: str
    base_folder: Path | None
    size: Truncation
    dtype: torch.dtype = torch.float32
    engine: Engine = Engine()
    known: Mapping[str, Factors] = field(default_factory=dict)

    def write(
        self, adapters: Sequence[NewAdapter], out: str, sources: Sequence[str], tasks: Scales
    ) -> list[AdapterReport]:
        """Write adapters into their folders below `out`, and `tasks` as `tasks.json`.

        Args:
            sources: Folders that `out` must not be in.

        Raises:
            UserError: `out` holds something, no room on the disk or in memory, nothing to write.
        """
        check_new_folder(out, sources)
        stage = StagedFolder(out)
        try:
            reports = [self._write(each, stage.path) for each in adapters]
            if tasks:
                _write_json(stage.path / TASKS, tasks)
            stage.publish()
        finally:
            stage.discard()
        return reports

    def errors(self, adapter: NewAdapter) -> tuple[list[float], list[int]]:
        """The error of an adapter of each of RANKS, and its bytes without the header."""
        items, change = self._change(adapter, Path())
        shapes = [target.item.shape for target in change.targets]
        values = change.values([min(*shape, RANKS[-1]) for shape in shapes])
        total = sum(change.left_out(item, "").square for item in items)
        kept = [sum(float(each[:rank].square().sum()) for each in values) for rank in RANKS]
        sizes = [
            self.dtype.itemsize * sum(min(*s, rank) * sum(s) for s in shapes) for rank in RANKS
        ]
        return [math.sqrt(max(0.0, 1 - each / (total or 1.0))) for each in kept], sizes

    def _change(self, adapter: NewAdapter, place: Path) -> tuple[list[Item], Change]:
        used = adapter.column.nonzero()[:, 0].tolist()
        items = [replace(i, inputs=tuple(i.inputs[k] for k in used)) for i in self.items]
        targets = [self._target(item) for item in items if not self._why_not(item)]
        if not targets or not used:
            raise UserError(f"{adapter.title}: no tensor is a matrix of a module; nothing to write")
        names = [self.inputs[k] for k in used]
        parts = [(scale, Checkpoint.open(place / of / WEIGHTS)) for scale, of in adapter.parts]
        known = partial(joined, parts) if parts else self._known if self.known else None
        column = adapter.column[used]
        return items, Change(column, names, targets, known, self.dtype, self.engine)

    def _write(self, adapter: NewAdapter, place: Path) -> AdapterReport:
        folder, (items, change) = place / adapter.folder, self._change(adapter, place)
        ranks = change.ranks(self.size)
        folder.mkdir(parents=True, exist_ok=True)
        found = change.write(folder / WEIGHTS, ranks)
        kept = [(t, each.rank) for t, each in zip(change.targets, found, strict=True) if each.rank]
        if not kept:
            raise UserError(f"{adapter.title}: no matrix differs from the base's; nothing to write")
        found += [change.left_out(i, why) for i in items if (why := self._why_not(i))]
        _write_json(folder / CONFIG, self._configuration(kept))
        said = {"what": adapter.title, "base_model": self.base_name}
        tensors = {each.name: each.as_json() for each in found}
        every = added("all", found).as_json()
        _write_json(folder / REPORT, {**said, "all": every, "tensors": tensors})
        return AdapterReport(adapter.title, found)

    def _known(self, target: Target) -> Factors:
        both = self.known[target.item.name]
        if target.transposed:
            return Factors(both.right.T.contiguous(), both.left.T.contiguous())
        return both

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
        groups = map(group_of, self.base.tensors)
        return bool(self._config.get("tie_word_embeddings", "embeddings" not in groups))

    @cached_property
    def _conv1d(self) -> bool:
        """Whether the base stores its matrices with a bias as [in, out]."""
        kinds = kinds_of_biased(self.base.tensors)
        if len(kinds) > 1:
            raise UserError(f"{self.base_name} has both Linear and Conv1D: no adapter can be made")
        return kinds == {True}

    def _why_not(self, item: Item) -> str:
        """The reason why a tensor gets no factors; empty if it gets them."""
        group = group_of(item.name)
        if len(item.shape) != 2:
            return "not a matrix"
        if group == "embeddings" or EMBEDDED.search(item.name):
            return "embeddings"
        if group == "output layer" and not CLASSIFIER.search(item.name) and self._tied:
            return "tied to the embeddings"
        weight = item.name.endswith(".weight") and item.numel
        return "" if weight else "not the weight of a module"

    def _target(self, item: Item) -> Target:
        biased = item.name.removesuffix("weight") + "bias" in self.base.tensors
        return Target(item, self._module(item.name), biased and self._conv1d)

    def _module(self, name: str) -> str:
        """PEFT's name of a module. GPT-2 and BLOOM are on the Hub without the first part."""
        bare = any(each.startswith("h.") for each in self.base.tensors)
        return ("transformer." if bare else "") + name.rpartition(".")[0]

    def _configuration(self, ranks: Sequence[tuple[Target, int]]) -> dict[str, Any]:
        """adapter_config.json. The scale alpha / r is 1 in every module."""
        most, modules = max(rank for _, rank in ranks), {target.module for target, _ in ranks}
        names = [self._module(name) for name in self.base.tensors if name.endswith(".weight")]
        last = {module.rpartition(".")[2] for module in modules}
        alike = {module for module in names if module.rpartition(".")[2] in last}
        pattern = {f"^{target.module}": rank for target, rank in ranks if rank != most}
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
            "fan_in_fan_out": any(target.transposed for target, _ in ranks),
            "lora_dropout": 0.0,
            "bias": "none",
            "init_lora_weights": True,
            "inference_mode": True,
        }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def items_of_store(bases: Bases, base: Weights) -> list[Item]:
    """The tensors that a store changes, each once."""
    tied, items = bases.facts.store.twins, items_of(bases, base, None, bases.sources)
    items = [item for item in items if item.inputs and item.name not in tied]
    if any(part.holds != "delta" for item in items for part in item.inputs):
        return items
    return [replace(item, base=None) for item in items]  # not read


def items_of_model(base: Weights, model: str) -> tuple[Sequence[Item], Sequence[str]]:
    """The tensors of a model and its base, and a note about tensors that only one of them has."""
    settings = resolve_settings("basis_ta", {"basis": "none"}, [model])
    found, notes = match(base, [open_model(model)], [model], settings)
    return found.items, notes


def adapters_of(bases: Bases, sums: bool) -> tuple[list[NewAdapter], Scales]:
    """The adapters of all tasks, or of all bases (and PCA's mean), and their scales for each task.

    The scales have the form of the adapters of llama.cpp's server.

    Args:
        sums: Also write each task of a store of bases as one adapter.
    """
    folders, tasks = bases.facts.store.folders, bases.tasks
    columns = [task_column(bases, task)[:, 0] for task in tasks]
    # A basis of PCA without a direction has no factors.
    squares = [] if bases.keeps_tasks else bases.tensors["gram_bases"].diagonal().tolist()
    empty = {name for name, square in zip(folders, squares, strict=False) if not square}
    ids = {name: k for k, name in enumerate(name for name in folders if name not in empty)}
    ones = torch.eye(len(bases.sources), dtype=torch.float64)
    scales = {
        task: [
            {"id": ids[name], "path": name, "scale": scale}
            for name, scale in zip(folders, of.tolist(), strict=True)
            if scale and name in ids
        ]
        for task, of in zip(tasks, ones if bases.keeps_tasks else columns, strict=True)
    }
    titles = [f"{label} of {bases.path}" for label in bases.labels]
    adapters = [*map(NewAdapter, folders, titles, columns if bases.keeps_tasks else ones)]
    adapters = [each for each in adapters if each.folder in ids]
    if sums and not bases.keeps_tasks:
        places = [f"tasks/{name}" for name in slugs(tasks)]
        parts = [[(each["scale"], each["path"]) for each in scales[task]] for task in tasks]
        adapters += map(NewAdapter, places, tasks, columns, parts)
    return adapters, scales
