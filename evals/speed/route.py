"""Generation with routers (`tvb learn wemoe`) against the same model without: see README.md.

The model has the sizes of SmolLM2-135M and random weights, bases and routers, on which the speed
does not depend. Every sequence of a batch has its own prompt, so its own coefficients. Both take
turns in one process.
"""

from __future__ import annotations

import time

import click
import torch
from tables import between, spread, table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tvb_mergekit.store.routing import Routed, routed_parameters, router_of

SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip
HEAD = ["sequences", "bases", "plain, CPU s", "routed, CPU s", "ratio, CPU"]


def routed_with(model: nn.Module, count: int) -> Routed:
    parameters, mlps = dict(model.named_parameters()), routed_parameters(model)
    bases = {n: 0.01 * torch.randn(count, *parameters[n].shape) for n in mlps}
    routers = {mlp: router_of([576, count]).requires_grad_(False) for mlp in mlps.values()}
    return Routed(model, routers, bases)


@click.command(epilog="Example: python evals/speed/route.py --layers 2 --tokens 4 --rounds 1")
@click.option("--layers", default=30, show_default=True)
@click.option("--prompt", default=32, show_default=True, help="Tokens of a prompt.")
@click.option("--tokens", default=32, show_default=True, help="Generated tokens.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(layers: int, prompt: int, tokens: int, rounds: int, threads: int) -> None:
    """Seconds of processors for a prompt and its answer, with and without routers."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers)).eval()

    def seconds(batch: int) -> float:
        ids = torch.randint(3, 49152, (batch, prompt))
        how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        started = time.process_time()
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how)
        return time.process_time() - started

    rows = []
    for batch, count in ((1, 4), (1, 8), (8, 4)):
        routed = routed_with(model, count)
        plain, other = list[float](), list[float]()
        seconds(batch)  # the first run is slower
        for _ in range(rounds):
            plain.append(seconds(batch))
            routed.route()
            other.append(seconds(batch))
            routed.reset()
        ratios = [b / a for a, b in zip(plain, other, strict=True)]
        rows.append([str(batch), str(count), *(between(spread(v)) for v in (plain, other, ratios))])
    click.echo(table(HEAD, rows))


if __name__ == "__main__":
    main()
