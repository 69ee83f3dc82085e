"""`basis.json`, the facts of a merge or a store: its schema, reading and writing.

`basis.safetensors` holds every number that later work computes with. `basis.json` repeats them for
people, and names the models and files. Its `checksum` covers all keys except FREE, which a user may
edit because no result depends on them. `docs/files.md` explains each key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import safetensors
import xxhash
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file
from torch import Tensor

from tvb_mergekit.atomic import REPORT
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.writing import file_record

if TYPE_CHECKING:
    from typing_extensions import Self

FACTS, TENSORS = REPORT
FOLDER = "basis"  # of both in a merged model: beside its weights, some programs would load them
FORMAT_VERSION, STORE_VERSION = 1, 2  # of `basis.json` of a merge, and of a store
CHECKSUM = "checksum"
# Paths of models, which the base's fingerprint guards, and seconds of work.
FREE = ("base_model", "models", "base_path", "base_beside", "seconds")

DtypeName = Literal["float32", "bfloat16", "float16"]
Codec = Literal["dense", "lossless", "sampled"]
EXACT = ("lossless", "sampled")  # hold entries of all models, without the weights of the tasks
Compression = Literal["ae", "balanced"]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Record(BaseModel, Mapping[str, Any]):
    """A JSON object, as attributes and as a mapping. Keys of a later version are let through."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    def __getitem__(self, key: str) -> Any:
        if key not in self.model_fields_set:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        known = (key for key in type(self).model_fields if key in self.model_fields_set)
        yield from (*known, *(self.model_extra or ()))

    def __len__(self) -> int:
        return len(self.model_fields_set)

    def but(self, **changes: Any) -> Self:
        """A copy with other values, which are checked."""
        return self.model_validate({**self, **changes})


class FileRecord(Record):
    """Size and checksum of a file."""

    bytes: Count
    xxh3_128: str


class StoreRecord(Record):
    """The key `store`: the vectors of a store, its files and its base."""

    codec: Codec
    dtype: DtypeName
    folders: list[str]
    budget: int | None
    compress: Compression | None
    basis_weights: list[Finite] | None
    base_fingerprint: str
    base_path: str | None = None
    twins: dict[str, str]
    model_bytes: Count
    added: Count
    files: dict[str, FileRecord]
    base_beside: str | None = None
    previous: str | None = None

    def within(self, folders: Sequence[str]) -> dict[str, FileRecord]:
        """The files, without those in other folders."""
        return {n: of for n, of in self.files.items() if n.partition("/")[0] in (n, *folders)}


class Facts(Record):
    """All of a merge's `basis.json`. Keys with a default may be missing."""

    format_version: Annotated[int, Field(ge=1)]
    versions: dict[str, str | None]
    method: str
    parameters: dict[str, Any]
    tasks: Annotated[list[str], Field(min_length=1)]
    models: list[str]
    base_model: str
    num_bases: Annotated[int, Field(ge=1)]
    num_parameters: Count
    dtype: str | None
    loss: Finite | None
    spectral_bound: Finite | None
    balanced_bound: Finite | None
    relative_gap: Finite | None
    retained_energy: Finite | None
    norms: dict[str, Finite]
    matrix_norms: dict[str, Finite] = {}
    left_out: dict[str, str]
    fingerprints: dict[str, str]
    bits: Finite | None = None
    bytes: Count | None = None
    density: Finite | None = None
    relative_error: dict[str, Finite] = {}
    seconds: dict[str, Finite]
    store: StoreRecord | None = None
    errors: dict[str, Finite | None] = {}  # null where unknown
    from_store: str | None = None
    checksum: str | None = None

    @pydantic.model_validator(mode="after")
    def _one_model_for_each_task(self) -> Self:
        if len(set(self.tasks)) != len(self.tasks) or len(self.models) != len(self.tasks):
            raise ValueError(f"{len(self.tasks)} tasks and {len(self.models)} models do not fit")
        return self


class StoreFacts(Facts):
    """All of a store's `basis.json`."""

    store: StoreRecord

    @property
    def keeps_tasks(self) -> bool:
        """Whether each vector is a task vector, in a folder of the task's name."""
        return self.store.codec in EXACT

    def of_merge(self) -> Facts:
        """The facts without those that a store alone has."""
        kept = {key: self[key] for key in self if key != "store"}
        return Facts.model_validate({**kept, "format_version": FORMAT_VERSION})

    @pydantic.model_validator(mode="after")
    def _errors_of_each_task(self) -> Self:
        if set(self.errors) != set(self.tasks):
            raise ValueError("`errors` does not name the tasks of `tasks`")
        return self


