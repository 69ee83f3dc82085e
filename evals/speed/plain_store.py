"""What building a store cannot be faster than: read the files twice, write M of them once.

Plain safetensors calls: `safe_open` and `get_tensor` with every byte looked at, one thread per
processor, and `save_file`. Prints the seconds of each part; `sync` is what it takes until the
written files are on the disk.

    python plain_store.py M OUT FILE [FILE ...]
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from read import touch
from safetensors.torch import load_file, save_file


def main(count: int, out: Path, paths: list[str]) -> None:
    torch.set_num_threads(1)
    threads = min(len(paths), len(os.sched_getaffinity(0)))
    out.mkdir(parents=True)
    marks = [time.perf_counter()]
    for _ in range(2):
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(touch, paths))
    marks.append(time.perf_counter())
    for index in range(count):
        save_file(load_file(paths[1 + index]), out / f"{index}.safetensors")
    marks.append(time.perf_counter())
    for index in range(count):
        with (out / f"{index}.safetensors").open("rb") as file:
            os.fsync(file.fileno())
    marks.append(time.perf_counter())
    parts = zip(("read", "write", "sync"), marks[1:], marks, strict=False)
    print(json.dumps({name: stop - start for name, stop, start in parts}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
