"""Tables and pictures of every benchmark: a function makes those of one preset and method.

A table without records is an empty list, and a column without numbers is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from study import pictures
from study.cells import Record
from study.kinds.learned import WAYS
from study.kinds.matrices import ALL, MERGES, ONLINE, SINGLE_TITLES
from study.kinds.stores import basis_of
from study.kinds.theirs import METHODS
from study.report import write_study
from study.tables import (
    Column,
    Runs,
    Sheet,
    Spread,
    Value,
    dig,
    grid,
    having,
    over,
    sheet,
    spread,
    value_of,
)
from tvb_mergekit.score.pairs import difference

Rows = dict[str, list[Record]]

NAMES = {  # of labels that do not speak for themselves; the others are names of bases in recipes
    "none": "all task vectors",
    "none_subsample": "all task vectors, M/T of the examples",
    "ae_exact": "ae, exact",
    "ae_annealed": "ae, Adam, annealed x0.8",
    "plain": "the task vector itself",
    "base": "base, zero-shot",
    "finetune": "fine-tuned on the examples",
    "bitdelta_projections": "BitDelta, embeddings and norms in bfloat16",
    "deltatensors_quantized": "deltatensors, quantized",
    "svd_1": "SVD, 1 bit",
    "svd_0.25": "SVD, 0.25 bits",
    "tsvc": "TSV-C",
    "delta_come": "Delta-CoMe, not calibrated",
    "signs_svd": "signs and SVD, as D-QRELO",
    "ultradelta": "UltraDelta, 10 %",
}
BASES = ("none", "balanced", "groups", "ae_exact", "ae_adam_5", "ae_adam_1", "ae_annealed",
         "linear_ae", "pca", "rand_select")  # fmt: skip
NEGATION = ("plain", "rand_proj", *BASES)
TRANSFER = ("base", "finetune", "none", "none_subsample", *BASES[1:])
BUFFERS = {"ae": "ae", "rand_select": "random buffer"}


def name(label: str, count: int | None = None) -> str:
    temperature = label.removeprefix("ae_adam_")
    text = label if temperature == label else f"ae, Adam, t = {temperature}"
    all_of_them = count is None or label in ("none", "plain", "base", "finetune")
    return NAMES.get(label, text) + ("" if all_of_them else f", M = {count}")


def tested(merge: str, scale: str = "tasks") -> tuple[str, ...]:
    return ("merges", merge, "scales", scale, "test")


def outcome(record: Record) -> dict[str, Any]:
    """Scores of the best lambda, and of items, of any kind of merge."""
    result: dict[str, Any] = record["result"]
    if record["cell"]["kind"] == "learned":
        return {"tuned": result["test"], "items": result.get("each")}
    summed = dig(result, *tested("ta"))
    return {"tuned": summed} if summed else result


def scored(runs: Runs) -> Value:
    """The normalized accuracy of a merge with the best lambda."""
    return lambda record: over(runs.shares(record, outcome(record).get("tuned") or {}), runs.tasks)


def forgotten(runs: Runs, key: str) -> Value:
    """The mean over the tasks. Each is forgotten by a model of its own."""
    return lambda record: over(
        {t: dig(record, "result", "tasks", t, key) for t in runs.tasks}, runs.tasks
    )


def p_value(runs: Runs, one: Sequence[Record], other: Sequence[Record]) -> Spread | None:
    """The paired test of two merges over all items, tasks weighted by their specialists."""
    pairs = []
    for a in one:
        for b in (r for r in other if r["train_seed"] == a["train_seed"] and r is not a):
            own = runs.reference[a["train_seed"]]["specialists"]
            x, y = outcome(a).get("items"), outcome(b).get("items")
            if x and y:
                weights = {t: 1 / (own[t] * len(runs.tasks)) if own[t] else 0.0 for t in runs.tasks}
                pairs.append([w * (np.array(x[t]) - np.array(y[t])) for t, w in weights.items()])
    return _tested(zip(*pairs, strict=True))


def _tested(parts: Iterable[Sequence[Any]]) -> Spread | None:
    """p of the differences of items, given for each seed in each part.

    The items of all seeds are the same, so their differences are averaged before the test.
    """
    means = [np.mean(each, axis=0) for each in parts if len(each)]
    return Spread(difference(means).p, None, 1) if means else None


def by_basis(runs: Runs, kind: str, labels: Iterable[str], **wanted: Any) -> Rows:
    """A row for each basis and M."""
    return {
        name(label, count): runs.find(kind, basis=label, num_bases=count, **wanted)
        for label in labels
        for count in runs.having(kind, "num_bases", basis=label)
    }


# ------------------------------------------------------------------------------------------ tables


def specialists(runs: Runs) -> list[Sheet]:
    """The scores of the base, the specialists and their sum, with a paired test of the first."""
    references = runs.find("reference")
    sums = runs.find("matrices", how="ta", basis="none")

    def p(task: str) -> Spread | None:
        both = [dig(found, "items") for found in runs.reference.values()]
        parts = [np.array(each["specialists"][task]) - np.array(each["base"][task])
                 for each in both if each and task in each["specialists"]]  # fmt: skip
        return _tested([parts])

    def row(of: Callable[[Record, dict[str, float]], float | None]) -> list[Spread | None]:
        found = [spread(of(r, r["result"][key]) for r in references)
                 for key in ("base", "specialists")]  # fmt: skip
        return [*found, spread(of(r, outcome(r)["tuned"]) for r in sums)]

    rows = {f"`{t}`": [*row(lambda r, scores, t=t: scores.get(t)), p(t)]  # type: ignore[misc]
            for t in (*runs.tasks, *runs.unseen)}  # fmt: skip
    rows["mean"] = [*row(lambda r, scores: over(scores, runs.tasks)), None]
    rows["normalized"] = [*row(lambda r, s: over(runs.shares(r, s), runs.tasks)), None]
    columns = {"base": Column(), "specialist": Column(), "addition": Column(),
               "p": Column(form=".1e")}  # fmt: skip
    caption = "Test scores: the base, each task's specialist, the sum of all task vectors"
    return sheet(runs, caption, "reference", columns, rows, corner="task")


def merges(runs: Runs) -> list[Sheet]:
    """Every merge over all task vectors; merges of matrices and sums over bases."""
    kinds = [("matrices", how, merge.title) for how, merge in ALL.items()]
    kinds += [("learned", how, way.title) for how, way in WAYS.items() if how != "ta"]
    kinds += [("theirs", how, f"mergekit's `{how}`") for how in METHODS]
    every = len(runs.tasks)
    sums = runs.find("matrices", how="ta", basis="none")
    sizes = {r["train_seed"]: outcome(r)["length"] for r in sums if "length" in outcome(r)}

    def share(record: Record) -> float | None:
        found: float | None = outcome(record).get("fixed_share")
        return found

    columns = {
        "normalized": Column(scored(runs)),
        "p": Column(form=".2g", of=lambda records: p_value(runs, records, sums)),
        "lambda": Column(lambda r: outcome(r).get("lambda"), ".2f"),
        "default over best": Column(share),
        "length": Column(lambda r: outcome(r).get("length", 0) / sizes[r["train_seed"]] or None
                         if r["train_seed"] in sizes else None, ".2f"),
    }  # fmt: skip
    rows = {title: runs.find(kind, how=how, basis="none", num_bases=every)
            for kind, how, title in kinds}  # fmt: skip
    caption = "Merges over all task vectors: normalized accuracy at the best and the default lambda"
    if any(outcome(r).get("fixed_share") for r in runs.find("matrices")):
        caption += " (the default's share of the best score on validation items)"
    if sizes:
        caption += "; p of the paired test against addition; length of the difference over the "
        caption += "sum's, at lambda 1"
    made = grid(runs, caption, "matrices", columns, rows)
    titles = {how: merge.title for how, merge in MERGES.items()}
    made += over_bases(runs, "Merges of matrices and sums, the best lambda", "matrices", titles)
    titles = {how: f"{merge.title} at {merge.fixed:g}" for how, merge in MERGES.items()}
    caption = "The default lambda's share of the best score on validation items"
    return made + over_bases(runs, caption, "matrices", titles, share, "share")


def over_bases(
    runs: Runs, caption: str, kind: str, titles: Mapping[str, str], value: Value | None = None,
    unit: str = "normalized accuracy",
) -> list[Sheet]:  # fmt: skip
    """A row for each basis and M, a column for each merge."""
    columns = {title: Column(value or scored(runs), wanted={"how": how})
               for how, title in titles.items()}  # fmt: skip
    rows = by_basis(runs, kind, BASES)
    return grid(runs, f"{caption}: {unit}", kind, columns, rows, corner="bases")


def learned(runs: Runs) -> list[Sheet]:
    """A column for each method, and one for its cells that lack the factor T/M."""
    columns = {}
    for how, way in WAYS.items():
        for scale in dict.fromkeys((way.scale, "bases")):
            title = way.title + ", unscaled" * (scale != way.scale)
            columns[title] = Column(scored(runs), wanted={"how": how, "scale": scale})
    caption = "Merges that learn, from M/T of the examples: normalized accuracy"
    rows = by_basis(runs, "learned", BASES)
    return grid(runs, caption, "learned", columns, rows, corner="bases")


def routers(runs: Runs) -> list[Sheet]:
    """Scores of tasks without a specialist under routers."""

    def score(task: str) -> Value:
        where = {"learned": "unseen", "reference": "base"}
        return lambda r: dig(r, "result", where[r["cell"]["kind"]], task)

    columns = {f"`{task}`": Column(score(task)) for task in runs.unseen}
    routed = by_basis(runs, "learned", BASES, how="wemoe")
    rows_ = {"base": runs.find("reference")} if any(routed.values()) else {}
    caption = "Tasks without a specialist under WEMoE: test scores"
    return grid(runs, caption, "learned", columns, rows_ | routed, corner="bases")


def stored(how: str) -> tuple[tuple[int, float, str], str]:
    """The place of a way to store in a table, and its title."""
    if how == "all":
        return (0, 0, how), "all task vectors, float32"
    if how.startswith("zoo_"):
        bits = float(how.removeprefix("zoo_"))
        return (2, -bits, ""), f"codes, {bits:g} bit{'s' * (bits > 1)}"
    if how == "lossless":
        return (1, -1, how), "lossless"
    if how.startswith("keep_"):
        share = float(how.removeprefix("keep_"))
        return (1, -share, ""), f"sample, {100 * share:g} %"
    if how.startswith("rank_"):
        rank = int(how.removeprefix("rank_"))
        return (4, rank, ""), f"LoRA adapters of rank {rank}, bfloat16"
    if found := basis_of(how):
        return (3, found[1], found[0]), f"{name(*found)}, bfloat16"
    return (5, 0, how), name(how.removeprefix("merged_"))


def kept_as(runs: Runs, *, to_forget: bool = False) -> Rows:
    """A row for each way to store; or those that are measured for forgetting alone."""
    rows: Rows = {}
    for record in sorted(runs.find("bits"), key=lambda r: stored(r["cell"]["how"])):
        if to_forget == (not record["cell"]["merges"] and "tasks" in record["result"]):
            rows.setdefault(stored(record["cell"]["how"])[1], []).append(record)
    return rows


def stores(runs: Runs) -> list[Sheet]:
    columns = {
        "MB": Column(value_of("bytes", per=1e6), ".2f", sd=False),
        "of bfloat16": Column(value_of("share"), ".1%", sd=False),
        "bits": Column(value_of("bits"), ".3f", sd=False),
        "error": Column(value_of("mean_error"), ".2f"),
        "specialists": Column(runs.normal("specialists")),
        "addition": Column(runs.normal(*tested("ta"))),
        "TIES": Column(runs.normal(*tested("ties"))),
        "WUDI, t = 30": Column(runs.normal(*tested("wudi_30"))),
        "forgetting": Column(forgotten(runs, "target")),
    }
    caption = "Kept task vectors: bytes, bits a parameter, relative error, normalized score of "
    caption += "specialists and merges, and score of a forgotten task (low is good)"
    note = "Bytes of codes, bases and adapters are those of the files, headers included. "
    note += "Bytes of others are codes and scales alone."
    return grid(runs, caption, "bits", columns, kept_as(runs), corner="kept as", note=note)


def negation(runs: Runs) -> list[Sheet]:
    columns = {
        "target before": Column(runs.mean_of("start")),
        "target after": Column(forgotten(runs, "target")),
        "control before": Column(forgotten(runs, "control_before")),
        "control after": Column(forgotten(runs, "control")),
        "relative error": Column(forgotten(runs, "relative_error")),
        "text loss before": Column(value_of("own", "start")),
        "text loss after": Column(forgotten(runs, "own")),
    }
    caption = (
        "Each task forgotten from a merge, with 95 % of the others kept: scores, and error of "
    )
    caption += "the task's vector; means over the tasks"
    if any(map(columns["text loss before"].value, runs.find("negation"))):
        caption += "; loss of a token of plain sentences"
    rows = by_basis(runs, "negation", NEGATION) | kept_as(runs, to_forget=True)
    return grid(runs, caption, "negation", columns, rows)


def streams(runs: Runs) -> dict[str, tuple[Value, list[Record]]]:
    """title -> the value and the records of a way to hold tasks that arrive one by one."""
    wanted = {f"{text}, {ALL[merge].title} at {ALL[merge].fixed:g}": (how, merge)
              for how, text in BUFFERS.items() for merge in ONLINE}  # fmt: skip
    wanted |= {title: key for key, title in SINGLE_TITLES.items()}
    return {
        title: (runs.normal("merges", merge, "test"), runs.find("matrices_online", how=how))
        for title, (how, merge) in wanted.items()
    }


def online(runs: Runs) -> list[Sheet]:
    budgets = runs.having("matrices_online", "budget")
    rows = {
        title: [spread(map(value, having(records, budget=m))) for m in budgets]
        for title, (value, records) in streams(runs).items()
    }
    columns = {"one vector" if m is None else f"M = {m}": Column() for m in budgets}
    caption = "Tasks arriving one by one, lambda not searched: normalized accuracy after the last"
    return sheet(runs, caption, "matrices_online", columns, rows)


def transfer(runs: Runs) -> list[Sheet]:
    values: dict[str, Value] = {"mean": lambda r: over(dig(r, "result", "tasks"), runs.unseen)}
    values |= {f"`{task}`": value_of("tasks", task) for task in runs.unseen}
    columns = {
        f"{title}, {shots} examples": Column(value, wanted={"shots": shots})
        for title, value in values.items()
        for shots in runs.having("transfer", "shots")
    }
    caption = "Few-shot transfer to tasks that no specialist has: test scores"
    return grid(runs, caption, "transfer", columns, by_basis(runs, "transfer", TRANSFER))


Sheets = dict[str, Callable[[Runs], list[Sheet]]]
SHEETS: Sheets = {"specialists": specialists, "merges": merges, "learned": learned,
                  "routers": routers, "bytes": stores, "negation": negation, "online": online,
                  "transfer": transfer}  # fmt: skip

# ---------------------------------------------------------------------------------------- pictures

BARS = ("ta", "ties", "iso", "tsvm", "wudi_300", "wudi")


def kept_picture(runs: Runs) -> bytes | None:
    """The share of each specialist's score that merges of all task vectors keep."""
    every = {ALL[how].title: runs.find("matrices", how=how, basis="none") for how in BARS}
    rows = {title: records for title, records in every.items() if records}
    if not rows:
        return None
    width = 0.8 / len(rows)
    with pictures.styled():
        figure, (axes,) = pictures.page(1, 1, 4.2)
        for k, (title, records) in enumerate(rows.items()):
            for place, task in enumerate(runs.tasks):
                cell = spread(runs.shares(r, outcome(r)["tuned"]).get(task) for r in records)
                look = {"width": width, "color": pictures.look(k)[0], "label": title}
                pictures.bar(axes, place + (k - (len(rows) - 1) / 2) * width, cell, **look)
        axes.set_xticks(range(len(runs.tasks)), [t.replace("_", "\n") for t in runs.tasks],
                        fontsize=7)  # fmt: skip
        axes.set_ylabel("score over the specialist's")
        pictures.legend(figure, [axes])
        title = f"What each task keeps, lambda tuned ({runs.what})"
        return pictures.svg(pictures.title(figure, title))


