"""One merge or build in several forked processes: the bits of one, or an error and no output."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import contents, merge, recipe, refused, write
from safetensors.torch import save_file
from tiny import family, gpt2, llama, load, save_tokenizer
from torch.distributed import TCPStore

if sys.platform == "win32":
    pytest.skip("needs fork", allow_module_level=True)

import processes
import worlds
from processes import KILL, Fault, Running, on_call

from tvb_mergekit.store.store import load as load_store

WRITE = "tvb_mergekit.tensors.output.OwnFile.write"
TASKS = ("math", "code", "safety")
BALANCED = {"basis": "balanced", "num_bases": 2}
Folders = tuple[Path, list[Path]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    folder = tmp_path_factory.mktemp("models")
    deep = partial(llama, vocab_size=500, num_hidden_layers=3, tie_word_embeddings=True)
    kinds = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
    return {
        "tied": stretched(*family(folder / "tied", deep, TASKS)),
        "sharded": family(folder / "sharded", llama, TASKS, dtypes=kinds, max_shard_size="40KB"),
        "gpt2": family(folder / "gpt2", gpt2, TASKS),
        "half": family(folder / "half", deep, TASKS, dtypes=kinds[:1] * 4, max_shard_size="90KB"),
    }


def stretched(base: Path, models: list[Path]) -> Folders:
    """Tensors of magnitudes so far apart that sums in another order have other bits."""
    for folder in (base, *models):
        state = load(folder)
        for index, name in enumerate(sorted(state)):
            state[name] *= 10.0 ** (-2 * (index % 4))
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return base, models


def run(folder: Path, *words: str, **faults: Fault) -> tuple[list[int], list[str]]:
    """The exit codes and outputs of one process for each of `words`; `rank_1=...` is a fault."""
    # A store of this process, as under torchrun: a free port may be taken before they need it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"WORLD_SIZE": str(len(words))}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    started = [
        Running(own.split(), folder, faults.get(f"rank_{r}"), **env, RANK=str(r), LOCAL_RANK=str(r))
        for r, own in enumerate(words)
    ]
    ended = [running.wait() for running in started]
    return [each.code for each in ended], [each.out + each.err for each in ended]


def same(one: Path, several: Path) -> None:
    """Equal weights, Gram matrices and files; shards may be split elsewhere."""
    for place in [p.parent for p in one.glob("config.json")]:
        want, found = load(place), load(several / place.relative_to(one))
        assert set(want) == set(found)
        assert all(torch.equal(want[name], found[name]) for name in want)
    names, others = ({*contents(folder)} for folder in (one, several))
    assert {n for n in names ^ others if "model" not in n} == set()
    if (one / "store.json").exists():  # all files are the same, except for times
        facts = [load_store(folder).facts for folder in (one, several)]
        told = [dict(each) | {"seconds": {}} for each in facts]
        assert told[0] == told[1]
        held = [(folder / name).read_bytes() for name in facts[0].held for folder in (one, several)]
        assert held[::2] == held[1::2]
    else:
        basis = Path("basis/basis.safetensors")
        assert (one / basis).read_bytes() == (several / basis).read_bytes()


CASES: dict[str, tuple[int, str, str, str, dict[str, Any]]] = {
    "adam": (3, "merge", "tied", "basis_ta", {"basis": "ae", "num_bases": 2, "steps": 100}),
    "ties": (2, "merge", "sharded", "basis_ties", BALANCED),
    "few": (3, "merge", "gpt2", "basis_ties", {**BALANCED, "exclude": "^((?!h.1.mlp.c_fc).)*$"}),
    "one pass": (2, "merge", "sharded", "basis_ta", BALANCED),
    "thresholds and sums": (2, "merge", "tied", "basis_ties", {"basis": "none"}),
    "store": (3, "build", "tied", "basis_ta", {"basis": "pca", "num_bases": 2}),
    "samples": (2, "build --keep 0.3", "sharded", "basis_ta", {"basis": "none"}),
    "lossless": (2, "build", "half", "basis_ta", {}),
    "mixed": (2, "build", "sharded", "basis_ta", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_to_the_bit(case: str, models: dict[str, Folders], tmp_path: Path) -> None:
    size, command, which, method, keys = CASES[case]
    write(recipe(method, *models[which], **keys), tmp_path / "recipe")
    assert run(tmp_path, f"tvb {command} recipe.yml one --quiet")[0] == [0]
    codes, said = run(tmp_path, *[f"tvb {command} recipe.yml out"] * size)
    assert codes == [0] * size, said
    assert said[0] and not any(said[1:])
    same(tmp_path / "one", tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"recipe.yml", "one", "out"}


def test_a_death_ends_all(models: dict[str, Folders], tmp_path: Path) -> None:
    write(recipe("basis_ta", *models["tied"], **BALANCED), tmp_path / "recipe")
    for dying in (0, 1):
        dies = partial(on_call, WRITE, KILL, 2)
        words = ["tvb merge recipe.yml merged --quiet"] * 2
        codes, said = run(tmp_path, *words, **{f"rank_{dying}": dies})
        assert (codes[dying], codes[1 - dying]) == (-9, 1)
        assert f"Error: rank {1 - dying}: another process ended" in said[1 - dying]
        assert "Traceback" not in said[1 - dying]
        assert not (tmp_path / "merged").exists()
    build = ["tvb build recipe.yml out --quiet"] * 2
    codes, _ = run(tmp_path, *build, rank_1=dies)
    assert codes == [1, -9] and not (tmp_path / "out").exists()
    codes, said = run(tmp_path, *build)
    assert codes == [0] * 2 and "2 balanced basis vectors of 3 task vectors" in said[0]


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overflow float16": ({"lambda": 1e9, "dtype": "float16"},) * 2,
    "rank 1 finds other tensors than rank 0": ({}, {"exclude": "mlp"}),
}


@pytest.mark.parametrize("told", MISTAKES)
def test_a_mistake_ends_all(told, models, tmp_path):
    for number, keys in enumerate(MISTAKES[told]):
        made = recipe("basis_ta", *models["tied"], **BALANCED, **keys)
        write(made, tmp_path / str(number))
    codes, said = run(tmp_path, *[f"tvb merge {name}.yml out --quiet" for name in (0, 1)])
    assert codes == [1, 1] and "Traceback" not in "".join(said)
    assert any(told in text for text in said), said
    assert not list(tmp_path.glob("out*"))


def test_other_commands_refuse(models, tmp_path, monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    out, document = tmp_path / "out", recipe("basis_ta", *models["tied"], **BALANCED)
    said = refused("inspect", write(document, out))
    assert "inspect runs in one process, and was started 2 times" in said
    told = merge(document, out, fails=True).output
    assert "Error: mergekit-yaml runs in one process" in told and "tvb merge" in told


def launch(*words: str) -> None:
    """accelerate's launcher in the place of the command: it starts two new Pythons."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(words))
    sys.exit()


