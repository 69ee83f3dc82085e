"""The numbers of a merge, a basis store or a recipe: norms, cosines, errors, sizes, bounds.

They follow from `basis.json` (`facts`) and `basis.safetensors` (`tensors`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.encoders.balanced import completion
from tvb_mergekit.core.encoders.linear import NULL
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import (
    TENSORS,
    Facts,
    StoreFacts,
    check_shapes,
    weight_bytes,
)
from tvb_mergekit.store.report import cosines, row_sums
from tvb_mergekit.store.store import Bases

SHARES = (0.8, 0.9, 0.95, 0.99)  # of the energy; the smallest M is reported for each


class Choice(NamedTuple):
    """The best result that M bases can reach, for any encoder.

    `spectral_bound` is the least loss. `next_eigenvalue` is lambda_{M+1}(G), 0 for M = T.
    `balanced_energy` is the energy of the best balanced bases.
    """

    num_bases: int
    retained_energy: float
    spectral_bound: float
    next_eigenvalue: float
    balanced_energy: float


@dataclass(frozen=True)
class Vector:
    """Bytes, mean bits of an element and relative error of a task vector in a store."""

    name: str
    bytes: int
    bits: float
    relative_error: float


@dataclass(frozen=True)
class Kept:
    """What a store of all tasks keeps of each.

    Attributes:
        sum: The relative error of the sum of the vectors, which addition adds.
    """

    vectors: list[Vector]
    sum: float


def kept_of(bases: Bases) -> Kept | None:
    """What a store keeps of each task; None for bases."""
    facts = bases.facts
    if not facts.keeps_tasks:
        return None
    made = []
    for task, folder in zip(bases.tasks, facts.store.folders, strict=True):
        nbytes = weight_bytes(facts.store.files, f"{folder}/")
        bits = 8 * nbytes / max(facts.num_parameters, 1)
        made.append(Vector(task, nbytes, bits, facts.relative_error[task]))
    if "tensor_errors" not in bases.tensors:
        return Kept(made, 0.0)
    # errors of independent samples add up in squares
    errors, square = bases.tensors["tensor_errors"].sum(), bases.tensors["gram_bases"].sum()
    return Kept(made, float((errors / square).sqrt()))


@dataclass(frozen=True, eq=False)
class Inspection:
    """Facts and tensors of a merge, a store or a recipe, and the numbers derived from them.

    Args:
        tensors: float64 on the CPU, as in `docs/files.md`. A store that has grown online, and
            bases over samples, have no `gram` and no `eigenvalues`.
        built: false if the facts describe a recipe before its merge.
        kept: what a store of all tasks keeps of each.

    Raises:
        UserError: a shape does not fit the facts, or a tensor is missing or not finite.
    """

    facts: Facts
    tensors: Mapping[str, Tensor]
    built: bool = True
    kept: Kept | None = None

    @classmethod
    def of(cls, bases: Bases) -> Inspection:
        return cls(bases.facts, bases.tensors, kept=kept_of(bases))

    def __post_init__(self) -> None:
        check_shapes(TENSORS, len(self.tasks), self.num_bases, self.tensors)
        for name, tensor in self.tensors.items():
            if not tensor.isfinite().all():
                raise UserError(f"basis.safetensors: `{name}` holds NaN or infinity")

    @property
    def tasks(self) -> list[str]:
        return self.facts.tasks

    @property
    def num_bases(self) -> int:
        return self.facts.num_bases

    @property
    def basis(self) -> str:
        return str(self.facts.parameters.get("basis", "ae"))

    @property
    def keeps_tasks(self) -> bool:
        return isinstance(self.facts, StoreFacts) and self.facts.keeps_tasks

    @property
    def what(self) -> str:
        return "store" if self.facts.store else "merge" if self.built else "recipe"

    @cached_property
    def _gram(self) -> Gram | None:
        return Gram.of(self.tensors["gram"]) if "gram" in self.tensors else None

    @property
    def norms(self) -> list[float]:
        """||tau|| of each task."""
        return [self.facts.norms[task] for task in self.tasks]

    @property
    def base_norm(self) -> float | None:
        """||theta_0||; None if a task called `base` replaces it in `norms`."""
        return None if "base" in self.tasks else self.facts.norms.get("base")

    @cached_property
    def cosines(self) -> tuple[Tensor, str] | None:
        """Cosines [T, T] float64 and the compared vectors: reconstructions if G is not known.

        The diagonal is 1, except for zero vectors, whose rows and columns are 0. None for a merge
        that computed no G.
        """
        if self._gram is not None:
            return cosines(self._gram.matrix), "task vectors"
        if not {"decoder", "gram_bases"} <= set(self.tensors):
            return None
        decoder = self.tensors["decoder"].numpy()
        root = Gram.of(self.tensors["gram_bases"]).root
        # a vector as small as rounding errors is zero and has no direction
        noise = NULL * float(np.linalg.norm(root) * np.linalg.norm(decoder))
        vectors = root @ decoder
        return cosines(vectors.T @ vectors, noise), "reconstructed task vectors"

    @property
    def reconstruction(self) -> Tensor | None:
        """R with T_hat = T R, [T, T] float64; None before the bases are built."""
        if not {"encoder", "decoder"} <= set(self.tensors):
            return None
        encoder, decoder = self.tensors["encoder"], self.tensors["decoder"]
        return self.tensors.get("reconstruction", encoder @ decoder)

    @cached_property
    def errors(self) -> dict[str, float]:
        """||tau_hat - tau|| / ||tau|| by task, where it is known.

        A store has it; otherwise G and the decoder give it. It is infinite for a zero task vector
        with another reconstruction, and not known before the bases are built.
        """
        if self.facts.errors:
            return {task: e for task, e in self.facts.errors.items() if e is not None}
        if self._gram is None or self.reconstruction is None:
            return {}
        lengths = self._gram.errors(self.reconstruction.numpy())
        norms = np.sqrt(np.maximum(self._gram.matrix.diagonal(), 0.0))
        ratios = np.where(lengths > 0, math.inf, 0.0)
        np.divide(lengths, norms, out=ratios, where=norms > 0)
        return dict(zip(self.tasks, ratios.tolist(), strict=True))

    @property
    def row_sums(self) -> list[float] | None:
        """The weight of each task in the sum of the bases, [T]; None without an encoder."""
        encoder = self.tensors.get("encoder")
        return None if encoder is None else row_sums(self.facts, encoder)

    @cached_property
    def choices(self) -> list[Choice]:
        """A choice for each M = 1..T; empty if G is not known."""
        if self._gram is None:
            return []
        values, found = self._gram.values.tolist(), []
        for count in range(1, len(values) + 1):
            bound = math.fsum(values[count:])
            _, least = completion(self._gram, count, np.ones(len(values)))
            total = self._gram.total
            energies = [1.0 - loss / total if total > 0 else 1.0 for loss in (bound, least)]
            following = values[count] if count < len(values) else 0.0
            found.append(Choice(count, energies[0], bound, following, energies[1]))
        return found

    @property
    def smallest(self) -> dict[float, int]:
        """The smallest M that can retain each of SHARES of the energy."""
        return {
            share: next(c.num_bases for c in self.choices if c.retained_energy >= share - 1e-12)
            for share in (SHARES if self.choices else ())
        }

    @property
    def sizes(self) -> dict[str, Any] | None:
        """Bytes of weights; `saved` is negative if a store is larger than its models."""
        if self.facts.store is None:
            return None
        models, stored = self.facts.store.model_bytes, weight_bytes(self.facts.store.files)
        saved, percent = models - stored, 100 * (1 - stored / models) if models else None
        return {"models": models, "store": stored, "saved": saved, "saved_percent": percent}

    def why_unknown(self, what: str) -> str:
        """The reason why `gram`, `encoder` or `errors` are missing."""
        if what in ("encoder", "errors") and not self.built:
            return "not known: the bases are not built yet"
        if self.facts.store and self.facts.store.added:
            return "not known: the store has grown online"
        if self.facts.store:
            return "not known: the bases are of samples"
        return "not known: this merge needed no Gram matrix; `tvb inspect RECIPE` computes it"


def as_json(inspection: Inspection) -> dict[str, Any]:
    """Facts and derived numbers in plain JSON types: null if unknown or infinite.

    Matrices are lists of rows. Lists by task are in the order of `tasks`.
    """
    matrices = ("eigenvalues", "encoder", "decoder", "reconstruction", "gram_bases")
    known = set(Facts.model_fields) - {"seconds", "checksum"}
    values, of = inspection.cosines or (None, None)
    tensors = inspection.tensors

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "what": inspection.what,
        "num_tasks": len(inspection.tasks),
        **inspection.facts.model_dump(mode="json", include=known),
        "base_norm": inspection.base_norm,
        "norms": inspection.norms,
        "sizes": inspection.sizes,
        "kept": None if inspection.kept is None else asdict(inspection.kept),
        "cosines": None if values is None else values.tolist(),
        "cosines_of": of,
        "choices": [choice._asdict() for choice in inspection.choices],
        "smallest": {f"{share:g}": count for share, count in inspection.smallest.items()},
        "row_sums": inspection.row_sums,
        "errors": {task: finite(value) for task, value in inspection.errors.items()},
        **{name: tensors[name].tolist() if name in tensors else None for name in matrices},
    }
