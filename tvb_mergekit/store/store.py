"""A basis store, the folder that replaces T fine-tuned models: reading, checking and locking it.

`docs/files.md` describes what lies in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from tvb_mergekit.atomic import check_interrupted, inode, next_to
from tvb_mergekit.core.settings import GLOBAL_KEYS, MERGING_KEYS, Settings, resolve_settings
from tvb_mergekit.errors import UserError, hint
from tvb_mergekit.store.facts import (
    EXACT,
    FACTS,
    TENSORS,
    Codec,
    DtypeName,
    StoreFacts,
    StoreRecord,
    check_files,
    check_shapes,
    read_facts,
)
from tvb_mergekit.tensors.checkpoint import Checkpoint, metadata_of
from tvb_mergekit.tensors.lossless import Lossless, Sampled
from tvb_mergekit.tensors.quantized import Decoded
from tvb_mergekit.tensors.stream import Weights
from tvb_mergekit.tensors.writing import MARKER

# The tensors of basis.safetensors that merges and additions need.
NEEDED = {"decoder", "gram_bases", "weights", "norms", "matrix_norms"}
MEAN = "mean"  # the folder of PCA's mean task vector
DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """The name of a store's dtype. Raise UserError if stores have no such dtype."""
    for name, value in DTYPES.items():
        if value == dtype:
            return name
    raise UserError(f"`dtype` is {dtype!r}: expected one of torch.{', torch.'.join(DTYPES)}")


def basis_folder(index: int) -> str:
    """The name of the folder that holds B_index."""
    return f"basis-{index:03d}"


@dataclass(frozen=True, repr=False)
class Bases:
    """M basis vectors of T tasks under one base, in a store or in memory.

    Attributes:
        facts: basis.json, as attributes or as a mapping: `facts.loss`, `facts["loss"]`.
        tensors: float64: `encoder` W_e [T, M], `decoder` W_d [M, T],
            `gram_bases` [M, M] and the tensors of `numbers_of`. If all inner products are known,
            also `gram` [T, T] and `eigenvalues` [T].
        vectors: The M bases as named tensors, in the store's dtype. A tensor that they lack stays
            the base's.
        mean: PCA's mean task vector.
        path: The store's folder; None in memory.
    """

    facts: StoreFacts
    tensors: Mapping[str, Tensor]
    vectors: Sequence[Weights]
    mean: Weights | None = None
    path: Path | None = None

    def __repr__(self) -> str:
        counts = f"M = {self.num_bases} of T = {len(self.tasks)}"
        return f"Bases({self.basis}, {counts}, {self.facts.store.codec}, {self.path})"

    @property
    def tasks(self) -> list[str]:
        return self.facts.tasks

    @property
    def place(self) -> str:
        """The name of the bases in messages."""
        return str(self.path or "these bases")

    @property
    def num_bases(self) -> int:
        return len(self.vectors)

    @property
    def basis(self) -> str:
        """The method that built the bases: `ae`, `balanced`, ..."""
        return str(self.facts.parameters["basis"])

    @property
    def encoder(self) -> Tensor:
        """W_e [T, M]: each basis as a combination of the task vectors."""
        return self.tensors["encoder"]

    @property
    def decoder(self) -> Tensor:
        """W_d [M, T]: each reconstructed task vector as a combination of the bases."""
        return self.tensors["decoder"]

    @property
    def basis_weights(self) -> Tensor | None:
        """w [M] with sum_m w_m B_m = the sum of all task vectors; None if no w has it."""
        return self.tensors.get("basis_weights")

    @property
    def weights(self) -> Tensor:
        """[T], the scale of each task vector."""
        return self.tensors["weights"]

    @property
    def shares(self) -> Tensor:
        """v [M], what multiplies each basis in a merge (see `shares`)."""
        return shares(self.facts.store, self.num_bases)

    @property
    def base_name(self) -> str:
        """The path or name of the base; see `base_of`."""
        return base_of(self.facts, self.path)

    @property
    def names(self) -> list[str]:
        """The tensors that the bases hold, by the names that the base's files give them."""
        return list(self.vectors[0].tensors)

    def stored_name(self, name: str | None) -> str | None:
        """The name under which the bases hold the base's tensor `name`; None if they do not."""
        if name is None:
            return None
        counted = self.facts.store.twins.get(name, name)
        return counted if counted in self.vectors[0].tensors else None

    @property
    def labels(self) -> list[str]:
        """The names of the vectors: tasks, or B0, B1 ... and PCA's mean."""
        if self.keeps_tasks:
            return self.tasks
        return [f"B{m}" for m in range(self.num_bases)] + ["mean"] * (self.mean is not None)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.facts.store.dtype]

    @property
    def keeps_tasks(self) -> bool:
        """Whether each vector is a task vector, in a folder of the task's name."""
        return self.facts.keeps_tasks

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
        for key in () if self.keeps_tasks else given:
            if key in GLOBAL_KEYS and key not in (*MERGING_KEYS, "exclude"):
                raise UserError(
                    f"`{key}` was set when the bases were built ({self.place}): leave the key out, "
                    "or list the fine-tuned models"
                )
        return resolve_settings(method, given, tasks or self.tasks)

    def index(self, task: str) -> int:
        """The column of a task. Raise UserError for an unknown task."""
        if task in self.tasks:
            return self.tasks.index(task)
        known = f"{hint(task, self.tasks)}; tasks: {', '.join(self.tasks)}"
        raise UserError(f"no task {task!r} in {self.place}{known}")

    def reconstruction(self, tasks: Sequence[str]) -> Tensor:
        """[M (+ 1 for the mean), len(tasks)]: each tau_hat over the bases (and the mean)."""
        columns = self.decoder[:, [self.index(task) for task in tasks]]
        if self.mean is None:
            return columns
        return torch.cat([columns, torch.ones(1, len(tasks), dtype=torch.float64)])

    @property
    def sources(self) -> list[Weights]:
        """The bases and, for PCA, the mean: what `reconstruction` is over."""
        return [*self.vectors, *([] if self.mean is None else [self.mean])]

    @property
    def scales(self) -> Tensor:
        """[len(sources)], the factor of each source in its basis: the weight of a model."""
        if self.facts.store.codec in EXACT:
            return self.weights
        return torch.ones(len(self.sources), dtype=torch.float64)

    def check_base(self, base: Weights, name: str) -> None:
        """Raise UserError unless `base` is the model that the bases are differences from.

        Afterwards lossless and sampled vectors are read with this base.
        """
        if base.fingerprint() != self.facts.store.base_fingerprint:
            raise UserError(
                f"{self.place}: belongs to the base {self.facts.base_model}, "
                f"and the weights of {name} are others; give the base that it was built from"
            )
        for vector in self.vectors:
            vector.base = base


