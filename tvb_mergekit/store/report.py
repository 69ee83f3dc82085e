"""Reports of merges and stores: facts and numbers, the model card, lines, what `inspect` shows.

`docs/files.md` describes both files of a merge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination
from tvb_mergekit.core.encoders.balanced import completion
from tvb_mergekit.core.gram import Encoding, Gram
from tvb_mergekit.core.settings import MERGING_KEYS, VARYING_KEYS
from tvb_mergekit.errors import counted, listed
from tvb_mergekit.store import facts as files
from tvb_mergekit.store.facts import FOLDER, Facts, StoreFacts
from tvb_mergekit.tensors.taskset import TaskSet

NUMBERS = ("gram", "eigenvalues", "encoder", "decoder", "reconstruction")
OURS = "[tvb-mergekit](https://pypi.org/project/tvb-mergekit/)"
CITATION = (
    "If you use this model, please cite Zeng et al., Task Vector Bases: A Unified and Scalable "
    "Framework for Compressed Task Arithmetic, TMLR 2026, https://openreview.net/forum?id=zkc7u3mIaE"
)


def facts(
    tasks: TaskSet,
    basis: Combination,
    tunables: Mapping[str, set[float]],
    built: StoreFacts | None = None,
) -> Facts:
    """All of a merge's `basis.json`; null if a number is undefined.

    Args:
        tunables: `lambda`, `alpha` and `density` -> all values of it.
        built: the facts of the bases that were merged.
    """
    in_force = basis.settings.in_force()
    varying = {k: v.copy().pop() if len(v) == 1 else sorted(v) for k, v in tunables.items()}
    found: dict[str, Any] = {
        "format_version": 1,
        "versions": versions(),
        "method": basis.settings.method,
        "dtype": tasks.dtype,
        "left_out": dict(tasks.left_out),
        "seconds": dict(basis.seconds),
    }
    if built is not None:
        merging = (*VARYING_KEYS, *MERGING_KEYS)
        kept = {key: value for key, value in built.parameters.items() if key not in merging}
        kept |= {key: in_force[key] for key in (*merging, "exclude") if key in in_force}
        kept["basis_weights"] = basis.weighted_encoder.diagonal().tolist()
        return Facts.model_validate({**dict(built), **found, "parameters": {**kept, **varying}})
    assert isinstance(basis, Basis)
    sums = basis.sums
    norms = [math.sqrt(sums.base_norm_squared), *sums.norms]
    weights = dict(zip(basis.tasks, basis.weights, strict=True))
    found |= {
        "parameters": {**in_force, **varying, "weights": weights},
        "tasks": list(basis.tasks),
        "models": list(tasks.models),
        "base_model": tasks.base_model,
        "num_bases": basis.num_bases,
        "num_parameters": sums.num_parameters,
        "norms": dict(zip(("base", *basis.tasks), norms, strict=True)),
        "fingerprints": tasks.fingerprints,
        **measured(basis.tasks, basis.encoding if sums.inner else None, sums.gram),
    }
    return Facts.model_validate(found)


def measured(tasks: Sequence[str], encoding: Encoding | None, gram: Tensor) -> dict[str, Any]:
    """Loss, bound and retained energy, null without an encoding; and from G the errors of tasks.

    They are ||tau_hat - tau|| / ||tau||, null of a zero vector.
    """
    known = ("loss", "spectral_bound", "retained_energy")
    found: dict[str, Any] = {name: encoding and getattr(encoding, name) for name in known}
    if encoding is None:
        return found
    lost = Gram.of(gram).errors(encoding.reconstruction.numpy()).tolist()
    pairs = zip(lost, gram.diagonal().sqrt().tolist(), strict=True)
    errors = [error / norm if norm else None for error, norm in pairs]
    return found | {"errors": dict(zip(tasks, errors, strict=True))}


def tensors_of(basis: Combination) -> dict[str, Tensor]:
    """All of a merge's `basis.safetensors` that was computed, float64."""
    assert isinstance(basis, Basis)
    encoding, kind = basis.encoding, basis.settings.basis
    known = {"encoder": encoding.encoder, "decoder": encoding.decoder}
    if not basis.sums.inner:  # what needs G is not known
        kept = {"none": ("encoder", "decoder"), "rand_select": ("encoder",)}.get(kind, ())
        return {name: tensor for name, tensor in known.items() if name in kept}
    known |= {"gram": basis.sums.gram, "eigenvalues": encoding.eigenvalues}
    return known | ({"reconstruction": encoding.reconstruction} if kind == "pca" else {})


def write_report(model: Path, facts: Facts, tensors: Mapping[str, Tensor], with_card: bool) -> None:
    """Write both files into the folder of a merged model, and our section into its model card."""
    (model / FOLDER).mkdir()
    files.write_tensors(model / FOLDER / files.TENSORS, tensors, {"format": "pt"})
    files.write_facts(model / FOLDER / files.FACTS, facts)
    if with_card:
        card = model / "README.md"
        text = card.read_text(encoding="utf-8") if card.exists() else ""
        said = section(f"{OURS} merged {vectors(facts)} by `{facts.method}`.", facts)
        card.write_text(f"{text.rstrip()}\n\n{said}", encoding="utf-8")


def section(said: str, facts: Facts) -> str:
    """Markdown: what was done, the tasks and their models, loss and bounds, citation."""
    pairs = zip(facts.tasks, facts.models, strict=True)
    rows = [f"| {task.replace('|', chr(92) + '|')} | `{model}` |" for task, model in pairs]
    table = ["| task | model |", "| --- | --- |", *rows]
    if forgotten := facts.parameters.get("forget"):
        table += ["", f"Forgotten: {', '.join(forgotten)}."]
    told = "".join(f"* {line}\n\n" for line in measures(facts))
    return "\n".join([f"## Task vectors\n\n{said}\n", *table, f"\n{told}{CITATION}\n"])


