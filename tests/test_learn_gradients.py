"""`tvb learn` by gradients: Localize-and-Stitch, AdaMerging and aTLAS over bases.

The reference is a model in float64. Its weights are functions of the variables in one graph
(`torch.func.functional_call`). Gradients are also compared with finite differences.
"""

import json
import math
import re
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
from passing import held_item
from safetensors import safe_open
from safetensors.torch import load_file
from test_learn import TASKS, Case, as_lines, data_words, facts, lines
from tiny import gpt2, load
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn import gradients, localize, models
from tvb_mergekit.learn.data import Batch, Example, Split, drawn, entropy, response_loss, shuffled
from tvb_mergekit.learn.descent import Descent, Moving, Schedule
from tvb_mergekit.learn.gradients import Coefficients, Rows
from tvb_mergekit.learn.localize import Mask, largest
from tvb_mergekit.learn.models import load_model

OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("gradients"))


def test_help_shows_the_defaults() -> None:
    for method, default in gradients.SCHEDULES.items():
        shown = " ".join(tvb("learn", "recipe", method, "--help").stdout.split())
        rate = "1/n, n: the size of a hidden state" if method == "wemoe" else f"{default.rate:g}"
        for value in (rate, str(default.batch), str(default.epochs)):
            assert f"[default: ({value});" in shown, (method, value)


def examples(case: Case, count: int = 3) -> list[Example]:
    every = [(ids, start) for task in TASKS for ids, start in case.data[task]]
    return [Example(ids, start, line, "data") for line, (ids, start) in enumerate(every[:count])]


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


def moving(kind: str, base: Mapping[str, Tensor], bases: Mapping[str, Tensor]) -> Moving:
    if kind == "mask":
        found = Mask(base, {n: b[:1] for n, b in bases.items()}, 0.3, bias=1.0, penalty=1e-3)
        with torch.no_grad():
            for own in found.variables:
                own += torch.randn_like(own)
        return found
    rows = Rows.of(list(base), "layer") if kind == "layers" else Rows.of(list(base), "tensor", 3)
    made = Coefficients(base, bases, rows, 0.3, kind == "squares")
    with torch.no_grad():
        made.variables[0] += 0.2 * torch.randn_like(made.variables[0])
    return made


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """GPT-2 computes in the dtype of its weights; Llama's norms are float32."""
    return Case(tmp_path_factory.mktemp("exact"), make=gpt2)


def by_formula(
    kind: str, values: list[Any], base: Mapping[str, Tensor], bases: Mapping[str, Any]
) -> dict[str, Any]:
    """theta by NumPy; `bases` [M, n]."""
    found, layers = {}, dict[str, int]()
    for number, (name, start) in enumerate(base.items()):
        vectors = np.asarray(bases[name])
        if kind == "mask":
            found[name] = start.numpy() + vectors[0] / (1 + np.exp(-values[number]))
            continue
        layer = ".".join(name.split(".")[:3]) if re.search(r"\.(h|layers)\.", name) else name
        row, blocks = layers.setdefault(layer, len(layers)), len(values[0]) // len(base)
        own = values[0][[row]] if kind == "layers" else values[0][blocks * number :][:blocks]
        own = own**2 if kind == "squares" else own
        pieces = np.array_split(vectors, len(own), axis=1)
        moved = [row @ piece for row, piece in zip(own, pieces, strict=True)]
        found[name] = start.numpy() + np.concatenate(moved)
    return found


