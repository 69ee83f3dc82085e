"""The items of the safety tasks, for the model and for the judge.

A row has three columns: `prompt` goes to the model, `judged` is the request for the judge, and
`unsafe` says whether the request is harmful. No prompt is kept in this repository. WildGuardTest is
a gated data set of the Hub. The others are files of safety-eval, in MergeBench's fork. Each is
downloaded once, into $MERGEBENCH_CACHE or else the cache of the Hugging Face libraries, or read
from the folder $MERGEBENCH_DATA.

Mistakes of a user end the program with one line.
"""

from __future__ import annotations

import http.client
import logging
import os
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pandas
from huggingface_hub import cached_assets_path, is_offline_mode

COMMIT = "2920bb85a8a8390144b9256f697395f81b94822e"
FILES = (
    f"https://raw.githubusercontent.com/nouhadziri/safety-eval-fork/{COMMIT}"
    "/evaluation/tasks/generation/"
)
WILDGUARDMIX = "allenai/wildguardmix"
TYPES = {"prompt": "string", "judged": "string", "unsafe": "bool"}
FEATURES = datasets.Features({name: datasets.Value(kind) for name, kind in TYPES.items()})
Row = Mapping[str, Any]

log = logging.getLogger(__name__)


def wildguardtest(**_: object) -> datasets.DatasetDict:
    """The harmful prompts of WildGuardTest that have both labels of harm."""
    try:
        rows = datasets.load_dataset(WILDGUARDMIX, "wildguardtest", split="test")
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, FileNotFoundError) as error:
        raise SystemExit(
            f"{WILDGUARDMIX} is gated, or the Hub is out of reach ({_first_line(error)}): accept"
            f" its terms at https://huggingface.co/datasets/{WILDGUARDMIX}, log in with"
            " `hf auth login` and run once online"
        ) from error
    kept = (row for row in rows if row["response_harm_label"] is not None)
    return _items(
        (_item(row["prompt"]) for row in kept if row["prompt_harm_label"] == "harmful"), 749
    )


def harmbench(**_: object) -> datasets.DatasetDict:
    """HarmBench's behaviours of the test set, sent without their context strings."""
    rows = _rows("harmbench/harmbench_behaviors_text_test.csv", "Behavior")
    return _items((_item(row["Behavior"]) for row in rows), 320)


def do_anything_now(**_: object) -> datasets.DatasetDict:
    """Jailbreaks; the judge sees the plain request within."""
    rows = _rows("do_anything_now/do_anything_now_jailbreak.jsonl", "adversarial", "vanilla")
    return _items((_item(row["adversarial"], row["vanilla"]) for row in rows), 300)


def xstest(**_: object) -> datasets.DatasetDict:
    """Safe requests that sound unsafe, and their unsafe contrasts."""
    rows = _rows("xstest/exaggerated_safety.json", "prompt", "type")
    return _items((_item(row["prompt"], unsafe="contrast" in row["type"]) for row in rows), 450)


def wildjailbreak(**_: object) -> datasets.DatasetDict:
    """safety-eval's `wildjailbreak:harmful`, for validation; the judge sees the plain request."""
    rows = _rows("wildjailbreak/harmful.jsonl", "adversarial", "vanilla")
    return _items(_item(row["adversarial"], row["vanilla"]) for row in rows)


def _item(prompt: str, judged: str | None = None, unsafe: bool = True) -> dict[str, Any]:
    return {"prompt": prompt, "judged": prompt if judged is None else judged, "unsafe": unsafe}


def _items(items: Iterable[Row], expected: int | None = None) -> datasets.DatasetDict:
    """As lm-eval's test split, with a warning if the number is not MergeBench's."""
    found = list(items)
    if expected not in (None, len(found)) and "MERGEBENCH_DATA" not in os.environ:
        log.warning("%d items, but MergeBench had %d: the data have changed", len(found), expected)
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(found, features=FEATURES)})


def _rows(file: str, *columns: str) -> list[dict[str, Any]]:
    """The columns of one of safety-eval's files, row by row; downloaded if it is missing."""
    url, own = FILES + file, os.environ.get("MERGEBENCH_DATA")
    folder = Path(own) if own else cached_assets_path(
        "tvb-mergekit", "mergebench", COMMIT, assets_dir=os.environ.get("MERGEBENCH_CACHE")
    )  # fmt: skip
    path = folder / Path(file).name
    try:
        if not own and not path.is_file():
            _download(url, path)
        if path.suffix == ".csv":
            table = pandas.read_csv(path, dtype=str)
        else:
            table = pandas.read_json(path, lines=path.suffix == ".jsonl", dtype=False)
        rows: list[dict[str, Any]] = table[list(columns)].to_dict("records")
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise SystemExit(
            f"{path} cannot be read ({_first_line(error)}): put {url} there, or into a folder that"
            " MERGEBENCH_DATA names"
        ) from error
    return rows


def _download(url: str, path: Path) -> None:
    if is_offline_mode():
        raise ConnectionError("HF_HUB_OFFLINE is set")
    with urllib.request.urlopen(url, timeout=60) as reply:
        content = reply.read()
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    os.replace(part, path)  # whole or not at all, whoever else is downloading


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
