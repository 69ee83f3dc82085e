"""What is summed of one task's model over its examples.

One example goes through the model at a time, so no padding is in any sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import Example


def fisher(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    examples: Sequence[Example],
    path: str,
    samples: int = 0,
    seed: str = "",
    tell: Callable[[int], object] = lambda done: None,
) -> dict[str, Tensor]:
    """The diagonal Fisher information of each parameter, float32, of its shape, on the CPU.

    F = mean over examples of the squared gradient of log p(response | prompt), in the response's
    own tokens. With `samples` K the tokens are drawn K times from the model's distribution at each
    place of the response instead, and the squares averaged: the expectation in Fisher's definition.

    Args:
        path: of the data, for messages.
        tell: called with the number of examples done.

    Raises:
        UserError: a loss or a sum that is not finite.
    """
    device = next(model.parameters()).device
    generator = torch.Generator("cpu").manual_seed(_number(seed))
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for name, parameter in parameters.items():
            parameter.requires_grad_(True)
            hook = parameter.register_post_accumulate_grad_hook(_squaring(sums[name]))
            stack.callback(hook.remove)
        for example in examples:
            logits, labels = _predicted(model, example, device)
            drawn = [labels]
            if samples:
                places = torch.softmax(logits.detach(), -1).cpu()
                each = torch.multinomial(places, samples, replacement=True, generator=generator)
                drawn = [column.to(device) for column in each.T]
            for number, wanted in enumerate(drawn, 1):
                loss = cross_entropy(logits, wanted, reduction="sum")
                _check_finite(loss, path, example)
                loss.backward(retain_graph=number < len(drawn))
            tell(1)
    scale = 1 / (len(examples) * max(1, samples))
    return _checked({name: total.mul_(scale).cpu() for name, total in sums.items()}, path)


def _squaring(total: Tensor) -> Callable[[Tensor], None]:
    """Adds the square of a gradient as soon as it is whole, and drops it: one is held at a time."""

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.addcmul_(parameter.grad, parameter.grad)
        parameter.grad = None

    return add


def grams(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    examples: Sequence[Example],
    path: str,
    tell: Callable[[int], object] = lambda done: None,
) -> dict[str, Tensor]:
    """X^T X of the inputs X [tokens, n] of each linear layer, [n, n] float32 on the CPU.

    Products of one example are float32, and summed in float64: RegMean's solution can multiply
    their error by the condition number of the sum. All tokens count, the prompt's too.

    Raises:
        UserError: a loss or a sum that is not finite.
    """
    device = next(model.parameters()).device
    sums = {}
    for name, layer in layers.items():
        assert isinstance(layer.weight, Tensor)
        size = layer.weight.shape[input_dimension(layer)]
        sums[name] = torch.zeros(size, size, dtype=torch.float64, device=device)

    def adding(total: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(layer: nn.Module, given: tuple[Any, ...]) -> None:
            rows = given[0].detach().reshape(-1, total.shape[0]).float()
            total.add_(rows.T @ rows)

        return add

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(adding(sums[name])).remove)
        for example in examples:
            logits, labels = _predicted(model, example, device)
            _check_finite(cross_entropy(logits, labels), path, example)
            tell(1)
    for name in list(sums):  # one after the other: not all of them are held in both dtypes
        sums[name] = sums.pop(name).float().cpu()
    return _checked(sums, path)


def linear_layers(model: nn.Module) -> dict[int, nn.Module]:
    """id of a weight -> the one linear layer whose weight it is; embeddings, and what is tied to
    one, are looked up as well, and are left out."""
    every = list(model.modules())
    looked_up = {id(each.weight) for each in every if isinstance(each, nn.Embedding)}
    linear = (each for each in every if isinstance(each, nn.Linear | Conv1D))
    return {id(each.weight): each for each in linear if id(each.weight) not in looked_up}


def input_dimension(layer: nn.Module) -> int:
    """The dimension of a linear layer's weight in which its inputs lie: of GPT-2's the first."""
    return 0 if isinstance(layer, Conv1D) else 1


def _predicted(model: nn.Module, example: Example, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] float32 of the n tokens of the response, and these tokens [n]."""
    ids = torch.tensor([list(example.ids)], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits[example.start - 1 : -1].float(), ids[0, example.start :]


def _check_finite(loss: Tensor, path: str, example: Example) -> None:
    if not torch.isfinite(loss):
        raise UserError(
            f"{path}, line {example.line}: the loss is {float(loss)}; look at the model's weights "
            "(`tvb check --deep`)"
        )


def _checked(sums: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    for name, total in sums.items():
        if not torch.isfinite(total).all():
            raise UserError(f"{path}: the statistics of tensor `{name}` are not finite")
    return sums


def _number(seed: str) -> int:
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % 2**63
