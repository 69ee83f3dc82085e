"""evals/mini/compare.py: all of `tiny`, as typed, which takes minutes (slow); resuming; scores."""

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

COMPARE = Path(__file__).resolve().parent.parent / "compare.py"
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, str(COMPARE), "--out", str(out), "--device", "cpu", *options]


def run_in(out: Path, *options: str, code: int = 0) -> str:
    """The output of the command."""
    done = subprocess.run(
        command(out, *options), env=ENV, cwd=out, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == code, done.stderr[-4000:]
    return done.stdout + done.stderr if code else done.stdout


def times(out: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in out.glob("*/cells/*/*.json")}


def average(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


@pytest.mark.slow
def test_the_whole_comparison(mini: SimpleNamespace, tmp_path: Path) -> None:
    """Specialists can do their task, the base cannot; what is finished is not computed again."""
    out = tmp_path / "out"
    out.mkdir()
    written = run_in(out, "--preset", "tiny", "--workers", "2").split()
    records = [json.loads(file.read_text()) for file in times(out)]

    def one(**cell: Any) -> Any:
        (result,) = (r["result"] for r in records if cell.items() <= r["cell"].items())
        return result

    reference = one(kind="reference")
    own = reference["specialists"]
    assert set(own) == set(mini.data.TASKS) and min(own.values()) > 0.9
    assert average({task: reference["base"][task] for task in own}) < 0.4 * average(own)
    added = one(kind="addition", basis="none")["merges"]["ta"]["scales"]["bases"]
    assert 0.6 < average(added["test"]) / average(own) < 0.9
    assert max(added["validation"]) == added["validation"][added["grid"].index(added["lambda"])]
    forgotten = one(kind="negation", basis="plain")
    for task, scores in forgotten["tasks"].items():
        fallen = forgotten["start"][task] - scores["target"]
        assert fallen > max(0.0, scores["control_before"] - scores["control"]), task

    report = out / "report-tiny"
    assert {str(path) for path in report.iterdir()} == set(written)
    before, tables = times(out), (report / "tables.md").read_bytes()
    (picked,) = (file for file in before if file.name.startswith("online-magmax"))
    result = json.loads(picked.read_text())["result"]
    picked.unlink()
    run_in(out, "--preset", "tiny")
    after = times(out)
    assert {file for file in after if after[file] != before.get(file)} == {picked}
    assert json.loads(picked.read_text())["result"] == result
    run_in(out, "--preset", "tiny", "--as-is", "--report", str(tmp_path / "r"))
    for folder in (report, tmp_path / "r"):
        assert (folder / "tables.md").read_bytes() == tables
    assert times(out) == after
    assert "has no results of micro" in run_in(out, "--preset", "micro", "--as-is", code=1)


def left_over(folder: Path) -> list[int]:
    """The processes that work in a folder (Linux)."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder.resolve():
                found.append(int(process.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for processes in /proc")
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    options = ("--preset", "micro", "--seeds", "3", "--workers", "2", "--kind", "addition")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command(tmp_path, *options), env=ENV, cwd=tmp_path, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 600
        while len(times(tmp_path)) < 4 and process.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        process.kill()  # the parent alone: its workers have to notice
        process.wait()
    deadline = time.monotonic() + 60
    while left_over(tmp_path):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.1)
    before = times(tmp_path)
    assert before
    run_in(tmp_path, *options)
    after = times(tmp_path)
    assert len(after) > len(before) and before.items() <= after.items()


def test_results_are_of_one_definition(mini: SimpleNamespace, tmp_path: Path) -> None:
    """Another cell, other weights: another file."""
    from study.cells import Source, fingerprint, works

    cell = next(mini.plan.cells(mini.plan.PLANS["micro"], 0.3))
    cells = [cell, cell | {"items": 11}, cell | {"seed": 1}]
    prints = set()
    for content in (b"a", b"b"):
        (tmp_path / "model.safetensors").write_bytes(content)
        prints.add(fingerprint([tmp_path]))
    files = {
        work.file
        for models in prints
        for source in [Source(dict, (), tmp_path, models, "cpu", ("micro", "full", 0))]
        for work in works(source, cells, mini.compare.MEASURES, mini.plan.KEYS)
    }
    assert len(files) == 6


@pytest.mark.parametrize("which", [
    "addition balanced ta", "addition ae_exact_mixed ta", "negation balanced ", "online ae ",
    "online rand_select ", "online magmax ", "transfer pca_turned ", "transfer finetune ",
])  # fmt: skip
def test_each_kind_of_cell_is_measured(mini: SimpleNamespace, run: Any, which: str) -> None:
    kind, label, merge = which.split(" ")
    plan = mini.plan.PLANS["micro"]
    (cell, *_) = (c for c in mini.plan.cells(plan, 0.3)
                  if c["kind"] == kind and label in (c.get("basis"), c.get("how")))  # fmt: skip
    found = mini.compare.MEASURES[kind](run, cell)
    scores = found["merges"][merge]["scales"]["tasks"]["test"] if merge else found
    assert json.loads(json.dumps(found, allow_nan=False)) and len(scores) > 0


class Scripted:
    """A model that gives each prompt its answer, one token after another, then the end."""

    def __init__(self, tokenizer: Any, answers: dict[str, str]) -> None:
        self.vocab, self.eos = tokenizer.get_vocab(), tokenizer.eos_token_id
        self.lines = {
            tuple(tokenizer(prompt)["input_ids"]): [*tokenizer(answer)["input_ids"], self.eos]
            for prompt, answer in answers.items()
        }

    def parameters(self) -> Any:
        return iter([torch.zeros(0)])

    def __call__(self, input_ids: Any, past_key_values: Any = None, **_: Any) -> SimpleNamespace:
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
