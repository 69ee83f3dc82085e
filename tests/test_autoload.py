"""The stock mergekit knows our methods as soon as the package is installed, and only as long.

Installations are real, in environments that see this one's packages. Other versions of mergekit
are patched names.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import mergekit.merge_methods.registry as registry
import pytest
import torch
import yaml
from commands import contents
from tiny import load

import tvb_mergekit.plugin as names
from tvb_mergekit.core.settings import METHODS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import tvb_mergekit_hook as hook  # noqa: E402

HOOK_FILES = ("tvb_mergekit_hook.py", "tvb_mergekit.pth", "tvb_mergekit.start")


# Installations, the real mergekit


class Venv:
    """A virtual environment that sees the packages of this one, but not this project."""

    def __init__(self, folder: Path, packages: Path):
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=os.name != "nt")
        scripts = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = scripts / ("python.exe" if os.name == "nt" else "python")
        lib = folder / "Lib" if os.name == "nt" else next((folder / "lib").glob("python*"))
        self.site = lib / "site-packages"
        # A folder named in a .pth file joins sys.path, but its own .pth files are not read.
        (self.site / "packages.pth").write_text(f"{packages}\n")

    def run(self, *args: str | Path, check: bool = True):
        """Run the environment's Python, far from the source tree and this process's settings."""
        ours = ("PYTHON", "PYTEST_", "TVB_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        clean |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return self._call([self.python, *args], clean, check)

    def pip(self, *args: str | Path):
        """Run this process's pip on the environment."""
        command = [sys.executable, "-m", "pip", "--python", self.python, *args]
        env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
        env.pop("PYTHONPATH", None)
        return self._call(command, env, True)

    def _call(self, command, env, check):
        words, how = [str(part) for part in command], {"capture_output": True, "text": True}
        done = subprocess.run(words, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, **how)
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    def files(self) -> set[Path]:
        return {p for p in self.site.rglob("*") if p.is_file() or p.is_symlink()}


@pytest.fixture
def environment(tmp_path: Path) -> Venv:
    """With links to all that is installed beside the running Python, except this project."""
    (packages := tmp_path / "packages").mkdir()
    for entry in map(Path, sys.path):
        if entry.name not in ("site-packages", "dist-packages") or not entry.is_dir():
            continue
        for item in entry.iterdir():
            ours = "tvb_mergekit" in item.name or item.suffix == ".pth"
            link = packages / item.name
            if not ours and item.name != "__pycache__" and not link.is_symlink():
                link.symlink_to(item)
    return Venv(tmp_path / "venv", packages)


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


def test_install_and_uninstall(environment):
    venv = environment
    before = venv.files()
    venv.pip("install", "--no-deps", "--no-compile", "--no-build-isolation", ROOT)
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
    shutil.rmtree(venv.site / "tvb_mergekit" / "plugin")  # half uninstalled
    told = venv.run("-c", "from mergekit.merge_methods import get").stderr
    assert re.fullmatch(r"tvb-mergekit: basis_ta.*No module named 'tvb_mergekit.*\n", told), told
    (venv.site / "tvb_mergekit_hook.py").write_text("this is not Python")
    assert (done := venv.run("-c", "print('done')")).stdout == "done\n" and not done.stderr
    venv.pip("uninstall", "-y", "tvb-mergekit")
    assert venv.files() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["editable", "sdist"])
def test_other_installations(kind: str, environment: Any, tmp_path: Path) -> None:
    """Of the source tree, and of its archive (of a wheel: above)."""
    venv, what = environment, ["-e", str(ROOT)]
    if kind == "sdist":
        words = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path / "made"]
        subprocess.run(words, cwd=ROOT, check=True)
        what = [str(archive) for archive in (tmp_path / "made").iterdir()]
        shutil.unpack_archive(what[0], tmp_path)
        (pages,) = [
            [folder / "README.md", *folder.glob("docs/*")] for folder in tmp_path.glob("tvb*")
        ]
        links = [(p, at) for p in pages for at in re.findall(r"\]\(([^):#]+)[#)]", p.read_text())]
        assert [link for link in links if not (link[0].parent / link[1]).exists()] == []
    before = venv.files()
    venv.pip("install", "--no-deps", "--no-compile", "--no-build-isolation", *what)
    code = "from mergekit.merge_methods import get; import tvb_mergekit as t; get('basis_ta')"
    found = venv.run("-c", f"{code}; print(t.__file__)").stdout
    assert found.startswith(str(ROOT)) == (kind == "editable")
    venv.pip("uninstall", "-y", "tvb-mergekit")
    assert venv.files() == before


