"""`tvb learn`: data, statistics and gradients over bases, against references in float64."""

import json
import math
import random
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import worlds
from commands import Result, recipe, refused, tvb, write
from safetensors.torch import load_file, save_file
from test_ranks import run
from tiny import family, gpt2, llama, load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

import tvb_mergekit as library
from tvb_mergekit.errors import UserError
from tvb_mergekit.learn import data as texts
from tvb_mergekit.learn import gradients, training
from tvb_mergekit.learn.data import Example, drawn, response_loss
from tvb_mergekit.learn.statistics import regression_mean
from tvb_mergekit.store.routing import Routed, linear_layers

TASKS = ("math", "code", "chat")
State = Mapping[str, Tensor]
Examples = Sequence[tuple[list[int], int]]  # tokens, and the place of the response


def lines(task: int) -> list[dict[str, str]]:
    """Four examples of prompt and response, of words that the tiny tokenizer knows."""
    draw = np.random.default_rng(task)

    def words(most: int) -> str:
        return " ".join(f"t{k}" for k in draw.integers(0, 96, draw.integers(2, most)))

    return [{"prompt": words(9) + " ", "response": words(6)} for _ in range(4)]


def tokens(record: Mapping[str, str]) -> tuple[list[int], int]:
    prompt, said = ([int(w[1:]) for w in record[k].split()] for k in ("prompt", "response"))
    return prompt + said, len(prompt)


def data_words(folder: Path, records: Mapping[str, Sequence[Any]]) -> list[str]:
    """Write each task's examples, and return the options that name the files."""
    for task, each in records.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in each))
    return [word for task in records for word in ("--data", f"{task}={folder / task}.jsonl")]


def learned(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / "basis" / "learned" / f"{name}.safetensors")


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "basis" / "learned.json").read_text())
    return found


def loss_of(logits: Tensor, ids: list[int], start: int) -> Tensor:
    return cross_entropy(logits[0, start - 1 : -1], torch.tensor(ids[start:]))


class Case:
    """A family, its data, and the words that give them to the command."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.folder = folder
        self.base, self.models = family(folder, tasks=TASKS, **how)
        self.records = {task: lines(k) for k, task in enumerate(TASKS)}
        self.data = {task: [*map(tokens, each)] for task, each in self.records.items()}
        self.words = data_words(folder, self.records)

    def recipe(self, name: str, method: str = "basis_ta", **parameters: Any) -> Path:
        return write(recipe(method, self.base, self.models, **parameters), self.folder / name)

    def learn(self, source: Path, method: str, name: str, *more: object) -> Result:
        out = self.folder / name
        tvb("learn", source, method, "--out", out, "--quiet", *more)
        return Result(out)

    def taus(self) -> dict[str, Tensor]:
        """The task vectors [T, ...] of each tensor, in float64."""
        models = [load(path) for path in self.models]
        return {
            n: torch.stack([m[n] for m in models]).double() - t for n, t in load(self.base).items()
        }

    def check(self, found: State, want: State, most: float = 1e-5) -> None:
        """The move from the base within `most` of its norm."""
        base = load(self.base)
        off = sum(float((found[n].detach().double() - t).square().sum()) for n, t in want.items())
        moved = sum(float((t - base[n]).square().sum()) for n, t in want.items())
        assert off**0.5 <= most * moved**0.5, (off / moved) ** 0.5

    def dense(
        self, method, encoder, folders=None, off_diagonal=0.9, normalize=False, by_tasks=False
    ) -> dict[str, Tensor]:
        """The merge by the equations of docs/mathematics.md, in float64.

        `folders`: the models of the statistics; `by_tasks`: `lambda_scale: tasks`.
        """
        w, scale = torch.as_tensor(np.asarray(encoder, np.float64)), 1.0
        (tasks, count), s = w.shape, torch.ones(len(w)).double()
        for i in torch.nonzero(w.sum(1))[:, 0] if by_tasks else ():
            k, own, scale = w @ w[i], w[i].sum(), tasks / count
            s[i] = max(own / k.norm(), min(scale, own / k[i]))
        each = zip(folders or self.models, self.data.values(), strict=True)
        found = [statistics_of(folder, method, data) for folder, data in each]
        totals = [sum(e.sum() for e in own.values()) if normalize else 1 for own in found]
        merged, taus = {}, self.taus()
        for name, start in load(self.base).items():
            b = torch.einsum("im,i...->m...", w, taus[name])
            if name not in found[0]:
                merged[name] = start + b.mean(0)
                continue
            own = torch.stack([e[name] / total for e, total in zip(found, totals, strict=True)])
            if method == "regmean":
                own = off_diagonal * own + (1 - off_diagonal) * own * torch.eye(own.shape[-1])
            mixed, scaled = (torch.einsum("im,i...->m...", of, own) for of in (w, s[:, None] * w))
            if method == "fisher":
                known = (scaled * b).sum(0) / mixed.sum(0)
                moved = torch.where(mixed.sum(0) > 0, known, scale * b.mean(0))
            else:
                turned = b if "c_" in name else b.mT
                moved = torch.linalg.solve(mixed.sum(0), (scaled @ turned).sum(0))
                moved = moved if "c_" in name else moved.T
            merged[name] = start + moved
        return merged


def statistics_of(folder: Path, method: str, data: Examples) -> dict[str, Tensor]:
    """The Fisher of the labels, or X^T X over the inputs X of each layer, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    sums: dict[str, Tensor] = {}

    def add(name: str, term: Tensor) -> None:
        sums[name] = sums.get(name, 0) + term.detach()

    def add_inputs(name: str, module: nn.Module, given: tuple[Tensor]) -> None:
        x = given[0].flatten(0, -2)
        add(name, x.T @ x)

    for path, module in model.named_modules():
        if method == "regmean" and isinstance(module, nn.Linear | Conv1D):
            module.register_forward_pre_hook(partial(add_inputs, f"{path}.weight"))
    for ids, start in data:
        model.zero_grad()
        (loss_of(model(torch.tensor([ids])).logits, ids, start) * (len(ids) - start)).backward()
        for name, parameter in model.named_parameters() if method == "fisher" else ():
            assert parameter.grad is not None
            add(name, parameter.grad**2 / len(data))
    return sums


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("learn"))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """GPT-2: it ties its head, and its weights are [inputs, outputs]."""
    return Case(tmp_path_factory.mktemp("exact"), make=gpt2)


