"""The studies, the benchmarks of speed and the recipe of evals/real, as modules to import."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

EVALS = Path(__file__).resolve().parent
sys.path += [str(EVALS), str(EVALS / "speed"), str(EVALS.parent / "recipes/smollm2")]


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autoencoders are trained for 20 steps."""
    autoencoder: Any = importlib.import_module("tvb_mergekit.core.encoders.autoencoder")
    train = autoencoder._train
    monkeypatch.setattr(autoencoder, "_train", lambda gram, count, settings: train(
        gram, count, settings.model_copy(update={"steps": 20})))  # fmt: skip