def load(path: str | os.PathLike[str], without: str = "") -> Bases:
    """Open a store. Vectors of the recorded size are trusted; `check` compares their checksums.

    Args:
        without: the folder of a vector to leave out of the `vectors` and of all checks.

    Raises:
        UserError: no store, a newer format, or a file that is missing or damaged.
    """
    folder = Path(path)
    for wait in (0.1, 0.5):
        opened = inode(folder)
        try:
            found = _load(folder, without)
            if opened == inode(folder):  # all files are of one state
                return found
        except (UserError, FileNotFoundError):
            changing = any(next_to(folder, kind).is_dir() for kind in ("new", "previous"))
            if not changing or opened == inode(folder) is not None:
                raise
        time.sleep(wait)  # a change was between its renames
    return _load(folder, without)


def _load(folder: Path, without: str) -> Bases:
    facts = read_store_facts(folder)
    names = [name for name in facts.store.folders if name != without]
    try:
        _check_files(folder, facts, names, checksums=False)
        tensors = load_file(folder / TENSORS)
        check_shapes(folder / TENSORS, len(facts.tasks), facts.num_bases, tensors)
        if missing := NEEDED - set(tensors):
            raise KeyError(min(missing))
        vectors: list[Weights] = [open_vector(folder / n, facts.store.codec) for n in names]
        shapes = [{n: info.shape for n, info in each.tensors.items()} for each in vectors]
        if shapes.count(shapes[0]) < len(shapes):
            raise KeyError("its vectors have different tensors")
    except (OSError, RuntimeError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{folder}: not a complete basis store ({error}); build it again"
        ) from error
    mean = vectors.pop() if MEAN in names else None
    return Bases(facts, tensors, vectors, mean, folder)


def check(path: str | os.PathLike[str]) -> Bases:
    """Open a store as `load`, and compare the checksums of all its files."""
    facts = read_store_facts(folder := Path(path))
    _check_files(folder, facts, facts.store.folders, checksums=True)
    return load(folder)


