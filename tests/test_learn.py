"""`tvb learn`: Fisher and RegMean over bases, against the equations in float64."""

import codecs
import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
import worlds
from commands import Result, recipe, refused, tvb, write
from safetensors.torch import load_file
from tiny import family, gpt2, load
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from tvb_mergekit.core.learned import regression_mean
from tvb_mergekit.errors import UserError
from tvb_mergekit.learn import statistics
from tvb_mergekit.learn.data import Example, encode, read_data

TASKS = ("math", "code", "chat")
State = Mapping[str, Tensor]
Examples = Sequence[tuple[list[int], int]]  # tokens, and the place of the response


class Linear(nn.Module):
    """Logits W x of a fixed input x for each token."""

    def __init__(self, inputs: Tensor, outputs: int) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(inputs)
        self.head = nn.Linear(inputs.shape[1], outputs, bias=False)

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.table(input_ids)))


def linear() -> tuple[Linear, list[Example]]:
    torch.manual_seed(0)
    model = Linear(torch.randn(6, 5), 6)
    ids = torch.randint(0, 6, (7, 4)).tolist()
    return model, [Example(row, 1 + k % 3, k, "data") for k, row in enumerate(ids)]


def test_drawn_labels_give_the_expected_fisher() -> None:
    """E[(sum_t (e_y - p) x_t)^2]; places are independent, so it is the sum of their variances."""
    model, examples = linear()
    inputs, weight = model.table.weight.double(), model.head.weight.detach().double()
    expected = torch.zeros(6, 5, dtype=torch.float64)
    for example in examples:
        x = inputs[list(example.ids[example.start - 1 : -1])]
        p = (x @ weight.T).softmax(-1)
        expected += (p * (1 - p)).T @ x**2 / len(examples)
    drawn, again = (
        statistics.fisher(model, {"w": model.head.weight}, examples, samples=200)["w"]
        for _ in range(2)
    )
    assert (drawn - expected).abs().max() < 0.1 * expected.max()
    assert torch.equal(drawn, again)


def test_inputs_that_are_always_zero_and_singular_sums() -> None:
    torch.manual_seed(0)
    bases, x = torch.randn(2, 3, 4), torch.randn(2, 2, 4)
    x[:, :, 1] = 0
    grams, encoder = list(x.mT @ x), torch.eye(2, dtype=torch.float64)
    kept = [gram.clone() for gram in grams]
    found = regression_mean("w", bases, grams, encoder, 0.9)
    assert torch.allclose(found[:, 1], bases[:, :, 1].mean(0))
    assert all(map(torch.equal, grams, kept))
    with pytest.raises(UserError, match="`w`: the sum of X\\^T X over its 4 inputs is singular"):
        regression_mean("w", bases, grams[:1] * 2, encoder, 1.0)


def test_sums_of_inputs_stay_float32() -> None:
    """Also while the model runs in bfloat16."""
    model, examples = linear()
    with torch.autocast("cpu", torch.bfloat16):
        found = statistics.grams(model, {"w": model.head}, examples)["w"]
    x = torch.cat([model.table(torch.tensor(each.ids)) for each in examples])
    assert torch.allclose(found, x.T @ x, rtol=1e-6, atol=1e-5)


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
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """The merged model by the equations of the paper's table 1, in float64.

    Args:
        bases: B_m by tensor.
        scale: of the bases, except in means without statistics.
        models: theta_i, whose statistics are summed.
        data: for each task in the order of `models`.
    """
    found = []
    for folder, examples in zip(models, data.values(), strict=True):
        own = statistics_of(folder, method, examples)
        total = sum(float(each.sum()) for each in own.values()) if normalize else 1.0
        found.append({name: each / total for name, each in own.items()})
    merged = {}
    count = len(bases)
    for name, start in base.items():
        if name not in found[0]:
            merged[name] = sum(start.double() + each[name].double() for each in bases) / count
            continue
        theta = [start.double() + scale * each[name].double() for each in bases]
        mixed = [
            sum(float(by) * each[name] for by, each in zip(column, found, strict=True))
            for column in np.asarray(encoder).T
        ]
        if method == "fisher":
            weighted = sum(f * t for f, t in zip(mixed, theta, strict=True)) / sum(mixed)
            merged[name] = torch.where(sum(mixed) > 0, weighted, sum(theta) / count)
            continue
        mixed = [off_diagonal * g + (1 - off_diagonal) * g.diag().diag() for g in mixed]
        turned = [t if "c_" in name else t.T for t in theta]
        sums = sum(g @ t for g, t in zip(mixed, turned, strict=True))
        solved = torch.linalg.solve(sum(mixed), sums)
        merged[name] = solved if "c_" in name else solved.T
    return merged


