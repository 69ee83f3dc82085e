"""What a tuning leaves: tables, tune.json, the curve, tuned.yml, and the items for the test.

Nothing here depends on the time of day or on interruptions: the same scores give the same files.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from tvb_mergekit.inspection import Sheet, blocks, printable, shortened
from tvb_mergekit.output import listed
from tvb_mergekit.plots import BLUE, DARK, ORANGE, PALE, rendered, write_file
from tvb_mergekit.tuning.harness import Entry, Scored
from tvb_mergekit.tuning.objective import Estimate, Objective
from tvb_mergekit.tuning.record import FORMAT_VERSION
from tvb_mergekit.tuning.running import Row, Tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY, TABLE, RECIPE, CURVE, REST = (
    *("tune.json", "tune.md", "tuned.yml", "curve.png", "test_samples.json"),
)
LABEL = 24  # characters of a column's head
NO_PICTURE = "no curve.png without matplotlib: pip install 'tvb-mergekit[plot]'"


def write(tuned: Tuned) -> list[str]:
    """Write the files into OUT; returns what could not be written."""
    out = tuned.request.out
    write_file(out / SUMMARY, _text(summary(tuned)))
    write_file(out / TABLE, markdown(tuned).encode())
    write_file(out / RECIPE, recipe_text(tuned).encode())
    rest = {part.task: list(part.rest) for e in entries(tuned) for part in e.parts if part.rest}
    if rest:
        write_file(out / REST, _text(rest))
    if importlib.util.find_spec("matplotlib") is None:
        return [NO_PICTURE]
    write_file(out / CURVE, rendered(lambda: _figure(tuned), "png"))
    return []


def _text(facts: Mapping[str, Any]) -> bytes:
    return (json.dumps(facts, indent=1) + "\n").encode()


def entries(tuned: Tuned) -> list[Entry]:
    return [*tuned.goal.entries, *(tuned.control.entries if tuned.control else ())]


def summary(tuned: Tuned) -> dict[str, Any]:
    """`tune.json`."""
    request, choice = tuned.request, tuned.choice
    return {
        "format_version": FORMAT_VERSION,
        "coefficient": tuned.recipe.key,
        "factor": tuned.recipe.factor,
        "best": _row(tuned, tuned.best),
        "search": {
            "kind": request.search,
            "grid": request.grid,
            "per_basis": request.per_basis,
            "early_stop": request.early_stop,
            "keep": request.keep if tuned.control else None,
        },
        "items": {
            "limit": choice.limit,
            "share": choice.share,
            "test_share": choice.test_share,
            "seed": choice.seed,
        },
        "tasks": {
            entry.name: {
                "metrics": list(entry.metrics),
                "role": "target" if entry in tuned.goal.entries else "control",
                "reference": {
                    metric: tuned.goal.reference[entry.name, metric]
                    for metric in entry.metrics
                    if (entry.name, metric) in tuned.goal.reference
                },
                "parts": [
                    {
                        "task": part.task,
                        "split": part.split,
                        "items": part.total,
                        "chosen": list(part.chosen),
                        "left_to_test": None if part.rest is None else list(part.rest),
                    }
                    for part in entry.parts
                ],
            }
            for entry in entries(tuned)
        },
        "points": [_row(tuned, row) for row in tuned.rows],
        "decided_by": dict(tuned.facts),
    }


def _row(tuned: Tuned, row: Row) -> dict[str, Any]:
    def number(estimate: Estimate | None) -> dict[str, float | None] | None:
        return None if estimate is None else {"value": estimate.value, "stderr": estimate.stderr}

    return {
        tuned.recipe.key: row.point.value,
        **({"weights": list(row.point.weights)} if row.point.weights else {}),
        "score": number(row.target),
        **({"control": number(row.control)} if tuned.control else {}),
        "tasks": {
            name: {"values": dict(s.values), "stderrs": dict(s.stderrs)}
            for name, s in row.scored.items()
        },
    }


def sheet(tuned: Tuned) -> Sheet:
    """A row for each point in the order of the coefficient; the chosen one has a star."""
    targets, control = tuned.goal, tuned.control
    what = "share of the reference" if targets.reference else "score"
    one = len(entries(tuned)) == 1
    head = [tuned.recipe.key, f"mean {what}", *(["control"] if control else [])]
    head += [] if one else [entry.name for entry in entries(tuned)]
    rows = []
    for row in sorted(tuned.rows, key=lambda row: (row.point.weights != (), row.point.value)):
        cells = [_number(row.target) if row.target else "given up"]
        cells += [_number(row.control)] if control else []
        for entry in [] if one else entries(tuned):
            goal = targets if entry in targets.entries else control
            assert goal is not None
            cells.append(_cell(goal, entry, row.scored.get(entry.name)))
        star = " *" if row.point == tuned.best.point else ""
        rows.append((f"{row.point}{star}", *cells))
    return Sheet(headline(tuned), tuple(head), rows)


def _cell(goal: Objective, entry: Entry, scored: Scored | None) -> str:
    return "" if scored is None else _number(goal.of(entry, scored))


def _number(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    error = "" if estimate.stderr is None else f" ± {estimate.stderr:.4f}"
    return f"{estimate.value:.4f}{error}"


def headline(tuned: Tuned) -> str:
    """What was found, in one line."""
    best, key = tuned.best, tuned.recipe.key
    found = f"{key} {best.point}: {_number(best.target)}"
    if tuned.control is None:
        return found
    return f"{found}, control {_number(best.control)}"


def print_table(tuned: Tuned, console: Console) -> None:
    """On the terminal, in blocks of as many columns as fit."""
    table = sheet(tuned)
    head = tuple(shortened(printable(name), LABEL) for name in table.head)
    for block in blocks(Sheet(table.title, head, table.rows), console.width):
        lines = [block.head, *block.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for index, line in enumerate(lines):
            text = "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
            console.print(Text(text.rstrip(), "bold" if index == 0 else ""), soft_wrap=True)
        console.print()
    console.print(Text(table.title, "bold"), soft_wrap=True)


def markdown(tuned: Tuned) -> str:
    """`tune.md`."""
    table = sheet(tuned)
    lines = [table.head, ("---",) * len(table.head), *table.rows]
    set_ = "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines)
    return f"# {table.title}\n\n{set_}\n\n" + "\n".join(f"* {line}" for line in how(tuned)) + "\n"


def _escaped(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def how(tuned: Tuned) -> list[str]:
    """How the coefficient was found, in lines."""
    request, recipe = tuned.request, tuned.recipe
    kind = "golden-section search" if request.search == "golden" else "grid"
    lines = [f"{recipe.key}: {kind} over {request.grid}, {len(tuned.rows)} points scored"]
    if recipe.factor:
        lines.append(f"{recipe.key} multiplies the recipe's own gradients and filters")
    if not recipe.linear:
        lines.append(f"draws at random: merge it with mergekit-yaml --random-seed {recipe.seed}")
    if tuned.best.point.weights:
        lines.append("then a weight for each basis, by Powell's method")
    if tuned.control is not None:
        lines.append(
            f"the smallest target score that keeps {request.keep:g} of the control score at 0"
        )
    for entry in entries(tuned):
        role = "control " if entry not in tuned.goal.entries else ""
        items = ", ".join(
            f"{len(part.chosen)} of {part.total} {part.split} items" for part in entry.parts[:1]
        )
        more = f" and {len(entry.parts) - 1} parts more" if len(entry.parts) > 1 else ""
        metrics = " and ".join(entry.metrics)
        lines.append(f"{role}{entry.name}: {metrics} on {items}{more}, seed {tuned.choice.seed}")
    if tuned.goal.reference:
        lines.append(f"scores are shares of those in {request.reference}")
    return [*lines, *tuned.notes]


def recipe_text(tuned: Tuned) -> str:
    """`tuned.yml`: the recipe with the coefficient written in, and how it was found."""
    lines = ["Found by tvb tune.", headline(tuned), *how(tuned)]
    comment = "".join(f"# {printable(line)}\n" for line in lines)
    return f"{comment}\n{tuned.recipe.tuned(tuned.best.point)}"


def _figure(tuned: Tuned) -> Figure:
    from matplotlib.figure import Figure

    rows = sorted(
        (row for row in tuned.rows if not row.point.weights), key=lambda row: row.point.value
    )
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(shortened(printable(headline(tuned)), 80))
    for entry in tuned.goal.entries if len(tuned.goal.entries) > 1 else ():
        pairs = [(r.point.value, r.scored[entry.name]) for r in rows if entry.name in r.scored]
        values = [tuned.goal.of(entry, scored).value for _, scored in pairs]
        axes.plot([x for x, _ in pairs], values, color=PALE, linewidth=0.8, zorder=1)
    goals = [("mean" if len(tuned.goal.entries) > 1 else tuned.goal.entries[0].name, BLUE, 0)]
    if tuned.control is not None:
        goals.append((f"control: {listed([e.name for e in tuned.control.entries])}", ORANGE, 1))
    for label, colour, place in goals:
        found = [(r.point.value, e) for r in rows if (e := (r.target, r.control)[place])]
        places, values = [x for x, _ in found], [estimate.value for _, estimate in found]
        axes.plot(places, values, "o-", color=colour, markersize=4, label=printable(label))
        if all(estimate.stderr is not None for _, estimate in found):
            spread = [estimate.stderr or 0.0 for _, estimate in found]
            low = [v - s for v, s in zip(values, spread, strict=True)]
            high = [v + s for v, s in zip(values, spread, strict=True)]
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    if tuned.control is not None and (start := rows[0].control) is not None:
        least = tuned.request.keep * start.value
        axes.axhline(least, color=ORANGE, linewidth=0.8, linestyle="--",
                     label=f"{tuned.request.keep:g} of the control score at 0")  # fmt: skip
    axes.axvline(tuned.best.point.value, color=DARK, linewidth=0.8, linestyle=":")
    axes.set_xlabel(tuned.recipe.key)
    axes.set_ylabel(
        "share of the reference" if tuned.goal.reference else "score, ± 1 standard error"
    )
    axes.legend(loc="best")
    return figure
