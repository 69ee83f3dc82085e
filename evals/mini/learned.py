#!/usr/bin/env python
"""What do merges that learn from data lose over bases, and what do they cost?

    python evals/mini/learned.py --preset small --seeds 0,1,2 --out mini-runs \\
        --report evals/mini/results --page evals/mini/RESULTS.md

The five methods of `tvb learn` over all task vectors and over M bases, beside task arithmetic with
lambda tuned on the same examples; and, for each that stays below addition, measured controls that
say why. Cells are computed one after another, in this process, and kept as those of compare.py;
models that are missing are trained.

A task has `--shots` validation items, of which M bases get M/T as `tvb learn` draws them. Nothing
is chosen on test items.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import cells
import click
import compare
import data
import score
import torch
import train
from matrices import LAMBDAS, QUICKSTART, Quickstart
from plan import HALF, PLANS, Cell, Plan, T, reference, settings
from report import write_study
from runs import Run, Weights, difference
from sheets import (
    Column,
    Record,
    Runs,
    Sheet,
    Spread,
    Value,
    dig,
    name,
    over,
    sheet,
    spread,
    value_of,
)
from transformers.utils import logging

import tvb_mergekit
from tvb_mergekit.learn import gradients
from tvb_mergekit.learn.batches import Batch, LossFunction, entropy, response_loss
from tvb_mergekit.learn.batches import runs as batched
from tvb_mergekit.learn.data import DataFile, Example, encode, read_data
from tvb_mergekit.learn.descent import Descent
from tvb_mergekit.learn.request import Request
from tvb_mergekit.learn.running import learn
from tvb_mergekit.plugin.document import from_mapping
from tvb_mergekit.tensors.sparse import Sparse
from tvb_mergekit.tune import search

TASKS = tuple(data.TASKS)
SHOTS = 64  # of the paper's experiments with language models
COUNTS = (HALF, 3)  # M; T/4 is 2.5
BASES = ("ae_adam_5", "balanced", "rand_select", "pca")
CONVEX = ("ae_adam_5", "balanced")
UNTUNED = 0.3  # where AdaMerging starts as published
FACTORS = tuple(10 * by for by in LAMBDAS if by <= 0.63)  # of a mean of T = 10
SCALES = tuple(by for by in LAMBDAS if by >= 0.25)  # of what is stitched
PARTS = ("methods", "controls", "quickstart")


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
# The same over a half of T, with all of the data; and with another mixture of it.
for _how in ("ta", *LEARNED):
    WAYS[f"{_how}_all"] = replace(
        WAYS[_how], options={"subsample": False}, bases=CONVEX[:1], counts=(HALF,), whole=False
    )
for _how in BY_MIXTURES:
    _bases = CONVEX if _how == "localize" else CONVEX[:1]
    WAYS[f"{_how}_equal"] = replace(
        WAYS[_how], options={"mixture": "equal"}, bases=_bases, counts=(HALF,), whole=False
    )
WAYS["localize_positive"] = replace(
    WAYS["localize"], options={"mixture": "positive"}, bases=("pca",), counts=(HALF,), whole=False
)


# ------------------------------------------------------------------------------------------- cells


def method_cells(plan: Plan, shots: int, seed: int) -> list[Cell]:
    """`seed`: of the training, and of what rand_select selects."""
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
    return cell | _defaults(way.method)


def _defaults(method: str) -> dict[str, Any]:
    """What a cell depends on, as it is set elsewhere."""
    schedule = gradients.SCHEDULES.get(method)
    told: dict[str, Any] = {"method": method}
    if schedule is not None:
        told["schedule"] = {key: str(value) for key, value in asdict(schedule).items()}
    return told | ({"lambdas": [*LAMBDAS]} if method in ("ta", "adamerging") else {})


def control_cells(plan: Plan, shots: int) -> list[Cell]:
    """Why some stay below addition, over all task vectors."""
    whole = {"basis": "none", "num_bases": T, "seed": 0, "shots": shots, "tested": plan.tested}
    few = whole | {"tested": max(1, plan.tested // 4)}  # after each epoch
    found: list[Cell] = [{"kind": "learned_fisher", "how": how} | whole | {"lambdas": [*LAMBDAS]}
                         for how in FISHERS]  # fmt: skip
    found += [{"kind": "learned_masks", "how": how} | whole | _defaults("localize")
              for how in MASKS]  # fmt: skip
    found += [{"kind": "learned_path", "how": how} | few | _defaults("adamerging")
              for how in PATHS]  # fmt: skip
    return found


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
        """The items that a share of the data is."""
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
    return cells._mean(score.ask(run.model, run.tokenizer, questions), run.tasks)


def tuned(
    run: Run, vector: Weights, docs: Sequence[data.Doc], grid: Sequence[float] = LAMBDAS
) -> tuple[float, list[float]]:
    """The best factor of what is added to the base on some items; the scores of all factors."""
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
    """The merged model, and what its learned.json says."""
    written = recipe(run, cell, by)
    learn(
        Request(
            document=from_mapping(written),
            out=str(out),
            method=cell["method"],
            data=given,
            **options,
        )
    )
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
            by, vector = _best(run, cell, docs)
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


def _best(run: Run, cell: Cell, docs: Sequence[data.Doc]) -> tuple[float, Weights]:
    """The best lambda of task arithmetic over the cell's bases, and what it multiplies."""
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


