"""Scores that tell more of how answers are read than of what the model can do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tvb_mergekit.score.benchmark import Category, Task
from tvb_mergekit.score.columns import Cell, Column
from tvb_mergekit.score.samples import Item

VERDICT = "looks like extraction, not ability"
SHOWN = 3  # answers of each remark
LONGEST = 160  # characters of an answer that are kept
NOTHING = ("", "[invalid]")  # the second is what lm-eval's regex filters give


@dataclass(frozen=True)
class Thresholds:
    """Shares of 1, of scores and of items.

    Attributes:
        items: of fewer nothing is said, and a neighbour with fewer tells nothing.
        floor: a score up to here is at the floor
        healthy: beside another one of the category from here on,
        fenced: or with a code fence in at least so many answers.
        empty: more empty answers than this among all items,
        letter: or one letter chosen more often, tell of the format at any score.
    """

    items: int = 10
    floor: float = 0.02
    healthy: float = 0.2
    fenced: float = 0.9
    empty: float = 0.1
    letter: float = 0.9


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Answer:
    """What a model answered to an item, cut to LONGEST characters."""

    doc_id: int
    text: str
    target: str


@dataclass(frozen=True)
class Remark:
    """What is odd about a column's score of a task."""

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
    """How many items show what, and the first answers of each, those to items of score 0 before
    others (True); `wanted` are the letters that the items ask for."""

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
    silent = _most([text.strip() in NOTHING for text in item.answers])
    unread = _most([text.strip() in NOTHING for text in item.found])
    wanted = bool(item.target.strip())  # else no answer may be the right one
    flags = {
        "empty": (silent and wanted) or (_wrong(item) and (silent or unread)),
        "fenced": _most(["```" in text for text in item.answers]),
        "wrong": _wrong(item),
        f"letter {item.letter}": item.letter is not None,
    }
    return [sign for sign, shown in flags.items() if shown]


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
    """What is odd about the score, if anything; without items only its neighbours tell."""
    if count_items(column.tasks[task.name], signs) < limits.items:
        return None
    share = column.tasks[task.name].value / 100
    low = category.floors and share <= limits.floor
    reasons: list[tuple[str, str]] = []  # and the sign whose answers are shown
    if signs is not None:
        if signs.share("empty") > limits.empty:
            reasons.append((f"no answer to {_of(signs, 'empty')}", "empty"))
        if low and signs.share("fenced") >= limits.fenced:
            fenced = _of(signs, "fenced")
            reasons.append((f"{100 * share:.2f} with code fences in {fenced}", "fenced"))
        letter = max((s for s in signs.counts if s.startswith("letter ")),
                     key=signs.counts.__getitem__, default="")  # fmt: skip
        often = signs.share(letter) > limits.letter and len(signs.wanted) > 1
        # where nearly all are right, the items want one letter
        if often and share < limits.letter:
            reasons.append((f"{letter} chosen in {_of(signs, letter)}", letter))
    others = [(other.label, column.tasks.get(other.name)) for other in category.tasks]
    cells = [(label, c.value) for label, c in others if c and count_items(c) >= limits.items]
    label, value = max(cells, key=lambda cell: cell[1], default=("", 0.0))
    if low and value >= 100 * limits.healthy:
        reasons.append((f"{100 * share:.2f} beside {value:.2f} of {label}", "wrong"))
    if not reasons:
        return None
    answers = signs.first.get(reasons[0][1], []) if signs else []
    told = tuple(reason for reason, _ in reasons)
    shown = tuple(answer for _, answer in answers)
    return Remark(column.label, task.name, task.label, told, shown)


def count_items(cell: Cell, signs: Signs | None = None) -> int:
    """How many items the score is over; 0 if nobody says."""
    if signs is not None:
        return signs.items
    known = cell.origin.settings.get("the number of items", "") if cell.origin else ""
    return int(known) if known.isdecimal() else 0


def _of(signs: Signs, sign: str) -> str:
    return f"{signs.counts[sign]} of {signs.items} items"
