r"""A program: reads pairs of formulas, a line of JSON each, and answers whether they are equal.

math_verify compares, and is spared what it misreads: `\frac\pi4 + 2`, of which it takes the last
number, the full stop of a sentence, the base of `2112_6`, which it drops, words, clocks, blanks
between digits, and large letters, which it takes for small ones.

It sets no time limit. math_answers.py, which runs it, kills it when it takes too long.
"""

import json
import re
import sys

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

ARGUMENTS = {r"\frac": 2, r"\dfrac": 2, r"\tfrac": 2, r"\cfrac": 2, r"\sqrt": 1}
ARGUMENTS |= {r"\binom": 2, r"\dbinom": 2, r"\tbinom": 2}
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
STYLED = re.compile(r"\\(?:text\w*|mbox|math(?:rm|bf|it|sf))\s*\{([^{}]*)\}")
TEXT = re.compile(r"\\(?:text\w*|mbox)\s*\{([^{}]*)\}")
SIGNS = str.maketrans({"½": r"\frac12", "²": "^2", "³": "^3", "∪": r"\cup ", "∞": r"\infty ",
                       "–": "-"})  # fmt: skip
SAME = [  # what is written in many ways -> in one
    (re.compile(r"(?<!\\right)[.\s]+$"), ""),
    (re.compile(r"(?<=\d)(?:\\[,; ]|[ ~])(?=\d{3}(?![\d/]))"), ""),  # 10\,000
    (re.compile(r"^(?:\\approx(?![a-z])|\\?\$)\s*(?=[\d.])"), ""),
    (re.compile(r"(?<=\d)\s*dollars?$"), ""),
    (re.compile(r"√\s*(?:(\d+|[a-z])|\(([^()]*)\))"), r"\\sqrt{\1\2}"),
    (re.compile(r"\s*,?\s*(?:\\text\{\s*,?\s*and\s*\}|\band\b)\s*"), ", "),
    (re.compile(r"(?<=\w)\s*(?:\\text\{)?\s*\(?base\s*\}?\s*(\w+)\)?\}?$"), r"_{\1}"),
    (re.compile(r"(?<=\d)\s+(\d+)/(\d+)(?![\d/])"), r"\\frac{\1}{\2}"),  # 3 1/2
    (re.compile(r"\{:\}"), ":"),
    (re.compile(r"\^?(?:\{\\degree\}|\\degree(?![a-z])|°)"), r"^\\circ"),
    (re.compile(r"\\varnothing(?![a-z])"), r"\\emptyset"),
    (re.compile(r"(?<=\d)\s*(?:percent\b|\\text\{\s*percent\s*\})"), r"\\%"),
]
UNSEEN = re.compile(r"\\(?:left|right)(?![a-z])|\\!|(?<=\\)[dt](?=frac)")
SPACE = re.compile(r"(?:\\[,;: ]|[\s~])+")
BLANK = re.compile(r"(?<!\w)(?<!\d,) | (?!\w)")
WORD = re.compile(r"(?<!\\)(?<![^\W\d_])[^\W\d_]{2,}")
LETTERS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
NAME = re.compile(r"\\[a-zA-Z]+|(?<![^\W\d_])[^\W\d_](?![^\W\d_])")  # no word
NUMBER = re.compile(r"[-+]?[\d.,]+\s*(\\?%)?")
PERCENT = re.compile(r"([-+]?[\d.]+|\d+\\frac\{\d+\}\{\d+\})\s*\\?%")
CLOCK = re.compile(r"(?=.*[ :.])(\d{1,2})(?::(\d\d))?(?: ?([ap])\.?m\.?)?", re.IGNORECASE)
BASES = "two three four five six seven eight nine ten eleven twelve".split()
BASE = "|".join(("[2-9]", r"[12]\d", "3[0-6]", *BASES))
IN_A_BASE = re.compile(rf"\(?((?=[a-z]*\d)[\da-z]+)\)?_\{{?\(?({BASE})\)?\}}?")
PRODUCT = re.compile("[a-z]{2}")
POINT = re.compile(r"(?:\\left)?[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
LIST = re.compile(r"(?!.*\\[{t])[^()\[\]=<>]*,[^()\[\]=<>]*")
INTERVAL = re.compile(r"[(\[].*[)\]]")


def same(reference: str, answer: str) -> bool:
    formulas = [tidy(text) for text in (reference, answer)]
    texts = [letters(text) for text in formulas]
    styled = STYLED.fullmatch(reference.strip(" .")) is not None
    if styled:
        texts = [text.casefold() for text in texts]
    if texts[0] == texts[1]:
        return True
    words = [text.strip("()") for text in texts]
    product = not styled and PRODUCT.fullmatch(formulas[0])
    if (
        not product
        and LETTERS.fullmatch(words[0])
        and (styled or len(words[0]) > 1 or words[0] != texts[0])
    ):
        return words[0].replace(" ", "") == words[1].replace(" ", "")
    meant, said = (CLOCK.fullmatch(text) for text in texts)
    if meant and meant[3]:  # an answer may leave out which half of the day it is
        said = said or re.fullmatch(r"(\d{1,2})()()", texts[1])
        return said is not None and _time(said) in (_time(meant), (*_time(meant)[:2], ""))
    meant, said = (IN_A_BASE.fullmatch(text.casefold()) for text in texts)
    if meant:  # the answer may leave it out
        return _based(said) == _based(meant) if said else meant[1] == texts[1].casefold()
    if said:
        return _based(said) == (texts[0].casefold(), 10)
    if any(re.search(r"\d\s+\d", text) for text in formulas):
        return False  # of which only the text says what it is
    for one, other in (formulas, formulas[::-1]):
        if POINT.fullmatch(one) and LIST.fullmatch(other):
            return False
    if not styled and _other_case(*formulas):
        return False
    read = [_parsed(text) for text in formulas]
    if _verified(read):
        return True
    if INTERVAL.fullmatch(formulas[0]) and re.search(r"[<>]|\\[lg]e", formulas[1]):
        return _verified(read[::-1])
    shares = [PERCENT.fullmatch(text) for text in formulas]
    for way in ("{}", "({})/100") if any(shares) else ():  # 50% is 0.5 as well
        read = [
            _parsed(way.format(share[1]) if share else text)
            for share, text in zip(shares, formulas, strict=True)
        ]
        if _verified(read):
            return True
    return False


def _verified(read: list[list[object]]) -> bool:
    """Numbers may differ by the 1e-8 that dart-math allows."""
    return bool(verify(*read, float_rounding=8, timeout_seconds=None))


def _time(clock: re.Match[str]) -> tuple[int, str, str]:
    return int(clock[1]), clock[2] or "00", (clock[3] or "").casefold()


def _based(number: re.Match[str]) -> tuple[str, int]:
    """Digits and base."""
    digits, base = number.groups()
    return digits, BASES.index(base) + 2 if base in BASES else int(base)


def _other_case(reference: str, answer: str) -> bool:
    """Whether a variable of one is written large, and small in the other."""
    meant, said = (set(NAME.findall(STYLED.sub("", text))) for text in (reference, answer))
    return any(name.casefold() in {other.casefold() for other in said - meant}
               for name in meant - said)  # fmt: skip


def tidy(text: str) -> str:
    """Without the full stop, the `\\text{}` around it all, and arguments that have no braces; what
    has several spellings in one of them."""
    text = text.strip().translate(SIGNS)
    for written, instead in SAME:
        text = written.sub(instead, text)
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
    """What is left to compare as text: words in lower case, and blanks only between letters and
    digits or after the comma of a number."""
    text = STYLED.sub(r"\1", TEXT.sub(lambda found: found[1].casefold(), text))
    text = BLANK.sub("", SPACE.sub(" ", UNSEEN.sub("", text)))
    return WORD.sub(lambda found: found[0].casefold(), text)


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
