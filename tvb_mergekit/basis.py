"""A built basis: Gram matrix and encoder of one recipe, and the coefficients they give."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tvb_mergekit.combine import Step
from tvb_mergekit.encoders import Encoding, encode, projection
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import GramSums, Sketch
from tvb_mergekit.recipe import Settings
from tvb_mergekit.trim import MagnitudeHistogram

# A fine-tuned model moves by about half a percent of the base's norm (the paper's table of task
# vector norms); another pre-training run lies at about 1.4 times the norm.
WRONG_BASE_RATIO = 0.5
UNRELATED_RATIO = 1.2  # not yet that 1.4, and out of reach of fine-tuning
LARGE_RATIO = 5  # to the median of the other task vectors' norms


@dataclass
class Combination(ABC):
    """What merging a tensor needs to know of the vectors that are combined.

    The vectors are the task vectors of T models (`Basis`) or the M bases of a store
    (`StoredBases`). `histogram` (TIES with `trim: model`) counts the magnitudes of each basis over
    the whole vector.
    """

    settings: Settings
    tasks: Sequence[str]
    histogram: MagnitudeHistogram | None = field(default=None, kw_only=True)
    seconds: dict[str, float] = field(default_factory=dict, kw_only=True)
    _thresholds: dict[float, Tensor] = field(default_factory=dict, repr=False, kw_only=True)

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """How many vectors are read."""

    @property
    @abstractmethod
    def num_bases(self) -> int:
        """M."""

    @property
    def deltas(self) -> int:
        """How many inputs are differences from the base already."""
        return 0

    @property
    def scale(self) -> float:
        """What lambda is multiplied by: T / M with `lambda_scale: tasks`, else 1."""
        if self.settings.lambda_scale == "bases":
            return 1.0
        return len(self.tasks) / self.num_bases

    @property
    @abstractmethod
    def addition(self) -> Tensor:
        """The sum of the bases from the vectors that are combined, [num_inputs] float64 (for
        rand_proj from the columns of Omega, [M])."""

    @property
    @abstractmethod
    def forgetting(self) -> Tensor:
        """The sum of the reconstructed task vectors to forget, likewise."""

    def steps(self, lambda_: float, alpha: float = 0.0) -> list[Step]:
        """lambda * sum_m B_m - alpha * sum_{j in forget} tau_hat_j, in the order of adding up."""
        steps = [(lambda_ * self.scale, self.addition)]
        if self.settings.forget:
            steps.append((-alpha, self.forgetting))
        return [step for step in steps if step[0] != 0]

    @property
    def direction(self) -> Tensor:
        """What a tuned coefficient scales, up to a factor of each."""
        return self.forgetting if self.settings.forget else self.addition

    @property
    @abstractmethod
    def weighted_encoder(self) -> Tensor:
        """The bases from the inputs: B = inputs @ this, [num_inputs, M] float64."""

    def thresholds(self, density: float) -> Tensor:
        """`trim: model`: the threshold of each basis for this density, [M] float32."""
        assert self.histogram is not None
        if density not in self._thresholds:
            self._thresholds[density] = self.histogram.thresholds(density)
        return self._thresholds[density]

    @property
    def forgotten(self) -> list[int]:
        """The columns of the tasks to forget."""
        return [list(self.tasks).index(name) for name in self.settings.forget]


@dataclass
class Basis(Combination):
    """A basis of the T models of a recipe. `sums` are those of the weighted task vectors."""

    sums: GramSums
    encoding: Encoding
    weights: Sequence[float]
    sketch: Sketch | None = None
    cached: bool = False

    @property
    def num_inputs(self) -> int:
        return len(self.weights)

    @property
    def num_bases(self) -> int:
        return self.encoding.num_bases

    @property
    def addition(self) -> Tensor:
        if self.sketch is not None:
            assert self.encoding.mixing is not None
            return self.encoding.mixing.sum(1)
        return self.weighted_encoder.sum(1)

    @property
    def forgetting(self) -> Tensor:
        encoding, columns = self.encoding, self.forgotten
        if self.sketch is not None:
            assert encoding.mixing is not None
            return encoding.mixing @ encoding.decoder[:, columns].sum(1)
        assert encoding.reconstruction is not None
        weights = torch.tensor(self.weights, dtype=torch.float64, device="cpu")
        return encoding.reconstruction[:, columns].sum(1) * weights

    @property
    def weighted_encoder(self) -> Tensor:
        """W_e with the models' weights folded in: B = [theta_i - theta_0] @ this, [T, M]."""
        assert self.encoding.encoder is not None
        weights = torch.tensor(self.weights, dtype=torch.float64, device="cpu")
        return weights[:, None] * self.encoding.encoder

    @property
    def cosines(self) -> Tensor:
        """Cosines between the task vectors, [T, T]."""
        norms = self.sums.gram.diagonal().sqrt()
        return self.sums.gram / torch.outer(norms, norms)


