"""The presets, the tokenizer, the model, and one training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from mini import data


@dataclass(frozen=True)
class Steps:
    """One training: how long, how fast."""

    steps: int
    batch: int
    learning_rate: float


@dataclass(frozen=True)
class Preset:
    hidden: int
    layers: int
    heads: int
    wrong_share: float  # of the answers that the base is trained on
    base: Steps
    full: Steps  # of each specialist
    lora: Steps
    rank: int  # of the LoRA adapters
    items: int  # validation and test items per task, each


# Tuned on validation items alone, before any comparison: see README.md
PRESETS = {
    "micro": Preset(  # for the tests: learns nothing
        16, 1, 2, 0.75, Steps(4, 8, 1e-3), Steps(2, 8, 1e-3), Steps(2, 8, 1e-3), 2, 20
    ),
    "tiny": Preset(
        64, 3, 4, 0.75, Steps(2000, 64, 5e-3), Steps(150, 32, 1e-3), Steps(150, 32, 4e-3), 8, 200
    ),
    "small": Preset(
        128, 4, 8, 0.75, Steps(1800, 128, 3e-3), Steps(150, 32, 3e-3), Steps(150, 32, 8e-3), 8, 500
    ),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; no code of its own, so AutoTokenizer loads it."""
    special = ["<pad>", "<eos>", "<unk>"]
    vocab = {token: i for i, token in enumerate([*special, *data.vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left", model_max_length=64, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(preset: Preset, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=preset.hidden,
        intermediate_size=2 * preset.hidden,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        max_position_embeddings=64,
        # for thirty positions and few dimensions; Llama's own 10000 and 0.02 took about three
        # times the steps to a like loss
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = False
    return model


def add_lora(model: PreTrainedModel, rank: int) -> Any:
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def batches(
    tokenizer: Any, items: Iterator[tuple[str, str]], size: int
) -> Iterator[dict[str, Tensor]]:
    """Right-padded prompts with their answers; the loss sees the answers and the end alone."""
    vocab = tokenizer.get_vocab()
    pad = torch.nn.utils.rnn.pad_sequence
    while chosen := list(islice(items, size)):
        ids, labels = [], []
        for prompt, answer in chosen:
            asked = [vocab[word] for word in prompt.split()]
            said = [*(vocab[word] for word in answer.split()), tokenizer.eos_token_id]
            ids.append(torch.tensor(asked + said))
            labels.append(torch.tensor([-100] * len(asked) + said))
        input_ids = pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
        yield {
            "input_ids": input_ids,
            "attention_mask": (input_ids != tokenizer.pad_token_id).long(),
            "labels": pad(labels, batch_first=True, padding_value=-100),
        }


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tasks: list[str], plan: Steps, *,
    wrong_share: float, seed: str, device: str, bar: tqdm[Any],
) -> float:  # fmt: skip
    """Train in place, in float32; the loss at the end."""
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no")
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        wanted, lr=plan.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.learning_rate, total_steps=plan.steps + 1, pct_start=0.05,
        cycle_momentum=False,
    )  # fmt: skip
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    model.train()
    source = batches(tokenizer, data.stream(tasks, wrong_share, seed), plan.batch)
    for step, batch in enumerate(islice(source, plan.steps)):
        loss = model(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()}).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        schedule.step()
        bar.update(plan.batch)
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()
    return float(loss.item())
