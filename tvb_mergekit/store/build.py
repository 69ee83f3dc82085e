"""A basis store of T models: the Gram matrix in one pass, the M bases in a second.

The store is written in STORE.partial and renamed when it is complete. `resume` continues an
interrupted build with its Gram matrix and every finished tensor. Each of several processes (see
`ranks`) reads and writes its share.

No write waits for the disk, because nothing is deleted. If a power cut damages a file, its checksum
differs from that in basis.json or in the journal of an interrupted build.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tvb_mergekit.atomic import check_interrupted, is_left_over, next_to, write_file
from tvb_mergekit.core.basis import Basis, warnings
from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.errors import UserError, megabytes
from tvb_mergekit.store import forms
from tvb_mergekit.store.export import write_originals
from tvb_mergekit.store.facts import Facts
from tvb_mergekit.store.forms import check_kept, keeping_of
from tvb_mergekit.store.report import tensors_of
from tvb_mergekit.store.store import Bases, dtype_name
from tvb_mergekit.store.vectors import (
    Vectors,
    dense_vectors,
    facts_of,
    folders_of,
    history_of,
    in_memory,
    numbers_of_bases,
    write_vectors,
)
from tvb_mergekit.store.writer import StoreWriter, check_movable, lock
from tvb_mergekit.tensors import cache, ranks
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.merging import encoded_by, sums_of
from tvb_mergekit.tensors.output import check_new_folder
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)

Warn = Callable[[str], object]
# In STORE.partial: a checksum of the inputs, their Gram matrix, the finished tensors.
STATE, SUMS, JOURNAL = forms.WORKING


def build_store(
    inputs: TaskSet,
    out: str | os.PathLike[str],
    engine: Engine = Engine(),
    *,
    dtype: torch.dtype = torch.float32,
    keep: float = 0,
    resume: bool = False,
    warn: Warn = LOG.warning,
) -> Bases:
    """Write the bases of `inputs` as the store `out`.

    Args:
        dtype: float32, bfloat16 or float16, of the stored bases.
        keep: Store this share of the entries of each task vector instead, exact. With 1 these are
            the models themselves, to the bit.
        resume: Continue `out`.partial if it exists.
        warn: Called with each doubt about a model, one line each.

    Raises:
        UserError: The inputs are bad, `out` exists, the disk is full, or the interrupted build was
            begun with other inputs.
    """
    dtype_name(dtype)
    world, out = ranks.world(), Path(os.path.realpath(out))
    world.first(lambda: check_interrupted(out))
    check_movable(out)
    if keep:
        check_kept(inputs, keep)
    with ExitStack() as stack:
        if world.leads:
            stack.callback(lock(out).release)
        world.agree([item.name for item in inputs.items])
        unfinished = _Unfinished(inputs, out, dtype, keep, resume)
        started = time.perf_counter()
        known = world.share(unfinished.sums)
        sums = known or sums_of(inputs, engine)
        summed = time.perf_counter()
        basis = world.share(lambda: _basis(inputs, sums, warn))
        if world.leads:
            unfinished.begin(basis, sums)
        encoded = time.perf_counter()
        partial, folders = unfinished.folder, folders_of(basis)
        world.check_shared(partial)
        items = [replace(item, out=dtype) for item in inputs.items]
        coding = keeping_of(inputs, keep) if keep else None
        if coding:
            folders = forms.slugs(inputs.tasks, forms.RESERVED)
        stored = len(folders) * sum(item.numel * item.out.itemsize for item in items)
        if stored > inputs.model_bytes and coding is None:
            more = megabytes(stored - inputs.model_bytes)
            warn(f"the store will take {more} more than the models: take fewer bases or a narrower "
                 "--dtype")  # fmt: skip
        files, measured = write_vectors(
            partial,
            folders,
            items,
            encoder_matrix(basis),
            inputs.folder,
            engine,
            coding=coding,
            journals=unfinished.journals,
        )
        basis.seconds = {
            "gram": summed - started,
            "encode": encoded - summed,
            "write": time.perf_counter() - encoded,
        }
        if coding is None:
            vectors = dense_vectors(inputs, basis, dtype, files)
        else:
            numbers = _numbers(inputs, basis, measured, keep)
            if keep == 1:
                own = dtype_name(inputs.own_dtype)
                vectors = Vectors(numbers, folders, files, own, "lossless")
            else:
                vectors = Vectors(numbers, folders, files, "float32", "sampled", keep)
        world.dismiss()
        if keep == 1:
            rest = write_originals(partial, folders, inputs, engine)
            vectors = replace(vectors, files={**files, **rest})
        inputs.check_unchanged()
        bases = StoreWriter(out, partial).commit(vectors, history_of(inputs, basis))
        unfinished.forget()
        return bases


def build_in_memory(
    inputs: TaskSet,
    engine: Engine = Engine(),
    *,
    dtype: torch.dtype = torch.float32,
    warn: Warn = LOG.warning,
) -> Bases:
    """Build the bases of `inputs` as state dicts."""
    dtype_name(dtype)
    basis = _basis(inputs, sums_of(inputs, engine), warn)
    items = [replace(item, out=dtype) for item in inputs.items]
    vectors, history = dense_vectors(inputs, basis, dtype), history_of(inputs, basis)
    return in_memory(vectors, history, items, encoder_matrix(basis), engine)


def inspect_inputs(inputs: TaskSet, engine: Engine = Engine()) -> tuple[Facts, dict[str, Tensor]]:
    """basis.json and basis.safetensors of a build in float32, without building."""
    basis = _basis(inputs, sums_of(inputs, engine), LOG.warning)
    vectors = dense_vectors(inputs, basis, torch.float32)
    tensors = {**vectors.tensors, **tensors_of(basis)}
    return facts_of(vectors, history_of(inputs, basis)).of_merge(), tensors


def _basis(inputs: TaskSet, sums: GramSums, warn: Warn) -> Basis:
    basis = encoded_by(inputs, sums)
    for line in warnings(basis, dict(zip(inputs.tasks, inputs.models, strict=True))):
        warn(line)
    return basis


def encoder_matrix(basis: Basis) -> Tensor:
    """The factors of the task vectors in each basis, [T, M]; [T, M + 1] with PCA's mean."""
    if basis.settings.basis != "pca":
        return basis.weighted_encoder
    mean = torch.tensor(basis.weights, dtype=torch.float64)[:, None] / len(basis.tasks)
    return torch.cat([basis.weighted_encoder, mean], dim=1)


