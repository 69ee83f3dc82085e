"""`basis.json`, the facts of a merge, and `store.json`, those of a store: schema, reading, writing.

Each has a `checksum` over all its keys. `docs/files.md` explains each key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from safetensors.torch import load_file, save
from torch import Tensor

from tvb_mergekit.atomic import write_file
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.output import checksum_of

if TYPE_CHECKING:
    from typing_extensions import Self

STORE = "store.json"
FOLDER = "basis"  # in a merged model: beside its weights, some programs would load the numbers
FACTS, TENSORS = "basis.json", "basis.safetensors"
MERGE_VERSION, STORE_VERSION = 1, 3
CHECKSUM = "checksum"

DtypeName = Literal["float32", "bfloat16", "float16"]
Codec = Literal["dense", "lossless", "sampled", "adapter"]
Compression = Literal["ae", "balanced"]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# The only files of a store: nothing else is read, and nothing else is ever deleted.
_OWN = re.compile(r"numbers-\d+\.safetensors|vectors/[^/\\:]+\.safetensors|files/[^/\\:]+/[^/\\:]+")


def _inside(place: str) -> str:
    own = _OWN.fullmatch(place) and place.isprintable()  # no NUL, no half of a surrogate pair
    if not own or {".", ".."} & {*place.split("/")}:
        raise ValueError(f"{place!r} is not a place of a file in a store")
    return place


class Record(BaseModel):
    """A JSON object, as attributes. Keys of a later version are dropped."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    def but(self, **changes: Any) -> Self:
        """A copy with other values, which are checked."""
        return self.model_validate({**dict(self), **changes})


class StoredFile(Record):
    """Place below the store, size and checksum of a file."""

    file: Annotated[str, AfterValidator(_inside)]
    bytes: Count
    xxh3_128: str


class Vector(Record):
    """One vector of a store: its name (a task, or B0, B1 ...), form and files.

    `dtype` is that of the decoded numbers, `share` that of the kept entries of a sample. A `mean`
    is part of each reconstruction, and of no merge. In memory a vector has no file.
    """

    name: str
    codec: Codec = "dense"
    dtype: DtypeName = "float32"
    weights: StoredFile | None = None
    files: list[StoredFile] = []
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    mean: bool = False

    @property
    def held(self) -> list[StoredFile]:
        return [*([self.weights] if self.weights else []), *self.files]


class Facts(Record):
    """All of a merge's `basis.json`. Keys with a default may be missing."""

    format_version: int
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
    retained_energy: Finite | None
    norms: dict[str, Finite]
    left_out: dict[str, str]
    fingerprints: dict[str, str]
    seconds: dict[str, Finite]
    errors: dict[str, Finite | None] = {}  # null where unknown
    from_store: str | None = None

    @pydantic.model_validator(mode="after")
    def _one_model_for_each_task(self) -> Self:
        if len(set(self.tasks)) != len(self.tasks) or len(self.models) != len(self.tasks):
            raise ValueError(f"{len(self.tasks)} tasks and {len(self.models)} models do not fit")
        return self


class StoreFacts(Facts):
    """All of a store's `store.json`."""

    base_fingerprint: str
    base_path: str | None = None
    base_beside: str | None = None
    tensors: list[str]
    twins: dict[str, str]
    model_bytes: Count
    budget: int | None = None
    compress: Compression | None = None
    basis_weights: list[Finite] | None = None
    vectors: Annotated[list[Vector], Field(min_length=1)]
    numbers: StoredFile | None = None
    previous: StoreFacts | None = None

    @property
    def whole(self) -> bool:
        """Whether the vectors are the task vectors: encoder and decoder are the identity."""
        return self.parameters.get("basis") == "none"

    @property
    def held(self) -> dict[str, StoredFile]:
        """Every file of this state, by its place."""
        files = [file for vector in self.vectors for file in vector.held]
        return {each.file: each for each in [*files, *([self.numbers] if self.numbers else [])]}

    @pydantic.model_validator(mode="after")
    def _complete(self) -> Self:
        names = [vector.name for vector in self.vectors]
        means = [vector.mean for vector in self.vectors]
        if set(self.errors) != set(self.tasks) or not {"base", *self.tasks} <= set(self.norms):
            raise ValueError("`errors` and `norms` do not name the base and the tasks")
        if means.count(False) != self.num_bases or True in means[:-1] or len({*names}) < len(names):
            raise ValueError(f"`vectors` does not name {self.num_bases} bases")
        if self.whole and names != self.tasks:
            raise ValueError("`vectors` does not name the tasks of `tasks`")
        weights = self.parameters.get("weights")
        given = [weights.get(t) for t in self.tasks] if isinstance(weights, dict) else [None]
        if not all(isinstance(w, int | float) and w and math.isfinite(w) for w in given):
            raise ValueError("`parameters.weights` does not give each task a weight")
        if self.parameters.get("lambda_scale") not in ("bases", "tasks"):
            raise ValueError("`parameters.lambda_scale` is neither `bases` nor `tasks`")
        if any(v.codec == "lossless" and v.weights and not v.files for v in self.vectors):
            raise ValueError("`files` of a lossless vector is empty")
        return self


