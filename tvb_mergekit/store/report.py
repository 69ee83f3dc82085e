"""Reports of merges: facts and numbers, the model card, the summary on the terminal.

`docs/files.md` describes both files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination
from tvb_mergekit.core.encoders import Encoding, Gram
from tvb_mergekit.core.settings import MERGING_KEYS, VARYING_KEYS
from tvb_mergekit.errors import counted
from tvb_mergekit.store.facts import (
    FACTS,
    FOLDER,
    MERGE_VERSION,
    TENSORS,
    Facts,
    StoreFacts,
    write_facts,
    write_tensors,
)
from tvb_mergekit.tables import Sheet, matrix, show
from tvb_mergekit.tensors.taskset import TaskSet

LOSSES = ("loss", "spectral_bound", "retained_energy")
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


def facts(tasks: TaskSet, basis: Basis, tunables: Mapping[str, set[float]]) -> Facts:
    """All of a merge's `basis.json`; null if a number is undefined.

    Args:
        tunables: `lambda`, `alpha` and `density` -> all values of it.
    """
    settings, sums, named = basis.settings, basis.sums, ("base", *basis.tasks)
    norms = [math.sqrt(sums.base_norm_squared), *sums.norms]
    weights = dict(zip(basis.tasks, basis.weights, strict=True))
    return Facts(
        format_version=MERGE_VERSION,
        versions=versions(),
        method=settings.method,
        parameters={**settings.in_force(), **_values(tunables), "weights": weights},
        tasks=list(basis.tasks),
        models=list(tasks.models),
        base_model=tasks.base_model,
        num_bases=basis.num_bases,
        num_parameters=sums.num_parameters,
        dtype=tasks.dtype,
        **losses_of(basis.encoding if sums.inner else None),
        norms=dict(zip(named, norms, strict=True)),
        left_out=dict(tasks.left_out),
        fingerprints=tasks.fingerprints,
        seconds=_rounded(basis.seconds),
    )


def losses_of(encoding: Encoding | None) -> dict[str, Any]:
    """Loss, bound and retained energy; null if they are not known."""
    return {name: encoding and getattr(encoding, name) for name in LOSSES}


def errors_of(
    tasks: Sequence[str], gram: Tensor, reconstruction: Tensor
) -> dict[str, float | None]:
    """Task -> ||tau_hat - tau|| / ||tau||, from G; null of a zero vector."""
    lost = Gram.of(gram).errors(reconstruction.numpy()).tolist()
    pairs = zip(lost, gram.diagonal().sqrt().tolist(), strict=True)
    errors = [error / norm if norm else None for error, norm in pairs]
    return dict(zip(tasks, errors, strict=True))


def facts_over_store(
    built: StoreFacts,
    basis: Combination,
    basis_weights: Sequence[float],
    left_out: Mapping[str, str],
    tunables: Mapping[str, set[float]],
    dtype: str | None,
) -> Facts:
    """`basis.json` of a merge over the bases of a store, from that of the store."""
    merging, in_force = (*VARYING_KEYS, *MERGING_KEYS), basis.settings.in_force()
    parameters = {k: v for k, v in built.parameters.items() if k not in merging}
    parameters |= {key: in_force[key] for key in (*merging, "exclude") if key in in_force}
    return Facts.model_validate(
        {
            **dict(built),
            "format_version": MERGE_VERSION,
            "versions": versions(),
            "method": basis.settings.method,
            "parameters": {**parameters, **_values(tunables), "basis_weights": list(basis_weights)},
            "dtype": dtype,
            "left_out": dict(left_out),
            "seconds": _rounded(basis.seconds),
        }
    )


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: round(value, 3) for phase, value in seconds.items()}


def _values(tunables: Mapping[str, set[float]]) -> dict[str, object]:
    """Key -> its value, or the list of values that filters and layer gradients give."""
    return {key: v.copy().pop() if len(v) == 1 else sorted(v) for key, v in tunables.items()}


def tensors_of(basis: Basis) -> dict[str, Tensor]:
    """All of a merge's `basis.safetensors` that was computed, float64."""
    encoding = basis.encoding
    tensors = {
        "gram": basis.sums.gram,
        "eigenvalues": encoding.eigenvalues,
        "encoder": encoding.encoder,
        "decoder": encoding.decoder,
        "reconstruction": encoding.reconstruction if basis.settings.basis == "pca" else None,
    }
    if not basis.sums.inner:  # what needs G is not known
        kept = {"none": ("encoder", "decoder"), "rand_select": ("encoder",)}
        tensors = {name: tensors[name] for name in kept.get(basis.settings.basis, ())}
    return {name: t.contiguous() for name, t in tensors.items() if t is not None}