@dataclass
class StoredBases(Combination):
    """The bases of a store in the place of models: no Gram matrix, and M vectors are read.

    Attributes:
        shares: v [M], what each basis counts in the sum (`Bases.shares` times the recipe's
            `weight`).
        reconstruction: [M, T] or, with PCA's mean as the last input, [M + 1, T]: each tau_hat.
    """

    shares: Tensor
    reconstruction: Tensor

    @property
    def num_inputs(self) -> int:
        return len(self.reconstruction)

    @property
    def num_bases(self) -> int:
        return len(self.shares)

    @property
    def deltas(self) -> int:
        return self.num_inputs

    @property
    def addition(self) -> Tensor:
        total = torch.zeros(self.num_inputs, dtype=torch.float64, device="cpu")
        total[: self.num_bases] = self.shares
        return total

    @property
    def forgetting(self) -> Tensor:
        return self.reconstruction[:, self.forgotten].sum(1)

    @property
    def weighted_encoder(self) -> Tensor:
        """diag(v) [num_inputs, M]: no row of the mean is in a basis."""
        encoder = torch.zeros(self.num_inputs, self.num_bases, dtype=torch.float64)
        encoder[: self.num_bases] = torch.diag(self.shares)
        return encoder


def build(
    settings: Settings,
    tasks: Sequence[str],
    weights: Sequence[float],
    raw: GramSums,
    sketch: Sketch | None = None,
) -> Basis:
    """From unweighted sums to a basis.

    Raises:
        UserError: a task vector is zero, or the settings do not fit the Gram matrix.
    """
    for task, square in zip(tasks, raw.gram.diagonal().tolist(), strict=True):
        if square == 0.0:
            raise UserError(
                f"task `{task}`: its task vector is zero in every tensor that counts: the model is "
                "identical to the base (or all that was trained is excluded); remove it"
            )
    sums = raw.scaled(weights)
    if sketch is not None:
        assert sums.sketch_gram is not None and sums.sketch_tasks is not None
        encoding = projection(sums.gram, sums.sketch_gram, sums.sketch_tasks)
    else:
        encoding = encode(sums.gram, settings)
    return Basis(settings, tasks, sums, encoding, weights, sketch)


def unlike(
    norm: float, base_norm: float, others: Sequence[float] = (), ratio: float = WRONG_BASE_RATIO
) -> str | None:
    """Why a task vector seems to be of no model fine-tuned from the base; None if it may be one.

    Args:
        norm: ||tau||, of all or over the matrices (`GramSums.sizes`), unweighted, as all here.
        base_norm: ||theta_0||; 0 where the base was not read (adapters).
        others: of the other tasks.
        ratio: to ||theta_0||, above which it is too long.
    """
    if base_norm and norm > ratio * base_norm:
        return (
            f"its task vector's norm is {norm:.4g}, the base's {base_norm:.4g}; fine-tuning moves "
            "a model by a few percent"
        )
    if others and norm > LARGE_RATIO * statistics.median(others):
        return (
            f"its task vector's norm is {norm:.4g}, the median of the other tasks' "
            f"{statistics.median(others):.4g}"
        )
    return None


def warnings(basis: Basis, models: Mapping[str, str]) -> list[str]:
    """What the Gram matrix says against the recipe, a line each; `models` maps task -> model."""
    lines = []
    scales = [abs(weight) for weight in basis.weights]
    base_size, *sizes = basis.sums.sizes
    sizes = [size / scale for size, scale in zip(sizes, scales, strict=True)]
    base_norm = basis.sums.base_norm_squared**0.5
    norms = basis.sums.gram.diagonal().sqrt().tolist()
    for index, task in enumerate(basis.tasks):
        others = sizes[:index] + sizes[index + 1 :]
        reason = unlike(sizes[index], base_size, others, UNRELATED_RATIO)
        if reason := reason or unlike(norms[index] / scales[index], base_norm):
            lines.append(
                f"task `{task}` ({models[task]}): {reason}: is it fine-tuned from this base?"
            )
    cosines = basis.cosines
    for i, j in torch.triu_indices(len(basis.tasks), len(basis.tasks), 1).T.tolist():
        if cosines[i, j] > 1 - 1e-6:
            lines.append(
                f"tasks `{basis.tasks[i]}` and `{basis.tasks[j]}` have the same task vector up to "
                "scale: one model under two names?"
            )
    return lines
