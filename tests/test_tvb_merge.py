"""`tvb merge` writes what `mergekit-yaml` writes, bit by bit, and leaves nothing half-written.

Both commands run in processes of their own, each through all its cases, with different numbers of
threads: the floats may not depend on them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import recipe, refused, tvb, write
from safetensors.torch import save_file
from test_architectures import mixtral
from test_inputs import slices
from test_lora import train
from tiny import as_bin, family, gpt2, llama, load, save_tokenizer

TASKS = ("math", "code", "safety")
FAST = {"steps": 200}
NEGATE = {"forget": "code", "alpha": 0.7, "lambda": 0.1}
# Tensors of several chunks, of which each thread takes some.
wide = partial(llama, vocab_size=3000, hidden_size=96)
Folders = tuple[Path, list[Path]]


def tied() -> torch.nn.Module:
    return wide(tie_word_embeddings=True)


def with_token(folder: Path) -> Folders:
    """The second model has one token more: of several mergekit's order is that of a set."""
    base, models = family(folder, tasks=TASKS)
    state = load(models[1])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], torch.randn(1, 32)])
    save_file(state, models[1] / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((models[1] / "config.json").read_text()) | {"vocab_size": 97}
    (models[1] / "config.json").write_text(json.dumps(config))
    save_tokenizer(models[1], 96, ("<think>",))
    return base, models


def with_adapters(folder: Path) -> tuple[Path, list[str]]:
    base, _ = family(folder, tasks=())
    for seed, task in enumerate(TASKS):
        train(base, folder / task, seed=seed)
    return base, [f"{base}+{folder / task}" for task in TASKS]


def in_pickles(folder: Path) -> Folders:
    """In PyTorch's format, the base's matrices column by column."""
    base, models = family(folder, tasks=TASKS)
    for path in models:
        as_bin(path, 2)
    as_bin(base)
    turned = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in load(base).items()}
    torch.save(turned, base / "pytorch_model.bin")
    return base, models


def untied_base(folder: Path) -> Folders:
    """The base ties its output embedding, the models do not."""
    base, _ = family(folder, partial(llama, tie_word_embeddings=True), tasks=())
    _, models = family(folder / "untied", tasks=TASKS)
    return base, models


def with_store(kind: str, folder: Path, *options: str) -> Folders:
    if options:
        base, listed = with_adapters(folder)
        models: list[Any] = list(listed)
    else:
        base, models = family(folder, tasks=TASKS)
    file = write(recipe("basis_ta", base, models, basis=kind, num_bases=2), folder / "store")
    tvb("build", file, folder / "store", "--quiet", *options)
    return base, sorted((folder / "store").glob("basis-0*"))


