"""A zoo, the store of all task vectors as codes: one more task, or one less.

Both change a store as `tvb add` does: beside it, in one rename, with what was before in `undo`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.gram import block_budget
from tvb_mergekit.core.merge import Linear
from tvb_mergekit.core.online import reported
from tvb_mergekit.core.quantize import GROUP, bits_within
from tvb_mergekit.errors import UserError, counted
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.store.add import (
    UNDO,
    Growth,
    check_free,
    check_new,
    check_size,
    given_items,
    keep_before,
    link,
)
from tvb_mergekit.store.bits import (
    RESERVED,
    Quantize,
    choose,
    mean_bits,
    measured_tensors,
    of_codes,
    slugs,
    stored_gram,
)
from tvb_mergekit.store.build import finish_store, finish_vectors, writers_of
from tvb_mergekit.store.facts import Bounds
from tvb_mergekit.store.inputs import Inputs
from tvb_mergekit.store.report import local_path, versions
from tvb_mergekit.store.store import Bases, is_zoo, load, read_store_facts, staged
from tvb_mergekit.tensors.output import check_disk
from tvb_mergekit.tensors.passes import combine_pass, gram_pass, measure_pass
from tvb_mergekit.tensors.quantized import Coded, Codes
from tvb_mergekit.tensors.writing import FoldersSink

CPU = torch.device("cpu")


def add_to_zoo(
    path: str | os.PathLike[str],
    inputs: Inputs,
    quantize: Quantize | None,
    growth: Growth,
    *,
    device: torch.device = CPU,
    budget: int | None = None,
    progress: Progress = silent,
) -> Bases:
    """Add the one model of `inputs` to the zoo at `path`.

    Args:
        quantize: the bits of the new task; None: as many as the tasks that are there have.
        budget: bytes that may be allocated; None: TVB_MERGEKIT_BLOCK_MB.

    Raises:
        UserError: another base, tensors that differ from the zoo's, a task name that is there,
            no room, a doubt. The store is as it was then.
    """
    store = Path(os.path.realpath(path))
    with staged(store) as work:
        bases = load(store)
        passes = {"devices": [device], "budget": budget or block_budget()}
        _Joining(bases, inputs, quantize, growth, passes, progress).write(work, store)
        keep_before(bases, work)
    return load(store)


def remove_task(path: str | os.PathLike[str], task: str) -> Bases:
    """Take a task out of the zoo at `path`.

    Raises:
        UserError: no zoo, no such task, or the only one.
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
    """One more task, from the checks to the new facts."""

    def __init__(
        self,
        bases: Bases,
        inputs: Inputs,
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
        sums = inputs.sums
        if sums is None:
            sums, _ = gram_pass(lambda: items, [self.task], **passes, progress=progress)
        check_size(bases, inputs, sums, growth.doubt)
        self.sums = sums.scaled([self.weight])
        self.norm = float(self.sums.gram[0, 0]) ** 0.5
        self.step = Linear.of(torch.tensor([[self.weight]], dtype=torch.float64))
        wanted, shares = quantize or _as_now(bases), torch.ones(1, dtype=torch.float64)
        self.coding = choose(items, [self.norm], shares, wanted, self._measured)

    def _measured(self, units: Sequence[float]) -> Tensor:
        update = self.progress("Errors at each width", sum(item.nbytes for item in self.items))
        return measure_pass(self.items, self.step, units, **self.passes, progress=update)

    def write(self, work: Path, store: Path) -> None:
        """Write the new store into `work`; it will lie at `store`."""
        bases, coding, inputs = self.bases, self.coding, self.inputs
        facts, count = bases.facts, bases.num_bases
        bits = mean_bits(coding.coded, {item.name: item.numel for item in self.items})
        self.growth.tell(
            f"{self.task} joins {counted(count, 'task')} at {counted(bits, 'bit')}; they stay as "
            "they are"
        )
        items = [item.coded(coding.widths(item.name)) for item in self.items]
        check_disk(str(work), sum(item.written(item.numel, 0) for item in items))
        assert bases.path is not None
        for name in facts.store.folders:
            shutil.copytree(store / name, work / name, copy_function=link)
        files = {name: of for name, of in facts.store.files.items() if "/" in name}
        first = bases.path / facts.store.folders[0]
        config = first if (first / "config.json").is_file() else None
        writers = writers_of(work, [self.folder], items, config, coding=coding)
        sink = FoldersSink(writers, coding=coding)
        combine_pass(
            items,
            dict.fromkeys((item.name for item in items), self.step),
            sink,
            coding=coding,
            **self.passes,
            progress=self.progress("Codes", sum(item.nbytes for item in items)),
        )
        files |= finish_vectors(writers, config, first=count)
        folders = [*facts.store.folders, self.folder]
        vectors = [Codes.open(work / name) for name in folders]
        gram = stored_gram(vectors, folders, **self.passes, progress=self.progress)
        # Nothing is known of the sum of all tasks, the last column.
        own = {n: of[:, :1] for n, of in measured_tensors(sink.measured).items()}
        own["errors"] = own["tensor_errors"].sum(0).sqrt().expand(2, 1)
        tensors = {name: torch.cat([bases.tensors[name][:, :count], own[name]], 1) for name in own}
        changed = {
            "tasks": [*facts.tasks, self.task],
            "models": [*facts.models, self.model],
            "parameters": {
                **facts.parameters,
                "weights": {**facts.parameters["weights"], self.task: self.weight},
            },
            "norms": {**facts.norms, self.task: self.norm},
            "matrix_norms": {**facts.matrix_norms, self.task: self.sums.sizes[-1]},
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
        _finish(work, store, bases, changed, stored, {**tensors, "gram_bases": gram}, coded)


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
