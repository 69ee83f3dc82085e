"""The Gram matrix G = T^T T of the task vectors: sums over pieces, and messages for bad inputs.

Task vectors are formed in float32 from the stored dtypes. A product of SUMMED columns is summed in
float32, and the products in float64. The relative error of the trace is about 3e-7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError

SUMMED = 2048  # columns that one float32 matrix product sums over
AT_ONCE = 2**17  # elements that are checked or made at once
OR_EXCLUDE = ", or leave the tensor out with `exclude`"
NO_TENSOR = "no tensor takes part: every floating-point tensor is excluded or missing in a model"


@dataclass
class GramSums:
    """Sums over tensors: T^T T [T, T], float64 on the CPU, and ||theta_0||^2.

    Without `inner` products of different task vectors, there are zeros.
    """

    gram: Tensor
    base_norm_squared: float = 0.0
    num_parameters: int = 0
    inner: bool = True

    @classmethod
    def zero(cls, tasks: int, inner: bool = True) -> GramSums:
        return cls(torch.zeros(tasks, tasks, dtype=torch.float64, device="cpu"), inner=inner)

    @property
    def norms(self) -> list[float]:
        """||tau_i||, [T]."""
        found: list[float] = self.gram.diagonal().clamp(min=0).sqrt().tolist()
        return found

    def plus(self, other: GramSums) -> GramSums:
        """The sums over both parts. Added in order, they do not depend on processes and threads."""
        base_norm_squared = self.base_norm_squared + other.base_norm_squared
        number, inner = self.num_parameters + other.num_parameters, self.inner and other.inner
        return GramSums(self.gram + other.gram, base_norm_squared, number, inner)

    def scaled(self, weights: Sequence[float]) -> GramSums:
        """The sums for task vectors scaled by `weights` [T]: exact, since G is bilinear."""
        w = self.gram.new_tensor(weights)
        return replace(self, gram=self.gram * torch.outer(w, w))


def products(rows: Tensor) -> Tensor:
    """X X^T in float64 of X [R, n]: one batched product over all complete runs, then the rest."""
    runs, rest = _runs(rows)
    runs = runs.transpose(0, 1)
    return torch.bmm(runs, runs.mT).sum(0, dtype=torch.float64).add_(rest @ rest.T)


def squares(rows: Tensor) -> Tensor:
    """The diagonal of `products`, [R]."""
    runs, rest = (torch.linalg.vector_norm(each, dim=-1).double() for each in _runs(rows))
    total: Tensor = runs.square().sum(1) + rest.square()
    return total


def _runs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The complete runs [R, k, SUMMED], and the columns after them."""
    count = rows.shape[1] // SUMMED
    whole = count * SUMMED
    return rows[:, :whole].unflatten(1, (count, SUMMED)), rows[:, whole:]


def symmetric(square: Tensor) -> Tensor:
    """X X^T on the CPU, symmetric to the bit; products by AVX2 and cuBLAS are not."""
    return ((square + square.T) / 2).cpu()


def damage(tensor: Tensor, infinite: bool = False) -> str:
    """Say what is wrong with a tensor that holds NaN, or infinity unless it may, else ""."""
    nan = inf = 0
    for chunk in tensor.reshape(-1).split(AT_ONCE):
        if chunk.dtype.itemsize == 1:  # no comparisons are defined for 8-bit floats
            chunk = chunk.float()
        if not torch.isfinite(chunk).all():
            nan += int(torch.isnan(chunk).sum())
            inf += int(torch.isinf(chunk).sum())
    if not nan and (infinite or not inf):
        return ""
    return (
        f"holds {nan:,} NaN and {inf:,} infinite values of {tensor.numel():,}; this checkpoint is "
        "damaged or its training diverged: take another"
    )


def check_copied(name: str, tensor: Tensor, excluded: bool) -> None:
    """Raise UserError if a tensor that stays the base's is damaged.

    One that is `excluded`, such as a mask, may hold infinity.
    """
    if told := damage(tensor, excluded):
        raise UserError(f"tensor `{name}` of the base {told}{'' if excluded else OR_EXCLUDE}")


def not_finite(name: str, inputs: Iterable[tuple[str, Tensor]]) -> str:
    """A message that names the first of the inputs of one tensor with NaN or infinity."""
    for who, tensor in inputs:
        if told := damage(tensor):
            return f"tensor `{name}` of {who} {told}{OR_EXCLUDE}"
    return (
        f"tensor `{name}`: the products of its task vectors overflow float32; the models are "
        "not fine-tuned from this base"
    )


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


def cores_of(updates: Sequence[Factors]) -> tuple[Tensor, Tensor, Tensor]:
    """P [m, p], the cores C_i [T, p, q] and Q [n, q], float64: each update is P C_i Q^T.

    Orthonormal P and Q (QR) span the columns of all `left` and the rows of all `right`, so p and q
    are at most the sum of all ranks. Whatever commutes with P and Q may work on the cores.
    """
    left, of_left = torch.linalg.qr(torch.cat([each.left for each in updates], 1).double())
    right, of_right = torch.linalg.qr(torch.cat([each.right for each in updates]).T.double())
    # P^T left_i and (right_i Q)^T are columns of the two triangles
    columns = [of.split([each.rank for each in updates], 1) for of in (of_left, of_right)]
    cores = [one @ other.T for one, other in zip(*columns, strict=True)]
    return left, torch.stack(cores), right


def factor_gram(matrices: Iterable[Sequence[Factors]], tasks: int) -> GramSums:
    """The Gram matrix [T, T] float64 of T task vectors by the T factors of each of their matrices.

    Two updates B A have the inner product sum((B1^T B2) * (A1 A2^T)), without a complete matrix:
    O(R^2 (out + in)) for the sum R of the ranks.
    """
    sums = GramSums.zero(tasks)
    for updates in matrices:
        ranks = [each.rank for each in updates]
        left = torch.cat([each.left for each in updates], 1).double()
        right = torch.cat([each.right for each in updates]).double()
        parts = zip(sums.gram, left.split(ranks, 1), right.split(ranks), strict=True)
        for row, one, other in parts:  # sum((B1^T B2) * (A1 A2^T)), never [R, R]
            inner = (one.T @ left) * (other @ right.T)
            row += torch.stack([each.sum() for each in inner.split(ranks, 1)])
        sums.num_parameters += left.shape[0] * right.shape[1]
    sums.gram = symmetric(sums.gram)
    return sums
