"""mergekit's commands around our plan: early checks, a staged output folder, the report."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import click
import mergekit.card
import yaml
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from pydantic import BaseModel

from tvb_mergekit import report
from tvb_mergekit.output import StagedFolder, check_output_folder, stale_parts
from tvb_mergekit.plugin.loaders import fresh_loaders
from tvb_mergekit.plugin.planning import Plan, Session, session
from tvb_mergekit.plugin.reading import (
    check_local_files,
    check_unknown_keys,
    input_folders,
    read_recipe,
)
from tvb_mergekit.plugin.refusals import refusing
from tvb_mergekit.recipe import METHODS

LOG = logging.getLogger(__name__)


def wrap_run_merge(module: ModuleType) -> None:
    """Wrap `mergekit.merge.run_merge`: for our methods it checks first, then writes beside and
    renames, and adds our files and summary; other methods pass through untouched."""
    original = module.run_merge
    if getattr(original, "tvb_mergekit", False):
        return

    @functools.wraps(original)
    def run_merge(
        merge_config: MergeConfiguration,
        out_path: str,
        options: MergeOptions,
        config_source: str | None = None,
    ) -> None:
        if merge_config.merge_method not in METHODS:
            original(merge_config, out_path, options, config_source)
            return
        with refusing():
            recipe = read_recipe(merge_config)
            check_output_folder(out_path, input_folders(recipe))
            check_local_files(recipe, options.lora_merge_cache)
            warn_of_stale_parts(out_path)
            started = time.perf_counter()
            with staged(out_path) as (stage, running), fresh_loaders(), _local_cards():
                original(merge_config, str(stage.path), options, config_source)
                assert running.plan is not None, "run_merge returned without planning"
                finish(stage, running.plan, started, card=options.write_model_card)

    run_merge.tvb_mergekit = True  # type: ignore[attr-defined]
    vars(module)["run_merge"] = run_merge


@contextmanager
def staged(out_path: str) -> Iterator[tuple[StagedFolder, Session]]:
    """A staged folder and the session that the planner adds its plan to; on an error, no folder."""
    stage = StagedFolder(out_path)
    running = Session(out_path)
    token = session.set(running)
    try:
        yield stage, running
    finally:
        session.reset(token)
        stage.discard()


def finish(stage: StagedFolder, plan: Plan, started: float, *, card: bool) -> None:
    """Write our files into the staged folder, publish it, and print the summary."""
    basis = plan.basis
    assert basis is not None, "the graph ended without building the basis"
    basis.seconds["merge"] = time.perf_counter() - started - sum(basis.seconds.values())
    facts = report.facts(
        basis,
        base_model=str(plan.recipe.base),
        models=plan.recipe.model_names,
        left_out=plan.left_out,
        fingerprints=plan.fingerprints,
        tunables=plan.tunables,
        dtype=plan.out_dtype,
    )
    report.write_files(stage.path, basis, facts)
    if card:
        report.add_card_section(stage.path / "README.md", basis, facts)
    stage.publish()
    if not plan.options.quiet:
        report.print_summary(basis, facts, str(stage.out))


def warn_of_stale_parts(out_path: str) -> None:
    for path in stale_parts(out_path):
        LOG.warning("%s was left by a merge that was killed or still runs; delete it if not", path)


def wrap_command(
    command: click.Command, *, schema: type[BaseModel] = MergeConfiguration, multiple: bool = False
) -> None:
    """Check a recipe's text before a command hands it to mergekit, which drops unknown keys.

    Args:
        command: `mergekit-yaml`, `mergekit-multi` or `mergekit-pytorch`.
        schema: what the command reads a document into.
        multiple: several documents in one file, each of which may have a `name`.
    """
    original = command.callback
    assert original is not None
    if getattr(original, "tvb_mergekit", False):
        return

    @functools.wraps(original)
    def callback(*args: Any, **kwargs: Any) -> Any:
        path = kwargs.get("config_file") or kwargs.get("config_path")
        if not (path and os.path.isfile(path) and uses_our_methods(path)):
            return original(*args, **kwargs)
        with refusing():
            for document in _documents(path):
                if multiple:
                    document.pop("name", None)
                check_unknown_keys(document, schema)
            return original(*args, **kwargs)

    callback.tvb_mergekit = True  # type: ignore[attr-defined]
    command.callback = callback


def uses_our_methods(path: str) -> bool:
    """Whether a document of this recipe asks for one of our methods; a file that is no YAML does
    not, and gets mergekit's own complaint."""
    try:
        return bool(_documents(path))
    except (yaml.YAMLError, UnicodeDecodeError):
        return False


def _documents(path: str) -> list[dict[str, Any]]:
    """The recipe's documents that use our methods."""
    with open(path, encoding="utf-8") as file:
        documents = list(yaml.safe_load_all(file))
    return [d for d in documents if isinstance(d, dict) and d.get("merge_method") in METHODS]


@contextmanager
def _local_cards() -> Iterator[None]:
    """Let the model card take an existing folder for a folder. mergekit asks the Hub whether
    `models/base` is a repository, and offline fails after the weights are written."""
    original: Callable[[str], bool] = mergekit.card.is_hf

    def is_hf(path: str) -> bool:
        return not os.path.exists(path) and original(path)

    mergekit.card.is_hf = is_hf
    try:
        yield
    finally:
        mergekit.card.is_hf = original
