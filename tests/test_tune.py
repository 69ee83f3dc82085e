"""`tvb tune` on the quickstart's models, against mergekit-yaml and lm_eval run one by one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
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
from commands import Result, merge, refused, tvb
from lm_eval.tasks import TaskManager
from PIL import Image
from tiny import family, load

from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.tuning import TunedRecipe
from tvb_mergekit.scoring import read_results
from tvb_mergekit.tuning import harness
from tvb_mergekit.tuning.model import Model

ROOT = Path(__file__).resolve().parent.parent
QUICK = ROOT / "recipes" / "quickstart"
EVAL = QUICK / "eval"
TASKS = ("copy", "reverse", "sort", "upper", "shift", "max", "double", "sum")
FILES = {"tuned.yml", "tune.md", "tune.json", "curve.png", "points.jsonl"}


@pytest.fixture(autouse=True, scope="module")
def _own_tasks_only() -> Iterator[None]:
    """lm-eval reads ten thousand YAML files for its own list of tasks."""
    with mock.patch.object(
        lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False)
    ):
        yield


def quick(method: str = "basis_ta", **parameters: Any) -> dict[str, Any]:
    """A recipe over the shipped specialists."""
    keys = {"basis": "balanced", "num_bases": 4, "lambda_scale": "tasks", **parameters}
    if method not in ("basis_ta", "basis_ties", "basis_negate"):
        keys = parameters
    models: list[dict[str, Any]] = [{"model": str(QUICK / "models" / task)} for task in TASKS]
    if keys is parameters:
        for model in models:
            model["parameters"] = {"weight": 1.0, "density": 0.5}
    return {
        "merge_method": method,
        "base_model": str(QUICK / "models" / "base"),
        "models": models,
        "parameters": {key.rstrip("_"): value for key, value in keys.items()},
        "dtype": "float32",
    }


def write(folder: Path, document: Mapping[str, Any], name: str = "recipe.yml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(dict(document), sort_keys=False))
    return path


def words(
    path: Path | str, out: Path, *more: object, tasks: Sequence[str] = ("copy", "sum")
) -> list[object]:
    names = ",".join(f"quickstart_{task}" for task in tasks)
    return ["tune", path, "--tasks", names, "--include-path", EVAL, "--batch-size", 64,
            "--device", "cpu", "--quiet", "--out", out, *more]  # fmt: skip


def facts(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "tune.json").read_text())
    return found


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(task, call) of everything that lm-eval scores from here on."""
    calls: list[tuple[str, int]] = []
    usual = harness.score

    def score(lm: Any, entry: harness.Entry, **how: Any) -> harness.Scored:
        calls.append((entry.name, len(calls)))
        return usual(lm, entry, **how)

    monkeypatch.setattr(harness, "score", score)
    return calls


# ------------------------------------------------------------------- what separate runs would give


def scored(model: Path, names: Sequence[str], tasks: Path, **more: Any) -> dict[str, Any]:
    """The results of lm-eval, name -> metric -> value, without a process of its own."""
    listed = TaskManager(include_path=str(tasks), include_defaults=False, metadata={"split": "val"})
    found = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={model}", tasks=list(names), batch_size=64,
        device="cpu", task_manager=listed, **more,
    )  # fmt: skip
    results: dict[str, Any] = found["results"]
    return results


def separate(
    document: Mapping[str, Any],
    folder: Path,
    tasks: Sequence[str],
    samples: Mapping[str, list[int]] | None,
) -> dict[str, float]:
    """mergekit-yaml, then lm_eval on some validation items; without `samples`, on all of them by
    the command."""
    made = merge(document, folder / "merged").folder
    names = [f"quickstart_{task}" for task in tasks]
    if samples is not None:
        found = scored(made, names, EVAL, samples=dict(samples))
        return {name: found[name]["exact_match,none"] for name in names}
    words = [Path(sys.executable).with_name("lm_eval"), "run", "--model", "hf", "--model_args",
             f"pretrained={made}", "--tasks", ",".join(names),
             "--include_path", EVAL, "--metadata", '{"split": "val"}', "--batch_size", "64",
             "--device", "cpu", "--output_path", folder / "out"]  # fmt: skip
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    read = read_results(folder / "out").tasks
    return {name: read[name].metrics["exact_match,none"] for name in read}


