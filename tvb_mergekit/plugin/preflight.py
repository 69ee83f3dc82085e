"""What lies on this disk of a recipe's models: looked at before anything is read or downloaded."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.tensors.checkpoint import Checkpoint, check_weight_file, weight_files
from tvb_mergekit.tensors.output import check_disk


def check_local_files(recipe: Recipe, options: MergeOptions) -> None:
    """`check_model` of each model of a recipe, before anything else is downloaded or planned."""
    for model in (recipe.base, *recipe.models):
        weights = recipe.store is None or model == recipe.base  # a store's bases may be adapters
        check_model(model, recipe.base, options, weights)


def check_model(
    model: ModelReference, base: ModelReference, options: MergeOptions, weights: bool = True
) -> None:
    """Open what lies of a model on this disk; a name is looked up on the Hub.

    Args:
        weights: whether its weight files are opened too.

    Raises:
        UserError: a folder, its configuration or its weights are missing or damaged.
    """
    path = model.model.path
    if model.lora is not None:
        _check_adapter(model, options.lora_merge_cache)
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            found = ", ".join(weight_files(path)) or "no weight file"
            adapter = os.path.isfile(os.path.join(path, "adapter_config.json"))
            hint = "; an adapter is listed as BASE+ADAPTER" if adapter else ""
            raise UserError(
                f"model {path}: no config.json in this folder (found {found}); expected a "
                f"Hugging Face model folder{hint}"
            )
        if not options.allow_crimes:
            _check_architecture(path, base.model.path)
        if scheme := _config(path).get("quantization_config"):
            kind = scheme.get("quant_method") if isinstance(scheme, dict) else scheme
            raise UserError(
                f"model {path} is stored quantized ({kind}): its tensors are codes, not "
                "weights; take an unquantized checkpoint (an adapter goes as BASE+ADAPTER)"
            )
        try:
            model.config(trust_remote_code=options.trust_remote_code)
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).split(". ")[0].splitlines()[0]
            raise UserError(
                f"model {path}: transformers cannot read its config.json: {reason}"
            ) from error
        if weights:
            Checkpoint.open(path)
    elif os.path.isfile(path):
        raise UserError(
            f"model {path} is a file; expected a model folder (mergekit-pytorch takes files)"
        )
    elif not may_be_on_the_hub(path):
        hint = "; `~` and `$` are not expanded in recipes" if path[0] in "~$" else ""
        if path.startswith("../"):
            hint = "; the recipes of a store are run where they lie, as STORE/recipes/NAME.yml"
        raise UserError(f"model {path}: no such folder (from {os.getcwd()}){hint}")
    elif _offline():
        _check_hub_cache(path)
    else:
        _check_hub(model, options.trust_remote_code)


def check_tokenizer_source(config: MergeConfiguration) -> None:
    """A tokenizer may come from a model that is not merged: its folder must exist.

    Raises:
        UserError: it does not, or a folder that should give a tokenizer has none.
    """
    key = "tokenizer.source" if config.tokenizer else "tokenizer_source"
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    if source is None:
        return
    if source == "union":
        models = config.referenced_models()
    else:
        models = [config.base_model if source == "base" else source]
    for model in models:
        path = model.model.path
        if not os.path.isdir(path) and not may_be_on_the_hub(path):
            raise UserError(f"`{key}` is {source}: no such folder {path} (from {os.getcwd()})")
        if os.path.isdir(path) and not _tokenizer_files(path):
            raise UserError(
                f"`{key}` is {source}: model {path} has no tokenizer files (tokenizer.json, "
                "tokenizer.model or vocab.json); copy them there, or leave the key out"
            )


def _tokenizer_files(path: str) -> list[str]:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    return [name for name in (*names, "tokenizer_config.json") if os.path.isfile(f"{path}/{name}")]


def may_be_on_the_hub(path: str) -> bool:
    """Whether a path has the form of a repository's name."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


def _check_hub_cache(path: str) -> None:
    """Offline, a name that is no folder must be in the Hub's cache on this disk."""
    if huggingface_hub.try_to_load_from_cache(path, "config.json") is None:
        raise UserError(
            f"model {path}: no such folder (from {os.getcwd()}), and not in this machine's "
            "Hugging Face cache (HF_HUB_OFFLINE is set)"
        )


def _check_hub(model: ModelReference, trust_remote_code: bool) -> None:
    """A name must be on the Hub: its configuration is fetched, which planning needs anyway."""
    try:
        model.config(trust_remote_code=trust_remote_code)
    except OSError as error:
        reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise UserError(
            f"model {model.model}: no such folder (from {os.getcwd()}), and not to be had from the "
            f"Hugging Face Hub: {reason}"
        ) from error


