"""`tvb tune` on the quickstart's models, against mergekit-yaml and lm_eval run one by one."""

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lm_eval
import pytest
import torch
import transformers
import yaml
from commands import merge, recipe, refused, tvb, write
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks import TaskManager
from PIL import Image
from torch import Tensor
from worlds import World

from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.tune import line, run, search, tasks
from tvb_mergekit.tune.search import Estimate

QUICK = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"
EVAL = QUICK / "eval"
PAIR = "quickstart_copy,quickstart_sum"


@pytest.fixture(autouse=True, scope="module")
def _small_lm_eval() -> Iterator[None]:
    """lm-eval reads ten thousand files of tasks, and starts programs to describe the machine."""
    own = partial(TaskManager, include_defaults=False)
    env = mock.patch("lm_eval.evaluator.add_env_info")
    with mock.patch.object(lm_eval.tasks, "TaskManager", own), env:
        yield


def quick(method: str = "basis_ta", **parameters: Any) -> dict[str, Any]:
    folders = [QUICK / "models" / task for task in ("copy", "upper", "double", "sum")]
    parameters = {"basis": "balanced", "num_bases": 2, "lambda_scale": "tasks", **parameters}
    return recipe(method, QUICK / "models" / "base", folders, {}, **parameters)


def evaluated(model: Any, args: str, samples: Any = None, split: str = "test") -> Any:
    """lm_eval's results on PAIR, or on these samples of it."""
    listed = TaskManager(include_path=str(EVAL), include_defaults=False, metadata={"split": split})
    return lm_eval.simple_evaluate(
        model=model, model_args=args, tasks=PAIR.split(","), batch_size=64, device="cpu",
        task_manager=listed, samples=samples, limit=None if samples else 8,
    )  # fmt: skip


def words(path: Path, out: Path, *more: object, tasks: str = PAIR, place: Path = EVAL) -> list[Any]:
    return ["tune", path, "--tasks", tasks, "--include-path", place, "--batch-size", 64,
            "--device", "cpu", "--quiet", "--out", out, *more]  # fmt: skip


def facts(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "tune.json").read_text())
    return found


def test_points_are_what_separate_runs_give(tmp_path: Path) -> None:
    """Compare with mergekit-yaml, to the bit, and with lm_eval."""
    path, out = write(quick(lambda_=0.1), tmp_path / "recipe"), tmp_path / "out"
    states: list[dict[str, Tensor]] = []

    def keeping(lm: Any, *given: Any) -> dict[str, Estimate]:
        assert bool(states) == (out / "tune.json").exists()  # after each point, against a kill
        states.append({name: tensor.clone() for name, tensor in lm.model.state_dict().items()})
        return tasks.score(lm, *given)

    with mock.patch.object(run, "score", keeping):
        tvb(*words(path, out, "--limit", 8, "--grid", "0.4,0.9"))
    assert {f.name for f in out.iterdir()} == {"tuned.yml", "tune.json", "curve.png"}
    found = facts(out)
    samples = {task["name"]: task["chosen"] for task in found["tasks"]}
    means = {}
    for point, scores in found["points"].items():
        made = merge(quick(lambda_=float(point)), tmp_path / point).folder
        want = evaluated("hf", f"pretrained={made}", samples, "val")["results"]
        for name, each in scores.items():
            assert each["value"] == want[name]["exact_match,none"]
            assert each["stderr"] == want[name]["exact_match_stderr,none"]
        means[float(point)] = sum(each["value"] for each in scores.values())
    assert found["best"] == max(means, key=means.__getitem__) and len({*means.values()}) == 2
    text = (out / "tuned.yml").read_text()
    assert yaml.safe_load(text) == quick(lambda_=found["best"])
    assert "8 of 100 validation items" in text
    tuned = merge(yaml.safe_load(text), tmp_path / "tuned")
    state = states[[*means].index(found["best"])]
    assert all(torch.equal(state[name], tensor) for name, tensor in tuned.tensors.items())
    picture = Image.open(out / "curve.png").convert("RGB")
    colours = {colour for _, colour in picture.getcolors(2**20) or ()}  # of tasks and mean
    assert {(31, 119, 180), (255, 127, 14), (0, 0, 0)} <= colours
    assert "already holds curve.png" in refused(*words(path, out))


