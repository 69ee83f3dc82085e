"""`tvb learn`: data, Fisher and RegMean over bases, against the equations in float64."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds
from commands import Result, recipe, refused, tvb, write
from safetensors.torch import load_file
from test_ranks import run
from tiny import family, gpt2, load
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from tvb_mergekit.core.learned import regression_mean, task_factors
from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import encode, read_data

TASKS = ("math", "code", "chat")
State = Mapping[str, Tensor]
Examples = Sequence[tuple[list[int], int]]  # tokens, and the place of the response


def test_inputs_that_are_always_zero_and_singular_sums() -> None:
    torch.manual_seed(0)
    bases, x = torch.randn(2, 3, 4), torch.randn(2, 2, 4)
    x[:, :, 1] = 0
    grams, encoder, ones = list(x.mT @ x), torch.eye(2).double(), torch.ones(2)
    kept = [gram.clone() for gram in grams]
    found = regression_mean("w", bases, grams, encoder, ones, 1.5, 0.9)
    assert torch.allclose(found[:, 1], 1.5 * bases[:, :, 1].mean(0))
    assert all(map(torch.equal, grams, kept))
    with pytest.raises(UserError, match="`w`: the sum of X\\^T X over its 4 inputs is singular"):
        regression_mean("w", bases, grams[:1] * 2, encoder, ones, 1.0, 1.0)


def test_factors_of_tasks() -> None:
    """The merge where task i alone has information, as s_i k_i / w_i of the task vectors."""
    groups = torch.eye(4).repeat_interleave(2, 0).double() / 2  # each basis the mean of two of 8
    chosen = torch.eye(6)[:, :3].double()  # rand_select
    convex = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)).double().softmax(0)
    for encoder in (groups, chosen, convex):
        shares = encoder @ encoder.T / encoder.sum(1, keepdim=True).clamp(min=1e-9)
        merged = task_factors(encoder, encoder)[:, None] * shares
        own = merged.diagonal()[encoder.sum(1) > 0]
        if encoder is convex:  # as long as the task vector, and never more of it
            assert torch.allclose(merged.norm(dim=1).clamp(max=1), torch.ones(8).double())
            assert (own < 1).all()
        else:
            assert torch.allclose(own, torch.ones_like(own))


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
        log = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        log[range(start - 1, len(ids) - 1), ids[start:]].sum().backward()
        for name, parameter in model.named_parameters() if method == "fisher" else ():
            assert parameter.grad is not None
            add(name, parameter.grad**2 / len(data))
    return sums


def dense(
    method: str,
    base: State,
    bases: Sequence[State],
    models: Sequence[Path],
    encoder: Any,
    data: Mapping[str, Examples],
    off_diagonal: float = 0.9,
    normalize: bool = False,
    by_tasks: bool = False,
) -> dict[str, Tensor]:
    """The merged model by the equations of docs/mathematics.md, in float64.

    Args:
        bases: B_m by tensor.
        models: theta_i, whose statistics are summed.
        data: for each task in the order of `models`.
        by_tasks: `lambda_scale: tasks`.
    """
    w, scale = np.asarray(encoder, np.float64), 1.0
    (tasks, count), s = w.shape, np.ones(len(w))
    if by_tasks:
        k, scale = w @ w.T, tasks / count
        for i in np.flatnonzero(w.sum(1)):
            own = w[i].sum()
            s[i] = max(own / np.linalg.norm(k[i]), min(scale, own / k[i, i]))
    found = [
        statistics_of(*each) for each in zip(models, [method] * tasks, data.values(), strict=True)
    ]
    if normalize:
        totals = [sum(float(each.sum()) for each in own.values()) for own in found]
        found = [{n: e / t for n, e in own.items()} for own, t in zip(found, totals, strict=True)]
    merged = {}
    for name, start in base.items():
        b = [each[name].double() for each in bases]
        mean = sum(b) / count
        if name not in found[0]:
            merged[name] = start.double() + mean
            continue
        own = [each[name] for each in found]
        mixed = [sum(w[i, m] * own[i] for i in range(tasks)) for m in range(count)]
        scaled = [sum(s[i] * w[i, m] * own[i] for i in range(tasks)) for m in range(count)]
        if method == "fisher":
            weighted = sum(f * t for f, t in zip(scaled, b, strict=True)) / sum(mixed)
            merged[name] = start.double() + torch.where(sum(mixed) > 0, weighted, scale * mean)
            continue
        mixed, scaled = ([off_diagonal * g + (1 - off_diagonal) * g.diag().diag() for g in some]
                         for some in (mixed, scaled))  # fmt: skip
        turned = [t if "c_" in name else t.T for t in b]
        solved = torch.linalg.solve(sum(mixed), sum(map(torch.matmul, scaled, turned)))
        merged[name] = start.double() + (solved if "c_" in name else solved.T)
    return merged


def assert_near(found: State, want: State, base: State, most: float = 1e-5) -> None:
    """The move from the base within `most` of its norm."""
    off = sum(float((found[n].double() - t).square().sum()) for n, t in want.items())
    moved = sum(float((t - base[n].double()).square().sum()) for n, t in want.items())
    assert off**0.5 <= most * moved**0.5, (off / moved) ** 0.5


def lines(task: int, count: int = 4, size: int = 96) -> list[dict[str, Any]]:
    """Examples of prompt and response, of words that the tiny tokenizer knows."""
    draw = np.random.default_rng(task)

    def words(most: int) -> str:
        return " ".join(f"t{k}" for k in draw.integers(0, size, draw.integers(2, most)))

    return [{"prompt": words(9) + " ", "response": words(6)} for _ in range(count)]


def tokens(records: Sequence[Mapping[str, Any]]) -> Examples:
    found = []
    for record in records:
        split = [[int(w[1:]) for w in record[key].split()] for key in ("prompt", "response")]
        found.append((split[0] + split[1], len(split[0])))
    return found


def as_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def data_words(folder: Path, records: Mapping[str, Sequence[Any]]) -> list[str]:
    """Write each task's examples, and return the options that name the files."""
    files = {task: as_lines(folder / f"{task}.jsonl", each) for task, each in records.items()}
    return [word for task, file in files.items() for word in ("--data", f"{task}={file}")]


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "basis" / "learned.json").read_text())
    return found