def negation_picture(runs: Runs) -> bytes | None:
    rows = {name(b): (forgotten(runs, "target"), runs.find("negation", basis=b)) for b in NEGATION}
    title = f"Forgetting one task out of the sum ({runs.what})"
    return pictures.by_size(title, {"": rows}, "num_bases", "score of the forgotten task")


def online_picture(runs: Runs) -> bytes | None:
    rows = streams(runs)
    single = {title: rows[title] for title in SINGLE_TITLES.values()}
    panels = {
        text: {t.partition(", ")[2]: row for t, row in rows.items() if t.startswith(f"{text}, ")}
        | single
        for text in BUFFERS.values()
    }
    title = f"Tasks that arrive one by one, lambda not searched ({runs.what})"
    return pictures.by_size(title, panels, "budget", "normalized accuracy")


def bits_picture(runs: Runs) -> bytes | None:
    """Specialists against bits a parameter: a line for each family of ours, points for others."""
    families: dict[str, list[Record]] = {}
    for title, records in kept_as(runs).items():
        kind, _, label = stored(records[0]["cell"]["how"])[0]
        family = {
            0: "",
            1: "exact entries, all or a sample",
            2: "codes",
            3: f"bases: {name(label)}",
            4: "adapters",
        }
        families.setdefault(family.get(kind, title.partition(",")[0]), []).extend(records)
    families.pop("", None)
    if not families:
        return None
    with pictures.styled():
        figure, (axes,) = pictures.page(1, 1, 4.6)
        for k, (title, records) in enumerate(families.items()):
            points = []
            for how in dict.fromkeys(r["cell"]["how"] for r in records):
                some = having(records, how=how)
                if size := spread(map(value_of("bits"), some)):
                    points.append((size.mean, spread(map(runs.normal("specialists"), some))))
            ours = stored(records[0]["cell"]["how"])[0][0] < 5
            for part in [sorted(points)] if ours else [[point] for point in points]:
                pictures.line(axes, pictures.look(k), part, title)
        axes.set(xscale="log", xlabel="bits a parameter", ylabel="kept of the specialists")
        ticks = [0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 4, 8, 16]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        pictures.legend(figure, [axes], 3)
        title = f"Specialists against bytes ({runs.what})"
        return pictures.svg(pictures.title(figure, title))


Pictures = dict[str, Callable[[Runs], bytes | None]]
PICTURES: Pictures = {"kept": kept_picture, "negation": negation_picture, "online": online_picture,
                      "bits": bits_picture}  # fmt: skip


def write(
    study: str, every: Sequence[Runs], sheets: Sheets, drawings: Pictures, folder: Path,
    page: Path | None,
) -> list[Path]:  # fmt: skip
    """Write STUDY.json and pictures into FOLDER, and marked tables into PAGE.

    `sheets` and `drawings` are a benchmark's own.
    """
    made = {f"{r.method}_{title}": make(r) for r in every for title, make in
            (SHEETS | sheets).items()}  # fmt: skip
    drawn = {f"{r.preset}-{r.method}-{title}": make(r) for r in every for title, make in
             (PICTURES | drawings).items()}  # fmt: skip
    files = {title: picture for title, picture in drawn.items() if picture}
    return write_study(study, every, made, files, folder, page)
