"""What every new store gets, whoever makes its vectors: their folders, basis.json, recipes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit import ranks, report
from tvb_mergekit.basis import Basis
from tvb_mergekit.facts import TENSORS, write_facts
from tvb_mergekit.inputs import Inputs
from tvb_mergekit.online import ARITHMETIC, NOISE, cast_loss, errors_of, reported
from tvb_mergekit.ready import write_recipes
from tvb_mergekit.report import write_tensors
from tvb_mergekit.store import MARKER, MEAN, basis_folder, dtype_name, numbers_of
from tvb_mergekit.stream import Item
from tvb_mergekit.writing import SHARD_BYTES, FolderWriter, file_record, plan_shards

# What belongs to the base and a basis folder needs, to be loaded and to be merged by mergekit.
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)


def folders_of(basis: Basis) -> list[str]:
    """The folders of the vectors of a store: each basis, and for PCA the mean."""
    names = [basis_folder(m) for m in range(basis.encoding.num_bases)]
    return names + [MEAN] * (basis.settings.basis == "pca")


def writers_of(
    folder: Path,
    names: Sequence[str],
    items: Sequence[Item],
    config: Path | None,
    hashes: Sequence[Sequence[str]] = (),
) -> list[FolderWriter]:
    """A writer for each vector of a store in `folder`.

    Args:
        config: the folder of the base's configuration.
        hashes: of each item that is written already, and there of each vector (`read_journal`).
    """
    world = ranks.world()
    if config is None:  # mergekit-pytorch, which takes bare weights, takes them from one file
        shards = plan_shards(items, sys.maxsize)
    else:
        shards = plan_shards(items, SHARD_BYTES, world.size)
    return [
        FolderWriter(
            folder / name,
            shards,
            {"format": "pt", MARKER: name},
            [each[index] for each in hashes],
            world.rank,
        )
        for index, name in enumerate(names)
    ]


def finish_vectors(
    writers: Sequence[FolderWriter], config: Path | None, first: int = 0
) -> dict[str, dict[str, object]]:
    """Complete the folders of vectors, of which the first is B_first; returns their files.

    Of several processes, the leader's work: the others stop here.
    """
    world = ranks.world()
    records = world.collect([writer.whole() for writer in writers])
    world.dismiss()
    files = {}
    for index, (writer, *written) in enumerate(zip(writers, *records, strict=True), first):
        for name, record in writer.finish(written).items():
            files[f"{writer.folder.name}/{name}"] = record
        files |= copy_config(config, writer.folder, index)
    return files


def copy_config(source: Path | None, folder: Path, index: int) -> dict[str, dict[str, object]]:
    """Give a basis folder the base's configuration, marked, and its tokenizer; returns the files
    and their records."""
    if source is None or not (source / "config.json").is_file():
        return {}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config[MARKER] = {"folder": folder.name, "index": index}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    names = ["config.json"]
    for file in companions(source, config):
        shutil.copyfile(file, folder / file.name)
        names.append(file.name)
    return {f"{folder.name}/{name}": file_record(folder / name) for name in names}


def companions(source: Path, config: Mapping[str, Any]) -> list[Path]:
    """The small files beside a model's weights and configuration; its own code, if it has any."""
    code = sorted(source.glob("*.py")) if "auto_map" in config else []
    return [*(source / name for name in COPIED if (source / name).is_file()), *code]