@pytest.mark.parametrize(
    ("family", "method", "more", "basis", "lambda_scale"),
    [
        ("case", "fisher", (), "balanced", "bases"), ("case", "fisher", (), "balanced", "tasks"),
        ("case", "fisher", ("--normalize",), "rand_select", "tasks"),
        ("case", "regmean", (), "groups", "bases"), ("case", "regmean", (), "balanced", "tasks"),
        ("case", "regmean", (), "rand_select", "tasks"),
        ("exact", "regmean", ("--off-diagonal", 0.5, "--spread"), "none", "bases"),
    ],
)  # fmt: skip
def test_merges_equal_the_equations(family, method, more, basis, lambda_scale, request):
    case, name = request.getfixturevalue(family), f"{basis}-{lambda_scale}-{method}"
    keys = {} if basis == "none" else {"num_bases": 2, "lambda_scale": lambda_scale}
    source = case.recipe(f"{name}-recipe", basis=basis, **keys)
    merged = case.learn(source, method, name, *case.words, *more, "--no-subsample")
    how = {"normalize": "--normalize" in more, "by_tasks": lambda_scale == "tasks"}
    how["off_diagonal"] = 0.5 if "--off-diagonal" in more else 0.9
    case.check(merged.tensors, case.dense(method, merged.basis.get("encoder", np.eye(3)), **how))
    assert merged.facts["method"] == method and "lambda" not in merged.facts["parameters"]
    assert facts(merged.folder)["examples"] == dict.fromkeys(TASKS, 4)
    assert f"tvb learn {method}" in (merged.folder / "README.md").read_text()
    assert not list(merged.folder.parent.glob(f"{name}.partial*"))
    AutoTokenizer.from_pretrained(merged.folder)


def test_inputs_that_are_always_zero_and_singular_sums() -> None:
    torch.manual_seed(0)
    bases, x = torch.randn(2, 3, 4), torch.randn(2, 2, 4)
    x[:, :, 1] = 0
    grams, encoder, ones = list(x.mT @ x), torch.eye(2).double(), torch.ones(2)
    found = regression_mean("w", bases, grams, encoder, ones, 1.5, 0.9)
    assert torch.allclose(found[:, 1], 1.5 * bases[:, :, 1].mean(0))
    assert all(map(torch.equal, grams, x.mT @ x))
    with pytest.raises(UserError, match="`w`: the sum of X\\^T X over its 4 inputs is singular"):
        regression_mean("w", bases, grams[:1] * 2, encoder, ones, 1.0, 1.0)


