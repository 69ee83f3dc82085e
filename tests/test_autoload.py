"""The stock mergekit knows our methods as soon as the package is installed, and only as long.

Installations are real, in environments that see this one's packages. A mergekit of a few lines,
which is imported in no time, tests the hook in odd situations. Other versions of mergekit are
patched names.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mergekit.merge_methods.registry as registry
import pytest
import torch
import yaml
from tiny import load

import tvb_mergekit.plugin as names
from tvb_mergekit.core.settings import METHODS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import tvb_mergekit_hook as hook  # noqa: E402

HOOK_FILES = ("tvb_mergekit_hook.py", "tvb_mergekit.pth", "tvb_mergekit.start")


# Installations, the real mergekit

START = """
import sys
assert not {"torch", "mergekit", "tvb_mergekit"} & set(sys.modules)
print(sys.modules["tvb_mergekit_hook"].__file__)
"""
CHECK = f"""{START}
from mergekit.merge_methods import get, registered_methods
assert get("basis_ta").spec.name == "basis_ta"
print(*sorted(m.spec.name for m in registered_methods() if m.spec.name.startswith("basis_")))
from mergekit.scripts.run_yaml import main
main(["recipe.yml", "merged"])
"""
MISSPELT = "{merge_method: basis_ta, base_model: b, models: [model: m], parameters: {lamda: 1}}"


def test_install_and_uninstall(make_venv, wheel):
    venv = make_venv()
    before = venv.files()
    venv.pip("install", "--no-deps", "--no-compile", wheel)
    assert all((venv.site / name).is_file() for name in HOOK_FILES)
    (venv.folder / "recipe.yml").write_text(MISSPELT)
    result = venv.run("-c", CHECK, check=False)
    hook_file, methods = result.stdout.splitlines()
    assert Path(hook_file) == venv.site / "tvb_mergekit_hook.py"
    assert methods.split() == sorted(hook.METHODS.replace(" and", ",").split(", "))
    assert re.fullmatch("Error: .*`lamda`.*\n", result.stderr), result.stderr
    (venv.folder / "recipe.yml").write_text(MISSPELT.replace("parameters: {lamda: 1}", "dtipe: a"))
    result = venv.run("-m", "mergekit.scripts.run_yaml", "recipe.yml", "merged", check=False)
    assert re.search("^Error: .*`dtipe`.*\n$", result.stderr, re.M), result.stderr
    venv.pip("uninstall", "-y", "tvb-mergekit")
    assert venv.files() == before


# The hook, a mergekit of few lines

MERGEKIT = {
    "mergekit/__init__.py": "",
    "mergekit/merge_methods/__init__.py": "from mergekit.merge_methods.registry import get\n",
    "mergekit/merge_methods/registry.py": "METHODS = {}\ndef get(name): return METHODS[name]\n",
    "mergekit/merge.py": """
        from mergekit import merge_methods
        class MergePlanner: pass
        """,
    "mergekit/scripts/__init__.py": "",
    "mergekit/scripts/run_yaml.py": """
        from mergekit.merge import MergePlanner
        if __name__ == "__main__":
            from mergekit.merge_methods import get
            print(get("basis_ta"))
        """,
    "mergekit/scripts/multimerge.py": "from mergekit.merge import MergePlanner\n",
}
PLUGIN = """
    CALLS = []
    def on_import(module):
        CALLS.append(module.__name__)
        if module.__name__ == "mergekit.merge_methods.registry":
            assert "basis_ta" not in module.METHODS
            module.METHODS["basis_ta"] = "a method"
        if module.__name__ == "mergekit.merge":
            class Patched(module.MergePlanner): pass
            module.MergePlanner = Patched
    """
GET = "from mergekit.merge_methods import get; print(get('basis_ta'))"
ALL = "import mergekit.scripts.run_yaml, mergekit.scripts.multimerge"
WORKERS = """
import multiprocessing

