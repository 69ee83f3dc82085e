"""The items of MATH, the answer in a response, and whether it equals the reference.

`score` finds an answer as dart-math does (https://github.com/hkust-nlp/dart-math,
dart_math/eval.py, from August 2024 on): the last box, else the text after "answer is" or the like,
else the last formula, else the last number. A box before the last "Therefore" does not count. The
second metric, `flexible`, forgives manners: bold type or code, a sentence or unit after the answer,
a "Therefore" after the box.

math_compare.py compares, in a process of its own: a power tower in a response keeps one C function
busy for hours, and only a kill stops that.
"""

import atexit
import json
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets

SUBJECTS = "algebra counting_and_probability geometry intermediate_algebra number_theory"
SUBJECTS += " prealgebra precalculus"
LONGEST = 500  # characters; what is longer is compared as text alone
SECONDS = 10.0  # of the processor for one comparison; one that takes longer counts as not equal
ALL_SECONDS, ALL_SHARE = 300.0, 0.1  # for all comparisons: once, and more for each asked

log = logging.getLogger(__name__)

BOX = re.compile(r"\\boxed|\\fbox")
BEFORE_ANSWER = ("answer is:", "answer is", "answer:", "answer :")
AFTER_ANSWER = ("is the ans", "is our ans")
FORMULA = re.compile(r"(?<!\$)\$+([^$]+)\$+|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.DOTALL)
NUMBER = re.compile(r"-?\d*\.?\d+")

# for `flexible`
BOLD = re.compile(r"(?<![\w*`])(\*\*?|__|`)(?=\S)([^*`\n]{1,200}?)(?<=\S)\1(?![\w*`])")
ANNOUNCED = re.compile(
    r"(?<!if the )\banswers?(?: to [^.\n]{1,40})? (?:is|are)\b"
    r"(?: (?:therefore|thus|then|hence|simply)\b,?)?"
    r"|\banswers?\s*:",
    re.IGNORECASE,
)
WITH_DOLLARS = re.compile(
    r"(?<!\$)\$+((?:\\.|[^$\\])+)\$+|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.DOTALL
)
BETWEEN = re.compile(r"\s*(?:,|,?\s*(?:and|or)\b)\s*")
SENTENCE = re.compile(r".*?(?=(?<![ap]\.m)[.!?](?:\s|$)|\.\s+[A-Z]|\n|$)")
LEAD = re.compile(  # "the point (3, 4)"
    r"(?:(?:simply|just|exactly|equal to|given by) )?(?:(?:the|an?) [a-z]+ )?", re.IGNORECASE
)
AMOUNT = re.compile(r"-?(?:\\?\$)?[\d,]{0,40}\.?\d{1,40}(?:/\d{1,40})?(?:\\?%)?")
ENDS = re.compile(  # "12 apples, because", but not "3 million" or "5 choose 2"
    r"(?:\s*(?:(?:square|cubic|different|possible) )?"
    r"(?!(?:dozen|hundred|thousand|[mbt]r?illion|percent|halve|third|quarter"
    r"|(?:four|fif|six|seven|eigh|nin|ten)th)s)(?:[a-z]*[a-rt-z]s|people|children|(?:wo)?men|feet"
    r"|[ckm]?m|ft|k?g)\b(?:\^?[23²³])?)?\s*(?:$|\n|[.;:!?](?:\s|$)"
    r"|,\s+(?!(?:(?:and|or)\s+)?[-\d$\\])"
    r"|(?:as|because|since|which|per [a-z]+|each|in (?:all|total))\b)",
    re.IGNORECASE,
)
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}")


def load(**_: object) -> datasets.DatasetDict:
    """All 5000 test problems: `problem`, `level`, `type`, `solution`, `config` and `answer`."""
    _comparer.running()  # an error now, not after hours of generation
    parts = []
    for subject in SUBJECTS.split():
        part = datasets.load_dataset("EleutherAI/hendrycks_math", subject, split="test")
        part = part.add_column("config", [subject] * len(part))
        parts.append(part.add_column("answer", [boxed(text) or "" for text in part["solution"]]))
    return datasets.DatasetDict(test=datasets.concatenate_datasets(parts))


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """`as_text` is 1 if a comparison took too long, so that text alone decided."""
    found, other = find_answer(results[0]), find_answer_flexibly(results[0])
    verdicts = [equal(doc["answer"], found)]
    if not verdicts[0] and other != found:
        verdicts.append(equal(doc["answer"], other))
    return {
        "score": float(verdicts[0] is True),
        "flexible": float(True in verdicts),
        "as_text": float(None in verdicts),
    }


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, all the rest if it never closes; None without one."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :].lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].strip()  # `\boxed 5`
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # `\{` is not a brace
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return rest[1 : brace.start()].strip()
    return rest[1:].strip()


