"""`tvb tune` on the quickstart's models, against mergekit-yaml and lm_eval run one by one."""

import errno
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval
import pytest
import torch
import yaml
from commands import Result, assert_same, merge, recipe, refused, tvb, write
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import tvb_mergekit as library
from tvb_mergekit.errors import UserError
from tvb_mergekit.tune import harness, report, search
from tvb_mergekit.tune.harness import EvalTask, ItemChoice, LmEval, Scored
from tvb_mergekit.tune.model import MovingModel
from tvb_mergekit.tune.search import Estimate, objective

ROOT = Path(__file__).resolve().parent.parent
QUICK = ROOT / "recipes" / "quickstart"
EVAL = QUICK / "eval"
TASKS = ("copy", "upper", "double", "sum")
FILES = {"tuned.yml", "tune.md", "tune.json", "curve.png", "points.jsonl"}


@pytest.fixture(autouse=True, scope="module")
def _small_lm_eval() -> Iterator[None]:
    """lm-eval reads ten thousand YAML files for its own list of tasks, and starts programs that
    describe the machine."""
    own = partial(TaskManager, include_defaults=False)
    with mock.patch.object(lm_eval.tasks, "TaskManager", own):
        with mock.patch("lm_eval.evaluator.add_env_info"):
            yield


@pytest.fixture
def _no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that do not look at the curve: as without matplotlib."""
    monkeypatch.setattr(report, "can_draw", lambda: False)


def quick(method: str = "basis_ta", **parameters: Any) -> dict[str, Any]:
    folders = [QUICK / "models" / task for task in TASKS]
    parameters = {"basis": "balanced", "num_bases": 2, "lambda_scale": "tasks", **parameters}
    return recipe(method, QUICK / "models" / "base", folders, {}, **parameters)


def written(folder: Path, document: Mapping[str, Any]) -> Path:
    return write(document, folder / "recipe")


PAIR = "quickstart_copy,quickstart_sum"


def evaluated(model: Any, args: str | None, samples: Any = None, split: str = "test") -> Any:
    """What lm_eval finds on PAIR, or on these samples of it."""
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
    """mergekit-yaml, then lm_eval on the items that chose."""
    document, values, limit = quick(lambda_=0.1), (0.3, 0.9), 8
    path, out = written(tmp_path, document), tmp_path / "out"
    tvb(*words(path, out, "--limit", limit, "--grid", "0.3,0.9", "--write", tmp_path / "model"))
    samples = {name: part["chosen"] for name, part in chosen(out).items()}
    assert {file.name for file in out.iterdir()} == FILES
    rows = facts(out)["points"]
    assert [row["lambda"] for row in rows] == list(values)
    means = {}
    for row in rows:
        document["parameters"]["lambda"] = value = row["lambda"]
        made = merge(document, tmp_path / str(value)).folder
        want = evaluated("hf", f"pretrained={made}", samples, "val")["results"]
        for name, found in row["tasks"].items():
            assert found["values"]["exact_match,none"] == want[name]["exact_match,none"]
            assert found["stderrs"]["exact_match,none"] == want[name]["exact_match_stderr,none"]
        means[value] = sum(want[name]["exact_match,none"] for name in samples) / 2
        assert row["score"]["value"] == pytest.approx(means[value], abs=1e-12)
    best = max(means, key=lambda value: (round(means[value], 9), -value))
    assert facts(out)["best"]["lambda"] == best
    assert_same(Result(tmp_path / "model"), Result(tmp_path / str(best)))
    text = (out / "tuned.yml").read_text()
    document["parameters"]["lambda"] = best
    assert yaml.safe_load(text) == document
    assert "# Found by tvb tune." in text
    assert f"{limit} of 100 validation items" in text
    picture = Image.open(out / "curve.png")
    assert picture.format == "PNG" and picture.size[0] > 500
    assert len(picture.convert("L").getcolors()) > 20


def test_a_kill_and_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are equal, nothing is scored twice, and a line that was cut is scored again.

    Scores of another tuning are not taken.
    """
    path = written(tmp_path, quick())
    more = ("--limit", 3, "--grid", "0:1:0.5")
    tvb(*words(path, tmp_path / "whole", *more))
    score, out = mock.Mock(wraps=harness.score), tmp_path / "out"

    def killed(*args: Any) -> Scored:
        if score.call_count == 4:
            raise ends[-1]
        return score(*args)

    monkeypatch.setattr(harness, "score", killed)
    ends: list[BaseException] = [OSError(errno.ENOSPC, "No space left on device")]
    said = refused(*words(path, out, *more))
    assert "No space left" in said and (out / "points.jsonl").is_file()
    (out / "points.jsonl").unlink()
    score.reset_mock()
    ends.append(KeyboardInterrupt())
    said = tvb(*words(path, out, *more), code=130).stderr
    assert "Interrupted." in said
    assert not (out / ".work").exists() and not (out / "tune.json").exists()
    file = out / "points.jsonl"
    assert len(file.read_text().splitlines()) == 1 + 4
    file.write_text(file.read_text()[:-20])
    (out / ".work" / "model").mkdir(parents=True)  # of a process that was killed
    score.reset_mock()
    monkeypatch.setattr(harness, "score", score)
    tvb(*words(path, out, *more))
    assert score.call_count == 6 - 3 and not (out / ".work").exists()
    for name in FILES - {"points.jsonl"}:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    # fewer points, the same tuning: no model is merged or loaded; what is searched counts not
    score.reset_mock()
    monkeypatch.setattr(report, "can_draw", lambda: False)
    monkeypatch.setattr(MovingModel, "at", None)
    written(tmp_path, quick(lambda_=0.9))
    said = tvb(*words(path, out, "--limit", 3, "--grid", "0,1"))
    assert report.NO_PICTURE in said.stderr
    assert not score.called and len(facts(out)["points"]) == 2
    said = refused(*words(path, out, "--limit", 2, "--grid", "0"))
    assert "holds scores of another tuning (tasks or their items differ)" in said
    written(tmp_path, quick(exclude="lm_head"))
    assert "(recipe differ)" in refused(*words(path, out, *more))
    file.write_text("\n")
    assert "damaged, or not of `tvb tune`" in refused(*words(path, out, *more))


