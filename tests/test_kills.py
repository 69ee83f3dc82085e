"""Killed at any moment, `tvb build` and `tvb add` leave the old store, the new one, or none.

The commands run in processes forked from a server that has imported everything, so that a moment
of the run is a moment of the work. Targeted kills are sent by the process to itself.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from commands import recipe

import tvb_mergekit as tvb

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
EACH = 5  # random kills of a kind; `slow` does ten times as many
TASKS = ["math", "code", "chat", "law", "poems"]


# What runs in the other processes


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(before: Callable[..., Any] | None, calls: int = 1) -> Callable[..., Any]:
    """A function that does what `before` did, `calls` times, and then kills the process."""
    left = [calls]

    def patched(*args: Any, **named: Any) -> Any:
        made = before(*args, **named) if before is not None else None
        left[0] -= 1
        if not left[0]:
            _die()
        return made

    return patched


def _full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")


def _signalled(rename: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The first call is followed by a signal."""
    left = [1]

    def patched(*args: Any) -> None:
        rename(*args)
        if left:
            left.pop()
            os.kill(os.getpid(), number)

    return patched


def _patch(point: str) -> None:
    """Make this process slow, or make it end at a point."""
    import resource

    from tvb_mergekit import building, grow, output, store_writing, writing

    name, _, number = point.partition(":")
    calls = int(number or 1)
    put = writing.FolderWriter._put
    if name == "slow":

        def slowly(self: Any, data: memoryview) -> None:
            time.sleep(0.01)
            put(self, data)

        writing.FolderWriter._put = slowly  # type: ignore[method-assign]
    elif name == "put":
        writing.FolderWriter._put = _dying(put, calls)  # type: ignore[method-assign]
    elif name == "journal":
        write = writing.FoldersSink.write
        writing.FoldersSink.write = _dying(write, calls)  # type: ignore[method-assign]
    elif name == "facts":
        store_writing.write_facts = _dying(store_writing.write_facts, calls)
    elif name == "tensors":
        store_writing.write_tensors = _dying(store_writing.write_tensors)
    elif name == "state":
        building.cache.write_sums = _die  # type: ignore[assignment]
    elif name == "mkdir":
        building.Path.write_text = _die  # type: ignore[assignment]
    elif name == "exchange":  # before it, or after
        output._exchange = _dying(output._exchange if calls == 2 else None)
    elif name == "renames":  # the first or the second of two, where names cannot be exchanged
        output._exchange = lambda a, b: False
        output.os.rename = _dying(os.rename, calls)
    elif name == "rename":  # of a new store: before it, or after
        for module in (building, grow):
            module.os.rename = _dying(os.rename if calls == 2 else None)
    elif name == "tidying":  # the old store is half deleted
        whole = shutil.rmtree

        def half(folder: Path, **named: Any) -> None:
            if not folder.exists():
                return
            first = sorted(folder.iterdir())[0]
            whole(first, **named) if first.is_dir() else first.unlink()
            _die()

        output.shutil.rmtree = half
    elif name.startswith("renames-"):
        ends = int(name.partition("-")[2])
        output._exchange = lambda a, b: False
        output.os.rename = _signalled(os.rename, ends)
    elif name.startswith("full-"):
        if name == "full-weights":
            writing.FolderWriter._put = _full  # type: ignore[method-assign,assignment]
        else:
            store_writing.write_facts = _full  # type: ignore[assignment]
    elif name == "limit":  # no file may be longer, so that true writes fail
        resource.setrlimit(resource.RLIMIT_FSIZE, (calls, calls))
    elif name == "no-links":
        grow.os.link = _full
    elif name == "no-exchange":
        output._exchange = lambda a, b: False
    elif name:
        raise AssertionError(point)


def _tvb(words: list[str], log: str, point: str, env: dict[str, str]) -> None:
    """The command, in a process of its own."""
    os.environ.update(env)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    _patch(point)
    from tvb_mergekit.cli import main

    main(words)


@dataclass
class Process:
    """One command."""

    process: Any
    log: Path
    started: float

    def end(self) -> tuple[int, str, float]:
        """Exit code (minus the signal), what it said, seconds."""
        self.process.join(120)
        assert self.process.exitcode is not None
        seconds = time.perf_counter() - self.started
        return self.process.exitcode, self.log.read_text(), seconds