def find_answer(response: str) -> str:
    """The answer in a response, "" if nothing in it can be one."""
    end = response
    for mark in ("herefore", "####", "# Answer"):
        end = end.split(mark)[-1]
    if (box := boxed(end)) is not None:
        return box
    for mark in AFTER_ANSWER:
        if mark in end:
            return _bare(re.split(r"[,.!]\s", end.split(mark)[-2])[-1])
    for mark in BEFORE_ANSWER:
        if mark in end:
            return _bare(end.split(mark)[-1])
    if formulas := FORMULA.findall(response):
        return _bare("".join(formulas[-1]))
    if numbers := NUMBER.findall(response.replace(",", "")):
        return str(numbers[-1])
    return ""


def find_answer_flexibly(response: str) -> str:
    """The last box or announced answer with a number or a formula, else announced words, else the
    answer of `find_answer`.

    An announcement that does not begin with its number or formula, as "The answer is right, since 5
    + 7 is", gives way to a box or another announcement before it.
    """
    text = BOLD.sub(r"\2", response)
    marks = [*BOX.finditer(text), *ANNOUNCED.finditer(text)]
    words, end = "", len(text)
    announced = ""  # holds a number or a formula, but does not begin with it
    for mark in sorted(marks, key=lambda mark: mark.start(), reverse=True):
        if mark.re is BOX:
            if answer := boxed(text[mark.start() : end]):
                return answer
        else:
            answer, begins = _announced(text[mark.end() : end].lstrip(": \n"))
            if begins:
                return answer
            if re.search(r"[\d\\]", answer):
                announced = announced or answer
            words = words or answer
        end = mark.start()
    return announced or words or find_answer(text)


def _announced(text: str) -> tuple[str, bool]:
    """The formulas or the number at the beginning of a text, if its clause ends there or after a
    unit, else its first sentence; "" if that begins with "not". And whether it begins with a number
    or a formula."""
    lead = LEAD.match(text)
    assert lead is not None  # it may be empty, as the sentence
    formulas = []
    place = end = lead.end()
    while formula := WITH_DOLLARS.match(text, place):
        formulas.append("".join(filter(None, formula.groups())).strip())
        end = formula.end()
        between = BETWEEN.match(text, end)
        place = between.end() if between else len(text)
    if not formulas and (number := AMOUNT.match(text, end)):
        formulas, end = [number[0]], number.end()
    if formulas and ENDS.match(text, end):
        return ", ".join(formulas), not lead[0]
    sentence = SENTENCE.match(text)
    assert sentence is not None
    if re.match(r"not\b", sentence[0], re.IGNORECASE):
        return "", False
    answer = _bare(sentence[0])
    return answer, bool(re.search(r"[\d\\]", answer)) and not WORD.search(answer)


def _bare(answer: str) -> str:
    """Without the punctuation at its end and the signs of a formula around it."""
    answer = answer.strip().rstrip(":./,#?\"'").strip()
    formula = FORMULA.fullmatch(answer)
    return "".join(filter(None, formula.groups())).strip() if formula else answer


def equal(reference: str, answer: str) -> bool | None:
    """Whether two formulas or words are the same; None if that takes too long to find out. Only the
    text counts if one is longer than LONGEST."""
    pair = [re.sub(r"(?<!\\)\$", "", " ".join(text.split())) for text in (reference, answer)]
    if not all(pair):
        return False
    if pair[0] == pair[1] or max(map(len, pair)) > LONGEST:
        return pair[0] == pair[1]
    return _comparer.ask(pair)


class _Comparer:
    """math_compare.py, started when first needed and again if it has crashed."""

    process: subprocess.Popen[str] | None = None
    asked = unfinished = 0
    spent = 0.0  # seconds

    def ask(self, pair: list[str]) -> bool | None:
        """Compare in a small part of the remaining time: quick comparisons are always made."""
        self.asked += 1
        left = ALL_SECONDS + ALL_SHARE * self.asked - self.spent
        seconds = max(ALL_SHARE, min(SECONDS, left * SECONDS / ALL_SECONDS))
        process = self.running()
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps([*pair, seconds]), file=process.stdin, flush=True)
        reply = process.stdout.readline()
        if not reply:  # it has crashed
            self.close()
            self.process = None
        equal, used = json.loads(reply or "[null, 0]")
        self.spent += used or seconds
        self.unfinished += equal is None
        return equal if equal is None else bool(equal)

    def running(self) -> subprocess.Popen[str]:
        """Ends the program, with one line, if it does not start."""
        if self.process is None or self.process.poll() is not None:
            program = [sys.executable, str(Path(__file__).with_name("math_compare.py"))]
            self.process = subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, encoding="utf-8",
            )  # fmt: skip
            assert self.process.stdout is not None
            if self.process.stdout.readline() != "ready\n":
                raise SystemExit(
                    "answers to MATH cannot be compared, is math_verify missing? Try: "
                    f"pip install 'lm_eval[math]'; to see the error: {shlex.join(program)}"
                )
        return self.process

    def close(self) -> None:
        if self.unfinished:
            log.warning("%d of %d comparisons of answers to MATH took too long, so that text alone "
                        "decided: see the metric as_text", self.unfinished, self.asked)  # fmt: skip
        if self.process is not None:
            self.process.communicate()


_comparer = _Comparer()
atexit.register(_comparer.close)
