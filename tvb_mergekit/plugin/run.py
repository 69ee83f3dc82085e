"""A merge by our passes: early checks, a staged output folder, the weights, the report.

The tensors go through `plan.Plan` in one pass and are written in the same order. mergekit's own
functions write configuration, tokenizer and model card. Several processes all plan the whole merge.
Each reads and writes its share, and the leader writes the rest.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import transformers
from mergekit import merge_methods
from mergekit.architecture import WeightInfo
from mergekit.card import generate_card
from mergekit.common import ModelReference, parse_kmb
from mergekit.config import MergeConfiguration
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from torch import Tensor

from tvb_mergekit.errors import UserError, one_line
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.loaders import MappedLoader, fresh_loaders, open_model
from tvb_mergekit.plugin.names import replaced
from tvb_mergekit.plugin.plan import Plan, check_base, engine_of, plan_merge, vectors_of
from tvb_mergekit.plugin.preflight import check_local_files, check_tokenizer_source, input_folders
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.plugin.sources import Candidate, part_of
from tvb_mergekit.progress import logging_above_bars
from tvb_mergekit.refusals import refusing, unwinding
from tvb_mergekit.store import report
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.output import (
    StagedFolder,
    check_disk,
    check_output_folder,
    stale_parts,
)
from tvb_mergekit.tensors.stream import Item
from tvb_mergekit.tensors.writing import (
    FoldersSink,
    FolderWriter,
    MemorySink,
    plan_shards,
    run_of,
)

LOG = logging.getLogger(__name__)
# mergekit's options for its own task graph, which none of our methods runs.
WITHOUT_EFFECT = (
    "async_write",
    "clone_tensors",
    "lazy_unpickle",
    "low_cpu_memory",
    "read_to_gpu",
    "write_threads",
)


def merge_recipe(
    document: Document, out: str, memory: int, *, out_shard_size: str, **options: Any
) -> None:
    """Merge into the folder `out`, as `mergekit-yaml` does.

    Args:
        document: the recipe; used up, since mergekit rewrites its configuration.
        memory: bytes that the passes may allocate.
        out_shard_size: as a user writes it.
        options: others of mergekit's `MergeOptions`.

    Raises:
        UserError, MergeRefused: what refuses the merge.
    """
    assert options.keys() <= MergeOptions.model_fields.keys()  # others would be dropped
    if document.raw:
        raise UserError(
            "the recipe's models are weight files: merge them with mergekit-pytorch, or list "
            "folders as Hugging Face writes them"
        )
    try:
        shard = parse_kmb(out_shard_size)
    except (ValueError, IndexError) as error:
        raise UserError(
            f"--out-shard-size {out_shard_size}: expected a size such as 500M or 5B"
        ) from error
    settings = MergeOptions(out_shard_size=shard, **options)
    merge(document.recipe, document.config, out, settings, document.text, memory)


def merge(
    recipe: Recipe,
    config: MergeConfiguration,
    out: str,
    options: MergeOptions,
    source: str | None = None,
    memory: int | None = None,
) -> None:
    """Merge model folders into the folder `out`, which appears when it is complete.

    Args:
        config: the configuration of `recipe`; used up, since mergekit rewrites it.
        source: the recipe as a text, for the output folder.
        memory: bytes that the passes may allocate; None: TVB_MERGEKIT_BLOCK_MB.

    Raises:
        MergeRefused: what refuses the merge.
    """
    started = time.perf_counter()
    world = ranks.world()
    _tell_options_without_effect(options)
    if options.random_seed is not None:
        transformers.trainer_utils.set_seed(options.random_seed)
    with logging_above_bars(), unwinding(), refusing(out=out):
        opened = None
        with refusing(planning=True):
            if world.leads:
                check_output_folder(out, input_folders(recipe))
                opened = check_local_files(recipe, options)
                check_tokenizer_source(config)
                warn_of_stale_parts(out)
        with staged(out) as stage, fresh_loaders():
            with refusing(planning=True):
                plan = world.first(lambda: plan_merge(recipe, config, options, memory, opened))
                plan.open()
                check_disk(out, plan.output_bytes)
            plan.build()
            write_model(plan, config, stage, source, started)


def write_model(
    plan: Plan,
    config: MergeConfiguration,
    stage: StagedFolder,
    source: str | None,
    started: float,
) -> None:
    """Write the merged model of a plan whose basis is built, and publish it.

    Args:
        started: when the work began, by `time.perf_counter`.
    """
    with _local_cards():
        write_tensors(plan, stage.path)
        _write_companions(plan, config, stage.path, source)
        finish(stage, plan, started, card=plan.options.write_model_card)


def _tell_options_without_effect(options: MergeOptions) -> None:
    given = options.model_dump(include=set(WITHOUT_EFFECT), exclude_defaults=True)
    if given and not options.gpu_rich and not options.quiet:  # --gpu-rich sets some of them
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        LOG.warning("%s: without effect on our methods, which stream tensors", names)


@contextmanager
def staged(out: str) -> Iterator[StagedFolder]:
    """A folder for the merged model that is deleted after an error.

    The leader of several processes makes and deletes the folder.
    """
    world = ranks.world()
    made = StagedFolder(out) if world.leads else None
    try:
        stage = world.share(lambda: made)
        assert stage is not None
        world.check_shared(stage.path)
        yield stage
    finally:
        if made is not None:
            made.discard()


class TorchSink(MemorySink):
    """Writes `.bin` shards by mergekit's writer, which holds one at a time."""

    def __init__(self, writer: TensorWriter) -> None:
        super().__init__(1)
        self._writer = writer

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        super().write(item, start, stop, values)
        if stop == item.numel:
            self._writer.save_tensor(item.name, self.states[0].pop(item.name))


