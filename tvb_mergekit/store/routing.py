"""Routed MLPs: each sequence combines the bases in the MLPs of a model by coefficients of its own.

WEMoE over bases (Tang et al., ICML 2024; the paper's table 1). W is the weight merged by addition.
A linear layer in MLP l computes (W + sum_m r_m B_m) x, and r = R_l(mean input of MLP l over the
prompt). So r is the difference of the coefficients from lambda. Generated tokens keep r.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import linear

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import FOLDER
from tvb_mergekit.tensors.checkpoint import metadata_of

ROUTERS = "routers.safetensors"
VERSION = 1  # of this file
MLP = re.compile(r"^(?:.*?\.)?(?:mlp|ffn|feed_forward)(?=\.)")
LAYER = re.compile(r"^(.*)\.router\.(\d+\.(?:weight|bias))$")
BLOCK = 2**28  # bytes of combined weights at a time

Layers = Sequence[tuple[Tensor, Tensor]]


def routed_layers(model: nn.Module) -> dict[str, str]:
    """The weights of the linear layers in MLPs -> the name of the MLP."""
    found = {}
    for name, module in model.named_modules():
        if (mlp := MLP.match(name)) and _is_linear(module):
            found[f"{name}.weight"] = mlp[0]
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


class Routed:
    """A model with routers and bases for its MLPs; see `attach`.

    Attributes:
        routers: MLP -> the weight [k, n] and bias [k] of each layer of R_l, with ReLU between them.
        bases: parameter of the model -> B_m in its shape, [M, ...].
        prompts: [sequences, tokens], 1 for each token of a prompt. By default None: all tokens that
            the attention mask keeps, in passes without earlier tokens in the cache.
        coefficients: MLP -> r [sequences, M] of the last prompts.
    """

    def __init__(
        self, model: nn.Module, routers: Mapping[str, Layers], bases: Mapping[str, Tensor]
    ) -> None:
        self.model, self.routers, self.bases = model, routers, bases
        self.prompts: Tensor | None = None
        self.coefficients: dict[str, Tensor] = {}
        self._stack = ExitStack()
        self._mask: Tensor | None = None
        self._begins = False
        # MLP -> whether all sequences have one r, and then the combined weights of its layers
        self._alike, self._merged = dict[str, bool](), dict[str, dict[str, Tensor]]()

    def route(self) -> nn.Module:
        """The model, whose MLPs combine the bases for each sequence from now on."""
        self.reset()
        hook = self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._stack.callback(hook.remove)
        for name in self.routers:
            module = self.model.get_submodule(name)
            hook = module.register_forward_pre_hook(partial(self._choose, name))
            self._stack.callback(hook.remove)
        for name, mlp in routed_layers(self.model).items():
            if name in self.bases:
                layer = self.model.get_submodule(name.removesuffix(".weight"))
                self._stack.callback(_restore, layer, vars(layer).get("forward"))
                layer.forward = partial(self._linear, name, mlp, layer)
        return self.model

    def reset(self) -> nn.Module:
        """The model without routers, as it was loaded. Its weights have never changed."""
        self._stack.close()
        return self.model

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        self._begins = cache is None or not cache.get_seq_length()
        self._mask = kwargs.get("attention_mask") if self.prompts is None else self.prompts

    def _choose(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Compute r for new prompts."""
        given = args[0]
        if not self._begins:
            return
        mask = given.new_ones(given.shape[:2]) if self._mask is None else self._mask.to(given)
        if given.dim() != 3 or mask.shape != given.shape[:2]:
            raise UserError(
                f"`{name}`: inputs {list(given.shape)} and a mask {list(mask.shape)} of tokens; "
                "routers need [sequences, tokens, n] and a mask [sequences, tokens]"
            )
        mean = (mask / mask.sum(1, keepdim=True).clamp(min=1))[:, None] @ given
        for number, (weight, bias) in enumerate(self.routers[name]):
            mean = mean.relu() if number else mean[:, 0].to(weight)
            mean = linear(mean, weight, bias)
        self.coefficients[name] = mean
        self._alike[name] = not mean.requires_grad and bool((mean == mean[:1]).all())
        self._merged.pop(name, None)

    def _linear(self, name: str, mlp: str, layer: Any, x: Tensor) -> Tensor:
        """The layer's outputs, with the coefficients of each sequence."""
        r, bases, bias = self.coefficients[mlp], self.bases[name], f"{name[:-6]}bias"
        if x.dim() != 3 or len(x) != len(r):
            raise UserError(
                f"`{name}`: inputs {list(x.shape)} after prompts of {len(r)} sequences; begin with "
                "the prompts of all, and leave experts out of the bases (`exclude`)"
            )
        turned = isinstance(layer, nn.Linear)
        if self._alike[mlp]:
            merged = self._merged.setdefault(mlp, {})
            if name not in merged:
                merged[name] = combined(r[:1], layer.weight, bases)[0]
            weight = merged[name]
            y = x @ (weight.mT if turned else weight)
        elif x.shape[1] == 1 and not r.requires_grad:  # no weights of one sequence are made
            y = x @ (layer.weight.mT if turned else layer.weight)
            terms = r.T.to(x)[:, :, None] * x[:, 0]
            y = y + torch.bmm(terms, bases.mT if turned else bases).sum(0)[:, None]
        else:
            y = RoutedProduct.apply(x, r, layer.weight, bases, turned)  # type: ignore[no-untyped-call]
        if layer.bias is not None:
            y = y + layer.bias
        return y + (r.to(x) @ self.bases[bias])[:, None] if bias in self.bases else y


