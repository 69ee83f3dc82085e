"""`basis.json`: its schema against docs/files.md, its checksum, and stores of earlier versions."""

import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tvb_mergekit.errors import UserError
from tvb_mergekit.store import facts

HERE = Path(__file__).parent
MODELS = (facts.Facts, facts.StoreRecord, facts.Bounds, facts.FileRecord)


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
    for key, same in (("seconds", True), ("loss", False), ("later", False)):
        (tmp_path / "basis.json").write_text(
            json.dumps({**json.loads(file.read_text()), key: {} if same else 3.5})
        )
        if same:
            facts.read_facts(tmp_path / "basis.json")
            continue
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
