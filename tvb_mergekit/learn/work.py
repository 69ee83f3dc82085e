"""The frame of all methods: request, data, costs, folder of finished files, and `learned.json`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from mergekit.common import dtype_from_name

from tvb_mergekit import __version__
from tvb_mergekit.atomic import is_left_over
from tvb_mergekit.core.gram import NO_TENSOR
from tvb_mergekit.errors import UserError, counted, listed, megabytes
from tvb_mergekit.learn import kept
from tvb_mergekit.learn.data import DataFile, Example, encode, open_tokenizer, read_data
from tvb_mergekit.learn.models import Mixture, TaskModels, limits
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.settings import MATRIX_METHODS
from tvb_mergekit.store.facts import FOLDER, record_of
from tvb_mergekit.store.writer import link
from tvb_mergekit.tensors.layout import MEMORY
from tvb_mergekit.tensors.output import check_disk
from tvb_mergekit.tensors.passes import LEAST
from tvb_mergekit.tensors.stream import Item, Sink

LOG = logging.getLogger(__name__)
LEARNED = "learned.json"  # in basis/ of a merged model
LearningMethod = Literal["fisher", "regmean", "localize", "adamerging", "atlas", "wemoe"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A method and its options, as in `tvb learn RECIPE METHOD --help`.

    Options of other methods have no effect. None stands for the method's own default.
    """

    document: Document
    method: LearningMethod
    out: str
    data: Sequence[str] = ()
    source: str | None = None
    mixture: Mixture = "encoder"
    subsample: bool = True
    samples: int = 0
    normalize: bool = False
    off_diagonal: float = 0.9
    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    held_out: float = 0.2
    patience: int = 3
    density: float = 0.05
    dataless: bool = False
    penalty: float = 0.0
    blocks: int = 1
    nonnegative: bool = False
    unlabeled: bool = False
    depth: int = 1
    precision: Precision = "float32"
    checkpointing: bool = False
    seed: int = 0
    memory: int = MEMORY
    resume: bool = False
    options: Options = field(default_factory=Options)

    @property
    def partial(self) -> Path:
        """The folder of finished files until the merged model is complete."""
        return Path(f"{os.path.realpath(self.out)}.partial")

    def check(self) -> None:
        """Warn of recipe keys without effect.

        Raises:
            UserError: a mistake that shows without the models.
        """
        recipe = self.document.recipe
        known = ["basis_ta", *(MATRIX_METHODS if self.method == "wemoe" else ())]
        if recipe.settings.method not in known:
            found = f"`merge_method` is {recipe.settings.method}"
            raise UserError(f"{found}: {self.method} needs {' or '.join(known)}")
        keys = self.document.varying
        lambdas = ("adamerging", "wemoe")
        unused = [key for key in keys if key != "lambda" or self.method not in lambdas]
        if unused and recipe.bases is None:  # a store's own recipes have some
            LOG.warning("%s does not use the recipe's `%s`", self.method, listed(unused))


@dataclass(frozen=True)
class CostEstimate:
    """Costs in bytes, and all costs in words.

    Attributes:
        memory: without activations.
        disk: of the finished files and the merged model.
    """

    memory: int
    disk: int
    lines: list[str]


