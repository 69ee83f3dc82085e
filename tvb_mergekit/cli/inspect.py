"""The tables and the picture of `tvb inspect`: `store/report.py` has the numbers."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from tvb_mergekit.atomic import write_file
from tvb_mergekit.core.gram import Array
from tvb_mergekit.errors import counted, listed, megabytes
from tvb_mergekit.figures import BLUE, DARK, LABEL, ORANGE, rendered
from tvb_mergekit.store.report import Inspection, measures, vectors
from tvb_mergekit.tables import Sheet, matrix, printable, shortened, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNKNOWN = "not known: no Gram matrix of all tasks is (after compression, or in a merge without G)"


def print_inspection(found: Inspection, console: Console) -> None:
    """Tables and sentences as wide as the terminal; in ASCII if its encoding needs that."""
    ascii_only, most = console.options.ascii_only, max(console.width // 4, 10)
    names = [shortened(printable(task, ascii_only), most, ascii_only) for task in found.facts.tasks]
    show([headline(found)], console, "bold")
    show(_remarks(found), console)
    cosines, encoder = found.cosines, found.tensors.get("encoder")
    parts = [_tasks(found, names)]
    title, numbers = "Cosines between the task vectors", [] if cosines is None else cosines.tolist()
    parts.append(matrix(title, names, names, numbers) if numbers else f"Cosines: {UNKNOWN}")
    if encoder is not None and not found.facts.whole:
        heads = [f"B{m}" for m in range(encoder.shape[1])]
        parts.append(matrix("Encoder weights", names, heads, encoder.tolist()))
    parts.append(_choices(found) if found.choices else f"What other M would retain: {UNKNOWN}")
    for part in parts:
        show(["", part], console)


def headline(found: Inspection) -> str:
    """Kind, M of T, form and base in one line."""
    facts, form = found.facts, forms(found) or found.facts.dtype
    what = f"Merge by {facts.method}" if found.built else f"Recipe for {facts.method}, not built"
    kind = "Store of " if found.whole else "Store: " if found.store else f"{what}: "
    return f"{kind}{vectors(facts)}{f' ({form})' if form else ''}, base {facts.base_model}"


def forms(found: Inspection) -> str:
    """The forms of a store's vectors, such as `lossless, 1.52 bits`."""
    widths = dict[str, list[float]]()
    for vector, bits in zip(found.store.vectors if found.store else [], found.bits, strict=True):
        name: str = vector.dtype if vector.codec == "dense" else vector.codec
        name = f"a sample of {100 * vector.share:.3g} %" if vector.share < 1 else name
        widths.setdefault(name, []).append(bits)
    told = {name: f", {sum(bits) / len(bits):.3g} bits" for name, bits in widths.items()}
    return "; ".join(n if n.startswith(("float", "bfloat")) else n + w for n, w in told.items())


def size_line(found: Inspection) -> str:
    """Bytes of a store, next to those of the models that it replaces."""
    assert found.sizes is not None
    saved = found.sizes["models"] - found.sizes["store"]
    more = f"{megabytes(abs(saved))} {'less' if saved >= 0 else 'more'} than the models"
    return f"{megabytes(found.sizes['store'])}, {more}"


def _remarks(found: Inspection) -> list[str]:
    """Lines on sizes, the loss against its bounds, and tensors left out."""
    facts, store = found.facts, found.store
    lines = [size_line(found)] if store else []
    lines.append(f"{facts.num_parameters:,} parameters in each task vector")
    lines += [] if found.whole else measures(facts)
    for reason in dict.fromkeys(facts.left_out.values()):
        names = [name for name, why in facts.left_out.items() if why == reason]
        lines.append(f"{counted(len(names), 'tensor')} left to the base, {reason}: {listed(names)}")
    return lines


