"""Stores, and the signs of a store's folder. This module imports no torch."""

import os

STORE = "store.json"


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a store, which may be damaged. Others have a `store.json` too."""
    file, vectors = os.path.join(path, STORE), os.path.join(path, "vectors")
    return os.path.isfile(file) and os.path.isdir(vectors)
