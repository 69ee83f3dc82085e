"""Models whose weights depend on the prompt; and `Routed`, which learned to combine bases.

WEMoE over bases (Tang et al., ICML 2024; the paper's table 1). W is the merged weight. A linear
layer in MLP l computes (W + sum_m r_m B_m) x, and r = R_l(mean input of MLP l over the prompt). So
r is the difference from the recipe's merge. `router` chooses tasks without learning.

Generated tokens keep what their prompt chose: a note on the cache says it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tvb_mergekit.errors import UserError
from tvb_mergekit.names import MLP
from tvb_mergekit.store.facts import FOLDER
from tvb_mergekit.tensors.checkpoint import metadata_of

ROUTING = "tvb_routed"  # attribute of a routed model: its `Routing`
CHOSEN = "tvb_chosen"  # attribute of a cache: what its prompts chose
ROUTERS = "routers.safetensors"
LEARNED = "tvb_learned"  # key of the metadata of `tvb learn`
COMBINED = 2**28  # bytes of combined weights at a time


class Routing:
    """A model, each of whose passes asks what its prompts choose. Threads take turns."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._lock = model, threading.RLock()
        self._stack, self._within = ExitStack(), False

    def route(self) -> nn.Module:
        """The model, whose passes are routed from now on."""
        vars(self.model).get(ROUTING, self).reset()  # of an earlier `attach`, perhaps
        vars(self.model)[ROUTING] = self
        self._stack.callback(vars(self.model).pop, ROUTING)
        # PEFT calls `forward` of the model, and some users its body alone
        for module in dict.fromkeys((self.model, getattr(self.model, "base_model", self.model))):
            self._replace(module, "forward", self._call)
        return self.model

    def reset(self) -> nn.Module:
        """The model without routing, with the weights that it has."""
        self._stack.close()
        return self.model

    def _replace(self, owner: object, name: str, new: Callable[..., Any]) -> None:
        """Replace a method; `new` gets the former one before its arguments."""
        old, own = getattr(owner, name), {key: v for key, v in vars(owner).items() if key == name}
        self._stack.callback(vars(owner).update, own)
        self._stack.callback(vars(owner).pop, name)
        vars(owner)[name] = functools.wraps(old)(partial(new, old))

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        """Let passes through as they are; yields whether an outer call does so already."""
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
            cache: Any = given.get("cache", given.get("past_key_values"))
            begins = not (is_cache(cache) and cache.get_seq_length())
            chosen = self._begin(given) if begins else getattr(cache, CHOSEN, None)
            if chosen is None:
                raise UserError("a cache of prompts that were not routed: begin with prompts")
            output = self._run(old, args, kwargs, chosen, begins)
            made = output.values() if isinstance(output, Mapping) else output
            for each in (cache, *(made if isinstance(made, Iterable) else ())):
                if is_cache(each):
                    setattr(each, CHOSEN, chosen)
            return output

    def _begin(self, given: Mapping[str, Any]) -> Any:
        """The choice of new prompts, by the named arguments of a call."""
        raise NotImplementedError

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any, chosen: Any, new: bool) -> Any:
        """The output of a call for prompts that chose this; `new`: they begin with this call."""
        raise NotImplementedError