def hash_of(value: object) -> str:
    """A hash of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


class Work(ABC):
    """One method on one planned merge; after `learn` a `plan.Learned`.

    Attributes:
        models: the models of the tasks and of the base.
        place: the folder of the finished files.
        files: the data.
        encoded: for each task its examples as tokens.
        passes: forward and backward passes of one example so far.
    """

    folder: str  # of the finished files, in basis/
    by_gradient = False  # on the base's model, in steps

    def __init__(self, request: Request, plan: Plan) -> None:
        self.request, self.plan = request, plan
        if not plan.tasks.items:
            raise UserError(NO_TENSOR)
        for name in plan.tensors.changed:
            raise UserError(f"the tokenizer changes `{name}`; leave out `tokenizer_source`")
        self.device = plan.engine.devices[0]
        self.dtype = dtype_from_name(request.precision)
        self.models = TaskModels(plan, self.device)
        self.tasks, source = self.models.tasks, request.source
        self.place = Path(source) / FOLDER / self.folder if source else request.partial
        self.files: list[DataFile] = []
        if source is None and not request.dataless:
            names = None if self.method == "atlas" else self.tasks
            self.files = read_data(request.data, names, self.unlabeled, self.method != "wemoe")
        self.encoded = {file.task: self._encoded(file) for file in self.files}
        self.seconds = 0.0
        self.passes = (0, 0)

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors that take part."""
        return [(item.name, item.shape) for item in self.plan.tasks.items]

    @property
    def method(self) -> str:
        return self.request.method

    @property
    def how(self) -> str:
        """The merge in words, for the model card."""
        return f"merged by `tvb learn {self.method}` instead of the recipe's addition"

    @property
    def unlabeled(self) -> bool:
        """Whether the entropy of the next token is the loss."""
        return self.method == "adamerging" or self.request.unlabeled

    def _encoded(self, file: DataFile) -> list[Example]:
        models = self.models
        own = models.folder(None if self.by_gradient else file.task)
        tokenizer = open_tokenizer([own, models.folder(None)], models.trust)
        return encode(file, tokenizer, *limits(own, models.trust))

    @property
    def num_bases(self) -> int:
        """M."""
        recipe = self.plan.recipe
        if recipe.store is not None:
            return len(recipe.order)
        return recipe.settings.bases_of(len(recipe.tasks))

    @property
    def share(self) -> float:
        """The fraction of a task's examples in use: M / T (paper, section 3.2)."""
        return self.num_bases / len(self.tasks) if self.request.subsample else 1.0

    @property
    def examples(self) -> dict[str, list[Example]]:
        """The examples of each task that are in use."""
        seed, share = self.request.seed, self.share
        return {f.task: [self.encoded[f.task][k] for k in f.drawn(share, seed)] for f in self.files}

    @property
    def model_bytes(self) -> int:
        """The size of a model in float32."""
        return 4 * sum(info.numel for info in self.plan.base.tensors.values())

    @property
    @abstractmethod
    def outputs(self) -> list[Path]:
        """The files to be finished."""

    @abstractmethod
    def costs(self) -> CostEstimate:
        """Estimate the costs before the bases are built."""

    @abstractmethod
    def learn(self) -> None:
        """Finish `outputs`, for `merge_into` and `write`."""

    @abstractmethod
    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        """Give `sink` the merged tensors."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The method's own entries of learned.json."""

    def estimate(self, forward: int, backward: int, memory: int, disk: int) -> CostEstimate:
        """Add the merge's own costs."""
        memory, disk = memory + LEAST, disk + self.plan.output_bytes
        used = [f"{f.task} {f.count(self.share)} of {len(f.records)}" for f in self.files]
        passes = "at most " * self.by_gradient  # which may end early
        lines = [
            f"{self.method} over {counted(self.num_bases, 'basis')}",
            f"Examples: {', '.join(used) or 'none'}",
            f"Passes of one example: {passes}{forward} forward, {backward} backward",
            f"Memory: {megabytes(memory)}, without activations",
            f"Disk: {megabytes(disk)}",
        ]
        return CostEstimate(memory, disk, lines)

    def check(self) -> CostEstimate:
        """Estimate the costs.

        Raises:
            UserError: too little memory or disk, or foreign files in OUT.partial.
        """
        request, costs = self.request, self.costs()
        if costs.memory > request.memory:
            raise UserError(
                f"{megabytes(request.memory)} of memory are too little for {self.method}, which "
                f"needs {megabytes(costs.memory)} without activations; raise --memory"
            )
        left = [file for file in self.finished() if file.parent == request.partial]
        needed = costs.disk - sum(file.stat().st_size for file in left)  # used again, or deleted
        if os.path.ismount(os.path.realpath(request.out)):  # OUT.partial is on another disk
            check_disk(request.out, self.plan.output_bytes)
            check_disk(request.partial, needed - self.plan.output_bytes)
        else:
            check_disk(request.out, needed)
        return costs

    def finished(self) -> list[Path]:
        """The finished files in OUT.partial; ignores remains of `atomic.beside`.

        Raises:
            UserError: it holds other files, or is not a folder.
        """
        partial = self.request.partial
        if os.path.lexists(partial) and not partial.is_dir():
            raise UserError(
                f"{partial} is in the way: not a folder, and a folder of this name holds finished "
                "files until OUT is complete; move it, or name another --out"
            )
        left = [file for file in partial.glob("*") if not is_left_over(file)]
        for file in left:
            if not kept.is_ours(file):
                raise UserError(
                    f"{file} is in the way: damaged, or not of an unfinished run; move it, or "
                    "delete it (--resume learns its content again)"
                )
        return left

    def begin(self) -> None:
        """Make OUT.partial; with --resume keep its files, else replace it."""
        partial, resume, left = self.request.partial, self.request.resume, self.finished()
        if left and not resume:
            LOG.warning("%s, an unfinished run, is replaced (--resume continues it)", partial)
            shutil.rmtree(partial)
        other = sorted({f.name for f in left} - {f.name for f in self.outputs})
        if other and resume:
            raise UserError(
                f"--resume: {partial} is of another run ({listed(other)}): repeat the options "
                "of that run, or leave out --resume to begin again"
            )
        partial.mkdir(parents=True, exist_ok=True)

    def write(self, folder: Path) -> None:
        """Write `learned.json`, the finished files, and a line in the model card."""
        place = folder / FOLDER / self.folder
        place.mkdir()
        files = {}
        for file in self.outputs:
            link(file, place / file.name)
            files[file.name] = record_of(place / file.name).model_dump()
        found = {
            "format_version": 1,
            "version": __version__,
            "method": self.method,
            "from": self.request.source,
            **self.facts(),
            "files": files,
            "passes": dict(zip(("forward", "backward"), self.passes, strict=True)),
            "seconds": round(self.seconds, 3),
            "peak_memory": peak_memory(),
        }
        text = json.dumps(found, indent=2) + "\n"
        (folder / FOLDER / LEARNED).write_text(text, encoding="utf-8")
        card = folder / "README.md"
        if card.exists():
            with card.open("a", encoding="utf-8") as stream:
                stream.write(f"\nThe bases were {self.how}: see `{FOLDER}/{LEARNED}`.\n")

    def data_facts(self) -> list[dict[str, Any]]:
        examples = self.examples
        return [
            {
                "task": file.task,
                "file": os.path.abspath(file.path),
                "sha256": file.sha256,
                "lines": len(file.records),
                "examples": file.count(self.share),
                "tokens": hash_of([[e.ids, e.start] for e in examples[file.task]]),
            }
            for file in self.files
        ]


def peak_memory() -> dict[str, int]:
    """The most bytes that the process has had in memory, and on an accelerator."""
    found = {}
    with suppress(ImportError):  # on Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.max_memory_allocated()
    return found
