"""The task of a prompt from the weights alone: a store's `route()` on test prompts.

Choices of the score (matrices, directions, texts of no task, threshold) are of validation items.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tvb_mergekit
from real.cells import Cell, Scores
from real.run import Run
from real.tasks import OUTSIDE, common, stripped
from tvb_mergekit.store import routing

QUICK = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
GERMAN = "Bitte lies den folgenden Text genau und antworte dann so kurz wie möglich.\n"
TEXT = "subj/raw/data__raw__subj.objective"  # of no task with a specialist
LONG = 571  # tokens of it after a prompt
# How -> what becomes of a prompt
CHANGES: dict[str, Callable[[str], str]] = {
    "templates": str, "stripped": stripped, "common": common, "german": GERMAN.__add__,
    "answers": str, "long": str, "long_all": str, "quickstart": str,
    "quickstart_common": lambda prompt: "do" + prompt[prompt.index(":") :],
}  # fmt: skip


def routed(run: Run, cell: Cell) -> dict[str, Any]:
    """One kind of prompts, answers of the routed store, or its times."""
    how, tested = cell["how"], cell["tested"]
    with tempfile.TemporaryDirectory() as folder:
        store, tokenizer, prompts = Path(folder) / "store", run.tokenizer, prompts_of(run)
        if how.startswith("quickstart"):
            live, tokenizer, prompts = quickstart(store)
        else:
            live = attached(run, store)
        if how == "speed":
            return speed(run, live)
        live.route()
        after = plain(run, LONG) if how.startswith("long") else []
        ends = 10**6 if how == "long_all" else routing.ENDS

        def seen(task: str, change: Callable[[str], str]) -> list[dict[str, float]]:
            """The scores of the first prompts of a task."""
            ids = tokenizer([change(prompt) for prompt in prompts[task][:tested]])["input_ids"]
            return [scored(live, each + after) for each in ids]

        with patch.object(routing, "ENDS", ends):
            found = {task: seen(task, CHANGES[how]) for task in live.tasks}
            asked = OUTSIDE if how in ("templates", "stripped") else ()
            if how == "answers":
                return {"items": answers(run, live, found)}
            none = [margin(own) for task in asked if task in prompts for own in seen(task, str)]
    some = [margin(own) for each in found.values() for own in each]
    right = {task: [float(best(own) == task) for own in each] for task, each in found.items()}
    pairs = [statistics.fmean(own[one] > own[other] for one, other in (pair, pair[::-1])
                              for own in found[one])
             for pair in itertools.combinations(found, 2)]  # fmt: skip
    kept = {"kept": above(some), "others kept": above(none), "pair": min(pairs)}
    return {"items": right, "none": auroc(some, none), **kept}


def prompts_of(run: Run) -> dict[str, list[str]]:
    """The test prompts of the tasks and of the sets without one, as far as these are there."""
    sets = [name for name in OUTSIDE if (run.data / name / "test.jsonl").exists()]
    return {t: [item.prompt for item in run.items(t, "test")] for t in (*run.tasks, *sets)}


def plain(run: Run, count: int) -> list[int]:
    """The first tokens of a plain text."""
    text = (run.data / TEXT).read_text(encoding="latin-1")
    return list(run.tokenizer(text)["input_ids"][:count])


def attached(run: Run, store: Path) -> Any:
    """The base with a store of the specialists as they were trained."""
    recipe = run.recipe(store.with_suffix(".yml"), "basis_ta", {}, trained=True)
    words = ["build", recipe, str(store), "--quiet"]
    subprocess.run([sys.executable, "-m", "tvb_mergekit", *words], check=True)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            parameter.copy_(run.base[name])
    return tvb_mergekit.attach(run.model, store, run.own)


def scored(live: Any, ids: list[int]) -> dict[str, float]:
    """The score of each task for one prompt."""
    live.choose(input_ids=torch.tensor([ids]))
    return dict(live.scores[0])


def best(scores: dict[str, float]) -> str:
    return max(scores, key=scores.__getitem__)


def margin(scores: dict[str, float]) -> float:
    """How far the highest score is ahead of the second, and of 0."""
    first, second = sorted(scores.values(), reverse=True)[:2]
    return first - max(0.0, second)


def auroc(more: list[float], less: list[float]) -> float | None:
    """The chance that one of `more` is larger than one of `less`."""
    if not less:
        return None
    pairs = torch.tensor(more)[:, None] - torch.tensor(less)
    return float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2)


def above(margins: list[float]) -> float | None:
    """The share for which a task answers, and not the base."""
    return sum(margin > routing.THRESHOLD for margin in margins) / len(margins) if margins else None


def answers(run: Run, live: Any, found: dict[str, list[dict[str, float]]]) -> Scores:
    """The score of each item with the weights that its prompt chose."""
    items = Scores()
    for task, each in found.items():
        names = [best(own) if margin(own) > routing.THRESHOLD else None for own in each]
        by = {name: run.ask(live.use(name or {}), "test", [task], len(each))[task]
              for name in dict.fromkeys(names)}  # fmt: skip
        items[task] = [by[names[place]][place] for place in range(len(by[names[0]]))]
    return items


def speed(run: Run, live: Any) -> dict[str, float]:
    """CPU seconds of a choice, a pass and a change; tokens that `generate` makes in one."""
    torch.set_num_threads(1)
    prompt, tasks = torch.tensor([plain(run, 100)]), iter([*run.tasks] * 5)
    more: Any = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}

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
        found["choice"] = seconds(lambda: live.choose(input_ids=prompt))
        found["routed"] = 32 / seconds(lambda: run.model.generate(prompt, **more))
        live.reset()
    return found


def quickstart(store: Path) -> tuple[Any, Any, dict[str, list[str]]]:
    """The quickstart's base with a store of its full fine-tunes; its tokenizer and prompts."""
    places = {place.name: str(place) for place in sorted((QUICK / "models").iterdir())}
    base, prompts = places.pop("base"), dict[str, list[str]]()
    tvb_mergekit.build(base, places, store)
    live = tvb_mergekit.attach(AutoModelForCausalLM.from_pretrained(base), store, base)
    for task in places:
        lines = (QUICK / "eval/data" / f"{task}.jsonl").read_text().splitlines()
        prompts[task] = [json.loads(line)["prompt"] for line in lines]
    return live, AutoTokenizer.from_pretrained(base), prompts
