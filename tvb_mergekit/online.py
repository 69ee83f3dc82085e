"""Algorithm 1 of the paper: an endless stream of tasks within a budget of M vectors.

Below the budget a new task vector joins the bases. At the budget the M bases B are compressed to
M - 1, U = B W_e, and it joins those. What a step costs depends on M alone: it reads the M bases
and the new model, never a model of before.

Over all steps are kept, for every task ever added:
* the composed encoder E [T, M]: B = T E. A step makes it [[E W_e, 0], [0, 1]]; products of convex
  columns stay convex.
* the composed decoder D [M, T]: tau_hat = B D. A step makes it [[W_d D, 0], [0, 1]].
* bounds of ||r_i||, r_i = tau_hat_i - tau_i. A step moves tau_hat_i by B x, x = (W_e W_d - I) D_i,
  so ||r_i + B x||^2 = ||r_i||^2 + 2 <r_i, B> x + x^T B^T B x. All of that follows from the bases'
  Gram matrix but <r_i, B_m> where B_m came after r_i: of the new tau = U y + z, z orthogonal to the
  bases U, the part <r_i, z> cannot be known without the old vectors, and is at most ||r_i|| ||z||.
  So the inner products <r_i, B_m> are kept as intervals (`residual` +- `slack`, [T, M]), and the
  error as an interval that also obeys the triangle inequalities, that of tau_i, tau_hat_i (whose
  norms are known) and r_i among them. It is one number, up to rounding, as long as nothing was
  compressed that came after an earlier compression.

Rounding is in the bounds: inner products are known to NOISE, bases to ARITHMETIC (and to what a
store's dtype loses), each relative to the vectors that entered. What is small because large terms
cancel is known the less for it: duplicate tasks, an encoder with nearly equal columns. All this is
of tau_hat = B D as an exact sum of the bases as they are stored; `reported` adds what float32 sums
of them lose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.encoders import Gram, balanced, encode
from tvb_mergekit.errors import UserError
from tvb_mergekit.recipe import Settings

COMPRESSIONS = ("ae", "balanced")
# Error of a basis relative to the norms of what it was summed from, in float32.
ARITHMETIC = 5e-7
# Error of <a, b> relative to ||a|| ||b||: float32 sums; 5e-7 was seen for 100 elements, 2e-7 for
# 2,000, 3e-9 for 3,000,000.
NOISE = 1e-6


@dataclass(frozen=True)
class Step:
    """One task's way into the buffer, all float64.

    Attributes:
        matrix: [M + 1, M'], the new bases from the old ones and the new task vector.
        encoder: E [T + 1, M']; decoder: D [M', T + 1].
        gram_bases: [M', M'].
        gram: [T + 1, T + 1] of all task vectors where it is known, else None.
        basis_weights: w [M'] with sum_m w_m B_m = the sum of all task vectors, else None.
        low, high: [T + 1], bounds of ||tau_hat_i - tau_i||, before rounding to a store's dtype.
        residual, slack: [T + 1, M'], <tau_hat_i - tau_i, B_m> is within residual +- slack.
        computed: [M'], what float32 arithmetic can lose in each new basis.
        compressed: whether the buffer was full.
    """

    matrix: Tensor
    encoder: Tensor
    decoder: Tensor
    gram_bases: Tensor
    gram: Tensor | None
    basis_weights: Tensor | None
    low: Tensor
    high: Tensor
    residual: Tensor
    slack: Tensor
    computed: Tensor
    compressed: bool

    def rounded(self, lost: Tensor) -> Step:
        """The same with bounds for the bases as stored: `lost` [M'] is ||what the cast lost||."""
        known = Known(self.low, self.high, self.residual, self.slack)
        norms = self.gram_bases.diagonal().clamp(min=0).sqrt()
        known = known.rounded(lost + self.computed, self.decoder, norms)
        return replace(self, low=known.low, high=known.high, slack=known.slack)


@dataclass(frozen=True)
class Known:
    """What is known of r_i = tau_hat_i - tau_i; see `Step`."""

    low: Tensor
    high: Tensor
    residual: Tensor
    slack: Tensor

    @classmethod
    def of(cls, gram: Tensor, encoder: Tensor, decoder: Tensor, stored: Tensor) -> Known:
        """From the Gram matrix of vectors that differ from the tau_i by at most `stored` [T]."""
        off = encoder @ decoder - torch.eye(len(gram), dtype=torch.float64)
        norms = gram.diagonal().clamp(min=0).sqrt()
        low, high = errors_of(gram, encoder @ decoder)
        slack = torch.outer(stored + NOISE * (norms @ off.abs()), norms @ encoder)
        return cls((low - stored).clamp(min=0), high + stored, off.T @ gram @ encoder, slack)

    @classmethod
    def offline(cls, gram: Tensor, encoder: Tensor, decoder: Tensor, lost: Tensor) -> Known:
        """Of bases that were built at once; `lost` [M]: the most that each has lost since."""
        stored = lost + ARITHMETIC * (gram.diagonal().clamp(min=0).sqrt() @ encoder.abs())
        moved = stored @ decoder.abs()
        known = cls.of(gram, encoder, decoder, moved)
        return replace(known, slack=known.slack + torch.outer(known.high + moved, stored))

    def rounded(self, lost: Tensor, decoder: Tensor, norms: Tensor) -> Known:
        """For bases of these norms [M] that differ from B by at most `lost` [M].

        tau_hat_i moves by at most |D_i| lost, and <r_i, B_m> by what that and `lost` can do.
        """
        moved = lost @ decoder.abs()
        high = self.high + moved
        slack = self.slack + torch.outer(high, lost) + torch.outer(moved, norms + lost)
        return replace(self, low=(self.low - moved).clamp(min=0), high=high, slack=slack)


@dataclass(frozen=True)
class Buffer:
    """What a step starts from; see `Step` for the names. Empty: `Buffer.empty()`.

    Attributes:
        norms: [T], ||tau_i||.
    """

    encoder: Tensor
    decoder: Tensor
    gram: Tensor | None
    basis_weights: Tensor | None
    norms: Tensor
    low: Tensor
    high: Tensor
    residual: Tensor
    slack: Tensor

    @classmethod
    def empty(cls) -> Buffer:
        nothing = torch.zeros(0, dtype=torch.float64)
        square = nothing.reshape(0, 0)
        return cls(square, square, square, nothing, nothing, nothing, nothing, square, square)


def add_task(buffer: Buffer, products: Tensor, budget: int, how: str, settings: Settings) -> Step:
    """One round of Algorithm 1.

    Args:
        products: [M + 1, M + 1] float64, the Gram matrix of the M bases and the new task vector.
        budget: the most bases that there may be after it, at least 2.
        how: `ae`, by `settings`, as in the paper; or `balanced`, each basis weighted by the number
            of tasks that it stands for, which keeps sum_m w_m B_m the sum of all tasks.
        settings: of the autoencoder.

    Raises:
        UserError: the budget is below the number of bases that are there, or below 2; `balanced`
            over bases whose weighted sum is not that of the tasks.
    """
    count = len(products) - 1
    check_budget(budget, count)
    products = (products + products.T) / 2
    old = products[:count, :count]
    compressed = count == budget
    encoder, decoder = buffer.encoder, buffer.decoder
    low, high, weights = buffer.low, buffer.high, buffer.basis_weights
    residual, slack = buffer.residual, buffer.slack
    inner = torch.eye(count, dtype=torch.float64)
    norms = products.diagonal().clamp(min=0).sqrt()
    if compressed:
        if how == "balanced":
            if weights is None:
                raise UserError(
                    "`balanced` keeps the sum of all tasks, which these bases do not hold (they "
                    "were built or compressed otherwise): compress by `ae`, or build anew with "
                    "`basis: balanced`"
                )
            encoding = balanced(Gram.of(old), count - 1, weights.numpy())
            total = float(weights.sum())
            weights = torch.full((count - 1,), total / (count - 1), dtype=torch.float64)
        else:
            chosen = {"num_bases": count - 1, "basis_ratio": None, "energy": None}
            encoding = encode(old, settings.model_copy(update=chosen))
            weights = None
        assert encoding.encoder is not None and encoding.reconstruction is not None
        inner = encoding.encoder
        moved = (encoding.reconstruction - torch.eye(count, dtype=torch.float64)) @ decoder
        low, high = _moved_bounds(buffer, old, moved)
        residual = (residual + moved.T @ old) @ inner
        terms = norms[:count] @ moved.abs()
        slack = (slack + NOISE * torch.outer(terms, norms[:count])) @ inner
        encoder, decoder = encoder @ inner, encoding.decoder @ decoder
    matrix = _joined(inner, 1.0)
    gram = _known_gram(buffer, products)
    encoder, decoder = _joined(encoder, 1.0), _joined(decoder, 1.0)
    residual, slack = _with_new(residual, slack, high, matrix, products)
    nothing = torch.zeros(1, dtype=torch.float64)
    low, high = torch.cat([low, nothing]), torch.cat([high, nothing])
    new = matrix.T @ products @ matrix
    if gram is not None:
        # Of the task vectors as they are stored: each is off by its rounding, the bound so far.
        known = Known.of(gram, encoder, decoder, torch.cat([buffer.high, nothing]))
        low, high, residual, slack = known.low, known.high, known.residual, known.slack
    low, high = _triangle(
        low, high, torch.cat([buffer.norms, norms[-1:]]), decoder, new, norms @ matrix
    )
    if weights is not None:
        weights = torch.cat([weights, torch.ones(1, dtype=torch.float64)])
    return Step(
        matrix=matrix,
        encoder=encoder,
        decoder=decoder,
        gram_bases=(new + new.T) / 2,
        gram=gram,
        basis_weights=weights,
        low=low,
        high=high,
        residual=residual,
        slack=slack,
        computed=ARITHMETIC * (norms @ matrix if compressed else _last(norms)),
        compressed=compressed,
    )


def _moved_bounds(buffer: Buffer, old: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of ||r_i + B x_i||; `moved` holds the x_i [M, T], `old` is B^T B."""
    squares = (moved * (old @ moved)).sum(0).clamp(min=0)
    noise = NOISE * (old.diagonal().clamp(min=0).sqrt() @ moved.abs()).square()
    fewer, more = (squares - noise).clamp(min=0), squares + noise
    cross = (buffer.residual * moved.T).sum(1)
    unsure = (buffer.slack * moved.T.abs()).sum(1)
    low, high = buffer.low, buffer.high
    most = torch.minimum((high + more.sqrt()).square(), high.square() + 2 * (cross + unsure) + more)
    least = torch.stack(
        [
            (low - more.sqrt()).clamp(min=0).square(),
            (fewer.sqrt() - high).clamp(min=0).square(),
            low.square() + 2 * (cross - unsure) + fewer,
        ]
    ).amax(0)
    high = most.clamp(min=0).sqrt()
    return torch.minimum(least.clamp(min=0).sqrt(), high), high


def _triangle(
    low: Tensor, high: Tensor, norms: Tensor, decoder: Tensor, gram_bases: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Bounds of ||tau_hat_i - tau_i|| that ||tau_hat_i|| and ||tau_i|| (`norms`) narrow."""
    squares = (decoder * (gram_bases @ decoder)).sum(0)
    noise = NOISE * (scale @ decoder.abs()).square()
    least, most = (squares - noise).clamp(min=0).sqrt(), (squares + noise).clamp(min=0).sqrt()
    high = torch.minimum(high, most + norms * (1 + NOISE))
    low = torch.stack([low, least - norms * (1 + NOISE), norms * (1 - NOISE) - most]).amax(0)
    return torch.minimum(low, high), high


def _with_new(
    residual: Tensor, slack: Tensor, high: Tensor, matrix: Tensor, products: Tensor
) -> tuple[Tensor, Tensor]:
    """<r_i, B_m> with a row (zero: it is exact) and a column for the new task vector."""
    whole = matrix.T @ products @ matrix
    kept, cross, square = whole[:-1, :-1], whole[:-1, -1], whole[-1, -1]
    # y of tau = U y + z. Any y is right; directions that may be noise are left to z.
    unit = kept.diagonal().clamp(min=0).sqrt()
    unit = torch.where(unit > 0, unit, 1.0)
    scaled = kept / torch.outer(unit, unit)
    along = torch.linalg.pinv(scaled, rtol=10 * NOISE, hermitian=True) @ (cross / unit) / unit
    scale = products.diagonal().clamp(min=0).sqrt() @ matrix
    terms = scale[:-1] @ along.abs() + scale[-1]
    left = square - 2 * (cross @ along) + along @ kept @ along
    rest = (left + NOISE * terms.square()).clamp(min=0).sqrt()  # ||z||, at most
    column = residual @ along
    unsure = slack @ along.abs() + high * rest
    both = []
    for inner, last in ((residual, column), (slack, unsure)):
        grown = torch.zeros(len(inner) + 1, inner.shape[1] + 1, dtype=torch.float64)
        grown[:-1, :-1] = inner
        grown[:-1, -1] = last
        both.append(grown)
    return both[0], both[1]


def check_budget(budget: int, count: int) -> None:
    """Raise UserError unless `count` bases and a new one can be kept within `budget`."""
    if budget < 2:
        raise UserError(
            f"the budget is {budget}: expected 2 or more, one basis for what was and one for the "
            "new task; give --budget 2 or more"
        )
    if budget < count:
        raise UserError(
            f"the budget is {budget}, and the store holds {count} bases: give {count} or more, or "
            f"build a smaller store"
        )


def cast_loss(norms: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
    """The most that a cast of vectors of `numel` elements and these norms can lose.

    Half a unit of each element's last place, or of the smallest number that `dtype` has.
    """
    kind = torch.finfo(dtype)
    return kind.eps / 2 * (norms + kind.smallest_normal * math.sqrt(numel))


def errors_of(gram: Tensor, reconstruction: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of ||tau_hat_i - tau_i|| [T] from the Gram matrix and the map T_hat = T R."""
    off = reconstruction - torch.eye(len(gram), dtype=torch.float64)
    squares = (off * (gram @ off)).sum(0)
    noise = NOISE * (gram.diagonal().clamp(min=0).sqrt() @ off.abs()).square()
    return (squares - noise).clamp(min=0).sqrt(), (squares + noise).clamp(min=0).sqrt()


def _last(norms: Tensor) -> Tensor:
    """`norms` with zeros for all but the new vector: the others are not computed anew."""
    return torch.cat([torch.zeros_like(norms[:-1]), norms[-1:]])


def _joined(square: Tensor, corner: float) -> Tensor:
    """[[square, 0], [0, corner]]."""
    rows, columns = square.shape
    whole = torch.zeros(rows + 1, columns + 1, dtype=torch.float64)
    whole[:rows, :columns] = square
    whole[rows, columns] = corner
    return whole


def _known_gram(buffer: Buffer, products: Tensor) -> Tensor | None:
    """G of all tasks, while every basis in the buffer is a task vector itself."""
    tasks, count = buffer.encoder.shape
    if buffer.gram is None or tasks != count:
        return None
    if not torch.equal(buffer.encoder, torch.eye(count, dtype=torch.float64)):
        return None
    return products


def reported(
    tasks: Sequence[str],
    norms: Mapping[str, float],
    bounds: Tensor,
    sizes: Tensor,
    decoder: Tensor,
) -> dict[str, Any]:
    """`errors` of basis.json: task -> bounds of ||tau_hat - tau|| / ||tau||, tau_hat in float32.

    Args:
        bounds: [2, T], of ||tau_hat_i - tau_i|| before float32 sums of the vectors.
        sizes: [M], the norms of the vectors; decoder: [M, T], what they are multiplied by.
    """
    rounding = ARITHMETIC * (sizes @ decoder.abs())
    low, high = (bounds[0] - rounding).clamp(min=0), bounds[1] + rounding
    made = {}
    for task, least, most in zip(tasks, low.tolist(), high.tolist(), strict=True):
        norm = norms[task] or math.inf
        made[task] = {"at_least": least / norm, "at_most": most / norm}
    return made