@pytest.mark.parametrize("kind", ["mask", "layers", "blocks", "squares"])
@pytest.mark.parametrize("loss", [response_loss, entropy])
def test_gradients_are_those_of_finite_differences(exact: Case, kind: str, loss: Any) -> None:
    torch.manual_seed(1)
    model, parameters, base, bases = doubled(exact)
    model.requires_grad_(False)
    way, some = moving(kind, base, bases), examples(exact)
    if loss is entropy:  # after a prompt alone the next token counts
        some[1] = Example(some[1].ids, len(some[1].ids), 1, unlabeled=True)
    values = [variable.detach().numpy() for variable in way.variables]
    for name, theta in by_formula(kind, values, base, bases).items():
        np.testing.assert_allclose(way.theta(name).detach().numpy(), theta, atol=1e-12)
    work = Descent(model, parameters, way, loss, Schedule(epochs=1, rate=1.0, batch=8))
    with way.attached(parameters):
        work.gradients(some)
    assert all(variable.grad is not None for variable in way.variables)

    def value() -> float:
        way.set(parameters)
        b = Batch.of(some, torch.device("cpu"))
        with torch.no_grad():
            logits = model(input_ids=b.ids, attention_mask=b.mask).logits
        masks = way.variables if kind == "mask" else []
        penalty = 1e-3 * sum(float(own.detach().sigmoid().sum()) for own in masks)
        return mean_loss(loss, logits, some) + penalty

    assert_finite_differences(way.variables[:8], value)


def test_over_all_tasks_it_is_the_published_method(case: Case) -> None:
    """aTLAS: a coefficient for each task vector and tensor, AdamW, cosine, clipped (its code).

    The reference is the published formula over T task vectors in one graph.
    """
    source = case.recipe("all", basis="none")
    words = (*case.words, "--epochs", 3, "--held-out", 0, "--batch-size", 5, "--patience", 9)
    merged = case.learn(source, "atlas", "atlas-all", *words)
    tokens = {t: [Example(i, s, 0) for i, s in case.data[t]] for t in TASKS}
    splits = [Split.of(tokens[t], 0.0, f"0 {t}").train for t in TASKS]
    model, parameters, base, taus = doubled(case)
    values = torch.zeros(len(base), 3, dtype=torch.float64, requires_grad=True)

    def theta() -> dict[str, Tensor]:
        moved = {name: values[row] @ tau for row, (name, tau) in enumerate(taus.items())}
        return {name: (base[name] + m).view_as(parameters[name]) for name, m in moved.items()}

    optimizer = torch.optim.AdamW([values], lr=0.1, weight_decay=0.1)
    epochs = [shuffled(splits, f"0 {epoch}") for epoch in (1, 2, 3)]
    steps = [every[k : k + 5] for every in epochs for k in range(0, 12, 5)]
    for number, batch in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 + math.cos(math.pi * number / len(steps))) / 2
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
    told = facts(merged.folder)
    assert told["passes"] == {"forward": 36 + 5, "backward": 36}  # a batch for the last weights


def test_blocks_of_an_empty_tensor_and_squares_of_nothing() -> None:
    for size, starts in ((0, [0]), (2, [0, 1])):
        item = held_item("short", torch.zeros(size), [torch.zeros(size)])
        assert [start for start, _ in gradients.blocks_of(item, 3)] == starts
    one = {"w": torch.ones(1, 2)}
    for start in (0.0, -0.3):
        with pytest.raises(UserError, match="--nonnegative begins at the recipe's `lambda`"):
            Coefficients({"w": torch.ones(2)}, one, Rows.of(["w"], "tensor"), start, True)


def coefficients(folder: Path) -> Tensor:
    return load_file(folder / "basis" / "learned" / "coefficients.safetensors")["coefficients"]


@pytest.mark.parametrize(
    ("method", "more"),
    [("adamerging", ()), ("atlas", ("--blocks", 3)), ("atlas", ("--nonnegative",))],
)
def test_coefficients_make_the_model(case: Case, method: str, more: tuple[object, ...]) -> None:
    source = case.recipe("two", basis="balanced", num_bases=2)
    name = f"{method}-{len(more)}"
    words = (*case.words, *more, "--epochs", 2, "--learning-rate", 0.05, "--held-out", 0)
    merged = case.learn(source, method, name, *words)
    values, encoder = coefficients(merged.folder).double().numpy(), merged.basis["encoder"]
    assert values.std() > 0
    _, _, base, taus = doubled(case)
    base = {name: base[name] for name in load(case.base)}  # the order of the rows
    bases = {name: encoder.T @ each.numpy() for name, each in taus.items()}
    kind = "layers" if method == "adamerging" else "blocks"
    for name, wanted in by_formula(kind, [values], base, bases).items():
        found = merged.tensors[name].double().numpy().ravel()
        assert np.abs(found - wanted).max() < 1e-6 * np.abs(wanted).max() + 1e-7, name
    assert ("start" in metadata(merged.folder)) == (method == "adamerging")  # else it is constant
    assert values.min() >= 0 or "--nonnegative" not in more


