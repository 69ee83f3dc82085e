"""What the passes hold in memory is what `layout` says, and never more than the budget."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import recipe, settings, write
from passing import combine, gram_of
from tiny import family, llama
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.core.settings import resolve_settings
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors import merging, passes, stream
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import BLOCK, READ, Needs, parse_memory, plan_layout
from tvb_mergekit.tensors.merging import build_basis, merge_items
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.summing import RunningSums
from tvb_mergekit.tensors.taskset import TaskSet

CPU = torch.device("cpu")
MB = 10**6


class HighWater(TorchDispatchMode):
    """Bytes of all tensors that are alive, at most; one for each thread, with one account."""

    lock = threading.Lock()
    alive: Counter[int]
    now = most = 0

    @classmethod
    def reset(cls) -> None:
        cls.alive, cls.now, cls.most = Counter(), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            if isinstance(value, Tensor):
                self.note(value)
        return made

    @classmethod
    def note(cls, value: Tensor) -> None:
        storage = value.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        with cls.lock:
            cls.alive[place] += 1
            if cls.alive[place] == 1:
                cls.now += size
                cls.most = max(cls.most, cls.now)
        weakref.finalize(value, cls.gone, place, size)

    @classmethod
    def gone(cls, place: int, size: int) -> None:
        with cls.lock:
            cls.alive[place] -= 1
            if not cls.alive[place]:
                cls.now -= size


@contextmanager
def in_every_thread(mode: Callable[[], TorchDispatchMode]) -> Iterator[None]:
    """Within it `mode` is entered in this thread, and once wherever `stream` makes what a thread
    reads and computes with."""
    local = threading.local()
    local.entered = True

    def watching(kind: type) -> Any:
        original: Callable[..., None] = kind.__init__  # type: ignore[misc]

        def watched(self: object, *args: Any, **keys: Any) -> None:
            if not hasattr(local, "entered"):
                local.entered = mode().__enter__()
            original(self, *args, **keys)

        return mock.patch.object(kind, "__init__", watched)

    with ExitStack() as stack:
        stack.enter_context(watching(stream.PieceBuffer))
        stack.enter_context(mode())
        yield


@contextmanager
def high_water(threads: int) -> Iterator[type[HighWater]]:
    """The most that is alive in this thread and in the `threads` that read and compute."""
    HighWater.reset()
    with (
        in_every_thread(HighWater),
        mock.patch("tvb_mergekit.tensors.layout.worker_count", lambda device: threads),
        mock.patch.object(passes, "worker_count", lambda device: threads),
    ):
        yield HighWater


def noise(dtype: torch.dtype, seed: int) -> Part:
    """Numbers that nothing holds."""

    def read(start: int, stop: int, room: Tensor) -> Tensor:
        with _disable_current_modes():  # reading a file makes nothing
            piece = room[: stop - start]
            steps = torch.arange(start, stop, dtype=torch.float32)
            return piece.copy_((steps * (0.37 + seed)).sin_())

    return Part(dtype, read)


def items_of(tasks: int, numel: int, dtypes: list[torch.dtype]) -> list[Item]:
    def parts(offset: int) -> list[Part]:
        return [noise(dtypes[i % len(dtypes)], offset + i) for i in range(tasks + 1)]

    return [
        Item(f"layer.{n}", (size,), parts(n)[0], tuple(parts(n)[1:]))
        for n, size in enumerate((numel, 1, 5 * BLOCK + 7))
    ]


class Nowhere:
    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        assert values.shape == (len(values), stop - start)


MIXED = [torch.float32, torch.bfloat16]
CASES = [  # tasks, budget in MB, threads, dtypes; float64 takes PyTorch's way
    (2, 8, 2, MIXED),
    (8, 16, 1, [torch.bfloat16]),
    (8, 40, 4, [torch.float64]),
    (72, 40, 4, MIXED),
]
Case = tuple[int, int, int, list[torch.dtype]]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def numel_for(tasks: int) -> int:
    return 20_000_000 // (tasks + 1) ** 2 + 150_000  # several pieces, in about as much time


def held_within(budget: int, threads: int, work: Callable[[], Any], least: float = 0.02) -> None:
    with high_water(threads) as seen:
        work()
    assert least * budget < seen.most <= budget, (seen.most, budget)


@each_case
def test_the_gram_pass(case: Case) -> None:
    tasks, megabytes, threads, dtypes = case
    items = items_of(tasks, numel_for(tasks), dtypes)
    budget = megabytes * MB
    work = lambda: gram_of(items, names(tasks), Engine(memory=budget))  # noqa: E731
    held_within(budget, threads, work, least=0.1)


@each_case
@pytest.mark.parametrize(("how", "outputs"), [("read", 1), ("read", 4), ("summed", 1)])
def test_combining(case: Case, how: str, outputs: int) -> None:
    tasks, megabytes, threads, dtypes = case
    items = items_of(tasks, numel_for(tasks), dtypes)
    more: dict[str, Any] = {}
    matrix = torch.full((tasks, outputs), 0.01)
    if how == "summed":
        more["summing"] = RunningSums(items, names(tasks))
    budget = megabytes * MB
    held_within(
        budget, threads, lambda: combine(items, matrix, Nowhere(), Engine(memory=budget), **more)
    )


@each_case
def test_trimming(case: Case) -> None:
    tasks, megabytes, threads, dtypes = case
    bases, budget = min(tasks, 6), (megabytes + 160) * MB  # with the histograms of six bases
    items = items_of(tasks, numel_for(tasks) // 2, dtypes)
    keys = {"basis": "rand_select", "num_bases": bases}
    found = resolve_settings("basis_ties", keys, names(tasks))
    merging.check_tables(bases, budget)
    merged = [replace(item, tunables=Tunables(0.1, density=0.3)) for item in items]
    engine = Engine(memory=budget)

    def work() -> None:
        taking_part = TaskSet(found, names(tasks), [1.0] * tasks, items)
        merge_items(build_basis(taking_part, engine), merged, Nowhere(), engine)

    held_within(budget, threads, work)


def names(tasks: int) -> list[str]:
    return [str(i) for i in range(tasks)]


def embedding(tasks: int, dtype: torch.dtype) -> list[Item]:
    """128k tokens of 4096 columns, which nothing holds."""
    return [Item("w", (128_000, 4096), noise(dtype, 0), (noise(dtype, 1),) * tasks)]


@pytest.mark.parametrize(("tasks", "megabytes"), [(2, 4000), (8, 200), (72, 50)])
def test_pieces_of_a_large_tensor_are_cut_to_the_budget(tasks: int, megabytes: int) -> None:
    items = embedding(tasks, torch.bfloat16)
    layout = passes.gram_layout(
        items, RunningSums(items, names(tasks)), Engine(memory=megabytes * MB)
    )
    assert layout.nbytes <= megabytes * MB
    assert layout.piece % layout.chunk == layout.chunk % BLOCK == 0
    bigger = replace(layout, piece=layout.piece + layout.chunk)
    assert bigger.nbytes > megabytes * MB or bigger.piece * layout.needs.inputs > READ
    assert layout.piece >= 16 * BLOCK


@pytest.mark.parametrize("outputs", [0, 1])
def test_sizes_do_not_grow_with_the_models(outputs: int) -> None:
    """Beyond what helps, a large budget is not used, for the Gram matrix nor for T/2 bases."""
    taken, large = [], Engine(memory=1000 * MB)
    for tasks in (8, 16, 32, 72):
        items, half = embedding(tasks, torch.float32), tasks // 2
        layout = passes.gram_layout(items, RunningSums(items, names(tasks)), large)
        if outputs:
            needs = Needs(tasks, passes.read_width(items), half * 4, extra=half)
            layout = plan_layout(needs, large)
        taken.append(layout.nbytes)
    assert max(taken) - min(taken) < 25 * MB and max(taken) < 150 * MB, taken


def test_a_budget_that_is_too_small_says_what_is_needed() -> None:
    needs = Needs(72, 2 * 73, extra=10, sums=8 * 72**2)
    with pytest.raises(UserError, match=r"^0.1 MB .* 72 models at a time: [\d.]+ MB") as told:
        plan_layout(needs, Engine(memory=100_000))
    words = str(told.value).split()
    needed = float(words[words.index("needed;") - 3])
    assert plan_layout(needs, Engine(memory=int((needed + 0.1) * MB))).chunk == BLOCK


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("500MB", 5 * 10**8), ("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("64k", 64_000)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_memory(text) == nbytes
    for other in (f"-{text}", f"{text}2", ""):
        with pytest.raises(UserError, match="expected a number and a unit"):
            parse_memory(other)


# The commands themselves


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("command", ["build", "merge"])
def test_the_process_grows_by_the_budget_at_most(command: str, tmp_path: Path) -> None:
    """RssAnon of the command on models of 64 MB against that on tiny ones."""
    tall = lambda: llama(vocab_size=200_000, hidden_size=64)  # noqa: E731
    most = {}
    for name, make in (("small", llama), ("large", tall)):
        base, models = family(tmp_path / name, make, [f"t{i}" for i in range(8)], tokenizer=False)
        made = recipe("basis_ta", base, models, basis="balanced", num_bases=4)
        for memory in ("40MB", "250MB"):
            out = tmp_path / f"{name}-{memory}"
            words = [sys.executable, "-m", "tvb_mergekit", command, str(write(made, out)), str(out)]
            words += ["--memory", memory, "--quiet"]
            most[name, memory] = peak(words, out)
    for memory in ("40MB", "250MB"):
        grown = most["large", memory] - most["small", memory]
        assert grown <= parse_memory(memory) + 16 * MB, (most, memory)
    assert most["large", "250MB"] > most["small", "250MB"] + 10 * MB  # more than tiny ones


def peak(words: list[str], out: Path) -> int:
    """The most anonymous memory that a process had, in bytes."""
    env = os.environ | {"OMP_NUM_THREADS": "2"} | settings("off", out, None)
    most = 0
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        while run.poll() is None:
            try:
                text = Path(f"/proc/{run.pid}/status").read_text()
            except OSError:
                break
            for line in text.splitlines():
                if line.startswith("RssAnon:"):
                    most = max(most, int(line.split()[1]) * 1024)
            time.sleep(0.01)
        told, _ = run.communicate()
    assert run.returncode == 0, told
    return most