def _numbers(
    inputs: TaskSet, basis: Basis, measured: Sequence[Sequence[float]], share: float
) -> dict[str, Tensor]:
    """`basis.safetensors` of kept task vectors; `gram_bases` is of the models themselves."""
    if share == 1:
        none = torch.zeros(len(basis.tasks), dtype=torch.float64)
        return numbers_of_bases(inputs, basis, torch.float32, none)
    own = forms.measured_tensors(measured, basis.weights)
    return numbers_of_bases(inputs, basis, torch.float32, forms.lost(own)) | own


class _Unfinished:
    """STORE.partial, which `resume` continues, with a journal for each process.

    Raises:
        UserError: a folder is in the way, or the build to continue was begun with something else.
    """

    def __init__(
        self,
        inputs: TaskSet,
        out: Path,
        dtype: torch.dtype,
        keep: float,
        resume: bool,
    ) -> None:
        world, self.inputs, self.out = ranks.world(), inputs, out
        self.folder = next_to(out, "partial")
        prefixes = [f"{rank}-" if world.size > 1 else "" for rank in range(world.size)]
        self.journals = [self.folder / f"{prefix}{JOURNAL}" for prefix in prefixes]
        begun: dict[str, object] = {
            **inputs.identity,
            "dtype": str(dtype),
            "weights": list(inputs.weights),
            "settings": inputs.settings.model_dump(mode="json"),
            "tasks": list(inputs.tasks),
            "processes": world.size,
            "keep": keep,
        }
        self.state = {"inputs": cache.key_of(begun)}
        self.resuming = world.share(lambda: self._can_resume(out, resume))

    def _can_resume(self, out: Path, resume: bool) -> bool:
        check_new_folder(out, [name for name in self.inputs.fingerprints if os.path.exists(name)])
        partial, begun = self.folder, (self.folder / STATE).is_file()
        there = partial.iterdir() if partial.is_dir() else [partial] * os.path.lexists(partial)
        if not begun and not all(map(is_left_over, there)):
            raise UserError(
                f"{partial} is in the way, and is not an unfinished build; move or delete it"
            )
        if resume and begun:
            self._check_same()
        elif resume:
            LOG.warning("--resume: nothing to continue in %s; starting again", partial)
        elif begun:
            LOG.warning("%s, an unfinished build, is replaced (--resume continues it)", partial)
        return resume and begun

    def _check_same(self) -> None:
        """Raise UserError unless the build was begun with this `state`."""
        try:
            before = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
            same = all(before[key] == self.state[key] for key in self.state)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"--resume: {self.folder} cannot be continued; delete it") from error
        if not same:
            raise UserError(
                f"--resume: {self.folder} was begun with other models, settings, --dtype, --keep, "
                "--lossless or number of processes, or with another PyTorch; start "
                "again without --resume"
            )

    def sums(self) -> GramSums | None:
        """The Gram matrix of the build to continue."""
        return cache.read_sums(self.folder / SUMS) if self.resuming else None

    def begin(self, basis: Basis, sums: GramSums) -> None:
        """Begin or continue the build with this basis and Gram matrix."""
        self.state["encoder"] = cache.key_of({"matrix": encoder_matrix(basis).tolist()})
        if self.resuming:
            self._check_same()
            for stale in self.folder.rglob(".partial-*"):  # left by a kill
                shutil.rmtree(stale)
        else:  # only now, so that refused inputs leave nothing
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            write_file(self.folder / STATE, json.dumps(self.state).encode())
        cache.write_sums(self.folder / SUMS, sums)

    def forget(self) -> None:
        """Delete the state of the build, which `resume` needs until the store is published."""
        for name in (STATE, SUMS, *(journal.name for journal in self.journals)):
            (self.out / name).unlink(missing_ok=True)
