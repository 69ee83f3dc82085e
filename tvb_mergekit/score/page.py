"""The result as one HTML page that refers to no other file and runs no script.

All text passes `_text`, which escapes it; the picture is drawn by matplotlib, letters as outlines.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable
from pathlib import Path

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.figures import MADE, embedded
from tvb_mergekit.score.columns import Column
from tvb_mergekit.score.floors import Remark
from tvb_mergekit.score.radar import heading
from tvb_mergekit.score.table import Table
from tvb_mergekit.score.text import HOW, HOW_PAIRS, pair_sheets, score_sheet
from tvb_mergekit.tables import Sheet, printable

# The policy forbids whatever a slip in escaping would let in.
HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{made}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 0 1em 3em;
  overflow-wrap: anywhere; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }}
th, td {{ border-bottom: 1px solid #8884; padding: .2em .7em; text-align: right;
  white-space: pre; }}
th:first-child {{ background: Canvas; left: 0; max-width: 40vw; min-width: 7em; position: sticky;
  text-align: left; white-space: pre-wrap; }}
.text {{ min-width: 12em; text-align: left; white-space: normal; }}
tr.bold > * {{ font-weight: bold; }}
tbody th {{ font-weight: normal; }}
.beyond {{ background: #0072b233; }}
.picture {{ background: white; }}
svg {{ display: block; height: auto; margin: auto; max-width: 48em; width: 100%; }}
@media (max-width: 40em) {{
  body {{ padding: 0 .5em 2em; }}
  th, td {{ padding: .2em .4em; white-space: pre-wrap; }}
  .text {{ min-width: 8em; }}
}}
pre {{ background: #8881; overflow-x: auto; padding: .7em; white-space: pre; }}
</style>
</head>
<body>
"""


def page(table: Table, svg: bytes | None = None) -> str:
    """The page: table, picture, paired differences, floors, and what is known of the models."""
    floors = [_remark(remark) for remark in table.remarks]
    parts = [
        HEAD.format(title=_text(table.title), made=MADE),
        _section("h1", table.title, [_table(score_sheet(table)), _paragraph(HOW)]),
        f'<div class="picture">{embedded(svg.decode(), printable(heading(table)))}</div>\n'
        if svg
        else "",
    ]
    if table.pairs:
        sheets = [f"<h3>{_text(s.title)}</h3>\n{_table(s)}" for s in pair_sheets(table)]
        parts.append(_section("h2", "Paired differences", [*sheets, _paragraph(HOW_PAIRS)]))
    parts += [
        _section("h2", "Floors", floors),
        _section("h2", "Missing", map(_paragraph, table.gaps())),
        _section("h2", "Warnings", map(_paragraph, table.warnings)),
        _section("h2", "Models", _models(table)),
    ]
    return "".join([*parts, "</body>\n</html>\n"])


def _models(table: Table) -> Iterable[str]:
    """Each column's models, with recipe and basis where their folders are found from here and hold
    what was run."""
    for column in table.columns:
        cells = column.tasks.values()
        for model in sorted({c.origin.model for c in cells if c.origin and c.origin.model}):
            yield f"<h3>{_text(column.label)}: {_text(model)}</h3>\n"
            recipe, facts = _described(model)
            found = [file for file in (recipe, facts) if os.path.isfile(file)]
            if found and not os.path.isabs(model):
                yield _paragraph(f"Found as {model} from the current folder.")
            if found and (doubt := _doubt(table, column, model, found)):
                yield _paragraph(doubt)
                continue
            if facts in found:
                told = _facts(facts)
                yield _table(told) if isinstance(told, Sheet) else _paragraph(told)
            try:
                text = recipe.read_text("utf-8", "replace") if recipe in found else None
            except OSError:
                text = None
            if text is None:
                yield _paragraph("No recipe beside its weights, as seen from the current folder.")
            else:
                yield f"<details><summary>Recipe</summary><pre>{_text(text)}</pre></details>\n"


def _described(model: str) -> tuple[Path, Path]:
    """Where a merge writes its recipe, and the facts of its basis."""
    from tvb_mergekit.store.facts import FACTS, FOLDER

    return Path(model) / "mergekit_config.yml", Path(model) / FOLDER / FACTS


def _doubt(table: Table, column: Column, model: str, found: Iterable[Path]) -> str | None:
    """Why the files found in the model's folder may not be of the model that was run, if so."""
    place = os.path.realpath(model)
    began = []
    for name, cell in column.tasks.items():
        if cell.origin is None or cell.origin.model != model:
            continue
        began.append(cell.origin.date)
        for other in table.columns:
            rival = other.tasks.get(name)
            if rival is None or rival.origin is None or rival.origin.model is None:
                continue
            if rival.value != cell.value and os.path.realpath(rival.origin.model) == place:
                return (
                    f"No recipe: {other.label} was run from the same folder, and its score of "
                    f"{name} is another."
                )
    dates = [date for date in began if date is not None]
    if len(dates) < len(began):
        return "No recipe: its results do not say when they were run."
    newer = [file.name for file in found if os.path.getmtime(file) > min(dates)]
    return f"No recipe: {listed(newer)} changed after this run." if newer else None


def _facts(file: Path) -> Sheet | str:
    """What `basis.json` tells, or why it cannot be read."""
    from tvb_mergekit.store.facts import read_facts

    try:
        facts = read_facts(file)
    except UserError as error:
        return str(error)
    settings = {
        key: ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        for key, value in facts.parameters.items()
        if value is not None
    }
    energy = facts.retained_energy
    told = {
        "method": facts.method,
        "bases": f"{facts.num_bases} of {len(facts.tasks)} task vectors",
        "tasks": ", ".join(facts.tasks),
        "base model": facts.base_model,
        **settings,
        **({} if energy is None else {"retained energy": f"{100 * energy:.2f} %"}),
    }
    return Sheet(
        "", ("", "value"), [(name, str(value)) for name, value in told.items()], ("value",)
    )


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
    kinds = ["text" if name in sheet.left else "" for name in sheet.head[1:]]
    named = zip(("", *kinds), sheet.head, strict=True)
    head = "".join(f'<th scope="col" class="{kind}">{_text(name)}</th>' for kind, name in named)
    rows = []
    for place, (name, *cells) in enumerate(sheet.rows):
        style = ' class="bold"' if place in sheet.bold else ""
        row = "".join(
            f'<td class="{kind or ("beyond" if cell.endswith("*") else "")}">{_number(cell)}</td>'
            for kind, cell in zip(kinds, cells, strict=True)
        )
        rows.append(f'<tr{style}><th scope="row">{_text(name)}</th>{row}</tr>\n')
    return (
        f'<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n</table></div>\n"
    )


def _number(cell: str) -> str:
    """The text of a cell, broken on a phone only before ± and p."""
    return _text(cell).replace("± ", "±&nbsp;").replace(" p ", " p&nbsp;")


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>\n"


def _text(text: str) -> str:
    """Text from anywhere: lines stay, what cannot be shown is spelled out."""
    lines = text.replace("\t", "    ").splitlines()
    return html.escape("\n".join(map(printable, lines)))