def write_files(model: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Write both files into `basis` in the folder of a merged model, which is not yet published."""
    folder = model / FOLDER
    folder.mkdir()
    write_tensors(folder / TENSORS, tensors)
    write_facts(folder / FACTS, facts)


def add_card_section(
    card: str | os.PathLike[str], facts: Facts, tensors: Mapping[str, Tensor]
) -> None:
    """Append our section to the model card that mergekit wrote."""
    path = Path(card)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(text.rstrip() + "\n\n" + card_section(facts, tensors), encoding="utf-8")


def card_section(facts: Facts, tensors: Mapping[str, Tensor]) -> str:
    """Markdown: tasks, encoder weights, loss and bounds, citation."""
    lines = [
        "## Task vector bases",
        "",
        f"The task vectors of {len(facts.tasks)} models were compressed into "
        f"{facts.num_bases} basis vectors (`basis: {facts.parameters['basis']}`) by "
        "[tvb-mergekit](https://pypi.org/project/tvb-mergekit/).",
        "",
    ]
    head = ["task", "model"]
    rows = [
        [t.replace("|", "\\|"), f"`{m}`"] for t, m in zip(facts.tasks, facts.models, strict=True)
    ]
    if "encoder" in tensors:
        lines += ["Encoder weights (each basis is this combination of the task vectors):", ""]
        head += [*(f"B{m}" for m in range(facts.num_bases)), "sum"]
        sums = row_sums(facts, tensors["encoder"])
        for row, weights, total in zip(rows, tensors["encoder"].tolist(), sums, strict=True):
            row += [f"{weight:.3f}" for weight in (*weights, total)]
    lines += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    lines += ["", *(f"* {line}" for line in (_size(facts), *measures(facts))), ""]
    if forgotten := facts.parameters.get("forget"):
        lines += [f"Forgotten: {', '.join(forgotten)}.", ""]
    lines += ["If you use this model, please cite:", "", CITATION, ""]
    return "\n".join(lines)


def row_sums(facts: Facts, encoder: Tensor) -> list[float]:
    """The weight of each task in the sum that a merge adds, [T]: W_e v."""
    given = facts.parameters.get("basis_weights") or [1.0] * encoder.shape[1]
    return (encoder @ torch.tensor(given, dtype=torch.float64)).tolist()


def print_summary(facts: Facts, tensors: Mapping[str, Tensor], out: str) -> None:
    """Cosines, M, retained energy and encoder on the terminal (standard output)."""
    told: list[Sheet | str] = []
    if "gram" in tensors:
        told.append(cosine_sheet(facts.tasks, cosines(tensors["gram"])))
    encoder = tensors.get("encoder")
    if encoder is not None and encoder.shape[1] <= WIDE:
        names = [f"B{m}" for m in range(encoder.shape[1])]
        told.append(matrix("Encoder weights", facts.tasks, names, encoder.tolist()))
    told += [_size(facts), *measures(facts)]
    if facts.left_out:
        told.append(f"{counted(len(facts.left_out), 'tensor')} left out: see {FOLDER}/{FACTS}")
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in facts.seconds.items())
    show([*told, seconds, f"Written to {out}"], Console(soft_wrap=True, highlight=False))


def cosines(gram: Tensor) -> Tensor:
    """Cosines [T, T] float64 from the inner products [T, T]; the diagonal is 1."""
    lengths = gram.diagonal().clamp(min=0).sqrt()
    return (gram / lengths.outer(lengths)).nan_to_num(0.0).clamp(-1, 1).fill_diagonal_(1.0)


def cosine_sheet(names: Sequence[str], values: Tensor) -> Sheet | str:
    """The cosines [T, T] as a table; of many tasks the least and the largest, in a line."""
    if len(names) > WIDE:
        pairs = [(float(values[i, j]), i, j) for i in range(len(names)) for j in range(i)]
        ends = [f"{value:.3f} ({names[i]}, {names[j]})" for value, i, j in (min(pairs), max(pairs))]
        return f"Cosines between the {len(names)} task vectors: {' to '.join(ends)}"
    heads = rows = names
    if max(map(len, names)) > 8:  # numbers for long names
        heads = [str(number) for number in range(1, len(names) + 1)]
        rows = [f"{number} {name}" for number, name in enumerate(names, 1)]
    return matrix("Cosines between the task vectors", rows, heads, values.tolist())


def _size(facts: Facts) -> str:
    return (
        f"M = {facts.num_bases} bases of {len(facts.tasks)} task vectors, "
        f"{facts.num_parameters:,} parameters each"
    )


def measures(facts: Facts) -> list[str]:
    """Lines on loss, bounds and retained energy, where they are known."""
    if facts.loss is not None:
        return [
            f"Retained energy {100 * (facts.retained_energy or 0):.2f} %: reconstruction loss "
            f"{facts.loss:.6g}, spectral lower bound {facts.spectral_bound:.6g}"
        ]
    lacks = "No Gram matrix: this merge needs none; `tvb inspect RECIPE` computes it"
    return [] if facts.errors else [lacks]


@cache
def versions() -> dict[str, str | None]:
    """The packages that a result depends on -> their versions."""
    packages = ("tvb-mergekit", "mergekit", "torch", "transformers", "safetensors")
    return {name: version(name) for name in packages}