class Case:
    """A family, its data, and the words that give them to the command."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.folder = folder
        self.base, self.models = family(folder, tasks=TASKS, **how)
        self.records = {task: lines(k) for k, task in enumerate(TASKS)}
        self.data = {task: tokens(each) for task, each in self.records.items()}
        self.words = data_words(folder, self.records)

    def recipe(self, name: str, method: str = "basis_ta", **parameters: Any) -> Path:
        return write(recipe(method, self.base, self.models, **parameters), self.folder / name)

    def learn(self, source: Path, method: str, name: str, *more: object) -> Result:
        out = self.folder / name
        tvb("learn", source, method, "--out", out, "--quiet", *more)
        return Result(out)

    def want(self, method: str, encoder: Any, **how: Any) -> dict[str, Tensor]:
        base = load(self.base)
        taus = [{n: t - base[n] for n, t in load(path).items()} for path in self.models]
        bases = [
            {n: sum(float(column[i]) * tau[n] for i, tau in enumerate(taus)) for n in base}
            for column in np.asarray(encoder).T
        ]
        return dense(method, base, bases, self.models, encoder, self.data, **how)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("learn"))


@pytest.mark.parametrize(
    ("method", "more", "basis", "lambda_scale"),
    [
        ("fisher", (), "balanced", "bases"), ("fisher", (), "balanced", "tasks"),
        ("fisher", ("--normalize",), "rand_select", "tasks"), ("regmean", (), "groups", "bases"),
        ("regmean", (), "balanced", "tasks"), ("regmean", (), "rand_select", "tasks"),
    ],
)  # fmt: skip
def test_merges_equal_the_equations(case, method, more, basis, lambda_scale):
    name = f"{basis}-{lambda_scale}-{method}"
    source = case.recipe(f"{name}-recipe", basis=basis, num_bases=2, lambda_scale=lambda_scale)
    merged = case.learn(source, method, name, *case.words, *more, "--no-subsample")
    how = {"normalize": bool(more), "by_tasks": lambda_scale == "tasks"}
    want = case.want(method, merged.basis["encoder"], **how)
    assert_near(merged.tensors, want, load(case.base))
    assert merged.facts["method"] == method and "lambda" not in merged.facts["parameters"]
    assert facts(merged.folder)["examples"] == dict.fromkeys(TASKS, 4)
    assert f"tvb learn {method}" in (merged.folder / "README.md").read_text()
    assert not list(merged.folder.parent.glob(f"{name}.partial*"))
    AutoTokenizer.from_pretrained(merged.folder)


def test_layers_of_gpt2_and_their_off_diagonals(tmp_path: Path) -> None:
    case = Case(tmp_path, make=gpt2)
    source = case.recipe("recipe", basis="none")
    words = (*case.words, "--no-subsample", "--off-diagonal", 0.5, "--spread")
    merged = case.learn(source, "regmean", "out", *words)
    want = case.want("regmean", np.eye(3), off_diagonal=0.5)
    assert_near(merged.tensors, want, load(case.base))


def test_fisher_over_a_store_has_the_statistics_of_its_models(case: Case) -> None:
    store, models = case.folder / "store", case.folder / "models"
    tvb("build", case.recipe("b", basis="balanced", num_bases=2), store, "--quiet")
    tvb("export", store, "--all", models, "--quiet")
    merged = case.learn(store, "fisher", "from-store", *case.words, "--no-subsample")
    vectors = [load(store / f"basis-00{m}") for m in range(2)]
    encoder = load_file(store / "basis.safetensors")["encoder"].numpy()
    base, folders = load(case.base), [models / task for task in TASKS]
    want = dense("fisher", base, vectors, folders, encoder, case.data)
    assert_near(merged.tensors, want, base, 3e-5)  # the exported models are rounded to float32


def test_examples_are_subsampled_by_seed(case: Case) -> None:
    source = case.recipe("half", basis="balanced", num_bases=2)
    made = [case.learn(source, "fisher", f"seed{s}", *case.words, "--seed", s) for s in (0, 1)]
    assert any(not torch.equal(t, made[1].tensors[n]) for n, t in made[0].tensors.items())
    assert facts(made[0].folder)["examples"] == dict.fromkeys(TASKS, 3)


def test_two_processes_learn_what_one_learns(case: Case) -> None:
    source = case.recipe("shared", basis="balanced", num_bases=2)
    for method, more in (("fisher", ()), ("atlas", ("--epochs", 2)), ("localize", ("--epochs", 1))):
        one = case.learn(source, method, f"{method}-one", *case.words, *more)
        out = case.folder / f"{method}-two"
        words = " ".join(
            map(str, ("tvb", "learn", source, method, *case.words, *more, "--out", out))
        )
        codes, said = run(case.folder, words, words)
        assert codes == [0, 0], said
        assert_near(load(out), one.tensors, load(case.base), 1e-4 if more else 1e-6)


def said(content: Any) -> str:
    return json.dumps({"messages": [{"role": "assistant", "content": content}]})


LINES = {
    "{": "line 2: Expecting property name",
    "[1]": "line 2: expected `prompt` and `response`, or `messages`, or `text`; found no object",
    '{"prompt": "t1"}': "found prompt",
    '{"text": 3}': "line 2: `text` is 3: expected text",
    '{"messages": []}': "line 2: `messages`: expected a list of {role, content}",
    said("t1"): "line 2: the tokenizer refuses it: ",
    said(None): "line 2: `messages`: a message without `content`",
    json.dumps({"prompt": "t1 ", "response": "t2 " * 64}): "line 2: 64 tokens, the model's context",
    json.dumps({"text": "t2 " * 65}): "line 2: 65 tokens, the model's context is 64",
    '{"prompt": "t1", "response": ""}': "line 2: no token to predict",
    '{"text": "\xff"}': "line 2: 'utf-8' codec can't decode",
}


def test_lines_that_are_no_examples(case: Case, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(case.models[0])
    for record, told in LINES.items():
        file = tmp_path / "data=1"
        file.write_bytes(b'\xef\xbb\xbf{"text": "t1 t2", "other": 1}\n' + record.encode("latin-1"))
        with pytest.raises(UserError) as error:  # a task's name may contain =
            encode(read_data([f"a=b={file}"], ["a=b"])["a=b"], tokenizer, 64)
        assert told in str(error.value) and str(file) in str(error.value)


def test_what_is_refused(case: Case, tmp_path: Path) -> None:
    plain, pca = case.recipe("plain", basis="none"), case.recipe("pca", basis="pca", num_bases=2)
    ties = write(recipe("basis_ties", case.base, case.models), case.folder / "ties")
    files, empty = case.words, as_lines(tmp_path / "empty", [])
    for told, source, *words in (
        ("no data for chat: give --data chat=FILE", plain, "fisher", *files[:-2]),
        ("(did you mean `chat`?)", plain, "fisher", *files[:-1], f"caht={empty}"),
        ("expected TASK=FILE", plain, "fisher", "--data", "math"),
        ("once for each task", plain, "fisher", *files, *files[:2]),
        ("no examples", plain, "fisher", *files[:-1], f"chat={empty}"),
        ("No such file", plain, "fisher", *files[:-1], "chat=/nowhere"),
        ("negative weights", pca, "fisher", *files), ("negative weights", pca, "localize", *files),
        ("`merge_method` is basis_ties", ties, "fisher", *files),
        ("no tensor takes part", case.recipe("n", basis="none", exclude="."), "fisher", *files),
        ("no data for NAME", plain, "atlas"),
        ("No such option '--blocks'", plain, "fisher", "--blocks", 2),
        ("--nonnegative", case.recipe("0", lambda_=0), "adamerging", *files, "--nonnegative"),
    ):  # fmt: skip
        assert told in refused("learn", source, *words, "--out", tmp_path / "out", "--quiet"), told
    assert not (tmp_path / "out").exists()


def test_experts_are_saved_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path, make=worlds.decoder("Mixtral", num_local_experts=4))
    source = case.recipe("recipe", basis="none")
    case.learn(source, "atlas", "atlas", *case.words, "--epochs", 1)
    assert "nothing is learned of them, unless you" in caplog.text
    for folder in (case.base, *case.models):  # as it says
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.save_pretrained(folder, save_original_format=False)
    caplog.clear()
    case.learn(source, "fisher", "again", *case.words)
    assert "nothing is learned of them" not in caplog.text


def test_tensors_that_one_model_ties(tmp_path: Path) -> None:
    models = worlds.one_untied(tmp_path / "models")
    words = data_words(tmp_path, {task: [{"text": "t1 t2"}] for task in models.tasks})
    source = write(models.recipe(basis="none"), tmp_path / "r")
    for method in ("fisher", "atlas"):
        line = refused("learn", source, method, *words, "--out", tmp_path / "out", "--quiet")
        assert "are tied in one model, and two in others" in line


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
    file = as_lines(tmp_path / "chat.jsonl", [{"messages": asked}, long, {"text": "t1 t2 t3"}])
    tvb(*words, *case.words[:-1], f"chat={file}", "--quiet")
    assert "1 prompts longer than the context of 64 tokens lost their beginning" in caplog.text
    case.data["chat"] = [([9, 1, 2, 9, 3, 4], 4), ([5] * 62 + [6, 7], 62), ([1, 2, 3], 1)]
    assert_near(Result(tmp_path / "out").tensors, case.want("fisher", np.eye(3)), load(case.base))
