"""Every block of commands and of Python in README and manual, typed page by page, in order; and
the recipes.

A page is typed in one folder, which holds small models under the names of the manual. bash splits
the lines, and the commands run in this process. What takes longer is parsed by its own command;
`slow` runs it too, with the installed commands.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from click.testing import CliRunner
from commands import recipe
from lm_eval._cli import HarnessCLI
from mergekit.scripts import run_yaml
from test_lora import train
from tiny import family, llama, load
from torch.distributed.run import get_args_parser
from transformers import AutoModelForCausalLM

import tvb_mergekit
from tvb_mergekit.cli.commands import main
from tvb_mergekit.core.settings import resolve_settings

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
RECIPES = ROOT / "recipes"
ADAPTERS = RECIPES / "smollm2/adapters"
NAMES = ("math", "code", "safety", "legal", "chat", "new-model", "first", "old")
DATA = " ".join(f"--data {task}={task}.jsonl" for task in NAMES[:3])
# Page -> what it says was done before
PAGES = {
    "README.md": "",
    "docs/files.md": "",
    "docs/learn.md": "tvb build models.yml store",
    "docs/merge.md": "",
    "docs/serving.md": f"""tvb build models.yml store
        tvb learn recipe.yml wemoe {DATA} --epochs 1 --out merged""",
    "docs/store.md": "",
    "docs/tune-and-score.md": "mergekit-yaml recipes/quickstart.yml ./merged",
    "recipes/README.md": "",
}
# Commands that no test runs, and why; ours are parsed
NEVER = {
    "pip install": "changes the environment",
    "python (recipes/smollm2|-c)": "downloads the base and data sets, or asks the merge of them",
    "lm_eval .*(gsm8k|mergebench|smollm2)": "needs data sets of the Hub",
    "tvb score merged=out/merged ": "needs the scores of mergebench",
    "vllm|llama-server|python (-m sglang|convert_lora_to_gguf)": "is not installed here",
}
SLOW = "lm_eval|mergekit-yaml tuned|tvb tune|tvb score|tvb learn recipes|torchrun|accelerate"
STUB = """#!/bin/sh
printf '%s\\0' "${0##*/}" "$@" >> "$TYPED"
printf '\\n\\0' >> "$TYPED"
"""
STUBS = "tvb mergekit-yaml lm_eval torchrun accelerate pip python vllm llama-server"


def make_models(folder: Path, names: Sequence[str], **sizes: Any) -> None:
    make = partial(llama, hidden_size=16, intermediate_size=24, **sizes)
    family(folder, make, names, dtypes=[torch.bfloat16], scale=0.01)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and adapters of `base`, three recipes, examples of tasks, and what is shipped."""
    folder = tmp_path_factory.mktemp("prepared")
    make_models(folder, NAMES)
    ignored = shutil.ignore_patterns("adapters")
    shutil.copytree(RECIPES, folder / "recipes", ignore=ignored)
    shutil.copytree(folder / "base", folder / "smollm2-base")
    shipped = [f"recipes/smollm2/adapters/{task}" for task in os.listdir(ADAPTERS)]
    for seed, name in enumerate(("code-adapter", "new-adapter", *shipped)):
        train(folder / "base", folder / name, seed, lora_alpha=0.2)
    for task in (*NAMES[:3], "law"):
        example = json.dumps({"prompt": "t1 t2 t3 ", "response": f"t{len(task)} t4"})
        (folder / f"{task}.jsonl").write_text(4 * f"{example}\n")
    lora = [f"base+{name}" for name in ("code-adapter", "new-adapter")]
    for name, models, keys in (
        ("recipe", NAMES[:3], {"basis": "balanced", "num_bases": 2}),
        ("models", [*NAMES[:3], "old"], {}),
        ("adapters", lora, {"basis": "none"}),
    ):
        made = recipe("basis_ta", Path("base"), models, dtype=None, **keys)
        (folder / f"{name}.yml").write_text(yaml.safe_dump(made))
    return folder


def typed(text: str, folder: Path) -> list[list[str]]:
    """The words of the commands that bash would run; sed and the like run."""
    stubs, log = folder.parent / "stubs", folder.parent / "typed"
    stubs.mkdir(exist_ok=True)
    for name in STUBS.split():
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    log.write_text("")
    env = {"PATH": f"{stubs}:/usr/bin:/bin", "TYPED": str(log)}
    subprocess.run(["bash", "-euc", text], cwd=folder, env=env, check=True)
    return [each.split("\0") for each in log.read_text().split("\0\n\0")[:-1]]


