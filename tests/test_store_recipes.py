"""Recipes over the bases of a store give what the same recipes give over the T models."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Result, assert_same, merge, ready, recipe, tvb
from safetensors.torch import save_file
from test_store import KINDS, SIZES, raw_family, read
from tiny import TASKS, llama, load
from torch import Tensor
from worlds import FAMILIES, Models, World, decoder, hub

from tvb_mergekit.errors import MergeRefused, UserError
from tvb_mergekit.plugin.document import from_mapping
from tvb_mergekit.plugin.inputs import Options, read_inputs
from tvb_mergekit.store.build import build_store
from tvb_mergekit.store.recipes import ALL_TASKS, templates


def stored(made: Models, out: Path, own: Any = None, **keys: Any) -> Path:
    build_store(read(made.base, made.listed, own, **keys), out)
    return out


def over(folder: Path, base: Path, method: str, out: Path, *args: str, **keys: Any) -> Result:
    own, extra = keys.pop("own", None), keys.pop("extra", None)
    models = sorted(folder.glob("basis-0*"))
    return merge(recipe(method, base, models, own, extra=extra, **keys), out, *args)


def assert_alike(found: Result, want: Result, start: Mapping[str, Tensor]) -> None:
    """Equal up to rounding in float32; Trim may turn an entry that is moved over its threshold."""
    assert {n: (t.shape, t.dtype) for n, t in found.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in want.tensors.items()
    }
    base, wanted, made = (
        torch.cat([state[n].double().flatten() for n in want.tensors])
        for state in (start, want.tensors, found.tensors)
    )
    near = (made - wanted).abs() <= 0.05 * (wanted - base).abs() + 1e-6
    assert (~near).double().mean() <= (2e-3 if want.facts["method"] == "basis_ties" else 0)
    moved, off = (wanted - base)[near], (made - wanted)[near]
    assert off.norm() <= 1e-6 * moved.norm() + 2.0**-23 * 30  # the float32 weights themselves


def test_an_output_embedding_that_only_the_models_have(tmp_path: Path) -> None:
    """A basis cannot hold two tensors for one of the base."""
    found = FAMILIES["tied"](tmp_path / "in")
    for path in found.listed:
        state = load(path)
        state["lm_head.weight"] = state["model.embed_tokens.weight"] + 0.01
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises((UserError, MergeRefused), match=r"lm_head\.weight"):
        stored(found, tmp_path / "no", **KINDS["balanced"])


def test_weights_of_bases_and_tasks_with_names(world: World, tmp_path: Path) -> None:
    found = world("llama")
    own = {0: {"task": "sums", "weight": 2.0}, 1: {"task": "a b"}}
    keys = {"forget": "a b, sums", "alpha": 0.5}
    folder = stored(found, tmp_path / "store", own=own, **KINDS["pca"])
    want = found.merge("basis_negate", tmp_path / "models", own=own, **KINDS["pca"], **keys)
    made = over(folder, found.base, "basis_negate", tmp_path / "merged", **keys)
    assert_alike(made, want, found.states[0])
    facts = made.facts
    assert facts["tasks"] == ["sums", "a b", *TASKS[2:]] and facts["from_store"] == str(folder)
    assert facts["method"] == "basis_negate" and facts["parameters"]["alpha"] == 0.5
    for name, value in want.basis.items():
        assert torch.allclose(torch.from_numpy(made.basis[name]), torch.from_numpy(value))
    weighted = over(
        folder, found.base, "basis_ta", tmp_path / "weighted", own={0: {"weight": 0.0001}}
    )
    assert weighted.facts["parameters"]["basis_weights"] == [0.0001, 1.0]


def test_the_base_s_tokenizer_and_slices(world: World, tmp_path: Path) -> None:
    found = world("llama")
    folder = stored(found, tmp_path / "store", **KINDS["balanced"])
    plain = over(folder, found.base, "basis_ta", tmp_path / "plain")
    extra = {"tokenizer_source": "base"}
    made = over(folder, found.base, "basis_ta", tmp_path / "tokenizer", extra=extra)
    assert_alike(made, plain, found.states[0])
    listed = [str(found.base), *map(str, sorted(folder.glob("basis-0*")))]
    slices = [
        {"sources": [{"model": model, "layer_range": [layer, layer + 1]} for model in listed]}
        for layer in (0, 1, 1)
    ]
    document = {
        "merge_method": "basis_ta", "base_model": str(found.base), "slices": slices,
        "dtype": "float32",
    }  # fmt: skip
    deep = merge(document, tmp_path / "slices")
    for name, tensor in plain.tensors.items():
        assert torch.equal(deep.tensors[name], tensor)
        if ".layers.1." in name:
            assert torch.equal(deep.tensors[name.replace(".1.", ".2.")], tensor)


@pytest.mark.parametrize("words", [("--keep", "0.5"), ("--lossless",)])
def test_vectors_without_a_tokenizer_have_the_base_s(words: Sequence[str], tmp_path: Path) -> None:
    """transformers makes up a tokenizer for a folder of Qwen2 without one."""
    made = hub(decoder("Qwen2"), tmp_path / "in", dtypes=[torch.bfloat16])
    folder, out = tmp_path / "store", tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer_config.json"):  # as of a fused adapter
        (Path(made.listed[0]) / name).unlink()
    made.build(folder, *words, basis="none")
    tvb("export", folder, out, "--task", made.tasks[0], "--quiet")
    assert (out / "tokenizer.json").read_bytes() == (made.base / "tokenizer.json").read_bytes()

    def merged(name: str, fails: bool = False, **tokenizer: object) -> Result:
        vectors = [folder / task for task in made.tasks]
        keys = {"extra": {"tokenizer": tokenizer} if tokenizer else {}, "basis": "none"}
        over = recipe("basis_ta", made.base, vectors, dtype=None, **keys)
        return merge(over, tmp_path / name, fails=fails)

    assert_same(merged("plain"), merged("tokenizer", source="base"))
    tokens = {"t5": {"source": str(made.base), "force": True}}
    assert "`force` makes rows" in merged("forced", True, source="base", tokens=tokens).output


def test_models_with_code_of_their_own(tmp_path: Path) -> None:
    found = hub(llama, tmp_path / "in")
    code = "from transformers import LlamaConfig\nclass Mine(LlamaConfig):\n    model_type = 'm'\n"
    for path in (found.base, *found.listed):
        config = json.loads((path / "config.json").read_text())
        more = {"model_type": "m", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
        (path / "config.json").write_text(json.dumps(config | more))
        (path / "configuration_mine.py").write_text(code)
    document, flag = found.recipe(**KINDS["balanced"]), "--trust-remote-code"
    made = read_inputs(from_mapping(document), Options(trust_remote_code=True))
    build_store(made, tmp_path / "store")
    merged = over(tmp_path / "store", found.base, "basis_ta", tmp_path / "merged", flag)
    assert_alike(merged, merge(document, tmp_path / "m", flag), found.states[0])


# The recipes of `tvb merge STORE --method`


@pytest.mark.parametrize("kind", ["balanced", "ae"])
def test_lambda_1_means_as_much_before_and_after_a_task_joins(kind, world, tmp_path):
    """Of methods whose lambda is 1: over balanced bases that of all task vectors."""
    found = world("llama")
    folder = stored(found, tmp_path / "store", **KINDS[kind])
    before = [ready(folder, name)["parameters"] for name in ("iso", "tsvm", "wudi")]
    new = found.listed[0]
    tvb("add", folder, new, "--task", "again", "--compress", kind, "--force", "--quiet")
    after = [ready(folder, name)["parameters"] for name in ("iso", "tsvm", "wudi")]
    scale = "tasks" if kind == "balanced" else "bases"
    assert before == after == [{"lambda": 1.0, "lambda_scale": scale}] * 3


def test_the_ready_recipes_run(world: World, tmp_path: Path) -> None:
    """They differ only in methods and parameters; test_merges.py runs those of stores."""
    found, built = world("llama"), {**KINDS["pca"], "lambda": 0.25}
    folder = stored(found, tmp_path / "my store", **built)
    forgets = [f"forget-{task}" for task in TASKS]
    kept = None
    for name in (*ALL_TASKS, forgets[0]):
        document = ready(folder, name)
        keys, method = document["parameters"], document["merge_method"]
        lambda_ = 0.25 if name in ("add", "ties") else 1.0  # the recipe's is of another method
        forget = {"forget": TASKS[0], "alpha": 1.0, "lambda": 0}
        assert (forget if name in forgets else {"lambda": lambda_}).items() <= keys.items()
        rest = {k: v for k, v in document.items() if k not in ("merge_method", "parameters")}
        kept = kept or rest
        assert method == ALL_TASKS.get(name, "basis_negate") and rest == kept
        if name in ("add", "wudi", forgets[0]):
            made = merge(document, tmp_path / name)
            want = found.merge(method, tmp_path / f"m-{name}", **KINDS["pca"], **keys)
            assert_alike(made, want, found.states[0])
            files = [{path.name for path in each.folder.iterdir()} for each in (made, want)]
            assert files[0] == files[1]


def test_task_names_that_no_file_could_have(tmp_path: Path) -> None:
    base, models = raw_family(tmp_path / "in", SIZES)
    own = {0: {"task": "a/b"}, 1: {"task": "A b"}, 2: {"task": "ü" * 300}, 3: {"task": "../x"}}
    built = build_store(read(base, models, own, **KINDS["balanced"]), tmp_path / "store")
    assert built.path is not None
    every = templates(built.facts, "", "")
    forgotten = [r["parameters"]["forget"] for n, r in every.items() if n.startswith("forget-")]
    assert forgotten == list(built.tasks)


def test_mergekit_merges_exported_bases(world: World, tmp_path: Path) -> None:
    """Their task arithmetic is addition over the bases."""
    made = world("store of balanced")
    tvb("export", made.listed[0].parent, tmp_path / "models", "--all-bases", "--quiet")
    models, own = sorted((tmp_path / "models").iterdir()), {n: {"weight": 1.0} for n in range(2)}
    keys = {"normalize": False, "lambda_": 0.7}
    theirs = merge(recipe("task_arithmetic", made.base, models, own, **keys), tmp_path / "theirs")
    ours = made.merge("basis_ta", tmp_path / "ours", tasks=made.tasks[:2], lambda_=0.7)
    for name, tensor in ours.tensors.items():
        torch.testing.assert_close(theirs.tensors[name], tensor, rtol=0, atol=3e-7)


# Stores that stand, and what does not fit them


@pytest.fixture(scope="module")
def standing(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that was moved, a model of it, and stores."""
    place = tmp_path_factory.mktemp("standing")
    found = world("llama")
    for name, kind in {"one": "pca", "other": "balanced"}.items():
        stored(found, place / name, **KINDS[kind])
    copied = {"base": found.base, "math": found.listed[0], "copy": place / "one"}
    for name, folder in copied.items():
        shutil.copytree(folder, place / name)
    return place