def test_fisher_over_a_store_has_the_statistics_of_its_models(case: Case) -> None:
    store, models = case.folder / "store", case.folder / "models"
    tvb("build", case.recipe("b", basis="balanced", num_bases=2), store, "--quiet")
    tvb("export", store, models, "--all", "--quiet")
    merged = case.learn(store, "fisher", "from-store", *case.words, "--no-subsample")
    encoder = load_file(store / "numbers-1.safetensors")["encoder"]
    want = case.dense("fisher", encoder, [models / task for task in TASKS])
    case.check(merged.tensors, want, 3e-5)  # the exported models are rounded to float32


def test_two_processes_learn_what_one_learns(case: Case) -> None:
    source = case.recipe("shared", basis="balanced", num_bases=2)
    for method, more, most in (("fisher", (), 1e-6), ("atlas", ("--epochs", 2), 1e-4)):
        one = case.learn(source, method, f"{method}-one", *case.words, *more)
        out = case.folder / method
        words = " ".join(map(str, ("tvb learn", source, method, *case.words, *more, "--out", out)))
        codes, said = run(case.folder, words, words)
        assert codes == [0, 0], said
        case.check(load(out), {name: t.double() for name, t in one.tensors.items()}, most)
        assert facts(out)["examples"] == dict.fromkeys(TASKS, 3)  # M/T of them


LINES = {
    "[1]": "line 2: expected `prompt` and `response`, or `messages`, or `text`; found no object",
    '{"messages": [{"role": "assistant", "content": "t1"}]}': "line 2: the tokenizer refuses it: ",
    json.dumps({"prompt": "t1 ", "response": "t2 " * 64}): "line 2: 64 tokens, the model's context",
    '{"prompt": "t1", "response": ""}': "line 2: no token to predict",
}


def test_lines_that_are_no_examples(case: Case, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(case.models[0])
    for record, told in LINES.items():
        file = tmp_path / "data=1"
        file.write_bytes(b'\xef\xbb\xbf{"text": "t1 t2", "other": 1}\n' + record.encode("latin-1"))
        with pytest.raises(UserError) as error:  # a task's name may contain =
            texts.encode(texts.read_data([f"a=b={file}"], ["a=b"])["a=b"], tokenizer, 64)
        assert told in str(error.value) and str(file) in str(error.value)


def test_what_is_refused(case: Case, tmp_path: Path) -> None:
    plain, pca = case.recipe("plain", basis="none"), case.recipe("pca", basis="pca", num_bases=2)
    ties, files = case.recipe("ties", "basis_ties"), case.words
    (tmp_path / "empty").touch()
    for told, source, *words in (
        ("no data for chat: give --data chat=FILE", plain, "fisher", *files[:-2]),
        ("no examples", plain, "fisher", *files[:-1], f"chat={tmp_path / 'empty'}"),
        ("negative weights", pca, "fisher", *files), ("negative weights", pca, "localize", *files),
        ("`merge_method` is basis_ties", ties, "fisher", *files),
        ("no tensor takes part", case.recipe("n", basis="none", exclude="."), "fisher", *files),
        ("--nonnegative", case.recipe("0", lambda_=0), "adamerging", *files, "--nonnegative"),
    ):  # fmt: skip
        assert told in refused("learn", source, *words, "--out", tmp_path / "out", "--quiet"), told
    assert not (tmp_path / "out").exists()


def test_tensors_that_one_model_ties(tmp_path: Path) -> None:
    """The merge is that of models of which each has two tensors."""
    models = worlds.one_untied(tmp_path / "models")
    words = data_words(tmp_path, {task: lines(k) for k, task in enumerate(models.tasks)})
    source, found = write(models.recipe(basis="none"), tmp_path / "r"), dict[str, State]()
    for method in ("fisher", "atlas"):
        tvb("learn", source, method, *words, "--out", tmp_path / method, "--quiet")
        found[method] = load(tmp_path / method)
        assert not found[method][worlds.HEAD].equal(found[method][worlds.EMBEDDING])
    for path, state in zip((models.base, *models.listed), models.states, strict=True):
        worlds.save(Path(path), state)
        worlds.configure(Path(path), tie_word_embeddings=False)
    for method, merged in found.items():
        tvb("learn", source, method, *words, "--out", tmp_path / "apart" / method, "--quiet")
        for name, tensor in load(tmp_path / "apart" / method).items():
            moved = (tensor - models.states[0][name]).norm()
            assert (merged[name] - tensor).norm() <= 1e-5 * moved, (method, name)


def test_chat_templates_cut_prompts_and_missing_tokenizers(tmp_path, caplog):
    case = Case(tmp_path, tokenizer=False)
    words = ["learn", case.recipe("plain", basis="none"), "fisher", "--out", tmp_path / "out"]
    assert "no tokenizer in" in refused(*words, *case.words)
    _, sources = family(tmp_path / "other", tasks=TASKS)
    tokenizer = AutoTokenizer.from_pretrained(sources[0])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 't9 ' + m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}t9 {% endif %}"
    )
    tokenizer.save_pretrained(case.base)
    asked = [{"role": r, "content": c} for r, c in (("user", "t1 t2"), ("assistant", "t3 t4"))]
    long = {"prompt": "t5 " * 70, "response": "t6 t7"}
    data_words(tmp_path, {"chat": [{"messages": asked}, long, {"text": "t1 t2 t3"}]})
    tvb(*words, *case.words, "--quiet")
    assert "1 prompts longer than the context of 64 tokens lost their beginning" in caplog.text
    case.data["chat"] = [([9, 1, 2, 9, 3, 4], 4), ([5] * 62 + [6, 7], 62), ([1, 2, 3], 1)]
    case.check(Result(tmp_path / "out").tensors, case.dense("fisher", np.eye(3)))