@dataclass
class Place:
    """A folder of stores, the models, and the commands."""

    folder: Path
    base: Path
    models: list[Path]
    context: Any
    count: int = 0

    @property
    def store(self) -> Path:
        return self.folder / "s[1]"

    def start(self, *words: str | Path, point: str = "") -> Process:
        self.count += 1
        log = self.folder.parent / f"{self.folder.name}-{self.count}.log"
        env = {"TVB_MERGEKIT_CACHE": str(self.folder.parent / "cache"), "HF_HUB_OFFLINE": "1"}
        log.write_text("")
        listed = [str(word) for word in words]
        process = self.context.Process(target=_tvb, args=(listed, str(log), point, env))
        process.start()
        return Process(process, log, time.perf_counter())

    def tvb(self, *words: str | Path, point: str = "", rc: int = 0) -> str:
        code, said, _ = self.start(*words, point=point).end()
        assert code == rc, (code, said)
        assert "Traceback" not in said
        return said

    def add(self, index: int) -> list[str | Path]:
        return ["add", self.store, self.models[index], "--task", TASKS[index], "--quiet"]

    def build(self, *more: str) -> list[str | Path]:
        path = self.folder.parent / "recipe.yml"
        made = recipe("basis_ta", self.base, self.models[:3], basis="balanced", num_bases=2)
        path.write_text(yaml.safe_dump(made))
        return ["build", path, self.store, "--quiet", *more]

    def hidden(self) -> list[str]:
        """What lies beside the store, the lock that a kill may leave aside."""
        names = {entry.name for entry in self.folder.iterdir()}
        return sorted(names - {self.store.name, f".{self.store.name}.lock"})


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["test_kills", *(f"tvb_mergekit.{n}" for n in ("plugin.inputs", "grow", "inspection"))]
    )
    with pytest.MonkeyPatch.context() as patch:  # what the server imports, it finds by these
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")  # as `tvb` sets it, before the import
        forkserver.ensure_running()
    yield context


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    small = partial(tiny.llama, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    return tiny.family(tmp_path_factory.mktemp("family"), small, TASKS, scale=0.01)


@pytest.fixture
def place(
    tmp_path: Path, family: tuple[Path, list[Path]], server: Any, monkeypatch: pytest.MonkeyPatch
) -> Place:
    monkeypatch.setenv("TVB_MERGEKIT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "stores"
    folder.mkdir()
    return Place(folder, *family, server)


def contents(store: Path) -> dict[str, str]:
    """File -> hash; basis.json, which has times in it, aside."""
    return {
        str(file.relative_to(store)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(store.rglob("*"))
        if file.is_file() and file.name != "basis.json"
    }


def digests(store: Path) -> dict[str, str]:
    """The same with basis.json."""
    facts = hashlib.sha256((store / "basis.json").read_bytes()).hexdigest()
    return contents(store) | {"basis.json": facts}


@dataclass
class Before:
    """A store, what it is before and after an addition, and how long that takes."""

    saved: Path
    old: dict[str, str]
    new: dict[str, str]
    seconds: float

    def restore(self, place: Place) -> None:
        shutil.rmtree(place.folder)
        place.folder.mkdir()
        shutil.copytree(self.saved, place.store)


def prepare(place: Place, budget: int, point: str = "") -> Before:
    """`law` is added: within the budget of 3, or at the budget of 2."""
    place.tvb(*place.build())
    saved = place.folder.parent / "saved"
    shutil.copytree(place.store, saved)
    before = Before(saved, digests(saved), {}, 0.0)
    for _ in range(2):
        before.restore(place)
        code, said, before.seconds = place.start(*adding(place, budget), point=point).end()
        assert code == 0, said
    before.new = contents(place.store)
    return before


def adding(place: Place, budget: int) -> list[str | Path]:
    return [*place.add(3), "--budget", str(budget)]


def check_after_add(place: Place, before: Before, budget: int) -> str:
    """The store is the old or the new one, and the next command finishes the matter."""
    tasks = tvb.load(place.store).tasks
    if tasks == TASKS[:3]:
        found = "old"
        assert digests(place.store) == before.old
    else:
        found = "new"
        assert tasks == TASKS[:4]
        assert contents(place.store) == before.new
    shown = place.tvb("inspect", place.store)
    assert ("law" in shown) == (found == "new")
    assert "files as they were written" in place.tvb("check", place.store)
    if found == "old":
        place.tvb(*adding(place, budget))
        assert contents(place.store) == before.new
    else:
        place.tvb(*place.add(4))
        assert tvb.load(place.store).tasks == TASKS
    assert place.hidden() == []
    return found


def kill_add(place: Place, budget: int, times: int, seed: int) -> None:
    before = prepare(place, budget, "slow")
    draw = random.Random(seed)
    seen = {"old": 0, "new": 0, "ended": 0}
    for _ in range(times):
        before.restore(place)
        running = place.start(*adding(place, budget), point="slow")
        time.sleep(draw.uniform(0, 1.05 * before.seconds))
        running.process.kill()
        code, said, _ = running.end()
        assert code in (-signal.SIGKILL, 0), said
        seen["ended"] += code == 0
        seen[check_after_add(place, before, budget)] += 1
    print(f"budget {budget}: {seen} of {times}; {before.seconds:.2f} s")


@pytest.mark.parametrize("budget", [2, 3])
def test_add_is_killed_at_any_moment(place: Place, budget: int) -> None:
    kill_add(place, budget, EACH, seed=budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2, 3])
def test_add_is_killed_at_many_moments(place: Place, budget: int) -> None:
    kill_add(place, budget, 10 * EACH, seed=10 + budget)


def test_add_is_killed_at_the_worst_moments(place: Place) -> None:
    before = prepare(place, 2)
    for point, expected in (
        ("put:1", "old"),
        ("put:20", "old"),
        ("tensors", "old"),
        ("facts", "old"),
        ("exchange:1", "old"),
        ("exchange:2", "new"),
        ("tidying", "new"),
        ("renames:2", "new"),
    ):
        before.restore(place)
        place.tvb(*adding(place, 2), point=point, rc=-signal.SIGKILL)
        assert check_after_add(place, before, 2) == expected, point


def test_add_is_killed_between_two_renames(place: Place) -> None:
    """Where the system cannot exchange two names."""
    before = prepare(place, 2)
    before.restore(place)
    place.tvb(*adding(place, 2), point="renames:1", rc=-signal.SIGKILL)
    assert not place.store.exists()
    said = place.tvb("inspect", place.store, rc=1)
    assert said.count("\n") == 1
    place.tvb(*adding(place, 2), "--base", place.base)
    assert contents(place.store) == before.new
    assert place.hidden() == []


def test_the_first_add_is_killed(place: Place) -> None:
    first = [*place.add(0), "--base", place.base, "--budget", "2"]
    for point, there in (("put:3", False), ("rename:1", False), ("rename:2", True)):
        place.tvb(*first, point=point, rc=-signal.SIGKILL)
        assert place.store.exists() == there
        said = place.tvb("inspect", place.store, rc=0 if there else 1)
        assert there or said.count("\n") == 1
    assert tvb.load(place.store).tasks == TASKS[:1]
    place.tvb(*place.add(1))
    assert place.hidden() == []


def check_after_build(place: Place, whole: dict[str, str], resume: bool) -> str:
    """The store is there whole, or not at all, and the next build makes it."""
    if place.store.exists():
        found = "there"
        assert tvb.load(place.store).tasks == TASKS[:3]
        place.tvb("inspect", place.store)
        place.tvb(*place.add(3))
        assert place.hidden() == []
        return found
    found = "partial" if place.hidden() else "none"
    said = place.tvb("inspect", place.store, rc=1)
    assert said.count("\n") == 1 and ("unfinished build" in said) == (found == "partial")
    place.tvb(*place.build(*(["--resume"] if resume else [])))
    assert contents(place.store) == whole
    assert place.hidden() == []
    return found


def kill_build(place: Place, times: int, seed: int) -> None:
    for _ in range(2):
        shutil.rmtree(place.folder)
        place.folder.mkdir()
        code, said, seconds = place.start(*place.build(), point="slow").end()
        assert code == 0, said
    whole, draw = contents(place.store), random.Random(seed)
    seen = {"there": 0, "partial": 0, "none": 0}
    for number in range(times):
        shutil.rmtree(place.folder)
        place.folder.mkdir()
        running = place.start(*place.build(), point="slow")
        time.sleep(draw.uniform(0, 1.05 * seconds))
        running.process.kill()
        code, said, _ = running.end()
        assert code in (-signal.SIGKILL, 0), said
        seen[check_after_build(place, whole, resume=number % 2 == 0)] += 1
    print(f"build: {seen} of {times}; {seconds:.2f} s")


def test_build_is_killed_at_any_moment(place: Place) -> None:
    kill_build(place, EACH, seed=0)


@pytest.mark.slow
def test_build_is_killed_at_many_moments(place: Place) -> None:
    kill_build(place, 10 * EACH, seed=1)


@pytest.mark.parametrize("resume", [False, True])
def test_build_is_killed_at_the_worst_moments(place: Place, resume: bool) -> None:
    place.tvb(*place.build())
    whole = contents(place.store)
    for point, expected in (
        ("mkdir", "partial"),
        ("state", "partial"),
        ("put:3", "partial"),
        ("journal:1", "partial"),
        ("journal:7", "partial"),
        ("tensors", "partial"),
        ("facts", "partial"),
        ("rename:1", "partial"),
        ("rename:2", "there"),
    ):
        if point == "mkdir" and resume:
            continue  # there is nothing to go on with: refused, with the remedy
        shutil.rmtree(place.folder)
        place.folder.mkdir()
        place.tvb(*place.build(), point=point, rc=-signal.SIGKILL)
        assert check_after_build(place, whole, resume) == expected, point


def test_build_is_killed_again_and_again(place: Place) -> None:
    place.tvb(*place.build())
    whole = contents(place.store)
    shutil.rmtree(place.store)
    for calls in (1, 2, 1, 3, 5):
        place.tvb(*place.build("--resume"), point=f"journal:{calls}", rc=-signal.SIGKILL)
    place.tvb(*place.build("--resume"))
    assert contents(place.store) == whole
    assert place.hidden() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["add", "build"])
def test_signals_end_a_command_in_one_line(place: Place, command: str, number: int) -> None:
    if command == "add":
        place.tvb(*place.build())
        old = digests(place.store)
    words = adding(place, 2) if command == "add" else place.build()
    running = place.start(*words, point="slow")
    pattern = ".*.adding-*/basis-000/*" if command == "add" else "*.partial/basis-000/*"
    while not list(place.folder.glob(pattern)):
        time.sleep(0.001)
        assert running.process.is_alive()
    os.kill(running.process.pid, number)
    code, said, _ = running.end()
    assert code == 128 + number, said
    assert said.count("\n") <= 1 and "Traceback" not in said, said
    if command == "add":
        assert digests(place.store) == old
        assert place.hidden() == []
    else:
        assert place.hidden() == [f"{place.store.name}.partial"]
        place.tvb(*place.build("--resume"))
        assert place.hidden() == []


# Two at once


def test_two_additions_at_once(place: Place) -> None:
    place.tvb(*place.build())
    both = [place.start(*place.add(index), point="slow") for index in (3, 4)]
    ended = [process.end() for process in both]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert set(tvb.load(place.store).tasks) == set(TASKS)
    assert place.hidden() == []
    assert sum("waiting for it" in said for _, said, _ in ended) == 1, ended


def test_one_task_twice_at_once(place: Place) -> None:
    place.tvb(*place.build())
    both = [place.start(*place.add(3), point="slow") for _ in range(2)]
    ended = sorted(process.end()[:2] for process in both)
    assert [code for code, _ in ended] == [0, 1], ended
    assert "'law' is in" in ended[1][1]
    assert "Traceback" not in ended[1][1]
    assert tvb.load(place.store).tasks == TASKS[:4]
    assert place.hidden() == []


def test_two_first_additions_at_once(place: Place) -> None:
    more = ["--base", place.base, "--budget", "2"]
    both = [place.start(*place.add(index), *more, point="slow") for index in (0, 1)]
    assert [process.end()[0] for process in both] == [0, 0]
    assert set(tvb.load(place.store).tasks) == set(TASKS[:2])


def test_add_while_build_runs(place: Place) -> None:
    building = place.start(*place.build(), point="slow")
    while not list(place.folder.glob("*.partial")):
        time.sleep(0.001)
    early = place.tvb(*place.add(3), rc=1)  # there is no store yet
    assert early.count("\n") == 1 and "no such store" in early
    adding = place.start(*place.add(3), "--base", place.base, "--budget", "2")
    assert building.end()[0] == 0
    code, said, _ = adding.end()
    assert code == 0, said
    assert tvb.load(place.store).tasks == TASKS[:4]
    assert place.hidden() == []


# A disk that is full, and file systems that cannot do this or that


def test_no_room_for_what_add_writes(place: Place) -> None:
    place.tvb(*place.build())
    old = digests(place.store)
    said = place.tvb(*adding(place, 2), point="limit:10000", rc=1)
    assert said.count("\n") == 1 and "cannot add to" in said and "as it was" in said, said
    assert "File too large; allow larger files (`ulimit -f unlimited`) or" in said
    assert digests(place.store) == old
    assert place.hidden() == []


def test_a_limit_on_the_size_of_files(place: Place) -> None:
    allow = "File too large; {}: allow larger files (`ulimit -f unlimited`) or"
    said = place.tvb(*place.build(), point="limit:10000", rc=1)
    assert said.startswith(f"Error: cannot write {place.store}: ") and said.count("\n") == 1
    assert allow.format(f"{place.store}.partial keeps what was finished") in said
    place.tvb(*place.build("--resume"))
    assert place.hidden() == []
    whole = digests(place.store)
    out = place.folder / "out"
    for words in (["merge", place.folder.parent / "recipe.yml", out],
                  ["export", place.store, out, "--task", TASKS[0]]):  # fmt: skip
        said = place.tvb(*words, "--quiet", point="limit:10000", rc=1)
        assert said.startswith(f"Error: cannot write {out}: ") and said.count("\n") == 1
        assert allow.format("nothing was left behind") in said
        assert place.hidden() == [] and digests(place.store) == whole


@pytest.mark.parametrize("what", ["weights", "facts"])
def test_a_full_disk(place: Place, what: str) -> None:
    place.tvb(*place.build())
    old = digests(place.store)
    said = place.tvb(*adding(place, 2), point=f"full-{what}", rc=1)
    assert said.count("\n") == 1 and "No space left" in said, said
    assert digests(place.store) == old
    assert place.hidden() == []


def test_without_hard_links(place: Place) -> None:
    before = prepare(place, 3)
    before.restore(place)
    place.tvb(*adding(place, 3), point="no-links")
    assert contents(place.store) == before.new


def test_without_exchange(place: Place) -> None:
    before = prepare(place, 2)
    before.restore(place)
    place.tvb(*adding(place, 2), point="no-exchange")
    assert contents(place.store) == before.new
    assert place.hidden() == []
    place.tvb(*place.add(4), point="no-exchange")
    assert tvb.load(place.store).tasks == TASKS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_renames(place: Place, number: int) -> None:
    before = prepare(place, 2)
    before.restore(place)
    place.tvb(*adding(place, 2), point=f"renames-{int(number)}", rc=128 + number)
    assert digests(place.store) == before.old
    assert place.hidden() == []


def test_a_parent_that_cannot_be_written_to(place: Place) -> None:
    words = [*place.add(3), "--base", place.base, "--budget", "2"]
    words[1] = "/sys/store"
    said = place.tvb(*words, rc=1)
    assert said.count("\n") == 1 and "cannot write beside /sys/store" in said, said


def test_names_with_wildcards_are_only_names(place: Place) -> None:
    """`.s*.adding-*` of a store `s*` is not that of the store `s1`."""
    other = place.folder / ".s1.adding-abcdefgh"
    own = place.folder / ".s[1].adding-abcdefgh"
    place.tvb(*place.build())
    other.mkdir()
    own.mkdir()
    place.tvb(*place.add(3))
    assert other.exists() and not own.exists()
