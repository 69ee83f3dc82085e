"""The task vectors of one command: models, tensors that take part, tensors left out and why."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tvb_mergekit.core.gram import NO_TENSOR, GramSums
from tvb_mergekit.core.settings import Settings
from tvb_mergekit.errors import UserError, idle, listed
from tvb_mergekit.names import OF_FUNCTION, renamed, tied_uses
from tvb_mergekit.tensors.adapter import GATHER, Adapter
from tvb_mergekit.tensors.checkpoint import SAME, tie
from tvb_mergekit.tensors.stream import Item, Part, StateDict, Weights

QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
ALIKE = "give models that were fine-tuned from this base, with their tensors named alike"
EXCLUDED, UNCHANGED = "excluded by the recipe", "no adapter changes it"
MISSING = "missing in "
NO_WEIGHTS = StateDict({})


@dataclass
class TaskSet:
    """T task vectors under one base.

    Whoever knows the models makes it once: mergekit's planner, name matching, adapters or a store.
    """

    settings: Settings
    tasks: Sequence[str]  # T unique names
    weights: Sequence[float]  # the scale of each task vector, none zero
    items: Sequence[Item]  # the tensors that count in the Gram matrix, each once
    base: Weights = NO_WEIGHTS
    base_model: str = ""  # as the user wrote it, and so the models
    models: Sequence[str] = ()
    sources: Sequence[Weights] = ()  # the T models; none of tensors that a caller holds
    left_out: dict[str, str] = field(default_factory=dict)  # tensor -> why it stays the base's
    tied: dict[str, str] = field(default_factory=dict)  # tensor of the base -> the one that counts
    sums: GramSums | None = None  # the unweighted Gram matrix, if it is known
    unchanged: int = 0  # elements of tensors that no adapter changes: zeros of each task vector
    varying: Mapping[str, Any] = field(default_factory=dict)  # keys as the recipe has them
    dtype: str | None = None  # of the recipe's output

    @property
    def names(self) -> list[str]:
        """The names of the tensors that count."""
        return [item.name for item in self.items]

    @property
    def adapters(self) -> list[Adapter]:
        return [source for source in self.sources if isinstance(source, Adapter)]

    def check_unchanged(self) -> None:
        """Raise UserError if a file of the inputs was changed after it was opened."""
        for weights in (self.base, *self.sources):
            weights.check_unchanged()

    @property
    def own_dtype(self) -> torch.dtype:
        """The narrowest dtype of a store that holds every dtype of the models."""
        found = {part.dtype for item in self.items for part in item.inputs}
        if len(self.adapters) == len(self.sources):  # their updates are float32
            found = {info.dtype for each in self.adapters for info in each.file.tensors.values()}
        widest = functools.reduce(torch.promote_types, found or {torch.float32})
        return widest if widest in (torch.bfloat16, torch.float16) else torch.float32

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Model -> fingerprint. A state dict may have the name of its task."""
        prints = [weights.fingerprint() for weights in (self.base, *self.sources)]
        return dict(zip((self.base_model, *self.models), prints, strict=True))


