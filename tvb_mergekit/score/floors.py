"""Remarks on scores that depend on the reading of answers rather than on the model's ability."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tvb_mergekit.score.benchmark import Category, Task
from tvb_mergekit.score.columns import Cell, Column
from tvb_mergekit.score.results import Sample

VERDICT = "looks like extraction, not ability"
SHOWN = 3  # answers of each remark
LONGEST = 160  # characters of an answer that are kept
READ = 600  # characters at either end of an answer that are read

# Thresholds of the remarks. Shares are of a task's items, if nothing else is said.
FEWEST = 10  # items of a score that gets a remark, or is a neighbour
FLOOR = 0.02  # the largest score that is at the floor
HEALTHY = 0.2  # the smallest neighbouring score that makes a score at the floor odd
CHANCE = 0.01  # a low score is odd if a model that scores HEALTHY would have it less often
SPOILED = 0.1  # the largest share without answer, wrongly counted, or right by `lenient` only
STUCK = 0.5  # the largest share of answers in a loop
FENCED = 0.9  # at the floor, the largest share of answers with code fences, or text before programs
GIVEN = 0.9  # a larger share of announced answers excuses a score at the floor
LETTER = 0.9  # the largest share with one letter; a score of LETTER excuses it

# Blanks, tokens that end or fill a text, and the `[invalid]` of lm-eval's regex filters.
NOTHING = re.compile(
    r"(?:\s|</?s>|<[|｜][^<>|｜]*[|｜]>|\[(?:invalid|PAD|EOS|UNK|SEP)\]"
    r"|<(?:pad|[be]os|unk|eo[dmt]|endoftext|(?:start|end|begin)_of_\w+|im_(?:start|end))>)*"
)
# A line of words, not the beginning of a program: `Sure! Here is`, but not `x = 1` or `for x in y`.
PROSE = re.compile(
    r"[\s*>¡¿“]*(?:[^\W\da-zA-Z_]"  # not a Latin letter
    rf"|(?!(?:{'|'.join([*keyword.kwlist, 'print', 'exec', 'match'])})\b)(?!.*\s=\s)"
    r"[^\W\d_][\w'’-]*[,;:!.]*\s+\w)"
)
# The text after the last place where an answer is announced.
ANNOUNCED = re.compile(
    r".*(?:\\(?:boxed|fbox)\s*\{|\banswer(?: is|:)|####)(?:[\s$*:]|\\[(\[])*(.+)",
    re.DOTALL | re.IGNORECASE,
)
# The end of a short answer: `2 apples`, but not `2.5`, `2 + x` or `2 and 3`.
ENDED = re.compile(r"\s*(?:[}$*\n]|\\[)\]]|[.,;!?](?!\d)|\s(?!(?:and|or)\b)[a-z]{2}|$)")
# Spellings that do not change a value.
SPELLED = re.compile(r"(?<=\d),(?=\d{3})|(?<=\\)[dt](?=frac)|^[\s$]+|[\s$]+$")


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
    """Counts of the signs that a task's samples show."""

    items: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    # sign -> its first answers, wrong ones (False) before others (True)
    first: dict[str, list[tuple[bool, Answer]]] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)  # choices that items ask for, at most two

    def add(self, sample: Sample) -> None:
        self.items += 1
        if sample.wanted is not None and len(self.wanted) < 2:
            self.wanted.add(sample.wanted)
        for sign in _signs(sample):
            self.counts[sign] += 1
            text = sample.answers[0] if sample.answers else ""
            answer = Answer(sample.doc_id, text[:LONGEST], sample.target[:LONGEST])
            kept = [*self.first.get(sign, ()), (not sample.wrong, answer)]
            self.first[sign] = sorted(kept, key=lambda pair: pair[0])[:SHOWN]

    def share(self, sign: str) -> float:
        return self.counts[sign] / max(self.items, 1)


def _signs(sample: Sample) -> list[str]:
    target, answers, wrong = sample.target, sample.answers, sample.wrong
    silent = _most(NOTHING.fullmatch(text) is not None for text in answers)
    unread = _most(NOTHING.fullmatch(text) is not None for text in sample.found)
    flags = {
        # without a target an empty answer may be right
        "empty": (silent and bool(target.strip())) or (wrong and (silent or unread)),
        "fenced": _most("```" in text for text in answers),
        "prose": _most(PROSE.match(text) is not None for text in answers),
        "stuck": _most(is_loop(text, target) for text in answers),
        "given": _most(announces(text, target) is not None for text in answers),
        "missed": wrong and _most(announces(text, target) is True for text in answers),
        "wrong": wrong,
        f"letter {sample.letter}": sample.letter is not None,
    }
    return [sign for sign, shown in flags.items() if shown]


