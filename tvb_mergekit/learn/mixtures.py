"""The bases of a planned merge, and the tasks from whose data each basis learns."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.plan import Plan

MIXED = ("pca", "linear_ae")  # bases whose encoder may have negative entries
Mixture = Literal["encoder", "equal", "positive"]


def base_names(plan: Plan) -> dict[str, str]:
    """The name in the base's files of each tensor that counts."""
    bases = ((item.name, item.base) for item in plan.tasks.items)
    return {name: (base and base.name) or name for name, base in bases}


def bases_of(plan: Plan) -> Tensor:
    """The bases as combinations of the plan's vectors, [N, M] float64."""
    if plan.recipe.store is None:
        assert plan.basis is not None
        return plan.basis.weighted_encoder
    return torch.diag(torch.tensor(plan.recipe.weights, dtype=torch.float64))


def mixtures_of(plan: Plan, mixture: Mixture) -> Tensor:
    """The weight of each task's data in each basis, [T, M] float64, without negative entries.

    - `encoder`: W_e. Balanced bases of a store may stand for different numbers of tasks after
      `tvb add`; then W_e times the store's v.
    - `equal`: 1/T.
    - `positive`: the softmax of a column's positive entries (PCA>=0 in the paper's appendix).

    Raises:
        UserError: W_e has negative entries, or a column without a positive one.
    """
    store, basis = plan.recipe.store, plan.basis
    encoder: Tensor | None
    if store is None:
        assert isinstance(basis, Basis)
        encoder = basis.encoding.encoder
    else:
        encoder = store.bases.encoder
        if encoder is not None:
            encoder = (encoder * store.bases.shares)[:, list(store.order)]
    if mixture == "equal":
        tasks = plan.recipe.tasks if store is None else store.bases.tasks
        return torch.full((len(tasks), bases_of(plan).shape[1]), 1 / len(tasks)).double()
    if encoder is None:
        raise _without_mixtures(plan, mixture)
    if mixture == "positive":
        if float(encoder.amax(0).min()) <= 0:
            raise UserError("--mixture positive: a basis has no positive weight; choose equal")
        return torch.where(encoder > 0, encoder, -torch.inf).softmax(0)
    if float(encoder.min()) < 0:
        raise _without_mixtures(plan, mixture)
    if float(encoder.sum(0).min()) <= 0:
        raise UserError("a basis holds no task (its column of W_e is 0); ask for fewer bases")
    return encoder


def check_mixture(plan: Plan, mixture: Mixture) -> None:
    """Raise UserError if the recipe's basis never gives this mixture."""
    if _basis_name(plan) in MIXED and mixture == "encoder":
        raise _without_mixtures(plan, mixture)


def _basis_name(plan: Plan) -> str | None:
    recipe = plan.recipe
    return recipe.settings.basis if recipe.store is None else recipe.store.bases.basis


def _without_mixtures(plan: Plan, mixture: Mixture) -> UserError:
    return UserError(
        f"`basis` is {_basis_name(plan)}, whose encoder has negative weights, and a basis learns "
        "from a mixture of the tasks' data; choose balanced, groups, ae, rand_select or none, or "
        f"--mixture equal{' or positive' if mixture == 'encoder' else ''}"
    )
