"""`tvb add`: one more task into a store, or into bases in memory, by Algorithm 1 (see `online`)."""

from __future__ import annotations

import operator
import os
import time
from dataclasses import replace
from typing import Any

import torch

from tvb_mergekit.core import online
from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.settings import VARYING_KEYS
from tvb_mergekit.errors import UserError, counted
from tvb_mergekit.store import addition
from tvb_mergekit.store.addition import Growth
from tvb_mergekit.store.facts import Compression, FileRecord, StoreFacts, StoreRecord
from tvb_mergekit.store.recipes import times
from tvb_mergekit.store.report import LOSSES
from tvb_mergekit.store.store import Bases, basis_folder, dtype_name, is_store, load
from tvb_mergekit.store.vectors import Vectors, facts_of, in_memory, write_vectors
from tvb_mergekit.store.writer import StoreWriter, changing
from tvb_mergekit.tensors.output import check_new_folder
from tvb_mergekit.tensors.peft_files import MERGE_FIRST
from tvb_mergekit.tensors.stream import Engine
from tvb_mergekit.tensors.taskset import TaskSet

STEP = ("encoder", "decoder", "gram_bases")  # tensors of a step in basis.safetensors


def add_to_store(
    path: str | os.PathLike[str], inputs: TaskSet, growth: Growth, engine: Engine = Engine()
) -> Bases:
    """Add the one model of `inputs` to the store at `path`, which is made if it does not exist.

    The model joins a store of all tasks, unless `growth` has a budget.

    Raises:
        UserError: another base, tensors that differ from the store's, a task name that is there,
            a budget that does not fit, no room, a doubt. The store stays as it was.
    """
    with changing(path, new=True) as writer:
        if is_store(writer.store):
            bases = load(writer.store)
        else:
            check_new_folder(path, [n for n in inputs.fingerprints if os.path.exists(n)])
            bases = _empty(inputs, growth.dtype)
        addition.check_new(bases, inputs)
        if growth.keeps_all(bases):
            return addition.join(writer, bases, inputs, growth, engine)
        return _Addition(bases, inputs, growth, engine).write(writer)


def add_in_memory(
    bases: Bases | None, inputs: TaskSet, growth: Growth, engine: Engine = Engine()
) -> Bases:
    """Add the one model of `inputs` to bases, which are not changed, as state dicts."""
    bases = bases or _empty(inputs, growth.dtype)
    addition.check_new(bases, inputs)
    growth.keeps_all(bases)  # False: stores of all tasks are always on disk
    return _Addition(bases, inputs, growth, engine).in_memory()


