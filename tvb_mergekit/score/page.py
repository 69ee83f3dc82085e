"""The result as one HTML page that refers to no other file and runs no script.

`page.html` is a template that escapes all text; the picture is drawn by matplotlib, letters as
outlines. The policy in the page forbids whatever a slip in escaping would let in. The picture shows
the scores of several models on one axis per task or category, in percent of the specialists'. A
table always gives the same bytes. matplotlib (the extra `plot`) is imported only inside functions.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.figures import DARK, LABEL, MADE, embedded, rendered
from tvb_mergekit.score.benchmark import HERE, Category, Task
from tvb_mergekit.score.columns import Column
from tvb_mergekit.score.table import Table
from tvb_mergekit.score.text import HOW, HOW_PAIRS, pair_sheets, score_sheet
from tvb_mergekit.tables import Sheet, printable, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

By = Literal["tasks", "categories"]
MOST = 200.0  # percent; larger values are drawn there
# Contrast to each wedge at least 3:1 (WCAG 2.2, 1.4.11); markers and dashes differ too.
LINES = ("#0072b2", "#a84300", "#00664a", "#9c3d74", "#7a5400", "#5b3fa0", "#000000")
BASE = "#666666"
MARKERS, DASHES = "osD^vPX*", ("-", "--", "-.", ":")
# Tol's pale colours, for the categories behind the lines
WEDGES = ("#bbccee", "#ccddaa", "#eeeebb", "#ffcccc", "#cceeff", "#dddddd")


def page(table: Table, svg: bytes | None = None) -> str:
    """Make the page: table, picture, paired differences, floors, gaps, warnings, models."""
    environment = Environment(
        autoescape=True, finalize=_shown, trim_blocks=True, undefined=StrictUndefined
    )
    environment.filters["number"] = _number
    template = environment.from_string((HERE / "page.html").read_text(encoding="utf-8"))
    return template.render(
        made=MADE,
        table=table,
        scores=score_sheet(table),
        how=HOW,
        picture=svg and Markup(embedded(svg.decode(), printable(heading(table)))),
        pairs=pair_sheets(table),
        how_pairs=HOW_PAIRS,
        models=list(_models(table)),
    )


def _shown(value: object) -> object:
    """Keep the lines of a text, and spell unprintable characters out."""
    if isinstance(value, Markup):
        return value
    return "\n".join(map(printable, str(value).replace("\t", "    ").splitlines()))


def _number(cell: str) -> Markup:
    """Escape a cell, so that phones break it before ± and p only."""
    return escape(_shown(cell)).replace("± ", "±\u00a0").replace(" p ", " p\u00a0")


def _models(table: Table) -> Iterator[tuple[str, list[str | Sheet], str | None]]:
    """Yield a title for each column's models, notes and facts, and the recipe in its folder."""
    from tvb_mergekit.store.facts import FACTS, FOLDER

    for column in table.columns:
        cells = column.tasks.values()
        for model in sorted({c.origin.model for c in cells if c.origin and c.origin.model}):
            recipe, facts = Path(model, "mergekit_config.yml"), Path(model, FOLDER, FACTS)
            found = [f for f in (recipe, facts) if os.path.isfile(f) and os.access(f, os.R_OK)]
            notes: list[str | Sheet] = []
            text = None
            if found and not os.path.isabs(model):
                notes.append(f"Found as {model} from the current folder.")
            if found and (doubt := _doubt(table, column, model, found)):
                notes.append(f"No recipe: {doubt}.")
            else:
                notes += [_facts(facts)] if facts in found else []
                if recipe in found:
                    text = recipe.read_text("utf-8", "replace")
                else:
                    notes.append("No recipe next to its weights, as seen from the current folder.")
            yield f"{column.label}: {model}", notes, text


def _doubt(table: Table, column: Column, model: str, found: Iterable[Path]) -> str | None:
    """Return why files in the model's folder may belong to another model than the one that ran."""
    own = {n: c for n, c in column.tasks.items() if c.origin and c.origin.model == model}
    for other in table.columns:
        for name in (name for name in own if name in other.tasks):
            rival = other.tasks[name]
            place = rival.origin.model if rival.origin else None
            if (
                rival.value != own[name].value
                and place
                and os.path.realpath(place) == os.path.realpath(model)
            ):
                return f"{other.label} was run from the same folder, with another score of {name}"
    dates = [cell.origin.date or 0.0 for cell in own.values() if cell.origin]
    if not all(dates):
        return "its results do not say when they were run"
    newer = [file.name for file in found if os.path.getmtime(file) > min(dates)]
    return f"{listed(newer)} changed after this run" if newer else None