@pytest.mark.parametrize(("lambda_scale", "scale"), [("bases", 1), ("tasks", 1.5)])
def test_steps_of_atlas_go_as_far_as_over_all_vectors(
    case: Case, lambda_scale: str, scale: float
) -> None:
    """The first step of AdamW is the rate, whatever the gradient: by tasks times T/M."""
    source = case.recipe(lambda_scale, basis="balanced", num_bases=2, lambda_scale=lambda_scale)
    words = (*case.words, "--epochs", 1, "--batch-size", 99, "--learning-rate", 0.05)
    merged = case.learn(source, "atlas", f"step-{lambda_scale}", *words, "--held-out", 0)
    assert coefficients(merged.folder).abs().median() == pytest.approx(0.05 * scale, rel=1e-3)
    assert facts(merged.folder)["scale"] == pytest.approx(scale)


def metadata(folder: Path) -> dict[str, Any]:
    """The facts in the file of coefficients."""
    with safe_open(folder / "basis" / "learned" / "coefficients.safetensors", "pt") as file:
        told: dict[str, Any] = json.loads(file.metadata()["tvb_learned"])
    return told


@pytest.mark.parametrize("dataless", [True, False])
def test_masks_are_stitched(case: Case, dataless: bool) -> None:
    source = case.recipe("masks", basis="balanced", num_bases=2, lambda_scale="tasks")
    name = f"masked-{dataless}"
    data = ("--dataless",) if dataless else (*case.words, "--epochs", 2, "--held-out", 0)
    merged = case.learn(source, "localize", name, *data, "--density", 0.1)
    _, _, base, taus = doubled(case)
    total = sum(map(len, base.values()))
    masks = []
    for column in merged.basis["encoder"].T:
        whole = column @ np.concatenate([tau.numpy() for tau in taus.values()], axis=1)
        masks.append((whole, np.sort(np.argsort(-np.abs(whole))[: round(0.1 * total)])))
    bits = [masks_in(merged.folder, m) for m in range(2)]
    assert all(of[n].shape == tensor.shape for of in bits for n, tensor in merged.tensors.items())
    kept = [np.concatenate([each[n].ravel() for n in base]) for each in bits]
    for (_, top), found in zip(masks, kept, strict=True):
        assert found.sum() == round(0.1 * total)
        assert np.array_equal(np.flatnonzero(found), top) == dataless  # data choose others
    vectors = np.stack([whole * found for (whole, _), found in zip(masks, kept, strict=True)])
    stitched = 1.5 * vectors.sum(0) / np.maximum(1, sum(found.astype(int) for found in kept))
    moved = [(merged.tensors[n].ravel() - start).numpy() for n, start in base.items()]
    np.testing.assert_allclose(np.concatenate(moved), stitched, atol=1e-6)


def test_a_model_of_other_names_is_refused(case: Case) -> None:
    def wrapped(*given: Any) -> nn.Module:
        return nn.Sequential(load_model(*given))

    source = case.recipe("wrapped", basis="none")
    words = (*case.words, "--quiet", "--out", case.folder / "no")
    told = "in memory the model names lm_head.weight, model.embed_tokens.weight"
    for method, module in (("atlas", gradients), ("fisher", models)):
        with mock.patch.object(module, "load_model", wrapped):
            assert told in refused("learn", source, method, *words)


