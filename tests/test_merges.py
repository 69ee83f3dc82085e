"""Every merge equals the dense reference in float64, whatever is merged and by which command."""

import copy
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from commands import Result, assert_close, assert_same, contents, merge, recipe, slices, tvb, write
from mergekit import merge_methods
from reference import Dense, expect
from tiny import TASKS, family, llama, load
from torch import Tensor
from worlds import ARCHITECTURES, EMBEDDING, HEAD, THREE, Models, World, save, state_dicts

import tvb_mergekit
from tvb_mergekit.tensors import passes

Tensors = Mapping[str, Tensor]
FAST = {"steps": 300}
NONE = {"basis": "none"}
PCA = {"basis": "pca", "num_bases": 2}
BALANCED = {"basis": "balanced", "num_bases": 2}
FORGET = {"forget": "code", "alpha": 0.7}
FORGOTTEN = {**PCA, **FORGET}
SCALED = {"lambda_scale": "tasks"}
BY_TASKS = {**BALANCED, **SCALED}
TVB = "tvb merge"
TA, TIES, NEGATE = "basis_ta", "basis_ties", "basis_negate"
ISO, TSVM, WUDI = "basis_iso", "basis_tsvm", "basis_wudi"
ONCE = ((TA, BALANCED), (TIES, {**PCA, "density": 0.5}), (NEGATE, FORGOTTEN))


@dataclass(frozen=True)
class Case:
    """A merge of one of FAMILIES; `own`: parameters of its models, `extra`: keys at the top.
    `varying`: a key, its value in the recipe, and its value by the name of a tensor."""

    models: str
    method: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    driver: str = "mergekit-yaml"
    own: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    form: str = "models"  # or slices, modules
    args: tuple[str, ...] = ()
    varying: tuple[str, list[Any], Callable[[str], float]] | None = None

    def document(self, models: Models) -> dict[str, Any]:
        own = {n: {**models.own.get(n, {}), **self.own.get(n, {})}
               for n in {*models.own, *self.own}}  # fmt: skip
        keys = dict(self.keys)
        if self.varying is not None:
            keys[self.varying[0]] = self.varying[1]
        made = recipe(self.method, models.base, models.listed, own, extra=self.extra, **keys)
        if self.form == "modules":
            made["modules"] = {"default": {"models": made.pop("models")}}
        elif self.form == "slices":
            made |= slices(models.base, models.listed, [(0, 1), (1, 2)], own)
            del made["models"]
        return made


WEIGHTS = {0: {"weight": -1.5, "task": "sums"}, 2: {"weight": 0.5}}
FILTERS: list[Any] = [{"filter": "self_attn", "value": 0.1}, {"filter": "mlp", "value": 0.9}]
FILTERS += [{"value": 0.5}]
GRADIENT = ["25e-2", 0.75]  # YAML reads numbers without a dot as text


def varied(method: str, keys: Mapping[str, Any], key: str, filters: bool) -> Case:
    """mergekit puts layer i of n at i / (n - 1) between two values, and all other tensors at 0."""

    def by_filter(name: str) -> float:
        return 0.1 if "self_attn" in name else 0.9 if "mlp" in name else 0.5

    def by_layer(name: str) -> float:
        found = re.search(r"layers\.(\d)\.", name)
        return (0.25, 0.5, 0.75)[int(found[1]) if found else 0]

    said = (key, FILTERS, by_filter) if filters else (key, GRADIENT, by_layer)
    return Case("three layers", method, keys, varying=said)