MIXED = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)
FAMILIES: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    "llama": lambda folder: family(folder, wide, TASKS),
    "tied": lambda folder: family(folder, tied, TASKS),
    "gpt2": lambda folder: family(folder, gpt2, TASKS),
    "sharded": lambda f: family(f, wide, TASKS, dtypes=MIXED, max_shard_size="400KB"),
    "bfloat16": lambda f: family(f, wide, TASKS, dtypes=MIXED[:1]),
    "token": with_token,
    "adapters": with_adapters,
    "pickles": in_pickles,
    "experts": lambda folder: family(folder, mixtral, TASKS),
    "untied": untied_base,
    "store": partial(with_store, "balanced"),
    "pca store": partial(with_store, "pca"),
    "adapter store": lambda folder: with_store("balanced", folder, "--adapters"),
}
Case = tuple[str, str, dict[str, Any]]  # models, method, parameters; `extra` are top-level keys
BALANCED = {"basis": "balanced", "num_bases": 2}
FILTERED = [{"filter": "mlp", "value": 0.5}, {"value": 0.1}]
CASES: dict[str, Case] = {
    "addition": ("llama", "basis_ta", {**BALANCED, "lambda_scale": "tasks"}),
    "ties": ("sharded", "basis_ties", {**BALANCED, "merge_func": "mean"}),
    "ties by tensor": ("llama", "basis_ties", {"basis": "none", "trim": "tensor"}),
    "projection": ("gpt2", "basis_negate", {"basis": "rand_proj", "num_bases": 2, **NEGATE}),
    "slices": ("llama", "basis_ta", {**BALANCED, "slices": True, "lambda": [0.1, 0.9]}),
    "union": (
        "token",
        "basis_ta",
        {
            **BALANCED,
            "exclude": "embed_tokens|lm_head",
            "extra": {"tokenizer_source": "union"},
        },
    ),
}
SLOW: dict[str, Case] = {
    **{
        f"{models} {basis}": (models, "basis_ta", {"basis": basis, **more})
        for models in ("llama", "tied", "gpt2", "sharded")
        for basis, more in {"ae": FAST, "balanced": {}, "pca": {}, "none": {}}.items()
    },
    **{
        f"{models} ties {trim} {how}": (
            models,
            "basis_ties",
            {"basis": basis, "trim": trim, "merge_func": how},
        )
        for models, basis in (("sharded", "pca"), ("tied", "balanced"))
        for trim in ("model", "tensor")
        for how in ("sum", "mean", "max")
    },
    **{
        f"{models} negate {basis}": (models, "basis_negate", {"basis": basis, **NEGATE, **more})
        for models in ("tied", "sharded")
        for basis, more in {"ae": {"solver": "exact"}, "balanced": {}, "rand_proj": {}}.items()
    },
    "exclude": ("sharded", "basis_ties", {**BALANCED, "exclude": r"mlp|norm|layers\.1"}),
    "filters": ("tied", "basis_ties", {**BALANCED, "density": FILTERED, "lambda": FILTERED}),
    "by tensor, all kept": ("gpt2", "basis_ties", {"trim": "tensor", "density": 1.0, **FAST}),
    "aligned": ("token", "basis_ties", {**BALANCED, "extra": {"tokenizer_source": "base"}}),
    "aligned by tensor": (
        "token",
        "basis_ties",
        {**BALANCED, "trim": "tensor", "extra": {"tokenizer": {"source": "base"}}},
    ),
    "adapters": ("adapters", "basis_ta", BALANCED),
    "pickles": ("pickles", "basis_ties", BALANCED),
    "experts": ("experts", "basis_ties", {**BALANCED, "trim": "tensor"}),
    "experts kept": ("experts", "basis_ta", {**BALANCED, "exclude": "experts"}),
    "untied": ("untied", "basis_ta", BALANCED),
    "store": ("store", "basis_ties", {}),
    "store, forget": ("pca store", "basis_negate", NEGATE),
    "adapter store": ("adapter store", "basis_ta", {}),
    "own dtypes": ("sharded", "basis_ta", {**BALANCED, "dtype": None}),
    "own dtype": ("bfloat16", "basis_ties", {**BALANCED, "dtype": None}),
    "bfloat16": ("llama", "basis_ties", {**BALANCED, "dtype": "bfloat16"}),
    "two dtypes": (
        "sharded",
        "basis_negate",
        {**BALANCED, **NEGATE, "exclude": "norm", "extra": {"out_dtype": "float16"}},
    ),
}
ARGS: dict[str, tuple[str, ...]] = {
    "ties": ("--out-shard-size", "300K"),
    "adapters": ("--lora-merge-cache", "fused"),
    "slices": ("--no-copy-tokenizer", "--no-write-model-card"),
}
DRIVER = """
import importlib, json, os, sys, traceback
module, cases = json.load(sys.stdin)
main = importlib.import_module(module).main
failed = {}
for name, words in cases.items():
    try:
        main(words, standalone_mode=False)
    except BaseException:
        failed[name] = traceback.format_exc()
json.dump(failed, open(sys.argv[1], "w"))
"""


def run_all(cases: Mapping[str, list[str]], folder: Path, module: str, threads: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    settings["TVB_MERGEKIT_CACHE"] = "off"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder / "failed.json")],
        input=json.dumps([module, cases]),
        env=os.environ | settings,
        text=True,
        capture_output=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    """Every selected case, merged by `mergekit-yaml` in stock/ and by `tvb merge` in ours/."""
    folder = tmp_path_factory.mktemp("merged")
    wanted = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.module is request.module and "merged" in item.fixturenames
    ]
    made: dict[str, tuple[Path, Any]] = {}
    words: dict[str, dict[str, list[str]]] = {"stock": {}, "ours": {}}
    for case in wanted:
        models, method, keys = (CASES | SLOW)[case]
        if models not in made:
            made[models] = FAMILIES[models](folder / models)
        base, listed = made[models]
        keys = {"dtype": "float32", **keys}
        sliced = keys.pop("slices", False)
        document = recipe(method, base, listed, **keys)
        if sliced:
            del document["models"]
            document |= slices(base, listed, [(0, 1), (1, 2)])
        for who, first in (("stock", []), ("ours", ["merge"])):
            out = folder / who / case
            file = str(write(document, folder / case))
            words[who][case] = [*first, file, str(out), "--quiet", *ARGS.get(case, ())]
    for who, module, threads in (
        ("stock", "mergekit.scripts.run_yaml", 2),
        ("ours", "tvb_mergekit.cli", 3),
    ):
        run_all(words[who], folder / who, module, threads)
    return folder


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_every_bit_is_mergekit_s(case: str, merged: Path) -> None:
    folders = {}
    for who in ("stock", "ours"):
        failed = json.loads((merged / who / "failed.json").read_text())
        assert case not in failed, failed[case]
        folders[who] = merged / who / case
    stock, ours = folders["stock"], folders["ours"]
    want, found = load(stock), load(ours)
    assert set(found) == set(want)
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name
    names = {
        who: {p.name for p in folder.iterdir() if not p.name.startswith("model")}
        for who, folder in folders.items()
    }
    assert names["stock"] == names["ours"] and "config.json" in names["ours"]
    for name in names["stock"] - {"basis"}:
        texts = [(folder / name).read_bytes().splitlines() for folder in (ours, stock)]
        if name == "README.md":  # mergekit lists the models in the order of a set
            texts = [sorted(text) for text in texts]
        assert texts[0] == texts[1], name
    facts = [json.loads((folder / "basis" / "basis.json").read_text()) for folder in (stock, ours)]
    for each in facts:
        assert set(each.pop("seconds")) >= {"merge"}
    assert facts[0] == facts[1]
    basis = [load_basis(folder) for folder in (stock, ours)]
    assert all(torch.equal(basis[0][key], basis[1][key]) for key in basis[0])
    if case == "ties":
        shards = {path.name for path in ours.glob("model*")}
        total = len(shards) - 1
        wanted = {f"model-{n + 1:05d}-of-{total:05d}.safetensors" for n in range(total)}
        assert total > 2 and shards == wanted | {"model.safetensors.index.json"}