# ------------------------------------------------------------------- why Fisher is below addition

FISHERS = {
    "mean": "the mean of the models",
    "fisher": "Fisher",
    "each": "each task's F over its sum",
    "tensor": "the same, its mean over each tensor",
    "sampled": "labels drawn from the model, 4 times",
    "more": "four times the examples",
}


def measure_fisher(run: Run, cell: Cell) -> dict[str, Any]:
    """A weighted mean of the models: as it is, and at the best factor of its way from the base."""
    how, shots = cell["how"], cell["shots"]
    vectors = [run.task_vector(task) for task in run.tasks]
    with tempfile.TemporaryDirectory() as folder:
        files = Data(run, Path(folder), shots)
        facts: dict[str, Any] = {}
        if how == "mean":
            weights = [{title: torch.ones_like(t) for title, t in each.items()} for each in vectors]
        else:
            options = {"samples": 4} if how == "sampled" else {}
            used = Data(run, Path(folder), 4 * shots) if how == "more" else files
            out = Path(folder) / "out"
            learned(run, cell | {"method": "fisher"}, out, used.given, **options)
            weights = [_statistics(run, out, task) for task in run.tasks]
            totals = [sum(float(f.sum()) for f in each.values()) for each in weights]
            facts["largest"] = max(totals) / sum(totals)
            if how in ("each", "tensor"):
                weights = [{title: f / total for title, f in each.items()}
                           for each, total in zip(weights, totals, strict=True)]  # fmt: skip
            if how == "tensor":
                weights = [{title: f.mean().expand_as(f) for title, f in each.items()}
                           for each in weights]  # fmt: skip
        vector, facts["models"] = weighted_mean(vectors, weights)
        by, curve = tuned(run, vector, files.drawn(1.0), FACTORS)
    tested = run.tasks, cell["tested"]
    total = cells.total(run, run.tasks)
    return facts | {
        "length": len(run.tasks) * cells.norm(vector) / cells.norm(total),
        "factor": by,
        "curve": curve,
        "plain": run.accuracy(run.shifted((1.0, vector)), "test", *tested),
        "tuned": run.accuracy(run.shifted((by, vector)), "test", *tested),
    }


def _statistics(run: Run, out: Path, task: str) -> Weights:
    from safetensors.torch import load_file

    found = load_file(out / "basis" / "statistics" / f"{task}.safetensors")
    return {title: found[title].to(run.device) for title in run.base}


