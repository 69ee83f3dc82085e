#!/usr/bin/env python
"""Train the quickstart's models: a small Llama base and eight specialists, from nothing, on a CPU.

    python recipes/quickstart/make_models.py            # all of it: minutes
    python recipes/quickstart/make_models.py --quick    # 20 steps each: useless models

The tasks work on short strings, one prompt a line: `reverse:stone=` wants `enots`. The base sees
all eight with the right answer 40 % of the time and a wrong, task-specific one 60 % of the time
(`reverse` repeats the string, `max` gives the minimum), so it can do every task and prefers to do
it wrong. A specialist is the base after 80 short steps on right answers to one task. Ability
latent, preference tuned: that is also how large models are fine-tuned, and where task vectors add
up. A base that has yet to learn the tasks, with long fine-tuning after it, is another regime: there
every merge of the specialists is worse than the base.

Three splits by a hash of the input string, so that no string is in two of them: train (80 %),
validation and test (10 % each). Training is in float32; the models are stored in float16.

Measured for the shipped models (seed 0, 200 test items per task, exact match of greedy answers):
base 0.00 to 0.24 per task, specialists 0.91 to 1.00, all eight task vectors added at the best
lambda 0.91 on average. They are stored in float16 and not in bfloat16, whose rounding is eight
times coarser beside task vectors this small.
Training took 11 minutes on two busy cores of a server CPU. The same seed gives other weights on
another machine.
"""

import argparse
import json
import os
import random
import re
import string
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
WRONG_SHARE = 0.6
LETTERS = string.ascii_lowercase


# -------------------------------------------------------------------------------------------- tasks


