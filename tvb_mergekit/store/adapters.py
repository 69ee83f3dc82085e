"""Bases of LoRA adapters, stored as LoRA adapters: nothing of the size of a weight is ever made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tvb_mergekit.core.basis import build as encode_basis
from tvb_mergekit.core.lora import Factors, combine_factors, factor_gram, truncate
from tvb_mergekit.core.online import ARITHMETIC
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.build import copy_config, finish_store
from tvb_mergekit.store.facts import FileRecord
from tvb_mergekit.store.inputs import Inputs
from tvb_mergekit.store.report import store_facts
from tvb_mergekit.store.store import Bases, basis_folder, load, record_of, staged
from tvb_mergekit.tensors.adapter import CONFIG, WEIGHTS, Adapter, common_targets, write_adapter
from tvb_mergekit.tensors.output import check_new_folder

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
    with staged(target) as work:
        check_new_folder(target, [n for n in inputs.fingerprints if os.path.exists(n)])
        _write(inputs, work, target, dtype, rank)
    return load(target)


def _write(inputs: Inputs, work: Path, out: Path, dtype: torch.dtype, rank: int | None) -> None:
    """Write the store into `work`; `out` is where it will lie."""
    assert inputs.sums is not None
    basis = encode_basis(inputs.settings, inputs.tasks, inputs.weights, inputs.sums)
    encoding, gram = basis.encoding, basis.sums.gram
    assert encoding.encoder is not None
    updates = [adapter.factors for adapter in inputs.adapters]
    targets = common_targets(inputs.adapters)
    kinds = [adapter.task_type for adapter in inputs.adapters]
    files: dict[str, FileRecord] = {}
    stored = []
    for index, column in enumerate(basis.weighted_encoder.T):
        update = combine_factors(updates, column)
        if rank is not None:
            update = truncate(update, rank)
        folder = work / basis_folder(index)
        write_adapter(
            folder,
            update,
            targets=targets,
            dtype=dtype,
            base_model=inputs.base_model,
            marker={"folder": folder.name},
            task_type=next(filter(None, kinds), None),
        )
        files |= copy_config(inputs.folder, folder, index)
        for name in (WEIGHTS, CONFIG):
            files[f"{folder.name}/{name}"] = record_of(folder / name)
        stored.append(Adapter.open(folder, inputs.base.tensors).factors)
    errors = _errors(inputs, stored, encoding.decoder)
    # Their products in float32, large ones that cancel too, are what is lost.
    rounding = ARITHMETIC * (
        gram.diagonal().sqrt() @ encoding.encoder.abs() @ encoding.decoder.abs()
    )
    measured = {
        "gram_bases": factor_gram(stored).gram,
        "errors": torch.stack([(errors - rounding).clamp(min=0), errors + rounding]),
    }
    facts, tensors = store_facts(inputs, basis, dtype, files, "adapters", measured)
    store = facts.store.but(
        rank=rank,
        targets=[item.name for item in inputs.items],
        shapes={name: list(info.shape) for name, info in inputs.base.tensors.items()},
    )
    # Of what is stored, truncated or rounded, not of what the Gram matrix alone would give.
    loss, bound = float(errors.square().sum()), facts.spectral_bound
    facts = facts.but(store=store, loss=loss, retained_energy=1 - loss / float(gram.trace()))
    if facts.relative_gap is not None and bound:
        facts = facts.but(relative_gap=(loss - bound) / bound)
    if facts.decoder_losses is not None:
        losses = {
            name: float(_errors(inputs, stored, decoder).square().sum())
            for name, decoder in encoding.decoders.items()
        }
        facts = facts.but(decoder_losses=losses)
    finish_store(work, out, facts, tensors)


def _errors(inputs: Inputs, stored: Sequence[dict[str, Factors]], decoder: Tensor) -> Tensor:
    """||tau_hat_i - tau_i|| [T]: the norms of low-rank updates that are the differences."""
    squares = []
    for index, (adapter, weight) in enumerate(zip(inputs.adapters, inputs.weights, strict=True)):
        column = torch.cat([decoder[:, index], torch.tensor([-weight], dtype=torch.float64)])
        difference = combine_factors([*stored, adapter.factors], column)
        squares.append(factor_gram([difference]).gram[0, 0])
    return torch.stack(squares).clamp(min=0).sqrt()
