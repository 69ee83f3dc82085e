"""Beside mergekit, pip and the operating system; many models, shards and strange names."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from commands import contents, merge, recipe, tvb, write
from tiny import family, llama, load

ROOT = Path(__file__).resolve().parent.parent
STOCK = """
import sys
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods import registered_methods
from mergekit.options import MergeOptions

given = {"weight": 0.4, "density": 0.5, "t": 0.3}
options = MergeOptions(random_seed=1, quiet=True, write_model_card=False)  # its order is a set's
known = {method.spec.name: method.spec for method in registered_methods()}
ours = {name for name in known if name.startswith("basis_")}
assert len(ours) == int(sys.argv[2]) and len(known) >= 20, known
for name in known.keys() - ours:
    keys = {parameter.name for parameter in known[name].parameters}
    models = {1: ["./a"], 2: ["./base", "./a"]}.get(known[name].contract.max_inputs, ["./a", "./b"])
    document = {"merge_method": name, "models": [{"model": model} for model in models]}
    document["parameters"] = {key: value for key, value in given.items() if key in keys}
    if known[name].contract.base.value != "ignored":
        document["base_model"] = "./base"
    run_merge(MergeConfiguration.model_validate(document), f"{sys.argv[1]}/{name}", options)
"""


@pytest.mark.slow
def test_stock_methods_write_the_same_bytes(tiny_models: Path, tmp_path: Path) -> None:
    """With our hook, and without it."""
    code = f"import tvb_mergekit_hook; tvb_mergekit_hook.install()\n{STOCK}"
    for kind, disabled, ours in (("with", "", 6), ("without", "1", 0)):
        env = {"TVB_MERGEKIT_DISABLE": disabled, "OMP_NUM_THREADS": "1"}
        env = os.environ | env | {"PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", code, tmp_path / kind, str(ours)]
        subprocess.run(words, cwd=tiny_models, env=env, check=True, timeout=300)
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def few_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    """And a store of them, and its export."""
    deep = partial(llama, hidden_size=8, intermediate_size=8, num_hidden_layers=34)
    base, models = family(tmp_path, deep, "ab", max_shard_size="0.01KB", dtypes=(torch.bfloat16,))
    assert len([*base.glob("*.safetensors")]) > 300
    write(recipe("basis_ties", base, models, basis="none", lambda_=1.0), tmp_path / "recipe")
    write(recipe("basis_ta", base, models), tmp_path / "store")
    for words in ("merge recipe.yml out", "build store.yml store", "export store back --task a"):
        ended = processes.run(["tvb", *words.split(), "--quiet"], tmp_path, few_files)
        assert ended.code == 0, ended.err
    found, want = load(tmp_path / "back"), load(models[0])
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def test_names_of_tasks_that_mergekit_would_split(tiny_models: Path, tmp_path: Path) -> None:
    """At `+` begins an adapter, at `@` a revision, at `/` a vector of a store."""
    names, models = ["math/easy", "x+y", "a@b"], [tiny_models / name for name in "abc"]
    own = {number: {"task": name} for number, name in enumerate(names)}
    store = tmp_path / "store"
    tvb("build", write(recipe("basis_ta", tiny_models / "base", models, own), store), store)
    over = recipe("basis_ta", tiny_models / "base", [store / name for name in names], basis="none")
    made = merge(over, tmp_path / "out")
    assert made.facts["tasks"] == names
    tvb("export", store, tmp_path / "all", "--all", "--quiet")
    for name, model in zip(names, models, strict=True):  # forgetting c++: test_cli.py
        (folder,) = (tmp_path / "all").glob(re.sub(r"\W", "?", name))
        back = load(folder)
        assert all(torch.allclose(back[n], tensor, atol=1e-6) for n, tensor in load(model).items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["editable", "sdist"])
def test_other_installations(kind: str, environment: Any, tmp_path: Path) -> None:
    """Of the source tree, and of its archive (of a wheel: test_autoload.py)."""
    venv, what = environment, ["-e", str(ROOT)]
    if kind == "sdist":
        words = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path / "made"]
        subprocess.run(words, cwd=ROOT, check=True)
        what = [str(archive) for archive in (tmp_path / "made").iterdir()]
    before = venv.files()
    venv.pip("install", "--no-deps", "--no-compile", "--no-build-isolation", *what)
    code = "from mergekit.merge_methods import get; import tvb_mergekit as t; get('basis_ta')"
    found = venv.run("-c", f"{code}; print(t.__file__)").stdout
    assert found.startswith(str(ROOT)) == (kind == "editable")
    venv.pip("uninstall", "-y", "tvb-mergekit")
    assert venv.files() == before
