"""The Gram matrix G = T^T T of the task vectors: its sums, its spectrum, and encodings by it.

Task vectors are formed in float32 from the stored dtypes. A product of SUMMED columns is summed in
float32, and the products in float64. The relative error of the trace is about 3e-7.

Encoders work on F, G = F^T F with F = S^(1/2) V^T from one `eigh`: ||F X||_F^2 is Tr(X^T G X)
without cancellation. Normal equations would square the condition number once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.errors import UserError

Array = NDArray[np.float64]
NULL = 1e-13  # the largest |F x| / (|F| |x|) of a null vector x of G
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


@dataclass(frozen=True)
class Encoding:
    """Coefficients of M bases over T tasks, all float64, and their loss.

    `encoder` is W_e [T, M] and `decoder` W_d [M, T]; T_hat = T `reconstruction` [T, T]. `errors`
    are ||tau_hat_i - tau_i|| / ||tau_i|| [T]: 0 if that is rounding alone, None of a zero vector.
    """

    encoder: Tensor
    decoder: Tensor
    reconstruction: Tensor
    eigenvalues: Tensor
    loss: float
    spectral_bound: float
    errors: list[float | None]

    @property
    def retained_energy(self) -> float:
        """1 - loss / tr G; 1 if all task vectors are zero."""
        total = float(self.eigenvalues.sum())
        return 1.0 - self.loss / total if total > 0 else 1.0


@dataclass(frozen=True)
class Gram:
    """G = T^T T by its spectrum: `values` [T] descending and `root` F [T, T].

    Eigenvalues that are zero up to rounding are set to zero: G has its true rank.
    """

    matrix: Array
    values: Array
    root: Array

    @classmethod
    def of(cls, gram: Tensor) -> Gram:
        """Raises UserError unless `gram` is finite."""
        matrix = np.array(gram.detach().cpu().numpy(), dtype=np.float64)
        if not np.isfinite(matrix).all():
            raise UserError("the Gram matrix of the task vectors holds NaN or infinity")
        matrix = (matrix + matrix.T) / 2
        values, vectors = np.linalg.eigh(matrix)
        values, vectors = values[::-1].copy(), vectors[:, ::-1]
        # eigh is exact to about eps * ||G||; below that an eigenvalue is noise of either sign
        values[values <= len(values) * np.finfo(np.float64).eps * max(values[0], 0.0)] = 0.0
        return cls(matrix, values, np.sqrt(values)[:, None] * vectors.T)

    @property
    def size(self) -> int:
        return len(self.values)

    def decoder(self, encoder: Array) -> Array:
        """The least-squares W_d [M, T] of least norm, (W_e^T G W_e)^+ W_e^T G = (F W_e)^+ F.

        F and W_e decide which values count as zero: their product may be pure noise.
        """
        left, scales, right = np.linalg.svd(self.root @ encoder, full_matrices=False)
        kept = scales > NULL * np.linalg.norm(self.root) * np.linalg.norm(encoder)
        return right[kept].T @ (left[:, kept].T @ self.root / scales[kept, None])

    def encoding(self, encoder: Array, decoder: Array | None = None, mean: float = 0) -> Encoding:
        """The result; the decoder defaults to least squares. R = W_e W_d + `mean` 11^T."""
        decoder = self.decoder(encoder) if decoder is None else decoder
        reconstruction = encoder @ decoder + mean
        lost = self.root @ (reconstruction - np.eye(self.size))
        loss = float(np.square(lost).sum())  # ||T R - T||_F^2 = ||F (R - I)||_F^2, Eqs. 5 and 6
        lengths, norms = np.linalg.norm(lost, axis=0), np.sqrt(self.matrix.diagonal())
        lengths[lengths <= NULL * np.linalg.norm(self.root)] = 0.0
        pairs = zip(lengths.tolist(), norms.tolist(), strict=True)
        errors = [length / norm if norm else None for length, norm in pairs]
        # the eigenvalues beyond the M-th (Eq. 7)
        bound = float(self.values[encoder.shape[1] :].sum())
        coefficients = _tensor(encoder), _tensor(decoder), _tensor(reconstruction)
        return Encoding(*coefficients, _tensor(self.values), loss, bound, errors)


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float64, order="C"))
