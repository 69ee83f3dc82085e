"""Sums of inner products of task vectors, on the way of any pass that reads them.

Each tensor is summed on its own, and the tensors' sums in order. So G does not depend on the number
of devices, threads and processes, nor on the budget unless it is very small.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tvb_mergekit.core.gram import BLOCK, NO_TENSOR, GramSums, not_finite, products, symmetric
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.layout import COLUMNS, PADDING, Layout, Needs
from tvb_mergekit.tensors.stream import Item, Piece, PieceBuffer

if TYPE_CHECKING:
    from tvb_mergekit.tensors import kernels


class RunningSums:
    """The sums of a pass, which gives the sums of each piece in order.

    Args:
        items: the tensors that count, of all processes.
        tasks: names of the inputs, for messages.

    Raises:
        UserError: no tensor counts.
    """

    def __init__(self, items: Sequence[Item], tasks: Sequence[str]) -> None:
        if not any(item.numel for item in items):
            raise UserError(NO_TENSOR)
        self.tasks = tasks
        self._zero = self._sums = GramSums.zero(len(tasks))
        self._each: list[GramSums] = []  # of complete tensors
        self._squares = len(tasks) ** 2
        self._chunk_bytes = 8 * (self._squares + 1)
        # One process adds up the sums of items at once; several hold them until they meet.
        self._held = len(items) if ranks.world().size > 1 else 1
        self.nbytes = (self._held + 16) * self._chunk_bytes  # of the smallest pass, about

    def within(self, needs: Needs, compiled: bool = False) -> Needs:
        """The memory of a pass that also sums.

        Args:
            compiled: `Chunks` use the loops of `kernels`.
        """
        # The batched products of a chunk: float32, and float64 while they are summed.
        extra = -(-12 * self._squares // (4 * BLOCK))
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


class Chunks:
    """Reads a piece and walks it in chunks of task vectors. One instance per thread.

    Args:
        summing: sum the inner products of each chunk as well, into `sums`.
        compiled: sum by the loops of `kernels`, else by PyTorch's products on the device.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        buffer: PieceBuffer | None = None,
        summing: RunningSums | None = None,
        compiled: bool = False,
    ) -> None:
        self.length, self.device, self.sums = layout.chunk, device, list[GramSums]()
        self.buffer = buffer or PieceBuffer(layout.buffer_bytes, device)
        self._shape, self._rows = (1 + layout.needs.rows, layout.chunk), torch.empty(0)
        self._products = summing is not None and not compiled
        self._compiled: kernels.Compiled | None = None
        if compiled:
            from tvb_mergekit.tensors import kernels  # imports numba, which takes long

            self._compiled = kernels.Compiled(layout.needs.rows, layout.chunk)

    def add(self, piece: Piece) -> list[GramSums]:
        """The sums of the chunks of a piece, if only these are of use."""
        if self._compiled is not None:
            return self._compiled(self.buffer, piece, self.buffer.read(piece, copy=True))[1]
        deque(self.walk(piece), maxlen=0)
        return self.sums

    def walk(self, piece: Piece) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (place in the piece, theta_0 [n] or 0, task vectors [T, n]), float32 on the device.

        The next step overwrites both tensors.
        """
        if not len(self._rows):
            self._rows = torch.empty(self._shape, dtype=torch.float32, device=self.device)
        item, self.sums = piece.item, []
        found = self.buffer.read(piece, copy=self._compiled is not None)
        if self._compiled is not None:
            self.sums += self._compiled(self.buffer, piece, found)[1]
        for start in range(0, piece.numel, self.length):
            place = slice(start, min(start + self.length, piece.numel))
            base, *task_vectors = rows = self._rows[:, : place.stop - start]
            # Move in the stored dtype and widen on the device: half the traffic for 16-bit models.
            values = [stored[place].to(self.device, non_blocking=True) for stored in found]
            if item.base is None:
                base.zero_()
            else:
                base.copy_(values.pop(0))
            # An item may have fewer inputs than there are rows.
            for row, part, value in zip(task_vectors, item.inputs, values, strict=False):
                row.copy_(value)
                if part.holds == "weight":
                    row.sub_(base)
            if self._products:
                self.sums.append(self._sums_of(base, rows[1:]))
            yield place, base, rows[1:]
        if self.device.type != "cpu":  # what was read may still be on its way there
            torch.accelerator.current_stream(self.device).synchronize()

    @staticmethod
    def _sums_of(base32: Tensor, tau: Tensor) -> GramSums:
        """The sums of one chunk."""
        norm = float(products(base32[None], base32[None]))
        return GramSums(symmetric(products(tau, tau)), norm)
