"""The encoders' common parts: the Gram matrix in square-root form, decoder, loss, bounds, result.

G = F^T F with F = S^(1/2) V^T from one `eigh`. Everything else works on F: ||F X||_F^2 is
Tr(X^T G X) without cancellation. Normal equations would square the condition number once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.errors import UserError

Array = NDArray[np.float64]
NULL = 1e-13  # the largest |F x| / (|F| |x|) of a null vector x of G


@dataclass(frozen=True)
class Encoding:
    """Coefficients of M bases over T tasks, all float64, and their loss.

    `encoder` is W_e [T, M] and `decoder` W_d [M, T]; T_hat = T `reconstruction` [T, T].
    """

    encoder: Tensor
    decoder: Tensor
    reconstruction: Tensor
    eigenvalues: Tensor
    loss: float
    spectral_bound: float

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

    def errors(self, reconstruction: Array) -> Array:
        """||tau_hat_i - tau_i|| [T] of T_hat = T `reconstruction`; 0 if it is rounding alone."""
        lengths = np.linalg.norm(self.root @ (reconstruction - np.eye(self.size)), axis=0)
        return np.where(lengths > NULL * np.linalg.norm(self.root), lengths, 0.0)

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
        # ||T R - T||_F^2 = ||F (R - I)||_F^2 (paper Eqs. 5 and 6)
        loss = float(np.square(self.root @ (reconstruction - np.eye(self.size))).sum())
        # the eigenvalues beyond the M-th (Eq. 7)
        bound = float(self.values[encoder.shape[1] :].sum())
        coefficients = _tensor(encoder), _tensor(decoder), _tensor(reconstruction)
        return Encoding(*coefficients, _tensor(self.values), loss, bound)


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float64, order="C"))
