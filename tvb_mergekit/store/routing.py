"""Routed MLPs: each sequence combines the bases in the MLPs of a model by coefficients of its own.

WEMoE over bases (Tang et al., ICML 2024; the paper's table 1). W is the merged weight. A linear
layer in MLP l computes (W + sum_m r_m B_m) x, and r = R_l(mean input of MLP l over the prompt). So
r is the difference from the recipe's merge. Generated tokens keep r.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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

ROUTERS = "routers.safetensors"
LEARNED = "tvb_learned"  # key of the metadata of `tvb learn`
COMBINED = 2**28  # bytes of combined weights at a time


def routed_parameters(model: nn.Module) -> dict[str, str]:
    """The parameters of the linear layers in MLPs -> the name of the MLP."""
    return {
        f"{name}.{kind}": mlp[0]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if (mlp := MLP.match(name))
        for kind, parameter in module.named_parameters()
    }


def router_of(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these sizes, with ReLU between them."""
    layers = ((nn.ReLU(), nn.Linear(*each)) for each in itertools.pairwise(sizes))
    return nn.Sequential(*[module for pair in layers for module in pair][1:])


class Routed:
    """A model with routers and bases for its MLPs; see `attach`. One thread at a time may run it.

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
        self.model, self.routers, self.bases = model, routers, dict(bases)
        self.prompts: Tensor | None = None
        self.coefficients: dict[str, Tensor] = {}
        self._layers: list[tuple[str, str, Any]] = [
            (name, mlp, model.get_submodule(name.removesuffix(".weight")))
            for name, mlp in routed_parameters(model).items()
            if name in bases and name.endswith(".weight")
        ]
        self._stack = ExitStack()
        self._mask: Any = None
        self._begins, self._count = False, 0  # whether a pass is one of prompts; such passes so far
        # MLP -> the combined weights of its layers if all sequences have one r, else None
        self._merged: dict[str, dict[str, Tensor] | None] = {}

    def route(self) -> nn.Module:
        """The model, whose MLPs combine the bases for each sequence from now on."""
        vars(self.model).get("tvb_routed", self).reset()  # of an earlier `attach`, perhaps
        vars(self.model)["tvb_routed"] = self
        self._stack.callback(vars(self.model).pop, "tvb_routed")
        body: Any = getattr(self.model, "base_model", self.model)  # PEFT never calls the model
        hooks = [body.register_forward_pre_hook(self._begin, with_kwargs=True)]
        hooks.append(body.register_forward_hook(self._end))
        for mlp in self.routers:
            module, choose = self.model.get_submodule(mlp), partial(self._choose, mlp)
            hooks.append(module.register_forward_pre_hook(choose))
        for hook in hooks:
            self._stack.callback(hook.remove)
        for name, mlp, layer in self._layers:
            own = {key: value for key, value in vars(layer).items() if key == "forward"}
            self._stack.callback(vars(layer).update, own)
            self._stack.callback(vars(layer).pop, "forward")
            layer.forward = partial(self._linear, name, mlp, layer)
        return self.model

    def reset(self) -> nn.Module:
        """The model without routers, as it was loaded. Its weights have never changed."""
        self._stack.close()
        self._merged.clear()
        return self.model

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
        self._begins = cache is None or not cache.get_seq_length()
        self._count += self._begins
        if cache is not None and self._begins:
            cache.tvb_prompts = self._count
        elif cache is not None and getattr(cache, "tvb_prompts", None) != self._count:
            raise UserError("the cache is of other prompts than the last: begin with the prompts")
        self._mask = kwargs.get("attention_mask") if self.prompts is None else self.prompts
        if isinstance(self._mask, Mapping):  # one for each kind of layer
            self._mask = next(iter(self._mask.values()))

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Mark a cache that the model has made itself."""
        for each in output.values() if isinstance(output, Mapping) else output:
            if hasattr(each, "get_seq_length"):
                each.tvb_prompts = self._count

    def _choose(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Compute r for new prompts."""
        if not self._begins:
            return
        given, mask = args[0], self._mask
        mask = given.new_ones(given.shape[:2]) if mask is None else mask.to(given.device)
        if mask.dim() == 4:  # of a static cache: the tokens that see themselves, also in a window
            mask = mask[:, 0].diagonal(dim1=1, dim2=2)[:, : given.shape[1]]
            mask = mask if mask.dtype == torch.bool else mask == 0
        if mask.shape != given.shape[:2]:  # of one token it would be spread over all
            raise UserError(f"`{name}`: a mask {list(mask.shape)} for inputs {list(given.shape)}")
        router = self.routers[name].to(given.device)
        kind = next(router.parameters()).dtype
        total = (given * mask[..., None]).sum(1, dtype=kind)
        self.coefficients[name] = r = router(total / mask.sum(1, True, dtype=kind).clamp(min=1))
        self._merged[name] = None if r.requires_grad or (r != r[:1]).any() else {}

    def _linear(self, name: str, mlp: str, layer: Any, x: Tensor) -> Tensor:
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
    if LEARNED not in metadata_of(file):
        raise UserError(f"{file}: damaged; copy it again, or repeat `tvb learn`")
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
