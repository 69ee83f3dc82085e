"""Checks of a recipe's models on this disk, before a tensor is read or a file downloaded."""

from __future__ import annotations

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

from tvb_mergekit.errors import UserError, one_line
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.tensors.checkpoint import Checkpoint, weight_files
from tvb_mergekit.tensors.output import check_disk

TOKENIZER_FILES = (
    "tokenizer.json tokenizer.model vocab.json vocab.txt spiece.model tokenizer_config.json"
).split()


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
        _check_adapter(model, options.lora_merge_cache)
    if os.path.isfile(path):
        raise UserError(f"model {path} is a file (for mergekit-pytorch); expected a model folder")
    if os.path.isdir(path):
        _check_config(path, base.model.path, options.allow_crimes)
    elif not may_be_on_the_hub(path):
        raise UserError(
            f"model {path}: no such folder (from {os.getcwd()}); recipes expand neither `~` nor "
            "`$`, and those of a store are run where they lie, as STORE/recipes/NAME.yml"
        )
    try:
        model.config(trust_remote_code=options.trust_remote_code)  # which planning needs anyway
    except (ValueError, KeyError, OSError) as error:
        reason = one_line(error).split(". ")[0].rstrip(".")
        problem = f"no such folder (from {os.getcwd()}), nor to be had from the Hugging Face Hub"
        problem += " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        if os.path.isdir(path):
            problem = "transformers cannot read its config.json"
        raise UserError(f"model {path}: {problem}: {reason}") from error
    opened = Checkpoint.open(path) if weights and os.path.isdir(path) else None
    return opened if model.lora is None else None


def check_tokenizer_source(config: MergeConfiguration) -> None:
    """Raise UserError if the model of `tokenizer_source` is missing or has no tokenizer."""
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    models = [config.base_model if source == "base" else source] if source else []
    if source == "union":
        models = config.referenced_models()
    for path in [model.model.path for model in models]:
        if os.path.isdir(path):
            if not any(os.path.isfile(os.path.join(path, name)) for name in TOKENIZER_FILES):
                raise UserError(
                    f"`tokenizer_source` is {source}: model {path} has no tokenizer files "
                    "(tokenizer.json ...); copy them there, or leave the key out"
                )
        elif not may_be_on_the_hub(path):
            raise UserError(f"`tokenizer_source` {source}: no folder {path} (from {os.getcwd()})")


def may_be_on_the_hub(path: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


def _check_config(path: str, base: str, any_architecture: bool) -> None:
    """Raise UserError unless a folder is an unquantized model of the base's architecture."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        found = ", ".join(weight_files(path)) or "no weight file"
        raise UserError(
            f"model {path}: no config.json in this folder (found {found}); expected a Hugging Face "
            "model folder, or an adapter as BASE+ADAPTER"
        )
    config = _read_config(path)
    architectures, expected = (c.get("architectures") for c in (config, _read_config(base)))
    if architectures and expected and architectures != expected and not any_architecture:
        raise UserError(
            f"model {path} is a {', '.join(architectures)}, the base {base} a "
            f"{', '.join(expected)}: expected one architecture (or --allow-crimes)"
        )
    if scheme := config.get("quantization_config"):
        kind = scheme.get("quant_method") if isinstance(scheme, dict) else scheme
        raise UserError(
            f"model {path} is stored quantized ({kind}): its tensors are codes, not weights; take "
            "an unquantized checkpoint (an adapter goes as BASE+ADAPTER)"
        )


def _read_config(path: str) -> dict[str, Any]:
    file = Path(path, "config.json")
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); download it again") from error
    return values if isinstance(values, dict) else {}


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


def _check_adapter(model: ModelReference, cache: str | None) -> None:
    """Check an adapter and mergekit's fused copy: mergekit itself accepts a cut or old copy."""
    assert model.lora is not None
    if not cache:
        raise UserError(f"model {model} has an adapter: give --lora-merge-cache DIR for its fusion")
    check_adapter_place(model.lora.path)
    folders = (model.model.path, model.lora.path)
    files = [os.path.join(path, name) for path in folders for name in weight_files(path)]
    for file in files:
        if os.path.basename(file).startswith("adapter_model."):
            Checkpoint.open(file)
    fused = Path(cache, f"{model.model._unique_id()}_{model.lora._unique_id()}")
    if not fused.exists():
        if os.path.isdir(model.model.path):
            check_disk(cache, Checkpoint.open(model.model.path).nbytes)
        return
    copy = f"model {model}: its fused copy in {fused}"
    try:
        written = min(Path(fused, shard).stat().st_mtime for shard in Checkpoint.open(fused).shards)
    except UserError as error:
        raise UserError(f"{copy} was cut while it was written; delete it ({error})") from error
    if any(os.path.getmtime(file) > written for file in files):
        raise UserError(f"{copy} is older than the adapter or the base; delete it")


def input_folders(recipe: Recipe) -> Sequence[str]:
    """Every local folder that the merge reads."""
    paths = [model.model.path for model in recipe.every]
    paths += [model.lora.path for model in recipe.models if model.lora]
    return [path for path in paths if os.path.exists(path)]
