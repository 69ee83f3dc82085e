"""WUDI: a matrix near the sum of the bases that interferes little with each of them.

Cheng et al., ICML 2025, arXiv 2503.08099; the flow: Wei et al., 2026, arXiv 2606.07289.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tvb_mergekit.core.matrices import NULL, Noise
from tvb_mergekit.core.registry import Key, Pattern, Positive, merge_method

ROUGH = 3e-3  # of t M^2 2^-24, up to which float32 is enough; `docs/mathematics.md` has the errors
LATEST = 300.0  # t of `auto` at most
SETTLED = 0.5  # t of `auto` times the median eigenvalue, at most


@merge_method(
    "basis_wudi",
    title="Interference-Free Merging (WUDI) on Task Vector Bases",
    keys={
        "flow_time": Key("end of the flow", Literal["auto", "exact"] | Positive, "auto"),
        "transposed": Key("matrices whose inputs are rows, by their names", Pattern),
    },
)
def interference_free(
    bases: Tensor,
    *,
    flow_time: float | str,
    noise: Noise = None,
    shares: Sequence[float] | None = None,
    spanned: int | None = None,
) -> Tensor:
    """D on the way from S = sum_m B_m to the least sum_m ||(D - B_m) B_m^T||_F^2 / ||B_m||_F^2.

    WUDI takes some hundred steps of Adam from S. SWUDI follows the gradient flow dD/dt = R - D A
    for a time t, which has a closed form:

        D(t) = S - (S A - R) g(A),  g(a) = (1 - exp(-t a)) / a  of each eigenvalue a of A,
        A = sum_m w_m B_m^T B_m,  R = sum_m w_m B_m B_m^T B_m,  w_m = 1 / ||B_m||^2 (0 for B_m = 0).

    Args:
        flow_time: t, or "exact" for the D of least loss that is nearest to S, or "auto" for the t
            of `settling_time`.
        spanned: the number of inputs that M bases of full rank have, if these are cores.
    """
    count, rows, columns = bases.shape
    shares, noise = shares or [1.0] * count, noise or [0.0] * count
    end = {"exact": math.inf, "auto": LATEST}.get(str(flow_time)) or float(flow_time)
    # Errors of float32 grow with t and M^2
    dtype = torch.float64 if end * count**2 * 2.0**-24 > ROUGH else torch.float32
    norms = torch.stack([torch.linalg.vector_norm(base, dtype=torch.float64) for base in bases])
    norms *= norms.new_tensor(shares).sqrt()
    norms[norms == 0] = 1
    total, few = bases.sum(0), count * rows < columns and min(shares) == 1
    if few:
        # With C [M m, n] of all B_m / ||B_m|| above each other and P [m, M m] of all
        # (S - B_m) B_m^T / ||B_m|| side by side, D(t) = S - P g(C C^T) C.
        sides = torch.cat([base.to(dtype) / norm for base, norm in zip(bases, norms, strict=True)])
        normal = sides @ sides.T
        parts = zip(bases, sides.split(rows), strict=True)
        push = torch.cat([(total.to(dtype) - base) @ side.T for base, side in parts], 1)
    else:
        normal = total.new_zeros(columns, columns, dtype=dtype)  # A
        push = total.new_zeros(rows, columns, dtype=dtype)  # S A - R
        for norm, base, share in zip(norms, bases, shares, strict=True):
            side = base.to(dtype) / norm
            square = side.T @ side
            # A sample Z of a share s of the entries of B, times 1 / s, has the expectation
            # E[Z^T Z] = B^T B + (1 / s - 1) diag(B^T B), so s times its diagonal is that of B^T B.
            square.diagonal().mul_(share)
            normal += square
            push += (total.to(dtype) - base) @ square
    values, vectors = torch.linalg.eigh(normal)
    if flow_time == "auto":
        end = settling_time(values, spanned or min(columns, count * rows))
    values.clamp_(min=0)
    # g is 0 if sqrt(a) is null or up to the noise: D keeps S there
    floor = math.hypot(*(each / norm for each, norm in zip(noise, norms.tolist(), strict=True)))
    cut = max(floor**2, NULL**2 * float(values.sum()))
    gains = torch.where(values > cut, -torch.expm1(-end * values) / values, 0)
    push = (push @ vectors * gains) @ vectors.T
    return total - (push @ sides if few else push).float()


def settling_time(values: Tensor, spanned: int) -> float:
    """The t at which the direction of the median has moved 1 - exp(-SETTLED) of its way.

    A full fine-tune moves all inputs, most by noise alone, and a long flow gives way to noise.
    Adapters leave most inputs alone: their median is 0, and LATEST ends their flow.

    Args:
        values: eigenvalues of A; all others, of `spanned` in all, are 0.
    """
    sizes = values.abs().sort(descending=True).values  # samples have noise around 0
    middle = spanned // 2
    median = float(sizes[middle]) if middle < len(sizes) else 0.0
    return min(LATEST, SETTLED / median) if median else LATEST
