"""`tvb add`: one more task into a store, or into bases in memory, by Algorithm 1 (see `online`).

The store of before stays in the new one, as the folder `undo`, until the next task is added.
"""

from __future__ import annotations

import logging
import operator
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core import online
from tvb_mergekit.core.basis import UNRELATED_RATIO, unlike
from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.gram import GramSums, block_budget
from tvb_mergekit.core.merge import Linear
from tvb_mergekit.errors import UserError, counted
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.settings import VARYING_KEYS, check_tasks
from tvb_mergekit.store.bits import largest_errors
from tvb_mergekit.store.build import finish_store, finish_vectors, writers_of
from tvb_mergekit.store.facts import (
    FACTS,
    FORMAT_VERSION,
    TENSORS,
    Compression,
    FileRecord,
    StoreFacts,
    StoreRecord,
)
from tvb_mergekit.store.recipes import FOLDER, edited
from tvb_mergekit.store.report import local_path, versions
from tvb_mergekit.store.store import (
    Bases,
    basis_folder,
    dtype_name,
    is_store,
    load,
    numbers_of,
    read_store_facts,
    staged,
)
from tvb_mergekit.tensors.output import check_disk, check_new_folder
from tvb_mergekit.tensors.passes import combine_pass, gram_pass
from tvb_mergekit.tensors.source import StateDict, Weights
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import FoldersSink, MemorySink

