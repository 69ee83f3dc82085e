"""`tvb tune` in order: what can be wrong first, then the search, then the files."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tvb_mergekit import __version__
from tvb_mergekit.checkpoints import weight_files
from tvb_mergekit.errors import UserError
from tvb_mergekit.layout import MEMORY
from tvb_mergekit.output import check_disk, check_output_folder
from tvb_mergekit.plots import write_file
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.plugin.tuning import TunedRecipe, read_tuned
from tvb_mergekit.progress import Bar
from tvb_mergekit.scoring.results import read_results
from tvb_mergekit.store import lock
from tvb_mergekit.tuning import harness, search
from tvb_mergekit.tuning.harness import Choice, Entry, Scored
from tvb_mergekit.tuning.line import Point
from tvb_mergekit.tuning.model import Model, check_memory
from tvb_mergekit.tuning.objective import Estimate, Objective, cannot_win, objective
from tvb_mergekit.tuning.record import POINTS, Record

LOG = logging.getLogger(__name__)
DISK = 5  # merged models of 16 bits: the first, and start and direction in float32
WORK = ".work"  # below OUT: the merged model that is loaded, and the line
WRITTEN = "written.json"  # below OUT: what --write's folder was given
BATCH = re.compile(r"[1-9][0-9]*|auto(:[1-9][0-9]*)?")  # what lm-eval takes


@dataclass(frozen=True)
class Request:
    """What a user asks for; see `tvb tune --help`."""

    recipe: str
    tasks: Sequence[str]
    out: Path
    grid: str = "0:1:0.05"
    search: Literal["grid", "golden"] = "grid"
    tolerance: float | None = None
    per_basis: int | None = None  # evaluations
    early_stop: bool = False
    metrics: Sequence[str] = ()
    reference: str | None = None
    controls: Sequence[str] = ()
    keep: float = 0.95
    limit: float | None = None
    subsample: bool = False
    test_share: float = 0.2
    seed: int = 0
    include_path: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    num_fewshot: int | None = None
    chat_template: bool = False
    unsafe_code: bool = False
    device: str = "cpu"
    batch_size: str = "1"
    model_args: str = ""
    memory: int = MEMORY
    write: str | None = None
    options: Options = field(default_factory=Options)
    quiet: bool = False


@dataclass(frozen=True)
class Row:
    """One point: its scores (in part, where it was given up), and the means of all of them."""

    point: Point
    scored: Mapping[str, Scored]
    target: Estimate | None
    control: Estimate | None


@dataclass(frozen=True)
class Tuned:
    """What came out.

    Attributes:
        best: the row that was chosen.
        rows: all points that were asked for, in their order.
    """

    request: Request
    recipe: TunedRecipe
    goal: Objective
    control: Objective | None
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
    points = search.grid_points(request.grid)
    _check(request, recipe, points)
    choice = Choice(
        request.limit,
        recipe.share if request.subsample else 1.0,
        request.test_share,
        request.seed,
    )
    size = recipe.output_bytes()
    check_memory(size, request.device)
    check_disk(request.out, (DISK if recipe.linear else 1) * size)
    goal, control = _objectives(request, choice)
    if request.early_stop and goal.lower:
        raise UserError("--early-stop goes with scores that rise, and here less is better")
    notes = harness.without_split([*goal.entries, *(control.entries if control else ())])
    for note in notes:
        LOG.warning("%s", note)
    request.out.mkdir(parents=True, exist_ok=True)
    facts = _facts(request, recipe, goal, control)
    begin = min((abs(value), value) for value in (*points, 1.0) if value)[1]
    model = Model(recipe, request.out / WORK, partial(_load, request), request.quiet, begin)
    held = lock(request.out, lambda text: LOG.warning("%s", text))
    try:
        record = Record(request.out / POINTS, facts)
        scorer = Scorer(request, goal, control, record, model.at)
        try:
            best = _search(request, recipe, points, scorer)
        finally:
            scorer.close()
            model.close()
    finally:
        held.release()
    rows = [scorer.row(point) for point in scorer.asked]
    chosen = scorer.row(best)
    return Tuned(request, recipe, goal, control, choice, chosen, rows, notes, facts)


def merge(tuned: Tuned) -> str:
    """Write the merged model of what was found into --write's folder, unless the same command did
    so before; a line about it.

    Raises:
        UserError: the folder holds the model of an earlier result; whatever stops the merge.
    """
    request, point, key = tuned.request, tuned.best.point, tuned.recipe.key
    assert request.write is not None
    held = _written(request.out, request.write)
    if held == point:
        return f"{request.write} holds this model already"
    if held is not None:
        raise UserError(
            f"--write {request.write} holds the model of {key} {held}, found before; delete it or "
            f"name another folder: the same command then merges {key} {point} at once"
        )
    tuned.recipe.write(point, request.write, request.quiet)
    facts = {"point": point.value, "weights": list(point.weights), **_stamps(request.write)}
    write_file(request.out / WRITTEN, (json.dumps(facts) + "\n").encode())
    return f"Merged into {request.write}"


def _written(out: Path, folder: str) -> Point | None:
    """The point whose model this tuning wrote into a folder, where the files are still those."""
    try:
        facts = json.loads((out / WRITTEN).read_text(encoding="utf-8"))
        point = Point(facts.pop("point"), tuple(facts.pop("weights")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return point if facts == _stamps(folder) else None


def _stamps(folder: str) -> dict[str, Any]:
    """What tells the weight files of a folder from others."""
    stats = {name: (Path(folder) / name).stat() for name in weight_files(folder)}
    files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    return {"folder": os.path.realpath(folder), "files": files}


def _check(request: Request, recipe: TunedRecipe, points: Sequence[float]) -> None:
    """All that can be wrong without lm-eval's or the models' help."""
    if recipe.key == "alpha":
        if not request.controls:
            raise UserError(
                "basis_negate needs --control TASK: what must not be forgotten, or the largest "
                "alpha would be the best"
            )
        if request.search != "grid" or request.early_stop or request.per_basis:
            raise UserError(
                "basis_negate is tuned on a grid: leave out --search, --per-basis and --early-stop"
            )
        if request.reference is not None:
            raise UserError("--reference goes with addition: leave it out")
    elif request.controls:
        raise UserError(f"--control goes with basis_negate, and the recipe's is {recipe.method}")
    if not request.tasks:
        raise UserError(
            "--tasks names none: give tasks or groups of lm-eval, as in --tasks copa,rte"
        )
    if not 0 < request.keep <= 1:
        raise UserError(f"--keep is {request.keep:g}: expected a number in (0, 1]")
    if not 0 < request.test_share <= 1:
        raise UserError(f"--test-share is {request.test_share:g}: expected a number in (0, 1]")
    limit = request.limit
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit.is_integer())):
        raise UserError(f"--limit is {limit:g}: a number of items, or a share below 1")
    if not BATCH.fullmatch(request.batch_size):
        raise UserError(
            f"--batch-size is {request.batch_size}: expected a positive number, auto or auto:N"
        )
    if request.search == "golden" and len(points) < 2:
        raise UserError("--search golden needs a --grid with two ends")
    if request.tolerance is not None and request.search != "golden":
        raise UserError("--tolerance goes with --search golden")
    if request.tolerance is not None and not request.tolerance > 0:
        raise UserError(f"--tolerance is {request.tolerance:g}: expected a positive number")
    if request.early_stop and request.search != "grid":
        raise UserError("--early-stop goes with --search grid")
    if request.per_basis is not None:
        recipe.num_bases  # noqa: B018  # raises where bases have no weights of their own
    recipe.check([Point(value) for value in points])
    out = request.out
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder")
    if out.is_dir() and not (out / POINTS).exists() and (found := sorted(os.listdir(out))):
        if found != [WORK]:
            raise UserError(f"--out {out} holds other files ({found[0]}): name another folder")
    if request.write is not None:
        if Path(request.write).resolve() in (out.resolve(), *out.resolve().parents):
            raise UserError(f"--write {request.write}: --out {out} lies there; name another folder")
        if _written(out, request.write) is None:
            check_output_folder(request.write)


def _objectives(request: Request, choice: Choice) -> tuple[Objective, Objective | None]:
    reference = None if request.reference is None else read_results(request.reference)
    asked = [_named(text, "--metric") for text in request.metrics]
    metrics: dict[str, list[str]] = {}
    for name, metric in asked:
        if metric is None:
            raise UserError(f"--metric {name}: expected TASK:METRIC, as in gsm8k:exact_match,none")
        metrics.setdefault(name, []).append(metric)
    controls: dict[str, list[str]] = {}
    for name, metric in (_named(text, "--control") for text in request.controls):
        controls.setdefault(name, []).extend([metric] if metric else [])
    manager = harness.manager(request.include_path, request.metadata)
    load = partial(
        harness.load_entries,
        manager,
        choice=choice,
        num_fewshot=request.num_fewshot,
        unsafe_code=request.unsafe_code,
    )
    entries = load(request.tasks, metrics)
    goal = objective(entries, reference, str(request.reference))
    if not controls:
        return goal, None
    if goal.lower:
        raise UserError(
            f"{entries[0].metrics[0]} of {entries[0].name} is better when it is lower: what is to "
            "be forgotten needs a score that rises"
        )
    given = {name: found for name, found in controls.items() if found}
    kept = load(list(controls), given, option="--control")
    if both := {entry.name for entry in entries} & {entry.name for entry in kept}:
        raise UserError(f"{min(both)} is both to be forgotten and --control")
    control = objective(kept, None, "")
    if control.lower:
        raise UserError(
            f"{kept[0].metrics[0]} of {kept[0].name} is better when it is lower: --control needs a "
            "score that rises"
        )
    return goal, control


def _named(text: str, option: str) -> tuple[str, str | None]:
    name, _, metric = text.partition(":")
    if not name:
        raise UserError(f"{option} {text}: expected TASK:METRIC")
    return name, metric or None


def _load(request: Request, folder: Path) -> Any:
    return harness.load_model(
        folder,
        request.device,
        request.batch_size,
        request.model_args,
        chat_template=request.chat_template,
        trust_remote_code=request.options.trust_remote_code,
    )


def _facts(
    request: Request, recipe: TunedRecipe, goal: Objective, control: Objective | None
) -> dict[str, Any]:
    """What decides the scores."""
    entries = [*goal.entries, *(control.entries if control else ())]
    return {
        **recipe.identity(),
        "tasks": {entry.name: [*entry.metrics, entry.content] for entry in entries},
        "device": request.device,
        "batch_size": request.batch_size,
        "model_args": request.model_args,
        "chat_template": request.chat_template,
        "versions": {"tvb_mergekit": __version__, **harness.versions()},
    }


class Scorer:
    """Scores of points, each asked of the record before the model.

    Attributes:
        asked: the points, in the order in which they were first asked for.
    """

    def __init__(
        self,
        request: Request,
        goal: Objective,
        control: Objective | None,
        record: Record,
        at: Callable[[Point], Any],
    ) -> None:
        self.request, self.goal, self.control = request, goal, control
        self.record, self.at = record, at
        self.asked: list[Point] = []
        self._given_up: set[Point] = set()
        self._told: set[tuple[Point, str]] = set()  # of the bar
        self._bar = Bar(desc="Tune", unit="task", disable=request.quiet)

    def expect(self, points: int) -> None:
        """Tell the bar how many points will come."""
        count = len(self.goal.entries) + (len(self.control.entries) if self.control else 0)
        self._bar.total = points * count
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()

    def row(self, point: Point) -> Row:
        """What is known of a point."""
        entries = [*self.goal.entries, *(self.control.entries if self.control else ())]
        found = {e.name: s for e in entries if (s := self.record.get(point, e.name)) is not None}

        def mean(of: Objective | None) -> Estimate | None:
            whole = of is not None and all(entry.name in found for entry in of.entries)
            return of.mean(found) if of is not None and whole else None

        target = None if point in self._given_up else mean(self.goal)
        return Row(point, found, target, mean(self.control))

    def _ask(self, point: Point, entries: Sequence[Entry], stop: bool = False) -> None:
        if point not in self.asked:
            self.asked.append(point)
        lm = None
        for entry in entries:
            if self.record.get(point, entry.name) is None:
                if stop and self._hopeless(point):
                    self._given_up.add(point)
                    self._tell(point, entries)
                    return
                self._bar.set_postfix_str(f"{point}: {entry.name}")
                lm = lm or self.at(point)
                chat = self.request.chat_template
                self.record.add(point, entry.name, harness.score(lm, entry, chat_template=chat))
            self._tell(point, [entry])

    def _tell(self, point: Point, entries: Sequence[Entry]) -> None:
        """That these are done, once."""
        new = {(point, entry.name) for entry in entries} - self._told
        self._told |= new
        self._bar.update(len(new))

    def _hopeless(self, point: Point) -> bool:
        """Whether a point, scored in part, cannot become the best any more."""
        rows = [self.row(other) for other in self.asked if other != point]
        whole = [row.target for row in rows if row.target is not None]
        found = self.row(point).scored
        if not whole or not found:
            return False
        tops = {
            entry.name: max(
                self.goal.of(entry, row.scored[entry.name]).value
                for row in rows
                if entry.name in row.scored
            )
            for entry in self.goal.entries
        }
        leader = max(whole, key=lambda estimate: estimate.value)
        return cannot_win(self.goal, found, tops, leader)

    def target(self, point: Point) -> float:
        """The mean target score."""
        self._ask(point, self.goal.entries)
        found = self.row(point).target
        assert found is not None
        return found.value

    def better(self, point: Point) -> float:
        """The same, the larger the better; minus infinity for a point that was given up."""
        self._ask(point, self.goal.entries, self.request.early_stop)
        found = self.row(point).target
        if found is None:
            return float("-inf")
        return -found.value if self.goal.lower else found.value

    def kept(self, point: Point) -> float:
        """The mean control score."""
        assert self.control is not None
        self._ask(point, self.control.entries)
        found = self.row(point).control
        assert found is not None
        return found.value


def _search(
    request: Request, recipe: TunedRecipe, points: Sequence[float], scorer: Scorer
) -> Point:
    if scorer.control is not None:
        return _negation(request, points, scorer)

    def score(value: float) -> float:
        return scorer.better(Point(value))

    if request.search == "golden":
        step = min(b - a for a, b in itertools.pairwise(points))
        best = search.golden(points[0], points[-1], request.tolerance or step / 2, score)
    else:
        scorer.expect(len(points))
        best, _ = search.grid(points, score)
    if request.per_basis is None:
        return Point(best)
    if best == 0:
        LOG.warning("--per-basis: the best %s is 0, where no basis counts", recipe.key)
        return Point(best)
    scorer.expect(len(scorer.asked) + request.per_basis)
    weights = search.coordinates(
        recipe.num_bases,
        points[-1] / best if best > 0 else 2.0,
        request.per_basis,
        lambda factors: scorer.better(Point(best, factors)),
    )
    found = Point(best, weights)
    return found if scorer.better(found) > score(best) else Point(best)


def _negation(request: Request, points: Sequence[float], scorer: Scorer) -> Point:
    assert scorer.control is not None
    every = sorted({0.0, *points})
    scorer.expect(len(every))
    if scorer.kept(Point(0.0)) <= 0:
        names = ", ".join(entry.name for entry in scorer.control.entries)
        raise UserError(f"--control {names}: the score is 0 at alpha 0 already: nothing to keep")
    for value in every:
        scorer.target(Point(value))
        scorer.kept(Point(value))
    best = search.most_forgotten(
        points,
        lambda value: scorer.target(Point(value)),
        lambda value: scorer.kept(Point(value)),
        request.keep,
    )
    return Point(best)
