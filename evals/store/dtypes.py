"""Costs of a store's dtype in precision, and its savings in bytes, on the shipped specialists.

A store of each dtype is compared in float64 with the exact one, by the largest relative errors over
bases or tasks. The errors are those of the bases, of their sum, and of a reconstructed task vector
(relative to the task vector, without the loss of compression).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import tvb_mergekit as tvb

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(folder: str) -> dict[str, Tensor]:
    return {n: t for file in Path(folder).glob("*.safetensors") for n, t in load_file(file).items()}


@click.command(epilog="Example: python evals/store/dtypes.py recipes/quickstart.yml")
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False))
def main(recipe: str) -> None:
    """Build RECIPE in each store dtype and print a Markdown table of errors and bytes."""
    document = yaml.safe_load(Path(recipe).read_text())
    listed = [entry["model"] for entry in document["models"]]
    base, *models = [load(folder) for folder in (document["base_model"], *listed)]
    names = sorted(base)

    def flat(state: Any) -> Tensor:
        return torch.cat([state[name].double().reshape(-1) for name in names])

    tau = torch.stack([flat(model) - flat(base) for model in models], dim=1)
    total = sum(t.nbytes for state in models for t in state.values())
    click.echo(f"T = {len(models)}, {len(tau):,} parameters, {total:,} bytes of models")
    click.echo("| dtype | bytes of the store | bases | sum of the bases | reconstructed task |")
    click.echo("|---|---:|---:|---:|---:|")
    tasks = {Path(folder).name: model for folder, model in zip(listed, models, strict=True)}
    for name, dtype in DTYPES.items():
        with tempfile.TemporaryDirectory() as folder:
            store = tvb.build(base, tasks, f"{folder}/store", dtype=dtype, **document["parameters"])
            size = sum(f.stat().st_size for f in Path(folder).glob("store/basis-0*/*.safetensors"))
            assert store.encoder is not None
            exact = tau @ store.encoder
            held = [flat({n: vector.tensor(n) for n in names}) for vector in store.vectors]
            off = torch.stack(held, dim=1) - exact
            bases = (off.norm(dim=0) / exact.norm(dim=0)).max()
            summed = off.sum(1).norm() / exact.sum(1).norm()
            task = ((off @ store.decoder).norm(dim=0) / tau.norm(dim=0)).max()
            found = " | ".join(f"{float(value):.1e}" for value in (bases, summed, task))
            click.echo(f"| {name} | {size:,} | {found} |")


if __name__ == "__main__":
    main()
