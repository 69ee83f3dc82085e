"""Models whose calls are answered as their prompts choose; and `Routed`, which combines bases.

WEMoE over bases (Tang et al., ICML 2024; the paper's table 1). W is the merged weight. A linear
layer in MLP l computes (W + sum_m r_m B_m) x, and r = R_l(mean input of MLP l over the prompt). So
r is the difference from the recipe's merge. `router` chooses tasks without learning.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tvb_mergekit.errors import UserError
from tvb_mergekit.names import MLP
from tvb_mergekit.store.facts import FOLDER
from tvb_mergekit.tensors.checkpoint import metadata_of

ROUTING = "tvb_routed"  # attribute of a routed model: its `Routing`
CHOSEN = "tvb_chosen"  # attribute of a cache: what its prompts chose, whatever came in between
ROUTERS = "routers.safetensors"
LEARNED = "tvb_learned"  # key of the metadata of `tvb learn`


class Routing(ABC):
    """A model whose calls are answered as their prompts choose. Threads take turns."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._lock, self._within = model, threading.RLock(), False
        self._undo = ExitStack()

    def route(self) -> nn.Module:
        """The model, whose calls are routed until `reset`."""
        end_routing(self.model)  # of an earlier `attach`, perhaps
        vars(self.model)[ROUTING] = self
        self._undo.callback(vars(self.model).pop, ROUTING)
        # PEFT calls `forward` of the model, and some users its body alone
        body = getattr(self.model, "base_model", self.model)
        for owner, name in {(self.model, "generate"), (self.model, "forward"), (body, "forward")}:
            if hasattr(owner, name):
                self._replace(owner, name, self._call)
        return self.model

    def reset(self) -> nn.Module:
        """The model without routing, with the weights that it has."""
        self._undo.close()
        return self.model

    def _replace(self, owner: nn.Module, name: str, new: Callable[..., Any]) -> None:
        """Replace a method until `reset`; `new` gets the former one before its arguments."""
        old, own = getattr(owner, name), {key: v for key, v in vars(owner).items() if key == name}
        self._undo.callback(vars(owner).update, own)
        self._undo.callback(vars(owner).pop, name)
        vars(owner)[name] = functools.wraps(old)(partial(new, old))

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
            cache, chosen = next(filter(is_cache, given.values()), None), None
            if cache is not None and cache.get_seq_length():
                chosen = getattr(cache, CHOSEN, None)
                if chosen is None:
                    raise UserError("a cache of prompts that were not routed: begin with prompts")
            output, chosen = self._answer(old, given, chosen)
            for each in filter(is_cache, (cache, *tree_leaves(output, is_leaf=is_cache))):
                setattr(each, CHOSEN, chosen)
            return output

    @abstractmethod
    def _answer(self, call: Callable[..., Any], given: dict[str, Any], chosen: Any) -> Any:
        """The output of a call and the choice of its prompts, which is None if they begin now."""


def end_routing(model: nn.Module) -> None:
    if routing := vars(model).get(ROUTING):
        routing.reset()


