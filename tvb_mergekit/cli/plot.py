"""`tvb inspect --plot`: cosines, encoder, eigenvalues, energy and errors in one picture.

Functions import matplotlib (the extra `plot`).
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvb_mergekit.atomic import write_file
from tvb_mergekit.cli.inspect import headline
from tvb_mergekit.core.encoders.linear import Array
from tvb_mergekit.errors import UserError
from tvb_mergekit.figures import BLUE, DARK, LABEL, ORANGE, can_draw, rendered
from tvb_mergekit.store.inspection import Inspection
from tvb_mergekit.store.report import WIDE
from tvb_mergekit.tables import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue


def plot(inspection: Inspection, path: str | os.PathLike[str]) -> None:
    """Draw the figure into `path`, a .png, .svg or .pdf file, which replaces it at the end.

    Raises:
        UserError: another suffix, or no matplotlib.
    """
    check_plot(path)
    target = Path(path)
    write_file(target, rendered(partial(_figure, inspection), target.suffix.lower()[1:]))


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise UserError if `path` cannot be drawn, before anything is read."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise UserError(f"--plot {target}: expected one of {', '.join(SUFFIXES)} at its end")
    if target.is_dir():
        raise UserError(f"cannot write {target}: it is a folder")
    if not (target.parent.is_dir() and os.access(target.parent, os.W_OK)):
        raise UserError(f"cannot write {target}: no such folder, or no right to write there")
    if not can_draw():
        raise UserError("--plot needs matplotlib: pip install 'tvb-mergekit[plot]'")


def _figure(inspection: Inspection) -> Figure:
    """All panels. The figure grows with T and M, so that all labels fit."""
    import matplotlib
    from matplotlib.figure import Figure

    tasks, bases = len(inspection.tasks), inspection.num_bases
    names = [shortened(printable(task), LABEL) for task in inspection.tasks]
    cell = 0.42 if tasks <= WIDE else 0.2 if tasks <= 30 else 0.135
    label = _inches(names) + 0.3
    square = max(3.0, cell * tasks)
    encoder = min(max(2.4, cell * bases), square)
    width = max(10.5, square + encoder + 2 * label + 2.2)
    # readers see a large figure from further away
    matplotlib.rcParams["font.size"] = 9 * math.sqrt(width / 10.5)
    heights = [square + 0.75 * label + 0.6, 3.2, 2.3 + 0.75 * label]
    figure = Figure(figsize=(width, sum(heights) + 0.7), layout="constrained")
    title = textwrap.fill(printable(headline(inspection)), int(10.5 * width), max_lines=3)
    figure.suptitle(title, x=0.01, ha="left", size="large")
    rows = figure.add_gridspec(3, 1, height_ratios=heights)
    top = rows[0].subgridspec(1, 2, width_ratios=[square, encoder])
    middle = rows[1].subgridspec(1, 2)
    _draw_cosines(figure.add_subplot(top[0]), inspection, names)
    if not inspection.keeps_tasks:
        _draw_encoder(figure.add_subplot(top[1]), inspection, names)
    _draw_eigenvalues(figure.add_subplot(middle[0]), inspection)
    _draw_energy(figure.add_subplot(middle[1]), inspection)
    _draw_errors(figure.add_subplot(rows[2]), inspection, names)
    return figure


def _draw_cosines(axes: Axes, inspection: Inspection, names: Sequence[str]) -> None:
    if inspection.cosines is None:
        return _say(axes, inspection.why_unknown("gram"))
    cosines, of = inspection.cosines
    values = cosines.numpy()
    # The diagonal is known. The other entries, often small, set the range of the colours.
    largest = float(np.abs(values - np.diag(values.diagonal())).max())
    limit = next((step for step in (0.1, 0.2, 0.5) if 0 < largest <= step), 1.0)
    axes.set_title(f"Cosines between the {of}")
    _heat_map(axes, values, names, names, -limit, limit)


def _draw_encoder(axes: Axes, inspection: Inspection, names: Sequence[str]) -> None:
    axes.set_title("Encoder weights")
    encoder = inspection.tensors.get("encoder")
    if encoder is None:
        _say(axes, inspection.why_unknown("encoder"))
        return
    values = encoder.numpy()
    bases = [f"B{m}" for m in range(values.shape[1])]
    limit = float(np.abs(values).max()) or 1.0
    _heat_map(axes, values, names, bases, -limit if values.min() < -1e-12 else 0.0, limit)


def _heat_map(
    axes: Axes, values: Array, rows: Sequence[str], columns: Sequence[str], low: float, high: float
) -> None:
    colours = "RdBu_r" if low < 0 else "Blues"  # both are safe for colour-blind readers
    how: dict[str, Any] = {"cmap": colours, "aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(values, vmin=low, vmax=high, **how)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    _label_x(axes, columns)
    axes.set_yticks(range(len(rows)), rows, size=_points(rows))
    extend = "max" if values.max() > high else "neither"
    axes.figure.colorbar(image, ax=axes, extend=extend, pad=0.02, aspect=30)
    if max(len(rows), len(columns)) > WIDE:
        return
    light = np.asarray(image.to_rgba(values))[:, :, :3] @ LUMINANCE
    for (row, column), value in np.ndenumerate(values):
        text = f"{round(float(value), 2) + 0.0:.2f}".replace("-", "\N{MINUS SIGN}")
        colour = "white" if light[row, column] < 0.5 else "black"
        axes.text(column, row, text, ha="center", va="center", size=7.5, color=colour)


def _draw_eigenvalues(axes: Axes, inspection: Inspection) -> None:
    if "eigenvalues" not in inspection.tensors:
        axes.set_title("Eigenvalues")
        _say(axes, inspection.why_unknown("gram"))
        return
    values = inspection.tensors["eigenvalues"].clamp(min=0.0).numpy()
    positive = values[values > 0]
    axes.set_title("Eigenvalues of the Gram matrix")
    if len(positive) and positive.max() > 100 * positive.min():  # without zeros
        axes.set_yscale("log", nonpositive="mask")
    else:
        axes.set_ylim(0, 1.08 * float(values.max()) or 1.0)
    axes.plot(range(1, len(values) + 1), values, "o-", color=BLUE, linewidth=1, markersize=4)
    _count_x(axes, len(values), "m", inspection.num_bases, 0.5)


def _draw_energy(axes: Axes, inspection: Inspection) -> None:
    axes.set_title("Energy that M bases can retain")
    choices, current, reached = inspection.choices, inspection.num_bases, list[float]()
    if not choices:
        _say(axes, inspection.why_unknown("gram"))
        return
    places = [choice.num_bases for choice in choices]
    energies = [100 * choice.retained_energy for choice in choices]
    axes.plot(places, energies, "o-", color=BLUE, markersize=4, label="any bases (spectral)")
    balanced = [100 * choice.balanced_energy for choice in choices]
    axes.plot(places, balanced, "--", color=ORANGE, label="balanced bases")
    if inspection.facts.retained_energy is not None and not inspection.keeps_tasks:
        reached = [100 * inspection.facts.retained_energy]
        label = f"these ({inspection.basis}): {reached[0]:.1f} %"
        axes.plot([current], reached, "D", color=DARK, markerfacecolor="none", label=label)
    # The axis starts at a round number, to show the approach to 100 %.
    bottom = 10 * math.floor(max(min(energies + balanced + reached) - 5, 0) / 10)
    axes.set_ylim(bottom, 100 + 0.06 * (100 - bottom))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_ylabel("retained energy, %")
    _count_x(axes, len(places), "M", current)
    axes.legend(loc="lower right")


def _draw_errors(axes: Axes, inspection: Inspection, names: Sequence[str]) -> None:
    axes.set_title("Error of each reconstructed task vector, relative to its norm")
    errors = np.array([inspection.errors.get(task, math.nan) for task in inspection.tasks])
    if not np.isfinite(errors).any():
        _say(axes, inspection.why_unknown("errors"))
        return
    places, heights = np.arange(len(names)), np.where(np.isfinite(errors), errors, 0.0)
    axes.bar(places, heights, 0.7, color=BLUE)
    for place in places[~np.isfinite(errors)]:
        axes.text(float(place), 0, "?" if math.isnan(errors[place]) else "∞", ha="center")
    axes.set_ylim(0, 1.15 * float(heights.max()) if heights.max() > 1e-6 else 1.0)
    axes.set_xlim(-0.7, len(names) - 0.3)
    _label_x(axes, names)
    axes.set_ylabel("‖τ̂ − τ‖ / ‖τ‖")


def _count_x(axes: Axes, count: int, name: str, bases: int, right: float = 0.0) -> None:
    """An axis of 1 to `count`, with a mark at M, or between M and M + 1."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0.5, count + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.axvline(bases + right, color=DARK, linewidth=1, linestyle=":", zorder=0)
    axes.set_xlabel(f"{name} (dotted: M = {bases})")


def _say(axes: Axes, why: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=DARK)


def _label_x(axes: Axes, names: Sequence[str]) -> None:
    """Labels are level if they fit, else slanted, or upright if slanted labels overlap."""
    # an estimate, before the final layout
    room = 0.8 * axes.bbox.width / axes.figure.dpi / len(names)
    turn = 0 if _inches(names) < room else 45 if room > 2 * _points(names) / 72 else 90
    how: dict[str, Any] = {"ha": "right", "rotation_mode": "anchor"} if turn == 45 else {}
    axes.set_xticks(range(len(names)), names, rotation=turn, size=_points(names), **how)


def _points(names: Sequence[str]) -> float:
    return 8.0 if len(names) <= 30 else 7.0


def _inches(names: Sequence[str]) -> float:
    return max(map(len, names)) * 0.62 * _points(names) / 72