def _facts(file: Path) -> str | Sheet:
    """Show `basis.json` as a table, or why it cannot be read."""
    from tvb_mergekit.store.facts import read_facts

    try:
        facts = read_facts(file)
    except UserError as error:
        return str(error)
    shown = {
        "method": facts.method,
        "bases": f"{facts.num_bases} of {len(facts.tasks)} task vectors",
        "tasks": ", ".join(facts.tasks),
        "base model": facts.base_model,
        **{key: value for key, value in facts.parameters.items() if value is not None},
    }
    if facts.retained_energy is not None:
        shown["retained energy"] = f"{100 * facts.retained_energy:.2f} %"
    for name, value in shown.items():
        if isinstance(value, dict):
            shown[name] = ", ".join(f"{k} {v}" for k, v in value.items())
    return Sheet("", ("", "value"), [(n, str(v)) for n, v in shown.items()], ("value",))


def radar(table: Table, kind: str, by: By = "tasks") -> bytes:
    """Draw the compared categories as png, svg or pdf; a missing score is a gap in its line.

    The table needs specialists.
    """
    return rendered(lambda: _figure(table, by), kind)


def heading(table: Table) -> str:
    what = f"{table.benchmark.title}: percent of the specialists' scores"
    return what + table.title.removeprefix(table.benchmark.title)


def _figure(table: Table, by: By) -> Figure:
    from matplotlib.figure import Figure

    columns = [column for column in table.columns if column.kind != "specialists"]
    parts: list[Task | Category] = [*table.compared]
    if by == "tasks":
        parts = [task for category in table.compared for task in category.tasks]
    values = np.array(  # [columns, spokes], None is NaN
        [[table.relative(column, part) for part in parts] for column in columns], dtype=float
    ).reshape(len(columns), len(parts))
    title = heading(table)
    if (values > MOST).any():
        title += f"; what is above {MOST:.0f} is drawn at {MOST:.0f}"
    values = np.minimum(values, MOST)
    highest = float(np.max(values, initial=100.0, where=np.isfinite(values)))

    height = 5.6 + 0.2 * max(len(columns) + 2, len(table.compared))  # upright, for a phone
    figure = Figure(figsize=(6.4, height), layout="constrained")
    figure.suptitle(textwrap.fill(printable(title), 60), x=0.01, ha="left", weight="bold")
    axes: Any = figure.add_subplot(projection="polar")
    step, top = 2 * math.pi / len(parts), 20 * math.ceil((highest + 5) / 20)
    angles = step * np.arange(len(parts))
    axes.set(theta_zero_location="N", theta_direction=-1, ylim=(0, top))
    axes.set(yticks=range(40, top + 1, 40), rlabel_position=math.degrees(step / 2))
    axes.tick_params(axis="y", labelsize=8, labelcolor="#555555")
    axes.tick_params(axis="x", pad=6)
    axes.grid(color="white", linewidth=0.9)
    axes.spines["polar"].set_visible(False)
    axes.set_xticks(angles, [_short(part.label) for part in parts])
    for label, across in zip(axes.get_xticklabels(), np.sin(angles), strict=True):
        label.set_ha("center" if abs(across) < 0.1 else "left" if across > 0 else "right")
    wedges = _draw_wedges(axes, table.compared, top, step, by)
    circle = np.linspace(0, 2 * math.pi, 361), np.full(361, 100.0)
    axes.plot(*circle, color=DARK, lw=1.2, linestyle=(0, (4, 2)), label="specialists: 100")
    for index, (column, row) in enumerate(zip(columns, values, strict=True)):
        total = table.normalized(column)
        axes.plot(
            np.append(angles, angles[:1]),
            np.append(row, row[:1]),
            color=BASE if column.kind == "base" else LINES[index % len(LINES)],
            linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            linewidth=1.8,
            label=_short(column.head) + ("" if total is None else f": {total.value:.2f}"),
            clip_on=False,
        )
    lines, _ = axes.get_legend_handles_labels()
    figure.legend(handles=wedges, loc="outside lower right")
    figure.legend(handles=lines, title="normalized accuracy", loc="outside lower left")
    return figure


def _draw_wedges(
    axes: Any, categories: tuple[Category, ...], top: int, step: float, by: By
) -> list[Any]:
    from matplotlib.patches import Patch

    wedges, start = [], -step / 2
    for index, category in enumerate(categories):
        colour = WEDGES[index % len(WEDGES)]
        size = step * (len(category.tasks) if by == "tasks" else 1)
        axes.bar(start, top, size, align="edge", color=colour, zorder=0)
        wedges.append(Patch(color=colour, label=_short(category.label)))
        start += size
    return wedges


def _short(text: str) -> str:
    return shortened(printable(text), LABEL)
