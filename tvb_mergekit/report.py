"""What a merge tells: basis.json and basis.safetensors, the model card's section, the terminal.

File formats: `basis.safetensors` (float64) holds `gram` [T, T], `eigenvalues` [T] descending,
`encoder` [T, M], `decoder` [M, T], and for PCA `reconstruction` [T, T]; for rand_proj, which has
no encoder, `mixing` [M, M] (B = Omega @ mixing). `basis.json` is `facts` below.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save
from torch import Tensor

from tvb_mergekit.basis import Basis, StoredBases
from tvb_mergekit.facts import FACTS, FOLDER, FORMAT_VERSION, TENSORS, write_facts
from tvb_mergekit.store import shares

# The tensors of a merge's basis.safetensors; a store's has more.
MERGED = ("gram", "eigenvalues", "encoder", "decoder", "reconstruction", "mixing")
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
        "versions": versions(),
        "method": settings.method,
        "parameters": parameters,
        "tasks": list(basis.tasks),
        "models": [models[task] for task in basis.tasks],
        "base_model": base_model,
        "num_bases": encoding.num_bases,
        "num_parameters": basis.sums.num_parameters,
        "dtype": dtype,
        "loss": encoding.loss,
        "decoder_losses": encoding.decoder_losses,
        "spectral_bound": encoding.spectral_bound,
        "balanced_bound": encoding.balanced_bound,
        "relative_gap": encoding.relative_gap,
        "retained_energy": encoding.retained_energy,
        "norms": {
            "base": math.sqrt(basis.sums.base_norm_squared),
            **dict(zip(basis.tasks, norms, strict=True)),
        },
        "matrix_norms": dict(zip(("base", *basis.tasks), basis.sums.sizes, strict=True)),
        "left_out": dict(left_out),
        "fingerprints": dict(fingerprints),
        "gram_cached": basis.cached,
        "seconds": {phase: round(seconds, 3) for phase, seconds in basis.seconds.items()},
    }


def facts_over_store(
    built: Mapping[str, Any],
    basis: StoredBases,
    *,
    store: str,
    basis_weights: Sequence[float],
    left_out: Mapping[str, str],
    tunables: Mapping[str, set[float]],
    dtype: str | None,
) -> dict[str, Any]:
    """`basis.json` of a merge over the bases of a store, from that of the store."""
    merging = ("lambda", "alpha", "density", "trim", "merge_func", "forget", "lambda_scale")
    parameters = {k: v for k, v in built["parameters"].items() if k not in merging}
    in_force = basis.settings.in_force()
    parameters |= {key: in_force[key] for key in (*merging, "exclude") if key in in_force}
    for key, values in tunables.items():
        parameters[key] = next(iter(values)) if len(values) == 1 else sorted(values)
    parameters["basis_weights"] = list(basis_weights)
    return {
        **{key: value for key, value in built.items() if key != "store"},
        "versions": versions(),
        "method": basis.settings.method,
        "parameters": parameters,
        "dtype": dtype,
        "left_out": dict(left_out),
        "from_store": store,
        "gram_cached": False,
        "seconds": {phase: round(seconds, 3) for phase, seconds in basis.seconds.items()},
    }


def tensors_of(basis: Basis) -> dict[str, Tensor]:
    """All of `basis.safetensors`."""
    encoding = basis.encoding
    tensors = {
        "gram": basis.sums.gram,
        "eigenvalues": encoding.eigenvalues,
        "encoder": encoding.encoder,
        "decoder": encoding.decoder,
        "reconstruction": encoding.reconstruction if encoding.basis == "pca" else None,
        "mixing": encoding.mixing,
    }
    return {name: t.contiguous() for name, t in tensors.items() if t is not None}


def write_files(model: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files into `basis` in the folder of a merged model, which is not yet published."""
    folder = model / FOLDER
    folder.mkdir()
    write_tensors(folder, tensors)
    write_facts(folder, facts)


