#!/usr/bin/env python
r"""Do bits or bases keep many models small? Measured on the small benchmark (`evals/mini`).

    python evals/store/bits.py --preset small --seeds 0,1,2 --out mini-runs \
        --report evals/mini/results --page evals/mini/RESULTS.md

Ten float32 task vectors are kept as stores at a few bits an element, as bases in bfloat16, and by
`evals/study/kinds/rivals.py`. Missing models are trained.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mini"))

import click
import pictures as mini
from plan import KEYS, PLANS, Plan, reference
from runs import trained
from sheets import Runs, forgotten, name, tested
from study import pictures
from study.cells import Cell, Record, measured
from study.command import Asked, study_options
from study.kinds import KINDS, rivals
from study.kinds.addition import GRID
from study.kinds.stores import RIVALS
from study.report import write_study
from study.tables import Column, Sheet, grid, value_of

ZOOS = (8, 4, 3, 2, 1, 0.5, 0.25)
SIZES = (2, 5, 8)
MIXED = (2, 1.5, 1, 0.5)
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
    **{f"svd_{bits:g}": f"SVD, {bits:g} bits" for bits in (1, 0.25)},
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
