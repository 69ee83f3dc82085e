"""A table of scores as Markdown, and on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tvb_mergekit.score.columns import Cell
from tvb_mergekit.score.table import Row, Table
from tvb_mergekit.tables import Sheet, escaped, markdown_table, print_sheet, printable, shortened

LABEL = 24  # characters of a column's label on the terminal
HOW = (
    "Percent, ± the standard error where all that it needs is known. Normalized accuracy is the "
    "sum of the category means over the same sum for the specialists. Tasks are taken as "
    "independent for the errors; model and specialists answer the same items, so those of the "
    "normalized accuracy are rather too large."
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
            names = [f"*{row.category.label}*", "*mean*"]
        else:
            names = [row.category.label, row.task.label]
        lines.append([*names, *texts])
    several = sum(column.kind == "model" for column in table.columns) > 1
    how = HOW + (" The best of the models is bold." if several else "")
    parts = [f"# {table.title}", markdown_table(lines, left=2), how]
    for title, found in (("Missing", table.gaps()), ("Warnings", table.warnings)):
        if found:
            plain = (printable(line).replace("<", "\\<") for line in found)
            parts += [f"## {title}", "\n".join(f"* {line}" for line in plain)]
    return "\n\n".join(parts) + "\n"


def print_table(table: Table, console: Console) -> None:
    """Print it in blocks of as many columns as fit; a category's row holds its mean."""
    ascii_only = console.options.ascii_only
    heads = [shortened(printable(c.head, ascii_only), LABEL, ascii_only) for c in table.columns]
    order = [*table.benchmark.categories, None]
    rows = sorted(table.rows(), key=lambda row: (order.index(row.category), row.task is not None))
    named = []
    for row in rows:
        label = row.category.label if row.category else _last(table)
        cells = (cell_text(cell, ascii_only) for cell in row.cells)
        named.append((f"  {row.task.label}" if row.task else label, *cells))
    bold = frozenset(place for place, row in enumerate(rows) if not row.task)
    print_sheet(Sheet(table.title, ("", *heads), named, bold=bold), console)
    console.print()
    for line in table.gaps():  # unbroken: they hold commands to be copied
        console.print(Text(printable(line, ascii_only)), soft_wrap=True)


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
