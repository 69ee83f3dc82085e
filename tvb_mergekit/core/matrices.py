"""Merges of one matrix that look at its singular directions: isotropic, singular vectors, WUDI.

From B_1 ... B_M, stacked as `bases` [M, m, n] (float32, any strides, not changed), each method
gives the direction D [m, n] float32 that is added to theta_0. r = min(m, n). The methods need no
data, and give the same bits for the same input and number of threads on the same machine.

Iso and TSV-M use Gram matrices of the shorter side, summed in float64 over BLOCK columns at a time.
Singular values are the roots of their eigenvalues, and known to about 1e-8 of the largest. Those up
to NULL of the largest count as 0, and their directions contribute nothing: rounding of models in
float32 makes such values. Vectors in 16 bits have larger ones (`rounding_noise`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tvb_mergekit.settings import Settings

BLOCK = 512  # columns in float64 at a time
NULL = 1e-5  # of the largest singular value
ROUGH = 3e-3  # of t M^2 2^-24, up to which WUDI computes in float32
Noise = Sequence[float] | None


def merge_matrix(
    settings: Settings,
    bases: Tensor,
    noise: Noise = None,
    shares: Sequence[float] | None = None,
    shape: tuple[int, int] | None = None,
) -> Tensor:
    """D of one matrix, by the method of the settings.

    Args:
        noise: the largest singular value that rounding to 16 bits makes in each B_m, [M].
        shares: of the entries that each B_m has, if it is a random sample, [M].
        shape: of the matrices P B_m Q^T, if P and Q have orthonormal columns: D is then their
            merge, between P and Q^T. Directions are counted in the larger matrices.
    """
    rows, columns = shape or bases.shape[1:]
    if settings.method == "basis_iso":
        return isotropic(bases, settings.common, noise, min(rows, columns))
    if settings.method == "basis_tsvm":
        return singular_vectors(bases, noise, min(rows, columns))
    assert settings.method == "basis_wudi"
    return interference_free(bases, settings.flow_time, noise, shares)


def rounding_noise(matrix: Tensor, dtype: torch.dtype) -> float:
    """Estimate the largest singular value of the errors of a matrix [m, n] after a cast to `dtype`.

    That of independent errors is about the largest norm of a row plus that of a column (Latala
    2005). An entry is off by up to eps / 2 of its size, by 0.41 of this on average; 0.6 leaves a
    margin. Below the normal numbers it is off by up to half of the smallest.
    """
    if not matrix.numel():
        return 0.0
    kind = torch.finfo(dtype)
    rows, columns = (torch.linalg.vector_norm(matrix, dim=dim).max() for dim in (1, 0))
    flat = kind.smallest_normal * sum(math.sqrt(side) for side in matrix.shape)
    return kind.eps / 2 * math.hypot(0.6 * float(rows + columns), flat)


def isotropic(
    bases: Tensor, common: float = 1.0, noise: Noise = None, rank: int | None = None
) -> Tensor:
    """D with one singular value for all its directions: those of the sum, or of each B_m as well.

    Iso-C (Marczak et al., ICML 2025, arXiv 2502.04959): mean(S) U V^T, for U S V^T = sum_m B_m and
    the mean over all r singular values. `common` below 1 gives Iso-CTS. It joins the first triples
    of the sum with equally many of each B_m minus its projection onto the sum's left space. The
    polar factors of all U and of all V, side by side, replace U and V; the mean replaces S.

    Args:
        common: the sum's share of the r directions, 0 to 1. The B_m share the rest equally, rounded
            as in the authors' code, but never more than r in all (their code may exceed r near M).
        rank: r, if the bases are cores of larger matrices (see `merge_matrix`).
    """
    count, most = len(bases), min(bases.shape[1:])
    rank, noise = rank or most, noise or [0.0] * count
    share = _share(rank, count, common)
    if not share:
        polar, sizes = _polar(bases.sum(0), sum(noise))
        return polar.mul_(sizes.sum() / rank)
    top, share = min(rank - count * share, most), min(share, most)  # others are zeros
    common_left, values, common_right = top_triples(bases.sum(0), top, sum(noise))
    floor = NULL * float(values[:1].sum())
    left, sizes, right = _places(bases, count * share + top)
    part = slice(count * share, None)
    left[:, part], sizes[part], right[:, part] = common_left, values, common_right
    blur = _blur(values, sum(noise))
    del common_right
    for number, base in enumerate(bases):
        part = slice(number * share, (number + 1) * share)
        outside = _outside(base, common_left)
        least = max(floor, noise[number])
        left[:, part], sizes[part], right[:, part] = top_triples(outside, share, least)
    del common_left, outside
    left = _polar(left, blur)[0]  # neither is held longer than it is needed
    right = _polar(right, blur)[0]
    return left.mul_(sizes.sum() / rank) @ right.T


def singular_vectors(bases: Tensor, noise: Noise = None, rank: int | None = None) -> Tensor:
    """D = U S V^T of the bases' first singular triples, U and V made orthonormal.

    TSV-M (Gargiulo et al., CVPR 2025, arXiv 2412.00081): the first r // M triples of each B_m. The
    polar factors of all U and of all V, side by side, replace U and V. D is 0 if r < M.

    Args:
        rank: r, if the bases are cores of larger matrices (see `merge_matrix`).
    """
    count, most = len(bases), min(bases.shape[1:])
    noise = noise or [0.0] * count
    share = min((rank or most) // count, most)
    left, sizes, right = _places(bases, count * share)
    blur = 0.0
    for number, base in enumerate(bases):
        part = slice(number * share, (number + 1) * share)
        left[:, part], sizes[part], right[:, part] = top_triples(base, share, noise[number])
        blur = max(blur, _blur(sizes[part], noise[number]))
    left = _polar(left, blur)[0]  # neither is held longer than it is needed
    right = _polar(right, blur)[0]
    return left.mul_(sizes.float()) @ right.T


def interference_free(
    bases: Tensor,
    flow_time: float | str,
    noise: Noise = None,
    shares: Sequence[float] | None = None,
) -> Tensor:
    """D on the way from S = sum_m B_m to the least sum_m ||(D - B_m) B_m^T||_F^2 / ||B_m||_F^2.

    WUDI (Cheng et al., ICML 2025, arXiv 2503.08099) takes some hundred steps of Adam from S. SWUDI
    (Wei et al., 2026, arXiv 2606.07289) follows the gradient flow dD/dt = R - D A for a time t:

        D(t) = S - (S A - R) g(A),  g(a) = (1 - exp(-t a)) / a  of each eigenvalue a of A,
        A = sum_m w_m B_m^T B_m,  R = sum_m w_m B_m B_m^T B_m,  w_m = 1 / ||B_m||^2 (0 for B_m = 0).

    If M m < n, D(t) = S - (S C^T - E) g(C C^T) C, with C [M m, n] of all B_m / ||B_m|| above each
    other and E [m, M m] of all B_m B_m^T / ||B_m|| side by side.

    Args:
        flow_time: t, or "exact" for the D of least loss that is nearest to S.
        shares: If each B_m is a sample of a share s of the entries of some B, times 1 / s, then
            E[B_m^T B_m] = B^T B + (1 / s - 1) diag(B^T B). So diag(B_m^T B_m) is multiplied by s.
    """
    count, rows, columns = bases.shape
    shares = [1.0] * count if shares is None else shares
    dtype = _flow_dtype(flow_time, count)
    norms = torch.stack([torch.linalg.vector_norm(base, dtype=torch.float64) for base in bases])
    norms *= norms.new_tensor(shares).sqrt()
    norms[norms == 0] = 1
    floor = math.hypot(*map(operator.truediv, noise or [], norms.tolist()))  # of C
    total = bases.sum(0)
    if small := count * rows < columns and min(shares) == 1:
        wide = norms.to(dtype)[:, None]
        sides = bases.flatten(0, 1).to(dtype) / wide.repeat_interleave(rows, 0)  # C
        normal = sides @ sides.T
        others = wide * (1 - torch.eye(count).to(wide))
        push = normal.view(count, rows, count, rows) * others[:, None, :, None]
        push = push.sum(0).flatten(1)  # S C^T - E
    else:
        normal = total.new_zeros(columns, columns, dtype=dtype)  # A
        push = total.new_zeros(rows, columns, dtype=dtype)  # S A - R
        for norm, base, share in zip(norms, bases, shares, strict=True):
            matrix = base.to(dtype, copy=True).div_(norm)
            square = matrix.T @ matrix
            square.diagonal().mul_(share)
            normal.add_(square)
            push.addmm_(matrix.copy_(total).sub_(base), square)
            del matrix, square
    values, vectors = torch.linalg.eigh(normal)
    del normal
    gains = _gains(values, flow_time, floor)
    push = (push @ vectors).mul_(gains) @ vectors.T
    return total.sub_((push @ sides if small else push).float())


def _flow_dtype(flow_time: float | str, count: int) -> torch.dtype:
    """float32 if its errors are small; `docs/mathematics.md` has them."""
    rough = flow_time == "exact" or float(flow_time) * count**2 * 2.0**-24 > ROUGH
    return torch.float64 if rough else torch.float32


def _gains(values: Tensor, time: float | str, floor: float) -> Tensor:
    """g(a) of eigenvalues a [k]; 0 if sqrt(a) <= `floor`."""
    values = values.clamp(min=0)
    end = math.inf if time == "exact" else float(time)
    cut = max(floor**2, NULL**2 * float(values.sum()))
    return torch.where(values > cut, -torch.expm1(-end * values) / values, 0)


def matrix_bytes(
    settings: Settings, count: int, rows: int, columns: int, sampled: bool = False
) -> int:
    """An upper bound of the bytes of all tensors of `merge_matrix`, M bases [m, n] included."""
    matrix, rank, longer = 4 * rows * columns, min(rows, columns), max(rows, columns)
    square, side = 8 * rank**2, columns if sampled else min(columns, count * rows)
    if settings.method == "basis_wudi":
        unit = _flow_dtype(settings.flow_time, count).itemsize
        normal, push = unit * side**2, unit * side * rows  # eigh needs three more of the first
        stacked = unit * side * columns if side < columns else 0
        steps = max(3 * normal, normal + push, 2 * push + (1 + unit // 4) * matrix)
        first, last = 2 * stacked, stacked + normal + push + steps
        return (count + 1) * matrix + max(first, last) + 128 * side
    isotropic = settings.method == "basis_iso"
    share = _share(rank, count, settings.common) if isotropic else rank // count
    top, held = share, 4 * (rows + columns) * count * share
    if isotropic:
        top = rank - count * share if share else 0
        held = matrix + (4 * (rows + columns) * rank + 8 * rows * top if share else 0)
    pieces = 16 * max(rows * min(BLOCK, columns), columns * min(BLOCK, rows))
    eigen = 4 * square  # with LAPACK's own
    polar = matrix + square + pieces
    triples = square + 8 * (2 * rank + longer) * top + pieces
    return count * matrix + held + max(eigen, polar, triples) + 256 * rank


def _share(rank: int, count: int, common: float) -> int:
    """The directions of each B_m alone, in Iso-CTS."""
    return min(round((rank - int(rank * common)) / count), rank // count)


def _places(bases: Tensor, directions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty U [m, directions], S [directions] and V [n, directions]."""
    left, right = (bases.new_empty(side, directions) for side in bases.shape[1:])
    return left, bases.new_empty(directions, dtype=torch.float64), right


