"""`tvb learn STORE route`: a centroid of the prompts of each task, for `Live.choose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tvb_mergekit.learn.data import encode, open_tokenizer, read_data
from tvb_mergekit.learn.models import limits, load_model
from tvb_mergekit.learn.work import save
from tvb_mergekit.progress import Progress
from tvb_mergekit.store.routing import prompt_states
from tvb_mergekit.store.store import Bases


def learn_centroids(
    bases: Bases, base: Path, data: Sequence[str], out: Path, device: torch.device,
    trust: bool, progress: Progress,
) -> None:  # fmt: skip
    """Write the mean `prompt_states` of each task's prompts to a file, as the base sees them.

    Args:
        base: the folder of theta_0.
        data: `TASK=FILE` for each task of the store; see `read_data`.

    Raises:
        UserError: a mistake in the data.
    """
    files = read_data(data, bases.tasks, unlabeled=True, texts=False)
    tokenizer = open_tokenizer([base], trust)
    files = [replace(file, records=[(n, _asked(of)) for n, of in file.records]) for file in files]
    encoded = [encode(file, tokenizer, *limits(base, trust)) for file in files]
    model, means = load_model(base, device, trust), []
    update = progress("Prompts", sum(map(len, encoded)), "prompt")
    for examples in encoded:
        states = []
        for example in examples:
            ids = torch.tensor([example.ids[: example.start]], device=device)
            states.append(prompt_states(model, ids, None))
            update(1)
        means.append(torch.cat(states).mean(0))
    facts = {"tasks": bases.tasks, "base": bases.facts.store.base_fingerprint}
    save(out, {"centroids": torch.stack(means)}, facts)


def _asked(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The prompt alone: a token may join its end and the response."""
    return {"prompt": record["prompt"]} if "prompt" in record else record
