"""The folders that PEFT writes, read as `Adapter`s.

https://huggingface.co/docs/peft/developer_guides/checkpoint describes the formats.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.gram import AT_ONCE, Factors, count_not_finite
from tvb_mergekit.errors import UserError, one_line
from tvb_mergekit.names import has_experts_in_out, tied_uses
from tvb_mergekit.tensors.adapter import CONFIG, PICKLED, PREFIX, WEIGHTS, Adapter, Target
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.stream import TensorInfo, Weights
from tvb_mergekit.tensors.ties import tie

MERGE_FIRST = "merge it with PEFT: merge_and_unload(), save_pretrained(FOLDER), and list FOLDER"

# module, A or B of a linear layer or of an embedding; the adapter's name in between is dropped.
_KEY = re.compile(r"(.+)\.(?:lora_([AB])(?:\.[^.]+)?\.weight|lora_embedding_([AB])(?:\.[^.]+)?)")
# Settings under which the update is not s B A and dense tensors, or not only that.
_NOT_PLAIN = (
    "use_dora use_qalora use_bdlora lora_bias layer_replication trainable_token_indices "
    "alora_invocation_tokens arrow_config kasa_config monteclora_config"
).split()
# All others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, MiCA) change the base when PEFT loads them.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_SAVED = re.compile(r"\.modules_to_save(\.default)?(?=\.)|\.base_layer(?=\.)")


def open_adapter(
    path: str | os.PathLike[str],
    base: Weights,
    under: Checkpoint | None = None,
    label: str = "",
    config: dict[str, Any] | None = None,
) -> Adapter:
    """The adapter in folder `path` of the model `under`, by default the base itself.

    Args:
        label: the task's name, for messages.
        config: its adapter_config.json, if `path` is the file of its weights.

    Raises:
        UserError: it is not readable, damaged, not of this base, or more than s B A and dense
            tensors (DoRA, trained biases, ...).
    """
    return _Reader(Path(path), base, under or base, label, config or {}).adapter()


@dataclass
class _Reader:
    """One reading of an adapter's folder; the fields are the arguments of `open_adapter`."""

    folder: Path
    base: Weights
    under: Weights
    label: str
    config: dict[str, Any] = field(default_factory=dict)

    def adapter(self) -> Adapter:
        alone = bool(self.config)
        self.config = self.config or self._read_config()
        both = (self.under.tensors, self.base.tensors)
        one, other = ({name: info.shape for name, info in each.items()} for each in both)
        if one != other:
            said = f"{self.under.folder} has other tensors than the base {self.base.folder}"
            raise self._not_plain(said)
        names = [name for name in (WEIGHTS, PICKLED) if (self.folder / name).is_file()]
        if not (names or alone):
            raise self._error(f"has no {WEIGHTS} or {PICKLED}; download it again")
        file = Checkpoint.open(self.folder if alone else self.folder / names[0])
        made = Adapter(file, self.under, self.base, self.config)
        halves: dict[tuple[str, bool], dict[str, str]] = {}  # (module, embedding) -> half -> key
        for key in sorted(file.tensors):
            name = key.removeprefix(PREFIX)
            match = _KEY.fullmatch(name)
            if match is None:
                self._add_dense(made, key, name)
            else:
                pair = halves.setdefault((match[1], match[3] is not None), {})
                if pair.setdefault(match[2] or match[3], key) != key:
                    raise self._error(f"holds several adapters (`{key}`); store them one by one")
        stacked: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by module, the inner ones first
        for (module, embedding), pair in sorted(halves.items(), reverse=True):
            down, up = (self._half(pair, half, file) for half in "AB")
            owner = module.replace(".base_layer", "")
            if self._parameters(owner) and f"{owner}.weight" not in self.under.tensors:
                stacked.setdefault(owner, []).append((down, up))
            else:
                self._add(made, module, embedding, down, up)
        for owner, pairs in stacked.items():
            self._add_stacked(made, owner, pairs)
        if not made.factors:
            raise self._error("holds no LoRA factors; save it again")
        if self.config.get("ensure_weight_tying") and tied_uses(made.changed):
            raise self._not_plain("changes both uses of tied embeddings (`ensure_weight_tying`)")
        made.name_tensors()
        return made

    def _read_config(self) -> dict[str, Any]:
        file = self.folder / CONFIG
        if not file.is_file():
            raise self._error(f"has no {CONFIG}; name the folder of a PEFT adapter")
        try:
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            kind, start = config.get("peft_type"), config.get("init_lora_weights")
        except (ValueError, AttributeError) as error:
            raise self._error(f"{CONFIG} cannot be read ({error}); download it again") from error
        if kind != "LORA":
            raise self._not_plain(f"is of type {kind}, expected LORA")
        if config.get("bias") not in (None, "none"):
            raise self._not_plain(f"has trained biases (`bias: {config['bias']}`)")
        if used := [setting for setting in _NOT_PLAIN if config.get(setting)]:
            raise self._not_plain(f"uses `{used[0]}`")
        if (start.lower() if isinstance(start, str) else start) not in _PLAIN_STARTS:
            raise self._not_plain(f"changes the base (`init_lora_weights: {start}`)")
        return config

    def _add_dense(self, made: Adapter, key: str, name: str) -> None:
        """A tensor that replaces X's: of `modules_to_save`, or PEFT's copy of the embeddings."""
        if "lora_" in name:
            raise self._not_plain(f"uses DoRA or biases (`{key}`)")
        name = self._found(_SAVED.sub("", name), key)
        self._check_shape(key, made.file.tensors[key].shape, self.under.tensors[name])
        both = made.file.tensor(key), self.under.tensor(name)
        pairs = zip(*(each.reshape(-1).split(AT_ONCE) for each in both), strict=True)
        if all(torch.equal(one.float(), other.float()) for one, other in pairs):
            return
        if ".base_layer." in key:
            raise self._not_plain(f"changes the weight that it adapts (`{key}`)")
        made.dense[name] = key

    def _add(self, made: Adapter, module: str, embedding: bool, down: Tensor, up: Tensor) -> None:
        """The factors of one matrix."""
        name = f"{module}.weight"
        if ".experts." not in module or name in self.under.tensors:
            name = self._found(name, module)
        if name in made.factors:
            raise self._not_plain(f"targets `{name}` under two names")
        known = self.under.tensors.get(name)
        transposed = embedding or (known is not None and self._is_conv1d(name, module, down, up))
        left, right = (down.T, up.T) if transposed else (up, down)
        self._check_shape(module, (left.shape[0], right.shape[1]), known)
        left = left * self._scale(module, down.shape[0], up.shape[1])
        made.factors[name] = (Factors(left.contiguous(), right.contiguous()),)
        made.targets[name] = Target(module, transposed, embedding)

    def _parameters(self, owner: str) -> list[str]:
        """The stacked parameters of a module that `target_parameters` names, the inner first.

        PEFT wraps them in the order of their definition, in which `gate_up_proj` is before
        `down_proj`.
        """
        parts = (each.rpartition(".") for each in self.config.get("target_parameters") or ())
        found = {name for path, _, name in parts if f".{owner}".endswith(f".{path}")}
        return sorted(found, reverse=True)

    def _add_stacked(self, made: Adapter, owner: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
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
            if has_experts_in_out(self.under.model_type):
                left, right = right.mT, left.mT
            halves = zip(left.contiguous(), right.contiguous(), strict=True)
            made.factors[name] = tuple(Factors(*both) for both in halves)
            shape = (experts, left.shape[1], right.shape[2])
            self._check_shape(name, shape, self.under.tensors.get(name))

    def _found(self, name: str, key: str) -> str:
        """X's name of a tensor. Models saved without their head lack the first part: `h.0` is
        PEFT's `transformer.h.0`."""
        if name not in self.under.tensors and tied_uses([name]):  # X stores the other use
            tie([self.under, self.base], [name])
        for each in (name, name.partition(".")[2]):
            if each in self.under.tensors:
                return each
        raise self._wrong_base(f"`{key}` fits no tensor of the base")

    def _half(self, pair: Mapping[str, str], half: str, file: Checkpoint) -> Tensor:
        if (key := pair.get(half)) is None:
            present = f"`{min(pair.values())}` but not its other half"
            raise self._error(f"holds {present}, lora_{half}; save it again")
        stored = file.tensor(key)
        if stored.ndim > 2:
            raise self._not_plain(f"targets a convolution (`{key}` is {list(stored.shape)})")
        if stored.ndim < 2 or not stored.numel() or not stored.is_floating_point():
            raise self._error(
                f"`{key}` is {list(stored.shape)} {stored.dtype}, expected a matrix of floats; a "
                "sharded training (ZeRO-3, FSDP) must gather the weights before it saves them"
            )
        value = stored.to(torch.float32, copy=True)  # nothing stays mapped
        if any(bad := count_not_finite(value)):
            raise self._error(
                f"`{key}` holds {bad[0]:,} NaN and {bad[1]:,} infinite values; it is damaged or "
                "its training diverged: take another"
            )
        return value

    def _is_conv1d(self, name: str, module: str, down: Tensor, up: Tensor) -> bool:
        """Whether the base stores this tensor as GPT-2's Conv1D (transposed), not as a Linear."""
        rows, columns = up.shape[0], down.shape[1]
        if rows != columns:
            return self.under.tensors[name].shape == (columns, rows)
        # A square matrix fits both. Conv1D has biases, and a model has one of the two kinds;
        # `fan_in_fan_out` is the kind of the last layer that PEFT wrapped.
        if name.removesuffix("weight") + "bias" not in self.under.tensors:
            return False
        kinds = _kinds_of_biased(self.under.tensors)
        if len(kinds) > 1:
            raise self._not_plain(f"targets `{module}`, square in a model of Linear and Conv1D")
        return kinds == {True} if kinds else bool(self.config.get("fan_in_fan_out"))

    def _setting(self, module: str, key: str, table: str) -> Any:
        """A value of the configuration, with the patterns as PEFT matches them."""
        for pattern, value in (self.config.get(table) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return self.config.get(key, 8)

    def _scale(self, module: str, down_rank: float, up_rank: float) -> float:
        """lora_alpha / r, or / sqrt(r)."""
        try:
            rank = self._setting(module, "r", "rank_pattern")
            alpha = float(self._setting(module, "lora_alpha", "alpha_pattern"))
            scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        except (TypeError, ValueError, ArithmeticError, AttributeError, re.error) as error:
            told = f"{CONFIG}: rank and alpha of `{module}`: {one_line(error)}; mend it"
            raise self._error(told) from error
        if not down_rank == up_rank == rank or not math.isfinite(scale):
            raise self._error(
                f"`{module}` has lora_A of rank {down_rank:g} and lora_B of rank {up_rank:g}, "
                f"expected {rank} from {CONFIG}; take the two files of one training run"
            )
        return scale

    def _check_shape(self, name: str, shape: tuple[int, ...], known: TensorInfo | None) -> None:
        if known is not None and known.shape != shape:
            raise self._wrong_base(f"`{name}` is {[*shape]}, in the base {[*known.shape]}")

    def _wrong_base(self, text: str) -> UserError:
        trained_on = self.config.get("base_model_name_or_path") or "not recorded"
        told = f"{text}; take the base that it was trained on ({trained_on}), or {MERGE_FIRST}"
        return self._error(told)

    def _not_plain(self, text: str) -> UserError:
        return self._error(f"{text}; {MERGE_FIRST}")

    def _error(self, text: str) -> UserError:
        who = f" (task `{self.label}`)" if self.label else ""
        return UserError(f"adapter {self.folder}{who}: {text}")


def _kinds_of_biased(base: Mapping[str, TensorInfo]) -> set[bool]:
    """Whether non-square matrices with a bias, which is as long as the output, are Conv1D."""
    kinds = set()
    for name, info in base.items():
        bias = base.get(name.removesuffix("weight") + "bias")
        if name.endswith(".weight") and bias is not None and len(info.shape) == 2:
            rows, columns = info.shape
            if rows != columns and bias.shape in ((rows,), (columns,)):
                kinds.add(bias.shape != (rows,))
    return kinds
