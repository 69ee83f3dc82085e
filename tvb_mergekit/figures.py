"""Pictures in one style: the same figure gives the same bytes.

Functions import matplotlib (the extra `plot`).
"""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABEL = 22  # characters of a name next to an axis
BLUE, ORANGE, DARK = "#0072b2", "#d55e00", "#333333"  # Okabe and Ito's
MARKS = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:")
MADE = "Made by tvb-mergekit"
# Metadata of files, without versions and dates.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": MADE},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "tvb-mergekit",
    "text.parse_math": False,  # names may hold dollars
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def rendered(make: Callable[[], Figure], kind: str) -> bytes:
    """The figure of `make` as png, svg or pdf, without the user's own settings."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        # boxes replace scripts that the font lacks; the tables have the text
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        buffer = io.BytesIO()
        make().savefig(buffer, format=kind, dpi=200, metadata=METADATA[kind])
    return buffer.getvalue()


def radar(spokes: Sequence[str], lines: Mapping[str, Sequence[float]]) -> Figure:
    """Lines around a centre, and a colour for each spoke."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * number / len(spokes) for number in range(len(spokes))]
    colours = [colormaps["turbo"](number / len(spokes)) for number in range(len(spokes))]
    for marks, (name, values) in zip(itertools.cycle(MARKS), lines.items()):
        axes.plot([*angles, 2 * math.pi], [*values, values[0]], marks[1:], color=DARK, linewidth=1)
        axes.scatter(angles, values, c=colours, marker=marks[0], zorder=3)
        axes.plot([], [], marks, color=DARK, label=name)
    axes.set_xticks(angles, spokes)
    for label, colour in zip(axes.get_xticklabels(), colours, strict=True):
        label.set_color(colour)
    axes.set_ylim(0)
    figure.legend(loc="outside right upper")
    return figure