TOKENIZER = {"tokenizer": {"source": "base"}}
SOURCE = {"tokenizer_source": "base"}
CASES = {
    **{name: Case(name, *ONCE[n % 3]) for n, name in enumerate(ARCHITECTURES)},
    # each basis and its options
    "ae": Case("llama", TA, {"lambda": -0.7, **FAST}),
    "balanced": Case("mixed dtypes", NEGATE, {**BALANCED, **FORGET}),
    "linear_ae": Case("llama", TIES, {"basis": "linear_ae", "merge_func": "max", "temperature": 2.0,
        **FAST}),
    "pca": Case("mixed dtypes", TIES, {**PCA, "merge_func": "mean"}),
    "rand_select": Case("llama", TIES, {"basis": "rand_select", "num_bases": 2}),
    "none": Case("mixed dtypes", TIES, {**NONE, "density": 0.1}),
    # methods for matrices
    "iso": Case("llama", ISO, BY_TASKS),
    "iso, common": Case("gpt2", ISO, {**NONE, "common": 0.7, "lambda": 0.8}),
    "tsvm": Case("mixed dtypes", TSVM, {**PCA, **SCALED}),
    "tsvm, some": Case("llama", TSVM, {**NONE, "matrices": "mlp|embed|norm"}),
    "wudi": Case("gpt2", WUDI, {"basis": "rand_select", "basis_ratio": 0.3}),
    "wudi, layers": varied(WUDI, {**NONE, "transposed": "up_proj"}, "lambda", False),
    "wudi, exact, adapters": Case("adapters", WUDI, {**BALANCED, "flow_time": "exact"}, TVB),
    "iso, experts": Case("mixtral", ISO, BALANCED, TVB),
    "wudi, weights": Case("mixed formats", WUDI, NONE, own=WEIGHTS),
    "iso, common, adapters": Case("adapters", ISO, {**NONE, "common": 0.6}, TVB),
    "tsvm, tokens": Case("two more tokens", TSVM, PCA, extra=SOURCE),
    # how many models
    "many models": Case("many models", TA, {**BY_TASKS, "lambda": 0.1},
        args=("--out-shard-size", "30K")),
    # keys
    "lambda by filter": varied(TA, {**PCA, **SCALED}, "lambda", True),
    "lambda by layer, ties": varied(TIES, {**PCA, **SCALED, "merge_func": "mean"}, "lambda", False),
    "density by filter": varied(TIES, PCA, "density", True),
    "alpha by filter": varied(NEGATE, {**BALANCED, **FORGET}, "alpha", True),
    # how checkpoints are stored
    "adapters": Case("adapters", NEGATE, FORGOTTEN),
    # vocabularies
    "more tokens": Case("two more tokens", TIES, PCA, extra=TOKENIZER),
    "more tokens of an encoder": Case("encoder of more tokens", TA, PCA, extra=SOURCE),
    "other order": Case("other order", TA, PCA, extra=SOURCE),
    "union": Case("tied", TA, PCA, extra={"tokenizer_source": "union"}),
    # recipes
    "exclude": Case("mixed formats", TIES, {**BALANCED, "exclude": r"mlp|norm|layers\.1"}),
    "exclude experts": Case("mixtral", TA, {**BALANCED, "exclude": "experts"}),
    "slices": Case("mixed formats", NEGATE, {**PCA, "forget": "sums", "alpha": 0.5}, own=WEIGHTS,
        form="slices"),
    "modules": Case("tied", TIES, PCA, own=WEIGHTS, form="modules"),
    # other commands
    "tvb merge": Case("mixed dtypes", TIES, BALANCED, TVB),
    "tvb merge, experts": Case("mixtral", TIES, PCA, TVB),
}  # fmt: skip


def run(case: Case, models: Models, out: Path) -> Result:
    if case.driver == TVB:
        tvb("merge", write(case.document(models), out), out, "--quiet", *case.args)
        return Result(out)
    return merge(case.document(models), out, *case.args)


def dense_of(case: Case, models: Models) -> Dense:
    base, *states = models.states
    excluded = case.keys.get("exclude", "^$")
    left = {*models.copied, *models.same}
    names = [name for name in base if name not in left and not re.search(excluded, name)]
    weights = [case.own.get(n, {}).get("weight", 1.0) for n in range(len(states))]
    return Dense(base, states, names, weights)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_reference(name, world, tmp_path, monkeypatch):
    case = CASES[name]
    if [*CASES].index(name) % 2:  # in many pieces, which several threads read
        monkeypatch.setattr(passes, "PIECE", 1)
        monkeypatch.setattr(passes, "SHORTEST", 256)
    models = world(case.models)
    tasks = [case.own.get(n, {}).get("task", task) for n, task in enumerate(models.tasks)]
    result = run(case, models, tmp_path / "out")
    tensors, facts = result.tensors, result.facts
    dense = dense_of(case, models)
    key, _, of_tensor = case.varying or ("", [], float)
    keys = dict(case.keys)
    if case.models == "gpt2" and case.method == WUDI:  # by its config.json
        keys["transposed"] = r"c_(attn|proj|fc)\."
        assert facts["parameters"]["transposed"].startswith(r"\bc_")
    varying = {key: of_tensor} if key else None
    want = expect(dense, case.method, keys, result.basis, tasks, varying)
    if want.boundary is not None:
        share = sum(int(b.sum()) for b in want.boundary.values()) / len(dense.theta)
        # task vectors between bfloat16 checkpoints have many equal magnitudes
        assert share <= (0.03 if case.models == "mixed dtypes" else 5e-3), share
    left = set(dense.base) - set(dense.names) - set(models.same)
    assert set(dense.base) - set(models.same) <= set(tensors) <= {*dense.base, *models.same}
    assert facts["num_parameters"] == len(dense.theta) and facts["tasks"] == tasks
    lengths = [np.linalg.norm(tau) for tau in dense.tau.T]
    assert [facts["norms"][task] for task in tasks] == pytest.approx(lengths, rel=1e-5)
    known = 0 if "adapters" in case.models else np.linalg.norm(dense.theta)  # factors need no base
    assert facts["norms"]["base"] == pytest.approx(known, rel=1e-5)
    assert left == set(facts["left_out"]) - set(models.same)
    assert all(tensor.dtype == torch.float32 for n, tensor in tensors.items() if n not in left)
    assert not key or facts["parameters"][key] == sorted({of_tensor(n) for n in dense.names})
    if models.loader:
        tensors = loaded(models.loader, result)
    flows = case.method == WUDI and keys.get("flow_time") != "exact"  # in float32
    strict = 2e-5 if flows else 2e-6
    assert_close(tensors, want.tensors, dense.base, want.boundary, strict)
    for name in left:
        assert torch.equal(tensors[name].double(), dense.base[name].double()), name
    for name in set(models.same) & set(tensors):
        assert torch.equal(tensors[name], tensors[models.same[name]])


