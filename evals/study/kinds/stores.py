"""Cells of stores: bytes and errors of task vectors as codes, as bases and by rivals.

A cell has the bytes, the error and the reconstructed specialists of one way, and addition, TIES and
forgetting with them. Bytes of ours are complete `.safetensors` files with their headers, bytes of
others only codes and scales.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tvb_mergekit
from study.cells import Cell
from study.kinds import rivals
from study.kinds.addition import merged
from study.kinds.negation import forget
from study.run import Run, Weights, difference, norm, settings
from tvb_mergekit.core.quantize import bits_within

WIDTHS = (0, 1, 2, 3, 4, 8)  # of a tensor in a store; of 0 nothing is kept
JUST = 1e-9  # bits more: the bytes of one width for all, but each tensor may have another

RIVALS: dict[str, Callable[[Sequence[rivals.Vector]], rivals.Kept]] = {
    "tvq_4": partial(rivals.tvq, bits=4),
    "tvq_3": partial(rivals.tvq, bits=3),
    "tvq_2": partial(rivals.tvq, bits=2),
    "rtvq": partial(rivals.rtvq, base_bits=3, bits=2),
    "bitdelta": rivals.bitdelta,
    "bitdelta_projections": partial(rivals.bitdelta, coded=rivals.is_projection),
    "deltatensors_sparse": partial(rivals.deltatensors, strategy="sparse"),
    "deltatensors_int4": partial(rivals.deltatensors, strategy="int4"),
    "deltatensors_quantized": partial(rivals.deltatensors, strategy="quantized"),
    "svd_1": partial(rivals.svd, bits=1),
    "svd_0.25": partial(rivals.svd, bits=0.25),
    "zstd": rivals.zstd,
}


def basis_of(how: str) -> tuple[str, int] | None:
    """Label and M of ways such as `balanced_5`."""
    label, _, count = how.rpartition("_")
    return (label, int(count)) if label in ("balanced", "pca", "ae_exact") else None


def measure(run: Run, cell: Cell) -> dict[str, Any]:
    how = cell["how"].removeprefix("merged_")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if how.startswith("mixed"):
            return _mixed(run, float(how.removeprefix("mixed_")), place)
        bases, nbytes = (
            _theirs(run, how, place) if how in RIVALS else _ours(run, how, place / "store")
        )
        result = facts(run, bases, nbytes)
        if not cell["merges"]:
            return result | ours_within(run, nbytes, place)
        result["specialists"] = {
            task: run.accuracy(model, "test", [task], cell["tested"])[task]
            for task in run.tasks
            for model in [run.shifted((1.0, decoded(bases, task)))]
        }
        result["merges"] = {m: merged(run, cell, bases, m) for m in cell["merges"]}
        if cell["lambda"] is not None:
            result |= forget(run, cell, partial(decoded, bases))
        return result


def _theirs(run: Run, how: str, place: Path) -> tuple[tvb_mergekit.Bases, int]:
    """Bases over the decoded vectors, as if of other models; and the bytes."""
    together = how == "rtvq"  # its mean needs all of them
    groups = [run.tasks] if together else [(task,) for task in run.tasks]
    models, nbytes = dict[str, Path](), 0
    for tasks in groups:
        kept = RIVALS[how]([run.task_vector(task) for task in tasks])
        nbytes += kept.nbytes
        for task, vector in zip(tasks, kept.vectors, strict=True):
            models[task] = place / f"{task}.safetensors"
            save_file(run.shifted((1.0, vector)), models[task])
    return tvb_mergekit.build(run.base, models, basis="none"), nbytes


def _ours(run: Run, how: str, place: Path) -> tuple[tvb_mergekit.Bases, int]:
    if how in ("sum", "all"):
        return tvb_mergekit.build(run.base, run.models, basis="none"), 4 * elements(run)
    if found := basis_of(how):
        label, count = found
        bases = tvb_mergekit.build(
            run.base, run.models, place, dtype=torch.bfloat16, num_bases=count, **settings(label)
        )
    else:
        bases = zoo(run, float(how.removeprefix("zoo_")), place)
    return bases, file_bytes(bases)


def zoo(run: Run, bits: float, place: Path) -> tvb_mergekit.Bases:
    """A store of all task vectors as codes."""
    return tvb_mergekit.build(run.base, run.models, place, bits=bits)


def ours_within(run: Run, most: int, place: Path) -> dict[str, Any]:
    """Stores with at most so many bytes: as files, and by codes and scales alone."""
    files = zoo_within(run, most, place)
    alike = zoo(run, bits_within(sizes(run), most / len(run.tasks)), place / "alike")
    return {
        "ours": files and facts(run, files, file_bytes(files)),
        "ours_alone": facts(run, alike, code_bytes(alike)),
    }


def zoo_within(run: Run, most: int, place: Path) -> tvb_mergekit.Bases | None:
    """A store whose files take at most so many bytes; None if their headers leave no room."""
    room = most
    for attempt in range(5):
        bits = bits_within(sizes(run), room / len(run.tasks))
        bases = zoo(run, bits, place / f"within-{attempt}")
        if (size := file_bytes(bases)) <= most:
            return bases
        # headers; and a whole tensor, where one less is needed
        room -= size - most + 64 + most // 500 * attempt
    return None


def _mixed(run: Run, bits: float, place: Path) -> dict[str, Any]:
    """Widths chosen by error, against one width for all with the same bytes.

    If the mean is not a width, the two widths around it share each task vector so that the bytes
    are equal, and squared errors are interpolated. At 0 bits nothing is kept, and the error is 1.
    """
    low = max(width for width in WIDTHS if width <= bits)
    high = min(width for width in WIDTHS if width >= bits)
    part = 0.0 if high == low else (bits - low) / (high - low)
    mixed = zoo(run, bits + JUST if bits in WIDTHS else bits, place / "mixed")
    found = list[dict[str, Any]]()
    for width in (low, high):
        if width == 0:
            none = {"bytes": 0.0, "error": 1.0, "errors": dict.fromkeys(run.tasks, 1.0)}
            found.append(none)
        else:
            one = zoo(run, width, place / f"one-{width}-{len(found)}")
            found.append(facts(run, one, code_bytes(one)))

    def shared(below: float, above: float) -> float:
        return math.sqrt((1 - part) * below**2 + part * above**2)

    below, above = found
    errors = {task: shared(below["errors"][task], above["errors"][task]) for task in run.tasks}
    uniform = {
        "bytes": (1 - part) * below["bytes"] + part * above["bytes"],
        "mean_error": statistics.fmean(errors.values()),
        "error": shared(below["error"], above["error"]),
    }
    return facts(run, mixed, code_bytes(mixed)) | {"uniform": uniform}


def decoded(bases: tvb_mergekit.Bases, task: str) -> Weights:
    """The task vector as the bases, or the codes, give it; float32."""
    column = bases.reconstruction([task])[:, 0].tolist()
    total: Weights = {}
    for by, vector in zip(column, bases.sources, strict=True):
        if by:
            for each in vector.tensors:
                term = by * vector.tensor(each).double()
                total[each] = total[each] + term if each in total else term
    return {each: tensor.float() for each, tensor in total.items()}


def sizes(run: Run) -> list[int]:
    """The elements of the tensors of a task vector."""
    return [tensor.numel() for tensor in run.base.values()]


def elements(run: Run) -> int:
    """The elements of all task vectors."""
    return len(run.tasks) * sum(sizes(run))


def file_bytes(bases: tvb_mergekit.Bases) -> int:
    assert bases.path is not None
    return sum(file.stat().st_size for file in bases.path.glob("*/*.safetensors"))


def code_bytes(bases: tvb_mergekit.Bases) -> int:
    """Without the headers."""
    return sum(info.nbytes for v in bases.vectors for info in v.stored.tensors.values())  # type: ignore[attr-defined]


def facts(run: Run, bases: tvb_mergekit.Bases, nbytes: int) -> dict[str, Any]:
    """Bytes and errors of a way, for each task vector and for all together."""
    errors, lost, whole = {}, 0.0, 0.0
    for task in run.tasks:
        true = run.task_vector(task)
        off, size = norm(difference(decoded(bases, task), true)), norm(true)
        errors[task] = off / size
        lost, whole = lost + off**2, whole + size**2
    return {
        "bytes": nbytes,
        "share": nbytes / (2 * elements(run)),
        "bits": 8 * nbytes / elements(run),
        "errors": errors,
        "mean_error": statistics.fmean(errors.values()),
        "error": math.sqrt(lost / whole),
    }


KINDS = {"bits": measure}
