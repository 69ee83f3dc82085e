"""A user's mistakes: each is one line that says where it is, what was found and what to do.

A case is a recipe and the faults of files or machine. `tvb inspect` reads all cases in process
(test_inspect.py); a few run end to end here.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import torch
import yaml
from mergekit.common import ModelReference
from processes import INTERRUPT, Fault, little_disk, on_call, on_change, run, unprivileged
from safetensors.torch import load_file, save_file
from tiny import family, llama, load

from tvb_mergekit.core.settings import METHODS, VARYING_KEYS, check_value, resolve_settings
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.recipe import default_task_name


@dataclass(frozen=True)
class Case:
    """One command line, in a folder that holds base, a, b, c and recipe.yml."""

    recipe: Any = None  # a mapping, or the YAML text itself; None: `recipe()`
    wants: tuple[str, ...] = ()  # regular expressions found in the error line (ok: in stderr)
    setup: Callable[[Path], object] = lambda folder: None
    out: str = "out"
    fault: Fault | None = None
    ok: bool = False  # the merge succeeds
    leaves: str = "nothing"  # what another process has written


def recipe(
    parameters: Mapping[str, Any] | None = None,
    method: str = "basis_ta",
    models: Sequence[str] = ("./a", "./b", "./c"),
    own: Mapping[int, Mapping[str, Any]] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A valid recipe without training, with changes."""
    given = {"basis": "balanced", "num_bases": 2, **(parameters or {})}
    made = commands.recipe(method, Path("base"), models, own, dtype=None, **given)
    return {**made, "base_model": "./base", **top}


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every path below `folder`, also of folders, with the contents of files."""
    every = folder.rglob("*")
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in every}


def prepare(folder: Path, models: Path, case: Case) -> None:
    """Make the case's folder (hard links: setups replace files, never write into them)."""
    shutil.copytree(models, folder, copy_function=os.link)
    written = recipe() if case.recipe is None else case.recipe
    text = written if isinstance(written, str) else yaml.safe_dump(written, allow_unicode=True)
    (folder / "recipe.yml").write_text(text, encoding="utf-8")
    case.setup(folder)


# Recipes that are not what they seem (others that are refused: test_reports.py)


RECIPES = {
    "misspelt parameter": Case(recipe({"lamda": 0.5}), ("`lamda`", r"`lambda`\?", "parameters")),
    "nothing excluded": Case(
        recipe({"exclude": "lmhead"}), ("depends on .lmhead. .did you mean `lm_head`",), ok=True
    ),
    "another encoding": Case(
        setup=lambda f: (f / "recipe.yml").write_bytes(b"merge_method: linear\n# \xe4\n"),
        wants=("recipe.yml: not a YAML", "utf-8"),
    ),
    "nested aliases": Case(
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join(9 * ['*' + o])}]\n" for o, n in pairwise("abcdefghij"))
        + "merge_method: basis_ta\nparameters: {exclude: *j}\n",
        ("recipe.yml: its aliases", "1,000,000 values"),
    ),
}


# Damaged, missing and unfit files


WEIGHTS = "model.safetensors"
NORM, MLP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
Setup = Callable[[Path], object]


def rewrite(file: Path, content: bytes) -> None:
    """Replace a file that may be a hard link to another case's."""
    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    file.unlink(missing_ok=True)
    save_file(tensors, file, {"format": "pt"})


