"""A base and its specialists as named tensors, and the score of any weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import tvb_mergekit
from study.cells import Cell
from tvb_mergekit.store.routing import Routed

Weights = dict[str, Tensor]
Doc = dict[str, Any]  # task, prompt and answer of an item
Scores = dict[str, list[float]]  # task -> the score of each item


class Run(ABC):
    """The models of a run in memory, or on disk until they are needed.

    Attributes:
        model: scoring copies weights into it.
        base: theta_0 in float32; a tied tensor is held once, as in `named_parameters`.
        models: task -> theta_i, as weights in float32 or a folder.
        places: the paths that a recipe names, of `base` and of each task.
        unseen: tasks without a specialist.
        held: bytes on disk of the specialists, T models or T adapters.
        routed: the model with the routers that are scored.
    """

    model: Any
    tokenizer: Any
    models: Mapping[str, Weights | Path]
    places: Mapping[str, str]
    unseen: tuple[str, ...] = ()
    held: int
    routed: Routed | None = None

    def __init__(self, model: Any, device: str) -> None:
        self.model, self.device = model.to(device), device
        self.base = self.weights(self.model)
        self.packed = cache(self._packed)

    @abstractmethod
    def items(self, task: str, split: str) -> list[Doc]:
        """The items of `train`, `validation` or `test`."""

    @abstractmethod
    def pack(self, docs: Sequence[Doc]) -> Any:
        """Items as tokens, to be put to many models."""

    @abstractmethod
    def ask(self, packed: Any) -> Scores:
        """The scores of the present weights."""

    def begin(self, prompts: Tensor | None) -> None:
        """Show routers the tokens of the prompts in the next pass, and not the answers."""
        if self.routed is not None:
            self.routed.prompts = prompts

    @abstractmethod
    def loss(
        self, weights: Mapping[str, Tensor], docs: Sequence[Doc], exact: bool = False
    ) -> Tensor:
        """The mean loss of the answers, through which gradients flow to the weights.

        `exact` computes in float32, if a faster dtype is usual.
        """

    def own(self, weights: Mapping[str, Tensor]) -> float | None:
        """What is left of the base's own abilities, if the run has a measure of it."""
        return None

    def example(self, doc: Doc) -> dict[str, str]:
        """An item as a line of `tvb learn --data`."""
        return {"prompt": doc["prompt"], "response": doc["answer"]}

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.models)

    @staticmethod
    def weights(model: torch.nn.Module) -> Weights:
        return {name: tensor.detach().clone().float() for name, tensor in model.named_parameters()}

    def task_vector(self, task: str) -> Weights:
        found = self.models[task]
        if isinstance(found, Path):
            found = load_file(found / "model.safetensors")
        return difference({name: found[name].float() for name in self.base}, self.base)

    def shifted(self, *terms: tuple[float, Mapping[str, Tensor]]) -> Weights:
        """theta_0 + sum of scale * vector."""
        moved = {name: tensor.clone() for name, tensor in self.base.items()}
        for scale, vector in terms:
            for name, tensor in vector.items():
                moved[name].add_(tensor.to(self.device, torch.float32), alpha=scale)
        return moved

    def total(self, tasks: Iterable[str]) -> Weights:
        """The sum of some task vectors."""
        vectors = ((1.0, self.task_vector(task)) for task in tasks)
        found: Weights = {}
        for _, vector in vectors:
            found = {name: found.get(name, 0) + tensor for name, tensor in vector.items()}
        return found

    def set(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def scores(
        self,
        weights: Mapping[str, Tensor],
        split: str,
        tasks: Iterable[str] | None = None,
        items: int | None = None,
    ) -> Scores:
        """The scores of the first `items` of a split, or of all."""
        self.set(weights)
        asked = self.tasks if tasks is None else tuple(tasks)
        return self.ask(self.packed(split, asked, items))

    def accuracy(
        self,
        weights: Mapping[str, Tensor],
        split: str,
        tasks: Iterable[str] | None = None,
        items: int | None = None,
    ) -> dict[str, float]:
        """The mean score of each task."""
        return means(self.scores(weights, split, tasks, items))

    def _packed(self, split: str, tasks: tuple[str, ...], items: int | None) -> Any:
        return self.pack([doc for task in tasks for doc in self.items(task, split)[:items]])


def means(scores: Scores) -> dict[str, float]:
    return {task: sum(each) / len(each) for task, each in scores.items()}


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Weights:
    """one - other, where `other` is: what the library returns is on the CPU."""
    return {name: tensor.to(other[name].device) - other[name] for name, tensor in one.items()}


def norm(vector: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in vector.values()))


# --------------------------------------------------------------------------------- cells' bases


def settings(label: str) -> dict[str, Any]:
    """The recipe's keys behind a label of the tables."""
    temperature = label.removeprefix("ae_adam_")
    if temperature != label:
        return {"basis": "ae", "temperature": float(temperature)}
    if label == "ae_annealed":
        return {"basis": "ae", "anneal_every": 500, "anneal_factor": 0.8}
    return {"basis": label}


def used(run: Run, cell: Cell) -> int:
    """Validation items of a task: of n_i, the share M/T that the paper gives M bases.

    A cell with `equal` gives M bases as many items as T task vectors.
    """
    every = len(run.tasks)
    count: int = (
        every if cell.get("equal") else cell.get("num_bases") or cell.get("budget") or every
    )
    items: int = cell["items"]
    return max(1, round(items * count / every))


def built(run: Run, cell: Cell) -> tvb_mergekit.Bases:
    label = cell["basis"]
    size = {} if label == "none" else {"num_bases": cell["num_bases"], "seed": cell["seed"]}
    return tvb_mergekit.build(
        run.base, run.models, dtype=torch.float32, device=run.device, **settings(label), **size
    )
