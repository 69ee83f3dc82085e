"""The paper's autoencoder (Definition 3.1), trained as its authors train it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim.adam import adam

from tvb_mergekit.core.encoders.exact import least_loss
from tvb_mergekit.core.encoders.linear import Encoding, Gram, one_thread
from tvb_mergekit.errors import UserError
from tvb_mergekit.settings import Settings

COLDEST = 0.1


@one_thread()
def autoencoder(gram: Gram, num_bases: int, settings: Settings) -> Encoding:
    """Bases `ae`, by either solver, and `linear_ae`, the ablation without softmax."""
    if settings.basis == "linear_ae":
        logits, temperature, _ = _train(gram, num_bases, settings)
        return gram.encoding("linear_ae", logits.double().numpy() / temperature)
    if settings.solver == "exact":
        return gram.encoding("ae", least_loss(gram, num_bases, settings.seed))
    logits, temperature, decoder = _train(gram, num_bases, settings)
    encoder = torch.softmax(logits / temperature, dim=0).double().numpy()
    encoder /= encoder.sum(axis=0)  # float32 columns sum to 1 only to 1e-7
    decoders = {"least_squares": gram.decoder(encoder), "learned": decoder.double().numpy()}
    return replace(
        gram.encoding("ae", encoder, decoders[settings.decoder]),
        decoder_losses={name: gram.loss(encoder @ each) for name, each in decoders.items()},
    )


def _train(
    gram: Gram, num_bases: int, settings: Settings
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Minimize the loss (paper Eq. 6) / T^2 by Adam over A [T, M] and W_d [M, T], in float32.

    Draws the numbers of `torch.manual_seed(seed)`, and leaves PyTorch's global state.

    Returns:
        A, the final temperature, W_d.
    """
    size, generator = gram.size, torch.Generator().manual_seed(settings.seed)
    target = torch.from_numpy(gram.matrix.astype(np.float32))
    identity = torch.eye(size, device="cpu")
    logits = torch.randn(size, num_bases, generator=generator, device="cpu").requires_grad_()
    decoder = torch.zeros(num_bases, size, device="cpu").requires_grad_()
    trained = [logits, decoder]
    means, squares = ([torch.zeros_like(each) for each in trained] for _ in range(2))
    counts = [torch.zeros((), device="cpu") for _ in trained]
    keys: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    keys |= {"eps": 1e-8, "foreach": False, "amsgrad": False, "maximize": False}
    softmax, temperature = settings.basis == "ae", settings.temperature
    with torch.enable_grad():
        for step in range(1, settings.steps + 1):
            scaled = logits / temperature
            encoder = torch.softmax(scaled, dim=0) if softmax else scaled
            error = encoder @ decoder - identity
            loss = torch.sum(error * (target @ error)) / size**2
            gradients = list(torch.autograd.grad(loss, trained))
            with torch.no_grad():
                # torch.optim.Adam calls this; making an Adam imports the compiler, 1.4 s.
                adam(trained, gradients, means, squares, [], counts, beta1=0.9, beta2=0.999, **keys)
            if settings.anneal_every and step % settings.anneal_every == 0:
                temperature = max(COLDEST, temperature * settings.anneal_factor)
    result, learned = logits.detach(), decoder.detach()
    if not (result.isfinite().all() and learned.isfinite().all()):
        raise UserError(
            f"training the autoencoder diverged within {settings.steps} steps: lower "
            f"`learning_rate` (it is {settings.learning_rate:g}) or take `solver: exact`"
        )
    return result, temperature, learned
