"""The result as one HTML page that refers to no other file and runs no script.

`_text` escapes all text; the picture is drawn by matplotlib, letters as outlines. The policy in
`page.html` forbids whatever a slip in escaping would let in.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable
from pathlib import Path
from string import Template

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.figures import MADE, embedded
from tvb_mergekit.score.benchmark import HERE
from tvb_mergekit.score.columns import Column
from tvb_mergekit.score.floors import Remark
from tvb_mergekit.score.radar import heading
from tvb_mergekit.score.table import Table
from tvb_mergekit.score.text import HOW, HOW_PAIRS, pair_sheets, score_sheet
from tvb_mergekit.tables import Sheet, printable


def page(table: Table, svg: bytes | None = None) -> str:
    """Make the page: table, picture, paired differences, floors, gaps, warnings, models."""
    parts = [_section("h1", table.title, [_table(score_sheet(table)), _paragraph(HOW)])]
    if svg:
        picture = embedded(svg.decode(), printable(heading(table)))
        parts.append(f'<div class="picture">{picture}</div>\n')
    if table.pairs:
        sheets = [f"<h3>{_text(s.title)}</h3>\n{_table(s)}" for s in pair_sheets(table)]
        parts.append(_section("h2", "Paired differences", [*sheets, _paragraph(HOW_PAIRS)]))
    parts += [
        _section("h2", "Floors", map(_remark, table.remarks)),
        _section("h2", "Missing", map(_paragraph, table.gaps())),
        _section("h2", "Warnings", map(_paragraph, table.warnings)),
        _section("h2", "Models", _models(table)),
    ]
    template = Template((HERE / "page.html").read_text(encoding="utf-8"))
    return template.substitute(title=_text(table.title), made=MADE, body="".join(parts))


def _models(table: Table) -> Iterable[str]:
    """Yield each column's models, with recipe and basis from their folders."""
    from tvb_mergekit.store.facts import FACTS, FOLDER

    for column in table.columns:
        cells = column.tasks.values()
        for model in sorted({c.origin.model for c in cells if c.origin and c.origin.model}):
            yield f"<h3>{_text(column.label)}: {_text(model)}</h3>\n"
            recipe, facts = Path(model, "mergekit_config.yml"), Path(model, FOLDER, FACTS)
            found = [f for f in (recipe, facts) if os.path.isfile(f) and os.access(f, os.R_OK)]
            if found and not os.path.isabs(model):
                yield _paragraph(f"Found as {model} from the current folder.")
            if found and (doubt := _doubt(table, column, model, found)):
                yield _paragraph(f"No recipe: {doubt}.")
                continue
            yield _facts(facts) if facts in found else ""
            if recipe in found:
                text = _text(recipe.read_text("utf-8", "replace"))
                yield f"<details><summary>Recipe</summary><pre>{text}</pre></details>\n"
            else:
                yield _paragraph("No recipe next to its weights, as seen from the current folder.")


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
                return (
                    f"{other.label} was run from the same folder, and its score of {name} is "
                    "different"
                )
    dates = [cell.origin.date or 0.0 for cell in own.values() if cell.origin]
    if not all(dates):
        return "its results do not say when they were run"
    newer = [file.name for file in found if os.path.getmtime(file) > min(dates)]
    return f"{listed(newer)} changed after this run" if newer else None


def _facts(file: Path) -> str:
    """Show `basis.json` as a table, or why it cannot be read."""
    from tvb_mergekit.store.facts import read_facts

    try:
        facts = read_facts(file)
    except UserError as error:
        return _paragraph(str(error))
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
    rows = [(name, str(value)) for name, value in shown.items()]
    return _table(Sheet("", ("", "value"), rows, ("value",)))


def _remark(remark: Remark) -> str:
    answers = "".join(
        f"<li>item {a.doc_id}, wanted <code>{_text(a.target)}</code><pre>{_text(a.text)}</pre></li>"
        for a in remark.answers
    )
    return f"{_paragraph(remark.line)}<ul>{answers}</ul>\n" if answers else _paragraph(remark.line)


def _section(tag: str, title: str, parts: Iterable[str]) -> str:
    inside = "".join(parts)
    return f"<{tag}>{_text(title)}</{tag}>\n{inside}" if inside else ""


def _table(sheet: Sheet) -> str:
    kinds = ["", *("text" if name in sheet.left else "" for name in sheet.head[1:])]
    head = "".join(
        f'<th scope="col" class="{kind}">{_text(name)}</th>'
        for kind, name in zip(kinds, sheet.head, strict=True)
    )
    rows = []
    for place, (name, *cells) in enumerate(sheet.rows):
        style = ' class="bold"' if place in sheet.bold else ""
        row = "".join(
            f'<td class="{kind or ("beyond" if cell.endswith("*") else "")}">{_number(cell)}</td>'
            for kind, cell in zip(kinds[1:], cells, strict=True)
        )
        rows.append(f'<tr{style}><th scope="row">{_text(name)}</th>{row}</tr>\n')
    return (
        f'<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n</table></div>\n"
    )


def _number(cell: str) -> str:
    """Escape a cell, so that phones break it before ± and p only."""
    return _text(cell).replace("± ", "±&#160;").replace(" p ", " p&#160;")


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>\n"


def _text(text: str) -> str:
    """Escape text from anywhere; lines stay, and unprintable characters are spelled out."""
    lines = text.replace("\t", "    ").splitlines()
    return html.escape("\n".join(map(printable, lines)))
