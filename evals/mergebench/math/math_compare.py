r"""A program: reads pairs of formulas, a line of JSON each, and answers whether they are equal.

Lists, points, intervals and unions are compared part by part, numbers by their values. math_verify
compares all else, except what it misreads: `\frac\pi4 + 2` (it uses the last number), the full stop
of a sentence, the base of `2112_6`, words, clocks, units, blanks between digits, and capitals.

A line is [reference, answer, seconds], the reply [equal, seconds used]; seconds are those of the
processor. The kernel ends a comparison that takes longer, since a power tower keeps one C function
busy for hours. Then `equal` is null.
"""

import itertools
import json
import os
import re
import signal
import sys
import time
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_text import GAP, LESS, STYLED, TOKEN, UNSEEN, letters, tidy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

CASE = re.compile(r"\\(?:text\w*|mbox)\{\s*(?:if|for)\s*\}|,")
LETTERS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
NAME = re.compile(r"\\[a-zA-Z]+|(?<![^\W\d_])[^\W\d_](?![^\W\d_])")  # no word
NUMBER = re.compile(r"[-+]?[\d.,]+\s*(\\?%)?")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
PERCENT = re.compile(r"(.*[\d}])\s*\\?%")
CLOCK = re.compile(r"(?=.*[ :.])(\d{1,2})(?::(\d\d))?(?: ?([ap])\.?m\.?)?", re.IGNORECASE)
BASES = "two three four five six seven eight nine ten eleven twelve".split()
BASE = "|".join(("[2-9]", r"[12]\d", "3[0-6]", *BASES))
IN_A_BASE = re.compile(rf"(-?)\(?((?=[a-z]*\d)[\da-z]+(?:\.\d+)?)\)?_\{{?\(?({BASE})\)?\}}?")
PRODUCT = re.compile("[a-z]{2}")
UNIT = re.compile(  # "12 square feet", `\text{ cm}^2`
    rf"(?<=[\w)}}%]){GAP}(?:\\(?:text\w*|mbox|mathrm)\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}"
    r"|((?:(?<= )(?:square|cubic|sq|cu)\.? )?"
    r"(?:(?:(?<= )|(?=[a-z]{2}))(?:[cmkd]?m|[km]?g|s|m?[lL]|ft|in|lbs?|oz|yd|mi|h|hrs?|min|sec|mph)"
    r"|(?<= )[a-zA-Z]{4,}|units)(?: (?:per [a-z]+|old|units|squared|cubed))?))(?:\^\{?(\d)\}?)?$"
)
COMMAND = re.compile(r"\\[a-zA-Z]+")
LETTER = re.compile(r"\\[a-zA-Z]+|[^\W\d_]")
NO_UNIT = re.compile(  # "3 million", "3 choose 2"
    r"\b(?:dozens?|(?:hundred|thousand|percent)\w*|[mbtr]+illion\w*|hal(?:f|ves)|thirds?"
    r"|quarters?|(?:four|fif|six|seven|eigh|nin|ten)ths?|choose|plus|minus|times|base|more|less"
    r"|fewer|factorial)\b|^\s*(?:squared|cubed)|\d(?!\}*$)"
)
POWER = re.compile(r"\b(?:(sq)(?:uared?)?|(cu)(?:b(?:ic|ed))?)\b|\^\{?(\d)")
ASSIGNED = re.compile(
    r"(\\math\w+\{\w\}|\\angle ?[A-Z]+|[a-zA-Z](?:_\{?\w\}?|\([a-z]\))?|\([a-z](?:, ?[a-z])+\))"
    r"\s*(?:=|\\in(?![a-z]))\s*(?!.*=)"
)
TURNED = {"<": ">", ">": "<", r"\le ": r"\ge ", r"\ge ": r"\le "}
UNKNOWN = re.compile(r"\s*(?!\\(?:pi|infty)\b)([a-zA-Z]|\\[a-z]+)\s*")
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
DEGREES = re.compile(r"(\d+(?:\.\d+)?)\^\\circ ?")
IMAGINARY = re.compile(r"(?<![a-zA-Z\\_])(?<!_\{)i(?![a-zA-Z])")
PLAIN = re.compile(  # `3`, `0.5`, `\frac{1}{2}`, `1/2`, `3\frac{1}{2}`
    r"([-+]?)\s*(\d*\.?\d*)\s*(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|/\s*(\d+))?"
)
BRACES = re.compile(r"\\\{([^|:]*(?<!\\emptyset))\\\}|\{([^{}]*,[^{}]*)\}")
OPEN, CLOSE = tuple("([{"), tuple(")]}")
LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(nits=True)
)  # without units, of which it knows `t` and `h`


