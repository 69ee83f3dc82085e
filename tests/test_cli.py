"""The `tvb` command as strangers, impatient people and attackers use it."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import click
import processes
import pytest
import tiny
import torch
import yaml
from click.testing import CliRunner, Result
from commands import recipe, write
from processes import encoded_output
from safetensors.torch import save_file
from test_faults import snapshot

from tvb_mergekit import __version__
from tvb_mergekit.cli.commands import main
from tvb_mergekit.cli.merging import WAYS
from tvb_mergekit.store.facts import read_facts, write_facts
from tvb_mergekit.store.recipes import ALL_TASKS

TVB = Path(sys.executable).with_name("tvb")
WEIGHTS = "model.safetensors"
COMMANDS = "build inspect add undo remove export merge score learn tune".split()


def run(*words: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, [str(word) for word in words], prog_name="tvb")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert "Traceback" not in done.output
    assert done.exit_code == code, done.output
    return done


def refused(*words: object) -> str:
    """The one line of an error; nothing on standard output, and nothing written."""
    lock, before = {"store/.lock": ""}, snapshot(Path.cwd())
    done = run(*words, code=1)
    assert done.stdout == "" and snapshot(Path.cwd()) | lock == before | lock
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("Error: "), done.stderr
    return str(done.stderr)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, math, code, safety, new-model; recipe.yml; a store of the three."""
    root = tmp_path_factory.mktemp("models")
    tiny.family(root, tasks=("math", "code", "safety", "new-model"))
    folders = [Path(name) for name in ("math", "code", "safety")]
    made_of = recipe("basis_ta", Path("base"), folders, basis="balanced", num_bases=2)
    (root / "recipe.yml").write_text(yaml.safe_dump(made_of))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        run("build", "recipe.yml", "store", "--quiet")
    return root


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of `models`, and the current folder."""
    folder = tmp_path / "here"
    shutil.copytree(models, folder, ignore=shutil.ignore_patterns(".*"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield folder


# Help


def examples(command: click.Command) -> list[list[str]]:
    """The command lines in a help text, without their comments."""
    text = (command.help or "").partition("Example:")[2]
    lines = [line.strip() for line in text.splitlines()]
    found = [shlex.split(line.partition("   ")[0]) for line in lines]
    return [words for words in found if words[:1] == ["tvb"]]


def every_command() -> dict[str, click.Command]:
    """Words -> command; those of a group stand behind its arguments."""
    found = dict(main.commands)
    for name, group in main.commands.items():
        if isinstance(group, click.Group):
            own = " ".join([name, *(p.human_readable_name for p in group.params)])
            found |= {f"{own} {inner}": each for inner, each in group.commands.items()}
    return found


def test_help() -> None:
    """`-h` is `--help`. Commands have examples and lines that are not cut, and fit a terminal."""
    assert list(main.commands) == COMMANDS and all(map(examples, every_command().values()))
    for words in ["", *every_command()]:
        said = run(*words.split(), "-h").stdout
        assert said == run(*words.split(), "--help").stdout
        assert max(map(len, said.splitlines())) <= 80
    told = run("-h").stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in told] == sorted(COMMANDS)  # one line each
    assert not [line for line in told if line.endswith("...")]


def test_the_examples_work(here: Path) -> None:
    """All are parsed; those on stores and merges run, one after another as a user would."""
    for made_of, keys in (("models", {}), ("two", {}), ("forget", {"forget": "code"})):
        made = yaml.safe_load((here / "recipe.yml").read_text())
        (here / f"{made_of}.yml").write_text(yaml.safe_dump({**made, "parameters": keys}))
    shutil.copytree("math", "first-model")
    for command in main.commands.values():
        for words in examples(command):
            main.commands[words[1]].make_context(words[1], words[2:])
    (here / "store").rename(here / "vectors")
    for name in ("build", "merge", "inspect", "add", "undo", "export", "remove"):
        for words in examples(main.commands[name]):
            if words[-2:] == ["--task", "math"] and name == "export":
                words[3] = "./math-again"  # the test has its model in ./math
            if "./merged" in words and name == "merge":
                shutil.rmtree("merged", ignore_errors=True)
            if name == "remove":
                shutil.rmtree("vectors")
                shutil.copytree("store", "vectors")
            run(*words[1:])
    assert (here / "store.png").is_file() and (here / "merged/basis/basis.json").is_file()
    for task in ("math", "code", "safety"):
        assert tiny.load(here / "models" / task).keys() == tiny.load(here / task).keys()


def completed(words: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a shell offers for the last word."""
    asked = {"COMP_WORDS": f"tvb {words}", "COMP_CWORD": str(len(words.split(" ")))}
    for name, value in {**asked, "_TVB_COMPLETE": "bash_complete"}.items():
        monkeypatch.setenv(name, value)
    return [line.partition(",")[2] for line in run().stdout.splitlines() if line]


