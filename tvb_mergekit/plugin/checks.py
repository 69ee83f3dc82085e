"""`tvb check`: what would stop a recipe, before it costs hours; and what it will take."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tvb_mergekit.building import inspect_inputs
from tvb_mergekit.engine import sketch_of
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import block_budget
from tvb_mergekit.inputs import Inputs
from tvb_mergekit.output import check_output_folder, megabytes
from tvb_mergekit.plugin.inputs import Document, Options, plan_only, read_document, read_inputs
from tvb_mergekit.progress import Progress
from tvb_mergekit.recipe import DEFAULT_RATIO, ratio_to_bases
from tvb_mergekit.stream import Item

SAMPLE = 256 * 2**20  # bytes read to learn the speed of reading
PROCESS = 700 * 2**20  # bytes of a process that has imported torch, transformers and mergekit


def check_recipe(
    path: str,
    options: Options,
    deep: bool,
    out: str | None,
    device: torch.device,
    progress: Progress,
) -> Iterator[str]:
    """Lines about a recipe in which nothing was found that would stop it.

    Args:
        deep: read all tensors as well.
        out: an output folder to check.

    Raises:
        UserError, MergeRefused: the first thing that would stop it.
    """
    document = read_document(path)
    recipe = document.recipe
    if out is not None:
        check_output_folder(out)
    if recipe.store is not None:
        yield from _check_store_recipe(document, options)
        return
    inputs = read_inputs(document, options)
    yield f"{path}: {recipe.settings.method}, {len(recipe.tasks)} tasks over {recipe.base}"
    for task, model, weight in zip(inputs.tasks, inputs.models, inputs.weights, strict=True):
        yield f"  {task}: {model}" + ("" if weight == 1 else f" (weight {weight:g})")
    count = sum(item.numel for item in inputs.items)
    yield f"{len(inputs.items)} tensors take part, {count:,} parameters"
    for reason, names in _by_reason(inputs).items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{len(names)} left to the base, {reason}: {', '.join(names[:3])}{more}"
    yield from _estimates(inputs, options, out)
    if not deep:
        yield "The headers are in order; --deep reads the tensors too: NaN, zero task vectors"
        return
    facts, _ = inspect_inputs(inputs, device, progress)
    count, energy = facts["num_bases"], 100 * facts["retained_energy"]
    yield f"All tensors are finite; {count} bases would retain {energy:.2f} % of the energy"


def _check_store_recipe(document: Document, options: Options) -> Iterator[str]:
    recipe = document.recipe
    assert recipe.store is not None
    if not document.raw:
        plan_only(document, options)  # compares checksums and the base on the way
    bases = recipe.store.bases
    yield (
        f"{recipe.settings.method} over {bases.num_bases} bases of {recipe.store.path} for "
        f"{len(bases.tasks)} tasks; its files and the base are those that it was built with"
    )


def _by_reason(inputs: Inputs) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in inputs.left_out.items():
        found.setdefault(reason, []).append(name)
    return found


def _estimates(inputs: Inputs, options: Options, out: str | None) -> Iterator[str]:
    settings, tasks = inputs.settings, len(inputs.tasks)
    bases = settings.num_bases or ratio_to_bases(settings.basis_ratio or DEFAULT_RATIO, tasks)
    exactly = "up to " if settings.energy is not None else ""
    bases = tasks if settings.basis == "none" or settings.energy is not None else bases
    merged = inputs.base.nbytes
    stored = 4 * bases * sum(item.numel for item in inputs.items)
    where = Path(os.path.abspath(out or "."))
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    yield (
        f"Disk: a merged model {megabytes(merged)}, a store of {exactly}{bases} bases "
        f"{megabytes(stored)} in float32, half of it in 16 bits; {megabytes(free)} are free in "
        f"{where}"
    )
    if free < merged:
        raise UserError(
            f"{where}: {megabytes(free)} free, a merged model takes {megabytes(merged)}; free some "
            "disk, or name another place with --out"
        )
    memory = PROCESS + 2 * block_budget()
    yield f"Memory: about {megabytes(memory)} for a build, whatever the number of models"
    speed = _speed(inputs.items)
    if speed is None:
        yield "Time: adapters are read at once; the bases are limited by writing them"
        return
    passes = 2 if sketch_of(settings, tasks) is None else 1
    seconds = passes * inputs.nbytes / speed
    yield (
        f"Time: {passes} x {megabytes(inputs.nbytes)} to read, at {megabytes(int(speed))}/s as "
        f"measured now on a sample: about {_duration(seconds)}, and the time to write"
    )


def _speed(items: object) -> float | None:
    """Bytes per second of reading a sample of the models in their order, or None without files."""
    assert isinstance(items, list | tuple)
    whole: list[Item] = [item for item in items if item.base is not None]
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