ONE, OTHER = (("one/basis-000", "one/basis-001"), ("other/basis-000", "other/basis-001"))
REFUSED: dict[str, tuple[str, str, Sequence[str], dict[str, Any]]] = {
    # the message -> method, base, what is listed, parameters
    "`num_bases` was set when": ("basis_ta", "base", ONE, {"num_bases": 2}),
    "make them with `tvb export`": ("task_arithmetic", "base", ONE, {"weight": 0.5}),
    "and linear takes models": ("linear", "base", ("math", "one/basis-000"), {"weight": 1}),
    "nothing else, basis-000, basis-001": ("basis_ta", "base", ONE[:1], {}),
    "basis-000, basis-001, mean of": ("basis_ta", "base", (*ONE, "one/mean"), {}),
    "has no configuration to read": ("basis_ta", "base", ("one",), {}),
    "two stores": ("basis_ta", "base", ("one/basis-000", "copy/basis-001"), {}),
    "is not a vector of a store": ("basis_ta", "base", ("math", *ONE), {}),
    "a difference from its base": ("basis_ta", "one/basis-000", OTHER, {}),
    "belongs to the base": ("basis_ta", "math", ONE, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_recipes_that_do_not_fit_the_store(message: str, standing: Path, tmp_path: Path) -> None:
    method, base, names, keys = REFUSED[message]
    document = recipe(method, standing / base, [standing / name for name in names], **keys)
    output = merge(document, tmp_path / "out", fails=True).output
    (line,) = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert message in line and "Traceback" not in output


def test_a_basis_is_not_a_model_and_a_moved_base_is_the_base(standing, tmp_path):
    bases = [standing / name for name in ONE]
    with pytest.raises(Exception, match="list the fine-tuned models"):
        build_store(read(standing / "base", bases), tmp_path / "store")
    merge(recipe("basis_ta", standing / "base", bases), tmp_path / "out")