def _check_architecture(path: str, base: str) -> None:
    """The model's class must be the base's; mergekit's own complaint names neither."""
    found, expected = _architectures(path), _architectures(base)
    if found and expected and found != expected:
        raise UserError(
            f"model {path} is a {', '.join(found)}, the base {base} a {', '.join(expected)}: a "
            "task vector needs one architecture (--allow-crimes tries all the same)"
        )


def _architectures(path: str) -> list[str]:
    return [str(name) for name in _config(path).get("architectures") or []]


def _config(path: str) -> dict[str, Any]:
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        return {}
    try:
        with open(file, encoding="utf-8") as stream:
            values = json.load(stream)
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); download it again") from error
    return values if isinstance(values, dict) else {}


def check_adapter_place(path: str) -> None:
    """Raise UserError where an adapter can be neither in its folder nor on the Hub."""
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "adapter_config.json")):
            raise UserError(
                f"adapter {path}: no adapter_config.json in this folder; expected a PEFT adapter"
            )
    elif not may_be_on_the_hub(path):
        raise UserError(
            f"adapter {path}: no such folder (from {os.getcwd()}); mergekit reads `+` in a model "
            "as MODEL+ADAPTER"
        )
    elif _offline() and huggingface_hub.try_to_load_from_cache(path, "adapter_config.json") is None:
        raise UserError(
            f"adapter {path}: no such folder (from {os.getcwd()}), and not in this machine's "
            "Hugging Face cache (HF_HUB_OFFLINE is set)"
        )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON")


def _check_adapter(model: ModelReference, lora_cache: str | None) -> None:
    assert model.lora is not None
    if not lora_cache:
        raise UserError(
            f"model {model} has an adapter: say where its fused copy may be kept, "
            "--lora-merge-cache DIR (it takes a base model's size per adapter)"
        )
    path = model.lora.path
    check_adapter_place(path)
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if os.path.isfile(os.path.join(path, name)):
            try:
                check_weight_file(os.path.join(path, name))
            except UserError as error:
                raise UserError(f"model {model}: {error}") from error
    fused = Path(lora_cache) / f"{model.model._unique_id()}_{model.lora._unique_id()}"
    if not fused.exists():
        try:
            importlib.import_module("peft")  # before mergekit makes the folder that it fuses into
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"model {model}: peft, which would fuse its adapter, cannot be imported: {reason}"
            ) from error
        if os.path.isdir(model.model.path):
            check_disk(lora_cache, Checkpoint.open(model.model.path).nbytes)
        return
    try:
        Checkpoint.open(fused)
    except UserError as error:
        # mergekit makes the folder first and would take a half-written one for whole.
        raise UserError(
            f"model {model}: its fused copy in {fused} was cut while it was written; "
            f"delete that folder ({error})"
        ) from error
    mark = fused / FUSED_MARK
    now = _origin(model)
    if mark.exists() and json.loads(mark.read_text(encoding="utf-8")) != now:
        raise UserError(
            f"model {model}: its fused copy in {fused} was made from other files than are there "
            "now (trained again, or another folder of that name); delete that folder"
        )
    newest = max((stamp[2] for stamps in now.values() for stamp in stamps), default=0)
    if not mark.exists() and newest > max(f.stat().st_mtime_ns for f in fused.iterdir()):
        raise UserError(
            f"model {model}: its fused copy in {fused} is older than the adapter or the base; "
            "delete that folder"
        )


FUSED_MARK = "tvb_fused_from.json"


def mark_fused(folder: str, model: ModelReference) -> None:
    """Note beside a copy that mergekit has fused what it was made from: mergekit itself never
    looks whether the adapter has changed since."""
    mark = Path(folder) / FUSED_MARK
    if not mark.exists():
        mark.write_text(json.dumps(_origin(model)), encoding="utf-8")


def _origin(model: ModelReference) -> dict[str, list[list[Any]]]:
    """Folder -> [weight file, size, mtime] of the base and the adapter, where they are local."""
    found = {}
    for part in (model.model, model.lora):
        if part is not None and os.path.isdir(part.path):
            files = [Path(part.path) / name for name in weight_files(part.path)]
            found[os.path.realpath(part.path)] = [
                [f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files
            ]
    return found


def input_folders(recipe: Recipe) -> Sequence[str]:
    """Every local folder that the merge reads."""
    paths = [model.model.path for model in (recipe.base, *recipe.models)]
    paths += [model.lora.path for model in recipe.models if model.lora]
    return [path for path in paths if os.path.exists(path)]
