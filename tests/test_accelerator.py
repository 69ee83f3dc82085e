"""Accelerators on a CPU: placement, clear refusals, and a CUDA device that is not there.

Results on this device are equal, and copies are counted. Tensors of this device wrap CPU tensors
that nothing else reaches. An operation fails if it mixes devices. So does a change of memory that a
GPU may still read, and a copy that converts on the host.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from worlds import state_dicts

from tvb_mergekit import Bases, attach, build
from tvb_mergekit.cli.options import auto_device
from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.core.gram import SUMMED
from tvb_mergekit.core.settings import resolve_settings
from tvb_mergekit.store.api import base_of
from tvb_mergekit.store.export import combine, items_of
from tvb_mergekit.tensors import passes, stream
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.merging import build_basis, merge_items
from tvb_mergekit.tensors.output import in_memory
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.stream import CPU, Engine
from tvb_mergekit.tensors.taskset import TaskSet

CUDA = torch.device("cuda", 0)
FORCED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # the host waits
ALL, TASKS, T = {"basis": "none"}, ["a", "b", "c"], 3
SHAPES = {"layer": (64, 160), "bias": (96,), "other": (48, 40)}  # 5, 1 and 1 pieces
PIECES = 7
# Copies to the device and from it. A pass moves each input of each piece once.
SUMS = 2 * len(SHAPES)  # back: G and the base's norm, of each tensor
GRAM = PIECES * (1 + T), SUMS
LINEAR = PIECES * (1 + T) + 1, PIECES  # also the weights; back: the outputs
COUNT = PIECES * (1 + T) + 1, 1  # also the weights; back: the histogram
TRIM = PIECES * (1 + T) + 1, PIECES  # also the weights


def matrices(*scalars: int) -> tuple[int, int]:
    """Two matrices of 6 pieces, whose bases pass through the host, and a vector.

    `scalars` are the numbers of each matrix that the host sends, and that it needs.
    """
    up = (1 + T + 1) + 6 * (1 + T) + 2 + 2 * (1 + scalars[0]) + 6 * 2 + 2
    return up, 1 + 6 + 2 * (1 + scalars[1]) + 6


class Device(TorchDispatchMode):
    """Counts copies `up` to the device and `down` from it."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE  # PyTorch does not look for a real one

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        # Thread -> memory that its copies read, and the content.
        self.reading: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.events: list[Event] = []

    def record_event(self) -> "Event":
        self.events.append(Event(self.reading.pop(get_ident(), [])))
        return self.events[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # counts the operations that it is made of
                return func.decompose(*args, **kwargs or {})
        name, kwargs = func.name(), {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        here = [t for t in tensors if isinstance(t, Hidden)]
        device = kwargs.get("device") or (CUDA if here else CPU)
        there = torch.device(device).type == "cuda"
        if name in ("aten::copy_", "aten::_to_copy"):
            source = args[name == "aten::copy_"]
            there = isinstance(args[0], Hidden) if name == "aten::copy_" else there
            if there != isinstance(source, Hidden):
                self.counts["up" if there else "down"] += 1
                same = source.dtype == kwargs.get("dtype", args[0].dtype)
                assert same or source.numel() < 16, "the host converts"
                if there and kwargs.get("non_blocking"):
                    self.reading[get_ident()].append((source, source.clone()))
        elif here:
            mixed = [t for t in tensors if t.dim() and not isinstance(t, Hidden)]
            assert not mixed, f"{name}: two devices"
            indexed = name == "aten::index.Tensor" and all(t.dtype != torch.bool for t in tensors)
            self.counts["down"] += not indexed and not FORCED.isdisjoint(func.tags)
        kwargs.update(dict(device=CPU) if kwargs.get("device") else {})
        plain, keys = tree_map_only(Hidden, lambda t: t.inner, (args, kwargs))
        made = func(*plain, **keys)
        if not there:
            return made
        known = {id(t.inner): t for t in here}  # changed in place
        return tree_map_only(
            Tensor, lambda t: known[id(t)] if id(t) in known else Hidden(t, self), made
        )


@dataclass
class Event:
    """After the copies of a thread so far, which read their memory until somebody waits."""

    reading: list[tuple[Tensor, Tensor]]

    def synchronize(self) -> None:
        while self.reading:
            assert torch.equal(*self.reading.pop()), "changed while a copy reads it"


class Hidden(Tensor):
    is_meta = False

    @staticmethod
    def __new__(cls, inner: Tensor, home: Device) -> "Hidden":
        made: Hidden = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device="meta",  # PyTorch for CPUs cannot index others
        )  # fmt: skip
        made.inner, made.home = inner, home
        return made

    device = property(lambda self: CUDA)
    data_ptr = lambda self: self.inner.data_ptr()  # noqa: E731
    tolist = lambda self: self.cpu().tolist()  # noqa: E731
    new_tensor = lambda self, data: torch.tensor(data, dtype=self.dtype, device=CUDA)  # noqa: E731

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (home, *_) = (t.home for t in tree_leaves((args, kwargs)) if isinstance(t, Hidden))
        return home.__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The device in all threads. Pieces are short, and the same on the CPU."""
    made = Device()

    def enter() -> None:
        torch._C._set_only_lift_cpu_tensors(True)  # in this thread: `torch.tensor` makes a copy
        made.__enter__()

    threads = partial(ThreadPoolExecutor, initializer=enter)
    monkeypatch.setattr(passes, "ThreadPoolExecutor", threads)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: made)
    monkeypatch.setattr(passes, "PIECE", 1)
    monkeypatch.setattr(passes, "SHORTEST", SUMMED)
    monkeypatch.setattr(passes, "DEVICE_THREADS", 1)
    torch._C._set_only_lift_cpu_tensors(True)
    with made:
        yield made
    torch._C._set_only_lift_cpu_tensors(False)
    assert not any(made.reading.values())
    for event in made.events:  # memory that nobody waited for was not filled again
        event.synchronize()


def test_mistakes_fail(device: Device) -> None:
    here, there = torch.ones(16), torch.ones(16).to(CUDA)
    mistakes = {
        "two devices": lambda: there + here,
        "the host converts": lambda: here.bfloat16().copy_(there),
        "changed while a copy reads it": lambda: (
            here.to(CUDA, non_blocking=True), here.zero_(), device.record_event().synchronize()
        ),
    }  # fmt: skip
    for message, mistake in mistakes.items():
        with pytest.raises(AssertionError, match=message):
            mistake()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three models, whose biases are those of the base."""
    made = tmp_path_factory.mktemp("models")
    found = state_dicts(made, "safetensors", [torch.bfloat16], tasks=TASKS, sizes=SHAPES)
    for task, state in zip(("base", *TASKS), found.states, strict=True):
        given = {name: state[name] for name in SHAPES} | {"bias": found.states[0]["bias"]}
        save_file(given, made / f"{task}.safetensors")
    return made


def items_in(folder: Path) -> list[stream.Item]:
    base, *models = (Checkpoint.open(folder / f"{task}.safetensors") for task in ("base", *TASKS))
    tunables, of = Tunables(0.4, 1.0, 0.2), stream.Part.of
    return [
        stream.Item(name, shape, of(base, name), tuple(of(model, name) for model in models),
                    torch.bfloat16, counted_as=name, tunables=tunables)
        for name, shape in SHAPES.items()
    ]  # fmt: skip


def copies(device: Device, run: Callable[[torch.device], Mapping[str, Any]]) -> tuple[int, int]:
    """The copies up and down. Results must be equal to the bit on the CPU and on the device."""
    here = run(CPU)
    assert not device.counts.total()
    there = run(CUDA)
    counts, device.counts = device.counts, Counter()
    for name, value in here.items():
        assert value is None or torch.equal(*map(torch.as_tensor, (there[name], value))), name
    return counts["up"], counts["down"]


def test_gram(folder: Path, device: Device) -> None:
    items = items_in(folder)
    assert copies(device, lambda d: vars(gram_pass(items, TASKS, Engine(d)))) == GRAM


def merged(method: str, items: Any, engine: Engine, keys: Any) -> dict[str, Tensor]:
    """The merged tensors, and what the passes summed."""
    held, sink = in_memory(items)
    tasks = TaskSet(resolve_settings(method, keys, TASKS), TASKS, [1.0] * T, items)
    basis = build_basis(tasks, engine)
    merge_items(basis, items, sink, engine)
    return {"sums": basis.sums.gram, **held}


# A model is read once for each of these, so once if G decides nothing.
MERGES: list[tuple[str, Any, Any]] = [
    ("basis_ta", {"basis": "balanced"}, [LINEAR, (0, SUMS)]),  # norms on the way
    ("basis_ta", {"basis": "rand_select"}, [LINEAR, (0, SUMS)]),
    ("basis_ta", {"basis": "pca"}, [GRAM, LINEAR]),
    ("basis_negate", {**ALL, "forget": "a", "alpha": 1.0}, [LINEAR, (1, SUMS)]),
    ("basis_negate", {"basis": "rand_select", "forget": "a", "alpha": 1.0}, [GRAM, LINEAR, (1, 0)]),
    ("basis_ties", {"basis": "balanced"}, [GRAM, COUNT, TRIM]),
    ("basis_ties", ALL, [COUNT, (0, SUMS), TRIM]),  # G on the way
    ("basis_iso", ALL, [(0, SUMS), matrices(0, 2)]),
    ("basis_iso", {**ALL, "common": 0.5}, [(0, SUMS), matrices(0, 11)]),
    ("basis_tsvm", ALL, [(0, SUMS), matrices(0, 11)]),
    ("basis_wudi", {**ALL, "flow_time": 30}, [(0, SUMS), matrices(1, 5)]),
    ("basis_wudi", {**ALL, "flow_time": "exact"}, [(0, SUMS), matrices(1, 5)]),
]


@pytest.mark.parametrize(("method", "keys", "passes"), MERGES)
def test_merges(method: str, keys: Any, passes: Any, folder: Path, device: Device) -> None:
    items = items_in(folder)
    found = copies(device, lambda d: merged(method, items, Engine(d), keys))
    assert found == tuple(map(sum, zip(*passes, strict=True)))


@pytest.fixture(params=[{}, {"lossless": True}, {"keep": 0.25}], ids=str)
def stored(request: Any, folder: Path, tmp_path: Path) -> tuple[Path, Bases]:
    base, models = folder / "base.safetensors", {t: folder / f"{t}.safetensors" for t in TASKS}
    return base, build(base, models, tmp_path / "store", **ALL, **request.param)


def test_stores(stored: tuple[Path, Bases], device: Device) -> None:
    path, store = stored
    items = items_of(store, base_of(store, path), store.sources)

    def run(on: torch.device) -> Mapping[str, Tensor]:
        held, sink = in_memory(items)
        combine(items, torch.full((T, 1), 0.5), sink, Engine(on))
        return held

    pieces = len(SHAPES) if store.facts.vectors[0].codec != "dense" else PIECES  # complete blocks
    assert copies(device, run) == (pieces * (1 + T) + 1, pieces)


def test_live(stored: tuple[Path, Bases], device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change copies each piece once; `attach` copies back what it compares."""
    path, store = stored
    base, states = Checkpoint.open(path), []
    pieces = len(SHAPES) if store.facts.vectors[0].codec != "dense" else PIECES
    for on in (CPU, CUDA):
        model = nn.ParameterDict({name: base.tensor(name).clone() for name in SHAPES})
        model["other"].data = model["other"].data.T.contiguous().T  # other strides
        model = model.to(on)
        counts = []
        device.counts.clear()
        attached = attach(model, store, path)
        counts.append(+device.counts)
        device.counts.clear()
        attached.use("b")
        counts.append(+device.counts)
        states.append({name: tensor.detach().cpu() for name, tensor in model.items()})
    assert counts == [{"down": len(list(base.samples()))}, {"up": pieces}]
    assert all(torch.equal(states[1][name], states[0][name]) for name in SHAPES)


# Placement and refusals


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