LOG = logging.getLogger(__name__)
UNDO = "undo"
LOSSES = (
    "loss",
    "decoder_losses",
    "spectral_bound",
    "balanced_bound",
    "relative_gap",
    "retained_energy",
)
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
        tell: called with what becomes of the tasks that are there, before anything is written.
    """

    budget: int | None = None
    compress: str | None = None
    dtype: torch.dtype = torch.float32
    doubt: Callable[[str], object] = LOG.warning
    tell: Callable[[str], object] = LOG.info


def add_to_store(
    path: str | os.PathLike[str],
    inputs: TaskSet,
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
    with staged(store) as work:
        bases = load(store) if is_store(store) else None
        if bases is None:
            check_new_folder(store, [n for n in inputs.fingerprints if os.path.exists(n)])
        bases = bases or _empty(inputs, growth.dtype)
        _Addition(bases, inputs, growth, device, budget or block_budget(), progress).write(
            work, store
        )
    return load(store)


def undo_addition(path: str | os.PathLike[str]) -> Bases:
    """Make a store again what it was before the last `add_to_store`.

    Raises:
        UserError: no store, or nothing to undo.
    """
    store = Path(os.path.realpath(path))
    with staged(store) as work:
        facts = read_store_facts(store)
        if not (store / UNDO).is_dir():
            raise UserError(
                f"{path}: nothing to undo: no task was added or removed since, or that is undone"
            )
        check_free(store, facts, os.listdir(store / UNDO))
        link_own(load(store / UNDO), work)
        keep_others(store, facts, work)
    return load(store)


def add_in_memory(
    bases: Bases | None,
    inputs: TaskSet,
    growth: Growth = Growth(),
    *,
    device: torch.device = CPU,
) -> Bases:
    """The same with the new bases as state dicts; `bases` are not changed."""
    bases = bases or _empty(inputs, growth.dtype)
    return _Addition(bases, inputs, growth, device, block_budget(), silent).in_memory()


def _empty(inputs: TaskSet, dtype: torch.dtype) -> Bases:
    """Bases of no task yet, under the base of `inputs`."""
    store = StoreRecord.model_construct(
        contents="tensors",
        dtype=dtype_name(dtype),
        budget=None,
        compress=None,
        base_fingerprint=inputs.prints[0],
        base_path=None,
        twins=dict(inputs.tied),
        model_bytes=0,
        added=0,
    )
    facts = StoreFacts.model_construct(
        format_version=FORMAT_VERSION,
        method=inputs.settings.method,
        parameters={
            "lambda_scale": inputs.settings.lambda_scale,
            "weights": {},
            **inputs.varying,
        },
        tasks=[],
        models=[],
        base_model=inputs.base_model,
        num_parameters=sum(item.numel for item in inputs.items),
        dtype=inputs.dtype,
        norms={},
        matrix_norms={},
        left_out=dict(inputs.left_out),
        fingerprints={},
        store=store,
    )
    shapes = {
        **dict.fromkeys(("basis_weights", "weights", "norms", "matrix_norms"), (0,)),
        **dict.fromkeys(("encoder", "decoder", "gram"), (0, 0)),
        "errors": (2, 0),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return Bases(facts, tensors, [])


class _Addition:
    """One step of Algorithm 1, from the checks to the new facts."""

    def __init__(
        self,
        bases: Bases,
        inputs: TaskSet,
        growth: Growth,
        device: torch.device,
        memory: int,
        progress: Progress,
    ) -> None:
        self.bases, self.inputs, self.growth = bases, inputs, growth
        self.device, self.memory, self.progress = device, memory, progress
        self.started = time.perf_counter()
        self.where = str(bases.path or "these bases")
        (self.task,), (self.model,), (self.weight,) = inputs.tasks, inputs.models, inputs.weights
        check_new(bases, inputs)
        self.dtype = growth.dtype if bases.is_zoo else bases.dtype
        self.how = self._how()
        budget = bases.facts.store.budget if growth.budget is None else growth.budget
        if budget is None:
            raise UserError("a new store needs --budget M, the most bases that it may hold")
        self.budget = operator.index(budget)
        online.check_budget(self.budget, 0 if bases.is_zoo else bases.num_bases)
        if bases.path is not None:
            count = min(bases.num_bases + 1, self.budget)
            check_free(bases.path, bases.facts, [UNDO, *map(basis_folder, range(count))])
        settings = bases.settings if bases.vectors else inputs.settings
        self.settings = settings.model_copy(update={"basis": self.how})
        self.items = self._items()
        self.sums = self._sums()
        self.norm = float(self.sums.gram[-1, -1]) ** 0.5
        held = bases.tensors
        buffer = online.Buffer(
            self.dtype,
            sum(item.numel for item in self.items),
            held["encoder"],
            held["decoder"],
            None if bases.is_zoo else held.get("gram"),  # which codes no longer have
            held.get("basis_weights"),
            held["norms"],
            held["errors"],
            exact=not bases.is_zoo,
        )
        self.step = online.add_task(buffer, self.sums.gram, self.budget, self.how, self.settings)

    def _how(self) -> Compression:
        store = self.bases.facts.store
        if store.contents == "codes" and not self.bases.is_zoo:
            bits = counted(self.bases.facts.bits or 0.0, "bit")
            raise UserError(
                f"{self.where} holds bases at {bits}, which would lose more with every task: build "
                "a store without --bits, or with `basis: none`"
            )
        if store.contents == "sparse":
            raise UserError(
                f"{self.where} holds sparse bases, whose masks were learned for its tasks: learn "
                "them anew with the new task, from a store of tensors or a recipe"
            )
        if store.compress is None and self.bases.vectors:
            raise UserError(
                f"the bases in {self.where} are {self.bases.basis}, no convex "
                "combinations of tasks: only ae, balanced, rand_select and none can grow"
            )
        how = self.growth.compress or store.compress or self.inputs.settings.basis
        if how not in online.COMPRESSIONS:
            raise UserError(
                f"`{how}` cannot compress online: expected one of {', '.join(online.COMPRESSIONS)}"
            )
        if how == "balanced" and self.bases.basis_weights is None:
            raise UserError(
                "--compress balanced keeps the sum of all tasks, and the bases in "
                f"{self.where} ({self.bases.basis}) do not hold it: compress by "
                "ae, or build the store with `basis: balanced`"
            )
        if how == "ae" and store.compress == "balanced":
            self.growth.doubt(
                f"{self.where} is balanced: once it is compressed by ae, its bases no longer add "
                "up to the sum of all tasks, and it cannot be compressed by balanced again"
            )
        return "balanced" if how == "balanced" else "ae"

    def _items(self) -> list[Item]:
        """The store's tensors, with the bases and the new model as inputs."""
        items = given_items(self.bases, self.inputs) if self.bases.vectors else self.inputs.items
        return [replace(item, out=self.dtype) for item in with_vectors(self.bases.vectors, items)]

    def _sums(self) -> GramSums:
        """The Gram matrix of the bases and the new task vector, weighted."""
        bases, inputs = self.bases, self.inputs
        sums = None if bases.vectors else inputs.sums
        if sums is None:
            sums, _cached = gram_pass(
                self.items,
                [*map(basis_folder, range(bases.num_bases)), self.task],
                devices=[self.device],
                budget=self.memory,
                progress=self.progress,
            )
        check_size(bases, inputs, sums, self.growth.doubt)
        return sums.scaled([*[1.0] * bases.num_bases, self.weight])

    def _combine(self, items: list[Item], matrix: Tensor, sink: FoldersSink | MemorySink) -> None:
        matrix = matrix.clone()
        matrix[-1] *= self.weight
        combine_pass(
            items,
            dict.fromkeys((item.name for item in items), Linear.of(matrix)),
            sink,
            devices=[self.device],
            budget=self.memory,
            progress=self.progress("Bases", sum(item.nbytes for item in items)),
        )

    def in_memory(self) -> Bases:
        """The new bases as state dicts."""
        sink = MemorySink(self.step.matrix.shape[1])
        self._combine(self.items, self.step.matrix, sink)
        facts = self._facts({})
        tensors = {**numbers_of(facts), **self._tensors()}
        return Bases(facts, tensors, [StateDict(state) for state in sink.states])

    def write(self, work: Path, store: Path) -> None:
        """Write the new store into `work`; `store` is where it will lie."""
        bases, items, matrix = self.bases, self.items, self.step.matrix
        same = 0 if self.step.compressed or bases.is_zoo else bases.num_bases
        if same:  # nothing but the new vector is written, the others are the same files
            items = [replace(item, inputs=item.inputs[-1:]) for item in items]
            matrix = matrix[-1:, -1:]
        outputs = matrix.shape[1]
        check_disk(str(work), outputs * sum(i.numel for i in items) * self.dtype.itemsize)
        files: dict[str, FileRecord] = {}
        for name in map(basis_folder, range(same)):
            assert bases.path is not None
            shutil.copytree(bases.path / name, work / name, copy_function=link)
            old = bases.facts.store.files
            files |= {file: record for file, record in old.items() if file.startswith(f"{name}/")}
        names = [basis_folder(m) for m in range(same, same + outputs)]
        config = self.inputs.folder
        if bases.path is not None and not bases.is_zoo:  # whose folders lack the tokenizer
            folder = bases.path / basis_folder(0)
            config = folder if (folder / "config.json").is_file() else None
        if bases.is_zoo:
            self.growth.tell(
                f"{counted(outputs, 'basis')} by Algorithm 1 ({self.how}) in the place of "
                f"{bases.num_bases} vectors at {counted(bases.facts.bits or 0.0, 'bit')}; "
                + costs(bases.facts.relative_error, largest_errors(self._facts({})))
            )
        writers = writers_of(work, names, items, config)
        self._combine(items, matrix, FoldersSink(writers))
        files |= finish_vectors(writers, config, first=same)
        finish_store(work, store, self._facts(files), self._tensors())
        if bases.path is not None:
            keep_before(bases, work)

    def _tensors(self) -> dict[str, Tensor]:
        step = self.step
        tensors = {
            "encoder": step.encoder,
            "decoder": step.decoder,
            "gram_bases": step.gram_bases,
            "errors": step.errors,
        }
        if step.gram is not None:
            values = torch.from_numpy(Gram.of(step.gram).values.copy())
            tensors |= {"gram": step.gram, "eigenvalues": values}
        return tensors

    def _facts(self, files: dict[str, FileRecord]) -> StoreFacts:
        """`basis.json`, less what `finish_store` adds."""
        step, inputs, old = self.step, self.inputs, self.bases.facts
        tasks, count, task = [*old.tasks, self.task], len(step.decoder), self.task
        base_size, *sizes = self.sums.sizes
        norms = {"base": self.sums.base_norm_squared**0.5, **old.norms, task: self.norm}
        parameters = {
            **old.parameters,
            **(self.settings.in_force() if step.compressed or not old.tasks else {}),
            "weights": {**old.parameters["weights"], task: self.weight},
        }
        if self.how == "balanced" and old.parameters["lambda_scale"] == "bases":
            # M stays and T grows: the same lambda would mean less and less for each task.
            parameters["lambda_scale"] = "tasks"
            if old.tasks:
                given = parameters.get("lambda", VARYING_KEYS["lambda"].default_for(old.method))
                parameters["lambda"] = _times(given, self.bases.num_bases / len(old.tasks))
        encoding = None  # of the Gram matrix of all tasks, where it is known
        if step.gram is not None:
            encoder, decoder = step.encoder.numpy(), step.decoder.numpy()
            encoding = Gram.of(step.gram).encoding("ae", encoder, decoder)
        lengths = step.gram_bases.diagonal().clamp(min=0).sqrt()
        weights = step.basis_weights
        store = {
            **old.store,
            "contents": "tensors",
            "dtype": dtype_name(self.dtype),
            "folders": [basis_folder(m) for m in range(count)],
            "budget": self.budget,
            "compress": self.how,
            "basis_weights": None if weights is None else weights.tolist(),
            "base_path": local_path(inputs.base_model) or old.store.base_path,
            "model_bytes": old.store.model_bytes + inputs.model_bytes,
            "added": old.store.added + 1,
            "files": files,
        }
        new = {
            "versions": versions(),
            "parameters": parameters,
            "tasks": tasks,
            "models": [*old.models, self.model],
            "num_bases": count,
            **{name: getattr(encoding, name, None) for name in LOSSES},
            "norms": norms,
            "matrix_norms": {"base": base_size, **old.matrix_norms, task: sizes[-1]},
            "fingerprints": {**old.fingerprints, **inputs.fingerprints},
            "gram_cached": False,
            "seconds": {"add": round(time.perf_counter() - self.started, 3)},
            "store": store,
            "errors": online.reported(tasks, norms, step.errors, lengths, step.decoder),
        }
        kept = {key: old[key] for key in old if key not in ("bits", "bytes", "relative_error")}
        return StoreFacts.model_validate({**kept, **new})


