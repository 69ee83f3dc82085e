"""`tvb add`: one more task into a store, or into bases in memory, by Algorithm 1 (see `online`).

The store of before stays in the new one, as the folder `undo`, until the next task is added.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit import online, report
from tvb_mergekit.basis import UNRELATED_RATIO, unlike
from tvb_mergekit.encoders import Gram
from tvb_mergekit.errors import UserError, remedy
from tvb_mergekit.facts import FACTS, FORMAT_VERSION, TENSORS
from tvb_mergekit.gram import GramSums, block_budget
from tvb_mergekit.inputs import Inputs
from tvb_mergekit.keys import VARYING_KEYS
from tvb_mergekit.output import check_disk, check_new_folder, recover_folder, replace_folder, sync
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.ready import FOLDER, keep_edited
from tvb_mergekit.recipe import Settings, check_tasks
from tvb_mergekit.store import (
    Bases,
    basis_folder,
    dtype_name,
    is_store,
    load,
    note_files,
    numbers_of,
    read_store_facts,
)
from tvb_mergekit.store import lock as store_lock
from tvb_mergekit.store_writing import finish_store, finish_vectors, local_path, writers_of
from tvb_mergekit.stream import Item, Part, combine, gram_of
from tvb_mergekit.weights import StateDict, Weights
from tvb_mergekit.writing import FoldersSink, MemorySink

LOG = logging.getLogger(__name__)
UNDO = "undo"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Growth:
    """How `add` works; None: as the store says.

    Attributes:
        budget: the most bases that the store may hold.
        compress: `ae` or `balanced`.
        dtype: of a store that is new.
        doubt: called with what speaks against it: a model that seems to be of another base, the
            end of an exact sum. It raises to refuse.
        warn: called with what should be looked at.
    """

    budget: int | None = None
    compress: str | None = None
    dtype: torch.dtype = torch.float32
    doubt: Callable[[str], object] = LOG.warning
    warn: Callable[[str], object] = LOG.warning


def add_to_store(
    path: str | os.PathLike[str],
    inputs: Inputs,
    growth: Growth = Growth(),
    *,
    device: torch.device = CPU,
    budget: int | None = None,
    progress: Progress = silent,
) -> Bases:
    """Add the one model of `inputs` to the store at `path`, which is made if it does not exist.

    Args:
        budget: bytes that may be allocated; None: TVB_MERGEKIT_BLOCK_MB.

    Raises:
        UserError: another base, tensors that differ from the store's, a task name that is there,
            a budget that does not fit, no room, a doubt. The store is as it was then.
    """
    store = Path(os.path.realpath(path))
    with _changing(store, "add to") as work:
        if is_store(store):
            bases: Bases | None = load(store)
        else:
            check_new_folder(store, [n for n in inputs.fingerprints if os.path.exists(n)])
            bases = None
        task = _Addition(bases, inputs, growth, device, budget or block_budget(), progress)
        facts = task.write(work, store)
        if bases is None:
            os.rename(work, store)
        else:
            replace_folder(work, store)
        note_files(store, facts["store"]["files"])
    return load(store)


def undo_addition(path: str | os.PathLike[str]) -> Bases:
    """Make a store again what it was before the last `add_to_store`.

    Raises:
        UserError: no store, or nothing to undo.
    """
    store = Path(os.path.realpath(path))
    with _changing(store, "undo the last addition to") as work:
        facts = read_store_facts(store)
        if not (store / UNDO).is_dir():
            raise UserError(f"{path}: nothing to undo: no `tvb add` since it was made, or undone")
        _link_own(load(store / UNDO), work)
        _keep_others(store, facts, work)
        _sync_all(work)
        replace_folder(work, store)
    return load(store)


@contextmanager
def _changing(store: Path, what: str) -> Iterator[Path]:
    """A folder beside the store, to be made its successor; locked, and tidied up at the end."""
    held = store_lock(store, LOG.warning)
    work = None
    try:
        for stale in store.parent.glob(f".{glob.escape(store.name)}.adding-*"):
            shutil.rmtree(stale, ignore_errors=True)  # ours alone, under the lock
        recover_folder(store)
        work = Path(tempfile.mkdtemp(prefix=f".{store.name}.adding-", dir=store.parent))
        os.chmod(work, 0o755)
        yield work
    except OSError as error:
        mend = remedy(error) and f"; {remedy(error)}"
        raise UserError(f"cannot {what} {store}, which is as it was: {error}{mend}") from error
    finally:
        if work is not None and work.exists():
            shutil.rmtree(work, ignore_errors=True)
        held.release()


def add_in_memory(
    bases: Bases | None,
    inputs: Inputs,
    growth: Growth = Growth(),
    *,
    device: torch.device = CPU,
) -> Bases:
    """The same with the new bases as state dicts; `bases` are not changed."""
    return _Addition(bases, inputs, growth, device, block_budget(), silent).in_memory()


class _Addition:
    """One step of Algorithm 1, from the checks to the new facts."""

    def __init__(
        self,
        bases: Bases | None,
        inputs: Inputs,
        growth: Growth,
        device: torch.device,
        memory: int,
        progress: Progress,
    ) -> None:
        self.bases, self.inputs, self.growth = bases, inputs, growth
        self.device, self.memory, self.progress = device, memory, progress
        self.started = time.perf_counter()
        if bases is not None and bases.facts["store"]["contents"] == "adapters":
            raise UserError(
                f"{bases.path} holds adapters, whose ranks would grow with every task: build "
                "a store of tensors (without --adapters) to add to"
            )
        old = [] if bases is None else bases.tasks
        (task,) = inputs.tasks
        if task in old:
            raise UserError(
                f"the task {task!r} is in {bases.path if bases else 'these bases'} already: give "
                "another name with --task"
            )
        check_tasks([*old, task], [*([] if bases is None else bases.facts["models"]), task])
        self.count = 0 if bases is None else bases.num_bases
        self.dtype = growth.dtype if bases is None else bases.dtype
        self.how, self.budget = self._how(), self._budget()
        if bases is not None:
            bases.check_base(inputs.base, inputs.base_model)
        self.items = self._items()
        self.step = self._step()

    def _how(self) -> str:
        """`ae` or `balanced`."""
        built = None if self.bases is None else self.bases.facts["store"]["compress"]
        if self.bases is not None and built is None:
            raise UserError(
                f"the bases in {self.bases.path or 'memory'} are {self.bases.basis}, no convex "
                "combinations of tasks: only ae, balanced, rand_select and none can grow"
            )
        how = self.growth.compress or built or self.inputs.settings.basis
        if how not in online.COMPRESSIONS:
            raise UserError(
                f"`{how}` cannot compress online: expected one of {', '.join(online.COMPRESSIONS)}"
            )
        if how == "balanced" and self.bases is not None and self.bases.basis_weights is None:
            raise UserError(
                "--compress balanced keeps the sum of all tasks, and the bases in "
                f"{self.bases.path or 'memory'} ({self.bases.basis}) do not hold it: compress by "
                "ae, or build the store with `basis: balanced`"
            )
        if how == "ae" and built == "balanced":
            self.growth.doubt(
                f"{self._where} is balanced: once it is compressed by ae, its bases no longer add "
                "up to the sum of all tasks, and it cannot be compressed by balanced again"
            )
        return str(how)

    def _budget(self) -> int:
        built = None if self.bases is None else self.bases.facts["store"]["budget"]
        budget = built if self.growth.budget is None else self.growth.budget
        if budget is None:
            raise UserError("a new store needs --budget M, the most bases that it may hold")
        online.check_budget(int(budget), self.count)
        return int(budget)

    def _items(self) -> list[Item]:
        """The store's tensors, with the bases and the new model as inputs."""
        given = {item.name: item for item in self.inputs.items}
        if self.bases is None:
            return [replace(item, out=self.dtype) for item in self.inputs.items]
        items = []
        (model,) = self.inputs.models
        left_out = self.bases.facts["left_out"]
        for name in given:
            known = name in self.bases.names
            if not known and not str(left_out.get(name, "")).startswith("excluded"):
                reason = left_out.get(name, "not in the store")
                if self.bases.stored_name(name) is not None:
                    reason = "tied there, and on its own in the model"
                raise UserError(
                    f"tensor `{name}` of model {model} takes no part in {self._where} ({reason}), "
                    "so that what was trained there would be lost: build a store with it"
                )
        for name in self.bases.names:
            item = given.get(name)
            if item is None:
                reason = self.inputs.left_out.get(name, "not in it")
                raise UserError(
                    f"tensor `{name}` is in {self._where}, and model {model} does not give it "
                    f"({reason}): a store holds one set of tensors"
                )
            shape = self.bases.vectors[0].tensors[name].shape
            if shape != item.shape:
                raise UserError(
                    f"tensor `{name}`: {list(item.shape)} in model {model}, {list(shape)} in the "
                    "bases"
                )
            parts = [Part.of(vector, name) for vector in self.bases.vectors]
            items.append(replace(item, inputs=(*parts, *item.inputs), out=self.dtype))
        return items

    @property
    def _where(self) -> str:
        return str((self.bases and self.bases.path) or "the bases")

    @property
    def deltas(self) -> int:
        return self.count + (1 if self.inputs.deltas else 0)

    def _step(self) -> online.Step:
        """Read the bases and the new model once, and find the new coefficients."""
        names = [*(basis_folder(m) for m in range(self.count)), *self.inputs.tasks]
        weights = torch.ones(self.count + 1, dtype=torch.float64)
        weights[-1] = self.inputs.weights[0]
        if self.bases is None and self.inputs.sums is not None:
            sums: GramSums = self.inputs.sums
        else:
            sums = gram_of(
                self.items,
                names,
                devices=[self.device],
                budget=self.memory,
                deltas=self.deltas,
                progress=self.progress("Gram matrix", sum(item.nbytes for item in self.items)),
            )
        self.sums = sums.scaled(weights.tolist())
        square = float(self.sums.gram[-1, -1])
        if square == 0.0:
            raise UserError(
                f"task `{self.inputs.tasks[0]}`: its task vector is zero: the model is identical "
                "to the base"
            )
        self.norm = square**0.5
        self._check_alike(sums)
        settings = self._settings()
        made = online.add_task(self._buffer(), self.sums.gram, self.budget, self.how, settings)
        self.weight = float(weights[-1])
        sizes = made.gram_bases.diagonal().clamp(min=0).sqrt()
        lost = online.cast_loss(sizes, self.dtype, sum(item.numel for item in self.items))
        if not made.compressed:
            lost[:-1] = 0  # as they were
        return made.rounded(lost)

    def _check_alike(self, sums: GramSums) -> None:
        """Refuse a model that seems to be fine-tuned from another base, or from none."""
        base, *sizes = sums.sizes
        norm = float(sums.gram[-1, -1]) ** 0.5
        mine, others = sizes[-1], []
        if self.bases is not None:
            known = self.bases.tensors
            if "matrix_norms" not in known:  # a store of the first version
                mine = norm
            norms = known.get("matrix_norms", known["norms"])
            others = (norms / self.bases.weights.abs()).tolist()
        self.size, self.base_size = sizes[-1] * abs(self.inputs.weights[0]), base
        model = f"model {self.inputs.models[0]}"
        if reason := unlike(mine, base, others, UNRELATED_RATIO):
            self.growth.doubt(
                f"{model}: {reason}: is it fine-tuned from this base? A task that was added cannot "
                "be taken out of the bases later"
            )
        elif reason := unlike(norm, sums.base_norm_squared**0.5):
            self.growth.warn(f"{model}: {reason}: is it fine-tuned from this base?")

    def _settings(self) -> Settings:
        settings = self.inputs.settings if self.bases is None else self.bases.settings
        return settings.model_copy(update={"basis": self.how})

    def _buffer(self) -> online.Buffer:
        bases = self.bases
        if bases is None:
            return online.Buffer.empty()
        assert bases.encoder is not None
        norms = bases.tensors["norms"]
        low, high = bases.tensors["errors"]
        gram = bases.tensors.get("gram")
        if "residual" in bases.tensors:
            residual, slack = bases.tensors["residual"], bases.tensors["residual_slack"]
        else:  # a store that was built offline, with bounds but for the noise of G
            assert gram is not None
            sizes = bases.tensors["gram_bases"].diagonal().clamp(min=0).sqrt()
            lost = online.cast_loss(sizes, bases.dtype, bases.facts["num_parameters"])
            known = online.Known.offline(gram, bases.encoder, bases.decoder, lost)
            low, high, residual, slack = known.low, known.high, known.residual, known.slack
        weights = bases.basis_weights
        return online.Buffer(
            bases.encoder, bases.decoder, gram, weights, norms, low, high, residual, slack
        )

    def _combine(self, items: list[Item], matrix: Tensor, sink: FoldersSink | MemorySink) -> None:
        matrix = matrix.clone()
        matrix[-1] *= self.weight
        combine(
            items,
            matrix,
            sink,
            devices=[self.device],
            budget=self.memory,
            deltas=len(matrix) - 1 if not self.inputs.deltas else len(matrix),
            progress=self.progress("Bases", sum(item.nbytes for item in items)),
        )

    def in_memory(self) -> Bases:
        sink = MemorySink(self.step.matrix.shape[1])
        self._combine(self.items, self.step.matrix, sink)
        vectors: list[Weights] = [StateDict(state) for state in sink.states]
        facts = self._facts({})
        return Bases(facts, {**numbers_of(facts), **self._tensors()}, vectors)

    def write(self, work: Path, store: Path) -> dict[str, Any]:
        """Write the new store into `work`; `store` is where it will lie. Returns its facts."""
        items, matrix = self.items, self.step.matrix
        kept = [] if self.step.compressed else [basis_folder(m) for m in range(self.count)]
        if kept:  # nothing but the new vector is written, the others are the same files
            items = [replace(item, inputs=item.inputs[-1:]) for item in items]
            matrix = matrix[-1:, -1:]
        outputs = matrix.shape[1]
        check_disk(str(work), outputs * sum(i.numel for i in items) * self.dtype.itemsize)
        files: dict[str, dict[str, object]] = {}
        for name in kept:
            assert self.bases is not None and self.bases.path is not None
            shutil.copytree(self.bases.path / name, work / name, copy_function=_link)
            old = self.bases.facts["store"]["files"]
            files |= {file: record for file, record in old.items() if file.startswith(f"{name}/")}
        names = [basis_folder(m) for m in range(len(kept), len(kept) + outputs)]
        writers = writers_of(work, names, items, self._config_folder())
        self._combine(items, matrix, FoldersSink(writers))
        files |= finish_vectors(writers, self._config_folder(), first=len(kept))
        facts = self._facts(files)
        finish_store(work, store, facts, self._tensors())
        if self.bases is not None and self.bases.path is not None:
            _keep_others(self.bases.path, self.bases.facts, work)
            (work / UNDO).mkdir()
            _link_own(self.bases, work / UNDO)
        _sync_all(work)
        return facts

    def _config_folder(self) -> Path | None:
        if self.bases is not None and self.bases.path is not None:
            folder = self.bases.path / basis_folder(0)
            return folder if (folder / "config.json").is_file() else None
        return self.inputs.folder

    @property
    def _errors(self) -> Tensor:
        return torch.stack([self.step.low, self.step.high])

    def _tensors(self) -> dict[str, Tensor]:
        step = self.step
        tensors = {
            "encoder": step.encoder,
            "decoder": step.decoder,
            "gram_bases": step.gram_bases,
            "residual": step.residual,
            "residual_slack": step.slack,
            "errors": self._errors,
        }
        if step.gram is not None:
            values = torch.from_numpy(Gram.of(step.gram).values.copy())
            tensors |= {"gram": step.gram, "eigenvalues": values}
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def _facts(self, files: dict[str, dict[str, object]]) -> dict[str, Any]:
        step, inputs = self.step, self.inputs
        old = self._old_facts()
        (task,) = inputs.tasks
        settings = self._settings()
        count = len(step.decoder)
        facts = {
            **old,
            "versions": report.versions(),
            "tasks": [*old["tasks"], task],
            "models": [*old["models"], inputs.models[0]],
            "num_bases": count,
            "norms": {**old["norms"], task: self.norm},
            "matrix_norms": {**old.get("matrix_norms", {}), task: self.size},
            "fingerprints": {**old["fingerprints"], **inputs.fingerprints},
            "gram_cached": False,
            "seconds": {"add": round(time.perf_counter() - self.started, 3)},
        }
        facts["parameters"] = parameters = {
            **old["parameters"],
            **(settings.in_force() if step.compressed else {}),
            "weights": {**old["parameters"]["weights"], task: self.weight},
        }
        if self.how == "balanced" and old["parameters"]["lambda_scale"] == "bases":
            # M stays and T grows: the same lambda would mean less and less for each task.
            parameters["lambda_scale"] = "tasks"
            if old["tasks"]:
                given = parameters.get("lambda", VARYING_KEYS["lambda"].default_for("basis_ta"))
                parameters["lambda"] = _times(given, self.count / len(old["tasks"]))
        facts |= _losses(step)
        facts["errors"] = online.reported(
            facts["tasks"],
            facts["norms"],
            self._errors,
            step.gram_bases.diagonal().clamp(min=0).sqrt(),
            step.decoder,
        )
        weights = step.basis_weights
        facts["store"] = {
            **old["store"],
            "folders": [basis_folder(m) for m in range(count)],
            "budget": self.budget,
            "compress": self.how,
            "base_path": local_path(inputs.base_model) or old["store"].get("base_path"),
            "basis_weights": None if weights is None else weights.tolist(),
            "model_bytes": old["store"]["model_bytes"] + inputs.model_bytes,
            "added": old["store"]["added"] + 1,
            "files": files,
        }
        return facts

    def _old_facts(self) -> Mapping[str, Any]:
        if self.bases is not None:
            return self.bases.facts
        inputs = self.inputs
        settings = inputs.settings.model_copy(update={"basis": self.how})
        return {
            "format_version": FORMAT_VERSION,
            "versions": report.versions(),
            "method": settings.method,
            "parameters": {**settings.in_force(), "weights": {}, **inputs.varying},
            "tasks": [],
            "models": [],
            "base_model": inputs.base_model,
            "num_parameters": sum(item.numel for item in inputs.items),
            "dtype": inputs.dtype,
            "norms": {"base": self.sums.base_norm_squared**0.5},
            "matrix_norms": {"base": self.base_size},
            "left_out": dict(inputs.left_out),
            "fingerprints": {},
            "store": {
                "contents": "tensors",
                "dtype": dtype_name(self.dtype),
                "twins": dict(inputs.twins),
                "base_fingerprint": inputs.base_fingerprint,
                "base_path": local_path(inputs.base_model),
                "model_bytes": 0,
                "added": 0,
            },
        }