def test_version_and_completion(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--version").stdout == f"tvb, version {__version__}\n"
    ways = [*ALL_TASKS, "forget-math", "forget-code", "forget-safety"]
    assert list(ALL_TASKS) == list(WAYS)
    wanted = {
        "exp": ["export"],
        "merge store out --method ": ways,
        "merge store out --method forget-s": ["forget-safety"],
        "export store out --task ": ["math", "code", "safety"],
        "remove store --task c": ["code"],
        "merge recipe.yml out --method ": [],
        "export nope out --task ": [],
    }
    assert {words: completed(words, monkeypatch) for words in wanted} == wanted


# How a command starts

HEAVY = ("mergekit", "transformers", "peft", "numba", "matplotlib")
LIGHT = {
    "--help": ("torch", "numpy", "rich", *HEAVY),
    **{f"{name} --help": ("torch", "numpy", "rich", *HEAVY) for name in COMMANDS},
    "complete merge store out --method ": ("torch", "numpy", "rich", *HEAVY),
    "score nope --out table": ("torch", *HEAVY), "inspect store": HEAVY,
    "inspect store --json": HEAVY,
}  # fmt: skip
PROBE = """
import contextlib, io, os, sys
from tvb_mergekit.__main__ import main
for words, unwanted in {light!r}.items():
    asked = words.split(" ")
    os.environ.pop("_TVB_COMPLETE", None)
    if asked[0] == "complete":
        number = str(len(asked) - 1)
        os.environ |= dict(_TVB_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=number)
    sys.stdout, sys.stderr, shown = io.TextIOWrapper(io.BytesIO()), io.StringIO(), sys.stdout
    with contextlib.suppress(SystemExit): main(asked, prog_name="tvb")
    sys.stdout = shown
    print(words, [name for name in unwanted if name in sys.modules])
"""


def test_what_commands_import(here: Path) -> None:
    """In one process: each line holds for what ran before, too."""
    code = PROBE.format(light=LIGHT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{words} []" for words in LIGHT], done.stderr


# Words that are refused

REFUSED: dict[str, str] = {
    "buildd": "No such command 'buildd'. Did you mean 'build'?",
    "build nope.yml out": "File 'nope.yml' does not exist (see `tvb build --help`)",
    "build recipe.yml": "Missing argument 'STORE' (see `tvb build --help`)",
    "build recipe.yml ''": "the path '' is empty (an unset variable?)",
    "learn '' atlas --out x": "the path '' is empty (an unset variable?)",
    "learn two.yml atlas --epochs x --out x": "'x' is not a valid integer range",
    "add store new-model --task n --compress x": "'x' is not one of 'ae', 'balanced'",
    "add store new-model --task n --no-such": "No such option",
    "remove store --task": "Option '--task' requires an argument",
    "inspect nope": "nope: no such folder",
    "inspect math": "math is not a store",
    "build recipe.yml base": "is the input base",
    "build recipe.yml store": "already holds",
    "build recipe.yml out --lossless --keep 0.5": "choose one of",
    "build recipe.yml out --device gpu": "device `gpu` cannot be used here: Expected one of cpu",
    "export store math --task math": "already holds weight files",
    "export store out": "give one of --task NAME and --all",
    "export store out --task mth": "did you mean `math`?",
    "export store out --task math --base math": "the weights of math are others",
    "export store out --task math --base ./nope": "base ./nope: no such",
    "merge store out --method tis": "did you mean `ties`?",
    "merge recipe.yml out --method ties": "--method and --base belong to a STORE",
    "add store new-model --task math": "/store already: give another name",
    "add fresh math --task math": "a new one needs --base BASE",
    "inspect store --plot x.txt": "name a .png, .svg or .pdf file",
    "inspect store --plot nope/x.png": "in a folder that exists",
}


def test_words_that_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first pass."""
    monkeypatch.setattr("tvb_mergekit.tensors.passes.run", None)
    for words, want in REFUSED.items():
        said = refused(*shlex.split(words))
        assert want in said, (words, said)
    with mock.patch("tvb_mergekit.figures.find_spec", return_value=None):
        assert "pip install" in refused("inspect", "recipe.yml", "--plot", "x.png")
    assert run(code=2).stderr.startswith("Usage: tvb")
    done = subprocess.run([TVB, "build", "recipe.yml", ""], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


# Names, places and pipes


def test_a_reader_that_has_seen_enough(here: Path) -> None:
    for words in ("tvb inspect store", "tvb inspect store --json"):
        ended = processes.run(words.split(), here, processes.closed_output)
        assert ended.err == "" and ended.code == 1


STRANGE = ["tür [red]x", "-dash", "数学"]


def test_strange_names(here: Path) -> None:
    for name in STRANGE:
        shutil.copytree(here / "code", here / name)
        tensors = {n: t + 0.01 * torch.randn_like(t) for n, t in tiny.load(here / name).items()}
        save_file(tensors, here / name / WEIGHTS, {"format": "pt"})
    made_of = recipe("basis_ta", Path("base"), STRANGE, basis="balanced", num_bases=2)
    write(made_of, here / "strange recipe")
    run("build", "strange recipe.yml", "a [store]", "--quiet")
    said = run("inspect", "a [store]", "--plot", "ü [red] 'x'.svg").stdout
    for name in STRANGE:
        assert name in said
        run("export", "a [store]", "one", f"--task={name}", "--quiet")
        shutil.rmtree(here / "one")
    for encoding, told in {"ascii": "t\\xfcr [red]x", "latin-1": "\\u6570\\u5b66"}.items():
        fault = partial(encoded_output, encoding)
        done = processes.run(["tvb", "inspect", "a [store]"], here, fault, COLUMNS="60")
        assert done.code == 0 and told in done.out


def test_a_base_that_has_moved_where_mergekit_would_split_its_name(here: Path) -> None:
    """At `+` an adapter begins, at `@` a revision."""
    folder = here / "c++/a@b"
    folder.mkdir(parents=True)
    for name in ("base", "new-model", "store"):
        (here / name).rename(folder / name)
    store = folder / "store"
    facts = read_facts(store / "store.json")
    write_facts(store / "store.json", facts.but(base_path=str(here / "base"), base_beside=None))
    export = ["export", store, "out", "--task", "math"]
    assert "base: no such folder" in (said := refused(*export)) and "--base" in said
    options = ("--base", folder / "base", "--quiet")
    run(*export, *options)
    run("add", store, folder / "new-model", "--task", "new", *options)
    run("merge", store, here / "one", "--method", "add", *options)
    assert (here / "one" / WEIGHTS).is_file()
