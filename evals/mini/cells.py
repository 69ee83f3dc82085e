"""The cells of the comparison: references, addition, negation and tasks that arrive one by one.

Bases are built, grown and merged by the library, as a user would. A coefficient only multiplies
what a merge adds to the base. So one merge with coefficient 1 gives the direction of the search.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import data
import torch
from model import batches
from plan import GRID, Cell, T, settings, used
from runs import Run, Weights, difference
from score import mean
from torch import Tensor
from torch.func import functional_call

import tvb_mergekit
from tvb_mergekit.tune import search
from tvb_mergekit.tune.search import DIGITS

TASKS = tuple(data.TASKS)
PAPERS_LAMBDA = 0.3  # online, where the paper does not search
KEPT = 0.95  # of the control score
ASCENT = 1e-3  # the longest step of gradient ascent, over the base's norm


def _reference(run: Run, cell: Cell) -> dict[str, Any]:
    tested = cell["tested"]
    own = {t: run.accuracy(run.models[t], "test", [t], tested)[t] for t in TASKS}
    return {
        "base": run.accuracy(run.base, "test", (*TASKS, *data.UNSEEN), tested),
        "specialists": own,
        "bytes": run.held,
        "parameters": sum(tensor.numel() for tensor in run.base.values()),
    }


# ---------------------------------------------------------------------------------------- addition


def built(run: Run, cell: Cell, out: Path | None = None) -> tvb_mergekit.Bases:
    label = cell["basis"].removesuffix("_mixed").removesuffix("_turned")
    size = {} if label == "none" else {"num_bases": cell["num_bases"]}
    # a mixture's seed is that of the mixture
    seed = {"seed": cell["seed"]} if label != "none" and label == cell["basis"] else {}
    dtype = getattr(torch, cell.get("dtype", "float32"))
    return tvb_mergekit.build(
        run.base, run.models, out, dtype=dtype, **settings(label), **size, **seed
    )


def mean_score(scores: Mapping[str, float], tasks: Iterable[str]) -> float:
    """Equal counts of right answers, task by task in any order, give equal means."""
    return round(mean(scores, tasks), DIGITS)


class Direction:
    """theta_0 + lambda * vector, for any lambda; a score is computed once."""

    def __init__(self, run: Run, vector: Mapping[str, Tensor]) -> None:
        self.run, self.vector = run, vector
        self.scores: dict[tuple[Any, ...], dict[str, float]] = {}

    def accuracy(
        self, scale: float, split: str, tasks: Sequence[str], items: int
    ) -> dict[str, float]:
        asked = round(scale, 9), split, tuple(tasks), items
        if asked not in self.scores:
            weights = self.run.shifted((scale, self.vector))
            self.scores[asked] = self.run.accuracy(weights, split, tasks, items)
        return self.scores[asked]

    def search(
        self, grid: Sequence[float], tasks: Sequence[str], items: int
    ) -> tuple[float, list[float]]:
        """The lambda with the best mean validation accuracy, the smallest of equals; all means."""
        return search.grid(
            grid, lambda s: mean_score(self.accuracy(s, "validation", tasks, items), tasks)
        )


def _addition(run: Run, cell: Cell) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        bases = built(run, cell, Path(folder) / "store" if cell["stored"] else None)
        seconds = time.perf_counter() - start
        if bases.path is None:
            held = sum(info.nbytes for vector in bases.vectors for info in vector.tensors.values())
        else:
            held = sum(file.stat().st_size for file in bases.path.glob("basis-*/*.safetensors"))
        mixed = cell["basis"].endswith("_mixed")
        mixture = _mixture(bases.num_bases, cell["seed"]) if mixed else None
        summed = torch.ones(bases.num_bases, dtype=torch.float64) if mixture is None else mixture
        encoder = bases.encoder
        facts = {key: bases.facts.get(key) for key in FACTS}
        return {
            "bytes": held,
            "facts": facts,
            "row_sums": None if encoder is None else (encoder @ summed).tolist(),
            "seconds": {"build": seconds},
            "merges": {merge: merged(run, cell, bases, merge, mixture)
                       for merge in cell["merges"]},
        }  # fmt: skip


FACTS = ("loss", "spectral_bound", "balanced_bound", "relative_gap", "retained_energy")


def _mixture(count: int, seed: int) -> Tensor:
    """Q 1 of a random Q with convex columns: B Q has the span and the loss of B, but addition sees
    other row sums, W_e Q 1."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, count, generator=generator, dtype=torch.float64)
    columns = uniform.log().neg() ** 3  # so that a column is nearly one basis, now and then
    mixture: Tensor = (columns / columns.sum(0)).sum(1)
    return mixture


