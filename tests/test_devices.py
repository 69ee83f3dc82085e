"""Properties of accelerators on a CPU: placement, partition, and clear refusals."""

import pytest
import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from passing import gram_of, merge_tensor
from tiny import family

from tvb_mergekit.cli.options import auto_device
from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.settings import resolve_settings
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import MEMORY, Needs, plan_layout
from tvb_mergekit.tensors.merging import build_basis
from tvb_mergekit.tensors.stream import Item, held_item
from tvb_mergekit.tensors.taskset import TaskSet

CPU = torch.device("cpu")
TASKS = ["a", "b", "c", "d"]
Family = dict[str, tuple[torch.Tensor, list[torch.Tensor]]]


def tensors(count: int = 3, numel: int = 5000) -> Family:
    generator = torch.Generator().manual_seed(0)
    bases = torch.randn(count, numel, generator=generator)
    moved = bases + 0.01 * torch.randn(len(TASKS), count, numel, generator=generator)
    return {f"layer.{n}.weight": (bases[n], list(moved[:, n])) for n in range(count)}


def items_of(made: Family) -> list[Item]:
    return [held_item(name, base, models) for name, (base, models) in made.items()]


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("basis_ta", {"basis": "balanced"}),
        ("basis_ties", {"basis": "none"}),
        ("basis_ties", {"basis": "none", "trim": "tensor"}),
        ("basis_negate", {"basis": "rand_proj", "forget": "a", "alpha": 1}),
    ],
)
def test_default_device_of_a_worker_does_not_leak(method: str, given: dict[str, object]) -> None:
    """mergekit's GPU workers run under `torch.device(cuda:i)`; `meta` stands for it here."""
    made = tensors()
    settings = resolve_settings(method, given, TASKS)
    results = []
    for default in ("cpu", "meta"):
        with torch.device(default):
            basis = build_basis(TaskSet(settings, TASKS, [1.0] * 4, items_of(made)))
            tunables = Tunables(0.4, 1.0, 0.2)
            for name, (base, models) in made.items():
                out = merge_tensor(basis, name, base, models, tunables, torch.float32, CPU)
                results.append(out)
    half = len(results) // 2
    assert all(torch.equal(a, b) for a, b in zip(results[:half], results[half:], strict=True))


def test_every_device_gets_its_threads() -> None:
    devices = [torch.device("cuda", index) for index in range(3)]
    assert plan_layout(Needs(8, 18, 2), Engine(devices, MEMORY)).workers == 4 * tuple(devices)


def test_each_process_takes_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert auto_device() == "cuda"
    found = []
    for rank in range(4):
        for name, value in (("WORLD_SIZE", "8"), ("RANK", rank + 4), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        found.append(auto_device())
    assert found == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_an_error_in_one_worker_stops_the_others() -> None:
    made = tensors(count=6)
    made["layer.2.weight"][1][1][17] = float("nan")
    with pytest.raises(ValueError, match=r"layer\.2\.weight.*`b` holds 1 NaN"):
        gram_of(items_of(made), TASKS, Engine([CPU, CPU]))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"cuda": True}, "device `cuda` cannot be used here"),
        ({"device": "cdua"}, "device `cdua` cannot be used here: .*; name another, such as cpu"),
        ({"multi_gpu": True}, "--multi-gpu: PyTorch sees no accelerator"),
    ],
)
def test_a_missing_device_is_refused_before_reading(options, wanted, tmp_path):
    base, models = family(tmp_path / "models", tokenizer=False)
    recipe = MergeConfiguration.model_validate(
        {"merge_method": "basis_ta", "base_model": str(base), "models": [{"model": str(models[0])}]}
    )
    with pytest.raises(RuntimeError, match=wanted):
        run_merge(recipe, str(tmp_path / "out"), MergeOptions(**options))
    assert not (tmp_path / "out").exists()
