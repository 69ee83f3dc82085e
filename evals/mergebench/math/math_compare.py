r"""A program: reads pairs of formulas, a line of JSON each, and answers whether they are equal.

math_verify compares, and is spared what it misreads: `\frac\pi4 + 2`, of which it takes the last
number, the full stop of a sentence, the base of `2112_6`, which it drops, words, and clocks.

It sets no time limit. math_answers.py, which runs it, kills it when it takes too long.
"""

import json
import re
import sys

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

ARGUMENTS = {r"\frac": 2, r"\dfrac": 2, r"\tfrac": 2, r"\cfrac": 2, r"\sqrt": 1}
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
STYLED = re.compile(r"\\(?:text\w*|mbox|math(?:rm|bf|it|sf))\s*\{([^{}]*)\}")
UNSEEN = re.compile(r"\\(?:left|right)(?![a-z])|\\[,;:! ]|[\s~]|(?<=\\)[dt](?=frac)")
NUMBER = re.compile(r"[-+]?[\d.,]+\s*(\\?%)?")
CLOCK = re.compile(r"(\d{1,2}:\d\d)(?:([ap])\.?m\.?)?")
IN_A_BASE = re.compile(r"(\d[\da-z]*)_\{?(\d+)\}?")


def same(reference: str, answer: str) -> bool:
    formulas = [tidy(text) for text in (reference, answer)]
    texts = [letters(text) for text in formulas]
    if texts[0] == texts[1]:
        return True
    meant, said = (CLOCK.fullmatch(text) for text in texts)
    if meant and meant[2]:  # an answer may leave out which half of the day it is
        return said is not None and said[1] == meant[1] and said[2] in (meant[2], None)
    meant, said = (IN_A_BASE.fullmatch(text) for text in texts)
    if meant and said:
        return meant.groups() == said.groups()
    if meant or said:  # the base may be left out
        return (meant[1] if meant else texts[0]) == (said[1] if said else texts[1])
    read = [_parsed(text) for text in formulas]
    return bool(verify(*read, timeout_seconds=None))


def tidy(text: str) -> str:
    """Without the full stop, the `\\text{}` around it all, and arguments that have no braces."""
    text = re.sub(r"(?<!\\right)[.\s]+$", "", text.strip())
    if styled := STYLED.fullmatch(text):
        text = styled[1].strip().rstrip(".")
    tokens = TOKEN.findall(text)[::-1]
    return "".join(_with_braces(tokens) for _ in iter(lambda: bool(tokens), False))


def _with_braces(tokens: list[str]) -> str:
    """The next token of a stack, with its arguments, each in braces; or the next group."""
    found = tokens.pop()
    if found == "{":
        while tokens and tokens[-1] != "}":
            found += _with_braces(tokens)
        return found + (tokens.pop() if tokens else "")
    for _ in range(ARGUMENTS.get(found, 0)):
        while tokens and tokens[-1].isspace():
            tokens.pop()
        if tokens and tokens[-1] == "[":  # a root's degree
            while tokens and not found.endswith("]"):
                found += tokens.pop()
        if not tokens:
            break
        argument = _with_braces(tokens)
        found += argument if argument.startswith("{") else f"{{{argument}}}"
    return found


def letters(text: str) -> str:
    """What is left to compare as text, in lower case."""
    return UNSEEN.sub("", STYLED.sub(r"\1", text)).casefold()


def _parsed(text: str) -> list[object]:
    """What math_verify makes of a formula. Its second way of reading is for numbers, as it takes
    one out of anything that it cannot parse."""
    ways = [LatexExtractionConfig()]
    if NUMBER.fullmatch(text):
        ways.append(ExprExtractionConfig())
    found: list[object] = parse(f"${text}$", ways, parsing_timeout=None)
    return found


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(same(*json.loads(line))), flush=True)
