"""The stock mergekit knows our methods as soon as the package is installed, and only as long.

Installations are real, in environments that see this one's packages. What the hook does in odd
situations is tested against a small stand-in for mergekit, which is imported in no time.
"""

from __future__ import annotations

import ast
import os
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import tvb_mergekit_hook as hook  # noqa: E402

HOOK_FILES = ("tvb_mergekit_hook.py", "tvb_mergekit.pth", "tvb_mergekit.start")


def code(text: str) -> str:
    return textwrap.dedent(text).strip()


# ---------------------------------------------------------------- installations, the real mergekit

CHECK = code(
    """
    import sys
    assert not {"torch", "mergekit", "tvb_mergekit"} & set(sys.modules)
    print(sys.modules["tvb_mergekit_hook"].__file__)
    from mergekit.merge_methods import get, registered_methods
    assert get("basis_ta").spec.name == "basis_ta"
    print(*sorted(m.spec.name for m in registered_methods() if m.spec.name.startswith("basis_")))
    """
)


def install(venv, how, wheel, tmp_path):
    if how == "wheel":
        venv.pip("install", "--no-deps", wheel)
    elif how == "uv":
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
        if uv is None:
            pytest.skip("uv is not installed")
        command = [uv, "pip", "install", "--offline", "--no-deps", "--python", venv.python, wheel]
        subprocess.run(command, check=True, capture_output=True)
    else:
        # A copy, so that nothing is written to the source tree.
        source = tmp_path / "source"
        source.mkdir()
        for name in ("tvb_mergekit", "packaging"):
            shutil.copytree(ROOT / name, source / name)
        for name in ("pyproject.toml", "README.md", "LICENSE", "tvb_mergekit_hook.py"):
            shutil.copy(ROOT / name, source)
        isolation = []
        if venv.run("-c", "import hatchling", check=False).returncode == 0:
            isolation = ["--no-build-isolation"]
        option = ["-e"] if how == "editable" else []
        venv.pip("install", "--no-deps", *isolation, *option, source)


@pytest.mark.parametrize("how", ["wheel", "source", "editable", "uv"])
def test_install_and_uninstall(how, make_venv, wheel, tmp_path):
    venv = make_venv()
    before = venv.files()
    install(venv, how, wheel, tmp_path)
    for name in HOOK_FILES:
        assert (venv.site / name).is_file()

    result = venv.run("-c", CHECK)
    hook_file, methods = result.stdout.splitlines()
    assert Path(hook_file) == venv.site / "tvb_mergekit_hook.py"
    assert methods.split() == sorted(hook.METHODS.replace(" and", ",").split(", "))
    assert result.stderr == ""

    if how == "uv":
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
        command = [uv, "pip", "uninstall", "--python", venv.python, "tvb-mergekit"]
        subprocess.run(command, check=True, capture_output=True)
    else:
        venv.pip("uninstall", "-y", "tvb-mergekit")
    left = venv.files() - before
    if how == "uv":  # leaves the cached bytecode of modules outside a package, which nobody reads
        left = {path for path in left if path.parent != venv.site / "__pycache__"}
    assert not left
    gone = 'import sys; assert "tvb_mergekit_hook" not in sys.modules; import tvb_mergekit_hook'
    result = venv.run("-c", gone, check=False)
    assert "No module named 'tvb_mergekit_hook'" in result.stderr
    if how == "wheel":
        result = venv.run(
            "-c", 'import mergekit.merge_methods as m; m.get("basis_ta")', check=False
        )
        assert "Unimplemented merge method basis_ta" in result.stderr


def test_mergekit_looks_untouched(make_venv, wheel):
    """What Python and its tools see of the watched modules is what they see without us."""
    venv = make_venv()
    venv.pip("install", "--no-deps", wheel)
    result = venv.run(
        "-c",
        code(
            """
            import importlib, importlib.resources, importlib.util, inspect, pickle, sys
            from importlib.machinery import SourceFileLoader

            assert importlib.util.find_spec("mergekit.plan").origin.endswith("plan.py")
            import mergekit.plan, mergekit.merge_methods.registry as registry
            import mergekit.scripts.run_yaml, mergekit.scripts.multimerge
            import mergekit.scripts.merge_raw_pytorch
            for name in sys.modules["tvb_mergekit_hook"].WATCHED:
                module = sys.modules[name]
                assert type(module.__spec__.loader) is SourceFileLoader, name
                assert module.__loader__ is module.__spec__.loader, name
                assert module.__spec__.origin == module.__file__, name
                assert inspect.getsource(module) == open(module.__file__).read(), name
            assert "class MergePlanner" in inspect.getsource(mergekit.plan.MergePlanner)
            planner = mergekit.plan.MergePlanner
            assert pickle.loads(pickle.dumps(planner)) is planner
            assert importlib.resources.files(mergekit.merge_methods).joinpath("ram.py").is_file()

            before = len(registry.registered_methods())
            for module in (registry, mergekit.plan, registry):
                importlib.reload(module)
            assert len(registry.registered_methods()) == before
            assert registry.get("basis_ta")
            """
        ),
    )
    assert result.stderr == ""