def _restore(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward  # of the object; the class has its own
    else:
        layer.forward = forward


def combined(r: Tensor, weight: Tensor, bases: Tensor) -> Tensor:
    """W + sum_m r_m B_m for each sequence, [sequences, *W.shape]."""
    with torch.autocast(weight.device.type, enabled=False):
        moved = torch.addmm(weight.reshape(1, -1), r.to(weight), bases.flatten(1))
    return moved.view(-1, *weight.shape)


class RoutedProduct(torch.autograd.Function):
    """The products of x [sequences, tokens, n] with `combined` weights.

    Keeps no weights for the backward pass, which combines them again. Only x and r have gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, r: Tensor, weight: Tensor, bases: Tensor, turned: bool
    ) -> Tensor:
        ctx.save_for_backward(x, r, weight, bases)
        ctx.turned = turned
        made = (combined(some, weight, bases) for some in r.split(_count(weight)))
        pairs = zip(x.split(_count(weight)), made, strict=True)
        return torch.cat([rows @ (w.mT if turned else w) for rows, w in pairs])

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        x, r, weight, bases = ctx.saved_tensors
        count, of_x, of_r = _count(weight), [], []
        (outer,) = given
        for rows, some, g in zip(x.split(count), r.split(count), outer.split(count), strict=True):
            made = combined(some, weight, bases).to(g)
            of_x.append((g @ (made if ctx.turned else made.mT)).to(x))
            rows = rows.to(g)
            of_weight = g.mT @ rows if ctx.turned else rows.mT @ g
            of_r.append(of_weight.flatten(1).to(bases) @ bases.flatten(1).T)
        return torch.cat(of_x), torch.cat(of_r).to(r), None, None, None


def _count(weight: Tensor) -> int:
    """The number of sequences whose weights are combined at a time."""
    return max(1, BLOCK // (weight.numel() * weight.itemsize))


def routers_in(folder: str | os.PathLike[str]) -> Path | None:
    """The file of routers in a merged model, if there is one."""
    file = Path(folder) / FOLDER / "learned" / ROUTERS
    return file if file.is_file() else None


def routed_model(model: nn.Module, file: Path) -> Routed:
    """A model with the routers and bases in a file; bases get the model's dtype.

    Raises:
        UserError: a later version wrote the file, or the model has other parameters.
    """
    told = json.loads(metadata_of(file).get("tvb_learned", "{}"))
    if told.get("version", VERSION) > VERSION:
        raise UserError(f"{file}: written by a later tvb-mergekit; upgrade this one")
    parameters, bases = dict(model.named_parameters()), dict[str, Tensor]()
    layers: dict[str, dict[str, Tensor]] = {}
    with safe_open(file, "pt") as held:
        for name in held.keys():
            own = parameters.get(name)
            if found := LAYER.match(name):
                layers.setdefault(found[1], {})[found[2]] = held.get_tensor(name)
            elif own is None or list(own.shape) != held.get_slice(name).get_shape()[1:]:
                raise UserError(
                    f"{file}: the model has no tensor `{name}` of this shape; load it from "
                    f"{file.parents[2]}, by the class that its config.json names"
                )
            else:
                bases[name] = held.get_tensor(name).to(own.detach())
    device = next(iter(bases.values())).device
    routers = {
        mlp: [(each[f"{k}.weight"].to(device), each[f"{k}.bias"].to(device))
              for k in range(len(each) // 2)]
        for mlp, each in layers.items()
    }  # fmt: skip
    return Routed(model, routers, bases)