def same(reference: str, answer: str) -> bool:
    formulas = [tidy(text) for text in (reference, answer)]
    if r"\begin{cases}" in reference:
        meant, said = (letters(CASE.sub("", text)) for text in formulas)
        return meant == said
    meant, said = formulas
    return _same(meant, said, STYLED.fullmatch(reference.strip(" .")) is not None)


def _same(meant: str, said: str, styled: bool) -> bool:
    """Compare unions, points and lists part by part."""
    meant, said = _unassigned(meant, said)
    if letters(meant) == letters(said):
        return True
    texts = [meant, said]
    unions, points = [_union(text) for text in texts], [_point(text) for text in texts]
    if any(unions):
        (name, of_meant), (other, of_said) = (
            union or ("", [text] if point else [])
            for union, point, text in zip(unions, points, texts, strict=True)
        )
        if of_meant and of_said:
            return (name == other or not (name and other)) and _matched(of_meant, of_said, styled)
        return all(map(LESS.search, texts)) and _verified(*map(_parsed, texts))
    lists = [_list(text) for text in texts]
    if any(points):
        for n, listed in enumerate(lists):
            point = points[1 - n]
            if listed and point and texts[n].startswith(r"\{"):  # `\{1,2\}` for `(1,2)`
                return _matched(listed, point[1:], styled)
            if listed and all(map(ASSIGNED.match, listed)):  # `x=1, y=2`
                points[n] = ["()", *(ASSIGNED.sub("", part) for part in listed)]
        one, two = points
        if not (one and two) or one[0] != two[0] or len(one) != len(two):
            return False
        return all(_same(*pair, styled) for pair in zip(one[1:], two[1:], strict=True))
    if any(lists):
        return _matched(lists[0] or [meant], lists[1] or [said], styled)
    return _same_leaf(meant, said, styled)


def _unassigned(meant: str, said: str) -> list[str]:
    r"""Remove `x \in`, and an `x =` that both texts have or only one of them."""
    texts = [meant.strip(), said.strip()]
    names = [ASSIGNED.match(text) for text in texts]
    bare = list(texts)
    for n, (name, other) in enumerate(zip(names, names[::-1], strict=True)):
        both = other and other[1] == name[1] if name else False
        if name and (both or name[0][0] == "(" or r"\in" in name[0] or "=" not in texts[1 - n]):
            bare[n] = texts[n][name.end() :]
    return bare


