"""A store whose bases are sparse: those of a recipe or of a store, each times a mask.

sigma(S_m) * B_m is not a combination of the task vectors. So the decoder and its errors follow from
one pass over the sparse bases and the vectors before: the small Gram matrix of both together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis
from tvb_mergekit.core.online import NOISE, lengths, of_sum
from tvb_mergekit.store.addition import with_vectors
from tvb_mergekit.store.facts import FileRecord, StoreFacts, record_of
from tvb_mergekit.store.forms import items_of
from tvb_mergekit.store.store import Bases, basis_folder, dtype_name
from tvb_mergekit.store.vectors import (
    Vectors,
    copy_config,
    dense_vectors,
    facts_of,
    history_of,
    local_path,
)
from tvb_mergekit.store.writer import StoreWriter, link
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.output import check_new_folder
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.sparse import Sparse
from tvb_mergekit.tensors.stream import Item
from tvb_mergekit.tensors.taskset import TaskSet

CONFIG, WEIGHTS = "config.json", "model.safetensors"
KEPT = ("gram", "eigenvalues", "encoder")  # of basis.safetensors, what does not depend on masks


@dataclass(frozen=True)
class Dense:
    """The M bases that were masked, and the task vectors that they stand for.

    Attributes:
        facts, tensors: of the store that holds these bases, or would; see `docs/files.md`.
        items: the tensors of the bases, with N vectors as inputs.
        names: of the N vectors.
        targets: [N, T], each task vector, or its reconstruction, from these N vectors.
        errors: [2, T], bounds of how far the targets are from the task vectors; None: they are
            the task vectors.
        config: the folder of the base's configuration.
    """

    facts: StoreFacts
    tensors: Mapping[str, Tensor]
    items: Sequence[Item]
    names: Sequence[str]
    targets: Tensor
    errors: Tensor | None = None
    config: Path | None = None

    @classmethod
    def of_models(cls, inputs: TaskSet, basis: Basis) -> Dense:
        """The bases of T models, which need not be stored."""
        vectors = dense_vectors(inputs, basis, torch.float32)
        facts = facts_of(vectors, history_of(inputs, basis))
        targets = torch.tensor(basis.weights, dtype=torch.float64).diag()
        errors = inputs.lacking if inputs.missed else None
        tensors, names, config = vectors.tensors, facts.tasks, inputs.folder
        return cls(facts, tensors, inputs.items, names, targets, errors, config)

    @classmethod
    def of_store(
        cls, bases: Bases, order: Sequence[int] = (), weights: Sequence[float] = ()
    ) -> Dense:
        """The bases of a store.

        Args:
            order: which of them was masked to give each sparse one.
            weights: by which each of these was multiplied before.
        """
        order = list(order) or range(bases.num_bases)
        scales = torch.tensor(list(weights) or [1.0] * len(order), dtype=torch.float64)
        tensors = {**bases.tensors, "encoder": bases.encoder[:, list(order)] * scales}
        places = [bases.path / basis_folder(0)] if bases.path else []
        places = [each for each in (*places, Path(bases.base_name)) if (each / CONFIG).is_file()]
        store = bases.facts.store.but(base_path=local_path(bases.base_name), base_beside=None)
        facts = bases.facts.but(store=store)
        targets = bases.reconstruction(bases.tasks) * bases.scales[:, None]
        items, names = items_of(bases.sources), facts.store.folders
        config, errors = next(iter(places), None), bases.tensors["errors"]
        return cls(facts, tensors, items, names, targets, errors, config)


def sparse_store(
    dense: Dense, files: Sequence[Path], out: str | os.PathLike[str], engine: Engine = Engine()
) -> Bases:
    """Write the store `out` of sparse bases.

    If several processes may write the store, the caller holds its lock.

    Args:
        dense: The bases before their masks.
        files: Files of `write_sparse` in one dtype, one for each basis, with the tensors of
            `dense.items`. The store links or copies them.

    Raises:
        UserError: `out` exists, or a file is damaged.
    """
    check_new_folder(out)
    vectors = [Sparse.open(file) for file in files]
    names = [basis_folder(m) for m in range(len(files))]
    sums = gram_pass(with_vectors(vectors, dense.items), [*names, *dense.names], engine)
    tensors, history = _measured(dense, sums.gram)
    entries = len(files) * sum(item.numel for item in dense.items)
    writer = StoreWriter(out)
    writer.begin()
    try:
        kept: dict[str, FileRecord] = {}
        for index, (file, name) in enumerate(zip(files, names, strict=True)):
            folder = writer.folder / name
            folder.mkdir()
            link(file, folder / WEIGHTS)
            kept[f"{name}/{WEIGHTS}"] = record_of(folder / WEIGHTS)
            kept |= copy_config(dense.config, folder, index, tokenizer=False)
        density = sum(each.count for each in vectors) / max(entries, 1)
        dtype = dtype_name(vectors[0].dtype)
        made = Vectors(tensors, names, kept, dtype, "sparse", density=density)
        return writer.commit(made, history)
    finally:
        writer.discard()


def _measured(dense: Dense, gram: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`basis.safetensors`, and the keys of `basis.json` that do not follow from it.

    `gram` [M + N, M + N] is of the M sparse bases and the N vectors before.
    """
    old, count = dense.facts, dense.facts.num_bases
    products = gram[:count, :count]
    # Least squares, with bases of length 1; one that is all zero, or their sum, gets no part.
    scales = products.diagonal().sqrt().reciprocal().nan_to_num(posinf=0.0)
    inverse = torch.linalg.pinv(
        products * torch.outer(scales, scales), rtol=NOISE * count, hermitian=True
    )
    cross = gram[:count, count:] @ dense.targets
    decoder = scales[:, None] * (inverse @ (scales[:, None] * cross))
    missed = torch.cat([-decoder, dense.targets])
    errors, loss = lengths(gram, missed), None
    energy = float((dense.targets * (gram[count:, count:] @ dense.targets)).sum())
    if dense.errors is None:
        loss = max(float((missed * (gram @ missed)).sum()), 0.0)
    else:
        errors = of_sum(errors, dense.errors)
    bound = old.spectral_bound or 0.0
    known = loss is not None and bound > 1e-12 * energy
    history = {
        **old,
        "loss": loss,
        "relative_gap": (loss - bound) / bound if loss is not None and known else None,
        "retained_energy": None if loss is None or not energy else 1 - loss / energy,
        "store": {**old.store, "compress": None, "basis_weights": None},
    }
    kept = {name: each for name, each in dense.tensors.items() if name in KEPT}
    tensors = {**kept, "decoder": decoder, "gram_bases": products, "errors": errors}
    return tensors, history