def weighted_mean(vectors: Sequence[Weights], weights: Sequence[Weights]) -> tuple[Weights, float]:
    """sum w_i tau_i / sum w_i in each entry, the mean where all w_i are 0; and how many models
    count in an entry, (sum w)^2 / sum w^2, on average over those where some w_i is not."""
    found, counted, entries = {}, 0.0, 0
    for title in vectors[0]:
        w = torch.stack([each[title] for each in weights]).double()
        tau = torch.stack([each[title] for each in vectors]).double()
        total = w.sum(0)
        some = total > 0
        mean = (w * tau).sum(0) / total.where(some, 1)
        found[title] = mean.where(some, tau.mean(0)).float()
        effective = (total.square() / w.square().sum(0).where(some, 1))[some]
        counted, entries = counted + float(effective.sum()), entries + int(some.sum())
    return found, counted / max(1, entries)


# -------------------------------------------------------------- what stitching costs, after masking

MASKS = {"localize": "learned, 5 %", "localize_dense": "learned, 20 %", "dataless": "dataless, 5 %"}


def measure_masks(run: Run, cell: Cell) -> dict[str, Any]:
    """Each masked task vector alone on its own task, and all of them together."""
    options = WAYS[cell["how"]].options
    tested = cell["tested"]
    with tempfile.TemporaryDirectory() as folder:
        files, out = Data(run, Path(folder), cell["shots"]), Path(folder) / "out"
        given = [] if options.get("dataless") else files.given
        stitched, _ = learned(run, cell | {"scale": "bases"}, out, given, **options)
        places = [out / "basis" / "learned" / f"basis-{k:03d}.safetensors" for k in range(T)]
        masked = []
        for place in places:
            sparse = Sparse.open(place)
            masked.append({title: sparse.tensor(title).to(run.device) for title in run.base})
        alone = {
            task: run.accuracy(run.shifted((1.0, vector)), "test", [task], tested)[task]
            for task, vector in zip(run.tasks, masked, strict=True)
        }
    docs = files.drawn(1.0)
    every = {title: torch.stack([vector[title] for vector in masked]) for title in run.base}
    counts = [(of != 0).sum(0) for of in every.values()]
    shared = sum(int(c[c > 1].sum()) for c in counts) / sum(int(c.sum()) for c in counts)
    total = {title: of.sum(0) for title, of in every.items()}
    found: dict[str, Any] = {"alone": alone, "shared": shared}
    mean = difference(stitched, run.base)
    for key, vector in {"mean": mean, "sum": total}.items():
        by, _ = tuned(run, vector, docs, SCALES)
        plain, best = (run.accuracy(run.shifted((k, vector)), "test", TASKS, tested)
                       for k in (1.0, by))  # fmt: skip
        found[key] = {"plain": plain, "factor": by, "tuned": best}
    return found


# --------------------------------------------------------- entropy and accuracy along AdaMerging


@dataclass(frozen=True)
class Descends:
    """Where coefficients of a layer start, and along what they fall.

    Attributes:
        start: None: at task arithmetic's best lambda.
        prompts: of the next token behind the prompt alone, else of all tokens of the right answer.
        labels: along the loss on the right answer, in the place of the entropy.
    """

    title: str
    start: float | None = None
    prompts: bool = True
    labels: bool = False


PATHS = {
    "prompts": Descends("entropy behind the prompt"),
    "untuned": Descends("the same, from 0.3", UNTUNED),
    "answers": Descends("entropy along the right answer", prompts=False),
    "labels": Descends("loss on the right answer", prompts=False, labels=True),
}