def write_tensors(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write `basis.safetensors` alone."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # One metadata entry: safetensors writes several in an order that changes from run to run. And
    # not `save_file`, whose files only their owner may read.
    data = save(contiguous, metadata={"format": "pt"})
    (Path(folder) / TENSORS).write_bytes(data)


def add_card_section(
    card: str | os.PathLike[str], facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Append our section to the model card that mergekit wrote."""
    path = Path(card)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(text.rstrip() + "\n\n" + card_section(facts, tensors), encoding="utf-8")


def card_section(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Markdown: tasks, encoder weights, loss against the bounds, and what to cite."""
    names = [f"B{m}" for m in range(facts["num_bases"])]
    lines = [
        "## Task vector bases",
        "",
        f"The task vectors of {len(facts['tasks'])} models were compressed into "
        f"{facts['num_bases']} basis vectors (`basis: {facts['parameters']['basis']}`) by "
        "[tvb-mergekit](https://pypi.org/project/tvb-mergekit/).",
        "",
    ]
    if "encoder" in tensors:
        head = ["task", "model", *names, "sum"]
        lines += ["Encoder weights (each basis is this combination of the task vectors):", ""]
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        sums = row_sums(facts, tensors["encoder"])
        rows = zip(facts["tasks"], facts["models"], tensors["encoder"].tolist(), sums, strict=True)
        for task, model, row, total in rows:
            cells = [
                task.replace("|", "\\|"),
                f"`{model}`",
                *(f"{w:.3f}" for w in row),
                f"{total:.3f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    else:
        pairs = zip(facts["tasks"], facts["models"], strict=True)
        lines += [f"* {task}: `{model}`" for task, model in pairs]
    lines += ["", *(f"* {line}" for line in _measures(facts)), ""]
    if forgotten := facts["parameters"].get("forget"):
        lines += [f"Forgotten: {', '.join(forgotten)}.", ""]
    lines += ["If you use this model, please cite:", "", CITATION, ""]
    return "\n".join(lines)


def row_sums(facts: Mapping[str, Any], encoder: Tensor) -> list[float]:
    """The weight of each task in the sum that a merge adds, [T]: W_e v, v as in `Bases.shares`."""
    factors = facts.get("parameters", {}).get("basis_weights")  # of a merge over a store
    if store := facts.get("store"):
        own = store.get("basis_weights")
        known = None if own is None else torch.tensor(own, dtype=torch.float64)
        factors = shares(store.get("compress"), known, encoder.shape[1])
    if factors is None:
        factors = torch.ones(encoder.shape[1])
    return (encoder @ torch.as_tensor(factors, dtype=torch.float64)).tolist()


def print_summary(
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    out: str,
    console: Console | None = None,
) -> None:
    """Cosines, M, retained energy and encoder on the terminal (standard output)."""
    console = console or Console(soft_wrap=True, highlight=False)
    tasks, encoder = facts["tasks"], tensors.get("encoder")
    if "gram" in tensors:
        norms = tensors["gram"].diagonal().sqrt()
        cosines = tensors["gram"] / torch.outer(norms, norms)
        if len(tasks) <= WIDE:
            _print_table(console, "Cosines between the task vectors", tasks, tasks, cosines)
        else:
            pairs = [(float(cosines[i, j]), i, j) for i in range(len(tasks)) for j in range(i)]
            low, high = min(pairs), max(pairs)
            console.print(
                f"Cosines between the {len(tasks)} task vectors: {low[0]:.3f} ({tasks[low[1]]}, "
                f"{tasks[low[2]]}) to {high[0]:.3f} ({tasks[high[1]]}, {tasks[high[2]]})"
            )
    if encoder is not None and encoder.shape[1] <= WIDE:
        names = [f"B{m}" for m in range(encoder.shape[1])]
        _print_table(console, "Encoder weights", tasks, names, encoder)
    for line in _measures(facts):
        console.print(line)
    if facts["left_out"]:
        console.print(f"{len(facts['left_out'])} tensors left out: see {FOLDER}/{FACTS}")
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in facts["seconds"].items())
    cached = " (Gram matrix from the cache)" if facts["gram_cached"] else ""
    console.print(f"{seconds}{cached}")
    console.print(f"Written to {out}")


def _measures(facts: Mapping[str, Any]) -> list[str]:
    gap, loss = facts["relative_gap"], facts["loss"]
    lines = [
        f"M = {facts['num_bases']} bases of {len(facts['tasks'])} task vectors, "
        f"{facts['num_parameters']:,} parameters each",
    ]
    if loss is not None:
        lines.append(
            f"Retained energy {100 * facts['retained_energy']:.2f} %: reconstruction loss "
            f"{loss:.6g}, spectral lower bound {facts['spectral_bound']:.6g}"
            + ("" if gap is None else f" (relative gap {gap:.2e})")
        )
    if facts["balanced_bound"] is not None:
        lines.append(f"Balanced bound {facts['balanced_bound']:.6g}")
    return lines + decoders(facts)


def decoders(facts: Mapping[str, Any]) -> list[str]:
    """A line on the loss with each decoder, for `ae` by Adam."""
    losses = facts.get("decoder_losses")
    if not losses:
        return []
    each = (f"{name.replace('_', ' ')} {loss:.6g}" for name, loss in losses.items())
    return [f"Reconstruction loss by decoder: {', '.join(each)}"]


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


def versions() -> dict[str, str | None]:
    """The packages that a result depends on -> their versions."""
    packages = ("tvb-mergekit", "mergekit", "torch", "transformers", "safetensors")
    return {name: _version(name) for name in packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
