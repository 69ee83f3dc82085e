"""Task vectors as a random sample of their entries: exact values times the inverse of the share.

Each entry of a matrix is drawn by itself, and drawn ones are stored as `lossless` stores all.
The decoded vector is unbiased: the expectation of each entry is its value. So are products of
different entries. Tensors of one dimension are stored complete. `docs/files.md` has the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.lossless import Blocks, Keeping, Kept
from tvb_mergekit.tensors.source import Holds
from tvb_mergekit.tensors.stream import Item

KEY = "tvb_sampled"  # in the metadata of a file of such a vector
VERSION = 1


@dataclass(frozen=True)
class Draw:
    """The entries of one vector that are stored.

    Attributes:
        seed: of the random places.
        share: the probability of an entry, a multiple of 2^-32.
    """

    seed: int
    share: float

    def of(self, shape: Sequence[int]) -> float:
        """The share of a tensor's entries: 1 if all are stored."""
        return self.share if len(shape) > 1 else 1.0

    def places(self, name: str, block: int, length: int) -> Tensor:
        """The stored entries of a block of a matrix, increasing; int64.

        Philox's stream of bits is the same in every version of numpy and on every machine.
        """
        key = xxhash.xxh3_64_intdigest(f"{self.seed}/{block}/{name}".encode())
        bits = np.random.Philox(key=key).random_raw(-(-length // 2)).astype("<u8").view("<u4")
        return torch.from_numpy(np.flatnonzero(bits[:length] < self.share * 2**32))


class Sampled(Blocks):
    """One sampled task vector, read as float32 with `base`, which its user sets. Thread-safe."""

    holds: Holds | None = "delta"

    def __init__(
        self,
        stored: Checkpoint,
        shapes: Mapping[str, Sequence[int]],
        dtypes: Mapping[str, torch.dtype],
        sample: Draw,
    ) -> None:
        super().__init__(stored, shapes, dtypes)
        self.sample = sample

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Sampled:
        """Read the headers of the vector at `path`, a folder or one file.

        Raises:
            UserError: no such files, or their headers do not say what a reader needs.
        """
        stored, samples = Checkpoint.open(path), list[Draw]()

        def parse(said: Mapping[str, Any]) -> None:
            samples.append(Draw(int(said["seed"]), float(said["share"])))
            if samples[-1] != samples[0] or not 0 < samples[0].share <= 1:
                raise ValueError("its sample is another one")

        shapes, dtypes = cls.headers(stored, KEY, VERSION, "a sampled task vector", parse)
        return cls(stored, shapes, dtypes, samples[0])

    def share(self, name: str) -> float:
        return self.sample.of(self.tensors[name].shape)

    def _decode(self, name: str, block: int, out: Tensor) -> None:
        share = self.share(name)
        base = self.base_block(name, block, len(out))
        places = self.sample.places(name, block, len(out)) if share < 1 else slice(None)
        base = base[places]
        theta = self.decoded(name, block, base, torch.empty(len(base), dtype=self.dtypes[name]))
        out.zero_()
        out[places] = (theta.float() - base.float()).div_(share)


@dataclass(frozen=True)
class KeptDraw(Kept):
    """The form of one sampled output of `keep_pass`."""

    sample: Draw
    key = KEY

    def metadata(self, shapes: Mapping[str, Sequence[int]]) -> str:
        said = {"version": VERSION, "seed": self.sample.seed, "share": self.sample.share}
        return json.dumps({**said, "tensors": self.tensors(shapes)})


class Sampling(Keeping):
    """Sampled outputs of `keep_pass`; measures squared norms of task vectors, and of errors."""

    numbers = 2

    def __init__(self, items: Sequence[Item], samples: Sequence[Draw]) -> None:
        super().__init__(items)
        pairs = zip(self.coded, samples, strict=True)
        self.coded, self.samples = [KeptDraw(kept.dtypes, s) for kept, s in pairs], samples

    def chosen(
        self, k: int, item: Item, block: int, theta: Tensor, base: Tensor | None
    ) -> tuple[Tensor, Tensor | None, list[float]]:
        assert base is not None, "a task vector has a base"
        sample, tau = self.samples[k], (theta.float() - base.float()).double()
        share, square = sample.of(item.shape), float(tau.square().sum())
        if share == 1:
            return theta, base, [square, 0.0]
        places = sample.places(item.name, block, len(theta))
        held = float(tau[places].square().sum())
        return theta[places], base[places], [square, (1 / share - 1) ** 2 * held + square - held]
