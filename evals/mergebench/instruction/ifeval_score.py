"""IFEval's checks, as lm-eval has them, reported with `score`: strict accuracy by prompt."""

import json
import time
from typing import Any

import datasets
from lm_eval.tasks.ifeval import instructions_util, utils

Doc = dict[str, Any]
IFEVAL_SIZE = 541


def score(doc: Doc, results: list[str]) -> dict[str, Any]:
    """lm-eval's four verdicts on one response, the first of them also as `score`."""
    verdicts: dict[str, Any] = utils.process_results(doc, results)
    return {"score": float(verdicts["prompt_level_strict_acc"]), **verdicts}


def score_like(doc: Doc, results: list[str]) -> dict[str, Any]:
    """Score an item of ifeval-like-data, whose `kwargs` are one JSON text."""
    return score({**doc, "kwargs": json.loads(doc["kwargs"])}, results)


def check(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows. Ends the program, before any generation, if NLTK cannot split sentences."""
    tries = 1 if instructions_util.RANK == "0" else 60  # rank 0 may still be downloading
    for left in reversed(range(tries)):
        try:
            instructions_util.count_sentences("One. Two.")
            break
        except Exception as error:  # LookupError if missing, others if a file is damaged
            if left == 0:
                raise SystemExit(
                    "IFEval needs NLTK's `punkt_tab`, which cannot be loaded "
                    f"({type(error).__name__}) and which lm-eval could not download, even if it "
                    "says so. Run `python -m nltk.downloader punkt_tab` where there is a network, "
                    "and name the folder `nltk_data` that it writes in NLTK_DATA"
                ) from None
            time.sleep(1)
    return rows


def first_rows(rows: datasets.Dataset) -> datasets.Dataset:
    """The first 541 rows with distinct prompts, without those that the checks cannot be run on."""
    check(rows)
    prompts: set[str] = set()
    kept: list[int] = []
    for index, row in enumerate(rows):
        if len(kept) == IFEVAL_SIZE:
            break
        if row["prompt"] not in prompts and _can_be_scored(row):
            prompts.add(row["prompt"])
            kept.append(index)
    return rows.select(kept)


def _can_be_scored(row: Doc) -> bool:
    # A model wrote these rows, so a check may be unknown or its arguments unfit. Found only when
    # the responses are scored, that would cost the whole run.
    try:
        score_like(row, [""])
    except Exception:
        return False
    return True
