"""Models whose calls are answered as their prompts choose: what `Live` and `Routed` share.

A linear layer with the weight W gives W x + sum_m B_m (c_m x), where each sequence has its own c.
In `attach.Live`, B_m is the adapter of task m, and c is 1 for the task of the prompt.

`Routed` is WEMoE over bases (Tang et al., ICML 2024; the paper's table 1): W is the merged weight,
B_m a basis of a layer in MLP l, and c = R_l(mean input of MLP l over the prompt). So c is the
difference from the recipe's merge.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import FOLDER
from tvb_mergekit.store.gates import is_turned, kept
from tvb_mergekit.tensors.checkpoint import metadata_of

HOOKS = "tvb_hooks"  # attribute of a routed model: what ends its routing
ROUTERS = "routers.safetensors"
LEARNED = "tvb_learned"  # key of the metadata of `tvb learn`
Updates = Mapping[str, Sequence[Sequence[Tensor]]]  # weight -> the factors of each B_m


def end_routing(model: nn.Module) -> ExitStack:
    """Let a model answer by its weights alone; returns a stack to end the next routing."""
    vars(model).pop(HOOKS, ExitStack()).close()
    hooks = vars(model)[HOOKS] = ExitStack()
    return hooks


@dataclass(eq=False)
class Routing(ABC):
    """A model whose calls are answered as their prompts choose. Threads take turns."""

    model: nn.Module
    _lock: Any = field(init=False, default_factory=threading.RLock)
    _within: bool = field(init=False, default=False)

    @abstractmethod
    def _answer(self, call: Callable[..., Any], given: dict[str, Any]) -> Any:
        """The output of a call of the model or of `generate`, with named arguments."""

    @abstractmethod
    def _used(self, name: str) -> Mapping[int, Tensor]:
        """m -> c_m [sequences] of the updates in use, for the layer with this weight."""

    def _route(self, updates: Updates) -> ExitStack:
        """Route calls of the model until the stack is closed."""
        model: Any = self.model
        hooks = end_routing(model)
        # PEFT calls `forward` of the model, and some users its body alone
        body = getattr(model, "base_model", model)
        for owner, name in {(model, "generate"), (model, "forward"), (body, "forward")}:
            if old := getattr(owner, name, None):
                hooks.callback(vars(owner).update, {name: old} if name in vars(owner) else {})
                hooks.callback(vars(owner).pop, name)
                vars(owner)[name] = functools.wraps(old)(partial(self._call, old))
        for name, own in updates.items():
            layer = model.get_submodule(name.removesuffix(".weight"))
            like, turned = layer.weight.detach(), is_turned(layer)  # where the model is by now
            moved = [[factor.to(like) for factor in factors] for factors in own]
            steps = [b if turned else [factor.mT for factor in reversed(b)] for b in moved]
            hooks.callback(layer.register_forward_hook(partial(self._add, name, steps)).remove)
        return hooks

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        """Let calls through as they are; yields whether an outer call does so already."""
        with self._lock:
            before, self._within = self._within, True
            try:
                yield before
            finally:
                self._within = before

    def _call(self, old: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._inside() as within:
            if within:
                return old(*args, **kwargs)
            given = dict(zip(inspect.signature(old).parameters, args, strict=False)) | kwargs
            # What the prompts of a cache have chosen is not known
            if any(hasattr(value, "get_seq_length") for value in given.values()):
                raise UserError("routed calls begin with prompts: leave `past_key_values` out")
            return self._answer(old, given)

    def _add(
        self, name: str, updates: Sequence[Any], layer: Any, args: tuple[Tensor, ...], y: Tensor
    ) -> Tensor:
        """y + sum_m B_m (c_m x). For this a backward pass keeps x and c, and not each B_m x."""
        x = args[0]
        for m, c in self._used(name).items():
            if x.dim() != 3 or len(x) % len(c):
                said = f"`{name}`: inputs {list(x.shape)} for {len(c)} prompts, as of experts"
                raise UserError(f"{said}; `use` one task, or `exclude` the layer from bases")
            c = c.repeat_interleave(len(x) // len(c)).to(x)  # `generate` makes beams of each
            y = y + functools.reduce(torch.matmul, updates[m], c[:, None, None] * x)
        return y


@dataclass(eq=False)
class Routed(Routing):
    """A model with routers and bases for its MLPs; see `attach`."""

    routers: Mapping[str, Sequence[Tensor]]  # MLP -> weight and bias of R_l
    bases: Mapping[str, Tensor]  # weight -> B_m [M, ...]
    # [sequences, tokens], 1 in prompts; None: what the attention mask keeps in the first pass
    prompts: Tensor | None = None
    coefficients: dict[str, Tensor] = field(default_factory=dict)  # MLP -> c of the last prompts
    _mask: Tensor | None = None

    def reset(self) -> nn.Module:
        """The merged model, whose weights have never changed."""
        end_routing(self.model)
        return self.model

    def route(self) -> nn.Module:
        """The model, whose MLPs combine the bases for each sequence from now on."""
        hooks = self._route({name: [[basis] for basis in own] for name, own in self.bases.items()})
        for name in self.routers:
            mlp = self.model.get_submodule(name)
            hooks.callback(mlp.register_forward_pre_hook(partial(self._choose, name)).remove)
        return self.model

    def _answer(self, call: Callable[..., Any], given: dict[str, Any]) -> Any:
        self._mask = given.get("attention_mask") if self.prompts is None else self.prompts
        self.coefficients = {}
        return call(**given)

    def _choose(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Compute c in the first pass; in training again for the backward pass."""
        if name not in self.coefficients or self.coefficients[name].requires_grad:
            weight, bias = (each.to(args[0].device) for each in self.routers[name])
            mask = kept(self._mask, args[0], name)[..., None]
            total = (args[0] * mask).sum(1, dtype=weight.dtype)
            mean = total / mask.sum(1, dtype=weight.dtype).clamp(min=1)
            self.coefficients[name] = linear(mean, weight, bias)

    def _used(self, name: str) -> Mapping[int, Tensor]:
        own = next(c for mlp, c in self.coefficients.items() if name.startswith(f"{mlp}."))
        return dict(enumerate(own.T))


def routed_model(model: nn.Module, folder: str | os.PathLike[str]) -> Routed | None:
    """The model that `tvb learn wemoe` wrote into a folder, with its routers; None: no routers."""
    file, end = Path(folder) / FOLDER / "learned" / ROUTERS, ".router.0."
    if not file.is_file():
        return None
    if '"version": 1,' not in metadata_of(file).get(LEARNED, ""):
        why = "damaged, or written by another tvb-mergekit"
        raise UserError(f"{file}: {why}; copy it again, or repeat `tvb learn`")
    held = load_file(file)
    mlps = {name.partition(end)[0] for name in held if end in name}
    routers = {m: [held.pop(f"{m}{end}{kind}") for kind in ("weight", "bias")] for m in mlps}
    return Routed(model, routers, held)
