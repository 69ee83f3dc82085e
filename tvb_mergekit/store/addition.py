"""One more task in a store, or one less: the decisions of all additions, and task-vector stores.

`add` has the additions to bases.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.basis import UNRELATED_RATIO, unlike
from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.settings import check_tasks
from tvb_mergekit.errors import UserError, counted
from tvb_mergekit.store import forms
from tvb_mergekit.store.export import write_originals
from tvb_mergekit.store.facts import FileRecord
from tvb_mergekit.store.forms import check_kept, draws_of
from tvb_mergekit.store.store import Bases, load, open_vector, read_store_facts
from tvb_mergekit.store.vectors import Vectors, local_path, write_vectors
from tvb_mergekit.store.writer import StoreWriter, changing
from tvb_mergekit.tensors.lossless import Lossless
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.stream import Engine, Item, Part, Weights
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Growth:
    """Choices of an addition; None: the store's own.

    Attributes:
        budget: the most bases that the store may hold; a store of all tasks then becomes bases.
        compress: `ae` or `balanced`.
        dtype: of a new store.
        doubt: called with each doubt, such as a model unlike the base; may raise to refuse.
        tell: called with the effect on the tasks that are there, before anything is written.
    """

    budget: int | None = None
    compress: str | None = None
    dtype: torch.dtype = torch.float32
    doubt: Callable[[str], object] = LOG.warning
    tell: Callable[[str], object] = LOG.info

    def keeps_all(self, bases: Bases) -> bool:
        """Whether the new task joins the task vectors of a store. It refuses bad choices."""
        if bases.keeps_tasks and self.budget is None:
            if self.compress:
                raise UserError(
                    f"--compress: {bases.place} keeps all tasks; --budget M turns them into bases"
                )
            return True
        return False


def check_new(bases: Bases, inputs: TaskSet) -> None:
    """Raise UserError unless the one model of `inputs` is a new task for the base of `bases`."""
    (task,) = inputs.tasks
    if task in bases.tasks:
        raise UserError(f"the task {task!r} is in {bases.place} already: give another name")
    check_tasks([*bases.tasks, task], [*bases.facts.models, task])
    bases.check_base(inputs.base, inputs.base_model)


def given_items(bases: Bases, inputs: TaskSet) -> list[Item]:
    """The store's tensors, with the new model as input. Raise UserError for other tensors."""
    given, left_out = {item.name: item for item in inputs.items}, bases.facts.left_out
    where, (model,) = bases.place, inputs.models
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
        parts = (*(Part.of(vector, item.name, "delta") for vector in vectors), *item.inputs)
        stored = tuple(replace(part, share=1.0) for part in parts)  # samples count as they are
        made.append(replace(item, inputs=stored))
    return made


def new_sums(
    bases: Bases,
    inputs: TaskSet,
    items: Sequence[Item],
    doubt: Callable[[str], object],
    engine: Engine,
) -> GramSums:
    """The Gram matrix of the items' vectors, the new one weighted and last; it must not be 0."""
    (task,), (model,), (weight,) = inputs.tasks, inputs.models, inputs.weights
    others = len(items[0].inputs) - 1
    sums = None if others else inputs.sums
    if sums is None:
        names = [*bases.facts.store.folders[:others], task]
        sums = gram_pass(items, names, engine)
    if float(sums.gram[-1, -1]) == 0.0:
        raise UserError(
            f"task `{task}`: its task vector is zero: the model is identical to the base"
        )
    base, *sizes = sums.sizes
    known = bases.tensors["matrix_norms"] / bases.weights.abs()
    if reason := unlike(sizes[-1], base, known.tolist(), UNRELATED_RATIO):
        later = "" if bases.keeps_tasks else " A task cannot be taken out of the bases later"
        doubt(f"model {model}: {reason}: is it fine-tuned from this base?{later}")
    return sums.scaled([*bases.scales.tolist()[:others], weight])


def config_of(bases: Bases) -> Path | None:
    """The folder of a store with the configuration of its vectors."""
    assert bases.path is not None
    folder = bases.path / bases.facts.store.folders[0]
    return folder if (folder / "config.json").is_file() else None


def grown_history(bases: Bases, inputs: TaskSet, sums: GramSums, started: float) -> dict[str, Any]:
    """The keys of basis.json after an addition that do not follow from the vectors.

    `started` is the time by `time.perf_counter`.
    """
    facts, (task,), (weight,) = bases.facts, inputs.tasks, inputs.weights
    norm, base_norm = float(sums.gram[-1, -1]) ** 0.5, sums.base_norm_squared**0.5
    base_size, *sizes = sums.sizes
    weights = {**facts.parameters["weights"], task: weight}
    place = local_path(inputs.base_model)
    return {
        **facts,
        "parameters": {**facts.parameters, "weights": weights},
        "tasks": [*facts.tasks, task],
        "models": [*facts.models, *inputs.models],
        "norms": {"base": base_norm, **facts.norms, task: norm},
        "matrix_norms": {"base": base_size, **facts.matrix_norms, task: sizes[-1]},
        "fingerprints": {**facts.fingerprints, **inputs.fingerprints},
        "seconds": {"add": round(time.perf_counter() - started, 3)},
        "store": {
            **facts.store,
            **({"base_path": place, "base_beside": None} if place else {}),
            "model_bytes": facts.store.model_bytes + inputs.model_bytes,
            "added": facts.store.added + 1,
        },
    }


