"""Families of models in every form that a recipe may list, with what the reference takes.

The fixture `world` makes each family once a session; tests do not change its files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from commands import Result, merge, recipe, tvb, write
from safetensors.torch import save_file
from tiny import TASKS, as_bin, family, gpt2, llama, load, save_tokenizer
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from tvb_mergekit.store import api
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.store import Bases

THREE = TASKS[:3]
CAUSAL, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = partial(llama, tie_word_embeddings=True)
THREE_LAYERS = partial(llama, num_hidden_layers=3)
State = Mapping[str, Tensor]
World = Callable[[str], "Models"]
Make = Callable[[], nn.Module]


@dataclass
class Models:
    """A base, its models as a recipe lists them, and their states as the reference takes them.

    Attributes:
        states: the base's and the models' tensors, under the names of the merged model.
        copied: tensors that take no part.
        same: tensors that are others: name -> the name that counts.
        loader: the class of transformers that loads the merged model; empty: none does.
        own: parameters of each model.
    """

    base: Path
    listed: Sequence[Path | str]
    states: list[State]
    tasks: Sequence[str] = THREE
    copied: frozenset[str] = frozenset()
    same: Mapping[str, str] = field(default_factory=dict)
    loader: str = ""
    own: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def models(self) -> dict[str, Path]:
        return dict(zip(self.tasks, map(Path, self.listed), strict=True))

    def recipe(
        self, method: str = "basis_ta", tasks: Sequence[str] | None = None, **keys: Any
    ) -> dict[str, Any]:
        numbers = [list(self.tasks).index(task) for task in tasks or self.tasks]
        listed = [self.listed[number] for number in numbers]
        return recipe(method, self.base, listed, keys.pop("own", self.own), **keys)

    def build(self, out: Path, *words: object, **keys: Any) -> Bases:
        """The store that `tvb build` makes of the recipe with these keys."""
        tvb("build", write(self.recipe(**keys), out), out, "--quiet", *words)
        return stores.load(out)

    def merge(self, method: str, out: Path, **keys: Any) -> Result:
        return merge(self.recipe(method, **keys), out)


# Models as `save_pretrained` writes them


def hub(
    make: Make, folder: Path, *, loader: str = CAUSAL, tasks: Sequence[str] = THREE, **options: Any
) -> Models:
    tokenizer = loader in (CAUSAL, CLASSIFIER)
    base, models = family(folder, make, tasks, tokenizer=tokenizer, **options)
    return Models(base, models, [load(path) for path in (base, *models)], tasks, loader=loader)


def converted(make: Make, folder: Path) -> Models:
    """Stored expert by expert, written as transformers holds them in memory."""
    made = hub(make, folder)
    read = transformers.AutoModelForCausalLM.from_pretrained
    made.states = [
        read(path, dtype=torch.float32).state_dict() for path in (made.base, *made.listed)
    ]
    return made


# Small models: of these sizes each configuration gets those that it has

LAYERS = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
SMALL = {
    **{f"{half}_{key}": n for half in ("encoder", "decoder") for key, n in LAYERS.items()},
    **dict.fromkeys(["hidden_size", "d_model", "out_hidden_size"], 32),
    **dict.fromkeys(["intermediate_size", "d_ff", "shared_intermediate_size"], 64),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "depth", "num_key_value_heads"], 2),
    **dict.fromkeys(["num_attention_heads", "num_heads", "num_conv_pos_embedding_groups"], 4),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["head_dim", "d_kv", "mamba_d_head", "mamba_n_heads", "num_mel_bins"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "q_lora_rank"], 8),
    **dict.fromkeys(["kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "patch_size"], 8),
    **dict.fromkeys(["moe_intermediate_size", "mamba_d_state", "projection_dim", "image_size"], 16),
    **dict.fromkeys(["eos_token_id", "sep_token_id", "decoder_start_token_id", "topk_group"], 1),
    **dict.fromkeys(["bos_token_id", "cls_token_id", "num_experts_per_tok", "n_group"], 2),
    "vocab_size": 96, "max_position_embeddings": 64, "max_source_positions": 32, "pad_token_id": 0,
    "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "qk_rope_head_dim": 4, "first_k_dense_replace": 1, "conv_dim": (16, 16), "conv_stride": (5, 2),
    "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8, "temporal_patch_size": 1,
}  # fmt: skip


def configuration(kind: Any, more: Mapping[str, Any]) -> Any:
    parts = {
        key: part for key, part in kind.sub_configs.items() if part is not transformers.AutoConfig
    }
    made = {key: configuration(part, more.get(key, {})) for key, part in parts.items()}
    sizes = {key: size for key, size in SMALL.items() if key in kind.__dataclass_fields__}
    return kind(**{**sizes, **more, **made})


def of(name: str, head: str = "ForCausalLM", **more: Any) -> Make:
    config = configuration(getattr(transformers, f"{name}Config"), more)
    return lambda: getattr(transformers, name + head)(config)


CLASSIFYING = of("Bert", "ForSequenceClassification", num_labels=3)
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


# Other forms of Llama checkpoints


def mixed_formats(folder: Path) -> Models:
    """The base in PyTorch's format, its matrices column by column; a model in shards of it, the
    others in shards of safetensors."""
    made = hub(llama, folder, max_shard_size="30KB")
    as_bin(made.base)
    turned = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in made.states[0].items()}
    torch.save(turned, made.base / "pytorch_model.bin")
    as_bin(Path(made.listed[1]), 3)
    return made


def tied(folder: Path) -> Models:
    made = hub(TIED, folder)
    made.same = {HEAD: EMBEDDING}
    return made


def one_untied(folder: Path, **options: Any) -> Models:
    """One task trained its output embedding apart, on a base that ties it."""
    made = hub(TIED, folder, **options)
    states = [{**state, HEAD: state[EMBEDDING].clone()} for state in made.states]
    states[1][HEAD] += 0.01 * torch.randn_like(states[1][HEAD])
    model = Path(made.listed[0])
    save(model, states[1])
    configure(model, tie_word_embeddings=False)
    made.states = states
    return made


def two_more_tokens(folder: Path, make: Make = llama, **options: Any) -> Models:
    """The second model's vocabulary has two tokens that the base lacks."""
    made = hub(make, folder, **options)
    model, grown = Path(made.listed[1]), dict(made.states[2])
    for name in [name for name, tensor in grown.items() if len(tensor) == 96]:
        grown[name] = torch.cat([grown[name], torch.randn(2, 32)])
    save(model, grown)
    configure(model, vocab_size=98)
    save_tokenizer(model, 96, ("<think>", "</think>"))
    return made