def _tasks(found: Inspection, names: list[str]) -> Sheet | str:
    """Norm, error and row sum of each task; of a store of tasks bits and bytes, no row sum."""
    facts, encoder = found.facts, found.tensors.get("encoder")
    base = None if "base" in facts.tasks else facts.norms.get("base")
    last = {} if facts.whole else {"row sum": ["?"] * len(names)}
    if found.whole:
        bits, sizes = [f"{each:.3g}" for each in found.bits], [*map(megabytes, found.bytes)]
        last = {"bits": bits, "bytes": sizes}
    elif encoder is not None and not facts.whole:
        last["row sum"] = [f"{round(total, 3) + 0.0:.3f}" for total in found.row_sums]
    norms, lost = [facts.norms[task] for task in facts.tasks], found.errors
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


def _choices(found: Inspection) -> Sheet:
    built = None if found.whole else found.facts.num_bases
    rows = [
        (f"{'>' if count == built else ' '} {count}", f"{100 * best:.2f}",
         f"{100 * even:.2f}", f"{bound:.4g}", f"{following:.4g}")
        for count, best, even, bound, following in (each.values() for each in found.choices)
    ]  # fmt: skip
    head = ("M", "best %", "balanced %", "loss >=", "lambda_{M+1}")
    return Sheet("Energy that M bases can retain", head, rows)


def plot(found: Inspection, path: str | os.PathLike[str]) -> None:
    """Draw the figure into `path`, a .png, .svg or .pdf file, which replaces it at the end."""
    target = Path(path)
    write_file(target, rendered(partial(_figure, found), target.suffix.lower()[1:]))


def _figure(found: Inspection) -> Figure:
    """All panels that have something to show. The figure grows with T, so that all labels fit."""
    from matplotlib.figure import Figure

    facts, encoder = found.facts, found.tensors.get("encoder")
    names = [shortened(printable(task), LABEL) for task in facts.tasks]
    panels: dict[str, Callable[[Axes], None]] = {}
    if (cosines := found.cosines) is not None:
        panels["Cosines between the task vectors"] = partial(_matrix, cosines.numpy(), names, names)
    if encoder is not None and not found.facts.whole:
        heads = [f"B{m}" for m in range(encoder.shape[1])]
        panels["Encoder weights"] = partial(_matrix, encoder.numpy(), names, heads)
    norms, lost = ([of[task] or 0.0 for task in facts.tasks] for of in (facts.norms, found.errors))
    panels["Norms of the task vectors"] = partial(_bars, norms, names)
    if found.whole:
        panels["Bits of a parameter"] = partial(_bars, found.bits, names)
    if any(lost):
        panels["Error of each task vector, relative to its norm"] = partial(_bars, lost, names)
    if found.choices:
        panels["Energy that M bases can retain"] = partial(_energy, found)
    size, rows = max(4.5, 0.32 * len(names) + 1.5), -(-len(panels) // 2)
    figure = Figure(figsize=(2.3 * size, rows * size), layout="constrained")
    title = textwrap.fill(printable(headline(found)), int(25 * size), max_lines=3)
    figure.suptitle(title, x=0.01, ha="left", size="large")
    for place, (title, draw) in enumerate(panels.items(), 1):
        draw(figure.add_subplot(rows, 2, place, title=title))
    return figure


def _matrix(values: Array, names: Sequence[str], heads: Sequence[str], axes: Axes) -> None:
    """A heat map of a matrix [T, T] or [T, M], whose numbers the tables have."""
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


def _energy(found: Inspection, axes: Axes) -> None:
    counts, best, balanced, *_ = np.array([[*each.values()] for each in found.choices]).T
    axes.plot(counts, 100 * best, "o-", color=BLUE, markersize=4, label="any bases (spectral)")
    axes.plot(counts, 100 * balanced, "--", color=ORANGE, label="balanced bases")
    if (reached := found.facts.retained_energy) is not None and not found.whole:
        label, place = f"these: {100 * reached:.1f} %", [found.facts.num_bases]
        axes.plot(place, [100 * reached], "D", color=DARK, markerfacecolor="none", label=label)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("M")
    axes.set_ylabel("retained energy, %")
    axes.legend(loc="lower right")
