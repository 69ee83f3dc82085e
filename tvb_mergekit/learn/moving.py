"""theta as a function of a few variables, tensor by tensor.

A model's weights are set to theta before a pass. In the backward pass the gradient of each weight
goes on to the variables and is dropped, so only one tensor's gradient is held.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tvb_mergekit.learn.statistics import gradients_to

PER = Literal["layer", "tensor"]
LAYER = re.compile(r"^(.*?\.\d+)\.")


class Moving(ABC):
    """theta_0 plus a differentiable function of `variables` and the bases.

    Attributes:
        base: theta_0 of each tensor, flattened.
        bases: B_m of each tensor, [M, n].
        variables: the tensors to learn.
    """

    def __init__(self, base: Mapping[str, Tensor], bases: Mapping[str, Tensor]) -> None:
        self.base, self.bases = base, bases
        self.variables: list[Tensor] = []

    @abstractmethod
    def theta(self, name: str) -> Tensor:
        """The weights of one tensor, flattened [n]."""

    def add_penalty(self) -> float:
        """Add the gradient of the penalty to the variables, and return the penalty."""
        return 0.0

    def merged(self) -> Callable[[str], Tensor]:
        """A function that returns the weights of one tensor in the merged model."""
        return self.theta

    def attached(self, parameters: Mapping[str, nn.Parameter]) -> AbstractContextManager[None]:
        """Compute the gradients of these parameters, and pass them on to the variables."""

        def pull(name: str, gradient: Tensor) -> None:
            with torch.enable_grad():
                self.theta(name).backward(gradient.view(-1))

        return gradients_to(pull, parameters)

    def set(
        self, parameters: Mapping[str, nn.Parameter], theta: Callable[[str], Tensor] | None = None
    ) -> None:
        """Write theta into a model's parameters."""
        theta = theta or self.theta
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.view(-1).copy_(theta(name))


@dataclass(frozen=True)
class Rows:
    """The coefficients of each tensor: `blocks` rows, from `first[name]` on."""

    first: Mapping[str, int]
    titles: Sequence[str]
    blocks: int = 1

    @classmethod
    def of(cls, names: Sequence[str], per: PER, blocks: int = 1) -> Rows:
        """A row for each tensor, or for each layer and each tensor outside the layers.

        Args:
            blocks: rows of each tensor, one for each piece by `torch.tensor_split`.
        """
        titles, first = dict[str, int](), dict[str, int]()
        for name in names:
            layer = LAYER.match(name) if per == "layer" else None
            first[name] = titles.setdefault(layer[1] if layer else name, blocks * len(titles))
        return cls(first, list(titles), blocks)

    def of_tensor(self, name: str) -> slice:
        return slice(self.first[name], self.first[name] + self.blocks)

    @property
    def count(self) -> int:
        return self.blocks * len(self.titles)


class Coefficients(Moving):
    """theta_0 + sum_m c_m B_m, with c [M] for each layer, tensor or block of a tensor.

    AdaMerging (Yang et al., ICLR 2024) and aTLAS (Zhang et al., NeurIPS 2024) over bases.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        bases: Mapping[str, Tensor],
        rows: Rows,
        start: float | Tensor,
        nonnegative: bool = False,
    ) -> None:
        """Begin at c = `start`, a number or [rows, M].

        Args:
            nonnegative: learn square roots of c.
        """
        super().__init__(base, bases)
        self.rows, self.nonnegative = rows, nonnegative
        example = next(iter(bases.values()))
        value = example.new_zeros(rows.count, example.shape[0]) + torch.as_tensor(start).to(example)
        if nonnegative:
            value.sqrt_()
        self.variables = [value.requires_grad_()]

    @property
    def values(self) -> Tensor:
        """c [rows, M]."""
        (value,) = self.variables
        return value.square() if self.nonnegative else value

    def theta(self, name: str) -> Tensor:
        own, bases = self.values[self.rows.of_tensor(name)], self.bases[name]
        pieces = bases.tensor_split(self.rows.blocks, dim=1)
        moved = [row @ piece for row, piece in zip(own, pieces, strict=True)]
        return torch.cat(moved).add(self.base[name])


class Mask(Moving):
    """theta_0 + sigma(S) * B for one basis B [1, n], with the penalty lambda ||sigma(S)||_1.

    Localize-and-Stitch (He et al., 2024); the weighted objective of the paper.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        bases: Mapping[str, Tensor],
        density: float,
        bias: float = 5.0,
        penalty: float = 0.0,
    ) -> None:
        """Set S to `bias` at the largest entries of B, a fraction `density`, else to -`bias`."""
        super().__init__(base, bases)
        self.density, self.penalty = density, penalty
        sizes = {n: torch.where(b[0] != 0, b[0].abs(), -torch.inf) for n, b in bases.items()}
        chosen = largest(sizes, density)
        self.scores = {
            name: torch.where(chosen[name], bias, -bias).to(size.dtype).requires_grad_()
            for name, size in sizes.items()
        }
        self.variables = list(self.scores.values())

    def theta(self, name: str) -> Tensor:
        own = self.scores[name]
        return self.base[name] + own.sigmoid() * self.bases[name][0]

    def merged(self) -> Callable[[str], Tensor]:
        kept = self.kept()
        return lambda name: self.base[name] + self.bases[name][0] * kept[name]

    def add_penalty(self) -> float:
        if not self.penalty:
            return 0.0
        total = 0.0
        for own in self.variables:
            mass = self.penalty * own.sigmoid().sum()
            mass.backward()
            total += float(mass.detach())
        return total

    def kept(self) -> dict[str, Tensor]:
        """The binary mask of each tensor: the largest S where B is not 0, by the density."""
        with torch.no_grad():
            sizes = {
                name: torch.where(self.bases[name][0] != 0, own, -torch.inf)
                for name, own in self.scores.items()
            }
        return largest(sizes, self.density)


def largest(sizes: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """Masks of the largest entries, a fraction `density` over all tensors.

    Compares in float32, leaves out -inf, and prefers the first of equal entries. Bisection finds
    the threshold without a copy of all entries.
    """
    wanted = max(1, round(density * sum(size.numel() for size in sizes.values())))
    low, high = -(2**31), 2**31 - 1
    while low < high:  # the largest threshold that lets enough pass
        middle = (low + high + 1) // 2
        if sum(int((_ordered(size) >= middle).sum()) for size in sizes.values()) >= wanted:
            low = middle
        else:
            high = middle - 1
    found = {name: _ordered(size) > low for name, size in sizes.items()}
    left = wanted - sum(int(mask.sum()) for mask in found.values())
    for name, size in sizes.items():
        if left > 0:
            places = ((_ordered(size) == low) & (size > -torch.inf)).nonzero()[:left, 0]
            found[name][places] = True
            left -= len(places)
    return found


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of float32 values."""
    bits = values.detach().float().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
