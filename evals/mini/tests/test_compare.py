"""evals/mini/compare.py: resuming, on `micro`; and the whole comparison of `tiny`, as typed, which
takes minutes (slow)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tvb_mergekit

COMPARE = Path(__file__).resolve().parent.parent / "compare.py"
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(out: Path, *options: str, code: int = 0) -> str:
    """What the command prints."""
    command = [sys.executable, str(COMPARE), "--out", str(out), "--device", "cpu", *options]
    done = subprocess.run(command, env=ENV, cwd=out, capture_output=True, text=True, timeout=1500)
    assert done.returncode == code, done.stderr[-4000:]
    return done.stdout + done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Everything: training, merges, scoring, tables, pictures."""
    out = tmp_path_factory.mktemp("tiny")
    written = run(out, "--preset", "tiny", "--workers", "2").split()
    records = [json.loads(file.read_text()) for file in out.glob("tiny-seed0/cells/full/*.json")]
    return SimpleNamespace(out=out, folder=out / "tiny-seed0", written=written, records=records)


def one(tiny: SimpleNamespace, **cell: Any) -> dict[str, Any]:
    (result,) = (r["result"] for r in tiny.records if cell.items() <= r["cell"].items())
    return dict(result)


def average(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


# -------------------------------------------------------------------------- what has to hold


@pytest.mark.slow
def test_the_regime(mini: SimpleNamespace, tiny: SimpleNamespace) -> None:
    """Specialists can do their task, the base cannot, and the sum of all lies between."""
    reference = one(tiny, kind="reference")
    own = reference["specialists"]
    assert set(own) == set(mini.data.TASKS)
    assert min(own.values()) > 0.9
    base = {task: reference["base"][task] for task in own}
    assert all(base[task] < own[task] for task in own)
    assert average(base) < 0.4 * average(own)
    added = one(tiny, kind="addition", basis="none")["merges"]["ta"]["scales"]["bases"]
    assert 0.6 < average(added["test"]) / average(own) < 0.9
    assert max(added["validation"]) == added["validation"][added["grid"].index(added["lambda"])]


@pytest.mark.slow
def test_forgetting_forgets_the_task(tiny: SimpleNamespace) -> None:
    """The true task vector: the target falls far more than the control, for every task."""
    forgotten = one(tiny, kind="negation", basis="plain")
    for task, scores in forgotten["tasks"].items():
        fallen = forgotten["start"][task] - scores["target"]
        assert fallen > max(0.0, scores["control_before"] - scores["control"]), task
    start = average(forgotten["start"])
    assert sum(s["target"] for s in forgotten["tasks"].values()) / 10 < start / 3
    rough = one(tiny, kind="negation", basis="rand_proj")
    assert sum(s["target"] for s in rough["tasks"].values()) / 10 > start / 2


# ------------------------------------------------------------------------------ resuming


def times(out: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in out.glob("*/cells/*/*.json")}


@pytest.mark.slow
def test_what_is_whole_is_not_computed_again(tiny: SimpleNamespace, tmp_path: Path) -> None:
    report = tiny.out / "report-tiny"
    assert {str(path) for path in report.iterdir()} == set(tiny.written)
    before, tables = times(tiny.out), (report / "tables.md").read_bytes()
    (picked,) = (file for file in before if file.name.startswith("online-magmax"))
    result = json.loads(picked.read_text())["result"]
    picked.unlink()
    run(tiny.out, "--preset", "tiny")
    after = times(tiny.out)
    assert set(after) == set(before)
    assert {file for file in after if after[file] != before[file]} == {picked}
    assert json.loads(picked.read_text())["result"] == result
    assert (report / "tables.md").read_bytes() == tables
    # or reported as it is
    run(tiny.out, "--preset", "tiny", "--as-is", "--seeds", "0,1", "--report", str(tmp_path / "r"))
    assert (tmp_path / "r" / "tables.md").read_bytes() == tables and times(tiny.out) == after
    told = run(tiny.out, "--preset", "micro", "--as-is", code=1)
    assert "has no results of micro" in told


def left_over(folder: Path) -> list[int]:
    """The processes that work in a folder (Linux)."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder.resolve():
                found.append(int(process.name))
        except OSError:
            continue  # gone, or not ours
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for processes in /proc")
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    options = ("--preset", "micro", "--seeds", "3", "--workers", "2", "--kind", "addition")
    command = [sys.executable, str(COMPARE), "--out", str(tmp_path), "--device", "cpu", *options]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=ENV, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
        deadline = time.monotonic() + 600
        while len(times(tmp_path)) < 4 and process.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        process.kill()  # the parent alone: its workers have to see it
        process.wait()
    deadline = time.monotonic() + 60
    while left_over(tmp_path):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.1)
    before = times(tmp_path)
    assert before
    run(tmp_path, *options)
    after = times(tmp_path)
    assert len(after) > len(before) and before.items() <= after.items()
    for file in after:
        json.loads(file.read_text())
    assert (tmp_path / "report-micro" / "tables.md").exists()


def test_results_are_of_one_definition(mini: SimpleNamespace, tmp_path: Path) -> None:
    """Another cell, other weights: another file."""
    compare = mini.compare
    cell = next(mini.plan.cells(mini.plan.PLANS["micro"], 0.3))
    files = {
        compare.work_of(tmp_path, "full", "cpu", models, chosen).file
        for models in ("a", "b")
        for chosen in (cell, cell | {"items": 11}, cell | {"seed": 1})
    }
    assert len(files) == 6
    for task in ("base", *(f"full/{task}" for task in mini.data.TASKS)):
        (tmp_path / task).mkdir(parents=True)
        (tmp_path / task / "model.safetensors").write_bytes(task.encode())
    first = compare.fingerprint(tmp_path, "full")
    (tmp_path / "full" / "math_add" / "model.safetensors").write_bytes(b"other")
    assert compare.fingerprint(tmp_path, "full") != first


def test_a_mistaken_page_is_refused_before_anything_is_trained(
    mini: SimpleNamespace, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: tiny full additions -->\n<!-- end -->\n")
    options = ["--out", str(tmp_path), "--page", str(page)]
    done = CliRunner().invoke(mini.compare.main, options)
    assert done.exit_code == 1
    assert "line 1: <!-- table: tiny full additions --> names no table" in done.stderr
    assert list(tmp_path.iterdir()) == [page]


# ------------------------------------------------------------------------------ what cells do


@pytest.fixture(scope="module")
def small(mini: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of models that learned nothing: for what has to hold of any weights."""
    folder, _ = mini.train.train_run("micro", "full", 0, tmp_path_factory.mktemp("micro"), "cpu")
    return mini.runs.Run(folder, "full")


def dense(small: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The task vectors, from the files."""
    base = small.base
    return {
        task: {name: model[name] - base[name] for name in base}
        for task, model in small.models.items()
    }


def near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in other)


def test_the_scales_of_addition(mini: SimpleNamespace, small: Any) -> None:
    """On which items lambda is chosen, along which grid, and on which it is tested."""
    asked = []

    class Watched(mini.runs.Run):
        def __init__(self) -> None:
            vars(self).update(vars(small))

        def accuracy(self, weights: Any, split: str, tasks: Any, items: int) -> dict[str, float]:
            asked.append((split, tuple(tasks), items))
            return dict.fromkeys(tasks, 0.5)

    cell = mini.plan._addition("balanced", 5, mini.plan.PLANS["tiny"])
    found = mini.cells.compute(Watched(), cell)
    tasks = tuple(mini.data.TASKS)
    assert set(asked) == {("validation", tasks, 10), ("test", tasks, 100)}  # 20 * 5 / 10
    scales = found["merges"]["ta"]["scales"]
    assert scales["bases"]["grid"] == pytest.approx([i / 20 for i in range(21)])
    assert scales["tasks"]["grid"] == pytest.approx([i / 10 for i in range(21)])
    assert set(found["merges"]["ties"]["scales"]) == {"bases", "tasks"}
    assert found["bytes"] == 5 * 4 * sum(tensor.numel() for tensor in small.base.values())


def test_the_sum_of_reconstructions(mini: SimpleNamespace, small: Any) -> None:
    """B W_d 1, against each task's own reconstruction; PCA's is the sum of all, by its mean."""
    tasks = list(mini.data.TASKS)
    for basis in ("ae", "pca"):
        bases = tvb_mergekit.build(small.base, small.models, basis=basis, num_bases=3)
        rebuilt = mini.cells._combined(small, bases.reconstruction(tasks).sum(1), bases.sources)
        expected = {name: torch.zeros_like(tensor) for name, tensor in small.base.items()}
        for task in tasks:
            model = tvb_mergekit.reconstruct(bases, small.base, task)
            for name in expected:
                expected[name] += model[name] - small.base[name]
        assert near(rebuilt, expected)
        if basis == "pca":
            assert near(rebuilt, mini.cells.total(small, tasks))


def test_buffers(mini: SimpleNamespace, small: Any) -> None:
    order = list(mini.data.TASKS)[::-1]
    vectors, names = dense(small), list(small.base)
    cells = mini.cells
    cell = {"budget": 3, "order": 0, "how": "rand_select"}

    for seen, (held, count) in enumerate(cells._random_buffer(small, cell, order), 1):
        assert count == min(seen, 3)
        newest = vectors[order[seen - 1]]
        rest = {name: held[name] - newest[name] for name in names}  # of one or two of before
        pairs = [(a, b) for a in range(seen - 1) for b in range(a)]
        if seen > 3:
            sums = (
                {n: vectors[order[a]][n] + vectors[order[b]][n] for n in names} for a, b in pairs
            )
            assert any(near(rest, found) for found in sums)

    *_, (held, count) = cells.magmax(small, cell, order)
    stacked = {name: torch.stack([vectors[task][name] for task in order]) for name in names}
    largest = {
        name: tensor.gather(0, tensor.abs().argmax(0, keepdim=True))[0]
        for name, tensor in stacked.items()
    }
    assert count == 10 and near(held, largest)

    *_, (held, count) = cells._continual(small, cell, order)
    assert count == 10 and near(held, {name: tensor.sum(0) for name, tensor in stacked.items()})
    *_, (held, count) = cells._bases_buffer(small, cell | {"how": "balanced"}, order)
    total = {name: tensor.sum(0) * 3 / 10 for name, tensor in stacked.items()}
    assert count == 3 and near(held, total)


def test_ascent_raises_the_loss_of_the_task(mini: SimpleNamespace, small: Any) -> None:
    steps = list(mini.cells._ascent(small, small.base, "math_add"))
    assert len(steps) == 21 and near(steps[0], small.base)
    batch = next(mini.model.batches(small.tokenizer, mini.data.stream(["math_add"], 0.0, "x"), 64))
    losses = [float(mini.cells._loss(small, steps[i], batch)) for i in (0, 10, 20)]
    assert losses[0] < losses[1] < losses[2]
    longest = mini.cells.ASCENT * mini.cells.norm(small.base)
    moved = mini.cells.norm(mini.runs.difference(steps[1], steps[0]))
    assert 0 < moved <= longest * 1.001


def test_few_shots_are_learned(mini: SimpleNamespace, small: Any) -> None:
    """Both ways lower the loss on the examples, and coefficients stay in the vectors' span."""
    docs = mini.data.read(small.folder / "data", "unseen_middle", "train")[:16]
    items = [(doc["prompt"], doc["answer"]) for doc in docs]
    batch = next(mini.model.batches(small.tokenizer, iter(items), 16))
    vectors = [small.task_vector(task) for task in list(mini.data.TASKS)[:2]]
    before = float(mini.cells._loss(small, small.base, batch))
    learned = mini.cells._atlas(small, vectors, items)
    assert float(mini.cells._loss(small, learned, batch)) < before
    assert float(mini.cells._loss(small, mini.cells._finetuned(small, items), batch)) < before
    for name, tensor in mini.runs.difference(learned, small.base).items():
        span = torch.stack([vector[name].flatten() for vector in vectors], 1).double()
        flat = tensor.flatten().double()
        left = flat - span @ torch.linalg.lstsq(span, flat).solution
        assert left.norm() <= 1e-3 * max(flat.norm(), 1e-6), name


def test_turned_bases_are_orthogonal_and_span_the_same(mini: SimpleNamespace, small: Any) -> None:
    cell = {"basis": "ae_exact", "num_bases": 3, "seed": 0}
    plain, turned = (
        torch.stack([torch.cat([t.flatten() for t in vector.values()]) for vector in vectors], 1)
        for vectors in (
            mini.cells._vectors(small, cell),
            mini.cells._vectors(small, cell | {"basis": "ae_exact_turned"}),
        )
    )
    length = plain.square().sum(0).mean()
    assert torch.allclose(turned.T @ turned, length * torch.eye(3), atol=1e-3 * float(length))
    inside = plain @ torch.linalg.lstsq(plain.double(), turned.double()).solution.float()
    assert torch.allclose(inside, turned, atol=1e-4)


class Scripted(torch.nn.Module):
    """A model that goes on as a script says."""

    def __init__(self, tokenizer: Any, lines: dict[str, str]) -> None:
        super().__init__()
        self.vocab, self.eos = tokenizer.get_vocab(), tokenizer.eos_token_id
        self.lines = {
            tuple(self.vocab[w] for w in prompt.split()): [
                *(self.vocab[w] for w in answer.split()), self.eos
            ]
            for prompt, answer in lines.items()
        }  # fmt: skip
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Any, past_key_values: Any = None, **_: Any) -> SimpleNamespace:
        past = past_key_values
        ids = input_ids if past is None else torch.cat([past, input_ids], 1)
        logits = torch.zeros(*ids.shape, len(self.vocab))
        for row, sequence in enumerate(ids.tolist()):
            for prompt, answer in self.lines.items():
                if tuple(sequence[: len(prompt)]) != prompt:
                    continue
                for place in range(len(prompt) - 1, len(sequence)):
                    said = place - len(prompt) + 1
                    right = sequence[len(prompt) : place + 1] == answer[:said]
                    token = answer[said] if right and said < len(answer) else self.eos
                    logits[row, place, token] = 1.0
        kept = logits if past is None else logits[:, -1:]
        return SimpleNamespace(logits=kept, past_key_values=ids)


def test_one_pass_tells_what_a_generation_would(mini: SimpleNamespace) -> None:
    """Among them answers that are right, and not the expected one."""
    tokenizer = mini.model.make_tokenizer()
    task = "coding_complete"
    docs = mini.data.held_out(task, "test", 6) + mini.data.held_out("math_add", "test", 3)
    one, two, three, four, five, six = (doc["answer"] for doc in docs[:6])
    said = {
        docs[0]["prompt"]: one,
        docs[1]["prompt"]: f", 3 {two}",  # right too
        docs[2]["prompt"]: f"{three} , 4",  # a tuple, in the end
        docs[3]["prompt"]: f"{four} {four}",
        docs[4]["prompt"]: " ".join(five.split()[:2]),
        docs[5]["prompt"]: f", , {six}",
        docs[6]["prompt"]: docs[6]["answer"],
        docs[7]["prompt"]: docs[7]["answer"] + " 1",
        docs[8]["prompt"]: "no",
    }
    model = Scripted(tokenizer, said)
    texts = mini.score.answers(model, tokenizer, [doc["prompt"] for doc in docs])
    assert texts == list(said.values())
    right = [mini.data.correct(doc, text) for doc, text in zip(docs, texts, strict=True)]
    assert right == [True, True, True, False, False, False, True, False, False]
    found = mini.score.ask(model, tokenizer, mini.score.pack(tokenizer, docs, size=4))
    assert found == pytest.approx({task: 3 / 6, "math_add": 1 / 3})


def test_equal_counts_are_equal_and_scored_once(mini: SimpleNamespace) -> None:
    """Though 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 to a float: the smaller lambda wins."""
    values = {0.0: (0.3, 0.2, 0.1), 1.0: (0.1, 0.2, 0.3)}
    assert sum(values[0.0]) != sum(values[1.0])
    asked = []

    def accuracy(weights: float, split: str, tasks: Any, items: int) -> dict[str, float]:
        asked.append((weights, split, items))
        return dict(zip(tasks, values[weights], strict=True))

    run = SimpleNamespace(shifted=lambda term: term[0], accuracy=accuracy)
    direction = mini.cells.Direction(run, {})
    for _ in range(2):
        assert direction.search([0.0, 1.0], ("a", "b", "c"), 3) == (0.0, [0.2, 0.2])
    assert asked == [(0.0, "validation", 3), (1.0, "validation", 3)]


def test_plans(mini: SimpleNamespace) -> None:
    """n_i M / T validation items, as in the paper; the recipe behind a label."""
    assert mini.plan.used({"items": 100, "num_bases": 5}) == 50
    assert mini.plan.used({"items": 64, "num_bases": None, "budget": 3}) == 19
    assert mini.plan.used({"items": 64, "budget": None}) == 64
    annealed = {"basis": "ae", "decoder": "learned", "anneal_every": 500, "anneal_factor": 0.8}
    for label, keys in {
        "ae_adam_0.5": {"basis": "ae", "decoder": "learned", "temperature": 0.5},
        "ae_annealed": annealed,
        "ae_annealed_0.9": annealed | {"anneal_factor": 0.9},
        "ae_exact": {"basis": "ae", "solver": "exact"},
        "rand_select": {"basis": "rand_select"},
    }.items():
        assert mini.plan.settings(label) == keys
