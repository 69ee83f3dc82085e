"""Low-rank updates: their Gram matrix, from the factors alone, and the factors of any matrix.

A model fine-tuned by LoRA has the task vector s B A in each target matrix. The inner product of
two task vectors is sum((B1^T B2) * (A1 A2^T)), without a tensor of the size of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tvb_mergekit.core.gram import GramSums, symmetric
from tvb_mergekit.core.matrices import BLOCK, singular_values, top_triples

EXACT = 1024  # the longest short side of a matrix whose singular vectors are always exact
EXTRA, ROUNDS = 16, 4  # of `_nearly_range`: directions beyond the rank, and rounds


@dataclass(frozen=True)
class Factors:
    """The update left @ right of one matrix; left [out, r], right [r, in], float32 on the CPU."""

    left: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]


def factor_gram(updates: Sequence[Mapping[str, Factors]]) -> GramSums:
    """The Gram matrix [T, T] float64 of T task vectors, each given by the factors of its matrices.

    A matrix without factors counts as zero; `num_parameters` counts matrices with factors of any
    task. Costs O(R^2 (out + in)) a matrix for the sum R of the ranks.
    """
    sums = GramSums(torch.zeros(len(updates), len(updates), dtype=torch.float64))
    # Sorted: sums must not depend on the order of files.
    for name in sorted({name for update in updates for name in update}):
        owners = [i for i, update in enumerate(updates) if name in update]
        parts = [updates[i][name] for i in owners]
        left = torch.cat([part.left for part in parts], dim=1).double()
        right = torch.cat([part.right for part in parts], dim=0).double()
        ranks = torch.tensor([part.rank for part in parts])
        of = torch.repeat_interleave(torch.tensor(owners), ranks)
        for owner, part in zip(owners, parts, strict=True):  # never [R, R]
            products = (part.left.double().T @ left) * (part.right.double() @ right.T)
            sums.gram[owner].index_add_(0, of, products.sum(0))
        sums.num_parameters += left.shape[0] * right.shape[1]
    sums.gram = symmetric(sums.gram)
    return sums


def truncate(matrix: Tensor, rank: int) -> Factors:
    """The factors U S^1/2 and S^1/2 V^T of the `rank` largest singular triples of a matrix.

    By Eckart and Young, no update of this rank is nearer to the matrix. The triples come from the
    Gram matrix of the shorter side in float64. If this side is longer than EXACT and four times the
    rank, the matrix is first projected onto a random subspace that nearly holds the triples. With
    task vectors of SmolLM2-135M, the squared error was then up to 0.7 % larger.

    Args:
        matrix: [m, n] float32, any strides and device, not changed.
        rank: Beyond min(m, n) it adds zeros. Singular values of up to 1e-6 times the largest are 0.

    Returns:
        left [m, rank], right [rank, n]. The largest entry of each row of `right` is positive.
    """
    matrix = matrix.contiguous()  # products have other last bits for other strides
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    basis = _nearly_range(wide, rank)
    wide = wide if basis is None else basis.T @ wide
    near, sizes, far = top_triples(wide, min(rank, len(wide)), 0.0)
    if basis is not None:
        near = basis.double() @ near
    left, right = (near, far) if matrix.shape[0] <= matrix.shape[1] else (far, near)
    roots = right.gather(0, right.abs().argmax(0)[None])[0].sign() * sizes.sqrt()
    left, right = (pad(half * roots, (0, rank - len(roots))).float() for half in (left, right))
    return Factors(left.cpu().contiguous(), right.T.cpu().contiguous())


def leading_values(matrix: Tensor, count: int) -> Tensor:
    """The `count` largest singular values of a matrix and perhaps more, as `truncate` finds them.

    All of them cost O(min(m, n)^3).
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    basis = _nearly_range(wide, count)
    return singular_values(wide if basis is None else basis.T @ wide).cpu()


def factor_bytes(shape: Sequence[int], rank: int) -> int:
    """An upper bound of the bytes of all tensors of `truncate`, the matrix [m, n] included.

    It also holds for `leading_values`, and for the error of the factors.
    """
    side, longer = sorted(shape)
    rank = min(rank, side)
    exact = 32 * side**2 if _is_exact(side, rank) else 0  # float64, with LAPACK's own
    blocks = 16 * BLOCK * longer
    return 8 * side * longer + exact + blocks + 32 * (side + longer) * (rank + EXTRA)


def _is_exact(side: int, rank: int) -> bool:
    return side <= max(EXACT, 4 * (rank + EXTRA))


def _nearly_range(wide: Tensor, rank: int) -> Tensor | None:
    """Orthonormal columns that nearly span the first left singular vectors of [a, b].

    Halko, Martinsson and Tropp, SIAM Review 2011, Algorithm 4.4, from a fixed seed. None if the
    complete matrix is as fast.
    """
    if _is_exact(len(wide), rank):
        return None
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(wide.shape[1], rank + EXTRA, generator=generator).to(wide.device)
    basis: Tensor = torch.linalg.qr(wide @ probe).Q
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(wide @ torch.linalg.qr(wide.T @ basis).Q).Q
    return basis


def share_ranks(
    values: Sequence[Tensor], costs: Sequence[int], energy: float = 1.0, budget: int | None = None
) -> list[int]:
    """The rank of each matrix, so that all keep the most energy for their bytes.

    Directions are accepted in decreasing order of energy for each byte, over all matrices. No other
    ranks of at most the same bytes keep more.

    Args:
        values: Singular values of each matrix, decreasing, float64 on the CPU.
        costs: Bytes of one direction of each matrix.
        energy: Stop at this share of all squared singular values.
        budget: Stop before the first direction beyond so many bytes.
    """
    squares = torch.cat([each.square() for each in values])
    owners = torch.repeat_interleave(torch.tensor([len(each) for each in values]))
    nbytes = torch.tensor(costs)[owners]
    order = torch.argsort(squares / nbytes, descending=True, stable=True)
    order = order[squares[order] > 0]
    kept = squares[order].cumsum(0)
    count = int(torch.searchsorted(kept, energy * kept[-1:])) + 1 if len(kept) else 0
    if budget is not None:
        count = min(count, int((nbytes[order].cumsum(0) <= budget).sum()))
    return torch.bincount(owners[order[:count]], minlength=len(values)).tolist()
