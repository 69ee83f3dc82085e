"""Names on the Hub in place of folders, with a folder that plays the Hub."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from commands import contents, recipe, refused, tvb, write
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from tiny import TASKS, family, load
from transformers import AutoModelForCausalLM

from tvb_mergekit import UserError, attach, build

UNREAD = ("pytorch_model.bin", "notes.md", "original/model.safetensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The remote repository `org/base`; downloads go to `cache` beside it."""
    remote = tmp_path / "remote"

    def download(name: str, revision: str | None = None, **patterns: Any) -> str:
        if name != "org/base" or revision not in (None, "main"):
            raise RepositoryNotFoundError(f"404: {name}", response=None)  # type: ignore[arg-type]
        for file in filter_repo_objects(sorted(contents(remote)), **patterns):
            (tmp_path / "cache" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(remote / file, tmp_path / "cache" / file)
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    family(tmp_path, tasks=TASKS[:2], dtypes=(torch.bfloat16,), scale=0.01, max_shard_size="30KB")
    (tmp_path / "base").rename(remote)
    (remote / "original").mkdir()
    for name in UNREAD:
        (remote / name).write_bytes(b"not read")
    (remote / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "cache"


def test_the_base_of_a_store_is_downloaded(hub: Path, tmp_path: Path) -> None:
    models = [tmp_path / task for task in TASKS[:2]]
    build(Path("org/base"), dict(zip(TASKS, models, strict=False)), "store")
    shutil.rmtree(hub)
    tvb("export", "store", "out", "--task", "math", "--quiet")
    states = load(tmp_path / "out"), load(models[0])
    assert states[0].keys() == states[1].keys()
    assert all(value.equal(states[1][name]) for name, value in states[0].items())
    assert 'base_model: "org/base"' in (tmp_path / "out/README.md").read_text()
    assert not {*UNREAD} & contents(hub).keys() and (hub / "chat_template.jinja").exists()
    live = attach(AutoModelForCausalLM.from_pretrained(hub), "store")
    assert live.tasks == [*TASKS[:2]]


def test_a_model_that_is_not_on_the_hub(hub: Path) -> None:
    for name in ("org/nothing", "org/base@none"):
        with pytest.raises(UserError, match=f"^{name}: no such folder .* nor to be had"):
            build(name, {"a": name})
    shutil.copytree("math", "base")
    file = write(recipe("basis_ta", Path("base"), [Path("code")]), Path("one"))
    tvb("build", file, "one", "--quiet")
    shutil.rmtree("base")
    assert "name the base of one with --base" in refused("export", "one", "out", "--all")