def compare(tmp_path: Path, values: Sequence[float], limit: int | None, *more: object) -> None:
    document = quick(lambda_=0.1)
    path = write(tmp_path, document)
    limited = [] if limit is None else ["--limit", limit]
    tvb(*words(path, tmp_path / "out", *limited, *more))
    parts = chosen(tmp_path / "out")
    samples = {name: part["chosen"] for name, part in parts.items()} if limit else None
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES
    rows = facts(tmp_path / "out")["points"]
    assert [row["lambda"] for row in rows] == list(values)
    means = {}
    for row in rows:
        document["parameters"]["lambda"] = row["lambda"]
        want = separate(document, tmp_path / str(row["lambda"]), ("copy", "sum"), samples)
        for name, scores in row["tasks"].items():
            assert scores["values"]["exact_match,none"] == want[name]
        means[row["lambda"]] = sum(want.values()) / 2
        assert row["score"]["value"] == pytest.approx(means[row["lambda"]], abs=1e-12)
    best = max(means, key=lambda value: (round(means[value], 9), -value))
    assert facts(tmp_path / "out")["best"]["lambda"] == best
    tuned = yaml.safe_load((tmp_path / "out" / "tuned.yml").read_text())
    document["parameters"]["lambda"] = best
    assert tuned == document


def test_points_are_what_separate_runs_give(tmp_path: Path) -> None:
    compare(tmp_path, (0.3, 0.9), 40, "--grid", "0.3,0.9")
    picture = Image.open(tmp_path / "out" / "curve.png")
    assert picture.format == "PNG" and picture.size[0] > 500
    assert len(picture.convert("L").getcolors()) > 20
    text = (tmp_path / "out" / "tuned.yml").read_text()
    assert "# Found by tvb tune." in text and "40 of 100 validation items" in text


@pytest.mark.slow
def test_all_points_of_the_paper_s_grid(tmp_path: Path) -> None:
    compare(tmp_path, [i / 20 for i in range(21)], 100)


@pytest.mark.slow
def test_points_are_what_the_commands_give(tmp_path: Path) -> None:
    compare(tmp_path, (0.0, 0.35), None, "--grid", "0,0.35")


def test_merged_with_what_was_found(tmp_path: Path) -> None:
    path = write(tmp_path, quick(lambda_=0.1))
    path.write_text(textwrap.indent(path.read_text(), "  "))  # YAML too
    said = tvb(*words(path, tmp_path / "out", "--limit", 4, "--grid", "0.2,0.4", "--write",
                      tmp_path / "model"))  # fmt: skip
    assert "lambda" in said.stdout and str(tmp_path / "out") in said.stdout
    tuned = yaml.safe_load((tmp_path / "out" / "tuned.yml").read_text())
    want = merge(tuned, tmp_path / "want")
    made = Result(tmp_path / "model")
    assert "Merged into" in said.stdout
    assert made.tensors.keys() == want.tensors.keys()
    assert all(torch.equal(made.tensors[n], want.tensors[n]) for n in want.tensors)
    assert made.facts["method"] == "basis_ta"


def test_the_same_command_after_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table again, and the merged model as it is; it is never taken for another result's."""
    path, out, model = write(tmp_path, quick()), tmp_path / "out", tmp_path / "model"

    def command(*grid: float) -> list[object]:
        numbers = ",".join(map(str, grid))
        return words(path, out, "--limit", 4, "--grid", numbers, "--write", model)

    first = tvb(*command(0.3))
    before = (model / "model.safetensors").stat()
    calls = counted(monkeypatch)
    again = tvb(*command(0.3))
    table = first.stdout.partition("Written to")[0]
    assert table in again.stdout and f"{model} holds this model already" in again.stdout
    assert calls == [] and (model / "model.safetensors").stat() == before
    tvb(*command(2, 0.3))  # a search that goes on, with the same end
    said = tvb(*command(2), code=1)
    assert f"--write {model} holds the model of lambda 0.3" in said.stderr
    assert facts(out)["best"]["lambda"] == 2 and (model / "model.safetensors").stat() == before
    shutil.rmtree(model)
    assert "Merged into" in tvb(*command(2)).stdout
    os.utime(model / "model.safetensors", (0, 0))  # whatever it is now
    assert "already holds weight files" in refused(*command(2))


