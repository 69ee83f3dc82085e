"""The Hugging Face Hub: names of models in place of folders.

huggingface_hub's own rules decide on the token, the cache, the mirror and being offline: HF_TOKEN
or `hf auth login`, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
import re
from typing import Any

from tvb_mergekit.errors import UserError, one_line

# Files of a model, and of an export beside its weights.
FILES = "*.json tokenizer.model *.safetensors *.jinja *.txt *.model *.tiktoken *.py".split()
ELSE = ["[!0-9]*/*", "consolidated*"]  # other copies of a model; `1_Pooling` is a part of it


def may_be_on_the_hub(path: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


def local(path: str | os.PathLike[str]) -> str:
    """The path, or the snapshot's folder of USER/NAME or USER/NAME@REVISION; or UserError."""
    text = os.fspath(path)
    name, _, revision = text.partition("@")
    if os.path.exists(text) or "/" not in name or not may_be_on_the_hub(name):
        return text
    try:
        return snapshot(name, revision or None)
    except Exception as error:  # also of an HTTP library, which depends on the Hub's version
        raise UserError(
            f"{text}: no such folder (from {os.getcwd()}), nor to be had from the Hugging Face "
            f"Hub: {one_line(error)}"
        ) from error


def snapshot(name: str, revision: str | None = None, cache: str | None = None) -> str:
    """The folder of a model's files."""
    from huggingface_hub import snapshot_download

    place: dict[str, Any] = {} if cache is None else {"cache_dir": cache}
    found: str = snapshot_download(
        name, revision=revision, allow_patterns=FILES, ignore_patterns=ELSE, **place
    )
    return found
