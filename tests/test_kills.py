"""Killed, interrupted or out of disk at any moment, a command leaves the old folder or the new one.

A moment is before a change of a file or folder, counted in a first run: `slow` takes all of them.
"""

import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import tiny
import yaml
from commands import contents, recipe

import tvb_mergekit as tvb

if sys.platform == "win32":
    pytest.skip("needs fork and SIGKILL", allow_module_level=True)

from processes import FULL, INTERRUPT, KILL, TERMINATE, Ended, Running, on_change, run, small_files

TASKS = ["math", "code", "chat", "law", "poems"]


@dataclass(frozen=True)
class Command:
    """A command line, `{}` standing for the folder of the models, and what it works on."""

    words: str
    target: str = "s[1]"
    start: str = ""  # what the target is before: a `store` of three tasks, or their `vectors`
    then: str = ""  # works once the target is there, and tidies up


ADD = "tvb add s[1] {}/law --task law --quiet --budget"
NEXT = "tvb add s[1] {}/poems --task poems --quiet"
COMMANDS = {
    "build": Command("tvb build {}/recipe.yml s[1] --quiet", then=NEXT),
    "add to a full store": Command(f"{ADD} 2", start="store", then=NEXT),
    "add below the budget": Command(f"{ADD} 3", start="store", then=NEXT),
    "first add": Command(f"{ADD} 2 --base {{}}/base", then=NEXT),
    "build of samples": Command("tvb build {}/vectors.yml s[1] --keep 0.1 --quiet", then=NEXT),
    "add a sample": Command("tvb add s[1] {}/law --task law --quiet", start="vectors", then=NEXT),
    "export": Command("tvb export {}/store out --task math --quiet", "out"),
    "merge": Command("tvb merge {}/recipe.yml out --quiet", "out"),
    "mergekit-yaml": Command("mergekit-yaml {}/recipe.yml out --quiet", "out"),
}
SMALL = ("first add", "build of samples", "add a sample")  # their files


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

    def refused(self, words: str, fault: Callable[[], object] | None = None) -> str:
        said = self.run(words, fault, 1).err
        assert said.startswith("Error: ") and said.count("\n") == 1
        return said

    def reset(self, command: Command) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if command.start:
            shutil.copytree(self.models / command.start, self.store)

    def hidden(self, target: str = "s[1]") -> list[str]:
        """The names next to the target, except a previous state and a lock that a kill leaves."""
        known = {target, f".{target}.lock", f"{target}.previous"}
        return sorted({p.name for p in self.folder.iterdir()} - known)