def test_what_was_found_is_kept_if_it_cannot_be_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = TunedRecipe.write

    def full(recipe: TunedRecipe, point: Any, out: Any, quiet: bool = True) -> None:
        if str(out) == str(tmp_path / "model"):
            raise UserError("no space left")
        usual(recipe, point, out, quiet)

    monkeypatch.setattr(TunedRecipe, "write", full)
    path, more = write(tmp_path, quick()), ("--limit", 2, "--grid", "0.2")
    said = tvb(*words(path, tmp_path / "out", *more, "--write", tmp_path / "model"), code=1)
    assert "no space left" in said.stderr
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES


@pytest.mark.slow
def test_the_benchmark_of_speed(tmp_path: Path) -> None:
    """It trains, and compares the scores of both ways itself."""
    from mini_modules import loaded

    with loaded() as mini:
        mini["train"].train_run("micro", "full", 0, tmp_path, "cpu")
        run = mini["train"].run_folder(tmp_path, "micro", 0)
    command = [sys.executable, ROOT / "evals" / "speed" / "tune.py", run, "--grid", "0.2,0.4",
               "--limit", "5"]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tvb tune: 2 points in" in done.stdout and "with the same scores" in done.stdout


# --------------------------------------------------------------------------------- interruptions


def test_a_kill_and_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files, nothing scored twice, and a line that was cut is scored again."""
    path = write(tmp_path, quick())
    more = ("--limit", 4, "--grid", "0:1:0.25")
    tvb(*words(path, tmp_path / "whole", *more))
    calls = counted(monkeypatch)
    score = harness.score

    def killed(*args: Any, **how: Any) -> harness.Scored:
        if len(calls) == 5:
            raise KeyboardInterrupt
        return score(*args, **how)

    out = tmp_path / "out"
    monkeypatch.setattr(harness, "score", killed)
    said = tvb(*words(path, out, *more), code=130)
    assert "The same command goes on." in said.stderr
    assert not (out / ".work").exists() and not (out / "tune.json").exists()
    file = out / "points.jsonl"
    assert len(file.read_text().splitlines()) == 1 + 5
    file.write_text(file.read_text()[:-20])
    calls.clear()
    monkeypatch.setattr(harness, "score", score)
    tvb(*words(path, out, *more))
    assert len(calls) == 10 - 4
    for name in FILES - {"points.jsonl"}:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    # all is there: no model is merged or loaded
    calls.clear()
    monkeypatch.setattr(Model, "at", None)
    tvb(*words(path, out, *more))
    assert calls == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kills as Unix does")
def test_a_kill_from_outside(tmp_path: Path) -> None:
    path = write(tmp_path, quick())
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from tvb_mergekit.cli import main; main()",
               *map(str, words(path, out, "--limit", 10, "--grid", "0:1:0.1"))]  # fmt: skip
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TVB_MERGEKIT_CACHE": "off"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    file = out / "points.jsonl"
    while not (file.exists() and len(file.read_text().splitlines()) > 4):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / ".work").is_dir()  # which the next run takes away
    tvb(*words(path, out, "--limit", 10, "--grid", "0:1:0.1"))
    tvb(*words(path, tmp_path / "whole", "--limit", 10, "--grid", "0:1:0.1"))
    assert not (out / ".work").exists()
    for name in ("tune.json", "tune.md", "tuned.yml"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_scores_of_another_tuning_are_not_taken(tmp_path: Path) -> None:
    path, out = write(tmp_path, quick()), tmp_path / "out"
    more = ("--limit", 2, "--grid", "0.2")
    tvb(*words(path, out, *more))
    tvb(*words(path, out, "--limit", 2, "--grid", "0.2,0.3"))  # more points are no other tuning
    assert len(facts(out)["points"]) == 2
    said = refused(*words(path, out, "--limit", 3, "--grid", "0.2"))
    assert "holds scores of another tuning (tasks differ)" in said
    write(tmp_path, quick(exclude="lm_head"))
    assert "(recipe differ)" in refused(*words(path, out, *more))
    other = tmp_path / "other"
    other.mkdir()
    (other / "points.jsonl").write_text("[1]\n")
    assert "cannot be read; name another --out" in refused(*words(path, other, *more))
    write(tmp_path, quick(lambda_=0.9))  # the number that is searched is none
    tvb(*words(path, out, *more))


# --------------------------------------------------------------------------------------- negation


def forgetting(tmp_path: Path, task: str, others: Sequence[str], *more: object) -> dict[str, Any]:
    """Forget one task from the sum of all; the rule, on the scores of the file."""
    document = quick("basis_negate", num_bases=6, forget=task, alpha=1.0, lambda_=0.35)
    path, out = write(tmp_path, document, f"{task}.yml"), tmp_path / task
    controls = [f"--control=quickstart_{other}" for other in others if other != task]
    tvb(*words(path, out, *controls, *more, tasks=[task]))
    found = facts(out)
    assert found["coefficient"] == "alpha"
    rows = {row["alpha"]: row for row in found["points"]}
    least = 0.95 * rows[0.0]["control"]["value"]
    kept = [a for a, row in rows.items() if row["control"]["value"] >= least - 1e-9]
    best = min(kept, key=lambda a: (rows[a]["score"]["value"], a))
    assert found["best"]["alpha"] == best
    assert yaml.safe_load((out / "tuned.yml").read_text())["parameters"]["alpha"] == best
    return found


def test_forgetting_one_task(tmp_path: Path) -> None:
    found = forgetting(
        tmp_path, "upper", ("copy", "sort", "double"), "--limit", 10, "--grid", "0:1:0.25"
    )
    assert found["best"]["score"]["value"] < 0.5 < found["points"][0]["score"]["value"]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_rule_holds_on_every_task(task: str, tmp_path: Path) -> None:
    forgetting(tmp_path, task, TASKS, "--limit", 20)


def test_a_control_that_fails_already(tmp_path: Path) -> None:
    document = quick("basis_negate", num_bases=6, forget="upper", alpha=1.0)  # from the base
    path = write(tmp_path, document)
    said = refused(*words(path, tmp_path / "out", "--control", "quickstart_sum", "--limit", 10,
                          tasks=["upper"]))  # fmt: skip
    assert "the score is 0 at alpha 0 already: nothing to keep" in said


# ------------------------------------------------------------------------- golden, weights, methods


def test_golden_section_on_the_models(tmp_path: Path) -> None:
    path = write(tmp_path, quick())
    tvb(*words(path, tmp_path / "out", "--search", "golden", "--limit", 8, "--grid", "0:1:0.1"))
    found = facts(tmp_path / "out")
    assert 2 < len(found["points"]) <= 8
    assert 0.1 < found["best"]["lambda"] < 0.7


def test_a_weight_for_each_basis_of_a_store(tmp_path: Path) -> None:
    path = write(tmp_path, quick(num_bases=2))
    tvb("build", path, tmp_path / "store", "--quiet")
    out = tmp_path / "out"
    tvb(*words(tmp_path / "store", out, "--limit", 10, "--grid", "0.2,0.3", "--per-basis", 6))
    found = facts(out)
    at_zero = tmp_path / "zero"  # where no basis counts, the grid's result is kept
    tvb(*words(tmp_path / "store", at_zero, "--limit", 2, "--grid", "0", "--per-basis", 6))
    assert facts(at_zero)["best"]["lambda"] == 0 and len(facts(at_zero)["points"]) == 1
    weighted = [row for row in found["points"] if "weights" in row]
    assert 1 <= len(weighted) <= 6 and weighted[0]["weights"] == [1.0, 1.0]
    top = max(row["score"]["value"] for row in found["points"])
    assert found["best"]["score"]["value"] == top
    tuned = yaml.safe_load((out / "tuned.yml").read_text())
    weights = [model.get("parameters", {}).get("weight", 1.0) for model in tuned["models"]]
    assert weights == found["best"].get("weights", [1.0, 1.0])
    assert len(merge(tuned, tmp_path / "merged").tensors) > 0


def test_a_method_that_draws_at_random_is_merged_point_by_point(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, out = write(tmp_path, quick("dare_ties")), tmp_path / "out"
    tvb(*words(path, out, "--limit", 4, "--grid", "0.2,0.5", "--write", tmp_path / "model"))
    assert "dare_ties draws at random and is not linear in lambda" in caplog.text
    text = (out / "tuned.yml").read_text()
    assert "merge it with mergekit-yaml --random-seed 0" in text
    tuned = yaml.safe_load(text)
    want = merge(tuned, tmp_path / "want", "--random-seed", "0").tensors
    made = load(tmp_path / "model")
    assert all(torch.equal(made[name], want[name]) for name in want)


def renamed(checkpoint: Any) -> Any:
    """A checkpoint that calls its last norm otherwise."""
    checkpoint.tensors["last"] = checkpoint.tensors.pop("model.norm.weight")
    return checkpoint


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("direction", "not linear in lambda to the last bit"),
        ("names", "names model.norm.weight otherwise than its files"),
    ],
)
def test_a_line_that_does_not_lead_there(
    what: str,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the line gives is compared with what mergekit wrote before it is used."""
    from tvb_mergekit.tuning import line

    path = write(tmp_path, quick())
    more = ("--limit", 4, "--grid", "0.2,0.5")
    tvb(*words(path, tmp_path / "out", *more))
    if what == "direction":
        usual = TunedRecipe.draw
        monkeypatch.setattr(TunedRecipe, "draw", lambda *given: usual(*given) * (1 + 1e-6))
    else:
        opened = line.Checkpoint.open
        other = SimpleNamespace(open=lambda folder: renamed(opened(folder)))
        monkeypatch.setattr(line, "Checkpoint", other)
    tvb(*words(path, tmp_path / "other", *more))
    assert said in caplog.text
    for name in ("tune.json", "tune.md", "tuned.yml"):
        found, want = ((tmp_path / out / name).read_bytes() for out in ("other", "out"))
        assert found == want