STOCK = """
import sys
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods import registered_methods
from mergekit.options import MergeOptions

given = {"weight": 0.4, "density": 0.5, "t": 0.3}
options = MergeOptions(random_seed=1, quiet=True, write_model_card=False)  # its order is a set's
known = {method.spec.name: method.spec for method in registered_methods()}
ours = {name for name in known if name.startswith("basis_")}
assert len(ours) == int(sys.argv[2]) and len(known) >= 20, known
for name in known.keys() - ours:
    keys = {parameter.name for parameter in known[name].parameters}
    models = {1: ["./a"], 2: ["./base", "./a"]}.get(known[name].contract.max_inputs, ["./a", "./b"])
    document = {"merge_method": name, "models": [{"model": model} for model in models]}
    document["parameters"] = {key: value for key, value in given.items() if key in keys}
    if known[name].contract.base.value != "ignored":
        document["base_model"] = "./base"
    run_merge(MergeConfiguration.model_validate(document), f"{sys.argv[1]}/{name}", options)
"""


@pytest.mark.slow
def test_stock_methods_write_the_same_bytes(tiny_models: Path, tmp_path: Path) -> None:
    """With our hook, and without it."""
    code = f"import tvb_mergekit_hook; tvb_mergekit_hook.install()\n{STOCK}"
    for kind, disabled, ours in (("with", "", 6), ("without", "1", 0)):
        env = {"TVB_MERGEKIT_DISABLE": disabled, "OMP_NUM_THREADS": "1"}
        env = os.environ | env | {"PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", code, tmp_path / kind, str(ours)]
        subprocess.run(words, cwd=tiny_models, env=env, check=True, timeout=300)
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


# mergekit as it may become: names that change


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> hook.TvbMergekitFinder:
    """The hook as after the start of Python, and mergekit's own methods alone."""
    theirs = {name: each for name, each in registry._METHODS.items() if name not in METHODS}
    monkeypatch.setattr(registry, "_METHODS", theirs)
    monkeypatch.setattr(hook, "FINDER", finder := hook.TvbMergekitFinder())
    return finder


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_plugin_that_fails_is_one_line(debug, fresh, monkeypatch, capsys):
    """Written once; mergekit goes on without us."""
    monkeypatch.setenv("TVB_MERGEKIT_DEBUG", debug)
    modules = [importlib.import_module(module) for module in hook.MODULES]
    monkeypatch.setattr(names, "on_import", lambda module: int("a\nb"))
    for module in modules:
        fresh.after(module)
    line, *traceback = capsys.readouterr().err.splitlines()
    assert re.match("tvb-mergekit: basis_ta.*ValueError: .*TVB_MERGEKIT_DEBUG=1", line)
    assert fresh.stopped and bool(traceback) == bool(debug)


def test_a_call_of_install_catches_up(fresh, monkeypatch):
    """As after `pip install --target`: what was imported before, in order, and what comes later."""
    seen, scripts = [], importlib.import_module("mergekit.scripts")
    for module in hook.MODULES:
        importlib.import_module(module)
    monkeypatch.setattr(names, "on_import", lambda module: seen.append(module.__name__))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("TVB_MERGEKIT_DISABLE", "1")
    hook.install()
    assert not seen and fresh not in sys.meta_path
    monkeypatch.delenv("TVB_MERGEKIT_DISABLE")
    hook.install()
    hook.install()
    assert seen == [*hook.MODULES] and sys.meta_path.count(fresh) == 1
    monkeypatch.setattr(scripts, "multimerge", scripts.multimerge)  # as it was, afterwards
    monkeypatch.delitem(sys.modules, hook.MODULES[-1])
    importlib.import_module(hook.MODULES[-1])
    assert seen == [*hook.MODULES, hook.MODULES[-1]]


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
