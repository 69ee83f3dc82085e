"""What starting costs: the start-up hook beside a bare Python, and `tvb` beside `import torch`.

    python evals/speed/startup.py [STORE]

The hook: the median over 300 interleaved pairs in two bare virtual environments, one of which has
its three files. `tvb`: medians of 7 interleaved runs; `inspect` needs a STORE.
"""

from __future__ import annotations

import compileall
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOOK = ("tvb_mergekit_hook.py", "packaging/tvb_mergekit.pth", "packaging/tvb_mergekit.start")
PAIRS, RUNS = 300, 7
TVB = (sys.executable, "-m", "tvb_mergekit")


def environment(folder: Path, hook: bool) -> Path:
    """A bare environment; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    if hook:
        for name in HOOK:
            shutil.copy(ROOT / name, site)
        compileall.compile_dir(site, quiet=1)
    return folder / "bin" / "python"


def seconds(*words: str | Path) -> float:
    started = time.perf_counter()
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def print_hook() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pythons = [environment(Path(folder, str(on)), on) for on in (False, True)]
        runs = [[seconds(python, "-c", "pass") for python in pythons] for _ in range(PAIRS + 10)]
    without = statistics.median(plain for plain, _ in runs[10:]) * 1e3
    cost = statistics.median(hooked - plain for plain, hooked in runs[10:]) * 1e3
    print(f"python -c pass: {without:.2f} ms; with the hook {cost:+.2f} ms (median of {PAIRS})")


def print_commands(commands: Sequence[Sequence[str]]) -> None:
    torch = (sys.executable, "-c", "import torch")
    runs = [
        [seconds(*torch), *(seconds(*TVB, *words) for words in commands)] for _ in range(RUNS + 1)
    ]
    base, *medians = (statistics.median(column[1:]) for column in zip(*runs, strict=True))
    print(f"python -c 'import torch': {base:.2f} s (medians of {RUNS})")
    for words, median in zip(commands, medians, strict=True):
        print(f"tvb {' '.join(words)}: {median:.2f} s, {median / base:.2f} times that")


def main() -> None:
    commands = [["--help"], ["build", "--help"], ["cache", "list"]]
    commands += [["inspect", store] for store in sys.argv[1:]]
    print_hook()
    print_commands(commands)


if __name__ == "__main__":
    main()
