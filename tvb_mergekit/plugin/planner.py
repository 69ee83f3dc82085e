"""The plan of a merge, by mergekit's own planner.

mergekit's planner knows the place of each merged tensor in each model, and resolves `lambda`,
`alpha` and `density` for the tensor. Our passes replace mergekit's own tasks. Models on this disk
are checked before a tensor is read or a file downloaded.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from mergekit.architecture import get_architecture_info
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader, MergeConfiguration, OutputSliceDefinition
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from pydantic import PrivateAttr

from tvb_mergekit.errors import UserError, listed, one_line, refusing
from tvb_mergekit.hub import may_be_on_the_hub
from tvb_mergekit.plugin import replaced
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.items import MergedTensors
from tvb_mergekit.plugin.plan import Plan, engine_of
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.plugin.sources import (
    ORIGIN,
    Loaders,
    candidate,
    files_of,
    fresh_loaders,
    fused_folder,
    install_loader,
    origin_of,
)
from tvb_mergekit.progress import phase
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import check_embeddings
from tvb_mergekit.tensors.checkpoint import TOKENIZER_FILES, Checkpoint
from tvb_mergekit.tensors.output import check_disk


@contextmanager
def planned(document: Document, options: MergeOptions, memory: int | None = None) -> Iterator[Plan]:
    """The plan of a merge, which may be run within the context.

    The document is used up: mergekit rewrites its configuration.

    Args:
        memory: Bytes that the passes may allocate. None: TVB_MERGEKIT_BLOCK_MB.

    Raises:
        UserError, MergeRefused: a reason that stops the merge before its first pass.
    """
    with fresh_loaders():
        yield _plan(document, options, memory)


def plan_only(document: Document, options: MergeOptions) -> Plan:
    """The plan of a merge that nothing will run; see `planned`."""
    with planned(document, options) as plan:
        return plan


@refusing(planning=True)
def _plan(document: Document, options: MergeOptions, memory: int | None) -> Plan:
    engine, world = engine_of(options, memory), ranks.world()
    loaders, planner = world.first(lambda: _opened(document, options))
    recipe = document.recipe.over(loaders[document.recipe.base].checkpoint)
    task = planner._tokenizer_task
    # mergekit orders new tokens by a set, whose order differs between processes.
    tokenizer = None if task is None else world.share(lambda: _tokenizer(task, recipe))
    held = {model: loader.checkpoint for model, loader in loaders.items()}
    configs = (model.config(trust_remote_code=options.trust_remote_code) for model in loaders)
    tied = all(getattr(config, "tie_word_embeddings", False) for config in configs)
    tensors = MergedTensors(recipe, held, document.dtype, document.config.out_dtype, tied)
    tensors.fill(candidate(held, w, task, tokenizer, options) for w, task in planner._tensors)
    made = planner.arch_info, planner.out_model_config
    return Plan(recipe, options, engine, loaders, tensors, tokenizer, *made)


def _tokenizer(task: Any, recipe: Recipe) -> Any:
    """mergekit's `TokenizerInfo`, whose permutations have a row, or -1, for each token and model.

    Vectors of a store, and models without tokenizer files, have the base's rows: for some
    architectures transformers makes up a tokenizer of a few tokens instead of failing.
    """
    found = task.execute()
    for rows in found.permutations.values():  # mergekit leaves out tokens beyond a model's rows
        rows |= {n: -1 for n in found.tokenizer.get_vocab().values() if n not in rows}
    for model in recipe.models:
        path = model.model.path
        if recipe.bases is not None or (os.path.isdir(path) and not _has_tokenizer(path)):
            found.permutations[model] = found.permutations[recipe.base]
    return found


@phase("Planning")
def _opened(document: Document, options: MergeOptions) -> tuple[Loaders, MergePlanner]:
    """The open models, and mergekit's plan; local files are checked before any download."""
    recipe, held = document.recipe, document.recipe.opened
    opened = {m: check_model(m, recipe.base, options, m not in held) for m in recipe.every}
    check_tokenizer_source(document.config)
    tokens = document.config.tokenizer and document.config.tokenizer.tokens
    if recipe.bases and (forced := [name for name, way in (tokens or {}).items() if way.force]):
        raise UserError(
            f"`tokens` of `tokenizer`: {listed(forced)}: `force` makes rows of weights, and the "
            "vectors of a store are differences; leave `force` out, or merge the models themselves"
        )
    LoaderCache().setup(options=options)
    loaders = {model: install_loader(model, found) for model, found in (opened | held).items()}
    recipe.check_base(loaders[recipe.base].checkpoint)
    return loaders, planned_by_mergekit(document.config, options)


