"""The result as one HTML page that refers to no other file and runs no script.

`page.html` is a template that escapes all text; the picture is drawn by matplotlib, letters as
outlines. The policy in the page forbids whatever a slip in escaping would let in.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.figures import MADE, embedded
from tvb_mergekit.score.benchmark import HERE
from tvb_mergekit.score.columns import Column
from tvb_mergekit.score.radar import heading
from tvb_mergekit.score.table import Table
from tvb_mergekit.score.text import HOW, HOW_PAIRS, pair_sheets, score_sheet
from tvb_mergekit.tables import Sheet, printable


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