def test_forgetting_one_task(tmp_path: Path) -> None:
    """The paper's rule, on the scores of the file."""
    document = quick("basis_negate", num_bases=3, forget="upper", alpha=1.0, lambda_=0.35)
    path, out = write(document, tmp_path / "recipe"), tmp_path / "out"
    controls = ("--control", "quickstart_copy", "--control", "quickstart_double")
    tvb(*words(path, out, *controls, "--limit", 5, "--grid", "0.5,1", tasks="quickstart_upper"))
    found = {}
    for alpha, scores in facts(out)["points"].items():
        upper, *kept = (scores[f"quickstart_{t}"]["value"] for t in ("upper", "copy", "double"))
        found[float(alpha)] = upper, sum(kept)
    assert [*found] == [0, 0.5, 1]
    allowed = [alpha for alpha, (_, kept) in found.items() if kept >= 0.95 * found[0][1] - 1e-9]
    best = min(allowed, key=lambda alpha: (found[alpha][0], alpha))
    assert yaml.safe_load((out / "tuned.yml").read_text())["parameters"]["alpha"] == best
    assert found[best][0] < 0.5 < found[0][0]
    left, kept = {0.0: 1, 1.0: 0.2, 2.0: 0.2, 3.0: 0}, {0.0: 1, 1.0: 0.95, 2.0: 1, 3.0: 0.94}
    assert search.most_forgotten(left, kept, 0.95) == 1  # the smallest of equals that keep enough


def test_a_search_with_few_points(tmp_path: Path) -> None:
    """And a bar that ends at 100 %."""
    path, out = write(quick(), tmp_path / "recipe"), tmp_path / "out"
    more = ("--search", "brent", "--limit", 8, "--grid", "0:1:0.1")
    said = tvb(*[word for word in words(path, out, *more) if word != "--quiet"]).stderr
    count = len(facts(out)["points"])
    assert 2 < count <= 9 and 0.1 < facts(out)["best"] < 0.7
    assert f"Tune: 100% {count}/{count}" in said and "?" not in said


# The line: theta_0 + coefficient * direction

BALANCED, SCALED = {"basis": "balanced", "num_bases": 2}, {"lambda_scale": "tasks"}
FORGOTTEN = {**BALANCED, "forget": "code,chat", "alpha": 1, "lambda": 0.3}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sum": ("mixed dtypes", "basis_ta", {**BALANCED, **SCALED}),
    "ties": ("mixed dtypes", "basis_ties", {**BALANCED, "density": [0.3, 0.6]}),
    "iso": ("mixed dtypes", "basis_iso", {**BALANCED, **SCALED}),
    "wudi": ("mixed dtypes", "basis_wudi", {"basis": "none", "matrices": "mlp"}),
    "forget from the sum": ("mixed dtypes", "basis_negate", FORGOTTEN),
    "some left out": ("mixed dtypes", "basis_ta", {**BALANCED, "exclude": "embed|lm_head"}),
    "tied": ("tied", "basis_ta", BALANCED),
    "adapters": ("adapters", "basis_ta", BALANCED),
    "a store": ("store of balanced", "basis_ta", SCALED),
}


def prepared(case: str, world: World) -> dict[str, Any]:
    (family, method, keys), dtypes = CASES[case], ("float32", "bfloat16", "float16")
    models, dtype = world(family), dtypes[[*CASES].index(case) % 3]
    return recipe(method, models.base, models.listed, {0: {"weight": 0.6}}, dtype=dtype, **keys)


