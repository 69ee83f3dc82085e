"""`tvb tune` in order: what can be wrong first, then the search, then the files."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tvb_mergekit import __version__
from tvb_mergekit.atomic import write_file
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.progress import Bar
from tvb_mergekit.score.results import read_results
from tvb_mergekit.store.store import lock
from tvb_mergekit.tensors.layout import MEMORY
from tvb_mergekit.tensors.output import check_disk, check_output_folder
from tvb_mergekit.tune import harness, search
from tvb_mergekit.tune.harness import Choice, Entry, LmEval, Scored
from tvb_mergekit.tune.merges import TunedRecipe, read_tuned, stamps
from tvb_mergekit.tune.model import Model, check_memory
from tvb_mergekit.tune.objective import Estimate, Objective, objective
from tvb_mergekit.tune.record import POINTS, Record

LOG = logging.getLogger(__name__)
DISK = 5  # merged models of 16 bits: the first, and start and direction in float32
DECIDING = ("device", "batch_size", "model_args", "chat_template")  # of lm-eval's options
WORK = ".work"  # below OUT: the merged model that is loaded, and the line
WRITTEN = "written.json"  # below OUT: what --write's folder was given
BATCH = re.compile(r"[1-9][0-9]*|auto(:[1-9][0-9]*)?")  # what lm-eval takes


@dataclass(frozen=True, kw_only=True)
class Request(LmEval):
    """What a user asks for; see `tvb tune --help`."""

    recipe: str
    tasks: Sequence[str]
    out: Path
    grid: str = "0:1:0.05"
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
    points = search.grid_points(request.grid)
    for mistake in _mistakes(request, recipe, points):
        raise UserError(mistake)
    recipe.check(points)
    if request.write is not None and _written(request.out, request.write) is None:
        check_output_folder(request.write)
    share = recipe.share if request.subsample else 1.0
    choice = Choice(request.limit, share, request.test_share, request.seed)
    size = recipe.output_bytes()
    check_memory(size, request.device)
    check_disk(request.out, (DISK if recipe.linear else 1) * size)
    goals = _objectives(request, choice)
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
    rows = [scorer.row(point) for point in scorer.asked]
    return Tuned(request, recipe, goals, choice, scorer.row(best), rows, notes, facts)


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
            f"--write {request.write} holds the model of {key} {held:g}, found before; delete it "
            f"or name another folder: the same command then merges {key} {point:g} at once"
        )
    tuned.recipe.write(point, request.write, request.quiet)
    facts = {"point": point, **_place(request.write)}
    write_file(request.out / WRITTEN, (json.dumps(facts) + "\n").encode())
    return f"Merged into {request.write}"


def _written(out: Path, folder: str) -> float | None:
    """The point whose model this tuning wrote into a folder, where the files are still those."""
    try:
        facts = json.loads((out / WRITTEN).read_text(encoding="utf-8"))
        point = float(facts.pop("point"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return point if facts == _place(folder) else None


def _place(folder: str) -> dict[str, Any]:
    return {"folder": os.path.realpath(folder), "files": stamps(Path(folder))}


def _mistakes(request: Request, recipe: TunedRecipe, points: Sequence[float]) -> Iterator[str]:
    """All that can be wrong without lm-eval's or the models' help."""
    golden = request.search == "golden"
    if recipe.key == "alpha":
        if not request.controls:
            yield (
                "basis_negate needs --control TASK: what must not be forgotten, or the largest "
                "alpha would be the best"
            )
        if golden:
            yield "basis_negate is tuned on a grid: leave out --search"
        if request.reference is not None:
            yield "--reference goes with addition: leave it out"
    elif request.controls:
        yield f"--control goes with basis_negate, and the recipe's is {recipe.method}"
    if not request.tasks:
        yield "--tasks names none: give tasks or groups of lm-eval, as in --tasks copa,rte"
    for option, share in (("--keep", request.keep), ("--test-share", request.test_share)):
        if not 0 < share <= 1:
            yield f"{option} is {share:g}: expected a number in (0, 1]"
    limit, tolerance = request.limit, request.tolerance
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit.is_integer())):
        yield f"--limit is {limit:g}: a number of items, or a share below 1"
    if not BATCH.fullmatch(request.batch_size):
        yield f"--batch-size is {request.batch_size}: expected a positive number, auto or auto:N"
    if golden and len(points) < 2:
        yield "--search golden needs a --grid with two ends"
    if tolerance is not None and not golden:
        yield "--tolerance goes with --search golden"
    if tolerance is not None and not tolerance > 0:
        yield f"--tolerance is {tolerance:g}: expected a positive number"
    out, write = request.out, request.write
    if out.exists() and not out.is_dir():
        yield f"--out {out} is a file; name a folder"
    if out.is_dir() and not (out / POINTS).exists():
        if others := sorted({*os.listdir(out)} - {WORK}):
            yield f"--out {out} holds other files ({others[0]}): name another folder"
    if write is not None and Path(write).resolve() in (out.resolve(), *out.resolve().parents):
        yield f"--write {write}: --out {out} lies there; name another folder"


def _objectives(request: Request, choice: Choice) -> dict[str, Objective]:
    reference = None if request.reference is None else read_results(request.reference)
    metrics = _by_task(request.metrics, "--metric")
    controls = _by_task(request.controls, "--control")
    manager = harness.manager(request.include_path, request.metadata)
    targets = harness.load_entries(manager, request.tasks, metrics, choice, request)
    goals = {"target": objective(targets, reference, str(request.reference))}
    if not controls:
        return goals
    _check_rising(targets, "what is to be forgotten")
    given = {name: found for name, found in controls.items() if found}
    kept = harness.load_entries(manager, list(controls), given, choice, request, "--control")
    if both := {entry.name for entry in targets} & {entry.name for entry in kept}:
        raise UserError(f"{min(both)} is both to be forgotten and --control")
    goals["control"] = objective(kept)
    _check_rising(kept, "--control")
    return goals


def _check_rising(entries: Sequence[Entry], what: str) -> None:
    first = entries[0]
    if first.lower:
        raise UserError(
            f"{first.metrics[0]} of {first.name} is better when it is lower: {what} needs a score "
            "that rises"
        )


def _by_task(texts: Sequence[str], option: str) -> dict[str, list[str]]:
    """The metrics of each task in TASK:METRIC; a control may name none."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, _, metric = text.partition(":")
        if not name or (option == "--metric" and not metric):
            raise UserError(f"{option} {text}: expected TASK:METRIC, as in gsm8k:exact_match,none")
        found.setdefault(name, []).extend([metric] if metric else [])
    return found