def announces(text: str, target: str) -> bool | None:
    """Whether the answer that a text announces is the target; None if it announces none."""
    if (found := ANNOUNCED.fullmatch(text[-READ:])) is None:
        return None
    given, wanted = (SPELLED.sub("", part) for part in (found[1], _wanted(target)))
    same = bool(wanted) and given.startswith(wanted)
    return same and ENDED.match(given, len(wanted)) is not None


def is_loop(text: str, target: str) -> bool:
    """Whether a text begins with a few words or signs in a loop, without the target."""
    words, wanted = re.findall(r"\w+", text[:READ].lower())[:60], _wanted(target)
    if len(words) > 5:
        loop = len(set(words)) <= len(words) // 6
    else:
        loop = re.fullmatch(r"\s*(.{1,8}?)\1{9,}.{0,8}", text[:READ], re.DOTALL) is not None
    return loop and not (wanted and wanted in text)


def _wanted(target: str) -> str:
    """The answer in a target; targets of lm-eval's `gsm8k` are solutions that end in `#### 72`."""
    return target.rpartition("####")[2].strip()


def _most(flags: Iterator[bool]) -> bool:
    known = list(flags)
    return 2 * sum(known) > len(known)


def remark(column: Column, category: Category, task: Task, signs: Signs | None) -> Remark | None:
    """Remark on a score that looks odd. Without samples (`signs`) only other scores show it."""
    cell = column.tasks[task.name]
    items = signs.items if signs else count_items(cell)
    if items < FEWEST:
        return None
    low = category.floors and cell.value / 100 <= FLOOR
    lenient = cell.others.get(task.lenient)
    if signs is not None:
        reasons = _odd_answers(cell.value, signs, low, category.programs)
        excused = signs.share("given") > GIVEN  # announced answers were read, so they are wrong
    else:
        reasons, excused = [], lenient is not None and lenient <= 100 * FLOOR
    if low and not excused and (label := _healthy_neighbour(column, category, cell, items)):
        reasons.append((f"{cell.value:.2f} beside {label}", "wrong"))
    if lenient is not None and lenient - cell.value > 100 * SPOILED:
        reasons.append((f"{cell.value:.2f} beside {lenient:.2f} by `{task.lenient}`", "wrong"))
    if not reasons:
        return None
    answers = signs.first.get(reasons[0][1], []) if signs else []
    texts = tuple(text for text, _ in reasons)
    return Remark(column.label, task.name, task.label, texts, tuple(a for _, a in answers))


def _odd_answers(score: float, signs: Signs, low: bool, programs: bool) -> list[tuple[str, str]]:
    limits = [
        ("empty", SPOILED, "no answer to"),
        ("stuck", STUCK, "a few words in a loop in"),
        ("missed", SPOILED, "the wanted answer counted as wrong in"),
    ]
    if low:
        limits.append(("fenced", FENCED, f"{score:.2f} with code fences in"))
    if low and programs:
        limits.append(("prose", FENCED, f"{score:.2f} with text before the program in"))
    letters = [sign for sign in signs.counts if sign.startswith("letter ")]
    # if nearly all answers are right, the items ask for one letter
    if letters and len(signs.wanted) > 1 and score / 100 < LETTER:
        letter = max(letters, key=signs.counts.__getitem__)
        limits.append((letter, LETTER, f"{letter} chosen in"))
    shown = [(sign, text) for sign, most, text in limits if signs.share(sign) > most]
    return [(f"{text} {signs.counts[s]} of {signs.items} items", s) for s, text in shown]


def _healthy_neighbour(column: Column, category: Category, cell: Cell, items: int) -> str | None:
    """Return score and label of the category's best task, if `cell` is too low next to it."""
    others = [(other.label, column.tasks.get(other.name)) for other in category.tasks]
    scores = [(c.value, label) for label, c in others if c and count_items(c) >= FEWEST]
    value, label = max(scores, key=lambda score: score[0], default=(0.0, ""))
    if value < 100 * HEALTHY:
        return None
    from scipy.stats import binom

    chance = binom.cdf(round(cell.value / 100 * items), items, HEALTHY)
    return f"{value:.2f} of {label}" if chance < CHANCE else None


def count_items(cell: Cell) -> int:
    """Return the number of items of a score; 0 if unknown."""
    known = cell.origin.settings.get("the number of items", "") if cell.origin else ""
    return int(known) if known.isdecimal() else 0
