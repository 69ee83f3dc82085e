"""Killed, interrupted or out of disk at any moment, a command leaves the store of before or after.

A moment is before a change of a file or folder, counted in a first run: `slow` takes all of them.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commands import contents, recipe, write

import tvb_mergekit as tvb
from tvb_mergekit.store import is_store
from tvb_mergekit.store.store import read_store

if sys.platform == "win32":
    pytest.skip("needs fork and SIGKILL", allow_module_level=True)

from processes import FULL, INTERRUPT, KILL, TERMINATE, Ended, Running, on_call, on_change, run

TASKS = ["math", "code", "chat", "law", "poems"]


@dataclass(frozen=True)
class Command:
    """A command line, `{}` standing for the folder of the models, and what it works on.

    `start` is the store before, one of the fixture `models`. `then` works after it, and before.
    """

    words: str
    start: str = ""
    then: str = "tvb add s[1] {}/poems --task poems --quiet"
    target: str = "s[1]"


COMMANDS = {
    "build of bases": Command("tvb build {}/bases.yml s[1] --quiet"),
    "build": Command("tvb build {}/models.yml s[1] --quiet"),
    "first add": Command("tvb add s[1] {}/law --task law --quiet --base {}/base"),
    "add": Command("tvb add s[1] {}/law --task law --quiet", "models"),
    "add a sample": Command("tvb add s[1] {}/law --task law --quiet", "samples"),
    "add to a full store": Command("tvb add s[1] {}/law --task law --quiet --budget 2", "bases"),
    "remove": Command("tvb remove s[1] --task math", "models"),
    "undo": Command("tvb undo s[1]", "models"),
    "export": Command("tvb export {}/models out --task math --quiet", target="out", then=""),
    "merge": Command("tvb merge {}/bases.yml out --quiet", target="out", then=""),
}
CHANGES = ("add", "add a sample", "add to a full store", "remove", "undo")


@dataclass
class Place:
    """A folder in which commands run, beside one of models."""

    models: Path
    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "s[1]"

    def start(self, words: str, fault: Callable[[], object] | None = None) -> Running:
        return Running(words.format(*[self.models] * 2).split(), self.folder, fault)

    def run(self, words: str, fault: Callable[[], object] | None = None, code: int = 0) -> Ended:
        ended = self.start(words, fault).wait()
        assert ended.code == code and "Traceback" not in ended.err, ended
        return ended

    def reset(self, command: Command) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if command.start:
            shutil.copytree(self.models / command.start, self.store)

    def files(self) -> dict[str, bytes]:
        """All files, except the lock that stays in a store."""
        return {n: data for n, data in contents(self.folder).items() if n != "s[1]/.lock"}

    def state(self, command: Command) -> dict[str, bytes]:
        """Everything that counts: facts without times, and each file that they name."""
        target = self.folder / command.target
        if not is_store(target):
            assert command.target != "s[1]" or not command.start
            found = contents(target) if (target / "config.json").exists() else {}
            return {name: data for name, data in found.items() if name != "basis/basis.json"}
        tvb.load(target)
        facts = read_store(target)
        told = facts.model_dump_json(exclude={"previous", "seconds"})
        # a later state may have a higher number
        told = re.sub(r"-\d+(/|\.safetensors)", r"\1", told)
        held = {re.sub(r"-\d+", "", name): (target / name).read_bytes() for name in facts.held}
        return {**held, "store.json": re.sub(r'"xxh3_128":"\w+"', "", told).encode()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    small = partial(tiny.llama, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    bf16 = (torch.bfloat16,)
    base, listed = tiny.family(folder, small, TASKS, scale=0.01, dtypes=bf16)
    write(recipe("basis_ta", base, listed[:3], basis="balanced", num_bases=2), folder / "bases")
    for name in ("models", "samples"):
        write(recipe("basis_ta", base, listed[:2]), folder / name)
    for name, more in {"bases": [], "models": [], "samples": ["--keep", "0.1"]}.items():
        ended = run(["tvb", "build", f"{name}.yml", name, *more, "--quiet"], folder)
        assert ended.code == 0, ended
    for name in ("models", "samples"):  # a state before, which changes replace
        words = ["tvb", "add", name, listed[2], "--task", "chat", "--quiet"]
        assert run(words, folder).code == 0
    return folder


@pytest.fixture
def place(models: Path, tmp_path: Path) -> Place:
    (tmp_path / "work").mkdir()
    return Place(models, tmp_path / "work")


Course = tuple[dict[str, bytes], dict[str, bytes], list[str]]


@pytest.fixture(scope="module")
def course_of(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Course]:
    """Name of a command -> the states before and after it, and its changes, if nothing happens."""

    @cache
    def course(name: str) -> Course:
        command, place = COMMANDS[name], Place(models, tmp_path_factory.mktemp("course") / "work")
        place.reset(command)
        before, log = place.state(command), place.folder.parent / "log"
        place.run(command.words, partial(on_change, place.folder, dict, 0, log))
        after = place.state(command)
        assert after and after != before
        return before, after, log.read_text().splitlines()

    return course


def moments(changes: list[str], count: int) -> list[int]:
    """`count` numbers of changes, evenly; of many alike a few."""
    few = [n for n, change in enumerate(changes, 1) if changes[n - 4 : n - 1] != [change] * 3]
    return sorted({few[int((i + 0.5) * len(few) / count)] for i in range(count)})


def check_left(place: Place, name: str, course: Course, told: object) -> bool:
    """One of the two states is there, and the next change works; whether it is that of after."""
    command, found, (before, after, _) = COMMANDS[name], place.state(COMMANDS[name]), course
    assert found in (before, after), told
    if found == before and not command.start:
        target = place.folder / command.target
        if target.exists():  # of a build: what it holds is said
            said = place.run(f"tvb inspect {command.target}", code=1).err
            assert "is not a store" in said, told
            if {each.name for each in target.iterdir()} > {".lock"}:
                said = place.run(command.words, code=1).err
                assert "already holds" in said, told
            shutil.rmtree(target)
        place.run(command.words)
    elif command.then:
        place.run(command.then)
        assert "poems" in tvb.load(place.store).tasks, told
        place.run("tvb undo s[1]")
    if command.then:
        place.run("tvb inspect s[1]")  # with the checksums of all files
    return found == after


EVERY = [pytest.param(name, True, marks=pytest.mark.slow) for name in COMMANDS]


@pytest.mark.parametrize(
    ("name", "everywhere"), [*((name, False) for name in (*CHANGES, "build")), *EVERY]
)
def test_killed(name: str, everywhere: bool, place: Place, course_of: Any) -> None:
    """At every moment and after the last; or around the one rename that counts."""
    course, seen = course_of(name), []
    changes = course[2]
    numbers = moments(changes, len(changes))
    if not everywhere:
        *_, rename = [n for n, line in enumerate(changes, 1) if line.startswith("os.rename")]
        numbers = [rename, rename + 1]
    for number in numbers:
        place.reset(COMMANDS[name])
        fault = partial(on_change, place.folder, KILL, number)
        assert place.start(COMMANDS[name].words, fault).wait().code == -9
        seen.append(check_left(place, name, course, (number, changes[number - 1])))
    assert seen == sorted(seen)
    assert {*seen} == ({False, True} if name in CHANGES or "build" in name else {False, *seen})


ENDS = {"full": (FULL, 1), "interrupted": (INTERRUPT, 130), "terminated": (TERMINATE, 143)}
FEW = [("add", "full", 2), ("build", "interrupted", 1), ("add to a full store", "terminated", 1)]


@pytest.mark.parametrize(("name", "act", "count"), FEW)
def test_ended(name, act, count, place, course_of):
    """By a full disk or a signal: one line, and no file more than before."""
    command, course, (what, code) = COMMANDS[name], course_of(name), ENDS[act]
    for number in moments(course[2], count):
        place.reset(command)
        before = place.files()
        ended = place.start(command.words, partial(on_change, place.folder, what, number)).wait()
        told = (number, course[2][number - 1], ended)
        lines = ended.err.strip().splitlines()
        assert ended.code in (0, code) and len(lines) <= 1 and "Traceback" not in ended.err, told
        assert ended.code or act == "full", told  # a file that need not be deleted
        assert act != "full" or not lines or "No space left" in lines[0], told
        if ended.code == 0 and "the tokenizer could not be copied" in ended.err:  # mergekit's words
            continue
        if place.state(command) == course[0]:
            assert place.files() == before, told
        check_left(place, name, course, told)


# Two at once


def hold(pipes: Path) -> None:
    """Tell the other command that the lock is held, and go on when it waits for the lock."""
    (pipes / "held").write_bytes(b"")
    (pipes / "asked").read_bytes()


def ask(pipes: Path) -> None:
    """Begin when the lock is held; tell the other command after the first try to lock."""
    (pipes / "held").read_bytes()
    asked = partial((pipes / "asked").write_bytes, b"")
    on_call("fcntl.flock", asked, 2)


@pytest.mark.parametrize(("second", "codes"), [("law", [0, 1]), ("poems", [0, 0])])
def test_two_additions_at_once(second: str, codes: list[int], place: Place) -> None:
    """The second waits, and both are there, unless they have one name."""
    place.reset(COMMANDS["add"])
    pipes, words = place.folder.parent, "tvb add s[1] {{}}/{0} --task {0} --quiet"
    for name in ("held", "asked"):
        os.mkfifo(pipes / name)
    holds = partial(on_change, place.store, partial(hold, pipes), 2)  # the first is the lock's file
    running = [place.start(words.format("law"), holds)]
    running.append(place.start(words.format(second), partial(ask, pipes)))
    ended = [each.wait() for each in running]
    assert [each.code for each in ended] == codes and "Traceback" not in str(ended), ended
    assert ("'law' is in" in ended[1].err) == (second == "law")
    assert {*tvb.load(place.store).tasks} == {*TASKS[:4], second}
    place.run("tvb inspect s[1]")