def is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def kept(mask: Any, x: Tensor, name: str) -> Any:
    """1 for each token of the inputs x [sequences, tokens, n] that an attention mask keeps."""
    if isinstance(mask, Mapping):  # one for each kind of layer
        mask = next(iter(mask.values()))
    mask = x.new_ones(x.shape[:2]) if mask is None else mask.to(x.device)
    if mask.dim() == 4:  # of a static cache: the tokens that see themselves, also in a window
        mask = mask[:, 0].diagonal(dim1=1, dim2=2)[:, : x.shape[1]]
        mask = mask if mask.dtype == torch.bool else mask == 0
    if mask.shape != x.shape[:2]:  # of one token it would be spread over all
        raise UserError(f"`{name}`: a mask {list(mask.shape)} for inputs {list(x.shape)}")
    return mask


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers, by the names of their weights."""
    named = model.named_modules()
    return {
        f"{name}.weight": m
        for name, m in named
        if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    }


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
        bases: parameter of the model -> B_m in its shape, [M, ...]; on its device, in its dtype.
        prompts: [sequences, tokens], 1 for each token of a prompt. None: all tokens that the
            attention mask keeps, in passes without earlier tokens in the cache.
        coefficients: MLP -> r [sequences, M] of the last prompts.
    """

    def __init__(
        self, model: nn.Module, routers: Mapping[str, nn.Module], bases: Mapping[str, Tensor]
    ) -> None:
        super().__init__(model)
        self.routers, self.bases = routers, dict(bases)
        self.prompts: Tensor | None = None
        self.coefficients: dict[str, Tensor] = {}
        self._layers: list[tuple[str, str, Any]] = [  # before PEFT may wrap some
            (name, mlp, model.get_submodule(name.removesuffix(".weight")))
            for name, mlp in routed_parameters(model).items()
            if name in bases and name.endswith(".weight")
        ]
        self._mask: Any = None
        self._begins = False  # whether the pass is one of prompts
        # MLP -> the combined weights of its layers if all sequences have one r, else None
        self._merged: dict[str, dict[str, Tensor] | None] = {}

    def route(self) -> nn.Module:
        """The model, whose MLPs combine the bases for each sequence from now on."""
        super().route()
        for mlp in self.routers:
            choose = partial(self._choose, mlp)
            hook = self.model.get_submodule(mlp).register_forward_pre_hook(choose)
            self._stack.callback(hook.remove)
        for name, mlp, layer in self._layers:
            self._replace(layer, "forward", partial(self._linear, name, mlp, layer))
        return self.model

    def _begin(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        self._mask = given.get("attention_mask") if self.prompts is None else self.prompts
        return {}

    def _run(self, call: Any, args: Any, kwargs: Any, chosen: dict[str, Tensor], new: bool) -> Any:
        self._begins = new
        if chosen is not self.coefficients:
            self.coefficients = chosen
            self._merged = {mlp: None if (r != r[:1]).any() else {} for mlp, r in chosen.items()}
        return call(*args, **kwargs)

    def _choose(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Compute r for new prompts."""
        if not self._begins:
            return
        given, mask = args[0], kept(self._mask, args[0], name)
        router = self.routers[name].to(given.device)
        kind = next(router.parameters()).dtype
        total = (given * mask[..., None]).sum(1, dtype=kind)
        self.coefficients[name] = r = router(total / mask.sum(1, True, dtype=kind).clamp(min=1))
        self._merged[name] = None if r.requires_grad or (r != r[:1]).any() else {}

    def _linear(self, name: str, mlp: str, layer: Any, old: object, x: Tensor) -> Tensor:
        """The layer's outputs, with the coefficients of each sequence."""
        r, weight, bias = self.coefficients.get(mlp), layer.weight, f"{name[:-6]}bias"
        if r is None or x.dim() != 3 or len(x) != len(r):
            said = f"`{name}`: inputs {list(x.shape)} after {0 if r is None else len(r)} prompts"
            raise UserError(f"{said}; begin with all prompts, and `exclude` experts from the bases")
        bases = self.bases[name] = self.bases[name].to(weight.detach())
        turned = isinstance(layer, nn.Linear)
        if (merged := self._merged.get(mlp)) is not None:
            if name not in merged:
                merged[name] = combined(r[:1], weight, bases)[0]
            y = x @ (merged[name].mT if turned else merged[name])
        elif x.shape[1] == 1 and not r.requires_grad:  # no weights of one sequence are made
            terms = r.T.to(x)[:, :, None] * x[:, 0]
            y = torch.bmm(terms, bases.mT if turned else bases).sum(0)[:, None]
            y = y + x @ (weight.mT if turned else weight)
        else:
            y = product(x, r, weight, bases, turned)
        y = y if layer.bias is None else y + layer.bias
        return y + (r.to(x) @ self.bases[bias].to(x))[:, None] if bias in self.bases else y


def combined(r: Tensor, weight: Tensor, bases: Tensor) -> Tensor:
    """W + sum_m r_m B_m for each sequence, [sequences, *W.shape]."""
    with torch.autocast(weight.device.type, enabled=False):
        moved = torch.addmm(weight.reshape(1, -1), r.to(weight), bases.flatten(1))
    return moved.view(-1, *weight.shape)


def product(x: Tensor, r: Tensor, weight: Tensor, bases: Tensor, turned: bool) -> Tensor:
    """x [sequences, tokens, n] times the `combined` weights, a few sequences at a time; the
    backward pass combines them again."""

    def some(x: Tensor, r: Tensor) -> Tensor:
        made = combined(r, weight, bases)
        return x @ (made.mT if turned else made)

    count = max(1, COMBINED // (weight.numel() * weight.itemsize))
    parts = zip(x.split(count), r.split(count), strict=True)
    return torch.cat([checkpoint(some, *each, use_reentrant=False) for each in parts])


def routers_in(folder: str | os.PathLike[str]) -> Path | None:
    """The file of routers in a merged model, if there is one."""
    file = Path(folder) / FOLDER / "learned" / ROUTERS
    return file if file.is_file() else None


def routed_model(model: nn.Module, file: Path) -> Routed:
    """A model with the routers and bases in a file of `tvb learn wemoe`."""
    told = metadata_of(file).get(LEARNED, "")
    if '"version": 1,' not in told:
        why = "written by another tvb-mergekit" if told else "damaged; copy it again"
        raise UserError(f"{file}: {why}, or repeat `tvb learn`")
    held, own = load_file(file), dict(model.named_parameters())
    states = defaultdict[str, dict[str, Tensor]](dict)  # of the router of each MLP
    for name in [name for name in held if ".router." in name]:
        mlp, _, key = name.rpartition(".router.")
        states[mlp][key] = held.pop(name)
    for name, bases in held.items():
        p = own.get(name)
        if p is None or p.shape != bases.shape[1:] or not p.is_floating_point():
            said = f"{file}: the model has no tensor `{name}` of this shape that is not quantized"
            raise UserError(f"{said}; load it from {file.parents[2]}, by its own class")
    routers = dict[str, nn.Module]()
    for mlp, state in states.items():
        shapes = [tensor.shape for _, tensor in sorted(state.items()) if tensor.dim() == 2]
        router = router_of([shapes[0][1], *(rows for rows, _ in shapes)])
        routers[mlp] = router.requires_grad_(False)
        routers[mlp].load_state_dict(state)
    return Routed(model, routers, held)
