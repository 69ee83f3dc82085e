"""The compiled loops against dense float64, and against PyTorch's own roundings."""

import runpy
import struct
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from passing import combine, gram_of
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.core.merge import Linear
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors import passes
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.kernels import KINDS, Compiled, compiled
from tvb_mergekit.tensors.stream import Item, Part, Piece, PieceBuffer, held_item
from tvb_mergekit.tensors.writing import MemorySink

DTYPES = list(KINDS)
SOURCE = "def added(x):\n    return x + %d\n"
quick = settings(max_examples=40, deadline=None)


def test_environments_share_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three environments, one with another source; then a folder of the user's, and none at all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    found = []
    for number, place in [(1, "one"), (1, "two"), (2, "three"), (1, "four"), (1, "five")]:
        if place == "four":
            monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "own"))
        if place == "five":
            monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
        file = tmp_path / place / "module.py"
        file.parent.mkdir()
        file.write_text(SOURCE % number)
        added = compiled(runpy.run_path(str(file))["added"])
        found.append((added(1), sum(added.stats.cache_hits.values())))
    assert found == [(2, 0), (2, 1), (3, 0), (2, 0), (2, 0)]
    assert len([*tmp_path.glob("own/*/module.added-*.nbi")]) == 1


@st.composite
def inputs(draw: st.DrawFn) -> list[Tensor]:
    """theta_0 and T models, each of a dtype of its own."""
    count = draw(st.integers(2, 10))
    length = draw(st.sampled_from([1, 7, 511, 512, 513, 2049, 5000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    made = torch.randn(count, length, generator=generator)
    return [each.to(draw(st.sampled_from(DTYPES))) for each in made]


def task_vectors(base: Tensor, models: list[Tensor], deltas: int = 0) -> Tensor:
    tau = torch.stack([model.double() for model in models])
    tau[deltas:] -= base.double()
    return tau


NAMES = [f"task-{i}" for i in range(10)]


def combined(step: Linear, tensors: list[Tensor], out: Tensor, base: bool = True) -> bool:
    """Fill `out` by the loops; what they say of its being finite."""
    item = held_item("w", tensors[0], tensors[1:])
    if not base:
        item = replace(item, base=None, inputs=item.parts)
    buffer = PieceBuffer(64 * (item.nbytes // 64 + 1 + len(tensors)))
    piece = Piece(item, 0, item.numel, 0)
    found = buffer.read(piece, copy=True)
    return Compiled(len(tensors) - base, step=step)(buffer, piece, found, out)[0]


@quick
@given(inputs(), st.data())
def test_the_gram_matrix_equals_float64(given: list[Tensor], data: st.DataObject) -> None:
    base, *models = given
    deltas = data.draw(st.integers(0, len(models)))
    sums = gram_of([held_item("w", base, models)], NAMES[: len(models)], deltas=deltas)
    tau = task_vectors(base, models, deltas)
    want = tau @ tau.T
    assert (sums.gram - want).abs().max() <= 1e-6 * want.trace()
    assert torch.equal(sums.gram, sums.gram.T)
    norm = float(base.double() @ base.double())
    assert sums.base_norm_squared == pytest.approx(norm, rel=1e-6)
    assert sums.num_parameters == base.numel()
    with mock.patch.object(passes, "fused", lambda *_: False):  # what other devices do
        other = gram_of([held_item("w", base, models)], NAMES[: len(models)], deltas=deltas)
    assert (sums.gram - other.gram).abs().max() <= 2e-6 * want.trace()


@quick
@given(inputs(), st.sampled_from(DTYPES), st.booleans(), st.data())
def test_combinations_equal_float64(given, out, add_base, data):
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
        size = moved.abs().sum(0) + base.double().abs() + 1e-3
        slack = (len(models) + 3) * 2.0**-24 * size + torch.finfo(out).eps / 2 * want.abs()
        slack += torch.finfo(out).smallest_normal  # subnormal float16
        assert ((state["w"].double() - want).abs() <= slack * 1.001).all()
        assert state["w"].dtype == out


def cast(row: Tensor, out: torch.dtype) -> Tensor:
    """0 + row, as the loops cast it; and whether they say rightly that it is finite."""
    made = torch.empty(1, len(row), dtype=out)
    once = Linear.of(torch.ones(1, 1))
    finite = combined(once, [row], made, base=False)
    assert finite == bool(torch.isfinite(made).all())
    return made[0]


@quick
@given(st.lists(st.floats(width=32), min_size=1, max_size=600), st.sampled_from(DTYPES))
def test_casts_are_those_of_pytorch(values: list[float], out: torch.dtype) -> None:
    row = torch.tensor(values)
    torch.testing.assert_close(cast(row, out), (row + 0.0).to(out), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_and_written_as_it_is(dtype: torch.dtype) -> None:
    words = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    for out in (torch.float32, dtype):
        want = words.to(out) + 0  # a sum with zero makes 0 of -0
        torch.testing.assert_close(cast(words, out), want, rtol=0, atol=0, equal_nan=True)
    between = words.float()[:-1] / 2 + words.float()[1:] / 2  # ties
    between = between[between.isfinite()]
    torch.testing.assert_close(cast(between, dtype), between.to(dtype) + 0, rtol=0, atol=0)


def test_a_coefficient_multiplies_a_finished_direction() -> None:
    """fl(theta_0 + fl(scale * direction)): what `tvb tune` computes of a direction it keeps."""
    torch.manual_seed(0)
    given, weights = list(torch.randn(6, 3000)), torch.randn(5)
    steps = [[(1.0, weights)], [(0.7, weights), (-0.3, weights.flip(0))]]
    made, alone, other = (torch.empty(count, 3000) for count in (2, 2, 1))
    assert combined(Linear(steps, add_base=False), given, alone)
    assert combined(Linear(steps), given, made)
    assert combined(Linear.of(weights.flip(0)[:, None]), given, other)
    assert torch.equal(made[0], given[0] + alone[0])
    assert torch.equal(made[1], (given[0] + alone[0] * 0.7) + other[0] * -0.3)


def both(items: list[Item]) -> list[Tensor]:
    sink = MemorySink(2)
    combine(items, torch.tensor([[0.5, 1], [0.25, -1], [0.25, 0.1]]), sink, add_base=True)
    return [tensor for state in sink.states for tensor in state.values()]


@pytest.mark.parametrize("shift", range(4))
def test_files_give_the_bits_of_tensors_in_memory(shift: int, tmp_path: Path) -> None:
    """Also where a header of an odd length puts numbers at odd places."""
    torch.manual_seed(1)
    kinds = [*DTYPES, torch.bfloat16]
    made, models = [torch.randn(300_001).to(dtype) for dtype in kinds], []
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
    left, right = ((gram_of(each, NAMES[:3]).gram, *both(each)) for each in (items, held))
    assert all(map(torch.equal, left, right))


def test_a_file_that_was_cut_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"v": torch.ones(8), "w": torch.ones(100_000)}, path)
    model = Checkpoint.open(path)
    assert torch.equal(model.read("w", 5, 9, torch.empty(4)), torch.ones(4))  # so it stays open
    with path.open("r+b") as file:
        file.truncate(200_000)
    item = Item("w", (100_000,), Part.of(model, "w"), (Part.of(model, "w"),))
    with pytest.raises(UserError, match="ends in tensor `w`; the file was changed while it was"):
        gram_of([item], NAMES[:1])


def test_a_budget_cuts_pieces_and_not_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The magnitudes are so far apart that sums in another order have other bits."""
    generator, sizes = torch.Generator().manual_seed(2), torch.logspace(0, -8, 400_003)
    base, *models = [sizes * torch.randn(400_003, generator=generator) for _ in range(4)]
    items = [held_item(name, base, models, torch.bfloat16) for name in ("v", "w")]
    seen = set()
    for longest in (2**17, 2**18, 2**20):
        monkeypatch.setattr(passes, "LONGEST", longest)
        sums = gram_of(items, NAMES[:3])
        seen.add((*sums.gram.flatten().tolist(), *(t.sum().item() for t in both(items))))
    assert len(seen) == 1
    tau = task_vectors(base, models)
    assert (sums.gram - 2 * tau @ tau.T).abs().max() <= 1e-6 * sums.gram.trace()