def write_tensors(plan: Plan, folder: Path) -> None:
    """Merge all tensors into the weight files of `folder`; of several processes, only the leader
    comes back."""
    items = plan.items()
    options, world = plan.options, ranks.world()
    if not options.safe_serialization:
        writer = TensorWriter(str(folder), options.out_shard_size, safe_serialization=False)
        plan.merge_into(TorchSink(writer), items)
        writer.finalize()
        return
    shards = plan_shards(items, options.out_shard_size or sys.maxsize, world.size)
    world.agree([[shard.name, [i.name for i in shard.items]] for shard in shards], "tensors")
    files = FolderWriter(folder, shards, {"format": "pt"}, rank=world.rank)
    plan.merge_into(FoldersSink([files]), run_of(shards, world.rank))
    records = world.collect(files.whole())
    world.dismiss()
    files.finish(records)


def _write_companions(
    plan: Plan, config: MergeConfiguration, folder: Path, source: str | None
) -> None:
    """Configuration, model card and tokenizer, as mergekit's `run_merge` writes them."""
    from mergekit.merge import (  # not above: our hook on it needs this module
        _copy_tagalong_files,
        _copy_tokenizer,
        _set_chat_template,
        _update_config_vocab,
    )

    options = plan.options
    tokenizer = next((made.tokenizer for made in plan.tokenizers.values()), None)
    if tokenizer is not None:
        multiple = config.tokenizer.pad_to_multiple_of if config.tokenizer else None
        _update_config_vocab(plan.config, plan.architecture, tokenizer, pad_to_multiple_of=multiple)
    plan.config.save_pretrained(folder)
    if plan.untied:  # let loaders read the model's own output embedding, which the base ties
        path = folder / "config.json"
        values = json.loads(path.read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if options.write_model_card:
        source = source or config.to_yaml()
        card = generate_card(config=config, config_yaml=source, name=folder.name)
        (folder / "README.md").write_text(card, encoding="utf-8")
        (folder / "mergekit_config.yml").write_text(source, encoding="utf-8")
    if tokenizer is not None:
        _set_chat_template(tokenizer, config)
        tokenizer.save_pretrained(folder)
    elif options.copy_tokenizer:
        try:
            _copy_tokenizer(config, str(folder), options=options)
        except Exception as error:  # of whatever kind the tokenizer's code leads to
            told = "the tokenizer could not be copied; the merge is whole: %s"
            LOG.error(told, one_line(error))
    elif config.chat_template:
        LOG.warning("`chat_template` is not saved: there is no tokenizer")
    files = plan.architecture.tagalong_files or []
    _copy_tagalong_files(config, str(folder), files=files, options=options)


def _local_cards() -> AbstractContextManager[None]:
    """Keep mergekit from asking the Hub whether an existing folder is a repository, which fails
    offline after the weights are written."""
    return replaced(
        "mergekit.card:is_hf",
        lambda original: lambda path: not os.path.exists(path) and original(path),
    )


def finish(stage: StagedFolder, plan: Plan, started: float, *, card: bool) -> None:
    """Write our files into the staged folder, publish the folder, and print the summary."""
    basis = plan.basis
    assert basis is not None
    plan.note_unread()
    basis.seconds["merge"] = time.perf_counter() - started - sum(basis.seconds.values())
    facts, tensors = plan.report()
    report.write_files(stage.path, facts, tensors)
    if card:
        report.add_card_section(stage.path / "README.md", facts, tensors)
    if plan.learned is not None:
        plan.learned.write(stage.path)
    stage.publish()
    if not plan.options.quiet:
        try:
            report.print_summary(facts, tensors, str(stage.out))
        except Exception as error:  # a closed pipe, a terminal without the characters
            LOG.warning("the merge is whole, but its summary cannot be printed: %s", error)


def warn_of_stale_parts(out: str) -> None:
    """Name the folders that killed merges into `out` left behind."""
    for path in stale_parts(out):
        LOG.warning("%s was left by a merge that was killed or still runs; delete it if not", path)


def plan_files(
    recipe: Recipe,
    config: Any,
    out: str,
    options: MergeOptions,
    union: bool,
    intersection: bool,
) -> Plan:
    """The plan of a merge of weight files into the folder `out`.

    Raises:
        UserError: a reason that stops the merge, before anything of a tensor is read.
    """
    check_output_folder(out, input_folders(recipe))
    _tell_options_without_effect(options)
    plan = _planned_files(recipe, config, options, union, intersection)
    check_disk(out, plan.output_bytes)
    warn_of_stale_parts(out)
    return plan


def merge_files(plan: Plan, out: str, started: float) -> None:
    """Merge weight files by their plan, and publish the folder `out`."""
    with refusing(out=out), staged(out) as stage:
        plan.build()
        write_tensors(plan, stage.path)
        finish(stage, plan, started, card=False)


def _planned_files(
    recipe: Recipe,
    config: Any,
    options: MergeOptions,
    union: bool,
    intersection: bool,
) -> Plan:
    # Not above: the import calls our hook, which needs this module.
    from mergekit.scripts.merge_raw_pytorch import construct_param_dicts

    engine = engine_of(options)
    known = vectors_of(recipe)
    files = {model: known.get(model) or open_file(model) for model in recipe.every}
    base, stored = files[recipe.base], recipe.vectors is not None
    check_base(recipe, base)
    if not stored and not (union or intersection):
        _check_same_tensors(files)
    loaders = {model: MappedLoader(file) for model, file in files.items()}
    plan = Plan(recipe, options, engine, loaders, config.out_dtype or config.dtype)
    method = merge_methods.get(config.merge_method)
    # A store may hold a tensor under another name, which the plan looks up.
    theirs = [base.tensors if stored else files[model].tensors for model in recipe.models]
    names = sorted(set(base.tensors).union(*theirs))
    if intersection:
        names = [n for n in names if all(n in tensors for tensors in (base.tensors, *theirs))]
    plan.candidates = [
        Candidate(
            WeightInfo(name=name),
            dict(construct_param_dicts(config, method, name)[0].items()),
            {model: part_of(file, name) for model, file in files.items()},
        )
        for name in names
    ]
    plan.open()
    return plan


def open_file(model: ModelReference) -> Checkpoint:
    """The weight file that a recipe of mergekit-pytorch names."""
    path = model.model.path
    if not os.path.isfile(path):
        found = "is a folder" if os.path.isdir(path) else "no such file"
        raise UserError(f"model {path}: {found}; mergekit-pytorch takes one weight file each")
    return open_model(path)


def _check_same_tensors(files: dict[ModelReference, Checkpoint]) -> None:
    every = {name for file in files.values() for name in file.tensors}
    for model, file in files.items():
        for name in sorted(every - set(file.tensors)):
            raise UserError(
                f"tensor `{name}` is not in {model}, but in others; merge what all have with "
                "--tensor-intersection, or keep the base's with --tensor-union"
            )
