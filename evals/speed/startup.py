"""What the start-up hook costs `python -c pass`: median of interleaved pairs, in milliseconds.

    python evals/speed/startup.py [PAIRS]      # 300 pairs, about ten seconds

Makes two bare virtual environments, gives one the hook's three files, and runs them in turn.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOOK = ("tvb_mergekit_hook.py", "packaging/tvb_mergekit.pth", "packaging/tvb_mergekit.start")


def environment(folder: Path, hook: bool) -> Path:
    """A bare environment; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    if hook:
        for name in HOOK:
            shutil.copy(ROOT / name, site)
        compileall.compile_dir(site, quiet=1)
    return folder / "bin" / "python"


def seconds(python: Path) -> float:
    started = time.perf_counter()
    subprocess.run([python, "-c", "pass"], check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory() as folder:
        plain, hooked = (environment(Path(folder, str(on)), on) for on in (False, True))
        runs = [(seconds(plain), seconds(hooked)) for _ in range(pairs + 10)][10:]
    without = statistics.median(a for a, _ in runs) * 1e3
    cost = statistics.median(b - a for a, b in runs) * 1e3
    print(f"python -c pass: {without:.2f} ms; with the hook {cost:+.2f} ms (median of {pairs})")


if __name__ == "__main__":
    main()