def edited(model: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Setup:

    def setup(folder: Path) -> None:
        tensors = load_file(folder / model / WEIGHTS)
        change(tensors)
        write(folder / model / WEIGHTS, tensors)

    return setup


def filled(model: str, name: str, count: int, value: float) -> Setup:
    return edited(model, lambda tensors: tensors[name].view(-1)[:count].fill_(value))


class Payload:
    """Creates the file `executed` in the current folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("executed", "w")


def payload(folder: Path) -> None:
    (folder / "b" / WEIGHTS).unlink()
    torch.save({NORM: Payload()}, folder / "b" / "pytorch_model.bin")


def quantized(folder: Path) -> None:
    config = json.loads((folder / "b" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    rewrite(folder / "b" / "config.json", json.dumps(config).encode())


def other_base(folder: Path) -> None:
    torch.manual_seed(99)
    model = llama()
    for parameter in model.parameters():
        parameter.data.add_(0.5 * torch.randn_like(parameter))
    shutil.rmtree(folder / "b")
    model.save_pretrained(folder / "b")


HALF = {"dtype": "float16"}
OF_FILES = {
    # values
    "nan": Case(setup=filled("b", MLP, 3, float("nan")), wants=(MLP, "`b`", "3 NaN", "exclude")),
    "overflow": Case(
        recipe(**HALF),
        (MLP, "float16", "bfloat16"),
        lambda f: [filled(m, MLP, 1, 7e4)(f) for m in ("base", "a", "b", "c")],
    ),
    "identical": Case(
        setup=lambda f: rewrite(f / "b" / WEIGHTS, (f / "base" / WEIGHTS).read_bytes()),
        wants=("`b`", "zero", "identical to the base"),
    ),
    "other base": Case(
        setup=other_base,
        wants=(r"`b` \(\./b\).*norm is [\d.]+, the base's [\d.]+", "this base"),
        ok=True,
    ),
    "shape": Case(
        setup=edited("b", lambda t: t.update({MLP: torch.ones(60, 32)})),
        wants=(MLP, "task .b.?", r"\[60, 32\]", r"\[64, 32\]", "exclude"),
    ),
    "tensor lost in a model": Case(
        setup=edited("b", lambda t: t.pop(MLP)), wants=(MLP, "not in b, so the base's"), ok=True
    ),
    "most lost in a model": Case(
        setup=edited("b", lambda t: [t.pop(name) for name in [*t] if "norm" not in name]),
        wants=("9. % of the base", "not in b, so the base's: lm_h", "fine-tuned from this base"),
    ),
    # files
    "data cut": Case(
        setup=lambda f: rewrite(f / "b" / WEIGHTS, (f / "b" / WEIGHTS).read_bytes()[:-9999]),
        wants=(f"b/{WEIGHTS}", "truncated", "download"),
    ),
    "bin code": Case(setup=payload, wants=("b/pytorch_model.bin", "running code", "safetensors")),
    "quantized": Case(setup=quantized, wants=("./b is stored quantized .gptq.",)),
}


# Output folders, full disks, interruptions

OF_OUTPUT = {
    # the output
    "output holds weights": Case(
        out="old",
        setup=lambda f: rewrite(f / "old/model-00003-of-00004.safetensors", b"mine"),
        wants=("old", "model-00003-of-00004.safetensors", "delete"),
    ),
    "disk": Case(fault=little_disk, wants=("out", "MB", "free")),
    "interrupted in the Gram pass": Case(
        fault=partial(on_call, "tvb_mergekit.core.gram.GramSums.plus", INTERRUPT, 3),
        wants=("Aborted!$",),
    ),
    # other settings that work
    # a mount, as in a container: it cannot be removed, and what is beside it is another disk
    "only the output is writable": Case(
        out="shut/out",
        ok=True,
        fault=unprivileged,
        setup=lambda f: [
            (f / "shut/out/lost+found").mkdir(parents=True),
            (f / "shut").chmod(0o555),
        ],
    ),
    "a log begins in it": Case(
        ok=True,
        fault=partial(on_change, ".", partial(shutil.copytree, "logs", "out"), 3),
        setup=lambda f: rewrite(f / "logs/log.txt", b"mine"),
    ),
    "two runs": Case(  # another merge finishes first
        fault=partial(on_change, ".", partial(shutil.copytree, "a", "out"), 3),
        wants=("out", "already holds"),
        leaves="out",
    ),
}


ENDS = OF_OUTPUT | {name: RECIPES[name] for name in ("misspelt parameter", "another encoding")}
ENDS |= {name: OF_FILES[name] for name in ("nan", "overflow", "other base", "bin code")}


@pytest.mark.parametrize("name", ENDS)
def test_end_to_end(name: str, tmp_path: Path, tiny_models: Path) -> None:
    """What the command said and did."""
    case, folder = ENDS[name], tmp_path / "work"
    prepare(folder, tiny_models, case)
    before = snapshot(folder)
    ended = run(["mergekit-yaml", "recipe.yml", case.out, "--quiet"], folder, case.fault)
    after, said = snapshot(folder), ended.err
    assert "Traceback" not in ended.out + said and not ended.out, said[-2000:]
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    if case.ok:
        assert ended.code == 0 and bool(said) == bool(case.wants), said
        assert all(t.isfinite().all() for t in load(folder / case.out).values())
        assert f"{case.out}/basis/basis.json" in changed
        changed = {path for path in changed if not f"{path}/".startswith(f"{case.out}/")}
    else:
        (*rest, said) = said.splitlines()
        assert ended.code and said.startswith(("Error: ", "Aborted!")), ended
        assert not [line for line in rest if line.startswith("Error: ")], rest
    assert not {path for path in changed if not path.startswith(case.leaves)}
    for want in case.wants:
        assert re.search(want, said), f"{want!r} is not in: {said[-2000:]}"


def few_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    """And a store of them, and its export."""
    deep = partial(llama, hidden_size=8, intermediate_size=8, num_hidden_layers=34)
    how = {"max_shard_size": "0.01KB", "dtypes": (torch.bfloat16,)}
    base, models = family(tmp_path, deep, "ab", **how)
    assert len([*base.glob("*.safetensors")]) > 300
    ties = commands.recipe("basis_ties", base, models, basis="none", lambda_=1.0)
    commands.write(ties, tmp_path / "recipe")
    commands.write(commands.recipe("basis_ta", base, models), tmp_path / "store")
    for words in ("merge recipe.yml out", "build store.yml store", "export store back --task a"):
        ended = run(["tvb", *words.split(), "--quiet"], tmp_path, few_files)
        assert ended.code == 0, ended.err
    found, want = load(tmp_path / "back"), load(models[0])
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


# The keys of a recipe: what is resolved, and what each mistake says


TASKS = ["math", "code", "safety", "7", "law", "med", "chat", "wiki"]


def test_defaults_are_those_of_the_contract() -> None:
    settings = resolve_settings("basis_ta", {}, TASKS)
    found = {"basis": "ae", "num_bases": None, "basis_ratio": 0.5, "seed": 0}
    found |= {"temperature": 5.0, "steps": 4000, "learning_rate": 0.01, "weight_decay": 1e-6}
    found |= {"lambda_scale": "bases", "merge_func": "sum"}
    assert all(getattr(settings, key) == value for key, value in found.items())
    halves = {(0.5, 8): 4, (0.5, 5): 3, (0.01, 8): 1, (1.0, 8): 8, (0.25, 10): 3}  # rounded up
    for (ratio, tasks), bases in halves.items():
        found = resolve_settings("basis_ta", {"basis_ratio": ratio}, ["t"] * tasks)
        assert found.bases_of(tasks) == bases
    defaults = [VARYING_KEYS["lambda"].default_for(method) for method in sorted(METHODS)]
    assert defaults == [1.0, 0.0, 0.4, 0.4, 1.0, 1.0]  # iso, negate, ta, ties, tsvm, wudi


RESOLVED: list[tuple[str, dict[str, object], str, object]] = [
    ("basis_ta", {"learning_rate": "1e-3"}, "learning_rate", 1e-3),
    ("basis_ta", {"lambda": [0.1, "0.4"], "exclude": "embed|head"}, "exclude", "embed|head"),
    ("basis_ties", {"density": {"value": 0.5}, "merge_func": "max"}, "merge_func", "max"),
    ("basis_negate", {"forget": " math , 7", "alpha": 0}, "forget", ("math", "7")),
    ("basis_negate", {"forget": 7, "alpha": "0.3"}, "forget", ("7",)),
    ("basis_wudi", {"flow_time": "exact"}, "flow_time", "exact"),
]


def test_values_are_resolved() -> None:
    for method, given, key, value in RESOLVED:
        found = getattr(resolve_settings(method, given, TASKS), key)
        assert found == value and type(found) is type(value), (method, given)
    for key, value, want in (
        ("weight", "-1", -1.0),
        ("num_bases", np.int64(2), 2),
        ("task", 1, "1"),
    ):
        assert check_value(key, value) == want and type(check_value(key, value)) is type(want)
        for wrong in (True, " ", *(() if key == "task" else ("nan", -1e300, np.bool_(True)))):
            with pytest.raises(UserError, match=f"`{key}` is "):
                check_value(key, wrong)


def test_names_of_tasks_from_paths() -> None:
    names = {"./models/math/": "math", "org/math-7b@main": "math-7b", "org/m@refs/pr/1": "m"}
    names |= {"./base+./adapters/code//": "code", "/": "/"}
    for path, name in names.items():
        assert default_task_name(ModelReference.parse(path)) == name