# What any addition looks at


def check_new(bases: Bases, inputs: TaskSet) -> None:
    """Raise UserError unless the one model of `inputs` is a new task for the base of `bases`."""
    ((task,), where) = inputs.tasks, bases.path or "these bases"
    if task in bases.tasks:
        raise UserError(f"the task {task!r} is in {where} already: give another name with --task")
    check_tasks([*bases.tasks, task], [*bases.facts.models, task])
    bases.check_base(inputs.base, inputs.base_model)


def given_items(bases: Bases, inputs: TaskSet) -> list[Item]:
    """The store's tensors, with the new model as input.

    Raises:
        UserError: it does not give one, or gives one that was trained and takes no part.
    """
    given, left_out = {item.name: item for item in inputs.items}, bases.facts.left_out
    where, (model,) = bases.path or "these bases", inputs.models
    for name in given:
        if name not in bases.names and not left_out.get(name, "").startswith("excluded"):
            raise UserError(
                f"tensor `{name}` of model {model} takes no part in {where} "
                f"({left_out.get(name, 'not in the store')}), so that what was trained there "
                "would be lost: build a store with it"
            )
    for name in bases.names:
        if name not in given:
            reason = inputs.left_out.get(name, "not in it")
            raise UserError(
                f"tensor `{name}` is in {where}, and model {model} does not give it ({reason}): a "
                "store holds one set of tensors"
            )
    return [given[name] for name in bases.names]


