"""Hundreds of models: planning grows with their number, and too many open files are named."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from commands import recipe, refused, write
from mergekit.common import ModelReference
from tiny import family

from tvb_mergekit.plugin.document import read_document
from tvb_mergekit.plugin.inputs import Options, read_inputs

TASKS = 140  # mergekit keeps 128 configurations


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A base and TASKS models in several shards: two, under as many names."""
    folder = tmp_path_factory.mktemp("many")
    base, pair = family(folder, tasks=("a", "b"), max_shard_size="30KB", tokenizer=False)
    made = []
    for index in range(TASKS):
        model = folder / f"task-{index}"
        model.mkdir()
        for file in pair[index % 2].iterdir():
            os.link(file, model / file.name)
        made.append(model)
    return base, made


@pytest.fixture
def calls() -> Iterator[Counter[str]]:
    """How often planning compares two models, and reads a configuration."""
    seen: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(ModelReference, name)

        def call(self: Any, *args: Any, **keys: Any) -> Any:
            seen[name] += 1
            return original(self, *args, **keys)

        return mock.patch.object(ModelReference, name, call)

    with counted("__eq__"), counted("config"):
        yield seen


def test_planning_grows_with_the_models_alone(many, tmp_path, calls):
    base, models = many
    found = []
    for count in (TASKS // 2, TASKS):
        calls.clear()
        made = write(recipe("basis_ta", base, models[:count]), tmp_path / str(count))
        inputs = read_inputs(read_document(made), Options())
        assert len(inputs.tasks) == count and len(inputs.items[0].inputs) == count
        found.append(dict(calls))
    half, whole = found
    assert whole["config"] <= 2.2 * half["config"]
    assert whole["__eq__"] <= 2.2 * half["__eq__"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_more_files_than_may_be_open(many: tuple[Path, list[Path]], tmp_path: Path) -> None:
    import resource

    base, models = many
    made = write(recipe("basis_ta", base, models[:60], num_bases=2), tmp_path / "made")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        line = refused("build", made, tmp_path / "store", "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in line and "raise `ulimit -n`" in line
