"""A store, the folder that replaces T fine-tuned models: N vectors, an encoder and a decoder.

`docs/files.md` describes what lies in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.gram import Factors, GramSums
from tvb_mergekit.core.settings import GLOBAL_KEYS, MERGING_KEYS, Settings, resolve_settings
from tvb_mergekit.errors import UserError, hint
from tvb_mergekit.store import STORE, is_store
from tvb_mergekit.store.codecs import open_vector
from tvb_mergekit.store.facts import DtypeName, StoreFacts, read_facts
from tvb_mergekit.store.files import check_files, read_numbers
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.stream import Weights
from tvb_mergekit.tensors.ties import SAME, lend, tie

DENSE: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """The name of a store's dtype. Raise UserError if stores have no such dtype."""
    for name, known in DENSE.items():
        if known == dtype:
            return name
    raise UserError(f"`dtype` is {dtype!r}: expected one of torch.{', torch.'.join(DENSE)}")


@dataclass(frozen=True, repr=False)
class Bases:
    """N vectors of T tasks under one base, with an encoder and a decoder; in a store or in memory.

    Attributes:
        facts: `store.json`.
        tensors: float64: `encoder` W_e [T, M], `decoder` W_d [M, T] and, while all inner products
            are known, `gram` [T, T] of the weighted task vectors.
        sources: The vectors as named tensors: M bases, and PCA's mean as the last. A tensor that
            they lack stays the base's. Those of an adapter are its factors until `check_base`.
        path: The store's folder; None in memory.
    """

    facts: StoreFacts
    tensors: Mapping[str, Tensor]
    sources: list[Weights]
    path: Path | None = None

    @property
    def tasks(self) -> list[str]:
        return self.facts.tasks

    @property
    def place(self) -> str:
        """The name of the bases in messages."""
        return str(self.path or "these bases")

    @property
    def num_bases(self) -> int:
        return self.facts.num_bases

    @property
    def vectors(self) -> Sequence[Weights]:
        """The M bases, without PCA's mean."""
        return self.sources[: self.num_bases]

    @property
    def whole(self) -> bool:
        """Whether the vectors are the task vectors, without the weights of the recipe."""
        return self.facts.whole

    @property
    def encoder(self) -> Tensor:
        """W_e [T, M]: each basis as a combination of the weighted task vectors."""
        return self.tensors["encoder"]

    @property
    def decoder(self) -> Tensor:
        """W_d [M, T]: each reconstructed task vector as a combination of the bases."""
        return self.tensors["decoder"]

    @property
    def weights(self) -> Tensor:
        """[T], the scale of each task vector."""
        weights = self.facts.parameters["weights"]
        return torch.tensor([weights[task] for task in self.tasks], dtype=torch.float64)

    @property
    def scales(self) -> Tensor:
        """[N], the factor of each vector in its basis: the weight of a task."""
        return self.weights if self.whole else torch.ones(len(self.sources), dtype=torch.float64)

    @property
    def shares(self) -> Tensor:
        """v [M], what multiplies each basis in a merge: w normalized to mean 1, or 1.

        1 for every store that was built offline. It differs where `tvb add` keeps balanced bases
        that stand for different numbers of tasks: then sum_m v_m B_m is M/T times the sum of all.
        """
        known = self.facts.basis_weights if self.facts.compress == "balanced" else None
        weights = torch.tensor(known or [1.0] * self.num_bases, dtype=torch.float64)
        return weights / weights.mean()

    def reconstruction(self, tasks: Sequence[str]) -> Tensor:
        """[N, len(tasks)]: each tau_hat over the bases, plus the mean."""
        columns = self.decoder[:, [self.index(task) for task in tasks]]
        means = torch.ones(len(self.sources) - self.num_bases, len(tasks), dtype=torch.float64)
        return torch.cat([columns, means])

    def index(self, task: str) -> int:
        """The column of a task. Raise UserError for an unknown task."""
        if task in self.tasks:
            return self.tasks.index(task)
        known = f"{hint(task, self.tasks)}; tasks: {', '.join(self.tasks)}"
        raise UserError(f"no task {task!r} in {self.place}{known}")

    def stored_name(self, name: str | None) -> str | None:
        """The name under which the vectors hold the base's tensor `name`; None: they do not."""
        held, twin = self.facts.tensors, self.facts.twins.get(str(name))
        alone = not self.facts.left_out.get(str(name), SAME).startswith(SAME)
        return name if name in held else twin if twin in held and not alone else None

    @property
    def settings(self) -> Settings:
        """The settings that built it, those of its size aside."""
        given = {k: v for k, v in self.facts.parameters.items() if k in GLOBAL_KEYS}
        return Settings("basis_ta", {**given, "num_bases": self.num_bases, "forget": ()})

    def merge_settings(
        self, method: str, given: Mapping[str, Any], tasks: Sequence[str] = ()
    ) -> Settings:
        """The settings of a merge over these vectors, or over the task vectors of `tasks`.

        Raises:
            UserError: A key that is fixed when bases are built, or that does not fit.
        """
        for key in () if self.whole else given:
            if key in GLOBAL_KEYS and key not in (*MERGING_KEYS, "exclude"):
                raise UserError(
                    f"`{key}` was set when the bases were built ({self.place}): leave the key out, "
                    "or list the fine-tuned models"
                )
        return resolve_settings(method, given, tasks or self.tasks)

    def sums(self, order: Sequence[int]) -> GramSums | None:
        """G of the unweighted task vectors at these places; None if it must be computed.

        A part of G has other last digits than the G of a part.
        """
        facts = self.facts
        known = self.whole and "gram" in self.tensors and "base" not in self.tasks
        sampled = all(vector.codec == "sampled" for vector in facts.vectors)
        part = len(order) < len(self.tasks) or "remove" in facts.seconds
        if not known or bool(self.weights.ne(1).any()) or (part and not sampled):
            return None  # the stored matrix is of the weighted task vectors
        gram = self.tensors["gram"][list(order)][:, list(order)]
        return GramSums(gram, facts.norms["base"] ** 2, facts.num_parameters)

    def check_base(self, base: Weights, name: str) -> None:
        """Raise UserError unless `base` is the model that the vectors are differences from.

        Afterwards the vectors are read with this base.
        """
        if base.fingerprint() != self.facts.base_fingerprint:
            raise UserError(
                f"{self.place}: belongs to the base {self.facts.base_model}, "
                f"and the weights of {name} are others; give the base that it was built from"
            )
        tie([base])
        lacking = {n: twin for n, twin in self.facts.twins.items() if n not in base.tensors}
        names = {name: self.stored_name(name) for name in (*lacking, *lacking.values())}
        if apart := [n for n, of in lacking.items() if names[n] == n or names[n] != names[of]]:
            # Tied in the base, and not in a model: an untied model has each of its names.
            for name in (*apart, *lacking):
                lend(base, name, lacking[name])
        for place, vector in enumerate(self.facts.vectors):
            if self.path and vector.codec != "dense":
                self.sources[place] = open_vector(self.path, vector, base)

    def as_models(self, base: Weights) -> list[Weights]:
        """The vectors under the base's names of their tensors; a tensor may have several."""
        every = self.sources
        return [each if isinstance(each, Adapter) else AsModel(each, self, base) for each in every]

    @property
    def base_name(self) -> str:
        """The first place of the base that exists: of the recipe, next to the store, absolute."""
        facts, last = self.facts, self.facts.base_path or self.facts.base_model
        here = self.path.resolve() if self.path else "."
        beside = os.path.normpath(os.path.join(here, facts.base_beside or last))
        return next(filter(os.path.exists, [facts.base_model, beside, last]), last)


