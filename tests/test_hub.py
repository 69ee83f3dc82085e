"""Names on the Hub in place of folders, against a local server that plays the Hub."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from commands import contents, recipe, tvb, write
from huggingface_hub import close_session, constants, hf_api
from tiny import TASKS, family, load
from transformers import AutoModelForCausalLM

from tvb_mergekit import UserError, attach, build

UNREAD = ("pytorch_model.bin", "notes.md")
OTHER_COPY = "original/model.safetensors"  # which mergekit downloads, too
Files = dict[str, bytes]


class HubServer(ThreadingHTTPServer):
    """Repositories in memory: a history of files for each, by their revisions."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories: dict[str, dict[str, Files]] = {}
        self.sent: list[str] = []  # files that were downloaded

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
        return name in self.server.repositories

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
        yield home
    close_session()


@pytest.fixture(scope="module")
def made(hub: HubServer, online: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base on the Hub, its models, and a store of them."""
    folder = tmp_path_factory.mktemp("made")
    how: dict[str, Any] = {"dtypes": (torch.bfloat16,), "scale": 0.01, "max_shard_size": "30KB"}
    _, models = family(folder, tasks=TASKS[:2], **how)
    others = dict.fromkeys((*UNREAD, OTHER_COPY), b"not read")
    others["chat_template.jinja"] = b"{{ messages }}"
    hub.commit("org/base", contents(folder / "base") | others)
    plan = write(recipe("basis_ta", Path("org/base"), models, basis="none"), folder / "store")
    tvb("build", plan, folder / "store", "--quiet")
    shutil.rmtree(folder / "base")
    return {"store": folder / "store", **dict(zip(TASKS, models, strict=False))}


def test_the_base_of_a_store_is_downloaded(
    hub: HubServer, online: Path, made: dict[str, Path], tmp_path: Path
) -> None:
    shutil.rmtree(online)
    hub.sent.clear()
    store, one = made["store"], tmp_path / "math"
    tvb("export", store, one, "--task", "math")
    states = load(one), load(made["math"])
    assert states[0].keys() == states[1].keys()
    assert all(value.equal(states[1][name]) for name, value in states[0].items())
    assert 'base_model: "org/base"' in (one / "README.md").read_text()
    live = attach(AutoModelForCausalLM.from_pretrained("org/base"), store)
    assert live.tasks == [*TASKS[:2]]
    assert not {*UNREAD, OTHER_COPY} & set(hub.sent)


def test_a_model_that_is_not_on_the_hub(online: Path) -> None:
    for name in ("org/nothing", "org/base@none"):
        with pytest.raises(UserError, match=f"^{name}: no such folder .* nor to be had"):
            build(name, {"a": name})