# By gradients


TWO = {"basis": "balanced", "num_bases": 2, "lambda_scale": "tasks"}


@pytest.mark.parametrize(
    ("method", "more", "keys"),
    [
        ("atlas", (), {"basis": "none"}), ("atlas", ("--blocks", 3), TWO),
        ("atlas", ("--nonnegative",), {"basis": "groups", "num_bases": 2}), ("adamerging", (), TWO),
    ],
)  # fmt: skip
def test_coefficients_are_those_of_the_published_methods(exact, method, more, keys):
    """AdamW; aTLAS clips, and its rate falls along a cosine (its code)."""
    atlas, blocks = method == "atlas", 3 if "--blocks" in more else 1
    power, name = 2 if "--nonnegative" in more else 1, "".join([method, *map(str, more)])
    words = (*exact.words, *more, "--no-subsample", "--learning-rate", 0.1, "--epochs", 3)
    source = exact.recipe(f"{name}-recipe", lambda_=0.3, **keys)
    merged = exact.learn(source, method, name, *words, "--held-out", 0, "--batch-size", 5)
    model = AutoModelForCausalLM.from_pretrained(exact.base, dtype=torch.float64).eval()
    base = {name: p.detach() for name, p in model.named_parameters()}
    encoder, longer = torch.as_tensor(merged.basis.get("encoder", np.eye(3))), len(keys) / 2  # T/M
    scale = longer if atlas and keys is TWO else 1.0
    start = (0.1 if power == 2 else 0.0) if atlas else 0.3 * longer
    taus = exact.taus()
    bases = {n: scale * torch.einsum("im,i...->m...", encoder, taus[n]).flatten(1) for n in base}
    rows = {n: ".".join(n.split(".")[:3]) if ".h." in n and not atlas else n for n in base}
    first = torch.full((blocks, encoder.shape[1]), start ** (1 / power)).double()
    values = {row: first.clone().requires_grad_() for row in rows.values()}

    def theta(name: str) -> Tensor:
        pieces = zip(values[rows[name]] ** power, bases[name].tensor_split(blocks, 1), strict=True)
        return base[name] + torch.cat([c @ piece for c, piece in pieces]).view_as(base[name])

    def loss(ids: list[int], start: int) -> Tensor:
        state = {name: theta(name) for name in base}
        logits = torch.func.functional_call(model, state, torch.tensor([ids])).logits
        logs = torch.log_softmax(logits[0, start - 1 : -1], -1)
        return loss_of(logits, ids, start) if atlas else -(logs.exp() * logs).sum(-1).mean()

    every = [e for t in TASKS for e in random.Random(f"0 {t}").sample(exact.data[t], 4)]
    epochs = [random.Random(f"0 {epoch}").sample(every, 12) for epoch in (1, 2, 3)]
    steps = [some[k : k + 5] for some in epochs for k in range(0, 12, 5)]
    optimizer = torch.optim.AdamW(values.values(), weight_decay=0.1 if atlas else 0.0)
    for number, batch in enumerate(steps):
        fallen = (1 + math.cos(math.pi * number / len(steps))) / 2 if atlas else 1
        optimizer.param_groups[0]["lr"] = 0.1 * fallen
        optimizer.zero_grad()
        torch.stack([loss(*example) for example in batch]).mean().backward()
        if atlas:
            torch.nn.utils.clip_grad_norm_(values.values(), 1.0)
        optimizer.step()
    exact.check(merged.tensors, {name: theta(name).detach() for name in base}, 5e-4)
    found, power = learned(merged.folder, "coefficients"), 1  # which make the model
    values = {row: c.double() / scale for row, c in found.items()}
    exact.check(merged.tensors, {name: theta(name) for name in base})


