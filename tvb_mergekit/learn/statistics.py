"""Statistics of one task's model, summed over its examples.

Examples pass one at a time, so no sum contains padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import Example

Parameters = Mapping[str, nn.Parameter]
WEIGHTS = "look at the models' weights (`tvb inspect RECIPE`)"


def fisher(
    model: nn.Module,
    parameters: Parameters,
    examples: Sequence[Example],
    samples: int = 0,
    seed: str = "",
    update: Callable[[int], object] = lambda done: None,
) -> dict[str, Tensor]:
    """The diagonal Fisher information of each parameter, in float32 on the CPU.

    F is the mean over examples of the squared gradient of log p(response | prompt). With `samples`
    the response's tokens are drawn that often from the model's distribution at each place, and the
    squares are averaged: the expectation in Fisher's definition.

    Args:
        update: called with the number of finished examples.

    Raises:
        UserError: a loss or a sum is not finite.
    """
    device = next(model.parameters()).device
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % 2**63
    generator = torch.Generator("cpu").manual_seed(number)
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}

    def add(name: str, gradient: Tensor) -> None:
        sums[name].addcmul_(gradient, gradient)

    model.requires_grad_(False)
    with torch.enable_grad(), gradients_to(add, parameters):
        for example in examples:
            logits, labels = _predicted(model, example, device)
            drawn = [labels]
            if samples:
                places = torch.softmax(logits.detach(), -1).cpu()
                each = torch.multinomial(places, samples, replacement=True, generator=generator)
                drawn = [column.to(device) for column in each.T]
            for wanted in drawn:
                loss = cross_entropy(logits, wanted, reduction="sum")
                _check_finite(loss, example)
                loss.backward(retain_graph=wanted is not drawn[-1])
            update(1)
    scale = 1 / (len(examples) * max(1, samples))
    return _checked({name: total.mul_(scale).cpu() for name, total in sums.items()}, examples)


@contextmanager
def gradients_to(use: Callable[[str, Tensor], None], parameters: Parameters) -> Iterator[None]:
    """Compute the gradients of parameters; `use` gets each with its name, then it is freed."""

    def hand_on(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        use(name, gradient)

    with ExitStack() as stack:
        for name, parameter in parameters.items():
            parameter.requires_grad_(True)
            hook = parameter.register_post_accumulate_grad_hook(partial(hand_on, name))
            stack.callback(hook.remove)
        yield


def grams(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    examples: Sequence[Example],
    update: Callable[[int], object] = lambda done: None,
) -> dict[str, Tensor]:
    """X^T X of the inputs X [tokens, n] of each linear layer, [n, n] float32 on the CPU.

    Products of one example are float32, their sum is float64: RegMean's solution can multiply its
    error by the condition number. All tokens count, also those of the prompt.

    Raises:
        UserError: a loss or a sum is not finite.
    """
    device = next(model.parameters()).device
    sums = {}
    for name, layer in layers.items():
        assert isinstance(layer.weight, Tensor)
        size = layer.weight.shape[input_dimension(layer)]
        sums[name] = torch.zeros(size, size, dtype=torch.float64, device=device)

    def add(total: Tensor, layer: nn.Module, given: tuple[Any, ...]) -> None:
        rows = given[0].detach().reshape(-1, total.shape[0]).float()
        with torch.autocast(device.type, enabled=False):
            total.add_(rows.T @ rows)

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(partial(add, sums[name])).remove)
        for example in examples:
            logits, labels = _predicted(model, example, device)
            _check_finite(cross_entropy(logits, labels), example)
            update(1)
    for name in list(sums):  # one after another: only one is held in both dtypes
        sums[name] = sums.pop(name).float().cpu()
    return _checked(sums, examples)


def linear_layers(model: nn.Module) -> dict[int, nn.Module]:
    """id of a weight -> its linear layer. Weights tied to an embedding are left out."""
    every = list(model.modules())
    embedded = {id(each.weight) for each in every if isinstance(each, nn.Embedding)}
    linear = (each for each in every if isinstance(each, nn.Linear | Conv1D))
    return {id(each.weight): each for each in linear if id(each.weight) not in embedded}


def input_dimension(layer: nn.Module) -> int:
    """The dimension of a linear layer's weight for its inputs; 0 in GPT-2."""
    return 0 if isinstance(layer, Conv1D) else 1


def _predicted(model: nn.Module, example: Example, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] float32 for the n tokens of the response, and these tokens [n]."""
    ids = torch.tensor([list(example.ids)], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits[example.start - 1 : -1].float(), ids[0, example.start :]


def _check_finite(loss: Tensor, example: Example) -> None:
    if not torch.isfinite(loss):
        place = f"{example.path}, line {example.line}"
        raise UserError(f"{place}: the loss is {float(loss)}; {WEIGHTS}")


def _checked(sums: dict[str, Tensor], examples: Sequence[Example]) -> dict[str, Tensor]:
    for name, total in sums.items():
        if not torch.isfinite(total).all():
            raise UserError(f"{examples[0].path}: the statistics of tensor `{name}` are not finite")
    return sums