@pytest.mark.usefixtures("_no_picture")
def test_forgetting_one_task(tmp_path: Path) -> None:
    """The rule, on the scores of the file."""
    document = quick("basis_negate", num_bases=3, forget="upper", alpha=1.0, lambda_=0.35)
    path, out = written(tmp_path, document), tmp_path / "out"
    controls = [f"--control=quickstart_{other}" for other in ("copy", "double")]
    tvb(*words(path, out, *controls, "--limit", 5, "--grid", "0:1:0.5", tasks="quickstart_upper"))
    found = facts(out)
    assert found["coefficient"] == "alpha"
    rows = {row["alpha"]: row for row in found["points"]}
    least = 0.95 * rows[0.0]["control"]["value"]
    kept = [a for a, row in rows.items() if row["control"]["value"] >= least - 1e-9]
    best = min(kept, key=lambda a: (rows[a]["score"]["value"], a))
    assert found["best"]["alpha"] == best
    assert yaml.safe_load((out / "tuned.yml").read_text())["parameters"]["alpha"] == best
    assert rows[best]["score"]["value"] < 0.5 < rows[0.0]["score"]["value"]
    written(
        tmp_path, quick("basis_negate", num_bases=3, forget="upper", alpha=1.0)
    )  # from the base
    said = refused(*words(path, tmp_path / "base", "--control", "quickstart_sum", "--limit", 8,
                          tasks="quickstart_upper"))  # fmt: skip
    assert "the score is 0 at alpha 0 already: nothing to keep" in said


