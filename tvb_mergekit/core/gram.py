"""The Gram matrix G = T^T T of the task vectors: sums over chunks, and messages for bad inputs.

Task vectors are formed in float32 from the stored dtypes. A product of SUMMED columns is summed in
float32, and the products in float64. The relative error of the trace is about 3e-7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError

SUMMED = 2048  # columns that one float32 matrix product sums over
AT_ONCE = 2**17  # elements that are checked at once


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64, device="cpu")


@dataclass
class GramSums:
    """Sums over tensors, or over one chunk; all in float64 on the CPU.

    Attributes:
        gram: T^T T [T, T].
        inner: Whether it has the inner products of different task vectors, or zeros there.
        matrix_squares: ||theta_0||^2 and ||tau_i||^2 over tensors of two or more dimensions,
            [1 + T]; None for a chunk.
    """

    gram: Tensor
    base_norm_squared: float = 0.0
    num_parameters: int = 0
    matrix_squares: Tensor | None = None
    inner: bool = True

    @classmethod
    def zero(cls, tasks: int, inner: bool = True) -> GramSums:
        return cls(_zeros(tasks, tasks), matrix_squares=_zeros(1 + tasks), inner=inner)

    def of_tensor(self, shape: Sequence[int], shares: Sequence[float]) -> GramSums:
        """These sums, of a complete tensor of this shape.

        Args:
            shares: E||tau_i||^2 / E||z_i||^2 of the summed z_i, [T]: below 1 for random samples.
        """
        gram = self.gram.clone()
        gram.diagonal().mul_(torch.tensor(shares, dtype=torch.float64))
        whole = replace(self, gram=gram, num_parameters=math.prod(shape))
        squares = whole._squares() * (1.0 if len(shape) > 1 else 0.0)
        return replace(whole, matrix_squares=squares)

    def _squares(self) -> Tensor:
        return torch.cat([_zeros(1) + self.base_norm_squared, self.gram.diagonal()])

    @property
    def sizes(self) -> list[float]:
        """||theta_0|| and ||tau_i|| over the matrices; without matrices over all tensors.

        Norm layers of ones would lengthen ||theta_0|| and hide that a model is unlike the base.
        """
        squares = self.matrix_squares
        if squares is None or not squares.any():
            squares = self._squares()
        sizes: list[float] = squares.clamp(min=0).sqrt().tolist()
        return sizes

    def finite(self) -> bool:
        return bool(torch.isfinite(self.gram).all())

    def plus(self, other: GramSums) -> GramSums:
        """The sums over both parts. Added in order, they do not depend on processes and threads."""
        mine, theirs = self.matrix_squares, other.matrix_squares
        return GramSums(
            self.gram + other.gram,
            self.base_norm_squared + other.base_norm_squared,
            self.num_parameters + other.num_parameters,
            None if mine is None or theirs is None else mine + theirs,
            self.inner and other.inner,
        )

    def scaled(self, weights: Sequence[float]) -> GramSums:
        """The sums for task vectors scaled by `weights` [T]: exact, since G is bilinear."""
        w = torch.tensor(weights, dtype=torch.float64, device="cpu")
        squares = self.matrix_squares
        return replace(
            self,
            gram=self.gram * torch.outer(w, w),
            matrix_squares=None if squares is None else squares * torch.cat([_zeros(1) + 1, w**2]),
        )


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


NO_TENSOR = "no tensor takes part: every floating-point tensor is excluded or missing in a model"


def shapes_differ(name: str, task: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return (
        f"tensor `{name}`: task `{task}` has shape {list(found)}, the base {list(expected)}; "
        f"leave it to the base with `exclude: {name.split('.')[-2] if '.' in name else name}`, or "
        "for a changed vocabulary align it with `tokenizer_source: base`"
    )


def check_copied(name: str, tensor: Tensor, excluded: bool) -> None:
    """Raise UserError if a tensor that stays the base's is damaged: an excluded one, such as a
    mask, may hold infinity."""
    nan, inf = count_not_finite(tensor) if tensor.is_floating_point() else (0, 0)
    if nan or (inf and not excluded):
        raise UserError(not_finite(name, tensor))


def not_finite(
    name: str, base: Tensor, models: Iterable[Tensor] = (), tasks: Sequence[str] = ()
) -> str:
    """A message that names the first input of one tensor with NaN or infinity.

    Args:
        models: the tensors of the tasks, read one at a time; empty if the tensor stays the base's.
    """
    remedy = "take another, or leave the tensor out with `exclude`"
    named = zip((f"task `{task}`" for task in tasks), models, strict=True)
    for who, tensor in chain([("the base", base)], named):
        nan, inf = count_not_finite(tensor)
        if nan or inf:
            return (
                f"tensor `{name}` of {who} holds {nan:,} NaN and {inf:,} infinite values of "
                f"{tensor.numel():,}; this checkpoint is damaged or its training diverged: "
                f"{remedy}"
            )
    return (
        f"tensor `{name}`: the products of its task vectors overflow float32; the models are "
        "not fine-tuned from this base"
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
