"""Stores that keep a random sample of each task vector: the bytes, the bias and the errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import merge, recipe, refused, tvb, write
from formats import program
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_lossless_store import bfloat
from tiny import TASKS, gpt2, llama, load
from torch import Tensor
from worlds import Models, hub

import tvb_mergekit
from tvb_mergekit.core.methods.wudi import interference_free
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.lossless import BLOCK, Draw
from tvb_mergekit.tensors.stream import StateDict

SHARE = 0.25


@given(st.integers(0, 2**64 - 1), st.floats(0, 1), st.integers(0, 500), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_places_are_those_of_the_format(seed, share, length, block):
    """As the program in docs/files.md draws them."""
    drawn = Draw(seed, share).places("a.weight", block, length)
    assert drawn.tolist() == program("places")(seed, share, "a.weight", block, length)


def sampled(name: str, tau: Tensor, sample: Draw) -> Tensor:
    """A sample of a tensor by its definition."""
    if tau.ndim < 2:
        return tau
    flat, made = tau.reshape(-1), torch.zeros(tau.numel())
    for block in range(-(-len(flat) // BLOCK)):
        chunk = flat[block * BLOCK :][:BLOCK]
        places = sample.places(name, block, len(chunk))
        made[block * BLOCK + places] = chunk[places] / sample.share
    return made.view(tau.shape)


def dense(models: Models) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    base, *others = ({n: t.float() for n, t in state.items()} for state in models.states)
    return base, [{n: m[n] - base[n] for n in base} for m in others]


def size(*vectors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for v in vectors for t in v.values()))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = bfloat(llama, tmp_path_factory.mktemp("family"), tasks=(*TASKS, "poems"))
    return replace(made, own={1: {"weight": -2.0}})


@pytest.fixture(scope="module")
def built(family: Models, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    folder = tmp_path_factory.mktemp("built") / "store"
    return family.build(folder, "--keep", str(SHARE), tasks=TASKS)


def vectors_of(bases: Bases, base: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    for vector in bases.vectors:
        vector.base = StateDict(load(Path(bases.facts.base_model)))
    return [{name: v.tensor(name) for name in base} for v in bases.vectors]


def test_a_store_against_its_definition(family: Models, built: Bases, tmp_path: Path) -> None:
    """Vectors to the bit, errors, Gram matrix, exports and merges; the weight of a model counts."""
    base, taus = dense(family)
    weights = torch.tensor([1.0, -2.0] + [1.0] * (len(TASKS) - 2), dtype=torch.float64)
    facts, made = built.facts, vectors_of(built, base)
    assert facts.store.codec == "sampled" and facts.density == SHARE and built.keeps_tasks
    seeds = set()
    for k, (task, found, tau) in enumerate(zip(TASKS, made, taus, strict=False)):
        sample = built.vectors[k].sample
        seeds.add(sample.seed)
        assert all(torch.equal(found[n], sampled(n, tau[n], sample)) for n in base)
        error = size({n: found[n] - tau[n] for n in base}) / size(tau)
        assert facts.relative_error[task] == pytest.approx(error, rel=1e-6)
    assert len(seeds) == len(TASKS)
    stacked = torch.stack([torch.cat([t.double().flatten() for t in v.values()]) for v in taus])
    gram = (stacked @ stacked.T)[: len(TASKS), : len(TASKS)] * weights.outer(weights)
    torch.testing.assert_close(built.tensors["gram_bases"], gram, rtol=1e-6, atol=1e-9)
    tvb("export", built.path, tmp_path / "one", "--task", TASKS[1], "--quiet")
    want = {name: (base[name] + made[1][name]).bfloat16() for name in base}
    assert all(torch.equal(t, want[name]) for name, t in load(tmp_path / "one").items())
    listed = [built.path / task for task in TASKS]
    over = recipe("basis_ta", family.base, listed, basis="none", **{"lambda": 0.5})
    for name, tensor in merge(over, tmp_path / "merged").tensors.items():
        terms = (0.5 * w * v[name].double() for w, v in zip(weights, made, strict=True))
        want = base[name].double() + sum(terms)
        torch.testing.assert_close(tensor.double(), want, rtol=1e-6, atol=1e-6)


def test_corrected_products_are_unbiased() -> None:
    """Over 4,000 seeds Z^T Z, with its diagonal times the share, has the mean tau^T tau."""
    tau, share = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), SHARE
    found = torch.zeros(4000, 5, 5)
    for seed in range(4000):
        z = sampled("w", tau, Draw(seed, SHARE))
        found[seed] = z.T @ z
        found[seed].diagonal().mul_(share)
    off = (found.mean(0) - tau.T @ tau).abs()
    assert (off < 4.5 * found.std(0) / 4000**0.5 + 1e-5).all()


@pytest.mark.parametrize("shape", [(40, 30), (6, 50)])
def test_wudi_over_samples(shape: tuple[int, int]) -> None:
    """WUDI with corrected products, by its definition in float64; also where M m < n."""
    generator, share = torch.Generator().manual_seed(1), SHARE
    taus = [torch.randn(shape, generator=generator) for _ in range(3)]
    bases = torch.stack([sampled("w", t, Draw(k, SHARE)) for k, t in enumerate(taus)])
    normal, right = torch.zeros(shape[1], shape[1]).double(), torch.zeros(shape).double()
    for base in bases.double():
        square = base.T @ base
        square.diagonal().mul_(share)
        square /= share * base.square().sum()
        normal, right = normal + square, right + base @ square
    values, turned = torch.linalg.eigh(normal)
    gain = torch.where(values > 1e-9, -torch.expm1(-30 * values) / values, 0)
    total = bases.double().sum(0)
    want = total - (total @ normal - right) @ (turned * gain) @ turned.T
    found = interference_free(bases, flow_time=30, shares=[share] * 3)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-3)


CHOICES = {"lossless": "", "keep": "0.1", "dtype": "float16"}


def test_mistakes_are_one_line(family: Models, tmp_path: Path) -> None:
    """A share above 1, and any two forms of a store at once."""
    build = ("build", write(family.recipe(), tmp_path / "models"), tmp_path / "store")
    assert "--keep 1.5: expected a share from 1e-06 to below 1" in refused(*build, "--keep", "1.5")
    words = {name: [f"--{name}", *value.split()] for name, value in CHOICES.items()}
    for one, other in itertools.combinations(words, 2):
        said = refused(*build, *words[one], *words[other])
        assert "choose one of --lossless, --keep and --dtype" in said
    assert not (tmp_path / "store").exists()


def test_a_basis_is_not_sampled(family: Models, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keeps all tasks"):
        tvb_mergekit.build(
            family.base, family.models, tmp_path / "s", keep=0.1, basis="balanced", num_bases=2
        )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"basis": "balanced", "num_bases": 2}, []),
        ({"basis": "ae", "steps": 300, "num_bases": 2, "exclude": ["mlp"]}, []),
        ({"basis": "none"}, ["--dtype", "bfloat16"]),
        ({"basis": "pca", "num_bases": 2}, []),
        ({"basis": "rand_select", "num_bases": 1}, []),
        ({"basis": "none", "exclude": "mlp"}, []),
    ],
)
def test_bases_over_samples(
    keys: dict[str, Any], words: list[str], family: Models, tmp_path: Path
) -> None:
    """Norms are those of the models, also after an addition; errors are not known."""
    tasks = family.build(tmp_path / "tasks", "--keep", "0.25")
    listed = [tasks.path / task for task in tasks.facts.store.folders]
    over = recipe("basis_ta", family.base, listed, own={2: {"weight": -0.01}}, **keys)
    store = tmp_path / "store"
    tvb("build", write(over, tmp_path / "over"), store, *words, "--quiet")
    base, taus = dense(family)

    def check() -> None:
        made = tvb_mergekit.load(store)
        for vector in made.sources:
            vector.base = StateDict(base)
        held = [{n: v.tensor(n).double() for n in made.names} for v in made.sources]
        for index, (task, tau) in enumerate(zip(made.tasks, taus, strict=False)):
            norm = size({n: tau[n] for n in held[0]}) * abs(float(made.weights[index]))
            assert made.facts.norms[task] == pytest.approx(norm, rel=0.03)
            assert made.facts.errors[task] is None
        gram = [[sum(float((a[n] * b[n]).sum()) for n in a) for b in held] for a in held]
        count, found = made.num_bases, made.tensors["gram_bases"]
        near = torch.tensor(gram, dtype=torch.float64)[:count, :count]
        torch.testing.assert_close(found, near, rtol=0, atol=0.1 * float(near.diagonal().max()))

    check()
    if keys["basis"] in ("balanced", "rand_select"):
        extra = family.models["poems"]
        tvb("add", store, extra, "--task", "more", "--base", family.base, "--budget", 2, "--quiet")
        check()


def test_bases_over_samples_under_other_names(tmp_path: Path) -> None:
    """Names that mergekit changes."""
    models = hub(gpt2, tmp_path / "models")
    for path in (models.base, *models.models.values()):
        state = {name.removeprefix("transformer."): t for name, t in load(path).items()}
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    tasks = models.build(tmp_path / "tasks", "--keep", "0.5", basis="none")
    vectors = [tasks.path / name for name in tasks.facts.store.folders]
    over = recipe("basis_ta", models.base, vectors, basis="balanced", num_bases=2)
    tvb("build", write(over, tmp_path / "over"), tmp_path / "bases", "--quiet")
    made = tvb_mergekit.load(tmp_path / "bases").facts
    for task in tasks.tasks:
        assert made.errors[task] is None
        assert made.norms[task] == pytest.approx(tasks.facts.norms[task])


def test_a_sample_with_a_tokenizer(tmp_path: Path) -> None:
    models, made = hub(llama, tmp_path / "models"), []
    tasks = models.build(tmp_path / "tasks", "--keep", SHARE, basis="none")
    for extra in ({}, {"tokenizer_source": "base"}):
        listed = [tasks.path / task for task in models.tasks]
        over = recipe("basis_ta", models.base, listed, basis="balanced", num_bases=2, extra=extra)
        store = tmp_path / f"store-{len(extra)}"
        tvb("build", write(over, store), store, "--quiet")
        made.append(tvb_mergekit.load(store).facts)
    assert made[0].matrix_norms == pytest.approx(made[1].matrix_norms, rel=0.1)
