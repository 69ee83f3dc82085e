"""`tvb tune` in order: what can be wrong first, then the search, then the files."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tvb_mergekit import __version__
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.progress import Bar
from tvb_mergekit.score.benchmark import check_known, repeated
from tvb_mergekit.score.results import read_results
from tvb_mergekit.settings import MATRIX_METHODS
from tvb_mergekit.store.store import lock
from tvb_mergekit.tensors.layout import MEMORY
from tvb_mergekit.tensors.output import check_disk, check_output_folder
from tvb_mergekit.tune import harness, search
from tvb_mergekit.tune.harness import Choice, LmEval, Scored
from tvb_mergekit.tune.merges import TunedRecipe, read_tuned
from tvb_mergekit.tune.model import Model, check_memory
from tvb_mergekit.tune.objective import Estimate, Objective, objective
from tvb_mergekit.tune.record import POINTS, Record

LOG = logging.getLogger(__name__)
DISK = 5  # merged models of 16 bits: the first, and start and direction in float32
DECIDING = ("device", "batch_size", "model_args", "chat_template")  # of lm-eval's options
WORK = ".work"  # below OUT: the merged model that is loaded, and the line


@dataclass(frozen=True, kw_only=True)
class Request(LmEval):
    """What a user asks for; see `tvb tune --help`."""

    recipe: str
    tasks: Sequence[str]
    out: Path
    grid: str | None = None  # by default it suits the method
    search: Literal["grid", "golden"] = "grid"
    tolerance: float | None = None
    metrics: Sequence[str] = ()
    reference: str | None = None
    controls: Sequence[str] = ()
    keep: float = 0.95
    limit: float | None = None
    subsample: bool = False
    test_share: float = 0.2
    seed: int = 0
    memory: int = MEMORY
    write: str | None = None
    options: Options = field(default_factory=Options)
    quiet: bool = False


@dataclass(frozen=True)
class Row:
    """One point: its scores by entry, and their means."""

    point: float
    scored: Mapping[str, Scored]
    target: Estimate
    control: Estimate | None


@dataclass(frozen=True)
class Tuned:
    """What came out.

    Attributes:
        goals: "target", and for negation "control", to the objective over its entries.
        best: the row that was chosen.
        rows: all points that were asked for, in their order.
        facts: what decides the scores.
    """

    request: Request
    recipe: TunedRecipe
    goals: Mapping[str, Objective]
    choice: Choice
    best: Row
    rows: Sequence[Row]
    notes: Sequence[str]
    facts: Mapping[str, Any]


def tune(request: Request) -> Tuned:
    """Find the coefficient. The files are `report.write`'s, but for OUT/points.jsonl; the merged
    model is the caller's to write.

    Raises:
        UserError, MergeRefused: a mistake in what was asked for, or what stops a merge.
    """
    harness.require()
    recipe = read_tuned(request.recipe, request.options, request.seed, request.memory)
    if request.grid is None:
        around_one = recipe.document.get("merge_method") in MATRIX_METHODS
        request = replace(request, grid="0:2:0.1" if around_one else "0:1:0.05")
    assert request.grid is not None
    points = search.grid_points(request.grid)
    _check(request, recipe, points)
    recipe.check(points)
    if request.write is not None:
        check_output_folder(request.write)
    share = recipe.share if request.subsample else 1.0
    choice = Choice(request.limit, share, request.test_share, request.seed)
    size = recipe.output_bytes()
    check_memory(size, request.device)
    check_disk(request.out, (DISK if recipe.linear else 1) * size)
    goals = _objectives(request, choice, recipe.base())
    entries = [entry for goal in goals.values() for entry in goal.entries]
    notes = harness.without_split(entries)
    for note in notes:
        LOG.warning("%s", note)
    request.out.mkdir(parents=True, exist_ok=True)
    facts = {
        **recipe.identity(),
        "tasks": {entry.name: [*entry.metrics, entry.content] for entry in entries},
        **{name: getattr(request, name) for name in DECIDING},
        "versions": {"tvb_mergekit": __version__, **harness.versions()},
    }
    begin = min((abs(value), value) for value in (*points, 1.0) if value)[1]
    load = partial(harness.load_model, request, request.options.trust_remote_code)
    with ExitStack() as stack:
        stack.callback(lock(request.out, lambda text: LOG.warning("%s", text)).release)
        record = Record(request.out / POINTS, facts)
        model = Model(recipe, request.out / WORK, load, request.quiet, begin)
        stack.enter_context(closing(model))
        bar = stack.enter_context(Bar(desc="Tune", unit="task", disable=request.quiet))
        scorer = Scorer(goals, record, model, bar, request.chat_template)
        best = _search(request, points, scorer)
    rows = list(scorer.rows.values())
    return Tuned(request, recipe, goals, choice, scorer.row(best), rows, notes, facts)


def _check(request: Request, recipe: TunedRecipe, points: Sequence[float]) -> None:
    """Raise UserError for what is wrong without lm-eval's or the models' help."""
    negation, golden = recipe.key == "alpha", request.search == "golden"
    limit, out = request.limit, request.out
    others = set(os.listdir(out)) - {WORK} if out.is_dir() else set()
    inside = request.write is not None and out.resolve().is_relative_to(
        Path(request.write).resolve()
    )
    mistakes = [
        (
            negation and not request.controls,
            "basis_negate needs --control TASK: what must not be forgotten, or the largest alpha "
            "would be the best",
        ),
        (negation and golden, "basis_negate is tuned on a grid: leave out --search"),
        (negation and request.reference, "--reference goes with addition: leave it out"),
        (
            request.controls and not negation,
            f"--control goes with basis_negate, and the recipe's is {recipe.method}",
        ),
        (not request.tasks, "--tasks names none: give tasks or groups of lm-eval, as copa,rte"),
        (
            limit is not None and not (limit > 0 and (limit < 1 or limit.is_integer())),
            f"--limit is {limit}: expected a number of items, or a share below 1",
        ),
        (golden and len(points) < 2, "--search golden needs a --grid with two ends"),
        (request.tolerance and not golden, "--tolerance goes with --search golden"),
        (out.is_file(), f"--out {out} is a file; name a folder"),
        (
            others and POINTS not in others,
            f"--out {out} holds other files ({min(others, default='')}): name another folder",
        ),
        (inside, f"--write {request.write}: --out {out} lies there; name another folder"),
    ]
    for wrong, told in mistakes:
        if wrong:
            raise UserError(told)


def _objectives(request: Request, choice: Choice, base: Path | None) -> dict[str, Objective]:
    """The objectives "target", and for negation "control"."""
    reference = None if request.reference is None else read_results(request.reference)
    metrics: dict[str, list[str]] = {}
    for text in request.metrics:
        name, _, metric = text.partition(":")
        if not name or not metric:
            raise UserError(f"--metric {text}: expected TASK:METRIC, as in gsm8k:exact_match,none")
        metrics.setdefault(name, []).append(metric)
    manager = harness.manager(request.include_path, harness.told(request, base))
    targets, controls = (
        harness.load_entries(manager, names, metrics, choice, request)
        for names in (request.tasks, request.controls)
    )
    names = [entry.name for entry in (*targets, *controls)]
    for name in metrics:
        check_known(name, names, f"--metric {name}: no such task here")
    if twice := repeated(names):
        raise UserError(f"{twice} is both to be forgotten and --control")
    rising = "forgetting" if controls else ""
    goals = {"target": objective(targets, reference, str(request.reference), rising)}
    return goals | ({"control": objective(controls, rising="--control")} if controls else {})


class Scorer:
    """Scores of points, each asked of the record before the model.

    Attributes:
        rows: point -> all that is known of it, in the order in which they were asked for.
    """

    def __init__(
        self, goals: Mapping[str, Objective], record: Record, model: Model, bar: Bar, chat: bool
    ) -> None:
        self.goals, self.record, self.model, self.bar, self.chat = goals, record, model, bar, chat
        self.entries = [entry for goal in goals.values() for entry in goal.entries]
        self.rows: dict[float, Row] = {}

    def row(self, point: float) -> Row:
        """All scores of a point."""
        if point not in self.rows:
            lm, found = None, {}
            for entry in self.entries:
                scored = self.record.get(point, entry.name)
                if scored is None:
                    self.bar.set_postfix_str(f"{point:g}: {entry.name}")
                    lm = lm or self.model.at(point)
                    scored = harness.score(lm, entry, self.chat)
                    self.record.add(point, entry.name, scored)
                found[entry.name] = scored
                self.bar.update()
            means = {role: goal.mean(found) for role, goal in self.goals.items()}
            self.rows[point] = Row(point, found, means["target"], means.get("control"))
        return self.rows[point]


def _search(request: Request, points: Sequence[float], scorer: Scorer) -> float:
    """The best point."""

    def target(point: float) -> float:
        return scorer.row(point).target.value

    def control(point: float) -> float:
        found = scorer.row(point).control
        assert found is not None
        return found.value

    def score(point: float) -> float:
        return -target(point) if scorer.goals["target"].lower else target(point)

    if "control" in scorer.goals:
        every = sorted({0.0, *points})
        scorer.bar.reset(len(every) * len(scorer.entries))
        if control(0.0) <= 0:
            raise UserError("--control: the score is 0 at alpha 0 already: nothing to keep")
        for point in every:
            scorer.row(point)
        return search.most_forgotten(points, target, control, request.keep)
    if request.search == "golden":
        step = min(b - a for a, b in itertools.pairwise(points))
        return search.golden(points[0], points[-1], request.tolerance or step / 2, score)
    scorer.bar.reset(len(points) * len(scorer.entries))
    best, _ = search.grid(points, score)
    return best
