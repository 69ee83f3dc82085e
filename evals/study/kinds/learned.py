"""Cells of merges that learn from data, over all task vectors and over bases.

A task has `shots` validation items. M bases get M/T of them, as `tvb learn` draws them. Nothing is
chosen on test items.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from study.cells import Cell
from study.kinds.addition import climbed, itemized, mean_score, start_of
from study.kinds.matrices import LAMBDAS, MERGES, direction
from study.run import Doc, Run, Scores, Weights, built, means, settings
from tvb_mergekit.learn import gradients
from tvb_mergekit.learn.data import DataFile, read_data
from tvb_mergekit.learn.running import learn
from tvb_mergekit.learn.work import Request
from tvb_mergekit.plugin.document import from_mapping
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.store.routing import routed_model, routed_parameters, routers_in
from tvb_mergekit.tune import search

SHOTS = 64  # of the paper's experiments with language models
UNTUNED = 0.3  # where AdaMerging starts as published


@dataclass(frozen=True)
class Way:
    """A method with its options.

    Attributes:
        method: of `tvb learn`, or `ta`, or `oracle`: the recipe's merge with the MLPs of the right
            specialist, which routers would at best choose.
        options: of the request.
        scale: the recipe's `lambda_scale`.
        merge: the recipe's method, of `matrices.MERGES`.
    """

    title: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    scale: str = "tasks"
    merge: str = "ta"


WAYS = {
    "ta": Way("task arithmetic", "ta"),
    "fisher": Way("Fisher", "fisher"),
    "normalized": Way("Fisher, normalized", "fisher", {"normalize": True}),
    "regmean": Way("RegMean", "regmean"),
    "localize": Way("Localize-and-Stitch", "localize", scale="bases"),
    "dataless": Way("Localize-and-Stitch, dataless", "localize", {"dataless": True}, "bases"),
    "adamerging": Way("AdaMerging", "adamerging"),
    "atlas": Way("aTLAS", "atlas"),
    "wemoe": Way("WEMoE", "wemoe"),
    "wemoe_wudi_30": Way("WEMoE on WUDI, t = 30", "wemoe", merge="wudi_30"),
    "oracle": Way("MLPs of the right specialist", "oracle"),
    "oracle_wudi_30": Way("MLPs of the right specialist, WUDI", "oracle", merge="wudi_30"),
}
BY_MIXTURES = ("fisher", "regmean", "localize")
TUNED = ("ta", "adamerging", "wemoe", "oracle")  # begin at the best lambda


def cell_of(how: str, label: str, count: int, shots: int, tested: int, seed: int = 0) -> Cell:
    way = WAYS[how]
    options = dict(way.options)
    if label == "pca" and way.method in BY_MIXTURES and "dataless" not in options:
        options.setdefault("mixture", "equal")  # its encoder has negative weights
    cell = {"kind": "learned", "how": how, "basis": label, "num_bases": count, "seed": seed}
    cell |= {"shots": shots, "tested": tested, "scale": way.scale, "options": options}
    return cell | defaults(way.method)


def defaults(method: str) -> dict[str, Any]:
    """Settings of a method that are defined elsewhere, and that a cell depends on."""
    schedule = gradients.SCHEDULES.get(method)
    told: dict[str, Any] = {"method": method}
    if schedule is not None:
        told["schedule"] = {key: str(value) for key, value in asdict(schedule).items()}
    return told | ({"lambdas": [*LAMBDAS]} if method in TUNED else {})


class Data:
    """The files of examples of a cell, and the same as questions.

    Args:
        prompts: without the answers.
    """

    def __init__(self, run: Run, folder: Path, shots: int, prompts: bool = False) -> None:
        self.docs = {task: run.items(task, "validation")[:shots] for task in run.tasks}
        self.given = []
        for task, docs in self.docs.items():
            file = folder / f"{task}.jsonl"
            lines = [run.example(doc) for doc in docs]
            for line in lines if prompts else ():
                del line["response"]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            self.given.append(f"{task}={file}")
        self.files: list[DataFile] = read_data(self.given, run.tasks, prompts)

    def drawn(self, share: float) -> list[Doc]:
        """The items in a share of the data."""
        return [self.docs[f.task][k] for f in self.files for k in f.drawn(share, seed=0)]


def tuned(run: Run, vector: Weights, docs: Sequence[Doc], cell: Cell) -> float:
    """The best factor of a vector on some items."""
    packed = run.pack(docs)

    def score(by: float) -> float:
        run.set(run.shifted((by, vector)))
        return mean_score(means(run.ask(packed)), run.tasks)

    start = start_of(cell)
    if start is None:
        return search.grid(cell["lambdas"], score)[0]
    return climbed(cell["lambdas"], score, start)[0]


def recipe(run: Run, cell: Cell, by: float) -> dict[str, Any]:
    label = cell["basis"]
    size = {} if label == "none" else {"num_bases": cell["num_bases"], "seed": cell["seed"]}
    scale = {"lambda": by, "lambda_scale": cell["scale"]}
    merge = MERGES[WAYS[cell["how"]].merge]
    return {
        "merge_method": merge.method,
        "base_model": run.places["base"],
        "models": [{"model": run.places[task], "parameters": {"task": task}} for task in run.tasks],
        "parameters": settings(label) | size | scale | merge.settings,
        "dtype": "float32",
    }


def learned(
    run: Run, cell: Cell, out: Path, given: Sequence[str], by: float = UNTUNED, **options: Any
) -> tuple[Weights, dict[str, Any]]:
    """The merged model, and its learned.json."""
    written = recipe(run, cell, by)
    learn(
        Request(document=from_mapping(written), out=str(out),
                method=cell["method"], data=given,
                options=Options(device=run.device), **options)
    )  # fmt: skip
    weights = load_file(out / "model.safetensors", run.device)
    return weights, json.loads((out / "basis" / "learned.json").read_text())


def measure(run: Run, cell: Cell) -> dict[str, Any]:
    """One method over some bases."""
    options = cell["options"]
    share = cell["num_bases"] / len(run.tasks)
    with tempfile.TemporaryDirectory() as folder:
        method = cell["method"]
        files = Data(run, Path(folder), cell["shots"], method == "adamerging")
        docs, by, file = files.drawn(share), UNTUNED, None
        if method in TUNED:
            by, vector = best_of(run, cell, docs)
        if method in ("ta", "oracle"):
            count = len(cell["lambdas"]) * len(docs)
            found: dict[str, Any] = {"passes": {"forward": count, "backward": 0}}
            weights = run.shifted((by, vector))
        else:
            given = [] if options.get("dataless") else files.given
            out = Path(folder) / "out"
            weights, told = learned(run, cell, out, given, by, **options)
            found = {key: told[key] for key in ("passes", "seconds")}
            file = routers_in(out)
        with routed(run, file):
            asked = [(weights, run.tasks)]
            if method == "oracle":
                asked = [(with_mlps(run, weights, task), (task,)) for task in run.tasks]
            scores: Scores = {}
            for put, some in asked:
                scores |= run.scores(put, "test", some, cell["tested"])
            if run.routed:
                found["unseen"] = run.accuracy(weights, "test", run.unseen, cell["tested"])
        found |= {"each": each} if (each := itemized(cell, scores)) else {}
    return {"items": len(docs), "lambda": by, "test": means(scores), **found}


def with_mlps(run: Run, weights: Weights, task: str) -> Weights:
    """The weights with the MLPs of a specialist."""
    mlps, own = routed_parameters(run.model), run.task_vector(task)
    return {n: run.base[n] + own[n] if n in mlps else each for n, each in weights.items()}


@contextmanager
def routed(run: Run, file: Path | None) -> Iterator[None]:
    """Score with the routers of a file, if there is one."""
    run.routed = routed_model(run.model, file) if file else None
    try:
        if run.routed:
            run.routed.route()
        yield
    finally:
        if run.routed:
            run.routed.reset()
        run.routed = None


def best_of(run: Run, cell: Cell, docs: Sequence[Doc]) -> tuple[float, Weights]:
    """The best lambda of the recipe's merge over the cell's bases, and its vector."""
    how = WAYS[cell["how"]].merge
    vector = direction(run, built(run, cell), how)
    about = [how, *(cell[key] for key in ("basis", "num_bases", "seed", "lambdas"))]
    key = json.dumps([sorted(run.places.items()), about, docs])
    if key not in _found:
        _found[key] = tuned(run, vector, docs, cell)
    return _found[key], vector


_found: dict[str, float] = {}


KINDS = {"learned": measure}
