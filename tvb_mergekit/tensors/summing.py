"""Sums of inner products of task vectors, on the way of any pass that reads them.

Each tensor is summed on its own, and the tensors' sums in order. So G does not depend on the number
of devices, threads and processes, nor on the budget unless it is very small.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tvb_mergekit.core.gram import (
    BLOCK,
    NO_TENSOR,
    GramSums,
    Sketch,
    not_finite,
    products,
    symmetric,
)
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.layout import COLUMNS, PADDING, Layout, Needs
from tvb_mergekit.tensors.stream import Chunks, Item, Piece, PieceBuffer

if TYPE_CHECKING:
    from tvb_mergekit.tensors import kernels


class RunningSums:
    """The sums of a pass, which gives the sums of each piece in order.

    Args:
        items: the tensors that count, of all processes.
        tasks: names of the inputs, for messages.
        sketch: sums of Omega as well.

    Raises:
        UserError: no tensor counts.
    """

    def __init__(
        self, items: Sequence[Item], tasks: Sequence[str], sketch: Sketch | None = None
    ) -> None:
        if not any(item.numel for item in items):
            raise UserError(NO_TENSOR)
        self.tasks, self.sketch = tasks, sketch
        self._zero = self._sums = GramSums.zero(len(tasks), sketch)
        self._each: list[GramSums] = []  # of complete tensors
        columns = 0 if sketch is None else sketch.columns
        self._squares = len(tasks) ** 2 + columns * (columns + len(tasks))
        self._chunk_bytes = 8 * (self._squares + 1)
        # One process adds up the sums of items at once; several hold them until they meet.
        self._held = len(items) if ranks.world().size > 1 else 1
        self.nbytes = (self._held + 16) * self._chunk_bytes  # of the smallest pass, about

    def within(self, needs: Needs, compiled: bool = False) -> Needs:
        """The memory of a pass that also sums.

        Args:
            compiled: `SummedChunks` use the loops of `kernels`.
        """
        # The batched products of a chunk: float32, and float64 while they are summed.
        extra = -(-12 * self._squares // (4 * BLOCK))
        extra += 0 if self.sketch is None else 2 * self.sketch.columns
        if compiled and not needs.fused:
            extra += -(-(COLUMNS + PADDING) * (len(self.tasks) + 6) // BLOCK)
        kept = needs.kept + (self._held + 4) * self._chunk_bytes
        return replace(needs, extra=needs.extra + extra, sums=self._chunk_bytes, kept=kept)

    def add(self, piece: Piece, sums: Sequence[GramSums]) -> None:
        """Add the sums of the chunks of the next piece; () if it has no inputs.

        Raises:
            UserError: NaN or infinity in an input.
        """
        if not sums:
            return
        item = piece.item
        total = functools.reduce(GramSums.plus, sums, self._sums)
        if not total.finite():
            base = torch.zeros(1, device="cpu") if item.base is None else item.whole(item.base)
            models = (item.whole(part) for part in item.inputs)
            raise UserError(not_finite(item.name, base, models, self.tasks))
        if item.counted_as not in (None, item.name):  # a second name of a tensor
            return
        self._sums = total
        if piece.stop == item.numel:
            shares = [part.share for part in item.inputs]
            self._each.append(total.of_tensor(item.shape, shares))
            self._sums = self._zero
            if self._held == 1:
                self._each = [self._added(self._each)]

    def total(self) -> GramSums:
        """The sums of all processes, in the order of the tensors."""
        return self._added(chain.from_iterable(ranks.world().collect(self._each)))

    def _added(self, sums: Iterable[GramSums]) -> GramSums:
        return functools.reduce(GramSums.plus, sums, self._zero)


class SummedChunks(Chunks):
    """Chunks whose inner products are summed while a piece is walked.

    Args:
        deltas: as in `kernels.Summing`, which sums; None: PyTorch's products on the device.
        sketch: sums of Omega as well.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        buffer: PieceBuffer | None = None,
        deltas: int | None = None,
        sketch: Sketch | None = None,
    ) -> None:
        super().__init__(layout, device, buffer)
        self._drawn = None if sketch is None else Drawn(sketch, device)
        self._compiled: kernels.Summing | None = None
        if deltas is not None:
            from tvb_mergekit.tensors import kernels  # imports numba, which takes long

            self._compiled = kernels.Summing(layout.needs.rows, deltas, layout.chunk)

    def add(self, piece: Piece) -> Sequence[GramSums]:
        """The sums of the chunks of a piece, which nobody else needs."""
        if self._compiled is not None:
            return self._compiled(self.buffer, piece, self.buffer.read(piece, copy=True))
        deque(self.walk(piece), maxlen=0)
        return self.sums

    def walk(
        self, piece: Piece, found: Sequence[Tensor] = ()
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        self.sums = sums = list[GramSums]()
        if self._compiled is not None:
            found = self.buffer.read(piece, copy=True)
            sums += self._compiled(self.buffer, piece, found)
        for place, base32, tau in super().walk(piece, found):
            if self._compiled is None:
                sums.append(self._sums_of(piece, base32, tau))
            yield place, base32, tau

    def _sums_of(self, piece: Piece, base32: Tensor, tau: Tensor) -> GramSums:
        """The sums of one chunk."""
        norm = float(products(base32[None], base32[None]))
        sums = GramSums(symmetric(products(tau, tau)), norm)
        if self._drawn is not None:
            omega = self._drawn.next(piece.item.name, tau.shape[1])
            sums.sketch_gram = symmetric(products(omega, omega))
            sums.sketch_tasks = products(omega, tau).cpu()
        return sums


class Drawn:
    """Rows of Omega, drawn in order for each tensor (rand_proj). One instance per thread.

    Args:
        counted_as: a tensor's name -> its name in the Gram matrix.
    """

    def __init__(
        self, sketch: Sketch, device: torch.device, counted_as: Mapping[str, str] | None = None
    ) -> None:
        self._sketch, self._device, self._counted_as = sketch, device, counted_as or {}
        self._streams: dict[str, torch.Generator] = {}

    def next(self, name: str, count: int) -> Tensor:
        """The next rows of a tensor, transposed: [M, count] float32 on the device."""
        if name not in self._streams:
            self._streams[name] = self._sketch.stream(self._counted_as.get(name, name))
        return self._sketch.rows(self._streams[name], count, self._device)
