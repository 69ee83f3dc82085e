"""The fifteen data sets, their splits and their metrics.

A folder holds `NAME/train.jsonl` and `NAME/test.jsonl` with `prompt` and `response`, and for
geoquery_sql the database in `raw/`. recipes/smollm2/get_data.py makes it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

TASKS = tuple(
    "sst2 trec snli_small banking77 snips_slots semeval2010_task8 multi30k_en_de geoquery_sql "
    "inflection_en commonsenseqa tweet_offensive nl2bash".split()
)
OUTSIDE = ("subj", "tweet_emotion", "cola")  # no specialists: data sets alone
# Adapters of these tasks are shipped. The licence of multi30k excludes commercial use, and tweets
# belong to their authors.
SHIPPED = tuple(
    "sst2 trec snli_small banking77 snips_slots semeval2010_task8 inflection_en nl2bash".split()
)
ALIKE = ("sst2", "trec", "snli_small", "semeval2010_task8")  # trained with one template, too
# Trained in full on 300 examples, too
SHORT = ("trec", "snips_slots", "inflection_en", "sst2")
GRADED = ("multi30k_en_de", "nl2bash")  # by chrF: hardly any answer equals the expected one
VALIDATION = 500  # items of train.jsonl, at most a sixth of them
DATABASE = "geoquery_sql/raw/data__geography-db.added-in-2020.sqlite"
STEPS = 20_000_000  # of SQLite's virtual machine, for one query
FUNCTIONS = {"count", "max", "min", "sum", "avg", "total", "abs", "like", "round"}

Score = Callable[[str, str], float]  # of an answer and the expected response


class Item(NamedTuple):
    prompt: str
    response: str


def read(folder: Path, task: str) -> dict[str, list[Item]]:
    """The items of `train`, `validation` and `test`.

    The hash of a prompt decides the order, since some files are sorted by their answers. Validation
    is the beginning of train.jsonl. No two splits share a prompt, and no two test items do.
    """
    given, test = (_items(folder / task / f"{split}.jsonl") for split in ("train", "test"))
    for items in (given, test):
        items.sort(key=lambda item: hashlib.sha256(item.prompt.encode()).digest())
    test = list({item.prompt: item for item in test}.values())
    asked = {item.prompt for item in test}
    given = [item for item in given if item.prompt not in asked]
    count = min(VALIDATION, len(given) // 6)
    validation = given[:count]
    asked = {item.prompt for item in validation}
    train = [item for item in given[count:] if item.prompt not in asked]
    return {"train": train, "validation": validation, "test": test}


def _items(path: Path) -> list[Item]:
    records = map(json.loads, path.read_bytes().splitlines())
    return [Item(record["prompt"], record["response"]) for record in records]


def stripped(prompt: str) -> str:
    """A prompt without its template: the names of its lines, and the last line that asks."""
    lines = prompt.split("\n")
    lines = [re.sub(r"^[A-Z][a-z]+: ", "", line) for line in lines[: max(1, len(lines) - 1)]]
    return re.sub(r" =$", "", "\n".join(lines))


def common(prompt: str) -> str:
    """A prompt with the one template of all tasks."""
    return f"Text: {stripped(prompt)}\nAnswer:"


def metric(folder: Path, task: str) -> Score:
    """The score of one answer, between 0 and 1."""
    if task == "geoquery_sql":
        database = folder / DATABASE
        return lambda answer, response: float(same_result(database, answer, response))
    return chrf if task in GRADED else exact


def exact(answer: str, response: str) -> float:
    return float(answer.split() == response.split())


def chrf(answer: str, response: str) -> float:
    """The sentence chrF2 of sacrebleu."""
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().sentence_score(answer.strip(), [response.strip()]).score) / 100


def same_result(database: Path, answer: str, response: str) -> bool:
    """Whether two queries have the same rows, in any order; false if the answer fails.

    A few expected queries have no rows, or are not SQLite's. The texts are compared then.
    """
    rows = []
    for text in (response, answer):
        try:
            rows.append(Counter(query(database, text)))
        except (sqlite3.Error, sqlite3.Warning, ValueError):
            rows.append(Counter())
    return rows[0] == rows[1] if rows[0] else bool(exact(answer, response))


def query(database: Path, text: str) -> Sequence[tuple[object, ...]]:
    """The rows of one SELECT that a model may have written, in a read-only connection.

    The connection permits SELECT with the functions in FUNCTIONS, and STEPS limits a query: what
    asks for more is an error.
    """
    reading = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}

    def allowed(action: int, table: str | None, name: str | None, *_: str | None) -> int:
        function = action == sqlite3.SQLITE_FUNCTION and (name or "").lower() in FUNCTIONS
        return sqlite3.SQLITE_OK if action in reading or function else sqlite3.SQLITE_DENY

    address = f"file:{quote(str(database.resolve()))}?mode=ro&immutable=1"
    connection = sqlite3.connect(address, uri=True)
    try:
        connection.set_authorizer(allowed)
        connection.set_progress_handler(lambda: 1, STEPS)
        return connection.execute(text.strip()).fetchall()
    finally:
        connection.close()
