"""PEFT's LoRA adapters as sources: folders of factors, read as dense updates.

An adapter adds s B A to each target module, as PEFT's `merge_and_unload` does. PEFT itself is not
needed: https://huggingface.co/docs/peft/developer_guides/checkpoint describes the formats.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tvb_mergekit.core.gram import PIECE, count_not_finite
from tvb_mergekit.core.lora import Factors
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import Checkpoint, stamp_of
from tvb_mergekit.tensors.source import TensorInfo, Weights

CONFIG = "adapter_config.json"
WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
FUSE_INSTEAD = "list it as BASE+ADAPTER with --lora-merge-cache DIR, which fuses it first"

PREFIX = "base_model.model."
# module, A or B of a linear layer or of an embedding; the adapter's name in between is dropped.
_KEY = re.compile(r"(.+)\.(?:lora_([AB])(?:\.[^.]+)?\.weight|lora_embedding_([AB])(?:\.[^.]+)?)")
# Settings under which the update is not s B A, or not only that.
_NOT_PLAIN = (
    "use_dora use_qalora use_bdlora lora_bias layer_replication target_parameters "
    "trainable_token_indices alora_invocation_tokens arrow_config kasa_config monteclora_config"
).split()
# All others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, MiCA) change the base when PEFT loads them.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")

# Architectures with an output layer over tokens, and the names of the two uses of tied embeddings
_SPEAKING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_INPUT = re.compile(r"\b(embed_tokens|embed_in|wte|word_embeddings|shared)\.")
_OUTPUT = re.compile(r"\b(lm_head|embed_out)\.")


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


class NotPlainLora(UserError):
    """An adapter whose update is more than s B A; fusing it into the base first does work."""


@dataclass(eq=False)
class Adapter(Weights):
    """A PEFT LoRA adapter as a source: the update of a tensor is multiplied out when it is read.

    Attributes:
        file: what the factors were read from.
        factors: of each targeted tensor, by the base's name; as the base stores it, with the scale.
        tensors: what can be read, float32; those without factors are zeros.
        targets: of each tensor with factors.
        config: adapter_config.json.
    """

    file: Checkpoint
    factors: dict[str, Factors]
    tensors: dict[str, TensorInfo]
    targets: dict[str, Target]
    config: dict[str, Any]

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        base: Mapping[str, TensorInfo],
        label: str = "",
        *,
        read: Callable[[str], Tensor] | None = None,
    ) -> Adapter:
        """The adapter in folder `path`, with the tensors of the base that it targets.

        Args:
            base: the tensors of the base model.
            label: the task's name, for messages.
            read: gives a tensor of the base. PEFT stores copies of the embeddings in adapters that
                target them; with `read` they are compared with the base, and without they count
                as changed.

        Raises:
            NotPlainLora: it is whole, but is more than s B A (DoRA, trained biases, ...).
            UserError: it is not readable, damaged, or not of this base.
        """
        adapter = _Reader(Path(path), base, label, read).adapter()
        return adapter.over({name: base[name] for name in adapter.factors})

    def over(self, tensors: Mapping[str, TensorInfo]) -> Adapter:
        """This adapter over these tensors of the base, with zeros if it has no factors."""
        shard = self.file.shards[0]
        infos = {
            name: TensorInfo(info.shape, torch.float32, shard, info.alias_of)
            for name, info in tensors.items()
        }
        factors = {name: both for name, both in self.factors.items() if name in tensors}
        return replace(self, factors=factors, tensors=infos)

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements `start` to `stop` of the flattened update, as a view of `out`; thread-safe.

        The rows of a product do not depend on the chunk, and so neither does an element.
        """
        factors = self.factors.get(self.canonical(name))
        chunk = out[: stop - start]
        if factors is None or start == stop:
            return chunk.zero_()
        columns = factors.shape[1]
        step = max(1, PIECE // columns)
        for top in range(start // columns // step * step, -(-stop // columns), step):
            rows = (factors.left[top : top + step] @ factors.right).view(-1)
            place = top * columns
            first, last = max(start, place), min(stop, place + len(rows))
            chunk[first - start : last - start] = rows[first - place : last - place]
        return chunk

    def fingerprint(self) -> str:
        """64 hexadecimal digits from the names, shapes and all factors, scales folded in."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(f"{name}|{self.tensors[name].shape}|".encode())
            if factors := self.factors.get(self.canonical(name)):
                for half in (factors.left, factors.right):
                    digest.update(f"{tuple(half.shape)}|".encode())
                    digest.update(half.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def stamp(self) -> list[list[int | str]]:
        """The stamps of the weights, and of the config, which holds the scale."""
        return stamp_of(self.file.folder, (*self.file.shards, CONFIG))

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {info.dtype for info in self.file.tensors.values()}

    @property
    def nbytes(self) -> int:
        return self.file.nbytes


@dataclass
class _Reader:
    """One reading of an adapter's folder; the fields are the arguments of `Adapter.open`."""

    folder: Path
    base: Mapping[str, TensorInfo]
    label: str
    read: Callable[[str], Tensor] | None
    config: dict[str, Any] = field(default_factory=dict)

    def adapter(self) -> Adapter:
        self.config = self._read_config()
        names = [name for name in (WEIGHTS, PICKLED) if (self.folder / name).is_file()]
        if not names:
            raise self._error(f"has no {WEIGHTS} or {PICKLED}; download it again")
        file = Checkpoint.open(self.folder / names[0])
        halves: dict[tuple[str, bool], dict[str, str]] = {}  # (module, embedding) -> half -> key
        for key in sorted(file.tensors):
            name = key.removeprefix(PREFIX)
            match = _KEY.fullmatch(name)
            if match is None:
                self._check_copy(key, name, file)
                continue
            pair = halves.setdefault((match[1], match[3] is not None), {})
            if pair.setdefault(match[2] or match[3], key) != key:
                raise self._error(f"holds several adapters (`{key}`); store them one by one")
        adapter = Adapter(file, {}, {}, {}, self.config)
        for (module, embedding), pair in halves.items():
            name = self._base_name(module)
            if name in adapter.factors:
                raise self._not_plain(f"targets `{name}` under two names")
            down, up = (self._half(pair, half, file) for half in "AB")
            transposed = embedding or self._is_conv1d(name, module, down, up)
            left, right = (down.T, up.T) if transposed else (up, down)
            found, wanted = [left.shape[0], right.shape[1]], list(self.base[name].shape)
            if found != wanted:
                raise self._wrong_base(f"`{module}` is {found}, in the base {wanted}")
            left = (left * self._scale(module, down.shape[0], up.shape[1])).contiguous()
            adapter.factors[name] = Factors(left, right.contiguous())
            adapter.targets[name] = Target(module, transposed, embedding)
        if not adapter.factors:
            raise self._error("holds no LoRA factors; save it again")
        return adapter

    def _read_config(self) -> dict[str, Any]:
        file = self.folder / CONFIG
        if not file.is_file():
            raise self._error(f"has no {CONFIG}; name the folder of a PEFT adapter")
        try:
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            kind = config.get("peft_type")
        except (ValueError, AttributeError) as error:
            raise self._error(f"{CONFIG} cannot be read ({error}); download it again") from error
        if kind != "LORA":
            raise self._not_plain(f"is of type {kind}, expected LORA")
        for setting in _NOT_PLAIN:
            if config.get(setting):
                raise self._not_plain(f"uses `{setting}`")
        start = config.get("init_lora_weights")
        if (start.lower() if isinstance(start, str) else start) not in _PLAIN_STARTS:
            raise self._not_plain(f"changes the base (`init_lora_weights: {start}`)")
        return config

    def _check_copy(self, key: str, name: str, file: Checkpoint) -> None:
        """Raise UserError if a stored tensor is not a factor and not a copy of the base's."""
        if "lora_magnitude_vector" in name:
            raise self._not_plain(f"uses DoRA (`{key}`)")
        original = name.replace(".base_layer.", ".")
        info = self.base.get(original)
        if info is not None and info.shape == file.tensors[key].shape and self.read is not None:
            both = (file.tensor(key), self.read(original))
            pairs = zip(*(tensor.reshape(-1).split(PIECE) for tensor in both), strict=True)
            if all(torch.equal(mine.float(), theirs.float()) for mine, theirs in pairs):
                return
        raise self._not_plain(f"stores more than factors (`{key}`: modules or biases trained)")

    def _base_name(self, module: str) -> str:
        # Models saved without their head lack the first part: `h.0` is PEFT's `transformer.h.0`.
        for name in (f"{module}.weight", f"{module.partition('.')[2]}.weight"):
            if name in self.base:
                return self.base[name].alias_of or name
        if module.rpartition(".")[2] in ("lm_head", "embed_out"):
            raise self._not_plain(f"targets `{module}`, which this base ties to its embedding")
        raise self._wrong_base(f"`{module}` is targeted, the base has no such tensor")

    def _half(self, pair: Mapping[str, str], half: str, file: Checkpoint) -> Tensor:
        if half not in pair:
            (present,) = pair.values()
            raise self._error(
                f"holds `{present}` but not its other half, lora_{half}; save it again"
            )
        key = pair[half]
        stored = file.tensor(key)
        if stored.ndim > 2:
            raise self._not_plain(f"targets a convolution (`{key}` is {list(stored.shape)})")
        if stored.ndim < 2 or not stored.numel() or not stored.is_floating_point():
            raise self._error(
                f"`{key}` is {list(stored.shape)} {stored.dtype}, expected a matrix of floats; a "
                "sharded training (ZeRO-3, FSDP) must gather the weights before it saves them"
            )
        value = stored.to(torch.float32, copy=True)  # nothing stays mapped
        nan, inf = count_not_finite(value)
        if nan or inf:
            raise self._error(
                f"`{key}` holds {nan:,} NaN and {inf:,} infinite values of {value.numel():,}; it "
                "is damaged or its training diverged: take another"
            )
        return value

    def _is_conv1d(self, name: str, module: str, down: Tensor, up: Tensor) -> bool:
        """Whether the base stores this tensor as GPT-2's Conv1D (transposed), not as a Linear."""
        rows, columns = up.shape[0], down.shape[1]
        if rows != columns:
            return self.base[name].shape == (columns, rows)
        # A square matrix fits both. Conv1D has biases, and a model has one of the two kinds;
        # `fan_in_fan_out` is the kind of the last layer that PEFT wrapped.
        if name.removesuffix("weight") + "bias" not in self.base:
            return False
        kinds = kinds_of_biased(self.base)
        if len(kinds) > 1:
            raise self._not_plain(f"targets `{module}`, square in a model of Linear and Conv1D")
        return kinds == {True} if kinds else bool(self.config.get("fan_in_fan_out"))

    def _scale(self, module: str, down_rank: int, up_rank: int) -> float:
        """lora_alpha / r, or / sqrt(r), with the patterns as PEFT matches them."""

        def setting(key: str, table: str) -> Any:
            for pattern, value in (self.config.get(table) or {}).items():
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            return self.config.get(key, 8)

        try:
            rank = setting("r", "rank_pattern")
            alpha = float(setting("lora_alpha", "alpha_pattern"))
        except (TypeError, ValueError, AttributeError, re.error) as error:
            raise self._error(
                f"{CONFIG}: rank and alpha of `{module}`: {error}; mend it"
            ) from error
        if not down_rank == up_rank == rank:
            raise self._error(
                f"`{module}` has lora_A of rank {down_rank} and lora_B of rank {up_rank}, expected "
                f"{rank} from {CONFIG}; take the two files of one training run"
            )
        if not math.isfinite(alpha):
            raise self._error(f"{CONFIG}: lora_alpha of `{module}` is {alpha}; expected a number")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _wrong_base(self, text: str) -> UserError:
        trained_on = self.config.get("base_model_name_or_path") or "not recorded"
        return self._error(f"{text}; take the base that it was trained on ({trained_on})")

    def _not_plain(self, text: str) -> UserError:
        return self._error(f"{text}; {FUSE_INSTEAD}", NotPlainLora)

    def _error(self, text: str, kind: type[UserError] = UserError) -> UserError:
        who = f" (task `{self.label}`)" if self.label else ""
        return kind(f"adapter {self.folder}{who}: {text}")


def check_embeddings(base: Checkpoint, adapter: Path) -> None:
    """Raise UserError if an adapter changes embeddings that the base uses as its output layer too.

    PEFT trains one of the two uses, unless it is asked to tie them, and fuses into both.
    """
    file = base.folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    speaks = any(name.endswith(_SPEAKING) for name in config.get("architectures") or ())
    tied = config.get("tie_word_embeddings", not any(map(_OUTPUT.search, base.tensors)))
    files = [adapter / name for name in (WEIGHTS, PICKLED) if (adapter / name).is_file()]
    keys = [key for each in files for key in Checkpoint.open(each).tensors if "lora_" in key]
    found = [key for key in keys if _INPUT.search(key) or _OUTPUT.search(key)]
    if speaks and tied and found:
        raise UserError(
            f"adapter {adapter}: `{found[0]}` changes the embeddings, which the base uses as its "
            "output layer too, and PEFT's fusion would apply it to both uses. Save the base with "
            "`tie_word_embeddings: false` and an output layer that is a copy of the embeddings"
        )


def kinds_of_biased(base: Mapping[str, TensorInfo]) -> set[bool]:
    """Whether non-square matrices with a bias, which is as long as the output, are Conv1D."""
    kinds = set()
    for name, info in base.items():
        bias = base.get(name.removesuffix("weight") + "bias")
        if name.endswith(".weight") and bias is not None and len(info.shape) == 2:
            rows, columns = info.shape
            if rows != columns and bias.shape in ((rows,), (columns,)):
                kinds.add(bias.shape != (rows,))
    return kinds
