"""A table of scores as Markdown, on the terminal, and as one HTML page.

The page refers to no other file and runs no script. `page.html` is a template that escapes all
text, and the policy in the page forbids whatever a slip in escaping would let in. The picture shows
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
from rich.console import Console
from rich.text import Text

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.figures import DARK, LABEL, MADE, embedded, rendered
from tvb_mergekit.score.benchmark import HERE, Category, Task
from tvb_mergekit.score.columns import Cell, Column
from tvb_mergekit.score.floors import Remark
from tvb_mergekit.score.pairs import Difference, Pair
from tvb_mergekit.score.table import Table
from tvb_mergekit.tables import Sheet, escaped, markdown_table, printable, shortened, show

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

HEAD = 24  # characters of a column's label
MOST_PAIRS = 3  # with more pairs, the terminal does not show their tasks
HOW = (
    "Percent, ± the standard error if all its parts are known. Normalized accuracy is the "
    "sum of the category means over the same sum for the specialists. The errors assume that tasks "
    "are independent. Model and specialists answer the same items, so errors of the normalized "
    "accuracy are rather too large."
)
HOW_PAIRS = (
    "Differences over the same items, ± their standard error, and p of a sign-flip test (its mid-p "
    "value; McNemar's if scores are 0 or 1). p is corrected by Holm's method: over the tasks of "
    "all pairs, and over the pairs for all tasks together. * is a p below 0.05."
)


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
    folder = os.path.realpath(model)
    for other in table.columns:
        for name in (name for name in own if name in other.tasks):
            rival = other.tasks[name]
            place = rival.origin.model if rival.origin else None
            if rival.value != own[name].value and place and os.path.realpath(place) == folder:
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
    from matplotlib.patches import Patch

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
    colours = [WEDGES[index % len(WEDGES)] for index in range(len(table.compared))]
    sizes = [step * (len(c.tasks) if by == "tasks" else 1) for c in table.compared]
    axes.bar(np.cumsum([-step / 2, *sizes[:-1]]), top, sizes, align="edge", color=colours, zorder=0)
    named = zip(colours, table.compared, strict=True)
    wedges = [Patch(color=colour, label=_short(category.label)) for colour, category in named]
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


def _short(text: str, most: int = LABEL) -> str:
    return shortened(printable(text), most)


def markdown(table: Table) -> str:
    """Return the text of `scores.md`."""
    several = sum(column.kind == "model" for column in table.columns) > 1
    how = HOW + (" The best of the models is bold." if several else "")
    parts = [f"# {escaped(table.title)}", markdown_table(_score_lines(table), left=2), how]
    if table.pairs:
        sheets = [(sheet.head, *sheet.rows) for sheet in pair_sheets(table)]
        tables = [markdown_table([[*map(escaped, row)] for row in rows]) for rows in sheets]
        parts += ["## Paired differences", *tables, escaped(HOW_PAIRS)]
    if lines := [line for remark in table.remarks for line in _remark_lines(remark)]:
        items = (f"{'  ' if x.startswith(' ') else ''}* {escaped(x.strip())}" for x in lines)
        parts += ["## Floors", "\n".join(items)]
    for title, found in (("Missing", table.gaps()), ("Warnings", table.warnings)):
        if found:
            plain = (printable(line).replace("<", "\\<") for line in found)
            parts += [f"## {title}", "\n".join(f"* {line}" for line in plain)]
    return "\n\n".join([*parts, f"{MADE}."]) + "\n"


def _score_lines(table: Table) -> list[list[str]]:
    lines = [["Category", "Task", *(escaped(column.head) for column in table.columns)]]
    for row in table.rows():
        texts = [cell_text(cell) for cell in row.cells]
        models = {  # the best of several is bold, by printed digits
            place: round(cell.value, 2)
            for place, (column, cell) in enumerate(zip(table.columns, row.cells, strict=True))
            if column.kind == "model" and cell is not None
        }
        for place, value in models.items():
            if len(models) > 1 and value == max(models.values()):
                texts[place] = f"**{texts[place]}**"
        if row.category is None:
            names = [f"*{_last(table)}*", ""]
        elif row.task is None:
            names = [f"*{escaped(row.category.label)}*", "*mean*"]
        else:
            names = [escaped(row.category.label), escaped(row.task.label)]
        lines.append([*names, *texts])
    return lines


def print_table(table: Table, console: Console) -> None:
    """Print the table in blocks of as many columns as fit, pairs, remarks and gaps."""
    sheets = pair_sheets(table)
    parts: list[Sheet | str] = [score_sheet(table)]
    parts += sheets[: 2 if len(table.pairs) <= MOST_PAIRS else 1]
    for part in (*parts, *([HOW_PAIRS] if sheets else [])):
        show([part], console)
        console.print()
    lines = [line for remark in table.remarks for line in _remark_lines(remark)]
    for line in (*lines, *table.gaps()):  # unbroken: gaps hold commands to be copied
        console.print(Text(printable(line, console.options.ascii_only)), soft_wrap=True)


def score_sheet(table: Table) -> Sheet:
    """Return the table with each category's mean above its tasks."""
    order = [*table.benchmark.categories, None]
    rows = sorted(table.rows(), key=lambda row: (order.index(row.category), row.task is not None))
    named = []
    for row in rows:
        label = row.category.label if row.category else _last(table)
        named.append((f"  {row.task.label}" if row.task else label, *map(cell_text, row.cells)))
    bold = frozenset(place for place, row in enumerate(rows) if not row.task)
    heads = (_short(column.head, HEAD) for column in table.columns)
    return Sheet(table.title, ("", *heads), named, bold=bold)