def _times(setting: Any, factor: float) -> Any:
    """A coefficient as a recipe gives it (number, text, layer gradient or filters), multiplied."""
    if isinstance(setting, Mapping):
        return {**setting, "value": _times(setting["value"], factor)}
    if isinstance(setting, list):
        return [_times(each, factor) for each in setting]
    return float(setting) * factor


def _losses(step: online.Step) -> dict[str, Any]:
    """`loss` and the bounds, null where the Gram matrix of all tasks is not known."""
    names = ("loss", "spectral_bound", "balanced_bound", "relative_gap", "retained_energy")
    made: dict[str, Any] = dict.fromkeys((*names, "decoder_losses"))
    if step.gram is not None:
        spectrum = Gram.of(step.gram)
        encoding = spectrum.encoding("ae", step.encoder.numpy(), step.decoder.numpy())
        made |= {
            "loss": encoding.loss,
            "spectral_bound": encoding.spectral_bound,
            "relative_gap": encoding.relative_gap,
            "retained_energy": encoding.retained_energy,
        }
    return made


def _link_own(bases: Bases, target: Path) -> None:
    """All that a store holds of its own, in another folder: the same files."""
    assert bases.path is not None
    for name in (FACTS, TENSORS):
        _link(bases.path / name, target / name)
    for name in (FOLDER, *bases.facts["store"]["folders"]):
        if (bases.path / name).is_dir():
            shutil.copytree(bases.path / name, target / name, copy_function=_link)


def _keep_others(old: Path, facts: Mapping[str, Any], work: Path) -> None:
    """What a user has put into a store stays in it: notes, other recipes, edited ones."""
    own = {FACTS, TENSORS, FOLDER, UNDO, *facts["store"]["folders"]}
    for entry in old.iterdir():
        if entry.name not in own and not (work / entry.name).exists():
            copy = shutil.copytree if entry.is_dir() else shutil.copy2
            copy(entry, work / entry.name)
    written = facts["store"].get("recipes", {})
    for name, kept in keep_edited(old / FOLDER, work / FOLDER, written).items():
        LOG.warning("%s was edited: it is kept as %s beside the new one", name, kept)


def _sync_all(folder: Path) -> None:
    """Wait until the disk has a folder, before what it replaces is deleted."""
    for path in (folder, *folder.rglob("*")):
        sync(path)


def _link(file: str | Path, target: str | Path) -> None:
    """The same file under another name, or a copy where the file system has no hard links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copy2(file, target)
