"""The size and the shape of the code: the budgets of pyproject.toml, and names defined once."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mutate import MUTATIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tvb_mergekit"


def lines(files: Iterator[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def is_test(file: Path) -> bool:
    return "tests" in file.relative_to(ROOT).parts


def sizes() -> dict[str, int]:
    """Lines of Python, docstrings and blank lines included."""
    found = {
        folder.name: lines(folder.rglob("*.py"))
        for folder in PACKAGE.iterdir()
        if (folder / "__init__.py").is_file()
    }
    evals = [*(ROOT / "evals").rglob("*.py")]
    return {
        **found,
        "top": lines(iter([*PACKAGE.glob("*.py"), ROOT / "tvb_mergekit_hook.py"])),
        "tests": lines((ROOT / "tests").rglob("*.py")) + lines(filter(is_test, evals)),
        "evals": lines(file for file in evals if not is_test(file)),
    }


def test_no_part_is_larger_than_its_budget() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    budgets = project["tool"]["tvb_mergekit"]["lines"]
    found = sizes()
    assert found.keys() == budgets.keys()
    over = {name: count for name, count in found.items() if count > budgets[name]}
    assert not over, f"lines over the budget of pyproject.toml: {over}"


def test_no_module_is_longer_than_400_lines() -> None:
    assert [file for file in PACKAGE.rglob("*.py") if lines(iter([file])) > 400] == []


def test_each_mutation_changes_one_place() -> None:
    places = [each[:2] for mutations in MUTATIONS.values() for each in mutations]
    found = {(file, old): (PACKAGE / "core" / file).read_text().count(old) for file, old in places}
    assert {place: count for place, count in found.items() if count != 1} == {}


def test_no_two_public_types_share_a_name() -> None:
    names = Counter(
        node.name if isinstance(node, ast.ClassDef) else target.id
        for file in PACKAGE.rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        for target in getattr(node, "targets", [node])
        if isinstance(node, ast.ClassDef)
        or (isinstance(target, ast.Name) and target.id.isidentifier() and is_type(target.id))
    )
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def is_type(name: str) -> bool:
    """Whether a name at the top of a module is that of a type, as `Model = str | Path`."""
    return name[:1].isupper() and not name.isupper() and "_" not in name