def loaded(loader: str, result: Result) -> Tensors:
    """The merged model as transformers loads it, nothing missing and nothing left over."""
    model, info = getattr(transformers, loader).from_pretrained(
        result.folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state: Tensors = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in result.tensors.items())
    if {HEAD, EMBEDDING} <= set(state) and not torch.equal(state[HEAD], state[EMBEDDING]):
        assert not model.config.tie_word_embeddings  # other loaders go by the configuration
    return state


EXACT = {**NONE, "flow_time": "exact"}
IN_MEMORY = [("ckpt", NEGATE, {**PCA, **FORGET}), ("bin", ISO, NONE), ("safetensors", TSVM, NONE)]
IN_MEMORY += [("bin", WUDI, EXACT), ("bin", WUDI, {**EXACT, "matrices": "."})]


@pytest.mark.parametrize(("ending", "method", "keys"), IN_MEMORY)
def test_the_library_reads_files_and_leaves_states_alone(ending, method, keys, tmp_path):
    """Of a training script: pickled and nested, tied, channels last, of any shape; not shared."""
    models = state_dicts(tmp_path, ending, twice=ending != "safetensors")
    before, (base, *states) = copy.deepcopy(models.states), map(dict, models.states)
    listed = dict(zip(models.tasks, states, strict=True))
    case = Case("", method, {**keys, "exclude": "kernel"}, own={0: {"weight": -1.5}})
    want = expect(dense_of(case, models), method, case.keys, {}, models.tasks).tensors
    of_build = {k: v for k, v in case.keys.items() if k in ("basis", "num_bases", "exclude")}
    of_merge = {key: value for key, value in keys.items() if key not in of_build}
    weights = {"math": -1.5, "code": 1.0, "safety": 1.0}
    for start, given in ((base, listed), (models.base, models.models)):
        bases = tvb_mergekit.build(start, given, weights=weights, **of_build)
        assert bases.facts.left_out["ids"] == "not floating point in the base (int64)"
        assert bases.facts.left_out["kernel"] == "excluded by the recipe"
        merged = tvb_mergekit.merge(bases, start, method, **of_merge)
        assert_close(merged, want, base, strict=1e-5 if method == WUDI else 2e-6)
        assert all(merged[n].dtype == t.dtype for n, t in base.items())
        used = {t.data_ptr() for state in (base, *states) for t in state.values()} - {0}
        assert not used & {tensor.data_ptr() for tensor in merged.values()}
    for old, new in zip(before, (base, *states), strict=True):
        assert all(torch.equal(tensor, new[name]) for name, tensor in old.items())


def test_balanced_addition_is_mergekit_s_task_arithmetic_over_all_tasks(world, tmp_path):
    models = world("llama")
    weights = {index: {"weight": 1.0} for index in range(5)}
    keys = {"normalize": False, "lambda": 0.3}
    document = recipe("task_arithmetic", models.base, models.listed, weights, **keys)
    stock = {n: t.double() for n, t in merge(document, tmp_path / "stock").tensors.items()}
    for number, sizes in enumerate((NONE, {"basis": "balanced", "num_bases": 1}, BALANCED)):
        ours = models.merge(TA, tmp_path / str(number), **sizes, **SCALED, lambda_=0.3)
        assert_close(ours.tensors, stock, models.states[0])


