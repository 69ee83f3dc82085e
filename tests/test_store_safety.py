"""A store that was damaged, moved, grown by a wrong model, or grown and taken back."""

import hashlib
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from click.testing import CliRunner
from commands import assert_close, contents, merge, ready, recipe, refused, tvb, write
from safetensors.torch import load_file, save_file
from torch import Tensor

import tvb_mergekit
from tvb_mergekit.cli.commands import main
from tvb_mergekit.errors import UserError
from tvb_mergekit.store import add as adding
from tvb_mergekit.store import facts, store
from tvb_mergekit.store.recipes import ALL_TASKS
from tvb_mergekit.store.writer import lock

TASKS = ("a", "b", "c", "d", "e", "f")
BASIS = "basis-001/model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, six models, and `grown`: a balanced store begun and grown by `tvb add`."""
    root = tmp_path_factory.mktemp("models")
    tiny.family(root, tasks=TASKS, scale=0.001)
    for number, task in enumerate(TASKS[:4]):
        begun = ["--base", root / "base", "--budget", 3, "--compress", "balanced"]
        words = ["add", root / "grown", root / task, "--task", task, "--quiet"]
        tvb(*words, *([] if number else begun))
    return root


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "here"
    shutil.copytree(models, folder)
    monkeypatch.chdir(folder)
    yield folder


def built(out: Path, models: Path, tasks: str = "abc", **keys: Any) -> Path:
    own = keys.pop("own", None)
    keys = {"basis": "balanced", **keys}
    keys |= {} if keys["basis"] == "none" else {"num_bases": 2}
    made = recipe("basis_ta", models / "base", [models / task for task in tasks], own, **keys)
    tvb("build", write(made, out), out, "--dtype", "float32", "--quiet")
    return out


# Damage


def over(here: Path) -> dict[str, Any]:
    bases = [here / f"grown/basis-00{number}" for number in range(3)]
    return recipe("basis_ta", here / "base", bases, lambda_=0.4)


Damage = Callable[[bytes], bytes | None]


def half(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Facts as a program of someone else's may write them: without a checksum."""

    def damage(text: bytes) -> bytes:
        found = json.loads(text)
        del found[facts.CHECKSUM]
        edit(found)
        return json.dumps(found).encode()

    return damage


def flipped(text: bytes) -> bytes:
    middle = len(text) // 2
    return text[:middle] + bytes([text[middle] ^ 1]) + text[middle + 1 :]


OF_FACTS: list[tuple[Damage, str]] = [
    (lambda text: b"{", "cannot be read"),
    (lambda text: b"\xff" + text, "cannot be read"),
    (lambda text: b"[]", r"cannot be read \(expected an object"),
    (lambda text: text.replace(b": 0.", b': NaN, "x": 0.', 1), "NaN is not a number"),
    (lambda text: text.replace(b'"a"', b'"A"', 1), "was changed after it was written"),
    (lambda text: text.replace(b"1.5", b"5.5", 1), "was changed after it was written"),  # one bit
    (half(lambda f: f["store"].pop("basis_weights")), "`store.basis_weights`: Field required"),
    (half(lambda f: f.update(tasks=["a", "b", "c", "c"])), "basis.json is not complete.* do not"),
    (half(lambda f: f.pop("errors")), "basis.json is not complete.*`errors` does not name the tas"),
    (lambda text: None, "is not a basis store"),
]
OF_WEIGHTS: list[tuple[Damage, str]] = [
    (flipped, "checksum"),
    (lambda text: text[:-64] + bytes(64), "checksum"),  # as a power cut can leave it
    (lambda text: text[:-4], "bytes, basis.json says"),
    (lambda text: b"", "bytes, basis.json says"),
    (lambda text: bytes(64) + text[64:], "header|not a complete basis store"),
    (lambda text: None, r"missing, and basis\.json names it"),
]
DAMAGED = {"basis.json": OF_FACTS} | dict.fromkeys((BASIS, "basis.safetensors"), OF_WEIGHTS)


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name: str, here: Path) -> None:
    """By all readers, or by `tvb inspect` if only a checksum shows it."""
    file = here / "grown" / name
    text = file.read_bytes()
    for damage, message in DAMAGED[name]:
        changed = damage(text)
        file.write_bytes(changed) if changed is not None else file.unlink()
        assert re.search(f"{message}|checksum is not", refused("inspect", "grown"))
        if message == "checksum" and name == BASIS:
            continue
        with pytest.raises(UserError, match=f"{message}|checksum is not"):
            store.load(here / "grown")
        if name == "basis.json":
            said = merge(over(here), here / "out", fails=True).output
            assert re.search("not a basis store" if changed is None else message, said), said


