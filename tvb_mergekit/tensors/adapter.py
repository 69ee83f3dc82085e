"""PEFT's LoRA adapters as sources: folders of factors, read as differences from the base.

An adapter adds s B A to each target matrix, as PEFT's `merge_and_unload` does. PEFT itself is not
needed: https://huggingface.co/docs/peft/developer_guides/checkpoint describes what it writes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.gram import AT_ONCE, Factors, damage
from tvb_mergekit.errors import UserError
from tvb_mergekit.names import IN_OUT, TRANSPOSED, tied_uses
from tvb_mergekit.tensors.checkpoint import Checkpoint, equal, tie
from tvb_mergekit.tensors.stream import Part, Weights

CONFIG = "adapter_config.json"
WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
GATHER = "a sharded training (ZeRO-3, FSDP) must gather the weights before it saves them"
MERGE_FIRST = "merge it with PEFT: merge_and_unload(), save_pretrained(FOLDER), and list FOLDER"

PREFIX = "base_model.model."
_SCALES = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
# module, A or B of a linear layer or of an embedding; the adapter's name in between is dropped.
_KEY = re.compile(r"(.+)\.(?:lora_([AB])(?:\.[^.]+)?\.weight|lora_embedding_([AB])(?:\.[^.]+)?)")
# Setting -> its values under which the update is s B A and dense tensors, and nothing more.
_MORE = (
    "use_dora use_qalora use_bdlora lora_bias layer_replication trainable_token_indices "
    "alora_invocation_tokens arrow_config kasa_config monteclora_config"
)
_PLAIN: dict[str, tuple[object, ...]] = dict.fromkeys(_MORE.split(), ()) | {
    "peft_type": ("lora",),
    "bias": ("none",),
    # All others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, MiCA) change the base when PEFT loads them.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_SAVED = re.compile(r"\.modules_to_save(\.default)?(?=\.)|\.base_layer(?=\.)")


def key_of(module: str, half: str, embedding: bool) -> str:
    """PEFT's key of lora_A or lora_B of a module."""
    kind = f"lora_embedding_{half}" if embedding else f"lora_{half}.weight"
    return f"{PREFIX}{module}.{kind}"


