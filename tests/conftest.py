"""Fixtures shared by the tests: virtual environments with this project installed for real."""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tiny import family
from worlds import FAMILIES, Models

ROOT = Path(__file__).resolve().parent.parent
# Every run has the same examples, and a busy machine fails none of them.
steady: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("tests", derandomize=True, **steady)
settings.load_profile("tests")
# A source distribution has no models, adapters and studies.
needing = ("golden", "house", "manual", "score", "store_recipes", "tune")
collect_ignore = [] if (ROOT / "evals").is_dir() else [f"test_{name}.py" for name in needing]


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of files: xdist would start files with many tests, which take less time."""
    config.option.loadscopereorder = False


class Venv:
    """A virtual environment that sees the packages of this one, but not this project."""

    def __init__(self, folder: Path, packages: Path):
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=os.name != "nt")
        scripts = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = scripts / ("python.exe" if os.name == "nt" else "python")
        lib = folder / "Lib" if os.name == "nt" else next((folder / "lib").glob("python*"))
        self.site = lib / "site-packages"
        # A folder named in a .pth file joins sys.path, but its own .pth files are not read.
        (self.site / "packages.pth").write_text(f"{packages}\n")

    def run(self, *args: str | Path, check: bool = True):
        """Run the environment's Python, far from the source tree and this process's settings."""
        ours = ("PYTHON", "PYTEST_", "TVB_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        clean |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return self._call([self.python, *args], clean, check)

    def pip(self, *args: str | Path):
        """Run this process's pip on the environment."""
        command = [sys.executable, "-m", "pip", "--python", self.python, *args]
        env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
        env.pop("PYTHONPATH", None)
        return self._call(command, env, True)

    def _call(self, command, env, check):
        words, how = [str(part) for part in command], {"capture_output": True, "text": True}
        done = subprocess.run(words, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, **how)
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    def files(self) -> set[Path]:
        return {p for p in self.site.rglob("*") if p.is_file() or p.is_symlink()}


@pytest.fixture(scope="session")
def other_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to all that is installed beside the running Python, except this project."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in map(Path, sys.path):
        if entry.name not in ("site-packages", "dist-packages") or not entry.is_dir():
            continue
        for item in entry.iterdir():
            ours = "tvb_mergekit" in item.name or item.suffix == ".pth"
            link = folder / item.name
            if not ours and item.name != "__pycache__" and not link.is_symlink():
                link.symlink_to(item)
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, a, b, c: read only."""
    folder = tmp_path_factory.mktemp("models")
    family(folder, tasks=("a", "b", "c"))
    return folder


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Models]:
    """Name -> the family of models, made once: read only."""
    return cache(lambda name: FAMILIES[name](tmp_path_factory.mktemp("world")))


@pytest.fixture
def environment(tmp_path: Path, other_packages: Path) -> Venv:
    return Venv(tmp_path / "venv", other_packages)