def other_order(folder: Path, **options: Any) -> Models:
    """The second model's vocabulary is the base's in another order."""
    made = hub(llama, folder, **options)
    model, state = Path(made.listed[1]), made.states[2]
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    inner = Tokenizer(WordLevel({f"t{int(t)}": i for i, t in enumerate(order)}, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t0").save_pretrained(model)
    save(model, {n: t[order] if n in (EMBEDDING, HEAD) else t for n, t in state.items()})
    return made


CONV = ["c_attn", "c_proj", "c_fc"]  # of GPT-2; attn.c_proj is square
ADAPTERS: tuple[dict[str, Any], ...] = (
    {},
    {"target_modules": ["q_proj", "up_proj"], "r": 2, "task_type": "CAUSAL_LM"},
    {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "r": 3, "use_rslora": True},
)


def adapters(
    folder: Path,
    configs: Sequence[Mapping[str, Any]] = ({}, {}, {}),
    make: Make = llama,
    tasks: Sequence[str] = THREE,
) -> Models:
    from test_lora import train

    base, _ = family(folder, make, tasks=())
    start, listed = load(base), []
    states = [{name: tensor.double() for name, tensor in start.items()}]
    for seed, (task, config) in enumerate(zip(tasks, configs, strict=True)):
        change = train(base, folder / task, seed=seed, **config)
        listed.append(f"{base}+{folder / task}")
        states.append({name: tensor + change[name] for name, tensor in states[0].items()})
    changed = {
        name
        for state in states[1:]
        for name in state
        if not state[name].equal(start[name].double())
    }
    left = frozenset(start) - changed
    return Models(base, listed, states, tasks, copied=left, loader=CAUSAL)


def a_store(folder: Path, basis: str) -> Models:
    """The vectors of a store stand for the models, by its name or one by one, the last first."""
    made, store = hub(THREE_LAYERS, folder), folder / "store"
    bases = made.build(store, basis=basis, **({"num_bases": 2} if basis != "none" else {}))
    names = [vector.name for vector in bases.facts.vectors]
    made.listed = [store / name for name in names[::-1]] if basis == "balanced" else [store]
    return made


def tensors_of(bases: Bases) -> list[State]:
    """The vectors of a store, and PCA's mean, as the library reads them."""
    bases.check_base(api.open_model(bases.base_name), "the base")
    return [{name: v.tensor(name) for name in bases.facts.tensors} for v in bases.sources]


def save(model: Path, state: State) -> None:
    save_file(dict(state), model / "model.safetensors", metadata={"format": "pt"})


def configure(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# State dicts, one file each

SIZES = {"embed": (50, 16), "layer": (16, 300), "bias": (7,), "empty": (0, 4), "kernel": (4, 3, 2)}
SIZES |= {"conv": (6, 5, 3, 3), "experts": (3, 12, 8), "column": (9, 1), "one": (1, 1)}
MIXED = (torch.bfloat16, torch.float32, torch.float16)


def state_dicts(
    folder: Path,
    ending: str,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    twice: bool = False,
    tasks: Sequence[str] = THREE,
    sizes: Mapping[str, tuple[int, ...]] = SIZES,
) -> Models:
    """Tensors of any shape, with integer buffers, as a training script writes them."""
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    states, paths = [], []
    for number, task in enumerate(("base", *tasks)):
        state = {
            name: tensor + 0.1 * number * torch.randn(tensor.shape, generator=generator)
            for name, tensor in base.items()
        }
        state = {name: t.to(dtypes[number % len(dtypes)]) for name, t in state.items()}
        state["ids"], state["steps"] = torch.arange(5)[None], torch.tensor(7)
        if twice:
            state["head"] = state["embed"]
            state["conv"] = state["conv"].to(memory_format=torch.channels_last)
        states.append(state)
        paths.append(folder / f"{task}.{ending}")
        folder.mkdir(parents=True, exist_ok=True)
        if ending == "safetensors":
            save_file(state, paths[-1])
        else:
            torch.save({"state_dict": state} if ending == "ckpt" else state, paths[-1])
    return Models(
        paths[0],
        paths[1:],
        states,
        tasks,
        copied=frozenset({"ids", "steps"}),
        same={"head": "embed"} if twice else {},
        own={number: {"task": task} for number, task in enumerate(tasks)},
    )


ARCHITECTURES: dict[str, Callable[[Path], Models]] = {
    "bert": partial(hub, CLASSIFYING, loader=CLASSIFIER),
    "mixtral": partial(converted, of("Mixtral")),
    "qwen3 moe": partial(converted, of("Qwen3Moe")),
}
FAMILIES: dict[str, Callable[[Path], Models]] = ARCHITECTURES | {
    "llama": partial(hub, llama, tasks=TASKS),
    "gpt2": partial(hub, gpt2, tasks=TASKS),
    "bf16": partial(
        hub, llama, tasks=TASKS, dtypes=(torch.bfloat16,), scale=0.002, max_shard_size="30KB"
    ),
    "mixed dtypes": partial(
        hub, llama, tasks=TASKS, dtypes=MIXED, scale=0.002, max_shard_size="40KB"
    ),
    "three layers": partial(hub, THREE_LAYERS, tasks=TASKS),
    "many models": partial(hub, llama, tasks=[f"task{n}" for n in range(14)], scale=0.005),
    "mixed formats": mixed_formats,
    "tied": tied,
    "two more tokens": two_more_tokens,
    "encoder of more tokens": partial(two_more_tokens, make=CLASSIFYING, loader=CLASSIFIER),
    "other order": other_order,
    "adapters": adapters,
    "mixed adapters": partial(adapters, configs=ADAPTERS),
    "conv1d adapters": partial(adapters, configs=[{"target_modules": CONV}] * 3, make=gpt2),
    "store of balanced": partial(a_store, basis="balanced"),
    "store of all": partial(a_store, basis="none"),
    "five": partial(state_dicts, ending="safetensors", tasks=TASKS),
}
