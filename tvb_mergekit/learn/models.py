"""The models of the tasks of a planned merge, its bases, and the data of each basis."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tvb_mergekit.core.basis import Basis, Linear
from tvb_mergekit.errors import UserError, listed, one_line
from tvb_mergekit.learn.statistics import input_dimension, linear_layers
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.plugin.sources import Source
from tvb_mergekit.store.api import base_of
from tvb_mergekit.store.attach import Live
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.checkpoint import SAVE_AGAIN
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.peft_files import MERGE_FIRST
from tvb_mergekit.tensors.writing import Stacked

LOG = logging.getLogger(__name__)
MIXED = ("pca", "linear_ae")  # bases whose encoder may have negative entries
Mixture = Literal["encoder", "equal", "positive"]


def check_untied(parameters: Mapping[str, nn.Parameter], which: str) -> None:
    """Raise UserError if two tensors of the merge are one parameter of a model."""
    first = {id(parameter): name for name, parameter in reversed([*parameters.items()])}
    if twice := [name for name, p in parameters.items() if first[id(p)] != name]:
        other = first[id(parameters[twice[0]])]
        raise UserError(
            f"tensors `{other}` and `{twice[0]}` are tied in {which}, and two in others: they "
            "cannot be learned apart; set `exclude` to one of them"
        )


class TaskModels:
    """theta_i of each task in float32.

    Over a recipe they are its models. Over a store they are the base plus each task's vector, which
    a store of bases reconstructs.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device, self.trust = plan, device, plan.options.trust_remote_code
        self.stored = plan.recipe.bases
        self._model: nn.Module | None = None
        self._warned = set[str]()

    @property
    def tasks(self) -> list[str]:
        store = self.plan.recipe.store
        return list(self.plan.recipe.tasks if store is None else store.tasks)

    def _source(self, task: str | None) -> Source:
        recipe = self.plan.recipe
        alone = task is not None and self.stored is None
        owner = recipe.models[self.tasks.index(str(task))] if alone else recipe.base
        return self.plan.tensors.checkpoints[owner]

    def folder(self, task: str | None) -> Path:
        """The folder with configuration and tokenizer of a task's model; None is the base."""
        return Path(self._source(task).folder)

    def load(self, task: str) -> nn.Module:
        """The model of a task, instead of the previous one."""
        if self.stored is None:
            self._model = None  # before the next one is loaded
            self._model = load_model(self.folder(task), self.device, self.trust)
            source = self._source(task)
            if isinstance(source, Adapter):
                _adapt(self._model, source)
            return self._model
        return self._live.use(task)

    @functools.cached_property
    def _live(self) -> Live:
        assert self.stored is not None
        base = self.folder(None)
        model = load_model(base, self.device, self.trust)
        return Live(model, self.stored, base_of(self.stored, os.fspath(base)))

    def named(self, model: nn.Module, task: str | None = None) -> dict[str, nn.Parameter]:
        """The parameters of a task's model that the merge moves, by their names in the merge.

        A warning lists the tensors whose names in memory differ from the files; they are left out.

        Args:
            task: None for the base's model.

        Raises:
            UserError: most names differ.
        """
        state = model.state_dict(keep_vars=True)
        place = 0 if task is None or self.stored is not None else 1 + self.tasks.index(task)
        stored = {item.name: item.parts[place].name for item in self.plan.tasks.items}
        found = {name: state[own] for name, own in stored.items() if own in state}
        if missing := [name for name, own in stored.items() if own not in state]:
            folder = self.folder(task)
            text = f"{folder}: in memory the model names {listed(missing)} otherwise than its files"
            if 2 * len(missing) > len(stored):
                raise UserError(f"{text}; {SAVE_AGAIN}")
            if text not in self._warned:
                LOG.warning("%s: nothing is learned of them, unless you %s", text, SAVE_AGAIN)
            self._warned.add(text)
        return found

    def stacked(self, bases: Tensor, names: Container[str] | None = None) -> dict[str, Tensor]:
        """The bases [M, n] float32 of each tensor that the merge moves, on the device.

        Args:
            bases: as combinations of the plan's vectors, [N, M].
            names: of the tensors; None for all.
        """
        every = self.plan.tasks.items
        items = [replace(i, out=torch.float32) for i in every if names is None or i.name in names]
        sink = Stacked(items, bases.shape[1])
        steps = dict.fromkeys((item.name for item in items), Linear.of(bases))
        combine_pass(items, steps, sink, self.plan.engine, title="Bases")
        return {name: held.to(self.device) for name, held in sink.held.items()}

    @functools.cached_property
    def empty(self) -> nn.Module:
        """The base's model without weights."""
        folder = self.folder(None)
        with torch.device("meta"), refused(folder):
            config = _config(folder, self.trust)
            own = {"trust_remote_code": self.trust}
            model: nn.Module = AutoModelForCausalLM.from_config(config, **own)
        return model

    def dimensions(self) -> dict[str, int]:
        """Weight of a linear layer -> the dimension of its inputs; loads nothing."""
        layers, parameters = linear_layers(self.empty), self.named(self.empty)
        return {n: input_dimension(layers[id(p)]) for n, p in parameters.items() if id(p) in layers}


