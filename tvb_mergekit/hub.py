"""The Hugging Face Hub: names of repositories in place of folders, and the upload of a store.

huggingface_hub's own rules decide on the token, the cache, the mirror and being offline: HF_TOKEN
or `hf auth login`, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tvb_mergekit.errors import UserError, one_line

STORE = ("basis.json", "basis.safetensors", "*/*")  # no model card
MODEL = ("*.json", "tokenizer.model", "*.safetensors")


def may_be_on_the_hub(path: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


def local(path: str | os.PathLike[str], patterns: Sequence[str]) -> str:
    """The path itself, or the folder of the snapshot of USER/NAME or USER/NAME@REVISION.

    Files that match the patterns are downloaded unless they are in the cache.

    Raises:
        UserError: neither a path nor a repository that can be read.
    """
    text = os.fspath(path)
    name, _, revision = text.partition("@")
    if os.path.exists(text) or "/" not in name or not may_be_on_the_hub(name):
        return text
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, revision=revision or None, allow_patterns=[*patterns])
    except Exception as error:  # also of an HTTP library, which depends on the Hub's version
        raise UserError(
            f"{text}: no such folder (from {os.getcwd()}), nor to be had from the Hugging Face "
            f"Hub: {one_line(error)}"
        ) from error


def push(folder: Path, name: str, card: str, private: bool) -> str:
    """Upload all files of a folder and a model card in one commit; returns its address.

    The repository is made if it does not exist.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    repository, _, revision = name.partition("@")
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    operations = [CommitOperationAdd(each.relative_to(folder).as_posix(), each) for each in files]
    operations.append(CommitOperationAdd("README.md", card.encode()))
    api = HfApi(library_name="tvb-mergekit")
    api.create_repo(repository, private=private, exist_ok=True)
    message = "Upload a store of task vector bases"
    done = api.create_commit(
        repository, operations, commit_message=message, revision=revision or None
    )
    return str(done.commit_url)
