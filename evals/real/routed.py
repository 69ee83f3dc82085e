"""The task of a prompt from the weights alone: a store's `route()` on test prompts.

Choices of the score (matrices, directions, texts of no task, threshold) are of validation items.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tvb_mergekit
from real.cells import Cell, Scores
from real.run import TEXT, Run
from real.tasks import OUTSIDE, read
from tvb_mergekit.store.router import THRESHOLD

QUICK = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
GERMAN = "Bitte lies den folgenden Text genau und antworte dann so kurz wie möglich.\n"


def stripped(prompt: str) -> str:
    """A prompt without its template: the names of its lines, and the last line that asks."""
    lines = prompt.split("\n")
    lines = [re.sub(r"^[A-Z][a-z]+: ", "", line) for line in lines[: max(1, len(lines) - 1)]]
    return re.sub(r" =$", "", "\n".join(lines))


def routed(run: Run, cell: Cell) -> dict[str, Any]:
    """One kind of prompts, answers of the routed store, or its times."""
    with tempfile.TemporaryDirectory() as folder:
        if cell["how"] == "quickstart":
            return quickstart(Path(folder) / "store", cell["tested"])
        live = attached(run, Path(folder) / "store")
        if cell["how"] == "speed":
            return speed(run, live)
        if cell["how"] == "answers":
            return {"items": answers(run, live, cell["tested"])}
        changes: dict[str, Callable[[str], str]] = {
            "templates": str, "stripped": stripped, "german": lambda prompt: GERMAN + prompt,
        }  # fmt: skip
        change = changes[cell["how"]]
        live.route()

        def ahead(task: str, change: Callable[[str], str] = str) -> list[tuple[str, float]]:
            items = read(run.data, task)["test"][: cell["tested"]]
            return [best(live, run.tokenizer(change(item.prompt))["input_ids"]) for item in items]

        chosen = {task: ahead(task, change) for task in run.tasks}
        asked = OUTSIDE if cell["how"] in ("templates", "stripped") else ()
        sets = [name for name in asked if (run.data / name / "test.jsonl").exists()]
        none = [margin for name in sets for _, margin in ahead(name)]
        some = [margin for each in chosen.values() for _, margin in each]
        right = {task: [float(name == task) for name, _ in each] for task, each in chosen.items()}
        kept = {"kept": above(some), "others kept": above(none)}
        return {"items": right, "none": auroc(some, none), **kept}


def attached(run: Run, store: Path) -> Any:
    """The base with a store of the specialists as they were trained."""
    recipe = run.recipe(store.with_suffix(".yml"), "basis_ta", {}, trained=True)
    words = ["build", recipe, str(store), "--quiet"]
    subprocess.run([sys.executable, "-m", "tvb_mergekit", *words], check=True)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            parameter.copy_(run.base[name])
    return tvb_mergekit.attach(run.model, store, run.own)


def best(live: Any, ids: list[int]) -> tuple[str, float]:
    """The task with the highest score, and how far it is ahead."""
    live.router.choose(input_ids=torch.tensor([ids]))
    (scores,) = live.router.scores
    first, second = sorted(scores, key=scores.__getitem__, reverse=True)[:2]
    return first, scores[first] - max(0.0, scores[second])


def auroc(more: list[float], less: list[float]) -> float | None:
    """The chance that one of `more` is larger than one of `less`."""
    if not less:
        return None
    pairs = torch.tensor(more)[:, None] - torch.tensor(less)
    return float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2)


def above(margins: list[float]) -> float | None:
    """The share for which a task answers, and not the base."""
    return sum(margin > THRESHOLD for margin in margins) / len(margins) if margins else None


def answers(run: Run, live: Any, tested: int) -> Scores:
    """The score of each item with the weights that its prompt chose."""
    live.route()
    chosen, found = dict[str, list[str | None]](), Scores()
    for task in run.tasks:
        prompts = [run.tokenizer(item.prompt)["input_ids"] for item in run.items(task, "test")]
        chosen[task] = [live.router.choose(input_ids=torch.tensor([each]))[0]
                        for each in prompts[:tested]]  # fmt: skip
    for task, names in chosen.items():
        by = {name: run.ask(live.use({name: 1.0} if name else {}), "test", [task], tested)[task]
              for name in dict.fromkeys(names)}  # fmt: skip
        asked = range(len(by[names[0]]))
        found[task] = [by[names[place]][place] for place in asked]
    return found


def speed(run: Run, live: Any) -> dict[str, float]:
    """CPU seconds of a choice, a pass and a change; tokens a second of `generate`."""
    ids = run.tokenizer((run.data / TEXT).read_text(encoding="latin-1"))["input_ids"][:100]
    prompt, how = torch.tensor([ids]), {"max_new_tokens": 32, "min_new_tokens": 32}
    more: dict[str, Any] = {**how, "do_sample": False, "pad_token_id": 0}
    tasks = iter([*run.tasks] * 5)

    def seconds(call: Callable[[], object], times: int = 5) -> float:
        taken = []
        for _ in range(times + 1):  # the first is warm-up
            started = time.process_time()
            call()
            taken.append(time.process_time() - started)
        return statistics.median(taken[1:])

    with torch.inference_mode():
        found = {"pass": seconds(lambda: run.model(prompt, use_cache=False)),
                 "plain": 32 / seconds(lambda: run.model.generate(prompt, **more))}  # fmt: skip
        found["change"] = seconds(lambda: live.use(next(tasks)))
        live.route(threshold=-torch.inf)
        found["choice"] = seconds(lambda: live.router.choose(input_ids=prompt))
        found["routed"] = 32 / seconds(lambda: run.model.generate(prompt, **more))
        live.reset()
    return found


def quickstart(store: Path, tested: int) -> dict[str, Any]:
    """The right task for prompts of the quickstart's eight full fine-tunes."""
    places = {place.name: place for place in sorted((QUICK / "models").iterdir())}
    base, items = places.pop("base"), dict[str, list[float]]()
    tvb_mergekit.build(base, places, store)
    live: Any = tvb_mergekit.attach(AutoModelForCausalLM.from_pretrained(base), store, base)
    live.route()
    tokenizer = AutoTokenizer.from_pretrained(base)
    for task in places:
        lines = (QUICK / "eval/data" / f"{task}.jsonl").read_text().splitlines()[:tested]
        prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
        items[task] = [float(best(live, ids)[0] == task) for ids in prompts]
    return {"items": items}