def why_left_out(
    name: str,
    settings: Settings,
    tasks: Sequence[str],
    base: Part,
    models: Sequence[Part | None],
    absent: str | None = None,
) -> str | None:
    """Reason why a tensor stays the base's; None if it takes part. The only rule for all commands.

    Every floating-point tensor that all models have takes part, unless `exclude` matches it.

    Args:
        models: One part of each task; None: the model lacks the tensor.
        absent: The reason for tensors that a model lacks, if there is a better one.
    """
    if settings.excludes(name):
        return EXCLUDED
    named = zip(("the base", *(f"task `{task}`" for task in tasks)), (base, *models), strict=True)
    parts = [(who, part) for who, part in named if part is not None]
    for who, part in parts:
        packed = part.dtype == torch.uint8 and part.shape != base.shape
        if part.dtype in QUANTIZED or packed:
            raise UserError(
                f"tensor `{name}` of {who} is stored as {part.dtype}: quantized codes are not "
                "weights; give an unquantized checkpoint, or leave the tensor out with `exclude`"
            )
    if missing := [task for task, part in zip(tasks, models, strict=True) if part is None]:
        return absent or MISSING + listed(missing)
    if all(part.factors == () for _, part in parts[1:]):
        return UNCHANGED
    for who, part in parts:
        if not part.dtype.is_floating_point:
            return f"not floating point in {who} ({str(part.dtype).removeprefix('torch.')})"
    for who, part in parts[1:]:
        if base.shape is not None and part.shape is not None and part.shape != base.shape:
            if not all(part.shape):
                raise UserError(f"tensor `{name}` of {who} is empty; {GATHER}")
            layer = name.split(".")[-2] if "." in name else name
            raise UserError(
                f"tensor `{name}`: {who} has shape {list(part.shape)}, the base "
                f"{list(base.shape)}; leave it to the base with `exclude: {layer}`, or for a "
                "changed vocabulary align it with `tokenizer_source: base`"
            )
    return None


def match(
    base: Weights,
    sources: Sequence[Weights],
    tasks: Sequence[str],
    settings: Settings,
) -> tuple[TaskSet, list[str]]:
    """Match the tensors of models by name.

    A tensor with two names counts once; see `checkpoint.tie`.

    Returns:
        The task set, whose weights are 1, and a line about each model with tensors that nobody
        asked to leave out.
    """
    tie([base, *sources])
    made = TaskSet(settings, tasks, [1.0] * len(tasks), items := [], base, sources=sources)
    counted: dict[tuple[str, ...], str] = {}  # first names in base and models -> the name here
    for name, info in base.tensors.items():
        parts = [Part.of(each, name) if name in each.tensors else None for each in sources]
        if reason := why_left_out(name, settings, tasks, Part.of(base, name), parts):
            made.left_out[name] = reason
            continue
        firsts = tuple(weights.canonical(name) for weights in (base, *sources))
        if (first := counted.setdefault(firsts, name)) != name:
            made.left_out[name] = f"{SAME} {first}: counted once"
            made.tied[name] = first
            continue
        items.append(Item(name, info.shape, Part.of(base, name), tuple(filter(None, parts))))
    shapes = [
        {n: i.shape for n, i in each.tensors.items()
         if i.dtype.is_floating_point and not settings.excludes(n)}
        for each in (base, *sources)
    ]  # fmt: skip
    notes = check_missing(made.left_out, shapes[0], dict(zip(tasks, shapes[1:], strict=True)))
    if not items:
        raise UserError(NO_TENSOR)
    if settings.exclude and EXCLUDED not in made.left_out.values():
        notes.append(idle("exclude", settings.exclude, made.names))
    check_words((base, *sources), tasks, made.names)
    return made, notes + doubts((base, *sources), tasks)


def doubts(models: Sequence[Weights], tasks: Sequence[str], trust: bool = False) -> list[str]:
    """A line about each model whose configuration gives equal weights another function than that
    of the base, the first model; and if none ends its texts as the base. The merged model has the
    base's configuration."""
    notes = []
    configs = [configuration(each.folder, trust) if each.folder else {} for each in models]
    base = {k: v for k, v in configs[0].items() if OF_FUNCTION.search(k)}
    for task, own in zip(tasks, configs[1:], strict=True):
        new = [f"{k} {own.get(k)} (base: {v})" for k, v in base.items() if own and own.get(k) != v]
        if new:
            notes.append(f"task `{task}` uses its weights otherwise than the base: {listed(new)}")
    first, *ends = [config.get("eos_token_id") for config in configs]
    if all(configs) and first not in ends:
        told = "every model ends its texts with token %s, the merge as the base with %s: mend its"
        notes.append(f"{told % (ends[0], first)} config.json and generation_config.json")
    return notes


