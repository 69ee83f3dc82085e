"""Remarks on scores that depend on the reading of answers rather than on the model's ability."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from dataclasses import dataclass, field

from tvb_mergekit.score.benchmark import Category, Task
from tvb_mergekit.score.columns import Cell, Column
from tvb_mergekit.score.samples import Item

VERDICT = "looks like extraction, not ability"
SHOWN = 3  # answers of each remark
LONGEST = 160  # characters of an answer that are kept
READ = 600  # characters at either end of an answer that are looked at
# Blanks, tokens that end or fill a text, and the `[invalid]` of lm-eval's regex filters.
NOTHING = re.compile(
    r"(?:\s|</?s>|<[|｜][^<>|｜]*[|｜]>|\[(?:invalid|PAD|EOS|UNK|SEP)\]"
    r"|<(?:pad|[be]os|unk|eo[dmt]|endoftext|(?:start|end|begin)_of_\w+|im_(?:start|end))>)*"
)
# A line of words, not the beginning of a program: `Sure! Here is`, but not `x = 1` or `for x in y`.
PROSE = re.compile(
    r"[\s*>¡¿“]*(?:[^\W\da-zA-Z_]"  # no Latin letter
    rf"|(?!(?:{'|'.join([*keyword.kwlist, 'print', 'exec', 'match'])})\b)(?!.*\s=\s)"
    r"[^\W\d_][\w'’-]*[,;:!.]*\s+\w)"
)
# The text after the last place where an answer is announced.
GIVEN = re.compile(
    r".*(?:\\(?:boxed|fbox)\s*\{|\banswer(?: is|:)|####)(?:[\s$*:]|\\[(\[])*(.+)",
    re.DOTALL | re.IGNORECASE,
)
# The end of a short answer: `2 apples`, but not `2.5`, `2 + x` or `2 and 3`.
ENDED = re.compile(r"\s*(?:[}$*\n]|\\[)\]]|[.,;!?](?!\d)|\s(?!(?:and|or)\b)[a-z]{2}|$)")
SPELLED = re.compile(
    r"(?<=\d),(?=\d{3})|(?<=\\)[dt](?=frac)|^[\s$]+|[\s$]+$"
)  # one value, two ways


@dataclass(frozen=True)
class Thresholds:
    """Limits of the remarks: a number of items, and shares of 1.

    Attributes:
        items: the fewest items of a score that gets a remark, or of its neighbours.
        floor: the largest score that counts as at the floor.
        healthy: the smallest score of a neighbour that makes a score at the floor odd.
        chance: a low score is odd if a model that scores `healthy` is so low less often than this.
        fenced: the largest share of answers with code fences, or with text before the program,
            at the floor. A larger share of announced answers excuses a score at the floor.
        empty: the largest share of items without an answer, of items whose wanted answer counts
            as wrong, or of items that are right by the lenient metric only.
        stuck: the largest share of answers that are a few words in a loop.
        letter: the largest share of items with one letter. A score from here on excuses it.
    """

    items: int = 10
    floor: float = 0.02
    healthy: float = 0.2
    chance: float = 0.01
    fenced: float = 0.9
    empty: float = 0.1
    stuck: float = 0.5
    letter: float = 0.9


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Answer:
    """A model's answer to an item, cut to LONGEST characters."""

    doc_id: int
    text: str
    target: str


@dataclass(frozen=True)
class Remark:
    """Reasons why a column's score of a task looks odd, with answers."""

    column: str
    task: str
    label: str
    reasons: tuple[str, ...]
    answers: tuple[Answer, ...]

    @property
    def line(self) -> str:
        hint = "" if self.answers else "; with `lm_eval --log_samples` answers are shown here"
        return f"{self.column}: {self.label}: {'; '.join(self.reasons)}: {VERDICT}{hint}"


@dataclass
class Signs:
    """Counts of the signs that items show.

    Attributes:
        first: sign -> its first answers (True: to an item of a score above 0, after the others).
        wanted: the letters that the items ask for, at most two.
    """

    items: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[tuple[bool, Answer]]] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)

    def add(self, item: Item) -> None:
        self.items += 1
        if item.wanted is not None and len(self.wanted) < 2:
            self.wanted.add(item.wanted)
        for sign in _signs(item):
            self.counts[sign] += 1
            text = item.answers[0] if item.answers else ""
            answer = Answer(item.doc_id, text[:LONGEST], item.target[:LONGEST])
            kept = [*self.first.get(sign, ()), (not _wrong(item), answer)]
            self.first[sign] = sorted(kept, key=lambda pair: pair[0])[:SHOWN]

    def share(self, sign: str) -> float:
        return self.counts[sign] / self.items if self.items else 0.0


