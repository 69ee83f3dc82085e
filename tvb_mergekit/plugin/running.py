"""mergekit's commands around our plan: early checks, a staged output folder, the report."""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import mergekit.card
import yaml
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from pydantic import BaseModel

from tvb_mergekit import ranks, report
from tvb_mergekit.errors import UserError, check_names
from tvb_mergekit.output import StagedFolder, check_output_folder, stale_parts
from tvb_mergekit.plugin.files import (
    check_local_files,
    check_tokenizer_source,
    input_folders,
)
from tvb_mergekit.plugin.loaders import fresh_loaders, install_adapters
from tvb_mergekit.plugin.planning import Plan, Session, session
from tvb_mergekit.plugin.reading import check_unknown_keys, read_recipe
from tvb_mergekit.progress import logging_above_bars
from tvb_mergekit.ready import located
from tvb_mergekit.recipe import METHODS, nearest
from tvb_mergekit.refusals import refusing, unwinding

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
        running = Session(out_path)
        stopping = refusing(planning=lambda: running.plan is None, out=out_path)
        with logging_above_bars(), stopping:
            recipe = read_recipe(merge_config)
            world = ranks.world()
            if world.leads:
                check_output_folder(out_path, input_folders(recipe))
                check_local_files(recipe, options)
                check_tokenizer_source(merge_config)
                warn_of_stale_parts(out_path)
            started = time.perf_counter()
            with unwinding(), staged(running) as stage, fresh_loaders(), _local_cards():
                if not world.leads:  # wait until the leader has planned, downloaded and fused
                    world.share(lambda: None)
                install_adapters(recipe)
                original(merge_config, str(stage.path), options, config_source)
                assert running.plan is not None, "run_merge returned without planning"
                if running.plan.untied:
                    write_untied(stage.path / "config.json")
                finish(stage, running.plan, started, card=options.write_model_card)

    run_merge.tvb_mergekit = True  # type: ignore[attr-defined]
    vars(module)["run_merge"] = run_merge


@contextmanager
def staged(running: Session) -> Iterator[StagedFolder]:
    """A staged folder, and `running` where the planner adds its plan; on an error, no folder.

    Of several processes the leader makes the folder, and deletes it when no other writes into it.
    """
    out = running.out
    assert out is not None
    world = ranks.world()
    stage = made = StagedFolder(out) if world.leads else None
    token = session.set(running)
    try:
        with world.whole(), refusing(planning=lambda: running.plan is None, out=out):
            stage = world.share(lambda: made)
            assert stage is not None
            world.check_shared(stage.path)
            yield stage
    finally:
        session.reset(token)
        if stage is not None and world.cleans:
            stage.discard()


def finish(stage: StagedFolder, plan: Plan, started: float, *, card: bool) -> None:
    """Write our files into the staged folder, publish it, and print the summary."""
    basis = plan.basis
    assert basis is not None, "the graph ended without building the basis"
    plan.note_unread()
    basis.seconds["merge"] = time.perf_counter() - started - sum(basis.seconds.values())
    facts, tensors = plan.report()
    report.write_files(stage.path, facts, tensors)
    if card:
        report.add_card_section(stage.path / "README.md", facts, tensors)
    stage.publish()
    if not plan.options.quiet:
        try:
            report.print_summary(facts, tensors, str(stage.out))
        except Exception as error:  # a closed pipe, a terminal without the characters
            LOG.warning("the merge is whole, but its summary cannot be printed: %s", error)


def write_untied(path: Path) -> None:
    """Let loaders of the merged model read its own output embedding, which the base ties."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
        key = "config_file" if "config_file" in kwargs else "config_path"
        path = kwargs.get(key)
        if not (path and os.path.isfile(path)):
            return original(*args, **kwargs)
        with refusing(planning=lambda: True):
            ours = uses_our_methods(path)
            if ours:
                check_names(path, kwargs.get("out_path") or path)
                ranks.one_only(str(command.name))
                check_documents(path, schema, multiple)
        if not ours:
            return original(*args, **kwargs)
        with refusing(out=str(kwargs.get("out_path"))), unwinding(), _placed(path) as placed:
            return original(*args, **{**kwargs, key: placed})

    callback.tvb_mergekit = True  # type: ignore[attr-defined]
    command.callback = callback


def uses_our_methods(path: str) -> bool:
    """Whether the recipe asks for one of our methods.

    Raises:
        UserError: the text is no YAML, or asks for a method that mergekit does not know either.
    """
    methods = [_method(document) for document in load_documents(path, strict=False)]
    for method in methods:
        if isinstance(method, str) and method not in registered():
            raise unknown_method(path, method, registered())
    return any(method in METHODS for method in methods)


def registered() -> Sequence[str]:
    """The methods that mergekit knows, ours first."""
    theirs = {method.spec.name for method in merge_methods.registered_methods()}
    return (*METHODS, *sorted(theirs - set(METHODS)))


def unknown_method(path: str, method: object, known: Sequence[str]) -> UserError:
    guess = nearest(method, known) if isinstance(method, str) else None
    hint = f" (did you mean `{guess}`?)" if guess else ""
    listed = ", ".join(known)
    return UserError(f"{path}: `merge_method` is {method!r:.80}: expected one of {listed}{hint}")


def _method(document: Any) -> object:
    """What a document says under `merge_method`, also in a list by mistake."""
    if isinstance(document, list) and document:
        document = document[0]
    return document.get("merge_method") if isinstance(document, dict) else None


def check_documents(path: str, schema: type[BaseModel], multiple: bool) -> None:
    """Check each document of ours as a recipe, before mergekit works on the first.

    Raises:
        UserError: no YAML, a key twice, an unknown key, or what `read_recipe` refuses.
        pydantic.ValidationError, RuntimeError: mergekit's own complaint.
    """
    documents = load_documents(path)
    for document in documents:
        if not isinstance(document, dict):
            raise UserError(
                f"{path}: a {type(document).__name__}, expected a mapping with `merge_method`"
            )
        if document.get("merge_method") not in METHODS:
            continue
        if multiple:
            document = {key: value for key, value in document.items() if key != "name"}
        check_unknown_keys(document, schema)
        read_recipe(schema.model_validate(document))


def load_documents(path: str, *, strict: bool = True) -> list[Any]:
    """The YAML documents of a recipe.

    Raises:
        UserError: the text is no YAML, or, where `strict`, a mapping has a key twice (YAML keeps
            the last).
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8")
        documents = list(yaml.load_all(text, Loader=_StrictLoader if strict else yaml.SafeLoader))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: no UTF-8 text ({error.reason})") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        found = f"{error.reason} ({error.character:#06x})"
        raise UserError(f"{path}, line {line}: no YAML, {found}") from error
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        tab = "; YAML is indented by spaces, not tabs" if "\\t" in str(error.problem) else ""
        raise UserError(f"{path}{place}: {error.problem}{tab}") from error
    return [located(document, path) for document in documents] if strict else documents


def recipe_text(path: str) -> str:
    """A recipe as mergekit is to read it: as it was written, or a store's with absolute paths."""
    documents = load_documents(path)
    if documents == load_documents(path, strict=False):
        return Path(path).read_text(encoding="utf-8")
    return str(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True))


@contextmanager
def _placed(path: str) -> Iterator[str]:
    """A file that holds `recipe_text`: where the recipe lies, or a temporary one."""
    text = recipe_text(path)
    if text == Path(path).read_text(encoding="utf-8"):
        yield path
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as copy:
        copy.write(text)
        copy.flush()
        yield copy.name


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key twice in one mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _value in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node.value, str) else None
            if key is not None and key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{key_node.value}` stands here a second time", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


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