def is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def kept(mask: Tensor | None, x: Tensor, name: str) -> Tensor:
    """1 for each token of the inputs x [sequences, tokens, n] that an attention mask keeps."""
    mask = x.new_ones(x.shape[:2]) if mask is None else mask.to(x.device)
    mask = mask.repeat_interleave(len(x) // len(mask), 0)  # `generate` makes beams of a sequence
    if mask.shape != x.shape[:2]:  # of one token it would be spread over all
        raise UserError(f"`{name}`: a mask {list(mask.shape)} for inputs {list(x.shape)}")
    return mask


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers, by the names of their weights."""
    every = {f"{name}.weight": module for name, module in model.named_modules()}
    return {n: m for n, m in every.items() if isinstance(m, nn.Linear) or is_turned(m)}


def is_turned(layer: nn.Module) -> bool:
    """Whether the weight of a linear layer is [inputs, outputs]."""
    return type(layer).__name__ == "Conv1D"


def routed_parameters(model: nn.Module) -> dict[str, str]:
    """The parameters of the linear layers in MLPs -> the name of the MLP."""
    return {
        name.replace(".weight", f".{kind}"): mlp[0]
        for name, module in linear_layers(model).items()
        if (mlp := MLP.match(name))
        for kind, _ in module.named_parameters()
    }


def router_of(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these sizes, with ReLU between them."""
    layers = ((nn.ReLU(), nn.Linear(*each)) for each in itertools.pairwise(sizes))
    return nn.Sequential(*[module for pair in layers for module in pair][1:])


class Routed(Routing):
    """A model with routers and bases for its MLPs; see `attach`.

    Attributes:
        routers: MLP -> R_l.
        bases: parameter of the model -> B_m in its shape, [M, ...]; where its inputs are.
        prompts: [sequences, tokens], 1 for each token of a prompt. None: all tokens that the
            attention mask keeps, in the first pass of a call without earlier tokens in its cache.
        coefficients: MLP -> r [sequences, M] of the last prompts.
    """

    def __init__(
        self, model: nn.Module, routers: Mapping[str, nn.Module], bases: Mapping[str, Tensor]
    ) -> None:
        super().__init__(model)
        self.routers, self.bases = routers, dict(bases)
        self.prompts: Tensor | None = None
        self.coefficients: dict[str, Tensor] = {}
        linear = linear_layers(model)  # before PEFT may wrap some
        self._layers = {name: linear[name] for name in bases if name.endswith(".weight")}
        self._mlps = routed_parameters(model)
        self._mask: Any = None
        self._combined = dict[str, tuple[Tensor, Tensor]]()  # of a single prompt: r, weight

    def route(self) -> nn.Module:
        """The model, whose MLPs combine the bases for each sequence from now on."""
        super().route()
        for name in self.routers:
            choose = partial(self._choose, name)
            hook = self.model.get_submodule(name).register_forward_pre_hook(choose)
            self._undo.callback(hook.remove)
        for name, layer in self._layers.items():
            self._replace(layer, "forward", partial(self._linear, name, layer))
        return self.model

    def _answer(self, call: Callable[..., Any], given: dict[str, Any], chosen: Any) -> Any:
        self._mask = given.get("attention_mask") if self.prompts is None else self.prompts
        self.coefficients = {} if chosen is None else chosen
        output = call(**given)  # generated tokens do not belong to the graph of their prompts
        return output, chosen or {name: r.detach() for name, r in self.coefficients.items()}

    def _choose(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Compute r in the first pass; in training again for the backward pass."""
        if name not in self.coefficients or self.coefficients[name].requires_grad:
            given, mask = args[0], kept(self._mask, args[0], name)
            router = self.routers[name].to(given.device)
            kind = next(router.parameters()).dtype
            total = (given * mask[..., None]).sum(1, dtype=kind)
            self.coefficients[name] = router(total / mask.sum(1, True, dtype=kind).clamp(min=1))

    def _linear(self, name: str, layer: Any, old: Callable[..., Tensor], x: Tensor) -> Tensor:
        """(W + sum_m r_m B_m) x, with r of each sequence."""
        r, weight, bias = self.coefficients.get(self._mlps[name]), layer.weight, f"{name[:-6]}bias"
        if r is None or x.dim() != 3 or len(x) != len(r):
            said = f"`{name}`: inputs {list(x.shape)} after {0 if r is None else len(r)} prompts"
            raise UserError(f"{said}; begin with all prompts, and `exclude` experts from the bases")
        bases, turned = self.bases[name].to(weight.detach()), is_turned(layer)
        self.bases[name] = bases  # where the model is by now

        def combined(r: Tensor) -> Tensor:
            with torch.autocast(weight.device.type, enabled=False):
                moved = torch.addmm(weight.reshape(1, -1), r[None].to(weight), bases.flatten(1))
            moved = moved.view(weight.shape)
            return moved if turned else moved.mT

        if len(r) == 1 and not r.requires_grad:  # once for all tokens to come
            if self._combined.get(name, (None,))[0] is not r:
                self._combined[name] = r, combined(r[0])
            y = x @ self._combined[name][1]
        elif x.shape[1] == 1 and not r.requires_grad:  # no weights of one sequence are made
            terms = r.T.to(x)[:, :, None] * x[:, 0]
            y = torch.bmm(terms, bases if turned else bases.mT).sum(0)[:, None]
            y = y + x @ (weight if turned else weight.mT)
        else:  # the backward pass combines them again
            some: Any = lambda x, r: x @ combined(r)  # noqa: E731
            rows = [checkpoint(some, *each, use_reentrant=False) for each in zip(x, r, strict=True)]
            y = torch.stack(rows)
        y = y if layer.bias is None else y + layer.bias
        return y + (r.to(x) @ self.bases[bias].to(x))[:, None] if bias in self.bases else y


def routers_in(folder: str | os.PathLike[str]) -> Path | None:
    """The file of routers in a merged model, if there is one."""
    file = Path(folder) / FOLDER / "learned" / ROUTERS
    return file if file.is_file() else None


def routed_model(model: nn.Module, file: Path) -> Routed:
    """A model with the routers and bases in a file of `tvb learn wemoe`."""
    if '"version": 1,' not in metadata_of(file).get(LEARNED, ""):
        why = "damaged, or written by another tvb-mergekit"
        raise UserError(f"{file}: {why}; copy it again, or repeat `tvb learn`")
    held, routers = load_file(file), dict[str, nn.Module]()
    for mlp in {name.partition(".router.")[0] for name in held if ".router." in name}:
        names = sorted(name for name in held if name.startswith(f"{mlp}.router."))
        state = {name.rpartition(".router.")[2]: held.pop(name) for name in names}
        weights = [tensor for tensor in state.values() if tensor.dim() == 2]
        router = router_of([weights[0].shape[1], *map(len, weights)])
        router.load_state_dict(state)
        routers[mlp] = router.requires_grad_(False)
    return Routed(model, routers, held)