def checksum(facts: Mapping[str, Any]) -> str:
    """xxh3_128 of JSON with sorted keys, without blanks, in ASCII, and without FREE."""

    def covered(part: Mapping[str, Any]) -> dict[str, Any]:
        return {key: part[key] for key in part if key not in (CHECKSUM, *FREE)}

    plain = covered(facts)
    if isinstance(plain.get("store"), dict):
        plain["store"] = covered(plain["store"])
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode("ascii")).hexdigest()


def write_facts(folder: Path, facts: Facts) -> None:
    """Write `basis.json` into a folder, with its checksum."""
    plain = facts.model_dump(mode="json", exclude_unset=True, exclude={CHECKSUM})
    text = json.dumps({**plain, CHECKSUM: checksum(plain)}, indent=2, allow_nan=False)
    (folder / FACTS).write_text(text + "\n", encoding="utf-8")


def read_facts(file: Path) -> Facts:
    """The facts in a `basis.json`: `StoreFacts` if it is a store's.

    Raises:
        UserError: no JSON, another checksum, a newer format, or a key that is missing or wrong.
    """
    remedy = "restore it from a copy, or build it again"
    try:
        found = json.loads(file.read_bytes().decode("utf-8"), parse_constant=_no_number)
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, found {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({error}); {remedy}") from error
    number = found.get("format_version")
    known = STORE_VERSION if "store" in found else FORMAT_VERSION
    if isinstance(number, int) and number != known:
        mend = (
            "upgrade it: pip install -U tvb-mergekit"
            if number > known
            else "build the store again from its models"
        )
        raise UserError(
            f"{file}: format version {number}, this tvb-mergekit reads version {known}; {mend}"
        )
    if CHECKSUM in found and found[CHECKSUM] != checksum(found):
        raise UserError(f"{file} was changed after it was written (its checksum differs); {remedy}")
    try:
        return (StoreFacts if "store" in found else Facts).model_validate(found)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"{file} is not complete: `{place}`: {first['msg']}; {remedy}") from error


def read_output(folder: Path) -> tuple[Facts, dict[str, Tensor]]:
    """basis.json and basis.safetensors in a folder. Raise UserError if one is damaged."""
    try:
        return read_facts(folder / FACTS), load_file(folder / TENSORS)
    except safetensors.SafetensorError as error:
        raise UserError(f"{folder / TENSORS}: cannot be read ({error})") from error


def is_output(path: Path) -> bool:
    """Whether a folder is a merged model with our report."""
    return (path / FOLDER / FACTS).is_file()


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file as it is."""
    return FileRecord.model_validate(file_record(path))


def weight_bytes(files: Mapping[str, FileRecord], folder: str = "") -> int:
    """Bytes of the weights among the files of a store, or of one of its folders."""
    weights = (name for name in files if name.endswith(".safetensors") and name.startswith(folder))
    return sum(files[name].bytes for name in weights)


def check_files(
    folder: Path,
    files: Mapping[str, FileRecord],
    named_in: str,
    remedy: str,
    checksums: bool = False,
) -> None:
    """Raise UserError if a recorded file is missing, or of another size or checksum.

    Args:
        files: the records of the files.
        named_in: the file with the records, for messages.
        remedy: what to do, for messages.
        checksums: compare them, too.
    """
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing, and {named_in} names it; {remedy}")
        if (size := path.stat().st_size) != record.bytes:
            raise UserError(
                f"{path}: {size:,} bytes, {named_in} says {record.bytes:,}: the file was changed; "
                f"{remedy}"
            )
    for name, record in files.items() if checksums else ():
        if record_of(folder / name).xxh3_128 != record.xxh3_128:
            raise UserError(
                f"{folder / name}: its checksum is not the one in {named_in}: the file was "
                f"changed; {remedy}"
            )


def check_shapes(file: Path | str, tasks: int, bases: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError where a tensor of `basis.safetensors` has no shape for T tasks, M bases."""
    shapes = {
        "gram": (tasks, tasks),
        "eigenvalues": (tasks,),
        "encoder": (tasks, bases),
        "decoder": (bases, tasks),
        "reconstruction": (tasks, tasks),
        "gram_bases": (bases, bases),
        "basis_weights": (bases,),
        "weights": (tasks,),
        "norms": (tasks,),
        "matrix_norms": (tasks,),
        "errors": (tasks,),
    }
    for name, tensor in tensors.items():
        found = tuple(tensor.shape)
        if found != shapes.get(name, found):
            raise UserError(
                f"{file} does not belong to {FACTS}: `{name}` has shape {found}, expected "
                f"{shapes[name]}"
            )


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")
