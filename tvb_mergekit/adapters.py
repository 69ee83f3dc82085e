"""Bases of LoRA adapters, stored as LoRA adapters: nothing of the size of a weight is ever made."""

from __future__ import annotations

import glob
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.basis import build as encode_basis
from tvb_mergekit.errors import UserError
from tvb_mergekit.inputs import Inputs
from tvb_mergekit.lora import (
    CONFIG,
    WEIGHTS,
    Adapter,
    combine_adapters,
    common_targets,
    factor_gram,
    truncate,
    write_adapter,
)
from tvb_mergekit.online import ARITHMETIC
from tvb_mergekit.output import check_new_folder
from tvb_mergekit.store import Bases, basis_folder, load, note_files
from tvb_mergekit.store import lock as store_lock
from tvb_mergekit.store_writing import copy_config, finish_store, store_facts, tensors_of
from tvb_mergekit.writing import file_record

LOG = logging.getLogger(__name__)
NOT_ADAPTERS = (
    "--adapters: only bases of adapters (all models listed as BASE+ADAPTER) can be adapters"
)


def build_adapters(
    inputs: Inputs,
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    rank: int | None = None,
) -> Bases:
    """Write the bases of adapters as a store of adapters in PEFT's format.

    Args:
        inputs: whose models are all adapters.
        dtype: of the stored factors.
        rank: truncate every basis to this rank by SVD; by default the ranks of a tensor's adapters
            add up and nothing is lost. The reported errors of the tasks are those of the adapters
            as they are stored, truncated and rounded.

    Raises:
        UserError: not all models are adapters, PCA or rand_proj, `out` exists.
    """
    if not inputs.adapters:
        raise UserError(NOT_ADAPTERS)
    if inputs.settings.basis in ("pca", "rand_proj"):
        raise UserError(
            f"--adapters with basis {inputs.settings.basis}: its vectors are no sums of few "
            "adapters; leave --adapters out"
        )
    target = Path(os.path.realpath(out))
    held = store_lock(target, LOG.warning)
    work = None
    try:
        check_new_folder(target, [n for n in inputs.fingerprints if os.path.exists(n)])
        prefix = f".{target.name}.adding-"
        for stale in target.parent.glob(f"{glob.escape(prefix)}*"):  # ours alone, under the lock
            shutil.rmtree(stale, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        os.chmod(work, 0o755)
        facts = _write(inputs, work, target, dtype, rank)
        os.rename(work, target)
        note_files(target, facts["store"]["files"])
        return load(target)
    finally:
        if work is not None and work.exists():
            shutil.rmtree(work, ignore_errors=True)
        held.release()


def _write(
    inputs: Inputs, work: Path, out: Path, dtype: torch.dtype, rank: int | None
) -> dict[str, Any]:
    assert inputs.sums is not None
    basis = encode_basis(inputs.settings, inputs.tasks, inputs.weights, inputs.sums)
    targets = common_targets(inputs.adapters)
    kind = _task_type(inputs)
    files: dict[str, dict[str, object]] = {}
    stored = []
    for index, column in enumerate(basis.weighted_encoder.T):
        kept = combine_adapters(inputs.adapters, column)
        if rank is not None:
            kept, _, _ = truncate(kept, rank)
        folder = work / basis_folder(index)
        write_adapter(
            folder,
            kept,
            targets=targets,
            dtype=dtype,
            base_model=inputs.base_model,
            marker={"folder": folder.name},
            task_type=kind,
        )
        files |= copy_config(inputs.folder, folder, index)
        for name in (WEIGHTS, CONFIG):
            files[f"{folder.name}/{name}"] = file_record(folder / name)
        stored.append(Adapter.open(folder, inputs.base.tensors))
    errors = _errors(inputs, stored, basis.encoding.decoder)
    # Their products in float32, large ones that cancel too, are what is lost.
    norms, encoder = basis.sums.gram.diagonal().sqrt(), basis.encoding.encoder
    assert encoder is not None
    rounding = ARITHMETIC * (norms @ encoder.abs() @ basis.encoding.decoder.abs())
    tensors = {
        **tensors_of(basis, dtype),
        "gram_bases": factor_gram(stored).gram,
        "errors": torch.stack([(errors - rounding).clamp(min=0), errors + rounding]),
    }
    facts = store_facts(inputs, basis, dtype, files, tensors, contents="adapters")
    facts["store"] |= {
        "rank": rank,
        "targets": [item.name for item in inputs.items],
        "shapes": {name: list(info.shape) for name, info in inputs.base.tensors.items()},
    }
    # Of what is stored, truncated or rounded, not of what the Gram matrix alone would give.
    total = float(basis.sums.gram.trace())
    loss = float(errors.square().sum())
    bound = facts["spectral_bound"]
    facts |= {"loss": loss, "retained_energy": 1 - loss / total}
    if facts["relative_gap"] is not None:
        facts["relative_gap"] = (loss - bound) / bound
    if facts["decoder_losses"] is not None:
        facts["decoder_losses"] = {
            name: float(_errors(inputs, stored, decoder).square().sum())
            for name, decoder in basis.encoding.decoders.items()
        }
    finish_store(work, out, facts, tensors)
    return facts


def _errors(inputs: Inputs, stored: Sequence[Adapter], decoder: Tensor) -> Tensor:
    """||tau_hat_i - tau_i|| [T]: the norms of adapters that are the differences."""
    squares = []
    for index, (adapter, weight) in enumerate(zip(inputs.adapters, inputs.weights, strict=True)):
        column = torch.cat([decoder[:, index], torch.tensor([-weight], dtype=torch.float64)])
        difference = combine_adapters([*stored, adapter], column)
        squares.append(factor_gram([Adapter(difference)]).gram[0, 0])
    return torch.stack(squares).clamp(min=0).sqrt()


def _task_type(inputs: Inputs) -> str | None:
    """PEFT's task type, which all adapters share, from the first that says it."""
    for adapter in inputs.adapters:
        if adapter.weights is not None:
            text = (adapter.weights.folder / CONFIG).read_text(encoding="utf-8")
            return json.loads(text).get("task_type")  # type: ignore[no-any-return]
    return None
