"""Grids, golden section, the rule of negation, means and shares, and which items choose."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvb_mergekit.errors import UserError
from tvb_mergekit.score.results import Origin, Results, TaskResult
from tvb_mergekit.tune import search
from tvb_mergekit.tune.harness import EvalTask, ItemChoice, Scored
from tvb_mergekit.tune.objective import Estimate, objective

GRID = search.grid_points("0:1:0.05")


def test_grids() -> None:
    assert search.best([0.0, 0.5, 1.0], [0.2, 0.7, 0.7 + 1e-12]) == 0.5  # the smallest of equals
    assert GRID == tuple(i / 20 for i in range(21))
    assert search.grid_points("0.5, 0,0.5") == (0.0, 0.5)
    assert search.grid_points("-0.2:0.2:0.1") == (-0.2, -0.1, 0.0, 0.1, 0.2)
    assert search.grid_points("0:1:0.3") == (0.0, 0.3, 0.6, 0.9)


@pytest.mark.parametrize(
    ("said", "texts"),
    [
        ("holds no point", ("", "1:0:0.1")),
        ("the step must be positive", ("0:1:0",)),
        ("expected START:STOP:STEP", ("0:inf:1", "0:1", "a,b", "0,nan")),
        ("1,000,001 points", ("0:1:1e-6",)),
    ],
)
def test_a_grid_that_is_none(said: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        with pytest.raises(UserError, match=said):
            search.grid_points(text)


@st.composite
def unimodal(draw: st.DrawFn) -> Callable[[float], float]:
    """Strictly rising up to somewhere in [0, 1], strictly falling from there."""
    top = draw(st.floats(0, 1))
    rise, fall = draw(st.floats(0.1, 20)), draw(st.floats(0.1, 20))
    power = draw(st.sampled_from([0.4, 1, 2, 3]))
    return lambda x: -(rise * (top - x) ** power if x < top else fall * (x - top) ** power)


@settings(deadline=None)
@given(unimodal())
def test_golden_section_within_a_step_of_the_grid_in_nine(curve: Callable[[float], float]) -> None:
    asked = []

    def score(x: float) -> float:
        asked.append(x)
        return curve(x)

    found = search.golden(0.0, 1.0, 0.025, score)
    best, found_by_grid = search.grid(GRID, curve)
    assert found_by_grid == [curve(x) for x in GRID]
    assert len(asked) <= 9 and len(set(asked)) == len(asked)
    assert abs(found - best) <= 0.05 + 1e-9
    assert curve(found) == max(map(curve, asked))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=21, max_size=21),
    st.sampled_from([0.5, 0.95, 1.0]),
)
def test_the_rule_of_negation(counts: list[tuple[int, int]], keep: float) -> None:
    """Against the rule written out; the control score is asked for no more than it must be."""
    target = {x: c[0] / 4 for x, c in zip(GRID, counts, strict=True)}
    control = {x: c[1] / 4 for x, c in zip(GRID, counts, strict=True)}
    allowed = [x for x in GRID if control[x] >= keep * control[0.0]]
    want = min(allowed, key=lambda x: (target[x], x))
    asked: list[float] = []

    def kept(x: float) -> float:
        asked.append(x)
        return control[x]

    assert search.most_forgotten(GRID, target.__getitem__, kept, keep) == want
    with pytest.raises(UserError, match="at no point the control score stays at"):
        search.most_forgotten([0.5, 1.0], lambda x: 0.0, lambda x: float(x == 0), 0.95)
    better = [x for x in GRID if (target[x], x) < (target[want], want)]
    assert len(asked) == 1 + len(better) + 1


def entry(name: str, *metrics: str, lower: bool = False) -> EvalTask:
    metrics = metrics or ("acc,none",)
    return EvalTask(name, metrics, metrics if lower else (), (), "", None)


def scored(value: float, error: float | None = 0.1) -> Scored:
    return Scored({"acc,none": value}, {} if error is None else {"acc,none": error})


def specialists(**values: float) -> Results:
    origin = Origin("file.json")
    return Results(
        {n: TaskResult({"acc,none": v}, {}, frozenset(), origin) for n, v in values.items()}
    )


def test_means_and_shares_and_their_errors() -> None:
    two = [entry("a"), entry("b")]
    goal = objective(two)
    assert goal.mean({"a": scored(0.2, 0.3), "b": scored(0.6, 0.4)}) == Estimate(0.4, 0.25)
    assert goal.mean({"a": scored(0.2, None), "b": scored(0.6)}) == Estimate(0.4, None)
    shares = objective(two, specialists(a=0.5, b=0.8), "r")
    found = shares.mean({"a": scored(0.25, 0.1), "b": scored(0.8, 0.0)})
    assert found.value == pytest.approx(0.75) and found.stderr == pytest.approx(0.1)
    # metrics on the same items: their errors add
    one = entry("a", "x,none", "y,none")
    both = Scored({"x,none": 0.2, "y,none": 0.4}, {"x,none": 0.1, "y,none": 0.3})
    found = objective([one]).of(one, both)
    assert found.value == pytest.approx(0.3) and found.stderr == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("entries", "reference", "said"),
    [
        ([entry("a")], specialists(b=0.5), r"no acc,none of a above 0 in it \(it has b\)"),
        ([entry("a")], specialists(a=0.0), "no acc,none of a above 0"),
        ([entry("a", "f1,none")], specialists(a=0.4), "no f1,none of a above 0"),
        ([entry("a"), entry("b", "ppl,none", lower=True)], None, "ppl,none of b is better when"),
        ([entry("b", "ppl,none", lower=True)], specialists(b=4.0), "needs scores that rise"),
    ],
)
def test_objectives_that_are_none(entries: list[EvalTask], reference: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        objective(entries, reference, "r")


@given(st.integers(2, 300), st.integers(0, 5), st.floats(0.05, 1), st.booleans())
def test_fewer_items_are_part_of_more(total: int, seed: int, share: float, own: bool) -> None:
    whole, rest = ItemChoice(seed=seed).part("t", total, own)
    some, left = ItemChoice(limit=20, seed=seed).part("t", total, own)
    fewer, _ = ItemChoice(limit=20, share=share, seed=seed).part("t", total, own)
    assert set(fewer) <= set(some) <= set(whole) <= set(range(total))
    assert len(some) == min(20, len(whole)) and len(fewer) == max(1, round(len(some) * share))
    assert some == sorted(some) and left == rest
    if own:
        assert len(whole) == total and rest is None
    else:
        assert len(whole) == max(1, min(round(0.2 * total), total - 1))
        assert rest is not None and sorted([*whole, *rest]) == list(range(total)) and rest
    assert ItemChoice(limit=0.5, seed=seed).part("t", total, True)[0].__len__() == math.ceil(
        total / 2
    )


def test_items_depend_on_seed_and_task() -> None:
    drawn = {tuple(ItemChoice(limit=5, seed=s).part(t, 50, True)[0]) for s in (0, 1) for t in "ab"}
    assert len(drawn) == 4
    assert ItemChoice(test_share=1.0).part("a", 3, False) == ([0, 1, 2], [])