def in_process(words: list[str], parsed: bool = False) -> None:
    """Run a command, or parse its words alone."""
    name, *rest = words
    if name == "lm_eval":
        with mock.patch.object(
            sys, "argv", [name, *(rest if rest[0] == "run" else ["run", *rest])]
        ):
            HarnessCLI().parse_args()
    elif name in ("torchrun", "accelerate"):
        parser = get_args_parser() if name == "torchrun" else launch_command_parser()
        given = parser.parse_args(rest[name == "accelerate" :])
        assert given.training_script in ("tvb", "tvb_mergekit")
        in_process(["tvb", *given.training_script_args], parsed)
    elif name in ("tvb", "mergekit-yaml"):
        only = mock.patch.object(click.Command, "invoke") if parsed else nullcontext()
        with only, mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
            done = CliRunner().invoke(main if name == "tvb" else run_yaml.main, rest)
        assert done.exit_code == 0, (words, done.output, done.exc_info)


def run(words: list[str], slow: bool, folder: Path) -> str:
    """Run or parse a command; what an installed one printed."""
    line = shlex.join(words)
    never = any(re.match(each, line) for each in NEVER)
    if slow and not never:
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command: list[Any] = [BIN / words[0], *words[1:]]
        done = subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE)
        assert done.returncode == 0, line
        return done.stdout
    in_process(words, parsed=never or re.match(SLOW, line) is not None)
    return ""


def names_of(folder: Path, page: str) -> dict[str, Any]:
    """What the programs of a page have at their beginning."""
    found = {"tvb_mergekit": tvb_mergekit, "np": np}
    if page in ("README.md", "docs/store.md"):
        states = {name.replace("-", "_"): load(folder / name) for name in ("base", *NAMES)}
        models = {task: folder / task for task in NAMES[:5]}
        found |= {**states, "models": models, "prompts": {"input_ids": torch.tensor([[1, 2, 3]])}}
        found["model"] = AutoModelForCausalLM.from_pretrained("./base", dtype=torch.bfloat16)
    return found


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_as_it_is_typed(page, slow, prepared, tmp_path, monkeypatch):
    text, folder = (ROOT / page).read_text(), tmp_path / "here"
    shutil.copytree(prepared, folder)
    if page == "docs/merge.md":  # it cuts layers
        make_models(folder, NAMES[:3], num_hidden_layers=32)
    monkeypatch.chdir(folder)
    names, said = names_of(folder, page), ""
    for words in typed(PAGES[page], folder):
        in_process(words)
    for number, (kind, block) in enumerate(re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)):
        if kind == "bash":
            for words in typed(block, folder):
                said += run(words, slow, folder)
        elif kind == "python":
            exec(block, names)
        elif "merge_method" in block:
            file = "recipe.yml" if page == "README.md" else f"{number}.yml"
            (folder / file).write_text(block)
            in_process(["mergekit-yaml", file, f"out-{number}"])
    if slow and page == "README.md":
        (score,) = re.findall(r"^\|quickstart\|.*\|([\d.]+)\|±", said, re.M)
        table = (RECIPES / "README.md").read_text()
        (told,) = re.findall(r"^\| quickstart\.yml \| ([\d.]+) ", table, re.M)
        assert float(score) == pytest.approx(float(told), abs=0.01)


def test_every_block_is_typed() -> None:
    """Pages that have blocks are listed, and no reason is left over."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), RECIPES / "README.md"]
    blocks = {
        page: re.findall(r"^```(?:bash|python)\n(.*?)^```", page.read_text(), re.M | re.S)
        for page in pages
    }
    assert {str(page.relative_to(ROOT)) for page, found in blocks.items() if found} == {*PAGES}
    text = "".join(itertools.chain(*blocks.values()))
    assert all(re.search(f"({each})", text) for each in NEVER)


# Recipes (merges: test_golden.py), and what is shipped with them

# M, if it is not half of T
BASES = {"quickstart-forget": 6, "mergebench-llama3.2-3b-forget": 3, "mistral-7b-qlora": 5}


def test_every_recipe_is_valid_and_says_its_command() -> None:
    readme = (RECIPES / "README.md").read_text()
    for path in (*RECIPES.glob("*.yml"), RECIPES / "smollm2/merge.yml"):
        text, place = path.read_text().replace("\\\n#", ""), path.relative_to(RECIPES)
        said = yaml.safe_load(text)
        own = [(model.get("parameters", {}), model["model"]) for model in said["models"]]
        tasks = [keys.get("task") or Path(model).name for keys, model in own]
        settings = resolve_settings(said["merge_method"], said["parameters"], tasks)
        assert settings.bases_of(len(tasks)) == BASES.get(path.stem, len(tasks) // 2)
        command = rf"^# +(mergekit-yaml recipes/{place} \./merged.*)$"
        (words,) = re.findall(command, text, re.M)
        in_process(shlex.split(words), parsed=True)
        assert f"[{place}]({place})" in readme
    assert {Path(model).name for _, model in own} == {*os.listdir(ADAPTERS)}  # of the last one
