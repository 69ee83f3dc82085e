"""Printing of an inspection: tables and sentences on the terminal.

`store/inspection.py` has the numbers, `plot` draws them.
"""

from __future__ import annotations

from rich.console import Console

from tvb_mergekit.errors import counted, listed, megabytes
from tvb_mergekit.store.facts import Facts
from tvb_mergekit.store.inspection import Inspection
from tvb_mergekit.store.report import WIDE, cosine_sheet, measures
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tables import Sheet, matrix, printable, shortened, show

CRITERION = "For negation take the smallest M after which lambda_{M+1}(G) drops off"


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Tables and sentences as wide as the terminal; in ASCII if its encoding needs that."""
    ascii_only, most = console.options.ascii_only, max(console.width // 4, 10)
    names = [shortened(printable(task, ascii_only), most, ascii_only) for task in inspection.tasks]
    show([headline(inspection)], console, "bold")
    show(remarks(inspection), console)
    parts: list[list[Sheet | str]] = [
        [_task_sheet(inspection, names)],
        [cosine_sheet(of, names, values) for values, of in filter(None, [inspection.cosines])],
        [] if inspection.keeps_tasks else _encoder_lines(inspection, names),
        _choice_lines(inspection),
    ]
    for part in filter(None, parts):
        console.print()
        show(part, console)


def headline(inspection: Inspection) -> str:
    """Kind, M of T, dtype and base in one line."""
    facts, tasks = inspection.facts, counted(len(inspection.tasks), "task vector")
    dtype = facts.dtype if facts.store is None else _stored_as(facts)
    if inspection.keeps_tasks:
        return f"Task-vector store: T = {tasks} at {dtype}, base {facts.base_model}"
    kinds = {"store": "Basis store", "merge": f"Merge by {facts.method}"}
    kind = kinds.get(inspection.what, f"Recipe for {facts.method}, not built")
    bases = counted(inspection.num_bases, f"{inspection.basis} basis vector")
    kept = f", {dtype}" if dtype else ""
    return f"{kind}: M = {bases} of T = {tasks}{kept}, base {facts.base_model}"


def remarks(inspection: Inspection) -> list[str]:
    """Lines on sizes, additions, the loss against its bounds, and tensors left out."""
    facts, store, kept = inspection.facts, inspection.facts.store, inspection.kept
    lines = []
    if store is not None:
        lines.append(size_line(inspection))
        if store.added:
            unlimited = store.budget is None or inspection.keeps_tasks
            within = "" if unlimited else f" within a budget of {store.budget}"
            lines.append(f"{counted(store.added, 'task')} added online{within}")
        if store.basis_weights and not inspection.keeps_tasks:
            terms = [f"{weight:.4g} B{m}" for m, weight in enumerate(store.basis_weights)]
            lines.append(f"The sum of all task vectors is {' + '.join(terms)}")
    if facts.relative_error:
        line = error_line(facts)
        if kept is not None:
            line += f"; storing changes the sum that addition adds by {kept.sum:.3g} of its norm"
        lines.append(line[0].upper() + line[1:])
    lines.append(f"{facts.num_parameters:,} parameters in each task vector")
    lines += [] if inspection.keeps_tasks else measures(facts)
    reasons: dict[str, list[str]] = {}
    for name, reason in facts.left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        lines.append(f"{counted(len(names), 'tensor')} left to the base, {reason}: {listed(names)}")
    return lines


def size_line(inspection: Inspection) -> str:
    """Numbers and bytes of a store and of the models that it replaces."""
    facts, sizes = inspection.facts, inspection.sizes
    assert sizes is not None
    held = f"{counted(inspection.num_bases, 'basis')} of {counted(len(inspection.tasks), 'task')}"
    if inspection.keeps_tasks:
        held = counted(len(inspection.tasks), "task vector")
    return (
        f"{held}: {megabytes(sizes['store'])} in {_stored_as(facts)}, "
        f"{megabytes(abs(sizes['saved']))} {'less' if sizes['saved'] >= 0 else 'more'} than the "
        f"models' {megabytes(sizes['models'])}"
    )


def store_line(bases: Bases) -> str:
    return f"{bases.path}: {size_line(Inspection(bases.facts, bases.tensors))}"


def error_line(facts: Facts) -> str:
    """The largest relative error of a task in a store, with the task's name."""
    if facts.store is not None and facts.store.codec == "lossless":
        return "every bit comes back"
    size = max(facts.relative_error.values())
    return f"{facts.bits:.3g} bits a parameter, random errors of {size:.3g} times the norm"


