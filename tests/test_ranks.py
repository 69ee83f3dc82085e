"""Several processes at one merge or build: the same bits as one, or one line and nothing left."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from commands import recipe, refused, tvb, write
from hypothesis import given
from hypothesis import strategies as st
from mergekit.scripts import run_yaml
from safetensors.torch import load_file, save_file
from several import Ended, run, started, waited
from tiny import family, gpt2, llama, load, save_tokenizer

from tvb_mergekit import ranks
from tvb_mergekit.errors import UserError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Linux and macOS only")

TASKS = ("math", "code", "safety")
Folders = tuple[Path, list[Path]]
BALANCED = {"basis": "balanced", "num_bases": 2}


@given(st.lists(st.integers(0, 20), max_size=7), st.integers(1, 5))
def test_shares_are_as_even_as_runs_can_be(sizes: list[int], count: int) -> None:
    cut = ranks.shares(sizes, count)
    assert len(cut) == count
    assert [i for run in cut for i in range(len(sizes))[run]] == list(range(len(sizes)))
    places = itertools.combinations_with_replacement(range(len(sizes) + 1), count - 1)
    best = min(
        max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *inner, len(sizes))))
        for inner in places
    )
    assert max(sum(sizes[run]) for run in cut) == best


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    folder = tmp_path_factory.mktemp("models")
    deep = partial(llama, vocab_size=500, num_hidden_layers=3, tie_word_embeddings=True)
    kinds = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
    return {
        "tied": family(folder / "tied", deep, TASKS),
        "sharded": family(folder / "sharded", llama, TASKS, dtypes=kinds, max_shard_size="40KB"),
        "gpt2": family(folder / "gpt2", gpt2, TASKS),
    }


def one_line(ended: list[Ended], *parts: str, speaker: int = 0) -> None:
    """All ended, and one told why."""
    for rank, each in enumerate(ended):
        assert each.code in (1, -signal.SIGKILL), (rank, each)
        assert not each.out
        assert each.err.count("\n") == (rank == speaker), (rank, each.err)
    said = ended[speaker].err
    assert said.startswith("Error: ") and all(part in said for part in parts), said


def same(one: Path, several: Path) -> None:
    """The same weights, Gram matrix and facts; the files of weights may be cut elsewhere."""
    want, found = load(one), load(several)
    assert set(want) == set(found)
    assert all(torch.equal(want[name], found[name]) for name in want)
    facts, bases = [], []
    for folder in (one, several):
        facts.append(json.loads((folder / "basis" / "basis.json").read_text()))
        facts[-1].pop("seconds")
        bases.append(load_file(folder / "basis" / "basis.safetensors"))
    assert facts[0] == facts[1]
    assert set(bases[0]) == set(bases[1])
    assert all(torch.equal(bases[0][key], bases[1][key]) for key in bases[0])
    names = [{p.name for p in f.iterdir() if "model" not in p.name} for f in (one, several)]
    assert names[0] == names[1] and "config.json" in names[0]


NEGATE = {"forget": "code", "alpha": 0.7}
CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "addition": (3, "tied", "basis_ta", {"basis": "ae", "num_bases": 2, "steps": 100}),
    "ties": (2, "sharded", "basis_ties", BALANCED),
    "ties by tensor": (4, "tied", "basis_ties", {**BALANCED, "trim": "tensor"}),
    "few": (4, "gpt2", "basis_ties", {**BALANCED, "exclude": "^((?!h.1.mlp.c_fc).)*$"}),
    "projection": (2, "gpt2", "basis_negate", {"basis": "rand_proj", "num_bases": 2, **NEGATE}),
}


@pytest.mark.parametrize("case", CASES)
def test_merges_are_the_same_to_the_bit(
    case: str, models: dict[str, Folders], tmp_path: Path
) -> None:
    size, which, method, keys = CASES[case]
    file = write(recipe(method, *models[which], **keys), tmp_path / "recipe")
    tvb("merge", file, tmp_path / "one", "--quiet")
    out = tmp_path / "out"
    words = ["merge", file, out, "--out-shard-size", "100K"]
    ended = run(size, words, tmp_path / "said")
    assert [each.code for each in ended] == [0] * size, ended
    assert "Retained energy" in ended[0].out or case == "projection"
    assert "Merged model" in ended[0].err
    assert all(each.out == each.err == "" for each in ended[1:]), ended
    same(tmp_path / "one", out)
    assert {p.name for p in tmp_path.iterdir()} == {"recipe.yml", "one", "out", "said"}
    assert len(list(out.glob("model-*.safetensors"))) > 1


def vectors(store: Path) -> dict[str, torch.Tensor]:
    folders = sorted(path for path in store.iterdir() if (path / "config.json").is_file())
    return {f"{path.name}/{n}": t for path in folders for n, t in load(path).items()}


def same_store(one: Path, several: Path) -> None:
    want, found = vectors(one), vectors(several)
    assert set(want) == set(found)
    assert all(torch.equal(want[name], found[name]) for name in want)
    basis = [load_file(folder / "basis.safetensors") for folder in (one, several)]
    assert all(torch.equal(basis[0][key], basis[1][key]) for key in basis[0])
    names = [{path.name for path in folder.iterdir()} for folder in (one, several)]
    assert names[0] == names[1]
    tvb("inspect", several, "--json")  # compares all files with their checksums


def test_a_build_is_the_same_and_goes_on(models: dict[str, Folders], tmp_path: Path) -> None:
    file = write(recipe("basis_ta", *models["tied"], basis="pca", num_bases=2), tmp_path / "r")
    one, out = tmp_path / "one", tmp_path / "out"
    tvb("build", file, one, "--quiet")
    words = ["build", file, out, "--quiet"]
    does = {0: "slow writing", 1: "dies writing", 2: "slow writing"}
    one_line(
        run(3, words, tmp_path / "killed", does=does), "rank 1 died", f"{out}.partial", "--resume"
    )
    assert not out.exists()
    text = refused("build", file, out, "--quiet", "--resume")
    assert "another number of processes" in text
    journals = list((tmp_path / "out.partial").glob("*journal*"))
    assert journals and all(journal.stat().st_size for journal in journals)
    lost = sorted((tmp_path / "out.partial" / "basis-001").glob("*.safetensors"))[-1]
    whole = lost.read_bytes()
    lost.write_bytes(whole[:-8] + bytes(8))
    ended = run(3, [*words, "--resume"], tmp_path / "damaged")
    one_line(ended, lost.name, "not what was written")
    lost.write_bytes(whole)
    ended = run(3, [*words, "--resume"], tmp_path / "again")
    assert [each.code for each in ended] == [0] * 3, ended
    assert ended[0].out.startswith(f"{out}: 2 bases of 3 tasks")
    assert all(each.out == each.err == "" for each in ended[1:]), ended
    same_store(one, out)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("dying", "does"),
    [
        (1, {0: "slow summing", 1: "dies summing"}),
        (2, {0: "slow writing", 1: "slow writing", 2: "dies writing"}),
        (0, {0: "dies writing", 1: "slow writing", 2: "slow writing"}),
    ],
)
def test_a_rank_that_dies_ends_all(
    dying: int, does: dict[int, str], models: dict[str, Folders], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    file = write(recipe("basis_ta", *models["tied"], **BALANCED), out)
    ended = run(3, ["merge", file, out, "--quiet"], tmp_path / "said", does=does)
    assert ended[dying].code == -signal.SIGKILL
    told = [f"rank {dying} died", "nothing was written"]
    one_line(ended, *told, speaker=0 if dying else 1)
    assert {path.name for path in tmp_path.iterdir()} == {"out.yml", "said"}


def damaged(folder: Path, models: Folders, how: str) -> Folders:
    """The same models, one of them damaged in the last of its tensors."""
    base, (first, *rest) = models
    shutil.copytree(first, folder / "bad")
    file = folder / "bad" / "model.safetensors"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        state = load_file(file)
        state["model.norm.weight"][3] = float("nan")
        save_file(state, file, metadata={"format": "pt"})
    return base, [folder / "bad", *rest]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("nan", ["model.norm.weight", "1 NaN"]),
        ("cut", ["model.safetensors"]),
        ("overflow", ["overflow float16"]),
        ("elsewhere", ["rank 2 does not see"]),
        ("other", ["rank 1 finds other tensors"]),
    ],
)
def test_a_mistake_is_one_line(
    how: str, told: list[str], models: dict[str, Folders], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    given, keys, more = models["tied"], {**BALANCED}, {}
    if how in ("nan", "cut"):
        given = damaged(tmp_path / "in", given, how)
    if how == "overflow":
        keys |= {"lambda": 1e9, "dtype": "float16"}
    out = tmp_path / "out"
    words = ["merge", write(recipe("basis_ta", *given, **keys), out), out, "--quiet"]
    if how == "elsewhere":
        more["does"] = {2: how}
    if how == "other":
        file = write(recipe("basis_ta", *given, **keys, exclude="mlp"), tmp_path / "in" / "other")
        more["others"] = {1: ["merge", file, out, "--quiet"]}
    one_line(run(3, words, tmp_path / "said", **more), *told)
    assert {path.name for path in tmp_path.iterdir()} == {"out.yml", "said", "in"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_leaves_nothing(
    number: int, models: dict[str, Folders], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    file = write(recipe("basis_ta", *models["tied"], **BALANCED), out)
    does = dict.fromkeys(range(2), "slow writing")
    processes = started(2, ["merge", file, out, "--quiet"], tmp_path / "said", does=does)
    for _ in range(600):
        if len(list((tmp_path / "said").glob("*.there"))) == 2:
            break
        time.sleep(0.1)
    for process in processes:
        os.kill(process.pid, number)
    ended = waited(processes, tmp_path / "said")
    assert [each.code for each in ended] == [130 if number == signal.SIGINT else 143, 1], ended
    assert "Traceback" not in ended[0].err + ended[1].err and not ended[1].err
    assert {path.name for path in tmp_path.iterdir()} == {"out.yml", "said"}


# What works in one process only


def test_other_commands_refuse(
    models: dict[str, Folders], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    out = tmp_path / "out"
    file = write(recipe("basis_ta", *models["tied"], **BALANCED), out)
    assert "check runs in one process, and was started 2 times" in refused("check", file)
    told = CliRunner().invoke(run_yaml.main, [str(file), str(out)])
    assert told.exit_code == 1 and not out.exists()
    assert "Error: mergekit-yaml runs in one process" in told.output and "tvb merge" in told.output
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE is `two`" in refused("check", file)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "--multi-gpu is for one process on a machine" in refused(
        "merge", file, out, "--multi-gpu"
    )


def test_without_a_launcher_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks.joined("out") as world:
        assert world is ranks.ALONE and ranks.world() is world
        assert world.share(lambda: 3) == 3 and world.collect(4) == [4]
        assert not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="rank 1 cannot reach the other 1 processes"):
        with ranks.joined("out"):
            pass


# As a user types it


def launched(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TVB_MERGEKIT_CACHE": "off"}
    return subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        env=env,
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=300,
    )


def test_under_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mergekit orders new tokens as a set, which each process has in another order: the matrices
    that two processes write must have their rows in the order of the one tokenizer."""
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    little = partial(llama, num_hidden_layers=1, num_key_value_heads=1, intermediate_size=2)
    base, listed = family(tmp_path / "in", little, TASKS)
    tokens = {f"<{n}>": float(n) for n in range(9)}
    vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    state = load(listed[0])
    for name in vocabulary:
        rows = torch.tensor(list(tokens.values()))[:, None].expand(-1, 32)
        state[name] = torch.cat([state[name], rows])
    save_file(state, listed[0] / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((listed[0] / "config.json").read_text()) | {"vocab_size": 105}
    (listed[0] / "config.json").write_text(json.dumps(config))
    save_tokenizer(listed[0], 96, list(tokens))
    keys = {"exclude": "embed_tokens|lm_head|proj", "extra": {"tokenizer_source": "union"}}
    out = tmp_path / "out"
    file = write(recipe("basis_ta", base, listed, **BALANCED, **keys), out)
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", 2]
    words = ["--main_process_port", 0, "-m", "tvb_mergekit", "merge", file, out]
    done = launched(*launch, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Retained energy") == 1
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[vocabulary[0]] != index[vocabulary[1]]
    merged = load(out)
    places = transformers.AutoTokenizer.from_pretrained(out).get_vocab()
    for token, value in tokens.items():
        for name in vocabulary:
            assert (merged[name][places[token]] == value).all(), (token, name)


KILLED = """
import os
from several import MISHAPS
if os.environ["RANK"] in os.environ["MISHAPS"]:
    MISHAPS["dies writing" if os.environ["RANK"] == "1" else "slow writing"](tuple)
from tvb_mergekit.cli import main
main()
"""


@pytest.mark.slow
def test_a_kill_under_torchrun(
    models: dict[str, Folders], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's own report is long; the line stands before it and at its end."""
    (tmp_path / "killed.py").write_text(KILLED)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("MISHAPS", "0 1")
    out = tmp_path / "out"
    file = write(recipe("basis_ta", *models["tied"], **BALANCED), out)
    words = [tmp_path / "killed.py", "merge", file, out, "--quiet"]
    done = launched("torch.distributed.run", "--nproc-per-node", 2, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "Error: rank 1 died" in done.stderr
    assert done.stderr.count("rank 1 died") == 2, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"killed.py", "out.yml"}
