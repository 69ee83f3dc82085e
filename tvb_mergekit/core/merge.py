"""The steps from theta_0 and a piece of the task vectors to outputs.

Steps compute in float32, and the caller casts once to the output dtype.

A coefficient multiplies a finished direction: theta_0 + fl(scale * direction), two roundings of
each entry. A fused product and sum would round differently by piece and processor. So a direction
that is computed once gives the merged weights for any scale, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError

Term = tuple[float, Tensor]  # a scale, and the weights [T] of the direction that it scales
# From theta_0 [n] and task vectors [T, n], float32 and not changed, to outputs [K, n].
Compute = Callable[[Tensor, Tensor], Tensor]


class Step(Protocol):
    """The merge of one tensor: `Linear`, `Entrywise`, or a step of `learned`.

    `count` is the number of outputs, `rows` that of the float32 rows of a piece that `compute`
    needs next to the inputs. Steps are equal if they are one object.
    """

    @property
    def count(self) -> int: ...
    @property
    def rows(self) -> int: ...
    def on(self, device: torch.device) -> Compute: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Linear:
    """Outputs theta_0 (or 0) + sum over their terms of fl(scale * sum_i weights[i] * tau_i).

    Addition over bases and negation have this form (paper Eq. 3), since B = T W_e (Eq. 8) and
    T_hat = T R (Eq. 10): the terms are (lambda, W_e 1) and (-alpha, R[:, forget] 1). Bases and
    exports have it as well.
    """

    outputs: Sequence[Sequence[Term]]
    add_base: bool = True

    @classmethod
    def of(cls, matrix: Tensor, add_base: bool = False) -> Linear:
        """One output for each column of `matrix` [T, K]."""
        return cls([[(1.0, column)] for column in matrix.T.cpu()], add_base)

    @property
    def count(self) -> int:
        return len(self.outputs)

    @property
    def rows(self) -> int:
        return self.count * min(2, max(map(len, self.outputs)))

    def on(self, device: torch.device) -> Compute:
        rounds = []
        for place in range(max(map(len, self.outputs))):  # the k-th terms of all outputs at once
            none = 0.0, 0 * self.outputs[0][0][1]
            terms = [terms[place] if place < len(terms) else none for terms in self.outputs]
            weights = torch.stack([w for _, w in terms]).to(device, torch.float32)
            scales = torch.tensor([scale for scale, _ in terms], dtype=torch.float32, device=device)
            rounds.append((weights, scales[:, None]))

        def compute(base32: Tensor, tau: Tensor) -> Tensor:
            values = base32.expand(self.count, -1) if self.add_base else None
            for weights, scales in rounds:
                term = torch.mm(weights, tau).mul_(scales)
                values = term if values is None else term.add_(values)
            return torch.zeros_like(base32)[None] if values is None else values

        return compute


@dataclass(frozen=True, eq=False)
class Entrywise:
    """theta_0 (or 0) + scale * the direction of the bases [M, n], entry by entry.

    B = T `encoder` [T, M]. `direction` overwrites the bases.
    """

    encoder: Tensor
    direction: Callable[[Tensor], Tensor]
    scale: float
    add_base: bool = True
    count = 1

    @property
    def rows(self) -> int:
        return self.encoder.shape[1] + 8

    def on(self, device: torch.device) -> Compute:
        weights = self.encoder.T.to(device, torch.float32)

        def compute(base32: Tensor, tau: Tensor) -> Tensor:
            merged = self.direction(weights @ tau).mul_(self.scale)
            return (merged.add_(base32) if self.add_base else merged)[None]

        return compute


def check_output(name: str, merged: Tensor, dtype: torch.dtype) -> None:
    """Raise UserError if a value overflowed (float16 does above 65504)."""
    # A sum is not finite if an entry is not, and needs one pass without a mask.
    if torch.isfinite(merged.sum(dtype=torch.float32)) or torch.isfinite(merged).all():
        return
    raise UserError(
        f"tensor `{name}`: values overflow {str(dtype).removeprefix('torch.')} in the output; "
        "take smaller coefficients (lambda, alpha, scales), or for float16 `dtype: bfloat16`"
    )
