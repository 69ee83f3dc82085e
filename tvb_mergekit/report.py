"""What a merge tells: basis.json and basis.safetensors, the model card's section, the terminal.

File formats: `basis.safetensors` (float64) holds `gram` [T, T], `eigenvalues` [T] descending,
`encoder` [T, M], `decoder` [M, T], and for PCA `reconstruction` [T, T]; for rand_proj, which has
no encoder, `mixing` [M, M] (B = Omega @ mixing). `basis.json` is `facts` below.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.basis import Basis

FORMAT_VERSION = 1
WIDE = 12  # tasks beyond which the terminal gets a summary instead of a T x T table

CITATION = """```bibtex
@article{zeng2026taskvectorbases,
  title   = {Task Vector Bases: A Unified and Scalable Framework for Compressed Task Arithmetic},
  author  = {Zeng, Siqi and He, Yifei and Liu, Meitong and You, Weiqiu and Hao, Yifan and
             Tsai, Yao-Hung Hubert and Yamada, Makoto and Zhao, Han},
  journal = {Transactions on Machine Learning Research},
  year    = {2026},
  url     = {https://openreview.net/forum?id=zkc7u3mIaE}
}
```"""


def facts(
    basis: Basis,
    *,
    base_model: str,
    models: Mapping[str, str],
    left_out: Mapping[str, str],
    fingerprints: Mapping[str, str],
    tunables: Mapping[str, set[float]],
    dtype: str | None,
) -> dict[str, Any]:
    """All of `basis.json`; plain JSON types, no NaN or infinity (null where undefined)."""
    settings, encoding = basis.settings, basis.encoding
    parameters = settings.in_force()
    # One value, or all that filters and layer gradients led to.
    for key, values in tunables.items():
        parameters[key] = next(iter(values)) if len(values) == 1 else sorted(values)
    parameters["weights"] = dict(zip(basis.tasks, basis.weights, strict=True))
    norms = [math.sqrt(value) for value in basis.sums.gram.diagonal().tolist()]
    return {
        "format_version": FORMAT_VERSION,
        "versions": {
            name: _version(name)
            for name in ("tvb-mergekit", "mergekit", "torch", "transformers", "safetensors")
        },
        "method": settings.method,
        "parameters": parameters,
        "tasks": list(basis.tasks),
        "models": [models[task] for task in basis.tasks],
        "base_model": base_model,
        "num_bases": encoding.num_bases,
        "num_parameters": basis.sums.num_parameters,
        "dtype": dtype,
        "loss": encoding.loss,
        "spectral_bound": encoding.spectral_bound,
        "balanced_bound": encoding.balanced_bound,
        "relative_gap": encoding.relative_gap,
        "retained_energy": encoding.retained_energy,
        "norms": {
            "base": math.sqrt(basis.sums.base_norm_squared),
            **dict(zip(basis.tasks, norms, strict=True)),
        },
        "left_out": dict(left_out),
        "fingerprints": dict(fingerprints),
        "gram_cached": basis.cached,
        "seconds": {phase: round(seconds, 3) for phase, seconds in basis.seconds.items()},
    }


def write_files(folder: str | os.PathLike[str], basis: Basis, facts: Mapping[str, Any]) -> None:
    """Write `basis.json` and `basis.safetensors` into `folder`, which is not yet published."""
    encoding = basis.encoding
    tensors = {
        "gram": basis.sums.gram,
        "eigenvalues": encoding.eigenvalues,
        "encoder": encoding.encoder,
        "decoder": encoding.decoder,
        "reconstruction": encoding.reconstruction if encoding.basis == "pca" else None,
        "mixing": encoding.mixing,
    }
    present = {name: t.contiguous() for name, t in tensors.items() if t is not None}
    # One metadata entry: safetensors writes several in an order that changes from run to run.
    save_file(present, Path(folder) / "basis.safetensors", metadata={"format": "pt"})
    text = json.dumps(facts, indent=2, allow_nan=False)
    (Path(folder) / "basis.json").write_text(text + "\n", encoding="utf-8")


def add_card_section(card: str | os.PathLike[str], basis: Basis, facts: Mapping[str, Any]) -> None:
    """Append our section to the model card that mergekit wrote."""
    path = Path(card)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(text.rstrip() + "\n\n" + card_section(basis, facts), encoding="utf-8")


def card_section(basis: Basis, facts: Mapping[str, Any]) -> str:
    """Markdown: tasks, encoder weights, loss against the bounds, and what to cite."""
    encoding = basis.encoding
    names = [f"B{m}" for m in range(encoding.num_bases)]
    lines = [
        "## Task vector bases",
        "",
        f"The task vectors of {len(basis.tasks)} models were compressed into "
        f"{encoding.num_bases} basis vectors (`basis: {encoding.basis}`) by "
        "[tvb-mergekit](https://pypi.org/project/tvb-mergekit/).",
        "",
    ]
    if encoding.encoder is not None:
        head = ["task", "model", *names, "sum"]
        lines += ["Encoder weights (each basis is this combination of the task vectors):", ""]
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for task, row in zip(basis.tasks, encoding.encoder.tolist(), strict=True):
            model = facts["models"][list(basis.tasks).index(task)]
            cells = [
                task.replace("|", "\\|"),
                f"`{model}`",
                *(f"{w:.3f}" for w in row),
                f"{sum(row):.3f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    else:
        lines += [f"* {task}: `{m}`" for task, m in zip(basis.tasks, facts["models"], strict=True)]
    lines += ["", *(f"* {line}" for line in _measures(basis, facts)), ""]
    if basis.settings.forget:
        lines += [f"Forgotten: {', '.join(basis.settings.forget)}.", ""]
    lines += ["If you use this model, please cite:", "", CITATION, ""]
    return "\n".join(lines)


def print_summary(
    basis: Basis, facts: Mapping[str, Any], out: str, console: Console | None = None
) -> None:
    """Cosines, M, retained energy and encoder on the terminal (standard output)."""
    console = console or Console(soft_wrap=True, highlight=False)
    tasks, encoding = list(basis.tasks), basis.encoding
    cosines = basis.cosines
    if len(tasks) <= WIDE:
        _print_table(console, "Cosines between the task vectors", tasks, tasks, cosines)
    else:
        pairs = [(float(cosines[i, j]), i, j) for i in range(len(tasks)) for j in range(i)]
        low, high = min(pairs), max(pairs)
        console.print(
            f"Cosines between the {len(tasks)} task vectors: {low[0]:.3f} ({tasks[low[1]]}, "
            f"{tasks[low[2]]}) to {high[0]:.3f} ({tasks[high[1]]}, {tasks[high[2]]})"
        )
    if encoding.encoder is not None and encoding.num_bases <= WIDE:
        names = [f"B{m}" for m in range(encoding.num_bases)]
        _print_table(console, "Encoder weights", tasks, names, encoding.encoder)
    for line in _measures(basis, facts):
        console.print(line)
    if facts["left_out"]:
        console.print(f"{len(facts['left_out'])} tensors left out: see basis.json")
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in facts["seconds"].items())
    cached = " (Gram matrix from the cache)" if basis.cached else ""
    console.print(f"{seconds}{cached}")
    console.print(f"Written to {out}")


def _measures(basis: Basis, facts: Mapping[str, Any]) -> list[str]:
    encoding = basis.encoding
    gap = facts["relative_gap"]
    lines = [
        f"M = {encoding.num_bases} bases of {len(basis.tasks)} task vectors, "
        f"{facts['num_parameters']:,} parameters each",
        f"Retained energy {100 * encoding.retained_energy:.2f} %: reconstruction loss "
        f"{encoding.loss:.6g}, spectral lower bound {encoding.spectral_bound:.6g}"
        + ("" if gap is None else f" (relative gap {gap:.2e})"),
    ]
    if encoding.balanced_bound is not None:
        lines.append(f"Balanced bound {encoding.balanced_bound:.6g}")
    return lines


def _print_table(
    console: Console, title: str, rows: list[str], columns: list[str], values: Tensor
) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in zip(rows, values.tolist(), strict=True):
        table.add_row(name, *(f"{value:.3f}" for value in row))
    console.print(table)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
