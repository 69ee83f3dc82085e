"""The paper's autoencoder (Definition 3.1), trained as its authors train it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from tvb_mergekit.core.gram import Encoding, Gram
from tvb_mergekit.core.registry import AtLeastOne, Key, Positive, Whole, basis
from tvb_mergekit.errors import UserError

COLDEST = 0.1
BETAS = 0.9, 0.999  # of Adam
TRAINING = {
    "temperature": Key("temperature of the softmax", Positive, 5.0),
    "steps": Key("training steps", AtLeastOne, 4000),
    "learning_rate": Key("learning rate of Adam", Positive, 0.01),
    "weight_decay": Key("weight decay of Adam", Annotated[float, Field(ge=0, le=1)], 1e-6),
    "anneal_every": Key("steps between two coolings, 0 for none", Whole, 0),
    "anneal_factor": Key("the temperature's factor per cooling", Positive, 0.9),
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Give PyTorch one thread, and no autocast: several wait for each other at every step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(threads)


@basis("linear_ae", keys=TRAINING)
@basis("ae", keys=TRAINING)
@one_thread()
def autoencoder(
    gram: Gram,
    num_bases: int,
    *,
    basis: str,
    seed: int,
    temperature: float,
    steps: int,
    learning_rate: float,
    weight_decay: float,
    anneal_every: int,
    anneal_factor: float,
) -> Encoding:
    """Minimize the loss (paper Eq. 6) / T^2 by Adam over A [T, M] and W_d [M, T], in float32.

    W_e = softmax(A / temperature) by columns, or A / temperature. The decoder of the result is
    least squares. Draws the numbers of `torch.manual_seed(seed)`, and keeps PyTorch's global state.
    """
    softmax, size, generator = basis == "ae", gram.size, torch.Generator()
    generator.manual_seed(seed)
    target = torch.from_numpy(gram.matrix.astype(np.float32))
    identity, part = torch.eye(size, device="cpu"), torch.ones((), device="cpu") / size**2
    logits = torch.randn(size, num_bases, generator=generator, device="cpu")
    decoder = torch.zeros(num_bases, size, device="cpu")
    means, squares = ([torch.zeros_like(each) for each in (logits, decoder)] for _ in range(2))
    for step in range(1, steps + 1):
        scaled = logits / temperature
        encoder = torch.softmax(scaled, dim=0) if softmax else scaled
        error = encoder @ decoder - identity
        # The gradient of Tr(error^T G error) / T^2, by the operations of autograd and of
        # torch.optim.Adam in their order: the same bits in a third of the time.
        slope = part * (target @ error) + target.T @ (part * error)
        above, below = slope @ decoder.T, encoder.T @ slope
        if softmax:
            above = torch._softmax_backward_data(above, encoder, 0, torch.float32)
        rate = -learning_rate / (1 - BETAS[0] ** step)
        root = (1 - BETAS[1] ** step) ** 0.5
        for values, gradient, mean, square in zip(
            (logits, decoder), (above / temperature, below), means, squares, strict=True
        ):
            gradient.add_(values, alpha=weight_decay)
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            values.addcdiv_(mean, (square.sqrt() / root).add_(1e-8), value=rate)
        if anneal_every and step % anneal_every == 0:
            temperature = max(COLDEST, temperature * anneal_factor)
    if not (logits.isfinite().all() and decoder.isfinite().all()):
        remedy = f"lower `learning_rate` (it is {learning_rate:g}) or take `basis: balanced`"
        raise UserError(f"training the autoencoder diverged within {steps} steps: {remedy}")
    if not softmax:
        return gram.encoding(logits.double().numpy() / temperature)
    found = torch.softmax(logits / temperature, dim=0).double().numpy()
    return gram.encoding(found / found.sum(axis=0))  # float32 sums are 1 to 1e-7
