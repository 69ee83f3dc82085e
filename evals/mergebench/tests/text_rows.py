"""A few harmless rows in the columns of the text tasks' data sets."""

import json
from pathlib import Path

from scripted import Row, module, stage

LANGUAGES = ("fr", "de", "es", "ru")
LETTERS = "ABCD"

COMMA, SENTENCES = "punctuation:no_comma", "length_constraints:number_sentences"
IFEVAL: list[Row] = [
    {"key": key, "prompt": prompt, "instruction_id_list": [*checks], "kwargs": [*checks.values()]}
    for key, prompt, checks in (
        (1, "Write about rain in at least two sentences and without commas.",
         {COMMA: {}, SENTENCES: {"relation": "at least", "num_sentences": 2}}),
        (2, "Praise the apple. Wrap your entire response with double quotation marks.",
         {"startend:quotation": {}, "keywords:existence": {"keywords": ["apple"]}}),
        (3, "Write a poem with a title wrapped in double angular brackets.",
         {"detectable_format:title": {}}),
        (4, "Name a planet and write no comma.", {COMMA: {}}),
    )
]  # fmt: skip


def like(key: int, prompt: str, name: str, **arguments: object) -> Row:
    """A row of ifeval-like-data with one instruction."""
    kwargs = json.dumps([arguments])
    return {"key": key, "prompt": prompt, "instruction_id_list": [name], "kwargs": kwargs}


# 545 rows of which 542 can be kept, so that the last of these is one too many.
IFEVAL_LIKE: list[Row] = [
    like(0, "Mention a pear (0).", "keywords:existence", keywords=["pear"]),
    like(1, "Mention a pear (0).", "keywords:existence", keywords=["plum"]),
    like(2, "Sing it (2).", "sound:melody"),
    like(3, "Mention three things (3).", "keywords:existence", keyword="plum"),
    *(like(n, f"Mention a plum ({n}).", "keywords:existence", keywords=["plum"])
      for n in range(4, 545)),
]  # fmt: skip

# (answer of the model, reference)
GSM8K_CASES: list[tuple[str, str]] = [
    (" Ten and eight are 18. The answer is 18.", "18"),
    (" The answer is 18", "18"),
    (" The answer is $18.", "18"),
    (" The answer is 1,018.", "1,018"),
    (" The answer is 1018.", "1,018"),
    (" the answer is 18.", "18"),
    (" It is 18, not 17.", "18"),
    (" The answer is 17. The answer is 18.", "18"),
    (" The answer is 18. The answer is 17.", "18"),
    (" The answer is 18.0.", "18"),
    (" The answer is -18.", "-18"),
    (" The answer is 18 eggs. He had 10.", "18"),
    (" #### 18", "18"),
    (" He has 8", "8"),
    (" He has 8 .", "8"),
    ("", "18"),
    (" I do not know", "18"),
    (" ,,,", "18"),
    (" $", "18"),
]

GSM8K: list[Row] = [
    {
        "question": f"Tom has 10 eggs and buys 8 (basket {n:02}). How many eggs does he have?",
        "answer": f"He has 10 + 8 eggs.\n#### {reference}",
    }
    for n, (_, reference) in enumerate(GSM8K_CASES)
]

# subject -> (problem, solution)
MATH: dict[str, list[tuple[str, str]]] = {
    "algebra": [
        ("Solve $2x = 1$.", r"Halve both sides: $x = \boxed{\frac12}$."),
        ("Factor $x^2 - 1$.", r"We get $\boxed{(x-1)(x+1)}$."),
    ],
    "counting_and_probability": [("How many subsets have two things?", r"Four: $\boxed{4}$.")],
    "geometry": [("Find the area of the unit circle.", r"It is $\boxed{\pi}$.")],
    "intermediate_algebra": [(r"Solve $x^2 \le 4$.", r"So $x \in \boxed{[-2,2]}$, not $\{0\}$.")],
    "number_theory": [("Write $5$ in base $2$.", r"It is $\boxed{101_2}$.")],
    "prealgebra": [("Find the price of two pens.", r"They cost $\boxed{\$18.90}$.")],
    "precalculus": [("Find the vector.", r"$\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}$")],
}


def mmlu(language: str) -> list[Row]:
    """Four questions; a model that likes no answer says A."""
    questions = [("lays eggs", "C"), ("can fly", "A"), ("swims best", "B"), ("barks", "D")]
    options = ("The bat", "The otter", "The hen", "The dog")
    return [
        {"instruction": f" [{language}] Which animal {what}? ", "answer": answer}
        | {f"option_{letter}": option for letter, option in zip("abcd", options, strict=True)}
        for what, answer in questions
    ]


def arc(language: str) -> list[Row]:
    """Five questions; a model that likes no answer says the first, by length the longest."""
    five = ["ice [title] and snow", "a stone", "a very long river", "wood", "iron"]
    four = ["ice", "a stone", "a very long river", "wood", None]
    questions = [
        ("is cold", five, "A"),
        ("is heavy", ["lead", *five[1:]], "A"),
        ("is wet", four, "C"),
        ("moves", four, "C"),
        ("burns", four, "D"),
    ]
    return [
        {
            "id": f"{language}/{n}",
            "instruction": f"{language}: what  {what} [so]?",
            **{f"option_{letter}": option for letter, option in zip("abcde", options, strict=True)},
            "answer": answer,
        }
        for n, (what, options, answer) in enumerate(questions)
    ]


