"""Our commands start without what they do not need, and get it where they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from commands import recipe, write
from packaging.version import Version
from tiny import DECODER, family, llama, load

HEAVY = {"peft", "transformers.modeling_utils"}
if Version(transformers.__version__) >= Version("5.21"):  # before, transformers imports them itself
    HEAVY |= {"sympy", "torch._dynamo", "torch.distributed.tensor", "transformers.activations"}


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


COMMAND = """
import sys
from tvb_mergekit.cli import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, sep="\\n")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    return family(tmp_path_factory.mktemp("models"), llama, ("math", "code"))


@pytest.mark.parametrize("command", ["build", "merge", "check"])
def test_a_command_imports_what_it_needs(
    command: str, models: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    file = write(recipe("basis_ta", *models, basis="balanced", num_bases=1), tmp_path / "out")
    words = [command, file, *([tmp_path / "out"] if command != "check" else [])]
    done = run("-c", COMMAND, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = set(done.stdout.splitlines())
    assert {"torch", "transformers", "mergekit.common"} <= found
    assert not found & HEAVY


def opt() -> torch.nn.Module:
    sizes = {"ffn_dim": 64, "word_embed_proj_dim": 32, "activation_function": "quick_gelu"}
    config = transformers.OPTConfig(**{**DECODER, **sizes, "tie_word_embeddings": True})
    return transformers.OPTForCausalLM(config)


def test_an_architecture_that_mergekit_has_not_listed(tmp_path: Path) -> None:
    base, tuned = family(tmp_path / "models", opt, ("math", "code"))
    file = write(recipe("basis_ta", base, tuned, basis="balanced", num_bases=1), tmp_path / "out")
    for module, words in {
        "tvb_mergekit": ["merge", file, "ours"],
        "mergekit.scripts.run_yaml": [file, "theirs"],
    }.items():
        done = run("-m", module, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    assert "No JSON architecture" in done.stderr
    equal(tmp_path)


def test_an_adapter_is_fused(models: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, (tuned, _other) = models
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "adapter")
    given = recipe("basis_ta", base, [tuned, f"{base}+{tmp_path / 'adapter'}"], num_bases=1)
    file = write(given, tmp_path / "out")
    (tmp_path / "broken" / "peft").mkdir(parents=True)
    (tmp_path / "broken" / "peft" / "__init__.py").write_text("raise ImportError('no luck')\n")
    cache = tmp_path / "fused-ours"
    words = ["merge", file, "ours", "--lora-merge-cache", cache]
    done = run("-c", "import sys; sys.path.insert(0, 'broken')" + COMMAND, *words, cwd=tmp_path)
    assert done.returncode == 1 and "no luck" in done.stderr
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert not cache.exists() or not list(cache.iterdir())
    for module, *words in (
        ("tvb_mergekit", "merge", file, "ours"),
        ("mergekit.scripts.run_yaml", file, "theirs"),
    ):
        cache = tmp_path / f"fused-{words[-1]}"
        done = run("-m", module, *words, "--lora-merge-cache", cache, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    equal(tmp_path)


def equal(folder: Path) -> None:
    ours, theirs = load(folder / "ours"), load(folder / "theirs")
    assert set(ours) == set(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)


LATER = """
import sys
import tvb_mergekit.cli, tvb_mergekit.plugin
heavy = set(sys.argv[1:])
assert not heavy & set(sys.modules), heavy & set(sys.modules)

import mergekit.architecture, mergekit.common, transformers
transformers.LlamaConfig()
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert len(mergekit.common.ARCH_NAME_TO_AUTO_CLS) > 100
from transformers.utils import type_validators
assert len(type_validators.ACT2FN) > 20 and "laplace" in type_validators.ACT2FN
assert "xielu" in type_validators.ACT2FN
from transformers.activations import ACT2FN
assert list(type_validators.ACT2FN) == list(ACT2FN) and "nothing" not in type_validators.ACT2FN

from mergekit.architecture import auto, conversion
assert auto.__file__ and conversion.__file__
assert mergekit.architecture.infer_architecture_info is not auto.infer_architecture_info
names = {"a.weight"}
assert mergekit.io.tasks.convert_checkpoint_tensors("llama", {}, "a.weight") is None
assert conversion.can_convert_checkpoint_keys("llama", names, "a.weight")

import peft
assert mergekit.common.peft.PeftModel is peft.PeftModel and peft.__file__
assert isinstance(transformers.PreTrainedModel, type)
"""


def test_what_comes_later_is_whole(tmp_path: Path) -> None:
    done = run("-c", LATER, *HEAVY, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr


WITHIN = """
import importlib.util, inspect, sys
from tvb_mergekit.plugin import lean
for name in ("peft", *lean.FUNCTIONS, lean.ACTIVATIONS):
    sys.modules.pop(name, None)
with lean.stand_ins():
    shown = sys.modules["peft"]
    assert importlib.util.find_spec("peft") is not None
    inspect.getmodule(inspect.currentframe())
    assert sys.modules["peft"] is shown and not inspect.isclass(shown)
    assert shown.PeftModel.__name__ == "PeftModel"
    real = sys.modules["peft"]
    assert real is not shown
assert sys.modules["peft"] is real
assert lean.ACTIVATIONS not in sys.modules or sys.modules[lean.ACTIVATIONS].__file__
"""


def test_a_stand_in_gives_way(tmp_path: Path) -> None:
    done = run("-c", WITHIN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


STAYS = """
import sys, {first}
module = sys.modules["{first}"]
import tvb_mergekit.cli, tvb_mergekit.plugin, mergekit.common, peft, transformers
assert sys.modules["{first}"] is module
assert mergekit.common.peft.PeftModel is peft.PeftModel
assert isinstance(transformers.PreTrainedModel, type)
"""


@pytest.mark.parametrize("first", ["peft", "transformers.activations"])
def test_what_is_there_stays(first: str, tmp_path: Path) -> None:
    done = run("-c", STAYS.format(first=first), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


PLAIN = """
import {first}, mergekit.architecture, mergekit.common, peft
import tvb_mergekit.plugin
assert mergekit.common.peft is peft and mergekit.architecture.auto.__file__
"""


@pytest.mark.parametrize("first", ["mergekit.merge_methods", "tvb_mergekit.plugin"])
def test_other_processes_import_as_without_us(first: str, tmp_path: Path) -> None:
    done = run("-c", PLAIN.format(first=first), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


ONCE = """
import sys
class Fails:
    left = 1
    def find_spec(self, name, path=None, target=None):
        if name == "mergekit.io.tasks" and self.left:
            self.left = 0
            raise ImportError
sys.meta_path.insert(0, Fails())
import tvb_mergekit.cli, tvb_mergekit.plugin.streaming, peft, transformers
assert not sys.meta_path[0].left
assert isinstance(transformers.PreTrainedModel, type) and peft.PeftModel
"""


def test_a_part_that_fails_is_imported_plainly(tmp_path: Path) -> None:
    done = run("-c", ONCE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
