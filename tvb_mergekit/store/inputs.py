"""What a store is built from: the tensors of base and models that take part, matched by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tvb_mergekit.core.gram import GramSums, shapes_differ
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.settings import Settings
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Holds, Item, Part

QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2)
ALIKE = "give models that were fine-tuned from this base, with their tensors named alike"


@dataclass
class Inputs:
    """Base and T models, and the tensors of theirs that make up the task vectors.

    Attributes:
        items: one for each tensor that counts, by the base's name for it.
        tied: a tensor of the base that is tied to another -> the one that counts.
        sums: their Gram matrix where it is known otherwise (adapters); unweighted.
        adapters: the models as low-rank factors, if all are.
        folder: the base's folder, for its config.json and tokenizer.
        varying: `lambda`, `alpha` and `density` as the recipe has them.
        dtype: the recipe's output dtype.
        built: the scales that the task vectors have already, of a zoo.
        changed: what else than the files decides the tensors: how a tokenizer aligns them.
    """

    settings: Settings
    base: Weights
    base_model: str
    tasks: Sequence[str]
    models: Sequence[str]
    weights: Sequence[float]
    sources: Sequence[Weights]
    items: Sequence[Item]
    left_out: Mapping[str, str]
    tied: Mapping[str, str] = field(default_factory=dict)
    sums: GramSums | None = None
    adapters: Sequence[Adapter] = ()
    folder: Path | None = None
    varying: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    changed: Sequence[str] = ()
    built: Sequence[float] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that one pass reads."""
        return sum(item.nbytes for item in self.items)

    @property
    def model_bytes(self) -> int:
        """Bytes of the models that the bases stand for."""
        return sum(source.nbytes for source in self.sources)

    @property
    def own_dtype(self) -> torch.dtype:
        """The narrowest dtype of stores that is as wide as all in which the models are stored."""
        found = {part.dtype for item in self.items for part in item.inputs}
        if self.adapters:  # which are read as float32
            found = set().union(*(adapter.dtypes for adapter in self.adapters))
        widest = functools.reduce(torch.promote_types, found or {torch.float32})
        return widest if widest in (torch.bfloat16, torch.float16) else torch.float32

    @functools.cached_property
    def prints(self) -> list[str]:
        """The fingerprints, the base's first."""
        return [weights.fingerprint() for weights in (self.base, *self.sources)]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Model -> fingerprint; a state dict may go by the same name as a task."""
        return dict(zip((self.base_model, *self.models), self.prints, strict=True))

    @property
    def in_memory(self) -> bool:
        """Whether a state dict is among them, of which nothing tells that it has changed."""
        return not all(source.stamp() for source in (self.base, *self.sources))

    @property
    def key(self) -> dict[str, object]:
        """What G depends on, for its cache."""
        return {
            "fingerprints": self.prints,
            "stamps": [source.stamp() for source in (self.base, *self.sources)],
            "items": [[item.name, list(item.shape)] for item in self.items],
            "changed": list(self.changed),
        }


@dataclass(frozen=True)
class Matched:
    """The parts of `Inputs` that follow from the tensors' names."""

    items: list[Item]
    left_out: dict[str, str]
    tied: dict[str, str]
    notes: Sequence[str] = ()  # what is left out although nobody asked for it; one of each model


