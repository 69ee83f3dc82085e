#!/usr/bin/env python
"""Compare the bytes of lossless stores with other ways to keep a model next to its base.

    python evals/real/lossless.py --out real-runs --seed 1

The table has bits a parameter of each full specialist: of a store, of the entropy of the
differences in units in the last place, given the exponent of the base's weight (its bound), and of
rivals. ZipNN has a column if it is installed (`pip install --no-deps zipnn==0.5.4`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from tqdm import tqdm

import tvb_mergekit

Words = NDArray[np.uint16]


def words(file: Path) -> Words:
    """All weights of a model in bfloat16, as patterns of 16 bits."""
    weights = load_file(file)
    return np.concatenate([weights[n].view(torch.uint16).numpy().ravel() for n in sorted(weights)])


def ordered(model: Words) -> NDArray[np.int32]:
    """Patterns as integers that increase with the value."""
    size = (model & 0x7FFF).astype(np.int32)
    return np.where(model >> 15, -size, size)


def entropy(model: Words, base: Words) -> float:
    """Bits of all differences in units in the last place, given the base's exponent."""
    steps, total = ordered(model) - ordered(base), 0.0
    exponents = (base >> 7) & 0xFF
    for exponent in np.unique(exponents):
        _, counts = np.unique(steps[exponents == exponent], return_counts=True)
        total -= float((counts * np.log2(counts / counts.sum())).sum())
    return total


def zstd(data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=3).compress(data))


def zipnn(data: bytes) -> int:
    """The package of that name, on differences by exclusive or."""
    from zipnn import ZipNN

    return len(ZipNN(bytearray_dtype="bfloat16").compress(data))


RIVALS: dict[str, Callable[[Words, Words], int]] = {
    "zstd": lambda model, base: zstd(model.tobytes()),
    "xor, zstd": lambda model, base: zstd((model ^ base).tobytes()),
    "xor, byte planes, zstd": lambda model, base: sum(
        zstd(np.ascontiguousarray((model ^ base).view(np.uint8)[plane::2]).tobytes())
        for plane in (0, 1)
    ),
    "xor, ZipNN": lambda model, base: zipnn((model ^ base).tobytes()),
}


def stored(base: Path, model: Path) -> int:
    """The bytes of a lossless store of one model, headers included."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "store"
        tvb_mergekit.build(base, {"task": model}, place, lossless=True)
        return sum(file.stat().st_size for file in place.glob("*/*.safetensors"))


@click.command(epilog="Example: python evals/real/lossless.py --out real-runs --seed 1")
@click.option("--out", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--seed", default=0, show_default=True)
def main(out: Path, seed: int) -> None:
    """Print bits a parameter of lossless stores, of their bound and of rivals."""
    folders = sorted(f for f in (out / f"seed{seed}/full").glob("*") if not f.suffix)
    if not folders:
        sys.exit(f"{out}/seed{seed}/full has no specialists: run evals/real/train.py")
    rivals = {n: r for n, r in RIVALS.items() if n != "xor, ZipNN" or find_spec("zipnn")}
    table = Table(title="Bits a parameter")
    for title in ("specialist", "store", "entropy", *rivals):
        table.add_column(title, justify="left" if title == "specialist" else "right")
    base, rows = words(out / "base/model.safetensors"), []
    for folder in tqdm(folders, unit="model"):
        model = words(folder / "model.safetensors")
        sizes = [stored(out / "base", folder), *(rival(model, base) for rival in rivals.values())]
        bits = [8 * size / len(base) for size in sizes]
        rows.append([bits[0], entropy(model, base) / len(base), *bits[1:]])
        table.add_row(folder.name, *(f"{value:.3f}" for value in rows[-1]))
    table.add_row("mean", *(f"{np.mean(column):.3f}" for column in zip(*rows, strict=True)))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