class Scorer:
    """Scores of points, each asked of the record before the model.

    Attributes:
        asked: the points, in the order in which they were first asked for.
    """

    def __init__(
        self, goals: Mapping[str, Objective], record: Record, model: Model, bar: Bar, chat: bool
    ) -> None:
        self.goals, self.record, self.model, self.bar, self.chat = goals, record, model, bar, chat
        self.asked: list[float] = []
        self._done: set[tuple[float, str]] = set()

    def mean(self, role: str, point: float) -> Estimate:
        """The mean target or control score of a point."""
        if point not in self.asked:
            self.asked.append(point)
        lm, found = None, {}
        for entry in self.goals[role].entries:
            scored = self.record.get(point, entry.name)
            if scored is None:
                self.bar.set_postfix_str(f"{point:g}: {entry.name}")
                lm = lm or self.model.at(point)
                scored = harness.score(lm, entry, self.chat)
                self.record.add(point, entry.name, scored)
            found[entry.name] = scored
            self._done.add((point, entry.name))
            self.bar.update(len(self._done) - self.bar.n)
        return self.goals[role].mean(found)

    def row(self, point: float) -> Row:
        """All that is known of a point that was asked for."""
        means = {role: self.mean(role, point) for role in self.goals}
        names = [entry.name for goal in self.goals.values() for entry in goal.entries]
        found = {name: s for name in names if (s := self.record.get(point, name)) is not None}
        return Row(point, found, means["target"], means.get("control"))


def _search(request: Request, points: Sequence[float], scorer: Scorer) -> float:
    """The best point."""
    goals = scorer.goals
    tasks = sum(len(goal.entries) for goal in goals.values())

    def target(point: float) -> float:
        return scorer.mean("target", point).value

    def control(point: float) -> float:
        return scorer.mean("control", point).value

    def score(point: float) -> float:
        return -target(point) if goals["target"].lower else target(point)

    if "control" in goals:
        every = sorted({0.0, *points})
        scorer.bar.reset(len(every) * tasks)
        if control(0.0) <= 0:
            names = ", ".join(entry.name for entry in goals["control"].entries)
            raise UserError(
                f"--control {names}: the score is 0 at alpha 0 already: nothing to keep"
            )
        for point in every:
            target(point)
            control(point)
        return search.most_forgotten(points, target, control, request.keep)
    if request.search == "golden":
        step = min(b - a for a, b in itertools.pairwise(points))
        return search.golden(points[0], points[-1], request.tolerance or step / 2, score)
    scorer.bar.reset(len(points) * tasks)
    best, _ = search.grid(points, score)
    return best