def assert_near(found: State, want: State, base: State, most: float = 1e-5) -> None:
    """Entries within 1e-5 of their tensor's largest, and the move within `most` of its norm."""
    off = moved = 0.0
    for name, wanted in want.items():
        error = (found[name].double() - wanted).abs().max()
        assert float(error) <= 1e-5 * float(wanted.abs().max()), name
        off += float((found[name].double() - wanted).square().sum())
        moved += float((wanted - base[name].double()).square().sum())
    assert off**0.5 <= most * moved**0.5, (off / moved) ** 0.5


def lines(task: int, count: int = 4, size: int = 96) -> list[dict[str, Any]]:
    """Examples of prompt and response, of words that the tiny tokenizer knows."""
    draw = np.random.default_rng(task)

    def words(most: int) -> str:
        return " ".join(f"t{k}" for k in draw.integers(0, size, draw.integers(2, most)))

    return [{"prompt": words(9) + " ", "response": words(6)} for _ in range(count)]


def tokens(records: Sequence[Mapping[str, Any]]) -> Examples:
    made = []
    for record in records:
        prompt, response = (
            [int(word[1:]) for word in record[key].split()] for key in ("prompt", "response")
        )
        made.append((prompt + response, len(prompt)))
    return made


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
        made = recipe(method, self.base, self.models, **parameters)
        return write(made, self.folder / name)

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
        ("fisher", ("--normalize",), "rand_select", "tasks"),
        ("regmean", (), "balanced", "tasks"), ("regmean", (), "rand_select", "bases"),
    ],
)  # fmt: skip
def test_merges_equal_the_equations(case, method, more, basis, lambda_scale):
    scale = 1.5 if lambda_scale == "tasks" else 1.0
    name = f"{basis}-{lambda_scale}-{method}-{len(more)}"
    source = case.recipe(f"{name}-recipe", basis=basis, num_bases=2, lambda_scale=lambda_scale)
    merged = case.learn(source, method, name, *case.words, *more, "--no-subsample")
    want = case.want(method, merged.basis["encoder"], normalize=bool(more), scale=scale)
    assert_near(merged.tensors, want, load(case.base))
    assert merged.facts["method"] == method and "lambda" not in merged.facts["parameters"]
    told = facts(merged.folder)
    assert told["passes"] == {"forward": 12, "backward": 12 * (method == "fisher")}
    assert [each["lines"] for each in told["tasks"]] == [4, 4, 4]
    assert f"tvb learn {method}" in (merged.folder / "README.md").read_text()
    assert not list(merged.folder.parent.glob(f"{name}.partial*"))
    transformers.AutoTokenizer.from_pretrained(merged.folder)


def test_layers_of_gpt2_and_their_off_diagonals(tmp_path: Path) -> None:
    case = Case(tmp_path, make=gpt2)
    source = case.recipe("recipe", basis="none")
    words = (*case.words, "--no-subsample", "--off-diagonal", 0.5)
    merged = case.learn(source, "regmean", "out", *words)
    want = case.want("regmean", np.eye(3), off_diagonal=0.5)
    assert_near(merged.tensors, want, load(case.base))


def test_fisher_over_a_store_has_the_statistics_of_its_models(case: Case) -> None:
    store, models = case.folder / "store", case.folder / "models"
    source = case.recipe("balanced", basis="balanced", num_bases=2)
    tvb("build", source, store, "--quiet")
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
    differ = [n for n, t in made[0].tensors.items() if not torch.equal(t, made[1].tensors[n])]
    assert differ
    told = facts(made[0].folder)
    assert [each["examples"] for each in told["tasks"]] == [3, 3, 3]
    drawn = case.learn(source, "fisher", "drawn", *case.words, "--samples", 3)
    assert facts(drawn.folder)["passes"] == {"forward": 9, "backward": 27}