def vectors(facts: Facts) -> str:
    """`8 task vectors`, or `4 balanced basis vectors of 8 task vectors`."""
    count, basis = counted(len(facts.tasks), "task vector"), facts.parameters.get("basis", "ae")
    many = f"{counted(facts.num_bases, f'{basis} basis vector')} of {count}"
    return count if facts.whole else many


def summary(facts: Facts, out: str) -> list[str]:
    """Lines on a merge: method, tasks, base, losses, tensors left out and place."""
    given = facts.parameters.get("lambda")
    scaled = f", lambda {given:g}" if isinstance(given, float | int) else ""
    left = f"{counted(len(facts.left_out), 'tensor')} left to the base"
    return [
        f"Merged {vectors(facts)} by {facts.method}{scaled}: {listed(facts.tasks, 12)}",
        f"Base: {facts.base_model}",
        *measures(facts),
        *([left] if facts.left_out else []),
        f"Written to {out} in {sum(facts.seconds.values()):.1f} s; `tvb inspect` shows details",
    ]


def measures(facts: Facts) -> list[str]:
    """Lines on loss, bounds and retained energy of bases, where they are known."""
    if facts.loss is None:
        lacks = "No Gram matrix: this merge needs none; `tvb inspect RECIPE` computes it"
        return [] if facts.errors else [lacks]
    kept, bound = 100 * (facts.retained_energy or 0), facts.spectral_bound
    told = f"reconstruction loss {facts.loss:.6g}, spectral lower bound {bound:.6g}"
    return [] if facts.whole else [f"Retained energy {kept:.2f} %: {told}"]


@cache
def versions() -> dict[str, str | None]:
    """The packages that a result depends on -> their versions."""
    packages = ("tvb-mergekit", "mergekit", "torch", "transformers", "safetensors")
    return {name: version(name) for name in packages}


@dataclass(frozen=True, eq=False)
class Inspection:
    """Facts and tensors of a merge, a store or (not `built`) a recipe, and derived numbers.

    Without G of the task vectors `cosines` are None and `choices` are empty.
    """

    facts: Facts
    tensors: Mapping[str, Tensor]
    built: bool = True

    @property
    def store(self) -> StoreFacts | None:
        return self.facts if isinstance(self.facts, StoreFacts) else None

    @property
    def whole(self) -> bool:
        """Whether a store holds the task vectors themselves."""
        return self.store is not None and self.store.whole

    @property
    def cosines(self) -> Tensor | None:
        """Cosines [T, T] float64 between the task vectors; the diagonal is 1."""
        if (gram := self.tensors.get("gram")) is None:
            return None
        lengths = gram.diagonal().clamp(min=0).sqrt()
        return (gram / lengths.outer(lengths)).nan_to_num(0.0).clamp(-1, 1).fill_diagonal_(1.0)

    @property
    def errors(self) -> Mapping[str, float | None]:
        """||tau_hat - tau|| / ||tau|| by task; None where it is not known."""
        return self.facts.errors or dict.fromkeys(self.facts.tasks)

    @property
    def row_sums(self) -> list[float]:
        """The weight of each task in the sum that a merge adds, [T]: W_e v."""
        encoder, facts = self.tensors["encoder"], self.facts
        given = facts.parameters.get("basis_weights") or [1.0] * encoder.shape[1]
        return (encoder @ encoder.new_tensor(given)).tolist()

    @cached_property
    def choices(self) -> list[dict[str, float]]:
        """For each M = 1..T the best result of M bases, of any encoder and of balanced bases."""
        if "gram" not in self.tensors:
            return []
        gram, found = Gram.of(self.tensors["gram"]), []
        values = gram.values.tolist()
        total = sum(values) or 1.0  # without any energy all of it is retained
        for count, following in enumerate([*values[1:], 0.0], 1):
            bound = math.fsum(values[count:])  # Eq. 6
            _, balanced = completion(gram, count, np.ones(len(values)))
            found.append(
                {
                    "num_bases": count,
                    "retained_energy": 1.0 - bound / total,
                    "balanced_energy": 1.0 - balanced / total,
                    "spectral_bound": bound,
                    "next_eigenvalue": following,
                }
            )
        return found

    @property
    def sizes(self) -> dict[str, int] | None:
        """Bytes of the models, and of the files of a store in their place."""
        if self.store is None:
            return None
        held = sum(file.bytes for file in self.store.held.values())
        return {"models": self.store.model_bytes, "store": held}

    @property
    def bytes(self) -> list[int]:
        """Bytes of each vector of a store."""
        every = self.store.vectors if self.store else []
        return [sum(file.bytes for file in vector.held) for vector in every]

    @property
    def bits(self) -> list[float]:
        """Mean bits of an element of each vector."""
        return [8 * size / max(self.facts.num_parameters, 1) for size in self.bytes]


def as_json(inspection: Inspection) -> dict[str, Any]:
    """Facts and numbers in plain JSON types, null if unknown; matrices are lists of rows."""
    numbers = {name: inspection.tensors.get(name) for name in NUMBERS}
    numbers["cosines"] = inspection.cosines
    derived = ("sizes", "bytes", "bits", "errors", "choices")
    return {
        "what": "store" if inspection.store else "merge" if inspection.built else "recipe",
        "num_tasks": len(inspection.facts.tasks),
        **inspection.facts.model_dump(mode="json", exclude={"seconds", "previous"}),
        **{name: getattr(inspection, name) for name in derived},
        **{name: None if n is None else n.tolist() for name, n in numbers.items()},
    }
