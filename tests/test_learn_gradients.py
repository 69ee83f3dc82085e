"""`tvb learn` by gradients: Localize-and-Stitch, AdaMerging and aTLAS over bases.

The reference is a model in float64. Its weights are functions of the variables in one graph
(`torch.func.functional_call`). Gradients are also compared with finite differences.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from commands import recipe, refused, slices, tvb, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_learn import TASKS, Case, as_lines, data_words, facts, lines
from tiny import gpt2, load
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tvb_mergekit.learn import gradients, training
from tvb_mergekit.learn.data import Batch, Example, drawn, entropy, held_out, response_loss
from tvb_mergekit.learn.gradients import Combined, Mask, largest, rows_of
from tvb_mergekit.learn.training import moved


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("gradients"))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """GPT-2 computes in the dtype of its weights; Llama's norms are float32. It ties its head."""
    return Case(tmp_path_factory.mktemp("exact"), make=gpt2)


def examples(case: Case, count: int = 3) -> list[Example]:
    every = [(ids, start) for task in TASKS for ids, start in case.data[task]]
    return [Example(ids, start) for ids, start in every[:count]]


def mean_loss(loss: Any, logits: Tensor, batch: Sequence[Example]) -> float:
    """As the losses, in the dtype of the logits, which they do not keep."""
    total = 0.0
    for row, example in zip(logits, batch, strict=True):
        stop = len(example.ids) - (not example.unlabeled)
        logs = torch.log_softmax(row, -1)[example.start - 1 : stop]
        labels = torch.tensor(example.ids[example.start :])
        each = (logs.exp() * logs).sum(-1) if loss is entropy else logs.gather(1, labels[:, None])
        total -= float(each.mean())
    return total / len(batch)


def assert_finite_differences(variables: Sequence[Tensor], value: Callable[[], float]) -> None:
    """The gradients of the variables, at three places of each."""
    for variable in variables:
        gradient, flat = variable.grad, variable.detach().view(-1)
        assert gradient is not None
        for place in torch.randperm(flat.numel())[:3].tolist():
            start, ends = float(flat[place]), []
            for step in (1e-5, -1e-5):
                flat[place] = start + step
                ends.append(value())
            flat[place] = start
            wanted = (ends[0] - ends[1]) / 2e-5
            assert abs(float(gradient.view(-1)[place]) - wanted) < 1e-6 * max(1.0, abs(wanted))


