"""evals/store: rivals against their formulas in NumPy, what a store takes, the whole command."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:.*gets no bits beside larger vectors")
STORE = Path(__file__).resolve().parent.parent
# of evals/mini, which are no names to leave in sys.modules for other tests
NAMES = "data plan model score train runs sheets pictures bits".split()


@pytest.fixture(scope="module")
def store() -> Iterator[SimpleNamespace]:
    """Imported afresh, and gone again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STORE)
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        bits, data = map(importlib.import_module, ("bits", "data"))
        kinds = importlib.import_module("study.kinds")
        yield SimpleNamespace(bits=bits, data=data, stores=kinds.stores, rivals=kinds.rivals)
        for name in NAMES:
            sys.modules.pop(name, None)


def vectors(count: int = 3) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    shapes = {"model.embed.weight": (7, 9), "a.mlp.up_proj.weight": (5, 13), "norm": (11,)}
    return [
        {name: torch.randn(shape) ** 3 + 0.1 for name, shape in shapes.items()}
        for _ in range(count)
    ]


def min_max(x: np.ndarray, bits: int) -> np.ndarray:
    """Element by element, in float64."""
    low, high = float(x.min()), float(x.max())
    step = (high - low) / (2**bits - 1)
    zero = -round(low / step)
    codes = [min(max(round(float(e) / step) + zero, 0), 2**bits - 1) for e in x.reshape(-1)]
    return np.array([step * (code - zero) for code in codes]).reshape(x.shape)


def close(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_tvq(store: SimpleNamespace, bits: int) -> None:
    given = vectors()
    kept = store.rivals.tvq(given, bits)
    for before, after in zip(given, kept.vectors, strict=True):
        for name, tensor in before.items():
            close(after[name], min_max(tensor.numpy(), bits))
    zeros = {"w": torch.zeros(5)}
    assert torch.equal(store.rivals.tvq([zeros], bits).vectors[0]["w"], zeros["w"])
    assert kept.nbytes == 3 * sum(-(-n * bits // 8) + 8 for n in (63, 65, 11))


def test_rtvq(store: SimpleNamespace) -> None:
    given = vectors()
    kept = store.rivals.rtvq(given, base_bits=3, bits=2)
    for name in given[0]:
        arrays = [vector[name].double().numpy() for vector in given]
        mean = min_max(sum(arrays) / 3, 3)
        for vector, array in zip(kept.vectors, arrays, strict=True):
            close(vector[name], mean + min_max(array - mean, 2))
    sizes = {bits: sum(-(-n * bits // 8) + 8 for n in (63, 65, 11)) for bits in (2, 3)}
    assert kept.nbytes == sizes[3] + 3 * sizes[2]


def test_bitdelta(store: SimpleNamespace) -> None:
    given = vectors()
    given[0]["norm"][0] = 0.0  # has a sign all the same
    every = store.rivals.bitdelta(given)
    some = store.rivals.bitdelta(given, store.rivals.is_projection)
    for before, after, partly in zip(given, every.vectors, some.vectors, strict=True):
        for name, tensor in before.items():
            x = tensor.double().numpy()
            close(after[name], np.where(x >= 0, 1, -1) * abs(x).mean())
            coded = name == "a.mlp.up_proj.weight"
            assert torch.equal(partly[name], after[name] if coded else tensor.bfloat16().float())
    assert every.nbytes == 3 * (8 + 9 + 2 + 3 * 4)
    assert some.nbytes == 3 * (9 + 4 + 2 * (63 + 11))


def run_of(store: SimpleNamespace) -> SimpleNamespace:
    """Of ten models; in the second tensor task vectors are small, in the third there are none."""
    torch.manual_seed(1)
    base = {name: 30 * torch.randn(100, 64) for name in ("large", "small", "none")}
    sizes = {"large": 1.0, "small": 0.03, "none": 0.0}
    models = {
        task: {name: w + sizes[name] * torch.randn(w.shape) for name, w in base.items()}
        for task in store.data.TASKS
    }

    def task_vector(task: str) -> dict[str, torch.Tensor]:
        return {name: models[task][name] - base[name] for name in base}

    tasks = store.data.TASKS
    return SimpleNamespace(base=base, models=models, tasks=tasks, task_vector=task_vector)


@pytest.mark.parametrize("most", [30_000, 60_000, 100_000])
def test_the_store_that_fits(store: SimpleNamespace, tmp_path: Path, most: int) -> None:
    run = run_of(store)
    found = store.stores.zoo_within(run, most, tmp_path)
    assert 0.9 * most < store.stores.file_bytes(found) <= most
    assert store.stores.zoo_within(run, 3000, tmp_path / "headers") is None


@pytest.mark.parametrize("bits", [2, 1.5, 0.5])
def test_mixed_widths(store: SimpleNamespace, tmp_path: Path, bits: float) -> None:
    """Where tensors differ as these do, a third of the bits of one width for all is enough."""
    run = run_of(store)
    found = store.stores._mixed(run, bits, tmp_path)
    assert found["bytes"] <= found["uniform"]["bytes"]
    assert found["error"] < 0.8 * found["uniform"]["error"]
    if bits == 0.5:  # half of the time nothing is kept
        one = store.stores.zoo(run, 1, tmp_path / "one")
        alone = store.stores.facts(run, one, 0)["error"]
        assert found["uniform"]["error"] == pytest.approx((0.5 + alone**2 / 2) ** 0.5)


def test_the_shipped_tables_are_of_the_shipped_cells(
    store: SimpleNamespace, tmp_path: Path
) -> None:
    mini = STORE.parent / "mini"
    shipped = json.loads((mini / "results" / "bits.json").read_text())
    page = tmp_path / "RESULTS.md"
    page.write_bytes((mini / "RESULTS.md").read_bytes())
    assert page.read_text().count("<!-- bits: ") == 4
    store.bits.write(shipped["cells"], "small", tmp_path / "out", page)
    assert page.read_bytes() == (mini / "RESULTS.md").read_bytes()


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """Trains models that learn nothing, measures them, and finds all that it measured again."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(STORE / "bits.py"), "--preset", "micro", "--out", str(tmp_path)]
    hows = ("all", "zoo_2", "balanced_5", "tvq_2", "merged_tvq_2", "mixed_1.5")
    report = tmp_path / "report-micro" / "bits.json"
    for more in ([word for how in hows for word in ("--how", how)], ["--as-is"]):
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        tables = {
            name: made[0]["rows"] for name, made in json.loads(report.read_text())["tables"].items()
        }
        assert len(tables["kept"]) == 3 and len(tables["mixed"]) == 1
        kept = tables["kept"]["2 bits"]
        assert 0 < kept["error"]["mean"] < 0.6 and 0.14 < kept["of bfloat16"]["mean"]
        assert tables["kept"]["all task vectors, float32"]["error"]["mean"] < 1e-6
        assert (
            tables["rivals"]["TVQ, 2 bits"]["error"]
            == tables["rivals_kept"]["TVQ, 2 bits"]["error"]
        )
        assert (report.parent / "micro-full-bits.svg").read_text().startswith("<?xml")
        report.unlink()
