"""`tvb learn` in order: what can be wrong first, the bill, the statistics, the merged model."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from tvb_mergekit import __version__
from tvb_mergekit.core.gram import block_budget
from tvb_mergekit.errors import UserError, counted, listed, megabytes
from tvb_mergekit.learn import statistics
from tvb_mergekit.learn.data import DataFile, Example, encode, open_tokenizer, read_data
from tvb_mergekit.learn.merging import Merging, bases_of, check_basis, layer_bytes
from tvb_mergekit.learn.models import TaskModels
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import Options, planned
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.plugin.preflight import input_folders
from tvb_mergekit.plugin.run import staged, write_model
from tvb_mergekit.progress import bars
from tvb_mergekit.store.bits import slugs
from tvb_mergekit.store.facts import FOLDER
from tvb_mergekit.store.store import lock
from tvb_mergekit.tensors.layout import MEMORY
from tvb_mergekit.tensors.merging import most_bases
from tvb_mergekit.tensors.output import check_disk, check_output_folder
from tvb_mergekit.tensors.passes import LEAST

LOG = logging.getLogger(__name__)
STATISTICS = "statistics"  # in basis/ of a merged model
LEARNED = "learned.json"  # likewise


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for; see `tvb learn --help`."""

    document: Document
    text: str
    method: Literal["fisher", "regmean"]
    out: str
    data: Sequence[str] = ()
    source: str | None = None
    samples: int = 0
    off_diagonal: float = 0.9
    subsample: bool = True
    seed: int = 0
    memory: int = MEMORY
    resume: bool = False
    options: Options = field(default_factory=Options)

    @property
    def partial(self) -> Path:
        """Where the statistics are until the merged model is whole."""
        return Path(f"{os.path.realpath(self.out)}.partial")


@dataclass(frozen=True)
class Bill:
    """What it takes.

    Attributes:
        examples: task -> how many are used, and how many its file has.
        at_most: M is known only once the bases are built.
        memory: the most bytes of tensors at once, activations aside.
        disk: of the merged model and the statistics.
    """

    method: str
    bases: int
    at_most: bool
    examples: Mapping[str, tuple[int, int]]
    forward: int
    backward: int
    memory: int
    disk: int

    def lines(self) -> list[str]:
        """For people."""
        used = [f"{task} {some} of {every}" for task, (some, every) in self.examples.items()]
        most = "at most " * self.at_most
        return [
            f"{self.method} over {most}{counted(self.bases, 'basis')}",
            f"Examples: {', '.join(used) or 'none; the statistics are there'}",
            f"Passes: {most}{self.forward} forward, {self.backward} backward, one example each",
            f"Memory: {megabytes(self.memory)}, and the activations of one example",
            f"Disk: {megabytes(self.disk)}",
        ]


def learn(request: Request, dry: bool = False) -> Bill:
    """Merge by what the task models show on data, into the folder `request.out`.

    Args:
        dry: only the bill.

    Raises:
        UserError, MergeRefused: what refuses it.
    """
    started = time.perf_counter()
    document, out = request.document, request.out
    _check(request)
    with ExitStack() as stack:
        plan = stack.enter_context(planned(document, request.options, request.memory))
        check_basis(plan)
        run = _Run(request, plan)
        if dry:
            return run.bill
        check_output_folder(out, input_folders(document.recipe))
        run.check()
        stack.callback(lock(out, lambda text: LOG.warning("%s", text)).release)
        plan.build()
        assert plan.basis is not None
        bases_of(plan)  # refuses negative weights
        began = time.perf_counter()
        files = run.statistics()
        run.seconds = plan.basis.seconds["learn"] = time.perf_counter() - began
        plan.learned = Merging(
            request.method, files, run.dimensions, request.off_diagonal, partial(run.write, files)
        )
        with staged(out) as stage:
            write_model(plan, document.config, stage, request.text, started)
        shutil.rmtree(request.partial, ignore_errors=True)
    return run.bill