def _stored_as(facts: Facts) -> str:
    """The dtype of a store and its share of kept entries, or its bits."""
    assert facts.store is not None
    if facts.density is not None:
        return f"a sample of {100 * facts.density:.3g} % of the entries"
    return facts.store.dtype if facts.bits is None else counted(facts.bits, "bit")


def _task_sheet(inspection: Inspection, names: list[str]) -> Sheet:
    """Norm, error and row sum of each task; for task-vector stores bits and bytes, no row sum."""
    base, unknown, kept = inspection.base_norm, [None] * len(names), inspection.kept
    weights, last = inspection.row_sums or unknown, ["row sum"]
    cells = [["?" if weight is None else f"{round(weight, 3) + 0.0:.3f}"] for weight in weights]
    if kept is not None:
        last = ["bits", "bytes"]
        cells = [[f"{each.bits:.3g}", megabytes(each.bytes)] for each in kept.vectors]
    rows = []
    for task, name, model, norm, cell in zip(
        inspection.tasks, names, inspection.facts.models, inspection.norms, cells, strict=True
    ):
        share = f"{100 * norm / base:.2f} %" if base else "?"
        error = f"{round(inspection.errors[task], 9):.3g}" if task in inspection.errors else "?"
        rows.append((name, f"{norm:.4g}", share, error, *cell, model))
    head = ("task", "||tau||", "of base", "error", *last, "model")
    return Sheet("Tasks", head, rows, left=("model",))


def _encoder_lines(inspection: Inspection, names: list[str]) -> list[Sheet | str]:
    """The encoder as a table, or the largest weights of each basis if there are many."""
    encoder = inspection.tensors.get("encoder")
    if encoder is None:
        return [f"Encoder weights: {inspection.why_unknown('encoder')}"]
    bases = [f"B{m}" for m in range(inspection.num_bases)]
    if len(bases) <= WIDE:
        return [matrix("Encoder weights", names, bases, encoder.tolist())]
    lines: list[Sheet | str] = ["Encoder weights, the largest of each basis"]
    for basis, column in zip(bases, encoder.T.tolist(), strict=True):
        order = sorted(range(len(column)), key=lambda i: -abs(column[i]))
        lines.append(f"{basis}: {listed([f'{names[i]} {column[i]:.3f}' for i in order])}")
    return lines


def _choice_lines(inspection: Inspection) -> list[Sheet | str]:
    if not inspection.choices:
        return [f"What other M would retain: {inspection.why_unknown('gram')}"]
    current = None if inspection.keeps_tasks else inspection.num_bases
    rows = [
        (
            f"{'>' if choice.num_bases == current else ' '} {choice.num_bases}",
            f"{100 * choice.retained_energy:.2f}",
            f"{100 * choice.balanced_energy:.2f}",
            f"{choice.spectral_bound:.4g}",
            f"{choice.next_eigenvalue:.4g}",
        )
        for choice in inspection.choices
    ]
    head = ("M", "best %", "balanced %", "loss >=", "lambda_{M+1}")
    sheet = Sheet("Energy that M bases can retain", head, rows)
    found = ", ".join(f"{100 * share:g} %: {count}" for share, count in inspection.smallest.items())
    return [sheet, f"Smallest M that can retain {found}", CRITERION]