@pytest.mark.parametrize("dataless", [True, False])
def test_masks_are_stitched(case: Case, dataless: bool) -> None:
    """The merge is the mean of the bases where their masks overlap."""
    source = case.recipe("masks", basis="balanced", num_bases=2, lambda_scale="tasks")
    data = ("--dataless",) if dataless else (*case.words, "--epochs", 2, "--penalty", 1e-4)
    with mock.patch.object(gradients, "stitch", side_effect=gradients.stitch) as stitching:
        merged = case.learn(source, "localize", f"masked-{dataless}", *data, "--density", 0.1)
    w, base = merged.basis["encoder"].T, load(case.base)
    taus = {name: tau.flatten(1).numpy() for name, tau in case.taus().items()}
    kept, tops = np.zeros(2), np.zeros(2)
    sizes = np.concatenate([w @ tau for tau in taus.values()], 1)
    limits = np.quantile(np.abs(sizes), 0.9, axis=1)[:, None]
    for name, call in zip(base, stitching.call_args_list, strict=True):
        vectors, mask = w @ taus[name], call.args[1].flatten(1).numpy()
        want = 1.5 * (vectors * mask).sum(0) / np.maximum(1, mask.sum(0))
        moved = (merged.tensors[name].double() - base[name]).view(-1).numpy()
        np.testing.assert_allclose(moved, want, atol=1e-6)
        kept, tops = kept + mask.sum(1), tops + (mask * (np.abs(vectors) > limits)).sum(1)
    assert (kept == round(0.1 * sizes.shape[1])).all()
    assert (tops >= kept - 1).all() == dataless  # data choose others
    for history in [] if dataless else facts(merged.folder)["history"]:
        assert history["held"][history["best"]] == min(history["held"])


def test_ties_are_broken_in_all_tensors_alike() -> None:
    """16-bit models have thousands of equal entries at the threshold; -inf is no size."""
    sizes = {"a": torch.ones(100), "b": torch.ones(300), "c": torch.tensor([2.0, -torch.inf])}
    found = gradients.largest(sizes, 101 / 402)
    assert [int(mask.sum()) for mask in found.values()] == [25, 75, 1] and found["c"][0]
    assert (found["b"].nonzero()[:, 0].diff() == 4).all()


def test_drawn_examples_keep_to_the_mixture() -> None:
    draw = np.random.default_rng(0)
    for sizes in ([4], [1, 9, 5], [3, 3], [2, 8, 6, 7]):
        weights, factor = draw.dirichlet(np.ones(len(sizes))), draw.uniform(0.5, 4)
        tasks = [[Example([k, n], 1) for n in range(size)] for k, size in enumerate(sizes)]
        found = drawn(weights.tolist(), tasks, factor, "seed")
        total = max(1, round(factor * sum(sizes) / len(sizes)))
        assert len(found) == total and found == drawn(weights.tolist(), tasks, factor, "seed")
        for weight, own in zip(weights, tasks, strict=True):
            counts = [found.count(example) for example in own]
            assert abs(sum(counts) - weight * total) < 1 and max(counts) - min(counts) <= 1