def test_folders_that_are_swapped_are_found(here: Path) -> None:
    for old, new in (("basis-000", "x"), ("basis-001", "basis-000"), ("x", "basis-001")):
        (here / "grown" / old).rename(here / "grown" / new)
    assert "checksum" in refused("inspect", "grown")


def test_a_user_may_say_where_the_models_are_now(here: Path) -> None:
    file = here / "grown/basis.json"
    found = json.loads(file.read_text())
    found["models"] = [f"/archive/{model}" for model in found["models"]]
    found["base_model"] = found["store"]["base_path"] = str(here / "base")
    file.write_text(json.dumps(found))
    tvb("export", "grown", "out", "--task", "a", "--quiet")


READERS = {
    "inspect": "inspect copy --json",
    "merge": "merge copy merged --method add --base base",
    "export": "export copy exported --task b --base base",
    "add": "add copy e --task e --base base",
}


def uses(readers: Iterable[str]) -> dict[str, str]:
    """The results of readers of the store `copy`: contents, or `refused` with one line."""
    results = {}
    for name in readers:
        with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
            done = CliRunner().invoke(main, [*READERS[name].split(), "--quiet"])
        if done.exit_code:
            assert isinstance(done.exception, SystemExit), done.exception
            assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1, done.stderr
            results[name] = "refused"
        elif name == "inspect":  # names are shown as they stand
            said = json.loads(done.stdout)
            own = (said.pop(key) for key in ("base_model", "models", "store"))
            results[name] = json.dumps([said, len(list(own))])
        else:
            made = {"merge": "merged", "export": "exported", "add": "copy"}.get(name, "nothing")
            results[name] = weights_of(Path(made))
    for made in ("merged", "exported"):
        shutil.rmtree(made, ignore_errors=True)
    return results


