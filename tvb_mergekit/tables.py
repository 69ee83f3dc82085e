"""Tables and lines of text, as wide as the terminal and in its characters."""

from __future__ import annotations

import base64
import io
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
    """A table: the first column holds names, the others numbers.

    Args:
        left: the heads of further columns that hold text.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[str, ...] = ()


def matrix(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Iterable[Iterable[float]]
) -> Sheet:
    """A sheet of numbers with three decimals and no minus before a zero."""
    cells = [tuple(f"{round(value, 3) + 0.0:.3f}" for value in row) for row in values]
    named = [(name, *row) for name, row in zip(rows, cells, strict=True)]
    return Sheet(title, ("", *columns), named)


def show(told: Iterable[Sheet | str], console: Console, style: str = "") -> None:
    """Print tables, and lines without interpreting their brackets and colons as markup."""
    for item in told:
        if isinstance(item, Sheet):
            show([item.title] if item.title else [], console, "bold")  # rich would wrap it
            _print_table(item, console)
        else:
            console.print(Text(printable(item, console.options.ascii_only), style=style))


def _print_table(sheet: Sheet, console: Console) -> None:
    """Print a table in blocks of as many columns as fit, without cutting numbers."""
    ascii_only = console.options.ascii_only
    lines = [[printable(cell, ascii_only) for cell in line] for line in (sheet.head, *sheet.rows)]
    widths = [max(map(cell_len, column)) + GAP for column in zip(*lines, strict=True)]
    blocks = [[0]]  # places of columns
    for place in range(1, len(widths)):
        needed = sum(widths[each] for each in (*blocks[-1], place)) - GAP
        if len(blocks[-1]) > 1 and needed > console.width:
            blocks.append([0])
        blocks[-1].append(place)
    for block in blocks:
        if block is not blocks[0]:
            console.print()
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for place in block:
            name = Text(lines[0][place])
            if place == 0 or sheet.head[place] in sheet.left:
                table.add_column(name, overflow="fold")
            else:
                table.add_column(name, justify="right", no_wrap=True)
        for line in lines[1:]:
            table.add_row(*(Text(line[place]) for place in block))
        console.print(table, soft_wrap=False)


def markdown(told: Iterable[Sheet | str]) -> str:
    """Tables under their titles, and lines as paragraphs."""
    parts = list[str]()
    for item in told:
        if isinstance(item, str):
            parts.append(escaped(item))
            continue
        lines = [[escaped(cell).replace("  ", "&emsp;") for cell in row] for row in item.rows]
        lines.insert(0, ["---", *("---:" for _ in item.head[1:])])
        lines.insert(0, [escaped(cell) for cell in item.head])
        parts.append(f"{'##' if parts else '#'} {escaped(item.title)}")
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def page(told: Iterable[Sheet | str], picture: bytes = b"") -> str:
    """A page of HTML: what a wide terminal shows, and a picture (PNG)."""
    console = Console(record=True, width=240, file=io.StringIO())
    for item in told:
        show([item, ""], console)
    image = f'<img src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
    text = console.export_html(inline_styles=True)
    return text.replace("</body>", f"{image}\n</body>") if picture else text


def escaped(text: str) -> str:
    return re.sub(r"([\\`*_<|\[])", r"\\\1", printable(text))


def shortened(text: str, most: int, ascii_only: bool = False) -> str:
    """`text`, or its ends around dots, in at most `most` >= 4 characters."""
    dots = "..." if ascii_only else "…"
    kept = most - len(dots)
    head, tail = kept - kept // 2, kept // 2
    return text if len(text) <= most else text[:head] + dots + text[len(text) - tail :]


def printable(text: str, ascii_only: bool = False) -> str:
    """`text` without control characters, and on request in ASCII."""
    if ascii_only:
        text = text.translate(ASCII).encode("ascii", "backslashreplace").decode()
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
