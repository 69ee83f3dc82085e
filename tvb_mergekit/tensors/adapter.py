"""PEFT's LoRA adapters as sources: folders of factors, read as differences from the base.

An adapter adds s B A to each target matrix, as PEFT's `merge_and_unload` does. PEFT itself is not
needed: `peft_files` reads what it writes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tvb_mergekit.core.gram import AT_ONCE, Factors
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.stream import Holds, Weights

CONFIG = "adapter_config.json"
WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"

PREFIX = "base_model.model."
_SCALES = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")


class Target(NamedTuple):
    """A matrix as PEFT names it.

    Attributes:
        transposed: It is stored as [in, out], as that of a Conv1D or an embedding.
    """

    module: str
    transposed: bool
    embedding: bool

    def key(self, half: str) -> str:
        """The key of lora_A or lora_B."""
        kind = f"lora_embedding_{half}" if self.embedding else f"lora_{half}.weight"
        return f"{PREFIX}{self.module}.{kind}"


@dataclass(eq=False)
class Adapter(Weights):
    """The model X+ADAPTER as its difference from theta_0: X - theta_0 + s B A.

    Attributes:
        file: what the factors were read from.
        base, under: theta_0 and X, which is the same object if the base itself was adapted.
        factors: of each matrix of a targeted tensor, by X's name; as X stores it, with the scale.
            Those of experts may be under names that X's files lack: see `loose`.
        dense: tensors that were trained completely (`modules_to_save`) -> their keys.
        targets: of each tensor with factors.
        config: adapter_config.json.
        claimed: loose names that a merge has found a tensor for.
    """

    file: Checkpoint
    under: Weights
    base: Weights = field()
    config: dict[str, Any] = field()
    factors: dict[str, tuple[Factors, ...]] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    holds: Holds | None = "delta"
    claimed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.name_tensors()

    def name_tensors(self) -> None:
        """Take X's names of tensors, also those that X has got since; see `ties.tie`."""
        self.tensors = {
            name: replace(
                info,
                dtype=torch.float32,
                alias_of=None if self.changed & {name, info.alias_of} else info.alias_of,
            )
            for name, info in self.under.tensors.items()
        }
        self.shards, self.folder = self.under.shards, self.under.folder

    @property
    def changed(self) -> set[str]:
        """The tensors that it changes. Of two tied uses PEFT changes one."""
        return self.factors.keys() | self.dense.keys()

    @cached_property
    def loose(self) -> set[str]:
        """Names that X's files lack: of experts in another layout."""
        return self.factors.keys() - self.tensors.keys()

    @cached_property
    def shapes(self) -> frozenset[tuple[str, tuple[int, ...]]]:
        return frozenset((name, info.shape) for name, info in self.tensors.items())

    @cached_property
    def loose_shapes(self) -> frozenset[tuple[str, tuple[int, ...]]]:
        single = (name for name in self.loose if len(self.factors[name]) == 1)
        return frozenset((name, self.factors[name][0].shape) for name in single)

    def check_claimed(self) -> None:
        """Raise UserError if factors of experts fit no tensor of the base."""
        if lost := sorted(self.loose - self.claimed):
            raise UserError(
                f"adapter {self.file.folder}: `{lost[0]}` fits no tensor of the base; take the "
                f"base that it was trained on ({self.config.get('base_model_name_or_path')})"
            )

    def factors_of(self, name: str) -> tuple[Factors, ...] | None:
        if self.under is not self.base or name in self.dense:
            return None
        return self.factors.get(name, ())

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements `start` to `stop` of the flattened difference, as a view of `out`; thread-safe.

        The rows of a product do not depend on the chunk, and so neither does an element.
        """
        chunk = out[: stop - start]
        key = self.dense.get(name)
        if key is None and self.under is self.base:
            chunk.zero_()
        else:
            weights, own = (self.under, name) if key is None else (self.file, key)
            theta, base = _floats(weights, own, start, stop), _floats(self.base, name, start, stop)
            torch.sub(theta, base, out=chunk)
        if key is not None:
            return chunk
        origin = 0  # of a matrix
        for each in self.factors.get(name, ()):
            rows, columns = each.shape
            step = max(1, AT_ONCE // columns)
            first, last = max(start - origin, 0), min(stop - origin, rows * columns)
            for top in range(first // columns // step * step, -(-last // columns), step):
                place = top * columns
                values = (each.left[top : top + step] @ each.right).view(-1)
                low, high = max(first, place), min(last, place + len(values))
                if low < high:
                    mine = chunk[origin + low - start : origin + high - start]
                    mine += values[low - place : high - place]
            origin += rows * columns
        return chunk

    def change(self, name: str) -> Tensor:
        """The complete s B A of a tensor, also of a loose one; float32."""
        products = [each.left @ each.right for each in self.factors[name]]
        return products[0] if len(products) == 1 else torch.stack(products)

    def whole(self, name: str) -> Tensor:
        weight = self.under.tensor(name)
        if not weight.is_floating_point() or self.factors_of(name) == ():
            return weight
        return self.base.tensor(name).float() + self.tensor(name)

    def check_unchanged(self) -> None:
        for file in (self.file, self.under):
            file.check_unchanged()

    def fingerprint(self) -> str:
        """64 hexadecimal digits from the weights and the scales."""
        scales = json.dumps({key: self.config.get(key) for key in _SCALES}, sort_keys=True)
        own = "" if self.under is self.base else f"|{self.under.fingerprint()}"
        text = f"{self.file.fingerprint()}|{scales}{own}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {info.dtype for info in self.file.tensors.values()}

    @property
    def nbytes(self) -> int:
        return self.file.nbytes


def _floats(weights: Weights, name: str, start: int, stop: int) -> Tensor:
    buffer = torch.empty(stop - start, dtype=weights.tensors[name].dtype)
    return weights.read(name, start, stop, buffer).float()
