"""A Gram pass that is cut goes on where it was, to the same sums bit by bit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import Result, merge, recipe, run, tvb, write
from tiny import family, llama

from tvb_mergekit import cache, engine, layout
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import GramSums
from tvb_mergekit.progress import Progress
from tvb_mergekit.store import load
from tvb_mergekit.stream import Item, gram_of, held_item

TASKS = ["a", "b", "c"]
KEY = {"what": "these models"}


def made(numel: int = 70_000) -> list[Item]:
    generator = torch.Generator().manual_seed(0)
    items = []
    for number in range(6):
        base = torch.randn(numel + number, generator=generator)
        models = [base + 0.1 * torch.randn(len(base), generator=generator) for _ in TASKS]
        items.append(held_item(f"layer.{number}", base, models))
    return items


class Reading:
    """Progress that knows what was announced and read, and may stop the pass."""

    def __init__(self, stop_after: int | None = None, error: type[BaseException] = OSError) -> None:
        self.announced = self.read = 0
        self.stop_after, self.error = stop_after, error

    def __call__(self, title: str, total: int) -> Any:
        self.announced += total

        def update(nbytes: int) -> None:
            self.read += nbytes
            if self.stop_after is not None and self.read >= self.stop_after:
                raise self.error

        return update


def sums_of(items: list[Item], progress: Progress, **more: Any) -> GramSums:
    return engine.sums_of(lambda: items, TASKS, key=KEY, progress=progress, **more)[0]


def same(one: GramSums, other: GramSums) -> bool:
    pairs = [
        (one.gram, other.gram),
        (one.sketch_gram, other.sketch_gram),
        (one.sketch_tasks, other.sketch_tasks),
    ]
    equal = all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in pairs
    )
    numbers = (one.base_norm_squared, one.num_parameters)
    return equal and numbers == (other.base_norm_squared, other.num_parameters)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TVB_MERGEKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize("stop", [1, 3])
def test_only_the_rest_is_read_again(
    stop: int,
    columns: int | None,
    error: type[BaseException],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    items = made()
    sketch = None if columns is None else engine.Sketch(columns, 1)
    sizes = [item.nbytes for item in items]
    first = Reading(sum(sizes[:stop]) + 1, error)
    with pytest.raises(error):
        sums_of(items, first, sketch=sketch)
    assert [path.suffix for path in folder.iterdir()] == [".unfinished"]
    assert cache.entries() == []
    rest = Reading()
    sums = sums_of(items, rest, sketch=sketch)
    assert rest.announced == rest.read == sum(sizes[stop:])
    assert f"summed {stop} of 6 tensors" in caplog.text
    assert same(sums, gram_of(made(), TASKS, sketch=sketch))
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]
    third = Reading()
    assert same(sums_of(items, third, sketch=sketch), sums) and third.announced == 0


def test_cut_again_and_again(folder: Path) -> None:
    items = made()
    for _ in range(5):
        cut = Reading(items[0].nbytes + 1000)  # one tensor, and a piece of the next
        with pytest.raises(OSError):
            sums_of(items, cut)
    sums = sums_of(items, Reading())
    assert same(sums, gram_of(made(), TASKS))


@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "note", "text"])
def test_a_damaged_file_is_not_gone_on_with(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = made()
    with pytest.raises(OSError):
        sums_of(items, Reading(items[0].nbytes + 1))
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    bad = {
        "empty": b"",
        "cut": whole[:-5],
        "bit": whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:],
        "note": whole.replace(b'\\"done\\": 1', b'\\"done\\": 2'),
        "text": b"no such file",
    }[damage]
    assert bad != whole
    file.write_bytes(bad)
    again = Reading()
    sums = sums_of(items, again)
    assert again.read == sum(item.nbytes for item in items)
    assert "interrupted" not in caplog.text
    assert same(sums, gram_of(made(), TASKS))


def test_what_the_sums_depend_on_is_in_the_key(folder: Path) -> None:
    items = made()
    total = sum(item.nbytes for item in items)

    def cut() -> None:
        for path in folder.glob("*"):
            path.unlink()
        with pytest.raises(OSError):
            sums_of(items, Reading(items[0].nbytes + 1))

    for change in ("order", "deltas", "chunk", "torch", "models", "nothing"):
        cut()
        again, key, given = Reading(), KEY, items
        keys: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            if change == "order":
                given = items[::-1]
            elif change == "deltas":
                keys["deltas"] = 1
            elif change == "chunk":
                patch.setattr(layout, "CPU_ROW", layout.CPU_ROW // 2)
            elif change == "torch":
                patch.setattr(torch, "__version__", "3.0")
            elif change == "models":
                key = {"what": "other models"}
            engine.sums_of(lambda g=given: g, TASKS, key=key, progress=again, **keys)  # type: ignore[misc]
        assert again.read == (total - items[0].nbytes if change == "nothing" else total), change


def test_an_input_that_is_refused_leaves_nothing(folder: Path) -> None:
    items = made()
    bad = torch.full((70_000,), float("nan"))
    items[4] = held_item("layer.4", bad, [bad] * 3)
    with pytest.raises(UserError, match=r"layer\.4"):
        sums_of(items, Reading())
    assert not folder.exists() or not list(folder.iterdir())
    with mock.patch.dict(os.environ, TVB_MERGEKIT_CACHE="off"), pytest.raises(OSError):
        sums_of(made(), Reading(1))
    assert not folder.exists() or not list(folder.iterdir())
    with pytest.raises(OSError):
        sums_of(made(), Reading(made()[0].nbytes + 1))
    assert list(folder.iterdir()) and cache.clear() == 0
    assert not list(folder.glob("*.unfinished"))


# The commands, killed

KILLED = """
import json, os, signal, sys
from tvb_mergekit import engine
engine.KEEP_EVERY = 0
left, words = json.loads(sys.argv[1])
keep = engine._Pass.keep
def dying(self):
    global left
    keep(self)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
engine._Pass.keep = dying
if words[0] == "mergekit-yaml":
    from mergekit.scripts.run_yaml import main
else:
    from tvb_mergekit.cli import main
main(words[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("command", ["mergekit-yaml", "merge", "build"])
def test_after_a_kill_a_command_goes_on(command: str, tmp_path: Path) -> None:
    base, models = family(tmp_path / "in", llama, TASKS)
    out, where = tmp_path / "out", tmp_path / "cache"
    made = recipe("basis_ta", base, models, basis="pca", num_bases=2)
    words = [str(write(made, out)), str(out), "--quiet"]
    words = ["mergekit-yaml", *words] if command == "mergekit-yaml" else ["tvb", command, *words]
    python = [sys.executable, "-c", KILLED]
    killed = run([*python, json.dumps([5, words])], out, where)
    assert killed.returncode == -9, killed.stderr
    assert [path.suffix for path in where.iterdir()] == [".unfinished"] and not out.exists()
    done = run([*python, json.dumps([-1, words])], out, where)
    assert done.returncode == 0, done.stderr
    assert "summed 5 of 21 tensors" in done.stderr
    whole = tmp_path / "whole"
    if command == "build":
        tvb("build", write(made, whole), whole, "--quiet")
        assert torch.equal(load(out).tensors["gram"], load(whole).tensors["gram"])
    else:
        fresh = merge(made, whole, cache="off")
        assert (Result(out).basis["gram"] == fresh.basis["gram"]).all()
        assert all(torch.equal(Result(out).tensors[n], t) for n, t in fresh.tensors.items())
