"""`tvb tune`: checks first, then the search."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tvb_mergekit import __version__
from tvb_mergekit.atomic import check_outside, write_file
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.progress import Bar
from tvb_mergekit.score.benchmark import check_known, repeated
from tvb_mergekit.store.writer import lock
from tvb_mergekit.tensors.output import check_disk, check_output_folder, folder_bytes
from tvb_mergekit.tune import harness, search
from tvb_mergekit.tune.harness import EvalTask, ItemChoice, LmEval, Scored
from tvb_mergekit.tune.merges import TunedRecipe, read_tuned
from tvb_mergekit.tune.model import MovingModel, check_memory
from tvb_mergekit.tune.search import Estimate, Objective, objective

LOG = logging.getLogger(__name__)
DISK = 5  # merged models of 16 bits: the first, and start and direction in float32
DECIDING = ("device", "batch_size", "model_args", "chat_template")  # lm-eval's options
POINTS = "points.jsonl"
POINTS_VERSION = 2  # 1 had a weight for each basis
WORK = ".work"  # below OUT, for the loaded model and the line


@dataclass(frozen=True, kw_only=True)
class TuneRequest(LmEval):
    """The words of a command; see `tvb tune --help`."""

    recipe: str
    tasks: Sequence[str]
    out: Path
    grid: str | None = None  # by default it suits the method
    search: Literal["grid", "golden"] = "grid"
    tolerance: float | None = None
    metrics: Sequence[str] = ()
    controls: Sequence[str] = ()
    keep: float = 0.95
    limit: float | None = None
    subsample: bool = False
    test_share: float = 0.2
    seed: int = 0
    write: str | None = None
    options: Options = field(default_factory=Options)
    quiet: bool = False


@dataclass(frozen=True)
class Point:
    """A coefficient with its scores by task, and their mean for each role of `Tuned.goals`."""

    value: float
    scored: Mapping[str, Scored]
    means: Mapping[str, Estimate]


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    request: TuneRequest
    recipe: TunedRecipe
    goals: Mapping[str, Objective]  # "target", and for negation "control"
    choice: ItemChoice
    best: Point
    points: Sequence[Point]  # in the order of the search
    notes: Sequence[str]
    facts: Mapping[str, Any]  # facts that decide the scores


def tune(request: TuneRequest) -> Tuned:
    """Find the coefficient. The only file that stays is OUT/points.jsonl."""
    harness.require()
    recipe = read_tuned(request.recipe, request.options)
    if request.grid is None:
        request = replace(request, grid=search.default_grid(recipe.method, request.search))
    points = search.grid_points(str(request.grid))
    for mistake in _mistakes(request, recipe, points):
        raise UserError(mistake)
    recipe.check(points)
    size = recipe.output_bytes()  # finds models that are missing
    inputs = recipe.inputs()
    for path in inputs:
        if request.out.resolve().is_relative_to(Path(path).resolve()):
            raise UserError(f"--out {request.out} lies in the input {path}; name another folder")
    check_outside(request.out)
    if request.write is not None:
        check_output_folder(request.write, inputs)
    share = recipe.share if request.subsample else 1.0
    choice = ItemChoice(request.limit, share, request.test_share, request.seed)
    check_memory(size, request.device)
    held = folder_bytes(request.out / WORK)  # of a killed run, deleted before the first point
    check_disk(request.out, DISK * size - held)
    given = {"tokenizer", "tokenizer_source", "chat_template"} & recipe.document.keys()
    usual = None if given else recipe.base()
    harness.check_options(request, usual, request.options.trust_remote_code)
    goals = _objectives(request, choice, recipe.base())
    tasks = [task for goal in goals.values() for task in goal.tasks]
    notes = harness.without_split(tasks)
    for note in notes:
        LOG.warning("%s", note)
    facts = {
        **recipe.identity(),
        "tasks": {task.name: [*task.metrics, task.content] for task in tasks},
        **{name: getattr(request, name) for name in DECIDING},
        "versions": {"tvb_mergekit": __version__, **harness.versions()},
    }
    request.out.mkdir(parents=True, exist_ok=True)
    begin = min((abs(value), value) for value in (*points, 1.0) if value)[1]
    load = partial(harness.load_model, request, request.options.trust_remote_code)
    with ExitStack() as stack:
        stack.callback(lock(request.out).release)
        file = ScoreFile(request.out / POINTS, facts)
        model = MovingModel(recipe, request.out / WORK, load, request.quiet, begin)
        stack.enter_context(closing(model))
        bar = stack.enter_context(Bar(desc="Tune", unit="task", disable=request.quiet))
        scorer = Scorer(goals, tasks, file, model, bar, request.chat_template)
        best = scorer.point(_search(request, points, scorer))
        bar.total = bar.n  # unknown to a search that ends by itself
    return Tuned(request, recipe, goals, choice, best, list(scorer.points.values()), notes, facts)


def _mistakes(request: TuneRequest, recipe: TunedRecipe, points: Sequence[float]) -> Iterator[str]:
    """Yield mistakes that show without lm-eval and without the models."""
    negation, golden = recipe.key == "alpha", request.search == "golden"
    limit, out, write = request.limit, request.out, request.write
    if negation and not request.controls:
        yield "basis_negate needs --control TASK, a task that must not be forgotten"
    if negation and golden:
        yield "basis_negate is tuned on a grid: leave out --search"
    if request.controls and not negation:
        yield f"--control goes with basis_negate, and the recipe's method is {recipe.method}"
    if not request.tasks:
        yield "--tasks names none: give tasks or groups of lm-eval, as copa,rte"
    if limit is not None and not (limit > 0 and (limit < 1 or limit.is_integer())):
        yield f"--limit is {limit}: expected a number of items, or a share below 1"
    if golden and len(points) < 2:
        yield "--search golden needs a --grid with two ends"
    if request.tolerance and not golden:
        yield "--tolerance goes with --search golden"
    if out.is_file():
        yield f"--out {out} is a file; name a folder"
    others = set(os.listdir(out)) - {WORK} if out.is_dir() else set()
    if others and POINTS not in others:
        yield f"--out {out} holds other files ({min(others)}): name another folder"
    if write is not None and out.resolve().is_relative_to(Path(write).resolve()):
        yield f"--write {write}: --out {out} lies there; name another folder"


def _objectives(request: TuneRequest, choice: ItemChoice, base: Path) -> dict[str, Objective]:
    metrics: dict[str, list[str]] = {}
    for text in request.metrics:
        name, _, metric = text.partition(":")
        if not name or not metric:
            raise UserError(f"--metric {text}: expected TASK:METRIC, as in gsm8k:exact_match,none")
        metrics.setdefault(name, []).append(metric)
    manager = harness.manager(request.include_path, harness.full_metadata(request, base))
    load = partial(harness.load_tasks, manager, metrics=metrics, choice=choice, options=request)
    targets, controls = load(request.tasks), load(request.controls)
    names = [task.name for task in (*targets, *controls)]
    for name in metrics:
        check_known(name, names, f"--metric {name}: no such task here")
    if twice := repeated(names):
        raise UserError(f"{twice} is both to be forgotten and --control")
    rising = "forgetting" if controls else ""
    goals = {"target": objective(targets, rising)}
    return goals | ({"control": objective(controls, "--control")} if controls else {})


class ScoreFile:
    """OUT/points.jsonl: a line for each point and task, on the disk before the next task begins.

    The first line holds the facts that decide the scores, as plain JSON: recipe, checkpoints, tasks
    and items, versions. Scores under other facts are never used. A line that a kill has cut is
    dropped.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self._found: dict[tuple[float, str], Scored] = {}
        head = json.loads(json.dumps({"format_version": POINTS_VERSION, **facts}))
        if not path.exists():
            write_file(path, (json.dumps(head) + "\n").encode())
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        complete = text[: text.rfind("\n") + 1]
        try:
            begun, *rows = [json.loads(line) for line in complete.splitlines()]
            differing = [key for key in head if begun.get(key) != head[key]]
            for row in () if differing else rows:
                self._found[row["point"], row["task"]] = Scored(row["values"], row["stderrs"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged, or not of `tvb tune`; name another --out") from error
        if differing:
            names = listed([{"tasks": "tasks or their items"}.get(key, key) for key in differing])
            raise UserError(
                f"{path} holds scores of another tuning ({names} differ): name another "
                "--out, or delete that folder"
            )
        if complete != text:
            os.truncate(path, len(complete.encode()))

    def get(self, point: float, task: str) -> Scored | None:
        return self._found.get((point, task))

    def add(self, point: float, task: str, scored: Scored) -> None:
        """Keep one score; it is on the disk when this returns."""
        row = {"point": point, "task": task, **asdict(scored)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._found[point, task] = scored


@dataclass
class Scorer:
    """Scores of points, from the file or from the model."""

    goals: Mapping[str, Objective]
    tasks: Sequence[EvalTask]  # of all goals
    file: ScoreFile
    model: MovingModel
    bar: Bar
    chat_template: bool
    points: dict[float, Point] = field(default_factory=dict)  # in the order of the search

    def point(self, value: float) -> Point:
        """Return all scores of a point."""
        if value not in self.points:
            lm, found = None, {}
            for task in self.tasks:
                scored = self.file.get(value, task.name)
                if scored is None:
                    self.bar.set_postfix_str(f"{value:g}: {task.name}")
                    lm = lm or self.model.at(value)
                    scored = harness.score(lm, task, self.chat_template)
                    self.file.add(value, task.name, scored)
                found[task.name] = scored
                self.bar.update()
            means = {role: goal.mean(found) for role, goal in self.goals.items()}
            self.points[value] = Point(value, found, means)
        return self.points[value]


def _search(request: TuneRequest, points: Sequence[float], scorer: Scorer) -> float:
    sign = -1 if scorer.goals["target"].lower else 1

    def target(value: float) -> float:
        return sign * scorer.point(value).means["target"].value

    def control(value: float) -> float:
        return scorer.point(value).means["control"].value

    if "control" in scorer.goals:
        every = sorted({0.0, *points})
        scorer.bar.reset(len(every) * len(scorer.tasks))
        if control(0.0) <= 0:
            raise UserError("--control: the score is 0 at alpha 0 already: nothing to keep")
        for value in every:
            scorer.point(value)
        return search.most_forgotten(points, target, control, request.keep)
    if request.search == "golden":
        step = min(b - a for a, b in itertools.pairwise(points))
        return search.golden(points[0], points[-1], request.tolerance or step / 2, target)
    scorer.bar.reset(len(points) * len(scorer.tasks))
    return search.grid(points, target)[0]
