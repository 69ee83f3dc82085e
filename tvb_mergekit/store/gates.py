"""Gates: directions of inputs that show the task of a prompt; see `router`.

The gate of a task and a matrix holds the first right singular vectors of the task's difference, k
rows [k, inputs]: what training has seen there. `tvb build` and `tvb add` keep them, which a sample
has lost. In `looked_at` lie few matrices, and so the gates take about a hundredth of the bytes of a
lossless model.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.names import TRANSPOSED, is_linear, looked_at
from tvb_mergekit.store.facts import StoredFile, check_files, record_of, write_tensors
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.stream import Item
from tvb_mergekit.tensors.taskset import TaskSet

MOST = 4  # directions of a matrix
LEAST = 0.1  # singular value, of the largest one
SKETCH = 12  # further columns of the random sketch, which make the first ones exact


def gate_of(difference: Tensor) -> Tensor:
    """The first right singular vectors of a matrix [outputs, inputs], [k, inputs] float32."""
    # Randomized: Halko et al., SIAM Review 2011, algorithm 4.4 with six iterations
    matrix, start = difference.double(), torch.Generator().manual_seed(0)
    span = torch.randn(len(matrix), MOST + SKETCH, generator=start, dtype=torch.float64)
    for _ in range(6):
        span = torch.linalg.qr(matrix @ (matrix.T @ torch.linalg.qr(span)[0]))[0]
    _, sizes, rows = torch.linalg.svd(span.T @ matrix, full_matrices=False)
    kept = (sizes > LEAST * sizes[:1]) & (sizes > 0)
    found: Tensor = rows[:MOST][kept[:MOST]].float()
    return found


def gates_of(items: Sequence[Item], number: int, turned: Container[str]) -> dict[str, Tensor]:
    """The gates of the model at `number` in each item's inputs, by names of matrices.

    Args:
        turned: the matrices that are stored as [inputs, outputs].
    """
    matrices = {i.name: i for i in items if len(i.shape) == 2 and is_linear(i.name, 2) and i.inputs}
    for names in looked_at([*matrices]):
        found = {n: gate_of(difference(matrices[n], number, n in turned)) for n in names}
        if any(map(len, found.values())):
            return {name: gate for name, gate in found.items() if len(gate)}
    return {}


def difference(item: Item, number: int, turned: bool) -> Tensor:
    """The change of a matrix by a model, [outputs, inputs]."""
    item = item.loaded()
    part, base = item.inputs[number], item.base
    found = item.whole(part).float().view(item.shape)
    if part.holds == "weight" and base is not None:
        found = found - item.whole(base).float().view(item.shape)
    return found.T if turned else found


def write_gates(store: Path, place: str, inputs: TaskSet, number: int) -> StoredFile:
    """Write the gates of one task at a place of a store."""
    pattern = TRANSPOSED.get(inputs.base.model_type or "", "$^")
    turned = {item.name for item in inputs.items if re.search(pattern, item.name)}
    found = gates_of(inputs.items, number, turned)
    halves = {name: gate.half() for name, gate in found.items()}
    write_tensors(store / place, halves, {"format": "pt"})
    return record_of(store, place)


def gates_in(bases: Bases, task: str, names: Container[str]) -> dict[str, Tensor]:
    """The gates of one task of a store, for the matrices of these names."""
    stored = bases.facts.vectors[bases.index(task)].gates
    if stored is None:
        raise UserError(f"{bases.path} has no gates of {task}; build it again")
    check_files(bases.path, [stored], checksums=True)
    held = load_file(bases.path / stored.file)
    return {name: gate.float() for name, gate in held.items() if name in names}
