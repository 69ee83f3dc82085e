"""The budgets of pyproject.toml, names defined once, and what the manual names."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from mutate import MUTATIONS
from test_cli import every_command

import tvb_mergekit
from tvb_mergekit.core.settings import ALL_KEYS, BASES, METHODS

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
    found = {(f, old): (PACKAGE / "core" / f).read_text().count(old) for f, old, _ in MUTATIONS}
    assert {place: count for place, count in found.items() if count != 1} == {}


def test_the_library_lists_and_explains_its_names() -> None:
    """`dir` and `help` do not depend on what has been used."""
    public = [name for name in dir(tvb_mergekit) if not name.startswith("__")]
    said = re.findall(r"^    (\w+) {2,}\w", tvb_mergekit.__doc__ or "", re.M)
    assert public == sorted(said) == sorted(tvb_mergekit.__all__)
    assert all(getattr(tvb_mergekit, name).__doc__ for name in public)


# The manual: its links lead somewhere, its commands exist, and it names every key of a recipe

MANUAL = {path: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = MANUAL | {
    path: path.read_text()
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md")),
        *sorted((ROOT / "evals").rglob("*.md")),
    )
}
CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]+`", re.M | re.S)


# Pattern of the words -> command; those of a group stand behind its arguments
COMMANDS = {
    re.sub("[A-Z]+", r"\\S+", words): command
    for words, command in every_command().items()
    if not isinstance(command, click.Group)
}


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page, text in PAGES.items():
        for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", CODE.sub("", text)):
            if link.startswith(("http://", "https://")):
                continue
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_a_package_index_shows_no_relative_links() -> None:
    """With a repository they are absolute; else the source archive has what they name."""
    made = runpy.run_path(str(ROOT / "packaging/description.py"))["Description"](str(ROOT), {})
    named = ("", "e (docs/merge.md)"), ("https://x.y", "e](https://x.y/blob/HEAD/docs/merge.md)")
    for home, wanted in named:
        made.update(found := {"urls": {"Repository": home}})
        links = re.findall(r"\]\((.*?)\)", CODE.sub("", found["readme"]["text"]))
        assert wanted in found["readme"]["text"] and all(link.startswith("http") for link in links)


def test_the_manual_names_every_command_and_key() -> None:
    text = "".join(MANUAL.values())
    assert [name for name in COMMANDS if not re.search(f"tvb {name}", text)] == []
    assert [key for key in ALL_KEYS if f"`{key}`" not in text] == []
    assert len(PAGES[ROOT / "README.md"].splitlines()) <= 110


def test_the_tables_list_what_is_registered() -> None:
    """Bases and merge methods in the README, keys of recipes in the manual."""
    readme, keys = PAGES[ROOT / "README.md"], MANUAL[ROOT / "docs/merge.md"]
    rows = readme[readme.index("## Methods and bases") :].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)`", rows, re.M)
    assert sorted(listed) == sorted(["merge_method", "basis", *METHODS, *BASES])
    keys = keys[: keys.index("## Which tensors take part")]
    assert set(re.findall(r"^\| `(\w+)` \|", keys, re.M)) == set(ALL_KEYS)


def test_the_readme_installs_the_torch_that_the_project_needs() -> None:
    (needed,) = re.findall(r'"(torch>=.*)"', (ROOT / "pyproject.toml").read_text())
    assert f'pip install "{needed}" --index-url' in PAGES[ROOT / "README.md"]


def test_commands_in_the_manual_exist_with_their_options() -> None:
    wrong = []
    for page, text in PAGES.items():
        for line in re.findall(r"\btvb ([a-z][^`\n#;&|]*)", text.replace("\\\n", " ")):
            name = next((n for n in COMMANDS if re.match(f"{n}( |$)", line)), None)
            options = re.findall(r"(?<!\S)--?[a-z][\w-]*", line)
            known = COMMANDS[name].params if name else ()
            mine = {o for p in known for o in (*p.opts, *p.secondary_opts)}
            if (name is None and options) or set(options) - {*mine, "--help"}:
                wrong.append(f"{page.relative_to(ROOT)}: tvb {line}")
    assert wrong == []
