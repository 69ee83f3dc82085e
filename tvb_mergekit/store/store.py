"""A store, the folder that replaces T fine-tuned models: N vectors, an encoder and a decoder.

`docs/files.md` describes what lies in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from tvb_mergekit.core.basis import Combination
from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.settings import GLOBAL_KEYS, MERGING_KEYS, Settings, resolve_settings
from tvb_mergekit.errors import UserError, check_known
from tvb_mergekit.store import STORE, is_store
from tvb_mergekit.store.codecs import CODECS
from tvb_mergekit.store.facts import StoreFacts, Vector, check_files, read_facts
from tvb_mergekit.tensors.checkpoint import RESTORE, SAME, lend, metadata_of, tie
from tvb_mergekit.tensors.merging import count_if_needed
from tvb_mergekit.tensors.output import MARKER
from tvb_mergekit.tensors.stream import Engine, Weights
from tvb_mergekit.tensors.taskset import TaskSet


@dataclass(eq=False, repr=False)
class Bases:
    """N vectors of T tasks under one base, with an encoder and a decoder: an open store.

    Attributes:
        facts: `store.json`.
        tensors: float64: `encoder`, `decoder` and, while all inner products are known, `gram`
            [T, T] of the weighted task vectors.
        sources: The vectors as named tensors: M bases, and PCA's mean as the last. A tensor that
            they lack stays the base's. Those of an adapter are its factors until `check_base`.
        path: The store's folder.
        temporary: That folder, if it goes with the bases.
        encoder: W_e [T, M], each basis as a combination of the weighted task vectors.
        decoder: W_d [M, T], each reconstructed task vector as a combination of the bases.
        weights: [T], the scale of each task vector.
        scales: [N], the factor of each vector in its basis: the weight of a task.
    """

    facts: StoreFacts
    tensors: Mapping[str, Tensor]
    sources: list[Weights]
    path: Path
    temporary: object = None

    def __post_init__(self) -> None:
        self.tasks, self.num_bases = self.facts.tasks, self.facts.num_bases
        self.encoder, self.decoder = self.tensors["encoder"], self.tensors["decoder"]
        weights = [self.facts.parameters["weights"][task] for task in self.tasks]
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.scales = self.weights if self.facts.whole else torch.ones(len(self.sources)).double()
        for source in self.sources:
            vars(source)["temporary"] = self.temporary  # which stays as long as one of them

    @property
    def vectors(self) -> Sequence[Weights]:
        """The M bases, without PCA's mean."""
        return self.sources[: self.num_bases]

    def reconstruction(self, tasks: Sequence[str]) -> Tensor:
        """[N, len(tasks)]: each tau_hat over the bases, plus the mean."""
        columns = self.decoder[:, [self.index(task) for task in tasks]]
        return pad(columns, (0, 0, 0, len(self.sources) - self.num_bases), value=1.0)

    def index(self, task: str) -> int:
        """The column of a task. Raise UserError for an unknown task."""
        check_known(task, self.tasks, f"no task {task!r} in {self.path}")
        return self.tasks.index(task)

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

        Raise UserError for a key that is fixed when bases are built, or that does not fit.
        """
        for key in () if self.facts.whole else given:
            if key in GLOBAL_KEYS and key not in (*MERGING_KEYS, "exclude"):
                raise UserError(
                    f"`{key}` was set when the bases were built ({self.path}): leave the key out, "
                    "or list the fine-tuned models"
                )
        return resolve_settings(method, given, tasks or self.tasks)

    def sums(self, order: Sequence[int]) -> GramSums | None:
        """G of the unweighted task vectors at these places; None if it must be computed.

        A part of G has other last digits than the G of a part, which samples do not give.
        """
        part = len(order) < len(self.tasks) or "remove" in self.facts.seconds
        read = part and any(vector.share == 1 for vector in self.facts.vectors)
        if not self.facts.whole or read or bool(self.weights.ne(1).any()):
            return None  # the stored matrix is of the weighted task vectors
        gram = self.tensors["gram"][list(order)][:, list(order)]
        return GramSums(gram, self.facts.norms["base"] ** 2, self.facts.num_parameters)

    def check_base(self, base: Weights, name: str) -> None:
        """Raise UserError unless `base` is the model that the vectors are differences from.

        Afterwards the vectors are read with this base, and have all its names of their tensors.
        """
        if base.fingerprint() != self.facts.base_fingerprint:
            raise UserError(
                f"{self.path}: belongs to the base {self.facts.base_model}, "
                f"and the weights of {name} are others; give the base that it was built from"
            )
        tie([base])
        lacking = {n: twin for n, twin in self.facts.twins.items() if n not in base.tensors}
        names = {name: self.stored_name(name) for name in (*lacking, *lacking.values())}
        if apart := [n for n, of in lacking.items() if names[n] == n or names[n] != names[of]]:
            # Tied in the base, and not in a model: an untied model has each of its names.
            for name in (*apart, *lacking):
                lend(base, name, lacking[name])
        second = {n: of for n in base.tensors if (of := self.stored_name(n)) not in (None, n)}
        for place, vector in enumerate(self.facts.vectors):
            self.sources[place] = source = open_vector(self.path, vector, base)
            vars(source)["temporary"] = self.temporary
            for name, of in second.items():
                lend(source, name, str(of))

    @property
    def base_name(self) -> str:
        """The base's place in the recipe, or if it is not there, the absolute one."""
        name, last = self.facts.base_model, self.facts.base_path
        place = name if os.path.exists(name) else last or name
        if last and not os.path.exists(place):
            raise UserError(f"{last}: no such folder; name the base of {self.path} by --base")
        return place


