"""A zoo, the store of all task vectors as codes: one more task, or one less.

Both change a store as `tvb add` does: beside it, in one rename, with what was before in `undo`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.gram import block_budget
from tvb_mergekit.core.merge import Linear
from tvb_mergekit.core.online import of_sum, reported
from tvb_mergekit.core.quantize import CHOICES, GROUP, bits_within, unit_of
from tvb_mergekit.errors import UserError, counted
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.store.add import (
    UNDO,
    Growth,
    check_free,
    check_new,
    check_size,
    costs,
    given_items,
    keep_before,
    link,
    with_vectors,
)
from tvb_mergekit.store.bits import (
    RESERVED,
    Quantize,
    Vectors,
    choose,
    fixed_bytes,
    mean_bits,
    measured_tensors,
    of_codes,
    slugs,
    stored_gram,
)
from tvb_mergekit.store.build import finish_store, finish_vectors, writers_of
from tvb_mergekit.store.facts import Bounds, FileRecord, StoreFacts
from tvb_mergekit.store.recipes import FOLDER, edited
from tvb_mergekit.store.report import local_path, versions
from tvb_mergekit.store.store import Bases, is_zoo, load, read_store_facts, staged
from tvb_mergekit.tensors.output import check_disk
from tvb_mergekit.tensors.passes import combine_pass, gram_pass, measure_pass
from tvb_mergekit.tensors.quantized import Coded, Codes, Coding
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import FoldersSink

CPU = torch.device("cpu")


def add_to_zoo(
    path: str | os.PathLike[str],
    inputs: TaskSet,
    quantize: Quantize | None,
    growth: Growth,
    *,
    device: torch.device = CPU,
    budget: int | None = None,
    progress: Progress = silent,
) -> Bases:
    """Add the one model of `inputs` to the zoo at `path`.

    Args:
        quantize: the bits of the new task, None for the zoo's; or a size, in which the tasks that
            are there get fewer.
        budget: bytes that may be allocated; None: TVB_MERGEKIT_BLOCK_MB.

    Raises:
        UserError: another base, tensors that differ from the zoo's, a task name that is there, a
            size that does not hold the scales, no room, a doubt. The store is as it was then.
    """
    store = Path(os.path.realpath(path))
    with staged(store) as work:
        bases = load(store)
        passes = {"devices": [device], "budget": budget or block_budget()}
        _Joining(bases, inputs, quantize, growth, passes, progress).write(work, store)
        keep_before(bases, work)
    return load(store)


def remove_task(path: str | os.PathLike[str], task: str, force: bool = False) -> Bases:
    """Take a task out of the zoo at `path`.

    Args:
        force: also one that a recipe names which a user has put there.

    Raises:
        UserError: no zoo, no such task, the only one, or a recipe that names it.
    """
    store = Path(os.path.realpath(path))
    started = time.perf_counter()
    with staged(store) as work:
        facts = read_store_facts(store)
        if not is_zoo(facts):
            raise UserError(
                f"{path}: its tasks are combined in {facts.num_bases} bases, and none can be taken "
                "out; `tvb undo` takes back the last addition"
            )
        if len(facts.tasks) == 1 and task in facts.tasks:
            raise UserError(f"{path}: {task!r} is its only task; delete the folder instead")
        index = facts.tasks.index(task) if task in facts.tasks else load(store).index(task)
        gone = facts.store.folders[index]
        check_free(store, facts, [UNDO])
        bases = load(store, without=gone)  # which may be damaged
        if not force and (recipe := _naming(store, facts, gone)):
            raise UserError(
                f"{recipe} names the task {task!r}: change or delete it first; --force removes the "
                "task all the same"
            )
        rest = [k for k in range(len(facts.tasks)) if k != index]
        for name in (facts.store.folders[k] for k in rest):
            shutil.copytree(store / name, work / name, copy_function=link)

        def but(of: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in of.items() if name != task}

        models = [facts.models[k] for k in rest]
        known = {facts.base_model, *models}
        files = {n: of for n, of in facts.store.files.items() if n.partition("/")[0] != gone}
        tensors = {
            # Of the sum of those that stay nothing is known.
            **{name: bases.tensors[name][:, rest] for name in ("tensor_squares", "tensor_errors")},
            **{
                n: bases.tensors[n][rest][:, rest]
                for n in ("gram_bases", "gram")
                if n in bases.tensors
            },
            "errors": bases.tensors["errors"][:, rest],
        }
        changed = {
            "tasks": [facts.tasks[k] for k in rest],
            "models": models,
            "parameters": {**facts.parameters, "weights": but(facts.parameters["weights"])},
            "norms": but(facts.norms),
            "matrix_norms": but(facts.matrix_norms),
            "fingerprints": {n: v for n, v in facts.fingerprints.items() if n in known},
            "seconds": {"remove": round(time.perf_counter() - started, 3)},
        }
        coded = [vector.coded for vector in _vectors(bases)]
        model_bytes = facts.store.model_bytes * len(rest) // len(bases.tasks)
        stored = {
            "folders": [facts.store.folders[k] for k in rest],
            "files": {name: of for name, of in files.items() if "/" in name},
            "model_bytes": model_bytes,
        }
        _finish(work, store, bases, changed, stored, tensors, coded)
        keep_before(bases, work)
    return load(store)


class _Joining:
    """One task more, from the checks to the new facts."""

    def __init__(
        self,
        bases: Bases,
        inputs: TaskSet,
        quantize: Quantize | None,
        growth: Growth,
        passes: Mapping[str, Any],
        progress: Progress,
    ) -> None:
        self.started = time.perf_counter()
        self.bases, self.inputs, self.growth = bases, inputs, growth
        self.passes, self.progress = passes, progress
        (self.task,), (self.model,), (self.weight,) = inputs.tasks, inputs.models, inputs.weights
        check_new(bases, inputs)
        self.folder = slugs([self.task], [*RESERVED, *bases.facts.store.folders])[0]
        assert bases.path is not None
        check_free(bases.path, bases.facts, [UNDO, self.folder])
        self.items = items = given_items(bases, inputs)
        wanted = quantize or _as_now(bases)
        self.old: list[Codes] = []  # that are written anew
        if wanted.size is not None:
            wanted.weight_bytes([i.numel for i in items], bases.num_bases + 1, self._fixed())
            self.old, self.items = _vectors(bases), with_vectors(bases.vectors, items)
        sums = inputs.sums
        if sums is None:
            sums, _ = gram_pass(items, [self.task], **passes, progress=progress)
        check_size(bases, inputs, sums, growth.doubt)
        self.sums = sums.scaled([self.weight])
        self.norm = float(self.sums.gram[0, 0]) ** 0.5
        self._table = torch.zeros(0)
        made = choose(self.items, self._known(), wanted, self._fixed(), self._measured)
        self.coding = Coding(made.coded, made.shares, [*self.old, None])

    def _known(self) -> Vectors:
        unit = unit_of(self.norm, sum(item.numel for item in self.items))
        shares = torch.ones(len(self.old) + 1, dtype=torch.float64)
        if not self.old:
            return Vectors([self.norm], shares, units=[unit])
        coded = [vector.coded for vector in self.old]
        limits = {i.name: [*(c.widths[i.name] for c in coded), CHOICES[-1]] for i in self.items}
        units = [*(each.unit for each in coded), unit]
        return Vectors([0.0] * len(units), shares, limits, units)

    def _fixed(self) -> int:
        count = self.bases.num_bases + 1
        left_out = self.bases.facts.left_out
        return fixed_bytes(self.items, count, count, left_out, self._config())

    def _config(self) -> Path | None:
        assert self.bases.path is not None
        folder = self.bases.path / self.bases.facts.store.folders[0]
        return folder if (folder / "config.json").is_file() else None

    @property
    def _step(self) -> Linear:
        scales = [*[1.0] * len(self.old), self.weight]
        return Linear.of(torch.diag(torch.tensor(scales, dtype=torch.float64)))

    def _measured(self, units: Sequence[float]) -> Tensor:
        update = self.progress("Errors at each width", sum(item.nbytes for item in self.items))
        found = measure_pass(self.items, self._step, units, **self.passes, progress=update)
        for place, item in enumerate(self.items):
            for k, vector in enumerate(self.old):  # codes that stay as they are lose nothing
                found[place, k, CHOICES.index(vector.coded.widths[item.name])] = 0
        self._table = found
        return found

    def write(self, work: Path, store: Path) -> None:
        """Write the new store into `work`; `store` is where it will lie."""
        bases, coding = self.bases, self.coding
        facts, count = bases.facts, bases.num_bases
        items = [item.coded(coding.widths(item.name)) for item in self.items]
        self._tell()
        check_disk(
            str(work), sum(i.written(i.numel, k) for i in items for k in range(len(i.widths)))
        )
        files: dict[str, FileRecord] = {}
        if not self.old:
            for name in facts.store.folders:
                shutil.copytree(store / name, work / name, copy_function=link)
            files = {name: of for name, of in facts.store.files.items() if "/" in name}
        names = [*(facts.store.folders if self.old else ()), self.folder]
        writers = writers_of(work, names, items, self._config(), coding=coding)
        sink = FoldersSink(writers, coding=coding)
        combine_pass(
            items,
            dict.fromkeys((item.name for item in items), self._step),
            sink,
            coding=coding,
            **self.passes,
            progress=self.progress("Codes", sum(item.nbytes for item in items)),
        )
        files |= finish_vectors(writers, self._config(), first=count - len(self.old))
        folders = [*facts.store.folders, self.folder]
        vectors = [Codes.open(work / name) for name in folders]
        gram = stored_gram(vectors, folders, **self.passes, progress=self.progress)
        found = measured_tensors(sink.measured)
        squares = torch.cat(
            [bases.tensors["tensor_squares"][:, :count], found["tensor_squares"][:, -2:-1]], 1
        )
        errors = bases.tensors["tensor_errors"][:, :count]
        bounds = bases.tensors["errors"]
        if self.old:
            bounds, errors = self._lowered(found["tensor_errors"][:, :count])
        own = found["tensor_errors"][:, -2:-1]
        lost = own.sum(0).sqrt().expand(2, 1)
        tensors = {
            "gram_bases": gram,
            "tensor_squares": squares,
            "tensor_errors": torch.cat([errors, own], 1),
            "errors": torch.cat([bounds, lost], 1),
        }
        inputs, size = self.inputs, self.sums.sizes
        changed = {
            "tasks": [*facts.tasks, self.task],
            "models": [*facts.models, self.model],
            "parameters": {
                **facts.parameters,
                "weights": {**facts.parameters["weights"], self.task: self.weight},
            },
            "norms": {**facts.norms, self.task: self.norm},
            "matrix_norms": {**facts.matrix_norms, self.task: size[-1]},
            "fingerprints": {**facts.fingerprints, **inputs.fingerprints},
            "seconds": {"add": round(time.perf_counter() - self.started, 3)},
        }
        stored = {
            "folders": folders,
            "files": files,
            "model_bytes": facts.store.model_bytes + inputs.model_bytes,
            "added": facts.store.added + 1,
            "base_path": local_path(inputs.base_model) or facts.store.base_path,
        }
        coded = [vector.coded for vector in vectors]
        _finish(work, store, bases, changed, stored, tensors, coded)

    def _lowered(self, more: Tensor) -> tuple[Tensor, Tensor]:
        """`errors` and `tensor_errors` of the tasks that are there once their codes lose `more`
        [items, T], squared."""
        held, count = self.bases.tensors, self.bases.num_bases
        most = (held["tensor_errors"][:, :count].sqrt() + more.sqrt()).square()
        widths = [self.coding.widths(item.name)[:count] for item in self.items]
        gone = torch.tensor([[not width.bits for width in each] for each in widths])
        most = torch.where(gone, held["tensor_squares"][:, :count], most)  # what is zero lost all
        bounds = of_sum(held["errors"], more.sum(0).sqrt().expand(2, -1))
        high = torch.minimum(bounds[1], most.sum(0).sqrt())
        return torch.stack([torch.minimum(bounds[0], high), high]), most

    def _tell(self) -> None:
        """What becomes of the tasks that are there."""
        count, facts = self.bases.num_bases, self.bases.facts
        bits = mean_bits(self.coding.coded, {i.name: i.numel for i in self.items})
        if not self.old:
            self.growth.tell(
                f"{self.task} joins {counted(count, 'task')} at {counted(bits, 'bit')}; they "
                "stay as they are"
            )
            return
        chosen = [[CHOICES.index(b) for b in self.coding.widths(item.name)] for item in self.items]
        lost = self._table.gather(2, torch.tensor(chosen)[:, :, None])[:, :, 0]
        most = torch.cat([self._lowered(lost[:, :count])[0][1], lost[:, count:].sum(0).sqrt()])
        norms = [*(facts.norms[task] for task in facts.tasks), self.norm]
        after = [error / norm for error, norm in zip(most.tolist(), norms, strict=True)]
        told = costs(facts.relative_error, dict(zip([*facts.tasks, self.task], after, strict=True)))
        self.growth.tell(f"all {count + 1} tasks at {counted(bits, 'bit')} in the mean; {told}")


def _finish(
    work: Path,
    store: Path,
    bases: Bases,
    changed: Mapping[str, Any],
    stored: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    coded: Sequence[Coded],
) -> None:
    """Write what a zoo holds beside its codes, in `work`; `store` is where that will lie."""
    facts, count = bases.facts, len(coded)
    one = torch.eye(count, dtype=torch.float64)
    whole = {**tensors, "encoder": one, "decoder": one.clone()}
    if "gram" in whole:
        whole["eigenvalues"] = torch.from_numpy(Gram.of(whole["gram"]).values.copy())
    sizes = whole["gram_bases"].diagonal().clamp(min=0).sqrt()
    errors = reported(changed["tasks"], changed["norms"], whole["errors"], sizes, one)
    record = facts.store.but(**stored, budget=count, basis_weights=[1.0] * count)
    facts = facts.but(
        **changed,
        versions=versions(),
        num_bases=count,
        store=record,
        errors={task: Bounds.model_validate(of) for task, of in errors.items()},
        gram_cached=False,
    )
    numels = {name: bases.vectors[0].tensors[name].numel for name in bases.names}
    finish_store(work, store, of_codes(facts, mean_bits(coded, numels)), whole)


def _vectors(bases: Bases) -> list[Codes]:
    return [vector for vector in bases.vectors if isinstance(vector, Codes)]


def _as_now(bases: Bases) -> Quantize:
    """As many bits for one task more as those there have: the same width, or the same bytes."""
    vectors = _vectors(bases)
    found = {width for vector in vectors for width in vector.coded.widths.values()}
    if len(found) == 1 and (width := found.pop()).bits and width.group == GROUP:
        return Quantize(bits=width.bits)
    numels = [vectors[0].tensors[name].numel for name in bases.names]
    return Quantize(bits=bits_within(numels, sum(v.nbytes for v in vectors) / len(vectors)))


def _naming(store: Path, facts: StoreFacts, folder: str) -> Path | None:
    """A recipe of a user's in a store that lists the vector in `folder`."""
    changed = {Path(name).name for name in edited(store, facts)}
    for file in sorted((store / FOLDER).glob("*.y*ml")):
        if file.name in facts.store.recipes and file.name not in changed:
            continue
        with suppress(OSError, ValueError, yaml.YAMLError):
            if folder in map(_last, _listed(yaml.safe_load(file.read_text(encoding="utf-8")))):
                return file
    return None


def _listed(part: object) -> Iterator[str]:
    """The models that a recipe lists, wherever in it."""
    if isinstance(part, Mapping):
        yield from (str(value) for key, value in part.items() if key == "model")
    inner = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    for each in inner:
        yield from _listed(each)


def _last(path: str) -> str:
    place = Path(path)
    return place.parent.name if place.suffix == ".safetensors" else place.name
