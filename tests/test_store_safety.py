"""Stores that were crafted, damaged, moved or read while they change; and what is not a store's."""

import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import xxhash
from commands import contents, recipe, refused, tvb, write
from safetensors.torch import save_file
from torch import Tensor

import tvb_mergekit
from tvb_mergekit.errors import UserError
from tvb_mergekit.store import build, store
from tvb_mergekit.store.change import slugs
from tvb_mergekit.tensors import merging

KINDS = ("grown", "lossless", "sampled", "adapters")
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` and models of it in bfloat16, two adapters, and a store of each kind with a past."""
    from test_lora import train

    root = tmp_path_factory.mktemp("models")
    bf16 = (torch.bfloat16,)
    make = partial(tiny.llama, **SMALL)
    base, paths = tiny.family(root, make, "abcdef", scale=0.004, dtypes=bf16)
    for number, task in enumerate("abcd"):
        begun = ["--base", base, "--budget", 3, "--compress", "balanced", "--dtype", "float32"]
        words = ["add", root / "grown", root / task, "--task", task, "--quiet"]
        tvb(*words, *([] if number else begun))
    (paths[0] / "chat_template.jinja").write_text("{{ messages }}")  # the base has none
    for kind, words in {"lossless": ["--lossless"], "sampled": ["--keep", 0.5]}.items():
        tvb("build", write(recipe("basis_ta", base, paths[:2]), root / kind), root / kind, *words)
        tvb("add", root / kind, root / "c", "--task", "c", "--quiet")
    for seed, task in enumerate("xyz"):
        train(base, root / "adapter" / task, seed)
    listed = [f"{base}+{root / 'adapter' / task}" for task in "xyz"]
    tvb("build", write(recipe("basis_ta", base, listed), root / "adapters"), root / "adapters")
    tvb("remove", root / "adapters", "--task", "z")
    return root


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "here"
    shutil.copytree(models, folder)
    monkeypatch.chdir(folder)
    yield folder


def sealed(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change `store.json` as somebody would who knows how to make its checksum."""
    found = json.loads((folder / "store.json").read_text())
    del found["checksum"]
    edit(found)
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    found["checksum"] = xxhash.xxh3_128(text.encode("ascii")).hexdigest()
    (folder / "store.json").write_text(json.dumps(found))


# Somebody else's store

OUTSIDE = (
    "/etc/passwd", "vectors/../../mine.safetensors", "../mine.safetensors", "vectors/../store.json",
    "vectors\\..\\..\\mine.safetensors", "files/a/..", "vectors/a\0.safetensors", "", "store.json",
)  # fmt: skip
ENTRIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "vectors.0.weights": lambda found: found["vectors"][0]["weights"],
    "vectors.0.files.0": lambda found: found["vectors"][0]["files"][0],
    "previous.numbers": lambda found: found["previous"]["numbers"],
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_place_outside_the_store_is_refused_when_it_is_read(entry: str, here: Path) -> None:
    original = (here / "lossless/store.json").read_text()
    for place in OUTSIDE:
        (here / "lossless/store.json").write_text(original)
        sealed(here / "lossless", lambda found, to=place: ENTRIES[entry](found).update(file=to))
        said = refused("inspect", "lossless")
        assert f"`{entry}.file`" in said, (place, said)
    before = contents(here)
    for words in ("undo lossless", "add lossless d --task d", "remove lossless --task a",
                  "merge lossless out --method add", "export lossless out --all"):  # fmt: skip
        assert refused(*words.split())
    assert contents(here) == before


def test_a_link_out_of_the_store_is_refused_and_its_target_stays(here: Path) -> None:
    (here / "mine").mkdir()
    vector = here / "lossless/vectors/a-1.safetensors"
    shutil.move(vector, here / "mine/a-1.safetensors")
    vector.symlink_to(here / "mine/a-1.safetensors")
    assert "a link out of the store" in refused("inspect", "lossless")
    # a state whose only files in a linked folder are those that the next change deletes
    target = here / "mine/other"
    (here / "sampled/files").mkdir()
    (here / "sampled/files/a-1").symlink_to(target)
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    mine = {"file": "files/a-1/mine.txt", "bytes": 4, "xxh3_128": ""}
    sealed(here / "sampled", lambda found: found["previous"]["vectors"][0].update(files=[mine]))
    tvb("remove", "sampled", "--task", "a")
    assert (target / "mine.txt").read_text() == "mine"
    assert "a link out of" in refused("add", "lossless", "d", "--task", "d")


def swap(found: dict[str, Any]) -> None:
    """Give each of two vectors the files of the other."""
    one, two = found["vectors"][:2]
    for key in ("weights", "files"):
        one[key], two[key] = two[key], one[key]


KEYS: dict[str, Callable[[dict[str, Any]], object]] = {
    "files of another vector": swap,
    "a norm that is NaN": lambda found: found["norms"].update(a=float("nan")),
    "a share of 2": lambda found: found["vectors"][0].update(share=2.0),
    "other tensors": lambda found: found["tensors"].pop(),
    "no weights of a vector": lambda found: found["vectors"][0].update(weights=None),
    "version 4": lambda found: found.update(format_version=4),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_do_not_fit_are_refused(name: str, here: Path) -> None:
    sealed(here / "lossless", KEYS[name])
    assert "lossless" in refused("export", "lossless", "out", "--task", "a", "--quiet")
    assert not (here / "out").exists()


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"a": NaN}'])
def test_what_is_not_a_store_is_refused(text: str, here: Path) -> None:
    (here / "lossless/store.json").write_text(text)
    assert "store.json" in refused("inspect", "lossless")


def test_folders_that_are_no_stores_are_refused(here: Path) -> None:
    """Nor does a `store.json` of another program matter."""
    (here / "store.json").write_text('{"shop": 1}')
    made = write(recipe("basis_ta", here / "base", [f"base+{here}/adapter/x"]), here / "merged")
    tvb("merge", made, "merged", "--quiet")
    (here / "old").mkdir()
    (here / "old/basis.json").write_text('{"format_version": 2}')
    for words in ("inspect old", "merge old out --method add", "undo old", "undo base"):
        assert "not a store" in refused(*words.split())
    assert "nothing is not a store" in refused("undo", "nothing")


def test_names_of_files() -> None:
    """Two have not the same, also where case does not count; none leads out of its folder."""
    found = slugs(["math", "Math", "..", "a/b", "x" * 99, "x" * 98, ""])
    assert found == f"math~1 Math~2 task~3 a-b {'x' * 60}~5 {'x' * 60}~6 task~7".split()


@pytest.mark.parametrize("name", ["../mine.json", "..\\mine.json", "a/b.json", "mine.bin"])
def test_a_model_of_somebody_else_writes_nothing_outside(name: str, here: Path) -> None:
    """Nor what no model has."""
    own = here / "lossless/files/a-1" / name.replace("/", "%2F")
    own.write_text("mine")
    known = xxhash.xxh3_128(b"mine").hexdigest()
    record = {"file": f"files/a-1/{own.name}", "bytes": 4, "xxh3_128": known}
    sealed(here / "lossless", lambda found: found["vectors"][0].update(files=[record]))
    before = contents(here)
    refused("export", "lossless", "out/deep", "--task", "a", "--quiet")
    assert {p: data for p, data in contents(here).items() if "out" not in p} == before


# Damage


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_or_a_cut_is_found(kind: str, here: Path) -> None:
    """In each file of the store."""
    draw = random.Random(kind)
    for name in (*store.load(kind).facts.held, "store.json"):
        content = bytearray(before := (here / kind / name).read_bytes())
        place = draw.randrange(len(content))
        content[place] ^= 1 << draw.randrange(8)
        for damaged in (content, before[:place]):
            (here / kind / name).write_bytes(damaged)
            assert refused("inspect", kind), (name, place)
        (here / kind / name).write_bytes(before)
    tvb("inspect", kind)


def test_a_file_that_is_gone_is_one_line(here: Path) -> None:
    """Before a store is opened, or between that and its reading."""
    for kind, name in (("lossless", "a-1"), ("grown", "B0-4")):
        bases = tvb_mergekit.load(kind)
        (here / kind / "vectors" / f"{name}.safetensors").unlink()
        with pytest.raises(UserError) as caught:
            tvb_mergekit.reconstruct(bases, "base", "a")
        assert f"{name}.safetensors" in str(caught.value) and "\n" not in str(caught.value)
        for words in (f"inspect {kind}", f"export {kind} out --task a"):
            assert "missing, and store.json names it" in refused(*words.split())
    assert "a-1.safetensors: missing" in refused("remove", "lossless", "--task", "b")  # for ever
    tvb("remove", "lossless", "--task", "a")  # the remedy
    tvb("export", "lossless", "out", "--task", "b", "--quiet")
    before = contents(here / "lossless")
    assert "missing" in refused("undo", "lossless") and contents(here / "lossless") == before
    Path("sampled/numbers-2.safetensors").unlink()
    assert "missing" in refused("merge", "sampled", "out", "--method", "add")


def test_damage_that_a_removal_does_not_mend(here: Path) -> None:
    (here / "lossless/files/a-1/config.json").unlink()  # of all tasks
    before = contents(here)
    assert "config.json: missing" in refused("remove", "lossless", "--task", "a")
    assert contents(here) == before
    for task in "ab":
        (here / f"sampled/vectors/{task}-1.safetensors").unlink()
    assert "'a' is removed, but" in refused("remove", "sampled", "--task", "a")
    tvb("remove", "sampled", "--task", "b")


# What changes and what stays


def test_files_of_the_user_stay_and_what_only_the_replaced_state_named_goes(here: Path) -> None:
    mine = {"notes.txt", "vectors/mine.safetensors", "vectors/b-9.safetensors", "files/a-1/my.json",
            "files/mine/x.json", "numbers-0.safetensors", "numbers-old.safetensors"}  # fmt: skip
    for name in mine:
        (here / "lossless" / name).parent.mkdir(exist_ok=True)
        (here / "lossless" / name).write_text("mine")
    before = contents(here / "lossless")
    tvb("remove", "lossless", "--task", "a")  # the former state has a, b and c
    assert (here / "lossless/numbers-10.safetensors").exists()  # after that of the user
    assert before.keys() - contents(here / "lossless").keys() == {"numbers-1.safetensors"}
    tvb("undo", "lossless")
    tvb("remove", "lossless", "--task", "b")
    assert before.keys() - contents(here / "lossless").keys() == {"numbers-1.safetensors"}
    damaged = here / "lossless/files/a-1/tokenizer.json"  # e has it, too, and keeps its own
    damaged.write_bytes(damaged.read_bytes().swapcase())
    tvb("add", "lossless", "e", "--task", "e", "--quiet")
    assert all((here / "lossless" / name).read_text() == "mine" for name in mine)
    known = store.load("lossless").facts
    ours = {*known.held, *known.previous.held} if known.previous else set()
    assert contents(here / "lossless").keys() - mine - ours == {".lock", "store.json"}  # no b
    for task in "ac":  # e has some of their files alike, which stay
        tvb("remove", "lossless", "--task", task)
    tvb("export", "lossless", "out", "--task", "e", "--quiet")


def test_undo_swaps_two_states(here: Path) -> None:
    held = contents(here / "grown")
    assert "3 task vectors" in tvb("undo", "grown").stdout
    assert tvb_mergekit.load("grown").tasks == [*"abc"]
    assert "3 balanced basis vectors of 4 task vectors" in tvb("undo", "grown").stdout
    assert contents(here / "grown") == held
    tvb("undo", "grown")
    tvb("add", "grown", "e", "--task", "e", "--quiet")  # what was undone is gone
    tvb("undo", "grown")
    assert tvb_mergekit.load("grown").tasks == [*"abc"]


def changed(source: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    shutil.copytree(source, folder)
    state = {name: change(name, tensor) for name, tensor in tiny.load(source).items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_change_that_is_refused_leaves_the_store(here: Path) -> None:
    start, before = tiny.load(here / "base"), {k: contents(here / k) for k in KINDS}
    rolled = changed(here / "e", here / "rolled", lambda _, t: t.flatten().roll(1).view_as(t))
    long = changed(here / "e", here / "long", lambda n, t: start[n] + 5 * (t - start[n]))
    less = shutil.copytree(here / "e", here / "less")
    state = tiny.load(less)
    del state["model.norm.weight"]
    save_file(state, less / "model.safetensors", {"format": "pt"})
    nan = changed(here / "e", here / "nan", lambda n, t: t / 0 if "norm" in n else t)
    for words, told in {
        ("grown", rolled, "--task", "e"): "the base's",
        ("grown", long, "--task", "e"): "the median of the other",
        ("grown", nan, "--task", "e"): "NaN|infinity",
        ("grown", "e", "--task", "a"): "in .*grown already",
        ("sampled", "e", "--task", "e", "--budget", 1): "is 1: expected 2 or more",
        ("grown", less, "--task", "e"): "`model.norm.weight` is not in .*its training",
        ("grown", "e", "--task", "e", "--base", "b"): "belongs to the base",
        ("lossless", f"{here}/base+{here}/adapter/x", "--task", "a"): "in .*lossless already",
    }.items():
        assert re.search(told, refused("add", *words, "--quiet")), words
    tvb("build", write(recipe("basis_ta", here / "base", [less]), here / "short"), "short")
    told = refused("add", "short", "e", "--task", "e", "--quiet")
    assert re.search("`model.norm.weight` is not in .*short .missing in less.*would be lost", told)
    assert "no task can be taken out of bases" in refused("remove", "grown", "--task", "a")
    assert "no task 'z'" in refused("remove", "lossless", "--task", "z")
    assert before == {kind: contents(here / kind) for kind in KINDS}
    done = tvb("add", "grown", long, "--task", "e", "--quiet", "--force", "--compress", "ae")
    assert "The errors of the tasks are not known" in done.stdout
    assert store.load("grown").facts.basis_weights is None
    tvb("remove", "adapters", "--task", "x")
    assert "'y' is its only task" in refused("remove", "adapters", "--task", "y")


def test_a_model_that_is_overwritten_while_it_is_read(here, monkeypatch):
    weights = here / "e/model.safetensors"

    def slow(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        weights.write_bytes(weights.read_bytes())  # the same inode
        return call(*args, **more)

    monkeypatch.setattr(build, "written", partial(slow, build.written))
    monkeypatch.setattr(merging, "merge_items", partial(slow, merging.merge_items))
    for kind in ("grown", "lossless"):
        before = contents(here / kind)
        with pytest.raises(UserError, match="was changed after it was opened"):
            tvb_mergekit.add(kind, "base", here / "e", "e")
        assert contents(here / kind) == before
    made = write(recipe("basis_ta", here / "base", [here / "e"]), here / "out")
    assert "was changed after it was opened" in refused("merge", made, "out", "--quiet")
    assert not (here / "out").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs capabilities of Linux")
def test_a_store_that_may_only_be_read(here: Path) -> None:
    from processes import run, unprivileged

    before = contents(here / "lossless")
    for folder in (here / "lossless", *(f for f in here.glob("lossless/**/*") if f.is_dir())):
        folder.chmod(0o555)
    for words in ("inspect lossless", "export lossless out --all", "merge lossless m --method add"):
        ended = run(["tvb", *words.split()], here, unprivileged)
        assert ended.code == 0, ended
    assert contents(here / "lossless") == before


# What it says


def test_what_is_lost_is_said_where_it_is_lost(here: Path, caplog: Any) -> None:
    base, models = here / "base", [here / task for task in "abcd"]
    made = recipe("basis_ta", base, models, basis="balanced", num_bases=2)
    said = tvb("build", write(made, here / "two"), "two", "--quiet").stdout
    errors = store.load("two").facts.errors
    worst = max(errors, key=lambda task: errors[task] or 0)
    assert f"Largest relative error of a task: {errors[worst]:.3g} ({worst})." in said
    tvb("export", "two", "out", "--task", worst, "--quiet")
    told = f"{worst}: its reconstruction has a relative error of {errors[worst]:.2f}"
    assert told in caplog.text and told in (here / "out/README.md").read_text()
    # the true error is the one that is told
    start, want, found = (tiny.load(here / name) for name in ("base", worst, "out"))
    lost = sum(float((found[n].double() - want[n].double()).square().sum()) for n in start)
    away = sum(float((want[n].double() - start[n].double()).square().sum()) for n in start)
    assert (lost / away) ** 0.5 == pytest.approx(errors[worst], abs=0.05)  # bfloat16
    sealed(here / "lossless", lambda found: found["vectors"][0].update(files=[]))
    tvb("export", "lossless", "old", "--task", "a", "--quiet")
    assert "a: the store lacks its config.json and tokenizer" in caplog.text


def test_only_a_lossless_store_is_told_that_models_may_go(here: Path) -> None:
    delete, files = "you may delete the models, but not the base", [here / "a", here / "b"]
    for words in ((), ("--lossless",), ("--keep", "0.5"), ("--dtype", "bfloat16")):
        out = here / f"new{'-'.join(words)}"
        said = tvb("build", write(recipe("basis_ta", here / "base", files), out), out, *words)
        assert (delete in said.stdout) == ("--lossless" in words or not words), words
    assert "Largest relative error of a task: 0.00391" in said.stdout  # of rounding to bfloat16
    # a model that does not fit is dense: not all bits come back
    wide = changed(here / "e", here / "wide", lambda _, t: t.float())
    assert delete not in tvb("add", "lossless", wide, "--task", "wide", "--quiet").stdout
