"""`basis.json`, the facts of a merge, and `store.json`, those of a store: schema, reading, writing.

Each has a `checksum` over all its keys. `docs/files.md` explains each key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tvb_mergekit.atomic import write_file
from tvb_mergekit.errors import UserError
from tvb_mergekit.store import STORE

if TYPE_CHECKING:
    from typing_extensions import Self

FOLDER = "basis"  # in a merged model: beside its weights, some programs would load the numbers
FACTS, TENSORS = "basis.json", "basis.safetensors"
MERGE_VERSION, STORE_VERSION = 1, 3
CHECKSUM = "checksum"

DtypeName = Literal["float32", "bfloat16", "float16"]
Codec = Literal["dense", "lossless", "sampled", "adapter"]
Compression = Literal["ae", "balanced"]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Size = Annotated[float, Field(allow_inf_nan=False, ge=0)]
# The only files of a store: nothing else is read, and nothing else is ever deleted.
OWN = re.compile(
    r"numbers-\d+\.safetensors|(vectors|gates)/[^/\\:]+\.safetensors|files/[^/\\:]+/[^/\\:]+"
)


def _inside(place: str) -> str:
    own = OWN.fullmatch(place) and place.isprintable()  # no NUL, no half of a surrogate pair
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

    `gates` is read by `attach(...).route()`, see `store.gates`; adapters have their own factors.
    `dtype` is that of the decoded numbers, `share` that of the kept entries of a sample. A `mean`
    is part of each reconstruction, and of no merge. In memory a vector has no file.
    """

    name: str
    codec: Codec = "dense"
    dtype: DtypeName = "float32"
    weights: StoredFile | None = None
    files: list[StoredFile] = []
    gates: StoredFile | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    mean: bool = False

    @property
    def held(self) -> list[StoredFile]:
        return [*filter(None, (self.weights, self.gates)), *self.files]

    @pydantic.model_validator(mode="after")
    def _files_of_one_model(self) -> Self:
        stem = Path(self.weights.file).stem if self.weights else None
        if any(Path(each.file).parts[1] != stem for each in self.files):
            raise ValueError("`files` are those of another vector")
        if self.codec == "lossless" and self.weights and not self.files:
            raise ValueError("`files` of a lossless vector is empty")
        return self


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
    norms: dict[str, Size]
    left_out: dict[str, str]
    fingerprints: dict[str, str]
    seconds: dict[str, Finite]
    errors: dict[str, Size | None] = {}  # null where unknown
    from_store: str | None = None

    @property
    def whole(self) -> bool:
        """Whether the vectors are the task vectors: encoder and decoder are the identity."""
        return self.parameters.get("basis") == "none"

    @pydantic.model_validator(mode="after")
    def _one_model_and_norm_for_each_task(self) -> Self:
        if len({*self.tasks}) != len(self.tasks) or len(self.models) != len(self.tasks):
            raise ValueError(f"{len(self.tasks)} tasks and {len(self.models)} models do not fit")
        if {*self.norms} != {"base", *self.tasks}:
            raise ValueError("`norms` does not name the base and the tasks")
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
    def held(self) -> dict[str, StoredFile]:
        """Every file of this state, by its place."""
        files = [file for vector in self.vectors for file in vector.held]
        return {each.file: each for each in [*files, *([self.numbers] if self.numbers else [])]}

    @pydantic.model_validator(mode="after")
    def _complete(self) -> Self:
        names = [vector.name for vector in self.vectors]
        means = [vector.mean for vector in self.vectors]
        if means.count(False) != self.num_bases or True in means[:-1] or len({*names}) < len(names):
            raise ValueError(f"`vectors` does not name {self.num_bases} bases")
        if {*self.errors} != {*self.tasks} or (self.whole and names != self.tasks):
            raise ValueError("`errors` or `vectors` do not name the tasks")
        weights = self.parameters.get("weights")
        given = [weights.get(t) for t in self.tasks] if isinstance(weights, dict) else [None]
        if not all(isinstance(w, int | float) and w and math.isfinite(w) for w in given):
            raise ValueError("`parameters.weights` does not give each task a weight")
        if self.parameters.get("lambda_scale") not in ("bases", "tasks"):
            raise ValueError("`parameters.lambda_scale` is neither `bases` nor `tasks`")
        return self


def write_facts(file: Path, facts: Facts) -> None:
    """Write `basis.json` or `store.json`, with its checksum; an earlier one is replaced."""
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
        found = json.loads(file.read_bytes())
        known = found.pop(CHECKSUM, None)
        if (number := found.get("format_version")) != version:
            raise ValueError(f"format version {number}, expected {version}")
        if known != _checksum(found):
            raise ValueError("its checksum differs: the file was changed")
        made = schema.model_validate(found)
        if isinstance(made, StoreFacts) and None in (
            made.numbers,
            *(v.weights for v in made.vectors),
        ):
            raise ValueError("it names no file of the numbers, or of a vector")
        return made
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"`{'.'.join(map(str, first['loc'])) or 'it'}`: {first['msg']}"
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        why = str(error)
    raise UserError(f"{file} cannot be read ({why}); restore it from a copy, or build it again")


def _checksum(facts: Mapping[str, Any]) -> str:
    """xxh3_128 of JSON with sorted keys, without blanks, in ASCII."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode("ascii")).hexdigest()