def test_run_as_a_module(make_venv, wheel):
    venv = make_venv()
    venv.pip("install", "--no-deps", wheel)
    result = venv.run("-m", "mergekit.scripts.run_yaml", "--help")
    assert "Usage" in result.stdout
    assert "tvb" not in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_parts_of_the_plugin_may_be_imported_first(make_venv, wheel):
    """Whichever part of the plugin is imported first, mergekit is complete afterwards."""
    venv = make_venv()
    venv.pip("install", "--no-deps", wheel)
    result = venv.run(
        "-c",
        code(
            """
            import os, pkgutil, sys, tvb_mergekit
            import numpy, scipy.optimize, torch, transformers  # what takes long, once

            folders = [os.path.join(path, "plugin") for path in tvb_mergekit.__path__]
            parts = pkgutil.iter_modules(folders, "tvb_mergekit.plugin.")
            for name in ["tvb_mergekit.plugin", *(part.name for part in parts)]:
                pid = os.fork()
                if not pid:
                    __import__(name)
                    from mergekit.merge_methods import get
                    get("basis_ta")
                    sys.exit()
                assert os.waitpid(pid, 0)[1] == 0, name
            """
        ),
    )
    assert result.stderr == ""


# ---------------------------------------------------------------- the hook, a stand-in for mergekit

STAND_IN = {
    "mergekit/__init__.py": "",
    "mergekit/merge_methods/__init__.py": "from mergekit.merge_methods.registry import get\n",
    "mergekit/merge_methods/registry.py": """
        METHODS = {}
        def get(name):
            return METHODS[name]
        """,
    "mergekit/plan.py": "from mergekit import merge_methods\nclass MergePlanner: pass\n",
    "mergekit/merge.py": "from mergekit.plan import MergePlanner\n",
    "mergekit/scripts/__init__.py": "",
    "mergekit/scripts/run_yaml.py": """
        from mergekit.merge import MergePlanner
        if __name__ == "__main__":
            from mergekit.merge_methods import get
            print(get("basis_ta"))
        """,
    "mergekit/scripts/multimerge.py": "from mergekit.merge import MergePlanner\n",
    "mergekit/scripts/merge_raw_pytorch.py": "from mergekit import merge_methods\n",
}
PLUGIN = """
    CALLS = []
    def on_import(module):
        CALLS.append(module.__name__)
        if module.__name__ == "mergekit.merge_methods.registry":
            assert "basis_ta" not in module.METHODS
            module.METHODS["basis_ta"] = "a method"
        if module.__name__ == "mergekit.plan":
            class Patched(module.MergePlanner): pass
            module.MergePlanner = Patched
    """
GET = "from mergekit.merge_methods import get; print(get('basis_ta'))"
ALL = "import mergekit.scripts.run_yaml, mergekit.scripts.multimerge, "
ALL += "mergekit.scripts.merge_raw_pytorch"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def write_mergekit(root: Path, version: str | None = "0.1.5") -> None:
    write(root, STAND_IN)
    if version is not None:
        metadata = f"Metadata-Version: 2.1\nName: mergekit\nVersion: {version}\n"
        write(root, {f"mergekit-{version}.dist-info/METADATA": metadata})


@pytest.fixture
def stand_in(make_venv, wheel, other_packages):
    """Our wheel, with a plugin of a few lines, beside a mergekit of a few lines."""
    venv = make_venv(packages=False)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(venv.site)
    (venv.site / "packaging").symlink_to(other_packages / "packaging")
    shutil.rmtree(venv.site / "tvb_mergekit" / "plugin", ignore_errors=True)
    write(venv.site, {"tvb_mergekit/plugin/__init__.py": PLUGIN})
    write_mergekit(venv.site)
    return venv


