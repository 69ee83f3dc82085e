"""`tvb learn` in order: what can be wrong first, the bill, what is learned, the merged model."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from mergekit.common import dtype_from_name

from tvb_mergekit import __version__
from tvb_mergekit.atomic import is_left_over
from tvb_mergekit.errors import UserError, counted, listed, megabytes
from tvb_mergekit.learn import kept
from tvb_mergekit.learn.data import DataFile, Example, encode, open_tokenizer, read_data
from tvb_mergekit.learn.merging import BY_MIXTURES, Mixture, check_basis
from tvb_mergekit.learn.models import TaskModels
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.plugin.plan import Learned, Plan
from tvb_mergekit.store.facts import FOLDER, FileRecord
from tvb_mergekit.store.store import check_files, record_of
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.layout import MEMORY
from tvb_mergekit.tensors.merging import most_bases
from tvb_mergekit.tensors.output import check_disk
from tvb_mergekit.tensors.passes import LEAST

LOG = logging.getLogger(__name__)
LEARNED = "learned.json"  # in basis/ of a merged model

Method = Literal["fisher", "regmean", "localize", "adamerging", "atlas"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for; see `tvb learn --help`. None: the method's own."""

    document: Document
    text: str
    method: Method
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
        """Where what is learned is until the merged model is whole."""
        return Path(f"{os.path.realpath(self.out)}.partial")

    @property
    def by_gradient(self) -> bool:
        """Whether it is learned step by step, from the base's model."""
        return self.method not in ("fisher", "regmean")

    @property
    def needs_data(self) -> bool:
        return self.source is None and not self.dataless


@dataclass(frozen=True)
class Costs:
    """What a method takes: passes of one example, and bytes.

    Attributes:
        model: of the tensors of models, and what is learned of them, at once.
        activations: of a batch; None: unknown.
        disk: of what is kept beside the merged model.
    """

    forward: int
    backward: int
    model: int
    activations: int | None
    disk: int


@dataclass(frozen=True)
class Bill:
    """What it takes.

    Attributes:
        examples: task -> how many are used, and how many its file has.
        at_most: M is known only once the bases are built.
        early: it may end before.
    """

    method: str
    bases: int
    at_most: bool
    early: bool
    examples: Mapping[str, tuple[int, int]]
    costs: Costs
    output: int

    @property
    def memory(self) -> int:
        return self.costs.model + (self.costs.activations or 0) + LEAST

    @property
    def disk(self) -> int:
        return self.costs.disk + self.output

    @property
    def activations(self) -> str:
        """Say which part of the memory activations take."""
        if self.costs.activations is None:
            return "without activations, which are not counted: the model's code allows no estimate"
        return f"of it activations: about {megabytes(self.costs.activations)}"

    def lines(self) -> list[str]:
        """For people."""
        used = [f"{task} {some} of {every}" for task, (some, every) in self.examples.items()]
        most, costs = "at most " * self.at_most, self.costs
        passes = "at most " * (self.at_most or self.early)
        return [
            f"{self.method} over {most}{counted(self.bases, 'basis')}",
            f"Examples: {', '.join(used) or 'none'}",
            f"Passes of one example: {passes}{costs.forward} forward, {costs.backward} backward",
            f"Memory: {megabytes(self.memory)}, {self.activations}",
            f"Disk: {megabytes(self.disk)}",
        ]


