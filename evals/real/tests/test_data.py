"""The commands for data and base, with small files and a server on this machine."""

import importlib
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import get_data
import pytest
import yaml
from click.testing import CliRunner
from real import tasks

SMOLLM2 = Path(get_data.__file__).parent
call = CliRunner().invoke
FILES = {"data/raw/TREC.train": "NUM:date Wann ändert\x85 es ?\n".encode("latin-1"),
         "data/raw/TREC.test": b"HUM:ind Who ?\nABBR:exp What ?\n"}  # fmt: skip
ITEMS = {
    "trec/train": [["Question: Wann ändert\x85 es ?\nType:", " number"]],
    "trec/test": [["Question: Who ?\nType:", " human"],
                  ["Question: What ?\nType:", " abbreviation"]],
}  # fmt: skip


def test_files_become_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = {path: sha256(data).hexdigest() for path, data in FILES.items()}
    about = {"repository": "we/us", "commit": "c0", "licence": "ours", "files": sums}
    given = tmp_path / "given"
    (given / "trec/raw").mkdir(parents=True)
    for path, data in FILES.items():
        (given / "trec/raw" / get_data.raw_name(path)).write_bytes(data)
    (tmp_path / "table.yml").write_text(yaml.safe_dump({"trec": about}, sort_keys=False))
    monkeypatch.setattr(get_data, "TABLE", tmp_path / "table.yml")
    out = tmp_path / "out"
    words = [str(out), "--raw", str(given), "--only=trec"]
    assert f"licence: ours\n{out / 'trec'}: 1 train, 2 test\n" in call(get_data.main, words).output
    for name, items in ITEMS.items():
        written = (out / f"{name}.jsonl").read_bytes().splitlines()
        assert [[*json.loads(line).values()] for line in written] == items
    assert call(get_data.main, words).output.count("exists: nothing to do") == 1
    raw = given / "trec/raw" / get_data.raw_name("data/raw/TREC.test")
    raw.write_bytes(b"")
    words[0] = str(tmp_path / "other")
    done = call(get_data.main, words)
    assert f": SHA-256 {sha256().hexdigest()}, expected SHA-256" in done.stderr
    assert done.exit_code == 1


def test_the_table_has_the_sets_of_the_benchmark() -> None:
    table = yaml.safe_load(get_data.TABLE.read_text())
    assert list(get_data.SETS) == list(table) == [*tasks.TASKS, *tasks.OUTSIDE]


def test_items_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SMOLLM2 / "eval")
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
    listed = yaml.safe_load((SMOLLM2 / "eval/smollm2.yaml").read_text())["task"]
    files = sorted(file.stem for file in (SMOLLM2 / "eval").glob("[!_]*.yaml"))
    assert sorted(f"smollm2_{name}" for name in files if name != "smollm2") == sorted(listed)