def merged(
    run: Run, cell: Cell, bases: tvb_mergekit.Bases, merge: str, mixture: Tensor | None = None
) -> dict[str, Any]:
    """One merge, or a mixture of the bases, its coefficient searched on three scales.

    `bases` and `tasks` are the recipe's `lambda_scale`. `decoder` is not in the paper: it adds up
    the reconstructed task vectors, B (W_d 1), so the encoder's row sums do not matter; PCA has its
    mean in it.
    """
    start = time.perf_counter()
    if mixture is not None:
        vector = combined(run, mixture, bases.vectors)
    else:
        moved = tvb_mergekit.merge(bases, run.base, f"basis_{merge}", lambda_=1.0)
        vector = difference(moved, run.base)
    seconds = time.perf_counter() - start
    moving = Direction(run, vector)
    directions = {"bases": (1.0, moving), "tasks": (T / bases.num_bases, moving)}
    if merge == "ta":
        rebuilt = combined(run, bases.reconstruction(TASKS).sum(1), bases.sources)
        directions["decoder"] = (1.0, moving if bases.basis == "none" else Direction(run, rebuilt))
    scales = {}
    for scale, (factor, direction) in directions.items():
        start = time.perf_counter()
        grid = [by * factor for by in GRID]
        best, found = direction.search(grid, TASKS, used(cell))
        scales[scale] = {
            "lambda": best,
            "grid": grid,
            "validation": found,
            "seconds": time.perf_counter() - start,
            "test": direction.accuracy(best, "test", TASKS, cell["tested"]),
        }
    return {"seconds": seconds, "items": used(cell), "scales": scales}


def combined(run: Run, by: Tensor, vectors: Iterable[Any]) -> Weights:
    terms = zip(by.tolist(), vectors, strict=True)
    moved = run.shifted(*((c, {n: v.tensor(n) for n in v.tensors}) for c, v in terms))
    return difference(moved, run.base)


# ---------------------------------------------------------------------------------------- negation


def _negation(run: Run, cell: Cell) -> dict[str, Any]:
    return forget(run, cell, _forgetting(run, cell))


def forget(run: Run, cell: Cell, vector_of: Callable[[str], Weights] | None) -> dict[str, Any]:
    """Forget each task, by gradient ascent or a vector to subtract.

    The paper forgets from the pretrained model, and asks a control task to keep 95 %. This base
    answers wrong to begin with, so a task is forgotten from the base and all task vectors. The
    other tasks are the control.
    """
    shipped = run.shifted(*((cell["lambda"], run.task_vector(task)) for task in TASKS))
    start = run.accuracy(shipped, "test", TASKS, cell["tested"])
    tasks = {}
    for task in TASKS:
        others = [other for other in TASKS if other != task]
        error = None
        states: dict[float, Callable[[], Weights]]
        if vector_of is None:
            path = enumerate(_ascent(run, shipped, task))
            states = {step: partial(dict, weights) for step, weights in path}
        else:
            vector, true = vector_of(task), run.task_vector(task)
            error = norm(difference(vector, true)) / norm(true)
            states = {alpha: partial(_without, shipped, vector, alpha) for alpha in GRID}
        alpha = _most_forgotten(run, states, task, cell["items"])
        after = run.accuracy(states[alpha](), "test", TASKS, cell["tested"])
        tasks[task] = {
            "alpha": alpha,
            "target": after[task],
            "control": mean(after, others),
            "control_before": mean(start, others),
            "relative_error": error,
        }
    return {"lambda": cell["lambda"], "start": start, "tasks": tasks}


def _without(start: Weights, vector: Weights, alpha: float) -> Weights:
    return {name: tensor - alpha * vector[name] for name, tensor in start.items()}


def _most_forgotten(
    run: Run, states: Mapping[float, Callable[[], Weights]], task: str, items: int
) -> float:
    """The alpha with the least target score among those that keep 95 % of the control score."""
    others = [other for other in TASKS if other != task]

    def target(alpha: float) -> float:
        return run.accuracy(states[alpha](), "validation", [task], items)[task]

    def control(alpha: float) -> float:
        return mean_score(run.accuracy(states[alpha](), "validation", others, items), others)

    return search.most_forgotten(list(states), target, control, KEPT)


def _forgetting(run: Run, cell: Cell) -> Callable[[str], Weights] | None:
    """task -> the vector to subtract; None for gradient ascent."""
    if cell["basis"] == "ascent":
        return None
    if cell["basis"] == "plain":
        return run.task_vector
    bases = built(run, cell)
    return lambda task: difference(tvb_mergekit.reconstruct(bases, run.base, task), run.base)


def norm(vector: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in vector.values()))