def measure_path(run: Run, cell: Cell) -> dict[str, Any]:
    """Entropies, loss and accuracy on test items after each epoch, none of which ends it."""
    path, seen = PATHS[cell["how"]], list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        files = Data(run, Path(folder), cell["shots"], path.prompts)
        look = Look(run, Path(folder), cell["tested"])
        by = path.start or _best(run, cell, files.drawn(1.0))[0]

        class Watched(Descent):
            def held_loss(self, examples: Sequence[Example]) -> float:
                found = super().held_loss(examples)
                with self.moving.sharp():
                    self.moving.set(self.parameters)
                seen.append(look(self.model))
                return found

        changed: dict[str, Any] = {"Descent": Watched}
        if path.labels:
            changed["entropy"] = response_loss
        with mock.patch.multiple(gradients, **changed):
            out = Path(folder) / "out"
            _, told = learned(run, cell, out, files.given, by, patience=10**6)
    history = told["history"][0]
    return {"start": by, "seen": seen, "held": history["held"], "best": history["best"]}


class Look:
    """What a model does on the first test items of each task."""

    def __init__(self, run: Run, folder: Path, tested: int) -> None:
        docs = [doc for task in run.tasks for doc in run.items(task, "test")[:tested]]
        self.run, self.questions = run, score.pack(run.tokenizer, docs, run.device)
        self.examples = {}
        for key, prompts in {"prompt": True, "answer": False}.items():
            place = folder / f"test-{key}"
            place.mkdir()
            files = Data(run, place, tested, prompts, "test").files
            self.examples[key] = [
                e for f in files for e in encode(f, run.tokenizer, 64, len(run.tokenizer))
            ]

    def __call__(self, model: Any) -> dict[str, float]:
        with torch.no_grad():
            found = score.ask(model, self.run.tokenizer, self.questions)
        return {
            "accuracy": cells._mean(found, self.run.tasks),
            "prompt": self._means(model, "prompt", entropy)[0],
            **dict(zip(("answer", "loss"), self._means(model, "answer", entropy, response_loss),
                       strict=True)),
        }  # fmt: skip

    @torch.no_grad()
    def _means(self, model: Any, key: str, *losses: LossFunction) -> list[float]:
        totals, examples = [0.0] * len(losses), sorted(self.examples[key], key=lambda e: len(e.ids))
        for some in batched(examples, 64):
            batch = Batch.of(some, torch.device(self.run.device))
            logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
            totals = [
                t + float(loss(logits, batch)) for t, loss in zip(totals, losses, strict=True)
            ]
        return [total / len(examples) for total in totals]


# ------------------------------------------------------------------------------------------ tables


def rows_of(runs: Runs) -> dict[str, dict[str, Any]]:
    """Title -> the bases, in the order of the tables."""
    found = {name("none"): {"basis": "none", "num_bases": T}}
    for m in COUNTS:
        found |= {f"{name(b)}, M = {m}": {"basis": b, "num_bases": m} for b in BASES}
    return found


def found_of(runs: Runs, how: str, value: Value, **of: Any) -> Spread | None:
    return spread(map(value, runs.find("learned", how=how, **of)))


def by_bases(runs: Runs, caption: str, columns: Mapping[str, str], value: Value) -> list[Sheet]:
    """A row for each basis and M, a column (title -> way) for each method."""
    rows = {
        row: [found_of(runs, how, value, **of) for how in columns.values()]
        for row, of in rows_of(runs).items()
    }
    shown = {title: Column(value) for title in columns}
    return sheet(runs, caption, "learned", shown, rows, corner="bases")


def methods(runs: Runs) -> list[Sheet]:
    columns = {TITLES.get(how, WAYS[how].title): how for how in MAIN}
    caption = "Merges that learn, and addition, from M/T of the examples: normalized accuracy"
    return by_bases(runs, caption, columns, runs.normal("test"))


TITLES = {"localize": "L&S, 5 %", "dataless": "L&S, 5 %, dataless", "localize_dense": "L&S, 20 %",
          "dataless_dense": "L&S, 20 %, dataless",
          "localize_tasks": "L&S, 5 %, bases times T/M"}  # fmt: skip


