"""The tables and the picture of `tvb inspect`: `store/report.py` has the numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from tvb_mergekit.errors import megabytes
from tvb_mergekit.figures import BLUE, DARK, LABEL, ORANGE, rendered
from tvb_mergekit.store.facts import Facts, StoreFacts
from tvb_mergekit.store.report import remarks, vectors
from tvb_mergekit.tables import Sheet, matrix, printable, shortened, show
from tvb_mergekit.tensors.output import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = dict[str, Any]  # of `report.inspected`
Matrix = list[list[float]]
UNKNOWN = "not known: no Gram matrix of all tasks is (after compression, or in a merge without G)"


def print_inspection(facts: Facts, found: Numbers, console: Console) -> None:
    """Tables and sentences as wide as the terminal; in ASCII if its encoding needs that."""
    ascii_only, most = console.options.ascii_only, max(console.width // 4, 10)
    names = [shortened(printable(task, ascii_only), most, ascii_only) for task in facts.tasks]
    show([headline(facts, found["what"])], console, "bold")
    show([size_line(facts)] if isinstance(facts, StoreFacts) else [], console)
    sized = f"{facts.num_parameters:,} parameters in each task vector"
    show([sized, *remarks(facts)], console)
    cosines, encoder = found["cosines"], found["encoder"]
    parts: list[Sheet | str] = [_tasks(facts, found, names)]
    title = "Cosines between the task vectors"
    parts.append(matrix(title, names, names, cosines) if cosines else f"Cosines: {UNKNOWN}")
    if encoder and not facts.whole:
        parts.append(matrix("Encoder weights", names, _bases(encoder), encoder))
    unknown = f"What other M would retain: {UNKNOWN}"
    parts.append(_choices(facts, found) if found["choices"] else unknown)
    for part in parts:
        show(["", part], console)


def headline(facts: Facts, what: str) -> str:
    """Kind, M of T, form and base in one line."""
    form = forms(facts) or facts.dtype
    kind = {
        "merge": f"Merge by {facts.method}: ",
        "recipe": f"Recipe for {facts.method}, not built: ",
        "store": "Store of " if facts.whole else "Store: ",
    }[what]
    return f"{kind}{vectors(facts)}{f' ({form})' if form else ''}, base {facts.base_model}"


def forms(facts: Facts) -> str:
    """The forms of a store's vectors, such as `lossless, 1.52 bits`; of a merge nothing."""
    if not isinstance(facts, StoreFacts):
        return ""
    widths = dict[str, list[float]]()
    for vector, bits in zip(facts.vectors, facts.bits, strict=True):
        name: str = vector.dtype if vector.codec == "dense" else vector.codec
        name = f"a sample of {100 * vector.share:.3g} %" if vector.share < 1 else name
        widths.setdefault(name, []).append(bits)
    told = {name: f", {sum(bits) / len(bits):.3g} bits" for name, bits in widths.items()}
    return "; ".join(n if n.startswith(("float", "bfloat")) else n + w for n, w in told.items())


def size_line(store: StoreFacts) -> str:
    """Bytes of a store, next to those of the models that it replaces."""
    saved = store.model_bytes - store.bytes
    more = f"{megabytes(abs(saved))} {'less' if saved >= 0 else 'more'} than the models"
    return f"{megabytes(store.bytes)}, {more}"


def _tasks(facts: Facts, found: Numbers, names: list[str]) -> Sheet:
    """Norm, error and row sum of each task; of a store of tasks bits and bytes, no row sum."""
    base = None if "base" in facts.tasks else facts.norms.get("base")
    last: dict[str, list[str]] = {}
    if not facts.whole:
        # The weight of each task in the sum that a merge adds, [T]: W_e v
        given = facts.parameters.get("basis_weights")  # of a merge over a store
        shares = facts.shares if isinstance(facts, StoreFacts) else given or 1.0
        sums = [np.multiply(row, shares).sum() for row in found["encoder"] or []]
        last["row sum"] = [f"{round(each, 3) + 0.0:.3f}" for each in sums] or ["?"] * len(names)
    elif found["bits"]:
        last["bits"] = [f"{each:.3g}" for each in found["bits"]]
        last["bytes"] = [*map(megabytes, found["bytes"])]
    norms, lost = [facts.norms[task] for task in facts.tasks], found["errors"]
    columns = {
        "task": names,
        "||tau||": [f"{norm:.4g}" for norm in norms],
        "of base": [f"{100 * norm / base:.2f} %" if base else "?" for norm in norms],
        "error": ["?" if e is None else f"{round(e, 9):.3g}" for e in map(lost.get, facts.tasks)],
        **last,
        "model": facts.models,
    }
    rows = list(zip(*columns.values(), strict=True))
    return Sheet("Tasks", tuple(columns), rows, left=("model",))


