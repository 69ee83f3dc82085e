"""Records of compare.py in; Markdown tables, one JSON and the marked blocks of a page out.

    <!-- table: small full addition -->     between these lines of a page `write` puts that table:
    <!-- end -->                            preset, method, a name of `SHEETS`

A table is worked out as numbers first (`sheets.py`), and its Markdown and the JSON are written from
them.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import data
from plan import DTYPES, HALF, T
from sheets import (
    COOLEST_FIRST,
    MAIN,
    MERGES,
    NEGATION,
    ONLINE,
    OTHER_SIGNS,
    SCALES,
    TA,
    TRANSFER,
    Column,
    Record,
    Runs,
    Sheet,
    Spread,
    Value,
    at_half,
    by_size,
    dig,
    forgotten,
    gap,
    grid,
    mean_of,
    name,
    over,
    pearson,
    row_sums,
    sheet,
    spread,
    tested,
    value_of,
    variation,
)

from tvb_mergekit.atomic import write_file

# ------------------------------------------------------------------------------------------- tables


def training(runs: Runs) -> list[Sheet]:
    paths: dict[str, tuple[str, ...]] = {"base": ("base",), "specialist": ("specialists",)}
    paths |= {"addition": TA}
    columns = {title: Column(mean_of(*path)) for title, path in paths.items()}
    sources = [runs.find("reference")] * 2 + [runs.find("addition", basis="none", num_bases=T)]

    def row(values: Iterable[Value]) -> list[Spread | None]:
        return [spread(map(value, some)) for value, some in zip(values, sources, strict=True)]

    rows = {f"`{t}`": row(value_of(*path, t) for path in paths.values()) for t in data.ALL}
    rows["mean of ten"] = row(column.value for column in columns.values())
    rows["normalized"] = row(runs.normal(*path) for path in paths.values())
    caption = "Test accuracy: the base, each task's specialist, the sum of all task vectors"
    found = sheet(runs, caption, "reference", columns, rows, corner="task")
    return found if runs.reference else []


def addition(runs: Runs, absolute: bool = False) -> list[Sheet]:
    sheets = []
    for merge, way in MERGES.items():
        for scale, text in SCALES.items():
            value = (mean_of if absolute else runs.normal)(*tested(merge, scale))
            columns = by_size(runs, "addition", value)
            caption = (
                f"Addition, {way}, {text}: {'' if absolute else 'normalized '}accuracy, best bold"
            )
            rows = {name(basis): {"basis": basis} for basis in MAIN}
            sheets += grid(runs, caption, "addition", columns, rows, ranked=True)
    return sheets


def addition_absolute(runs: Runs) -> list[Sheet]:
    return addition(runs, absolute=True)


def per_task(runs: Runs) -> list[Sheet]:
    def share_of(task: str) -> Value:
        return lambda record: runs.share(record, *TA).get(task)

    sheets = []
    for word, of, mean in (
        ("normalized accuracy", share_of, runs.normal(*TA)),
        ("accuracy", lambda task: value_of(*TA, task), mean_of(*TA)),
    ):
        columns = {t.replace("_", " "): Column(of(t), sd=False) for t in data.TASKS}
        columns["mean"] = Column(mean)
        caption = f"Addition at M = {HALF}, task arithmetic, {SCALES['tasks']}: {word}"
        sheets += grid(runs, caption, "addition", columns, at_half(MAIN))
    return sheets


def encoder() -> dict[str, Column]:
    return {
        "loss / least possible": Column(gap, ".4f"),
        "row sums: variation": Column(variation),
        "least": Column(lambda record: min(row_sums(record), default=None)),
        "largest": Column(lambda record: max(row_sums(record), default=None)),
    }


def scales(runs: Runs) -> dict[str, Column]:
    return {text: Column(runs.normal(*tested("ta", scale))) for scale, text in SCALES.items()}


def temperature(runs: Runs) -> list[Sheet]:
    caption = f"Temperature t of the softmax at M = {HALF}: encoder, and normalized accuracy of "
    caption += "task arithmetic"
    return grid(runs, caption, "addition", encoder() | scales(runs), at_half(COOLEST_FIRST))


def precision(runs: Runs) -> list[Sheet]:
    columns = {}
    for dtype in DTYPES:
        wanted = {"dtype": dtype, "stored": True}
        size = value_of("bytes", per=1e6)
        columns[f"{dtype}, MB"] = Column(size, sd=False, wanted=wanted)
        columns[dtype] = Column(runs.normal(*TA), wanted=wanted)
    caption = f"Bases in stores at M = {HALF} in three precisions: size, and normalized accuracy "
    caption += f"of task arithmetic, {SCALES['tasks']}"
    return grid(runs, caption, "addition", columns, at_half(MAIN[1:]))


def cost(runs: Runs) -> list[Sheet]:
    rows = {
        f"{name(label)}, M = {size}": {"basis": label, "num_bases": size}
        for label in MAIN
        for size in runs.having("addition", "num_bases", basis=label)
    }
    search = value_of("merges", "ta", "scales", "bases", "seconds")
    columns = {
        "size": Column(runs.stored, ".1%", sd=False),
        "build, s": Column(value_of("seconds", "build")),
        "one merge, s": Column(value_of("merges", "ta", "seconds")),
        "search, s": Column(search, ".2f"),
    }
    caption = "Cost of task arithmetic (size: of the specialists' files, without PCA's mean, one "
    caption += "vector more that its reconstructions need; search: of lambda, by "
    caption += f"{SCALES['bases']}), and its normalized accuracy"
    return grid(runs, caption, "addition", columns | scales(runs), rows)


def negation(runs: Runs) -> list[Sheet]:
    columns = {
        "target before": Column(mean_of("start")),
        "target after": Column(forgotten("target")),
        "control before": Column(forgotten("control_before")),
        "control after": Column(forgotten("control")),
        "relative error": Column(forgotten("relative_error")),
    }
    caption = f"Forgetting one task at M = {HALF}: accuracy on it and on the other nine, error of "
    caption += "its vector; means over the ten tasks"
    return grid(runs, caption, "negation", columns, at_half(NEGATION))


def negation_per_task(runs: Runs) -> list[Sheet]:
    def of(task: str, key: str) -> Column:
        return Column(value_of("tasks", task, key), sd=False)

    sheets = []
    for key, text in {
        "target": "on it, afterwards (low is good)",
        "control": "on the other nine, afterwards",
        "alpha": "what alpha was chosen (of gradient ascent: steps)",
    }.items():
        caption = (
            f"Forgetting one task at M = {HALF}: {'' if key == 'alpha' else 'accuracy '}{text}"
        )
        columns = {task.replace("_", " "): of(task, key) for task in data.TASKS}
        sheets += grid(runs, caption, "negation", columns, at_half(NEGATION))
    return sheets


def negation_by_m(runs: Runs) -> list[Sheet]:
    columns = by_size(runs, "negation", forgotten("target"))
    caption = "Forgetting one task: accuracy on it (low is good), mean over the ten tasks"
    rows = {name(basis): {"basis": basis} for basis in NEGATION}
    return grid(runs, caption, "negation", columns, rows)


def online(runs: Runs) -> list[Sheet]:
    sheets = []
    for key, text in {"tuned": "lambda tuned", "fixed": "lambda 0.3"}.items():
        columns = by_size(runs, "online", runs.normal(key, "test"), "budget", "no budget")
        caption = f"Tasks arriving one by one, {text}: normalized accuracy after the last"
        # the paper's lambda is one of sums of task vectors
        shown = [how for how in ONLINE if (key, how) != ("fixed", "magmax")]
        rows = {name(how): {"how": how} for how in shown}
        sheets += grid(runs, caption, "online", columns, rows)
    return sheets


def transfer(runs: Runs) -> list[Sheet]:
    rows = {
        name(label) + ("" if size is None else f", M = {size}"): {"basis": label, "num_bases": size}
        for label in TRANSFER
        for size in runs.having("transfer", "num_bases", basis=label)
    }
    tasks = tuple(data.UNSEEN)
    values: dict[str, Value] = {"mean of both": lambda r: over(dig(r, "result", "tasks"), tasks)}
    values |= {f"`{task}`": value_of("tasks", task) for task in tasks}
    sheets = []
    for word, value in values.items():
        shots = runs.having("transfer", "shots")
        columns = {f"shots: {k or 0}": Column(value, wanted={"shots": k}) for k in shots}
        caption = f"Few-shot transfer to tasks that no specialist has: accuracy, {word}"
        sheets += grid(runs, caption, "transfer", columns, rows)
    return sheets


def compared(runs: Runs) -> list[tuple[Record, float, float]]:
    """Additions at M = T/2 whose row sums compare: each with its variation and its accuracy."""
    value = runs.normal(*TA)
    found = [(r, variation(r), value(r)) for r in runs.find("addition", num_bases=HALF)]
    return [
        (record, unevenness, accuracy)
        for record, unevenness, accuracy in found
        if unevenness is not None
        and accuracy is not None
        and record["cell"]["basis"] not in OTHER_SIGNS
    ]


def why(runs: Runs) -> list[Sheet]:
    """Do the row sums explain what addition loses? Over cells, and over the tasks in them."""
    cells = compared(runs)
    groups: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for record, _, _ in cells:
        shares, sums = runs.share(record, *TA), row_sums(record)
        for task, own in zip(data.TASKS, sums, strict=True):
            pair = (own / statistics.fmean(sums), shares[task])
            groups.setdefault((record["train_seed"], task), []).append(pair)
    # Some tasks are easier to merge than others; what is left within one has no part in that.
    within = []
    for group in groups.values():
        x, y = map(statistics.fmean, zip(*group, strict=True))
        within += [(a - x, b - y) for a, b in group]
    facts: dict[str, float | int | None] = {
        "cells": len(cells),
        "r_variation": pearson([(x, y) for _, x, y in cells]),
        "r_tasks": pearson([pair for group in groups.values() for pair in group]),
        "r_within_tasks": pearson(within),
    }
    r, r_tasks, r_within = ("-" if v is None else f"{v:.2f}" for v in list(facts.values())[1:])
    note = (
        f"Pearson's r between that variation and that accuracy: {r} over {len(cells)} cells of "
        f"M = {HALF}; between a task's row sum (over the mean row sum) and its normalized "
        f"accuracy: {r_tasks} over {len(within)} pairs, {r_within} with each task's mean over the "
        f"cells of its training seed taken off. Without {' and '.join(OTHER_SIGNS)}, whose row "
        "sums have other signs or another scale."
    )
    caption = f"Row sums of the encoder at M = {HALF}, which are what addition sees of it, and "
    caption += "normalized accuracy of task arithmetic"
    columns = encoder() | {SCALES["tasks"]: Column(runs.normal(*TA))}
    rows = at_half([*MAIN[1:], "ae_exact_mixed"])
    return grid(runs, caption, "addition", columns, rows, facts=facts, note=note)


SHEETS = {
    make.__name__: make
    for make in (training, addition, addition_absolute, per_task, temperature, precision, cost,
                 negation, negation_per_task, negation_by_m, online, transfer, why)
}  # fmt: skip


# ------------------------------------------------------------------------------------------- output


def tables(records: Sequence[Record], preset: str, method: str) -> dict[str, str]:
    """name -> Markdown, a caption above each; a table of which nothing is known is left out."""
    runs = Runs(records, preset, method)
    made = {name: [s.markdown() for s in make(runs)] for name, make in SHEETS.items()}
    return {name: "\n".join(texts) for name, texts in made.items() if texts}


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """preset -> method -> table -> its numbers."""
    found: dict[str, Any] = {}
    for preset, method in pairs(records):
        runs = Runs(records, preset, method)
        sheets = {name: [s.plain() for s in make(runs)] for name, make in SHEETS.items()}
        found.setdefault(preset, {})[method] = {name: some for name, some in sheets.items() if some}
    return found


def listing(records: Sequence[Record]) -> str:
    """What the tables are made of, a cell a line."""
    lines = [
        json.dumps(bare({key: value for key, value in record.items() if key != "seconds"}))
        for pair in pairs(records)
        for record in Runs(records, *pair).records
    ]
    return "\n".join(lines) + "\n"


def pairs(records: Iterable[Record]) -> list[tuple[str, str]]:
    return sorted({(record["preset"], record["method"]) for record in records})


def bare(found: Any) -> Any:
    """Of the search for lambda its best, not all that it tried; null for what is no number."""
    if isinstance(found, dict):
        if isinstance(found.get("validation"), list):
            found = {**found, "validation": max(found["validation"])}
        return {key: bare(value) for key, value in sorted(found.items()) if key != "grid"}
    if isinstance(found, (list, tuple)):
        return [bare(value) for value in found]
    if isinstance(found, float):
        return float(f"{found:.6g}") if math.isfinite(found) else None
    return found


RUNS = (
    "A run is a training seed, times the seeds of a random basis or the orders of a stream. All "
    "runs share the held-out items, the few-shot examples and the orders. Seconds are of the "
    "clock, with as many other cells computed at once as there were workers."
)


def write(records: Sequence[Record], folder: Path, page: Path | None = None) -> list[Path]:
    """Tables, numbers and pictures into FOLDER, and the tables that PAGE marks into PAGE.

    The same records give the same bytes. Nothing is written before all is known.
    """
    import pictures  # needs matplotlib, and this module

    made = {pair: tables(records, *pair) for pair in pairs(records)}
    files: dict[Path, bytes] = {}
    if page is not None:
        files[page] = filled(page.read_text(encoding="utf-8"), made, str(page)).encode()
    lines = ["# MergeBench in miniature: all tables", "", RUNS, ""]
    for (preset, method), texts in made.items():
        lines += [f"## {preset}, {method}", ""]
        for title, text in texts.items():
            lines += [f"### {title}", "", text]
        for title, figure in pictures.draw(records, preset, method).items():
            picture = folder / f"{preset}-{method}-{title}.svg"
            files[picture] = pictures.svg(figure)
            lines += [f"![{preset}, {method}: {title}]({picture.name})", ""]
    files[folder / "tables.md"] = "\n".join(lines).encode()
    numbers = json.dumps(summary(records), indent=1, sort_keys=True, allow_nan=False)
    files[folder / "results.json"] = f"{numbers}\n".encode()
    files[folder / "cells.jsonl"] = listing(records).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_file(path, content)
    return list(files)


def write_study(
    study: str,
    records: Sequence[Record],
    made: Mapping[str, Sequence[Sheet]],
    drawn: Mapping[str, bytes],
    folder: Path,
    page: Path | None = None,
) -> list[Path]:
    """STUDY.json and the pictures into FOLDER, and the tables that PAGE marks into PAGE."""
    tables = {title: [each.plain() for each in some] for title, some in made.items()}
    numbers = json.dumps({"tables": tables}, indent=1, sort_keys=True).removesuffix("\n}")
    lines = listing(records).splitlines()
    numbers += ',\n "cells": [\n' + ",\n".join(lines) + "\n ]\n}\n"  # a cell a line
    files = {folder / f"{study}.json": numbers.encode()}
    files |= {folder / f"{title}.svg": picture for title, picture in drawn.items()}
    if page is not None:
        files[page] = filled_study(study, page.read_text(encoding="utf-8"), made).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_file(path, content)
    return list(files)


def filled_study(study: str, text: str, made: Mapping[str, Sequence[Sheet]]) -> str:
    """The page with the tables between `<!-- STUDY: NAME -->` and `<!-- end -->`."""

    def table(found: re.Match[str]) -> str:
        markdown = "\n".join(each.markdown() for each in made[found[2]])
        return f"{found[1]}\n\n{markdown}\n{found[3]}"

    return re.sub(rf"(<!-- {study}: (\w+) -->).*?(<!-- end -->)", table, text, flags=re.DOTALL)


MARK = re.compile(r"\s*<!-- table: (\S+) (\S+) (\S+) -->\s*")
END = "<!-- end -->"


def check_page(page: Path) -> None:
    """Before hours of work: raise unless all marks of a page are closed, and name tables."""
    filled(page.read_text(encoding="utf-8"), {}, str(page))


def filled(text: str, made: Mapping[tuple[str, str], Mapping[str, str]], where: str) -> str:
    """The page with the tables between its marks; those of other presets and methods stay."""
    lines, inside, keep = [], 0, True
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        mark = MARK.fullmatch(line)
        if mark or line.lstrip().startswith("<!-- table:"):
            if inside:
                break
            if mark is None or mark[3] not in SHEETS:
                raise click.ClickException(
                    f"{where}, line {number}: {line.strip()} names no table; expected "
                    f"<!-- table: PRESET METHOD NAME -->, NAME one of {', '.join(SHEETS)}"
                )
            tables = made.get((mark[1], mark[2]))
            inside, keep = number, tables is None
            lines.append(line)
            if tables is not None:
                lines += [
                    "\n",
                    tables.get(mark[3], "(nothing was measured)\n"),
                    "\n",
                ]
            continue
        if line.strip() == END:
            inside, keep = 0, True
        if keep:
            lines.append(line)
    if inside:
        raise click.ClickException(f"{where}, line {inside}: no {END} after this table")
    return "".join(lines)
