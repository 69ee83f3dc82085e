"""`basis.json`, the facts of a merge, and `store.json`, those of a store, with the files they name.

Each has a `checksum` over all its keys. `docs/files.md` explains each key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from tvb_mergekit.errors import UserError, complaints
from tvb_mergekit.store import STORE
from tvb_mergekit.tensors.output import checksum_of, header_of, write_file

FOLDER = "basis"  # in a merged model: beside its weights, some programs would load the numbers
FACTS, TENSORS = "basis.json", "basis.safetensors"
CHECKSUM = "checksum"

# The only files of a store: nothing else is read, and nothing else is ever deleted.
NAME = r"[^/\\:\0-\x1f]+"
OWN = (
    rf"\A(numbers-\d+\.safetensors|(vectors|gates)/{NAME}\.safetensors"
    rf"|files(/(?!\.\.?(/|\Z)){NAME}){{2}})\Z"
)
# Keys of a later version are dropped.
KEYS = ConfigDict(extra="ignore", strict=True, frozen=True, regex_engine="python-re")


class StoredFile(BaseModel):
    """Place below the store, size and checksum of a file."""

    model_config = KEYS
    file: Annotated[str, Field(pattern=OWN)]
    bytes: int
    xxh3_128: str


class Vector(BaseModel):
    """One vector of a store: its name (a task, or B0, B1 ...), its form, and its files.

    `dtype` is that of dense numbers, `share` that of the kept entries of a sample. `gates`,
    of a task, is read by `attach(...).route()`, see `store.routing`. A lossless model has the other
    `files`, and all tensors of the vector except the `foreign` ones.
    """

    model_config = KEYS
    name: str
    codec: Literal["dense", "lossless", "sampled", "adapter"] = "dense"
    dtype: Annotated[str, Field(pattern=r"\A(float32|bfloat16|float16)\Z")] = "float32"
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    weights: StoredFile = StoredFile(file="vectors/unwritten.safetensors", bytes=0, xxh3_128="")
    gates: StoredFile | None = None
    files: list[StoredFile] = []
    foreign: list[str] = []

    @property
    def held(self) -> list[StoredFile]:
        return [self.weights, *filter(None, [self.gates]), *self.files]


class Facts(BaseModel):
    """All of a merge's `basis.json`. Keys with a default may be missing."""

    model_config = KEYS
    format_version: Literal[1, 3]
    versions: dict[str, str | None]
    method: str
    parameters: dict[str, Any]
    tasks: list[str]
    models: list[str]
    base_model: str
    num_bases: int
    num_parameters: int
    dtype: str | None
    loss: float | None
    spectral_bound: float | None
    retained_energy: float | None
    norms: dict[str, Annotated[float, Field(ge=0)]]
    left_out: dict[str, str]
    fingerprints: dict[str, str]
    seconds: dict[str, float]
    errors: dict[str, float | None] = {}  # null where unknown

    @property
    def whole(self) -> bool:
        """Whether the vectors are the task vectors: encoder and decoder are the identity."""
        return self.parameters.get("basis") == "none"


class StoreFacts(Facts):
    """All of a store's `store.json`."""

    format_version: Literal[3]
    base_fingerprint: str
    base_path: str | None = None
    tensors: list[str]
    twins: dict[str, str]
    model_bytes: int
    budget: int | None = None
    compress: Literal["ae", "balanced"] | None = None
    basis_weights: list[float] | None = None
    vectors: list[Vector]
    numbers: StoredFile
    previous: StoreFacts | None = None

    @property
    def held(self) -> dict[str, StoredFile]:
        """Every file of this state, by its place."""
        files = [file for vector in self.vectors for file in vector.held]
        return {each.file: each for each in [*files, self.numbers]}

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.held.values())

    @property
    def shares(self) -> list[float]:
        """v [M], which multiplies each basis in a merge: w of balanced bases with mean 1, or 1.

        Those of `tvb add` may stand for different numbers of tasks: sum_m v_m B_m is M/T times the
        sum of all.
        """
        known = self.basis_weights if self.compress == "balanced" else None
        weights = known or [1.0] * self.num_bases
        return [weight * len(weights) / sum(weights) for weight in weights]

    @property
    def bits(self) -> list[float]:
        """Mean bits of an element of each vector."""
        return [8 * each.weights.bytes / max(self.num_parameters, 1) for each in self.vectors]


Kind = TypeVar("Kind", bound=Facts)


def write_facts(file: Path, facts: Facts) -> None:
    """Write `basis.json` or `store.json`, with its checksum, in place of an earlier one."""
    # The former state of a store is written without its own former state.
    plain = facts.model_dump(mode="json", exclude={"previous": {"previous"}})
    text = json.dumps({**plain, CHECKSUM: _checksum(plain)}, indent=2, allow_nan=False)
    write_file(file, f"{text}\n".encode())


def read_facts(file: Path, kind: type[Kind]) -> Kind:
    """The facts in a file. Raise UserError for no JSON, another checksum, or a wrong key."""
    try:
        found = json.loads(file.read_bytes())
        if found.pop(CHECKSUM, None) != _checksum(found):
            raise ValueError("its checksum differs: the file was changed")
        return kind.model_validate(found)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        why = complaints(error) if isinstance(error, pydantic.ValidationError) else str(error)
    raise UserError(f"{file} cannot be read ({why}); restore it from a copy, or build it again")


def _checksum(facts: Mapping[str, Any]) -> str:
    """xxh3_128 of JSON with sorted keys, without blanks, in ASCII."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode("ascii")).hexdigest()


def name_of_dtype(dtype: torch.dtype) -> str:
    """The name of a dtype. `Vector` refuses all that a store cannot have."""
    return str(dtype).removeprefix("torch.")


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a new safetensors file. Its bytes follow from the arguments, in every run."""
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    plain = (tensor.contiguous().reshape(-1) for tensor in tensors.values())
    with file.open("wb") as opened:
        opened.write(header_of(metadata, layout))
        opened.writelines(tensor.view(torch.uint8).numpy().data for tensor in plain)


def record_of(store: Path, place: str) -> StoredFile:
    """Size and checksum of a file of a store as it is."""
    path = store / place
    return StoredFile(file=place, bytes=path.stat().st_size, xxh3_128=checksum_of(path))


def check_files(store: Path, files: Iterable[StoredFile], checksums: bool = False) -> None:
    """Raise UserError if a file is missing, outside the store, or of another size or checksum."""
    inside = store.resolve()
    for each in files:
        path, why = store / each.file, ""
        if not path.resolve().is_relative_to(inside):
            why = "a link out of the store"
        elif not path.is_file():
            why = f"missing, and {STORE} names it"
        elif path.stat().st_size != each.bytes or (
            checksums and record_of(store, each.file) != each
        ):
            why = f"its size or checksum is not the one in {STORE}"
        if why:
            own = each.file.startswith(("vectors", "gates"))  # of one task, or basis
            out = ", take the task out (`tvb remove`)," if own else ""
            raise UserError(f"{path}: {why}; restore it from a copy{out} or build it again")
