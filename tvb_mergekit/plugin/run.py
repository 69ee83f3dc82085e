"""A merge by our passes: early checks, a staged output folder, the weights, the report.

mergekit's own functions write configuration, tokenizer and model card. Several processes all plan
the complete merge. Each reads and writes its share, and the leader writes the rest.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from pathlib import Path

import click
import transformers
from mergekit import card
from mergekit import merge as stock
from mergekit.common import ModelPath, ModelReference
from mergekit.options import MergeOptions

from tvb_mergekit.errors import listed, one_line, refusing, unwinding
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.plugin.planner import planned
from tvb_mergekit.progress import logging_above_bars
from tvb_mergekit.store import report
from tvb_mergekit.store.facts import FACTS, FOLDER, TENSORS, Facts, write_facts, write_tensors
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.checkpoint import say_untied, weight_files
from tvb_mergekit.tensors.output import (
    check_disk,
    check_output_folder,
    plan_shards,
    staged,
    to_files,
)
from tvb_mergekit.tensors.passes import share_of

LOG = logging.getLogger(__name__)
# mergekit's options for its own task graph, which none of our methods runs.
WITHOUT_EFFECT = set(
    "async_write clone_tensors lazy_unpickle lora_merge_cache lora_merge_dtype low_cpu_memory "
    "multi_gpu read_to_gpu write_threads".split()
)
# Files of the base that loaders of the merge need: for generation, images and sounds, own code, and
# sentence-transformers with its modules
COMPANIONS = (
    "generation_config.json *processor_config.json *.py modules.json *sentence*.json [0-9]_[A-Z]*/"
).split()
OF_TOKENIZER = "tekken.json *.tiktoken additional_chat_templates/".split()


def merge(document: Document, out: str, options: MergeOptions) -> None:
    """Merge model folders into the folder `out`, which appears when it is complete."""
    started = time.perf_counter()
    if options.random_seed is not None:
        transformers.trainer_utils.set_seed(options.random_seed)
    with logging_above_bars(), unwinding(), refusing(out=out):
        if ranks.leads():
            check_place(out, options)
        with planned(document, options) as plan:
            with staged(out) as folder:
                check_disk(out, plan.output_bytes)
                plan.build()
                facts = write_model(plan, document, folder, started)
            say(plan, facts, out)


def check_place(out: str, options: MergeOptions) -> None:
    """Check the output folder, and warn of options without effect."""
    check_output_folder(out)
    given = options.model_dump(include=WITHOUT_EFFECT, exclude_defaults=True)
    if given and not options.gpu_rich and not options.quiet:  # --gpu-rich sets some of them
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        LOG.warning("%s: without effect on our methods, which stream models and adapters", names)
    if not options.safe_serialization:
        LOG.warning("--no-safe-serialization: our methods write safetensors all the same")


def write_model(plan: Plan, document: Document, folder: Path, started: float) -> Facts:
    """Write the merged model of a plan whose basis is built, with its report, into `folder`.

    Args:
        started: when the work began, by `time.perf_counter`.
    """
    items = plan.tensors.items
    limit = max(plan.options.out_shard_size or 0, 0) or sys.maxsize
    sink = to_files(folder, plan_shards(items, limit), {"format": "pt"})
    plan.merge_into(sink, share_of(items))
    ranks.dismiss()  # only the leader goes on
    _write_companions(plan, document, folder)
    seconds = plan.basis.seconds
    seconds["merge"] = time.perf_counter() - started - sum(seconds.values())
    facts, tensors = plan.report()
    (folder / FOLDER).mkdir()
    write_tensors(folder / FOLDER / TENSORS, tensors, {"format": "pt"})
    write_facts(folder / FOLDER / FACTS, facts)
    if (page := folder / "README.md").exists():
        said = f"{report.OURS} merged {report.vectors(facts)} by `{facts.method}`."
        text = f"{page.read_text(encoding='utf-8').rstrip()}\n\n{report.section(said, facts)}"
        page.write_text(text, encoding="utf-8")
    if plan.learned is not None:
        plan.learned.write(folder)
    return facts


def _write_companions(plan: Plan, document: Document, folder: Path) -> None:
    """Configuration, model card and tokenizer, as mergekit's `run_merge` writes them."""
    config, options = document.config, plan.options
    tokenizer = plan.tokenizer and plan.tokenizer.tokenizer
    if tokenizer is not None:
        multiple = config.tokenizer.pad_to_multiple_of if config.tokenizer else None
        stock._update_config_vocab(
            plan.config, plan.architecture, tokenizer, pad_to_multiple_of=multiple
        )
    plan.config.save_pretrained(folder)
    say_untied(folder)
    if options.write_model_card:
        (folder / "README.md").write_text(_card(document, folder.name), encoding="utf-8")
        (folder / "mergekit_config.yml").write_text(document.text, encoding="utf-8")
    if tokenizer is not None:
        stock._set_chat_template(tokenizer, config)
        tokenizer.save_pretrained(folder)
    elif options.copy_tokenizer:
        donor = ModelReference(model=ModelPath(path=str(plan.base.folder)))  # not from the Hub
        given = config.model_copy(update={"base_model": donor})
        try:
            stock._copy_tokenizer(given, str(folder), options=options)
        except Exception as error:  # a tokenizer's own code may raise any
            told = "the tokenizer could not be copied; the merge is complete: %s"
            LOG.error(told, one_line(error))
    elif config.chat_template:
        LOG.warning("`chat_template` is not saved: the merge has no tokenizer")
    patterns = [*COMPANIONS, *(OF_TOKENIZER if not tokenizer and options.copy_tokenizer else ())]
    for file in (file for pattern in patterns for file in plan.base.folder.glob(pattern)):
        place = folder / file.name
        if file.is_dir():
            shutil.copytree(file, place, dirs_exist_ok=True)
            if weight_files(file):
                LOG.warning("%s: its weights are copied from the base, not merged", file.name)
        elif not place.exists():
            shutil.copyfile(file, place)


def say(plan: Plan, facts: Facts, out: str) -> None:
    """Print the summary of a complete merge."""
    if not plan.options.quiet:
        place, seconds = os.path.realpath(out), sum(facts.seconds.values())
        lines = [
            f"Merged {report.vectors(facts)} by {facts.method}: {listed(facts.tasks, 12)}",
            f"Base: {facts.base_model}",
            *report.remarks(facts),
            f"Written to {place} in {seconds:.1f} s; `tvb inspect` shows details",
        ]
        try:
            click.echo("\n".join(lines))
        except Exception as error:  # a closed pipe, a terminal without the letters of a name
            LOG.warning("the merge is complete, but its summary cannot be printed: %s", error)


def _card(document: Document, name: str) -> str:
    """mergekit's model card. It would ask the Hub whether a folder is one's name there."""
    asked = card.is_hf
    card.is_hf = lambda path: not os.path.exists(path) and asked(path)
    try:
        text: str = card.generate_card(document.given, document.text, name)
    finally:
        card.is_hf = asked
    return text
