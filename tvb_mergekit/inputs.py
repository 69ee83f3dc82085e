"""What a store is built from: the tensors of base and models that take part, matched by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import GramSums, shapes_differ
from tvb_mergekit.lora import Adapter, AdapterDelta
from tvb_mergekit.recipe import Settings
from tvb_mergekit.stream import Item, Part
from tvb_mergekit.weights import Weights

QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Inputs:
    """Base and T models, and the tensors of theirs that make up the task vectors.

    Attributes:
        items: one for each tensor that counts, by the base's name for it.
        twins: a tensor of the base that is another one's double -> the one that counts.
        deltas: whether the models are differences from the base already (adapters).
        sums: their Gram matrix where it is known otherwise (adapters); unweighted.
        adapters: the models as low-rank factors, if all are.
        folder: the base's folder, for its config.json and tokenizer.
        varying: `lambda`, `alpha` and `density` as the recipe has them.
        dtype: the recipe's output dtype.
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
    twins: Mapping[str, str] = field(default_factory=dict)
    deltas: bool = False
    sums: GramSums | None = None
    adapters: Sequence[Adapter] = ()
    folder: Path | None = None
    varying: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    changed: Sequence[str] = ()
    _prints: list[str] = field(default_factory=list)

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
        if self.deltas:  # which are read as float32
            adapters = (source for source in self.sources if isinstance(source, AdapterDelta))
            found = set().union(*(adapter.dtypes for adapter in adapters))
        widest = functools.reduce(torch.promote_types, found or {torch.float32})
        return widest if widest in (torch.bfloat16, torch.float16) else torch.float32

    @property
    def fingerprints(self) -> dict[str, str]:
        """Model -> fingerprint, the base's first."""
        names = (self.base_model, *self.models)
        return dict(zip(names, self._fingerprints(), strict=True))

    @property
    def base_fingerprint(self) -> str:
        """The base's; a state dict may go by the same name as a task."""
        return self._fingerprints()[0]

    def _fingerprints(self) -> list[str]:
        if not self._prints:
            self._prints = [weights.fingerprint() for weights in (self.base, *self.sources)]
        return self._prints

    @property
    def in_memory(self) -> bool:
        """Whether a state dict is among them, of which nothing tells that it has changed."""
        return not all(source.stamp() for source in (self.base, *self.sources))

    @property
    def key(self) -> dict[str, object]:
        """What G depends on, for its cache."""
        return {
            "fingerprints": self._fingerprints(),
            "stamps": [source.stamp() for source in (self.base, *self.sources)],
            "items": [[item.name, list(item.shape)] for item in self.items],
            "changed": list(self.changed),
        }


@dataclass(frozen=True)
class Matched:
    """The parts of `Inputs` that follow from the tensors' names."""

    items: list[Item]
    left_out: dict[str, str]
    twins: dict[str, str]


def match(
    base: Weights, sources: Sequence[Weights], tasks: Sequence[str], settings: Settings
) -> Matched:
    """The tensors that take part, of models that name them as the base does.

    Every floating-point tensor takes part that all have, unless `exclude` matches it. A tensor
    under two names counts once.

    Raises:
        UserError: shapes differ, a tensor is quantized, or nothing is left.
    """
    items: list[Item] = []
    left_out: dict[str, str] = {}
    twins: dict[str, str] = {}
    counted: dict[tuple[str, ...], str] = {}
    for name, info in base.tensors.items():
        if settings.excludes(name):
            left_out[name] = "excluded by the recipe"
            continue
        missing = [
            task for task, source in zip(tasks, sources, strict=True) if name not in source.tensors
        ]
        if missing:
            left_out[name] = f"missing in {', '.join(missing)}"
            continue
        for who, source in zip(("the base", *tasks), (base, *sources), strict=True):
            found = source.tensors[name]
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
        place = tuple(source.canonical(name) for source in (base, *sources))
        if place in counted:
            left_out[name] = f"the same tensor as {counted[place]}: counted once"
            twins[name] = counted[place]
            continue
        counted[place] = name
        parts = tuple(Part.of(source, name) for source in sources)
        items.append(Item(name, info.shape, Part.of(base, name), parts))
    if not items:
        raise UserError(
            "no tensor takes part: every floating-point tensor is excluded or missing in a model"
        )
    return Matched(items, left_out, twins)
