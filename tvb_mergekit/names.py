"""The names that architectures give to tensors and modules: every table and pattern of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# Tensors of two dimensions that are not linear maps between activations, and those over tokens
_VECTORS = re.compile(
    r"embed|\bwte\b|\bwpe\b|^shared\."  # embeddings
    r"|lm_head|embed_out|^output\.weight|classifier|\bscore\b|\bhead\b",  # output layers
    re.IGNORECASE,
)
_EXPERTS = re.compile(r"expert|moe", re.IGNORECASE)  # stacked to three dimensions
# The two uses of tied embeddings
INPUT_EMBEDDING = re.compile(
    r"\b(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|shared)\.weight$"
)
OUTPUT_EMBEDDING = re.compile(
    r"\b(lm_head|lm_head\.decoder|embed_out|predictions\.decoder|generator_lm_head"
    r"|vocab_projector|proj_out)\.weight$|^decoder\.weight$"
)
# Embeddings of encoder and decoder, next to `shared`
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
EXPERT = re.compile(r"\bexperts\.(\d+)\.")  # one of several, with its number
# Names of normalized weights and BERT's norms, which transformers loads by either name
_OLD = {
    "weight_g": "parametrizations.weight.original0",
    "weight_v": "parametrizations.weight.original1",
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
MLP = re.compile(r"^(?:.*?\.)?(?:mlp|ffn|feed_forward)(?=\.)")
LAYER = re.compile(r"^((.*?)\.(\d+))\.")  # beginning of the names in a layer: module, number
# Matrices of an attention that see tokens: not relative positions, nor what few models use
_ATTENTION = re.compile(r"(?i)^(?!.*(\b(pos|rel)\w*_|_global\.)).*\.\w*att(ention|n)\w*\.")

# Keys of configurations that change what equal weights compute
OF_FUNCTION = re.compile(
    r"rope|rotary|alibi|eps(ilon)?$|(activation|_act|_fn|_function)$|heads?$|head_dim|softcap|scal"
    r"|multiplier|parallel|^sliding_window$|layer_types|per_tok$|norm_topk|qk_norm|bidirectional"
)

# Types of models that store weights as [inputs, outputs], and not as [outputs, inputs]: all of a
# Conv1D, or stacked experts
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
IN_OUT = "gpt_oss openai_privacy_filter llama4 llama4_text aria aria_text qwen3_vl_moe".split()
TRANSPOSED = {
    **dict.fromkeys(_CONV1D, r"\bc_(attn|proj|fc)\.|\bq_attn\."),
    **dict.fromkeys(IN_OUT, r"experts\.(gate_up|down)_proj$"),
}


def is_linear(name: str, dimensions: int) -> bool:
    """Whether a tensor is a linear map: not embeddings or an output layer; in 3-D, experts."""
    stacked = dimensions == 2 or _EXPERTS.search(name)
    return bool(stacked and not _VECTORS.search(name))


def looked_at(matrices: Sequence[str]) -> list[list[str]]:
    """The linear maps whose inputs show the task of a prompt, best first.

    Those of the attention in the first half of the layers, all linear maps there, and all of the
    model. The longest stack of layers counts; the first of equals, such as an encoder.
    """
    places = {name: match for name in matrices if (match := LAYER.match(name))}
    depths = dict[str, int]()  # of each stack
    for match in places.values():
        depths[match[2]] = max(depths.get(match[2], 0), 1 + int(match[3]))
    stack = max(depths, key=depths.__getitem__, default="")
    near = [n for n, m in places.items() if m[2] == stack and 2 * int(m[3]) < depths[stack]]
    return [[name for name in near if _ATTENTION.search(name)], near, [*matrices]]


def renamed(
    missing: Mapping[str, tuple[int, ...]], extra: Mapping[str, tuple[int, ...]]
) -> tuple[str, str] | None:
    """The first two names of one tensor: with the same shape, and numbers of layers and experts.

    One has all parts of the other, and maybe those of a wrapper (`_orig_mod`, `base_layer`).
    """
    alike: dict[object, list[str]] = {}
    for name, shape in extra.items():
        alike.setdefault((shape, *_NUMBER.findall(name)), []).append(name)
    for name, shape in missing.items():
        parts = _parts(name)
        for other in alike.get((shape, *_NUMBER.findall(name)), ()):
            if parts <= _parts(other) or _parts(other) <= parts:
                return name, other
    return None


def _parts(name: str) -> Counter[str]:
    for old, new in _OLD.items():
        name = name.replace(old, new)
    return Counter(name.split("."))


def tied_uses(names: Iterable[str]) -> list[str]:
    """The embeddings and output layers over tokens among these tensors."""
    return [n for n in names if INPUT_EMBEDDING.search(n) or OUTPUT_EMBEDDING.search(n)]