def planned_by_mergekit(config: MergeConfiguration, options: MergeOptions) -> MergePlanner:
    """mergekit's planner, with its task for each tensor in `_tensors`.

    Args:
        config: used up, since mergekit rewrites it.
    """
    from mergekit.merge import _model_out_config  # not above: our hook on it needs this module

    LoaderCache().setup(options=options)
    architecture = get_architecture_info(config, options)
    if unknown := sorted(set(config.modules or ()) - set(architecture.modules)):
        known = listed([*architecture.modules])
        raise UserError(f"`modules`: the models have no {listed(unknown)}; they have {known}")
    out = _model_out_config(config, architecture, trust_remote_code=options.trust_remote_code)
    planner = MergePlanner(config, architecture, options, out)
    # mergekit's own cache holds the configurations of 128 models.
    uncached = MergePlanner._model_arch.__wrapped__
    planner._model_arch = functools.cache(functools.partial(uncached, planner))
    with replaced("mergekit.plan:ConfigReader", lambda _original: _Reader):
        planner._plan()  # its plan_in_memory fails for all methods of mergekit's own
    return planner


class _Reader(ConfigReader):
    """mergekit's reader with the same settings in the same order, except that it finds a model by
    its hash: mergekit's own compares each model with each, for every tensor."""

    _of: dict[ModelReference, list[Any]] = PrivateAttr(default_factory=dict)
    _slice: OutputSliceDefinition | None = PrivateAttr(default=None)

    def parameter_sources(self, model: ModelReference | None = None) -> Iterator[Any]:
        if self.slice_out is not None:
            if self._slice is not self.slice_out:
                self._slice, self._of = self.slice_out, {}
                for source in self.slice_out.sources:
                    self._of.setdefault(source.model, []).append(source.parameters)
            if model is not None:
                yield from self._of.get(model, ())
            yield self.slice_out.parameters
        if self.module is not None:
            yield self.module.parameters
        yield self.config.parameters


def check_model(
    model: ModelReference, base: ModelReference, options: MergeOptions, weights: bool = True
) -> Checkpoint | None:
    """Check the files of a model on this disk; look a name up on the Hub.

    Args:
        weights: whether its weight files are opened.

    Returns:
        The open checkpoint; None for an adapter, a name on the Hub, or without `weights`.

    Raises:
        UserError: a folder, its configuration or its weights are missing or damaged.
    """
    path = model.model.path
    if model.lora is not None:
        dtype = options.lora_merge_dtype
        _check_adapter(model, options.lora_merge_cache, dtype and dtype_from_name(dtype))
    check_model_place(path)
    try:
        config = model.config(trust_remote_code=options.trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            f"model {path} has no configuration to read (an adapter goes as BASE+ADAPTER): "
            f"{one_line(error)}"
        ) from error
    if scheme := getattr(config, "quantization_config", None):
        kind = scheme.get("quant_method") if isinstance(scheme, dict) else scheme
        raise UserError(
            f"model {path} is stored quantized ({kind}): its tensors are codes, not weights; take "
            "an unquantized checkpoint"
        )
    opened = Checkpoint.open(path) if weights and os.path.isdir(path) else None
    return opened if model.lora is None else None