@pytest.mark.usefixtures("_no_picture")
def test_a_search_with_few_points(tmp_path: Path) -> None:
    path, out = written(tmp_path, quick()), tmp_path / "out"
    more = ("--search", "golden", "--limit", 8, "--grid", "0:1:0.1")
    said = tvb(*[word for word in words(path, out, *more) if word != "--quiet"])
    found = facts(out)
    count = len(found["points"])
    assert 2 < count <= 9 and 0.1 < found["best"]["lambda"] < 0.7
    assert f"Tune: 100% {2 * count}/{2 * count}" in said.stderr


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": ["t1", "t2"],
    "doc_to_target": "answer",
    "target_delimiter": " ",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
    ],
}


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


def chosen(out: Path) -> dict[str, dict[str, Any]]:
    return {part["task"]: part for task in facts(out)["tasks"].values() for part in task["parts"]}


@pytest.mark.usefixtures("_no_picture")
def test_which_items_choose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Validation items where there are some; else a part of the scored ones, and the rest is left
    to the test in the form of lm-eval's --samples."""
    tasks = tmp_path / "tasks"
    own_task(tasks, "tt_both", {"training": 3, "validation": 40, "test": 30})
    own_task(tasks, "tt_test", {"test": 50})
    own_task(tasks, "tt_only", {"validation": 20})
    document = {"group": "tt_one", "task": ["tt_part_a", "tt_part_b"],
                "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}  # fmt: skip
    own_task(tasks, "tt_part_a", {"validation": 30, "test": 5})
    own_task(tasks, "tt_part_b", {"validation": 10, "test": 5})
    (tasks / "tt_one.yaml").write_text(yaml.safe_dump(document))
    group = {"group": "tt_many", "task": ["tt_both", "tt_test", "tt_only", "tt_one"]}
    (tasks / "tt_many.yaml").write_text(yaml.safe_dump(group))
    out = tmp_path / "out"
    names = ("tt_both", "tt_test", "tt_only")
    metrics = [f"--metric={name}:acc,none" for name in names] + ["--metric=tt_both:acc_norm,none"]
    path = written(tmp_path, quick())
    tvb(*words(path, out, "--grid", "1", "--limit", 16, "--subsample", *metrics,
               tasks="tt_many", place=tasks))  # fmt: skip
    found = facts(out)
    assert list(found["tasks"]) == ["tt_both", "tt_test", "tt_only", "tt_one"]
    assert found["tasks"]["tt_both"]["metrics"] == ["acc,none", "acc_norm,none"]
    assert found["tasks"]["tt_one"]["metrics"] == ["acc,none"]
    parts = chosen(out)
    assert parts["tt_both"]["split"] == "validation" and parts["tt_both"]["left_to_test"] is None
    counts = {name: len(part["chosen"]) for name, part in parts.items()}
    # M / T = 2 / 4 of 16 items, or of all in a part; 0.2 of the test's
    assert counts == {"tt_both": 8, "tt_test": 5, "tt_only": 2, "tt_part_a": 8, "tt_part_b": 5}
    rest = json.loads((out / "test_samples.json").read_text())
    assert {name: len(items) for name, items in rest.items()} == {"tt_test": 40, "tt_only": 16}
    for name, items in rest.items():
        assert not set(items) & set(parts[name]["chosen"])
    assert "no validation split in tt_test (10 of 50), tt_only (4 of 20)" in caplog.text
    again = tmp_path / "again"
    tvb(*words(path, again, "--grid", "1", *metrics[1:2], "--test-share", 1, tasks="tt_test",
               place=tasks))  # fmt: skip
    assert len(chosen(again)["tt_test"]["chosen"]) == 50
    assert not (again / "test_samples.json").exists()


OWN = """
from lm_eval.api.task import ConfigurableTask

class Own(ConfigurableTask):
    def __init__(self, config):
        super().__init__(config={k: v for k, v in config.items() if k != "class"})

    has_training_docs = lambda self: False
    has_validation_docs = has_test_docs = lambda self: True
    validation_docs = lambda self: self.dataset["validation"]
    test_docs = lambda self: self.dataset["test"]
"""


def loaded(folder: Path, metadata: Mapping[str, Any], options: LmEval = LmEval()) -> EvalTask:  # noqa: B008
    manager = harness.manager([str(folder)], metadata)
    metrics = {"tt": ["acc,none"]}
    (task,) = harness.load_tasks(manager, ["tt"], metrics, ItemChoice(), options)
    return task


def test_tasks_know_the_model(tmp_path: Path) -> None:
    """As by lm_eval's command; and it changes no checksum, under which scores are kept."""
    own_task(tmp_path, "tt", {"test": 8})
    plain = loaded(tmp_path, {}).content
    for options, base, want in (
        (LmEval(metadata={"split": "val"}), "a", {"split": "val", "pretrained": "a"}),
        (LmEval(metadata={"pretrained": "z", "split": "val"}, model_args="pretrained=b,dtype=f"),
         "a", {"split": "val", "pretrained": "b", "dtype": "f"}),
        (LmEval(), "a", {"pretrained": "a"}),
        (LmEval(), "b", {"pretrained": "b"}),
        (LmEval(), None, {}),
    ):  # fmt: skip
        metadata = harness.full_metadata(options, base and Path(base))
        assert metadata == want
        found = loaded(tmp_path, metadata, options)
        (task,) = found.loaded["tasks"].values()
        assert metadata.items() <= task.config.metadata.items()
        assert options.metadata or found.content == plain
    # examples count as items do
    contents = []
    for shots, count in ((0, 5), (0, 6), (2, 5), (2, 6)):
        own_task(tmp_path, "tt", {"test": 8, "fewshot": count}, num_fewshot=shots)
        contents.append(loaded(tmp_path, {}).content)
    assert contents[0] == contents[1] and len({*contents}) == 3


@pytest.mark.parametrize(("own_class", "shots"), [(False, 3), (True, 0), (True, 3)])
def test_an_item_is_not_its_own_example(own_class: bool, shots: int, tmp_path: Path) -> None:
    """Examples come from the validation split, which is scored now.

    A task's own class may find the splits instead of the configuration.
    """
    tasks = tmp_path / "tasks"
    splits = {"validation_split": None, "test_split": None} if own_class else {}
    own_task(tasks, "tt", {"validation": 6, "test": 8}, num_fewshot=shots, **splits)
    if own_class:
        (tasks / "tt_own.py").write_text(OWN)
        with (tasks / "tt.yaml").open("a") as file:
            file.write("class: !function tt_own.Own\n")
    found = loaded(tasks, {})
    assert [(part.split, part.items) for part in found.parts] == [("validation", 6)]
    (task,) = found.loaded["tasks"].values()
    task.set_fewshot_seed(seed=1234)
    assert len(task.eval_docs) == 6
    for doc in task.eval_docs:
        assert task.fewshot_context(doc, num_fewshot=shots).count(doc["question"]) == 1


FORGET = quick("basis_negate", forget="sum", alpha=1.0)
MAX = ["--control", "quickstart_double"]
BAD: dict[str, tuple[dict[str, Any], list[object], str]] = {
    "an unknown task": (quick(), ["--tasks", "quickstart_cpoy"],
                        "knows no task quickstart_cpoy (did you mean `quickstart_copy`"),
    "an unknown metric": (quick(), ["--metric", "quickstart_copy:exact_mach,none"],
                          "has no metric exact_mach,none (did you mean `exact_match,none`?"),
    "a metric of another task": (quick(), ["--metric", "quickstart_double:exact_match,none"],
                                 "--metric quickstart_double: no such task here"),
    "a metric without a task": (quick(), ["--metric", "quickstart_copy"], "expected TASK:METRIC"),
    "no such folder": (quick(), ["--include-path", "nowhere"], "nowhere: no such folder"),
    "no such lambda": (quick() | {"merge_method": "slerp"}, [], "expected one of basis_iso"),
    "a negative alpha": (FORGET, [*MAX, "--grid", "-1:1:1"], "`alpha` is -1.0"),
    "no control": (FORGET, [], "needs --control TASK"),
    "a control for addition": (quick(), MAX, "--control goes with basis_negate"),
    "a control to forget": (FORGET, ["--control", "quickstart_copy"],
                            "both to be forgotten and --control"),
    "golden negation": (FORGET, [*MAX, "--search", "golden"], "on a grid"),
    "no task": (quick(), ["--tasks", ", "], "--tasks names none"),
    "half an item": (quick(), ["--limit", 2.5], "--limit is 2.5"),
    "a tolerance for a grid": (quick(), ["--tolerance", 0.1], "goes with --search golden"),
    "golden with one end": (quick(), ["--search", "golden", "--grid", "0.4"], "with two ends"),
    "no chat template": (quick(), ["--apply-chat-template", "--grid", "0.2"],
                         "the base's tokenizer has no chat template"),
    "batches of none": (quick(), ["--batch-size", "none"], "--batch-size none: expected a number"),
    "a device twice": (quick(), ["--model-args", "device=cpu"], "--model-args device=...: tvb"),
    "no model's argument": (quick(), ["--model-args", "dtipe=float32"], "dtipe"),
    "no JSON": (quick(), ["--metadata", "{"], "no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line(case: str, tmp_path: Path) -> None:
    document, more, said = BAD[case]
    given = document.get("parameters", {}).items()
    parameters = {key: value for key, value in given if value is not None}
    path = written(tmp_path, document | {"parameters": parameters})
    assert said in refused(*words(path, tmp_path / "out", "--limit", 2, *more))
    assert not (tmp_path / "out" / "tune.json").exists()


def test_the_model_type_tvb(tmp_path: Path) -> None:
    """A task of a store, and routers, by lm-eval's own loader of models; beside the type `hf`."""
    base, store, out = QUICK / "models" / "base", tmp_path / "store", tmp_path / "out"
    folders = [QUICK / "models" / task for task in ("copy", "sum")]
    path = written(tmp_path, recipe("basis_ta", base, folders, {}, basis="none"))
    tvb("build", path, store, "--quiet")
    given = []
    for task in ("copy", "sum"):
        lines = (EVAL / "data" / f"{task}.val.jsonl").read_text().splitlines()[:8]
        file = tmp_path / f"{task}.jsonl"
        file.write_text("\n".join(lines).replace('"answer"', '"response"'))
        given += ["--data", f"{task}={file}"]
    tvb("learn", path, "wemoe", *given, "--epochs", 1, "--out", out, "--quiet")
    file = out / "basis" / "learned" / "routers.safetensors"
    with safe_open(file, "pt") as held:  # coefficients that change answers
        routers = {name: held.get_tensor(name) for name in held.keys()}
        facts = held.metadata()
    save_file({k: v + 0.5 * ("router" in k) for k, v in routers.items()}, file, facts)

    def answers(model: Any, args: str = "") -> list[str]:
        found = evaluated(model, f"{args},dtype=float32" if args else None)
        return [str(each["resps"]) for some in found["samples"].values() for each in some]

    task = answers("tvb", f"pretrained={base},store={store},task=sum")
    assert task == answers("hf", f"pretrained={folders[1]}")
    assert task != answers("hf", f"pretrained={base}")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    routed = HFLM(library.attach(model, out).route(), tokenizer=str(out), batch_size=8)
    found = answers("tvb", f"pretrained={out}")
    assert found == answers(routed)
    assert found != answers("hf", f"pretrained={out}")
    says = {
        f",store={store}": r"`task` is missing; \S+ has copy, sum$",
        ",task=sum": "`task` is of a store",
        "": "not a basis store",
    }
    for more, said in says.items():
        with pytest.raises(SystemExit, match=said):
            answers("tvb", f"pretrained={base}{more}")


def test_folders_tasks_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    path, sum_ = written(tmp_path, quick()), QUICK / "models" / "sum"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    out, gone = tmp_path / "out", {"base_model": "./nowhere"}
    for paths, said in (
        ((path, tmp_path / "mine"), "holds other files (notes.txt)"),
        ((path, path), "is a file; name a folder"),
        ((path, out, "--write", sum_), "is the input"),
        ((path, sum_ / "out"), "lies in the input"),
        ((written(tmp_path / "no", quick() | gone), out), "model ./nowhere: no such folder"),
        ((path, out, "--write", tmp_path), "lies there; name another"),
        ((sum_, out), "a folder, but not a store"),
    ):
        assert said in refused(*words(*paths))
    for keys, said in (
        ({}, "--metric tt:METRIC, one of acc,none, acc_norm,none"),
        ({"unsafe_code": True}, "allow it with --confirm-run-unsafe-code"),
    ):
        own_task(tmp_path / "tasks", "tt", {"test": 10}, **keys)
        assert said in refused(*words(path, out, tasks="tt", place=tmp_path / "tasks"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: mock.Mock(free=2**20))
    assert "too little disk" in refused(*words(path, out, tasks="cpoy"))
    (out / ".work").mkdir(parents=True)
    with (out / ".work" / "model").open("wb") as file:  # of a killed run
        file.truncate(2**27)
    assert "knows no task cpoy" in refused(*words(path, out, tasks="cpoy"))
    shutil.rmtree(out)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: mock.Mock(available=2**20))
    assert "too little memory on cpu" in refused(*words(path, out))
    assert not out.exists()


# Grids, golden section, the rule of negation, means and shares, and which items choose


GRID = search.grid_points("0:1:0.05")


def test_grids() -> None:
    assert search.best([0.0, 0.5, 1.0], [0.2, 0.7, 0.7 + 1e-12]) == 0.5  # the smallest of equals
    assert GRID == tuple(i / 20 for i in range(21))
    assert search.grid_points("0.5, 0,0.5") == (0.0, 0.5)
    assert search.grid_points("-0.2:0.2:0.1") == (-0.2, -0.1, 0.0, 0.1, 0.2)
    assert search.grid_points("0:1:0.3") == (0.0, 0.3, 0.6, 0.9)
    for method, how, count, last in (("basis_ta", "golden", 21, 1),
                                     ("basis_wudi", "grid", 12, 4), ("basis_iso", "grid", 17, 22),
                                     ("basis_iso", "golden", 21, 4)):  # fmt: skip
        points = search.grid_points(search.default_grid(method, how))
        assert (len(points), points[-1]) == (count, last), method
    for said, text in (
        ("holds no point", ""), ("holds no point", "1:0:0.1"),
        ("the step must be positive", "0:1:0"), ("1,000,001 points", "0:1:1e-6"),
        *(("expected START:STOP:STEP", text) for text in ("0:inf:1", "0:1", "a,b", "0,nan")),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            search.grid_points(text)


@st.composite
def unimodal(draw: st.DrawFn) -> Callable[[float], float]:
    """Strictly rising up to somewhere in [0, 1], strictly falling from there."""
    top = draw(st.floats(0, 1))
    rise, fall = draw(st.floats(0.1, 20)), draw(st.floats(0.1, 20))
    power = draw(st.sampled_from([0.4, 1, 2, 3]))
    return lambda x: -(rise * (top - x) ** power if x < top else fall * (x - top) ** power)


@settings(max_examples=40, deadline=None)
@given(unimodal())
def test_few_points_find_the_best_of_the_grid(curve: Callable[[float], float]) -> None:
    asked = []

    def score(x: float) -> float:
        asked.append(x)
        return curve(x)

    found = search.golden(0.0, 1.0, 0.025, score)
    best, found_by_grid = search.grid(GRID, curve)
    assert found_by_grid == [curve(x) for x in GRID]
    assert len(asked) <= 12 and len(set(asked)) == len(asked)
    assert abs(found - best) <= 0.05 + 1e-9
    assert curve(found) == max(map(curve, asked))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=21, max_size=21),
    st.sampled_from([0.5, 0.95, 1.0]),
)
def test_the_rule_of_negation(counts: list[tuple[int, int]], keep: float) -> None:
    """Against the rule written out; the control score is asked for no more than it must be."""
    target = {x: c[0] / 4 for x, c in zip(GRID, counts, strict=True)}
    control = {x: c[1] / 4 for x, c in zip(GRID, counts, strict=True)}
    allowed = [x for x in GRID if control[x] >= keep * control[0.0]]
    want = min(allowed, key=lambda x: (target[x], x))
    asked: list[float] = []

    def kept(x: float) -> float:
        asked.append(x)
        return control[x]

    assert search.most_forgotten(GRID, target.__getitem__, kept, keep) == want
    with pytest.raises(UserError, match="at no point the control score stays at"):
        search.most_forgotten([0.5, 1.0], lambda x: 0.0, lambda x: float(x == 0), 0.95)
    better = [x for x in GRID if (target[x], x) < (target[want], want)]
    assert len(asked) == 1 + len(better) + 1


def entry(name: str, *metrics: str, lower: bool = False) -> EvalTask:
    metrics = metrics or ("acc,none",)
    return EvalTask(name, metrics, metrics if lower else (), (), "", None)


def scored(value: float, error: float | None = 0.1) -> Scored:
    return Scored({"acc,none": value}, {} if error is None else {"acc,none": error})


def test_means_and_their_errors() -> None:
    two = [entry("a"), entry("b")]
    goal = objective(two)
    assert goal.mean({"a": scored(0.2, 0.3), "b": scored(0.6, 0.4)}) == Estimate(0.4, 0.25)
    assert goal.mean({"a": scored(0.2, None), "b": scored(0.6)}) == Estimate(0.4, None)
    # metrics on the same items: their errors add
    one = entry("a", "x,none", "y,none")
    both = Scored({"x,none": 0.2, "y,none": 0.4}, {"x,none": 0.1, "y,none": 0.3})
    found = objective([one]).of(one, both)
    assert found.value == pytest.approx(0.3) and found.stderr == pytest.approx(0.2)


def test_metrics_that_fall_stand_alone() -> None:
    low = entry("b", "ppl,none", lower=True)
    assert objective([low]).lower
    for entries, rising in (([entry("a"), low], ""), ([low], "forgetting")):
        with pytest.raises(UserError, match=r"ppl,none of b is better when .* scores that rise"):
            objective(entries, rising)


@given(st.integers(2, 300), st.integers(0, 5), st.floats(0.05, 1), st.booleans())
def test_fewer_items_are_part_of_more(total: int, seed: int, share: float, own: bool) -> None:
    whole, rest = ItemChoice(seed=seed).part("t", total, own)
    some, left = ItemChoice(limit=20, seed=seed).part("t", total, own)
    fewer, _ = ItemChoice(limit=20, share=share, seed=seed).part("t", total, own)
    assert set(fewer) <= set(some) <= set(whole) <= set(range(total))
    assert len(some) == min(20, len(whole)) and len(fewer) == max(1, round(len(some) * share))
    assert some == sorted(some) and left == rest
    if own:
        assert len(whole) == total and rest is None
    else:
        assert len(whole) == max(1, min(round(0.2 * total), total - 1))
        assert rest is not None and sorted([*whole, *rest]) == list(range(total)) and rest
    assert ItemChoice(limit=0.5, seed=seed).part("t", total, True)[0].__len__() == math.ceil(
        total / 2
    )


def test_items_depend_on_seed_and_task() -> None:
    drawn = {tuple(ItemChoice(limit=5, seed=s).part(t, 50, True)[0]) for s in (0, 1) for t in "ab"}
    assert len(drawn) == 4
    assert ItemChoice(test_share=1.0).part("a", 3, False) == ([0, 1, 2], [])
