"""Names on the Hub in place of folders, and uploads, against a local server that plays the Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

import pytest
import torch
from commands import contents, recipe, refused, tvb, write
from huggingface_hub import close_session, constants, hf_api
from tiny import TASKS, family, load
from transformers import AutoModelForCausalLM

from tvb_mergekit import UserError, attach, remove
from tvb_mergekit import load as load_store

TOKEN = "hf_" + "x" * 34
UNREAD = ("pytorch_model.bin", "notes.md")
OTHER_COPY = "original/model.safetensors"  # which mergekit downloads, too
Files = dict[str, bytes]


class HubServer(ThreadingHTTPServer):
    """Repositories in memory: a history of files for each, by their revisions."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories: dict[str, dict[str, Files]] = {}
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

    def allowed(self, name: str) -> bool:
        given = self.headers.get("Authorization")
        there = name in self.server.repositories
        return there and (name not in self.server.private or given == f"Bearer {TOKEN}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
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

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") not in (f"Bearer {TOKEN}", None):
            return self.answer({"error": "Invalid token"}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(text)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repositories.setdefault(name, {"main": {}})
            private = asked.get("private") or asked.get("visibility") == "private"
            self.server.private |= {name} if private else set()
            return self.answer({"url": f"{self.server.address}/{name}", "name": name, "id": name})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name = "/".join(self.path.strip("/").split("/")[2:4])
        if "/preupload/" in self.path:
            how = {"shouldIgnore": False, "uploadMode": "regular"}
            made = [{"path": file["path"], **how} for file in json.loads(text)["files"]]
            return self.answer({"files": made})
        assert "/commit/" in self.path, self.path
        files: Files = {}
        deleted = []
        for line in map(json.loads, text.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
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


@pytest.fixture(scope="module")
def online(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """huggingface_hub with the Hub at the server and an empty cache, whose folder is returned."""
    home = tmp_path_factory.mktemp("home")
    changed = {
        "ENDPOINT": hub.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    close_session()  # the next one reads the proxies of the environment again
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setattr(constants, name, value)
        patch.setattr(hf_api.api, "endpoint", hub.address)
        patch.setenv("NO_PROXY", "*")
        patch.setenv("HF_TOKEN", TOKEN)
        yield home
    close_session()


@pytest.fixture(scope="module")
def pushed(
    hub: HubServer, online: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A base on the Hub, and a private store of its models, which `tvb push` uploads."""
    folder = tmp_path_factory.mktemp("made")
    how: dict[str, Any] = {"dtypes": (torch.bfloat16,), "scale": 0.01, "max_shard_size": "30KB"}
    base, models = family(folder, tasks=TASKS[:2], **how)
    others = dict.fromkeys((*UNREAD, OTHER_COPY), b"not read")
    others["chat_template.jinja"] = b"{{ messages }}"
    hub.commit("org/base", contents(base) | others)
    bases: dict[str, dict[str, Any]] = {"store": {"basis": "none"}}
    bases["bases"] = {"basis": "pca", "num_bases": 1}
    for name, keys in bases.items():
        plan = write(recipe("basis_ta", Path("org/base"), models, **keys), folder / name)
        tvb("build", plan, folder / name, "--quiet")
        sent = tvb("push", folder / name, f"me/{name}", "--private").output
        assert f"Uploaded: {hub.address}/me/{name}/commit/" in sent
    return {"base": base, "store": folder / "store", **dict(zip(TASKS, models, strict=False))}


def test_a_pushed_store_is_the_store_with_a_card(hub: HubServer, pushed: dict[str, Path]) -> None:
    files = dict(hub.repositories["me/store"]["main"])
    card = files.pop("README.md").decode()
    assert card.startswith('---\nbase_model: "org/base"\ntags: [merge, tvb-mergekit]\n---\n')
    assert "me/store: 2 tasks" in card and "math" in card and "me/store" in hub.private
    assert files == contents(pushed["store"])


def forget(hub: HubServer, cache: Path) -> None:
    """Empty the cache, and the list of what was downloaded."""
    shutil.rmtree(cache)
    hub.sent.clear()


NEEDED: dict[str, tuple[int, list[str], str]] = {
    # command -> exit code, folders that are downloaded, and what is said
    "export STORE OUT --task math --base BASE": (0, ["math"], "Written to"),
    "export STORE OUT --task maht": (1, [], "did you mean `math`?"),
    "inspect STORE": (0, ["math", "code"], "T = 2 task vectors"),
    "inspect me/bases": (0, [], "T = 2 task vectors"),
    "inspect org/base": (1, [], "the repository has no basis.json"),
}


@pytest.mark.parametrize("line", NEEDED)
def test_only_what_a_command_needs_is_downloaded(
    line: str, hub: HubServer, online: Path, pushed: dict[str, Path], tmp_path: Path
) -> None:
    code, folders, said = NEEDED[line]
    places = {"STORE": "me/store", "BASE": pushed["base"], "OUT": tmp_path / "out"}
    forget(hub, online)
    assert said in tvb(*(places.get(word, word) for word in line.split()), code=code).output
    assert {name.partition("/")[0] for name in hub.sent if "/" in name} == {*folders}
    basis = {name for name in hub.sent if "/" not in name}
    assert basis == ({"basis.json", "basis.safetensors"} if "repository" not in said else set())


def test_commands_read_the_hub_and_only_what_they_need(
    hub: HubServer,
    online: Path,
    pushed: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(hub, online)
    sha = hub.sha("me/store", "main")
    hub.commit("me/store", {"basis.json": b"{}"})  # later: the revision counts
    store, here, there = f"me/store@{sha}", tmp_path / "here", tmp_path / "there"
    tvb("export", store, tmp_path / "math", "--task", "math")
    files = {name for name in contents(pushed["base"]) if name.startswith("model")}
    assert {"config.json", *files} <= set(hub.sent)
    tvb("export", "me/bases", tmp_path / "basis", "--basis", 0)
    assert (tmp_path / "basis" / "chat_template.jinja").is_file()
    assert "T = 2 task vectors" in tvb("inspect", store).output
    assert not {"README.md", *UNREAD} & set(hub.sent)
    forget(hub, online)
    live = attach(AutoModelForCausalLM.from_pretrained("org/base"), store)
    live.use("math")
    live.verify()
    assert live.tasks == [*TASKS[:2]]
    assert not {"README.md", *UNREAD, OTHER_COPY} & set(hub.sent)
    cached = load_store(store)
    with pytest.raises(UserError, match="is in the Hugging Face cache: copy it"):
        remove(str(cached.path), "math")

    tvb("merge", pushed["store"], here, "--method", "add", "--quiet")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # mergekit asks for a base by name
    monkeypatch.delenv("HF_TOKEN")
    tvb("merge", store, there, "--method", "add", "--base", pushed["base"], "--quiet")
    for one, other in ((tmp_path / "math", pushed["math"]), (here, there)):
        states = load(one), load(other)
        assert states[0].keys() == states[1].keys()
        assert all(value.equal(states[1][name]) for name, value in states[0].items())
    assert not {"README.md", *UNREAD} & set(hub.sent)


def test_mistakes(
    hub: HubServer, pushed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        ("inspect", "me/nothing"): "me/nothing: no such folder",
        ("inspect", "me/store@none"): "me/store@none: no such folder",
        ("push", pushed["store"], "store"): "expected a repository of the Hub, USER/NAME",
        ("push", tmp_path, "me/new"): "is not a basis store",
        ("remove", tmp_path / "me/store", "--task", "math"): "no such folder",
        ("undo", tmp_path / "me/store"): "no such folder",
    }
    for words, expected in said.items():
        assert expected in refused(*words)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "Invalid" in refused("push", pushed["store"], "me/new")
    assert "me/new" not in hub.repositories and not (tmp_path / "me").exists()
    with mock.patch("huggingface_hub.snapshot_download", side_effect=KeyboardInterrupt):
        done = tvb("export", "me/other", "out", "--task", "math", code=130)
    assert done.stderr == "Interrupted.\n"


def test_a_push_deletes_files_of_removed_tasks_and_no_others(
    hub: HubServer, pushed: dict[str, Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(pushed["store"], store)
    hub.commit("me/less", {"LICENSE": b"mine"})
    for words in (["push", store, "me/less"], ["remove", store, "--task", "code"]):
        tvb(*words)
    mine = (store / ".env", store / ".git" / "config")
    for file in mine:  # is not uploaded
        file.parent.mkdir(exist_ok=True)
        file.write_text("secret")
    tvb("push", store, "me/less")
    for file in mine:
        file.unlink()
    files = dict(hub.repositories["me/less"]["main"])
    assert "1 task" in files.pop("README.md").decode() and files.pop("LICENSE") == b"mine"
    assert files == contents(store)
