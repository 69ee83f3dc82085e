"""Tied tensors: one tensor under several names, such as the input and output embeddings.

Values decide what is tied, whatever config.json says. A file may hold tied tensors under each of
their names, or under any one of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from tvb_mergekit.names import INPUT_EMBEDDING, OUTPUT_EMBEDDING, tied_uses
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.stream import Weights

SAME = "the same tensor as"  # the beginning of a reason why a tensor is left out
# Embeddings of encoder and decoder, beside `shared`
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def tie(every: Sequence[Weights], names: Iterable[str] = ()) -> None:
    """Give the tied tensors of models all names that any of the models, or `names`, have for them.

    Embeddings and output layers of equal bytes are one tensor. A name that a model lacks is that of
    the tensor with which another model ties it. It is that of the other use of the embeddings, if
    the model has only one of the two uses.
    """
    models = [each.under or each for each in every if each.under or each.holds is None]
    wanted = dict.fromkeys(tied_uses(names))
    for model in models:
        _compare(model)
        aliases = (n for name, i in model.tensors.items() if i.alias_of for n in (i.alias_of, name))
        wanted |= dict.fromkeys((*tied_uses(model.tensors), *aliases))
    if any(map(_unties, models)):  # transformers would make up what an untied model lacks
        shared = [n.removesuffix("shared.weight") for n in wanted if n.endswith("shared.weight")]
        wanted |= dict.fromkeys(f"{start}{copy}" for start in shared for copy in COPIES)
    for name in (name for each in every for name in each.changed):
        if INPUT_EMBEDDING.search(name):  # and so not the output layer
            wanted["embed_out.weight" if "embed_in" in name else _head_of(models[0])] = None
    for model in models:
        for name in [name for name in wanted if name not in model.tensors]:
            if found := _tied_to(name, model, models, wanted):
                lend(model, name, found)
    for each in every:
        each.name_tensors()


def _head_of(model: Weights) -> str:
    """The output layer's name by the model's class."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        config = json.loads((Path(str(model.folder)) / "config.json").read_bytes())
        import transformers  # slow

        tied = getattr(transformers, config["architectures"][0])._tied_weights_keys
        return next(str(name) for name in tied if OUTPUT_EMBEDDING.search(name))
    return "lm_head.weight"


def lend(model: Weights, name: str, of: str) -> None:
    """Give the tensor `of` of a model a second name, which its file lacks."""
    of = model.canonical(of)
    model.tensors[name] = replace(model.tensors[of], alias_of=of, stored=False)


def _compare(model: Weights) -> None:
    """Note which embeddings and output layers of a model have equal bytes."""
    firsts: list[str] = []
    for name in tied_uses(model.tensors):
        info = model.tensors[name]
        if info.alias_of is None:
            first = next((other for other in firsts if _equal(model, other, name)), None)
            model.tensors[name] = replace(info, alias_of=first)
            firsts += [] if first else [name]


def _equal(model: Weights, one: str, other: str) -> bool:
    first, second = model.tensors[one], model.tensors[other]
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(*(model.tensor(n).reshape(-1).view(torch.uint8) for n in (one, other)))


def _tied_to(
    name: str, model: Weights, models: Sequence[Weights], wanted: Collection[str]
) -> str | None:
    """The tensor of a model that has `name` too; see `tie`."""
    having = [each for each in models if name in each.tensors]
    for other in having:
        for twin in wanted:
            if twin in other.tensors and other.canonical(twin) == other.canonical(name):
                if twin in model.tensors:
                    return twin
    widths = {each.tensors[name].shape[1:] for each in having}  # other models may have more tokens
    uses = [n for n in tied_uses(model.tensors) if widths <= {model.tensors[n].shape[1:]}]
    inputs, outputs = ([*filter(use.search, uses)] for use in (INPUT_EMBEDDING, OUTPUT_EMBEDDING))
    if INPUT_EMBEDDING.search(name):
        shared = [n for n in inputs if n.endswith("shared.weight") and not having]
        return next(iter(shared if inputs else outputs), None)
    return inputs[0] if OUTPUT_EMBEDDING.search(name) and inputs and not outputs else None


def _unties(model: Weights) -> bool:
    """Whether a model has an output layer that is not its embeddings."""
    uses = tied_uses(model.tensors)
    return any(map(OUTPUT_EMBEDDING.search, uses)) and len({*map(model.canonical, uses)}) > 1


def say_untied(folder: Path) -> None:
    """Let the configuration in a folder say so if its embeddings and output layer differ.

    transformers 5 loads such a model right either way, and other loaders go by the configuration.
    """
    file = folder / "config.json"
    if not file.is_file():
        return
    values = json.loads(file.read_text(encoding="utf-8"))
    tie([model := Checkpoint.open(folder)])
    if not _unties(model) or "scale_decoder_outputs" in values:  # as which T5 reads the key
        return
    if any(name.endswith("decoder.weight") for name in tied_uses(model.tensors)):
        return  # transformers would make up the head's bias, which is tied too
    for part in (values, values.get("text_config")):
        if isinstance(part, dict) and (part is values or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
