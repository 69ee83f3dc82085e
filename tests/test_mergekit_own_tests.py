"""mergekit's own tests pass with this package installed.

They come from the source distribution of the version that is installed, except those of six files
that need a `tests/common.py` which it lacks. Nothing of mergekit's is kept in this repository.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile

import pytest

from tvb_mergekit.core.settings import METHODS

CONFTEST = """
from pathlib import Path

import tvb_mergekit_hook
from mergekit.merge_methods import get


def pytest_sessionstart(session):
    assert get("basis_ta") and tvb_mergekit_hook._FINDER.handed_over
    assert not tvb_mergekit_hook._FINDER.stopped
"""

REGRESSIONS = (
    "tests/test_merge_method_regressions.py::"
    "test_state_dict_methods_accept_strided_weights_without_mutation"
)


@pytest.mark.slow
def test_mergekit_own_tests(tmp_path, make_venv, wheel):
    version = importlib.metadata.version("mergekit")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=mergekit"]
    command += ["-d", str(tmp_path), f"mergekit=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        problem = f"mergekit's source distribution could not be had: {done.stderr[-500:]}"
        pytest.fail(problem) if "CI" in os.environ else pytest.skip(problem)
    (archive,) = tmp_path.glob("mergekit-*.tar.gz")
    with tarfile.open(archive) as tar:
        # Only the tests, so that the mergekit that is tested is the installed one.
        members = [m for m in tar.getmembers() if m.isfile() and "/tests/" in m.name]
        for member in members:
            member.name = member.name.split("/", 1)[1]
            tar.extract(member, tmp_path / "mergekit")
    tests = tmp_path / "mergekit" / "tests"
    (tests / "__init__.py").touch()
    (tests / "conftest.py").write_text(CONFTEST)
    venv = make_venv()
    venv.pip("install", "--no-deps", wheel)
    texts = {file: file.read_text() for file in tests.glob("test_*.py")}
    files = sorted(file for file, text in texts.items() if "common" not in text)
    assert len(files) >= 11
    options = ["-q", "-rs", "-p", "no:cacheprovider", "--rootdir", tests.parent, "-c", os.devnull]
    # One test merges in memory by all registered methods. Ours refuse that, in one line.
    options += [word for method in METHODS for word in ("--deselect", f"{REGRESSIONS}[{method}]")]
    result = venv.run("-m", "pytest", *options, *files, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    lines = result.stdout.splitlines()
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    assert all(line.endswith(("CUDA unavailable", "MPS unavailable")) for line in skipped), skipped
    passed = int(re.search(r"(\d+) passed", lines[-1])[1])
    assert passed >= 515  # of mergekit's without a GPU
