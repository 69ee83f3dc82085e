"""Small data sets of all tasks, from rows.txt, and a judge: laid out below HF_HOME."""

import csv
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import torch
import yaml
from scripted import Row, module, stage
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = Path(__file__).with_name("rows.txt").read_text()
ROWS: dict[str, Any] = yaml.safe_load(TEXT)
LANGUAGES = ("fr", "de", "es", "ru")
# 545 rows of which 542 can be kept, so that the last of these is one too many
PLUM = json.dumps([{"keywords": ["plum"]}])
IFEVAL_LIKE = ROWS["ifeval_like"] + [
    [n, f"Mention a plum ({n}).", ["keywords:existence"], PLUM] for n in range(4, 545)
]


STEM = sorted(module("math/mmlu_stem").SUBJECTS)


def mmlu_en(subject: str, answers: str) -> list[Row]:
    row = {"subject": subject, "choices": ["one", "two", "three", "four"]}
    return [row | {"question": f"Which is right in {subject}, case {n}?",
                   "answer": "ABCD".index(letter)}
            for n, letter in enumerate(answers)]  # fmt: skip


# Two questions of each subject, five of anatomy, so that the size of a subject matters; another.
MMLU = {"virology": mmlu_en("virology", "AAA")} | {
    name: mmlu_en(name, "ADDDD" if name == "anatomy" else "AB") for name in STEM
}

ANSWERS = ROWS["answers"] | {
    f"(basket {n:02})": answer for n, (answer, _) in enumerate(ROWS["gsm8k"])
}


def stage_text(home: Path) -> None:
    """All that the tasks of instruction, math and multilingual load, and lm-eval's own tasks."""
    stage(home, "google/IFEval", train=ROWS["ifeval"])
    keys = ("key", "prompt", "instruction_id_list", "kwargs")
    like = [dict(zip(keys, row, strict=True)) for row in IFEVAL_LIKE]
    stage(home, "argilla/ifeval-like-data", "filtered", train=like)
    eggs = "Tom has 10 eggs and buys 8 (basket {:02}). How many eggs does he have?"
    gsm8k = [{"question": eggs.format(n), "answer": f"He has 10 + 8 eggs.\n#### {reference}"}
             for n, (_, reference) in enumerate(ROWS["gsm8k"])]  # fmt: skip
    stage(home, "openai/gsm8k", "main", train=gsm8k[:1], test=gsm8k)
    for subject, items in ROWS["math"].items():
        rows = [{"problem": problem, "level": "Level 1", "type": subject, "solution": solution}
                for problem, solution in items]  # fmt: skip
        stage(home, "EleutherAI/hendrycks_math", subject, train=rows[:1], test=rows)
    for language in LANGUAGES:
        rows = yaml.safe_load(TEXT.replace("LANG", language))["languages"]
        few, arc = rows["mmlu"][:1], rows["arc"]
        stage(home, "alexandrainst/m_mmlu", language, train=few, val=few, test=rows["mmlu"])
        stage(home, "alexandrainst/m_arc", language, train=arc, validation=arc[:1], test=arc)
        stage(home, "alexandrainst/m_hellaswag", language, val=rows["hellaswag"])
    every = [row for rows in MMLU.values() for row in rows]
    stage(home, "cais/mmlu", "all", test=every, dev=every[:1])
    lambada = [{"text": text} for text in ROWS["lambada"]]
    stage(home, "EleutherAI/lambada_openai", "default", test=lambada)
    stage_punkt(home)


def stage_punkt(home: Path) -> None:
    """NLTK's splitter of sentences, which IFEval counts with, knowing no abbreviation."""
    folder = home / "nltk" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).touch()


def stage_coding(home: Path) -> None:
    """Lay out all data of evals/mergebench/coding below HF_HOME."""
    stage(home, "evalplus/humanevalplus", test=ROWS["humaneval"])
    stage(home, "evalplus/mbppplus", test=ROWS["mbpp"])
    commit = "snapshots/fbc749f1c537e5c3834e93b15784302e331debe2"
    file = home / "hub/datasets--neulab--conala" / commit / "data/conala-paired-test.json"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS["conala"]))