def _check_files(folder: Path, facts: StoreFacts, names: Sequence[str], checksums: bool) -> None:
    files, mend = facts.store.within(names), "restore it, or build the store again"
    more = ", or take it out with `tvb remove`" if facts.keeps_tasks else ""
    # The numbers are few, and everything is computed from them.
    numbers = {name: of for name, of in files.items() if name == TENSORS}
    check_files(folder, numbers, FACTS, mend, checksums=True)
    check_files(folder, files, FACTS, mend + more, checksums)


def base_of(facts: StoreFacts, folder: Path | None) -> str:
    """The path or name of a store's base.

    The candidates are the recipe's name and its path, relative to the store in `folder` (which may
    have moved) or absolute. If several exist, the first with the right fingerprint counts.
    """
    store, places = facts.store, [facts.base_model]
    if folder is not None and store.base_beside:
        places.append(os.path.normpath(os.path.join(os.path.realpath(folder), store.base_beside)))
    if store.base_path:
        places.append(store.base_path)
    there = list(filter(os.path.exists, dict.fromkeys(places)))
    for place in there if len(there) > 1 else ():
        with suppress(UserError):  # no model
            if Checkpoint.open(place).fingerprint() == store.base_fingerprint:
                return place
    return [*there, store.base_path or facts.base_model][0]


def shares(store: StoreRecord, num_bases: int) -> Tensor:
    """v [M] float64, what multiplies each basis in a merge: w normalized to mean 1, or 1.

    1 for every store that was built offline. It differs where `tvb add` keeps balanced bases that
    stand for different numbers of tasks: then sum_m v_m B_m is M/T times the sum of all.
    """
    if store.basis_weights is None or store.compress != "balanced":
        return torch.ones(num_bases, dtype=torch.float64)
    weights = torch.tensor(store.basis_weights, dtype=torch.float64)
    return weights / weights.mean()


def numbers_of(facts: StoreFacts) -> dict[str, Tensor]:
    """`weights`, `norms`, `matrix_norms` [T] and, where the bases hold the sum of all tasks,
    `basis_weights` [M], float64: the numbers of basis.json that basis.safetensors has too."""
    tables = {"norms": facts.norms, "matrix_norms": facts.matrix_norms}
    tables["weights"] = facts.parameters["weights"]
    numbers = {name: [of[task] for task in facts.tasks] for name, of in tables.items()}
    if facts.store.basis_weights is not None:
        numbers["basis_weights"] = facts.store.basis_weights
    return {name: torch.tensor(each, dtype=torch.float64) for name, each in numbers.items()}


CODECS: Mapping[str, type[Decoded]] = {
    "lossless": Lossless,
    "sampled": Sampled,
}


def open_vector(folder: Path, codec: Codec) -> Checkpoint | Decoded:
    """One vector of a store as named tensors."""
    opened = Checkpoint.open(folder)
    return opened if codec == "dense" else CODECS[codec](opened)


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a store's basis.json. Raise UserError if that is damaged."""
    file = Path(path) / FACTS
    return file.is_file() and isinstance(read_facts(file), StoreFacts)


def is_basis(path: str | os.PathLike[str]) -> bool:
    """Whether a folder or a weight file is marked as a basis of a store, wherever it lies."""
    place = Path(path)
    config = place / "config.json"
    if config.is_file() and f'"{MARKER}"' in config.read_text(encoding="utf-8", errors="replace"):
        return True
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    return bool(files) and MARKER in metadata_of(files[0])


def read_store_facts(folder: Path) -> StoreFacts:
    """The facts of the store in a folder. Raise UserError if there is none."""
    file = folder / FACTS
    if not folder.is_dir():
        check_interrupted(folder)
        partial = next_to(folder, "partial")
        more = f"; {partial} is an unfinished build" if partial.is_dir() else ""
        raise UserError(f"{folder}: no such folder{more}")
    if not file.is_file():
        hint = "a model" if (folder / "config.json").is_file() else "no basis.json in it"
        raise UserError(f"{folder} is not a basis store ({hint}); make one with `tvb build`")
    facts = read_facts(file)
    if not isinstance(facts, StoreFacts):
        raise UserError(f"{folder} is the output of a merge, not a basis store (see `tvb build`)")
    return facts
