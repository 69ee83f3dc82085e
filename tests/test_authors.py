"""The paper's authors' folders: written here as their methods do, from dense numbers, and read."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tvb_mergekit.authors import Published, read_published
from tvb_mergekit.errors import UserError
from tvb_mergekit.keys import check_value

M, T = 2, 5
TASKS = ["Cars", "DTD", "EuroSAT", "GTSRB", "MNIST"]
SHAPES = {"proj": (6, 4), "ln.weight": (7,), "scale": (), "conv": (3, 2, 2, 2)}
INFO, VECTORS = "method_info.json", "basis_vectors.pt"
Vector = dict[str, Tensor]
Edit = Callable[[Path], object]


def task_vectors(dtype: torch.dtype = torch.float32) -> list[Vector]:
    generator = torch.Generator().manual_seed(3)
    common = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return [
        {
            name: (0.3 * common[name] + torch.randn(shape, generator=generator)).to(dtype)
            for name, shape in SHAPES.items()
        }
        for _ in range(T)
    ]


def dense(vectors: list[Vector]) -> Tensor:
    """[d, number of vectors] float64, names in the order of SHAPES."""
    columns = [torch.cat([v[name].double().flatten() for name in SHAPES]) for v in vectors]
    return torch.stack(columns, dim=1)


def named(column: Tensor) -> Vector:
    pieces = column.split([math.prod(shape) for shape in SHAPES.values()])
    return {n: p.reshape(s) for (n, s), p in zip(SHAPES.items(), pieces, strict=True)}


def write(folder: Path, method: str, info: dict[str, Any], vectors: list[Vector] | None) -> None:
    folder.mkdir(parents=True)
    info = {"method": method, "M": M, "seed": 4, "datasets": TASKS} | info
    (folder / INFO).write_text(json.dumps(info, indent=2))
    if vectors is not None:
        content = {"basis_vectors": vectors, "num_basis": len(vectors), "method": method}
        torch.save(content, folder / VECTORS)


def layout() -> dict[str, Any]:
    return {
        "total_dim": sum(math.prod(shape) for shape in SHAPES.values()),
        "keys_order": list(SHAPES),
        "param_shapes": {name: torch.Size(shape) for name, shape in SHAPES.items()},
        "dataset_names": TASKS,
        "storage_info": {"compact_size_mb": 0.1},
    }


# What the pipeline writes down for every method, whether it uses it or not.
UNUSED = {"steps": 4000, "lr": 0.01, "tau": 1.0, "anneal_tau": None, "encoder": "softmax"}


def autoencoder(
    folder: Path,
    encoder: str = "softmax",
    anneal: tuple[int, float] | None = None,
    softmax_w: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Train on the Gram matrix, write; returns W_e, W_d and the reconstruction [d, T], float64."""
    tasks = task_vectors(dtype)
    matrix = dense(tasks)
    gram, tau = (matrix.T @ matrix).float(), 5.0
    torch.manual_seed(4)
    logits = torch.randn(T, M, requires_grad=True)
    weights = torch.zeros(M, T, requires_grad=True)
    optimizer = torch.optim.Adam([logits, weights], lr=0.01, weight_decay=1e-6)

    def encode() -> Tensor:
        scaled = logits / tau
        return scaled.softmax(dim=0) if encoder == "softmax" else scaled

    def decode() -> Tensor:
        return (weights / tau).softmax(dim=0) if softmax_w else weights

    for step in range(1, 121):
        error = encode() @ decode() - torch.eye(T)
        optimizer.zero_grad()
        ((error * (gram @ error)).sum() / T**2).backward()
        optimizer.step()
        if anneal and step % anneal[0] == 0:
            tau = max(0.1, tau * anneal[1])
    with torch.no_grad():
        b, w = encode(), decode().detach()
    vectors = [
        {name: sum(float(b[t, m]) * tasks[t][name] for t in range(T)).to(dtype) for name in SHAPES}
        for m in range(M)
    ]
    metadata = {
        "model": "ViT-B-32",
        "finetuning_mode": "standard",
        "datasets": TASKS,
        "M": M,
        "steps": 120,
        "lr": 0.01,
        "tau_init": 5.0,
        "anneal_every": anneal[0] if anneal else None,
        "anneal_factor": anneal[1] if anneal else None,
        "weight_decay": 1e-6,
        "grad_clip": None,
        "batch_cols": None,
        "device": "cuda",
        "seed": 4,
        "softmax_w": softmax_w,
        "encoder": encoder,
        "w_activation": "linear",
        "gram_dtype": "float32",
        "notes": None,
        "task_scenario": 8,
        "timestamp": "2026-01-01 00:00:00",
        "method": "AutoencoderBasisMethod",
    }
    write(folder, "AutoencoderBasisMethod", metadata, vectors)
    content = {"A": logits.detach(), "W": w, "B": b, "metadata": metadata}
    torch.save(content, folder / "AWB.pt")
    return {"W_e": b.double(), "W_d": w.double(), "T_hat": dense(vectors) @ w.double()}


