"""The files that `basis.json` and `store.json` stand for: written, read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.store import STORE
from tvb_mergekit.store.facts import (
    FACTS,
    OWN,
    TENSORS,
    Facts,
    StoredFile,
    StoreFacts,
    read_facts,
)
from tvb_mergekit.tensors.output import checksum_of, header_of


def read_output(folder: Path) -> tuple[Facts, dict[str, Tensor]]:
    """The facts and numbers in the report of a merged model. Raise UserError if it is damaged."""
    facts = read_facts(folder / FACTS)
    return facts, read_numbers(folder / TENSORS, facts)


def read_numbers(file: Path, facts: Facts) -> dict[str, Tensor]:
    """The matrices of a merge or a store: of T tasks and M bases.

    Raises:
        UserError: the file is damaged, or a matrix is of another shape, or not finite.
    """
    tasks, bases = len(facts.tasks), facts.num_bases
    shapes = {"encoder": (tasks, bases), "decoder": (bases, tasks), "eigenvalues": (tasks,)}
    try:
        tensors = load_file(file)
    except Exception as error:  # safetensors raises several kinds
        raise UserError(f"{file}: cannot be read ({error}); restore it from a copy") from error
    if isinstance(facts, StoreFacts) and (missing := {"encoder", "decoder"} - tensors.keys()):
        raise UserError(f"{file}: no `{min(missing)}`; build it again")
    for name, tensor in tensors.items():
        wanted = shapes.get(name, (tasks, tasks))
        if tuple(tensor.shape) != wanted or not tensor.isfinite().all():
            found = f"`{name}` has shape {list(tensor.shape)}, or holds NaN or infinity"
            raise UserError(f"{file}: {found}; expected finite numbers of shape {list(wanted)}")
    return tensors


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
        path = store / each.file
        if not path.resolve().is_relative_to(inside):
            why = "a link out of the store"
        elif not path.is_file():
            why = f"missing, and {STORE} names it"
        elif (size := path.stat().st_size) != each.bytes:
            why = f"{size:,} bytes, {STORE} says {each.bytes:,}"
        elif checksums and checksum_of(path) != each.xxh3_128:
            why = f"its checksum is not the one in {STORE}"
        else:
            continue
        remedy = "restore it from a copy, take the task out (`tvb remove`), or build it again"
        raise UserError(f"{path}: {why}; {remedy}")


def unnamed_files(store: Path, facts: StoreFacts) -> list[Path]:
    """Files that only an interrupted change can have left: no state of the store names them."""
    named = {*facts.held, *(facts.previous.held if facts.previous else ())}
    found = (path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file())
    return [store / each for each in sorted(found) if OWN.fullmatch(each) and each not in named]
