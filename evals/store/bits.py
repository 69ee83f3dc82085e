#!/usr/bin/env python
r"""Do bits or bases keep many models small? Measured on the small benchmark (`evals/mini`).

    python evals/store/bits.py --preset small --seeds 0,1,2 --out mini-runs \
        --report evals/mini/results --page evals/mini/RESULTS.md

Ten float32 task vectors are kept as stores at a few bits an element, as bases in bfloat16, and by
`rivals.py`. A cell measures the bytes, the error and the reconstructed specialists of one way, and
addition, TIES and forgetting with them. Missing models are trained.

Bytes of ours are complete `.safetensors` files with their headers, bytes of others only codes and
scales.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mini"))

import cells
import click
import data
import pictures as mini
import rivals
import torch
from plan import GRID, KEYS, PLANS, Cell, Plan, reference, settings
from runs import Run, Weights, difference, trained
from sheets import Runs, forgotten, name, tested
from study import pictures
from study.cells import Record, measured
from study.command import Asked, study_options
from study.report import write_study
from study.tables import Column, Sheet, grid, value_of

import tvb_mergekit
from tvb_mergekit.core.quantize import bits_within

TASKS = tuple(data.TASKS)
WIDTHS = (0, 1, 2, 3, 4, 8)  # of a tensor in a store; of 0 nothing is kept
ZOOS = (8, 4, 3, 2, 1, 0.5, 0.25)
SIZES = (2, 5, 8)
MIXED = (2, 1.5, 1, 0.5)
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
    "zstd": rivals.zstd,
}
MERGED = [how for how in RIVALS if how not in ("zstd", "deltatensors_sparse")]  # and forgotten
BASES = {f"{label}_{m}": (label, m) for label in ("balanced", "pca", "ae_exact") for m in SIZES}
KEPT = ("all", *(f"zoo_{bits}" for bits in ZOOS), *BASES)
NAMES = {
    "all": "all task vectors, float32",
    **{f"zoo_{bits}": f"{bits:g} bit{'s' * (bits > 1)}" for bits in ZOOS},
    **{how: f"{name(label)}, M = {m}, bfloat16" for how, (label, m) in BASES.items()},
    **{f"tvq_{bits}": f"TVQ, {bits} bits" for bits in (4, 3, 2)},
    "rtvq": "RTVQ, mean at 3 bits, offsets at 2",
    "bitdelta": "BitDelta, not distilled",
    "bitdelta_projections": "the same, embeddings and norms in bfloat16",
    "deltatensors_sparse": "deltatensors, sparse",
    "deltatensors_int4": "deltatensors, int4",
    "deltatensors_quantized": "deltatensors, quantized",
    "zstd": "bfloat16, zstd",
    **{f"mixed_{bits}": f"{bits:g} bit{'s' * (bits > 1)}" for bits in MIXED},
}


# ------------------------------------------------------------------------------------------- cells


def cells_of(plan: Plan, shipped: float | None) -> list[Cell]:
    """Without `shipped` only the first cell; with it all, for rivals first the errors alone.

    Args:
        shipped: the lambda of the model that tasks are forgotten from, the sum of all of them.
    """
    counts = {"kind": "bits", "items": plan.items, "tested": plan.tested, "grid": len(GRID)}

    def cell(how: str, *merges: str) -> Cell:
        made = counts | {"how": how, "merges": [*merges], "lambda": shipped if merges else None}
        return made | ({"num_bases": BASES[how][1]} if how in BASES else {})

    if shipped is None:
        return [cell("sum", "ta")]
    kept = [cell(how, "ta", "ties") for how in KEPT]
    errors = [*(f"mixed_{bits}" for bits in MIXED), *RIVALS]
    return [*kept, *map(cell, errors), *(cell(f"merged_{how}", "ta") for how in MERGED)]


def measure(run: Run, cell: Cell) -> dict[str, Any]:
    how = cell["how"].removeprefix("merged_")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if how.startswith("mixed"):
            return _mixed(run, float(how.removeprefix("mixed_")), place)
        bases, nbytes = _theirs(run, how) if how in RIVALS else _ours(run, how, place / "store")
        result = facts(run, bases, nbytes)
        if not cell["merges"]:
            return result | ours_within(run, nbytes, place)
        result["specialists"] = {
            task: run.accuracy(model, "test", [task], cell["tested"])[task]
            for task in TASKS
            for model in [run.shifted((1.0, decoded(bases, task)))]
        }
        result["merges"] = {m: cells.merged(run, cell, bases, m) for m in cell["merges"]}
        if cell["lambda"] is not None:
            result |= cells.forget(run, cell, partial(decoded, bases))
        return result


def _theirs(run: Run, how: str) -> tuple[tvb_mergekit.Bases, int]:
    """Bases over the decoded vectors, as if of ten other models; and the bytes."""
    kept = RIVALS[how]([run.task_vector(task) for task in TASKS])
    models = {
        task: run.shifted((1.0, vector)) for task, vector in zip(TASKS, kept.vectors, strict=True)
    }
    return tvb_mergekit.build(run.base, models, basis="none"), kept.nbytes


def _ours(run: Run, how: str, place: Path) -> tuple[tvb_mergekit.Bases, int]:
    if how in ("sum", "all"):
        return tvb_mergekit.build(run.base, run.models, basis="none"), 4 * elements(run)
    if how in BASES:
        label, count = BASES[how]
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
    alike = zoo(run, bits_within(sizes(run), most / len(TASKS)), place / "alike")
    return {
        "ours": files and facts(run, files, file_bytes(files)),
        "ours_alone": facts(run, alike, code_bytes(alike)),
    }


def zoo_within(run: Run, most: int, place: Path) -> tvb_mergekit.Bases | None:
    """A store whose files take at most so many bytes; None if their headers leave no room."""
    room = most
    for attempt in range(5):
        bits = bits_within(sizes(run), room / len(TASKS))
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
            none = {"bytes": 0.0, "error": 1.0, "errors": dict.fromkeys(TASKS, 1.0)}
            found.append(none)
        else:
            one = zoo(run, width, place / f"one-{width}-{len(found)}")
            found.append(facts(run, one, code_bytes(one)))

    def shared(below: float, above: float) -> float:
        return math.sqrt((1 - part) * below**2 + part * above**2)

    below, above = found
    errors = {task: shared(below["errors"][task], above["errors"][task]) for task in TASKS}
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
    return len(TASKS) * sum(sizes(run))


def file_bytes(bases: tvb_mergekit.Bases) -> int:
    assert bases.path is not None
    return sum(file.stat().st_size for file in bases.path.glob("*/*.safetensors"))


def code_bytes(bases: tvb_mergekit.Bases) -> int:
    """Without the headers."""
    return sum(info.nbytes for v in bases.vectors for info in v.stored.tensors.values())  # type: ignore[attr-defined]


def facts(run: Run, bases: tvb_mergekit.Bases, nbytes: int) -> dict[str, Any]:
    """Bytes and errors of a way, for each task vector and for all together."""
    errors, lost, whole = {}, 0.0, 0.0
    for task in TASKS:
        true = run.task_vector(task)
        off, size = cells.norm(difference(decoded(bases, task), true)), cells.norm(true)
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


# ------------------------------------------------------------------------------------------ tables

WAYS = {
    "MB": Column(value_of("bytes", per=1e6), ".2f", sd=False),
    "of bfloat16": Column(value_of("share"), ".1%", sd=False),
    "error": Column(value_of("mean_error")),
}


def quality(runs: Runs) -> dict[str, Column]:
    return {
        "specialists": Column(runs.normal("specialists")),
        "addition": Column(runs.normal(*tested("ta", "tasks"))),
        "TIES": Column(runs.normal(*tested("ties", "tasks"))),
        "forgetting": Column(forgotten("target")),
    }


def sheets(runs: Runs) -> dict[str, list[Sheet]]:
    def rows(hows: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {NAMES[how]: {"how": how} for how in hows}

    caption = (
        "Ten task vectors kept as codes and as bases: bytes (of files, headers included), mean "
    )
    caption += "relative error of a task vector, normalized accuracy of the reconstructed "
    caption += "specialists, of task arithmetic and of TIES, and accuracy on a task after it was "
    caption += "forgotten (low is good)"
    others = "The same of what others do (bytes of codes and scales alone), without TIES"
    against = "What others do, and stores of ours that take no more bytes, as whole files and by "
    against += "codes and scales alone as the others: bits a parameter, mean relative error of a "
    against += "task vector"
    merged = {key: of for key, of in quality(runs).items() if key != "TIES"}
    mixed = "Widths chosen by error against one width for all, at the same bytes of codes and "
    mixed += "scales: relative errors, mean over the tasks, and of all task vectors together"
    return {
        "kept": grid(runs, caption, "bits", WAYS | quality(runs), rows(KEPT), corner="kept as"),
        "rivals": grid(runs, against, "bits", {
            "bits": Column(value_of("bits"), ".2f", sd=False),
            "error": Column(value_of("mean_error")),
            "our files: bits": Column(value_of("ours", "bits"), ".2f", sd=False),
            "our files: error": Column(value_of("ours", "mean_error")),
            "our codes: bits": Column(value_of("ours_alone", "bits"), ".2f", sd=False),
            "our codes: error": Column(value_of("ours_alone", "mean_error")),
        }, rows([*RIVALS])),
        "rivals_kept": grid(runs, others, "bits", WAYS | merged,
                            {NAMES[how]: {"how": f"merged_{how}"} for how in MERGED}),
        "mixed": grid(runs, mixed, "bits", {
            "bits, scales included": Column(value_of("bits"), ".3f", sd=False),
            "one width": Column(value_of("uniform", "mean_error")),
            "mixed": Column(value_of("mean_error")),
            "one width, together": Column(value_of("uniform", "error")),
            "mixed, together": Column(value_of("error")),
        }, rows([f"mixed_{bits}" for bits in MIXED]), corner="width"),
    }  # fmt: skip


def picture(runs: Runs) -> bytes:
    """Error against bits a parameter, a line for each family."""
    families = {
        "task vectors as codes": ("balanced", [f"zoo_{bits}" for bits in ZOOS]),
        **{f"bases: {name(label)}": (looks, [f"{label}_{m}" for m in SIZES])
           for label, looks in (("balanced", "ae_adam_5"), ("pca", "pca"),
                                ("ae_exact", "ae_exact"))},
        "TVQ": ("ae_adam_1", ["tvq_2", "tvq_3", "tvq_4"]),
        "RTVQ": ("rand_select", ["rtvq"]),
        "BitDelta, not distilled": ("ae_annealed", ["bitdelta", "bitdelta_projections"]),
        "deltatensors": ("linear_ae", ["deltatensors_quantized", "deltatensors_int4",
                                       "deltatensors_sparse"]),
        "bfloat16, zstd": ("none", ["zstd"]),
    }  # fmt: skip
    with pictures.styled():
        figure, (axes,) = pictures.page(1, 1, 4.6)
        for text, (looks, hows) in families.items():
            points = []
            for how in hows:
                size = runs.spread("bits", value_of("bits"), how=how)
                error = runs.spread("bits", value_of("mean_error"), how=how)
                points += [(size.mean, error)] if size and error else []
            joined = text not in ("deltatensors", "BitDelta, not distilled")  # of one kind
            for some in [points] if joined else [[point] for point in points]:
                pictures.line(axes, mini.LOOKS[looks], some, text)
        axes.set(xscale="log", yscale="log", xlabel="bits a parameter",
                 ylabel="relative error of a task vector")  # fmt: skip
        axes.set_xticks([0.25, 0.5, 1, 2, 4, 8, 16], ["0.25", "0.5", "1", "2", "4", "8", "16"])
        levels = [1, 0.3, 0.1, 0.03, 0.01, 0.003]
        axes.set_yticks(levels, [str(level) for level in levels])
        axes.minorticks_off()
        pictures.legend(figure, [axes], 3)
        figure.suptitle(f"Bits and bases: error against bytes ({runs.what})", x=0.01, ha="left")
        return pictures.svg(figure)


def write(records: Sequence[Record], preset: str, folder: Path, page: Path | None) -> list[Path]:
    """Write bits.json and the picture into FOLDER, and the marked tables into PAGE."""
    runs = Runs(records, preset, "full")
    drawn = {f"{preset}-full-bits": picture(runs)}
    return write_study("bits", [runs], sheets(runs), drawn, folder, page)


# ----------------------------------------------------------------------------------------- command

KINDS = cells.KINDS | {"bits": measure}


def records_of(asked: Asked, seed: int, hows: Sequence[str]) -> list[Record]:
    """The records of a seed, after missing cells were measured."""
    source = trained(asked.preset, "full", seed, asked.out, asked.device, asked.as_is)
    plan = PLANS[asked.preset]
    done = partial(measured, source, kinds=KINDS, keys=KEYS, as_is=asked.as_is,
                   skipped=rivals.Missing)  # fmt: skip
    first = done([reference(plan)[0], *cells_of(plan, None)])
    if len(first) < 2:
        return []
    shipped = first[1]["result"]["merges"]["ta"]["scales"]["tasks"]["lambda"]
    wanted = [cell for cell in cells_of(plan, shipped) if not hows or cell["how"] in hows]
    return [first[0], *done(wanted)]


@click.command(epilog="Example: python evals/store/bits.py --preset tiny --seeds 0")
@study_options(list(PLANS), "tiny", "mini-runs")
@click.option("--how", "hows", multiple=True, help="Only these cells, such as zoo_2 or tvq_3; may "
              "be repeated. By default all.")  # fmt: skip
def main(asked: Asked, hows: tuple[str, ...]) -> None:
    """Measure what bits and bases keep of ten task vectors, and report it."""
    records = [record for seed in asked.seeds for record in records_of(asked, seed, hows)]
    asked.finish(records, lambda found, folder: write(found, asked.preset, folder, asked.page))


if __name__ == "__main__":
    main()