def test_slices_may_repeat_drop_and_reorder_layers(tmp_path):
    """A repeated layer is one tensor of the task vector; a dropped one is none."""
    order = [2, 0, 3, 0]
    base, models = family(tmp_path, lambda: llama(num_hidden_layers=4), THREE)
    states = [load(path) for path in (base, *models)]
    names = [n for n in states[0] if ".layers." not in n or int(n.split(".")[2]) in order]
    dense = Dense(states[0], states[1:], names)
    made = recipe(TIES, base, models, **PCA)
    del made["models"]
    made |= slices(base, models, [(layer, layer + 1) for layer in order])
    result = merge(made, tmp_path / "out")
    assert result.facts["num_parameters"] == len(dense.theta)
    found = loaded("AutoModelForCausalLM", result)
    for place, layer in enumerate(order):
        first = order.index(layer)
        here, there = (f".layers.{n}." for n in (place, first))
        for name in [name for name in found if here in name]:
            assert torch.equal(found[name], found[name.replace(here, there)]), name
    want = expect(dense, TIES, PCA, result.basis, THREE)

    def first_place(name: str) -> str:
        return re.sub(r"(?<=layers\.)\d", lambda layer: str(order.index(int(layer[0]))), name)

    unrolled = {name: found[first_place(name)] for name in names}
    assert_close(unrolled, want.tensors, dense.base, want.boundary, strict=1e-5)


# dtypes: what is cast is the output, once, never the inputs


def test_dtypes_of_files(world: World, tmp_path: Path) -> None:
    document = world("mixed dtypes").recipe(TIES, dtype=None, **NONE, density=0.1)

    def merged(name: str, **dtypes: Any) -> Result:
        return merge(document | dtypes, tmp_path / name)

    whole = merged("whole", dtype="float32")
    assert_same(merged("promoted"), whole)  # bfloat16, float16 and float32 together
    for kind in (torch.bfloat16, torch.float16):
        name = str(kind).removeprefix("torch.")
        for key in ("dtype", "out_dtype"):
            cast = merged(f"{key} {name}", **{key: name})
            for tensor, values in whole.tensors.items():
                assert torch.equal(cast.tensors[tensor], values.to(kind)), tensor
                assert cast.tensors[tensor].dtype == kind


# Equal bits

# Options of mergekit-yaml, and files that are missing
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json"}
OPTIONS: dict[str, set[str]] = {
    "--no-write-model-card --random-seed 5": {"README.md", "mergekit_config.yml"},
    "--lazy-unpickle --clone-tensors --async-write --read-to-gpu --low-cpu-memory "
        "--no-safe-serialization": set(),
    "--no-copy-tokenizer -v": TOKENIZER_FILES,
}  # fmt: skip


def test_the_same_bits_by_more_threads_and_with_options(world, tmp_path, monkeypatch):
    """Over many pieces (shards, `tvb merge`, and more processes: CASES, below, test_ranks.py)."""
    monkeypatch.setattr(passes, "PIECE", 1)
    monkeypatch.setattr(passes, "SHORTEST", 256)
    document = world("llama").recipe(TIES, **BALANCED, merge_func="mean")
    plain, before = merge(document, tmp_path / "plain"), torch.get_num_threads()
    torch.set_num_threads(2)
    found = [merge(document, tmp_path / f"o{len(o)}", *o.split()) for o in OPTIONS]
    torch.set_num_threads(before)
    for each, gone in zip(found, OPTIONS.values(), strict=True):
        assert_same(each, plain)
        assert all((each.basis[key] == value).all() for key, value in plain.basis.items())
        assert contents(plain.folder).keys() ^ contents(each.folder).keys() == gone


# Whole commands (`mergekit-yaml`: test_manual.py)


@pytest.mark.parametrize("command", ["tvb merge", "mergekit-multi"])
def test_commands(command: str, world: World, tmp_path: Path) -> None:
    processes = pytest.importorskip("processes", reason="processes are forked")
    out, document = tmp_path / "out", world("llama").recipe("basis_ties", **BALANCED)
    words = [*command.split(), str(write(document, out)), str(out)]
    if command == "mergekit-multi":
        words[-1:] = ["-I", str(tmp_path), "--out-path", str(out), "--lazy-unpickle"]
        words += ["--lora-merge-cache", str(tmp_path / "cache")]
    done = processes.run(words, tmp_path)
    assert done.code == 0, done.err
    assert "Cosines" not in done.out and len(done.out.splitlines()) <= 10
    for text in ("by basis_ties", "Base: ", "Retained energy", "Written to", *TASKS):
        assert text in done.out
    told = "--lazy-unpickle, --lora-merge-cache: without effect on our methods" in done.err
    assert told == ("--lazy-unpickle" in words)
    assert "\r" not in done.err and "Merged model: 100%" in done.err  # no terminal
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.yml"}
    assert_same(Result(out), merge(document, tmp_path / "same"))


