"""The `tvb` command as strangers, impatient people and attackers use it."""

import json
import re
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
import test_score
import tiny
import torch
import transformers
import yaml
from click.testing import CliRunner, Result
from commands import recipe, write
from processes import encoded_output
from safetensors.torch import save_file
from test_faults import snapshot

from tvb_mergekit import __version__
from tvb_mergekit.cli.commands import main
from tvb_mergekit.errors import megabytes
from tvb_mergekit.store import store

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
    before = snapshot(Path.cwd())
    done = run(*words, code=1)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("Error: "), done.stderr
    after = snapshot(Path.cwd())
    assert after == before
    return str(done.stderr)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, math, code, safety, new-model; recipe.yml; a store of the three."""
    root = tmp_path_factory.mktemp("models")
    base, _ = tiny.family(root, tasks=("math", "code", "safety", "new-model"))
    tokens = {"bos_token": "t1", "eos_token": "t2"}  # without which lm-eval scores nothing
    transformers.AutoTokenizer.from_pretrained(base, **tokens).save_pretrained(base)
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
    """Every command has an example, and its help fits a terminal."""
    assert list(main.commands) == COMMANDS
    assert examples(main)
    for words, command in every_command().items():
        assert examples(command), words
        assert max(map(len, run(*words.split(), "--help").stdout.splitlines())) <= 80
    assert max(map(len, run("--help").stdout.splitlines())) <= 80


def stand_in_tasks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`copa` and `rte`, of a few items."""
    import lm_eval.tasks

    for place, name in enumerate(("copa", "rte")):
        rows = [{"text": f"t{i}", "answer": (i + place) % 2} for i in range(3, 11)]
        (here / f"{name}.json").write_text("\n".join(map(json.dumps, rows)))
        task = {"task": name, "dataset_path": "json", "validation_split": "train",
                "dataset_kwargs": {"data_files": str(here / f"{name}.json")},
                "output_type": "multiple_choice", "doc_to_text": "{{text}}",
                "doc_to_target": "answer", "doc_to_choice": ["t1", "t2"],
                "metric_list": [{"metric": "acc"}]}  # fmt: skip
        (here / "tasks").mkdir(exist_ok=True)
        (here / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(task))
    forget = {"basis": "balanced", "num_bases": 2, "forget": "code", "alpha": 1.0}
    folders = [Path(name) for name in ("math", "code", "safety")]
    made_of = recipe("basis_negate", Path("base"), folders, **forget)
    (here / "forget.yml").write_text(yaml.safe_dump(made_of))
    # lm-eval reads ten thousand YAML files for its own list of tasks
    manager = lm_eval.tasks.TaskManager(include_path=str(here / "tasks"), include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: manager)


