"""A few items in those columns of HumanEval+, MBPP+ and CoNaLa that the tasks read."""

import json
from pathlib import Path

from scripted import Row, stage

HUMANEVAL: list[Row] = [
    {
        "prompt": '\ndef add(a: int, b: int) -> int:\n    """The sum of a and b."""\n',
        "canonical_solution": "    return a + b\n",
        "entry_point": "add",
        "test": (
            "import numpy as np\n\n\ndef check(candidate):\n"
            "    inputs = [[1, 2], [-3, 3], [10**9, 1]]\n"
            "    for args in inputs:\n        assert candidate(*args) == np.sum(args)\n"
        ),
    },
    {
        "prompt": (
            'from typing import List\n\n\ndef longest(words: List[str]) -> str:\n    """'
            'The longest of the words.\n    >>> longest(["a", "bcd"])\n    \'bcd\'\n    """\n'
        ),
        "canonical_solution": "    return max(words, key=len)\n",
        "entry_point": "longest",
        "test": "def check(candidate):\n    assert candidate(['a', 'bcd', 'ef']) == 'bcd'\n",
    },
]

MBPP: list[Row] = [
    {
        "code": "def double(n):\n    return 2 * n",
        "prompt": "Write a function to double a number.",
        "test_list": ["assert double(2) == 4", "assert double(0) == 0", "assert double(5) == 10"],
        # As in MBPP+: more inputs than `test_list` has; n * n and 2 ** n are right on its first.
        "test": (
            "import numpy as np\n\ninputs = [[2], [0], [5], [-7], [0.25]]\n"
            "results = [4, 0, 10, -14, 0.5]\n"
            "for inp, exp in zip(inputs, results):\n    assert np.isclose(double(*inp), exp)\n"
        ),
    },
    {
        "code": "def vowels(text):\n    return sum(letter in 'aeiou' for letter in text)",
        "prompt": "Write a function to count the vowels of a text.",
        "test_list": ["assert vowels('tree') == 2"],
        "test": "assert vowels('tree') == 2\nassert vowels('') == 0\n",
    },
]

CONALA = [
    {
        "intent": "how to sort a list?",
        "rewritten_intent": "sort list `x` in place ",
        "snippet": "x.sort()",
    },
    {
        "intent": " read a file by lines",
        "rewritten_intent": None,
        "snippet": "lines = open('f').readlines()",
    },
]


def stage_coding(home: Path) -> None:
    """Lay out all data of evals/mergebench/coding below HF_HOME."""
    stage(home, "evalplus/humanevalplus", test=HUMANEVAL)
    stage(home, "evalplus/mbppplus", test=MBPP)
    commit = (
        home / "hub/datasets--neulab--conala/snapshots/fbc749f1c537e5c3834e93b15784302e331debe2"
    )
    file = commit / "data" / "conala-paired-test.json"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in CONALA))
