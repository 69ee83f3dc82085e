"""The numbers of a merge, a store or a recipe, from its facts and float64 tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from tvb_mergekit.core.encoders.balanced import completion
from tvb_mergekit.core.gram import Gram
from tvb_mergekit.store.facts import Facts, StoreFacts

NUMBERS = ("gram", "eigenvalues", "encoder", "decoder", "reconstruction")


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