def test_other_layers_are_refused(case: Case) -> None:
    """Nothing is learned on the base for a model with fewer layers, or with layers twice."""
    words = (*case.words, "--quiet", "--out", case.folder / "no")
    for ranges in ([(0, 1)], [(0, 2), (1, 2)], [(1, 2), (0, 1)], [(0, 1), (0, 1)]):
        made = slices(case.base, case.models, ranges) | {"merge_method": "basis_ta"}
        made |= {"base_model": str(case.base), "parameters": {"basis": "none"}, "dtype": "float32"}
        file = write(made, case.folder / "layers")
        assert "`slices` change the base's layers" in refused("learn", file, "atlas", *words)


def masks_in(folder: Path, number: int) -> dict[str, Any]:
    """As docs/files.md has them."""
    file = folder / "basis" / "learned" / f"basis-{number:03d}.safetensors"
    with safe_open(file, "np") as held:
        shapes = json.loads(held.metadata()["tvb_learned"])["shapes"]
        return {
            n: np.unpackbits(held.get_tensor(n), count=math.prod(shape)).reshape(shape)
            for n, shape in shapes.items()
        }


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_drawn_examples_keep_to_the_mixture(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    raw = data.draw(st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes)))
    weights = [w / sum(raw) for w in raw] if sum(raw) > 0.01 else [1 / len(raw)] * len(raw)
    tasks = [[Example([k, n], 1, n) for n in range(size)] for k, size in enumerate(sizes)]
    factor = data.draw(st.floats(0.5, 4))
    found = drawn(weights, tasks, factor, "seed")
    total = max(1, round(factor * sum(sizes) / len(sizes)))
    assert len(found) == total
    for k, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        own = [e.line for e in found if e.ids[0] == k]
        assert abs(len(own) - weight * total) < 1 + 1e-6
        counts = [own.count(n) for n in range(size)]
        assert max(counts) - min(counts) <= 1
    assert found == drawn(weights, tasks, factor, "seed")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.floats(0.01, 1))
def test_the_largest_entries(values: list[int], density: float) -> None:
    every = torch.tensor(values).float()
    every[every == 0] = -torch.inf  # never taken
    sizes = {"a": every[:7], "b": every[7:]}
    found = largest(sizes, density)
    kept = torch.cat([found["a"], found["b"]])
    wanted = min(max(1, round(density * len(values))), int((every > 0).sum()))
    assert int(kept.sum()) == wanted
    if wanted and wanted < len(values):
        assert every[kept].min() >= every[~kept].max()
        ties = (every == every[kept].min()).nonzero()[:, 0].tolist()
        taken = [place for place in ties if kept[place]]
        assert taken == ties[: len(taken)]  # the first


