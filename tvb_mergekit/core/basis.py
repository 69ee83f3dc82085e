"""Basis and merge: Gram matrix and encoder of a recipe, coefficients of its merges, and steps.

A coefficient multiplies a finished direction: theta_0 + fl(scale * direction), two roundings of
each entry. A fused product and sum would round differently by piece and processor. So a direction
that is computed once gives the merged weights for any scale, to the last bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tvb_mergekit.core.gram import Encoding, Gram, GramSums
from tvb_mergekit.core.methods.ties import trim_thresholds
from tvb_mergekit.core.settings import BASES, EVEN, METHODS, Settings
from tvb_mergekit.errors import UserError

Term = tuple[float, Tensor]  # a scale, and the weights [T, K] of the directions that it scales


@dataclass(frozen=True, eq=False)
class Step:
    """K outputs theta_0 (or 0) + sum over the terms of fl(scale * T weights), in float32.

    Addition over bases and negation have this form (paper Eq. 3), since B = T W_e (Eq. 8) and
    T_hat = T R (Eq. 10): the terms are (lambda, W_e 1) and (-alpha, R[:, forget] 1). Bases and
    exports have it as well. A `direction` makes one output of the K combinations [K, n], which it
    overwrites.
    """

    terms: Sequence[Term]
    add_base: bool = True
    direction: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, matrix: Tensor, add_base: bool = False) -> Step:
        """One output for each column of `matrix` [T, K]."""
        return cls([(1.0, matrix)], add_base)

    @property
    def rows(self) -> int:
        """Float32 rows of a piece that it needs next to the inputs."""
        return sum(w.shape[1] for _, w in self.terms[:2]) + (8 if self.direction else 0)

    def on(self, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
        """From theta_0 [n] and task vectors [T, n], which stay as they are, to outputs [K, n]."""
        terms = [(scale, w.T.to(device, torch.float32).contiguous()) for scale, w in self.terms]

        def compute(base32: Tensor, tau: Tensor) -> Tensor:
            values = (base32 if self.add_base else torch.zeros_like(base32))[None]
            for scale, weights in terms:
                term = torch.mm(weights, tau)
                term = self.direction(term)[None] if self.direction else term
                values = term.mul_(scale).add_(values)
            return values

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


# A fine-tuned model moves by about half a percent of the base's norm (the paper's table of task
# vector norms); another pre-training run lies at about 1.4 times the norm of the matrices.
WRONG_BASE_RATIO = 0.5
LARGE_RATIO = 5  # to the median of the other task vectors' norms


@dataclass(frozen=True)
class Tunables:
    """The keys that may vary from tensor to tensor, resolved for one tensor."""

    lambda_: float
    alpha: float = 0.0
    density: float = 1.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Tunables:
        """From a mapping with `lambda` and, if the method has them, `alpha` and `density`."""
        return cls(values["lambda"], values.get("alpha") or 0.0, values.get("density") or 1.0)


@dataclass
class Combination:
    """Coefficients of the N vectors that a merge combines: T task vectors, or M bases of a store.

    `histogram` [M, BINS] counts the magnitudes of each basis over all tensors, for TIES.
    """

    settings: Settings
    tasks: Sequence[str]
    # B = vectors @ [N, M] (paper Eq. 8), T_hat = vectors @ [N, T] (Eq. 10), both float64
    weighted_encoder: Tensor
    weighted_reconstruction: Tensor
    histogram: Tensor | None = field(default=None, kw_only=True)
    seconds: dict[str, float] = field(default_factory=dict, kw_only=True)

    @property
    def num_bases(self) -> int:
        return self.weighted_encoder.shape[1]

    @property
    def scale(self) -> float:
        """The factor of lambda: T / M with `lambda_scale: tasks`, else 1."""
        tasks = self.settings.lambda_scale == "tasks"
        return len(self.tasks) / self.num_bases if tasks else 1.0

    @property
    def directions(self) -> Mapping[str, Tensor]:
        """The directions that `lambda` (times `scale`) and `alpha` scale, each [N] float64.

        Methods that merge matrices use the mean of the bases for all other tensors, for any scale.
        """
        method, encoder = METHODS[self.settings.method], self.weighted_encoder
        if method.merges != "sums":
            return {"lambda": encoder.sum(1) / (self.num_bases * self.scale)}
        reconstruction = self.weighted_reconstruction
        return method(self.settings, encoder, reconstruction=reconstruction, tasks=self.tasks)

    @property
    def trims(self) -> bool:
        """Whether merging needs a threshold of each basis."""
        return METHODS[self.settings.method].merges == "entries"

    def step(self, values: Tunables, alone: bool = False) -> Step:
        """The merge of one tensor.

        `alone` is only the direction that `alpha`, or else `lambda`, scales, without theta_0.
        """
        if self.trims:
            limits = [0.0] * self.num_bases
            if values.density < 1:
                assert self.histogram is not None
                limits = trim_thresholds(self.histogram, values.density).tolist()
            direction = partial(METHODS[self.settings.method], self.settings, thresholds=limits)
            scale = 1.0 if alone else values.lambda_ * self.scale
            return Step([(scale, self.weighted_encoder)], not alone, direction)
        if alone:
            *_, last = self.directions.values()
            return Step.of(last[:, None])
        return Step(self.terms(values))

    def terms(self, values: Tunables) -> list[Term]:
        """The directions with their coefficients, in the order of addition."""
        scales = {"lambda": values.lambda_ * self.scale, "alpha": -values.alpha}
        every = [(scales[key], direction[:, None]) for key, direction in self.directions.items()]
        return [term for term in every if term[0] != 0]


@dataclass
class Basis(Combination):
    """A basis of the T models of a recipe. `sums` are over the weighted task vectors."""

    sums: GramSums
    encoding: Encoding
    weights: Sequence[float]

    @property
    def waits(self) -> bool:
        """Whether no pass has summed yet: G does not matter, and a merge finds the norms."""
        return self.sums.num_parameters == 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Encoder, decoder, G and its eigenvalues, as far as they are known."""
        encoding, kind = self.encoding, self.settings.basis
        found = {"encoder": encoding.encoder, "decoder": encoding.decoder}
        if self.sums.inner:
            return {**found, "gram": self.sums.gram, "eigenvalues": encoding.eigenvalues}
        known = {"none": ("encoder", "decoder"), "rand_select": ("encoder",)}  # without G
        return {name: found[name] for name in known.get(kind, ())}


