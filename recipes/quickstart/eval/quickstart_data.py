"""The held-out items of one task, for lm-eval's `custom_dataset`.

lm-eval resolves `data_files` against the working folder; this finds the data beside itself.
"""

from pathlib import Path

import datasets

DATA = Path(__file__).resolve().parent / "data"


def load(name: str, split: str = "test", **_: object) -> datasets.DatasetDict:
    """`--metadata '{"split": "val"}'` on lm_eval's command line scores the validation items."""
    path = DATA / (f"{name}.jsonl" if split == "test" else f"{name}.{split}.jsonl")
    items = datasets.Dataset.from_json(str(path), keep_in_memory=True)
    return datasets.DatasetDict({"test": items})