def test_the_examples_work(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once: what the help of a later command shows too runs there."""
    stand_in_tasks(here, monkeypatch)
    (here / "store").rename(here / "built")
    for recipe_of, keys in (("two", {"basis": "none"}), ("other", {"basis": "ae", "steps": 20})):
        made = recipe("basis_ta", Path("base"), [Path("math"), Path("code")], **keys)
        (here / f"{recipe_of}.yml").write_text(yaml.safe_dump(made))
    made = yaml.safe_load((here / "recipe.yml").read_text())
    (here / "models.yml").write_text(yaml.safe_dump({**made, "parameters": {}}))
    run("build", "models.yml", "built vectors", "--keep", "0.5", "--quiet")
    for data in ("m", "c"):
        (here / f"{data}.jsonl").write_text('{"prompt": "t3 ", "response": "t4 t5"}\n')
    for name in ("ta", "ae", "base", "math", "specialists"):
        scores = {"mergebench_gsm8k": 0.5, "mergebench_math_hendrycks": 0.25}
        test_score.write_results(f"out/{name}/results_a.json", scores)
    commands = {"": main, **every_command()}
    shown_last = {tuple(line): name for name in commands for line in examples(commands[name])}
    for name, command in commands.items():
        made = ["store", "vectors", "math-model", *(["merged"] if name == "merge" else [])]
        made += ["two", "other", "law"] if "learn" in name else []
        for folder in (*map(Path, made), *Path().glob("*.previous")):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree("built vectors", "vectors")
        if name in ("inspect", "add", "undo", "export", "learn", "tune"):
            shutil.copytree("built", "store")
        if name == "undo":
            run("add", "store", "new-model", "--task", "new", "--quiet")
        for words in (line for line in examples(command) if shown_last[tuple(line)] == name):
            if words[-2:] == ["--task", "math"]:  # into ./math, where the test has the model
                words = ["./math-model" if word == "./math" else word for word in words]
            run(*words[1:])
    assert (here / "store.png").is_file() and (here / "merged/basis/basis.json").is_file()


def test_version_and_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--version").stdout == f"tvb, version {__version__}\n"
    words = {"COMP_WORDS": "tvb exp", "COMP_CWORD": "1", "_TVB_COMPLETE": "bash_complete"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    assert run().stdout == "plain,export\n"


# How a command starts

HEAVY = ("mergekit", "transformers", "peft", "numba", "matplotlib")
LIGHT = {
    "--help": ("torch", "numpy", "rich", *HEAVY),
    **{f"{name} --help": ("torch", "numpy", "rich", *HEAVY) for name in COMMANDS},
    "score nope --out table": ("torch", *HEAVY), "inspect store": HEAVY,
    "inspect store --json": HEAVY,
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


def test_where_time_goes(here: Path) -> None:
    fresh = partial(processes.not_imported, "tvb_mergekit.plugin.inputs")
    said = processes.run("tvb build recipe.yml out --quiet -v".split(), here, fresh).err
    for phase in ("Importing mergekit", "Reading the recipe", "Planning", "Encoding"):
        assert re.search(rf"^INFO: {phase}: [\d.]+ s$", said, re.MULTILINE), said
    for phase in ("Gram matrix", "Bases"):
        found = rf"^INFO: {phase}: [\d.]+ MB in [\d.]+ s, [\d.]+ GB/s$"
        assert re.search(found, said, re.MULTILINE), said
    assert run("inspect", "out").stderr == ""


# Words that are refused


ONE = "give one of --task NAME, --basis K, --all-bases and --all DIR"
NEW = "a new one needs --base BASE and --budget M"
REFUSED: dict[str, str] = {
    # files for folders and folders for files
    "inspect nope": "nope: no such folder",
    "inspect math": "math is not a basis store",
    "inspect store/basis-000": "is one basis of a store",
    # where a store may go
    "build recipe.yml recipe.yml/x": "is a file",
    "build recipe.yml base": "is the input base",
    "build recipe.yml store": "store is a store or a report already",
    "build recipe.yml notes": "already holds mine.txt",
    # where models may go
    "export store store/x --task math": "lies in the input store",
    "merge store store/x --method add": "store/x lies in the input",
    "build recipe.yml store/x": "/store, a store or a report; name another place",
    "inspect store --plot store/x.svg": "a store or a report",
    "export store math --task math": "already holds weight files",
    # options
    "export store out": ONE,
    "export store out --basis 2": "basis 2: store has the bases 0 to 1",
    "export store out --task mth": "did you mean `math`?",
    "export store out --task math --base math": "the weights of math are others",
    "export store out --task math --base ./nope": "base ./nope: no such",
    "add store new-model --task math": "/store already: give another name",
    "add store new-model --task ''": "empty",
    "add store new-model --task a,b": "comma",
    "add store new-model --task n --budget 1": "the budget is 1: expected 2 or more",
    "add store new-model --task 'x\n'": "control",
    "add store new-model --task n --weight 0": "`weight` is",
    "add store new-model --task n --dtype float16": "leave --dtype out",
    "add store new-model --task n --base code": "are others",
    "add store base --task n": "is the base model",
    "add fresh math --task math --base base": NEW,
    "inspect recipe.yml --plot x.txt": "expected one of .png",
    "inspect store --plot notes.png": "is a folder",
    "build recipe.yml begun": "/begun.partial is in the way",
}
DEVICES = {  # PyTorch's own words
    "gpu": "Expected one of cpu, cuda",
    "cpu:x": "Invalid device string: 'cpu:x'",
    "meta": "Tensor.item() cannot be called on meta tensors",
}


def test_words_that_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first pass."""
    monkeypatch.setattr("tvb_mergekit.tensors.passes.run", None)
    (here / "notes").mkdir()
    (here / "notes/mine.txt").write_text("x")
    (here / "notes.png").mkdir()
    (here / "begun.partial/.partial-mine").mkdir(parents=True)
    for words, want in REFUSED.items():
        said = refused(*shlex.split(words))
        assert want in said, (words, said)
    for device, why in DEVICES.items():
        want = f"Error: device `{device}` cannot be used here: {why}"
        for words in ("build recipe.yml out", "export store o --basis 0"):
            said = refused(*shlex.split(f"{words} --device {device}"))
            assert said.startswith(want) and said.endswith("; name another, such as cpu\n")
    assert not {path.name for path in here.iterdir() if path.name.startswith(".")}


def misuses() -> Iterator[tuple[list[str], str]]:
    """Command lines with one wrong word each, for every parameter of every command, and the reason
    that is expected."""
    yield ["buildd"], "No such command 'buildd'"
    yield ["build", "nope.yml", "out"], "File 'nope.yml' does not exist"
    yield ["export", "store", "--all", ""], "name one output folder"
    yield ["learn", "", "atlas", "--out", "x"], "is empty"
    for name, command in {"": main, **every_command()}.items():
        yield [*name.split(), "--no-such"], "No such option"
        yield [*name.split(), "--help=3"], "does not take a value"
        if isinstance(command, click.Group):
            continue
        needed = [each for each in command.params if each.required]
        if needed:
            yield name.split(), "Missing"
        for each in command.params:
            kind = each.type
            reasons = {
                "path": ("", "is empty"),
                "file": ("", "is empty"),
                "float": ("abc", "is not a valid float"),
                "integer": ("abc", "is not a valid integer"),
                "choice": ("nope", "is not one of"),
            }
            bad, why = reasons.get(kind.name.removesuffix(" range"), ("", ""))
            if not why:
                continue
            words = name.split()
            for one in needed if each.required else [*needed, each]:
                good = one.type.choices[0] if isinstance(one.type, click.Choice) else "recipe.yml"
                option = one.opts[:1] if isinstance(one, click.Option) else []
                words += [*option, bad if one is each else str(good)]
            yield words, why


PATHS = """build RECIPE STORE; inspect PATH --plot; add STORE MODEL --base; undo STORE; remove STORE
    export STORE [OUT] --base; merge RECIPE|STORE OUT --base
    score [[LABEL=]PATH...] --base --specialist --reference --benchmark --out
    learn RECIPE --out --base; tune RECIPE --out"""


def test_every_wrong_word_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty word is an unset variable of a shell: nothing may be written into this folder."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yml").write_text("")
    found = set()
    names = sorted(["", *every_command()], key=len)
    for words, want in misuses():
        said = refused(*words)
        assert want in said, (words, said)
        if "(see `" in said:
            *_, name = (each for each in names if words[: len(each.split())] == each.split())
            assert f"(see `{' '.join(['tvb', *name.split()])} --help`)" in said, (words, said)
        if named := re.match(r"Error: Invalid value for '([^']*)'.* is empty", said):
            found.add((words[0], named[1]))
    wanted = {tuple(words.split()) for words in PATHS.replace("\n", ";").split(";")}
    assert {(words[0], name) for words in wanted for name in words[1:]} <= found
    for name in ("build", "inspect", "add", "merge", "learn", "tune"):
        assert (name, "--transformers-cache") in found
    run(code=1)
    done = subprocess.run([TVB, "build", "recipe.yml", ""], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


def test_pictures_are_refused_before_anything_is_read(here: Path) -> None:
    with (
        mock.patch("tvb_mergekit.cli.stores._inspection", side_effect=AssertionError("read")),
        mock.patch.dict(sys.modules, matplotlib=None),
    ):
        assert "pip install" in refused("inspect", "recipe.yml", "--plot", "x.png")
    pytest.importorskip("matplotlib")
    run("inspect", "store", "--plot", "ü [red] 'x'.svg")
    assert (here / "ü [red] 'x'.svg").read_text().startswith("<?xml")


# What is written


WIDTHS = [  # of the base, of the models, and of their store
    (torch.float32, torch.bfloat16, "bfloat16"),
    (torch.bfloat16, torch.float64, "float32"),
]


@pytest.mark.parametrize(("of_base", "of_models", "want"), WIDTHS)
def test_a_store_is_as_wide_as_the_models(of_base, of_models, want, tmp_path, monkeypatch):
    dtypes = (of_base, of_models, of_models)
    base, listed = tiny.family(tmp_path, tasks=("math", "code"), dtypes=dtypes)
    monkeypatch.chdir(tmp_path)
    made_of = recipe("basis_ta", base, listed, basis="none")
    Path("recipe.yml").write_text(yaml.safe_dump(made_of))
    said = run("build", "recipe.yml", "store", "--quiet").stdout
    assert store.load("store").facts["store"]["dtype"] == want
    models = sum(t.nbytes for path in listed for t in tiny.load(path).values())
    files = store.load("store").facts["store"]["files"].items()
    more = sum(f["bytes"] for name, f in files if name.endswith(".safetensors")) - models
    kind = "more" if more > 0 else "less"
    assert f", {megabytes(abs(more))} {kind} than the models'" in said


def test_a_reader_that_has_seen_enough(here: Path) -> None:
    for words in ("tvb inspect store", "tvb inspect store --json"):
        ended = processes.run(words.split(), here, processes.closed_output)
        assert ended.err == "" and ended.code == 1


STRANGE = ["tür [red]x", "-dash", "数学"]


def test_strange_names(here: Path) -> None:
    for name in STRANGE:
        shutil.copytree(here / "code", here / name)
        tensors = {n: t + 0.01 * torch.randn_like(t) for n, t in tiny.load(here / name).items()}
        (here / name / "model.safetensors").unlink()
        save_file(tensors, here / name / "model.safetensors", {"format": "pt"})
    made_of = recipe("basis_ta", Path("base"), STRANGE, basis="balanced", num_bases=2)
    write(made_of, here / "strange recipe")
    run("build", "strange recipe.yml", "a [store]", "--quiet")
    said = run("inspect", "a [store]").stdout
    inspected = run("inspect", "strange recipe.yml").stdout
    for name in STRANGE:
        assert name in said and name in inspected
        run("export", "a [store]", "one", f"--task={name}", "--quiet")
        shutil.rmtree(here / "one")
    done = processes.run(
        ["tvb", "inspect", "a [store]"], here, partial(encoded_output, "ascii"), COLUMNS="60"
    )
    assert done.code == 0 and "t\\xfcr [red]x" in done.out and done.out.isascii()
    done = processes.run(
        ["tvb", "inspect", "strange recipe.yml"], here, partial(encoded_output, "latin-1")
    )
    assert done.code == 0 and "\\u6570\\u5b66" in done.out


# Places


def test_the_base_has_moved(here: Path) -> None:
    (here / "base").rename(here / "moved")
    facts = json.loads((here / "store/basis.json").read_text())
    facts["store"]["base_path"] = str(here / "base")  # the store here is a copy
    (here / "store/basis.json").write_text(json.dumps(facts))
    for words in (
        ["export", "store", "out", "--task", "math"],
        ["add", "store", "new-model", "--task", "new"],
    ):
        said = refused(*words)
        assert "base: no such file or folder" in said and "--base" in said
        run(*words, "--base", "moved", "--quiet")


def test_a_folder_whose_name_mergekit_would_split(here: Path) -> None:
    """At `+` an adapter begins, at `@` a revision."""
    folder = here / "c++/a@b"
    shutil.copytree(here / "base", folder / "base")
    shutil.copytree(here / "new-model", folder / "model")
    run("build", "recipe.yml", folder / "store", "--quiet")
    (here / "base").rename(here / "moved")
    options = ("--base", folder / "base", "--quiet")
    run("add", folder / "store", folder / "model", "--task", "new", *options)
    run("merge", folder / "store", here / "one", "--method", "add", *options)
    assert (here / "one" / WEIGHTS).is_file()