def encode(gram: Tensor, settings: Settings) -> Encoding:
    """The bases of these settings by G = T^T T [T, T], float64."""
    spectrum = Gram.of(gram)
    return BASES[settings.basis](settings, spectrum, settings.bases_of(spectrum.size))


def check_not_zero(raw: GramSums, tasks: Sequence[str]) -> GramSums:
    """These unweighted sums; raise UserError if a task vector is zero."""
    for task, square in zip(tasks, raw.gram.diagonal().tolist(), strict=True):
        if square == 0.0:
            raise UserError(
                f"task `{task}`: its task vector is zero in every tensor that counts: the model is "
                "identical to the base (or all that was trained is excluded); remove it"
            )
    return raw


def build(
    settings: Settings, tasks: Sequence[str], weights: Sequence[float], raw: GramSums | None
) -> Basis:
    """The basis of unweighted sums.

    Without sums, it serves a merge in which G decides nothing: the loss and bounds mean nothing.
    """
    count = len(tasks)
    if raw is None:
        sums, gram = GramSums.zero(count, inner=False), torch.eye(count, device="cpu").double()
    else:
        sums = check_not_zero(raw, tasks).scaled(weights)
        gram = sums.gram
    if raw is None and settings.basis in EVEN:  # only the sum of the bases is known, and counts
        encoding = Gram.of(gram).encoding(np.full((count, settings.bases_of(count)), 1 / count))
    else:
        encoding = encode(gram, settings)
    scales = torch.tensor(weights, dtype=torch.float64, device="cpu")[:, None]
    weighted = scales * encoding.encoder, scales * encoding.reconstruction
    return Basis(settings, tasks, *weighted, sums, encoding, weights)


def unlike(norm: float, base_norm: float, others: Sequence[float]) -> str | None:
    """Say why a model seems not fine-tuned from the base, by unweighted norms of task vectors.

    The norm of a base that was not read, since all models are adapters, is 0.
    """
    median, its = statistics.median(others or [0]), f"its task vector's norm is {norm:.4g}"
    if base_norm and norm > WRONG_BASE_RATIO * base_norm:
        return f"{its}, the base's {base_norm:.4g}; fine-tuning moves a model by a few percent"
    if norm > LARGE_RATIO * median > 0:
        return f"{its}, the median of the other tasks' {median:.4g}"
    return None


def warnings(basis: Basis, models: Mapping[str, str]) -> list[str]:
    """Lines on suspicious task vectors, by the Gram matrix; `models` maps task -> model."""
    lines, twins, sums, tasks = list[str](), list[str](), basis.sums, basis.tasks
    norms = [n / abs(weight) for n, weight in zip(sums.norms, basis.weights, strict=True)]
    lengths = sums.gram.diagonal().sqrt()
    alike = (sums.gram.abs() > (1 - 1e-6) * torch.outer(lengths, lengths)).tolist()
    for index, task in enumerate(tasks):
        others = norms[:index] + norms[index + 1 :]
        if reason := unlike(norms[index], sums.base_norm_squared**0.5, others):
            told = f"task `{task}` ({models[task]}): {reason}"
            lines.append(f"{told}: is it fine-tuned from this base?")
        if True in alike[index][:index]:
            both = f"tasks `{tasks[alike[index].index(True)]}` and `{task}`"
            twins.append(
                f"{both} have the same task vector up to scale: one model under two names?"
            )
    return lines + twins