def test_points_that_cannot_win_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, quick())
    more = ("--limit", 20, "--grid", "0.3,1.5,3")
    tasks = ("copy", "upper", "reverse", "double")
    tvb(*words(path, tmp_path / "whole", *more, tasks=tasks))
    calls = counted(monkeypatch)
    tvb(*words(path, tmp_path / "out", *more, "--early-stop", tasks=tasks))
    found, whole = facts(tmp_path / "out"), facts(tmp_path / "whole")
    assert len(calls) < 12
    assert found["best"] == whole["best"]
    stopped = [row for row in found["points"] if row["score"] is None]
    assert stopped and "given up" in (tmp_path / "out" / "tune.md").read_text()


def test_mergekit_s_own_methods(tmp_path: Path) -> None:
    path = write(tmp_path, quick("task_arithmetic"))
    tvb(*words(path, tmp_path / "own", "--limit", 10, "--grid", "0.1,0.35"))
    path = write(tmp_path, quick())
    tvb(*words(path, tmp_path / "ours", "--limit", 10, "--grid", "0.1,0.35"))
    own, ours = (facts(tmp_path / name)["points"] for name in ("own", "ours"))
    assert [row["score"] for row in own] == [row["score"] for row in ours]  # balanced is the same


# ------------------------------------------------------------------------------ tasks and items

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
    """A task of ours, its items numbered."""
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    base, models = family(folder, scale=0.2)
    document = {
        "merge_method": "basis_ta",
        "base_model": str(base),
        "models": [{"model": str(model)} for model in models[:4]],
        "parameters": {"basis": "balanced", "num_bases": 2},
        "dtype": "float32",
    }
    names = {"bos_token": "t1", "eos_token": "t2"}
    transformers.AutoTokenizer.from_pretrained(base, **names).save_pretrained(base)
    return write(folder, document)


