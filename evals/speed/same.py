"""How far the vectors of a store are from those that authors_procedure.py has written.

Prints the largest ||a - b|| / ||b|| of the M vectors.

    python same.py STORE PLAIN
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors import safe_open


def distance(store: Path, plain: Path) -> float:
    """Of one basis, a tensor at a time."""
    off = norm = 0.0
    with safe_open(plain, framework="pt") as expected:
        names = set(expected.keys())
        for file in store.glob("*.safetensors"):
            with safe_open(file, framework="pt") as found:
                for name in found.keys():
                    want = expected.get_tensor(name).double()
                    off += float((found.get_tensor(name).double() - want).square().sum())
                    norm += float(want.square().sum())
                    names.remove(name)
    if names:
        raise SystemExit(f"{store}: has no {sorted(names)[0]}")
    return float((off / norm) ** 0.5)


if __name__ == "__main__":
    store, plain = map(Path, sys.argv[1:])
    files = sorted(plain.glob("basis-*.safetensors"), key=lambda f: int(f.stem.split("-")[1]))
    print(max(distance(store / f"basis-{i:03d}", file) for i, file in enumerate(files)))
