"""A base and its specialists, and the scores of any weights."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import tvb_mergekit
from real.cells import Cell, Scores
from real.model import LONGEST, answers, encode, endings, evaluate, predict
from real.tasks import GRADED, Item, metric, read

Weights = dict[str, Tensor]
GENERATED = (*GRADED, "geoquery_sql")  # other answers than the expected one count, too
SPOKEN = 50  # items of such a task, which cost as much as hundreds of others


class Run:
    """SmolLM2 and its specialists of one seed and kind.

    Specialists stay on disk. The weights of merged full fine-tunes are rounded to bfloat16, as
    users store them. Merges of adapters are scored in float32: bfloat16 would round adapters away.

    Attributes:
        base: theta_0 in float32; a tied tensor is held once.
        folders: task -> the folder of a whole model, with adapters fused.
        trained: task -> the folder of the model or adapter.
        own: the folder of the base.
    """

    def __init__(
        self, out: Path, data: Path, seed: int, kind: str, tasks: Sequence[str], device: str
    ) -> None:
        self.own, self.data, self.device = out / "base", data, device
        self.tokenizer = AutoTokenizer.from_pretrained(self.own)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        loaded = AutoModelForCausalLM.from_pretrained(self.own, dtype=torch.float32)
        self.model: Any = loaded.eval().to(device)
        self.base = weights_of(self.model)
        self.dtype = torch.bfloat16 if kind == "full" else torch.float32
        self.folders = {task: out / f"seed{seed}" / kind / task for task in tasks}
        self.trained = self.folders  # adapters as they are
        if kind != "full":
            self.fused = tempfile.TemporaryDirectory()
            self.folders = {task: self._fused(place) for task, place in self.folders.items()}
        self.tasks = tuple(tasks)
        self.ends = endings(self.tokenizer)
        self.items: Callable[[str, str], list[Item]] = cache(lambda t, split: read(data, t)[split])

    def _fused(self, adapter: Path) -> Path:
        model = AutoModelForCausalLM.from_pretrained(self.own, dtype=torch.float32)
        folder = Path(self.fused.name) / adapter.name
        PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)
        return folder

    def built(self, cell: Cell, store: Path | None = None, **more: Any) -> tvb_mergekit.Bases:
        """The bases of a cell, as the library builds them."""
        given = keys_of(cell) | {"dtype": torch.float32, "device": self.device} | more
        return tvb_mergekit.build(self.base, self.folders, store, **given)

    def recipe(self, file: Path, method: str, keys: Cell, trained: bool = False) -> str:
        """Write a recipe over whole models, or over the specialists as they were trained."""
        models = [
            {"model": f"{self.own}+{place}" if (place / "adapter_config.json").exists()
             else str(place.resolve()), "parameters": {"task": task}}
            for task, place in (self.trained if trained else self.folders).items()
        ]  # fmt: skip
        made = {"merge_method": method, "base_model": str(self.own.resolve()), "models": models}
        kind = {} if trained else {"dtype": str(self.dtype).removeprefix("torch.")}
        file.write_text(yaml.safe_dump(made | {"parameters": keys} | kind))
        return str(file)

    # ------------------------------------------------------------------------------------ vectors

    def task_vector(self, task: str) -> Weights:
        found = load_file(self.folders[task] / "model.safetensors", self.device)
        return difference(found, self.base)

    def total(self, tasks: Iterable[str]) -> Weights:
        """The sum of some task vectors."""
        found = {name: torch.zeros_like(tensor) for name, tensor in self.base.items()}
        for task in tasks:
            for name, tensor in self.task_vector(task).items():
                found[name] += tensor
        return found

    def shifted(self, scale: float, vector: Mapping[str, Tensor]) -> Weights:
        """theta_0 + scale * vector."""
        return {n: tensor + scale * vector[n].to(tensor) for n, tensor in self.base.items()}

    # ------------------------------------------------------------------------------------- scores

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Write weights into the model, as precise as users would store them."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name].to(self.dtype))

    def scores(
        self, weights: Mapping[str, Tensor], split: str, tasks: Iterable[str], count: int
    ) -> Scores:
        """The scores of the first items of a split."""
        self.put(weights)
        return self.ask(self.model, split, tasks, count)

    def ask(
        self, model: Any, split: str, tasks: Iterable[str], count: int,
        begin: Callable[[Tensor | None], None] = lambda prompts: None,
    ) -> Scores:  # fmt: skip
        """The scores of a model: exact match by one pass, or the metric of generated answers.

        Validation items, which choose coefficients, are not generated. Graded tasks have the share
        of right tokens there.

        Args:
            begin: is called before a pass with the tokens of the prompts, and at the end with None.
        """
        found: Scores = {}
        once = [task for task in tasks if split != "test" or task not in GENERATED]
        items = {task: self.items(task, split)[:count] for task in tasks}
        pairs = [(t, e) for t in once for e in encode(self.tokenizer, items[t])]
        shares, _ = evaluate(model, [example for _, example in pairs], self.ends, begin)
        begin(None)  # generation passes prompts alone
        for (task, _), share in zip(pairs, shares, strict=True):
            found.setdefault(task, []).append(share if task in GRADED else float(share == 1))
        for task in (task for task in tasks if task not in once):
            some, score = items[task][:SPOKEN], metric(self.data, task)
            most = max(len(e.ids) - e.start for e in encode(self.tokenizer, some))
            prompts = [item.prompt for item in some]
            said = answers(model, self.tokenizer, prompts, self.ends, min(LONGEST, most))
            found[task] = [score(a, i.response) for a, i in zip(said, some, strict=True)]
        return {task: found[task] for task in tasks}

    def loss(self, weights: Mapping[str, Tensor], items: Sequence[Item]) -> Tensor:
        """The mean loss of the responses in float32, through which gradients flow to weights."""

        def call(**inputs: Any) -> Any:
            return functional_call(self.model, dict(weights), (), inputs)

        logits, tokens = predict(call, encode(self.tokenizer, items), self.model.device)
        return cross_entropy(logits.float(), tokens)

    def test_loss(self, weights: Mapping[str, Tensor], task: str, count: int) -> float:
        """The mean loss of a token of the test responses."""
        self.put(weights)
        examples = encode(self.tokenizer, self.items(task, "test")[:count])
        return evaluate(self.model, examples, self.ends)[1]


def keys_of(cell: Cell) -> dict[str, Any]:
    """The keys of a cell's basis."""
    keys = {"basis": cell["basis"]}
    return keys if cell["basis"] == "none" else keys | {k: cell[k] for k in ("num_bases", "seed")}


def weights_of(model: torch.nn.Module) -> Weights:
    return {name: tensor.detach().clone().float() for name, tensor in model.named_parameters()}


def means(scores: Scores) -> dict[str, float]:
    return {task: sum(each) / len(each) for task, each in scores.items()}


def mean(scores: Scores, tasks: Iterable[str]) -> float:
    """The mean over tasks; equal counts of right answers give equal means in any order."""
    found = [*map(means(scores).__getitem__, tasks)]
    return round(sum(found) / len(found), 9)


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Weights:
    """one - other in float32, where `other` is: what the library returns is on the CPU."""
    return {name: one[name].to(tensor) - tensor for name, tensor in other.items()}


def norm(vector: Mapping[str, Tensor]) -> float:
    return math.sqrt(inner(vector, vector))


def inner(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)
