"""Generation with routers (`tvb learn wemoe`) against the same model without: see README.md.

The model has the sizes of SmolLM2-135M and random weights, bases and routers, on which the speed
does not depend. Every sequence of a batch has its own prompt, so its own coefficients. Both take
turns in one process. Peak memory is that of a process for each, which generates once.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from typing import Any

import click
import torch
from tables import between, spread, table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tvb_mergekit.store.routing import Routed, routed_parameters, router_of

SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip
HEAD = ["sequences", "bases", "plain, CPU s", "routed, CPU s", "ratio, CPU",
        "plain, peak MB", "routed, peak MB"]  # fmt: skip


def model_of(layers: int, threads: int) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers)).eval()


def routed_with(model: nn.Module, count: int) -> Routed:
    parameters, mlps = dict(model.named_parameters()), routed_parameters(model)
    bases = {n: torch.randn(count, *parameters[n].shape).mul_(0.01) for n in mlps}
    routers = {mlp: router_of([576, count]).requires_grad_(False) for mlp in mlps.values()}
    return Routed(model, routers, bases)


def seconds(model: Any, batch: int, prompt: int, tokens: int) -> float:
    ids = torch.randint(3, 49152, (batch, prompt))
    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    started = time.process_time()
    model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how)
    return time.process_time() - started


def peak(layers: int, threads: int, batch: int, prompt: int, tokens: int, count: int) -> str:
    """The most MB that this process had in memory after one generation; 0 bases: not routed."""
    model = model_of(layers, threads)
    if count:
        routed_with(model, count).route()
    seconds(model, batch, prompt, tokens)
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6:.0f}"


@click.command(epilog="Example: python evals/speed/route.py --layers 2 --tokens 4 --rounds 1")
@click.option("--layers", default=30, show_default=True)
@click.option("--prompt", default=32, show_default=True, help="Tokens of a prompt.")
@click.option("--tokens", default=32, show_default=True, help="Generated tokens.")
@click.option("--rounds", default=3, show_default=True, help="0: memory alone.")
@click.option("--threads", default=1, show_default=True)
def main(layers: int, prompt: int, tokens: int, rounds: int, threads: int) -> None:
    """Seconds of processors and memory for a prompt and its answer, with and without routers."""
    cases, alone = ((1, 4), (1, 8), (8, 4)), multiprocessing.get_context("spawn")
    peaks, rows = [], []
    for batch, count in cases:  # before this process grows: a fork counts its parent's memory
        for bases in (0, count):
            with alone.Pool(1) as pool:
                peaks.append(pool.apply(peak, (layers, threads, batch, prompt, tokens, bases)))
    for batch, count in cases:
        model = model_of(layers, threads)
        routed = routed_with(model, count)
        plain, other = list[float](), list[float]()
        for number in range(rounds):
            if not number:
                seconds(model, batch, prompt, tokens)  # the first run is slower
            plain.append(seconds(model, batch, prompt, tokens))
            routed.route()
            other.append(seconds(model, batch, prompt, tokens))
            routed.reset()
        ratios = [b / a for a, b in zip(plain, other, strict=True)]
        times = [between(spread(v)) for v in (plain, other, ratios)]
        rows.append([str(batch), str(count), *times, *peaks[:2]])
        del peaks[:2]
    click.echo(table(HEAD, rows))


if __name__ == "__main__":
    main()
