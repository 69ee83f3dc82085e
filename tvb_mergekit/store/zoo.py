"""A zoo, the store of all task vectors as codes: one more task, or one less."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.merge import Linear
from tvb_mergekit.core.online import reported
from tvb_mergekit.core.quantize import GROUP, bits_within
from tvb_mergekit.errors import UserError, counted
from tvb_mergekit.store import addition
from tvb_mergekit.store.addition import Growth
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
from tvb_mergekit.store.build import finish_store
from tvb_mergekit.store.facts import Bounds
from tvb_mergekit.store.report import versions
from tvb_mergekit.store.store import Bases, is_zoo, load, read_store_facts, staged
from tvb_mergekit.store.undo import UNDO, check_free, keep_previous, link_vectors
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.passes import measure_pass
from tvb_mergekit.tensors.quantized import Codes
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.taskset import TaskSet


def join_zoo(
    work: Path,
    store: Path,
    bases: Bases,
    inputs: TaskSet,
    growth: Growth,
    engine: Engine,
) -> None:
    """Write a zoo with the new task of `inputs` into `work`; the zoo will lie at `store`."""
    started, facts, count = time.perf_counter(), bases.facts, bases.num_bases
    folder = slugs(inputs.tasks, [*RESERVED, *facts.store.folders])[0]
    check_free(store, facts, [UNDO, folder])
    items = addition.given_items(bases, inputs)
    sums = addition.new_sums(bases, inputs, items, growth.doubt, engine)
    matrix = torch.tensor([inputs.weights], dtype=torch.float64)

    def measure(units: Sequence[float]) -> Tensor:
        return measure_pass(items, Linear.of(matrix), units, engine)

    norm, one = float(sums.gram[0, 0]) ** 0.5, torch.ones(1, dtype=torch.float64)
    coding = choose(items, [norm], one, growth.bits or _as_now(bases), measure)
    bits = mean_bits(coding.coded, {item.name: item.numel for item in items})
    growth.tell(
        f"{inputs.tasks[0]} joins {counted(count, 'task')} at {counted(bits, 'bit')}; they stay as "
        "they are"
    )
    files = link_vectors(bases, work)
    coded = [item.coded(coding.widths(item.name)) for item in items]
    found, measured = addition.write_vectors(
        [work / folder], coded, matrix, addition.config_of(bases), count, engine, coding
    )
    # The last column would be of the sum of all tasks, which nobody has measured.
    own = {name: of[:, :1] for name, of in measured_tensors(measured).items()}
    own["errors"] = own["tensor_errors"].sum(0).sqrt().expand(2, 1)
    folders = [*facts.store.folders, folder]
    vectors = [Codes.open(work / name) for name in folders]
    tensors = {name: torch.cat([bases.tensors[name][:, :count], own[name]], 1) for name in own}
    tensors["gram_bases"] = stored_gram(vectors, folders, engine)
    changed, stored = addition.grown_facts(bases, inputs, sums, started)
    stored |= {"folders": folders, "files": {**files, **found}}
    _finish(work, store, bases, vectors, changed, stored, tensors)


def _as_now(bases: Bases) -> Quantize:
    """As many bits for the new task as the others have: the same width, or the same bytes."""
    vectors = [vector for vector in bases.vectors if isinstance(vector, Codes)]
    found = {width for vector in vectors for width in vector.coded.widths.values()}
    if len(found) == 1 and (width := found.pop()).bits and width.group == GROUP:
        return Quantize(bits=width.bits)
    numels = [vectors[0].tensors[name].numel for name in bases.names]
    return Quantize(bits=bits_within(numels, sum(v.nbytes for v in vectors) / len(vectors)))


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
        check_free(store, facts, [UNDO])
        bases = load(store, without=facts.store.folders[index])  # which may be damaged
        _write_rest(work, store, bases, index, started)
        keep_previous(bases, work)
    return load(store)


def _write_rest(work: Path, store: Path, bases: Bases, index: int, started: float) -> None:
    """Write a zoo without the task at `index` into `work`; the zoo will lie at `store`."""
    facts, tensors = bases.facts, bases.tensors
    rest = [k for k in range(len(facts.tasks)) if k != index]

    def others(of: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in of.items() if name != facts.tasks[index]}

    columns = {n: tensors[n][:, rest] for n in ("tensor_squares", "tensor_errors", "errors")}
    grams = {n: tensors[n][rest][:, rest] for n in ("gram_bases", "gram") if n in tensors}
    models = [facts.models[k] for k in rest]
    known = {facts.base_model, *models}
    changed = {
        "versions": versions(),
        "tasks": [facts.tasks[k] for k in rest],
        "models": models,
        "parameters": {**facts.parameters, "weights": others(facts.parameters["weights"])},
        "norms": others(facts.norms),
        "matrix_norms": others(facts.matrix_norms),
        "fingerprints": {n: v for n, v in facts.fingerprints.items() if n in known},
        "gram_cached": False,
        "seconds": {"remove": round(time.perf_counter() - started, 3)},
    }
    stored = {
        "folders": [facts.store.folders[k] for k in rest],
        "files": link_vectors(bases, work, without=facts.store.folders[index]),
        "model_bytes": facts.store.model_bytes * len(rest) // len(facts.tasks),
    }
    _finish(work, store, bases, bases.vectors, changed, stored, {**columns, **grams})


def _finish(
    work: Path,
    store: Path,
    bases: Bases,
    vectors: Sequence[Weights],
    changed: Mapping[str, Any],
    stored: Mapping[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """Write basis.json, basis.safetensors and the recipes of a changed zoo into `work`."""
    coded = [vector.coded for vector in vectors if isinstance(vector, Codes)]
    count, one = len(coded), torch.eye(len(coded), dtype=torch.float64)
    tensors |= {"encoder": one, "decoder": one.clone()}
    if "gram" in tensors:
        tensors["eigenvalues"] = torch.from_numpy(Gram.of(tensors["gram"]).values.copy())
    sizes = tensors["gram_bases"].diagonal().clamp(min=0).sqrt()
    errors = reported(changed["tasks"], changed["norms"], tensors["errors"], sizes, one)
    facts = bases.facts.but(
        **changed,
        num_bases=count,
        store=bases.facts.store.but(**stored, budget=count, basis_weights=[1.0] * count),
        errors={task: Bounds.model_validate(of) for task, of in errors.items()},
    )
    numels = {name: vectors[0].tensors[name].numel for name in bases.names}
    finish_store(work, store, of_codes(facts, mean_bits(coded, numels)), tensors)