def join(
    writer: StoreWriter, bases: Bases, inputs: TaskSet, growth: Growth, engine: Engine
) -> Bases:
    """Add the task of `inputs` to a store of all tasks, whose other vectors stay as they are."""
    started, count = time.perf_counter(), bases.num_bases
    items = given_items(bases, inputs)
    sums = new_sums(bases, inputs, items, growth.doubt, engine)
    matrix = torch.tensor([inputs.weights], dtype=torch.float64)

    newest = bases.vectors[-1]
    assert isinstance(newest, Lossless)
    share = newest.sample.share
    standing = inputs.settings.but(basis="none", seed=bases.settings.seed)
    kept = replace(inputs, settings=standing, items=items)
    check_kept(kept, share)
    coding = draws_of(kept, share)
    told = "without loss" if share == 1 else f"with {100 * share:.3g} % of its entries"
    growth.tell(f"{inputs.tasks[0]} joins {counted(count, 'task')} {told}; they stay as they are")
    old = bases.facts.store.folders
    folders = [*old, *forms.slugs(inputs.tasks, [*forms.RESERVED, *old])]
    files = writer.keep(bases)
    config, new = config_of(bases), folders[-1:]
    found, measured = write_vectors(
        writer.folder, new, items, matrix, config, engine, first=count, draws=coding
    )
    own = {"errors": torch.zeros(1, dtype=torch.float64)}
    if share == 1:
        found |= write_originals(writer.folder, new, replace(inputs, items=items), engine)
    else:
        own = forms.measured_tensors(measured, inputs.weights)
        own["errors"] = forms.lost(own)
    tensors = {name: torch.cat([bases.tensors[name], own[name]], -1) for name in own}
    vectors = [open_vector(writer.folder / name, bases.facts.store.codec) for name in folders]
    for vector in vectors:
        vector.base = inputs.base
    scales = torch.cat([bases.scales, torch.tensor(inputs.weights, dtype=torch.float64)])
    gram = gram_pass(forms.items_of(vectors), folders, engine).gram * scales.outer(scales)
    if share < 1:  # the products of the models themselves, where they are known
        gram[:count, :count] = bases.tensors["gram_bases"]
        gram[count, count] = sums.gram[0, 0]
    tensors |= {"gram_bases": gram, "gram": gram.clone()}
    history = grown_history(bases, inputs, sums, started)
    inputs.check_unchanged()
    return _commit(writer, vectors, folders, {**files, **found}, history, tensors)


def remove_task(path: str | os.PathLike[str], task: str) -> Bases:
    """Remove a task from the store of all tasks at `path`.

    Raises:
        UserError: another kind of store, no such task, or the only one.
    """
    started = time.perf_counter()
    with changing(path) as writer:
        facts = read_store_facts(writer.store)
        if not facts.keeps_tasks:
            raise UserError(
                f"{path}: it holds {facts.num_bases} bases, from which no task can be taken out; "
                "`tvb undo` takes back the last addition; a store by --lossless or --keep can "
                "remove tasks"
            )
        if len(facts.tasks) == 1 and task in facts.tasks:
            raise UserError(f"{path}: {task!r} is its only task; delete the folder instead")
        if task not in facts.tasks:
            load(writer.store).index(task)  # raises
        index = facts.tasks.index(task)
        without = facts.store.folders[index]  # which may be damaged
        bases = load(writer.store, without)
        count, tensors = len(facts.tasks), bases.tensors
        rest = [k for k in range(count) if k != index]
        named = [n for n in ("tensor_squares", "tensor_errors", "errors") if n in tensors]
        columns = {n: tensors[n][..., rest] for n in named}
        grams = {n: tensors[n][rest][:, rest] for n in ("gram_bases", "gram") if n in tensors}
        models = [facts.models[k] for k in rest]

        def others(of: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in of.items() if name != task}

        store = {**facts.store, "model_bytes": facts.store.model_bytes * (count - 1) // count}
        known = {facts.base_model, *models}
        history = {
            **facts,
            "tasks": [facts.tasks[k] for k in rest],
            "models": models,
            "parameters": {**facts.parameters, "weights": others(facts.parameters["weights"])},
            "norms": others(facts.norms),
            "matrix_norms": others(facts.matrix_norms),
            "fingerprints": {n: of for n, of in facts.fingerprints.items() if n in known},
            "seconds": {"remove": round(time.perf_counter() - started, 3)},
            "store": store,
        }
        folders, files = [facts.store.folders[k] for k in rest], writer.keep(bases, without)
        return _commit(writer, bases.vectors, folders, files, history, {**columns, **grams})


def _commit(
    writer: StoreWriter,
    vectors: Sequence[Weights],
    folders: Sequence[str],
    files: Mapping[str, FileRecord],
    history: Mapping[str, Any],
    tensors: dict[str, Tensor],
) -> Bases:
    """Publish a store of these task vectors."""
    count, one = len(vectors), torch.eye(len(vectors), dtype=torch.float64)
    tensors |= {"encoder": one, "decoder": one.clone()}
    if "gram" in tensors:
        tensors["eigenvalues"] = torch.from_numpy(Gram.of(tensors["gram"]).values.copy())
    store = {**history["store"], "budget": count, "basis_weights": [1.0] * count}
    codec, dtype, density = store["codec"], store["dtype"], history.get("density")
    made = Vectors(tensors, folders, files, dtype, codec, density)
    return writer.commit(made, {**history, "store": store})
