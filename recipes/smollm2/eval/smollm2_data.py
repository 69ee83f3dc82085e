"""The items of one task for lm-eval, from the folder that get_data.py makes.

`--metadata '{"data": "FOLDER"}'` on lm_eval's command line names the folder; by default it is
smollm2-data. The splits and the metric are those of evals/real.
"""

import sys
from pathlib import Path
from typing import Any

import datasets

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "evals"))

from real.tasks import metric, read

ITEMS = 100  # of each split


def load(name: str, data: str = "smollm2-data", **_: object) -> datasets.DatasetDict:
    """The first test and validation items.

    Raises:
        OSError: the folder lacks the task.
    """
    try:
        splits = read(Path(data), name)
    except OSError as error:
        raise OSError(f"{error}; run python recipes/smollm2/get_data.py {data}") from None
    return datasets.DatasetDict(
        {part: datasets.Dataset.from_list([{"task": name, **item._asdict()} for item in
                                           splits[part][:ITEMS]])
         for part in ("test", "validation")}
    )  # fmt: skip


def scored(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"score": metric(Path(), doc["task"])(results[0], doc["response"])}
