"""Our commands start without what they do not need, and get it where they do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from commands import recipe, write
from tiny import DECODER, family, llama, load

HEAVY = {
    "peft",
    "sympy",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
}


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
    ours, theirs = load(tmp_path / "ours"), load(tmp_path / "theirs")
    assert set(ours) == set(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_an_adapter_is_fused(models: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, (tuned, _other) = models
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "adapter")
    given = recipe("basis_ta", base, [tuned, f"{base}+{tmp_path / 'adapter'}"], num_bases=1)
    file = write(given, tmp_path / "out")
    words = ["build", file, "store", "--fuse", "--lora-merge-cache", "fused"]
    done = run("-m", "tvb_mergekit", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "store" / "basis.json").read_text())["num_bases"] == 1


LATER = """
import sys
import tvb_mergekit.plugin
heavy = set(sys.argv[1:])
assert not heavy & set(sys.modules), heavy & set(sys.modules)

import mergekit.architecture, mergekit.common, transformers
transformers.LlamaConfig()
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from transformers.utils import type_validators
assert len(type_validators.ACT2FN) > 20 and "laplace" in type_validators.ACT2FN
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
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["mergekit.common", "transformers.modeling_utils"])
def test_what_is_there_stays(first: str, tmp_path: Path) -> None:
    code = f"import {first}\nimport tvb_mergekit.plugin, mergekit.common, peft, transformers\n"
    code += "assert mergekit.common.peft.PeftModel is peft.PeftModel\n"
    code += "assert isinstance(transformers.PreTrainedModel, type)\n"
    done = run("-c", code, cwd=tmp_path)
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
import tvb_mergekit.plugin.streaming, peft, transformers
assert not sys.meta_path[0].left
assert isinstance(transformers.PreTrainedModel, type) and peft.PeftModel
"""


def test_a_part_that_fails_is_imported_plainly(tmp_path: Path) -> None:
    done = run("-c", ONCE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
