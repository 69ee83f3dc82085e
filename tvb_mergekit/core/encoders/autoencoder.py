"""The paper's autoencoder (Definition 3.1), trained as its authors train it."""

from __future__ import annotations

import numpy as np
import torch

from tvb_mergekit.core.encoders.linear import Encoding, Gram, one_thread
from tvb_mergekit.errors import UserError
from tvb_mergekit.settings import Settings

COLDEST = 0.1
BETAS = 0.9, 0.999  # of Adam


@one_thread()
def autoencoder(gram: Gram, num_bases: int, settings: Settings) -> Encoding:
    """Bases `ae`, and `linear_ae`, the ablation without softmax."""
    logits, temperature = _train(gram, num_bases, settings)
    if settings.basis == "linear_ae":
        return gram.encoding("linear_ae", logits.double().numpy() / temperature)
    encoder = torch.softmax(logits / temperature, dim=0).double().numpy()
    return gram.encoding("ae", encoder / encoder.sum(axis=0))  # float32 sums are 1 only to 1e-7


def _train(gram: Gram, num_bases: int, settings: Settings) -> tuple[torch.Tensor, float]:
    """Minimize the loss (paper Eq. 6) / T^2 by Adam over A [T, M] and W_d [M, T], in float32.

    Draws the numbers of `torch.manual_seed(seed)`, and leaves PyTorch's global state.

    Returns:
        A and the final temperature.
    """
    size, generator = gram.size, torch.Generator().manual_seed(settings.seed)
    target = torch.from_numpy(gram.matrix.astype(np.float32))
    identity, part = torch.eye(size, device="cpu"), torch.ones((), device="cpu") / size**2
    logits = torch.randn(size, num_bases, generator=generator, device="cpu")
    decoder = torch.zeros(num_bases, size, device="cpu")
    means, squares = ([torch.zeros_like(each) for each in (logits, decoder)] for _ in range(2))
    softmax, temperature = settings.basis == "ae", settings.temperature
    for step in range(1, settings.steps + 1):
        scaled = logits / temperature
        encoder = torch.softmax(scaled, dim=0) if softmax else scaled
        error = encoder @ decoder - identity
        # The gradient of Tr(error^T G error) / T^2, by the operations of autograd and of
        # torch.optim.Adam in their order: the same bits in a third of the time.
        slope = part * (target @ error) + target.T @ (part * error)
        above, below = slope @ decoder.T, encoder.T @ slope
        if softmax:
            above = torch._softmax_backward_data(above, encoder, 0, torch.float32)
        rate = -settings.learning_rate / (1 - BETAS[0] ** step)
        root = (1 - BETAS[1] ** step) ** 0.5
        for values, gradient, mean, square in zip(
            (logits, decoder), (above / temperature, below), means, squares, strict=True
        ):
            gradient.add_(values, alpha=settings.weight_decay)
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            values.addcdiv_(mean, (square.sqrt() / root).add_(1e-8), value=rate)
        if settings.anneal_every and step % settings.anneal_every == 0:
            temperature = max(COLDEST, temperature * settings.anneal_factor)
    if not (logits.isfinite().all() and decoder.isfinite().all()):
        raise UserError(
            f"training the autoencoder diverged within {settings.steps} steps: lower "
            f"`learning_rate` (it is {settings.learning_rate:g}) or take `basis: balanced`"
        )
    return logits, temperature