def top_triples(matrix: Tensor, directions: int, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """The first singular triples of [m, n], float64: U [m, k], S [k] decreasing, V [n, k].

    Vectors are zero for values of at most `floor`, or NULL times the largest.
    """
    wide = _wide(matrix)
    sizes, vectors = _spectrum(wide)
    inverse = _inverse(sizes, floor)
    first = slice(len(sizes) - directions, None)
    sizes, inverse = sizes[first].flip(0), inverse[first].flip(0)
    near = vectors[:, first].flip(1) * (inverse > 0)
    far = sizes.new_empty(wide.shape[1], directions)
    for part in _blocks(wide.shape[1]):
        far[part] = wide[:, part].double().T @ near
    far *= inverse
    left, right = (near, far) if wide is matrix else (far, near)
    return left, sizes, right


def _outside(base: Tensor, left: Tensor) -> Tensor:
    """B_m - U U^T B_m [m, n] float32, for U [m, k] float64 with orthonormal columns."""
    outside = torch.empty_like(base)
    for part in _blocks(base.shape[1]):
        piece = base[:, part].double()
        outside[:, part] = piece.addmm_(left, left.T @ piece, alpha=-1)
    return outside


def _polar(matrix: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """U V^T [m, n] float32 of a U S V^T [m, n], and S [r] float64, increasing."""
    wide = _wide(matrix)
    sizes, vectors = _spectrum(wide)
    root = (vectors * _inverse(sizes, floor)) @ vectors.T
    del vectors
    polar = torch.empty_like(wide)
    for part in _blocks(wide.shape[1]):
        polar[:, part] = root @ wide[:, part].double()
    return (polar if wide is matrix else polar.T), sizes


def _spectrum(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values [a] float64, increasing, and left singular vectors [a, a] of [a, b], a <= b.

    Newton-Schulz steps to a polar factor are six times slower for 1024 x 1024 noise on a CPU.
    """
    values, vectors = torch.linalg.eigh(_gram(wide))
    return values.clamp_(min=0).sqrt_(), vectors


def _gram(wide: Tensor) -> Tensor:
    """W W^T [a, a] float64 of [a, b]."""
    gram = wide.new_zeros(len(wide), len(wide), dtype=torch.float64)
    for part in _blocks(wide.shape[1]):
        piece = wide[:, part].double()
        gram.addmm_(piece, piece.T)
        del piece
    return gram


def _inverse(sizes: Tensor, floor: float) -> Tensor:
    """1 / sigma [r], sigma increasing; 0 for sigma up to `floor` or NULL times the largest."""
    return torch.where(sizes > max(floor, NULL * float(sizes[-1:].sum())), 1 / sizes, 0)


def _blur(sizes: Tensor, noise: float) -> float:
    """An estimate of the turn by rounding of vectors with values above a quarter of the largest."""
    largest = float(sizes[:1].sum())
    return 4 * noise / largest if largest else 0.0


def _blocks(columns: int) -> Iterator[slice]:
    for start in range(0, columns, BLOCK):
        yield slice(start, min(start + BLOCK, columns))


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
