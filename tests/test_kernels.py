"""The compiled loops against dense float64, and against PyTorch's own roundings."""

from __future__ import annotations

import functools
import os
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit import checkpoints, kernels, stream
from tvb_mergekit.checkpoints import Checkpoint
from tvb_mergekit.errors import UserError
from tvb_mergekit.kernels import KINDS, Combining, Inputs
from tvb_mergekit.stream import Item, Part, combine, gram_of, held_item, layout_for
from tvb_mergekit.window import Window
from tvb_mergekit.writing import MemorySink

DTYPES = list(KINDS)
quick = settings(max_examples=60, deadline=None)


@st.composite
def inputs(draw: st.DrawFn) -> list[Tensor]:
    """theta_0 and T models, each of a dtype of its own."""
    count = draw(st.integers(2, 10))
    length = draw(st.sampled_from([1, 7, 511, 512, 513, 2049, 5000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return [
        torch.randn(length, generator=generator).to(draw(st.sampled_from(DTYPES)))
        for _ in range(count)
    ]


def task_vectors(base: Tensor, models: list[Tensor], deltas: int = 0) -> Tensor:
    return torch.stack(
        [m.double() - (0 if i < deltas else base.double()) for i, m in enumerate(models)]
    )


def names(count: int) -> list[str]:
    return [f"task-{i}" for i in range(count)]


@quick
@given(inputs(), st.data())
def test_the_gram_matrix_equals_float64(given: list[Tensor], data: st.DataObject) -> None:
    base, *models = given
    deltas = data.draw(st.integers(0, len(models)))
    sums = gram_of([held_item("w", base, models)], names(len(models)), deltas=deltas)
    tau = task_vectors(base, models, deltas)
    want = tau @ tau.T
    assert (sums.gram - want).abs().max() <= 1e-6 * want.trace()
    assert torch.equal(sums.gram, sums.gram.T)
    norm = float(base.double() @ base.double())
    assert sums.base_norm_squared == pytest.approx(norm, rel=1e-6)
    assert sums.num_parameters == base.numel()
    with mock.patch.object(stream, "fused", lambda *_: False):  # what other devices do
        other = gram_of([held_item("w", base, models)], names(len(models)), deltas=deltas)
    assert (sums.gram - other.gram).abs().max() <= 2e-6 * want.trace()


@quick
@given(inputs(), st.sampled_from(DTYPES), st.booleans(), st.data())
def test_combinations_equal_float64(
    given: list[Tensor], out: torch.dtype, add_base: bool, data: st.DataObject
) -> None:
    base, *models = given
    deltas = data.draw(st.integers(0, len(models)))
    outputs = data.draw(st.integers(1, 3))
    matrix = torch.randn(len(models), outputs, generator=torch.Generator().manual_seed(outputs))
    sink = MemorySink(outputs)
    item = held_item("w", base, models, out)
    combine([item], matrix, sink, add_base=add_base, deltas=deltas)
    tau = task_vectors(base, models, deltas)
    for state, weights in zip(sink.states, matrix.double().T, strict=True):
        moved = weights[:, None] * tau
        want = moved.sum(0) + (base.double() if add_base else 0)
        room = moved.abs().sum(0) + base.double().abs() + 1e-3
        slack = (len(models) + 3) * 2.0**-24 * room + torch.finfo(out).eps / 2 * want.abs()
        slack += torch.finfo(out).smallest_normal  # subnormal float16
        assert ((state["w"].double() - want).abs() <= slack * 1.001).all()
        assert state["w"].dtype == out


@quick
@given(st.lists(st.floats(width=32), min_size=1, max_size=600), st.sampled_from(DTYPES))
def test_casts_are_those_of_pytorch(values: list[float], out: torch.dtype) -> None:
    row = torch.tensor(values)
    made = torch.empty(1, len(row), dtype=out)
    zero = torch.zeros_like(row)
    step = [(1.0, torch.ones(1))]
    finite = Combining(1, 0, [step], with_base=True)(Inputs.of([zero, row], True), made)
    want = (row + 0.0).to(out)  # a sum with theta_0 makes 0 of -0
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(made[0]), nan)
    assert torch.equal(made[0][~nan], want[~nan])
    assert finite == bool(torch.isfinite(want).all())


def test_a_coefficient_multiplies_a_finished_direction() -> None:
    """fl(theta_0 + fl(scale * direction)): what `tvb tune` computes of a direction it keeps."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(3000, generator=generator) for _ in range(6)]
    weights = torch.randn(5, generator=generator)
    made = torch.empty(2, 3000)
    steps = [[(1.0, weights)], [(0.7, weights), (-0.3, weights.flip(0))]]
    alone, other = torch.empty(2, 3000), torch.empty(1, 3000)
    found = Inputs.of(given, True)
    assert Combining(5, 0, steps, with_base=False)(found, alone)
    assert Combining(5, 0, steps, with_base=True)(found, made)
    assert Combining(5, 0, [[(1.0, weights.flip(0))]], with_base=False)(found, other)
    assert torch.equal(made[0], given[0] + alone[0])
    assert torch.equal(made[1], (given[0] + alone[0] * 0.7) + other[0] * -0.3)


def no_mapping(*_: object) -> Tensor:
    raise OSError("No such device")


@pytest.mark.parametrize("how", [0, 1, 2, 3, "no window", "no mapping"])
def test_files_are_read_where_they_are(
    how: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a header of an odd length puts numbers at odd places, on other systems, and on
    file systems that map no files."""
    shift = how if isinstance(how, int) else 0
    if how == "no window":
        monkeypatch.setattr(Window, "usable", False)
    elif how == "no mapping":
        monkeypatch.setattr(Window, "add", no_mapping)
    cut_at(2**17, monkeypatch)
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(300_001, generator=generator) for _ in range(4)]
    made = [t.to(dtype) for t, dtype in zip(made, [*DTYPES, torch.bfloat16], strict=True)]
    models = []
    for number, tensor in enumerate(made):
        path = tmp_path / f"{number}.safetensors"
        save_file({"w": tensor}, path)
        raw = path.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header = raw[8 : 8 + size].rstrip() + b" " * shift
        path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])
        models.append(Checkpoint.open(path))
    parts = [Part.of(model, "w") for model in models]
    items = [Item("w", (300_001,), parts[0], tuple(parts[1:]), torch.bfloat16)]
    held = [held_item("w", made[0], made[1:], torch.bfloat16)]
    for left, right in zip(
        (gram_of(items, names(3)).gram, *combined(items)),
        (gram_of(held, names(3)).gram, *combined(held)),
        strict=True,
    ):
        assert torch.equal(left, right)


