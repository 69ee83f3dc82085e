"""Read all tensors of the given safetensors files once, and print the seconds: the yardstick.

The files are opened as mergekit opens them (mapped), and every byte is looked at, by one thread
per processor. The seconds are of this alone: no imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors import safe_open

PIECE = 2**20  # elements


def touch(path: str) -> int:
    """The largest 16-bit word of a file, so that none can be skipped."""
    largest = -(2**15)
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            words = file.get_tensor(name).view(torch.int16).reshape(-1)
            for piece in words.split(PIECE):
                largest = max(largest, int(piece.max()))
    return largest


def timed(paths: list[str]) -> dict[str, float]:
    """Seconds, threads, and the largest word."""
    torch.set_num_threads(1)  # inside an operation: the files are shared out instead
    threads = min(len(paths), len(os.sched_getaffinity(0)))
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        largest = max(pool.map(touch, paths))
    return {"seconds": time.perf_counter() - started, "threads": threads, "largest": largest}


if __name__ == "__main__":
    print(json.dumps(timed(sys.argv[1:])))
