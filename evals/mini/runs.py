"""The runs of evals/mini, for cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from study import run
from study.cells import Source, fingerprint
from study.run import Doc, Scores
from torch import Tensor
from torch.func import functional_call
from transformers import AutoTokenizer

from mini import data, score, train
from mini.model import batches


class Run(run.Run):
    """Base and specialists in float32, for adapters the merged models."""

    unseen = tuple(data.UNSEEN)

    def __init__(self, folder: Path, method: str, device: str = "cpu") -> None:
        super().__init__(score.load(folder / "base"), device)
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "base")
        folders = {task: folder / method / task for task in data.TASKS}
        self.models = {
            task: self.weights(score.load(place, folder / "base").to(device))
            for task, place in folders.items()
        }
        base = str((folder / "base").resolve())
        self.places = {"base": base} | {t: str(place.resolve()) for t, place in folders.items()}
        files = (folder / method).glob("*/*.safetensors")
        self.held = sum(file.stat().st_size for file in files)

    def items(self, task: str, split: str) -> list[Doc]:
        return data.read(self.folder / "data", task, split)

    def example(self, doc: Doc) -> dict[str, str]:
        return {"prompt": doc["prompt"], "response": f" {doc['answer']} <eos>"}

    def pack(self, docs: Sequence[Doc]) -> score.Questions:
        return score.pack(self.tokenizer, docs, self.device)

    def ask(self, packed: score.Questions) -> Scores:
        return score.ask(self.model, self.tokenizer, packed, self.begin)

    def loss(
        self, weights: Mapping[str, Tensor], docs: Sequence[Doc], exact: bool = True
    ) -> Tensor:
        (batch,) = batches(self.tokenizer, ((d["prompt"], d["answer"]) for d in docs), len(docs))
        inputs = {name: tensor.to(self.device) for name, tensor in batch.items()}
        loss: Tensor = functional_call(self.model, dict(weights), (), inputs).loss
        return loss

    def stream(self, task: str, seed: str, size: int) -> Iterator[list[Doc]]:
        source = data.stream([task], 0.0, seed)
        while True:
            yield [{"prompt": p, "answer": answer} for p, answer in islice(source, size)]


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
