"""One thread for what is done on T x T matrices.

Several threads wait for each other by spinning, at every step. Where another process has a core,
that takes up to a hundred times as long as the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch and the BLAS of NumPy and SciPy have one thread, afterwards as many as before."""
    threads = torch.get_num_threads()
    with threadpool_limits(1):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