def match(
    base: Weights,
    sources: Sequence[Weights],
    tasks: Sequence[str],
    settings: Settings,
    holds: Holds = "weight",
) -> Matched:
    """The tensors that take part, of models that name them as the base does.

    Every floating-point tensor takes part that all have, unless `exclude` matches it. A tensor
    under two names counts once; of a tensor that the base ties, a model needs one of the names.

    Raises:
        UserError: a model shares no tensor with the base, the models lack most of it, shapes
            differ, a tensor is quantized, or nothing is left.
    """
    notes = _notes(base, sources, tasks, settings)
    held = [{base.canonical(n): n for n in base.tensors if n in s.tensors} for s in sources]
    items: list[Item] = []
    left_out: dict[str, str] = {}
    tied: dict[str, str] = {}
    counted: dict[tuple[str, ...], str] = {}
    for name, info in base.tensors.items():
        if settings.excludes(name):
            left_out[name] = "excluded by the recipe"
            continue
        named = [
            name if name in source.tensors else tied.get(base.canonical(name), "")
            for source, tied in zip(sources, held, strict=True)
        ]
        if missing := [task for task, found in zip(tasks, named, strict=True) if not found]:
            left_out[name] = f"missing in {', '.join(missing)}"
            continue
        places = list(zip((base, *sources), (name, *named), strict=True))
        for who, (source, its_name) in zip(("the base", *tasks), places, strict=True):
            found = source.tensors[its_name]
            if found.dtype in QUANTIZED:
                raise UserError(
                    f"tensor `{name}` of {who} is stored as {found.dtype}: quantized codes are no "
                    "weights; take an unquantized checkpoint, or leave it out with `exclude`"
                )
            if not found.dtype.is_floating_point:
                kind = str(found.dtype).removeprefix("torch.")
                left_out.setdefault(name, f"not floating point in {who} ({kind})")
            if found.shape != info.shape and found.dtype.is_floating_point:
                raise UserError(shapes_differ(name, who, found.shape, info.shape))
        if name in left_out:
            continue
        place = tuple(source.canonical(its_name) for source, its_name in places)
        if place in counted:
            left_out[name] = f"the same tensor as {counted[place]}: counted once"
            tied[name] = counted[place]
            continue
        counted[place] = name
        parts = [Part.of(source, its_name, holds) for source, its_name in places[1:]]
        items.append(Item(name, info.shape, Part.of(base, name), tuple(parts)))
    if not items:
        raise UserError(
            "no tensor takes part: every floating-point tensor is excluded or missing in a model"
        )
    return Matched(items, left_out, tied, notes)


def _notes(
    base: Weights, sources: Sequence[Weights], tasks: Sequence[str], settings: Settings
) -> list[str]:
    """A sentence about each model of which something is left out that nobody asked to leave out.

    Raises:
        UserError: a model shares no floating-point tensor with the base, or together they lack
            most of it.
    """
    notes, lost, wanted = [], set[str](), _floating(base, settings).values()
    for task, source in zip(tasks, sources, strict=True):
        missing, extra = _absent(base, source, settings), _absent(source, base, settings)
        lost.update(missing)
        reasons = (("missing in the model", missing), ("not in the base", extra))
        found = ", ".join(f"{len(n)} {reason} ({listed(n)})" for reason, n in reasons if n)
        if missing and len(missing) == len(wanted):
            raise UserError(
                f"the model of task `{task}` shares no floating-point tensor with the base: "
                f"{found}; {ALIKE}"
            )
        if found:
            notes.append(f"the model of task `{task}`: left out of its task vector: {found}")
    whole, part = (sum(base.tensors[name].numel for name in names) for names in (wanted, lost))
    if 2 * part > whole:
        raise UserError(
            f"{100 * part / whole:.0f} % of the base would be left out: {'; '.join(notes)}; {ALIKE}"
        )
    return notes


def _floating(weights: Weights, settings: Settings) -> dict[str, str]:
    """The floating-point tensors that `exclude` does not match, each under one name."""
    found: dict[str, str] = {}
    for name, info in weights.tensors.items():
        if info.dtype.is_floating_point and not settings.excludes(name):
            found.setdefault(weights.canonical(name), name)
    return found


def _absent(weights: Weights, other: Weights, settings: Settings) -> list[str]:
    """The floating-point tensors that `other` has under none of their names."""
    there = {weights.canonical(name) for name in weights.tensors if name in other.tensors}
    return [name for place, name in _floating(weights, settings).items() if place not in there]
