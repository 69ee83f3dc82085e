"""The frame of all methods: request, data, learned files, and `learned.json`."""

from __future__ import annotations

import json
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mergekit.common import dtype_from_name
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit import __version__
from tvb_mergekit.core.gram import NO_TENSOR
from tvb_mergekit.core.settings import MATRIX_METHODS
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.learn.data import DataFile, Example, encode, open_tokenizer, read_data
from tvb_mergekit.learn.models import Mixture, TaskModels, limits
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.store import routing
from tvb_mergekit.store.facts import FOLDER, record_of
from tvb_mergekit.tensors.checkpoint import FACTS_VERSION
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
    options: Options = field(default_factory=Options)

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


def save(file: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write learned tensors, with facts in the metadata."""
    held = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(held, file, {routing.LEARNED: json.dumps({"version": FACTS_VERSION, **facts})})
    file.chmod(0o644)  # `save_file` lets only the owner read


class Work(ABC):
    """One method on one planned merge; after `learn` a `plan.Learned`.

    Attributes:
        models: the models of the tasks and of the base.
        place: a folder for learned files, which is deleted after the merge.
        files: the data.
        encoded: for each task its examples as tokens.
        passes: forward and backward passes of one example so far.
    """

    by_gradient = False  # on the base's model, in steps

    def __init__(self, request: Request, plan: Plan) -> None:
        self.request, self.plan = request, plan
        if not plan.tasks.items:
            raise UserError(NO_TENSOR)
        for name in plan.tensors.changed:
            raise UserError(f"the tokenizer changes `{name}`; leave out `tokenizer_source`")
        self.device = plan.engine.device
        self.dtype = dtype_from_name(request.precision)
        self.models = TaskModels(plan, self.device)
        self.tasks, self.place = self.models.tasks, Path()
        self.files: list[DataFile] = []
        if not request.dataless:
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
    def disk(self) -> int:
        """The bytes of `outputs`, if they are many."""
        return 0

    @property
    @abstractmethod
    def outputs(self) -> list[Path]:
        """The files in `place`."""

    @abstractmethod
    def learn(self) -> None:
        """Write `outputs`, for `merge_into` and `write`."""

    @abstractmethod
    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        """Give `sink` the merged tensors."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The method's own entries of learned.json."""

    def write(self, folder: Path) -> None:
        """Write `learned.json`, what gradients have learned, and a line in the model card."""
        place, files = folder / FOLDER / "learned", {}
        for file in self.outputs if self.by_gradient else ():
            place.mkdir(exist_ok=True)
            shutil.move(file, place / file.name)
            files[file.name] = record_of(place / file.name).model_dump()
        found = {
            "format_version": 1,
            "version": __version__,
            "method": self.method,
            **self.facts(),
            "files": files,
            "passes": dict(zip(("forward", "backward"), self.passes, strict=True)),
            "seconds": round(self.seconds, 3),
        }
        text = json.dumps(found, indent=2) + "\n"
        (folder / FOLDER / LEARNED).write_text(text, encoding="utf-8")
        card = folder / "README.md"
        if card.exists():
            with card.open("a", encoding="utf-8") as stream:
                stream.write(f"\nThe bases were {self.how}: see `{FOLDER}/{LEARNED}`.\n")

    def data_facts(self) -> list[dict[str, Any]]:
        return [
            {
                "task": file.task,
                "file": os.path.abspath(file.path),
                "sha256": file.sha256,
                "lines": len(file.records),
                "examples": file.count(self.share),
            }
            for file in self.files
        ]
