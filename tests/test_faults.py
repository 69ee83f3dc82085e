"""Faults: how the commands are run with a user's mistakes, and how what they did is judged.

The mistakes are in `test_faults_recipe`, `test_faults_files` and `test_faults_output`.
Importing mergekit takes seconds, so one driver process runs the real commands' `main` with many
argument lists, as the console script does, and reports exit code, stdout and stderr of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import family

from tvb_mergekit.refusals import MergeRefused, refusing

DRIVER = """
import contextlib, ctypes, errno, importlib, json, os, pkgutil, resource, shutil, signal, sys
import traceback
from types import SimpleNamespace
from unittest import mock

MODULES = {"mergekit-yaml": "run_yaml", "mergekit-multi": "multimerge",
           "mergekit-pytorch": "merge_raw_pytorch"}

def disk(free):
    return mock.patch("shutil.disk_usage", lambda path: SimpleNamespace(free=free, total=free))

def on_call(number, name, act):
    '''Let `act()` happen in place of the `number`-th call of the function `name`.'''
    path, _, attribute = name.rpartition(".")
    original, calls = getattr(pkgutil.resolve_name(path), attribute), []
    def function(*args, **kwargs):
        calls.append(1)
        return act() if len(calls) == number else original(*args, **kwargs)
    return mock.patch(name, function)

def fail(error):
    def act():
        raise error
    return act

@contextlib.contextmanager
def small_files(size):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)

@contextlib.contextmanager
def unprivileged():
    '''Permissions count for root, too: without CAP_DAC_OVERRIDE and _READ_SEARCH.'''
    libc = ctypes.CDLL(None, use_errno=True)
    header, old = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, old) == 0
    assert libc.capset(header, (ctypes.c_uint32 * 6)(old[0] & ~6, *old[1:])) == 0
    try:
        yield
    finally:
        libc.capset(header, old)

@contextlib.contextmanager
def full_cache():
    from safetensors import SafetensorError
    error = SafetensorError("Error while serializing: I/O error: No space left on device")
    with mock.patch.dict(os.environ, TVB_MERGEKIT_CACHE="cache"):
        with mock.patch("tvb_mergekit.cache.save_file", side_effect=error):
            yield

full = fail(OSError(errno.ENOSPC, "No space left on device"))

def send(number):
    return lambda: os.kill(os.getpid(), number)

def run(job):
    main = importlib.import_module("mergekit.scripts." + MODULES[job["command"]]).main
    os.chdir(job["cwd"])
    sys.argv = [job["command"], *job["args"]]
    with eval(job["patch"]) if job["patch"] else contextlib.nullcontext():
        try:
            sys.exit(main())
        except SystemExit as end:
            return end.code or 0
        except BaseException:
            traceback.print_exc()
            return 1

def captured(job):
    saved = os.dup(1), os.dup(2)
    with open("stdout", "wb+") as out, open("stderr", "wb+") as err:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        try:
            code = run(job)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os.dup2(saved[0], 1), os.dup2(saved[1], 2)
            os.close(saved[0]), os.close(saved[1])
            os.chdir(job["home"])
        texts = [file.seek(0) or file.read().decode(errors="replace") for file in (out, err)]
    return {"code": code, "stdout": texts[0], "stderr": texts[1]}

jobs = json.load(open(sys.argv[1]))
if len(jobs) == 1 and jobs[0]["alone"]:
    sys.exit(run(jobs[0]))
with open(sys.argv[2], "w") as results:
    for job in jobs:
        results.write(json.dumps(captured(job)) + "\\n")
        results.flush()
"""


@dataclass(frozen=True)
class Case:
    """One command line as a user types it, in a folder that holds base, a, b, c and recipe.yml."""

    recipe: Any = None  # a mapping, or the YAML text itself; None: `recipe()`
    wants: tuple[str, ...] = ()  # regular expressions found in the error line (ok: in stderr)
    setup: Callable[[Path], object] = lambda folder: None
    args: tuple[str, ...] = ("--quiet",)
    out: str = "out"
    patch: str = ""  # an expression in the driver that gives a context manager
    command: str = "mergekit-yaml"
    ok: bool = False  # the merge succeeds
    leaves: str = ""  # what it may leave beside OUT
    foreign: bool = False  # no recipe of ours: mergekit's own complaint, a traceback, will do


@dataclass(frozen=True)
class Outcome:
    """What a run gave, and what it did to the case's folder."""

    code: int
    stdout: str
    stderr: str
    folder: Path
    changed: dict[str, str]  # path -> added, removed or changed


