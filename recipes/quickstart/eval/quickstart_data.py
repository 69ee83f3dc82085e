"""The held-out items of one task, for lm-eval's `custom_dataset`.

lm-eval resolves `data_files` against the working folder; this finds the data beside itself.
"""

from pathlib import Path

import datasets

DATA = Path(__file__).resolve().parent / "data"


def load(name: str, split: str = "test", **_: object) -> datasets.DatasetDict:
    """`--metadata '{"split": "val"}'` on lm_eval's command line scores the validation items."""
    files = {"test": f"{name}.jsonl", "validation": f"{name}.val.jsonl"}
    if split != "test":
        files["test"] = f"{name}.{split}.jsonl"
    return datasets.DatasetDict(
        {part: datasets.Dataset.from_json(str(DATA / file), keep_in_memory=True)
         for part, file in files.items()}
    )  # fmt: skip
