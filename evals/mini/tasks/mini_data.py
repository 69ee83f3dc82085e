"""The held-out items and the score of one task, for lm-eval.

The items are those that train.py wrote into `RUN/data`: MINI_DATA names that folder, or
`--metadata '{"data": "RUN/data", "split": "validation"}'` on lm_eval's command line does.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets


def _definition() -> ModuleType:
    """../data.py, which also scores in train.py and score.py; its folder is on no path here."""
    name = "tvb_mini_data"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, Path(__file__).resolve().parent.parent / "data.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # its dataclass looks itself up there
        spec.loader.exec_module(module)
    return sys.modules[name]


def load(
    task: str, data: str | None = None, split: str = "test", **_: object
) -> datasets.DatasetDict:
    folder = data or os.environ.get("MINI_DATA")
    if folder is None:
        raise ValueError("set MINI_DATA to the folder RUN/data of evals/mini/train.py")
    found = {}
    for name, part in (("test", split), ("validation", "validation")):
        path = Path(folder) / f"{task}.{part}.jsonl"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: is MINI_DATA a folder RUN/data of evals/mini/train.py?"
            )
        found[name] = datasets.Dataset.from_json(str(path), keep_in_memory=True)
    return datasets.DatasetDict(found)


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"score": float(_definition().correct(doc, results[0]))}
