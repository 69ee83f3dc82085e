"""Pieces of files in memory without a copy: mmap(2) into one range of addresses.

To unmap interrupts every processor that runs a thread of this process, so what is mapped of the
T + 1 models for a piece is unmapped by one call, before the next piece. Python's own `mmap` can
neither choose the addresses nor let other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import BinaryIO, ClassVar

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_NONE, _READ = 0, 1  # PROT_NONE, PROT_READ
_PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x2, 0x10, 0x20, 0x4000  # MAP_*, of Linux
_POPULATE = 22  # MADV_POPULATE_READ: pages take a sixth of the time that they take one by one


class Window:
    """One thread's range of addresses, which `clear` empties."""

    usable: ClassVar[bool] = sys.platform == "linux"

    def __init__(self) -> None:
        self._address = self._size = self._used = 0
        if not self.usable:
            return
        self._call = ctypes.CDLL(None, use_errno=True)
        self._call.mmap.restype = ctypes.c_void_p
        self._call.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_int64,
        ]
        self._call.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._call.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def clear(self, sizes: list[int]) -> None:
        """Make room for pieces of so many bytes; the tensors before must not be used any more.

        Raises:
            OSError: there are not so many addresses.
        """
        size = sum(_rounded(size) + _PAGE for size in sizes)
        self._used = 0
        if not size or not self.usable:
            return
        how = _PRIVATE | _ANONYMOUS | _NORESERVE
        if size <= self._size:
            self._map(self._address, self._size, _NONE, how | _FIXED, -1, 0)
            return
        self.close()
        self._address = self._map(None, size, _NONE, how, -1, 0)
        self._size = size

    def add(self, file: BinaryIO, place: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements, at least one, from byte `place` of a file on. Read-only.

        Raises:
            EOFError: the file ends before. To touch what is mapped beyond its end ends the process,
                as when another program cuts it after this.
            OSError: it cannot be mapped, or read.
        """
        size = count * dtype.itemsize
        if os.fstat(file.fileno()).st_size < place + size:
            raise EOFError
        skip = place % _PAGE
        address = self._address + self._used
        self._map(address, skip + size, _READ, _PRIVATE | _FIXED, file.fileno(), place - skip)
        if self._call.madvise(address, skip + size, _POPULATE):
            number = ctypes.get_errno()
            if number != errno.EINVAL:  # Linux before 5.14
                raise OSError(number, os.strerror(number))
        self._used += _rounded(skip + size)
        room = (ctypes.c_char * size).from_address(address + skip)
        return torch.frombuffer(room, dtype=dtype, count=count)

    def close(self) -> None:
        """Unmap all."""
        if self._size:
            self._call.munmap(self._address, self._size)
            self._address = self._size = 0

    __del__ = close

    def _map(
        self, address: int | None, size: int, access: int, how: int, file: int, place: int
    ) -> int:
        found: int | None = self._call.mmap(address, size, access, how, file, place)
        if found is None or found == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return found


def _rounded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
