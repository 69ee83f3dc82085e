"""What the dtype of a store costs in precision and saves in bytes, on the shipped specialists.

For every dtype a store is built, and three things are compared in float64 with the exact ones:
relative errors (the largest over bases or tasks) of the
bases, of their sum (what addition adds to the base), and of a reconstructed task vector (beyond
what compression itself loses, relative to the task vector).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import torch
from torch import Tensor

import tvb_mergekit as tvb
from tvb_mergekit.plugin.document import read_document
from tvb_mergekit.plugin.inputs import Options, read_inputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def flat(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([tensors[name].double().reshape(-1) for name in names])


@click.command(epilog="Example: python evals/store/dtypes.py recipes/quickstart.yml")
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False))
def main(recipe: str) -> None:
    """Build RECIPE in each store dtype and print a Markdown table of errors and bytes."""
    inputs = read_inputs(read_document(recipe), Options())
    names = [item.name for item in inputs.items]
    states = [{n: w.tensor(n) for n in names} for w in (inputs.base, *inputs.sources)]
    base, *models = [flat(state, names) for state in states]
    tau = torch.stack([model - base for model in models], dim=1)
    settings = inputs.settings.model_dump(exclude_defaults=True, exclude={"method"})
    click.echo(
        f"T = {len(models)}, {len(base):,} parameters, {inputs.model_bytes:,} bytes of models"
    )
    click.echo("| dtype | bytes of the store | bases | sum of the bases | reconstructed task |")
    click.echo("|---|---:|---:|---:|---:|")
    for name, dtype in DTYPES.items():
        with tempfile.TemporaryDirectory() as folder:
            tasks = dict(zip(inputs.tasks, states[1:], strict=True))
            store = tvb.build(states[0], tasks, Path(folder) / "store", dtype=dtype, **settings)
            size = sum(
                entry["bytes"]
                for file, entry in store.facts["store"]["files"].items()
                if file.startswith("basis-0")
            )
            assert store.encoder is not None
            exact = tau @ store.encoder
            held = [{n: vector.tensor(n) for n in names} for vector in store.vectors]
            found = torch.stack([flat(state, names) for state in held], dim=1)
            off = (found - exact).norm(dim=0) / exact.norm(dim=0)
            total = (found - exact).sum(1).norm() / exact.sum(1).norm()
            lost = (found - exact) @ store.decoder
            task = lost.norm(dim=0) / tau.norm(dim=0)
            cells = [f"{float(value):.1e}" for value in (off.max(), total, task.max())]
            click.echo(f"| {name} | {size:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