class Adapter(Weights):
    """The model X+ADAPTER as its difference from theta_0: X - theta_0 + s B A.

    Attributes:
        file: what the factors were read from.
        base, under: theta_0 and X, which is the same object if the base itself was adapted.
        factors: of each matrix of a targeted tensor, by X's name; as X stores it, with the scale.
            Those of experts may be under names that X's files lack: see `loose`.
        dense: tensors that were trained completely (`modules_to_save`) -> their keys.
        targets: matrix -> its module as PEFT names it, whether it is stored as [in, out] (Conv1D,
            embeddings), and whether it is of an embedding.
        config: adapter_config.json.
        claimed: loose names that a merge has found a tensor for.
    """

    base: Weights
    under: Weights
    holds = "delta"

    def __init__(
        self,
        path: str | os.PathLike[str],
        base: Weights,
        under: Checkpoint | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Read the adapter in folder `path` of the model `under`, by default the base itself.

        If `path` is the file of its weights, `config` is its adapter_config.json. More than s B A
        and dense tensors (DoRA, trained biases, ...) is refused.
        """
        self.path, self.base, self.under = Path(path), base, under or base
        self.config = config or self._read_config()
        shapes = [{n: i.shape for n, i in m.tensors.items()} for m in (self.under, base)]
        if shapes[0] != shapes[1]:
            raise self._not_plain(f"{self.under.folder} has other tensors than the base")
        names = [name for name in (WEIGHTS, PICKLED) if (self.path / name).is_file()]
        if not (names or config):
            raise self._error(f"has no {WEIGHTS} or {PICKLED}; download it again")
        self.file = Checkpoint.open(self.path if config else self.path / names[0])
        self.files = self.file, self.under
        self.factors: dict[str, tuple[Factors, ...]] = {}
        self.dense: dict[str, str] = {}
        self.targets: dict[str, tuple[str, bool, bool]] = {}
        self.claimed: set[str] = set()
        halves: dict[tuple[str, bool], dict[str, str]] = {}  # (module, embedding) -> half -> key
        for key in sorted(self.file.tensors):
            name = key.removeprefix(PREFIX)
            match = _KEY.fullmatch(name)
            if match is None:
                self._add_dense(key, name)
            else:
                pair = halves.setdefault((match[1], match[3] is not None), {})
                if pair.setdefault(match[2] or match[3], key) != key:
                    raise self._error(f"holds several adapters (`{key}`); store them one by one")
        stacked: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by module, the inner ones first
        for (module, embedding), pair in sorted(halves.items(), reverse=True):
            down, up = (self._half(pair, half) for half in "AB")
            owner = module.replace(".base_layer", "")
            if self._parameters(owner) and f"{owner}.weight" not in self.under.tensors:
                stacked.setdefault(owner, []).append((down, up))
            else:
                self._add(module, embedding, down, up)
        for owner, pairs in stacked.items():
            self._add_stacked(owner, pairs)
        if self.config.get("ensure_weight_tying") and tied_uses(self.changed):
            raise self._not_plain("changes both uses of tied embeddings (`ensure_weight_tying`)")
        if any(name.endswith("shared.weight") for name in self.changed):
            raise self._not_plain("targets `shared`, the embeddings of encoder and decoder")
        self.name_tensors()

    def name_tensors(self) -> None:
        """Take X's names of tensors, also those that X has got since; see `checkpoint.tie`."""
        self.folder, self.tensors = self.under.folder, {}
        for name, info in self.under.tensors.items():
            alias = None if self.changed & {name, info.alias_of} else info.alias_of
            self.tensors[name] = replace(info, dtype=torch.float32, alias_of=alias)

    @property
    def changed(self) -> set[str]:  # type: ignore[override]
        """The tensors that it changes. PEFT changes one of two tied uses."""
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
        for name in sorted(self.loose - self.claimed)[:1]:
            raise self._wrong_base(f"`{name}` fits no tensor of the base")

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
            theta, base = weights.elements(own, start, stop), self.base.elements(name, start, stop)
            torch.sub(theta.float(), base.float(), out=chunk)
        if key is not None:
            return chunk
        origin = 0  # of a matrix
        for each in self.factors.get(name, ()):
            rows, columns = each.shape
            first, last = max(start - origin, 0), min(stop - origin, rows * columns)
            size = max(1, AT_ONCE // columns) * columns  # of the rows that are made at once
            for place in range(first - first % size, last, size) if first < last else ():
                low, high = max(first, place), min(last, place + size)
                made = each.left[place // columns : (place + size) // columns] @ each.right
                mine = chunk[origin + low - start : origin + high - start]
                mine += made.view(-1)[low - place : high - place]
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

    def fingerprint(self) -> str:
        """64 hexadecimal digits from the weights and the scales."""
        scales = json.dumps({key: self.config.get(key) for key in _SCALES}, sort_keys=True)
        own = "" if self.under is self.base else f"|{self.under.fingerprint()}"
        text = f"{self.file.fingerprint()}|{scales}{own}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _read_config(self) -> dict[str, Any]:
        file = self.path / CONFIG
        if not file.is_file():
            raise self._error(f"has no {CONFIG}; name the folder of a PEFT adapter")
        try:
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            given = {key: value for key, value in config.items() if key in _PLAIN and value}
            given.setdefault("peft_type", "not named")
        except (ValueError, AttributeError) as error:
            raise self._error(f"{CONFIG} cannot be read ({error}); download it again") from error
        for key, value in given.items():
            if (value.lower() if isinstance(value, str) else value) not in _PLAIN[key]:
                raise self._not_plain(f"has `{key}: {value}`, and so not only factors")
        return config

    def _add_dense(self, key: str, name: str) -> None:
        """A tensor that replaces X's: of `modules_to_save`, or PEFT's copy of the embeddings."""
        if "lora_" in name:
            raise self._not_plain(f"uses DoRA or biases (`{key}`)")
        name = self._found(_SAVED.sub("", name), key)
        self._check_shape(key, self.file.tensors[key].shape, name)
        if equal(Part.of(self.file, key), Part.of(self.under, name)):
            return
        if ".base_layer." in key:
            raise self._not_plain(f"changes the weight that it adapts (`{key}`)")
        self.dense[name] = key

    def _add(self, module: str, embedding: bool, down: Tensor, up: Tensor) -> None:
        """The factors of one matrix."""
        name = f"{module}.weight"
        if ".experts." not in module or name in self.under.tensors:
            name = self._found(name, module)
        if name in self.factors:
            raise self._not_plain(f"targets `{name}` under two names")
        known = name in self.under.tensors
        transposed = embedding or (known and self._is_conv1d(name, down, up))
        left, right = (down.T, up.T) if transposed else (up, down)
        self._check_shape(module, (left.shape[0], right.shape[1]), name)
        left = left * self._scale(module, down.shape[0], up.shape[1])
        self.factors[name] = (Factors(left.contiguous(), right.contiguous()),)
        self.targets[name] = module, transposed, embedding

    def _parameters(self, owner: str) -> list[str]:
        """The stacked parameters of a module that `target_parameters` names, the inner first.

        PEFT wraps them in the order of their definition: `gate_up_proj`, then `down_proj`.
        """
        parts = (each.rpartition(".") for each in self.config.get("target_parameters") or ())
        found = {name for path, _, name in parts if f".{owner}".endswith(f".{path}")}
        return sorted(found, reverse=True)

    def _add_stacked(self, owner: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """The factors of experts in one tensor, [r experts, in] and [out, r experts]."""
        names = [f"{owner}.{name}" for name in self._parameters(owner)]
        if len(names) != len(pairs):
            raise self._not_plain(f"stores {len(pairs)} of the parameters {names} of `{owner}`")
        for name, (down, up) in zip(names, pairs, strict=True):
            rank = self._setting(name, "r", "rank_pattern")
            experts = max(1, len(down) // rank)
            scale = self._scale(name, len(down) / experts, up.shape[1] / experts)
            # PEFT's lora_A is "(e r) i" and lora_B is "o (r e)".
            right = down.reshape(experts, rank, -1)
            left = scale * up.reshape(len(up), rank, experts).permute(2, 0, 1)
            if self.under.model_type in IN_OUT:
                left, right = right.mT, left.mT
            halves = zip(left.contiguous(), right.contiguous(), strict=True)
            self.factors[name] = tuple(Factors(*both) for both in halves)
            self._check_shape(name, (experts, left.shape[1], right.shape[2]), name)

    def _found(self, name: str, key: str) -> str:
        """X's name of a tensor. Models saved without their head lack the first part: `h.0` is
        PEFT's `transformer.h.0`."""
        if name not in self.under.tensors and tied_uses([name]):  # X stores the other use
            tie([self.under, self.base], [name])
        for each in (name, name.partition(".")[2]):
            if each in self.under.tensors:
                return each
        raise self._wrong_base(f"`{key}` fits no tensor of the base")

    def _half(self, pair: Mapping[str, str], half: str) -> Tensor:
        if (key := pair.get(half)) is None:
            present = f"`{min(pair.values())}` but not its other half"
            raise self._error(f"holds {present}, lora_{half}; save it again")
        stored = self.file.tensor(key)
        if stored.ndim != 2 or not stored.numel() or not stored.is_floating_point():
            told = f"`{key}` is {list(stored.shape)} {stored.dtype}, expected a matrix of floats"
            raise self._error(f"{told}; {GATHER}. If it is of a convolution, {MERGE_FIRST}")
        value = stored.float()
        if told := damage(value):
            raise self._error(f"`{key}` {told}")
        return value

    def _is_conv1d(self, name: str, down: Tensor, up: Tensor) -> bool:
        """Whether the base stores this tensor as GPT-2's Conv1D (transposed), not as a Linear."""
        rows, columns = up.shape[0], down.shape[1]
        if rows != columns:
            return self.under.tensors[name].shape == (columns, rows)
        # A square matrix fits both. PEFT sets the flag to the kind of the last layer that it wraps.
        pattern = TRANSPOSED.get(self.under.model_type or "")
        flag = bool(self.config.get("fan_in_fan_out"))
        return flag if pattern is None else re.search(pattern, name) is not None

    def _setting(self, module: str, key: str, table: str) -> Any:
        """A value of the configuration, with the patterns as PEFT matches them."""
        for pattern, value in (self.config.get(table) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return self.config.get(key, 8)

    def _scale(self, module: str, down_rank: float, up_rank: float) -> float:
        """lora_alpha / r, or / sqrt(r)."""
        rank = self._setting(module, "r", "rank_pattern")
        if not down_rank == up_rank == rank:
            raise self._error(
                f"`{module}` has lora_A of rank {down_rank:g} and lora_B of rank {up_rank:g}, "
                f"expected {rank} from {CONFIG}; take the two files of one training run"
            )
        alpha = self._setting(module, "lora_alpha", "alpha_pattern")
        if not isinstance(alpha, (int, float)):
            raise self._error(f"`lora_alpha` of `{module}` is {alpha!r}, expected a number")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _check_shape(self, name: str, shape: tuple[int, ...], of: str) -> None:
        if (known := self.under.tensors.get(of)) and known.shape != shape:
            raise self._wrong_base(f"`{name}` is {[*shape]}, in the base {[*known.shape]}")

    def _wrong_base(self, text: str) -> UserError:
        trained_on = self.config.get("base_model_name_or_path") or "not recorded"
        told = f"{text}; take the base that it was trained on ({trained_on}), or {MERGE_FIRST}"
        return self._error(told)

    def _not_plain(self, text: str) -> UserError:
        return self._error(f"{text}; {MERGE_FIRST}")

    def _error(self, text: str) -> UserError:
        return UserError(f"adapter {self.path}: {text}")