def timeless(found: dict[str, bytes]) -> dict[str, bytes]:
    """Without what holds times."""
    return {name: hashed for name, hashed in found.items() if Path(name).name != "basis.json"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    small = partial(tiny.llama, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    base, listed = tiny.family(folder, small, TASKS, scale=0.01)
    made = recipe("basis_ta", base, listed[:3], basis="balanced", num_bases=2)
    (folder / "recipe.yml").write_text(yaml.safe_dump(made))
    del made["parameters"]
    (folder / "vectors.yml").write_text(yaml.safe_dump(made))
    for words in (["recipe.yml", "store"], ["vectors.yml", "vectors", "--keep", "0.1"]):
        ended = run(["tvb", "build", *words, "--quiet"], folder)
        assert ended.code == 0, ended
    return folder


@pytest.fixture
def place(models: Path, tmp_path: Path) -> Place:
    (tmp_path / "work").mkdir()
    return Place(models, tmp_path / "work")


@dataclass
class Course:
    """What a command does when nothing happens to it."""

    before: dict[str, bytes]
    after: dict[str, bytes]
    changes: list[str]


@pytest.fixture(scope="module")
def course_of(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Course]:
    """Name of a command -> what it does."""

    @cache
    def course(name: str) -> Course:
        command, place = COMMANDS[name], Place(models, tmp_path_factory.mktemp("course") / "work")
        place.reset(command)
        before, log = contents(place.folder / command.target), place.folder.parent / "log"
        place.run(command.words, partial(on_change, place.folder, time.time, 0, log))
        assert place.hidden(command.target) == []
        after = timeless(contents(place.folder / command.target))
        return Course(before, after, log.read_text().splitlines())

    return course


def moments(changes: list[str], count: int, kinds: tuple[str, ...] = ("",)) -> list[int]:
    """`count` numbers of changes, evenly; of many alike a few."""
    few = [
        number
        for number, change in enumerate(changes, 1)
        if change.startswith(kinds) and changes[number - 4 : number - 1] != [change] * 3
    ]
    return sorted({few[int((i + 0.5) * len(few) / count)] for i in range(count)})


@pytest.mark.parametrize("count", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMMANDS)
def test_killed(
    name: str, count: int | None, place: Place, course_of: Callable[[str], Course]
) -> None:
    """At one moment or at all, and before the last rename, which counts."""
    command, course = COMMANDS[name], course_of(name)
    target = place.folder / command.target
    renames = [n for n, change in enumerate(course.changes, 1) if change.startswith("os.rename")]
    for number in {*moments(course.changes, count or len(course.changes)), *renames[-1:]}:
        place.reset(command)
        place.run(command.words, partial(on_change, place.folder, KILL, number), -9)
        told = course.changes[number - 1]
        if command.start and not target.exists():  # between the two renames
            assert "mv " in place.refused(f"tvb inspect {command.target}")
            (place.folder / f"{command.target}.new").rename(target)
        found = contents(target)
        if found != course.before:
            assert course.after.items() <= timeless(found).items(), told
            if command.then:
                place.run(command.then)
                assert place.hidden(command.target) == [], told
            continue
        place.run(command.words)
        assert timeless(contents(target)) == course.after, told
        assert not command.then or place.hidden(command.target) == [], told


ENDS = {"full": (FULL, 1), "interrupted": (INTERRUPT, 130), "terminated": (TERMINATE, 143)}
FEW = [*((name, "full", 1) for name in COMMANDS), ("build", "interrupted", 1)]
FEW += [("add below the budget", "terminated", 1), ("mergekit-yaml", "interrupted", 1)]
ALL = [pytest.param(n, act, 8, marks=pytest.mark.slow) for n in COMMANDS for act in ENDS]


@pytest.mark.parametrize(("name", "act", "count"), [*FEW, *ALL])
def test_ended(
    name: str, act: str, count: int, place: Place, course_of: Callable[[str], Course]
) -> None:
    """By a full disk or a signal before something is made: nothing is left."""
    command, course = COMMANDS[name], course_of(name)
    target = place.folder / command.target
    what, code = ENDS[act]
    if act == "interrupted" and "tvb" not in command.words:
        code = 1  # by click
    for number in moments(course.changes, count, ("open", "os.mkdir")):
        place.reset(command)
        ended = place.start(command.words, partial(on_change, place.folder, what, number)).wait()
        told, found = (course.changes[number - 1], ended), contents(target)
        if ended.code == 0:  # of the tokenizer mergekit says that it must be copied
            assert act == "full" and timeless(found).items() <= course.after.items(), told
            continue
        lines = ended.err.strip().splitlines()
        assert ended.code == code and len(lines) <= 1, told
        assert act != "full" or re.match("Error: .*No space left", lines[0]), told
        assert found == course.before, told
        assert place.hidden(command.target) == [], told


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in SMALL])
def test_a_limit_on_the_size_of_files(name: str, place: Place) -> None:
    """Real writes fail here, in the middle of a file of weights."""
    command = COMMANDS[name]
    place.reset(command)
    before = contents(place.folder / command.target)
    said = place.refused(command.words, partial(small_files, 10000))
    assert "File too large" in said
    assert contents(place.folder / command.target) == before
    assert "cannot write" in said and ("which is as it was" in said) == name.startswith("add")
    assert place.hidden(command.target) == []


# Two at once


@pytest.mark.parametrize(
    ("grows", "others", "codes", "tasks"),
    [
        (True, ("law", "law"), [0, 1], {*TASKS[:4]}),
        (False, ("math", "code"), [0, 0], {"math", "code"}),
    ],
)
def test_two_additions_at_once(grows, others, codes, tasks, place):
    slow = partial(on_change, place.folder, partial(time.sleep, 0.02), 0)
    if grows:
        place.reset(COMMANDS["add below the budget"])
    words = "tvb add s[1] {{}}/{0} --task {0} --base {{}}/base --budget 3 --quiet"
    both = [place.start(words.format(task), slow) for task in others]
    ended = [running.wait() for running in both]
    assert sorted(e.code for e in ended) == codes, ended
    assert set(tvb.load(place.store).tasks) == tasks
    assert sum("waiting for it" in e.err for e in ended) == 1, ended
    assert sum("'law' is in" in e.err for e in ended) == sum(codes)
    assert place.hidden() == []


def test_an_addition_while_a_build_runs(place: Place) -> None:
    slow = partial(on_change, place.folder, partial(time.sleep, 0.02), 0)
    building = place.start(COMMANDS["build"].words, slow)
    while not list(place.folder.glob("*.partial")):
        time.sleep(0.001)
    assert "no such store" in place.refused(NEXT)
    adding = place.start(f"{NEXT} --base {{}}/base --budget 2")
    assert [building.wait().code, adding.wait().code] == [0, 0]
    assert tvb.load(place.store).tasks == [*TASKS[:3], "poems"]
    assert place.hidden() == []