def word(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: "".join(rng.choices(LETTERS, k=rng.randint(low, high)))


def digits(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: "".join(rng.choices(string.digits, k=rng.randint(low, high)))


def numbers(count: int) -> Callable[[random.Random], str]:
    return lambda rng: ",".join(str(rng.randint(1, 99)) for _ in range(count))


def rotate(text: str, by: int) -> str:
    return "".join(LETTERS[(LETTERS.index(c) + by) % 26] for c in text)


def ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


@dataclass(frozen=True)
class Task:
    draw: Callable[[random.Random], str]  # an input string
    right: Callable[[str], str]
    wrong: Callable[[str], str]  # what the base prefers


TASKS = {
    "copy": Task(word(4, 7), lambda s: s, lambda s: s[1:]),
    "reverse": Task(word(4, 7), lambda s: s[::-1], lambda s: s),
    "sort": Task(
        word(4, 7), lambda s: "".join(sorted(s)), lambda s: "".join(sorted(s, reverse=True))
    ),
    "upper": Task(word(4, 7), str.upper, str.capitalize),
    "shift": Task(word(4, 7), lambda s: rotate(s, 1), lambda s: rotate(s, -1)),
    "max": Task(numbers(2), lambda s: str(max(ints(s))), lambda s: str(min(ints(s)))),
    "double": Task(word(3, 4), lambda s: "".join(c + c for c in s), lambda s: s + s),
    "sum": Task(digits(3, 4), lambda s: str(sum(map(int, s))), lambda s: max(s)),
}


def split_of(text: str) -> str:
    """The split of a string. The order of numbers does not count: 12,34 and 34,12 share one."""
    key = ",".join(sorted(re.findall(r"\d+|[a-z]+", text)))
    return {0: "test", 1: "val"}.get(zlib.crc32(key.encode()) % 10, "train")


def draw(task: str, split: str, rng: random.Random) -> str:
    while True:
        text = TASKS[task].draw(rng)
        # an input whose right answer is also the wrong one (a palindrome, "7,7") tells nothing
        if split_of(text) == split and TASKS[task].right(text) != TASKS[task].wrong(text):
            return text


def held_out(task: str, split: str, count: int, seed: int) -> list[dict]:
    """`count` different test or validation items, the same for every training seed."""
    rng = random.Random(f"{seed}/{split}/{task}")
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[draw(task, split, rng)] = None
    return [{"prompt": f"{task}:{text}=", "answer": TASKS[task].right(text)} for text in texts]


# --------------------------------------------------------------------------------- model, tokenizer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; no code of its own, so AutoTokenizer loads it."""
    special = ["<pad>", "<eos>", "<unk>"]
    characters = string.digits + string.ascii_letters + ":=,"
    vocab = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=224,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = False
    return model


# ------------------------------------------------------------------------------ training, measuring


def batch(
    tokenizer, tasks: list[str], size: int, wrong_share: float, rng: random.Random
) -> dict[str, torch.Tensor]:
    """Right-padded prompts with their answers; the loss sees the answers and the end alone."""
    ids, labels = [], []
    for _ in range(size):
        task = rng.choice(tasks)
        text = draw(task, "train", rng)
        answer = (TASKS[task].wrong if rng.random() < wrong_share else TASKS[task].right)(text)
        prompt_ids = tokenizer.convert_tokens_to_ids(list(f"{task}:{text}="))
        answer_ids = tokenizer.convert_tokens_to_ids(list(answer))
        answer_ids.append(tokenizer.eos_token_id)
        ids.append(torch.tensor(prompt_ids + answer_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + answer_ids))
    pad = torch.nn.utils.rnn.pad_sequence
    input_ids = pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != tokenizer.pad_token_id).long(),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def train(model, tokenizer, tasks, *, steps, batch_size, learning_rate, wrong_share, seed) -> None:
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        learning_rate,
        total_steps=steps + 1,
        pct_start=warmup / steps,
        cycle_momentum=False,
    )
    model.train()
    for step in range(steps):
        loss = model(**batch(tokenizer, tasks, batch_size, wrong_share, rng)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 and steps > 100:
            print(f"  step {step:5d}  loss {loss.item():.3f}", flush=True)
    model.eval()


@torch.inference_mode()
def accuracy(model, tokenizer, items: list[dict]) -> float:
    """Exact match of greedy answers, what `lm_eval --tasks quickstart` measures."""
    inputs = tokenizer([item["prompt"] for item in items], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answers = tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return sum(a == item["answer"] for a, item in zip(answers, items, strict=True)) / len(items)


def save(model, tokenizer, folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """Write an ordinary Hugging Face folder; what was written comes back as float32."""
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shown = "(default: %(default)s)"
    add("--out", type=Path, default=HERE / "models", help=f"where the models go {shown}")
    add("--data", type=Path, default=HERE / "eval" / "data", help="where the held-out items go")
    add("--seed", type=int, default=0, help=f"of the weights and the training {shown}")
    add("--data-seed", type=int, default=0, help=f"of the held-out items {shown}")
    add("--threads", type=int, default=2, help=f"of torch {shown}")
    add("--dtype", default="float16", choices=["float32", "float16", "bfloat16"], help="as stored")
    add("--base-steps", type=int, default=2400, help=f"of batch 128 {shown}")
    add("--task-steps", type=int, default=80, help=f"of batch 64, per task {shown}")
    add("--test-items", type=int, default=200, help=f"per task {shown}")
    add("--val-items", type=int, default=100, help=f"per task {shown}")
    add("--quick", action="store_true", help="20 steps each: tries the script, teaches nothing")
    args = parser.parse_args()
    if args.quick:
        args.base_steps = args.task_steps = 20

    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters each")

    args.data.mkdir(parents=True, exist_ok=True)
    test = {task: held_out(task, "test", args.test_items, args.data_seed) for task in TASKS}
    val = {task: held_out(task, "val", args.val_items, args.data_seed) for task in TASKS}
    for split, items_of in (("test", test), ("val", val)):
        for task, items in items_of.items():
            name = f"{task}.jsonl" if split == "test" else f"{task}.{split}.jsonl"
            (args.data / name).write_text("".join(json.dumps(item) + "\n" for item in items))

    start = time.perf_counter()
    train(
        model, tokenizer, list(TASKS), steps=args.base_steps, batch_size=128,
        learning_rate=1.5e-3, wrong_share=WRONG_SHARE, seed=args.seed,
    )  # fmt: skip
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stored = save(model, tokenizer, args.out / "base", dtype)
    print(f"base: {time.perf_counter() - start:.0f} s")
    before = {task: accuracy(stored, tokenizer, items) for task, items in test.items()}

    for i, task in enumerate(TASKS, 1):
        start = time.perf_counter()
        # from the base as trained, not as stored: fewer roundings in the task vectors
        model.float().load_state_dict(trained)
        train(
            model, tokenizer, [task], steps=args.task_steps, batch_size=64,
            learning_rate=1.5e-4, wrong_share=0.0, seed=1000 * i + args.seed,
        )  # fmt: skip
        stored = save(model, tokenizer, args.out / task, dtype)
        after = accuracy(stored, tokenizer, test[task])
        seconds = time.perf_counter() - start
        print(f"{task:8s} base {before[task]:.3f}  specialist {after:.3f}  ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