def kept(runs: Runs) -> list[Sheet]:
    """What bases keep of the same method over all task vectors."""

    def share(how: str) -> Value:
        value = runs.normal("test")
        whole = {r["train_seed"]: value(r) for r in runs.find("learned", how=how, basis="none")}

        def of(record: Record) -> float | None:
            own, best = value(record), whole.get(record["train_seed"])
            return own / best if own is not None and best else None

        return of

    columns = {TITLES.get(how, WAYS[how].title): how for how in MAIN}
    rows = {
        row: [found_of(runs, how, share(how), **of) for how in columns.values()]
        for row, of in rows_of(runs).items()
        if of["basis"] != "none"
    }
    shown = {title: Column(runs.normal("test")) for title in columns}
    caption = "Accuracy over that of the same method over all task vectors"
    return sheet(runs, caption, "learned", shown, rows, corner="bases")


def cost(runs: Runs) -> list[Sheet]:
    """Passes and seconds of each method over all, and over bases with M/T of the data."""
    columns = {"forward": ".0f", "backward": ".0f", "seconds": ".0f"}
    values = [value_of("passes", "forward"), value_of("passes", "backward"), value_of("seconds")]
    sizes = {"all": ("none", T)} | {f"M = {m}": ("ae_adam_5", m) for m in COUNTS}
    shown = {f"{size}: {title}": Column(values[0], form, sd=False)
             for size in sizes for title, form in columns.items()}  # fmt: skip
    ratios = {m: f"passes, M = {m} over all" for m in COUNTS}
    shown |= {title: Column(values[0], ".2f") for title in ratios.values()}
    rows = {}
    for how in ("ta", *LEARNED):
        cells_ = [found_of(runs, how, value, basis=basis, num_bases=m)
                  for basis, m in sizes.values() for value in values]  # fmt: skip
        whole = {r["train_seed"]: passes(r) for r in runs.find("learned", how=how, basis="none")}

        def ratio(record: Record, whole: Mapping[int, float | None] = whole) -> float | None:
            own, every = passes(record), whole.get(record["train_seed"])
            return own / every if own is not None and every else None

        cells_ += [found_of(runs, how, ratio, basis="ae_adam_5", num_bases=m) for m in ratios]
        rows[WAYS[how].title] = cells_
    caption = "Passes of one example and seconds of learning, over all and over `ae` at t = 5"
    return sheet(runs, caption, "learned", shown, rows)


def passes(record: Record) -> float | None:
    both = [dig(record, "result", "passes", kind) for kind in ("forward", "backward")]
    return sum(both) if None not in both else None


def sparse(runs: Runs) -> list[Sheet]:
    ways = ("localize", "dataless", "localize_dense", "dataless_dense", "localize_tasks")
    caption = "Localize-and-Stitch, by the share of entries that a basis keeps: normalized accuracy"
    return by_bases(runs, caption, {TITLES[how]: how for how in ways}, runs.normal("test"))


def amounts(runs: Runs) -> list[Sheet]:
    """M/T of the data against all of it, at M = T/2."""
    value = runs.normal("test")
    of = {"basis": CONVEX[0], "num_bases": HALF}
    rows = {}
    for how in ("ta", *LEARNED):
        both = [found_of(runs, way, value, **of) for way in (how, f"{how}_all")]
        work = [found_of(runs, way, passes, **of) for way in (how, f"{how}_all")]
        rows[WAYS[how].title] = both + work
    shown = {title: Column(value) for title in ("M/T of the data", "all")}
    shown |= {f"passes, {title}": Column(passes, ".0f", sd=False) for title in shown}
    caption = f"Over {HALF} bases of `ae` at t = 5, M/T of the data or all: normalized accuracy"
    return sheet(runs, caption, "learned", shown, rows)


