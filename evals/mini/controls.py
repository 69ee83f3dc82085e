"""Controls of merges that learn: measurements that explain each method below addition."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import cells
import score
import torch
from learning import TASKS, UNTUNED, WAYS, Data, best_of, defaults, learned, tuned
from merges import LAMBDAS
from plan import Cell, Plan, T
from runs import Run, Weights, difference
from safetensors.torch import load_file

from tvb_mergekit.learn import gradients
from tvb_mergekit.learn.batches import Batch, LossFunction, entropy, response_loss
from tvb_mergekit.learn.batches import runs as batched
from tvb_mergekit.learn.data import Example, encode
from tvb_mergekit.learn.descent import Descent
from tvb_mergekit.tensors.sparse import Sparse

FACTORS = tuple(10 * by for by in LAMBDAS if by <= 0.63)  # of a mean of T = 10
SCALES = tuple(by for by in LAMBDAS if by >= 0.25)  # of stitched vectors
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
    found = load_file(out / "basis" / "statistics" / f"{task}.safetensors")
    return {title: found[title].to(run.device) for title in run.base}


def weighted_mean(vectors: Sequence[Weights], weights: Sequence[Weights]) -> tuple[Weights, float]:
    """sum w_i tau_i / sum w_i in each entry, the mean if all w_i are 0. And (sum w)^2 / sum w^2,
    the number of models that count, on average over the entries with a weight."""
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
    """The start of coefficients, and the objective along which they fall.

    Attributes:

        start: None: task arithmetic's best lambda.
        prompts: use the token after the prompt; else all tokens of the right answer.
        labels: use the loss on the right answer instead of the entropy.
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
    """Entropies, loss and accuracy on test items after each epoch, without early stopping."""
    path, seen = PATHS[cell["how"]], list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        files = Data(run, Path(folder), cell["shots"], path.prompts)
        look = Look(run, Path(folder), cell["tested"])
        by = path.start or best_of(run, cell, files.drawn(1.0))[0]

        class Watched(Descent):
            def held_loss(self, examples: Sequence[Example]) -> float:
                found = super().held_loss(examples)
                self.moving.set(self.parameters, self.moving.merged())
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
    """The behaviour of a model on the first test items of each task."""

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
            "accuracy": cells.mean_score(found, self.run.tasks),
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


def control_cells(plan: Plan, shots: int) -> list[Cell]:
    """Controls over all task vectors."""
    whole = {"basis": "none", "num_bases": T, "seed": 0, "shots": shots, "tested": plan.tested}
    few = whole | {"tested": max(1, plan.tested // 4)}  # after each epoch
    found: list[Cell] = [{"kind": "learned_fisher", "how": how} | whole | {"lambdas": [*LAMBDAS]}
                         for how in FISHERS]  # fmt: skip
    found += [{"kind": "learned_masks", "how": how} | whole | defaults("localize")
              for how in MASKS]  # fmt: skip
    found += [{"kind": "learned_path", "how": how} | few | defaults("adamerging")
              for how in PATHS]  # fmt: skip
    return found


KINDS = {
    "learned_fisher": measure_fisher,
    "learned_masks": measure_masks,
    "learned_path": measure_path,
}
