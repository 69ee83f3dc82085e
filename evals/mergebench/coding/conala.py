"""CoNaLa as bigcode-evaluation-harness runs it: two shots, one line of Python, BLEU.

The prompts are those of https://github.com/bigcode-project/bigcode-evaluation-harness
(bigcode_eval/tasks/conala.py). The score is that of
https://github.com/huggingface/evaluate/tree/main/metrics/bleu with `max_order=4, smooth=True`.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import datasets
from huggingface_hub import hf_hub_download
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

SHOTS = (
    ("convert a list of integers into a single integer", "r = int(''.join(map(str, x)))"),
    ("how to convert a datetime string back to datetime object?",
     "datetime.datetime.strptime(str, '%m/%d/%Y')"),
)  # fmt: skip
# bigcode's prompt is a Python string over several lines, whose indentation became a part of it.
PAD = " " * 19
ORDERS = (1, 2, 3, 4)

_tokenize = Tokenizer13a()  # type: ignore[no-untyped-call]


def load(**_: object) -> datasets.DatasetDict:
    """The curated test split, 500 items: `question_id`, `intent`, `rewritten_intent`, `snippet`.

    Beside the file the repository has a script to load it, which datasets no longer runs.
    """
    path = hf_hub_download(
        "neulab/conala", "data/conala-paired-test.json", repo_type="dataset",
        revision="fbc749f1c537e5c3834e93b15784302e331debe2",
    )  # fmt: skip
    items = datasets.Dataset.from_json(path, keep_in_memory=True)
    return datasets.DatasetDict({"test": items})


def prompt(doc: dict[str, Any]) -> str:
    intent: str = doc["rewritten_intent"] or doc["intent"]
    text = "Answer the following instructions in one line of Python code:\n"
    for instruction, solution in SHOTS:
        text += f"\nInstruction:\n{instruction}{PAD}\nSolution:\n{solution}{PAD}"
    return f"{text}\nInstruction:\n{intent.strip()}{PAD}\nSolution:\n"


def pair(doc: dict[str, Any], results: list[str]) -> dict[str, tuple[str, str]]:
    return {"score": (results[0].split("\n")[0].strip(), doc["snippet"])}


def _ngrams(tokens: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def bleu(pairs: Iterable[tuple[str, str]]) -> float:
    """BLEU-4 of (prediction, reference) over the corpus, 0 to 1, with the smoothing of Lin and Och
    (2004) at every order: (matches + 1) / (n-grams + 1). sacrebleu, which adds nothing at order 1,
    cannot say this."""
    matches, possible = [0] * len(ORDERS), [0] * len(ORDERS)
    said_length = meant_length = 0
    for prediction, reference in pairs:
        said, meant = _tokenize(prediction).split(), _tokenize(reference).split()
        said_length += len(said)
        meant_length += len(meant)
        for i, n in enumerate(ORDERS):
            found = _ngrams(said, n)
            matches[i] += (found & _ngrams(meant, n)).total()
            possible[i] += found.total()
    if said_length == 0:
        return 0.0
    logs = [math.log((m + 1) / (p + 1)) for m, p in zip(matches, possible, strict=True)]
    brevity = min(0.0, 1 - meant_length / said_length)
    return math.exp(brevity + sum(logs) / len(ORDERS))
