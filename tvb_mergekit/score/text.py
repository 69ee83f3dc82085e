"""A table of scores as Markdown and on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tvb_mergekit.errors import listed
from tvb_mergekit.figures import MADE
from tvb_mergekit.score.columns import Cell
from tvb_mergekit.score.pairs import Difference, Pair
from tvb_mergekit.score.table import Table
from tvb_mergekit.tables import Sheet, escaped, markdown_table, printable, shortened, show

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


def markdown(table: Table) -> str:
    """Return the text of `scores.md`."""
    several = sum(column.kind == "model" for column in table.columns) > 1
    how = HOW + (" The best of the models is bold." if several else "")
    parts = [f"# {escaped(table.title)}", markdown_table(_score_lines(table), left=2), how]
    if table.pairs:
        sheets = [(sheet.head, *sheet.rows) for sheet in pair_sheets(table)]
        tables = [markdown_table([[*map(escaped, row)] for row in rows]) for rows in sheets]
        parts += ["## Paired differences", *tables, escaped(HOW_PAIRS)]
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
    """Print the table in blocks of as many columns as fit, pairs and gaps."""
    sheets = pair_sheets(table)
    parts: list[Sheet | str] = [score_sheet(table)]
    parts += sheets[: 2 if len(table.pairs) <= MOST_PAIRS else 1]
    for part in (*parts, *([HOW_PAIRS] if sheets else [])):
        show([part], console)
        console.print()
    for line in table.gaps():  # unbroken: gaps hold commands to be copied
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
    heads = (shortened(printable(column.head), HEAD) for column in table.columns)
    return Sheet(table.title, ("", *heads), named, bold=bold)


def pair_sheets(table: Table) -> list[Sheet]:
    """Return two tables: wins of each pair, and differences of each task. Empty without pairs."""
    if not table.pairs:
        return []
    labels = {task.name: task.label for task in table.benchmark.tasks}
    ends = ((pair.other, pair.one) for pair in table.pairs)
    names = [" − ".join(shortened(printable(end), HEAD) for end in each) for each in ends]

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


def cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "—"
    return f"{cell.value:.2f}" + ("" if cell.stderr is None else f" ± {cell.stderr:.2f}")


def _last(table: Table) -> str:
    return f"Average normalized accuracy{' (partial)' if table.is_partial else ''}"