def lines_of(result) -> list[str]:
    return result.stderr.splitlines()


@pytest.mark.parametrize(
    "flags", [[], ["-I"], ["-s"], ["-E"], ["-B"], ["-P"], ["-O"], ["-W", "error"]]
)
def test_found_with(flags, stand_in):
    if flags == ["-P"] and sys.version_info < (3, 11):
        pytest.skip("new in Python 3.11")
    result = stand_in.run(*flags, "-c", GET)
    assert (result.stdout, result.stderr) == ("a method\n", "")


def test_found_by_a_module_run_as_a_script(stand_in):
    result = stand_in.run("-m", "mergekit.scripts.run_yaml")
    assert (result.stdout, result.stderr) == ("a method\n", "")


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_found_in_workers(method, stand_in):
    script = stand_in.folder / "work.py"
    script.write_text(
        code(
            f"""
            import multiprocessing

            def work(_):
                from mergekit.merge_methods import get
                return get("basis_ta")

            if __name__ == "__main__":
                with multiprocessing.get_context({method!r}).Pool(1) as pool:
                    print(pool.map(work, [0]))
            """
        )
    )
    result = stand_in.run(script)
    assert (result.stdout, result.stderr) == ("['a method']\n", "")


def test_every_module_is_handed_over_once_and_before_its_importer_reads_it(stand_in):
    result = stand_in.run(
        "-c",
        code(
            f"""
            {ALL}
            import importlib, tvb_mergekit_hook
            from tvb_mergekit.plugin import CALLS
            assert sorted(CALLS) == sorted(tvb_mergekit_hook.MODULES), CALLS
            assert mergekit.scripts.run_yaml.MergePlanner.__name__ == "Patched"
            tvb_mergekit_hook.install()
            tvb_mergekit_hook.install()
            assert len(CALLS) == len(tvb_mergekit_hook.MODULES)
            import sys
            assert sum(type(f).__name__ == "TvbMergekitFinder" for f in sys.meta_path) == 1

            # A reloaded module is a new one: handed over once more, and patched once.
            importlib.reload(mergekit.plan)
            assert CALLS.count("mergekit.plan") == 2
            assert [c.__name__ for c in mergekit.plan.MergePlanner.__mro__] == [
                "Patched", "MergePlanner", "object"]
            """
        ),
    )
    assert result.stderr == ""


def test_explicit_install_without_pth_files(stand_in):
    """As with `pip install --target`: also after mergekit was imported, and then in order."""
    result = stand_in.run(
        "-S",
        "-c",
        code(
            f"""
            import sys
            sys.path.append({str(stand_in.site)!r})
            import mergekit.scripts.merge_raw_pytorch, mergekit.merge
            assert "tvb_mergekit_hook" not in sys.modules
            import tvb_mergekit_hook
            tvb_mergekit_hook.install()
            from tvb_mergekit.plugin import CALLS
            assert CALLS == list(tvb_mergekit_hook.MODULES[:4]), CALLS
            from mergekit.merge_methods import get
            assert get("basis_ta")
            import mergekit.scripts.run_yaml
            assert CALLS == list(tvb_mergekit_hook.MODULES[:5]), CALLS
            """
        ),
    )
    assert result.stderr == ""


def test_a_module_that_fails_may_be_imported_again(stand_in):
    plan = stand_in.site / "mergekit" / "plan.py"
    plan.write_text("import os\nif 'FAIL' in os.environ: raise OSError\n" + plan.read_text())
    result = stand_in.run(
        "-c",
        code(
            """
            import os
            os.environ["FAIL"] = "1"
            try:
                import mergekit.plan
            except OSError:
                pass
            from tvb_mergekit.plugin import CALLS
            assert "mergekit.plan" not in CALLS
            del os.environ["FAIL"]
            import mergekit.plan
            assert mergekit.plan.MergePlanner.__name__ == "Patched"
            """
        ),
    )
    assert result.stderr == ""


