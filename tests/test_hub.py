"""Names on the Hub in place of folders, and uploads, against a local server that plays the Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from commands import contents, recipe, write
from tiny import TASKS, family, load

TOKEN = "hf_" + "x" * 34
Files = dict[str, bytes]


class HubServer(ThreadingHTTPServer):
    """Repositories in memory: a history of files for each, by their revisions."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Answers)
        self.repositories: dict[str, dict[str, Files]] = {}
        self.blobs: Files = {}
        self.sent: list[str] = []  # files that were downloaded
        self.private: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, name: str, files: Files, deleted: Sequence[str] = ()) -> str:
        history = self.repositories.setdefault(name, {})
        kept = {**history.get("main", {}), **files}
        kept = {path: data for path, data in kept.items() if path not in deleted}
        sha = hashlib.sha1(json.dumps(sorted(kept)).encode() + b"".join(kept.values())).hexdigest()
        history["main"] = history[sha] = kept
        return sha

    def sha(self, name: str, revision: str) -> str:
        history = self.repositories[name]
        return next(k for k, v in history.items() if v is history[revision] and len(k) == 40)


class Answers(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, body: Any = b"", code: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, kind: str) -> None:
        self.answer({"error": "not found"}, 404, X_Error_Code=kind)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def allowed(self, name: str) -> bool:
        given = self.headers.get("Authorization")
        there = name in self.server.repositories
        return there and (name not in self.server.private or given == f"Bearer {TOKEN}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts == ["emptied"]:
            self.server.sent.append("|")
            return self.answer()
        if parts[:2] == ["api", "models"]:
            self.about("/".join(parts[2:4]), parts[4:])
        elif parts[2:3] == ["resolve"]:
            self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.missing("EntryNotFound")

    def about(self, name: str, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        if not self.allowed(name):
            return self.missing("RepoNotFound")
        if revision not in self.server.repositories[name]:
            return self.missing("RevisionNotFound")
        files = self.server.repositories[name][revision]
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": p, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for p, d in files.items()]  # fmt: skip
            return self.answer(tree, Content_Type="application/json")
        facts = {"id": name, "modelId": name, "sha": self.server.sha(name, revision)}
        facts |= {"siblings": [{"rfilename": path} for path in files], "private": False, "tags": []}
        return self.answer(facts, Content_Type="application/json")

    def file(self, name: str, revision: str, path: str) -> None:
        if not self.allowed(name):
            return self.missing("RepoNotFound")
        data = self.server.repositories[name].get(revision, {}).get(path)
        if data is None:
            return self.missing("EntryNotFound")
        if self.command == "GET":
            self.server.sent.append(path)
        sha = self.server.sha(name, revision)
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        return self.answer(data, ETag=etag, X_Repo_Commit=sha)

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self.body()
        self.answer()

    def do_POST(self) -> None:
        text = self.body()
        if self.headers.get("Authorization") not in (f"Bearer {TOKEN}", None):
            return self.answer({"error": "Invalid token"}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(text)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repositories.setdefault(name, {"main": {}})
            self.server.private |= {name} if asked.get("private") else set()
            return self.answer({"url": f"{self.server.address}/{name}", "name": name, "id": name})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name = "/".join(
            self.path.strip("/").removesuffix("/info/lfs/objects/batch").split("/")[2:4]
        )
        if "/preupload/" in self.path:
            made = [{"path": f["path"], "shouldIgnore": False, "uploadMode": "lfs" if
                     f["path"].endswith(".safetensors") else "regular"}
                    for f in json.loads(text)["files"]]  # fmt: skip
            return self.answer({"files": made})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [{"oid": o["oid"], "size": o["size"], "actions": {"upload": {
                "href": f"{self.server.address}/lfs/{o['oid']}"}}}
                for o in json.loads(text)["objects"]]  # fmt: skip
            return self.answer({"transfer": "basic", "objects": objects})
        assert "/commit/" in self.path, self.path
        files: Files = {}
        deleted = []
        for line in map(json.loads, text.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                deleted.append(value["path"])
        sha = self.server.commit(name, files, deleted)
        url = f"{self.server.address}/{name}/commit/{sha}"
        return self.answer({"success": True, "commitUrl": url, "commitOid": sha})


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    server = HubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


DRIVER = """
import json, os, sys
from click.testing import CliRunner
from huggingface_hub import constants
from tvb_mergekit.cli import commands
for line in sys.stdin:
    os.environ["HF_TOKEN"], constants.HF_HUB_OFFLINE, *given = json.loads(line)
    os.environ["HF_HUB_OFFLINE"] = str(int(constants.HF_HUB_OFFLINE))
    found = []
    for words in given:
        if words[0] == "-c":
            names = {}
            exec(words[1], names)
            found.append([0, names.get("said")])
        else:
            done = CliRunner().invoke(commands.main, words)
            found.append([done.exit_code, done.output])
    print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def run(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run commands, or Python code after `-c`, in one process, with the Hub at the server.

    Returns the exit code and the output of each, or what the code calls `said`.
    """
    home = tmp_path_factory.mktemp("home")
    env = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(home), "NO_PROXY": "*",
           "HF_HUB_DISABLE_XET": "1", "TVB_MERGEKIT_CACHE": "off", "HF_HUB_OFFLINE": "0",
           "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
    how: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    how |= {"stderr": (home / "log").open("w"), "env": env, "cwd": home, "text": True}
    driver: Any = subprocess.Popen([sys.executable, "-c", DRIVER], **how)

    def run(*commands: Sequence[object], token: str = TOKEN, offline: bool = False) -> list[Any]:
        words = [[*map(str, command)] for command in commands]
        driver.stdin.write(json.dumps([token, offline, *words]) + "\n")
        driver.stdin.flush()
        line = driver.stdout.readline()
        assert line, (home / "log").read_text()
        found: list[Any] = json.loads(line)
        return found

    yield run
    driver.kill()
    driver.communicate()


@pytest.fixture(scope="module")
def pushed(hub: HubServer, run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base on the Hub, and a private store of its models, which `tvb push` uploads."""
    folder = tmp_path_factory.mktemp("made")
    how: dict[str, Any] = {"dtypes": (torch.bfloat16,), "scale": 0.01, "max_shard_size": "30KB"}
    base, models = family(folder, tasks=TASKS[:2], **how)
    hub.commit("org/base", contents(base) | {"pytorch_model.bin": b"not read", "notes.md": b""})
    store = folder / "store"
    for name, place, keys in (("store", store, {}), ("bases", folder / "bases", {"num_bases": 1})):
        basis = "pca" if keys else "none"
        plan = write(recipe("basis_ta", Path("org/base"), models, basis=basis, **keys), folder)
        built, sent = run(
            ("build", plan, place, "--quiet"), ("push", place, f"me/{name}", "--private")
        )
        assert built[0] == sent[0] == 0, (built, sent)
        assert f"Uploaded: {hub.address}/me/{name}/commit/" in sent[1]
    return {"base": base, "store": store, **dict(zip(TASKS, models, strict=False))}


def test_a_pushed_store_is_the_store_with_a_card(hub: HubServer, pushed: dict[str, Path]) -> None:
    files = dict(hub.repositories["me/store"]["main"])
    card = files.pop("README.md").decode()
    assert card.startswith('---\nbase_model: "org/base"\ntags: [merge, tvb-mergekit]\n---\n')
    assert "me/store: 2 tasks" in card and "math" in card
    assert files == contents(pushed["store"])


# Empties the cache, and lets the server note it.
EMPTIED = ("-c", "import os, shutil, urllib.request as r; shutil.rmtree(os.environ['HF_HOME'] + "
           "'/hub', True); r.urlopen(os.environ['HF_ENDPOINT'] + '/emptied').close()")  # fmt: skip
NEEDED: dict[str, tuple[str, list[str], str]] = {
    "a task": ("export STORE OUT --task math --base BASE", ["math"], "Written to"),
    "an adapter": ("export STORE OUT --task math --lora --rank 2 --base BASE", ["math"], "rank"),
    "no such task": ("export STORE OUT --task maht", [], "did you mean `math`?"),
    "task vectors": ("inspect STORE", ["math", "code"], "T = 2 task vectors"),
    "bases": ("inspect me/bases", [], "T = 2 task vectors"),
    "a model": ("inspect org/base", [], "the repository has no basis.json"),
}


def test_only_what_a_command_needs_is_downloaded(
    hub: HubServer, run: Any, pushed: dict[str, Path], tmp_path: Path
) -> None:
    places = {"STORE": "me/store", "BASE": pushed["base"]}
    commands = [
        [tmp_path / str(k) if word == "OUT" else places.get(word, word) for word in line.split()]
        for k, (line, _, _) in enumerate(NEEDED.values())
    ]
    before = len(hub.sent)
    _, *found = run(EMPTIED, *(each for command in commands for each in (command, EMPTIED)))
    downloads, answers = " ".join(hub.sent[before:]).split("|")[1:-1], found[::2]
    for (_, folders, said), (_, told), sent in zip(
        NEEDED.values(), answers, downloads, strict=True
    ):
        assert said in told
        assert {name.partition("/")[0] for name in sent.split() if "/" in name} == {*folders}
        basis = {name for name in sent.split() if "/" not in name}
        assert basis == ({"basis.json", "basis.safetensors"} if "repository" not in said else set())


def test_commands_read_the_hub_and_only_what_they_need(
    hub: HubServer, run: Any, pushed: dict[str, Path], tmp_path: Path
) -> None:
    files = {name for name in contents(pushed["base"]) if name.startswith("model")}
    assert {"config.json", *files} <= set(hub.sent)
    sha = hub.sha("me/store", "main")
    hub.commit("me/store", {"basis.json": b"{}"})  # later: the revision counts
    store, here, there = f"me/store@{sha}", tmp_path / "here", tmp_path / "there"
    code = (
        "import transformers, tvb_mergekit as t; "
        "m = transformers.AutoModelForCausalLM.from_pretrained('org/base'); "
        f"live = t.attach(m, {store!r}); live.use('math'); live.verify(); "
        "said = str(live.tasks)"
    )
    changed = (
        f"import tvb_mergekit as t\nbases = t.load({store!r})\n"
        "try: t.remove(bases.path, 'math')\nexcept t.UserError as error: said = str(error)"
    )
    found = run(
        ("export", store, tmp_path / "math", "--task", "math"),
        ("inspect", store),
        ("export", "--model", pushed["math"], "--base", "org/base", tmp_path / "lora", "--lora",
         "--rank", 2),
        ("-c", code),
        ("-c", changed),
        ("merge", pushed["store"], here, "--method", "add", "--quiet"),
    )  # fmt: skip
    words = ("merge", store, there, "--method", "add", "--base", pushed["base"], "--quiet")
    (offline,) = run(words, token="", offline=True)  # mergekit asks the Hub for a base by name
    assert [code for code, _ in (*found, offline)] == [0] * 7, found
    assert "T = 2 task vectors" in found[1][1] and found[3][1] == str([*TASKS[:2]])
    assert "is in the Hugging Face cache: copy it" in found[4][1]
    for one, other in ((tmp_path / "math", pushed["math"]), (here, there)):
        states = load(one), load(other)
        assert states[0].keys() == states[1].keys()
        assert all(value.equal(states[1][name]) for name, value in states[0].items())
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
    assert not {"README.md", "pytorch_model.bin", "notes.md"} & set(hub.sent)


def test_mistakes(hub: HubServer, run: Any, pushed: dict[str, Path], tmp_path: Path) -> None:
    said = {
        ("inspect", "me/nothing"): "me/nothing: no such folder",
        ("inspect", "me/store@none"): "me/store@none: no such folder",
        ("push", pushed["store"], "store"): "expected a repository of the Hub, USER/NAME",
        ("push", tmp_path, "me/new"): "is not a basis store",
        ("remove", tmp_path / "me/store", "--task", "math"): "no such folder",
        ("undo", tmp_path / "me/store"): "no such folder",
    }
    found = [*zip(said.values(), run(*said), strict=True)]
    found += zip(["Invalid"], run(("push", pushed["store"], "me/new"), token="wrong"), strict=True)
    for expected, (code, told) in found:
        assert code == 1 and expected in told and len(told.splitlines()) == 1, told
    assert "me/new" not in hub.repositories and not (tmp_path / "me").exists()
    interrupted = (
        "from unittest import mock\nfrom click.testing import CliRunner\n"
        "from tvb_mergekit.cli.commands import main\n"
        "with mock.patch('huggingface_hub.snapshot_download', side_effect=KeyboardInterrupt):\n"
        "    done = CliRunner().invoke(main, ['export', 'me/store', 'out', '--task', 'math'])\n"
        "said = [done.exit_code, done.output]"
    )
    assert run(("-c", interrupted))[0][1] == [130, "Interrupted.\n"]


def test_a_push_deletes_files_of_removed_tasks_and_no_others(
    hub: HubServer, run: Any, pushed: dict[str, Path], tmp_path: Path
) -> None:
    store, push = tmp_path / "store", ("push", tmp_path / "store", "me/less")
    shutil.copytree(pushed["store"], store)
    hub.commit("me/less", {"LICENSE": b"mine"})
    found = run(push, ("remove", store, "--task", "code"), push)
    assert [code for code, _ in found] == [0] * 3, found
    files = dict(hub.repositories["me/less"]["main"])
    assert "1 task" in files.pop("README.md").decode() and files.pop("LICENSE") == b"mine"
    assert files == contents(store)