def mixtures(runs: Runs) -> list[Sheet]:
    shown = {f"{name(b)}: {title}": Column(runs.normal("test"))
             for b in CONVEX for title in ("encoder", "equal")}  # fmt: skip
    shown |= {f"pca: {title}": Column(runs.normal("test")) for title in ("equal", "positive")}
    rows = {}
    for how in BY_MIXTURES:
        wanted = [(b, way) for b in CONVEX for way in (how, f"{how}_equal")]
        wanted += [("pca", how), ("pca", f"{how}_positive")]
        rows[WAYS[how].title] = [
            found_of(runs, way, runs.normal("test"), basis=b, num_bases=HALF) for b, way in wanted
        ]
    caption = f"Which tasks a basis learns from, at M = {HALF}: normalized accuracy"
    return sheet(runs, caption, "learned", shown, rows)


def fishers(runs: Runs, absolute: bool = False) -> list[Sheet]:
    """`absolute`: the accuracy itself, of tasks that are not the ten."""

    def score_of(key: str) -> Value:
        def value(record: Record) -> float | None:
            found = dig(record, "result", key)
            return over(found, found)

        return value if absolute else runs.normal(key)

    values = {
        "as it is": Column(score_of("plain")),
        "best factor": Column(value_of("factor"), ".1f"),
        "at that": Column(score_of("tuned")),
        "length": Column(value_of("length"), ".2f"),
        "models that count": Column(value_of("models"), ".1f"),
        "largest share of F": Column(value_of("largest"), ".2f"),
    }
    rows = {
        title: [spread(map(c.value, runs.find("learned_fisher", how=how))) for c in values.values()]
        for how, title in FISHERS.items()
    }
    caption = "Weighted means of all models: "
    caption += "mean accuracy on eight tasks" if absolute else "normalized accuracy"
    return sheet(runs, caption, "learned_fisher", values, rows, corner="weights")


def masks(runs: Runs) -> list[Sheet]:
    values = {
        "alone": Column(runs.normal("alone")),
        "entries in several masks": Column(value_of("shared")),
        "stitched": Column(runs.normal("mean", "plain")),
        "times the best factor": Column(runs.normal("mean", "tuned")),
        "factor": Column(value_of("mean", "factor"), ".2f"),
        "summed": Column(runs.normal("sum", "plain")),
        "sum times the best factor": Column(runs.normal("sum", "tuned")),
        "its factor": Column(value_of("sum", "factor"), ".2f"),
    }
    rows = {
        title: [spread(map(c.value, runs.find("learned_masks", how=how))) for c in values.values()]
        for how, title in MASKS.items()
    }
    caption = "Masked task vectors, alone on their own task and all together: normalized accuracy"
    return sheet(runs, caption, "learned_masks", values, rows, corner="masks")


def paths(runs: Runs) -> list[Sheet]:
    """At the start, at the epoch that the held-out objective likes best, and after the last."""
    whens = ("start", "kept", "last")
    kinds = {"accuracy": ("accuracy", whens), "prompt": ("entropy behind the prompt", whens[::2]),
             "answer": ("entropy along the answer", whens[::2]),
             "loss": ("loss on the answer", whens[::2])}  # fmt: skip

    def at(key: str, when: str) -> Value:
        def value(record: Record) -> float | None:
            result = record["result"]
            place = {"start": 0, "kept": result["best"], "last": -1}[when]
            found: float = result["seen"][place][key]
            return found

        return value

    columns = {"from": Column(value_of("start"), ".2f", sd=False)}
    for key, (title, some) in kinds.items():
        columns |= {f"{title}, {when}": Column(at(key, when), sd=False) for when in some}
    rows = {
        path.title: [
            spread(map(c.value, runs.find("learned_path", how=how))) for c in columns.values()
        ]
        for how, path in PATHS.items()
    }
    caption = "Coefficients of all task vectors, one for each layer, by what they fall along"
    return sheet(runs, caption, "learned_path", columns, rows, corner="falls along")


def sheets(records: Sequence[Record], preset: str) -> dict[str, list[Sheet]]:
    runs = Runs(records, preset, "full")
    made = {"methods": methods, "kept": kept, "cost": cost, "sparse": sparse, "amounts": amounts,
            "mixtures": mixtures, "fishers": fishers, "masks": masks, "paths": paths}  # fmt: skip
    shipped = Runs(records, "quickstart", "full")
    others = {"quickstart": fishers(shipped, absolute=True) + paths(shipped)}
    return {title: make(runs) for title, make in made.items()} | others


