"""A trained run in memory: its models as named tensors, and the accuracy of any weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import data
import score
import torch
import train
from study.cells import Source, fingerprint
from torch import Tensor
from transformers import AutoTokenizer

Weights = dict[str, Tensor]
QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"


class Run:
    """Base and specialists in float32; a tied tensor is held once, as in `named_parameters`.

    Attributes:
        base: theta_0.
        models: task -> theta_i, for adapters the merged models.
        held: bytes on disk of the specialists, T models or T adapters.
    """

    def __init__(
        self, folder: Path, method: str, device: str = "cpu",
        tasks: Iterable[str] = tuple(data.TASKS),
    ) -> None:  # fmt: skip
        self.folder, self.device, self.tasks = folder, device, tuple(tasks)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "base")
        self.model = score.load(folder / "base").to(device)
        self.base = self._weights(self.model)
        self.models = {
            task: self._weights(score.load(folder / method / task, folder / "base").to(device))
            for task in self.tasks
        }
        files = (folder / method).glob("*/*.safetensors")
        self.held = sum(file.stat().st_size for file in files)
        self.questions = cache(self._questions)

    @staticmethod
    def _weights(model: torch.nn.Module) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def task_vector(self, task: str) -> Weights:
        return difference(self.models[task], self.base)

    def shifted(self, *terms: tuple[float, Mapping[str, Tensor]]) -> Weights:
        """theta_0 + sum of scale * vector."""
        moved = {name: tensor.clone() for name, tensor in self.base.items()}
        for scale, vector in terms:
            for name, tensor in vector.items():
                moved[name].add_(tensor.to(self.device, torch.float32), alpha=scale)
        return moved

    def accuracy(
        self,
        weights: Mapping[str, Tensor],
        split: str,
        tasks: Iterable[str] = tuple(data.TASKS),
        items: int | None = None,
    ) -> dict[str, float]:
        """task -> share of right answers to its first `items` of a split, or to all."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        return score.ask(self.model, self.tokenizer, self.questions(split, tuple(tasks), items))

    def _questions(self, split: str, tasks: tuple[str, ...], items: int | None) -> score.Questions:
        docs = [doc for task in tasks for doc in self.items(task, split)[:items]]
        return score.pack(self.tokenizer, docs, self.device)

    def items(self, task: str, split: str) -> list[data.Doc]:
        return data.read(self.folder / "data", task, split)


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Weights:
    """one - other, where `other` is: what the library returns is on the CPU."""
    return {name: tensor.to(other[name].device) - other[name] for name, tensor in one.items()}


def trained(
    preset: str, method: str, seed: int, out: Path, device: str, as_is: bool = False
) -> Source:
    """A run of evals/mini for cells; missing models are trained, unless it is used as it is."""
    folder = train.run_folder(out, preset, seed)
    if not as_is:
        train.train_run(preset, method, seed, out, device)
    models = fingerprint([folder / "base", *(folder / method / task for task in data.TASKS)])
    cells, about = folder / "cells" / method, (preset, method, seed)
    return Source(Run, (folder, method, device), cells, models, device, about)


class Quickstart(Run):
    """The quickstart's base and specialists, in float32."""

    def __init__(self, device: str) -> None:
        folders = (QUICKSTART / "models").iterdir()
        tasks = sorted(folder.name for folder in folders if folder.name != "base")
        super().__init__(QUICKSTART / "models", "", device, tasks)

    def items(self, task: str, split: str) -> list[data.Doc]:
        ending = {"validation": ".val.jsonl", "test": ".jsonl"}[split]
        lines = (QUICKSTART / "eval" / "data" / (task + ending)).read_text().splitlines()
        return [{"task": task} | json.loads(line) for line in lines]


def quickstart(out: Path, device: str) -> Source:
    folder = QUICKSTART / "models"
    models = fingerprint([folder / "base", *sorted(folder.iterdir())])
    cells = out / "quickstart" / "cells"
    return Source(Quickstart, (device,), cells, models, device, ("quickstart", "full", 0))