def _matched(meant: list[str], said: list[str], styled: bool) -> bool:
    """Whether the parts are the same in some order."""
    left = list(said)
    for part in meant:
        found = next((other for other in left if _same(part, other, styled)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _split(text: str, *signs: str) -> list[str]:
    """Split at signs outside of brackets."""
    parts, depth = [""], 0
    for token in TOKEN.findall(text):
        depth += token.endswith(OPEN) - token.endswith(CLOSE)
        if depth == 0 and token in signs:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def _point(text: str) -> list[str] | None:
    """The brackets and the elements of a point or an interval."""
    text = UNSEEN.sub("", text).strip()
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    parts = _split(text[1:-1], ",", ";")
    if len(parts) < 2 or not all(parts) or len(_split(text, ",", ";")) > 1:  # `(1,2),(3,4)`
        return None
    return [text[0] + text[-1], *parts]


def _list(text: str) -> list[str] | None:
    r"""The elements of a list or a set, and the two of `3 \pm 1`."""
    text = UNSEEN.sub("", text).strip()
    braces = BRACES.fullmatch(text)
    text = (braces[1] or braces[2]) if braces else text
    number = THOUSANDS.fullmatch(_without_unit(text)[0])
    parts = [text] if number else _split(text, ",", ";", r"\lor")
    if len(parts) > 1 and "=" not in "".join(parts[1:]):
        parts[0] = ASSIGNED.sub("", parts[0])  # `x = 1, 2`
    found = []
    for part in parts:
        around = part.split(r"\pm")
        ways = itertools.product("+-", repeat=len(around) - 1) if len(around) < 4 else ()
        found += ["".join(map("".join, zip(around, (*way, ""), strict=True))) for way in ways] or [
            part
        ]
    return found if braces or len(found) > 1 else None


def _union(text: str) -> tuple[str, list[str]] | None:
    r"""The unknown and the intervals of `x < 1 \lor x > 2`, or the intervals of a union."""
    text = UNSEEN.sub("", text)
    parts = _split(text, r"\cup", r"\lor")
    if len(parts) > 1 and all(map(_point, parts)):
        return "", parts
    if not LESS.search(text):
        return None
    found = [_interval(part) for part in _split(text, r"\cup", r"\lor", ",")]
    names = {name for name, _ in found}
    return (names.pop(), [each for _, each in found]) if len(names) == 1 and all(names) else None


def _interval(text: str) -> tuple[str, str]:
    r"""The unknown of `1 < x \le 2`, and `(1,2]`; "" if the text is not of this form."""
    ends, closed, names = {"<": r"-\infty", ">": r"\infty"}, {"<": "(", ">": ")"}, set()
    for part in _split(text, r"\land"):
        terms = LESS.split(part)
        if len(terms) not in (3, 5):
            return "", text
        for left, sign, right in zip(terms[::2], terms[1::2], terms[2::2], strict=False):
            if not UNKNOWN.fullmatch(left):
                left, sign, right = right, TURNED[sign], left
            if not UNKNOWN.fullmatch(left):
                return "", text
            names.add(left.strip())
            side = "<" if sign in (">", r"\ge ") else ">"  # the end of the interval
            ends[side] = right.strip()
            closed[side] = {"<": "([", ">": ")]"}[side]["\\" in sign]
    if len(names) != 1 or names & set(NAME.findall(" ".join(ends.values()))):
        return "", text
    return names.pop(), f"{closed['<']}{ends['<']},{ends['>']}{closed['>']}"


def _same_leaf(meant: str, said: str, styled: bool) -> bool:
    formulas = [meant, said]
    texts = [letters(text).casefold() if styled else letters(text) for text in formulas]
    if texts[0] == texts[1]:
        return True
    words = [text.strip("()") for text in texts]
    if LETTERS.fullmatch(words[0]) and (
        styled or (not PRODUCT.fullmatch(meant) and (len(words[0]) > 1 or words[0] != texts[0]))
    ):
        return words[0].replace(" ", "") == words[1].replace(" ", "")
    clock, other = (CLOCK.fullmatch(text) for text in texts)
    if clock and clock[3]:  # an answer may leave out the half of the day
        other = other or re.fullmatch(r"(\d{1,2})()()", texts[1])
        return other is not None and _time(other) in (_time(clock), (*_time(clock)[:2], ""))
    one, two = (_based(text.casefold()) for text in texts)
    if one:  # the answer may leave out the base
        return two == one if two else one[0] == texts[1].casefold()
    if two:
        return two == (texts[0].casefold(), 10)
    if bool(LESS.search(meant)) != bool(LESS.search(said)):
        return False
    (meant, power), (said, other_power) = map(_without_unit, formulas)
    if (
        (power and other_power and power != other_power)
        or len({text.count(":") for text in (meant, said)} - {0}) > 1
        or (not styled and _other_case(meant, said))
        or any(re.search(r"\d\s+\d", text) for text in (meant, said))  # only the text says what
    ):
        return False
    shares = [PERCENT.fullmatch(text) for text in (meant, said)]
    for way in ("{}", "({})/100") if any(shares) else ("{}",):  # 50% is 0.5 as well
        pair = [way.format(share[1]) if share else text
                for share, text in zip(shares, (meant, said), strict=True)]  # fmt: skip
        if _same_value(*pair):
            return True
    return False


def _without_unit(text: str) -> tuple[str, int]:
    """A formula, and the power of the unit after it, 0 without a unit."""
    unit = UNIT.search(text)
    ahead = text[: unit.start()] if unit else ""
    if not unit or NO_UNIT.search(unit[0]) or not re.search(r"[\d\\]", ahead):
        return text, 0
    if unit[2] and NAME.search(COMMAND.sub("", ahead)):  # `2r h` is a product
        return text, 0
    power = POWER.search(unit[0])
    return ahead.strip(), (1 if not power else 2 if power[1] else 3 if power[2] else int(power[3]))


def _same_value(meant: str, said: str) -> bool:
    """Compare as fractions, which is quick, else as numbers, else by math_verify."""
    texts = (meant, said)
    read: list[list[object]] = []
    fractions = [_fraction(text) for text in texts]
    if None in fractions:
        read = [_parsed(text) for text in texts]
        fractions = [_number(found[0]) if found else None for found in read]
    one, other = fractions
    if one is None or other is None:
        return _verified(*read)
    one, other = sympy.sympify(one), sympy.sympify(other)
    apart = abs(sympy.N(one - other, 15))
    size = max(abs(sympy.N(one, 15)), abs(sympy.N(other, 15)))
    # to the eight decimals of dart-math, small numbers to six digits
    small = one.is_Rational and other.is_Rational and size < 0.01
    return bool(apart <= (1e-6 * size if small else 1e-8))


def _fraction(text: str) -> Any:
    text = UNSEEN.sub("", text).strip().strip("{}").strip()
    if THOUSANDS.fullmatch(text):
        text = re.sub("[^-+.0-9]", "", text)
    found = PLAIN.fullmatch(text)
    if not found or not re.search(r"\d", text):
        return None
    sign, ahead, above, below, divisor = found.groups()
    if ahead == "." or (divisor and not ahead) or "0" in (below, divisor):
        return None
    part = Fraction(int(above or 0), int(below or 1))
    if above and ahead and ("." in ahead or part < 0):
        return None
    value = Fraction(ahead or 0) / Fraction(divisor or 1) + part
    return -value if sign == "-" else value


def _number(found: object) -> Any:
    """The value of a formula without unknowns, decimals in it exact."""
    if not isinstance(found, sympy.Expr) or found.free_symbols:
        return None
    exact = found.replace(
        lambda part: isinstance(part, sympy.Float), lambda part: sympy.Rational(str(part))
    ).doit()
    return exact if exact.is_number and exact.is_finite is not False else None


def _verified(meant: list[object], said: list[object]) -> bool:
    """Numbers may differ by the 1e-8 that dart-math allows."""
    return bool(verify(meant, said, float_rounding=8, timeout_seconds=None))


def _time(clock: re.Match[str]) -> tuple[int, str, str]:
    return int(clock[1]), clock[2] or "00", (clock[3] or "").casefold()


def _based(text: str) -> tuple[str, int] | None:
    """Digits, with their sign, and base."""
    if not (number := IN_A_BASE.fullmatch(text)):
        return None
    sign, digits, base = number.groups()
    return sign + digits, BASES.index(base) + 2 if base in BASES else int(base)


def _other_case(reference: str, answer: str) -> bool:
    """Whether one text has a variable as a capital, and the other as a small letter."""
    meant, said = (set(LETTER.findall(STYLED.sub("", text))) for text in (reference, answer))
    return bool({n.casefold() for n in meant - said} & {n.casefold() for n in said - meant})


def _parsed(text: str) -> list[object]:
    """The reading of math_verify: letters as real, i as the imaginary unit.

    Its second way of reading is for numbers only, since it finds one in any text.
    """
    if TRIGONOMETRIC.search(text):
        text = DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = IMAGINARY.sub(" i ", text.replace(r"^\circ", ""))
    ways = [LATEX, *([ExprExtractionConfig()] if NUMBER.fullmatch(text) else [])]
    return [
        found.xreplace({
            symbol: sympy.I if symbol.name == "i" else sympy.Symbol(symbol.name, real=True)
            for symbol in found.free_symbols
        }) if isinstance(found, sympy.Expr | sympy.MatrixBase) else found
        for found in parse(f"${text}$", ways, parsing_timeout=None)
    ]  # fmt: skip


def main() -> None:
    """Forks off a process that compares, and another one when it is ended."""
    same(r"\frac{1}{2}+\sqrt{2}", r"\sqrt{2}+0.5")  # fills caches
    print("ready", flush=True)
    while child := os.fork():
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            return
        print("[null, 0]", flush=True)
    for line in sys.stdin:
        *pair, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        start = time.process_time()
        try:
            equal = same(*pair)
        except Exception:
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([equal, time.process_time() - start]), flush=True)


if __name__ == "__main__":
    main()