def test_threads_that_import_at_the_same_time(stand_in):
    result = stand_in.run(
        "-c",
        code(
            """
            import importlib, sys, threading, tvb_mergekit_hook
            sys.setswitchinterval(1e-6)
            start = threading.Barrier(10)
            errors = []
            def work(name):
                start.wait()
                try:
                    importlib.import_module(name)
                except BaseException as error:
                    errors.append(error)
            # Not the registry: its package imports it, and Python itself (with no hook) may find a
            # deadlock where one thread imports a package and another a module in it.
            names = tvb_mergekit_hook.MODULES[1:] * 2
            threads = [threading.Thread(target=work, args=[name]) for name in names]
            for t in threads: t.start()
            for t in threads: t.join()
            from tvb_mergekit.plugin import CALLS
            assert sorted(CALLS) == sorted(tvb_mergekit_hook.MODULES), CALLS
            assert not errors, errors
            """
        ),
    )
    assert result.stderr == ""


def test_beside_another_finder_of_the_same_kind(stand_in):
    """One that asks the whole machinery for the real spec, as many import hooks do."""
    result = stand_in.run(
        "-c",
        code(
            """
            import importlib.util, sys
            class Other:
                busy = False
                def find_spec(self, name, path=None, target=None):
                    if self.busy or not name.startswith("mergekit"):
                        return None
                    self.busy = True
                    try:
                        return importlib.util.find_spec(name)
                    finally:
                        self.busy = False
            sys.meta_path.insert(0, Other())
            sys.meta_path.insert(2, Other())
            import mergekit.merge, tvb_mergekit_hook
            from tvb_mergekit.plugin import CALLS
            assert CALLS == list(tvb_mergekit_hook.MODULES[:3]), CALLS
            """
        ),
    )
    assert result.stderr == ""


def test_lazy_and_zipped_modules(stand_in):
    """Loaders that execute a module later, and one loader object shared by several modules."""
    archive = stand_in.folder / "mergekit.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for name, text in STAND_IN.items():
            out.writestr(name, textwrap.dedent(text))
    shutil.rmtree(stand_in.site / "mergekit")
    result = stand_in.run(
        "-c",
        code(
            f"""
            import importlib.util, sys
            sys.path.append({str(archive)!r})
            import mergekit.merge_methods
            spec = importlib.util.find_spec("mergekit.plan")
            spec.loader = importlib.util.LazyLoader(spec.loader)
            module = sys.modules["mergekit.plan"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            from tvb_mergekit.plugin import CALLS
            assert CALLS == ["mergekit.merge_methods.registry"]
            assert module.MergePlanner.__name__ == "Patched"
            import mergekit.merge
            assert type(mergekit.merge.__loader__).__name__ == "zipimporter"
            assert len(CALLS) == 3, CALLS
            """
        ),
    )
    assert result.stderr == ""


@pytest.mark.parametrize("value", ["1", "yes", "false"])
def test_off_switch(value, stand_in):
    text = "import sys, mergekit.merge_methods as m; assert m.registry.METHODS == {}; "
    text += "assert 'tvb_mergekit' not in sys.modules"
    assert stand_in.run("-c", text, env={"TVB_MERGEKIT_DISABLE": value}).stderr == ""
    # also within a process, up to the import of mergekit
    text = f"import os; os.environ['TVB_MERGEKIT_DISABLE'] = {value!r}; {text}"
    assert stand_in.run("-c", text).stderr == ""


@pytest.mark.parametrize("value", ["", "0"])
def test_off_switch_that_is_not_set(value, stand_in):
    assert stand_in.run("-c", GET, env={"TVB_MERGEKIT_DISABLE": value}).stdout == "a method\n"


@pytest.mark.parametrize("version", ["0.1.4", "0.1.6", "0.2.0", "0.1.5rc1"])
def test_version_outside_the_range(version, stand_in):
    shutil.rmtree(stand_in.site / "mergekit-0.1.5.dist-info")
    write_mergekit(stand_in.site, version)
    result = stand_in.run("-c", f"{ALL}; print(mergekit.merge_methods.registry.METHODS)")
    assert result.stdout == "{}\n"
    text = (stand_in.site / "tvb_mergekit" / "__init__.py").read_text()
    ours = text.partition('__version__ = "')[2].partition('"')[0]
    assert lines_of(result) == [
        f"tvb-mergekit {ours}: basis_ta, basis_ties and basis_negate are not available: mergekit "
        f"{version} is installed, >=0.1.5,<0.1.6 is needed; pip install 'mergekit>=0.1.5,<0.1.6'"
    ]


def test_version_unknown(stand_in):
    shutil.rmtree(stand_in.site / "mergekit-0.1.5.dist-info")
    (line,) = lines_of(stand_in.run("-c", ALL))
    assert "its version is unknown, >=0.1.5,<0.1.6 is needed" in line


