"""The models of the tasks of a planned merge, loaded one at a time, and where its tensors are."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tvb_mergekit.core.merge import Linear
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.learn.statistics import input_dimension, linear_layers
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.store.live import Live, attach
from tvb_mergekit.tensors.checkpoint import SAVE_AGAIN
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Item

LOG = logging.getLogger(__name__)


class TaskModels:
    """theta_i of each task in float32: a recipe's model, or of a store the base with the task's
    vector (its reconstruction, where the store holds bases)."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.stored = plan.recipe.vectors
        self._live: Live | None = None
        self._model: nn.Module | None = None
        self._told = set[str]()

    @property
    def tasks(self) -> list[str]:
        """Of the recipe's models, or of all whose vectors a store's bases hold."""
        store = self.plan.recipe.store
        return list(self.plan.recipe.tasks if store is None else store.bases.tasks)

    def folder(self, task: str) -> Path:
        """Where configuration and tokenizer of a task's model are."""
        models = self.plan.recipe.models
        owner = self.plan.recipe.base
        if self.stored is None:
            owner = models[self.tasks.index(task)]
        return Path(self.plan.checkpoints[owner].folder)

    @property
    def base_folder(self) -> Path:
        return Path(self.plan.checkpoints[self.plan.recipe.base].folder)

    def weights(self, task: str) -> list[str]:
        """What tells the weights of a task's model from all others: fingerprints."""
        prints = self.plan.tasks.fingerprints
        if self.stored is None:
            return [prints[str(self.plan.recipe.models[self.tasks.index(task)])]]
        return [*prints.values(), task]

    def limits(self, task: str | None) -> tuple[int, int]:
        """The most tokens that a task's model (None: the base) takes, and how many it knows."""
        folder = self.base_folder if task is None else self.folder(task)
        config = _config(folder, self.plan.options.trust_remote_code).get_text_config()
        names = ("max_position_embeddings", "vocab_size")
        context, vocabulary = (int(getattr(config, name, None) or 2**31) for name in names)
        return context, vocabulary

    def load(self, task: str) -> nn.Module:
        """The model of a task; the one before it is gone."""
        trust = self.plan.options.trust_remote_code
        if self.stored is None:
            self._model = None  # before the next one is loaded
            self._model = load_model(self.folder(task), self.device, trust)
            return self._model
        if self._live is None:
            model = load_model(self.base_folder, self.device, trust)
            self._live = attach(model, self.stored.bases, os.fspath(self.base_folder))
        return self._live.use(task)

    def named(self, model: nn.Module, task: str | None = None) -> dict[str, nn.Parameter]:
        """The parameters of a task's model (None: the base's) that the merge moves, by their names
        in the merged model. Those that the model names otherwise than its files are missing.

        Raises:
            UserError: most are.
        """
        state = model.state_dict(keep_vars=True)
        place = 0 if task is None or self.stored is not None else 1 + self.tasks.index(task)
        stored = {item.name: item.parts[place].name for item in self.plan.tasks.items}
        found = {name: state[own] for name, own in stored.items() if own in state}
        if missing := [name for name, own in stored.items() if own not in state]:
            folder = self.base_folder if task is None else self.folder(task)
            told = f"{folder}: in memory the model names {listed(missing)} otherwise than its files"
            if 2 * len(missing) > len(stored):
                raise UserError(f"{told}; {SAVE_AGAIN}")
            if told not in self._told:
                LOG.warning("%s: nothing is learned of them, unless you %s", told, SAVE_AGAIN)
            self._told.add(told)
        return found

    def stacked(self, bases: Tensor) -> dict[str, Tensor]:
        """The bases [M, n] float32 of each tensor that the merge moves, on the device.

        Args:
            bases: from the vectors that the plan reads, [N, M].
        """
        sink, items = Stacked(bases.shape[1]), self.plan.tasks.items
        steps = dict.fromkeys((item.name for item in items), Linear.of(bases))
        means = self.plan.means
        update = means.pop("progress")("Bases", sum(item.nbytes for item in items))
        plain = [replace(item, out=torch.float32) for item in items]
        combine_pass(plain, steps, sink, **means, progress=update)
        return {name: held.to(self.device) for name, held in sink.held.items()}

    @functools.cached_property
    def empty(self) -> nn.Module:
        """The base's model without weights."""
        with torch.device("meta"), refused(self.base_folder):
            return self._made()

    def _made(self) -> nn.Module:
        trust = self.plan.options.trust_remote_code
        config = _config(self.base_folder, trust)
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
        return model

    def activations(
        self, batch: int, length: int, backward: bool = True, checkpointing: bool = False
    ) -> int | None:
        """About the bytes of a pass of `batch` examples of `length` tokens, in float32: of what it
        keeps for gradients and, without them or with `checkpointing`, of the layers' mean of that;
        and of the logits, their logarithms and gradients. Nothing is computed; None where that
        cannot be, as in some models of experts."""
        kept = dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        torchs = logging.getLogger(FakeTensorMode.__module__)  # prints tracebacks of its errors
        torchs.disabled = True
        try:
            with FakeTensorMode(), saved_tensors_hooks(pack, lambda tensor: tensor):
                model = self._made()
                weights = {p.untyped_storage()._cdata for p in model.parameters()}
                ids = torch.zeros(batch, length, dtype=torch.long)
                logits = model(input_ids=ids, use_cache=False).logits
        except Exception as error:  # of whatever kind a model's code leads to
            LOG.info("%s: no estimate of its activations: %s", self.base_folder, error)
            return None
        finally:
            torchs.disabled = False
        text = cast(Any, model).config.get_text_config()
        layers = int(getattr(text, "num_hidden_layers", None) or 1)
        total = sum(kept.values())
        if checkpointing:  # the input of each layer, and one layer
            total = total // layers + 4 * batch * length * layers * int(text.hidden_size)
        elif not backward:
            total //= layers
        return total + 4 * 3 * int(logits.numel())

    def dimensions(self) -> dict[str, int]:
        """Weight of a linear layer -> the dimension in which its inputs lie; nothing is loaded."""
        model = self.empty
        layers, parameters = linear_layers(model), self.named(model)
        return {n: input_dimension(layers[id(p)]) for n, p in parameters.items() if id(p) in layers}


class Stacked:
    """A `stream.Sink` that holds all outputs [K, n] of each tensor."""

    def __init__(self, outputs: int) -> None:
        self.outputs, self.held = outputs, dict[str, Tensor]()

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        if start == 0:
            self.held[item.name] = torch.empty(self.outputs, item.numel, dtype=item.out)
        self.held[item.name][:, start:stop] = values


def load_model(folder: Path, device: torch.device, trust_remote_code: bool) -> nn.Module:
    """The causal language model in a folder, in float32.

    Raises:
        UserError: transformers cannot load it as one.
    """
    disable_progress_bar()  # ours counts examples
    with refused(folder):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            os.fspath(folder), dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    return model.to(device).eval()


@contextmanager
def refused(folder: Path) -> Iterator[None]:
    """Turn what transformers raises of a model's folder into UserError."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{folder}: no causal language model: {text}") from error


def _config(folder: Path, trust_remote_code: bool) -> Any:
    with refused(folder):
        path = os.fspath(folder)
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