def load_basis(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "basis" / "basis.safetensors")


# The command


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return family(tmp_path_factory.mktemp("models"), tasks=TASKS)


def test_the_command_itself(models: Folders, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = write(recipe("basis_ta", *models, **BALANCED), out)
    script = Path(sys.executable).with_name("tvb")
    words = [str(script)] if script.exists() else [sys.executable, "-c", RUN]
    words += ["merge", str(file), str(out)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TVB_MERGEKIT_CACHE": "off"}
    done = subprocess.run(words, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    for text in ("Gram matrix", "Merged model"):
        assert text in done.stderr
    assert "Retained energy" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.yml"}


RUN = "from tvb_mergekit.cli import main; main()"


def test_what_is_refused_leaves_nothing(models: Folders, tmp_path: Path) -> None:
    base, listed = models
    out = tmp_path / "out"

    def says(document: dict[str, Any], *options: str) -> str:
        text = refused("merge", write(document, out), out, "--quiet", *options)
        assert {path.name for path in tmp_path.iterdir()} <= {"out.yml", "raw.safetensors"}
        return text

    good = recipe("basis_ta", base, listed, **BALANCED)
    assert "expected one of basis_ta" in says(recipe("linear", base, listed))
    assert "`num_base`" in says(recipe("basis_ta", base, listed, num_base=2))
    assert "500MB or 2GB" in says(good, "--memory", "many")
    assert "500M or 5B" in says(good, "--out-shard-size", "5 apples")
    assert "too little for 3 models at a time" in says(good, "--memory", "20KB")
    ties = recipe("basis_ties", base, listed, **BALANCED)
    assert "a histogram of 2 bases" in says(ties, "--memory", "60MB")
    save_file(load(base), tmp_path / "raw.safetensors")
    raw = recipe("basis_ta", tmp_path / "raw.safetensors", [str(listed[0])])
    assert "mergekit-pytorch" in says(raw)
    overflow = recipe("basis_ta", base, listed, basis="none", lambda_=1e9, dtype="float16")
    assert "overflow float16" in says(overflow)


SLOWLY = """
import os, signal, sys, time
from tvb_mergekit import writing
from tvb_mergekit.cli import main
put = writing.FolderWriter._put
def slowly(self, data):
    put(self, data)
    print("written", flush=True)
    time.sleep(0.05)
writing.FolderWriter._put = slowly
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_merge_leaves_no_model(number: int, models: Folders, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = write(recipe("basis_ta", *models, **BALANCED), out)
    words = [sys.executable, "-c", SLOWLY, "merge", str(file), str(out), "--quiet"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TVB_MERGEKIT_CACHE": "off"}
    with subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        for _ in range(4):
            assert running.stdout.readline() == "written\n"
        running.send_signal(number)
        _, told = running.communicate(timeout=60)
    assert running.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -9), told
    left = {path.name for path in tmp_path.iterdir()} - {"out.yml"}
    if number == signal.SIGKILL:
        assert not out.exists() and all(".partial-" in name for name in left)
        assert not list(tmp_path.rglob("config.json"))
        tvb("merge", file, out, "--quiet")
        assert set(load(out)) == set(load(models[0]))
    else:
        assert not left and "Traceback" not in told