def pair_sheets(table: Table) -> list[Sheet]:
    """Return two tables: wins of each pair, and differences of each task. Empty without pairs."""
    if not table.pairs:
        return []
    labels = {task.name: task.label for task in table.benchmark.tasks}
    names = [f"{_short(pair.other, HEAD)} − {_short(pair.one, HEAD)}" for pair in table.pairs]

    def ahead(pair: Pair, sign: int) -> str:
        tasks = [labels[name] for name in pair.ahead(sign)]
        return f"{len(tasks)}: {listed(tasks)}" if tasks else "0"

    def single(found: Difference | None) -> str:
        return " p ".join(_difference_texts(found)) if found else cell_text(None)

    what = "Normalized accuracy" if table.specialists else "Mean of the categories"
    better = ("tasks better", "tasks worse")
    wholes = [(*_difference_texts(p.whole), ahead(p, 1), ahead(p, -1)) for p in table.pairs]
    wins = [(name, *whole) for name, whole in zip(names, wholes, strict=True)]
    tasks = [
        (label, *(single(pair.tasks.get(task)) for pair in table.pairs))
        for task, label in labels.items()
        if any(task in pair.tasks for pair in table.pairs)
    ]
    return [
        Sheet("Better beyond chance", ("", what, "p", *better), wins, left=better),
        Sheet("Paired differences of each task", ("", *names), tasks),
    ]


def _difference_texts(found: Difference | None) -> tuple[str, str]:
    """Return the difference with its standard error, and corrected p with a star below 0.05."""
    if found is None:
        return cell_text(None), cell_text(None)
    error = "" if found.stderr is None else f" ± {found.stderr:.2f}"
    p = "<0.001" if found.corrected < 0.001 else f"{found.corrected:.3f}"
    value = round(found.value, 2) + 0.0  # no minus before a zero
    return f"{value:+.2f}{error}", p + ("*" if found.beyond_chance else "")


def _remark_lines(remark: Remark) -> list[str]:
    answers = [f"  item {a.doc_id}, wanted {a.target!r}: {a.text!r}" for a in remark.answers]
    return [remark.line, *answers]


def cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "—"
    return f"{cell.value:.2f}" + ("" if cell.stderr is None else f" ± {cell.stderr:.2f}")


def _last(table: Table) -> str:
    return f"Average normalized accuracy{' (partial)' if table.is_partial else ''}"
