"""The `tvb` command as strangers, impatient people and attackers use it."""

import filecmp
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import click
import processes
import pytest
import tiny
import yaml
from commands import recipe, write
from commands import tvb as run
from processes import encoded_output
from test_faults import snapshot

from tvb_mergekit import __version__
from tvb_mergekit.cli.commands import main
from tvb_mergekit.cli.stores import WAYS
from tvb_mergekit.plugin.ways import ALL_TASKS
from tvb_mergekit.store.facts import StoreFacts, read_facts, write_facts

COMMANDS = "build inspect add undo remove export merge score learn tune".split()


def refused(*words: object) -> str:
    """The one line of an error; nothing on standard output, and nothing written."""
    lock, before = {"store/.lock": b""}, snapshot(Path.cwd())
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
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `models`, and the current folder."""
    folder = tmp_path / "here"
    shutil.copytree(models, folder, ignore=shutil.ignore_patterns(".*"))
    monkeypatch.chdir(folder)
    return folder


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
    told = run("-h").stdout.partition("Commands:\n")[2]
    assert [line.split()[0] for line in told.splitlines()] == sorted(COMMANDS)  # one line each
    assert "..." not in told


def test_the_examples_work(here: Path) -> None:
    """All are parsed; those on stores and merges run, one after another as a user would."""
    for made_of, keys in (("models", {}), ("two", {}), ("forget", {"forget": "code"})):
        made = yaml.safe_load((here / "recipe.yml").read_text())
        (here / f"{made_of}.yml").write_text(yaml.safe_dump({**made, "parameters": keys}))
    shutil.copytree("math", "first-model")
    for command in main.commands.values():
        for words in examples(command):
            main.commands[words[1]].make_context(words[1], words[2:])
    shutil.rmtree("store")
    for name in ("build", "merge", "inspect", "add", "undo", "export", "remove"):
        for words in examples(main.commands[name]):
            if words[-2:] == ["--task", "math"] and name == "export":
                words[3] = "./math-again"  # the test has its model in ./math
            elif name == "merge":
                shutil.rmtree("merged", ignore_errors=True)
            elif name == "remove":
                Path("store").rename("vectors")
            run(*words[1:])
    assert (here / "store.png").is_file() and (here / "merged/basis/basis.json").is_file()


def completed(words: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a shell offers for the last word."""
    asked = {"COMP_WORDS": f"tvb {words}", "COMP_CWORD": str(len(words.split(" ")))}
    for name, value in {**asked, "_TVB_COMPLETE": "bash_complete"}.items():
        monkeypatch.setenv(name, value)
    return [line.partition(",")[2] for line in run().stdout.splitlines() if line]


def test_version_and_completion(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--version").stdout == f"tvb, version {__version__}\n"
    assert list(ALL_TASKS) == list(WAYS)
    wanted = {
        "exp": ["export"],
        "merge store out --method ": [*WAYS, "forget-math", "forget-code", "forget-safety"],
        "merge store out --method forget-s": ["forget-safety"],
        "export store out --task ": ["math", "code", "safety"],
        "remove store --task c": ["code"],
        "merge recipe.yml out --method ": [],
        "export nope out --task ": [],
    }
    assert {words: completed(words, monkeypatch) for words in wanted} == wanted
    monkeypatch.setenv("COMP_WORDS", "tvb export store out --task ma")
    monkeypatch.setenv("COMP_CWORD", "5")
    without = "import sys; sys.modules['torch'] = None; from tvb_mergekit.__main__ import main"
    without += "; main(prog_name='tvb')"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True)
    assert done.stdout == b"plain,math\n"


# How a command starts

HEAVY = ("mergekit", "transformers", "peft", "numba", "matplotlib")
LIGHT = {
    "--help": ("torch", "numpy", "rich", *HEAVY),
    **{f"{name} --help": ("torch", "numpy", "rich", *HEAVY) for name in COMMANDS},
    "score nope --out table": ("torch", *HEAVY), "inspect store": HEAVY,
}  # fmt: skip
PROBE = """
import contextlib, io, sys
from tvb_mergekit.__main__ import main
for words, unwanted in {light!r}.items():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try: main(words.split(), prog_name="tvb")
        except SystemExit: pass
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
    "build recipe.yml ''": "the path '' is empty (an unset variable?)",
    "inspect nope": "nope is not a store (no store.json of ours, from ",
    "build recipe.yml base": "already holds",
    "build recipe.yml out --device gpu": "device `gpu` cannot be used here: Expected one of cpu",
    "learn recipe.yml atlas --out out --learning-rate nan": "--learning-rate is nan",
    "export store out": "give one of --task NAME and --all",
    "export store out --task mth": "did you mean `math`?",
    "export store out --task math --base math": "the weights of math are others",
    "merge store out --method tis": "did you mean `ties`?",
    "add fresh math --task math": "a new one needs --base BASE",
    "inspect store --plot x.txt": "name a .png, .svg or .pdf file",
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


def test_a_reader_that_has_seen_enough(here: Path) -> None:
    for words in ("tvb inspect store", "tvb inspect store --json"):
        ended = processes.run(words.split(), here, processes.closed_output)
        assert ended.err == "" and ended.code == 1


def test_strange_names(here: Path) -> None:
    strange = {"math": "tür [red]x", "code": "-dash", "safety": "数学"}
    for name, to in strange.items():
        (here / name).rename(here / to)
    made_of = recipe("basis_ta", Path("base"), list(strange.values()), basis="pca", num_bases=2)
    write(made_of, here / "strange recipe")
    run("build", "strange recipe.yml", "a [store]", "--quiet")
    said = run("inspect", "a [store]", "--plot", "ü [red] 'x'.svg").stdout
    for name in strange.values():
        assert name in said
        run("export", "a [store]", "one", f"--task={name}", "--quiet")
        shutil.rmtree(here / "one")
    words = ["tvb", "inspect", "a [store]"]
    done = processes.run(words, here, partial(encoded_output, "ascii"), COLUMNS="60")
    assert done.code == 0 and "t\\xfcr [red]x" in done.out and done.out.isascii()


def test_a_base_that_has_moved_where_mergekit_would_split_its_name(here: Path) -> None:
    """At `+` an adapter begins, at `@` a revision."""
    folder = here / "c++/a@b"
    folder.mkdir(parents=True)
    for name in ("base", "new-model", "store"):
        (here / name).rename(folder / name)
    store = folder / "store"
    facts = read_facts(store / "store.json", StoreFacts)
    moved = facts.model_copy(update={"base_path": str(here / "base")})
    write_facts(store / "store.json", moved)
    export = ["export", store, "out", "--task", "math"]
    assert "base: no such folder" in (said := refused(*export)) and "--base" in said
    options = ("--base", folder / "base", "--quiet")
    run(*export, *options)
    run("merge", store, here / "zero", "--method", "add", *options)
    run("add", own := folder / "own", folder / "new-model", "--task", "c++", *options)
    run("merge", own, here / "one", "--method", "forget-c++", *options)
    keys = {"basis": "none", "forget": "c++", "alpha": 1.0}
    listed = write(recipe("basis_negate", folder / "base", [own / "c++"], **keys), here / "two")
    run("merge", listed, here / "two", "--quiet")
    assert (here / "zero/model.safetensors").is_file()
    assert filecmp.cmp(here / "one/model.safetensors", here / "two/model.safetensors", False)
