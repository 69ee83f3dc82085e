"""Whole pieces by compiled loops, on a CPU: their Gram sums, and combinations of them.

PyTorch takes a pass over memory for each of its operations, and between them threads pass the
interpreter's lock to each other. The functions of `loops` do all that is to be done with a few
hundred columns while they lie in the first cache, and hold no lock meanwhile. `stream` has the same
in PyTorch for other devices and dtypes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.gram import ChunkSums
from tvb_mergekit.layout import APART, FUSED

BFLOAT16, FLOAT16, FLOAT32, ZERO = range(4)  # how an input is stored; ZERO: there is none
KINDS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}
TILE = 4  # rows of a tile of G, whose 16 sums stay in registers; rows are padded to whole tiles


def usable() -> bool:
    """Whether the processor has what LLVM takes for granted to convert float16: on x86, F16C, which
    comes with AVX2 (2013). Without it the process would be aborted."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.backends.cpu.get_cpu_capability() != "DEFAULT" and not os.environ.get(
        "NUMBA_CPU_NAME"
    )


@dataclass(frozen=True)
class Inputs:
    """Where base and inputs are, [1 + T] each."""

    addresses: NDArray[np.int64]
    kinds: NDArray[np.int64]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], with_base: bool) -> Inputs:
        """Of tensors on the CPU, whose elements lie side by side."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        kinds = [KINDS[tensor.dtype] for tensor in tensors]
        if not with_base:
            addresses, kinds = [0, *addresses], [ZERO, *kinds]
        return cls(np.array(addresses, np.int64), np.array(kinds, np.int64))


def _rows(count: int) -> NDArray[np.float32]:
    """For theta_0, the task vectors, what is made of them, and zeros."""
    room: NDArray[np.float32] = torch.zeros(count, FUSED + APART, device="cpu").numpy()
    return room


class Gram:
    """G and ||theta_0||^2 of one piece after the other, chunk by chunk. One instance per thread."""

    def __init__(self, tasks: int, deltas: int) -> None:
        self._tasks, self._deltas = tasks, deltas
        self._padded = -(-tasks // TILE) * TILE
        self._rows = _rows(self._padded + 2)
        from tvb_mergekit.loops import gram  # takes long, and not every command needs it

        self._gram = gram

    def __call__(self, inputs: Inputs, numel: int, chunk: int) -> ChunkSums:
        """The sums of `numel` columns in chunks of `chunk`."""
        count = -(-numel // chunk)
        sums, norms = np.zeros((count, self._padded, self._padded)), np.zeros(count)
        self._gram(
            inputs.addresses,
            inputs.kinds,
            self._deltas,
            numel,
            chunk,
            FUSED,
            self._rows,
            sums,
            norms,
        )
        upper = sums[:, : self._tasks, : self._tasks]  # below the diagonal it is zero
        whole = upper + np.triu(upper, 1).transpose(0, 2, 1)
        return ChunkSums(torch.from_numpy(whole), torch.from_numpy(norms))


class Combining:
    """theta_0 (or 0) + sum over steps of fl(scale * sum_i weights[i] * tau_i), for several outputs.

    One instance per thread.

    Args:
        steps: of each output, (scale, weights [T]).
    """

    def __init__(
        self,
        tasks: int,
        deltas: int,
        steps: Sequence[Sequence[tuple[float, Tensor]]],
        with_base: bool,
    ) -> None:
        self._deltas, self._with_base = deltas, with_base
        padded = -(-tasks // TILE) * TILE
        flat = [step for every in steps for step in every]
        self._weights = np.zeros((len(flat), padded), np.float32)
        for row, (_scale, weights) in zip(self._weights, flat, strict=True):
            row[:tasks] = weights.to(torch.float32).numpy()
        self._scales = np.array([scale for scale, _weights in flat], np.float32)
        self._ends = np.cumsum([len(every) for every in steps])
        self._rows = _rows(padded + 4)
        from tvb_mergekit.loops import combine  # takes long, and not every command needs it

        self._combine = combine

    def __call__(self, inputs: Inputs, out: Tensor) -> bool:
        """Fill `out` [outputs, n]; whether all of it is finite."""
        outs = np.array([row.data_ptr() for row in out], np.int64)
        bad = self._combine(
            inputs.addresses,
            inputs.kinds,
            self._deltas,
            out.shape[1],
            FUSED,
            self._weights,
            self._scales,
            self._ends,
            self._with_base,
            self._rows,
            outs,
            KINDS[out.dtype],
        )
        return not bad