@pytest.mark.parametrize(
    ("data", "begins", "best"),
    [("unheld", 4, 1), ("unheld", 3, None), ("unheld", 9, 2), ("single", 4, 1), ("held", 5, 1),
     ("held", 4, None)],
)  # fmt: skip
def test_a_loss_that_is_not_finite_keeps_the_last_good(case, tmp_path, data, begins, best):
    """Three steps an epoch; two, and one batch that is held out, with `held`.

    Without held-out examples the weights of a step are known to be good only by the next step, or
    by one more batch at the end.
    """
    source, kept, calls = case.recipe("wild", basis="none"), response_loss, 0

    def spoiled(logits: Tensor, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        return kept(logits, batch) * (math.nan if calls > begins else 1)

    files, size = case.words, 4
    if data == "single":  # one example a task: none can be held out
        files, size = data_words(tmp_path, {t: lines(k, 1) for k, t in enumerate(TASKS)}), 1
    more = ("--held-out", 0) if data == "unheld" else ()
    out = tmp_path / "out"
    words = ("learn", source, "atlas", *files, "--quiet", "--batch-size", size, *more)
    with mock.patch("tvb_mergekit.learn.gradients.response_loss", spoiled):
        if best is None:
            line = refused(*words, "--epochs", 3, "--out", out)
            assert "the loss is nan in a batch that begins with" in line
            assert "; lower --learning-rate" in line
            return
        tvb(*words, "--epochs", 3, "--out", out)
    told = facts(out)["history"][0]
    assert told["best"] <= best and "is nan" in told["stopped"]
    assert told["best"] == best or data == "held"
    assert coefficients(out).isfinite().all()


def test_precision_and_checkpointing(case: Case) -> None:
    source = case.recipe("memory", basis="balanced", num_bases=2)
    plain = case.learn(source, "atlas", "plain", *case.words, "--epochs", 2)
    less = case.learn(source, "atlas", "less", *case.words, "--epochs", 2, "--checkpointing")
    more = ("--epochs", 2, "--precision", "bfloat16")
    half = case.learn(source, "atlas", "half", *case.words, *more)
    a, b, c = (coefficients(each.folder) for each in (plain, less, half))
    assert torch.allclose(a, b, atol=1e-5) and not torch.equal(a, c)
    assert torch.allclose(a, c, atol=0.1)


def test_unlabeled_prompts_and_other_tasks(case: Case, tmp_path: Path) -> None:
    prompts = {t: [{"prompt": r["prompt"]} for r in each] for t, each in case.records.items()}
    words = data_words(tmp_path, prompts)
    source = case.recipe("open", basis="balanced", num_bases=2)
    case.learn(source, "adamerging", "prompts", *words, "--epochs", 1)
    assert "expected `prompt` and `response`" in refused(
        "learn", source, "atlas", *words, "--out", tmp_path / "out"
    )
    other = as_lines(tmp_path / "law", lines(7))
    merged = case.learn(source, "atlas", "law", "--data", f"law={other}", "--epochs", 1)
    told = facts(merged.folder)
    assert [each["task"] for each in told["tasks"]] == ["law"]


@pytest.mark.parametrize(("basis", "mixture"), [("ae", ""), ("pca", "equal"), ("pca", "positive")])
def test_mixtures_of_tasks_that_masks_learn_from(case: Case, basis: str, mixture: str) -> None:
    few = {"steps": 50} if basis == "ae" else {}
    source = case.recipe(f"{basis}-mixed", basis=basis, num_bases=2, **few)
    words = (*case.words, "--epochs", 1, *(("--mixture", mixture) if mixture else ()))
    with mock.patch.object(localize, "drawn", side_effect=drawn) as drawing:
        merged = case.learn(source, "localize", f"{basis}-{mixture}", *words)
    encoder = merged.basis["encoder"].astype(np.float64)
    assert (encoder.min() < 0) == (basis == "pca")
    powers = np.where(encoder > 0, np.exp(encoder) if mixture else encoder, 0)
    want = np.full_like(encoder, 1 / 3) if mixture == "equal" else powers / powers.sum(0)
    seen = [call.args[0] for call in drawing.call_args_list]
    np.testing.assert_allclose(seen, np.repeat(want.T, 2, axis=0), atol=1e-6)
    sizes = [[len(each) for each in call.args[1]] for call in drawing.call_args_list]
    assert sizes == [[1] * 3, [2] * 3] * 2  # held out, learned from


def test_bases_without_mixtures(case: Case) -> None:
    pca = case.recipe("pca", basis="pca", num_bases=2)
    line = refused("learn", pca, "localize", *case.words, "--out", case.folder / "no")
    assert "negative weights" in line and "--mixture equal or positive" in line
    case.learn(pca, "atlas", "pca-atlas", *case.words, "--epochs", 1)  # needs none


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
    how = (*case.words, "--epochs", 1)
    for method in ("localize",) if keep is None else ("localize", "adamerging"):
        found, want = (case.learn(of, method, f"{method}-{keep}-{of.name}", *how)
                       for of in (store, source))  # fmt: skip
        change, wanted = (
            torch.cat([(t - base[n]).flatten() for n, t in each.tensors.items()])
            for each in (found, want)
        )
        # The exported models round: masks cut elsewhere among equals.
        most = 0.1 if method == "localize" and keep else 3e-5
        assert float((change - wanted).norm()) < most * float(wanted.norm()) > 0, method


REFUSALS = {
    "fisher --blocks 2": "No such option '--blocks'",
    "regmean --samples 2": "No such option '--samples'",
    "regmean --epochs 2": "No such option '--epochs'",
    "atlas --density 0.1": "No such option '--density'",
    "localize --dataless --data a=b": "--data: --dataless uses no examples",
    "localize --dataless --seed 0": "--seed: --dataless uses no examples",
    "localize --dataless --learning-rate 1": "--learning-rate: --dataless",
    "atlas": "no data: give --data NAME=FILE",
    "adamerging": "no data for math",
    "atlas --learning-rate nan": "'--learning-rate': nan is not a finite number",
    "atlas --learning-rate 1e39": "'--learning-rate': 1e+39 is not in the range",
    "atlas --held-out nan": "'--held-out': nan is not a finite number",
}


def test_options_that_do_not_belong(case: Case) -> None:
    plain, out = case.recipe("plain", basis="none"), case.folder / "no"
    for words, told in REFUSALS.items():
        assert told in refused("learn", plain, *words.split(), "--out", out), words


def test_masks_keep_the_largest_however_large() -> None:
    """Also where sigma(S) is 1 in float32; but none where the basis is 0."""
    bases = {"w": torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]])}
    mask = Mask({}, bases, 3 / 7)
    with torch.no_grad():
        mask.variables[0].copy_(torch.tensor([-18.0, -19.0, -20.0, -5.0, 400.0, 300.0, 500.0]))
    assert mask.kept()["w"].tolist() == [False, False, False, True, True, True, False]


