"""The scripts of evals/speed, run as commands, and imported as modules."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

SPEED = Path(__file__).resolve().parent.parent / "evals" / "speed"


def run(script: str, *words: str | Path | float) -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, str(SPEED / script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def module(name: str) -> ModuleType:
    """A script imported afresh, under a name that no other package has."""
    spec = importlib.util.spec_from_file_location(f"speed_{name}", SPEED / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded
