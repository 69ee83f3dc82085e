#!/usr/bin/env python
r"""Measure WUDI from sums over tasks, which take the same bytes for any number of tasks.

    python evals/real/fixed.py --out real-runs --seed 1 --layer 5 --layer 20

D(t) needs S = sum Z_i, A = sum u_i Z_i^T Z_i and R = sum u_i Z_i Z_i^T Z_i. Here S is exact, and A
and R have a few bits for each entry, with one scale for each row. The table has the error of D(t),
and the bits of all three for each parameter.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch import Tensor

from tvb_mergekit.core.matrices import interference_free

TIMES = (30.0, 300.0)
BITS = (16, 12, 8, 6, 4)


def rounded(matrix: Tensor, bits: int) -> Tensor:
    """The matrix in signed integers of some bits, times a scale for each row."""
    scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    found: Tensor = (matrix / scale).round() * scale
    return found


def flow(total: Tensor, normal: Tensor, pull: Tensor, time: float) -> Tensor:
    """S - (S A - R) g(A) with g(a) = (1 - exp(-t a)) / a, in float64."""
    values, vectors = torch.linalg.eigh((normal + normal.T) / 2)
    values = values.clamp(min=1e-12 * float(values[-1]))
    push = (total @ normal - pull) @ vectors
    moved: Tensor = (push * (-torch.expm1(-time * values) / values)) @ vectors.T
    return total - moved


@click.command(epilog="Example: python evals/real/fixed.py --out real-runs --layer 5")
@click.option("--out", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--layer", multiple=True, type=int, default=(5,), show_default=True)
def main(out: Path, seed: int, layer: tuple[int, ...]) -> None:
    """Print the error of WUDI from S, A and R at a few bits, over full specialists."""
    folders = sorted(f for f in (out / f"seed{seed}/full").iterdir() if not f.suffix)
    if len(folders) < 2:
        sys.exit(f"{out}/seed{seed}/full has {len(folders)} specialists: expected two or more")
    base, *models = (safe_open(f / "model.safetensors", "pt") for f in (out / "base", *folders))
    wanted = [f"layers.{k}." for k in layer]
    names = [n for n in base.keys() if "_proj" in n and any(part in n for part in wanted)]
    errors = {(bits, time): list[float]() for bits in BITS for time in TIMES}
    numbers = entries = 0
    for name in names:
        start = base.get_tensor(name).float()
        vectors = torch.stack([model.get_tensor(name).float() - start for model in models])
        exact = {t: interference_free(vectors.clone(), t).double() for t in TIMES}
        every = [vector.double() / float(vector.norm() or 1) for vector in vectors]
        normal = torch.stack([each.T @ each for each in every]).sum(0)
        pull = sum(v.double() @ (z.T @ z) for v, z in zip(vectors, every, strict=True))
        assert isinstance(pull, Tensor)
        numbers, entries = numbers + start.numel(), entries + len(normal) * (len(normal) + 1) // 2
        for (bits, time), found in errors.items():
            got = flow(vectors.sum(0).double(), rounded(normal, bits), rounded(pull, bits), time)
            found.append(float((got - exact[time]).norm() / exact[time].norm()))
    table = Table(title=f"{len(models)} tasks, {len(names)} matrices: error of D(t), on average")
    for title in ("bits of A, R", "S, A, R: bits a parameter", *(f"t = {t:g}" for t in TIMES)):
        table.add_column(title, justify="right")
    for bits in BITS:
        whole = 16 + bits * (1 + entries / numbers)
        means = [f"{sum(errors[bits, t]) / len(names):.3f}" for t in TIMES]
        table.add_row(str(bits), f"{whole:.1f}", *means)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