def test_under_accelerate(tmp_path: Path) -> None:
    """mergekit orders new tokens by process; all rows must have the order of the one tokenizer."""
    base, listed = family(tmp_path / "in", llama, TASKS)
    tokens = {f"<{n}>": float(n) for n in range(9)}
    vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    state = load(listed[0])
    for name in vocabulary:
        rows = torch.tensor(list(tokens.values()))[:, None].expand(-1, 32)
        state[name] = torch.cat([state[name], rows])
    worlds.save(listed[0], state)
    worlds.configure(listed[0], vocab_size=105)
    save_tokenizer(listed[0], 96, list(tokens))
    keys = {"exclude": "embed_tokens|lm_head|proj", "extra": {"tokenizer_source": "union"}}
    out = tmp_path / "out"
    file = write(recipe("basis_ta", base, listed, **BALANCED, **keys), out)
    words = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    words += ["-m", "tvb_mergekit", "merge", str(file), str(out)]
    fault = partial(launch, *words)
    done = processes.run(["tvb"], tmp_path, fault, PYTHONHASHSEED="random")
    assert done.code == 0, done.err
    assert done.out.count("Written to") == 1
    merged = load(out)
    places = transformers.AutoTokenizer.from_pretrained(out).get_vocab()
    for token, value in tokens.items():
        for name in vocabulary:
            assert (merged[name][places[token]] == value).all(), (token, name)