def finish_store(
    folder: Path,
    out: Path,
    facts: dict[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Write all of a store but its bases into `folder`, basis.json last.

    Args:
        out: where the folder will lie.
    """
    write_tensors(folder, {**numbers_of(facts), **tensors})
    facts["store"]["files"][TENSORS] = file_record(folder / TENSORS)
    if place := facts["store"]["base_path"]:
        facts["store"]["base_beside"] = os.path.relpath(place, out)
    facts["store"]["recipes"] = write_recipes(folder, facts)
    write_facts(folder, facts)


def tensors_of(basis: Basis, dtype: torch.dtype) -> dict[str, Tensor]:
    """`basis.safetensors` of a store in `dtype`, but for `numbers_of`: that of a merge,
    `gram_bases` [M, M], and `errors` [2, T], bounds of ||tau_hat_i - tau_i|| for exact sums."""
    encoding, gram = basis.encoding, basis.sums.gram
    if encoding.encoder is None:  # rand_proj: orthonormal
        products = torch.eye(encoding.num_bases, dtype=torch.float64)
        # An orthogonal projection. The noise: of ||tau_i||^2, and twice that of each <q_m, tau_i>.
        squares = gram.diagonal() - encoding.decoder.square().sum(0)
        noise = NOISE * gram.diagonal() * (1 + 2 * encoding.num_bases**0.5)
        low, high = ((squares + off).clamp(min=0).sqrt() for off in (-noise, noise))
    else:
        products = encoding.encoder.T @ gram @ encoding.encoder
        assert encoding.reconstruction is not None
        low, high = errors_of(gram, encoding.reconstruction)
    products = (products + products.T) / 2
    sizes, terms, table = _vectors(basis, products)
    lost = cast_loss(sizes, dtype, basis.sums.num_parameters) + ARITHMETIC * terms
    moved = lost @ table.abs()
    errors = torch.stack([(low - moved).clamp(min=0), high + moved])
    return {**report.tensors_of(basis), "gram_bases": products, "errors": errors}


def _vectors(basis: Basis, gram_bases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the bases and PCA's mean: their norms, the norms of what each is summed from, added up,
    and what each is multiplied by in every tau_hat [vectors, T]."""
    encoding, gram = basis.encoding, basis.sums.gram
    sizes, table = gram_bases.diagonal().clamp(min=0).sqrt(), encoding.decoder
    norms, encoder = gram.diagonal().clamp(min=0).sqrt(), encoding.encoder
    if encoding.mixing is not None:  # of the columns of Omega
        assert basis.sums.sketch_gram is not None
        norms, encoder = basis.sums.sketch_gram.diagonal().sqrt(), encoding.mixing
    assert encoder is not None
    terms = norms @ encoder.abs()
    if basis.settings.basis == "pca":
        sizes = torch.cat([sizes, gram.mean().clamp(min=0).sqrt().reshape(1)])
        terms = torch.cat([terms, norms.mean().reshape(1)])
        table = torch.cat([table, torch.ones(1, table.shape[1], dtype=torch.float64)])
    return sizes, terms, table


def local_path(model: str) -> str | None:
    """Where a model that is on this disk lies, to be found from any folder."""
    return os.path.abspath(model) if os.path.exists(model) else None


def store_facts(
    inputs: Inputs,
    basis: Basis,
    dtype: torch.dtype,
    files: dict[str, dict[str, object]],
    tensors: Mapping[str, Tensor],
    contents: str = "tensors",
) -> dict[str, Any]:
    """All of a new store's basis.json but the checksum of basis.safetensors.

    Args:
        tensors: as `tensors_of` gives them.
    """
    facts = report.facts(
        basis,
        base_model=inputs.base_model,
        models=dict(zip(inputs.tasks, inputs.models, strict=True)),
        left_out=inputs.left_out,
        fingerprints=inputs.fingerprints,
        tunables={},
        dtype=inputs.dtype,
    )
    facts["parameters"] |= inputs.varying
    kind, count = basis.settings.basis, basis.encoding.num_bases
    weights = None
    if kind in ("balanced", "none"):
        weights = [len(inputs.tasks) / count] * count
    compress = {"balanced": "balanced", "ae": "ae", "none": "ae", "rand_select": "ae"}.get(kind)
    facts["store"] = {
        "contents": contents,
        "dtype": dtype_name(dtype),
        "folders": folders_of(basis),
        "budget": count,
        "compress": compress,
        "basis_weights": weights,
        "base_fingerprint": inputs.base_fingerprint,
        "base_path": local_path(inputs.base_model),
        "twins": dict(inputs.twins),
        "model_bytes": inputs.model_bytes,
        "added": 0,
        "files": files,
    }
    sizes, _, table = _vectors(basis, tensors["gram_bases"])
    facts["errors"] = reported(inputs.tasks, facts["norms"], tensors["errors"], sizes, table)
    return facts