def cut_at(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of at most so many elements."""
    monkeypatch.setattr(stream, "layout_for", functools.partial(layout_for, longest=longest))


def combined(items: list[Item]) -> list[Tensor]:
    sink = MemorySink(2)
    combine(items, torch.tensor([[0.5, 1], [0.25, -1], [0.25, 0.1]]), sink, add_base=True)
    return [state["w"] for state in sink.states]


def test_a_file_that_was_cut_is_one_line(tmp_path: Path) -> None:
    """As when another program writes it anew in its place."""
    path = tmp_path / "model.safetensors"
    save_file({"v": torch.ones(8), "w": torch.ones(100_000)}, path)
    model = Checkpoint.open(path)
    window = Window()
    window.clear([16])
    assert torch.equal(model.view("w", 5, 9, window), torch.ones(4))  # and so it stays open
    with path.open("r+b") as file:
        file.truncate(200_000)
    with pytest.raises(UserError, match="ends in tensor `w`; the file was changed while it was"):
        model.view("w", 90_000, 100_000, window)
    item = Item("w", (100_000,), Part.of(model, "w"), (Part.of(model, "w"),))
    with pytest.raises(UserError, match="ends in tensor `w`"):
        gram_of([item], names(1))


def test_a_budget_cuts_pieces_and_not_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    base, *models = [torch.randn(400_003, generator=generator) for _ in range(4)]
    items = [held_item("w", base, models, torch.bfloat16)]
    seen = set()
    for longest in (2**17, 2**18, 2**20):
        cut_at(longest, monkeypatch)
        sums = gram_of(items, names(3))
        seen.add((*sums.gram.flatten().tolist(), *(t.sum().item() for t in combined(items))))
    assert len(seen) == 1


ADD = """
import sys
import torch
from tvb_mergekit.kernels import Combining, Inputs
out = torch.empty(1, 3)
given = [torch.ones(3), torch.full((3,), 3.0)]
Combining(1, 0, [[(2.0, torch.ones(1))]], with_base=True)(Inputs.of(given, True), out)
print(out.tolist())
"""


@pytest.mark.parametrize("fault", ["damaged", "a file in the way", "none"])
def test_without_what_was_compiled_it_is_compiled_again(fault: str, tmp_path: Path) -> None:
    """numba itself would end with EOFError or RuntimeError."""
    cache = tmp_path / "tvb-mergekit" / "compiled"

    def run() -> str:
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        env.pop("NUMBA_CACHE_DIR", None)
        done = subprocess.run(
            [sys.executable, "-c", ADD], env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    if fault == "a file in the way":
        cache.parent.mkdir()
        cache.write_text("")
    assert run() == "[[5.0, 5.0, 5.0]]\n"
    if fault == "damaged":
        kept = [path for path in cache.rglob("*") if path.is_file()]
        assert kept
        for path in kept:
            path.write_bytes(b"")
        assert run() == "[[5.0, 5.0, 5.0]]\n"


@pytest.mark.parametrize("layout", ["column", "one column", "expanded"])
def test_tensors_of_any_layout(layout: str) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = [torch.randn(1000, 3, generator=generator) for _ in range(3)]
    if layout == "column":
        given = [tensor[:, 0] for tensor in wide]
    elif layout == "one column":
        given = [tensor[:, :1] for tensor in wide]
    else:
        given = [tensor[0, :1].expand(1000) for tensor in wide]
    base, *models = given
    want = gram_of([held_item("w", base.clone(), [m.clone() for m in models])], names(2))
    strided = gram_of([held_item("w", base, models)], names(2))
    assert torch.equal(strided.gram, want.gram)


def test_where_the_processor_lacks_float16_pytorch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    item = held_item("w", torch.ones(5), [torch.ones(5) * 3])
    assert not stream.fused([item], [torch.device("cpu")])
    assert gram_of([item], names(1)).gram.item() == 20


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="not on Linux")
def test_the_disk_is_asked_only_for_what_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(1000)}, tmp_path / "model.safetensors")
    model = Checkpoint.open(tmp_path / "model.safetensors")
    end = (tmp_path / "model.safetensors").stat().st_size
    asked: list[tuple[int, int]] = []
    looked: list[int] = []
    memory: set[int] = set()

    def cached(_file: object, place: int) -> bool:
        looked.append(end - place)
        return end - place in memory

    monkeypatch.setattr(
        os, "posix_fadvise", lambda _file, place, size, _: asked.append((place - end, size))
    )
    monkeypatch.setattr(checkpoints, "_cached", cached)

    def walk() -> tuple[list[tuple[int, int]], list[int]]:
        asked.clear()
        looked.clear()
        for start in range(0, 1000, 250):
            model.ahead("w", start, start + 250)
        return asked, looked

    assert walk()[0] == [(-4000, 1000), (-3000, 1000), (-2000, 1000), (-1000, 1000)]
    memory |= {1, 1001}  # the last byte, and that of the third piece
    assert walk() == ([], [1])
    memory -= {1}  # by the next pass it has been dropped
    assert walk()[0] == [(-4000, 1000), (-3000, 1000), (-1000, 1000)]
