"""Time the Gram matrix of LoRA adapters from their factors against the dense way, in memory.

    python evals/speed/lora.py --help
    python evals/speed/lora.py --tasks 8 --rank 16 --hidden 2048 --layers 8

The dense way is what fused checkpoints cost, without their disk: each update is materialized as
hidden x hidden in float32 and goes through the block Gram pass. Both are run in turn, and the
ratio is of neighbouring runs. Let nothing else run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.lora import Factors, factor_gram
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.stream import held_item


def make(tasks: int, rank: int, hidden: int, layers: int) -> list[dict[str, Factors]]:
    """Adapters of seeded noise; two of them have a cosine of about a half."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    common = [(noise(hidden, rank), noise(rank, hidden)) for _ in range(layers)]
    return [
        {
            f"layers.{i}.weight": Factors(left + 0.6 * noise(hidden, rank), right)
            for i, (left, right) in enumerate(common)
        }
        for _ in range(tasks)
    ]


def dense_gram(adapters: list[dict[str, Factors]]) -> GramSums:
    """The same matrix from whole updates; one tensor of all tasks is held at a time."""
    tasks = [f"task {number}" for number in range(len(adapters))]
    total = GramSums.zero(len(tasks))
    for name, factors in adapters[0].items():
        updates = [a[name].left @ a[name].right for a in adapters]
        item = held_item(name, torch.zeros(factors.shape), updates)
        sums, _ = gram_pass([item], tasks)
        total = total.plus(sums)
    return total


def timed(
    work: Callable[[list[dict[str, Factors]]], GramSums], adapters: list[dict[str, Factors]]
) -> tuple[float, GramSums]:
    started = time.perf_counter()
    sums = work(adapters)
    return time.perf_counter() - started, sums


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=8, help="adapters (default: 8)")
    parser.add_argument("--rank", type=int, default=16, help="of each (default: 16)")
    parser.add_argument("--hidden", type=int, default=2048, help="rows and columns (default: 2048)")
    parser.add_argument("--layers", type=int, default=8, help="matrices (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="repeats of both (default: 5)")
    parser.add_argument("--threads", type=int, help="of PyTorch (default: PyTorch's own)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    adapters = make(args.tasks, args.rank, args.hidden, args.layers)
    few = make(args.tasks, args.rank, 64, 1)
    factor_gram(few), dense_gram(few)  # the libraries start their threads
    rounds = []
    for _ in range(args.rounds):
        ours, sums = timed(factor_gram, adapters)
        dense, expected = timed(dense_gram, adapters)
        rounds.append((ours, dense))
    ratios = [dense / ours for ours, dense in rounds]
    difference = (sums.gram - expected.gram).norm() / expected.gram.norm()
    shape = f"T={args.tasks} r={args.rank} hidden={args.hidden} layers={args.layers}"
    print(f"{shape}, {torch.get_num_threads()} threads, {args.rounds} rounds, medians")
    print(f"factors   {1e3 * statistics.median(ours for ours, _ in rounds):10.1f} ms")
    print(f"dense     {1e3 * statistics.median(dense for _, dense in rounds):10.1f} ms")
    middle = statistics.median(ratios)
    print(f"ratio     {middle:10.1f} ({min(ratios):.1f}..{max(ratios):.1f})")
    print(f"relative difference of the matrices {float(difference):.1e}")


if __name__ == "__main__":
    main()
