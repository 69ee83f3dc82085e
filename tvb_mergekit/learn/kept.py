"""Files of what is learned: tensors, and in their metadata what they were learned from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.atomic import beside
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.tensors.checkpoint import metadata_of
from tvb_mergekit.tensors.output import sync
from tvb_mergekit.tensors.writing import HASH, content_hash

VERSION = 1
STATISTICS, LEARNED = "tvb_statistics", "tvb_learned"  # keys of metadata


def save(file: Path, key: str, tensors: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
    """Write tensors and, under a key of the metadata, what they are of; never half."""
    held = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    said = {key: described(told)}
    said[HASH] = content_hash(said, held.items())
    with beside(file) as path:
        save_file(held, path, said)
        path.chmod(0o644)  # `save_file` lets only the owner read
        sync(path)


def described(told: Mapping[str, Any]) -> str:
    """What a file is of, as a value of its metadata."""
    return json.dumps({"version": VERSION, **told})


def told_in(file: Path, key: str) -> dict[str, Any] | None:
    """What a file is of; None where it is none with this key.

    Raises:
        UserError: it is of a later version.
    """
    if not file.is_file() or key not in (found := metadata_of(file)):
        return None
    told: dict[str, Any] = json.loads(found[key])
    if told.pop("version") > VERSION:
        raise UserError(f"{file}: written by a later tvb-mergekit; upgrade this one")
    return told


def is_ours(file: Path) -> bool:
    """Whether `tvb learn` has written a file."""
    keys = {STATISTICS, LEARNED}
    return file.suffix == ".safetensors" and not keys.isdisjoint(metadata_of(file))


def check_same(file: Path, key: str, wanted: Mapping[str, Any]) -> None:
    """Raise UserError if a file of an unfinished run was changed, or was made for other values than
    are wanted; where data lie, `file`, may differ."""
    with safe_open(file, "pt") as held:
        said = held.metadata()
        recorded = said.pop(HASH, None)
        found = content_hash(said, ((name, held.get_tensor(name)) for name in held.keys()))
    if found != recorded:
        raise UserError(
            f"--resume: {file}: its content does not have the checksum in its header: the file was "
            "changed; delete it, and --resume learns again what it held"
        )
    told = told_in(file, key) or {}
    other = [name for name, value in wanted.items() if name != "file" and told.get(name) != value]
    if other:
        raise UserError(
            f"--resume: {file} differs from this command in {listed(other)}: give what that run "
            "had, or leave out --resume to begin again"
        )
