"""Draws recipes/quickstart/picture.png from a merged folder and lm-eval's result files.

Needs matplotlib, which nothing else here does:

    mergekit-yaml recipes/quickstart.yml ./merged
    # lm_eval ... --output_path scores/base.json, scores/merged.json, and for each specialist
    # scores/TASK.json with --tasks quickstart_TASK
    python recipes/quickstart/make_picture.py ./merged scores recipes/quickstart/picture.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from safetensors.numpy import load_file


def main(merged: str, scores: str, out: str) -> None:
    """Cosines, encoder, and the scores of base, merged model and specialists, side by side."""
    facts = json.loads((Path(merged) / "basis" / "basis.json").read_text())
    tensors = load_file(Path(merged) / "basis" / "basis.safetensors")
    tasks = facts["tasks"]
    norms = np.sqrt(np.diag(tensors["gram"]))
    cosines = tensors["gram"] / np.outer(norms, norms)
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(13, 4.2), width_ratios=[1.15, 0.75, 1.6], layout="constrained"
    )
    _heat_map(left, cosines, tasks, tasks, "RdBu_r", 1)
    left.set_title(f"cosines of the T = {len(tasks)} task vectors")
    encoder = tensors["encoder"]
    names = [f"B{m}" for m in range(encoder.shape[1])]
    _heat_map(middle, encoder, tasks, names, "Blues", float(encoder.max()))
    middle.set_title(f"M = {len(names)} {facts['parameters']['basis']} bases")
    _bars(right, tasks, Path(scores))
    right.set_title("exact match on held-out items")
    figure.savefig(out, dpi=110)


def _heat_map(axes, values, rows, columns, colours, limit) -> None:
    low = -limit if values.min() < 0 else 0
    axes.imshow(values, cmap=colours, vmin=low, vmax=limit, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    for (row, column), value in np.ndenumerate(values):
        dark = abs(value) > 0.6 * limit
        axes.text(
            column,
            row,
            f"{round(value, 2) + 0.0:.2f}",
            ha="center",
            va="center",
            size=7,
            color="w" if dark else "k",
        )


def _bars(axes, tasks, folder: Path) -> None:
    def score(file: str, task: str) -> float:
        (path,) = folder.glob(f"{file}_*.json")
        return json.loads(path.read_text())["results"][f"quickstart_{task}"]["exact_match,none"]

    bars = [
        ("base", "0.75", lambda task: score("base", task)),
        ("merged from 4 bases", "tab:blue", lambda task: score("merged", task)),
        ("each task's specialist", "tab:orange", lambda task: score(task, task)),
    ]
    for index, (label, colour, of) in enumerate(bars):
        values = [of(task) for task in tasks]
        places = np.arange(len(tasks)) + 0.27 * (index - 1)
        axes.bar(places, values, 0.25, color=colour, label=f"{label} ({np.mean(values):.2f})")
    axes.set_xticks(range(len(tasks)), tasks, rotation=45, ha="right")
    axes.set_ylim(0, 1.22)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(
        loc="upper left", ncols=3, columnspacing=1, handlelength=1, frameon=False, fontsize=8
    )
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
