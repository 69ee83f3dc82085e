"""Files of learned tensors, with the facts about their learning in the metadata."""

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
from tvb_mergekit.store import routing
from tvb_mergekit.tensors.checkpoint import FACTS_VERSION, facts_in, metadata_of
from tvb_mergekit.tensors.writing import HASH, content_hash

STATISTICS, LEARNED = "tvb_statistics", routing.LEARNED  # keys of metadata


def save(file: Path, key: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, and facts under a key of the metadata; the file appears complete."""
    held = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    metadata = {key: described(facts)}
    metadata[HASH] = content_hash(metadata, held.items())
    with beside(file) as path:
        save_file(held, path, metadata)
        path.chmod(0o644)  # `save_file` lets only the owner read


def described(facts: Mapping[str, Any]) -> str:
    return json.dumps({"version": FACTS_VERSION, **facts})


def is_ours(file: Path) -> bool:
    keys = {STATISTICS, LEARNED}
    return file.suffix == ".safetensors" and not keys.isdisjoint(metadata_of(file))


def check_same(file: Path, key: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The facts in a finished file. The fact `file`, where the data lie, may differ.

    Raises:
        UserError: the file was changed, or its facts differ from the wanted ones.
    """
    with safe_open(file, "pt") as held:
        metadata = held.metadata()
        recorded = metadata.pop(HASH, None)
        found = content_hash(metadata, ((name, held.get_tensor(name)) for name in held.keys()))
    if found != recorded:
        raise UserError(f"--resume: {file} was changed; delete it, and --resume learns it again")
    facts = facts_in(file, key)
    other = [name for name, value in wanted.items() if name != "file" and facts.get(name) != value]
    if told := listed(other):
        raise UserError(f"--resume: {file} differs from this command in {told}: repeat its options")
    return facts