def asked(recipe: Path, task: str, tasks: Path, out: Path, *more: object) -> list[object]:
    return ["tune", recipe, "--tasks", task, "--include-path", tasks, "--out", out, "--device",
            "cpu", "--quiet", *more]  # fmt: skip


def chosen(out: Path) -> dict[str, dict[str, Any]]:
    return {part["task"]: part for task in facts(out)["tasks"].values() for part in task["parts"]}


def test_which_items_choose(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    tvb(*asked(small, "tt_many", tasks, out, "--grid", "0.2,1", "--limit", 16, "--subsample",
               *metrics))  # fmt: skip
    found = facts(out)
    assert list(found["tasks"]) == ["tt_both", "tt_test", "tt_only", "tt_one"]
    assert found["tasks"]["tt_both"]["metrics"] == ["acc,none", "acc_norm,none"]
    assert found["tasks"]["tt_one"]["metrics"] == ["acc,none"]
    parts = chosen(out)
    assert parts["tt_both"]["split"] == "validation" and parts["tt_both"]["left_to_test"] is None
    counts = {name: len(part["chosen"]) for name, part in parts.items()}
    # M / T = 2 / 4 of 16 items, or of what the part has; 0.2 of the test's
    assert counts == {"tt_both": 8, "tt_test": 5, "tt_only": 2, "tt_part_a": 8, "tt_part_b": 5}
    rest = json.loads((out / "test_samples.json").read_text())
    assert {name: len(items) for name, items in rest.items()} == {"tt_test": 40, "tt_only": 16}
    for name, items in rest.items():
        assert not set(items) & set(parts[name]["chosen"])
    assert "no validation split in tt_test (10 of 50), tt_only (4 of 20)" in caplog.text
    again = tmp_path / "again"
    tvb(*asked(small, "tt_test", tasks, again, "--grid", "1", *metrics[1:2], "--test-share", 1))
    assert len(chosen(again)["tt_test"]["chosen"]) == 50
    assert not (again / "test_samples.json").exists()


def test_lm_eval_scores_the_same_items(small: Path, tmp_path: Path) -> None:
    """The scores of the chosen items alone, and those of the rest by `lm_eval --samples`."""
    tasks = tmp_path / "tasks"
    own_task(tasks, "tt_test", {"test": 60})
    out = tmp_path / "out"
    tvb(*asked(small, "tt_test", tasks, out, "--grid", "1", "--metric", "tt_test:acc,none",
               "--write", tmp_path / "model"))  # fmt: skip
    part = chosen(out)["tt_test"]
    scores = {}
    for name, items in (("chosen", part["chosen"]), ("rest", part["left_to_test"]), ("all", None)):
        more = {"samples": {"tt_test": items}} if items else {}
        result = scored(tmp_path / "model", ["tt_test"], tasks, bootstrap_iters=1000, **more)
        scores[name] = tuple(result["tt_test"][key] for key in ("acc,none", "acc_stderr,none"))
    found = facts(out)["best"]["tasks"]["tt_test"]
    assert (found["values"]["acc,none"], found["stderrs"]["acc,none"]) == scores["chosen"]
    counts = (
        len(part["chosen"]) * scores["chosen"][0] + len(part["left_to_test"]) * scores["rest"][0]
    )
    assert counts == pytest.approx(60 * scores["all"][0])


def test_an_item_is_not_its_own_example(tmp_path: Path) -> None:
    """Where examples come from the validation split that is scored now."""
    tasks = tmp_path / "tasks"
    own_task(tasks, "tt_shots", {"validation": 6, "test": 4}, num_fewshot=3)
    manager = harness.manager([str(tasks)], {})
    (entry,) = harness.load_entries(
        manager, ["tt_shots"], {"tt_shots": ["acc,none"]}, harness.Choice()
    )
    (task,) = entry.loaded["tasks"].values()
    task.set_fewshot_seed(seed=1234)
    assert len(task.eval_docs) == 6
    for doc in task.eval_docs:
        text = task.fewshot_context(doc, num_fewshot=3)
        assert text.count(doc["question"]) == 1


@pytest.mark.parametrize("shots", [0, 3])
def test_a_class_that_finds_its_items_itself(shots: int, tmp_path: Path) -> None:
    """Its splits are no keys of the configuration: the validation items all the same."""
    tasks = tmp_path / "tasks"
    own_task(tasks, "tt_class", {"validation": 6, "test": 8}, num_fewshot=shots,
             validation_split=None, test_split=None)  # fmt: skip
    code = """
    from lm_eval.api.task import ConfigurableTask

    class Own(ConfigurableTask):
        def __init__(self, config):
            super().__init__(config={k: v for k, v in config.items() if k != "class"})

        has_training_docs = lambda self: False
        has_validation_docs = has_test_docs = lambda self: True
        validation_docs = lambda self: self.dataset["validation"]
        test_docs = lambda self: self.dataset["test"]
    """
    (tasks / "tt_own.py").write_text(textwrap.dedent(code))
    with (tasks / "tt_class.yaml").open("a") as file:
        file.write("class: !function tt_own.Own\n")
    named = {"tt_class": ["acc,none"]}
    manager = harness.manager([str(tasks)], {})
    (entry,) = harness.load_entries(manager, ["tt_class"], named, harness.Choice())
    assert [(part.split, part.total) for part in entry.parts] == [("validation", 6)]
    (task,) = entry.loaded["tasks"].values()
    task.set_fewshot_seed(seed=1234)
    assert len(task.eval_docs) == 6
    for doc in task.eval_docs:
        assert task.fewshot_context(doc, num_fewshot=shots).count(doc["question"]) == 1


def test_shares_of_the_specialists(tmp_path: Path) -> None:
    path = write(tmp_path, quick())
    results = {"results": {"quickstart_copy": {"exact_match,none": 0.5},
                           "quickstart_sum": {"exact_match,none": 0.8}}}  # fmt: skip
    (tmp_path / "results_1.json").write_text(json.dumps(results))
    out = tmp_path / "out"
    tvb(
        *words(
            path, out, "--limit", 10, "--grid", "0.35", "--reference", tmp_path / "results_1.json"
        )
    )
    best = facts(out)["best"]
    one, other = (
        best["tasks"][f"quickstart_{t}"]["values"]["exact_match,none"] for t in ("copy", "sum")
    )
    assert best["score"]["value"] == pytest.approx((one / 0.5 + other / 0.8) / 2)
    assert "share of the reference" in (out / "tune.md").read_text()


# ------------------------------------------------------------------------------------- mistakes


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in quick("ties").items() if name != key}