def multi(*documents: Mapping[str, Any]) -> str:
    return yaml.safe_dump_all(documents)


def recipe(
    parameters: Mapping[str, Any] | None = None,
    *,
    method: str = "basis_ta",
    models: Sequence[Any] = ("./a", "./b", "./c"),
    first: Mapping[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A valid recipe without training, with changes; `first` is added to the first model."""
    entries = [{"model": model} if isinstance(model, str) else dict(model) for model in models]
    entries[0] |= dict(first or {})
    defaults = {"basis": "balanced", "num_bases": 2}
    given = dict(parameters or {})
    if {"basis", "basis_ratio", "energy"} & set(given):
        defaults = {}
    result = {"merge_method": method, "base_model": "./base", "models": entries}
    result |= {"parameters": defaults | given, **top}
    return {key: value for key, value in result.items() if value is not ...}


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below `folder` with its contents' hash; links are not followed."""
    found = {}
    for path in folder.rglob("*"):
        content = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = content
    return found


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    words = dict.fromkeys(after.keys() - before.keys(), "added")
    words |= dict.fromkeys(before.keys() - after.keys(), "removed")
    common = before.keys() & after.keys()
    return words | {path: "changed" for path in common if before[path] != after[path]}


def prepare(folder: Path, models: Path, case: Case) -> dict[str, Any]:
    """Make the case's folder (hard links: setups replace files, never write into them)."""
    shutil.copytree(models, folder, copy_function=os.link)
    written = recipe() if case.recipe is None else case.recipe
    text = written if isinstance(written, str) else yaml.safe_dump(written, allow_unicode=True)
    (folder / "recipe.yml").write_text(text, encoding="utf-8")
    case.setup(folder)
    out = ["--out-path", case.out, "-I", "between"] if "multi" in case.command else [case.out]
    return {
        "command": case.command,
        "args": ["recipe.yml", *out, *case.args],
        "cwd": str(folder),
        "patch": case.patch,
        "alone": False,
    }


def environment() -> dict[str, str]:
    return dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TVB_MERGEKIT_CACHE="off")


def start(home: Path, jobs: Sequence[Mapping[str, Any]]) -> subprocess.Popen[str]:
    home.mkdir()
    (home / "jobs.json").write_text(json.dumps([{**job, "home": str(home)} for job in jobs]))
    command = [sys.executable, "-c", DRIVER, "jobs.json", "results.jsonl"]
    return subprocess.Popen(
        command,
        cwd=home,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_cases(root: Path, models: Path, cases: Mapping[str, Case]) -> dict[str, Outcome]:
    """All cases, one after the other, in one driver process."""
    (root / "cases").mkdir()
    folders = {name: root / "cases" / f"{i:03}" for i, name in enumerate(cases)}
    jobs = [prepare(folders[name], models, case) for name, case in cases.items()]
    before = {name: snapshot(folder) for name, folder in folders.items()}
    driver = start(root / "driver", jobs)
    _, errors = driver.communicate(timeout=600)
    lines = (root / "driver" / "results.jsonl").read_text().splitlines()
    assert len(lines) == len(cases), f"the driver died in case {len(lines)}: {errors}"
    assert not {p.name for p in (root / "cases").iterdir()} - {f.name for f in folders.values()}
    results = {}
    for (name, folder), line in zip(folders.items(), lines, strict=True):
        changed = differences(before[name], snapshot(folder))
        results[name] = Outcome(**json.loads(line), folder=folder, changed=changed)
    return results


def check_no_traceback(outcome: Outcome) -> None:
    if "Traceback" in outcome.stdout + outcome.stderr:
        pytest.fail(f"a traceback: {' | '.join(outcome.stderr.splitlines()[-4:])}", pytrace=False)


def check_refused(outcome: Outcome, case: Case) -> None:
    """One line `Error: ...` at the end of stderr that says what is wanted, and nothing left."""
    assert outcome.code not in (0, None), f"it was not refused: {outcome.changed}"
    said = outcome.stderr
    if not case.foreign:
        check_no_traceback(outcome)
        lines = [line for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("Error: ")]
        assert len(errors) == 1 and lines[-1] == errors[0], said
        said = errors[0]
    for want in case.wants:
        assert re.search(want, said), f"{want!r} is not in: {said[-3000:]}"
    assert not {
        p: v for p, v in outcome.changed.items() if not case.leaves or not p.startswith(case.leaves)
    }


def check_merged(outcome: Outcome, case: Case) -> None:
    """Exit code 0, a whole model, and nothing changed outside OUT."""
    check_no_traceback(outcome)
    assert outcome.code == 0, outcome.stderr[-3000:]
    for want in case.wants:
        assert re.search(want, outcome.stderr), outcome.stderr
    if "--quiet" in case.args and not case.wants and case.command == "mergekit-yaml":
        said = (outcome.stdout + outcome.stderr).splitlines()
        theirs = ("[transformers] ", "WARNING:transformers.")  # the second where CI is set
        assert not [line for line in said if not line.startswith(theirs)]
    where = Path(os.path.realpath(outcome.folder / case.out))
    changed = [outcome.folder / path for path in outcome.changed]
    allowed = {where, outcome.folder / (case.leaves or case.out)}
    assert not [path for path in changed if not allowed & {path, *path.parents}]
    assert "removed" not in outcome.changed.values()
    assert (where / "basis" / "basis.json").is_file()
    for file in where.glob("*.safetensors"):
        assert all(t.isfinite().all() for t in load_file(file).values())


def check(outcome: Outcome, case: Case) -> None:
    (check_merged if case.ok else check_refused)(outcome, case)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, a, b, c; hard-linked into every case."""
    folder = tmp_path_factory.mktemp("models")
    family(folder, tasks=("a", "b", "c"))
    return folder


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_models: Path
) -> dict[str, Outcome]:
    """What the cases of the requesting module did: those that this session asks for."""
    items = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    cases = {name: case for name, case in request.module.CASES.items() if name in names}
    return run_cases(tmp_path_factory.mktemp("cases"), tiny_models, cases)


def alone(folder: Path, models: Path, case: Case) -> Outcome:
    """One case in a process of its own, which may kill itself."""
    job = prepare(folder / "work", models, case) | {"alone": True}
    before = snapshot(folder / "work")
    process = start(folder / "driver", [job])
    stdout, stderr = process.communicate(timeout=300)
    changed = differences(before, snapshot(folder / "work"))
    return Outcome(process.returncode, stdout, stderr, folder / "work", changed)


def console_script(outcome: Outcome, *args: str) -> Outcome:
    """The installed command in the folder of an outcome, before it or again."""
    before = snapshot(outcome.folder)
    command = [str(Path(sys.executable).parent / "mergekit-yaml"), "recipe.yml", *args]
    done = subprocess.run(
        command,
        cwd=outcome.folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    changed = differences(before, snapshot(outcome.folder))
    return Outcome(done.returncode, done.stdout, done.stderr, outcome.folder, changed)


def test_console_script_refuses(tmp_path: Path, tiny_models: Path) -> None:
    case = Case(recipe({"lamda": 1}), ("`lamda`", r"`lambda`\?"))
    prepare(tmp_path / "work", tiny_models, case)
    outcome = console_script(Outcome(0, "", "", tmp_path / "work", {}), "out")
    assert (outcome.code, outcome.stdout) == (1, "")
    check_refused(outcome, case)


def test_a_file_that_cannot_be_read_is_no_full_disk() -> None:
    error = SafetensorError("Error while deserializing header: incomplete metadata")
    with pytest.raises(MergeRefused, match="deserializing header") as raised, refusing():
        raise error
    assert "free some disk" not in str(raised.value)