# Refusals


def test_mergekit_pytorch_and_tensors_in_memory(tmp_path: Path) -> None:
    """Refused before a file is read: each tensor would get a basis of its own."""
    document = recipe("basis_ta", Path("base.pt"), ["a.pt"])
    told = merge(document, tmp_path / "out", command="mergekit-pytorch", fails=True).output
    assert told.startswith("Error: basis_ta needs all tensors") and told.count("\n") == 1
    with pytest.raises(RuntimeError, match=r"use mergekit-yaml, or tvb_mergekit\.merge"):
        merge_methods.merge_state_dicts([{"w": torch.ones(2)}] * 2, "basis_ta", base=0)


def test_new_tokens_of_a_union(world: World, tmp_path: Path) -> None:
    """The base has no weights for them."""
    made = world("two more tokens")
    document = made.recipe(basis="none", extra={"tokenizer_source": "union"})
    told = merge(document, tmp_path / "out", fails=True).output
    assert told.count("Error: ") == 1 and "2 tokens that the base lacks" in told
    tokens = {"source": "base", "tokens": {"new": {"source": {"kind": "zero"}}}}
    added = made.recipe(basis="none", extra={"tokenizer": tokens})
    assert "lacks (such as 'new')" in merge(added, tmp_path / "out", fails=True).output
    document["parameters"]["exclude"] = "embed_tokens|lm_head"
    assert merge(document, tmp_path / "left").tensors["lm_head.weight"].shape == (98, 32)


def test_mergekit_multi_merges_what_it_has_merged(world, tmp_path, monkeypatch):
    """Each step of ours is what mergekit-yaml writes."""
    base, models = world("llama").base, world("llama").listed
    made = {"first": recipe(TA, base, models, **PCA)}
    made["second"] = recipe(TIES, Path("first"), models, **PCA)
    own = {0: {"weight": 1.0}}
    third = recipe("task_arithmetic", base, ["second"], own, normalize=False, lambda_=0.5)
    named = [{"name": name} | document for name, document in made.items()]
    words = (tmp_path / "out", "-I", str(tmp_path))
    out = merge([*named, third], *words, command="mergekit-multi").tensors
    monkeypatch.chdir(tmp_path)  # where `first` and `second` are
    for name, document in made.items():
        assert_same(Result(Path(name)), merge(document, Path("alone") / name))
    dense = Dense.of(base, [Path("second")])
    assert_close(out, dense.split(dense.theta + 0.5 * dense.tau[:, 0]), dense.base)


# What is found on the way


WEIGHT = "model.layers.0.mlp.up_proj.weight"
NAN, ONE = f"tensor `{HEAD}` of task `code` holds 1 NaN", {"basis": "pca", "num_bases": 1}
FAULTS: list[tuple[str, str, dict[str, Any], str, float, str]] = [
    ("llama", TA, BALANCED, "", 0.0, "task `code`: its task vector is zero"),
    ("llama", ISO, BALANCED, WEIGHT, -math.inf, f"`{WEIGHT}` of task `code` holds 0 NaN and 1"),
    ("llama", TIES, NONE, WEIGHT, math.nan, f"tensor `{WEIGHT}` of task `code` holds 1 NaN"),
    # a tensor that counts under another name is not summed
    ("tied", TA, NONE, HEAD, math.nan, NAN),
    ("tied", TA, ONE, HEAD, math.nan, NAN),
]


@pytest.mark.parametrize(("family", "method", "keys", "name", "value", "said"), FAULTS)
def test_a_fault_leaves_nothing(family, method, keys, name, value, said, world, tmp_path):
    """The model `code` holds a NaN or an infinity, or is the base."""
    models = world(family)
    shutil.copytree(models.listed[1], tmp_path / "code")
    state = dict(models.states[2 if name else 0])
    if name:
        state[name] = state.get(name, state[EMBEDDING]).clone()
        state[name].view(-1)[3] = value
    save(tmp_path / "code", state)
    listed = [models.listed[0], tmp_path / "code", *models.listed[2:]]
    document = recipe(method, models.base, listed, **keys)
    done = merge(document, tmp_path / "out", "--out-shard-size", "300K", fails=True)
    assert said in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"code", "out.yml"}
