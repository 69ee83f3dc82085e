"""`tvb check`: problems and costs of a recipe, before a merge or a build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from mergekit.common import dtype_from_name

from tvb_mergekit.core.basis import Basis
from tvb_mergekit.core.encoders import known_before
from tvb_mergekit.core.gram import check_copied
from tvb_mergekit.core.settings import Settings
from tvb_mergekit.errors import UserError, counted, listed, megabytes
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import Options, by_factors, read_inputs
from tvb_mergekit.plugin.planner import input_folders, plan_only
from tvb_mergekit.store.build import inspect_inputs
from tvb_mergekit.store.store import check as check_store
from tvb_mergekit.store.store import dtype_name
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import MEMORY
from tvb_mergekit.tensors.matrices import count_matrices, largest_matrix
from tvb_mergekit.tensors.output import check_disk, check_output_folder, existing
from tvb_mergekit.tensors.passes import LEAST
from tvb_mergekit.tensors.stream import Item
from tvb_mergekit.tensors.taskset import TaskSet

PROCESS = 400_000_000  # bytes of a process that has imported torch, transformers and mergekit


def check_recipe(
    path: str, document: Document, options: Options, deep: bool, out: str | None, engine: Engine
) -> Iterator[str]:
    """Lines about a recipe without problems that would stop a merge.

    A problem that only stops a build (slices, another model's tokenizer) is one of the lines.

    Args:
        deep: read all tensors as well.
        out: an output folder to check.

    Raises:
        UserError, MergeRefused: the first problem.
    """
    recipe = document.recipe
    if out is not None:
        check_output_folder(out, input_folders(recipe))
    if recipe.store is not None:
        yield from _check_store_recipe(document, options)
        return
    plan = refusal = None
    try:
        inputs = read_inputs(document, options)
    except UserError as error:
        if by_factors(document, options):
            raise
        plan, refusal = plan_only(document, options), error  # raises if a merge is refused
        if not plan.tasks.items:
            raise
    tasks = counted(len(recipe.tasks), "task")
    yield f"{path}: {recipe.settings.method}, {tasks} over {recipe.base}"
    for task, model, weight in zip(recipe.tasks, recipe.models, recipe.weights, strict=True):
        yield f"  {task}: {model}" + ("" if weight == 1 else f" (weight {weight:g})")
    if plan is not None:
        yield from _costs(plan.tasks, plan.output_bytes, out)
        if deep:
            basis = plan.build()
            assert isinstance(basis, Basis)
            yield _verdict(basis.num_bases, basis.encoding.retained_energy)
        yield f"Not for tvb build: {refusal}"
    else:
        yield from _check_inputs(inputs, out)
        if deep:
            _check_left_out(inputs)
            facts, _ = inspect_inputs(inputs, engine)
            yield _verdict(facts.num_bases, facts.retained_energy or 0.0)
    if not deep:
        yield "The headers are in order; --deep reads the tensors too: NaN, zero task vectors"


def _check_inputs(inputs: TaskSet, out: str | None) -> Iterator[str]:
    settings, dtype = inputs.settings, inputs.own_dtype
    bases = settings.bases_of(len(inputs.tasks))
    vectors = bases + (settings.basis == "pca")  # and the mean
    nbytes = dtype.itemsize * vectors * sum(item.numel for item in inputs.items)
    stored = f"{counted(bases, 'basis')} {megabytes(nbytes)} in {dtype_name(dtype)}"
    yield from _costs(inputs, _merged_bytes(inputs), out, f", a store of {stored}")
    if inputs.adapters:
        yield (
            "mergekit-yaml merges adapters with --lora-merge-cache DIR, where each takes "
            f"{megabytes(inputs.base.nbytes)} in the base's dtype; tvb build takes them as they are"
        )


def _costs(tasks: TaskSet, merged: int, out: str | None, store: str = "") -> Iterator[str]:
    """The tensors, and the disk, time and memory of a merge; `store` for those of a build."""
    settings, items = tasks.settings, tasks.items
    numel = sum(item.numel for item in items)
    yield f"{counted(len(items), 'tensor')} take part, {numel:,} parameters"
    reasons: dict[str, list[str]] = {}
    for name, reason in tasks.left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        yield f"{len(names)} left to the base, {reason}: {listed(names)}"
    where = existing(Path(os.path.abspath(out or ".")))
    if out is not None:
        check_disk(out, merged)
    free = megabytes(shutil.disk_usage(where).free)
    yield f"Disk: a merged model {megabytes(merged)}{store}; {free} are free in {where}"
    yield (
        f"Time of a merge: that of reading {_passes(tasks)} x {megabytes(tasks.nbytes)}, and of "
        f"writing. Memory: at most {megabytes(PROCESS + MEMORY)} in tvb's commands, unless "
        "--memory says otherwise"
    )
    yield from _matrices(settings, items, settings.bases_of(len(tasks.tasks)))


def _passes(tasks: TaskSet) -> int:
    """How often a merge without a cached Gram matrix reads the models."""
    settings = tasks.settings
    gram = tasks.sums is None and not known_before(settings)
    return 1 + gram + (settings.method == "basis_ties")


def _matrices(settings: Settings, items: Sequence[Item], bases: int) -> Iterator[str]:
    if largest := largest_matrix(settings, items, bases):
        needed = f"--memory {-(-(largest.nbytes + LEAST) // 10**8) / 10:g}GB"
        more = f": tvb's commands need {needed}" if largest.nbytes + LEAST > MEMORY else ""
        count = sum(count_matrices(settings, item, bases) for item in items)
        yield (
            f"{settings.method} merges {counted(count, 'matrix')} one by one, which takes most of "
            f"the time; {largest} of memory{more}"
        )


def _verdict(count: int, energy: float) -> str:
    bases = counted(count, "basis")
    return f"All tensors are finite; {bases} would retain {100 * energy:.2f} % of the energy"


def _check_left_out(inputs: TaskSet) -> None:
    """Raise UserError if a tensor of the base that a merge copies is not finite."""
    for name, info in inputs.base.tensors.items():
        if name in inputs.left_out and info.dtype.is_floating_point:
            check_copied(name, inputs.base.tensor(name), inputs.settings.excludes(name))


def _check_store_recipe(document: Document, options: Options) -> Iterator[str]:
    recipe = document.recipe
    assert recipe.store is not None
    bases = check_store(recipe.store.place)
    plan = plan_only(document, options)  # compares the base
    held = f"{counted(bases.num_bases, 'basis')} of {bases.place}"
    over = f"{recipe.settings.method} over {held} for {counted(len(bases.tasks), 'task')}"
    yield f"{over}; its files and the base are those that it was built with"
    yield from _matrices(recipe.settings, plan.tasks.items, bases.num_bases)


def _merged_bytes(inputs: TaskSet) -> int:
    dtype = dtype_from_name(inputs.dtype)
    own = [info for info in inputs.base.tensors.values() if info.alias_of is None]
    dtypes = [dtype if dtype and i.dtype.is_floating_point else i.dtype for i in own]
    return sum(info.numel * out.itemsize for info, out in zip(own, dtypes, strict=True))
