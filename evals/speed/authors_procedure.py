"""The paper's procedure in plain PyTorch, with nothing of this package: see README.md.

Load all T task vectors in float32, their Gram matrix in chunks, 4000 steps of Adam on a softmax
encoder and a linear decoder (Definition 1, with the hyperparameters of the appendix), M basis
vectors, save. Prints the seconds of each part. There is one file of weights for each basis, and
`encoding.safetensors` with both matrices.

Two ways to hold the task vectors: `dicts`, a dictionary of tensors for each model as in the
authors' published code (github.com/uiuctml/TaskVectorBasis), which never holds more; and `matrix`,
the paper's T x d stacked from flat vectors, which holds them twice while it does so.

    python authors_procedure.py {dicts,matrix} M OUT BASE MODEL [MODEL ...]
    python authors_procedure.py same STORE OUT    the largest ||a - b|| / ||b|| of M vectors
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

STEPS, RATE, TEMPERATURE, DECAY = 4000, 0.01, 5.0, 1e-6
ROWS = 2_000_000  # of one chunk of the Gram matrix
State = dict[str, Tensor]


def load(folder: Path) -> State:
    state: State = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    return state


def flat(state: State) -> Tensor:
    return torch.cat([tensor.float().flatten() for tensor in state.values()])


def train(gram: Tensor, bases: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """W_e [T, M] and W_d [M, T] by Adam on Tr(E^T G E) / T^2, E = W_e W_d - I."""
    torch.manual_seed(seed)
    tasks = len(gram)
    logits = torch.randn(tasks, bases, requires_grad=True)
    decoder = torch.zeros(bases, tasks, requires_grad=True)
    optimizer = torch.optim.Adam([logits, decoder], lr=RATE, weight_decay=DECAY)
    for _ in range(STEPS):
        error = torch.softmax(logits / TEMPERATURE, dim=0) @ decoder - torch.eye(tasks)
        loss = (error * (gram @ error)).sum() / tasks**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.softmax(logits.detach() / TEMPERATURE, dim=0), decoder.detach()


def gram_of(rows: list[Tensor] | Tensor) -> Tensor:
    """G [T, T] in float32 of T flat tensors, chunk by chunk."""
    gram = torch.zeros(len(rows), len(rows))
    for start in range(0, rows[0].numel(), ROWS):
        chunk = torch.stack([row[start : start + ROWS] for row in rows])
        gram += chunk @ chunk.T
    return gram


def main(form: str, bases: int, out: Path, base_folder: Path, folders: list[Path]) -> None:
    marks = [time.perf_counter()]
    base = load(base_folder)
    made: list[State]
    if form == "dicts":
        vectors = []
        for folder in folders:
            model = load(folder)
            vectors.append({name: model[name].float() - base[name].float() for name in base})
            del model
        marks.append(time.perf_counter())
        gram = torch.zeros(len(folders), len(folders))
        for name in base:
            gram += gram_of([vector[name].flatten() for vector in vectors])
        marks.append(time.perf_counter())
        encoder, decoder = train(gram, bases)
        marks.append(time.perf_counter())
        made = [{n: torch.zeros(t.shape) for n, t in base.items()} for _ in range(bases)]
        for vector, weights in zip(vectors, encoder.tolist(), strict=True):
            for basis, weight in zip(made, weights, strict=True):
                for name, tensor in basis.items():
                    tensor.add_(vector[name], alpha=weight)
    else:
        start = flat(base)
        matrix = torch.stack([flat(load(folder)).sub_(start) for folder in folders])
        marks.append(time.perf_counter())
        gram = gram_of(matrix)
        marks.append(time.perf_counter())
        encoder, decoder = train(gram, bases)
        marks.append(time.perf_counter())
        sizes = [tensor.numel() for tensor in base.values()]
        made = [
            {
                name: piece.view(base[name].shape)
                for name, piece in zip(base, row.split(sizes), strict=True)
            }
            for row in encoder.T @ matrix
        ]
    marks.append(time.perf_counter())
    out.mkdir(parents=True)
    for index, basis in enumerate(made):
        save_file(basis, out / f"basis-{index}.safetensors")
    save_file({"encoder": encoder.contiguous(), "decoder": decoder}, out / "encoding.safetensors")
    marks.append(time.perf_counter())
    names = ("load", "gram", "encode", "combine", "save")
    parts = zip(names, marks[1:], marks, strict=False)
    print(json.dumps({name: stop - start for name, stop, start in parts}))


def distance(store: Path, plain: Path) -> float:
    """The relative distance of a store's basis from the procedure's, a tensor at a time."""
    off = norm = 0.0
    with safe_open(plain, framework="pt") as expected:
        names = set(expected.keys())
        for file in store.glob("*.safetensors"):
            with safe_open(file, framework="pt") as found:
                for name in found.keys():
                    want = expected.get_tensor(name).double()
                    off += float((found.get_tensor(name).double() - want).square().sum())
                    norm += float(want.square().sum())
                    names.remove(name)
    if names:
        raise SystemExit(f"{store}: has no {sorted(names)[0]}")
    return float((off / norm) ** 0.5)


def farthest(store: Path, out: Path) -> float:
    count = len([*out.glob("basis-*.safetensors")])
    return max(
        distance(store / f"basis-{i:03d}", out / f"basis-{i}.safetensors") for i in range(count)
    )


if __name__ == "__main__":
    if sys.argv[1] == "same":
        print(farthest(*map(Path, sys.argv[2:])))
    elif sys.argv[1] != "start-up":  # the imports alone
        form, bases, out, *folders = sys.argv[1:]
        main(form, int(bases), Path(out), Path(folders[0]), [Path(f) for f in folders[1:]])