def work(_):
    from mergekit.merge_methods import get
    return get("basis_ta")

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(*pool.map(work, [0]))
"""
# As with `pip install --target`: also after mergekit was imported, and then in order.
EXPLICIT = """
import pathlib, sys
sys.path += map(str, pathlib.Path(__file__).parent.glob("**/site-packages"))
import mergekit.merge
assert "tvb_mergekit_hook" not in sys.modules
import tvb_mergekit_hook
tvb_mergekit_hook.install()
from tvb_mergekit.plugin import CALLS
assert CALLS == list(tvb_mergekit_hook.MODULES[:3]), CALLS
from mergekit.merge_methods import get
assert get("basis_ta")
import mergekit.scripts.run_yaml
assert CALLS == list(tvb_mergekit_hook.MODULES[:4]), CALLS
"""
UNTOUCHED = "import sys, mergekit.merge_methods as m; assert m.registry.METHODS == {}; "
UNTOUCHED += "assert 'tvb_mergekit' not in sys.modules"


def write_files(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def half_uninstalled(site: Path) -> None:
    shutil.rmtree(site / "tvb_mergekit")
    write_files(site / "tvb_mergekit", {"__init__.py": ""})


def with_plugin(text: str) -> Callable[[Path], None]:
    return lambda site: write_files(site, {"tvb_mergekit/plugin/__init__.py": text})


def damaged(site: Path) -> None:
    (site / "tvb_mergekit_hook.py").write_text("this is not Python")


@dataclass(frozen=True)
class Script:
    """What Python runs in a changed environment, what it prints, and a pattern of its errors."""

    text: str = GET
    out: str = "a method\n"
    err: str = ""
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Path], object] = lambda site: None


BROKEN = r"[^\n]*ValueError: a b [^\n]*TVB_MERGEKIT_DEBUG=1[^\n]*\n"
NOT_THERE = r"tvb-mergekit: basis_ta[^\n]*No module named 'tvb_mergekit[^\n]*\n"
RAISE = "raise ValueError('a\\nb')"
FAILING = with_plugin(f"def on_import(module):\n  if module.__name__ == 'mergekit.merge': {RAISE}")
SCRIPTS = {
    "workers": Script(WORKERS, "a method\n" * 3),
    "explicit": Script(EXPLICIT, "", flags=("-S",)),
    "off": Script(UNTOUCHED, "", env={"TVB_MERGEKIT_DISABLE": "1"}),
    "half uninstalled": Script(ALL, "", NOT_THERE, change=half_uninstalled),
    "a damaged hook": Script(f"{ALL}; print('done')", "done\n", change=damaged),
    "plugin fails, in detail": Script(
        ALL, "", f"{BROKEN}Traceback(?!.*Traceback).*", (), {"TVB_MERGEKIT_DEBUG": "1"}, FAILING
    ),
}


@pytest.fixture
def few_lines(make_venv, wheel):
    """Our wheel, with a plugin of a few lines, beside a mergekit of a few lines."""
    venv = make_venv(packages=False)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(venv.site)
    shutil.rmtree(venv.site / "tvb_mergekit" / "plugin")
    write_files(venv.site, {"tvb_mergekit/plugin/__init__.py": PLUGIN, **MERGEKIT})
    return venv


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name, few_lines):
    script = SCRIPTS[name]
    script.change(few_lines.site)
    (few_lines.folder / "script.py").write_text(script.text)
    result = few_lines.run(*script.flags, "script.py", env=dict(script.env))
    assert result.stdout == script.out
    assert re.fullmatch(script.err, result.stderr, re.S), result.stderr


# mergekit as it may become: names that change


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> hook.TvbMergekitFinder:
    """The hook as after the start of Python, and mergekit's own methods alone."""
    theirs = {name: each for name, each in registry._METHODS.items() if name not in METHODS}
    monkeypatch.setattr(registry, "_METHODS", theirs)
    monkeypatch.setattr(hook, "FINDER", finder := hook.TvbMergekitFinder())
    return finder


@pytest.mark.parametrize("place", ["", *names.NAMES, "merge:run_merge"])
def test_a_missing_name_is_named(place, fresh, monkeypatch, capsys):
    """When one of our methods is needed, or at the import of a module whose names are wrapped."""
    if place:
        owner, attribute = names.owner_of(place)
        monkeypatch.delattr(owner, attribute, raising=False)
        monkeypatch.delitem(owner.__annotations__, attribute, raising=False)
    fresh.after(importlib.import_module("mergekit.merge"))
    assert place == "merge:run_merge" or not fresh.stopped
    if place == "merge_methods.registry:_METHODS":  # of mergekit's own `get`
        assert not names.ready()
    elif place:
        assert registry.get("task_arithmetic")
        with pytest.raises(RuntimeError, match="Unimplemented merge method basis_ta"):
            registry.get("basis_ta")
    else:
        assert METHODS.keys() <= {each.spec.name for each in registry.registered_methods()}
    line = f"tvb-mergekit: {hook.METHODS} are not available: mergekit {names.version('mergekit')} "
    line += f"has no `mergekit.{place.replace(':', '.')}`; pip install 'mergekit=={names.TESTED}', "
    assert capsys.readouterr().err == (place and f"{line}or a newer tvb-mergekit\n")


VERSIONS = [(names.TESTED, True), ("0.1.6.dev1", True), ("0.2.0", False), ("0.10.1", False)]


@pytest.mark.parametrize(("version", "known"), VERSIONS)
def test_the_range_of_versions(version, known, fresh, monkeypatch, capsys):
    """An untested version with the same names works. Another one is named once, at its import."""
    assert f'"mergekit>={names.TESTED},<0.2"' in (ROOT / "pyproject.toml").read_text()
    assert list(names.WRAPPED) == list(hook.MODULES)
    monkeypatch.setattr(names, "version", lambda _name: version)
    for module in names.WRAPPED:
        fresh.after(importlib.import_module(module))
    assert names.ready() == known and fresh.stopped != known
    told = capsys.readouterr().err
    assert (told == "") == known and told.count("\n") == (not known)


LIGHT = """
import sys
from mergekit.scripts.run_yaml import main
main(["stock.yml", "merged"], standalone_mode=False)
print(*sorted(name for name in sys.modules if name.startswith("tvb_mergekit")))
"""


def test_a_stock_recipe_is_mergekits_alone(tmp_path, tiny_models):
    """No more of ours is imported than reads a recipe's text."""
    models = [{"model": str(tiny_models / n), "parameters": {"weight": 0.5}} for n in "ab"]
    (tmp_path / "stock.yml").write_text(
        yaml.safe_dump({"merge_method": "linear", "models": models})
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    rest = "errors plugin store".split()
    wanted = ["tvb_mergekit", *(f"tvb_mergekit.{name}" for name in rest), "tvb_mergekit_hook"]
    assert done.stdout.split() == wanted, done.stderr
    one, two = (load(tiny_models / name) for name in "ab")
    for name, merged in load(tmp_path / "merged").items():
        assert torch.allclose(merged, (one[name] + two[name]) / 2), name