def vocabulary(folder: Path) -> tuple[str, bytes]:
    """The file with a tokenizer's words, and its bytes; both empty without one."""
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        with suppress(OSError):
            return name, (folder / name).read_bytes()
    return "", b""


def token_rows(name: str, data: bytes) -> dict[str, int]:
    """Token -> row, by a file of `vocabulary`; empty if it cannot be read."""
    with suppress(Exception):  # damaged: the tokenizer's own loader complains
        if name == "tokenizer.json":
            return dict(Tokenizer.from_buffer(data).get_vocab())
        if name == "vocab.json":
            return dict(json.loads(data))
        return {word: row for row, word in enumerate(data.decode().splitlines())}
    return {}


def configuration(folder: Path, trust: bool = False) -> dict[str, Any]:
    """A model's configuration, of a multimodal model that of its text; empty if none can be read.

    Args:
        trust: whether to run a model's own code.
    """
    with suppress(Exception):
        from transformers import AutoConfig  # slow

        found = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        return dict((getattr(found, "text_config", None) or found).to_dict())
    return {}


def check_words(models: Sequence[Weights], tasks: Sequence[str], names: Iterable[str]) -> None:
    """Raise UserError if embeddings, among these tensors, have other rows than the base's, the
    first model's. A reserved token that a model calls otherwise keeps its row.
    """
    embeddings, known = tied_uses(names), models[0].folder
    # Most models have the base's file, and a large one takes a second.
    read = functools.lru_cache(2)(token_rows)
    for task, folder in zip(tasks, (each.folder for each in models[1:]), strict=True):
        if not (embeddings and known and folder) or folder == known:
            continue
        words, rows = (read(*vocabulary(each)) for each in (known, folder))
        if moved := [word for word, row in words.items() if rows.get(word, row) != row]:
            word = moved[0]
            raise UserError(
                f"tensor `{embeddings[0]}`: {len(moved)} tokens of task `{task}` have other rows "
                f"than in the base, such as {word!r} {rows[word]} for {words[word]}; use "
                "`tokenizer_source: base`, or `exclude`"
            )


def check_missing(
    left_out: Mapping[str, str],
    base: Mapping[str, tuple[int, ...]],
    models: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> list[str]:
    """Lines about tensors that a model lacks, and about those that the base lacks.

    Raise UserError if models lack most of the base, or have a tensor of it under another name.

    Args:
        left_out: tensor -> why it stays the base's.
        base, models: shapes of floating-point tensors, those of the models by task.
    """
    missing = {n: left_out[n] for n in base if left_out.get(n, "").startswith(MISSING)}
    extra = dict[str, None]()
    for task, shapes in models.items():
        others = {name: shape for name, shape in shapes.items() if name not in base}
        if pair := renamed({name: base[name] for name in missing}, others):
            remedy = "save both by one class and version of transformers, without wrappers"
            if "base_layer" in pair[1]:
                remedy = "its adapter is not merged: `merge_and_unload()`, `save_pretrained`"
            raise UserError(
                f"tensor `{pair[0]}` is named `{pair[1]}` in task `{task}`: {remedy}, or leave it "
                "out with `exclude`"
            )
        extra |= dict.fromkeys(others)
    lines = []
    for why in sorted(set(missing.values())):
        names = [name for name, own in missing.items() if own == why]
        lines.append(f"not in {why.removeprefix(MISSING)}, so the base's: {listed(names)}")
    once = [name for name in base if not left_out.get(name, "").startswith(SAME)]
    part, whole = (sum(math.prod(base[name]) for name in names) for names in (missing, once))
    if 2 * part > whole:
        raise UserError(
            f"{100 * part / whole:.0f} % of the base would be left out: {'; '.join(lines)}; "
            f"{ALIKE}, or leave tensors out with `exclude`"
        )
    if extra:
        lines.append(f"not in the base, and so not in the merge: {listed([*extra])}")
    return lines