@pytest.mark.parametrize("version", ["0.1.5", "0.1.5.post1", "0.1.5+local"])
def test_version_inside_the_range(version, stand_in):
    shutil.rmtree(stand_in.site / "mergekit-0.1.5.dist-info")
    write_mergekit(stand_in.site, version)
    assert lines_of(stand_in.run("-c", GET)) == []


@pytest.mark.parametrize("leave", [[], ["__pycache__/x.pyc"], ["__init__.py"]])
def test_half_uninstalled(leave, stand_in):
    package = stand_in.site / "tvb_mergekit"
    shutil.rmtree(package)
    write(package, dict.fromkeys(leave, ""))
    assert stand_in.run("-c", "pass").stderr == ""
    (line,) = lines_of(stand_in.run("-c", ALL))
    assert line.startswith("tvb-mergekit: basis_ta")
    assert "the package tvb_mergekit is missing" in line and "pip uninstall tvb-mergekit" in line


@pytest.mark.parametrize("hook_text", [None, "", "import no_such_module", "this is not Python"])
def test_damaged_hook_is_silent(hook_text, stand_in):
    path = stand_in.site / "tvb_mergekit_hook.py"
    path.unlink() if hook_text is None else path.write_text(hook_text)
    result = stand_in.run("-c", f"{ALL}; print('done')")
    assert (result.stdout, result.stderr) == ("done\n", "")


@pytest.mark.parametrize(
    "plugin",
    [
        "raise ValueError('a\\nb')",
        "def on_import(module): raise ValueError('a\\nb')",
        "def on_import(module):\n  if 'plan' in module.__name__: raise ValueError('a\\nb')",
    ],
)
def test_broken_plugin(plugin, stand_in):
    write(stand_in.site, {"tvb_mergekit/plugin/__init__.py": plugin})
    (line,) = lines_of(stand_in.run("-c", ALL))
    assert "ValueError: a b" in line and "TVB_MERGEKIT_DEBUG=1" in line
    lines = lines_of(stand_in.run("-c", ALL, env={"TVB_MERGEKIT_DEBUG": "1"}))
    assert lines[0] == line and lines[1].startswith("Traceback")
    assert sum("Traceback" in each for each in lines) == 1
    result = stand_in.run("-c", f"import sys; sys.stderr.close(); sys.stderr = None; {ALL}")
    assert result.stderr == ""


def test_no_mergekit_at_all(stand_in):
    shutil.rmtree(stand_in.site / "mergekit")
    result = stand_in.run("-c", "import mergekit.plan", check=False)
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'mergekit'\n")
    assert "tvb" not in result.stderr


# ---------------------------------------------------------------- what the hook is made of


def test_the_range_is_the_one_in_the_metadata():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'"mergekit{hook.MERGEKIT_RANGE}"' in pyproject


def test_the_hook_imports_sys_alone():
    tree = ast.parse(Path(hook.__file__).read_text())
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(n) for n in imports] == ["import sys"]


def test_python_starts_with_one_more_module(stand_in):
    # Python 3.13 loads a codec for the first .pth file, whatever is in it.
    (stand_in.site / "other.pth").write_text("# nothing")
    text = "import sys; print(*sys.modules)"
    with_hook = set(stand_in.run("-c", text).stdout.split())
    for name in HOOK_FILES:
        (stand_in.site / name).unlink()
    without = set(stand_in.run("-c", text).stdout.split())
    assert with_hook - without == {"tvb_mergekit_hook"}


def test_the_wheel_holds_the_hook(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert set(HOOK_FILES) < set(names)
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"tvb_mergekit", *HOOK_FILES}


@pytest.mark.slow
def test_start_up_costs_less_than_a_millisecond(make_venv, wheel):
    with_hook, without = make_venv("with"), make_venv("without")
    with_hook.pip("install", "--no-deps", wheel)
    times = {with_hook: [], without: []}
    for _ in range(200):
        for venv, seconds in times.items():
            start = time.perf_counter()
            subprocess.run([venv.python, "-c", "pass"], check=True)
            seconds.append(time.perf_counter() - start)
    usual = statistics.median(times[without])
    cost = statistics.median(times[with_hook]) - usual
    print(f"\nstart-up: +{1000 * cost:.2f} ms on {1000 * usual:.2f} ms")
    assert cost < max(1e-3, 0.1 * usual)  # the latter on a slow or busy machine
