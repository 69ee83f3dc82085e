"""Few-shot transfer to an unseen task, through what is held of others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from study.cells import Cell
from study.run import Doc, Run, Weights, built

EPOCHS, RATE, DECAY = 10, 0.1, 0.1  # the paper's, for aTLAS
BATCH = 16
TUNING = 1e-3  # the rate of fine-tuning, unless a cell has its own


def transfer(run: Run, cell: Cell) -> dict[str, Any]:
    """An unseen task from a few examples: coefficients of the held vectors, learned for each
    tensor.

    As in aTLAS (Zhang et al., 2024) each vector has a coefficient for each tensor, from 0. M bases
    and `none_subsample` get M/T of the examples, as in the paper.
    """
    every = len(run.tasks)
    count = cell["num_bases"] or every
    shots = max(1, round(cell["shots"] * count / every))
    tasks = {}
    for task in run.unseen:
        docs = run.items(task, "train")[:shots]
        if cell["basis"] == "base":
            weights = run.base
        elif cell["basis"] == "finetune":
            weights = _finetuned(run, docs, cell.get("rate", TUNING))
        else:
            weights = _atlas(run, _vectors(run, cell), docs)
        tasks[task] = run.accuracy(weights, "test", [task], cell["tested"])[task]
    return {"tasks": tasks}


def _vectors(run: Run, cell: Cell) -> list[Weights]:
    if cell["basis"].startswith("none"):
        return [run.task_vector(task) for task in run.tasks]
    bases = built(run, cell)
    return [{n: v.tensor(n).to(run.device) for n in v.tensors} for v in bases.vectors]


def _steps(docs: list[Doc]) -> Iterator[list[Doc]]:
    rng = random.Random(0)
    for _ in range(EPOCHS):
        drawn = rng.sample(docs, len(docs))
        yield from (drawn[i : i + BATCH] for i in range(0, len(drawn), BATCH))


def _learn(
    run: Run,
    learned: list[Tensor],
    optimizer: torch.optim.Optimizer,
    weights: Callable[[], Mapping[str, Tensor]],
    docs: list[Doc],
) -> Weights:
    """Train `learned`, the parameters of `weights`, with a rate that falls to 0."""
    steps = list(_steps(docs))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(steps))
    for batch in steps:
        optimizer.zero_grad()
        run.loss(weights(), batch).backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
    return {name: tensor.detach() for name, tensor in weights().items()}


def _atlas(run: Run, vectors: Sequence[Weights], docs: list[Doc]) -> Weights:
    names = list(run.base)
    stacked = {name: torch.stack([vector.pop(name) for vector in vectors]) for name in names}
    coefficients = torch.zeros(len(names), len(vectors), device=run.device, requires_grad=True)

    def weights() -> Weights:
        return {name: run.base[name] + torch.tensordot(row, stacked[name], 1)
                for name, row in zip(names, coefficients, strict=True)}  # fmt: skip

    optimizer = torch.optim.AdamW([coefficients], RATE, weight_decay=DECAY)
    return _learn(run, [coefficients], optimizer, weights, docs)


def _finetuned(run: Run, docs: list[Doc], rate: float) -> Weights:
    moving = {name: tensor.clone().requires_grad_() for name, tensor in run.base.items()}
    optimizer = torch.optim.AdamW(moving.values(), rate, weight_decay=0.0)
    return _learn(run, list(moving.values()), optimizer, lambda: moving, docs)


KINDS = {"transfer": transfer}