def _ascent(run: Run, weights: Weights, task: str) -> Iterator[Weights]:
    """The weights after 0, 1 ... 20 steps of raising the loss on the task's training items."""
    moving = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    optimizer = torch.optim.SGD(moving.values(), ASCENT * norm(run.base), maximize=True)
    source = batches(run.tokenizer, data.stream([task], 0.0, f"ascent/{task}"), 32)
    for _ in GRID:
        yield {name: tensor.detach().clone() for name, tensor in moving.items()}
        optimizer.zero_grad()
        loss_of(run, moving, next(source)).backward()
        torch.nn.utils.clip_grad_norm_(moving.values(), 1.0)
        optimizer.step()


def loss_of(run: Run, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: tensor.to(run.device) for name, tensor in batch.items()}
    loss: Tensor = functional_call(run.model, dict(weights), (), inputs).loss
    return loss


# ------------------------------------------------------------------------------------------ online


def order_of(cell: Cell) -> list[str]:
    return random.Random(cell["order"]).sample(TASKS, T)


def _online(run: Run, cell: Cell) -> dict[str, Any]:
    """Tasks arrive one by one; the held vectors are added up at the end, and along the way."""
    order = order_of(cell)
    tested, curve = cell["tested"], []
    for seen, (vector, count) in enumerate(BUFFERS[cell["how"]](run, cell, order), 1):
        if seen < T and not (cell["curve"] and seen % 2 == 0):
            continue
        held, known = Direction(run, vector), order[:seen]
        # the paper's grid times tasks per vector held
        best, _ = held.search([by * seen / count for by in GRID], known, used(cell))
        test = held.accuracy(best, "test", known, tested)
        curve.append({"seen": seen, "lambda": best, "test": test})
    fixed = held.accuracy(PAPERS_LAMBDA, "test", order, tested)
    return {
        "order": order,
        "fixed": {"lambda": PAPERS_LAMBDA, "test": fixed},
        "tuned": {"lambda": best, "test": test},
        "curve": curve if cell["curve"] else None,
    }


def algorithm_1(
    run: Run, cell: Cell, order: Sequence[str], **first: Any
) -> Iterator[tvb_mergekit.Bases]:
    """The bases after each task, as `tvb add` makes them; `first`: settings of the encoder."""
    bases: tvb_mergekit.Bases | None = None
    for task in order:
        bases = tvb_mergekit.add(
            bases, run.base, run.models[task], task, budget=cell["budget"], compress=cell["how"],
            **({} if bases else first),
        )  # fmt: skip
        yield bases


def _bases_buffer(run: Run, cell: Cell, order: Sequence[str]) -> Iterator[tuple[Weights, int]]:
    for bases in algorithm_1(run, cell, order):
        moved = tvb_mergekit.merge(bases, run.base, "basis_ta", lambda_=1.0)
        yield difference(moved, run.base), bases.num_bases


def kept_tasks(cell: Cell, order: Sequence[str]) -> Iterator[list[str]]:
    """After each task those in a random buffer: at the budget, one of them is thrown away."""
    rng, kept = random.Random(f"{cell['order']}/{cell['budget']}"), list[str]()
    for task in order:
        if len(kept) == cell["budget"]:
            kept.remove(rng.choice(kept))
        kept.append(task)
        yield [*kept]


def _random_buffer(run: Run, cell: Cell, order: Sequence[str]) -> Iterator[tuple[Weights, int]]:
    for kept in kept_tasks(cell, order):
        yield total(run, kept), len(kept)


def _continual(run: Run, cell: Cell, order: Sequence[str]) -> Iterator[tuple[Weights, int]]:
    """One running sum of all tasks; no task can be removed from it."""
    for seen in range(1, T + 1):
        yield total(run, order[:seen]), seen


def magmax(run: Run, cell: Cell, order: Sequence[str]) -> Iterator[tuple[Weights, int]]:
    """In each entry the task vector of the largest magnitude (Marczak et al., 2024)."""
    largest: Weights = {}
    for seen, task in enumerate(order, 1):
        vector = run.task_vector(task)
        largest = {
            name: torch.where(tensor.abs() > largest[name].abs(), tensor, largest[name])
            if largest else tensor
            for name, tensor in vector.items()
        }  # fmt: skip
        yield largest, seen


def total(run: Run, tasks: Iterable[str]) -> Weights:
    return difference(run.shifted(*((1.0, run.task_vector(task)) for task in tasks)), run.base)


BUFFERS: dict[str, Callable[[Run, Cell, Sequence[str]], Iterator[tuple[Weights, int]]]]
BUFFERS = {"ae": _bases_buffer, "balanced": _bases_buffer, "rand_select": _random_buffer}
BUFFERS |= {"continual_ta": _continual, "magmax": magmax}

KINDS = {"reference": _reference, "addition": _addition, "negation": _negation, "online": _online}
