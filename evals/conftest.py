"""The study, the benchmark of speed and the commands of recipes/smollm2, as modules to import."""

import sys
from pathlib import Path

EVALS = Path(__file__).resolve().parent
sys.path += [str(EVALS), str(EVALS / "speed"), str(EVALS.parent / "recipes/smollm2")]