def with_vectors(vectors: Sequence[Weights], items: Sequence[Item]) -> list[Item]:
    """The items with the vectors of a store as inputs before their own."""
    made = []
    for item in items:
        parts = (Part.of(vector, item.name, "delta") for vector in vectors)
        made.append(replace(item, inputs=(*parts, *item.inputs)))
    return made


def check_size(
    bases: Bases, inputs: TaskSet, sums: GramSums, doubt: Callable[[str], object]
) -> None:
    """Doubt a new task vector, the last of `sums`, that is unlike those that are there.

    Raises:
        UserError: it is zero.
    """
    (task,), (model,) = inputs.tasks, inputs.models
    if float(sums.gram[-1, -1]) == 0.0:
        raise UserError(
            f"task `{task}`: its task vector is zero: the model is identical to the base"
        )
    base, *sizes = sums.sizes
    others = bases.tensors["matrix_norms"] / bases.weights.abs()
    if reason := unlike(sizes[-1], base, others.tolist(), UNRELATED_RATIO):
        more = (
            "" if bases.is_zoo else "? A task that was added cannot be taken out of the bases later"
        )
        doubt(f"model {model}: {reason}: is it fine-tuned from this base{more or '?'}")


def costs(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """What becomes of the relative error of each task."""
    told = [
        f"{task} {f'{before[task]:.3f} -> ' if task in before else ''}{error:.3f}"
        for task, error in after.items()
    ]
    return f"relative error at most: {', '.join(told)}"


def _times(setting: Any, factor: float) -> Any:
    """A coefficient as a recipe gives it (number, text, layer gradient or filters), multiplied."""
    if isinstance(setting, Mapping):
        return {**setting, "value": _times(setting["value"], factor)}
    if isinstance(setting, list):
        return [_times(each, factor) for each in setting]
    return float(setting) * factor


def link_own(bases: Bases, target: Path) -> None:
    """All that a store holds of its own, in another folder: the same files."""
    assert bases.path is not None
    (target / FOLDER).mkdir()
    recipes = [f"{FOLDER}/{name}" for name in bases.facts.store.recipes]
    for name in (FACTS, TENSORS, *recipes):
        if (bases.path / name).is_file():
            link(bases.path / name, target / name)
    for name in bases.facts.store.folders:
        if (bases.path / name).is_dir():
            shutil.copytree(bases.path / name, target / name, copy_function=link)


def check_free(store: Path, facts: StoreFacts, names: Iterable[str]) -> None:
    """Raise UserError if a change of a store would lose an entry of a user's, or cannot keep it.

    Args:
        names: the top-level names that the change writes.
    """
    own, known = {FACTS, TENSORS, FOLDER, *facts.store.folders}, _files(facts)
    with suppress(UserError):  # a damaged basis.json
        if is_store(store / UNDO):
            own.add(UNDO)
            known |= {f"{UNDO}/{name}" for name in _files(read_store_facts(store / UNDO))}
    for name in names:
        if name not in own and os.path.lexists(store / name):
            raise UserError(
                f"{store / name}: is not the store's, which needs the name; move or rename it"
            )
    replaced = own - {FOLDER}
    for entry in store.rglob("*"):
        place, kept = entry.relative_to(store), entry.is_file()
        if entry.is_dir():  # a folder could take the name of a template recipe
            kept = place.parent != Path(FOLDER) or place.suffix != ".yml"
        elif place.parts[0] in replaced:
            kept = kept and place.as_posix() in known
        if not kept:
            raise UserError(
                f"{entry}: is not the store's, which cannot keep it there; move it out of {store}"
            )


def _files(facts: StoreFacts) -> set[str]:
    """All files that a store has written."""
    recipes = (f"{FOLDER}/{name}" for name in facts.store.recipes)
    return {FACTS, TENSORS, *facts.store.files, *recipes}


def keep_others(old: Path, facts: StoreFacts, work: Path) -> None:
    """Keep the user's files of an old store in a new one: notes, recipes, edited recipes."""
    check_free(old, facts, os.listdir(work))
    recipes, changed = {f"{FOLDER}/{name}" for name in facts.store.recipes}, edited(old, facts)
    own = {FACTS, TENSORS, FOLDER, UNDO, *facts.store.folders, *recipes.difference(changed)}
    for entry in (*old.iterdir(), *(old / FOLDER).glob("*")):
        name = entry.relative_to(old).as_posix()
        if name in own:
            continue
        if entry.is_dir():
            shutil.copytree(entry, work / name, dirs_exist_ok=True)
            continue
        if (work / name).exists():
            LOG.warning("%s is yours: it stays as it is (--method takes the store's)", name)
        (work / name).unlink(missing_ok=True)  # it may be a link to the file of another store
        shutil.copy2(entry, work / name)


def keep_before(bases: Bases, work: Path) -> None:
    """Put into a new store what else lies in the old one, and that one as `undo`."""
    assert bases.path is not None
    (work / UNDO).mkdir()
    keep_others(bases.path, bases.facts, work)
    link_own(bases, work / UNDO)


def link(file: str | Path, target: str | Path) -> None:
    """A hard link from `target` to `file`, or a copy if there are no hard links."""
    try:
        os.link(file, target)
    except (AttributeError, OSError):
        shutil.copy2(file, target)
