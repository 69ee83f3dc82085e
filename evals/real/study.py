#!/usr/bin/env python
"""Measure merges, bases and stores of SmolLM2's specialists, and report it.

Each new cell gets a line in `cells.jsonl`, and the tables of evals/RESULTS.md are renewed. A
command goes on after an interruption.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import torch
from tqdm import tqdm
from transformers.utils import logging

from real import cells, tables
from real.plan import KINDS, MODELS, parts
from real.run import Run

HERE = Path(__file__).resolve().parent
FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(epilog="Example: python evals/real/study.py --data real-data --part merges")
@click.option("--data", type=FOLDER, help="The folder of get_data.py. Without it: report alone.")
@click.option("--out", type=FOLDER, default="real-runs", show_default=True,
              help="The folder of train.py.")  # fmt: skip
@click.option("--models", type=click.Choice([*MODELS]), default="full", show_default=True)
@click.option("--seed", default=0, show_default=True, help="Seed of the training.")
@click.option("--part", "wanted", type=click.Choice([*parts(8)]), multiple=True,
              default=("reference",), show_default=True, help="May be repeated.")  # fmt: skip
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--cells", "kept", type=FILE, default=HERE / "cells.jsonl", help="All cells so far.")
@click.option("--page", type=FILE, default=HERE.parent / "RESULTS.md", help="Has marked tables.")
def main(
    data: Path | None, out: Path, models: str, seed: int, wanted: tuple[str, ...], device: str,
    kept: Path, page: Path,
) -> None:  # fmt: skip
    """Measure missing cells of some models, and renew the tables of the page."""
    records = cells.read(kept)
    if data is not None:
        logging.disable_progress_bar()
        kind, tasks = MODELS[models]
        folders = [out / f"seed{seed}" / kind / task for task in tasks]
        lacking = [str(folder) for folder in (out / "base", *folders) if not folder.exists()]
        if lacking:
            raise click.ClickException(f"run evals/real/train.py first: no {lacking[0]}")
        weights = cells.fingerprint([out / "base", *folders])
        place = out / f"seed{seed}" / "cells" / models
        needed = () if {*wanted} == {"routed"} else ("reference",)  # right tasks need no scores
        asked = [cell for part in dict.fromkeys((*needed, *wanted))
                 for cell in parts(len(tasks))[part]]  # fmt: skip
        files = {cells.place(place, cell, weights): cell for cell in asked}
        missing = not all(file.exists() for file in files)
        run: Any = Run(out, data, seed, kind, tasks, device) if missing else None
        for file, cell in tqdm(files.items(), desc=f"{models} seed {seed}", unit="cell"):
            result = cells.measured(file, cell, lambda cell: KINDS[cell["kind"]](run, cell))
            records.append({"models": models, "seed": seed, "cell": cell, "result": result})
            cells.write(kept, records)
    tables.report(cells.read(kept), page)


if __name__ == "__main__":
    main()
