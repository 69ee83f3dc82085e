"""`tvb check`: what would stop a recipe, before it costs hours; and what it will take."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tvb_mergekit.basis import Basis
from tvb_mergekit.building import inspect_inputs
from tvb_mergekit.checkpoints import Checkpoint
from tvb_mergekit.engine import most_bases, sketch_of
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import count_not_finite, not_finite
from tvb_mergekit.inputs import Inputs
from tvb_mergekit.layout import MEMORY
from tvb_mergekit.output import check_disk, check_output_folder, listed, megabytes
from tvb_mergekit.plugin.files import input_folders
from tvb_mergekit.plugin.inputs import (
    Document,
    Options,
    by_factors,
    plan_only,
    read_document,
    read_inputs,
)
from tvb_mergekit.plugin.planning import Plan
from tvb_mergekit.plugin.sources import Changed
from tvb_mergekit.plugin.tasks import torch_dtype
from tvb_mergekit.progress import Progress
from tvb_mergekit.recipe import Settings
from tvb_mergekit.store import dtype_name
from tvb_mergekit.store import load as load_store
from tvb_mergekit.stream import Item

SAMPLE = 256 * 2**20  # bytes read to learn the speed of reading
PROCESS = 400_000_000  # bytes of a process that has imported torch, transformers and mergekit
DEEPER = "The headers are in order; --deep reads the tensors too: NaN, zero task vectors"


def check_recipe(
    path: str,
    options: Options,
    deep: bool,
    out: str | None,
    device: torch.device,
    progress: Progress,
) -> Iterator[str]:
    """Lines about a recipe in which nothing was found that would stop a merge.

    A merge may do more than a build (slices, another model's tokenizer): what stops a build alone
    is one of the lines.

    Args:
        deep: read all tensors as well.
        out: an output folder to check.

    Raises:
        UserError, MergeRefused: the first thing that would stop it.
    """
    document = read_document(path)
    recipe = document.recipe
    if out is not None:
        check_output_folder(out, input_folders(recipe))
    if recipe.store is not None:
        yield from _check_store_recipe(document, options)
        return
    try:
        inputs = read_inputs(document, options)
    except UserError as error:
        if document.raw or by_factors(document, options):
            raise
        plan = plan_only(document, options)  # what stops a merge is said here
        if not plan.counted:
            raise
        yield from _listing(path, document)
        yield from _check_plan(plan, deep, out)
        yield f"Not for tvb build: {error}"
        return
    yield from _listing(path, document)
    yield from _taking_part(inputs)
    yield from _disk(inputs.settings, len(inputs.tasks), _merged_bytes(inputs), inputs, out)
    yield from _cost(inputs)
    if document.raw:
        yield from _raw_notes(inputs)
    if inputs.adapters:
        yield (
            "mergekit-yaml merges adapters with --lora-merge-cache DIR, where each takes "
            f"{megabytes(inputs.base.nbytes)}; tvb build takes them as they are"
        )
    if not deep:
        yield DEEPER
        return
    _check_kept(inputs)
    facts, _ = inspect_inputs(inputs, device, progress)
    yield _verdict(facts["num_bases"], facts["retained_energy"])


def _listing(path: str, document: Document) -> Iterator[str]:
    recipe = document.recipe
    count = f"{len(recipe.tasks)} task" + ("s" if len(recipe.tasks) > 1 else "")
    yield f"{path}: {recipe.settings.method}, {count} over {recipe.base}"
    for task, model, weight in zip(recipe.tasks, recipe.models, recipe.weights, strict=True):
        yield f"  {task}: {model}" + ("" if weight == 1 else f" (weight {weight:g})")


def _verdict(count: int, energy: float) -> str:
    would = "1 basis would" if count == 1 else f"{count} bases would"
    return f"All tensors are finite; {would} retain {100 * energy:.2f} % of the energy"


def _check_plan(plan: Plan, deep: bool, out: str | None) -> Iterator[str]:
    """A recipe of which only mergekit's planner knows the tensors."""
    taking = plan.counted.values()
    count = sum(planned.numel for planned in taking)
    more = any(isinstance(planned.whole, Changed) for planned in taking)  # sized by the tokenizer
    yield f"{len(taking)} tensors take part, {'over ' * more}{count:,} parameters"
    yield from _kept(plan.left_out)
    settings = plan.recipe.settings
    yield from _disk(settings, len(plan.recipe.tasks), plan.output_bytes, None, out)
    nbytes, passes = sum(planned.nbytes for planned in taking), _passes(settings)
    yield f"A merge reads {passes} x {megabytes(nbytes)}"
    if not deep:
        yield DEEPER
        return
    basis = plan.build()
    assert isinstance(basis, Basis)
    yield _verdict(basis.num_bases, basis.encoding.retained_energy)


def _check_kept(inputs: Inputs) -> None:
    """A merge writes the tensors that stay the base's, too, and refuses what is not finite."""
    for name, info in inputs.base.tensors.items():
        if name in inputs.left_out and info.dtype.is_floating_point:
            tensor = inputs.base.tensor(name)
            if any(count_not_finite(tensor)):
                raise UserError(not_finite(name, tensor))


def _raw_notes(inputs: Inputs) -> Iterator[str]:
    every = [inputs.base, *inputs.sources]
    names = {name for weights in every for name in weights.tensors}
    some = sorted(n for n in names if not all(n in weights.tensors for weights in every))
    if some:
        yield (
            f"mergekit-pytorch wants --tensor-intersection or --tensor-union: {listed(some)} not "
            "in all files"
        )


def _check_store_recipe(document: Document, options: Options) -> Iterator[str]:
    recipe = document.recipe
    assert recipe.store is not None
    if document.raw:
        base = Checkpoint.open(recipe.base.model.path)
        load_store(recipe.store.path).check_base(base, str(recipe.base))
    else:
        plan_only(document, options)  # compares checksums and the base on the way
    bases = recipe.store.bases
    count = f"{bases.num_bases} basis" if bases.num_bases == 1 else f"{bases.num_bases} bases"
    tasks = "1 task" if len(bases.tasks) == 1 else f"{len(bases.tasks)} tasks"
    yield (
        f"{recipe.settings.method} over {count} of {recipe.store.path} for {tasks}; its files and "
        "the base are those that it was built with"
    )


def _taking_part(inputs: Inputs) -> Iterator[str]:
    count = sum(item.numel for item in inputs.items)
    yield f"{len(inputs.items)} tensors take part, {count:,} parameters"
    yield from _kept(inputs.left_out)


def _kept(left_out: Mapping[str, str]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        found.setdefault(reason, []).append(name)
    for reason, names in found.items():
        yield f"{len(names)} left to the base, {reason}: {listed(names)}"


def _merged_bytes(inputs: Inputs) -> int:
    """Of the merged model, in the recipe's dtype."""
    dtype = torch_dtype(inputs.dtype)
    total = 0
    for info in inputs.base.tensors.values():
        if info.alias_of is None:
            out = dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
            total += info.numel * out.itemsize
    return total


def _disk(
    settings: Settings, tasks: int, merged: int, inputs: Inputs | None, out: str | None
) -> Iterator[str]:
    where = Path(os.path.abspath(out or "."))
    while not where.exists():
        where = where.parent
    text = f"Disk: a merged model {megabytes(merged)}"
    if inputs is not None:
        dtype = inputs.own_dtype
        bases = most_bases(settings, tasks)
        upto = "up to " if settings.energy is not None else ""
        vectors = bases + (settings.basis == "pca")  # and the mean
        stored = dtype.itemsize * vectors * sum(item.numel for item in inputs.items)
        noun = "basis" if bases == 1 else "bases"
        text += f", a store of {upto}{bases} {noun} {megabytes(stored)} in {dtype_name(dtype)}"
        text += ", half of it in 16 bits" if dtype == torch.float32 else ""
    yield f"{text}; {megabytes(shutil.disk_usage(where).free)} are free in {where}"
    if out is not None:
        if not os.access(where, os.W_OK):
            raise UserError(f"cannot make the output folder {out}: Permission denied ({where})")
        check_disk(out, merged)


def _passes(settings: Settings) -> int:
    return 3 if settings.method == "basis_ties" and settings.trim == "model" else 2


def _cost(inputs: Inputs) -> Iterator[str]:
    memory = megabytes(PROCESS + MEMORY)
    yield f"Memory: at most {memory} for a build, whatever the number of models, or see --memory"
    speed = _speed(inputs.items)
    if speed is None:
        yield "Time: adapters are read at once; the bases are limited by writing them"
        return
    sketched = sketch_of(inputs.settings, len(inputs.tasks)) is not None
    passes = 1 if sketched else _passes(inputs.settings)
    seconds = passes * inputs.nbytes / speed
    yield (
        f"Time: {passes} x {megabytes(inputs.nbytes)} to read, at {megabytes(int(speed))}/s as "
        f"measured now on a sample: about {_duration(seconds)}, and the time to write"
    )


def _speed(items: Sequence[Item]) -> float | None:
    """Bytes per second of reading a sample of the models in their order, or None without files."""
    whole = [item for item in items if item.base is not None]
    read, started = 0, time.perf_counter()
    for item in whole:
        for part in item.parts:
            count = min(item.numel, 2**22)
            part.read(0, count, torch.empty(count, dtype=part.dtype))
            read += count * part.dtype.itemsize
        if read >= SAMPLE:
            break
    return read / max(time.perf_counter() - started, 1e-9) if read else None


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