def test_held_out_examples_are_not_learned_from() -> None:
    every = [Example([k], 1, k) for k in range(20)]
    split = Split.of(every, 0.2, "seed")
    assert len(split.held) == 4
    assert sorted(e.line for e in (*split.train, *split.held)) == list(range(20))


def test_adamerging_begins_at_the_addition(case: Case) -> None:
    """A store that has grown, a lambda for some tensors, and a scale."""
    source = case.recipe("start", basis="balanced", num_bases=2, lambda_scale="tasks",
                         lambda_=[{"filter": "mlp", "value": 0.5}, {"value": 0.2}])  # fmt: skip
    plain = case.recipe("start-plain", basis="balanced", num_bases=1)
    store = case.folder / "grown"
    tvb("build", plain, store, "--quiet")
    more = [word for word in case.words]
    tvb("add", store, case.models[0], "--task", "again", "--budget", 3, "--quiet")
    more += ["--data", f"again={as_lines(case.folder / 'again.jsonl', lines(9))}"]
    small = ("--epochs", 1, "--learning-rate", 1e-9, "--held-out", 0)
    merged = case.learn(store, "adamerging", "start-store", *more, *small)
    tvb("merge", store, case.folder / "start-added", "--method", "add", "--quiet")
    added = load(case.folder / "start-added")
    assert all(torch.allclose(t, added[n], atol=1e-6) for n, t in merged.tensors.items())
    layered = case.learn(source, "adamerging", "start-layers", *case.words, *small)
    values, told = coefficients(layered.folder), metadata(layered.folder)
    norm = told["rows"].index("model.norm.weight")
    assert torch.allclose(values[norm], torch.full((2,), 0.2 * 1.5), atol=1e-6)
    assert (values[told["rows"].index("model.layers.0")] > 0.2 * 1.5).all()  # it has an mlp
    assert told["start"][0] == pytest.approx(values[0].tolist(), rel=1e-4)


def test_the_best_epoch_is_kept_and_patience_ends(case: Case) -> None:
    source = case.recipe("best", basis="none")
    words = (*case.words, "--epochs", 9, "--patience", 1, "--learning-rate", 20)
    merged = case.learn(source, "atlas", "best", *words)
    told = facts(merged.folder)
    (history,) = told["history"]
    assert len(history["held"]) < 10 and history["stopped"] == "no lower held-out loss in 1 epochs"
    assert history["held"][history["best"]] == min(history["held"])
    if history["best"] == 0:
        assert not coefficients(merged.folder).any()
