"""The items of recipes/smollm2/eval for lm-eval."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes/smollm2"


def test_items_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPE / "eval")
    data: Any = importlib.import_module("smollm2_data")
    (tmp_path / "sst2").mkdir()
    for split, count in (("train", 24), ("test", 120)):
        items = [{"prompt": f"{split} {i}:", "response": f" {i}"} for i in range(count)]
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (tmp_path / "sst2" / f"{split}.jsonl").write_text(lines)
    loaded = data.load("sst2", str(tmp_path))
    assert {part: len(items) for part, items in loaded.items()} == {"test": 100, "validation": 4}
    doc = loaded["test"][0]
    for answer, score in ((doc["response"], 1.0), (doc["response"] + "\n", 1.0), ("no", 0.0)):
        assert data.scored(doc, [answer]) == {"score": score}
    with pytest.raises(OSError, match=r"run python recipes/smollm2/get_data\.py"):
        data.load("trec", str(tmp_path))
    listed = yaml.safe_load((RECIPE / "eval/smollm2.yaml").read_text())["task"]
    files = sorted(file.stem for file in (RECIPE / "eval").glob("[!_]*.yaml"))
    assert sorted(f"smollm2_{name}" for name in files if name != "smollm2") == sorted(listed)