def check_tokenizer_source(config: MergeConfiguration) -> None:
    """Raise UserError if a folder of `tokenizer_source` has no tokenizer.

    For some architectures transformers would make one up.
    """
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    models = config.referenced_models() if source == "union" else [source] if source else []
    for model in [config.base_model if model == "base" else model for model in models]:
        path = model.model.path
        if os.path.isdir(path) and not _has_tokenizer(path):
            raise UserError(
                f"`tokenizer_source` is {source}: model {path} has no tokenizer files "
                "(tokenizer.json ...); use `base`, or copy them there if it is in no store"
            )


def _has_tokenizer(path: str) -> bool:
    return any(os.path.isfile(os.path.join(path, name)) for name in TOKENIZER_FILES)


def check_model_place(path: str) -> None:
    """Raise UserError if a model can be neither in its folder nor on the Hub."""
    if not os.path.isdir(path) and not may_be_on_the_hub(path):
        raise UserError(
            f"model {path}: no such folder (from {os.getcwd()}); recipes expand neither `~` nor `$`"
        )


def check_adapter_place(path: str) -> None:
    """Raise UserError if an adapter can be neither in its folder nor on the Hub."""
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "adapter_config.json")):
            raise UserError(f"adapter {path}: no adapter_config.json; expected a PEFT adapter")
        return
    there = may_be_on_the_hub(path)
    if there and os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        there = huggingface_hub.try_to_load_from_cache(path, "adapter_config.json") is not None
    if not there:
        raise UserError(
            f"adapter {path}: no such folder (from {os.getcwd()}), nor to be had from the Hugging "
            "Face Hub; mergekit reads `+` in a model as MODEL+ADAPTER"
        )


def _check_adapter(model: ModelReference, cache: str | None, dtype: torch.dtype | None) -> None:
    """Check an adapter and mergekit's fused copy: mergekit accepts a cut, old or other copy."""
    assert model.lora is not None
    if not cache:
        raise UserError(f"model {model} has an adapter: give --lora-merge-cache DIR for its fusion")
    check_adapter_place(model.lora.path)
    files = files_of(model)
    for file in files:
        if file.name.startswith("adapter_model."):
            Checkpoint.open(file)
    base = Checkpoint.open(model.model.path) if os.path.isdir(model.model.path) else None
    if base is not None:
        check_embeddings(base, Path(model.lora.path))
    fused = fused_folder(model, cache)
    if not fused.exists():
        if base is not None:
            infos = base.tensors.values()
            check_disk(cache, sum(i.numel * (dtype or i.dtype).itemsize for i in infos))
        return
    copy = f"model {model}: its fused copy in {fused}"
    try:
        opened = Checkpoint.open(fused)
        written = min(Path(fused, shard).stat().st_mtime for shard in opened.shards)
    except UserError as error:
        raise UserError(f"{copy} was cut while it was written; delete it ({error})") from error
    if (record := fused / ORIGIN).is_file():
        if json.loads(record.read_text(encoding="utf-8")) != origin_of(files):
            raise UserError(f"{copy} is of another adapter or base, or of older ones; delete it")
    elif any(file.stat().st_mtime > written for file in files):  # made by mergekit alone
        raise UserError(f"{copy} is older than the adapter or the base; delete it")
    if dtype and dtype not in {info.dtype for info in opened.tensors.values()}:
        raise UserError(f"{copy} is not in {dtype}, the --lora-merge-dtype; delete it")


def input_folders(recipe: Recipe) -> Sequence[str]:
    """Every local folder that the merge reads, and the store of its vectors."""
    paths = [] if recipe.bases is None else [recipe.bases.place]
    paths += [model.model.path for model in recipe.every]
    paths += [model.lora.path for model in recipe.models if model.lora]
    return [path for path in paths if os.path.exists(path)]