def over_store(bases: Bases, tasks: TaskSet, engine: Engine) -> Combination:
    """All bases of a store as the vectors of a merge, with weights v [M] in the sum.

    PCA's mean is in no basis. It is the last input of a merge that reconstructs a task.
    """
    table, shares = bases.reconstruction(bases.tasks), bases.facts.shares
    count = len(table) if tasks.settings.method == "basis_negate" else bases.num_bases
    weights = [share * weight for share, weight in zip(shares, tasks.weights, strict=False)]
    encoder = torch.diag(torch.tensor(weights, dtype=torch.float64))
    encoder = pad(encoder, (0, 0, 0, count - bases.num_bases))
    made = Combination(tasks.settings, bases.tasks, encoder, table[:count])
    count_if_needed(made, tasks.items, engine, zeros=tasks.unchanged)
    return made


def load(path: str | os.PathLike[str], checksums: bool = False) -> Bases:
    """Open a store. Raise UserError for a file that is missing, damaged or of another vector.

    Args:
        checksums: compare those of all files; else vectors of the recorded size are trusted.
    """
    folder = Path(path)
    facts = read_store(folder)
    check_files(folder, facts.held.values(), checksums)
    sources = [open_vector(folder, vector, None) for vector in facts.vectors]
    for vector, source in zip(facts.vectors, sources, strict=True):
        if vector.codec != "adapter" and source.tensors.keys() != {*facts.tensors}:
            raise UserError(f"{folder}: {vector.name} has other tensors than {STORE} says")
    return Bases(facts, load_numbers(folder, facts), sources, folder)


def load_numbers(folder: Path, facts: StoreFacts) -> dict[str, Tensor]:
    """Encoder, decoder and G. Everything is computed from them, so their checksum is compared."""
    check_files(folder, [facts.numbers], checksums=True)
    return load_file(folder / facts.numbers.file)


def open_vector(store: Path, vector: Vector, base: Weights | None) -> Weights:
    """One vector of a store. Raise UserError if the file is damaged, or of another vector."""
    file = store / vector.weights.file
    if (name := metadata_of(file).get(MARKER)) != vector.name:
        raise UserError(f"{file}: holds {name!r}, {STORE} says {vector.name!r}; {RESTORE}")
    return CODECS[vector.codec].decode(file, base)


def read_store(folder: Path) -> StoreFacts:
    """The facts of the store in a folder. Raise UserError if there is none."""
    if not is_store(folder):
        where = f"no {STORE} of ours, from {os.getcwd()}"
        raise UserError(f"{folder} is not a store ({where}); make one with `tvb build`")
    return read_facts(folder / STORE, StoreFacts)
