"""From a recipe as mergekit's commands take it to the inputs of a store."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mergekit.architecture import WeightInfo, get_architecture_info
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.graph import Task
from mergekit.io.tasks import LoaderCache
from mergekit.merge import _model_out_config
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig

from tvb_mergekit.checkpoints import Checkpoint
from tvb_mergekit.errors import UserError
from tvb_mergekit.inputs import Inputs, Matched, match
from tvb_mergekit.lora import FUSE_INSTEAD, Adapter, AdapterDelta, NotPlainLora, factor_gram
from tvb_mergekit.plugin.files import (
    check_adapter_place,
    check_local_files,
    check_tokenizer_source,
    may_be_on_the_hub,
)
from tvb_mergekit.plugin.loaders import fresh_loaders
from tvb_mergekit.plugin.planning import Plan, Session, session
from tvb_mergekit.plugin.raw import open_file
from tvb_mergekit.plugin.reading import Recipe, check_unknown_keys, read_recipe
from tvb_mergekit.plugin.running import load_documents, unknown_method
from tvb_mergekit.plugin.stores import refuse_bases
from tvb_mergekit.recipe import METHODS, VARYING_KEYS
from tvb_mergekit.refusals import refusing
from tvb_mergekit.stream import Item, Part

LOG = logging.getLogger(__name__)
FUSE = "merge the adapters into models first: --fuse --lora-merge-cache DIR"


@dataclass(frozen=True)
class Options:
    """How the command may get at models."""

    trust_remote_code: bool = False
    allow_crimes: bool = False
    lora_merge_cache: str | None = None
    transformers_cache: str | None = None
    fuse: bool = False  # adapters, instead of working on their factors

    @property
    def mergekit(self) -> MergeOptions:
        return MergeOptions(
            trust_remote_code=self.trust_remote_code,
            allow_crimes=self.allow_crimes,
            lora_merge_cache=self.lora_merge_cache,
            transformers_cache=self.transformers_cache,
            quiet=True,
        )


@dataclass
class Document:
    """One recipe, read and checked; nothing of its models has been opened."""

    config: Any
    recipe: Recipe
    raw: bool  # models are weight files, as for mergekit-pytorch
    varying: dict[str, Any] = field(default_factory=dict)


def load_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The one recipe in a file, of any method, as plain objects.

    Raises:
        UserError: no such file, no YAML, several documents, or no mapping.
    """
    try:
        documents = load_documents(str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise UserError(f"{path}: expected one recipe, a mapping with `merge_method`")
    return documents[0]


def read_document(path: str | os.PathLike[str]) -> Document:
    """The recipe in a file.

    Raises:
        UserError: no recipe of ours, several documents, or a mistake in it.
    """
    document = load_document(path)
    method = document.get("merge_method")
    if method not in METHODS:
        raise unknown_method(str(path), method, METHODS)
    return from_mapping(document)


def from_mapping(document: Mapping[str, Any]) -> Document:
    """A recipe given as plain objects; see `read_document`."""
    with refusing(planning=lambda: True):
        base = document.get("base_model")
        raw = isinstance(base, str) and os.path.isfile(base)
        schema = RawPyTorchMergeConfig if raw else MergeConfiguration
        check_unknown_keys(document, schema)
        config = schema.model_validate(document)
        parameters = document.get("parameters") or {}
        varying = {key: parameters[key] for key in VARYING_KEYS if key in parameters}
        return Document(config, read_recipe(config), raw, varying)


def read_inputs(document: Document, options: Options, names: Sequence[str] | None = None) -> Inputs:
    """Open the models of a recipe, and match their tensors.

    Adapters of one base are taken by their factors; nothing of the size of a weight is made.

    Args:
        names: tensors that take part although no adapter targets them: as zeros.

    Raises:
        UserError: a model is missing, damaged, quantized or does not fit the base.
    """
    recipe = document.recipe
    if recipe.store is not None:
        raise UserError(
            f"the recipe lists the bases of {recipe.store.path}: list the fine-tuned models that a "
            "store is to replace"
        )
    with refusing():
        refuse_bases([recipe.base], "`base_model`")
    if document.raw:
        found = _raw_inputs(document)
    elif by_factors(document, options):
        found = _adapter_inputs(document, options, names or ())
    else:
        found = _planned_inputs(document, options)
    if not found.items:
        raise UserError(
            "no tensor takes part: every floating-point tensor is excluded or missing in a model"
        )
    found.varying = document.varying
    return found


def by_factors(document: Document, options: Options) -> bool:
    """Whether all models are adapters, which are then taken as they are."""
    return not options.fuse and all(model.lora is not None for model in document.recipe.models)


def _raw_inputs(document: Document) -> Inputs:
    recipe = document.recipe
    base, *sources = [open_file(model) for model in (recipe.base, *recipe.models)]
    matched = match(base, sources, recipe.tasks, recipe.settings)
    for note in matched.notes:
        LOG.warning("%s", note)
    return _inputs(document, base, sources, matched)


def _inputs(document: Document, base: Any, sources: Sequence[Any], matched: Matched) -> Inputs:
    recipe = document.recipe
    return Inputs(
        recipe.settings,
        base,
        str(recipe.base),
        recipe.tasks,
        [str(model) for model in recipe.models],
        recipe.weights,
        sources,
        matched.items,
        matched.left_out,
        matched.twins,
        dtype=document.config.out_dtype or document.config.dtype,
    )


def _adapter_inputs(document: Document, options: Options, names: Sequence[str]) -> Inputs:
    """All models are adapters of the base: their updates, from the factors."""
    recipe = document.recipe
    base = _local(recipe.base, options)
    sources = []
    adapters = []
    for task, model in zip(recipe.tasks, recipe.models, strict=True):
        assert model.lora is not None
        if ModelReference(model=model.model) != recipe.base:
            raise UserError(
                f"model {model} adapts {model.model}, and the base is {recipe.base}: adapters are "
                f"taken by their factors only under their own base; {FUSE}"
            )
        check_adapter_place(model.lora.path)
        path = ModelReference(model=model.lora).local_path(options.transformers_cache)
        try:
            adapters.append(Adapter.open(path, base.tensors, task, read=base.tensor))
        except NotPlainLora as error:
            raise UserError(str(error).replace(FUSE_INSTEAD, FUSE)) from error
    every = {name for adapter in adapters for name in adapter.factors}.union(names)
    settings = recipe.settings
    left_out = {
        name: "excluded by the recipe" if settings.excludes(name) else "no adapter targets it"
        for name in base.tensors
        if name not in every or settings.excludes(name)
    }
    targets = {name: info for name, info in base.tensors.items() if name not in left_out}
    if not targets:
        raise UserError("no tensor takes part: `exclude` matches all that the adapters target")
    kept = [adapter.restricted(targets) for adapter in adapters]
    sources = [AdapterDelta(adapter, targets, every=True) for adapter in kept]
    items = [
        Item(name, info.shape, None, tuple(Part.of(source, name) for source in sources))
        for name, info in targets.items()
    ]
    return replace(
        _inputs(document, base, sources, Matched(items, left_out, {})),
        deltas=True,
        adapters=kept,
        sums=factor_gram(kept),
        folder=base.folder,
    )


def open_base(text: str) -> tuple[Checkpoint, Path | None]:
    """A base model by its path or Hub name, and its folder (None for a weight file).

    Raises:
        UserError: it is not there.
    """
    if os.path.isfile(text):
        return Checkpoint.open(text), None
    if os.path.isdir(text):
        return Checkpoint.open(text), Path(text)
    if not may_be_on_the_hub(text.partition("@")[0]):
        raise UserError(
            f"base {text}: no such folder (from {os.getcwd()}); say where it is with --base"
        )
    with refusing(planning=lambda: True):
        checkpoint = _local(ModelReference.parse(text), Options())
    return checkpoint, checkpoint.folder


def _local(model: ModelReference, options: Options) -> Checkpoint:
    """Open a model, downloading it if it is a name on the Hub."""
    return Checkpoint.open(model.local_path(options.transformers_cache))


def _planned_inputs(document: Document, options: Options) -> Inputs:
    """Models as mergekit plans them: its architectures know under which names a tensor may go."""
    recipe, config = document.recipe, document.config
    if config.slices:
        raise UserError(
            "`slices`: a store holds differences from the base's own layers; list the models "
            "under `models`"
        )
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    if source not in (None, "base"):
        raise UserError(
            f"`tokenizer_source` is {source}: a store belongs to the base and its vocabulary; set "
            "`tokenizer_source: base`"
        )
    plan = plan_only(document, options)
    base = plan.checkpoints[recipe.base]
    sources = [plan.checkpoints[model] for model in recipe.models]
    items = []
    owners: dict[str, str] = {}
    for planned in plan.counted.values():
        names = planned.names
        if None in names or names[0] is None:
            raise UserError(
                f"tensor `{planned.name}` is made of others when it is loaded (an old layout of "
                "experts): save the models anew with a current transformers, or merge them with "
                "mergekit-yaml"
            )
        if (owner := owners.setdefault(names[0], planned.name)) != planned.name:
            raise UserError(
                f"tensors `{owner}` and `{planned.name}` are one tensor of the base, and two of "
                "the models: a store holds one difference for each tensor of the base; save the "
                "base with both, or leave both to it with `exclude`"
            )
        shape = base.tensors[names[0]].shape
        item = planned.item()
        if item.shape != shape:
            raise UserError(
                f"tensor `{planned.name}`: the recipe's tokenizer gives it the shape "
                f"{list(item.shape)}, the base has {list(shape)}: a store belongs to the base's "
                "own vocabulary"
            )
        items.append(replace(item, name=names[0]))
    found = _inputs(document, base, sources, Matched(items, plan.left_out, plan.twins))
    return replace(found, folder=base.folder, changed=plan.changed)


def plan_only(document: Document, options: Options) -> Plan:
    """mergekit's plan of a merge, with our tasks in it, that nothing will run.

    Raises:
        UserError, MergeRefused: what would refuse the merge before it starts.
    """
    with planned(document, options) as (plan, _tasks):
        return plan


@contextmanager
def planned(
    document: Document, options: Options
) -> Iterator[tuple[Plan, Sequence[tuple[WeightInfo, Task[Any]]]]]:
    """mergekit's plan with our tasks in it, and the tasks, which may be run within the context.

    The document is used up: mergekit rewrites its configuration.

    Raises:
        UserError, MergeRefused: what would refuse the merge before it starts.
    """
    running = Session(None)
    token = session.set(running)
    try:
        with refusing(planning=lambda: running.plan is None), fresh_loaders():
            check_local_files(document.recipe, options.mergekit)
            check_tokenizer_source(document.config)
            tasks = stock_tasks(document.config, options)
            assert running.plan is not None, "mergekit planned without our planner"
            yield running.plan, tasks
    finally:
        session.reset(token)


def stock_tasks(config: Any, options: Options) -> list[tuple[WeightInfo, Task[Any]]]:
    """What mergekit plans to do for each tensor of the merged model, up to the cast to
    `out_dtype`, which our own tasks do themselves."""
    settings = options.mergekit
    architecture = get_architecture_info(config, settings)
    LoaderCache().setup(options=settings)
    out = _model_out_config(config, architecture, trust_remote_code=settings.trust_remote_code)
    planner: Any = MergePlanner(config, architecture, settings, out)
    planner._plan()  # its plan_in_memory fails for all methods of mergekit's own
    tasks: list[tuple[WeightInfo, Task[Any]]] = planner._tensors
    return tasks
