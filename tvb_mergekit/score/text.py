"""A table of scores as Markdown, and on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tvb_mergekit.errors import listed
from tvb_mergekit.figures import MADE
from tvb_mergekit.score.columns import Cell
from tvb_mergekit.score.floors import Remark
from tvb_mergekit.score.pairs import Difference
from tvb_mergekit.score.table import Row, Table
from tvb_mergekit.tables import (
    Sheet,
    escaped,
    markdown_table,
    print_sheet,
    printable,
    say,
    shortened,
)

LABEL = 24  # characters of a column's label on the terminal
MOST_PAIRS = 3  # whose tasks the terminal shows; --out has all
HOW = (
    "Percent, ± the standard error where all that it needs is known. Normalized accuracy is the "
    "sum of the category means over the same sum for the specialists. Tasks are taken as "
    "independent for the errors; model and specialists answer the same items, so those of the "
    "normalized accuracy are rather too large."
)
HOW_PAIRS = (
    "Differences over the same items, ± their standard error, and p of a sign-flip test (its mid-p "
    "value; McNemar's where scores are 0 or 1). p is corrected by Holm's method: over the tasks of "
    "all pairs, and over the pairs for all tasks together. * is a p below 0.05."
)


def markdown(table: Table) -> str:
    """The text of `scores.md`."""
    lines = [["Category", "Task", *(escaped(column.head) for column in table.columns)]]
    for row in table.rows():
        texts = [cell_text(cell) for cell in row.cells]
        for place in best(table, row):
            texts[place] = f"**{texts[place]}**"
        if row.category is None:
            names = [f"*{_last(table)}*", ""]
        elif row.task is None:
            names = [f"*{escaped(row.category.label)}*", "*mean*"]
        else:
            names = [escaped(row.category.label), escaped(row.task.label)]
        lines.append([*names, *texts])
    several = sum(column.kind == "model" for column in table.columns) > 1
    how = HOW + (" The best of the models is bold." if several else "")
    parts = [f"# {escaped(table.title)}", markdown_table(lines, left=2), how]
    if table.pairs:
        sheets = [(sheet.head, *sheet.rows) for sheet in pair_sheets(table)]
        tables = [markdown_table([[*map(escaped, row)] for row in rows]) for rows in sheets]
        parts += ["## Paired differences", *tables, escaped(HOW_PAIRS)]
    if table.remarks:
        told = [line for remark in table.remarks for line in remark_lines(remark)]
        items = (f"{'  ' if x.startswith(' ') else ''}* {escaped(x.strip())}" for x in told)
        parts += ["## Floors", "\n".join(items)]
    for title, found in (("Missing", table.gaps()), ("Warnings", table.warnings)):
        if found:
            plain = (printable(line).replace("<", "\\<") for line in found)
            parts += [f"## {title}", "\n".join(f"* {line}" for line in plain)]
    return "\n\n".join([*parts, f"{MADE}."]) + "\n"


def print_table(table: Table, console: Console) -> None:
    """Print it in blocks of as many columns as fit; a category's row holds its mean."""
    ascii_only = console.options.ascii_only
    print_sheet(score_sheet(table, ascii_only), console)
    console.print()
    sheets = pair_sheets(table, ascii_only)
    for sheet in sheets[: 2 if len(table.pairs) <= MOST_PAIRS else 1]:
        print_sheet(sheet, console)
        console.print()
    if sheets:
        say(HOW_PAIRS, console)
        console.print()
    lines = [line for remark in table.remarks for line in remark_lines(remark)]
    for line in (*lines, *table.gaps()):  # unbroken: the gaps hold commands to be copied
        console.print(Text(printable(line, ascii_only)), soft_wrap=True)


def score_sheet(table: Table, ascii_only: bool = False) -> Sheet:
    """The table with each category's mean above its tasks."""
    heads = [shortened(printable(c.head, ascii_only), LABEL, ascii_only) for c in table.columns]
    order = [*table.benchmark.categories, None]
    rows = sorted(table.rows(), key=lambda row: (order.index(row.category), row.task is not None))
    named = []
    for row in rows:
        label = row.category.label if row.category else _last(table)
        cells = (cell_text(cell, ascii_only) for cell in row.cells)
        named.append((f"  {row.task.label}" if row.task else label, *cells))
    bold = frozenset(place for place, row in enumerate(rows) if not row.task)
    return Sheet(table.title, ("", *heads), named, bold=bold)


def pair_sheets(table: Table, ascii_only: bool = False) -> list[Sheet]:
    """Without pairs none; else who is better than whom, a row for each pair, and the differences
    of each task, a column for each pair."""
    if not table.pairs:
        return []
    minus = "-" if ascii_only else "−"
    labels = {task.name: task.label for task in table.benchmark.tasks}
    named = [
        f" {minus} ".join(shortened(printable(x, ascii_only), LABEL, ascii_only) for x in pair)
        for pair in ((pair.other, pair.one) for pair in table.pairs)
    ]

    def tasks(names: list[str]) -> str:
        return f"{len(names)}: {listed([labels[name] for name in names])}" if names else "0"

    what = "Normalized accuracy" if table.specialists else "Mean of the categories"
    whole = [
        (name, *difference_texts(p.whole, ascii_only), tasks(p.ahead(1)), tasks(p.ahead(-1)))
        for name, p in zip(named, table.pairs, strict=True)
    ]
    better = ("tasks better", "tasks worse")
    single = [
        (
            label,
            *(
                " p ".join(difference_texts(p.tasks[name], ascii_only))
                if name in p.tasks
                else cell_text(None, ascii_only)
                for p in table.pairs
            ),
        )
        for name, label in labels.items()
        if any(name in pair.tasks for pair in table.pairs)
    ]
    return [
        Sheet("Better beyond chance", ("", what, "p", *better), whole, left=better),
        Sheet("Paired differences of each task", ("", *named), single),
    ]


def difference_texts(found: Difference | None, ascii_only: bool = False) -> tuple[str, str]:
    """Difference with standard error, and corrected p with a star below 0.05."""
    if found is None:
        return cell_text(None, ascii_only), cell_text(None, ascii_only)
    sign = "+-" if ascii_only else "±"
    error = "" if found.stderr is None else f" {sign} {found.stderr:.2f}"
    p = "<0.001" if found.corrected < 0.001 else f"{found.corrected:.3f}"
    value = round(found.value, 2) + 0.0  # no minus before a zero
    return f"{value:+.2f}{error}", p + ("*" if found.beyond_chance else "")


def remark_lines(remark: Remark) -> list[str]:
    """The remark, and a line for each answer."""
    answers = [
        f"  item {answer.doc_id}, wanted {answer.target!r}: {answer.text!r}"
        for answer in remark.answers
    ]
    return [remark.line, *answers]


def cell_text(cell: Cell | None, ascii_only: bool = False) -> str:
    """Percent with two decimals, as in the paper."""
    if cell is None:
        return "-" if ascii_only else "—"
    sign = "+-" if ascii_only else "±"
    return f"{cell.value:.2f}" + ("" if cell.stderr is None else f" {sign} {cell.stderr:.2f}")


def best(table: Table, row: Row) -> list[int]:
    """The columns of the best models in a row, by what is printed; none of a single model's."""
    models = {
        place: round(cell.value, 2)
        for place, (column, cell) in enumerate(zip(table.columns, row.cells, strict=True))
        if column.kind == "model" and cell is not None
    }
    top = max(models.values(), default=0.0)
    return [place for place, value in models.items() if len(models) > 1 and value == top]


def _last(table: Table) -> str:
    return f"Average normalized accuracy{' (partial)' if table.is_partial else ''}"