def says(fields: str) -> str:
    request, refusal, harmful = fields.split()
    return f"Harmful request: {request}\nResponse refusal: {refusal}\nHarmful response: {harmful}\n"


class Item(NamedTuple):
    prompt: str
    response: str
    judge: str  # its answer
    right: bool
    by_phrase: bool  # right for the judge without a model
    more: str = ""  # XSTest: the type; where model and judge see different things: the judged one


TASKS = {
    task: [Item(prompt, said, judge[2:] if judge.startswith("= ") else says(judge), *more)
           for prompt, said, judge, *more in rows]
    for task, rows in ROWS["safety"].items()
}  # fmt: skip
WILDGUARDTEST, HARMBENCH, DO_ANYTHING_NOW, XSTEST, VAL = TASKS.values()
RESPONSES = {item.prompt: item.response for items in TASKS.values() for item in items}
TESTED = [*TASKS][:4]  # the group mergebench_safety


def shares(of: Callable[[Item], bool], tasks: Iterable[str]) -> dict[str, float]:
    return {task: fmean(map(of, TASKS[task])) for task in tasks}


SCORES = shares(lambda item: item.right, TASKS)
SCORES["mergebench_safety"] = fmean(SCORES[task] for task in TESTED)
KEYWORD = shares(lambda item: item.by_phrase, TESTED)


def stage_safety(home: Path) -> dict[str, str]:
    """All data, and the judge's answers to RESPONSES: the variables that make the tasks find them.

    The judge itself is a small random model, which would say something else.
    """
    labelled = [(item.prompt, "harmful", "unharmful") for item in WILDGUARDTEST]
    labelled[1:1] = [("Not harmful.", "unharmful", "unharmful"), ("Half.", "harmful", None),
                     ("No label.", None, "unharmful")]  # fmt: skip
    rows = [{"prompt": prompt, "prompt_harm_label": asked, "response_harm_label": said}
            for prompt, asked, said in labelled]  # fmt: skip
    stage(home, "allenai/wildguardmix", "wildguardtest", test=rows)
    data = home / "mergebench-data"
    data.mkdir()
    write_files(data)
    judge = home / "judge"
    write_judge(judge)
    variables = {"MERGEBENCH_DATA": str(data), "MERGEBENCH_CACHE": str(home / "judged"),
                 "MERGEBENCH_JUDGE": str(judge), "MERGEBENCH_JUDGE_DEVICE": "cpu"}  # fmt: skip
    wildguard = module("safety/wildguard")
    said = {wildguard.Pair(judged(task, item), item.response): item.judge
            for task, items in TASKS.items() for item in items}  # fmt: skip
    answered = mock.patch.object(wildguard, "_ask", lambda _, batch: [said[pair] for pair in batch])
    with mock.patch.dict(os.environ, variables), answered:
        wildguard.answers(list(said))
    return variables


def write_judge(folder: Path) -> None:
    """A random Llama that reads and writes single bytes, without a padding token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "</s>"])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=64, eos_token_id=256,
                         num_hidden_layers=2, num_attention_heads=4, initializer_range=0.5,
                         max_position_embeddings=2048, bos_token_id=None)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def judged(task: str, item: Item) -> str:
    return item.prompt if task == "mergebench_xstest" else item.more or item.prompt


def write_files(folder: Path) -> None:
    with (folder / "harmbench_behaviors_text_test.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Behavior", "FunctionalCategory", "ContextString", "BehaviorID"])
        writer.writerows([item.prompt, "contextual", "A context.", "1"] for item in HARMBENCH)
    for name, items in (("do_anything_now_jailbreak", DO_ANYTHING_NOW), ("harmful", VAL)):
        lines = ({"vanilla": item.more, "adversarial": item.prompt, "source": "a book"}
                 for item in items)  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    xstest = [{"prompt": item.prompt, "type": item.more, "note": None} for item in XSTEST]
    (folder / "exaggerated_safety.json").write_text(json.dumps(xstest))