def write(records: Sequence[Record], preset: str, folder: Path, page: Path | None) -> list[Path]:
    """learned.json into FOLDER, and the tables that PAGE marks into PAGE."""
    return write_study("learned", records, sheets(records, preset), {}, folder, page)


# ----------------------------------------------------------------------------------------- command


def quickstart_records(out: Path, device: str, shots: int, as_is: bool) -> list[Record]:
    """The controls of Fisher and of AdaMerging that tell most, over the eight shipped models."""
    whole = {"basis": "none", "num_bases": 8, "seed": 0, "shots": shots, "tested": 200}
    wanted = [{"kind": "learned_fisher", "how": how} | whole | {"lambdas": [*LAMBDAS]}
              for how in ("mean", "fisher", "each")]  # fmt: skip
    few = whole | {"tested": 50} | _defaults("adamerging")
    wanted += [{"kind": "learned_path", "how": how} | few
               for how in ("prompts", "answers", "labels")]  # fmt: skip
    folder, about = QUICKSTART / "models", {"preset": "quickstart", "method": "full"}
    models = compare.fingerprint(folder, "", [p.name for p in sorted(folder.iterdir())])
    works = []
    for cell in wanted:
        work = compare.work_of(folder, "", device, models, cell)
        works.append(replace(work, file=out / "quickstart" / "cells" / work.file.name))
    if not as_is and not all(work.file.exists() for work in works):
        compare.take(Quickstart(device), "")
    found = compare.serially(works, "quickstart", as_is)
    return [about | {"train_seed": 0} | record for record in found]


cells.KINDS |= {"learned": measure, "learned_fisher": measure_fisher,
                "learned_masks": measure_masks, "learned_path": measure_path}  # fmt: skip


def records_of(
    preset: str, seed: int, out: Path, device: str, parts: Sequence[str], shots: int,
    as_is: bool,
) -> list[Record]:  # fmt: skip
    """What is there of a seed, after what is missing was measured."""
    folder = train.run_folder(out, preset, seed)
    if not as_is:
        train.train_run(preset, "full", seed, out, device)
    models, plan = compare.fingerprint(folder, "full"), PLANS[preset]
    wanted = [reference(plan)[0]]
    wanted += method_cells(plan, shots, seed) if "methods" in parts else []
    wanted += control_cells(plan, shots) if "controls" in parts else []
    works = [compare.work_of(folder, "full", device, models, cell) for cell in wanted]
    found = compare.serially(works, folder.name, as_is)
    return [{"preset": preset, "method": "full", "train_seed": seed} | each for each in found]


@click.command(epilog="Example: python evals/mini/learned.py --preset tiny --seeds 0")
@compare.study_options
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS,
              help="Only this; may be repeated. By default all.")  # fmt: skip
@click.option("--shots", type=click.IntRange(2), default=SHOTS, show_default=True,
              help="Validation items of a task.")  # fmt: skip
def main(
    preset: str,
    seeds: list[int],
    parts: tuple[str, ...],
    shots: int,
    out: Path,
    device: str,
    folder: Path | None,
    as_is: bool,
    page: Path | None,
) -> None:
    """Measure merges that learn from data, over all task vectors and over bases, and report it."""
    logging.disable_progress_bar()
    on, records = train.chosen_device(device), list[Record]()
    for seed in seeds:
        records += records_of(preset, seed, out, on, parts, shots, as_is)
    if "quickstart" in parts:
        records += quickstart_records(out, on, shots, as_is)
    if not records:
        raise click.ClickException(f"{out} has no results of {preset}: leave out --as-is")
    for path in write(records, preset, folder or out / f"report-{preset}", page):
        click.echo(path)


if __name__ == "__main__":
    main()
