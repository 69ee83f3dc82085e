"""Tables and lines of text, as wide as the terminal and in the characters that it knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2  # spaces between two columns
ASCII = str.maketrans({"±": "+-", "−": "-", "—": "-", "…": "..."})


@dataclass(frozen=True)
class Sheet:
    """A table before it is set: the first column holds names, the others numbers.

    Args:
        left: the heads of further columns that hold text.
        bold: the places of the rows to be set off.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[str, ...] = ()
    bold: frozenset[int] = frozenset()


def matrix(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Iterable[Iterable[float]]
) -> Sheet:
    """A sheet of numbers with three decimals and no minus before a zero."""
    cells = [tuple(f"{round(value, 3) + 0.0:.3f}" for value in row) for row in values]
    named = [(name, *row) for name, row in zip(rows, cells, strict=True)]
    return Sheet(title, ("", *columns), named)


def show(told: Iterable[Sheet | str], console: Console, style: str = "") -> None:
    for item in told:
        if isinstance(item, Sheet):
            print_sheet(item, console)
        else:
            say(item, console, style)


def print_sheet(sheet: Sheet, console: Console) -> None:
    """Print title and table, in blocks of as many columns as fit; no number is cut."""
    ascii_only = console.options.ascii_only
    head = tuple(printable(name, ascii_only) for name in sheet.head)
    rows = [tuple(printable(cell, ascii_only) for cell in row) for row in sheet.rows]
    whole = Sheet("", head, rows, sheet.left, sheet.bold)
    if sheet.title:  # not the table's own, which would wrap at the table's width
        say(sheet.title, console, "bold")
    for number, block in enumerate(_blocks(whole, console.width)):
        if number:
            console.print()
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for place, name in enumerate(block.head):
            if place == 0 or name in sheet.left:
                table.add_column(Text(name), overflow="fold")
            else:
                table.add_column(Text(name), justify="right", no_wrap=True)
        for place, row in enumerate(block.rows):
            table.add_row(*map(Text, row), style="bold" if place in sheet.bold else "")
        console.print(table, soft_wrap=False)


def markdown_table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lines of cells as a Markdown table, the first of them its head, `left` columns of text."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * w if place < left else f"{'-' * (w - 1)}:" for place, w in enumerate(widths)]
    aligned = [f"<{w}" if place < left else f">{w}" for place, w in enumerate(widths)]
    rows = [f"| {' | '.join(map(format, line, aligned))} |" for line in lines]
    return "\n".join([rows[0], f"| {' | '.join(rule)} |", *rows[1:]])


def escaped(text: str) -> str:
    """`text` as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_<|\[])", r"\\\1", printable(text))


def say(line: str, console: Console, style: str = "") -> None:
    """Print a line in which brackets and colons of names are no markup."""
    console.print(Text(printable(line, console.options.ascii_only), style=style))


def width(sheet: Sheet) -> int:
    """The characters of a whole row."""
    columns = list(zip(sheet.head, *sheet.rows, strict=True))
    return sum(max(map(cell_len, column)) for column in columns) + GAP * (len(columns) - 1)


def shortened(text: str, most: int, ascii_only: bool = False) -> str:
    """`text` in at most `most` >= 4 characters, with dots in its middle where it was longer."""
    dots = "..." if ascii_only else "…"
    if len(text) <= most:
        return text
    kept = most - len(dots)
    tail = kept // 2
    return text[: kept - tail] + dots + text[len(text) - tail :]


def printable(text: str, ascii_only: bool = False) -> str:
    """`text` without what would steer a terminal, and in ASCII where that is all it can show."""

    def fits(character: str) -> bool:
        return character.isprintable() and (character.isascii() or not ascii_only)

    known = text.translate(ASCII) if ascii_only else text
    return "".join(c if fits(c) else ascii(c)[1:-1] for c in known)


def _blocks(sheet: Sheet, most: int) -> list[Sheet]:
    """The sheet, or sheets of as many of its columns as fit, each with the first one."""
    count = len(sheet.head)
    while count > 2 and width(_columns(sheet, range(count))) > most:
        count -= 1
    if count == len(sheet.head):
        return [sheet]
    rest = _columns(sheet, [0, *range(count, len(sheet.head))])
    return [_columns(sheet, range(count)), *_blocks(rest, most)]


def _columns(sheet: Sheet, places: Iterable[int]) -> Sheet:
    kept = list(places)
    rows = [tuple(row[place] for place in kept) for row in sheet.rows]
    return Sheet("", tuple(sheet.head[place] for place in kept), rows)
