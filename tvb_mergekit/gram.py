"""The Gram matrix G = T^T T of the task vectors: its sums over chunks, and what is wrong with them.

Task vectors are formed in float32 from the stored dtypes; products of 2048 columns (of 512 in
`loops`) are summed in float32 and in float64 from there on (relative error of the trace about 3e-7,
against 3e-4 for whole tensors in float32). `stream.gram_of` has the pass over the tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.layout import BLOCK

PIECE = 2**17  # elements that are looked at together, where nothing else says how many
BUDGET_VARIABLE = "TVB_MERGEKIT_BLOCK_MB"
DEFAULT_BUDGET = 256 * 2**20  # bytes


@dataclass
class GramSums:
    """Sums over tensors: `gram` [T, T] and, for random projections, `sketch_gram` [M, M] =
    Omega^T Omega and `sketch_tasks` [M, T] = Omega^T T; all float64 on the CPU.

    `matrix_squares` [1 + T]: ||theta_0||^2 and ||tau_i||^2 over tensors of two or more dimensions.
    """

    gram: Tensor
    base_norm_squared: float = 0.0
    num_parameters: int = 0
    sketch_gram: Tensor | None = None
    sketch_tasks: Tensor | None = None
    matrix_squares: Tensor | None = None

    @classmethod
    def zero(cls, tasks: int, sketch: Sketch | None = None) -> GramSums:
        def square(rows: int, columns: int) -> Tensor:
            return torch.zeros(rows, columns, dtype=torch.float64, device="cpu")

        sums = cls(square(tasks, tasks))
        sums.matrix_squares = square(1, 1 + tasks)[0]
        if sketch is not None:
            sums.sketch_gram = square(sketch.columns, sketch.columns)
            sums.sketch_tasks = square(sketch.columns, tasks)
        return sums

    def add(self, chunks: ChunkSums) -> None:
        """Add a piece, chunk by chunk: the same sum whatever the piece that the chunks came in."""
        for gram in chunks.gram:
            self.gram += gram
        for norm in chunks.base_norm_squared.tolist():
            self.base_norm_squared += norm
        if chunks.sketch_gram is not None and chunks.sketch_tasks is not None:
            assert self.sketch_gram is not None and self.sketch_tasks is not None
            for square in chunks.sketch_gram:
                self.sketch_gram += square
            for products in chunks.sketch_tasks:
                self.sketch_tasks += products

    def end(self, shape: Sequence[int]) -> None:
        """These are the sums of one tensor, of this shape, and they are whole."""
        if len(shape) > 1:
            base = torch.tensor([self.base_norm_squared], dtype=torch.float64, device="cpu")
            self.matrix_squares = torch.cat([base, self.gram.diagonal()])

    @property
    def sizes(self) -> list[float]:
        """||theta_0|| and ||tau_i|| over the matrices: norm layers of ones would hide in
        ||theta_0|| that a model is unlike the base. Over all tensors where there is no matrix."""
        squares = self.matrix_squares
        if squares is None or not squares.any():
            each = [self.base_norm_squared, *self.gram.diagonal().tolist()]
            squares = torch.tensor(each, dtype=torch.float64, device="cpu")
        sizes: list[float] = squares.clamp(min=0).sqrt().tolist()
        return sizes

    def plus(self, other: GramSums) -> GramSums:
        """Both together. Sums of tensors are added in the order of the tensors, wherever they were
        taken: so they are the same to the bit however many processes take them."""

        def added(one: Tensor | None, two: Tensor | None) -> Tensor | None:
            return None if one is None or two is None else one + two

        return GramSums(
            self.gram + other.gram,
            self.base_norm_squared + other.base_norm_squared,
            self.num_parameters + other.num_parameters,
            added(self.sketch_gram, other.sketch_gram),
            added(self.sketch_tasks, other.sketch_tasks),
            added(self.matrix_squares, other.matrix_squares),
        )

    def scaled(self, weights: Sequence[float]) -> GramSums:
        """The same sums for task vectors scaled by `weights` [T]: exact, since G is bilinear."""
        w = torch.tensor(weights, dtype=torch.float64, device="cpu")
        tasks = None if self.sketch_tasks is None else self.sketch_tasks * w
        squares = self.matrix_squares
        if squares is not None:
            one = torch.ones(1, dtype=torch.float64, device="cpu")
            squares = squares * torch.cat([one, w.square()])
        gram = self.gram * torch.outer(w, w)
        return replace(self, gram=gram, sketch_tasks=tasks, matrix_squares=squares)


@dataclass(frozen=True)
class ChunkSums:
    """The sums of n chunks: `gram` [n, T, T], `base_norm_squared` [n], and with a sketch
    `sketch_gram` [n, M, M] and `sketch_tasks` [n, M, T]; float64 on the CPU."""

    gram: Tensor
    base_norm_squared: Tensor
    sketch_gram: Tensor | None = None
    sketch_tasks: Tensor | None = None


@dataclass(frozen=True)
class Sketch:
    """A d x M Gaussian matrix Omega that is never held: rows come from (seed, tensor name)."""

    columns: int
    seed: int

    def stream(self, tensor_name: str) -> torch.Generator:
        """A generator for one tensor's rows; draw them with `rows` in order, BLOCK at a time."""
        text = hashlib.sha256(f"{self.seed}:{tensor_name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(text[:8], "little") >> 1)

    def rows(self, generator: torch.Generator, count: int, device: torch.device) -> Tensor:
        """The next `count` rows, transposed: [M, count] float32 on `device`.

        Always drawn on the CPU and in blocks of BLOCK rows, so that Omega does not depend on the
        device or on the block budget.
        """
        omega = torch.empty(self.columns, count, dtype=torch.float32, device="cpu")
        for start in range(0, count, BLOCK):
            block = torch.randn(self.columns, BLOCK, generator=generator, device="cpu")
            omega[:, start : start + BLOCK] = block[:, : count - start]
        return omega.to(device)


def block_budget() -> int:
    """Bytes that the working buffers of one device may take: TVB_MERGEKIT_BLOCK_MB, or 256 MB.

    Raises:
        UserError: the variable is not a number of at least 1.
    """
    text = os.environ.get(BUDGET_VARIABLE, "")
    if not text:
        return DEFAULT_BUDGET
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = 0.0
    if not 1 <= megabytes < float("inf"):
        raise UserError(f"{BUDGET_VARIABLE} is `{text}`; expected megabytes, 1 or more")
    return int(megabytes * 2**20)


def products(left: Tensor, right: Tensor) -> Tensor:
    """left @ right^T in float64: whole BLOCKs by one batched product, and the rest."""
    whole = left.shape[1] // BLOCK * BLOCK
    total = None
    if whole:
        batch, other = _blocks(left[:, :whole], right[:, :whole])
        total = torch.bmm(batch, other).sum(0, dtype=torch.float64)
    if whole < left.shape[1]:
        rest = (left[:, whole:] @ right[:, whole:].T).double()
        total = rest if total is None else total.add_(rest)
    assert total is not None, "no columns"
    return total


class Products:
    """X @ X^T in float64 of one X after the other: `products` with views that are made once."""

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.shape[1] % BLOCK:
            return products(rows, rows)
        if rows is not self._last:
            self._last = rows
            self._batch, self._other = _blocks(rows, rows)
            self._out = torch.bmm(self._batch, self._other)
        torch.bmm(self._batch, self._other, out=self._out)
        return self._out.sum(0, dtype=torch.float64)


def _blocks(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Whole BLOCKs of columns of two matrices, for one batched product."""
    other = right.unflatten(1, (-1, BLOCK)).permute(1, 2, 0)
    return left.unflatten(1, (-1, BLOCK)).transpose(0, 1), other


def symmetric(squares: Tensor) -> Tensor:
    """Products [n, T, T] of matrices with themselves, on the CPU: not every matrix product gives
    X X^T symmetric to the bit (AVX2 and cuBLAS do not)."""
    return ((squares + squares.transpose(1, 2)) / 2).cpu()


def check_shapes(name: str, base: Tensor, models: Sequence[Tensor], tasks: Sequence[str]) -> None:
    """Raise UserError where a model's tensor has another shape than the base's."""
    for task, model in zip(tasks, models, strict=True):
        if model.shape != base.shape:
            raise UserError(shapes_differ(name, task, tuple(model.shape), tuple(base.shape)))


def shapes_differ(name: str, task: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """The message for a tensor whose shape is not the base's."""
    return (
        f"tensor `{name}`: task `{task}` has shape {list(found)}, the base {list(expected)}; "
        f"leave it to the base with `exclude: {name.split('.')[-2] if '.' in name else name}`, or "
        "for a changed vocabulary align it with `tokenizer_source: base`"
    )


def not_finite(
    name: str, base: Tensor, models: Iterable[Tensor] = (), tasks: Sequence[str] = ()
) -> str:
    """The message that says which of the inputs of one tensor holds NaN or infinity.

    Args:
        models: of the tasks, taken one at a time. Without tasks the tensor stays the base's.
    """
    remedy = "take another, or leave the tensor out with `exclude`" if tasks else "take another"
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
    """Numbers of NaN and of infinite entries, counted in chunks of bounded size."""
    nan = inf = 0
    for piece in tensor.reshape(-1).split(PIECE):
        if piece.dtype.itemsize == 1:  # no comparisons are defined for 8-bit floats
            piece = piece.float()
        if not torch.isfinite(piece).all():
            nan += int(torch.isnan(piece).sum())
            inf += int(torch.isinf(piece).sum())
    return nan, inf