def _check(request: Request) -> None:
    """Raise UserError for what is wrong without the models' help."""
    document, method = request.document, request.method
    mistakes = [
        (
            document.recipe.settings.method != "basis_ta",
            f"the recipe's `merge_method` is {document.recipe.settings.method}, and {method} takes "
            "the place of addition: expected basis_ta",
        ),
        (
            document.raw,
            "the recipe's models are weight files, which no example can go through: list folders "
            "as Hugging Face writes them",
        ),
        (request.samples and method != "fisher", "--samples belongs to fisher"),
        (request.source and request.data, "--from takes statistics that are there: no --data"),
        (
            request.source and request.samples,
            "--samples: the statistics of --from are there already; leave it out",
        ),
    ]
    for wrong, told in mistakes:
        if wrong:
            raise UserError(told)
    if document.varying and not document.recipe.in_store:  # whose own recipes have some
        LOG.warning("%s does not use the recipe's `%s`", method, listed(list(document.varying)))


class _Run:
    """The work on one planned merge."""

    def __init__(self, request: Request, plan: Plan) -> None:
        self.request, self.plan = request, plan
        if aligned := [p.name for p in plan.counted.values() if p.whole and None not in p.names]:
            raise UserError(
                f"tensor `{aligned[0]}` is changed by the recipe's tokenizer, and no longer what a "
                "model's statistics are of; set `tokenizer_source: base`"
            )
        device = plan.devices[0]
        self.models = TaskModels(plan, device)
        self.tasks = self.models.tasks
        self.files: list[DataFile] = []
        if request.source is None:
            self.files = read_data(request.data, self.tasks)
        self.dimensions = self.models.dimensions()
        self.examples: dict[str, list[Example]] = {}
        self.seconds = 0.0
        self.told: list[Mapping[str, Any]] = []

    @property
    def most_bases(self) -> int:
        """M, or the most that it can be."""
        recipe = self.plan.recipe
        store = recipe.store
        return most_bases(recipe.settings, len(recipe.tasks)) if store is None else len(store.order)

    @property
    def share(self) -> float:
        """Of the examples of a task that are used: M / T (paper, section 3.2)."""
        if not self.request.subsample:
            return 1.0
        basis = self.plan.basis
        return (self.most_bases if basis is None else basis.num_bases) / len(self.tasks)

    @property
    def bill(self) -> Bill:
        """What it takes, as far as it is known."""
        fisher, recipe = self.request.method == "fisher", self.plan.recipe
        examples = {f.task: (f.count(self.share), len(f.records)) for f in self.files}
        forward, merging = sum(used for used, _ in examples.values()), 0
        base = self.plan.checkpoints[recipe.base]
        model = 4 * sum(info.numel for info in base.tensors.values())
        sizes = {item.name: item.shape for item in self.plan.items()}
        if fisher:  # the sums, and the gradient of one tensor
            numels = [math.prod(shape) for shape in sizes.values()]
            held, stored = 4 * (sum(numels) + max(numels)), 4 * sum(numels)
        else:  # sums in float64, and a product in float32
            layers = {name: (sizes[name], where) for name, where in self.dimensions.items()}
            squares = [shape[where] ** 2 for shape, where in layers.values()]
            held, stored = 8 * sum(squares) + 8 * max(squares, default=0), 4 * sum(squares)
            each = (layer_bytes(shape, self.most_bases, where) for shape, where in layers.values())
            merging = max(each, default=0)
        visiting = model + held
        if self.models.stored is not None:  # whose vectors are decoded into the model
            visiting += block_budget()
        if not self.files:
            visiting = stored = 0
        return Bill(
            self.request.method,
            self.most_bases,
            recipe.store is None and recipe.settings.energy is not None and self.plan.basis is None,
            examples,
            forward,
            forward * max(1, self.request.samples) * fisher,
            max(visiting, merging) + LEAST,
            self.plan.output_bytes + stored * len(self.tasks),
        )

    def check(self) -> None:
        """Raise UserError where the bill cannot be paid, or examples or statistics do not fit."""
        bill = self.bill
        if bill.memory > self.request.memory:
            raise UserError(
                f"{megabytes(self.request.memory)} of memory are too little for "
                f"{self.request.method}: one model and its statistics take "
                f"{megabytes(bill.memory)}; raise --memory"
            )
        check_disk(self.request.out, bill.disk)
        partial = self.request.partial
        there = [file for file in partial.glob("*") if not file.name.startswith(".")]
        if any(statistics.told_in(file) is None for file in there):
            raise UserError(f"{partial} is in the way, and no unfinished run; move or delete it")
        if self.request.source is not None:
            self.told = [self._known(file, task) for task, file in self._files().items()]
        for file in self.files:
            folders = [self.models.folder(file.task), self.models.base_folder]
            tokenizer = open_tokenizer(folders, self.request.options.trust_remote_code)
            self.examples[file.task] = encode(file, tokenizer, self.models.context(file.task))

    def _files(self) -> dict[str, Path]:
        """Task -> the file of its statistics."""
        source, folder = self.request.source, self.request.partial
        if source is not None:
            folder = Path(source) / FOLDER / STATISTICS
        names = (f"{name}.safetensors" for name in slugs(self.tasks))
        return {t: folder / name for t, name in zip(self.tasks, names, strict=True)}

    def statistics(self) -> list[Path]:
        """The files of the tasks' statistics, computed where they are not there."""
        request, files = self.request, self._files()
        if request.source is not None:
            return list(files.values())
        folder = request.partial
        if folder.is_dir() and not request.resume:
            LOG.warning("%s, an unfinished run, is replaced (--resume continues it)", folder)
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        wanted = self._wanted()
        self.told = list(wanted.values())
        left = [task for task in self.tasks if not _same(files[task], wanted[task])]
        if len(left) < len(files):
            done = [task for task in files if task not in left]
            LOG.warning("--resume: the statistics of %s are there", listed(done))
        total = sum(wanted[task]["examples"] for task in left)
        tell = bars(request.options.quiet)(request.method, total, "example")
        for task in left:
            statistics.save(files[task], self._sums(task, tell), wanted[task])
        return list(files.values())

    def _wanted(self) -> dict[str, dict[str, Any]]:
        """Task -> what its statistics must be of."""
        request = self.request
        return {
            file.task: {
                "method": request.method,
                "task": file.task,
                "weights": self.models.weights(file.task),
                "file": os.path.abspath(file.path),
                "sha256": file.sha256,
                "lines": len(file.records),
                "examples": file.count(self.share),
                "seed": request.seed,
                "samples": request.samples,
            }
            for file in self.files
        }

    def _known(self, file: Path, task: str) -> Mapping[str, Any]:
        """What a file of --from tells; raises UserError where it has not what this merge needs."""
        told = statistics.told_in(file)
        if told is None:
            raise UserError(f"--from {self.request.source}: no statistics of {task} ({file})")
        if told["method"] != self.request.method:
            raise UserError(f"{file}: statistics of {told['method']}, not of {self.request.method}")
        if told["weights"] != self.models.weights(task):
            raise UserError(f"{file}: statistics of another model than this recipe's {task}")
        return told

    def _sums(self, task: str, tell: Any) -> dict[str, torch.Tensor]:
        """The statistics of one task."""
        request, file = self.request, self.files[self.tasks.index(task)]
        chosen = file.drawn(self.share, request.seed)
        examples, path = [self.examples[task][index] for index in chosen], file.path
        model = self.models.load(task)
        parameters = self.models.named(model, task)
        if not parameters:
            raise UserError(
                f"{self.models.folder(task)}: in memory the model names its tensors otherwise than "
                "its files; save it anew with a current transformers"
            )
        if missing := [name for name in self.plan.counted if name not in parameters]:
            LOG.warning("%s: no statistics, the mean of the bases", listed(missing))
        if request.method == "fisher":
            seed = f"{request.seed} {task}"
            return statistics.fisher(model, parameters, examples, path, request.samples, seed, tell)
        layers = statistics.linear_layers(model)
        places = {n: id(p) for n, p in parameters.items() if n in self.dimensions}
        linear = {name: layers[place] for name, place in places.items() if place in layers}
        return statistics.grams(model, linear, examples, path, tell)

    def write(self, files: Sequence[Path], folder: Path) -> None:
        """`learned.json`, the statistics, and a line in the model card."""
        request, place = self.request, folder / FOLDER / STATISTICS
        place.mkdir()
        for file in files:
            _link(file, place / file.name)
        found = {
            "format_version": 1,
            "version": __version__,
            "method": request.method,
            "off_diagonal": request.off_diagonal if request.method == "regmean" else None,
            "seed": request.seed,
            "subsample": request.subsample,
            "from": request.source,
            "tasks": self.told,
            "passes": {"forward": self.bill.forward, "backward": self.bill.backward},
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


def _same(file: Path, wanted: Mapping[str, Any]) -> bool:
    """Whether a file has the statistics that are wanted, wherever the data lies."""
    told = statistics.told_in(file)
    return told is not None and {**told, "file": None} == {**wanted, "file": None}


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