def loaded(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return SimpleNamespace(model=model)


@pytest.mark.parametrize("case", CASES)
def test_every_point_is_what_mergekit_writes(case, world, tmp_path, caplog, monkeypatch):
    """To the bit, to and fro, by one model in memory."""
    monkeypatch.setattr(line, "CHUNK", 700)
    path = write(prepared(case, world), tmp_path / "recipe")
    tuned = line.read_tuning(str(path), Options())
    load = mock.Mock(side_effect=loaded)
    at = line.moving_model(tuned, tmp_path / "work", load)
    for point in (0.9, 0.0, 0.35):
        found = at(point).model.state_dict()
        made = merge(tuned.at(point), tmp_path / str(point)).folder
        want = loaded(made).model.state_dict()
        assert [n for n in want if not torch.equal(found[n], want[n])] == []
    assert load.call_count == 1 and "merged to disk" not in caplog.text


def changed(model: Any) -> Any:
    model.model.norm.weight.data[0] += 1e-3
    return model


@pytest.mark.parametrize("change", [torch.nn.Sequential, changed])  # other names, other weights
def test_a_model_that_cannot_move(change, world, tmp_path, caplog):
    """A line that does not lead through the loaded weights is not used, but the loaded point is."""
    path = write(prepared("sum", world), tmp_path / "recipe")
    load = mock.Mock(side_effect=lambda place: SimpleNamespace(model=change(loaded(place).model)))
    at = line.moving_model(line.read_tuning(str(path), Options()), tmp_path / "work", load)
    assert at(line.BEGIN) is not at(0.4)
    assert "each point is merged to disk and loaded" in caplog.text and load.call_count == 2


CHOICE = {"output_type": "multiple_choice", "doc_to_text": "{{question}}",
          "doc_to_choice": ["t1", "t2"], "doc_to_target": "answer",
          "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}  # fmt: skip


def own_task(folder: Path, name: str, splits: Mapping[str, int], **keys: Any) -> None:
    folder.mkdir(exist_ok=True)
    files = {}
    for split, count in splits.items():
        file = folder / f"{name}.{split}.json"
        rows = [{"question": f"t{i % 9 + 3} t{i // 9}", "answer": i % 2} for i in range(count)]
        file.write_text("\n".join(map(json.dumps, rows)))
        files[split] = str(file)
    document = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files},
                **CHOICE, **{f"{split}_split": split for split in splits}, **keys}  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))


def test_which_items_choose(tmp_path: Path) -> None:
    """Validation items, or a part of the scored ones: the rest is for lm-eval's --samples."""
    place, out = tmp_path / "tasks", tmp_path / "out"
    own_task(place, "tt_both", {"training": 3, "validation": 40, "test": 30})
    own_task(place, "tt_test", {"test": 50})
    own_task(place, "tt_only", {"validation": 20})
    group = {"group": "tt_many", "task": ["tt_both", "tt_test", "tt_only"]}
    (place / "tt_many.yaml").write_text(yaml.safe_dump(group))
    path = write(quick(), tmp_path / "recipe")
    more = ("--grid", "1", "--limit", 8, "--metric", "tt_both:acc_norm,none")
    tvb(*words(path, out, *more, tasks="tt_many", place=place))
    found = {task["name"]: task for task in facts(out)["tasks"]}
    assert {n: (t["metric"], t["split"], len(t["chosen"])) for n, t in found.items()} == {
        "tt_both": ("acc_norm,none", "validation", 8),
        "tt_test": ("acc,none", "test", 8),
        "tt_only": ("acc,none", "validation", 4),
    }
    rest = json.loads((out / "test_samples.json").read_text())
    assert {name: len(items) for name, items in rest.items()} == {"tt_test": 40, "tt_only": 16}
    assert all(not set(items) & set(found[name]["chosen"]) for name, items in rest.items())


def test_an_item_is_not_its_own_example(tmp_path: Path) -> None:
    """Examples come from the validation split too."""
    own_task(tmp_path, "tt", {"validation": 6, "test": 8}, num_fewshot=3)
    (found,) = tasks.load_tasks(["tt"], [], tasks.Evaluation({}, include_path=[str(tmp_path)]), "")
    assert (found.split, found.items) == ("validation", 6)
    found.loaded.set_fewshot_seed(seed=1234)
    assert len(found.loaded.eval_docs) == 6
    for doc in found.loaded.eval_docs:
        assert found.loaded.fewshot_context(doc, num_fewshot=3).count(doc["question"]) == 1