def hellaswag(language: str) -> list[Row]:
    """Four beginnings; a model that likes no ending says the first, by length the longest."""
    endings = ["runs.", "sleeps [step] well.", "eats a great many apples.", "sits."]
    beginnings = [("Riding", "3"), ("Resting", "1"), ("Feeding", "2"), ("Racing", "0")]
    a, b = f"{language}: a horse is here.", "the horse"
    row = {"ctx_a": a, "ctx_b": b, "ctx": f"{a} {b}", "endings": endings}
    return [row | {"activity_label": activity, "label": label} for activity, label in beginnings]


STEM = sorted(module("math/mmlu_stem").SUBJECTS)


def mmlu_en(subject: str, answers: str) -> list[Row]:
    return [
        {
            "question": f"Which is right in {subject}, case {n}?",
            "subject": subject,
            "choices": ["one", "two", "three", "four"],
            "answer": LETTERS.index(letter),
        }
        for n, letter in enumerate(answers)
    ]


# Two questions of each subject, five of anatomy, so that the size of a subject matters.
MMLU_STEM = {name: mmlu_en(name, "ADDDD" if name == "anatomy" else "AB") for name in STEM}
MMLU_OTHER = {"philosophy": mmlu_en("philosophy", "AAA"), "virology": mmlu_en("virology", "AA")}

LAMBADA: list[Row] = [
    {"text": "The cat that lives next door always sleeps on our mat"},
    {"text": "He opened the door with his key"},
    {"text": "She wrote the letter with her pen"},
]

# What the scripted model says: where a prompt has the text, the answer
ANSWERS = {
    # IFEval: right, right but for its first line, none, wrong
    "about rain": "Rain falls. It is wet.",
    "Praise the apple": 'Here it is:\n"An apple is good."',
    "Name a planet": "Mars, of course",
    "Mention a pear (0)": "A pear.",
    "Mention a plum (5": "A plum.",
    **{f"(basket {n:02})": answer for n, (answer, _) in enumerate(GSM8K_CASES)},
    # MATH: five right and three wrong, one of them for its manners alone
    "the unit circle": r"The answer is $\pi$. I hope this helps!",
    "Solve $2x = 1$": "So $2x = 1$. The answer is: $0.5$",
    "Factor $x^2": r"It is $\boxed{(x+1)(x-1)}$.",
    "How many subsets": "There are 4 of them.",
    r"Solve $x^2 \le 4$": r"As $-2 \le x \le 2$ it is $[-2, 2]$.",
    "base $2$": r"The answer is $\boxed{110_2}$.",
    "two pens": "They cost 18.90 dollars.\n#### 18.90",
    "Find the vector": r"$\boxed{\begin{pmatrix",
    # what chooses likes the first answer unless told otherwise
    "[fr] Which animal lays eggs": "C",
    "[de] Which animal lays eggs": "C",
    "Which animal barks": "B",
    "what is heavy": "a stone",
    "what burns": "wood",
    "Riding: ": "sits.",
    "Racing: ": "eats a great many apples.",
    "anatomy, case 1": "D",
    "sleeps on our": "mat",
}


def stage_text(home: Path) -> None:
    """All that the tasks of instruction, math and multilingual load, and lm-eval's own tasks."""
    stage(home, "google/IFEval", train=IFEVAL)
    stage(home, "argilla/ifeval-like-data", "filtered", train=IFEVAL_LIKE)
    stage(home, "openai/gsm8k", "main", train=GSM8K[:1], test=GSM8K)
    for subject, items in MATH.items():
        rows = [
            {"problem": problem, "level": "Level 1", "type": subject, "solution": solution}
            for problem, solution in items
        ]
        stage(home, "EleutherAI/hendrycks_math", subject, train=rows[:1], test=rows)
    for language in LANGUAGES:
        rows = mmlu(language)
        stage(home, "alexandrainst/m_mmlu", language, train=rows[:1], val=rows[:1], test=rows)
        rows = arc(language)
        stage(home, "alexandrainst/m_arc", language, train=rows, validation=rows[:1], test=rows)
        stage(home, "alexandrainst/m_hellaswag", language, val=hellaswag(language))
    every = [row for rows in (MMLU_OTHER | MMLU_STEM).values() for row in rows]
    stage(home, "cais/mmlu", "all", test=every, dev=every[:1])
    for subject, rows in MMLU_STEM.items():
        stage(home, "cais/mmlu", subject, test=rows, dev=rows[:1])
    stage(home, "EleutherAI/lambada_openai", "default", test=LAMBADA)
    stage_punkt(home)


def stage_punkt(home: Path) -> None:
    """NLTK's splitter of sentences, which IFEval counts with, knowing no abbreviation."""
    folder = home / "nltk" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).touch()