def weights_of(folder: Path) -> str:
    """A hash of all weights and matrices below a folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        if store.MEAN not in file.parts:
            for name, tensor in sorted(load_file(file).items()):
                digest.update(f"{file.name} {name} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_a_flipped_bit_is_found_by_inspect_or_harmless(here: Path) -> None:
    """A command on a damaged store ends with one line, or without an error."""

    shutil.copytree("grown", "copy")
    want, draw, found = uses(READERS), random.Random(0), 0
    assert "refused" not in want.values()
    # one of each kind, without those that mergekit reads
    names = sorted(name for name in contents(here / "grown") if "config.json" not in name)
    files = {re.sub(r"\d+|[\w-]+\.yml", "", name): name for name in names}
    halves = ("inspect", "merge"), ("inspect", "export", "add")
    for name, readers in product(files.values(), halves):
        shutil.rmtree("copy")
        shutil.copytree("grown", "copy")
        content = bytearray(Path("copy", name).read_bytes())
        place = draw.randrange(min(len(content), draw.choice((200, 4000, len(content)))))
        content[place] ^= 1 << draw.randrange(8)
        Path("copy", name).write_bytes(content)
        results = uses(readers)
        if results["inspect"] == "refused":
            found += 1
        else:
            assert results == {reader: want[reader] for reader in readers}, (name, place)
    assert found >= len(files)


# A model that does not belong there


def changed(source: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    shutil.copytree(source, folder)
    state = {name: change(name, tensor) for name, tensor in tiny.load(source).items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_fifties(_name: str, tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, 50.0) if tensor.dim() == 1 else tensor


def test_a_foreign_model_is_not_added(here: Path) -> None:
    tiny.family(here / "other", tasks=(), seed=5)
    before = contents(here / "grown")
    start = tiny.load(here / "base")
    rolled = changed(here / "e", here / "rolled", lambda _, t: t.flatten().roll(1).view_as(t))
    long = changed(here / "e", here / "long", lambda n, t: start[n] + 12 * (t - start[n]))
    foreign = {
        "rolled": (rolled, "the base's"),
        "unrelated": (here / "other/base", "the base's"),
        "long": (long, "the median of the other"),
    }
    for task, (model, message) in foreign.items():
        said = refused("add", "grown", model, "--task", task, "--quiet")
        assert f"model {model}: its task vector's norm is" in said and message in said, said
        assert "--force adds it anyway" in said
    assert contents(here / "grown") == before
    with pytest.warns(UserWarning, match="the median of the other tasks'"):
        tvb_mergekit.add("grown", "base", long, "long")
    # norm layers of ones, which make most of the base's norm, do not hide it
    base, model = (
        changed(path, here / f"of-fifties-{path.name}", of_fifties)
        for path in (here / "base", rolled)
    )
    words = ["add", "new", model, "--task", "x", "--base", base, "--budget", 3]
    assert "the base's" in refused(*words, "--quiet")
    done = tvb(*words, "--quiet", "--force")
    assert "1 task in 1 of at most 3 bases" in done.stdout


def test_an_exact_sum_is_not_ended_in_silence(here: Path) -> None:
    before = contents(here / "grown")
    said = refused("add", "grown", "e", "--task", "e", "--compress", "ae", "--quiet")
    assert "grown is balanced" in said and "no longer add up to the sum of all tasks" in said
    assert "--force" in said and contents(here / "grown") == before
    tvb("add", "grown", "e", "--task", "e", "--compress", "ae", "--quiet", "--force")
    assert store.load("grown").basis_weights is None


# One step back


def test_undo_swaps_a_store_and_its_previous_state(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = contents(here / "grown")
    tvb("add", "grown", "e", "--task", "e", "--quiet")
    second = contents(here / "grown")
    assert "4 tasks in 3 bases, as before" in tvb("undo", "grown").stdout
    assert contents(here / "grown") == first
    assert "5 tasks in 3 bases" in tvb("undo", "grown").stdout
    assert contents(here / "grown") == second
    tvb("inspect", "grown")
    with pytest.raises(UserError, match="cannot write next to"):
        lock(here / "base/config.json/store")
    for words in (["undo", "base"], ["undo", "nothing"]):
        assert refused(*words)
    monkeypatch.chdir(here / "grown")
    assert "the current folder lies in" in refused("add", ".", "../e", "--task", "f")
    monkeypatch.chdir(here)
    monkeypatch.setattr(os.path, "ismount", lambda place: Path(place) == here / "grown")
    assert "is a mount point" in refused("undo", "grown")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.chdir(here.parent)  # a path like that of a repository
    for kind, told in (("new", "a change was interrupted; complete it: mv"), ("partial", "an unf")):
        (here / "grown").rename(here / f"grown.{kind}")
        assert told in refused("inspect", "here/grown")
        (here / f"grown.{kind}").rename(here / "grown")
    monkeypatch.chdir(here)
    shutil.rmtree(here / "grown.previous")
    assert f"nothing to undo: {here}/grown.previous does not exist" in refused("undo", "grown")


STRANGE = {  # what a store cannot keep -> the command that would lose it
    "grown/notes.txt": "add grown e --task e --budget 4",
    "grown/2-basis.json": "undo grown",
    "grown/basis-003/mine.txt": "undo grown",
    "vectors/link@/nowhere": "add vectors e --task e",
    "grown/folder@/": "undo grown",
    "vectors/mine/mine.yml": "remove vectors --task a",
    "grown/notes/pipe|": "undo grown",
}


def test_a_file_that_a_change_would_lose_is_refused_before_the_work(here, monkeypatch):
    made = recipe("basis_ta", here / "base", [here / task for task in "abc"])
    tvb("build", write(made, here / "vectors"), "vectors", "--keep", "0.5", "--quiet")
    monkeypatch.setattr("tvb_mergekit.store.addition.gram_pass", None)
    for name, words in STRANGE.items():
        path, _, target = name.rstrip("|").partition("@")
        mine = here / path
        mine.parent.mkdir(parents=True, exist_ok=True)
        if target:
            mine.symlink_to(target)
        elif name.endswith("|"):
            os.mkfifo(mine)
        else:
            mine.write_text("{}")
        said = refused(*words.split())
        assert f"{mine}: is not the store's" in said and "move it out" in said, said
        mine.unlink()


def test_a_change_that_was_killed_between_its_renames(here: Path) -> None:
    """The message names the command that completes it. Other folders of these names stay."""
    tvb("add", "grown", "e", "--task", "e", "--quiet")
    second = contents(here / "grown")
    (here / "grown").rename(here / "grown.new")
    mend = f"mv {here}/grown.new {here}/grown"
    for words in ("undo grown", "inspect grown", "add grown f --task f --budget 3 --base base"):
        assert mend in refused(*words.split())
    (here / "grown.new/.unfinished").touch()  # a kill leaves it, and waiting writers must too
    build = partial(tvb_mergekit.build, here / "base", {t: here / t for t in "ab"})
    for change in (tvb_mergekit.undo, partial(tvb_mergekit.remove, task="e"), build):
        with pytest.raises(UserError, match="a change was interrupted"):
            change(here / "grown")
    (here / "grown.new/.unfinished").unlink()
    assert os.system(mend) == 0
    assert contents(here / "grown") == second
    for name in ("grown.new", "grown.previous"):
        shutil.rmtree(here / name, ignore_errors=True)
        (here / name).mkdir()
        (here / name / "mine.txt").touch()
        assert f"{here / name} is in the way" in refused("undo", "grown")
        shutil.rmtree(here / name)
    tvb("add", "grown", "f", "--task", "f", "--quiet")
    (here / "grown.previous").rename(here / "grown.new")  # as of an undo that was killed
    mend = f"mv {here}/grown.new {here}/grown.previous"
    assert mend in refused("undo", "grown")
    assert os.system(mend) == 0
    shutil.rmtree(here / "grown")
    tvb("add", "grown", "f", "--task", "g", "--budget", "3", "--base", "base", "--quiet")
    assert "grown.previous is of another store" in refused("undo", "grown")
    before = contents(here / "grown.previous")
    assert "in the way; move or delete it" in refused("add", "grown", "e", "--task", "h")
    assert contents(here / "grown.previous") == before


def test_a_state_that_is_read_while_another_is_published(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts, numbers and vectors are of one state."""
    opening, calls = store.open_vector, list[int]()

    def slow(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            tvb_mergekit.undo("grown")
        return opening(*args)

    other = tvb_mergekit.load("grown.previous").tasks
    monkeypatch.setattr(store, "open_vector", slow)
    assert tvb_mergekit.load("grown").tasks == other


def test_a_model_that_is_overwritten_in_place_while_it_is_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, weights = adding.write_vectors, here / "e/model.safetensors"

    def slow(*args: Any, **more: Any) -> Any:
        weights.write_bytes(weights.read_bytes())  # the same inode
        return writing(*args, **more)

    before = contents(here / "grown")
    monkeypatch.setattr(adding, "write_vectors", slow)
    with pytest.raises(UserError, match="was changed after it was opened"):
        tvb_mergekit.add("grown", "base", here / "e", "e")
    assert contents(here / "grown") == before


def test_a_file_system_without_hard_links(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(here / "grown", here / "copied")
    tvb_mergekit.add("grown", "base", here / "e", "e")
    monkeypatch.delattr(os, "link")
    tvb_mergekit.add("copied", "base", here / "e", "e")
    for name in ("basis-000", "basis-001", "basis-002"):
        assert contents(here / "copied" / name) == contents(here / "grown" / name)


def test_a_store_is_read_while_it_is_replaced(here: Path) -> None:
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            store.load("grown")

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        for words in (["add", "grown", "e", "--task", "e", "--quiet"], ["undo", "grown"]) * 2:
            tvb(*words)
        ended.set()
        reader.result()


# What is in a store means what it says


def test_the_export_of_a_weighted_task_is_the_task(here: Path) -> None:
    own = {0: {"weight": -0.5}, 1: {"weight": 2.0}}
    folder = built(here / "weighted", here, "ab", basis="none", own=own)
    for task in "ab":
        tvb("export", folder, here / f"{task}-again", "--task", task, "--quiet")
        want = {n: t.double() for n, t in tiny.load(here / task).items()}
        assert_close(tiny.load(here / f"{task}-again"), want, tiny.load(here / "base"))
        assert "without its weight" in (here / f"{task}-again/README.md").read_text()
    again = tvb_mergekit.reconstruct(store.load(folder), "base", "a")
    assert_close(again, {n: t.double() for n, t in tiny.load(here / "a").items()}, again, None, 1)


FILTERS = [{"filter": "mlp", "value": 1}, {"value": 0.5}]


@pytest.mark.parametrize("given", [0.8, None, FILTERS])
def test_a_lambda_of_bases_keeps_its_meaning_when_the_store_grows(given: Any, here: Path) -> None:
    folder = built(here / "four", here, "abcd", **({} if given is None else {"lambda": given}))
    before = ready(folder, "add")["parameters"]
    assert before == {"lambda": 0.4 if given is None else given, "lambda_scale": "bases"}
    filters = [{"filter": "mlp", "value": 0.5}, {"value": 0.25}]
    want = filters if given is FILTERS else {0.8: 0.4, None: 0.2}[given]
    for task in "ef":
        tvb("add", folder, task, "--task", task, "--quiet")
        after = ready(folder, "add")["parameters"]
        assert after == {"lambda": want, "lambda_scale": "tasks"}


# Where it lies


@pytest.mark.parametrize("copied", [True, False])
def test_a_store_that_was_moved_works(copied: bool, here: Path, tmp_path: Path) -> None:
    """Another model may lie where the base was."""
    want = tiny.load(merge(ready(here / "grown", "ties"), here / "want").folder)
    place = tmp_path / "elsewhere"
    place.mkdir()
    shutil.move(here / "grown", place / "store")
    if copied:
        shutil.copytree(here / "b", place / "base")
    else:
        shutil.move(here / "base", place / "base")
    shutil.rmtree(here / "a")
    os.chdir(tmp_path)
    tvb("merge", place / "store", "out", "--method", "ties", "--quiet")
    found = tiny.load(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    tvb("export", place / "store", "exported", "--task", "a", "--quiet")


def test_a_moved_store_finds_its_base_after_a_removal(here: Path, tmp_path: Path) -> None:
    made = recipe("basis_ta", here / "base", [here / task for task in "abc"], basis="none")
    tvb("build", write(made, here / "both"), "both", "--keep", "0.5", "--quiet")
    place = tmp_path / "elsewhere"
    place.mkdir()
    for name in ("both", "base"):
        shutil.move(here / name, place / name)
    shutil.copytree(here / "b", here / "base")  # another model where the base was
    os.chdir(tmp_path)
    os.rename(place / "base", place / "away")
    tvb("remove", place / "both", "--task", "a")  # needs no base
    os.rename(place / "away", place / "base")
    tvb("export", place / "both", "exported", "--task", "b", "--quiet")
    tvb("remove", place / "both", "--task", "b")
    os.chdir(here)
    tvb("export", place / "both", "exported", "--task", "c", "--quiet")


def test_a_store_is_merged_without_a_recipe(here: Path) -> None:
    done = refused("merge", "grown", "out")
    assert "name a --method, one of add, ties, iso, tsvm, wudi, forget-a, forget-b" in done
    assert ", ".join(ALL_TASKS) in " ".join(tvb("merge", "--help").stdout.split())
    assert "did you mean `forget-b`?" in refused("merge", "grown", "out", "--method", "forgt-b")
    file = write(over(here), here / "over")
    assert "belong to a STORE" in refused("merge", file, "o", "--method", "add")
    tvb("merge", "grown", "out", "--method", "forget-b", "--quiet")
    assert json.loads((here / "out/basis/basis.json").read_text())["parameters"]["forget"] == ["b"]