def _choices(facts: Facts, found: Numbers) -> Sheet:
    built = None if facts.whole else facts.num_bases
    rows = [
        (f"{'>' if count == built else ' '} {count}", f"{100 * best:.2f}", f"{100 * even:.2f}")
        for count, best, even in (each.values() for each in found["choices"])
    ]
    return Sheet("Energy that M bases can retain", ("M", "best %", "balanced %"), rows)


def plot(facts: Facts, found: Numbers, target: Path) -> None:
    """Draw the figure into a .png, .svg or .pdf file, which replaces it at the end."""
    write_file(target, rendered(partial(_figure, facts, found), target.suffix.lower()[1:]))


def _figure(facts: Facts, found: Numbers) -> Figure:
    """All panels that have something to show. The figure grows with T, so that all labels fit."""
    from matplotlib.figure import Figure

    names = [shortened(printable(task), LABEL) for task in facts.tasks]
    panels: dict[str, Callable[[Axes], None]] = {}
    if cosines := found["cosines"]:
        panels["Cosines between the task vectors"] = partial(_matrix, cosines, names, names)
    if (encoder := found["encoder"]) and not facts.whole:
        panels["Encoder weights"] = partial(_matrix, encoder, names, _bases(encoder))
    every = facts.norms, found["errors"]
    norms, lost = ([of[task] or 0.0 for task in facts.tasks] for of in every)
    panels["Norms of the task vectors"] = partial(_bars, norms, names)
    if facts.whole and found["bits"]:
        panels["Bits of a parameter"] = partial(_bars, found["bits"], names)
    if any(lost):
        panels["Error of each task vector, relative to its norm"] = partial(_bars, lost, names)
    if found["choices"]:
        panels["Energy that M bases can retain"] = partial(_energy, facts, found)
    size, rows = max(4.5, 0.32 * len(names) + 1.5), -(-len(panels) // 2)
    figure = Figure(figsize=(2.3 * size, rows * size), layout="constrained")
    title = textwrap.fill(printable(headline(facts, found["what"])), int(25 * size), max_lines=3)
    figure.suptitle(title, x=0.01, ha="left", size="large")
    for place, (title, draw) in enumerate(panels.items(), 1):
        draw(figure.add_subplot(rows, 2, place, title=title))
    return figure


def _bases(encoder: Matrix) -> list[str]:
    return [f"B{m}" for m in range(len(encoder[0]))]


def _matrix(rows: Matrix, names: Sequence[str], heads: Sequence[str], axes: Axes) -> None:
    """A heat map of a matrix [T, T] or [T, M], whose numbers the tables have."""
    values = np.array(rows)
    # A diagonal of ones is known. The other entries, often small, set the range of the colours.
    known = np.eye(len(values)) if heads is names else 0.0
    limit = float(np.abs(values - known).max()) or 1.0
    low = -limit if values.min() < 0 else 0.0
    colours = "RdBu_r" if low else "Blues"  # both are safe for colour-blind readers
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=limit, aspect="auto")
    axes.set_xticks(range(len(heads)), heads, rotation=90, size=8)
    axes.set_yticks(range(len(names)), names, size=8)
    axes.figure.colorbar(image, ax=axes, extend="max" if values.max() > limit else "neither")


def _bars(values: Sequence[float], names: Sequence[str], axes: Axes) -> None:
    axes.bar(range(len(names)), values, 0.7, color=BLUE)
    axes.set_xticks(range(len(names)), names, rotation=90, size=8)


def _energy(facts: Facts, found: Numbers, axes: Axes) -> None:
    counts, best, balanced = np.array([[*each.values()] for each in found["choices"]]).T
    axes.plot(counts, 100 * best, "o-", color=BLUE, markersize=4, label="any bases (spectral)")
    axes.plot(counts, 100 * balanced, "--", color=ORANGE, label="balanced bases")
    if (reached := facts.retained_energy) is not None and not facts.whole:
        label, place = f"these: {100 * reached:.1f} %", [facts.num_bases]
        axes.plot(place, [100 * reached], "D", color=DARK, markerfacecolor="none", label=label)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("M")
    axes.set_ylabel("retained energy, %")
    axes.legend(loc="lower right")