def _adapt(model: nn.Module, adapter: Adapter) -> None:
    """Make X+ADAPTER of a loaded X."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    changed = adapter.factors.keys() | adapter.dense.keys()
    if lost := sorted(changed - parameters.keys()):
        raise UserError(
            f"adapter {adapter.file.folder}: in memory the model names {listed(lost)} otherwise "
            f"than its files; {MERGE_FIRST}"
        )
    with torch.no_grad():
        for name in changed:
            parameters[name].copy_(adapter.whole(name))


def load_model(folder: Path, device: torch.device, trust_remote_code: bool) -> nn.Module:
    """The causal language model in a folder, in float32.

    Raises:
        UserError: transformers cannot load it.
    """
    disable_progress_bar()  # ours counts examples
    with refused(folder):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            os.fspath(folder), dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    return model.to(device).eval()


@contextmanager
def refused(folder: Path) -> Iterator[None]:
    """Raise UserError if transformers refuses a model's folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{folder}: not a causal language model: {one_line(error)}") from error


def limits(folder: Path, trust_remote_code: bool) -> tuple[int, int]:
    """The longest input of a model in tokens, and the size of its vocabulary."""
    config = _config(folder, trust_remote_code).get_text_config()
    names = ("max_position_embeddings", "vocab_size")
    context, vocabulary = (int(getattr(config, name, None) or 2**31) for name in names)
    return context, vocabulary


def _config(folder: Path, trust_remote_code: bool) -> Any:
    with refused(folder):
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)


def base_names(plan: Plan) -> dict[str, str]:
    """The name in the base's files of each tensor that counts."""
    bases = ((item.name, item.base) for item in plan.tasks.items)
    return {name: (base and base.name) or name for name, base in bases}


def bases_of(plan: Plan) -> Tensor:
    """The bases as combinations of the plan's vectors, [N, M] float64."""
    if plan.recipe.store is None:
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
    tasks = len(basis.tasks)
    if mixture == "equal":
        return torch.full((tasks, basis.num_bases), 1 / tasks).double()
    if store is None:
        assert isinstance(basis, Basis)
        encoder = basis.encoding.encoder
    else:
        encoder = (store.encoder * store.shares)[:, list(plan.recipe.order)]
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
    return recipe.settings.basis if recipe.store is None else recipe.store.basis


def _without_mixtures(plan: Plan, mixture: Mixture) -> UserError:
    return UserError(
        f"`basis` is {_basis_name(plan)}, whose encoder has negative weights, and a basis learns "
        "from a mixture of the tasks' data; choose balanced, groups, ae, rand_select or none, or "
        f"--mixture equal{' or positive' if mixture == 'encoder' else ''}"
    )
