"""Merges of single matrices against fusion-bench's functions, on the same matrices in one process.

    pip install --no-deps --target /tmp/fb fusion-bench==0.2.33
    python evals/speed/matrices.py --against /tmp/fb
    python evals/speed/matrices.py --against /tmp/fb BASE TASK TASK ...

Of noise, or of the matrices in which models (folders with safetensors) differ from their base. Only
the three files that merge are loaded from fusion-bench, with stand-ins for what they import: its
own imports want a dozen packages. Ours and theirs are run in turn; let nothing else run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import torch
from safetensors.torch import load_file
from tables import between, spread, table
from torch import Tensor

from tvb_mergekit.core.matrices import interference, interference_free, isotropic, singular_vectors

INSTALL = "pip install --no-deps --target DIR fusion-bench==0.2.33"
STEPS = 300  # of Adam, the default of their wudi_merging
STAND_INS: dict[str, dict[str, Any]] = {
    "fusion_bench": {
        "BaseAlgorithm": object,
        "BaseModelPool": object,
        "auto_register_config": lambda kind: kind,
    },
    "fusion_bench.mixins": {"LightningFabricMixin": type("LightningFabricMixin", (), {})},
    "fusion_bench.utils": {"timeit_context": nullcontext},
    "fusion_bench.utils.type": {"StateDictType": dict},
    "fusion_bench.utils.state_dict_arithmetic": {"state_dict_add": None, "state_dict_sub": None},
}
HEAD = ("merge", "matrices", "ours, s", "fusion-bench, s", "ratio", "difference", "interference")


def theirs(folder: Path) -> SimpleNamespace:
    """Their functions, each from `bases` [M, m, n] to D [m, n]."""
    files = {
        "iso": "isotropic_merging/iso_utils.py",
        "tsv": "task_singular_vector/utils/TSVM_utils.py",
        "wudi": "wudi/wudi.py",
    }
    for name, attributes in STAND_INS.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(attributes, __path__=[])
    loaded = {}
    for name, file in files.items():
        path = folder / "fusion_bench" / "method" / file
        if not path.is_file():
            raise click.ClickException(f"no {path}; install fusion-bench by `{INSTALL}`")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        loaded[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[name])

    def quiet(merge: Callable[..., Any]) -> Callable[..., Tensor]:
        def merged(bases: Tensor, *more: Any, **options: Any) -> Tensor:
            vectors = [{"a.weight": base} for base in bases]
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                result: Tensor = merge(vectors, *more, accelerator="cpu", **options)["a.weight"]
            return result.detach()

        return merged

    return SimpleNamespace(
        iso_c=quiet(loaded["iso"].iso_c),
        iso_cts=quiet(loaded["iso"].iso_cts),
        tsv=quiet(loaded["tsv"].compute_and_sum_svd_mem_reduction),
        wudi=quiet(loaded["wudi"].wudi_merging),
    )


def of_models(folders: tuple[Path, ...], only: str = "") -> Iterator[Tensor]:
    """The task vectors [M, m, n] of each matrix of a base and its models whose name matches."""
    states = []
    for folder in folders:
        files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
        states.append({name: tensor for file in files for name, tensor in file.items()})
    base, *models = states
    for name, tensor in base.items():
        if tensor.ndim == 2 and re.search(only, name):
            yield torch.stack([model[name].float() - tensor.float() for model in models])


def of_noise(shape: str, count: int) -> Tensor:
    rows, columns = map(int, shape.split("x"))
    return torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(0))


def timed(merge: Callable[..., Tensor], *arguments: Any, **options: Any) -> tuple[float, Tensor]:
    started = time.perf_counter()
    merged = merge(*arguments, **options)
    return time.perf_counter() - started, merged


def compare(name: str, matrices: list[Tensor], peer: SimpleNamespace, rounds: int, steps: int):
    """The rows of the table: one for each merge of all these matrices."""
    merges: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        ("Iso-C", isotropic, peer.iso_c),
        ("Iso-CTS, 0.8", lambda b: isotropic(b, 0.8), lambda b: peer.iso_cts(b, 0.8)),
        ("TSV-M", singular_vectors, peer.tsv),
        ("WUDI", interference_free, lambda b: peer.wudi(b, iter_num=steps)),
    ]
    for title, our_merge, their_merge in merges:
        wudi = title == "WUDI"
        seconds, ratios = [], []
        for _ in range(1 if wudi else rounds):
            ours = [timed(our_merge, bases) for bases in matrices]
            peers = [timed(their_merge, bases) for bases in matrices]
            one, two = (sum(took for took, _ in runs) for runs in (ours, peers))
            two *= STEPS / steps if wudi else 1
            seconds.append((one, two))
            ratios.append(one / two)
        pairs = [(a, b) for (_, a), (_, b) in zip(ours, peers, strict=True)]
        off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        found = "-"
        if wudi:
            both = zip(*pairs, strict=True)
            losses = [sum(map(interference, each, matrices)) for each in both]
            found = " : ".join(f"{loss:.3g}" for loss in losses)
        ours_s, peers_s = (statistics.median(column) for column in zip(*seconds, strict=True))
        difference = "-" if wudi else f"{off:.0e}"
        ratio = f"{ratios[0]:.4f}" if wudi else between(spread(ratios))
        yield [title, name, f"{ours_s:.3f}", f"{peers_s:.3f}", ratio, difference, found]


@click.command(epilog="Example: python evals/speed/matrices.py --against /tmp/fb --shape 256x1024")
@click.argument("folders", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--against", required=True, type=click.Path(path_type=Path), help=INSTALL)
@click.option("--only", default="", help="Models: a regular expression of matrices' names.")
@click.option("--shape", "shapes", multiple=True, help="Of the noise: ROWSxCOLUMNS, repeatable.")
@click.option("--count", type=click.IntRange(1), default=8, show_default=True, help="Noise: M.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(1, STEPS), default=STEPS, show_default=True,
              help="Steps of Adam that are run; the time is scaled to 300.")  # fmt: skip
def main(
    folders: tuple[Path, ...], against: Path, only: str, shapes: tuple[str, ...], count: int,
    rounds: int, steps: int,
) -> None:  # fmt: skip
    """Seconds, the ratio ours / fusion-bench's, how far the results differ, WUDI's loss of both."""
    peer = theirs(against)
    if folders:
        matrices = list(of_models(folders, only))
        groups = {f"{len(matrices)} of {len(folders) - 1} models": matrices}
    else:
        names = shapes or ("1024x1024", "4096x1024", "1024x4096")
        groups = {f"{count} x {name}": [of_noise(name, count)] for name in names}
    few = torch.randn(2, 8, 8)
    for start in (isotropic, singular_vectors, interference_free, peer.iso_c):
        start(few)  # the libraries start their threads
    rows = [row for group in groups.items() for row in compare(*group, peer, rounds, steps)]
    click.echo(f"{torch.get_num_threads()} threads; WUDI: Adam for {steps} steps, scaled to 300.\n")
    click.echo(table(HEAD, rows))


if __name__ == "__main__":
    main()
