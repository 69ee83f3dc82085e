"""The Hugging Face Hub: names of repositories in place of folders, and the upload of a store.

huggingface_hub's own rules decide on the token, the cache, the mirror and being offline: HF_TOKEN
or `hf auth login`, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvb_mergekit.atomic import MARK, next_to
from tvb_mergekit.errors import UserError, listed, one_line

FACTS = ("basis.json", "basis.safetensors", "basis/basis.*")  # of a store, or in a merged model
MODEL = ("*.json", "tokenizer.model", "*.safetensors")
BESIDE = ("*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")  # of an export, next to MODEL
ELSE = ("*/*", "consolidated*")  # other copies of a model


def may_be_on_the_hub(path: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


def parsed(text: str) -> tuple[str, str | None] | None:
    """The repository and the revision of USER/NAME or USER/NAME@REVISION; None for other texts."""
    name, _, revision = text.partition("@")
    found = "/" in name and not name.endswith((".yml", ".yaml")) and may_be_on_the_hub(name)
    return (name, revision or None) if found else None


def local(path: str | os.PathLike[str], patterns: Sequence[str], but: Sequence[str] = ()) -> str:
    """The path itself, or the folder of the snapshot of USER/NAME or USER/NAME@REVISION.

    Files that match the patterns, and none of `but`, are downloaded unless they are in the cache.

    Raises:
        UserError: neither a path nor a repository with such files that can be read.
    """
    text = os.fspath(path)
    if os.path.exists(text) or (found := parsed(text)) is None:
        return text
    new, previous, begun = (next_to(text, kind) for kind in ("new", "previous", "partial"))
    if (new.is_dir() and previous.is_dir()) or (new / MARK).is_file() or begun.is_dir():
        return text  # a store that is being changed or built, or was interrupted
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            found[0], revision=found[1], allow_patterns=[*patterns], ignore_patterns=[*but]
        )
    except Exception as error:  # also of an HTTP library, which depends on the Hub's version
        raise UserError(
            f"{text}: no such folder (from {os.getcwd()}), nor to be had from the Hugging Face "
            f"Hub: {one_line(error)}"
        ) from error
    if not os.path.isdir(folder):
        raise UserError(f"{text}: the repository has no {listed(patterns)}")
    return folder


def in_cache(path: Path) -> bool:
    """Whether a resolved path lies in the cache of downloaded repositories."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return path.is_relative_to(os.path.realpath(HF_HUB_CACHE))


def push(
    folder: Path,
    names: Sequence[str],
    repository: str,
    revision: str | None,
    card: str,
    private: bool = False,
) -> str:
    """Upload these files of a folder and a model card in one commit; returns its address.

    The repository is made if it does not exist. Files of an earlier store are deleted.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    content: dict[str, Path | bytes] = {"README.md": card.encode()}
    content |= {name: folder / name for name in sorted(names)}
    operations: list[Any] = [CommitOperationAdd(*each) for each in content.items()]
    api = HfApi(library_name="tvb-mergekit")
    api.create_repo(repository, private=private, exist_ok=True)
    there = {*api.list_repo_files(repository, revision=revision)}
    if FACTS[0] in there:  # an earlier store, whose other files go
        facts = Path(api.hf_hub_download(repository, FACTS[0], revision=revision)).read_bytes()
        record = json.loads(facts).get("store", {}).get("files", ())
        old = {name for name in there if name in record or name.startswith("recipes/")}
        kept = {name for name in old if (folder / name).exists()}  # a user's own recipes
        operations += map(CommitOperationDelete, sorted(old - kept - {*content}))
    message = "Upload a store of task vector bases"
    done = api.create_commit(repository, operations, commit_message=message, revision=revision)
    return str(done.commit_url)