def pca(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    matrix = dense(task_vectors(dtype)).to(dtype)
    mean = matrix.mean(dim=1)
    left, scales, right = torch.linalg.svd((matrix - mean[:, None]).float(), full_matrices=False)
    left, scales, right = left.to(dtype), scales.to(dtype), right.to(dtype)
    basis = left[:, :M] * scales[:M]
    # as views of one flat vector each
    write(folder, "PCABasisMethod", UNUSED, [named(basis[:, m].clone()) for m in range(M)])
    content = {
        "coefficients": right[:M],
        "mean_vector": mean,
        "singular_values": scales[:M],
        "M_actual": M,
    }
    torch.save(content | layout(), folder / "pca_components.pt")
    exact = dense(task_vectors(dtype))
    centering = torch.eye(T, dtype=torch.float64) - 1 / T
    top = torch.linalg.svd(exact @ centering)[2][:M].T
    top = top * (top * right[:M].T.double()).sum(dim=0).sign()  # the signs that the file has
    components = exact @ centering @ top
    mu = exact.mean(dim=1, keepdim=True)
    return {"W_e": centering @ top, "W_d": top.T, "T_hat": components @ top.T + mu, "mu": mu}


def rand_proj(folder: Path) -> dict[str, Tensor]:
    matrix = dense(task_vectors()).float()
    generator = torch.Generator().manual_seed(9)
    omega = torch.linalg.qr(torch.randn(len(matrix), M, generator=generator)).Q
    # strided views of the one d x M matrix
    write(folder, "RandomBasisMethod", UNUSED, [named(omega[:, m]) for m in range(M)])
    content = {"projection_coefficients": omega.T @ matrix, "seed": 9, "M": M}
    torch.save(content | layout(), folder / "random_basis.pt")
    decoder = omega.double().T @ dense(task_vectors())
    return {"W_d": decoder, "T_hat": omega.double() @ decoder}


def rand_select(folder: Path) -> dict[str, Tensor]:
    tasks = task_vectors()
    drawn = sorted(random.Random(4).sample(range(T), M))
    vectors = [{name: value.clone() for name, value in tasks[i].items()} for i in drawn]
    write(folder, "RandomSampleMethod", UNUSED, vectors)
    content = {
        "seed": 4,
        "M": M,
        "selected_indices": drawn,
        "selected_datasets": [TASKS[i] for i in drawn],
        "total_tasks": T,
    }
    (folder / "random_selection.json").write_text(json.dumps(content))
    one_hot = torch.zeros(T, M, dtype=torch.float64)
    for place, index in enumerate(drawn):
        one_hot[index, place] = 1
    t_hat = dense(tasks) * one_hot.sum(dim=1)
    return {"W_e": one_hot, "W_d": one_hot.T, "T_hat": t_hat}


WRITERS: dict[str, tuple[str, Callable[[Path], dict[str, Tensor]]]] = {
    "softmax": ("ae", autoencoder),
    "annealed": ("ae", lambda folder: autoencoder(folder, anneal=(20, 0.6))),
    "softmax_w": ("ae", lambda folder: autoencoder(folder, softmax_w=True, anneal=(50, 0.9))),
    "linear": ("linear_ae", lambda folder: autoencoder(folder, encoder="linear")),
    "pca": ("pca", pca),
    "rand_proj": ("rand_proj", rand_proj),
    "rand_select": ("rand_select", rand_select),
}
TRAINED = ("softmax", "annealed", "softmax_w", "linear")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    root = tmp_path_factory.mktemp("runs")
    return {case: (root / case, writer(root / case)) for case, (_, writer) in WRITERS.items()}


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", WRITERS)
def test_the_folder_is_read_as_dense_numbers_say(
    case: str, written: dict[str, tuple[Path, dict[str, Tensor]]]
) -> None:
    folder, expected = written[case]
    result = read_published(folder)
    assert isinstance(result, Published)
    assert result.basis == WRITERS[case][0]
    assert result.tasks == tuple(TASKS)
    assert result.source == json.loads((folder / INFO).read_text())
    assert result.seed == (9 if case == "rand_proj" else 4)
    assert result.decoder.shape == (M, T) and result.decoder.is_contiguous()
    tasks, vectors = dense(task_vectors()), dense(result.vectors)
    assert vectors.shape == (len(tasks), M)
    close(result.decoder, expected["W_d"])
    if case == "rand_proj":
        assert result.encoder is None
        close(vectors.T @ vectors, torch.eye(M))
        close(result.decoder, vectors.T @ tasks)
    else:
        assert result.encoder is not None and result.encoder.is_contiguous()
        close(result.encoder, expected["W_e"])
        close(vectors, tasks @ result.encoder, 1e-5)
    mean = torch.zeros(len(tasks), 1)
    if case == "pca":
        assert result.mean is not None
        assert {name: value.shape for name, value in result.mean.items()} == SHAPES
        mean = dense([result.mean])
        close(mean, expected["mu"])
    else:
        assert result.mean is None
    close(vectors @ result.decoder + mean, expected["T_hat"], 1e-5)


@pytest.mark.parametrize("case", TRAINED)
def test_trained_coefficients_are_the_file_s_own(
    case: str, written: dict[str, tuple[Path, dict[str, Tensor]]]
) -> None:
    folder, expected = written[case]
    result = read_published(folder)
    assert result.encoder is not None
    assert torch.equal(result.encoder, expected["W_e"])
    assert torch.equal(result.decoder, expected["W_d"])


def test_annealing_and_its_last_temperature_are_in_the_encoder(
    written: dict[str, tuple[Path, dict[str, Tensor]]],
) -> None:
    folder, _ = written["annealed"]
    result = read_published(folder)
    logits = torch.load(folder / "AWB.pt", weights_only=True)["A"].double()
    assert result.encoder is not None
    close(result.encoder, (logits / (5 * 0.6**6)).softmax(dim=0))
    assert (result.encoder - (logits / 5).softmax(dim=0)).abs().max() > 0.05


def test_parameters_are_the_recipe_s_keys(
    written: dict[str, tuple[Path, dict[str, Tensor]]],
) -> None:
    common = {"steps": 120, "learning_rate": 0.01, "temperature": 5.0, "weight_decay": 1e-6}
    annealed = {"anneal_every": 20, "anneal_factor": 0.6}
    results = {case: read_published(folder).parameters for case, (folder, _) in written.items()}
    assert results["softmax"] == results["linear"] == common | {"anneal_every": 0}
    assert results["annealed"] == common | annealed
    for case in ("pca", "rand_proj", "rand_select"):
        assert results[case] == {}
    for key, value in results["annealed"].items():
        assert check_value(key, value) == value


@pytest.mark.parametrize("case", WRITERS)
def test_vectors_are_as_stored(
    case: str, written: dict[str, tuple[Path, dict[str, Tensor]]]
) -> None:
    folder, _ = written[case]
    stored = torch.load(folder / VECTORS, weights_only=True)["basis_vectors"]
    for vector, other in zip(read_published(folder).vectors, stored, strict=True):
        assert list(vector) == list(other)
        for name, value in vector.items():
            assert value.stride() == other[name].stride()
            assert torch.equal(value, other[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("writer", [autoencoder, pca], ids=["ae", "pca"])
def test_half_precision_stays(
    writer: Callable[..., dict[str, Tensor]], dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = writer(tmp_path / "run", dtype=dtype)
    result = read_published(tmp_path / "run")
    assert {value.dtype for vector in result.vectors for value in vector.values()} == {dtype}
    t_hat = dense(result.vectors) @ result.decoder
    if result.mean is not None:
        assert {value.dtype for value in result.mean.values()} == {dtype}
        t_hat = t_hat + dense([result.mean])
    close(t_hat, expected["T_hat"], 0.05)
    assert result.decoder.dtype == torch.float64


def test_files_are_mapped_not_read(
    written: dict[str, tuple[Path, dict[str, Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    load = torch.load

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    for folder, _ in written.values():
        read_published(folder)
    assert len(calls) == 13  # two for each method, one for rand_select
    safe = {"map_location": "cpu", "weights_only": True, "mmap": True}
    assert all(kwargs == safe for kwargs in calls)


def test_pca_needs_no_seed(tmp_path: Path) -> None:
    pca(tmp_path / "run")
    json_edit(INFO, seed=None)(tmp_path / "run")
    assert read_published(tmp_path / "run").seed == 0


def test_every_task_selected(tmp_path: Path) -> None:
    """M = T: the decoder knows all tasks."""
    write(tmp_path / "run", "RandomSampleMethod", {"M": T}, task_vectors())
    names = {"selected_datasets": TASKS, "total_tasks": T, "M": T, "seed": 4}
    content = json.dumps(names | {"selected_indices": list(range(T))})
    (tmp_path / "run" / "random_selection.json").write_text(content)
    close(read_published(tmp_path / "run").decoder, torch.eye(T))


# Faults: each is made in a copy of a sound folder, and is told in one line.


def json_edit(file: str, **changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps(content))

    return edit


def pt_edit(file: str, change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(folder: Path) -> None:
        content = torch.load(folder / file, weights_only=True)
        change(content)
        torch.save(content, folder / file)

    return edit


def pt_set(file: str, **changes: Any) -> Edit:
    return pt_edit(file, lambda content: content.update(changes))


def metadata(**changes: Any) -> Edit:
    return pt_edit("AWB.pt", lambda content: content["metadata"].update(changes))


def vector(change: Callable[[Vector], object]) -> Edit:
    return pt_edit(VECTORS, lambda content: change(content["basis_vectors"][1]))


def poke(file: str, key: str, value: float) -> Edit:
    return pt_edit(file, lambda content: content[key].view(-1)[:1].fill_(value))


def remove(file: str) -> Edit:
    return lambda folder: (folder / file).unlink()


def text(file: str, content: str) -> Edit:
    return lambda folder: (folder / file).write_text(content)


def cut(file: str) -> Edit:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size // 2)


def three(content: dict[str, Any]) -> None:
    content["basis_vectors"].append(content["basis_vectors"][0])
    content["num_basis"] = 3


def flatten(content: dict[str, Any]) -> None:
    content["basis_vectors"] = [dense([v])[:, 0] for v in content["basis_vectors"]]


def legacy(file: str) -> Edit:
    def edit(folder: Path) -> None:
        content = torch.load(folder / file, weights_only=True)
        torch.save(content, folder / file, _use_new_zipfile_serialization=False)

    return edit


PCA, PROJ, SELECT = "pca_components.pt", "random_basis.pt", "random_selection.json"
FAULTS: dict[str, tuple[str, Edit, str]] = {
    "no info": ("pca", remove(INFO), f"{INFO}: missing; .*give the folder of one basis"),
    "info not JSON": ("pca", text(INFO, "{"), f"{INFO}: cannot be read as JSON"),
    "info not text": (
        "pca",
        lambda folder: (folder / INFO).write_bytes(b"\xff\xfe"),
        "JSON .UnicodeDecode",
    ),
    "info a list": ("pca", text(INFO, "[1]"), f"{INFO}: holds a list of 1: expected a dict"),
    "info deep": ("pca", text(INFO, "[" * 200_000), "cannot be read as JSON .RecursionError"),
    "method": (
        "pca",
        json_edit(INFO, method="MyMethod"),
        "`method` is 'MyMethod': expected one of",
    ),
    "method a list": ("pca", json_edit(INFO, method=[1]), r"`method` is \[1\]: expected one of"),
    "no tasks": ("pca", json_edit(INFO, datasets=[]), r"`datasets` is \[\]: expected the tasks'"),
    "tasks twice": ("pca", json_edit(INFO, datasets=["a", "a"]), "each once"),
    "tasks no text": ("pca", json_edit(INFO, datasets=[1, 2]), r"`datasets` is \[1, 2\]"),
    "M text": ("pca", json_edit(INFO, M="two"), "`num_bases` is 'two': .*its key is `M`"),
    "M zero": ("pca", json_edit(INFO, M=0), "expected a whole number >= 1"),
    "M other": ("pca", json_edit(INFO, M=3), "holds 2 basis vectors: expected 3, the M of"),
    "seed": ("softmax", json_edit(INFO, seed=None), "`seed` is empty: expected a whole number"),
    "no vectors": ("pca", remove(VECTORS), f"{VECTORS}: missing"),
    "vectors cut": ("pca", cut(VECTORS), f"{VECTORS}: truncated, or not a file in PyTorch's zip"),
    "vectors old format": ("pca", legacy(VECTORS), f"{VECTORS}: .*zip format.*mmap"),
    "vectors a list": (
        "pca",
        lambda folder: torch.save([1], folder / VECTORS),
        f"{VECTORS}: holds a list of 1: expected a dictionary",
    ),
    "vectors' method": ("pca", pt_set(VECTORS, method="X"), "`method` is 'X': expected PCABasis"),
    "no list": ("pca", pt_set(VECTORS, basis_vectors=None), "`basis_vectors` is missing: expected"),
    "empty list": (
        "pca",
        pt_set(VECTORS, basis_vectors=[]),
        "is a list of 0: expected a list of 2",
    ),
    "num_basis": ("pca", pt_set(VECTORS, num_basis=3), "`num_basis` is 3: expected 2, the number"),
    "num_basis tensor": ("pca", pt_set(VECTORS, num_basis=torch.ones(2, 2)), "`num_basis` is tens"),
    "three vectors": ("pca", pt_edit(VECTORS, three), "holds 3 basis vectors: expected 2"),
    "flat": (
        "pca",
        pt_edit(VECTORS, flatten),
        r"vector 0 is float64 \[56\]: expected a d",
    ),
    "less": ("pca", vector(lambda v: v.pop("conv")), "vector 1 has no tensor 'conv': expected one"),
    "more": ("pca", vector(lambda v: v.update(x=torch.ones(1))), "has a tensor 'x': expected none"),
    "shape": (
        "pca",
        vector(lambda v: v.update(conv=torch.ones(24))),
        r"basis vector 1 has shape \[24\] for 'conv': expected \[3, 2, 2, 2\] as in basis vector 0",
    ),
    "integers": (
        "pca",
        vector(lambda v: v.update(scale=torch.tensor(1))),
        r"basis vector 1 has int64 \[\] under 'scale'",
    ),
    "meta tensor": (
        "pca",
        vector(lambda v: v.update(scale=torch.ones((), device="meta"))),
        "on meta under 'scale': expected a floating-point",
    ),
    "no AWB": ("softmax", remove("AWB.pt"), "AWB.pt is missing: an autoencoder's encoder and dec"),
    "two AWB": (
        "softmax",
        lambda folder: shutil.copy(folder / "AWB.pt", folder / "AWB_old.pt"),
        "holds AWB.pt, AWB_old.pt: expected one; keep the one",
    ),
    "AWB cut": ("softmax", cut("AWB.pt"), "AWB.pt: truncated"),
    "no metadata": ("softmax", pt_set("AWB.pt", metadata=None), "`metadata` is missing: expected"),
    "AWB other tasks": ("softmax", metadata(datasets=TASKS[::-1]), r"`datasets` is \['MNIST'"),
    "AWB other M": ("softmax", metadata(M=3), "`M` is 3: expected 2, as in method_info.json"),
    "fewer tasks": (
        "softmax",
        json_edit(INFO, datasets=TASKS[:4]),
        "`datasets` is .*'MNIST'.*: expected .*'GTSRB'",
    ),
    "A": (
        "softmax",
        pt_set("AWB.pt", A=torch.ones(M, T)),
        r"`A` is float32 \[2, 5\]: exp",
    ),
    "B": (
        "softmax",
        pt_set("AWB.pt", B=torch.ones(4, M)),
        r"`B` is float32 \[4, 2\]: expected floating point \[T, M\] = \[5, 2\]",
    ),
    "W": ("softmax", pt_set("AWB.pt", W=torch.ones(M, T + 1)), r"`W` .*\[M, T\] = \[2, 5\] by the"),
    "W whole": ("softmax", pt_set("AWB.pt", W=torch.ones(M, T).int()), "`W` is int32 "),
    "no W": ("softmax", pt_edit("AWB.pt", lambda c: c.pop("W")), "`W` is missing: expected"),
    "W NaN": ("softmax", poke("AWB.pt", "W", math.nan), "`W` has 1 of 10 entries NaN or infinite"),
    "B inf": ("linear", poke("AWB.pt", "B", math.inf), "`B` has 1 of 10 entries NaN or infinite"),
    "kind": (
        "softmax",
        metadata(encoder="relu"),
        "`encoder` is 'relu': expected softmax or linear",
    ),
    "not convex": (
        "linear",
        metadata(encoder="softmax"),
        "`B` has columns that sum to 1 .- .*conv",
    ),
    "raw W": (
        "softmax",
        metadata(softmax_w=True),
        "expected convex columns, which `softmax_w` giv",
    ),
    "steps": ("softmax", metadata(steps="many"), "`steps` is 'many': expected a whole number >= 1"),
    "tau": ("softmax", metadata(tau_init=0), "`temperature` is 0: .*its key is `tau_init`"),
    "no pca": ("pca", remove(PCA), f"{PCA}: missing"),
    "pca tasks": ("pca", pt_set(PCA, dataset_names=TASKS[:4]), "`dataset_names` is .*: expected"),
    "pca M": ("pca", pt_set(PCA, M_actual=1), "`M_actual` is 1: expected 2"),
    "pca coefficients": (
        "pca",
        pt_set(PCA, coefficients=torch.ones(T, M)),
        "`coefficients` is float32",
    ),
    "pca NaN": ("pca", poke(PCA, "singular_values", math.nan), "`singular_values` has 1 of 2 ent"),
    "pca names": (
        "pca",
        pt_set(PCA, keys_order=["a"]),
        "`keys_order` is a list of 1: expected the",
    ),
    "pca shapes": (
        "pca",
        pt_set(PCA, param_shapes={n: torch.Size(s[::-1]) for n, s in SHAPES.items()}),
        r"`param_shapes` has torch.Size\(\[4, 6\]\) for 'proj': expected \[6, 4\]",
    ),
    "pca size": ("pca", pt_set(PCA, total_dim=55), "`total_dim` is 55: expected 56"),
    "pca mean": (
        "pca",
        pt_set(PCA, mean_vector=torch.ones(55)),
        r"`mean_vector` is .*\[55\]: expec",
    ),
    "no proj": ("rand_proj", remove(PROJ), f"{PROJ}: missing"),
    "proj M": ("rand_proj", pt_set(PROJ, M=3), "`M` is 3: expected 2"),
    "proj size": ("rand_proj", pt_set(PROJ, total_dim=None), "`total_dim` is empty: expected 56"),
    "proj NaN": ("rand_proj", poke(PROJ, "projection_coefficients", math.nan), "NaN or infinite"),
    "proj seed": ("rand_proj", pt_set(PROJ, seed=-1), "`seed` is -1: expected a whole number in"),
    "no selection": ("rand_select", remove(SELECT), f"{SELECT}: missing; it holds the drawn tasks"),
    "selection cut": ("rand_select", text(SELECT, "{"), f"{SELECT}: cannot be read as JSON"),
    "drawn beyond": ("rand_select", json_edit(SELECT, selected_indices=[0, 5]), "from 0 to 4"),
    "drawn twice": ("rand_select", json_edit(SELECT, selected_indices=[1, 1]), "2 different whole"),
    "drawn few": ("rand_select", json_edit(SELECT, selected_indices=[1]), r"is \[1\]: expected 2"),
    "drawn words": ("rand_select", json_edit(SELECT, selected_indices="01"), "is '01': expected 2"),
    "total": ("rand_select", json_edit(SELECT, total_tasks=8), "`total_tasks` is 8: expected 5"),
    "other tasks": (
        "rand_select",
        json_edit(INFO, datasets=TASKS[::-1]),
        "`selected_datasets` is .*by `selected_indices`",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_line_for_each_fault(
    fault: str, written: dict[str, tuple[Path, dict[str, Tensor]]], tmp_path: Path
) -> None:
    case, edit, message = FAULTS[fault]
    folder = tmp_path / "run"
    shutil.copytree(written[case][0], folder)
    edit(folder)
    with pytest.raises(UserError, match=message) as error:
        read_published(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder))


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.mark, "ran")


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before zip"])
@pytest.mark.parametrize(
    "case, file",
    [("softmax", VECTORS), ("softmax", "AWB.pt"), ("pca", PCA), ("rand_proj", PROJ)],
)
def test_code_in_a_file_is_not_run(
    case: str,
    file: str,
    old: bool,
    written: dict[str, tuple[Path, dict[str, Tensor]]],
    tmp_path: Path,
) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(written[case][0], folder)
    content = torch.load(folder / file, weights_only=True) | {"more": Malicious(mark)}
    torch.save(content, folder / file, _use_new_zipfile_serialization=not old)
    message = "zip format" if old else "without running code that it carries .*do not use this file"
    with pytest.raises(UserError, match=message) as error:
        read_published(folder)
    assert "\n" not in str(error.value)
    assert not mark.exists()
    torch.load(folder / file, weights_only=False)  # it is malicious indeed
    assert mark.read_text() == "ran"