def _empty(inputs: TaskSet, dtype: torch.dtype) -> Bases:
    """Bases without tasks, under the base of `inputs`."""
    store = StoreRecord.model_construct(
        codec="dense",
        dtype=dtype_name(dtype),
        folders=[],
        budget=None,
        compress=None,
        base_fingerprint=inputs.prints[0],
        base_path=None,
        twins=dict(inputs.tied),
        model_bytes=0,
        added=0,
    )
    facts = StoreFacts.model_construct(
        method=inputs.settings.method,
        parameters={"lambda_scale": inputs.settings.lambda_scale, "weights": {}, **inputs.varying},
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
    none = torch.zeros(0, dtype=torch.float64)
    tensors = dict.fromkeys(("basis_weights", "weights", "norms", "matrix_norms"), none)
    tensors |= dict.fromkeys(("encoder", "decoder", "gram"), none.view(0, 0))
    return Bases(facts, tensors, [])


# Decisions


def _compression(bases: Bases, inputs: TaskSet, growth: Growth) -> Compression:
    """The way in which a full store makes room. Raise UserError if the store cannot grow so."""
    store, where = bases.facts.store, bases.place
    if store.codec == "lossless" and inputs.adapters:
        raise UserError(
            f"{where} holds models, and that of task `{inputs.tasks[0]}` is an adapter: "
            + MERGE_FIRST
        )
    if store.compress is None and bases.vectors:
        raise UserError(
            f"the bases in {where} are {bases.basis}, no convex combinations of tasks: only ae, "
            "balanced, groups, rand_select and none can grow"
        )
    how = growth.compress or store.compress or inputs.settings.basis
    if how not in online.COMPRESSIONS:
        raise UserError(
            f"`{how}` cannot compress online: expected one of {', '.join(online.COMPRESSIONS)}"
        )
    if how == "balanced" and bases.basis_weights is None:
        raise UserError(
            f"--compress balanced keeps the sum of all tasks, and the bases in {where} "
            f"({bases.basis}) do not hold it: compress by ae, or build the store with "
            "`basis: balanced`"
        )
    if how == "ae" and store.compress == "balanced":
        growth.doubt(
            f"{where} is balanced: once it is compressed by ae, its bases no longer add up to the "
            "sum of all tasks, and it cannot be compressed by balanced again"
        )
    return "balanced" if how == "balanced" else "ae"


def _budget(bases: Bases, growth: Growth) -> int:
    """The most bases of the store. Raise UserError if there is none, or if it does not fit."""
    budget = bases.facts.store.budget if growth.budget is None else growth.budget
    if budget is None:
        raise UserError("a new store needs --budget M, the most bases that it may hold")
    budget = operator.index(budget)
    if budget < 2:
        raise UserError(
            f"the budget is {budget}: expected 2 or more, one basis for the previous tasks and one "
            "for the new task; give --budget 2 or more"
        )
    if not bases.keeps_tasks and budget < bases.num_bases:
        raise UserError(
            f"the budget is {budget}, and the store holds {bases.num_bases} bases: give "
            f"{bases.num_bases} or more, or build a smaller store"
        )
    return budget


class _Addition:
    """One step of Algorithm 1, from the checks to the new facts."""

    def __init__(self, bases: Bases, inputs: TaskSet, growth: Growth, engine: Engine) -> None:
        self.started = time.perf_counter()
        self.bases, self.inputs, self.growth, self.engine = bases, inputs, growth, engine
        self.exact = not bases.keeps_tasks  # else the vectors are the task vectors, or samples
        self.dtype = bases.dtype if self.exact else growth.dtype
        self.how = _compression(bases, inputs, growth)
        self.budget = _budget(bases, growth)
        settings = bases.settings if bases.vectors else inputs.settings
        self.settings = settings.but(basis=self.how)
        items = addition.given_items(bases, inputs) if bases.vectors else inputs.items
        items = [replace(item, out=self.dtype) for item in items]
        self.items = addition.with_vectors(bases.vectors, items)
        self.sums = addition.new_sums(bases, inputs, self.items, growth.doubt, engine)
        held = bases.tensors
        buffer = online.Buffer(
            held["encoder"],
            held["decoder"],
            # The Gram matrix of samples is of the task vectors before them.
            held.get("gram") if bases.facts.store.codec != "sampled" else None,
            held.get("basis_weights"),
        )
        self.step = online.add_task(buffer, self.sums.gram, self.budget, self.how, self.settings)
        # The factors of the bases and of the new model's difference in the new bases.
        self.matrix = self.step.matrix.clone()
        self.matrix[-1] *= self.inputs.weights[0]
        self.matrix[:-1] *= bases.scales[:, None]

    def in_memory(self) -> Bases:
        """The new bases as state dicts."""
        return in_memory(self._vectors(), self._history(), self.items, self.matrix, self.engine)

    def write(self, writer: StoreWriter) -> Bases:
        """Write and publish the new store."""
        bases, items, matrix = self.bases, self.items, self.matrix
        config = self.inputs.folder  # of a new store; and a store of all tasks lacks the tokenizer
        if bases.path is not None and self.exact:
            config = addition.config_of(bases)
        if not self.exact:
            self.growth.tell(f"{counted(matrix.shape[1], 'basis')} {self._effect()}")
        files, vectors, same = dict[str, FileRecord](), self._vectors(), 0
        if self.exact and not self.step.compressed:  # the old vectors stay the same files
            files, same = writer.keep(bases) if bases.vectors else {}, bases.num_bases
            items = [replace(item, inputs=item.inputs[-1:]) for item in items]
            matrix = matrix[-1:, -1:]
        new = vectors.folders[same:]
        found, _ = write_vectors(writer.folder, new, items, matrix, config, self.engine, first=same)
        self.inputs.check_unchanged()
        return writer.commit(replace(vectors, files={**files, **found}), self._history())

    def _effect(self) -> str:
        """The new form, and the errors of the tasks if they are known."""
        errors = facts_of(self._vectors(), self._history()).errors
        told = [f"{task} {error:.3f}" for task, error in errors.items() if error is not None]
        return (
            f"by Algorithm 1 ({self.how}) instead of {self.bases.num_bases} vectors at "
            f"{counted(self.bases.facts.bits or 0.0, 'bit')}; relative errors: "
            f"{', '.join(told) or 'not known'}"
        )

    def _vectors(self) -> Vectors:
        step = self.step
        tensors = {name: getattr(step, name) for name in STEP}
        if step.gram is not None:
            gram = Gram.of(step.gram)
            errors = gram.errors((step.encoder @ step.decoder).numpy())
            tensors |= {"gram": step.gram, "eigenvalues": torch.from_numpy(gram.values.copy())}
            tensors["errors"] = torch.from_numpy(errors)
        folders = [basis_folder(m) for m in range(len(step.decoder))]
        return Vectors(tensors, folders, dtype=dtype_name(self.dtype))

    def _history(self) -> dict[str, Any]:
        """The keys of basis.json that do not follow from the vectors."""
        made = addition.grown_history(self.bases, self.inputs, self.sums, self.started)
        step, encoding = self.step, None
        if step.gram is not None:  # else the losses are not known
            encoder, decoder = step.encoder.numpy(), step.decoder.numpy()
            encoding = Gram.of(step.gram).encoding("ae", encoder, decoder)
        weights = step.basis_weights
        store = {
            "budget": self.budget,
            "compress": self.how,
            "basis_weights": None if weights is None else weights.tolist(),
        }
        return {
            **made,
            **{name: getattr(encoding, name, None) for name in LOSSES},
            "parameters": {**made["parameters"], **self._parameters()},
            "store": {**made["store"], **store},
        }

    def _parameters(self) -> dict[str, Any]:
        """The recipe's keys that this addition changes."""
        old = self.bases.facts
        changed = self.settings.in_force() if self.step.compressed or not old.tasks else {}
        if self.how == "balanced" and old.parameters["lambda_scale"] == "bases":
            # M stays and T grows: the same lambda would mean less and less for each task.
            changed["lambda_scale"] = "tasks"
            if old.tasks:
                parameters = {**old.parameters, **changed}
                given = parameters.get("lambda", VARYING_KEYS["lambda"].default_for(old.method))
                changed["lambda"] = times(given, self.bases.num_bases / len(old.tasks))
        return changed
