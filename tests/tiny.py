"""Small random checkpoints for the tests, written as Hugging Face writes them."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

TASKS = ("math", "code", "safety", "chat", "legal")

DECODER = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def llama(**changes: object) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **changes}))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def family(
    folder: Path,
    make: Callable[[], nn.Module] = llama,
    tasks: Sequence[str] = TASKS,
    *,
    seed: int = 0,
    scale: float = 0.02,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
) -> tuple[Path, list[Path]]:
    """A base and a model per task, correlated, unequal task vectors: (base, [models]).

    `dtypes` are dealt out in turn, the base first. Models are saved by `save_pretrained`.
    """
    torch.manual_seed(seed)
    base = make().float()
    for parameter in base.parameters():  # no exact zeros or ones anywhere
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    common = [torch.randn_like(p) for p in base.parameters()]
    paths = []
    for index, name in enumerate(("base", *tasks)):
        model = copy.deepcopy(base)
        if index:
            size = scale * (0.6 + 0.25 * index)
            for parameter, shared in zip(model.parameters(), common, strict=True):
                parameter.data.add_(size * (torch.randn_like(parameter) + 0.5 * shared))
        path = folder / name
        model.to(dtypes[index % len(dtypes)]).save_pretrained(path, max_shard_size=max_shard_size)
        if tokenizer:
            save_tokenizer(path, 96)
        paths.append(path)
    return paths[0], paths[1:]


def save_tokenizer(folder: Path, size: int, extra: Sequence[str] = ()) -> None:
    """A word-level tokenizer of `size` tokens t0, t1, ... and `extra` ones, loadable offline."""
    vocabulary = {f"t{i}": i for i in range(size)}
    vocabulary |= {token: size + i for i, token in enumerate(extra)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t0").save_pretrained(folder)


def load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read by nothing of this project."""
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (folder / "model.safetensors").exists():
        shards = ["model.safetensors"]
    else:
        return torch.load(folder / "pytorch_model.bin", weights_only=True)
    merged: dict[str, Tensor] = {}
    for shard in shards:
        merged |= load_file(folder / shard)
    return merged


def as_bin(folder: Path, shards: int = 1) -> None:
    """Rewrite a checkpoint in PyTorch's format, as older models on the Hub are."""
    state = load(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    weight_map = {}
    for number in range(shards):
        name = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = {key: state[key] for key in list(state)[number::shards]}
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