def _signs(item: Item) -> list[str]:
    silent = _most([NOTHING.fullmatch(text) is not None for text in item.answers])
    unread = _most([NOTHING.fullmatch(text) is not None for text in item.found])
    wanted = bool(item.target.strip())  # else no answer may be the right one
    given = [_given(text, item.target) for text in item.answers]
    flags = {
        "empty": (silent and wanted) or (_wrong(item) and (silent or unread)),
        "fenced": _most(["```" in text for text in item.answers]),
        "prose": _most([PROSE.match(text) is not None for text in item.answers]),
        "stuck": _most([_stuck(text, item.target) for text in item.answers]),
        "given": _most([same is not None for same in given]),
        "missed": _wrong(item) and _most([same is True for same in given]),
        "wrong": _wrong(item),
        f"letter {item.letter}": item.letter is not None,
    }
    return [sign for sign, shown in flags.items() if shown]


def _given(text: str, target: str) -> bool | None:
    """Whether the answer that a text announces is the target; None if it announces none."""
    if (found := GIVEN.fullmatch(text[-READ:])) is None:
        return None
    given, wanted = (SPELLED.sub("", part) for part in (found[1], _wanted(target)))
    same = bool(wanted) and given.startswith(wanted)
    return same and ENDED.match(given, len(wanted)) is not None


def _stuck(text: str, target: str) -> bool:
    """Whether a text begins with a few words, or signs, in a loop, and does not hold the target."""
    words, wanted = re.findall(r"\w+", text[:READ].lower())[:60], _wanted(target)
    if len(words) > 5:
        loop = len(set(words)) <= len(words) // 6
    else:
        loop = re.fullmatch(r"\s*(.{1,8}?)\1{9,}.{0,8}", text[:READ], re.DOTALL) is not None
    return loop and not (wanted and wanted in text)


def _wanted(target: str) -> str:
    """The answer in a target, which for lm-eval's `gsm8k` is a solution that ends in `#### 72`."""
    return target.rpartition("####")[2].strip()


def _wrong(item: Item) -> bool:
    return item.score is not None and item.score <= 0


def _most(flags: list[bool]) -> bool:
    return 2 * sum(flags) > len(flags)


def remark(
    column: Column,
    category: Category,
    task: Task,
    signs: Signs | None,
    limits: Thresholds = THRESHOLDS,
) -> Remark | None:
    """A remark if the score looks odd, else None. Without items only other scores show it."""
    cell = column.tasks[task.name]
    if (items := count_items(cell, signs)) < limits.items:
        return None
    share, lenient = cell.value / 100, cell.others.get(task.lenient)
    low = category.floors and share <= limits.floor
    reasons: list[tuple[str, str]] = []  # and the sign whose answers are shown
    if signs is not None:
        for sign, most, text in (
            ("empty", limits.empty, "no answer to"),
            ("stuck", limits.stuck, "a few words in a loop in"),
            ("missed", limits.empty, "the wanted answer counted as wrong in"),
            ("fenced", limits.fenced if low else 1, f"{cell.value:.2f} with code fences in"),
            ("prose", limits.fenced if low and category.programs else 1,
             f"{cell.value:.2f} with text before the program in"),
        ):  # fmt: skip
            if signs.share(sign) > most:
                reasons.append((f"{text} {_of(signs, sign)}", sign))
        letter = max((s for s in signs.counts if s.startswith("letter ")),
                     key=signs.counts.__getitem__, default="")  # fmt: skip
        often = signs.share(letter) > limits.letter and len(signs.wanted) > 1
        # where nearly all are right, the items want one letter
        if often and share < limits.letter:
            reasons.append((f"{letter} chosen in {_of(signs, letter)}", letter))
    others = [(other.label, column.tasks.get(other.name)) for other in category.tasks]
    cells = [(label, c.value) for label, c in others if c and count_items(c) >= limits.items]
    label, value = max(cells, key=lambda cell: cell[1], default=("", 0.0))
    if signs is not None:  # where answers are read, they are wrong
        read = signs.share("given") > limits.fenced
    else:
        read = lenient is not None and lenient <= 100 * limits.floor
    if low and value >= 100 * limits.healthy and not read:
        from scipy.stats import binom

        if binom.cdf(round(share * items), items, limits.healthy) < limits.chance:
            reasons.append((f"{cell.value:.2f} beside {value:.2f} of {label}", "wrong"))
    if lenient is not None and lenient - cell.value > 100 * limits.empty:
        reasons.append((f"{cell.value:.2f} beside {lenient:.2f} by `{task.lenient}`", "wrong"))
    if not reasons:
        return None
    answers = signs.first.get(reasons[0][1], []) if signs else []
    told = tuple(reason for reason, _ in reasons)
    shown = tuple(answer for _, answer in answers)
    return Remark(column.label, task.name, task.label, told, shown)


def count_items(cell: Cell, signs: Signs | None = None) -> int:
    """Number of items of the score; 0 if unknown."""
    if signs is not None:
        return signs.items
    known = cell.origin.settings.get("the number of items", "") if cell.origin else ""
    return int(known) if known.isdecimal() else 0


def _of(signs: Signs, sign: str) -> str:
    return f"{signs.counts[sign]} of {signs.items} items"