def test_a_loss_that_is_not_finite_keeps_the_last_good(case: Case, tmp_path: Path) -> None:
    """Four batches an epoch, and one that is held out, if any."""
    words = ["learn", case.recipe("wild", basis="none"), "atlas", *case.words, "--epochs", 3]
    words += ["--batch-size", 3, "--quiet", "--out", tmp_path / "out"]

    def spoiled(*given: Tensor) -> Tensor:
        return response_loss(*given) * next(finite, math.nan)

    with mock.patch.object(training, "response_loss", spoiled):
        finite = iter([1.0] * 5)
        said = refused(*words, "--held-out", 0)
        assert "the loss is nan in a batch with" in said and "; lower --learning-rate" in said
        finite = iter([1.0] * 6)
        tvb(*words)
    (told,) = facts(tmp_path / "out")["history"]
    assert told["best"] <= 1 and "is nan" in told["stopped"]
    assert all(c.isfinite().all() for c in learned(tmp_path / "out", "coefficients").values())


# WEMoE: routed models against dense ones that merge the weights of each sequence


WINDOWED = worlds.of("Mistral", sliding_window=3)  # attention sees the last three tokens
PROMPTS = ([3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8, 1, 8])


def routed(make: Any, bases: int = 3) -> Routed:
    """A model in float64, with random bases and routers."""
    torch.manual_seed(0)
    model = make().double().eval().requires_grad_(False)
    parameters = dict(model.named_parameters())
    moved, routers = {}, {}
    for name in (name for name in linear_layers(model) if ".mlp." in name):
        p = parameters[name]
        p += 0.1 * torch.randn_like(p)
        moved[name] = 0.1 * torch.randn(bases, *p.shape, dtype=p.dtype)
        router = [torch.randn(bases, 32, dtype=p.dtype), torch.randn(bases, dtype=p.dtype)]
        routers[name.partition(".mlp.")[0] + ".mlp"] = router
    return Routed(model, routers, moved)


def dense_model(made: Routed, prompt: Sequence[int]) -> nn.Module:
    """A model with the weights that the routers give one prompt, MLP after MLP, each seen through
    the model with the earlier ones merged."""
    own: nn.Module = AutoModelForCausalLM.from_config(made.model.config).double().eval()
    own.load_state_dict(made.model.state_dict())
    theta = dict(own.requires_grad_(False).named_parameters())
    for mlp, (weight, bias) in made.routers.items():
        seen = list[Tensor]()
        hook = own.get_submodule(mlp).register_forward_pre_hook(lambda m, x, s=seen: s.append(x[0]))
        own(torch.tensor([prompt]))
        hook.remove()
        r = weight @ seen[0][0].mean(0) + bias
        for name, each in made.bases.items():
            if name.startswith(f"{mlp}."):
                theta[name] += torch.tensordot(r, each, 1)
    return own


def padded(prompts: Sequence[Sequence[int]], left: bool) -> dict[str, Tensor]:
    size = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        gap = [0] * (size - len(prompt))
        rows.append([*gap, *prompt] if left else [*prompt, *gap])
        masks.append([*gap, *[1] * len(prompt)] if left else [*[1] * len(prompt), *gap])
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


@pytest.mark.parametrize("make", [llama, gpt2, WINDOWED])
def test_a_batch_is_what_dense_models_give_one_by_one(make: Any) -> None:
    """Logits, and generation with a cache; `reset`: test_routing.py."""
    there = routed(make)
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    every = [dense_model(there, prompt) for prompt in PROMPTS]
    model = there.route()
    rows = model(**padded(PROMPTS, left=False)).logits
    for row, prompt, own in zip(rows, PROMPTS, every, strict=True):
        logits = own(torch.tensor([prompt])).logits[0]
        assert (row[: len(logits)] - logits).abs().max() < 1e-6 * logits.abs().max()
    for some, beams, cache in (([0, 1, 2], 2, None), ([1], 1, None), ([2, 0], 1, "static")):
        batch, how["num_beams"] = padded([PROMPTS[k] for k in some], left=True), beams
        told = model.generate(**batch, **how, cache_implementation=cache)[:, -5:]
        want = [every[k].generate(torch.tensor([PROMPTS[k]]), **how)[0, -5:] for k in some]
        assert torch.equal(told, torch.stack(want))


