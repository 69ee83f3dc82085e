"""Spellings of formulas: one of each for comparison by math_compare.py."""

import re
from fractions import Fraction

ARGUMENTS = {r"\frac": 2, r"\dfrac": 2, r"\tfrac": 2, r"\cfrac": 2, r"\sqrt": 1}
ARGUMENTS |= {r"\binom": 2, r"\dbinom": 2, r"\tbinom": 2}
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
STYLED = re.compile(r"\\(?:text\w*|mbox|math(?:rm|bf|it|sf))\s*\{([^{}]*)\}")
TEXT = re.compile(r"\\(?:text\w*|mbox)\s*\{([^{}]*)\}")
SIGNS = str.maketrans({"½": r"\frac12", "²": "^2", "³": "^3", "∪": r"\cup ", "∞": r"\infty ",
                       "–": "-", "−": "-", "π": r"\pi ", "∅": r"\emptyset ", "×": r"\times ",
                       "·": r"\cdot ", "±": r"\pm ", "≈": r"\approx ", "≤": r"\le ",
                       "≥": r"\ge ", "∈": r"\in ", "“": "", "”": "", '"': ""})  # fmt: skip
GAP = r"(?:\\[,;: ]|[\s~])*"
SPACING = r"\\[,;:! ]|\\q?quad(?![a-z])|[\s~]"


def _worded(word: str) -> str:
    r"""A pattern for a word between two formulas, plain or in `\text{}`, maybe after a comma."""
    inside = rf"\\(?:text\w*|mbox)\s*\{{{GAP},?{GAP}{word}{GAP}\}}"
    return rf"{GAP},?{GAP}(?:{inside}|\b{word}\b){GAP}"


def _repeating(found: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as a fraction."""
    ahead, once, again = found.groups()
    value = Fraction(int(ahead + once + again) - int(ahead + once or "0"),
                     10 ** len(once) * (10 ** len(again) - 1))  # fmt: skip
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


SAME = tuple((re.compile(written), instead) for written, instead in (
    # spellings -> the one that is compared
    (rf"^(?:{SPACING})+|(?:{SPACING}|(?<!\\right)\.|\\$)+$", ""),
    (r"^\{(?!.*\\(?:over|choose))((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}$", r"\1"),
    (r"\\(?:[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])", ""),
    (r"\\(?:q?quad|lor)(?![a-z])", " "),
    (r"\\[lr]?vert(?![a-z])", "|"),
    (r"(?:\\le(?:q|qslant)?(?![a-z])|<=)\s*", r"\\le "),
    (r"(?:\\ge(?:q|qslant)?(?![a-z])|>=)\s*", r"\\ge "),
    (r"\\lt(?![a-z])", "<"),
    (r"\\gt(?![a-z])", ">"),
    (r"\\([lr])brace(?![a-z])", lambda found: {"l": r"\{", "r": r"\}"}[found[1]]),
    (r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{?\s*(\d+)\s*\}?", _repeating),
    (r"(?<=\d)(?:\\[,; ]|[ ~])(?=\d{3}(?![\d/]))", ""),  # 10\,000
    (r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d{3}(?!\d))", ","),
    (r"^\s*(?:\\approx(?![a-z])|=)\s*|\\?\$\s*(?=[\d.])", ""),
    (r"~", " "),
    (r"\s+(?=_)|(?<=\])\s+(?=\{)", ""),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"√\s*(?:(\d+|[a-z])|\(([^()]*)\))", r"\\sqrt{\1\2}"),
    (r"(?<![a-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z\\])pi(?![a-z])", r"\\pi "),
    (r"\\bigcup(?![a-z])|(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
    (_worded("or"), r"\\lor "),
    (rf"(?<=\d)(?:{_worded('to')}|\s*\\colon(?![a-z])\s*)(?=\d)", ":"),
    (r"(?<=[\w)])\s*(?:\\text\w*\{)?\s*\(?(?:in )?base\s*\}?\s*(?:\\text\w*\{)?(\w+)\)?\}?$",
     r"_{\1}"),
    (r"\\log\s*_\s*(\w)", r"\\log_{\1}"),
    (r"(?<=\d)\s+(\d+)/(\d+)(?![\d/])", r"\\frac{\1}{\2}"),  # 3 1/2
    (r"\{:\}", ":"),
    (r"\s*(?:\^?(?:\{\\degree\}|\\degree(?![a-z])|°)|\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z])))",
     r"^\\circ "),
    (r"\\varnothing(?![a-z])|(?:\\left)?\\\{\s*(?:\\right)?\\\}", r"\\emptyset"),
    (r"(?<=\d)\s*(?:percent\b|\\text\w*\{\s*percent\s*\})", r"\\%"),
    (r"\\math(?:rm|it)\{i\}", "i"),
))  # fmt: skip
AND = re.compile(_worded("and"))
UNSEEN = re.compile(r"\\(?:left|right)(?![a-z])|\\!|(?<=\\)[dt](?=frac)")
SPACE = re.compile(r"(?:\\[,;: ]|[\s~])+")
BLANK = re.compile(r"(?<!\w)(?<!\d,) | (?!\w)")
WORD = re.compile(r"(?<!\\)(?<![^\W\d_])(?![a-z][A-Z])[^\W\d_]{2,}")
LESS = re.compile(r"(<|>|\\[lg]e )")


def tidy(text: str) -> str:
    r"""Remove the full stop and a `\text{}` around all, brace arguments, unify spellings."""
    text = text.strip().translate(SIGNS)
    for written, instead in SAME:
        text = written.sub(instead, text)
    text = AND.sub(r"\\land " if LESS.search(text) else ", ", text).strip()
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
    """A text for comparison: words in lower case, blanks only between letters and digits or after
    the comma of a number."""
    text = STYLED.sub(r"\1", TEXT.sub(lambda found: found[1].casefold(), text))
    text = BLANK.sub("", SPACE.sub(" ", UNSEEN.sub("", text)))
    return WORD.sub(lambda found: found[0].casefold(), text)
