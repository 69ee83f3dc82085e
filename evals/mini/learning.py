"""Merges that learn from data, over all task vectors and over bases: their cells.

A task has `shots` validation items. M bases get M/T of them, as `tvb learn` draws them. Nothing is
chosen on test items.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import cells
import data
import score
import torch
from merges import LAMBDAS
from plan import HALF, Cell, Plan, T, settings
from runs import Quickstart, Run, Weights, difference

import tvb_mergekit
from tvb_mergekit.learn import gradients
from tvb_mergekit.learn.data import DataFile, read_data
from tvb_mergekit.learn.request import Request
from tvb_mergekit.learn.running import learn
from tvb_mergekit.plugin.document import from_mapping
from tvb_mergekit.tune import search

TASKS = tuple(data.TASKS)
SHOTS = 64  # of the paper's experiments with language models
COUNTS = (HALF, 3)  # M; T/4 is 2.5
BASES = ("ae_adam_5", "balanced", "rand_select", "pca")
CONVEX = ("ae_adam_5", "balanced")
UNTUNED = 0.3  # where AdaMerging starts as published


@dataclass(frozen=True)
class Way:
    """A method with its options.

    Attributes:
        method: of `tvb learn`, or `ta`.
        options: of the request.
        scale: the recipe's `lambda_scale`.
        bases: over which it is measured, beside all task vectors; at `counts`.
    """

    title: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    scale: str = "tasks"
    bases: tuple[str, ...] = BASES
    counts: tuple[int, ...] = COUNTS
    whole: bool = True  # over all task vectors, too


DENSE = {"density": 0.2}
WAYS = {
    "ta": Way("task arithmetic", "ta"),
    "fisher": Way("Fisher", "fisher"),
    "normalized": Way("Fisher, normalized", "fisher", {"normalize": True}),
    "regmean": Way("RegMean", "regmean"),
    "localize": Way("Localize-and-Stitch", "localize", scale="bases"),
    "dataless": Way("dataless", "localize", {"dataless": True}, "bases"),
    "adamerging": Way("AdaMerging", "adamerging"),
    "atlas": Way("aTLAS", "atlas"),
    "localize_dense": Way("learned, 20 %", "localize", DENSE, "bases", CONVEX, (HALF,)),
    "dataless_dense": Way(
        "dataless, 20 %", "localize", DENSE | {"dataless": True}, "bases", CONVEX, (HALF,)
    ),
    "localize_tasks": Way("bases times T/M", "localize", {}, "tasks", CONVEX, (HALF,), False),
}
MAIN = ("ta", "fisher", "normalized", "regmean", "localize", "dataless", "adamerging", "atlas")
LEARNED = tuple(how for how in MAIN if how not in ("ta", "normalized", "dataless"))
BY_MIXTURES = ("fisher", "regmean", "localize")


def _half(how: str, bases: tuple[str, ...] = CONVEX[:1], **options: Any) -> Way:
    return replace(WAYS[how], options=options, bases=bases, counts=(HALF,), whole=False)


# Over T/2 bases alone: with all of the data, and with other mixtures of it.
WAYS |= {f"{how}_all": _half(how, subsample=False) for how in ("ta", *LEARNED)}
WAYS |= {f"{how}_equal": _half(how, mixture="equal") for how in BY_MIXTURES[:2]}
WAYS["localize_equal"] = _half("localize", CONVEX, mixture="equal")
WAYS["localize_positive"] = _half("localize", ("pca",), mixture="positive")


# ------------------------------------------------------------------------------------------- cells


def method_cells(plan: Plan, shots: int, seed: int) -> list[Cell]:
    """All cells of a training seed, which is also the seed of rand_select."""
    found = []
    for how, way in WAYS.items():
        every = [("none", T)] * way.whole
        every += [(label, m) for m in way.counts for label in way.bases]
        for label, m in every:
            found.append(_cell(plan, shots, how, label, m, seed * (label == "rand_select")))
    return found


def _cell(plan: Plan, shots: int, how: str, label: str, count: int, seed: int = 0) -> Cell:
    way = WAYS[how]
    options = dict(way.options)
    if label == "pca" and way.method in BY_MIXTURES and "dataless" not in options:
        options.setdefault("mixture", "equal")  # its encoder has negative weights
    cell = {"kind": "learned", "how": how, "basis": label, "num_bases": count, "seed": seed}
    cell |= {"shots": shots, "tested": plan.tested, "scale": way.scale, "options": options}
    return cell | defaults(way.method)


def defaults(method: str) -> dict[str, Any]:
    """Settings of a method that are defined elsewhere, and that a cell depends on."""
    schedule = gradients.SCHEDULES.get(method)
    told: dict[str, Any] = {"method": method}
    if schedule is not None:
        told["schedule"] = {key: str(value) for key, value in asdict(schedule).items()}
    return told | ({"lambdas": [*LAMBDAS]} if method in ("ta", "adamerging") else {})


class Data:
    """The files of examples of a cell, and the same as questions.

    Args:
        prompts: without the answers.
    """

    def __init__(
        self, run: Run, folder: Path, shots: int, prompts: bool = False, split: str = "validation"
    ) -> None:
        self.docs = {task: run.items(task, split)[:shots] for task in run.tasks}
        self.given = []
        for task, docs in self.docs.items():
            file = folder / f"{task}.jsonl"
            lines = (json.dumps(_example(run, doc, prompts)) + "\n" for doc in docs)
            file.write_text("".join(lines))
            self.given.append(f"{task}={file}")
        self.files: list[DataFile] = read_data(self.given, run.tasks, prompts)

    def drawn(self, share: float) -> list[data.Doc]:
        """The items in a share of the data."""
        return [self.docs[f.task][k] for f in self.files for k in f.drawn(share, seed=0)]


def _example(run: Run, doc: data.Doc, prompts: bool) -> dict[str, str]:
    prompt, quickstart = {"prompt": doc["prompt"]}, isinstance(run, Quickstart)
    response = doc["answer"] if quickstart else f" {doc['answer']} <eos>"
    return prompt if prompts else prompt | {"response": response}


def asked(run: Run, weights: Mapping[str, torch.Tensor], questions: score.Questions) -> float:
    """The mean over tasks of the share of right answers."""
    with torch.no_grad():
        for title, parameter in run.model.named_parameters():
            parameter.copy_(weights[title])
    return cells.mean_score(score.ask(run.model, run.tokenizer, questions), run.tasks)


def tuned(
    run: Run, vector: Weights, docs: Sequence[data.Doc], grid: Sequence[float] = LAMBDAS
) -> tuple[float, list[float]]:
    """The best factor of a vector on some items; the scores of all factors."""
    questions = score.pack(run.tokenizer, docs, run.device)
    return search.grid(grid, lambda by: asked(run, run.shifted((by, vector)), questions))


def recipe(run: Run, cell: Cell, by: float) -> dict[str, Any]:
    label = cell["basis"]
    folder = run.folder if isinstance(run, Quickstart) else run.folder / "full"
    size = {} if label == "none" else {"num_bases": cell["num_bases"], "seed": cell["seed"]}
    scale = {"lambda": by, "lambda_scale": cell.get("scale", "tasks")}
    return {
        "merge_method": "basis_ta",
        "base_model": str((run.folder / "base").resolve()),
        "models": [{"model": str((folder / task).resolve())} for task in run.tasks],
        "parameters": settings(label) | size | scale,
        "dtype": "float32",
    }


def learned(
    run: Run, cell: Cell, out: Path, given: Sequence[str], by: float = UNTUNED, **options: Any
) -> tuple[Weights, dict[str, Any]]:
    """The merged model, and its learned.json."""
    written = recipe(run, cell, by)
    learn(
        Request(document=from_mapping(written), out=str(out),
                method=cell["method"], data=given, **options)
    )  # fmt: skip
    model = score.load(out).to(run.device)
    weights = {title: tensor.detach() for title, tensor in model.named_parameters()}
    return weights, json.loads((out / "basis" / "learned.json").read_text())


def measure(run: Run, cell: Cell) -> dict[str, Any]:
    """One method over some bases."""
    options, tested = cell["options"], (TASKS, cell["tested"])
    share = cell["num_bases"] / len(run.tasks) if options.get("subsample", True) else 1.0
    with tempfile.TemporaryDirectory() as folder:
        method = cell["method"]
        files = Data(run, Path(folder), cell["shots"], method == "adamerging")
        docs, by = files.drawn(share), UNTUNED
        if method in ("ta", "adamerging"):
            by, vector = best_of(run, cell, docs)
        if method == "ta":
            count = len(LAMBDAS) * len(docs)
            found = {"passes": {"forward": count, "backward": 0}}
            weights = run.shifted((by, vector))
        else:
            given = [] if options.get("dataless") else files.given
            out = Path(folder) / "out"
            weights, told = learned(run, cell, out, given, by, **options)
            found = {key: told[key] for key in ("passes", "seconds")} | _history(told)
        test = run.accuracy(weights, "test", *tested)
    return {"items": len(docs), "lambda": by, "test": test, **found}


def best_of(run: Run, cell: Cell, docs: Sequence[data.Doc]) -> tuple[float, Weights]:
    """The best lambda of task arithmetic over the cell's bases, and its vector."""
    about = {"basis": cell["basis"], "num_bases": cell["num_bases"], "seed": cell["seed"]}
    moved = tvb_mergekit.merge(cells.built(run, about), run.base, "basis_ta", lambda_=1.0,
                               lambda_scale="tasks", dtype=torch.float32)  # fmt: skip
    vector = difference(moved, run.base)
    key = run.folder, json.dumps(about), json.dumps(docs)
    if key not in _found:
        _found[key] = tuned(run, vector, docs)[0]
    return _found[key], vector


_found: dict[tuple[Path, str, str], float] = {}


def _history(told: Mapping[str, Any]) -> dict[str, Any]:
    every = [h for h in told.get("history", []) if h["held"]]
    if not every:
        return {}
    lengths = [h["best"] for h in every]
    return {
        "start": told.get("start"),
        "epochs": sum(lengths) / len(lengths),
        "held": [sum(h["held"][k] for h in every) / len(every) for k in (0,)]
        + [sum(h["held"][h["best"]] for h in every) / len(every)],
    }
