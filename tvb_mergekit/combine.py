"""Coefficients and blocks in, merged tensors out: addition, negation, and TIES over bases.

Everything is computed in float32 from the stored dtypes, in chunks, and cast once to the output
dtype. Inputs are never modified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import CPU_CHUNK, Sketch, TaskVectorBlocks
from tvb_mergekit.trim import MagnitudeHistogram, exact_thresholds


def add_task_vectors(
    base: Tensor,
    models: Sequence[Tensor],
    coefficients: Sequence[float],
    blocks: TaskVectorBlocks,
    out: Tensor,
) -> Tensor:
    """out = theta_0 + sum_i coefficients[i] * (theta_i - theta_0).

    Addition over bases and negation are both this, since B = T W_e and T_hat = T R
    (paper Eqs. 7 and 9): the coefficients are lambda * W_e 1 - alpha * R[:, forget] 1.
    """
    flat = out.view(-1)
    weights = torch.tensor(coefficients, dtype=torch.float32, device=blocks.device)
    for start, stop, base32, tau in blocks.walk(base, models):
        flat[start:stop].copy_(base32.addmv_(tau.T, weights))
    return out


def add_sketch(
    name: str, base: Tensor, sketch: Sketch, weights: Tensor, device: torch.device, out: Tensor
) -> Tensor:
    """out = theta_0 + Omega @ weights, the rows of Omega drawn again from (seed, tensor name)."""
    flat, source = out.view(-1), base.reshape(-1)
    generator = sketch.stream(name)
    weights = weights.to(device, torch.float32)
    for start in range(0, flat.numel(), CPU_CHUNK):
        stop = min(start + CPU_CHUNK, flat.numel())
        base32 = source[start:stop].to(device).to(torch.float32, copy=True)
        rows = sketch.rows(generator, stop - start, device)
        flat[start:stop].copy_(base32.addmv_(rows.T, weights))
    return out


def count_magnitudes(
    base: Tensor,
    models: Sequence[Tensor],
    encoder: Tensor,
    blocks: TaskVectorBlocks,
    histogram: MagnitudeHistogram,
) -> None:
    """Add one tensor's share of every basis B = T W_e to the histogram that `trim: model` needs."""
    for values in _bases(base, models, encoder, blocks):
        histogram.add(values)


def tensor_thresholds(
    base: Tensor,
    models: Sequence[Tensor],
    encoder: Tensor,
    blocks: TaskVectorBlocks,
    density: float,
) -> Tensor:
    """`trim: tensor`: the threshold of each basis within this tensor alone, [M] float32."""
    return exact_thresholds(
        lambda: _bases(base, models, encoder, blocks), encoder.shape[1], base.numel(), density
    )


def trim_elect_merge(
    base: Tensor,
    models: Sequence[Tensor],
    encoder: Tensor,
    thresholds: Tensor,
    merge_func: str,
    scale: float,
    blocks: TaskVectorBlocks,
    out: Tensor,
) -> Tensor:
    """out = theta_0 + scale * TrimElectMerge(B_1 ... B_M) (Yadav et al., NeurIPS 2023).

    Trim keeps |B| >= threshold; Elect takes the sign of the sum of what is left; Merge is the
    `sum`, the `mean` or the entry of largest magnitude (`max`) over the entries of that sign.
    """
    flat = out.view(-1)
    # hardshrink drops |x| <= its limit, Trim |x| < the threshold: the float32 just below.
    limits = torch.nextafter(thresholds.cpu(), thresholds.cpu().neg()).clamp(min=0).tolist()
    weights = encoder.T.to(blocks.device, torch.float32)
    for start, stop, base32, tau in blocks.walk(base, models):
        bases = weights @ tau
        for row, limit in zip(bases, limits, strict=True):
            row.copy_(hardshrink(row, limit))  # Trim
        sign = bases.sum(0).sign_()  # Elect
        up = _merge(bases.clamp(min=0), merge_func)
        down = _merge(bases.clamp_(max=0), merge_func)
        merged = (up * sign.clamp(min=0)).addcmul_(down, sign.clamp_(max=0), value=-1)
        flat[start:stop].copy_(base32.add_(merged, alpha=scale))
    return out


def _merge(agreeing: Tensor, merge_func: str) -> Tensor:
    """Merge entries of one sign [M, n], the others being 0."""
    if merge_func == "max":
        return agreeing.amax(0).clamp_(min=0) + agreeing.amin(0).clamp_(max=0)  # one is 0
    total = agreeing.sum(0)
    if merge_func == "mean":
        total /= (agreeing != 0).sum(0).clamp_(min=1)
    return total


def _bases(
    base: Tensor, models: Sequence[Tensor], encoder: Tensor, blocks: TaskVectorBlocks
) -> Iterator[Tensor]:
    weights = encoder.T.to(blocks.device, torch.float32)
    for _start, _stop, _base32, tau in blocks.walk(base, models):
        yield weights @ tau


def check_output(name: str, merged: Tensor, dtype: torch.dtype) -> None:
    """Raise UserError where a value overflowed (float16 does above 65504)."""
    # A sum is not finite if an entry is not, and takes one pass without a mask.
    if torch.isfinite(merged.sum(dtype=torch.float32)) or torch.isfinite(merged).all():
        return
    raise UserError(
        f"tensor `{name}`: values overflow {str(dtype).removeprefix('torch.')} in the output; "
        "set `dtype: bfloat16` or `float32`, or a smaller lambda"
    )