class AsModel(Weights):
    """A vector as a model of the base's tensors, those with two names included."""

    shards = ("vector.safetensors",)

    def __init__(self, vector: Weights, bases: Bases, base: Weights) -> None:
        named = {name: bases.stored_name(name) for name in base.tensors}
        self._vector, self._names = vector, {n: held for n, held in named.items() if held}
        self.tensors = {
            name: replace(vector.tensors[held], shard=self.shards[0], alias_of=held)
            for name, held in self._names.items()
        }
        self.holds, self.grain = vector.holds or "delta", vector.grain
        self.base, self.folder = base, bases.path

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        return self._vector.read(self._names[name], start, stop, out)

    def share(self, name: str) -> float:
        return self._vector.share(self._names[name])

    def factors_of(self, name: str) -> Sequence[Factors] | None:
        return self._vector.factors_of(self._names[name])

    def check_unchanged(self) -> None:
        self._vector.check_unchanged()

    def fingerprint(self) -> str:
        return self._vector.fingerprint()

    @property
    def nbytes(self) -> int:
        return self._vector.nbytes


def load(path: str | os.PathLike[str], checksums: bool = False) -> Bases:
    """Open a store.

    Args:
        checksums: compare those of all files; else vectors of the recorded size are trusted.

    Raises:
        UserError: no store, or a file that is missing, damaged or of another vector.
    """
    folder, bases = Path(path), load_numbers(path)
    facts = bases.facts
    check_files(folder, [file for vector in facts.vectors for file in vector.held], checksums)
    sources = [open_vector(folder, vector, None) for vector in facts.vectors]
    shapes = [
        {name: info.shape for name, info in source.tensors.items()}
        for vector, source in zip(facts.vectors, sources, strict=True)
        if vector.codec != "adapter"
    ]
    if any(found.keys() != {*facts.tensors} or found != shapes[0] for found in shapes):
        said = f"the tensors of a vector are not what {STORE} says; build it again"
        raise UserError(f"{folder}: {said}")
    return replace(bases, sources=sources)


def load_numbers(path: str | os.PathLike[str]) -> Bases:
    """A store without its vectors, which may be damaged."""
    folder = Path(path)
    facts = read_store(folder)
    assert facts.numbers is not None
    check_files(folder, [facts.numbers], checksums=True)  # everything is computed from them
    return Bases(facts, read_numbers(folder / facts.numbers.file, facts), [], folder)


def read_store(folder: Path) -> StoreFacts:
    """The facts of the store in a folder. Raise UserError if there is none."""
    if not is_store(folder):
        found = f"no {STORE} of ours in it"
        kind = found if folder.exists() else f"no such folder, from {os.getcwd()}"
        raise UserError(f"{folder} is not a store ({kind}); make one with `tvb build`")
    facts = read_facts(folder / STORE)
    assert isinstance(facts, StoreFacts)
    return facts
