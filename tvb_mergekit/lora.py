"""LoRA adapters as task vectors: what they need is computed from the factors, never from d x d.

A fine-tune given as base and adapter has the task vector s B A in each target module. The inner
product of two of those is sum((B1^T B2) * (A1 A2^T)); a combination of adapters is again an
adapter, with the factors stacked, or truncated by QR and SVD to the rank that one wants.

The meaning of an adapter is what PEFT's `merge_and_unload` adds to the base. The file formats are
PEFT's (https://huggingface.co/docs/peft/developer_guides/checkpoint); PEFT itself is not needed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from tvb_mergekit.checkpoints import Checkpoint, TensorInfo
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import PIECE, GramSums, count_not_finite

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FUSE_INSTEAD = (
    "list it as BASE+ADAPTER with --lora-merge-cache DIR and without --adapters, "
    "which fuses it first"
)
MARKER = "tvb_basis"  # the key in the metadata of what `write_adapter` writes

_PREFIX = "base_model.model."
# module, A or B of a linear layer or of an embedding; the adapter's name in between is dropped.
_KEY = re.compile(r"(.+)\.(?:lora_([AB])(?:\.[^.]+)?\.weight|lora_embedding_([AB])(?:\.[^.]+)?)")
# Settings under which the update is not s B A, or not only that.
_NOT_PLAIN = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
# All others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, MiCA) change the base when PEFT loads them.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


class NotPlainLora(UserError):
    """An adapter whose update is more than s B A; fusing it into the base first does work."""


@dataclass(frozen=True)
class Factors:
    """One tensor's update as left @ right, oriented as the base stores that tensor.

    left [out, r] with the scale folded in, right [r, in]; float32 on the CPU.
    """

    left: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]


class Target(NamedTuple):
    """The module that owns a tensor, and how PEFT lays out its factors."""

    module: str  # the full name in the model, which may have a prefix that the base's names lack
    kind: str  # "linear"; "conv1d" (GPT-2: stored as [in, out]); "embedding"


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA adapter: the update of each base tensor that it targets."""

    factors: dict[str, Factors]  # by the base's name of the tensor
    targets: dict[str, Target] = field(default_factory=dict)
    label: str = ""
    weights: Checkpoint | None = None  # the file that it was read from

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        base: Mapping[str, TensorInfo],
        label: str = "",
        *,
        read: Callable[[str], Tensor] | None = None,
    ) -> Adapter:
        """Read the adapter in folder `path`, all of it, and check it against the base's header.

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
        folder = Path(path)
        return _Reader(folder, base, label, read).adapter()

    def restricted(self, names: Container[str]) -> Adapter:
        """The same without the tensors that are not in `names`."""
        kept = {name: both for name, both in self.factors.items() if name in names}
        return replace(self, factors=kept)


@dataclass
class _Reader:
    """The steps of `Adapter.open`."""

    folder: Path
    base: Mapping[str, TensorInfo]
    label: str
    read: Callable[[str], Tensor] | None
    config: dict[str, Any] = field(default_factory=dict)

    def adapter(self) -> Adapter:
        self.config = self._read_config()
        weights = self._open_weights()
        halves: dict[tuple[str, bool], dict[str, str]] = {}  # (module, embedding) -> half -> key
        for key in sorted(weights.tensors):
            name = key.removeprefix(_PREFIX)
            match = _KEY.fullmatch(name)
            if match is None:
                self._check_copy(key, name, weights)
                continue
            pair = halves.setdefault((match[1], match[3] is not None), {})
            if pair.setdefault(match[2] or match[3], key) != key:
                raise self._error(f"holds several adapters (`{key}`); store them one by one")
        factors: dict[str, Factors] = {}
        targets: dict[str, Target] = {}
        for (module, embedding), pair in halves.items():
            name = self._base_name(module)
            if name in factors:
                raise self._not_plain(f"targets `{name}` under two names")
            down, up = (self._half(module, pair, half, weights) for half in "AB")
            kind = "embedding" if embedding else self._kind(name, module, down, up)
            left, right = (up, down) if kind == "linear" else (down.T, up.T)
            found = (left.shape[0], right.shape[1])
            if found != self.base[name].shape:
                raise self._wrong_base(module, f"is {list(found)}", self.base[name].shape)
            left = (left * self._scale(module, down.shape[0], up.shape[1])).contiguous()
            factors[name] = Factors(left, right.contiguous())
            targets[name] = Target(module, kind)
        if not factors:
            raise self._error("holds no LoRA factors; save it again")
        return Adapter(factors, targets, self.label, weights)

    def _read_config(self) -> dict[str, Any]:
        file = self.folder / CONFIG
        if not file.is_file():
            raise self._error(f"has no {CONFIG}; name the folder of a PEFT adapter")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            kind = config.get("peft_type")
        except (ValueError, AttributeError) as error:
            raise self._error(f"{CONFIG} cannot be read ({error}); download it again") from error
        if kind != "LORA":
            raise self._not_plain(f"is of type {kind}, expected LORA")
        assert isinstance(config, dict)
        for setting in _NOT_PLAIN:
            if config.get(setting):
                raise self._not_plain(f"uses `{setting}`")
        start = config.get("init_lora_weights")
        if (start.lower() if isinstance(start, str) else start) not in _PLAIN_STARTS:
            raise self._not_plain(f"changes the base (`init_lora_weights: {start}`)")
        return config

    def _open_weights(self) -> Checkpoint:
        for file in (WEIGHTS, "adapter_model.bin"):
            if (self.folder / file).is_file():
                return Checkpoint.open(self.folder / file)
        raise self._error(f"has no {WEIGHTS} or adapter_model.bin; download it again")

    def _check_copy(self, key: str, name: str, weights: Checkpoint) -> None:
        """Accept a stored tensor that is no factor only if it is a copy of the base's."""
        if "lora_magnitude_vector" in name:
            raise self._not_plain(f"uses DoRA (`{key}`)")
        original = name.replace(".base_layer.", ".")
        info = self.base.get(original)
        if info is None or info.shape != weights.tensors[key].shape or self.read is None:
            same = False
        else:
            both = (weights.tensor(key), self.read(original))
            pieces = zip(*(tensor.reshape(-1).split(PIECE) for tensor in both), strict=True)
            same = all(torch.equal(mine.float(), theirs.float()) for mine, theirs in pieces)
        if not same:
            raise self._not_plain(f"stores more than factors (`{key}`: modules or biases trained)")

    def _base_name(self, module: str) -> str:
        # Models saved without their head lack the first part: `h.0` is PEFT's `transformer.h.0`.
        for name in (f"{module}.weight", f"{module.partition('.')[2]}.weight"):
            if name in self.base:
                return self.base[name].alias_of or name
        if module.rpartition(".")[2] in ("lm_head", "embed_out"):
            raise self._not_plain(f"targets `{module}`, which this base ties to its embedding")
        raise self._wrong_base(module, "is targeted", None)

    def _half(self, module: str, pair: Mapping[str, str], half: str, weights: Checkpoint) -> Tensor:
        if half not in pair:
            present = next(iter(pair.values()))
            raise self._error(
                f"holds `{present}` but not its other half, lora_{half}; save it again"
            )
        key = pair[half]
        stored = weights.tensor(key)
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

    def _kind(self, name: str, module: str, down: Tensor, up: Tensor) -> str:
        """Whether the base stores this tensor as a Linear or as GPT-2's Conv1D (transposed)."""
        shape, rows, columns = self.base[name].shape, up.shape[0], down.shape[1]
        if rows != columns:
            return "conv1d" if shape == (columns, rows) else "linear"
        # A square matrix does not tell. Conv1D has biases, and a model is built of one or the
        # other; `fan_in_fan_out` says what PEFT made of the last layer that it wrapped.
        if name.removesuffix("weight") + "bias" not in self.base:
            return "linear"
        kinds = _kinds_of_biased(self.base) or {
            "conv1d" if self.config.get("fan_in_fan_out") else "linear"
        }
        if len(kinds) > 1:
            raise self._not_plain(f"targets `{module}`, square in a model of Linear and Conv1D")
        return kinds.pop()

    def _scale(self, module: str, down_rank: int, up_rank: int) -> float:
        """lora_alpha / r, or / sqrt(r), with the patterns as PEFT matches them."""
        try:
            rank = self._setting("rank_pattern", module, self.config.get("r", 8))
            alpha = float(self._setting("alpha_pattern", module, self.config.get("lora_alpha", 8)))
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

    def _setting(self, table: str, module: str, default: Any) -> Any:
        for pattern, value in (self.config.get(table) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    def _wrong_base(self, module: str, found: str, shape: tuple[int, ...] | None) -> UserError:
        expected = "the base has no such tensor" if shape is None else f"in the base {list(shape)}"
        trained_on = self.config.get("base_model_name_or_path") or "not recorded"
        return self._error(
            f"`{module}` {found}, {expected}; take the base that it was trained on ({trained_on})"
        )

    def _error(self, text: str) -> UserError:
        return UserError(f"{self._who()} {text}")

    def _not_plain(self, text: str) -> NotPlainLora:
        return NotPlainLora(f"{self._who()} {text}; {FUSE_INSTEAD}")

    def _who(self) -> str:
        return f"adapter {self.folder}" + (f" (task `{self.label}`):" if self.label else ":")


def _kinds_of_biased(base: Mapping[str, TensorInfo]) -> set[str]:
    """What the non-square matrices with a bias say: the bias is as long as the output."""
    kinds = set()
    for name, info in base.items():
        bias = base.get(name.removesuffix("weight") + "bias")
        if name.endswith(".weight") and bias is not None and len(info.shape) == 2:
            rows, columns = info.shape
            if rows != columns and bias.shape in ((rows,), (columns,)):
                kinds.add("linear" if bias.shape == (rows,) else "conv1d")
    return kinds


def factor_gram(adapters: Sequence[Adapter]) -> GramSums:
    """The Gram matrix of the T adapters' updates, [T, T] float64, from their factors.

    A tensor that an adapter does not target is zero there; `num_parameters` counts the tensors
    that any of them targets. Per tensor O(R^2 (out + in)) for the sum R of the ranks, in float64.
    """
    sums = GramSums(torch.zeros(len(adapters), len(adapters), dtype=torch.float64))
    for name in _names(adapters):
        owners = [i for i, adapter in enumerate(adapters) if name in adapter.factors]
        parts = [adapters[i].factors[name] for i in owners]
        left = torch.cat([part.left for part in parts], dim=1).double()
        right = torch.cat([part.right for part in parts], dim=0).double()
        products = (left.T @ left) * (right @ right.T)
        ranks = torch.tensor([part.rank for part in parts])
        of = torch.repeat_interleave(torch.tensor(owners), ranks)
        rows = torch.zeros(len(adapters), len(of), dtype=torch.float64)
        rows.index_add_(0, of, products)
        sums.gram.index_add_(1, of, rows)
        sums.num_parameters += left.shape[0] * right.shape[1]
    sums.gram = (sums.gram + sums.gram.T) / 2  # not every matrix product is symmetric to the bit
    sums.end((1, 1))  # all of them are matrices
    return sums


def combine_adapters(adapters: Sequence[Adapter], coefficients: Tensor) -> dict[str, Factors]:
    """sum_i coefficients[i] * update_i with the factors stacked: exact, rank = sum of the ranks.

    `coefficients` is [T] float64; adapters with a zero there are left out.
    """
    used = [(a, c) for a, c in zip(adapters, coefficients.tolist(), strict=True) if c != 0]
    combined = {}
    for name in _names([adapter for adapter, _ in used]):
        parts = [(a.factors[name], c) for a, c in used if name in a.factors]
        left = torch.cat([part.left * c for part, c in parts], dim=1)
        combined[name] = Factors(left, torch.cat([part.right for part, _ in parts], dim=0))
    return combined


def common_targets(adapters: Iterable[Adapter]) -> dict[str, Target]:
    """The modules that the adapters target together, for `write_adapter`.

    Raises:
        NotPlainLora: two adapters target one tensor as different modules (a tied embedding).
    """
    targets: dict[str, Target] = {}
    for adapter in adapters:
        for name, target in adapter.targets.items():
            if targets.setdefault(name, target) != target:
                raise NotPlainLora(
                    f"adapter of task `{adapter.label}`: targets `{name}` as {target.kind} "
                    f"`{target.module}`, another adapter as {targets[name].kind} "
                    f"`{targets[name].module}`; {FUSE_INSTEAD}"
                )
    return targets


def _names(adapters: Iterable[Adapter]) -> list[str]:
    """All targeted tensors, sorted, so that sums do not depend on the order of the files."""
    return sorted({name for adapter in adapters for name in adapter.factors})


def truncate(factors: Mapping[str, Factors], rank: int) -> tuple[dict[str, Factors], float, float]:
    """The nearest update of at most `rank` for each tensor, by QR and SVD in float64.

    Returns:
        The factors, each with the square roots of the singular values; the squared Frobenius
        distance from the given ones, and their squared norm, summed over the tensors.
    """
    if rank < 1:
        raise UserError(f"the rank of an adapter is {rank}; expected 1 or more")
    kept: dict[str, Factors] = {}
    lost = total = 0.0
    for name, both in factors.items():
        left, left_core = torch.linalg.qr(both.left.double())
        right, right_core = torch.linalg.qr(both.right.double().T)
        u, s, vh = torch.linalg.svd(left_core @ right_core.T, full_matrices=False)
        root = s[:rank].sqrt()
        kept[name] = Factors(
            (left @ (u[:, :rank] * root)).float(), ((right @ vh[:rank].T) * root).T.float()
        )
        lost += float(s[rank:].square().sum())
        total += float(s.square().sum())
    return kept, lost, total


def write_adapter(
    folder: str | os.PathLike[str],
    factors: Mapping[str, Factors],
    *,
    targets: Mapping[str, Target],
    dtype: torch.dtype,
    base_model: str,
    marker: Mapping[str, object],
    task_type: str | None = None,
) -> None:
    """Write `factors` as an adapter that `peft.PeftModel.from_pretrained` loads, with scale 1.

    Args:
        folder: made if it does not exist.
        targets: the modules of at least these tensors, see `common_targets`.
        base_model: goes to `base_model_name_or_path`.
        marker: goes, as JSON, to the metadata of the weights: PEFT warns of keys that it does not
            know in its config.
        task_type: PEFT's, such as CAUSAL_LM.

    Raises:
        UserError: no factors, or a value that overflows `dtype`.
    """
    if not factors:
        raise UserError(
            f"adapter {folder}: nothing to write, no tensor is changed; check the basis"
        )
    state: dict[str, Tensor] = {}
    for name in sorted(factors):
        module, kind = targets[name]
        left, right = factors[name].left, factors[name].right
        down, up = (right, left) if kind == "linear" else (left.T, right.T)
        stem, end = ("lora_embedding_", "") if kind == "embedding" else ("lora_", ".weight")
        for half, value in (("A", down), ("B", up)):
            stored = value.to(dtype, copy=True).contiguous()
            if not torch.isfinite(stored).all():
                raise UserError(
                    f"adapter {folder}: `{name}` overflows {dtype}; write it in bfloat16 or float32"
                )
            state[f"{_PREFIX}{module}.{stem}{half}{end}"] = stored
    ranks = {targets[name].module: factors[name].rank for name in sorted(factors)}
    largest = max(ranks.values())
    # Anchored and escaped: PEFT searches patterns as regular expressions at the end of names.
    pattern = {f"^{re.escape(m)}": rank for m, rank in ranks.items() if rank != largest}
    config = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": any(targets[name].kind == "conv1d" for name in factors),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": largest,  # over r: the scale is 1 everywhere
        "alpha_pattern": pattern,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": largest,
        "rank_pattern": pattern,
        # A module whose name ends in one of these would be wrapped too, with an update of zero.
        "target_modules": sorted(ranks),
        "task_type": task_type,
        "use_rslora": False,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", MARKER: json.dumps(marker, sort_keys=True)}
    # not `save_file`, whose files only their owner may read
    (folder / WEIGHTS).write_bytes(save(state, metadata=metadata))
    _sort_metadata(folder / WEIGHTS)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def _sort_metadata(path: Path) -> None:
    """Safetensors writes several metadata entries in an order that changes from run to run."""
    with path.open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length
        file.seek(8)
        file.write(text.ljust(length))


class AdapterDelta:
    """An adapter as the dense updates of the base's tensors, each materialized only when read.

    `tensors` has an entry for each tensor of the base that the adapter targets, or with `every`
    for all of them: the others read as zeros. Thread-safe.
    """

    others: Sequence[str] = ()

    def __init__(
        self, adapter: Adapter, base: Mapping[str, TensorInfo], *, every: bool = False
    ) -> None:
        self._weights = adapter.weights
        shard = "" if adapter.weights is None else adapter.weights.shards[0]
        self.tensors: dict[str, TensorInfo] = {}
        self._factors: dict[str, Factors] = {}
        for name, info in base.items():
            factors = adapter.factors.get(info.alias_of or name)
            if factors is not None:
                self._factors[name] = factors
            if factors is not None or every:
                self.tensors[name] = TensorInfo(info.shape, torch.float32, shard)

    def tensor(self, name: str) -> Tensor:
        """The whole update of the tensor `name`, float32."""
        info = self.tensors[name]
        return self.read(name, 0, info.numel, torch.empty(info.numel)).view(info.shape)

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements `start` to `stop` of the flattened update, as a view of `out`.

        Args:
            out: 1-D float32, at least `stop - start` elements; overwritten.

        A few rows at a time are multiplied, always the same: what an element is does not depend on
        the piece in which it is read.
        """
        self.tensors[name]  # KeyError for what is not there
        piece = out[: stop - start]
        factors = self._factors.get(name)
        if factors is None or start == stop:
            return piece.zero_()
        columns = factors.shape[1]
        step = max(1, PIECE // columns)
        for top in range(start // columns // step * step, -(-stop // columns), step):
            rows = (factors.left[top : top + step] @ factors.right).view(-1)
            place = top * columns
            first, last = max(start, place), min(stop, place + len(rows))
            piece[first - start : last - start] = rows[first - place : last - place]
        return piece

    @property
    def folder(self) -> Path:
        """Where the weights lie."""
        assert self._weights is not None
        return self._weights.folder

    @property
    def shards(self) -> tuple[str, ...]:
        """The names of the weight files."""
        assert self._weights is not None
        return self._weights.shards

    def canonical(self, name: str) -> str:
        """The name under which a tensor is counted: its own."""
        return name

    def fingerprint(self) -> str:
        """64 hexadecimal digits from the names, shapes and all factors, scales folded in."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(f"{name}|{self.tensors[name].shape}|".encode())
            if name in self._factors:
                for half in (self._factors[name].left, self._factors[name].right):
                    digest.update(f"{tuple(half.shape)}|".encode())
                    digest.update(half.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def stamp(self) -> list[list[int | str]]:
        """What the file system says of the weights and of the config, which holds the scale."""
        if self._weights is None:
            return []
        return Checkpoint(self._weights.folder, (*self._weights.shards, CONFIG), {}).stamp()

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Those in which the factors are stored."""
        stored = () if self._weights is None else self._weights.tensors.values()
        return {info.dtype for info in stored}

    @property
    def nbytes(self) -> int:
        """Bytes of the adapter's weights as stored."""
        return 0 if self._weights is None else self._weights.nbytes