FORGET, DOUBLE = quick("basis_negate", forget="sum", alpha=1.0), ["--control", "quickstart_double"]
BAD: list[tuple[dict[str, Any], list[object], str]] = [
    (quick(), ["--tasks", "quickstart_cpoy"], "(did you mean `quickstart_copy`"),
    (quick(), ["--batch-size", "none"], "--batch-size none: expected 1 or more, or auto"),
    (quick(lambda_=[0.1, 0.9]), [], "tvb tune finds one number"),
    (FORGET, [*DOUBLE, "--grid", "-1:1:1"], "`alpha` is -1.0"),
    (FORGET, [*DOUBLE, "--search", "brent"], "cannot tune basis_negate"),
    (quick(), ["--tasks", "tt_runs"], "allow it with --confirm-run-unsafe-code"),
    (quick(), ["--tasks", f"tt_falls,{PAIR}"], "better when lower"),
]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    place, falls = tmp_path / "tasks", {"metric": "acc", "higher_is_better": False}
    own_task(place, "tt_runs", {"test": 9}, unsafe_code=True)
    own_task(place, "tt_falls", {"test": 9}, metric_list=[falls])
    for document, more, said in BAD:
        path = write(document, tmp_path / "recipe")
        more = ["--limit", 2, "--include-path", place, *more]
        assert said in refused(*words(path, tmp_path / "out", *more)), said
        assert not (tmp_path / "out" / "tune.json").exists()


def test_the_model_type_tvb(tmp_path: Path) -> None:
    """A task of a store or a routed store by lm-eval's loader; beside the type `hf`."""
    base, store = QUICK / "models" / "base", tmp_path / "store"
    folders = [QUICK / "models" / task for task in ("copy", "sum")]
    path = write(recipe("basis_ta", base, folders, {}, basis="none"), tmp_path / "recipe")
    tvb("build", path, store, "--quiet")

    def answers(kind: str, args: str) -> list[str]:
        found = evaluated(kind, f"{args},dtype=float32")
        return [str(each["resps"]) for some in found["samples"].values() for each in some]

    task = answers("tvb", f"pretrained={base},store={store},task=sum")
    plain = answers("hf", f"pretrained={base}")
    assert task == answers("hf", f"pretrained={folders[1]}") and task != plain
    alone = [answers("hf", f"pretrained={folder}") for folder in folders]
    right = [*alone[0][: len(task) // 2], *alone[1][len(task) // 2 :]]
    assert answers("tvb", f"base={base},store={store},route=true") == right
    with pytest.raises(SystemExit, match="Error: "):
        answers("tvb", f"pretrained={base},store={store}")


# Grids, means, and items


def test_grids() -> None:
    assert search.grid_points("0:1:0.05") == [i / 20 for i in range(21)]
    assert search.grid_points("-0.3:0.4:0.3") == [-0.3, 0.0, 0.3]
    for method, count, last in (("basis_ta", 21, 1), ("basis_wudi", 12, 4), ("basis_iso", 17, 22)):
        points = search.grid_points(search.GRIDS.get(method, search.PAPER))
        assert (len(points), points[-1]) == (count, last), method
    for text in ("1:0:0.1", "0:1:1e-9", "0:inf:1", "a,b", "0,nan"):
        with pytest.raises(UserError, match="expected START:STOP:STEP"):
            search.grid_points(text)


def test_means_and_their_errors() -> None:
    assert search.mean([Estimate(0.2, 0.3), Estimate(0.6, 0.4)]) == Estimate(0.4, 0.25)
    assert search.mean([Estimate(0.2, None), Estimate(0.6, 0.1)]) == Estimate(0.4, None)


@given(st.integers(2, 300), st.integers(0, 5), st.booleans())
def test_fewer_items_are_part_of_more(total: int, seed: int, own: bool) -> None:
    (whole, rest), (some, left) = (tasks.choose("t", total, own, n, seed) for n in (None, 20))
    assert set(some) <= set(whole) and len(some) == min(20, len(whole)) and left == rest
    assert some == sorted(some) and sorted([*whole, *rest]) == list(range(total))
    assert len(whole) == (total if own else max(1, round(0.2 * total))) and bool(rest) != own
    assert len(tasks.choose("t", total, True, 0.5, seed)[0]) == math.ceil(total / 2)
    assert len({tuple(tasks.choose(t, 50, True, 5, s)[0]) for s in (0, 1) for t in "ab"}) == 4
