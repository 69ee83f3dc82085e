"""The bases that the paper's authors publish, read from the files that their code writes.

https://github.com/uiuctml/TaskVectorBasis, src/basis_vectors.py: a folder for each run, with
method_info.json, basis_vectors.pt and one file of coefficients that depends on the method. Their
reader unpickles without restriction and cuts or zero-pads what does not fit together; this one
loads tensors and plain values only, and refuses it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from tvb_mergekit.checkpoints import load_pickle
from tvb_mergekit.errors import UserError
from tvb_mergekit.keys import check_value, shown

_INFO = "method_info.json"
_VECTORS = "basis_vectors.pt"
_AGAIN = "download the folder again"
_ONE_RUN = f"the files are not of one run: {_AGAIN}"
# recipe key -> what the authors call it
_TRAINING = {
    "steps": "steps",
    "learning_rate": "lr",
    "temperature": "tau_init",
    "weight_decay": "weight_decay",
    "anneal_every": "anneal_every",
    "anneal_factor": "anneal_factor",
}


@dataclass(frozen=True)
class Published:
    """What one of the authors' methods wrote: M basis vectors and how they map to T tasks.

    The vectors, as the columns of B, are T W_e, up to the rounding of their dtype, and
    T_hat = B W_d (+ mu 1^T) is what the authors' `recover_task_vectors_from_basis` gives.

    Attributes:
        basis: "ae", "linear_ae", "pca", "rand_proj" or "rand_select".
        tasks: the T names, unique, in the order of W_e's rows and W_d's columns.
        vectors: M times name -> delta: mapped files in their stored dtypes, not always contiguous;
            all have the same names and shapes. Treat them as read-only.
        encoder: W_e [T, M] float64. From the files as it is for ae and linear_ae; for pca
            J V_M, J = I - 11^T/T, which the stored V_M^T determines; one-hot for rand_select.
            None for rand_proj, whose directions are no combination of the task vectors.
        decoder: W_d [M, T] float64: the learned one for ae and linear_ae, V_M^T for pca, Q^T T
            for rand_proj. The authors do not reconstruct from rand_select. What is here is their
            weight matrix: a selected task is its own basis, and every other column is zero and
            says nothing of its task, whose least squares need the task vectors.
        mean: pca: mu as name -> tensor, views of the stored vector; None for the other bases.
        seed: what drew a random basis; otherwise what method_info.json says, 0 for pca without
            one, which draws nothing. (For an autoencoder their code writes down the pipeline's
            seed there, not the method's own, in case a caller gave two.)
        parameters: how an autoencoder was trained, by the recipe's keys; empty for other bases,
            though their method_info.json may list such numbers. `temperature` is the first one;
            the last, after annealing, is already in `encoder`.
        source: method_info.json as it is.
    """

    basis: str
    tasks: tuple[str, ...]
    vectors: list[dict[str, Tensor]]
    encoder: Tensor | None
    decoder: Tensor
    mean: dict[str, Tensor] | None
    seed: int
    parameters: dict[str, Any]
    source: dict[str, Any]


def read_published(folder: str | os.PathLike[str]) -> Published:
    """Read the folder that one of the authors' methods wrote.

    Opens headers and coefficients; the vectors and the mean stay mapped, and are not checked for
    NaN and infinity.

    Raises:
        UserError: a file is missing, cannot be read without running code that it carries, is not
            what the authors' code writes, or does not fit the others.
    """
    folder = Path(folder)
    path = folder / _INFO
    source = _read_json(path, "the method and the tasks: give the folder of one basis")
    method = source.get("method")
    if not isinstance(method, str) or method not in _READERS:
        raise UserError(
            f"{path}: `method` is {shown(method)}: expected one of {', '.join(_READERS)}; "
            "another method's files cannot be read"
        )
    tasks = source.get("datasets")
    if (
        not isinstance(tasks, list)
        or not tasks
        or not all(isinstance(name, str) and name for name in tasks)
        or len(set(tasks)) < len(tasks)
    ):
        raise UserError(
            f"{path}: `datasets` is {shown(tasks)}: expected the tasks' names, each once; {_AGAIN}"
        )
    count = _number(path, source, "M", "num_bases")
    vectors = _read_vectors(folder / _VECTORS, method, count)
    return _READERS[method](_Run(folder, source, tuple(tasks), vectors))


@dataclass(frozen=True)
class _Run:
    """One folder, its common files read and checked."""

    folder: Path
    source: dict[str, Any]
    tasks: tuple[str, ...]
    vectors: list[dict[str, Tensor]]

    def check(self, path: Path, data: Mapping[str, Any], tasks: str, count: str) -> None:
        """That a file of coefficients gives the same tasks and the same M under these keys."""
        _expect(path, data, tasks, list(self.tasks), f"as in {_INFO}")
        _expect(path, data, count, len(self.vectors), f"as in {_INFO}")

    def matrix(self, path: Path, data: Mapping[str, Any], key: str, dims: str) -> Tensor:
        """A small matrix in float64, of the shape that the letters M and T in `dims` say."""
        value = data.get(key)
        shape = tuple({"M": len(self.vectors), "T": len(self.tasks)}[letter] for letter in dims)
        if not _is_plain(value) or value.shape != shape:
            raise UserError(
                f"{path}: `{key}` is {_kind(value)}: expected floating point "
                f"[{', '.join(dims)}] = {list(shape)} by the M and datasets of {_INFO}; {_ONE_RUN}"
            )
        result: Tensor = value.detach().to(torch.float64, copy=True).contiguous()
        bad = int((~result.isfinite()).sum())
        if bad:
            raise UserError(
                f"{path}: `{key}` has {bad} of {result.numel()} entries NaN or infinite: expected "
                "finite numbers; training diverged or the file is damaged"
            )
        return result

    def layout(self, path: Path, data: Mapping[str, Any]) -> list[str]:
        """The names in the order of the flat vectors, checked against the basis vectors."""
        names, shapes = data.get("keys_order"), data.get("param_shapes")
        first = self.vectors[0]
        if (
            not isinstance(names, list)
            or not all(isinstance(name, str) for name in names)
            or sorted(names) != sorted(first)
        ):
            raise UserError(
                f"{path}: `keys_order` is {_kind(names)}: expected the names of the {len(first)} "
                f"tensors of {_VECTORS}, each once; {_ONE_RUN}"
            )
        for name, tensor in first.items():
            shape = shapes.get(name) if isinstance(shapes, dict) else None
            if not isinstance(shape, list | tuple) or list(shape) != list(tensor.shape):
                raise UserError(
                    f"{path}: `param_shapes` has {_found(shape)} for {shown(name)}: expected "
                    f"{list(tensor.shape)} as in {_VECTORS}; {_ONE_RUN}"
                )
        size = sum(tensor.numel() for tensor in first.values())
        _expect(path, data, "total_dim", size, f"the numbers in a vector of {_VECTORS}")
        return names

    def published(
        self,
        basis: str,
        encoder: Tensor | None,
        decoder: Tensor,
        seed: int,
        mean: dict[str, Tensor] | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> Published:
        return Published(
            basis=basis,
            tasks=self.tasks,
            vectors=self.vectors,
            encoder=encoder,
            decoder=decoder,
            mean=mean,
            seed=seed,
            parameters=parameters or {},
            source=self.source,
        )


def _autoencoder(run: _Run) -> Published:
    """AWB.pt: A [T, M] logits, B [T, M] = softmax(A / last temperature) or A / it, W [M, T].

    W is written as it is multiplied with: where `softmax_w` is on, after the softmax. (Reloaded by
    the authors' code it goes through the softmax again, with the first temperature; that is not
    what was trained, and not done here.) `w_activation` alone leaves W raw, in recovery too.
    """
    found = [p.name for p in sorted(run.folder.glob("AWB*.pt"))]
    if not found:
        raise UserError(
            f"{run.folder}: AWB.pt is missing: an autoencoder's encoder and decoder are in it, "
            f"{_VECTORS} has only the vectors; {_AGAIN}"
        )
    if len(found) > 1:
        raise UserError(
            f"{run.folder}: holds {', '.join(found)}: expected one; keep the one that belongs to "
            f"{_VECTORS}"
        )
    path = run.folder / found[0]
    data = _load(path)
    metadata = data.get("metadata")
    if not isinstance(metadata, dict):
        raise UserError(
            f"{path}: `metadata` is {_kind(metadata)}: expected a dictionary of the run's settings;"
            f" {_AGAIN}"
        )
    run.check(path, metadata, "datasets", "M")
    run.matrix(path, data, "A", "TM")
    encoder = run.matrix(path, data, "B", "TM")
    decoder = run.matrix(path, data, "W", "MT")
    kind = metadata.get("encoder", "softmax")  # the authors' default
    if kind not in ("softmax", "linear"):
        raise UserError(
            f"{path}: `encoder` is {_found(kind)}: expected softmax or linear; {_AGAIN}"
        )
    if kind == "softmax":
        _check_convex(path, "B", encoder, "`encoder: softmax`")
    if metadata.get("softmax_w") is True:
        _check_convex(path, "W", decoder, "`softmax_w`")
    parameters = {
        ours: _number(path, metadata, theirs, ours)
        for ours, theirs in _TRAINING.items()
        if metadata.get(theirs) is not None
    }
    if "anneal_every" in metadata:
        parameters.setdefault("anneal_every", 0)
    return run.published(
        "ae" if kind == "softmax" else "linear_ae",
        encoder,
        decoder,
        _number(run.folder / _INFO, run.source, "seed", "seed"),
        parameters=parameters,
    )


def _pca(run: _Run) -> Published:
    """pca_components.pt: V_M^T [M, T], S [M] and mu [d]; B = U_M S_M = T J V_M.

    So W_e = J V_M: each column of V_M minus its mean.
    """
    path = run.folder / "pca_components.pt"
    data = _load(path)
    run.check(path, data, "dataset_names", "M_actual")
    decoder = run.matrix(path, data, "coefficients", "MT")
    run.matrix(path, data, "singular_values", "M")
    names = run.layout(path, data)
    flat = data.get("mean_vector")
    if not _is_plain(flat) or flat.shape != (data["total_dim"],):
        raise UserError(
            f"{path}: `mean_vector` is {_kind(flat)}: expected floating point "
            f"[{data['total_dim']}], flat as `total_dim` says; {_AGAIN}"
        )
    first = run.vectors[0]
    pieces = flat.split([first[name].numel() for name in names])
    mean = {
        name: piece.reshape(first[name].shape) for name, piece in zip(names, pieces, strict=True)
    }
    seed = 0
    if run.source.get("seed") is not None:
        seed = _number(run.folder / _INFO, run.source, "seed", "seed")
    encoder = (decoder - decoder.mean(dim=1, keepdim=True)).T.contiguous()
    return run.published("pca", encoder, decoder, seed, mean=mean)


def _rand_proj(run: _Run) -> Published:
    """random_basis.pt: Q^T T [M, T] and the seed of Q, the basis vectors.

    The authors draw Q again to recover; the stored vectors are the same Q, whatever PyTorch's
    generator does today.
    """
    path = run.folder / "random_basis.pt"
    data = _load(path)
    run.check(path, data, "dataset_names", "M")
    run.layout(path, data)
    decoder = run.matrix(path, data, "projection_coefficients", "MT")
    return run.published("rand_proj", None, decoder, _number(path, data, "seed", "seed"))


def _rand_select(run: _Run) -> Published:
    """random_selection.json: which task vectors were drawn, in the order of the basis vectors."""
    path = run.folder / "random_selection.json"
    data = _read_json(path, f"the drawn tasks: {_AGAIN}")
    drawn, size = data.get("selected_indices"), len(run.tasks)
    if (
        not isinstance(drawn, list)
        or not all(type(index) is int and 0 <= index < size for index in drawn)
        or len(set(drawn)) < len(drawn)
        or len(drawn) != len(run.vectors)
    ):
        raise UserError(
            f"{path}: `selected_indices` is {shown(drawn)}: expected {len(run.vectors)} different "
            f"whole numbers from 0 to {size - 1}, by the M and datasets of {_INFO}; {_ONE_RUN}"
        )
    names = [run.tasks[index] for index in drawn]
    _expect(path, data, "total_tasks", size, f"as in {_INFO}")
    _expect(path, data, "selected_datasets", names, f"by `selected_indices` and {_INFO}")
    encoder = torch.eye(size, dtype=torch.float64)[:, drawn].contiguous()
    seed = _number(path, data, "seed", "seed")
    return run.published("rand_select", encoder, encoder.T.contiguous(), seed)


_READERS: dict[str, Callable[[_Run], Published]] = {
    "AutoencoderBasisMethod": _autoencoder,
    "PCABasisMethod": _pca,
    "RandomBasisMethod": _rand_proj,
    "RandomSampleMethod": _rand_select,
}


def _read_vectors(path: Path, method: str, count: int) -> list[dict[str, Tensor]]:
    data = _load(path)
    _expect(path, data, "method", method, f"as in {_INFO}")
    vectors = data.get("basis_vectors")
    if not isinstance(vectors, list) or not vectors:
        raise UserError(
            f"{path}: `basis_vectors` is {_kind(vectors)}: expected a list of {count} "
            f"dictionaries; {_AGAIN}"
        )
    _expect(path, data, "num_basis", len(vectors), "the number of vectors in it")
    if len(vectors) != count:
        # Their pipeline writes the M it was called with, not the method's, and PCA and random
        # selection stop at T.
        raise UserError(
            f"{path}: holds {len(vectors)} basis vectors: expected {count}, the M of {_INFO}; "
            f"{_AGAIN}, or correct M in its files if the run made {len(vectors)}"
        )
    for place, vector in enumerate(vectors):
        _check_vector(path, place, vector, vectors[0])
    return vectors


def _check_vector(path: Path, place: int, vector: object, first: dict[str, Tensor]) -> None:
    where = f"{path}: basis vector {place}"
    if not isinstance(vector, dict) or not vector:
        raise UserError(
            f"{where} is {_kind(vector)}: expected a dictionary of named tensors (a flat vector "
            f"has lost its names); {_AGAIN}"
        )
    for name, value in vector.items():
        if not isinstance(name, str) or not _is_plain(value):
            raise UserError(
                f"{where} has {_kind(value)} under {shown(name)}: expected a floating-point tensor "
                f"under a name; {_AGAIN}"
            )
    if vector.keys() != first.keys():
        name = sorted(vector.keys() ^ first.keys())[0]
        found, expected = ("has no", "one") if name in first else ("has a", "none")
        raise UserError(
            f"{where} {found} tensor {shown(name)}: expected {expected} as in basis vector 0; "
            f"{_AGAIN}"
        )
    for name, value in vector.items():
        if value.shape != first[name].shape:
            raise UserError(
                f"{where} has shape {list(value.shape)} for {shown(name)}: expected "
                f"{list(first[name].shape)} as in basis vector 0; {_AGAIN}"
            )


def _check_convex(path: Path, key: str, matrix: Tensor, reason: str) -> None:
    """That the columns are what a softmax gives, up to the rounding of half precision."""
    off = float((matrix.sum(dim=0) - 1).abs().max())
    least = float(matrix.min())
    if off > 1e-2 or least < 0:
        raise UserError(
            f"{path}: `{key}` has columns that sum to 1 +- {off:.3g} and a least entry of "
            f"{least:.3g}: expected convex columns, which {reason} gives; {_AGAIN}"
        )


def _number(path: Path, data: Mapping[str, Any], theirs: str, ours: str) -> Any:
    """One of their numbers, held to the type and range of the recipe's key."""
    try:
        return check_value(ours, data.get(theirs))
    except UserError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: {reason} (its key is `{theirs}`); {_AGAIN}") from error


def _is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor of numbers that are there to be read and computed with."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.device.type == "cpu"
    )


def _expect(path: Path, data: Mapping[str, Any], key: str, expected: object, why: str) -> None:
    found = data.get(key)
    if isinstance(found, tuple):
        found = list(found)
    # the type first: `!=` of a tensor gives a tensor
    if type(found) is not type(expected) or found != expected:
        raise UserError(
            f"{path}: `{key}` is {_found(found)}: expected {expected}, {why}; {_ONE_RUN}"
        )


def _found(value: object) -> str:
    """A value from a file, on one line: the text of a tensor has several."""
    return " ".join(shown(value).split())


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{place}"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; it holds {what}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read as JSON ({type(error).__name__}: {error}); {_AGAIN}"
        ) from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds {_kind(data)}: expected a dictionary; {_AGAIN}")
    return data


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: missing; {_AGAIN}")
    unsafe = "the authors' code writes tensors and plain values only: do not use this file"
    data = load_pickle(path, legacy=False, unsafe=unsafe, broken=_AGAIN)
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds {_kind(data)}: expected a dictionary; {_AGAIN}")
    return data
