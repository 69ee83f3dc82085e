"""The Gram matrix G = T^T T of the task vectors: sums over pieces, and messages for bad inputs.

Task vectors are formed in float32 from the stored dtypes. A product of SUMMED columns is summed in
float32, and the products in float64. The relative error of the trace is about 3e-7.

A model fine-tuned by LoRA has the task vector s B A in each target matrix. The inner product of
two task vectors is sum((B1^T B2) * (A1 A2^T)), without a tensor of the size of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError

SUMMED = 2048  # columns that one float32 matrix product sums over
AT_ONCE = 2**17  # elements that are checked or made at once
NO_TENSOR = "no tensor takes part: every floating-point tensor is excluded or missing in a model"


def _squares_of(base: float, gram: Tensor) -> Tensor:
    """||theta_0||^2 and ||tau_i||^2 [1 + T]."""
    return torch.cat([gram.new_tensor([base]), gram.diagonal()])


@dataclass
class GramSums:
    """Sums over tensors; all in float64 on the CPU.

    Attributes:
        gram: T^T T [T, T].
        inner: Whether it has the inner products of different task vectors, or zeros there.
        matrix_squares: ||theta_0||^2 and ||tau_i||^2 over tensors of two or more dimensions,
            [1 + T].
    """

    gram: Tensor
    base_norm_squared: float = 0.0
    num_parameters: int = 0
    matrix_squares: Tensor = field(kw_only=True)
    inner: bool = True

    @classmethod
    def zero(cls, tasks: int, inner: bool = True) -> GramSums:
        gram = torch.zeros(tasks, tasks, dtype=torch.float64, device="cpu")
        return cls(gram, matrix_squares=_squares_of(0, gram), inner=inner)

    @classmethod
    def of_tensor(
        cls,
        gram: Tensor,
        base_square: float,
        shape: Sequence[int],
        drawn: Sequence[float],
        inner: bool,
    ) -> GramSums:
        """The sums of one tensor.

        Args:
            gram: Z^T Z [T, T] of the vectors that were read.
            drawn: E||tau_i||^2 / E||z_i||^2, [T]: below 1 for random samples.
        """
        gram.diagonal().mul_(gram.new_tensor(drawn))
        matrix = _squares_of(base_square, gram) * (1.0 if len(shape) > 1 else 0.0)
        return cls(gram, base_square, math.prod(shape), matrix_squares=matrix, inner=inner)

    @property
    def sizes(self) -> list[float]:
        """||theta_0|| and ||tau_i|| over the matrices; without matrices over all tensors.

        Norm layers of ones would lengthen ||theta_0|| and hide that a model is unlike the base.
        """
        squares = self.matrix_squares
        if not squares.any():
            squares = _squares_of(self.base_norm_squared, self.gram)
        sizes: list[float] = squares.clamp(min=0).sqrt().tolist()
        return sizes

    def plus(self, other: GramSums) -> GramSums:
        """The sums over both parts. Added in order, they do not depend on processes and threads."""
        return GramSums(
            self.gram + other.gram,
            self.base_norm_squared + other.base_norm_squared,
            self.num_parameters + other.num_parameters,
            matrix_squares=self.matrix_squares + other.matrix_squares,
            inner=self.inner and other.inner,
        )

    def scaled(self, weights: Sequence[float]) -> GramSums:
        """The sums for task vectors scaled by `weights` [T]: exact, since G is bilinear."""
        w = self.gram.new_tensor(weights)
        squares = self.matrix_squares * self.gram.new_tensor([1.0, *weights]) ** 2
        return replace(self, gram=self.gram * torch.outer(w, w), matrix_squares=squares)


def products(left: Tensor, right: Tensor) -> Tensor:
    """left @ right^T in float64: complete runs of SUMMED by one batched product, then the rest."""
    count = left.shape[1] // SUMMED
    whole = count * SUMMED
    lefts = left[:, :whole].unflatten(1, (count, SUMMED)).transpose(0, 1)
    rights = right[:, :whole].unflatten(1, (count, SUMMED)).permute(1, 2, 0)
    total = torch.bmm(lefts, rights).sum(0, dtype=torch.float64)
    return total.add_(left[:, whole:] @ right[:, whole:].T)


def squares(rows: Tensor) -> Tensor:
    """Squared norms of the rows of [R, n], [R] float64; float32 sums as in `products`."""
    whole = rows.shape[1] // SUMMED * SUMMED
    blocks = rows[:, :whole].unflatten(1, (-1, SUMMED)) if whole else rows[:, None, :0]
    total: Tensor = torch.linalg.vector_norm(blocks, dim=2).double().square_().sum(1)
    return total.add_(torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square_())


def symmetric(square: Tensor) -> Tensor:
    """X X^T on the CPU, symmetric to the bit; products by AVX2 and cuBLAS are not."""
    return ((square + square.T) / 2).cpu()


def check_copied(name: str, tensor: Tensor, excluded: bool) -> None:
    """Raise UserError if a tensor that stays the base's is damaged: an excluded one, such as a
    mask, may hold infinity."""
    nan, inf = count_not_finite(tensor) if tensor.is_floating_point() else (0, 0)
    if nan or (inf and not excluded):
        raise UserError(_damaged(name, "the base", nan, inf, tensor.numel(), excluded))


def not_finite(name: str, base: Tensor, models: Iterable[Tensor], tasks: Sequence[str]) -> str:
    """A message that names the first input of one tensor with NaN or infinity."""
    named = zip((f"task `{task}`" for task in tasks), models, strict=True)
    for who, tensor in (("the base", base), *named):
        nan, inf = count_not_finite(tensor)
        if nan or inf:
            return _damaged(name, who, nan, inf, tensor.numel())
    return (
        f"tensor `{name}`: the products of its task vectors overflow float32; the models are "
        "not fine-tuned from this base"
    )


def _damaged(name: str, who: str, nan: int, inf: int, numel: int, excluded: bool = False) -> str:
    other = "" if excluded else ", or leave the tensor out with `exclude`"
    return (
        f"tensor `{name}` of {who} holds {nan:,} NaN and {inf:,} infinite values of {numel:,}; "
        f"this checkpoint is damaged or its training diverged: take another{other}"
    )


def count_not_finite(tensor: Tensor) -> tuple[int, int]:
    """Numbers of NaN and of infinite entries, counted AT_ONCE elements at a time."""
    nan = inf = 0
    for chunk in tensor.reshape(-1).split(AT_ONCE):
        if chunk.dtype.itemsize == 1:  # no comparisons are defined for 8-bit floats
            chunk = chunk.float()
        if not torch.isfinite(chunk).all():
            nan += int(torch.isnan(chunk).sum())
            inf += int(torch.isinf(chunk).sum())
    return nan, inf


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


def factor_gram(updates: Sequence[Mapping[str, Factors]]) -> GramSums:
    """The Gram matrix [T, T] float64 of T task vectors, each given by the factors of its matrices.

    A matrix without factors counts as zero; `num_parameters` counts matrices with factors of any
    task. Costs O(R^2 (out + in)) a matrix for the sum R of the ranks.
    """
    sums = GramSums.zero(len(updates))
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
    sums.matrix_squares[1:] = sums.gram.diagonal()
    return sums
