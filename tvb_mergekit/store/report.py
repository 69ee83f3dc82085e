"""Reports of merges and stores: facts, parts of model cards, lines, what `inspect` shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination
from tvb_mergekit.core.encoders.balanced import choices
from tvb_mergekit.core.gram import Encoding, Gram
from tvb_mergekit.core.settings import MERGING_KEYS, VARYING_KEYS
from tvb_mergekit.errors import counted, listed
from tvb_mergekit.store.facts import Facts, StoreFacts
from tvb_mergekit.tensors.taskset import TaskSet

PACKAGES = ("tvb-mergekit", "mergekit", "torch", "transformers", "safetensors")
NUMBERS = ("gram", "eigenvalues", "encoder", "decoder", "cosines")
UNKNOWN = dict.fromkeys(("loss", "spectral_bound", "retained_energy"))  # without G
OURS = "[tvb-mergekit](https://pypi.org/project/tvb-mergekit/)"
CITATION = (
    "If you use this model, please cite Zeng et al., Task Vector Bases: A Unified and Scalable "
    "Framework for Compressed Task Arithmetic, TMLR 2026, https://openreview.net/forum?id=zkc7u3mIaE"
)


def facts(
    tasks: TaskSet, basis: Combination, tunables: Mapping[str, set[float]], built: StoreFacts | None
) -> Facts:
    """All of a merge's `basis.json`; null if a number is undefined.

    Args:
        tunables: `lambda`, `alpha` and `density` -> all values of it.
        built: the facts of the bases that were merged.
    """
    in_force, merging = basis.settings.in_force(), (*VARYING_KEYS, *MERGING_KEYS)
    varying = {k: min(v) if len(v) == 1 else sorted(v) for k, v in tunables.items()}
    found: dict[str, Any] = {
        "format_version": 1,
        "versions": {name: version(name) for name in PACKAGES},
        "method": basis.settings.method,
        "dtype": tasks.dtype,
        "left_out": dict(tasks.left_out),
        "seconds": dict(basis.seconds),
    }
    if built is not None:
        kept = {key: value for key, value in built.parameters.items() if key not in merging}
        kept |= {key: in_force[key] for key in (*merging, "exclude") if key in in_force}
        kept |= {"basis_weights": basis.weighted_encoder.diagonal().tolist(), **varying}
        return Facts.model_validate({**dict(built), **found, "parameters": kept})
    assert isinstance(basis, Basis)
    sums, names = basis.sums, basis.tasks
    weights = dict(zip(names, basis.weights, strict=True))
    norms = {"base": math.sqrt(sums.base_norm_squared)}
    found |= {
        "parameters": {**in_force, **varying, "weights": weights},
        "tasks": list(names),
        "models": list(tasks.models),
        "base_model": tasks.base_model,
        "num_bases": basis.num_bases,
        "num_parameters": sums.num_parameters,
        "norms": norms | dict(zip(names, sums.norms, strict=True)),
        "fingerprints": tasks.fingerprints,
        **(measured(names, basis.encoding) if sums.inner else UNKNOWN),
    }
    return Facts.model_validate(found)


def measured(tasks: Sequence[str], encoding: Encoding) -> dict[str, Any]:
    """Loss, bound, retained energy and the errors of tasks, by G."""
    known = {name: getattr(encoding, name) for name in UNKNOWN}
    return {**known, "errors": dict(zip(tasks, encoding.errors, strict=True))}


def section(said: str, facts: Facts) -> str:
    """Markdown: what was done, the tasks and their models, loss and bounds, citation."""
    pairs = zip(facts.tasks, facts.models, strict=True)
    models = "\n".join(f"* {task}: `{model}`" for task, model in pairs)
    return "\n\n".join(["## Task vectors", said, models, *measures(facts), f"{CITATION}\n"])


def vectors(facts: Facts) -> str:
    """`8 task vectors`, or `4 balanced basis vectors of 8 task vectors`."""
    count, basis = counted(len(facts.tasks), "task vector"), facts.parameters.get("basis", "ae")
    many = f"{counted(facts.num_bases, f'{basis} basis vector')} of {count}"
    return count if facts.whole else many


def measures(facts: Facts) -> list[str]:
    """A line on loss, bound and retained energy of bases, where they are known."""
    if facts.loss is None:
        lacks = "No Gram matrix: this merge needs none; `tvb inspect RECIPE|STORE` shows it"
        return [] if facts.errors else [lacks]
    kept, bound = 100 * (facts.retained_energy or 0), facts.spectral_bound
    told = f"reconstruction loss {facts.loss:.6g}, spectral lower bound {bound:.6g}"
    return [] if facts.whole else [f"Retained energy {kept:.2f} %: {told}"]


def remarks(facts: Facts) -> list[str]:
    """That line, and one for each reason why tensors of a merge stay the base's."""
    lines, reasons = measures(facts), dict[str, list[str]]()
    for name, why in facts.left_out.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        lines.append(f"{counted(len(names), 'tensor')} left to the base, {why}: {listed(names)}")
    return lines


def inspected(facts: Facts, tensors: Mapping[str, Tensor], built: bool = True) -> dict[str, Any]:
    """All that `tvb inspect` shows of a merge, a store or (not `built`) a recipe.

    Plain JSON types, null if unknown; matrices are lists of rows.
    """
    store = facts if isinstance(facts, StoreFacts) else None
    numbers = {**dict.fromkeys(NUMBERS), **tensors}
    if (gram := tensors.get("gram")) is not None:
        lengths = gram.diagonal().clamp(min=0).sqrt()
        cosines = (gram / lengths.outer(lengths)).nan_to_num(0.0).clamp(-1, 1)
        numbers["cosines"] = cosines.fill_diagonal_(1.0)
    return {
        "what": "store" if store else "merge" if built else "recipe",
        "num_tasks": len(facts.tasks),
        **facts.model_dump(mode="json", exclude={"seconds", "previous"}),
        "errors": facts.errors or dict.fromkeys(facts.tasks),
        "sizes": store and {"models": store.model_bytes, "store": store.bytes},
        "bytes": [vector.weights.bytes for vector in store.vectors] if store else [],
        "bits": store.bits if store else [],
        "choices": [] if gram is None else choices(Gram.of(gram)),
        **{name: None if n is None else n.tolist() for name, n in numbers.items()},
    }