class Work(ABC):
    """The work of one method on one planned merge.

    Attributes:
        models: of the tasks and of the base.
        files: the data.
        passes: forward and backward, of one example each, as they were done.
    """

    folder: str  # in basis/, of what is learned

    def __init__(self, request: Request, plan: Plan) -> None:
        self.request, self.plan = request, plan
        if plan.changed:
            raise UserError(
                f"tensor `{next(iter(plan.changed))}` is changed by the recipe's tokenizer, and "
                "no longer what a model has learned; set `tokenizer_source: base`"
            )
        self.device = plan.devices[0]
        self.dtype = dtype_from_name(request.precision)
        self.models = TaskModels(plan, self.device)
        self.tasks = self.models.tasks
        self.files: list[DataFile] = []
        if request.needs_data:
            names = None if request.method == "atlas" else self.tasks
            self.files = read_data(request.data, names, self.unlabeled)
        self.encoded = {file.task: self._encoded(file) for file in self.files}
        self.seconds = 0.0
        self.passes = (0, 0)

    @property
    def unlabeled(self) -> bool:
        """Whether it learns from prompts alone."""
        return self.request.method == "adamerging"

    @property
    def most_bases(self) -> int:
        """M, or the most that it can be."""
        recipe, basis = self.plan.recipe, self.plan.basis
        if recipe.store is not None:
            return len(recipe.store.order)
        return most_bases(recipe.settings, len(recipe.tasks)) if basis is None else basis.num_bases

    @property
    def share(self) -> float:
        """Of the examples of a task that are used: M / T (paper, section 3.2)."""
        return self.most_bases / len(self.tasks) if self.request.subsample else 1.0

    @property
    def examples_used(self) -> dict[str, tuple[int, int]]:
        """Task -> how many are used, and how many its file has."""
        return {f.task: (f.count(self.share), len(f.records)) for f in self.files}

    @property
    def examples(self) -> dict[str, list[Example]]:
        """The same as tokens."""
        seed, share = self.request.seed, self.share
        return {f.task: [self.encoded[f.task][k] for k in f.drawn(share, seed)] for f in self.files}

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max((len(e.ids) for some in self.encoded.values() for e in some), default=0)

    @property
    def model_bytes(self) -> int:
        """A model in float32."""
        base = self.plan.checkpoints[self.plan.recipe.base]
        return 4 * sum(info.numel for info in base.tensors.values())

    @property
    @abstractmethod
    def outputs(self) -> list[Path]:
        """The files of what is learned, where they lie while it is made, or in --from."""

    @abstractmethod
    def costs(self) -> Costs:
        """What it takes, as far as it is known."""

    @property
    def unfinished(self) -> list[Path]:
        """The files that a run of this method may leave."""
        return self.outputs

    def known(self) -> None:  # noqa: B027
        """Raise UserError where --from has not what this merge needs, as far as it is known."""

    @abstractmethod
    def learn(self) -> Learned:
        """What merges the bases; `write` is called after it."""

    def after(self) -> None:  # noqa: B027
        """What is written once the merged model is whole."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What learned.json says beside what all methods have."""

    @property
    def bill(self) -> Bill:
        """What it takes, as far as it is known."""
        recipe = self.plan.recipe
        at_most = recipe.store is None and recipe.settings.energy is not None
        at_most &= self.plan.basis is None
        early, name = self.request.by_gradient, self.request.method
        examples, costs, output = self.examples_used, self.costs(), self.plan.output_bytes
        return Bill(name, self.most_bases, at_most, early, examples, costs, output)

    def check(self) -> Bill:
        """The bill. Raises UserError where it cannot be paid, or --from does not fit."""
        request = self.request
        bill = self.bill
        if bill.memory > request.memory:
            raise UserError(
                f"{megabytes(request.memory)} of memory are too little for {request.method}, which "
                f"takes {megabytes(bill.memory)}, {bill.activations}; raise --memory"
            )
        check_disk(request.out, bill.disk)
        if request.source is not None:
            self._check_source(request.source)
            self.known()
            if request.partial.is_dir():
                LOG.warning("%s is neither used nor deleted (--from)", request.partial)
            return bill
        for file in self._left():
            if not kept.is_ours(file):
                raise UserError(
                    f"{file} is in the way: damaged, or not of an unfinished run; move it, or "
                    "delete it (--resume learns again what it held)"
                )
        return bill

    def _left(self) -> list[Path]:
        """Return all files in OUT.partial, except remains of `atomic.beside`.

        Raises:
            UserError: OUT.partial is not a folder.
        """
        partial = self.request.partial
        if os.path.lexists(partial) and not partial.is_dir():
            raise UserError(
                f"{partial} is in the way: not a folder, and a folder of this name holds what is "
                "learned until OUT is complete; move it, or name another --out"
            )
        return [file for file in partial.glob("*") if not is_left_over(file)]

    def _check_source(self, source: str) -> None:
        """Raise UserError where --from is no output of this method, or files of it have changed."""
        file, method = Path(source) / FOLDER / LEARNED, self.request.method
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            found, files = said["method"], said["files"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--from {source}: {file} cannot be read; expected what `tvb learn` wrote as --out"
            ) from error
        if found != method:
            raise UserError(f"--from {source}: learned by {found}, not by {method}")
        records = {name: FileRecord.model_validate(record) for name, record in files.items()}
        check_files(self.place, records, LEARNED, "restore it, or learn anew")

    def _encoded(self, file: DataFile) -> list[Example]:
        """A file as tokens."""
        models, folders = self.models, []
        if not self.request.by_gradient:
            folders.append(models.folder(file.task))
        folders += [models.base_folder, *map(models.folder, self.tasks)]
        tokenizer = open_tokenizer(folders, self.request.options.trust_remote_code)
        limits = models.limits(None if self.request.by_gradient else file.task)
        return encode(file, tokenizer, *limits)

    @property
    def place(self) -> Path:
        """Where what is learned lies: of --from, or while it is made."""
        if self.request.source is not None:
            return Path(self.request.source) / FOLDER / self.folder
        return self.request.partial

    def begin(self) -> None:
        """Make the folder of an unfinished run, or go on in the one that is there."""
        request = self.request
        if request.source is None and ranks.world().leads:
            left = self._left()
            if left and not request.resume:
                told = "%s, an unfinished run, is replaced (--resume continues it)"
                LOG.warning(told, request.partial)
                shutil.rmtree(request.partial)
            other = sorted({f.name for f in left} - {f.name for f in self.unfinished})
            if other and request.resume:
                raise UserError(
                    f"--resume: {request.partial} is of another run ({listed(other)}): give "
                    "what that had, or leave out --resume to begin again"
                )
            request.partial.mkdir(parents=True, exist_ok=True)
        ranks.world().share(lambda: None)

    def write(self, folder: Path) -> None:
        """`learned.json`, what was learned, and a line in the model card."""
        request, place = self.request, folder / FOLDER / self.folder
        place.mkdir()
        files = {}
        for file in self.outputs:
            _link(file, place / file.name)
            files[file.name] = record_of(place / file.name).model_dump()
        found = {
            "format_version": 1,
            "version": __version__,
            "method": request.method,
            "from": request.source,
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
            line = (
                f"\nThe bases were merged by `tvb learn {request.method}` in the place of the "
                f"recipe's addition: see `{FOLDER}/{LEARNED}`.\n"
            )
            with card.open("a", encoding="utf-8") as stream:
                stream.write(line)


def check_request(request: Request) -> None:
    """Raise UserError for what is wrong without the models' help."""
    document, method = request.document, request.method
    for wrong, told in _mistakes(request):
        if wrong:
            raise UserError(told)
    unused = [key for key in document.varying if (method, key) != ("adamerging", "lambda")]
    if unused and document.recipe.vectors is None:  # whose own recipes have some
        LOG.warning("%s does not use the recipe's `%s`", method, listed(unused))


def _mistakes(request: Request) -> Iterator[tuple[Any, str]]:
    document, method = request.document, request.method
    name = document.recipe.settings.method
    yield (
        name != "basis_ta",
        f"the recipe's `merge_method` is {name}, and {method} takes the place of addition: "
        "expected basis_ta",
    )
    yield (
        document.raw,
        "the recipe's models are weight files, which no example can go through: list folders as "
        "Hugging Face writes them",
    )
    yield request.source and request.data, "--from takes what was learned: no --data"
    yield (
        request.store and ranks.world().size > 1,
        "--store is written by one process: learn without it, then give --from and --store",
    )
    out, store = (Path(os.path.realpath(path)) for path in (request.out, request.store or ""))
    yield (
        request.store and (out.is_relative_to(store) or store.is_relative_to(out)),
        f"--store {request.store} and --out {request.out}: two folders, none in the other",
    )
    yield (
        request.store and store.is_relative_to(request.partial),
        f"--store {request.store}: {request.partial} holds what is learned until --out is "
        "complete, and is then deleted; name another folder",
    )
    yield request.dataless and request.data, "--dataless takes no --data"
    yield request.dataless and request.source, "--dataless and --from: give one of them"
    usual = Request(document=document, text="", method=method, out="")
    for option, methods in BELONGS.items():
        field_ = option.replace("-", "_")
        if getattr(request, field_) != getattr(usual, field_):
            yield method not in methods, f"--{option} belongs to {listed(methods, 5)}"
            later = option in LATER and not (option == "mixture" and request.by_gradient)
            told = f"--{option}: what was learned is in --from already; leave it out"
            yield request.source and not later, told
            told = f"--{option}: --dataless passes no examples; leave it out"
            yield request.dataless and option not in ("density", "dataless", "store"), told


# Options of some methods alone; those that are not among LATER shape what is learned.
GRADIENT = ("localize", "adamerging", "atlas")
EVERY = ("fisher", "regmean", *GRADIENT)
BELONGS = {
    "seed": EVERY,
    "subsample": EVERY,
    "precision": EVERY,
    "samples": ("fisher",),
    "normalize": ("fisher",),
    "off-diagonal": ("regmean",),
    "mixture": ("fisher", "regmean", "localize"),
    "epochs": GRADIENT,
    "learning-rate": GRADIENT,
    "batch-size": GRADIENT,
    "held-out": GRADIENT,
    "patience": GRADIENT,
    "checkpointing": GRADIENT,
    "density": ("localize",),
    "dataless": ("localize",),
    "penalty": ("localize",),
    "store": ("localize",),
    "blocks": ("atlas",),
    "nonnegative": ("adamerging", "atlas"),
}
LATER = ("normalize", "off-diagonal", "mixture", "store")


def learn(request: Request, dry: bool = False) -> Bill:
    """Merge by what examples show, into the folder `request.out`.

    Args:
        dry: only the bill.

    Raises:
        UserError, MergeRefused: what refuses it.
    """
    from tvb_mergekit.learn.descents import Descents
    from tvb_mergekit.learn.visits import Visits
    from tvb_mergekit.plugin.inputs import check_for_store, planned
    from tvb_mergekit.plugin.preflight import input_folders
    from tvb_mergekit.plugin.run import staged, warn_of_stale_parts, write_model
    from tvb_mergekit.store.store import lock
    from tvb_mergekit.tensors.output import check_new_folder, check_output_folder

    started, world = time.perf_counter(), ranks.world()
    document, out = request.document, request.out
    check_request(request)
    if request.store is not None:
        check_for_store(document)
    with ExitStack() as stack:
        made = planned(document, request.options, request.memory)
        plan = world.first(lambda: stack.enter_context(made))
        if request.method in BY_MIXTURES and not request.dataless:
            check_basis(plan, request.mixture)
        work: Work = (Descents if request.by_gradient else Visits)(request, plan)
        if dry:
            return work.bill

        def check_places() -> None:
            if request.resume and (Path(out) / FOLDER / LEARNED).is_file():
                told = f"--resume: {out} is whole already"
                more = f"; its store is made by --from {out} and another --out"
                raise UserError(told + more * (request.store is not None))
            check_output_folder(out, input_folders(document.recipe))
            if request.store is not None:
                check_new_folder(request.store, input_folders(document.recipe))

        if world.leads:
            check_places()
            warn_of_stale_parts(out)
        bill = work.check()
        if world.leads:
            for path in filter(None, (out, request.store)):
                stack.callback(lock(path, lambda text: LOG.warning("%s", text)).release)
            check_places()  # another process may have written there meanwhile
        plan.build()
        assert plan.basis is not None
        began = time.perf_counter()
        work.begin()
        plan.learned = work.learn()
        work.seconds = plan.basis.seconds["learn"] = time.perf_counter() - began
        with staged(out) as stage:
            write_model(plan, document.config, stage, request.text, started)
        work.after()
        if request.source is None:
            shutil.rmtree(request.partial, ignore_errors=True)
    return bill


def _link(file: Path, place: Path) -> None:
    """Give a file a second name, or copy it where the disk has no such."""
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)


def peak_memory() -> dict[str, int]:
    """Bytes: the most that the process had in memory, and on an accelerator."""
    found = {}
    with suppress(ImportError):  # on Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.max_memory_allocated()
    return found
