"""One thread for what is done on T x T matrices.

Several threads wait for each other by spinning, at every step. Where another process has a core,
that takes up to a hundred times as long as the work.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

# Modules that OpenBLAS comes with, and what the wheels of numpy and scipy, and others, call its
# functions.
NUMPY, SCIPY = "numpy.linalg._umath_linalg", "scipy.linalg._fblas"
NAMES: tuple[str, ...] = ("scipy_openblas_%s_num_threads64_", "scipy_openblas_%s_num_threads")
NAMES += ("openblas_%s_num_threads64_", "openblas_%s_num_threads")


@contextmanager
def one_thread(*modules: str) -> Iterator[None]:
    """PyTorch and the OpenBLAS of these modules have one thread, afterwards as many as before."""
    with ExitStack() as stack:
        both = (pair for module in modules for pair in _openblas(module))
        for get, put in ((torch.get_num_threads, torch.set_num_threads), *both):
            stack.callback(put, get())
            put(1)
        yield


@functools.cache
def _openblas(module: str) -> list[tuple[Callable[[], int], Callable[[int], object]]]:
    """How to get and to set the threads of a module's OpenBLAS; empty if it has another BLAS."""
    try:
        library = ctypes.CDLL(str(importlib.import_module(module).__file__))
    except (ImportError, OSError):
        return []
    known = [name for name in NAMES if hasattr(library, name % "set")][:1]
    return [(getattr(library, n % "get"), getattr(library, n % "set")) for n in known]