def doubled(case: Case) -> tuple[Any, dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """The base's model in float64, its parameters, theta_0, and the task vectors [T, n]."""
    model = AutoModelForCausalLM.from_pretrained(case.base, dtype=torch.float64).eval()
    parameters = dict(model.named_parameters())
    base = {name: p.detach().clone().view(-1) for name, p in parameters.items()}
    models = [load(path) for path in case.models]
    bases = {n: torch.stack([m[n].double().view(-1) for m in models]) - t for n, t in base.items()}
    return model, parameters, base, bases


def moves_of(kind: str, bases: Mapping[str, Tensor]) -> tuple[dict[str, nn.Module], list[Any]]:
    """A random move of each tensor, and the variables in order."""
    made: dict[str, nn.Module] = {}
    if kind == "mask":
        for name, b in bases.items():
            made[name] = mask = Mask(b[0], torch.rand_like(b[0]) < 0.3).double()
            mask.scores.data = torch.randn_like(mask.scores)
        return made, [mask.scores for mask in made.values()]
    rows, blocks = rows_of([*bases], kind == "layers"), 1 if kind == "layers" else 3
    values = {
        row: nn.Parameter(0.3 + 0.2 * torch.randn(blocks, 3).double()) for row in rows.values()
    }
    for name, b in bases.items():
        made[name] = Combined(values[rows[name]], b, kind == "squares")
    return made, [*values.values()]


@pytest.mark.parametrize("kind", ["mask", "layers", "blocks", "squares"])
@pytest.mark.parametrize("loss", [response_loss, entropy])
def test_gradients_are_those_of_finite_differences(exact: Case, kind: str, loss: Any) -> None:
    torch.manual_seed(1)
    model, parameters, base, bases = doubled(exact)
    model.requires_grad_(False)
    moves, variables = moves_of(kind, bases)
    some = examples(exact)
    if loss is entropy:  # after a prompt alone the next token counts
        some[1] = Example(some[1].ids, len(some[1].ids), unlabeled=True)
    b = Batch.of(some, torch.device("cpu"))

    def logits() -> Tensor:
        found: Tensor = model(input_ids=b.ids, attention_mask=b.mask).logits
        return found

    with moved(model, parameters, moves):
        nn.ModuleList(moves.values()).train()
        (loss(logits(), b) / len(some)).backward()
        with torch.no_grad():
            assert_finite_differences(variables[:8], lambda: mean_loss(loss, logits(), some))
    assert all(torch.equal(p.view(-1), base[n]) for n, p in model.named_parameters())


def test_over_all_tasks_it_is_the_published_method(case: Case) -> None:
    """aTLAS: a coefficient for each task vector and tensor, AdamW, cosine, clipped (its code)."""
    source = case.recipe("all", basis="none")
    words = (*case.words, "--epochs", 3, "--held-out", 0, "--batch-size", 5, "--patience", 9)
    merged = case.learn(source, "atlas", "atlas-all", *words)
    tokens = {t: [Example(i, s) for i, s in case.data[t]] for t in TASKS}
    train = [held_out(tokens[t], 0.0, f"0 {t}")[0] for t in TASKS]
    model, parameters, base, taus = doubled(case)
    values = torch.zeros(len(base), 3, dtype=torch.float64, requires_grad=True)

    def theta() -> dict[str, Tensor]:
        moved = {name: values[row] @ tau for row, (name, tau) in enumerate(taus.items())}
        return {name: (base[name] + m).view_as(parameters[name]) for name, m in moved.items()}

    optimizer = torch.optim.AdamW([values], lr=0.1, weight_decay=0.1)
    every = [example for some in train for example in some]
    epochs = [random.Random(f"0 {epoch}").sample(every, 12) for epoch in (1, 2, 3)]
    steps = [every[k : k + 5] for every in epochs for k in range(0, 12, 5)]
    for number, batch in enumerate(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * number / len(steps))) / 2
        optimizer.zero_grad()
        b = Batch.of(batch, torch.device("cpu"))
        given = {"input_ids": b.ids, "attention_mask": b.mask}
        logits = torch.func.functional_call(model, theta(), kwargs=given).logits
        (response_loss(logits, b) / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_([values], 1.0)
        optimizer.step()
    for name, wanted in theta().items():
        found, start = merged.tensors[name].double(), base[name].view_as(wanted)
        assert float((found - wanted).norm()) < 1e-4 * float((wanted - start).norm()), name


def coefficients(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "basis" / "learned" / "coefficients.safetensors")


@pytest.mark.parametrize(
    ("method", "more"),
    [("adamerging", ()), ("atlas", ("--blocks", 3)), ("atlas", ("--nonnegative",))],
)
def test_coefficients_make_the_model(case: Case, method: str, more: tuple[object, ...]) -> None:
    source = case.recipe("two", basis="balanced", num_bases=2, lambda_scale="tasks")
    words = (*case.words, *more, "--epochs", 2, "--learning-rate", 0.05, "--held-out", 0)
    merged = case.learn(source, method, f"{method}-{len(more)}", *words)
    values, encoder = coefficients(merged.folder), merged.basis["encoder"]
    _, _, base, taus = doubled(case)
    for name, each in taus.items():
        layer = ".".join(name.split(".")[:3]) if ".layers." in name else name
        own = values[layer if method == "adamerging" else name].double().numpy()
        pieces = np.array_split(encoder.T @ each.numpy(), len(own), axis=1)
        wanted = np.concatenate([c @ piece for c, piece in zip(own, pieces, strict=True)])
        moved = (merged.tensors[name].double().view(-1) - base[name]).numpy()
        assert np.abs(moved - wanted).max() < 1e-6, name
    flat = torch.cat([each.flatten() for each in values.values()])
    assert flat.std() > 0 and (flat.min() >= 0 or "--nonnegative" not in more)


@pytest.mark.parametrize(("lambda_scale", "scale"), [("bases", 1), ("tasks", 1.5)])
def test_steps_of_atlas_go_as_far_as_over_all_vectors(case, lambda_scale, scale):
    """The first step of AdamW is the rate, whatever the gradient: by tasks times T/M."""
    source = case.recipe(lambda_scale, basis="balanced", num_bases=2, lambda_scale=lambda_scale)
    words = (*case.words, "--epochs", 1, "--batch-size", 99, "--learning-rate", 0.05)
    merged = case.learn(source, "atlas", f"step-{lambda_scale}", *words, "--held-out", 0)
    values = torch.cat([each.flatten() for each in coefficients(merged.folder).values()])
    assert values.abs().median() == pytest.approx(0.05 * scale, rel=1e-3)


@pytest.mark.parametrize("dataless", [True, False])
def test_masks_are_stitched(case: Case, dataless: bool) -> None:
    """The merge is the mean of the bases where their masks overlap."""
    source = case.recipe("masks", basis="balanced", num_bases=2, lambda_scale="tasks")
    data = ("--dataless",) if dataless else (*case.words, "--epochs", 2, "--penalty", 1e-4)
    with mock.patch.object(gradients, "stitch", side_effect=gradients.stitch) as stitching:
        name = f"masked-{dataless}"
        merged = case.learn(source, "localize", name, *data, "--density", 0.1)
    _, _, base, taus = doubled(case)
    kept, tops = np.zeros(2), np.zeros(2)
    sizes = np.concatenate([merged.basis["encoder"].T @ each.numpy() for each in taus.values()], 1)
    limits = np.quantile(np.abs(sizes), 0.9, axis=1)[:, None]
    for name, call in zip(load(case.base), stitching.call_args_list, strict=True):
        vectors = merged.basis["encoder"].T @ taus[name].numpy()
        mask = call.args[1].flatten(1).numpy()
        want = 1.5 * (vectors * mask).sum(0) / np.maximum(1, mask.sum(0))
        moved = (merged.tensors[name].view(-1) - base[name]).numpy()
        np.testing.assert_allclose(moved, want, atol=1e-6)
        kept, tops = kept + mask.sum(1), tops + (mask * (np.abs(vectors) > limits)).sum(1)
    assert (kept == round(0.1 * sizes.shape[1])).all()
    assert (tops >= kept - 1).all() == dataless  # data choose others


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.floats(0.01, 1))
def test_the_largest_entries(values: list[int], density: float) -> None:
    """Of equal entries at the threshold, each tensor keeps its part within one."""
    every = torch.tensor(values).float()
    every[every == 0] = -torch.inf  # never taken
    cut = len(values) // 3
    found = largest({"a": every[:cut], "b": every[cut:]}, density)
    kept = torch.cat([found["a"], found["b"]])
    wanted = min(max(1, round(density * len(values))), int((every > 0).sum()))
    assert int(kept.sum()) == wanted
    if wanted and wanted < len(values):
        assert every[kept].min() >= every[~kept].max()
        ties = every == every[kept].min()
        share = int((ties & kept).sum()) / int(ties.sum())
        for part in (slice(0, cut), slice(cut, None)):
            assert abs(int((ties & kept)[part].sum()) - share * int(ties[part].sum())) < 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_drawn_examples_keep_to_the_mixture(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    raw = data.draw(st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes)))
    weights = [w / sum(raw) for w in raw] if sum(raw) > 0.01 else [1 / len(raw)] * len(raw)
    tasks = [[Example([k, n], 1) for n in range(size)] for k, size in enumerate(sizes)]
    factor = data.draw(st.floats(0.5, 4))
    found = drawn(weights, tasks, factor, "seed")
    total = max(1, round(factor * sum(sizes) / len(sizes)))
    assert len(found) == total
    for k, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        own = [e.ids[1] for e in found if e.ids[0] == k]
        assert abs(len(own) - weight * total) < 1 + 1e-6
        counts = [own.count(n) for n in range(size)]
        assert max(counts) - min(counts) <= 1
    assert found == drawn(weights, tasks, factor, "seed")