def loaded(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def mean_loss(model: nn.Module, data: Mapping[str, Examples], live: Routed) -> float:
    total = []
    for ids, start in (each for some in data.values() for each in some):
        live.prompts = (torch.arange(len(ids)) < start)[None]
        with torch.no_grad():
            total.append(float(loss_of(model(torch.tensor([ids])).logits, ids, start)))
    return sum(total) / len(total)


@pytest.mark.parametrize(
    ("method", "keys"),
    [("basis_ta", {"basis": "balanced", "num_bases": 2}), ("basis_wudi", {"basis": "none"})],
)
def test_routers_lower_the_loss_of_the_merge(case: Case, method: str, keys: dict[str, Any]) -> None:
    source = case.recipe(f"{method}-recipe", method, lambda_=0.4, **keys)
    words = (*case.words, "--no-subsample", "--held-out", 0, "--learning-rate", 0.01)
    merged = case.learn(source, "wemoe", method, *words, "--epochs", 6, "--batch-size", 4)
    tvb("merge", source, case.folder / f"{method}-merged", "--quiet")
    added = load(case.folder / f"{method}-merged")
    assert all(torch.equal(t, added[n]) for n, t in merged.tensors.items())
    encoder, taus = torch.as_tensor(merged.basis["encoder"]), case.taus()
    held = learned(merged.folder, "routers")
    bases = {name: t.double() for name, t in held.items() if ".router." not in name}
    assert bases and all("mlp" in name for name in bases)
    for name, found in bases.items():
        assert torch.allclose(found, torch.einsum("im,i...->m...", encoder, taus[name]), atol=1e-6)
    live = library.attach(loaded(merged.folder), merged.folder)
    assert isinstance(live, Routed)
    before = mean_loss(live.model, case.data, live)
    assert mean_loss(live.route(), case.data, live) < before - 0.01
    (history,) = facts(merged.folder)["history"]
    assert history["losses"][0] == pytest.approx(before, abs=0.05)
    shapes = {name: [*of_bases.shape] for name, of_bases in live.coefficients.items()}
    assert shapes == {f"model.layers.{k}.mlp": [1, encoder.shape[1]] for k in (0, 1)}
    assert mean_loss(live.reset(), case.data, live) == before
    assert "with routers for its MLPs" in (merged.folder / "README.md").read_text()


def test_prompts_alone_checkpointing_and_a_store(case: Case, tmp_path: Path) -> None:
    prompts = {t: [{"prompt": r["prompt"]} for r in each] for t, each in case.records.items()}
    words = data_words(tmp_path, prompts)
    source = case.recipe("forms", basis="balanced", num_bases=2)
    tvb("build", source, tmp_path / "store", "--quiet")
    said = refused("learn", source, "wemoe", *words, "--out", tmp_path / "out")
    assert "`prompt` and `response`" in said
    words += ["--unlabeled", "--epochs", "2", "--held-out", "0"]
    words += ["--learning-rate", "0.01"]
    plain = case.learn(source, "wemoe", "all-prompts", *words)
    told, want = facts(plain.folder), learned(plain.folder, "routers")
    assert told["unlabeled"] and told["learning_rate"] == 0.01
    assert want["model.layers.0.mlp.router.0.weight"].any()
    less = case.learn(source, "wemoe", "lessened", *words, "--checkpointing")
    for other in (less, case.learn(tmp_path / "store", "wemoe", "stored", *words)):
        assert learned(other.folder, "routers").keys() == want.keys()
        # Adam gives an entry a step of the rate even if rounding alone decides its sign. Such a
        # step changes the loss by no more than rounding does: some hundred sums in float32.
        (own,), rounding = facts(other.folder)["history"], 1e3 * torch.finfo(torch.float32).eps
        assert own["losses"] == pytest.approx(told["history"][0]["losses"], rel=rounding)


def test_models_and_files_that_do_not_fit(case, tmp_path):
    source = case.recipe("fit", basis="none")
    merged = case.learn(source, "wemoe", "fit-out", *case.words, "--epochs", 1)
    assert facts(merged.folder)["learning_rate"] == 1 / loaded(case.base).config.hidden_size
    with pytest.raises(UserError, match="are not the base's"):
        library.attach(loaded(case.base), merged.folder)
    folder = shutil.copytree(merged.folder, tmp_path / "other")
    place, held = folder / "basis/learned/routers.safetensors", learned(folder, "routers")
    later = {"tvb_learned": '{"version": 2, "method": "wemoe"}'}
    for told in (None, later):
        save_file(held, place, told)
        with pytest.raises(UserError, match="damaged, or written by another tvb-mergekit"):
            library.attach(loaded(folder), folder)
    words = [case.recipe("no-mlp", basis="none", exclude="mlp"), "wemoe", *case.words, "--quiet"]
    assert "merge moves none of them" in refused("learn", *words, "--out", tmp_path / "no")
