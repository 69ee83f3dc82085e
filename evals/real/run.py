"""The runs of evals/real, for cells."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import click
import torch
from peft import PeftModel
from safetensors.torch import save_file
from study import run
from study.cells import Source, fingerprint
from study.run import Doc, Scores
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from real.model import LONGEST, Example, answers, autocast, encode, endings, evaluate, predict
from real.tasks import GRADED, OUTSIDE, SHIPPED, TASKS, Item, metric, read

GENERATED = (*GRADED, "geoquery_sql")  # other answers than the expected one count, too
SPOKEN = 50  # items of such a task, which cost as much as hundreds of others
TEXT = "subj/raw/data__raw__subj.objective"  # of no task with a specialist
LINES = 200  # of it


class Run(run.Run):
    """SmolLM2 and its specialists.

    Full fine-tunes stay on disk, and the weights of merges are rounded to bfloat16, as users store
    them. Merges of adapters are scored in float32: bfloat16 would round the adapters away.
    """

    unseen = OUTSIDE

    def __init__(
        self, out: Path, data: Path, seed: int, kind: str, device: str, tasks: tuple[str, ...]
    ) -> None:
        base, self.data = out / "base", data
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.rounded = full = kind == "full"
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        super().__init__(loaded.eval(), device)
        folders = {task: out / f"seed{seed}" / kind / task for task in tasks}
        files = (file for place in folders.values() for file in place.glob("*.safetensors"))
        self.held = sum(file.stat().st_size for file in files)
        self.places = {"base": str(base.resolve())}
        if not full:
            self.fused = tempfile.TemporaryDirectory()  # too many for the memory
            folders = {task: self._adapted(base, place) for task, place in folders.items()}
        self.models = folders
        self.places |= {task: str(place.resolve()) for task, place in folders.items()}
        self.splits = lru_cache(lambda task: read(data, task))

    def _adapted(self, base: Path, adapter: Path) -> Path:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        weights = self.weights(PeftModel.from_pretrained(model, adapter).merge_and_unload())
        folder = Path(self.fused.name) / adapter.name
        folder.mkdir()
        shutil.copy(base / "config.json", folder)
        save_file(weights, folder / "model.safetensors")
        return folder

    def set(self, weights: Mapping[str, Tensor]) -> None:
        if self.rounded:
            weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
        super().set(weights)

    @cached_property
    def ends(self) -> Tensor:
        return endings(self.tokenizer)

    def items(self, task: str, split: str) -> list[Doc]:
        found = self.splits(task)[split]
        return [{"task": task, "split": split, "prompt": item.prompt, "answer": item.response}
                for item in found]  # fmt: skip

    def pack(self, docs: Sequence[Doc]) -> list[tuple[Doc, Example]]:
        items = [Item(doc["prompt"], doc["answer"]) for doc in docs]
        return list(zip(docs, encode(self.tokenizer, items), strict=True))

    def ask(self, packed: list[tuple[Doc, Example]]) -> Scores:
        """Exact match by one pass; for test items of GENERATED the metric of generated answers.

        Validation items, which choose coefficients, are not generated. Graded tasks have the share
        of right tokens there.
        """
        found: Scores = {doc["task"]: [] for doc, _ in packed}
        spoken = [task for task in GENERATED
                  if any((d["task"], d["split"]) == (task, "test") for d, _ in packed)]  # fmt: skip
        once = [(doc, e) for doc, e in packed if doc["task"] not in spoken]
        shares, _ = evaluate(self.model, [e for _, e in once], self.ends, self.begin)
        self.begin(None)  # generation passes prompts alone
        for (doc, _), share in zip(once, shares, strict=True):
            graded = doc["task"] in GRADED
            found[doc["task"]].append(share if graded else float(share == 1))
        for task in spoken:
            some = [(doc, e) for doc, e in packed if doc["task"] == task][:SPOKEN]
            most = min(LONGEST, max(len(e.ids) - e.start for _, e in some))
            prompts = [doc["prompt"] for doc, _ in some]
            said = answers(self.model, self.tokenizer, prompts, self.ends, most)
            score = metric(self.data, task)
            found[task] = [score(a, d["answer"]) for a, (d, _) in zip(said, some, strict=True)]
        return found

    def loss(
        self, weights: Mapping[str, Tensor], docs: Sequence[Doc], exact: bool = False
    ) -> Tensor:
        def call(**inputs: Any) -> Any:
            return functional_call(self.model, dict(weights), (), inputs)

        with autocast(self.model.device, exact):
            logits, tokens = predict(call, [e for _, e in self.pack(docs)], self.model.device)
        return cross_entropy(logits.float(), tokens)

    def losses(self, weights: Mapping[str, Tensor], task: str, items: int) -> float:
        """The mean loss of a token of the test answers."""
        self.set(weights)
        packed = self.pack(self.items(task, "test")[:items])
        return evaluate(self.model, [example for _, example in packed], self.ends)[1]

    def own(self, weights: Mapping[str, Tensor]) -> float:
        """The mean loss of a token of plain English sentences."""
        lines = (self.data / TEXT).read_text(encoding="latin-1").splitlines()[:LINES]
        texts = [Example(ids, 1) for ids in self.tokenizer(lines)["input_ids"]]
        self.set(weights)
        return evaluate(self.model, texts, self.ends)[1]


def trained(
    out: Path, data: Path, seed: int, kind: str, device: str, tasks: tuple[str, ...] = TASKS
) -> Source:
    """The specialists of a seed and kind.

    Raises:
        click.ClickException: some are not trained.
    """
    folders = [out / f"seed{seed}" / kind / task for task in tasks]
    lacking = [place for place in (out / "base", *folders) if not place.exists()]
    if lacking:
        raise click.ClickException(
            f"{len(lacking)} folders are missing, first {lacking[0]}: "
            f"run python evals/real/train.py --data {data} --out {out} --only 'seed{seed}/{kind}/*'"
        )
    models = fingerprint([out / "base", *folders])
    models += fingerprint([data / task for task in (*tasks, *OUTSIDE)], ("t*.jsonl",))
    models += fingerprint([out / "base"], ("tokenizer*.json", "generation_config.json"))
    label = kind if len(tasks) == len(TASKS) else f"{kind}-{len(tasks)}"
    if tasks not in (TASKS, SHIPPED):
        label += "-" + hashlib.sha256(" ".join(tasks).encode()).hexdigest()[:4]
    cells = out / f"seed{seed}" / "cells" / label
    arguments = (out, data, seed, kind, device, tasks)
    return Source(Run, arguments, cells, models, device, ("real", label, seed))