def said(content: Any) -> str:
    return json.dumps({"messages": [{"role": "assistant", "content": content}]})


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", "line 2: expected an object, found list"),
        ('{"prompt": "t1"}', "line 2: expected `prompt` and `response`, `messages`, or `text`"),
        ('{"text": 3}', "line 2: `text` is 3: expected text"),
        ('{"messages": []}', "line 2: `messages`: expected a list of {role, content}"),
        (said("t1"), "line 2: `messages`, and the tokenizer has no chat template"),
        (said(None), "line 2: `messages`: the content of message 1 is null: expected text"),
        (said({"a": 1}), 'line 2: `messages`: the content of message 1 is {"a": 1}: expected text'),
        *(
            (
                json.dumps({"prompt": "t1 ", "response": "t2 " * count}),
                f"line 2: a response of {count} tokens, and the model's context is 64",
            )
            for count in (64, 65)
        ),
        (json.dumps({"text": "t2 " * 65}), "line 2: a text of 65 tokens"),
        ('{"text": "t1 \\ud800"}', "line 2: 'utf-8' codec can't encode character"),
        ('{"prompt": "t1", "response": ""}', "line 2: the response has no tokens to predict"),
    ],
)
def test_lines_that_are_no_examples(case: Case, tmp_path: Path, record: str, told: str) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"text": "t1 t2"}\n' + record + "\n")
    words = [*case.words[:-1], f"chat={file}", "--out", tmp_path / "out", "--quiet"]
    line = refused("learn", case.recipe("bad", basis="none"), "fisher", *words)
    assert f"{file}, " in line and told in line
    assert not (tmp_path / "out").exists()


def test_what_is_refused(case: Case, tmp_path: Path) -> None:
    plain, empty = case.recipe("plain", basis="none"), tmp_path / "empty"
    empty.write_text("\n")
    pca = case.recipe("pca", basis="pca", num_bases=2)
    ties = write(recipe("basis_ties", case.base, case.models), case.folder / "ties")
    files = case.words
    for told, source, *words in (
        ("no data for chat: give --data chat=FILE", plain, *files[:-2]),
        ("no task 'caht' (did you mean `chat`?)", plain, *files[:-1], f"caht={empty}"),
        ("expected TASK=FILE", plain, "--data", "math"),
        ("task math has", plain, *files, *files[:2]),
        ("no examples, and task chat needs some", plain, *files[:-1], f"chat={empty}"),
        ("--data chat=/nowhere: No such file", plain, *files[:-1], "chat=/nowhere"),
        ("`basis` is pca, whose encoder has negative weights", pca, *files),
        ("`merge_method` is basis_ties", ties, *files),
        ("no tensor takes part", case.recipe("nothing", basis="none", exclude="."), *files),
        ("expected TASK=FILE", plain, *files, "--data", f"={empty}"),
    ):
        assert told in refused("learn", source, "fisher", *words, "--out", tmp_path / "out"), told


def test_what_stops_the_last_stage_leaves_nothing(case: Case) -> None:
    """A full disk, Ctrl-C, and another process that has written meanwhile."""
    source, out = case.recipe("last", basis="none"), case.folder / "last"
    words = ["learn", source, "fisher", *case.words, "--quiet", "--out", out]
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, code, told in (
        (KeyboardInterrupt, 130, "Interrupted.\n"),
        (full, 1, f"{full}\n"),
    ):
        with mock.patch("tvb_mergekit.learn.running.write_model", side_effect=error):
            assert told in tvb(*words, code=code).stderr
        assert not list(case.folder.glob("last*/"))
    with mock.patch("tvb_mergekit.learn.running.check_disk", side_effect=lambda *_: out.mkdir()):
        with mock.patch("tvb_mergekit.plugin.run.check_output_folder"):
            tvb(*words)
    assert load(out) and [*out.glob("*/")] == [out / "basis"]
    assert "already holds weight files" in refused(*words)


def test_experts_are_saved_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path, make=worlds.decoder("Mixtral", num_local_experts=4))
    source, store = case.recipe("recipe", basis="none"), tmp_path / "store"
    told = "`save_pretrained(FOLDER, save_original_format=False)`"
    assert told in refused("build", source, store)

    def warned(name: str, method: str, *more: object) -> list[str]:
        caplog.clear()
        case.learn(source, method, name, *case.words, *more)
        return [line for line in caplog.messages if "nothing is learned of them" in line]

    for method, count, more in (("fisher", 4, ()), ("atlas", 1, ("--epochs", 1))):
        lines = warned(method, method, *more)
        assert len(lines) == count and all("save_original_format=False" in line for line in lines)
    for folder in (case.base, *case.models):  # as it says
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.save_pretrained(folder, save_original_format=False)
    tvb("build", source, store, "--quiet")
    assert warned("again", "fisher", "--no-subsample") == []