BAD: dict[str, tuple[dict[str, Any], list[object], str]] = {
    "an unknown task": (quick(), ["--tasks", "quickstart_cpoy"],
                        "lm-eval knows no task quickstart_cpoy; did you mean quickstart_copy"),
    "a pattern for nothing": (quick(), ["--tasks", "nothing_like_this*"], "knows no task like it"),
    "an unknown metric": (quick(), ["--metric", "quickstart_copy:exact_mach,none"],
                          "has no metric exact_mach,none; did you mean exact_match,none?"),
    "a metric of another task": (quick(), ["--metric", "quickstart_max:exact_match,none"],
                                 "--metric quickstart_max: it is none of"),
    "a metric without a task": (quick(), ["--metric", "quickstart_copy"], "expected TASK:METRIC"),
    "no such folder": (quick(), ["--include-path", "nowhere"], "nowhere: no such folder"),
    "no point": (quick(), ["--grid", "1:0:0.5"], "holds no point"),
    "no such lambda": (quick("slerp", t=0.5), [], "slerp has no coefficient `lambda` to tune"),
    "no such method": (quick("basis_tia"), [], "(did you mean `basis_ta`?)"),
    "list of methods": (quick("ta") | {"merge_method": ["ta"]}, [], "is ['ta']: expected"),
    "no method": (without("merge_method"), [], "`merge_method` is None"),
    "no base of mergekit's": (without("base_model"), [], "`base_model` is missing"),
    "a missing base of mergekit's": (quick("ties") | {"base_model": "./nowhere"}, [],
                                     "model ./nowhere: no such folder"),
    "a missing base by name": (quick("ties") | {"base_model": "nowhere"}, [],
                               "model nowhere: no such folder"),
    "a negative alpha": (quick("basis_negate", forget="sum", alpha=1.0),
                         ["--control", "quickstart_max", "--grid", "-1:1:1"], "`alpha` is -1.0"),
    "no control": (quick("basis_negate", forget="sum", alpha=1.0), [], "needs --control TASK"),
    "a control for addition": (quick(), ["--control", "quickstart_max"],
                               "--control goes with basis_negate"),
    "a control to forget": (quick("basis_negate", forget="sum", alpha=1.0),
                            ["--control", "quickstart_copy"], "both to be forgotten and --control"),
    "a metric of a control group": (quick("basis_negate", forget="sum", alpha=1.0),
                                    ["--control", "quickstart:exact_match,none"],
                                    "--control quickstart: it is none of quickstart_copy, "),
    "golden negation": (quick("basis_negate", forget="sum", alpha=1.0),
                        ["--control", "quickstart_max", "--search", "golden"], "on a grid"),
    "keep more than all": (quick(), ["--keep", 1.5], "--keep is 1.5"),
    "no share": (quick(), ["--test-share", 0], "--test-share is 0"),
    "no task": (quick(), ["--tasks", ", "], "--tasks names none"),
    "endless items": (quick(), ["--limit", "inf"], "--limit is inf"),
    "no number of items": (quick(), ["--limit", "nan"], "--limit is nan"),
    "a tolerance for a grid": (quick(), ["--tolerance", 0.1], "goes with --search golden"),
    "no chat template": (quick(), ["--apply-chat-template", "--grid", "0.2"],
                         "the base's tokenizer has no chat template"),
    "no such dtype": (quick(), ["--model-args", "dtype=float99", "--grid", "0.2"], "float99"),
    "half an item": (quick(), ["--limit", 2.5], "--limit is 2.5"),
    "weights without a store": (quick(), ["--per-basis", 5], "--per-basis needs a recipe over"),
    "golden with one end": (quick(), ["--search", "golden", "--grid", "0.4"], "with two ends"),
    "a batch of less than nothing": (quick(), ["--batch-size", "-3"], "--batch-size is -3"),
    "a batch of words": (quick(), ["--batch-size", "auto:x"], "--batch-size is auto:x"),
    "no tolerance": (quick(), ["--search", "golden", "--tolerance", "nan"], "--tolerance is nan"),
    "early and golden": (quick(), ["--search", "golden", "--early-stop"], "goes with --search"),
    "energy": (quick(num_bases=None, energy=0.9), ["--subsample"], "needs M, which `energy`"),
    "a wrong key": (quick(lamda=0.4), [], "did you mean `lambda`?"),
    "no JSON": (quick(), ["--metadata", "{"], "no JSON"),
    "no reference": (quick(), ["--reference", "nowhere.json"], "nowhere.json"),
    "no model's argument": (quick(), ["--model-args", "dtipe=float32"], "dtipe"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line(case: str, tmp_path: Path) -> None:
    document, more, said = BAD[case]
    document["parameters"] = {k: v for k, v in document["parameters"].items() if v is not None}
    path = write(tmp_path, document)
    message = refused(*words(path, tmp_path / "out", "--limit", 2, *more))
    assert said in message
    assert not (tmp_path / "out" / "tune.json").exists()


def test_a_truncated_model_of_a_method_of_mergekit_s(tmp_path: Path) -> None:
    document = quick("ties")
    cut = shutil.copytree(document["models"][7]["model"], tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 400_000)
    document["models"][7]["model"] = str(cut)
    said = refused(*words(write(tmp_path, document), tmp_path / "out"))
    assert f"{cut}/model.safetensors: truncated or damaged" in said


def test_folders_that_are_in_use(tmp_path: Path, small: Path) -> None:
    path = write(tmp_path, quick())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    assert "holds other files (notes.txt)" in refused(*words(path, tmp_path / "mine"))
    assert "is a file; name a folder" in refused(*words(path, path))
    assert "already holds" in refused(
        *words(path, tmp_path / "out", "--write", QUICK / "models" / "sum")
    )
    for place in (tmp_path / "out", tmp_path):
        assert "lies there; name another" in refused(
            *words(path, tmp_path / "out", "--write", place)
        )
    assert "a folder, and no store" in refused(*words(QUICK / "models" / "sum", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_several_metrics_and_none_named(small: Path, tmp_path: Path) -> None:
    own_task(tmp_path / "tasks", "tt_two", {"test": 10})
    said = refused(*asked(small, "tt_two", tmp_path / "tasks", tmp_path / "out"))
    assert "--metric tt_two:METRIC, one of acc,none, acc_norm,none" in said


def test_giving_up_where_less_is_better(small: Path, tmp_path: Path) -> None:
    own_task(tmp_path / "tasks", "tt_less", {"test": 10},
             metric_list=[{"metric": "acc", "higher_is_better": False}])  # fmt: skip
    said = refused(*asked(small, "tt_less", tmp_path / "tasks", tmp_path / "out", "--early-stop"))
    assert "--early-stop goes with scores that rise" in said


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Memory:
        available = 2**20

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    said = refused(*words(write(tmp_path, quick()), tmp_path / "out"))
    assert "too little memory on cpu" in said
    assert not (tmp_path / "out").exists()


def test_code_that_a_model_wrote(small: Path, tmp_path: Path) -> None:
    own_task(tmp_path / "tasks", "tt_code", {"test": 10}, unsafe_code=True)
    said = refused(*asked(small, "tt_code", tmp_path / "tasks", tmp_path / "out"))
    assert "allow it with --confirm-run-unsafe-code" in said
