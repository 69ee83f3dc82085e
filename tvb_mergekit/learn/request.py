"""A request of `tvb learn`, and the mistakes that show before any model is opened."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.learn.mixtures import Mixture
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.layout import MEMORY

LOG = logging.getLogger(__name__)

LearningMethod = Literal["fisher", "regmean", "localize", "adamerging", "atlas"]
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
    store: str | None = None
    blocks: int = 1
    nonnegative: bool = False
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
        if recipe.settings.method != "basis_ta":
            raise UserError(f"`merge_method` is {recipe.settings.method}: expected basis_ta")
        if self.document.raw:
            raise UserError("the models are weight files, which cannot run: list folders")
        if self.store is not None:
            self._check_store(self.store)
        keys = self.document.varying
        unused = [key for key in keys if (self.method, key) != ("adamerging", "lambda")]
        if unused and recipe.vectors is None:  # a store's own recipes have some
            LOG.warning("%s does not use the recipe's `%s`", self.method, listed(unused))

    def _check_store(self, name: str) -> None:
        out, store = Path(os.path.realpath(self.out)), Path(os.path.realpath(name))
        if ranks.world().size > 1:
            raise UserError("--store needs a single process: start one, or leave out --store")
        if out.is_relative_to(store) or store.is_relative_to(out):
            raise UserError(f"--store {name}: name two folders, none in the other ({self.out})")
        if store.is_relative_to(self.partial):
            raise UserError(f"--store {name}: {self.partial} holds finished files; choose another")
