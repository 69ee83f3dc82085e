"""A dispatch mode in the threads that read and compute: each thread has modes of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from tvb_mergekit.tensors import stream


@contextmanager
def in_every_thread(mode: Callable[[], TorchDispatchMode]) -> Iterator[None]:
    """Within it `mode` is entered in this thread, and once wherever `stream` makes what a thread
    reads and computes with."""
    local = threading.local()
    local.entered = True

    def watching(kind: type) -> Any:
        original: Callable[..., None] = kind.__init__  # type: ignore[misc]

        def watched(self: object, *args: Any, **keys: Any) -> None:
            if not hasattr(local, "entered"):
                local.entered = mode().__enter__()
            original(self, *args, **keys)

        return mock.patch.object(kind, "__init__", watched)

    with ExitStack() as stack:
        stack.enter_context(watching(stream.PieceBuffer))
        stack.enter_context(mode())
        yield
