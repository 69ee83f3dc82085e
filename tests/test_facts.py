"""`basis.json`: its schema against docs/files.md, its checksum, and stores of earlier versions."""

import importlib.metadata
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from commands import Result, merge, recipe
from safetensors.torch import save_file
from tiny import TASKS, load

from tvb_mergekit.errors import UserError
from tvb_mergekit.store import facts

HERE = Path(__file__).parent
MODELS = (facts.Facts, facts.StoreRecord, facts.FileRecord)


def words(kind: Any) -> str:
    """An annotation as docs/files.md writes it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        first, rest = words(arguments[0]), words(arguments[1])
        return f"{first}{',' if ' of ' in first else ''} or {rest}"
    if origin is typing.Literal:
        return " or ".join(f'"{each}"' for each in arguments)
    if origin in (list, dict):
        inner = words(arguments[-1])
        name = "list" if origin is list else "object"
        return name if inner == "Any" else f"{name} of {f'({inner})' if ' ' in inner else inner}"
    return "null" if kind is type(None) else str(kind.__name__)


def documented(title: str) -> dict[str, str]:
    """Key -> type of the table under a heading of docs/files.md."""
    text = (HERE.parent / "docs/files.md").read_text()
    section = re.split(rf"^#+ {title}$", text, flags=re.M)[1]
    section = re.split(r"^#", section, maxsplit=1, flags=re.M)[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", section, flags=re.M)
    assert all(meaning.strip() for _, _, meaning in rows)
    return {key: kind for key, kind, _ in rows}


@pytest.mark.parametrize("model", MODELS)
def test_the_schema_is_the_documented_one(model: type[pydantic.BaseModel]) -> None:
    hints = typing.get_type_hints(model, include_extras=True)
    wanted = {
        key: words(hints[key]) + ("" if field.is_required() else "; optional")
        for key, field in model.model_fields.items()
    }
    assert documented("basis.json" if model is facts.Facts else model.__name__) == wanted
    assert set(facts.StoreFacts.model_fields) == set(facts.Facts.model_fields)


def test_facts_are_a_mapping_of_the_keys_in_the_file() -> None:
    file = HERE / "facts/basis.json"
    found, plain = facts.read_facts(file), json.loads(file.read_text())
    assert list(found) == list(plain) and len(found) == len(plain)
    assert found["loss"] is found.loss and found["store"]["dtype"] == "float32"
    assert "from_store" not in found and found.get("from_store") is None
    with pytest.raises(KeyError):
        found["nothing"]
    with pytest.raises(pydantic.ValidationError):
        found.but(num_bases=0)


def test_facts_are_written_as_they_were_read(tmp_path: Path) -> None:
    """Keys of a later version too."""
    file = HERE / "facts/basis.json"
    plain = json.loads(file.read_text())
    del plain["checksum"]
    plain["later"] = {"x": 1}
    plain["store"]["later"] = [1.5]
    (tmp_path / "basis.json").write_text(json.dumps(plain))
    facts.write_facts(tmp_path, facts.read_facts(tmp_path / "basis.json"))
    written = json.loads((tmp_path / "basis.json").read_text())
    assert written.pop("checksum") and written == plain
    (tmp_path / "basis.json").write_text(json.dumps(json.loads(file.read_text()) | {"seconds": {}}))
    facts.read_facts(tmp_path / "basis.json")  # times are in no checksum
    for key in ("loss", "later"):
        changed = json.loads(file.read_text()) | {key: 3.5}
        (tmp_path / "basis.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match="changed after it was written"):
            facts.read_facts(tmp_path / "basis.json")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ('{"format_version": 2}', "reads version 1; upgrade it"),
        ('{"format_version": 3, "store": {}}', "reads version 2; upgrade it"),
        ('{"format_version": 1, "store": {}}', "reads version 2; build the store again"),
    ],
)
def test_another_format_is_refused(document: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "basis.json").write_text(document)
    with pytest.raises(UserError, match=message):
        facts.read_facts(tmp_path / "basis.json")


# basis.safetensors and basis.json beside a merged model


CASES: dict[str, dict[str, Any]] = {
    "ae": {"basis": "ae", "num_bases": 3, "steps": 300},
    "balanced": {"basis": "balanced", "num_bases": 3},
    "negated": {"basis": "pca", "num_bases": 2, "forget": "math", "alpha": 1},
}


@pytest.fixture(scope="module")
def results(world: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("merged")
    made = {}
    for name, keys in CASES.items():
        method = "basis_negate" if name == "negated" else "basis_ta"
        made[name] = world("llama").merge(method, folder / name, **keys)
    return made


def test_basis_json_says_what_was_merged(results, world):
    base, models = world("llama").base, world("llama").listed
    for case, result in results.items():
        facts = result.facts
        for package in ("tvb-mergekit", "mergekit", "torch"):
            assert facts["versions"][package] == importlib.metadata.version(package)
        assert facts["method"] == ("basis_negate" if case == "negated" else "basis_ta")
        assert (facts["format_version"], facts["left_out"]) == (1, {})
        assert facts["tasks"] == list(TASKS)
        assert (facts["base_model"], facts["models"]) == (str(base), list(map(str, models)))
        assert facts["num_parameters"] == sum(t.numel() for t in load(base).values())
        assert set(facts["fingerprints"]) == {str(path) for path in (base, *models)}
        assert len(set(facts["fingerprints"].values())) == len(TASKS) + 1
        assert set(facts["seconds"]) >= {"merge"}
        assert all(seconds >= 0 for seconds in facts["seconds"].values())
        card = (result.folder / "README.md").read_text()
        assert "## Task vector bases" in card and all(task in card for task in TASKS)


def test_parameters_are_there_as_resolved(results: dict[str, Result]) -> None:
    found = results["balanced"].facts["parameters"]
    resolved = {"basis": "balanced", "num_bases": 3}
    resolved |= {"exclude": None, "lambda_scale": "bases", "lambda": 0.4, "seed": 0}
    assert found == resolved | {"weights": dict.fromkeys(TASKS, 1.0)}
    assert results["ae"].facts["parameters"]["steps"] == 300
    negated = results["negated"].facts["parameters"]
    assert negated["forget"] == ["math"] and negated["alpha"] == 1 and negated["lambda"] == 0


def test_fingerprints_follow_the_contents(world, results, tmp_path):
    """Not the path, the format or the sharding; any of the values that are sampled."""
    base, models = world("llama").base, world("llama").listed
    before = results["balanced"].facts["fingerprints"]
    state = load(models[0])
    same, changed = tmp_path / "same", tmp_path / "changed"
    for folder in (same, changed):
        folder.mkdir()
        (folder / "config.json").write_text((models[0] / "config.json").read_text())
    torch.save(state, same / "pytorch_model.bin")
    state["model.norm.weight"][0] += 1
    save_file(state, changed / "model.safetensors", metadata={"format": "pt"})
    made = recipe("basis_ta", base, [models[1], same, changed], basis="none")
    after = merge(made, tmp_path / "out").facts["fingerprints"]
    assert after[str(base)] == before[str(base)]
    assert after[str(same)] == before[str(models[0])]
    assert after[str(changed)] != before[str(models[0])]