def test_a_token_that_the_model_does_not_know(case: Case, tmp_path: Path) -> None:
    (file,) = read_data([f"law={as_lines(tmp_path / 'law', [{'text': 't1 t95'}])}"], None)
    tokenizer = AutoTokenizer.from_pretrained(case.models[0])
    with pytest.raises(UserError, match=r"line 1: token 95 \('t95'\), and the model knows 95; use"):
        encode(file, tokenizer, 64, 95)
    assert encode(file, tokenizer, 64, 96)


@pytest.mark.parametrize(
    ("line", "texts", "plain"),
    [
        ({"prompt": "t1", "response": "t2 t3", "text": "t9"}, False, ("prompt", "response")),
        ({"text": "t4 t5", "prompt": "t1"}, True, ("text",)),
    ],
)
def test_other_keys_of_a_line_do_not_count(line, texts, plain, case, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(case.models[0])
    given = [line, {key: line[key] for key in plain}]
    file = as_lines(tmp_path / "data", given)
    (one,) = read_data([f"law={file}"], None, unlabeled=True, texts=texts)
    first, second = encode(one, tokenizer, 64, 96)
    assert first == replace(second, line=first.line) and not first.unlabeled


def test_tensors_that_one_model_ties(tmp_path: Path) -> None:
    models = worlds.one_untied(tmp_path / "models")
    file = as_lines(tmp_path / "data", [{"text": "t1 t2"}])
    words = [word for task in models.tasks for word in ("--data", f"{task}={file}")]
    recipe = write(models.recipe(basis="none"), tmp_path / "r")
    tvb("learn", recipe, "regmean", *words, "--out", tmp_path / "mean", "--quiet")
    for method, which in (("fisher", f"the model of {models.tasks[1]}"), ("atlas", "the base")):
        said = refused("learn", recipe, method, *words, "--out", tmp_path / "out", "--quiet")
        assert f"are tied in {which}" in said


def test_a_name_with_an_equals_sign_and_a_mark_of_the_byte_order(tmp_path: Path) -> None:
    file = tmp_path / "data=1"
    file.write_bytes(codecs.BOM_UTF8 + b'{"text": "t1 t2"}\n')
    (found,) = read_data([f"a=b={file}"], ["a", "a=b"][1:])
    assert found.task == "a=b" and found.path == str(file) and len(found.records) == 1


def test_chat_templates_cut_prompts_and_missing_tokenizers(tmp_path, caplog):
    case = Case(tmp_path, tokenizer=False)
    plain = case.recipe("plain", basis="none")
    words = ["learn", plain, "fisher", "--out", tmp_path / "out", "--quiet"]
    _, sources = family(tmp_path / "other", tasks=TASKS)
    tokenizer = AutoTokenizer.from_pretrained(sources[0])
    tokenizer.save_pretrained(case.models[1])  # another task's does not count
    assert "no tokenizer in" in refused(*words, *case.words)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 't9 ' + m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}t9 {% endif %}"
    )
    tokenizer.save_pretrained(case.base)
    asked = [{"role": r, "content": c} for r, c in (("user", "t1 t2"), ("assistant", "t3 t4"))]
    long = {"prompt": "t5 " * 70, "response": "t6 t7"}
    file = as_lines(tmp_path / "chat.jsonl", [{"messages": asked}, long, {"text": "t1 t2 t3"}])
    tvb(*words, *case.words[:-1], f"chat={file}")
    assert "1 prompt longer than the context of 64 tokens lost their beginning" in caplog.text
    case.data["chat"] = [([9, 1, 2, 9, 3, 4], 4), ([5] * 62 + [6, 7], 62), ([1, 2, 3], 1)]
    assert_near(Result(tmp_path / "out").tensors, case.want("fisher", np.eye(3)), load(case.base))


def test_a_loss_that_is_not_finite_stops_it() -> None:
    model, examples = linear()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="data, line 0: the loss is nan"):
        statistics.grams(model, {"w": model.head}, examples)
