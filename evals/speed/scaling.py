"""The cost model of SCALING.md with the rates that memory.py has measured: hours and money.

    python evals/speed/scaling.py speed-work/memory.json --models "176 MB bfloat16, warm"
    python evals/speed/scaling.py --encoders 1000

A pass costs the longer of reading and computing, which overlap. Rates are fitted to the rows of
`memory.json`: seconds of one element of one model, and of one product of two. The machines are
assumptions, and so are their prices; change them here.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from tables import Row, table

from tvb_mergekit.tensors.layout import MOST_WORKERS


@dataclass(frozen=True)
class Rates:
    """Seconds on one core, of one element: in all, of each of T + 1 models or each of T^2 products.

    Attributes:
        touch: reading it from the page cache and forming a task vector, for the Gram matrix.
        multiply: one product of the Gram matrix (2 flop).
        combine: the same as `touch`, and M products and writes, in the second pass.
    """

    touch: float
    multiply: float
    combine: float


@dataclass(frozen=True)
class Machine:
    """Assumed; GB/s of the disk are what programs reach, not what the box says."""

    name: str
    cores: int
    disk: float  # GB/s, reading
    dollars: float  # an hour
    flops: float = 0.0  # float32 flop/s of an accelerator
    bus: float = 0.0  # GB/s to it


MACHINES = (
    Machine("workstation, 8 cores, one NVMe", 8, 6.0, 0.30),
    Machine("workstation, 8 cores, files on a NAS (10 Gbit/s)", 8, 1.1, 0.30),
    Machine("cloud, 16 vCPU (8 cores), local NVMe", 8, 3.0, 1.40),
    Machine("cloud, 1 H100, local NVMe", 8, 5.0, 4.00, 30e12, 25.0),
)
ENCODERS: tuple[dict[str, str], ...] = (  # the slowest last
    {"basis": "rand_select"},
    {"basis": "pca"},
    {"basis": "balanced"},
    {"basis": "ae"},
    {"basis": "ae", "solver": "exact"},
)
CASES = ((72, 8e9, 4), (20, 70e9, 4), (1000, 8e9, 16))  # T, d, M; models and store in bf16


def fit(rows: list[Row]) -> Rates:
    """Least squares over the rows of one kind of model, in terms of one element and one core."""
    tasks = np.array([row["tasks"] for row in rows], dtype=float)
    d = np.array([row["num_parameters"] / row["cores"] for row in rows])
    gram, write = (np.array([row["phases"][p] for row in rows]) / d for p in ("gram", "write"))
    powers = np.stack([tasks + 1, tasks**2], axis=1)
    touch, multiply = np.linalg.lstsq(powers, gram, rcond=None)[0]
    combine = float(write @ (tasks + 1) / ((tasks + 1) @ (tasks + 1)))
    if touch < 0 or multiply < 0:
        raise click.ClickException("the rows give a negative rate: measure larger T, or quietly")
    return Rates(float(touch), float(multiply), combine)


def passes(machine: Machine, rates: Rates, tasks: int, d: float, bases: int) -> list[Row]:
    """Seconds of both passes of bf16 models, and what each waits for."""
    cores = min(machine.cores, MOST_WORKERS)
    nbytes = 2 * d * (tasks + 1)
    made = []
    for name in ("gram", "combine"):
        each = rates.touch if name == "gram" else rates.combine
        parts = {"disk": nbytes / machine.disk / 1e9}
        products = tasks**2 if name == "gram" else 0  # those of the second pass are in its rate
        if machine.flops:
            flops = 2 * d * (tasks**2 if name == "gram" else tasks * bases)
            parts |= {"bus": nbytes / machine.bus / 1e9, "accelerator": flops / machine.flops}
        else:
            parts["cores"] = d * (each * (tasks + 1) + rates.multiply * products) / cores
        if name == "combine":  # the store goes to the same disk
            parts["disk"] += 2 * d * bases / machine.disk / 1e9
        waits = max(parts, key=parts.__getitem__)
        made.append({"seconds": parts[waits], "waits": waits})
    return made


def hours(rates: Rates) -> str:
    lines = []
    for tasks, d, bases in CASES:
        for machine in MACHINES:
            first, second = passes(machine, rates, tasks, d, bases)
            total = (first["seconds"] + second["seconds"]) / 3600
            cells = [f"{tasks} x {d / 1e9:.0f}B, M = {bases}", machine.name]
            cells += [f"{2 * d * (tasks + 1) / 1e12:.2f}"]
            cells += [f"{p['seconds'] / 3600:.2f} ({p['waits']})" for p in (first, second)]
            lines.append([*cells, f"{total:.2f}", f"{total * machine.dollars:.2f}"])
    head = ["models", "machine", "TB in a pass", "Gram pass, h", "second pass, h", "hours", "$"]
    return table(head, lines)


def encoders(tasks: int, bases: int) -> None:
    """Print the seconds of each encoder; random task vectors with a direction in common."""
    import torch

    from tvb_mergekit.core.encoders import encode
    from tvb_mergekit.settings import resolve_settings

    random = torch.Generator().manual_seed(0)
    rows = torch.randn(tasks, 4 * tasks, generator=random, dtype=torch.float64)
    rows += torch.randn(1, 4 * tasks, generator=random, dtype=torch.float64)
    gram = rows @ rows.T
    click.echo(
        table([f"encoder, T = {tasks}, M = {bases}", "s", "over the bound"], [], 1), nl=False
    )
    for parameters in ENCODERS:
        keys = {**parameters, "num_bases": bases}
        settings = resolve_settings("basis_ta", keys, [str(number) for number in range(tasks)])
        started = time.perf_counter()
        encoding = encode(gram, settings)
        seconds = time.perf_counter() - started
        gap = encoding.loss / encoding.spectral_bound - 1
        click.echo(f"| {', '.join(parameters.values())} | {seconds:.2f} | {gap:.2g} |")


@click.command(epilog="Example: python evals/speed/scaling.py speed-work/memory.json")
@click.argument("results", type=click.Path(exists=True, path_type=Path), required=False)
@click.option("--models", help="The kind of model in RESULTS whose rows are fitted.")
@click.option("--memory", default="1GB", show_default=True)
@click.option("--encoders", "tasks", type=click.IntRange(2), help="Time the encoders at this T.")
@click.option("--bases", default=16, show_default=True, help="M, for --encoders.")
def main(
    results: Path | None, models: str | None, memory: str, tasks: int | None, bases: int
) -> None:
    """Hours and money for large cases, from the RESULTS of memory.py."""
    if tasks:
        encoders(tasks, bases)
    if results is None:
        return
    found = json.loads(results.read_text())
    rows = [row for row in found["runs"] if row["memory"] == memory]
    kinds = [*dict.fromkeys(row["models"] for row in rows)]
    chosen = models or (kinds[0] if kinds else None)
    if chosen not in kinds:
        raise click.ClickException(f"{results} has {kinds} under {memory}, not {chosen}")
    rows = [row for row in rows if row["models"] == chosen]
    if len({row["tasks"] for row in rows}) < 2:
        raise click.ClickException(f"{results}: one T alone; measure at least two")
    rates = fit(rows)
    click.echo(
        f"{chosen}, {memory}: {1e9 * rates.touch:.3f} ns to touch an element of a model, "
        f"{1e12 * rates.multiply:.2f} ps a product ({2e-9 / rates.multiply:.0f} Gflop/s), "
        f"{1e9 * rates.combine:.3f} ns in the second pass, on one core. From T = "
        f"{rates.touch / rates.multiply:.0f} on the products cost more.\n"
    )
    click.echo(hours(rates))


if __name__ == "__main__":
    main()