def write_facts(file: Path, facts: Facts) -> None:
    """Write `basis.json` or `store.json`, with its checksum, in the place of an earlier one."""
    plain = facts.model_dump(mode="json")
    text = json.dumps({**plain, CHECKSUM: _checksum(plain)}, indent=2, allow_nan=False)
    write_file(file, f"{text}\n".encode())


def read_facts(file: Path) -> Facts:
    """The facts in a `basis.json`, or `StoreFacts` in a `store.json`.

    Raises:
        UserError: no JSON, another checksum or version, or a key that is missing or wrong.
    """
    schema, version = (StoreFacts, STORE_VERSION) if file.name == STORE else (Facts, MERGE_VERSION)
    try:
        found = json.loads(file.read_bytes().decode("utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, found {type(found).__name__}")
        if (number := found.get("format_version")) != version:
            raise ValueError(
                f"format version {number}, expected {version}: of another tvb-mergekit"
            )
        if found.pop(CHECKSUM, None) != _checksum(found):
            raise ValueError("its checksum differs: the file was changed")
        return schema.model_validate(found)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"`{'.'.join(map(str, first['loc'])) or 'it'}`: {first['msg']}"
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise UserError(f"{file} cannot be read ({why}); restore it from a copy, or build it again")


def _checksum(facts: Mapping[str, Any]) -> str:
    """xxh3_128 of JSON with sorted keys, without blanks, in ASCII."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode("ascii")).hexdigest()


def read_output(folder: Path) -> tuple[Facts, dict[str, Tensor]]:
    """The facts and numbers in the report of a merged model. Raise UserError if it is damaged."""
    facts = read_facts(folder / FACTS)
    return facts, read_numbers(folder / TENSORS, len(facts.tasks), facts.num_bases)


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], key: str = "format", value: str = "pt"
) -> None:
    """Write a new safetensors file, with one entry of metadata."""
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # safetensors writes several entries in an order that changes from run to run. And not
    # `save_file`, whose files only their owner may read.
    file.write_bytes(save(plain, metadata={key: value}))


def read_numbers(file: Path, tasks: int, bases: int) -> dict[str, Tensor]:
    """The tensors of a file, of T tasks and M bases.

    Raises:
        UserError: the file is damaged, or a tensor is of another shape, or not finite.
    """
    shapes = {"encoder": (tasks, bases), "decoder": (bases, tasks), "eigenvalues": (tasks,)}
    try:
        tensors = load_file(file)
    except Exception as error:  # safetensors raises several kinds
        raise UserError(f"{file}: cannot be read ({error}); restore it from a copy") from error
    for name, tensor in tensors.items():
        wanted = shapes.get(name, (tasks, tasks))
        if tuple(tensor.shape) != wanted or not tensor.isfinite().all():
            found = f"`{name}` has shape {list(tensor.shape)}, or holds NaN or infinity"
            raise UserError(f"{file}: {found}; expected finite numbers of shape {list(wanted)}")
    return tensors


def record_of(store: Path, place: str) -> StoredFile:
    """Size and checksum of a file of a store as it is."""
    path = store / place
    return StoredFile(file=place, bytes=path.stat().st_size, xxh3_128=checksum_of(path))


def check_files(store: Path, files: Iterable[StoredFile], checksums: bool = False) -> None:
    """Raise UserError if a file is missing, outside the store, or of another size or checksum."""
    remedy = "restore it from a copy, take the task out (`tvb remove`), or build the store again"
    inside = store.resolve()
    for each in files:
        path = store / each.file
        if not path.resolve().is_relative_to(inside):
            raise UserError(f"{path}: a link out of the store; {remedy}")
        if not path.is_file():
            raise UserError(f"{path}: missing, and {STORE} names it; {remedy}")
        if (size := path.stat().st_size) != each.bytes:
            raise UserError(f"{path}: {size:,} bytes, {STORE} says {each.bytes:,}; {remedy}")
        if checksums and record_of(store, each.file) != each:
            raise UserError(f"{path}: its checksum is not the one in {STORE}; {remedy}")


def unnamed_files(store: Path, facts: StoreFacts | None) -> list[Path]:
    """Files that only an interrupted change can have left: no state of the store names them."""
    states = [state for state in (facts, facts and facts.previous) if state]
    named = {place for state in states for place in state.held}
    found = (path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file())
    return [store / each for each in sorted(found) if _OWN.fullmatch(each) and each not in named]


def of_files(files: Iterable[StoredFile]) -> int:
    """Bytes of files."""
    return sum(each.bytes for each in files)


def subset(of: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The entries of some names."""
    return {name: of[name] for name in names if name in of}