@pytest.mark.parametrize(("held", "begins", "best"), [(0.2, 6, 1), (0.2, 2, 0), (0, 5, None)])
def test_a_loss_that_is_not_finite_keeps_the_last_good(case, tmp_path, held, begins, best):
    """Four batches an epoch, and one that is held out, if any."""
    source, kept, calls = case.recipe("wild", basis="none"), response_loss, 0

    def spoiled(logits: Tensor, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        return kept(logits, batch) * (math.nan if calls > begins else 1)

    words = ("learn", source, "atlas", *case.words, "--epochs", 3, "--batch-size", 3)
    words = (*words, "--held-out", held, "--quiet", "--out", tmp_path / "out")
    with mock.patch.object(training, "response_loss", spoiled):
        if best is None:
            assert "the loss is nan in a batch with" in (line := refused(*words))
            assert "; lower --learning-rate" in line
            return
        tvb(*words)
    (told,) = facts(tmp_path / "out")["history"]
    assert told["best"] <= best and "is nan" in told["stopped"]
    assert all(each.isfinite().all() for each in coefficients(tmp_path / "out").values())


def test_precision_checkpointing_and_patience(case: Case) -> None:
    source = case.recipe("memory", basis="balanced", num_bases=2)
    ways = {"plain": [], "less": ["--checkpointing"], "half": ["--precision", "bfloat16"]}
    made = [case.learn(source, "atlas", way, *case.words, "--epochs", 2, *more).folder
            for way, more in ways.items()]  # fmt: skip
    a, b, c = (torch.cat([*coefficients(folder).values()]) for folder in made)
    assert torch.allclose(a, b, atol=1e-5) and not torch.equal(a, c)
    assert torch.allclose(a, c, atol=0.1)
    words = (*case.words, "--epochs", 9, "--patience", 1, "--learning-rate", 20)
    (told,) = facts(case.learn(source, "atlas", "best", *words).folder)["history"]
    assert len(told["held"]) < 10 and told["stopped"] == "no lower held-out loss in 1 epochs"
    assert told["held"][told["best"]] == min(told["held"])


def test_unlabeled_prompts_other_tasks_and_layers(case: Case, tmp_path: Path) -> None:
    prompts = {t: [{"prompt": r["prompt"]} for r in each] for t, each in case.records.items()}
    words, out = data_words(tmp_path, prompts), ("--out", tmp_path / "out")
    source = case.recipe("open", basis="balanced", num_bases=2)
    case.learn(source, "adamerging", "prompts", *words, "--epochs", 1)
    assert "expected `prompt` and" in refused("learn", source, "atlas", *words, *out)
    other = as_lines(tmp_path / "law", lines(7))
    merged = case.learn(source, "atlas", "law", "--data", f"law={other}", "--epochs", 1)
    assert facts(merged.folder)["examples"] == {"law": 3}
    made = slices(case.base, case.models, [(0, 1)]) | {"merge_method": "basis_ta"}
    made |= {"base_model": str(case.base), "parameters": {"basis": "none"}, "dtype": "float32"}
    file = write(made, tmp_path / "layers")
    assert "not `slices`" in refused("learn", file, "atlas", *case.words, *out)


@pytest.mark.parametrize(("basis", "mixture"), [("ae", ""), ("pca", "equal"), ("pca", "positive")])
def test_mixtures_of_tasks_that_masks_learn_from(case: Case, basis: str, mixture: str) -> None:
    few = {"steps": 50} if basis == "ae" else {}
    source = case.recipe(f"{basis}-mixed", basis=basis, num_bases=2, **few)
    words = (*case.words, "--epochs", 1, *(("--mixture", mixture) if mixture else ()))
    with mock.patch.object(gradients, "drawn", side_effect=drawn) as drawing:
        merged = case.learn(source, "localize", f"{basis}-{mixture}", *words)
    encoder = merged.basis["encoder"].astype(np.float64)
    assert (encoder.min() < 0) == (basis == "pca")
    powers = np.where(encoder > 0, np.exp(encoder) if mixture else encoder, 0)
    want = np.full_like(encoder, 1 / 3) if mixture == "equal" else powers / powers.sum(0)
    seen = np.unique([call.args[0] for call in drawing.call_args_list], axis=0)
    np.testing.assert_allclose(seen, np.unique(want.T, axis=0), atol=1e-6)


@pytest.mark.parametrize("keep", [None, 0.5])
def test_over_a_store(case: Case, keep: float | None) -> None:
    """As over a recipe of the same bases, or of the models that the store's vectors make."""
    store, models = case.folder / f"learn-{keep}", case.folder / f"learned-from-{keep}"
    if keep is None:
        source = case.recipe("for-store", basis="balanced", num_bases=2)
        tvb("build", source, store, "--quiet")
    else:
        tvb("build", case.recipe("for-zoo", basis="none"), store, "--keep", keep, "--quiet")
        tvb("export", store, "--all", models, "--quiet")
        made = recipe("basis_ta", case.base, [models / task for task in TASKS], basis="none")
        source = write(made, case.folder / "for-exported")
    base = load(case.base)
    for method in ("localize",) if keep is None else ("localize", "adamerging"):
        found, want = (
            case.learn(of, method, f"{method}-{keep}-{of.name}", *case.words, "--epochs", 1)
            for of in (store, source)
        )
        change, wanted = (
            torch.cat([(t - base[n]).flatten() for n, t in each.tensors.items()])
            for each in (found, want)
        )
        # The exported models round: masks cut elsewhere among equals.
        most = 0.1 if method == "localize" and keep else 3e-5
        assert float((change - wanted).norm()) < most * float(wanted.norm()) > 0, method


def test_adamerging_begins_at_the_addition(case: Case) -> None:
    """A store that has grown, a lambda for some tensors, and a scale."""
    source = case.recipe("start", basis="balanced", num_bases=2, lambda_scale="tasks",
                         lambda_=[{"filter": "mlp", "value": 0.5}, {"value": 0.2}])  # fmt: skip
    store = case.folder / "grown"
    tvb("build", case.recipe("start-plain", basis="balanced", num_bases=1), store, "--quiet")
    tvb("add", store, case.models[0], "--task", "again", "--budget", 3, "--quiet")
    more = [*case.words, "--data", f"again={as_lines(case.folder / 'again.jsonl', lines(9))}"]
    small = ("--epochs", 1, "--learning-rate", 1e-9, "--held-out", 0)
    merged = case.learn(store, "adamerging", "start-store", *more, *small)
    tvb("merge", store, case.folder / "start-added", "--method", "add", "--quiet")
    added = load(case.folder / "start-added")
    assert all(torch.allclose(t, added[n], atol=1e-6) for n, t in merged.tensors.items())
    values = coefficients(
        case.learn(source, "adamerging", "start-layers", *case.words, *small).folder
    )
    assert torch.allclose(values["model.norm.weight"], torch.full((1, 2), 0.2 * 1.5), atol=1e-6)
    assert (values["model.layers.0"] > 0.2 * 1.5).all()  # it has an mlp
