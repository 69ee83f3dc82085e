"""The tables and the picture of evals/RESULTS.md.

    <!-- NAME -->     the table NAME stands between these lines of the page
    <!-- end -->

`kept` is the normalized accuracy: the mean over tasks of the score over that of the specialist. A
row has n runs, of the training seeds that it names: a seed, times the draws of a random basis or
the orders of tasks. A cell of fewer runs says so. Several runs are mean ± standard deviation.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from real.cells import Record, unpacked
from real.learned import WAYS
from real.merges import MERGES
from real.online import ONLINE
from real.plan import MODELS
from real.routed import LONG
from real.theory import bounds

TITLES = {"full": "full, 12 tasks", "full-8": "full, 8 tasks", "lora16": "rank 16, 12 tasks",
          "lora4-8": "rank 4, 8 tasks", "peft4-8": "rank 4, begun at random",
          "short-4": "full, 4 tasks, 300 examples",
          "same4-4": "rank 4, 4 tasks trained with one template"}  # fmt: skip
LESS = ("full-8", "short-4")  # are of the same kind as the twelve
BASES = ("none", "groups", "balanced", "ae", "rand_select", "pca", "rand_proj", "sample")
NAMES = {"none": "all task vectors", "sample": "samples of 5 %"}
DRAWS = 9999
Value = Callable[[Record], float | None]
Rows = Sequence[tuple[tuple[str, ...], list[Record]]]  # the labels of a row, and its records


class Column(NamedTuple):
    value: Value
    wanted: Mapping[str, Any] = {}  # nobody changes it
    form: str = ".3f"


class Study:
    """All cells, and the specialists that they are compared with."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.own = {
            (record["models"], record["seed"]): scores(record["result"]["items"])
            for record in records
            if record["cell"]["kind"] == "reference"
        }

    def find(self, models: str, **wanted: Any) -> list[Record]:
        return having((r for r in self.records if r["models"] == models), **wanted)

    def kept(self, record: Record, means: Mapping[str, float] | None) -> float | None:
        """The mean over tasks of a score over the specialist's; 0 if the specialist has 0."""
        if not means:
            return None
        own = self.own[record["models"], record["seed"]]
        first = record["cell"].get("tested")
        best = {task: statistics.fmean(each[:first]) for task, each in own.items()}
        return statistics.fmean(means[t] / best[t] if best[t] else 0.0 for t in best)

    def tuned(self, record: Record) -> float | None:
        return self.kept(record, means(record["result"]))

    def p(self, one: Iterable[Record], other: Sequence[Record]) -> float | None:
        """The paired test of two merges; differences of an item are averaged over the seeds."""
        pairs = []
        for a, b in ((a, b) for a in one for b in other if a["seed"] == b["seed"] and a is not b):
            x, y = (scores(record["result"]["items"]) for record in (a, b))
            own = self.own[a["models"], a["seed"]]
            pairs.append([(x[t] - y[t]) / (x[t].size * own[t].mean()) if own[t].any()
                          else 0 * x[t] for t in own])  # fmt: skip
        parts = [np.mean(each, axis=0) for each in zip(*pairs, strict=True)]
        return sign_flip(np.concatenate(parts)) if parts else None


def scores(items: Mapping[str, Any]) -> dict[str, Any]:
    return {task: np.array(unpacked(each)) for task, each in items.items()}


def means(result: Mapping[str, Any]) -> dict[str, float] | None:
    """The score of each task."""
    if "items" not in result:
        return None
    return {task: float(each.mean()) for task, each in scores(result["items"]).items()}


def sign_flip(differences: Any) -> float:
    """The share of random signs that give a sum as large as the observed, ties counted half."""
    if not differences.any():
        return 1.0
    signs = np.random.default_rng(0).integers(0, 2, (DRAWS, len(differences)), dtype=np.int8)
    sums, total = abs((2.0 * signs - 1) @ differences), abs(differences.sum())
    same = np.isclose(sums, total, rtol=0, atol=1e-12)
    larger = np.count_nonzero((sums > total) & ~same)
    return float(1 + larger + np.count_nonzero(same) / 2) / (DRAWS + 1)


def result(key: str) -> Value:
    return lambda record: record["result"].get(key)


def having(records: Iterable[Record], **wanted: Any) -> list[Record]:
    return [r for r in records if all(r["cell"].get(key) == v for key, v in wanted.items())]


def named(basis: str, count: int) -> str:
    return NAMES.get(basis, f"{basis}, M = {count}")


# -------------------------------------------------------------------------------------------- text


def text(values: Iterable[float | None], form: str, most: int) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return "-"
    shown = format(statistics.fmean(found), form)
    if len(found) > 1:
        shown += f" ± {statistics.stdev(found):{form}}"
    return shown + (f" (n={len(found)})" if len(found) < most else "")


def grid(heads: Sequence[str], columns: Mapping[str, Column], rows: Rows) -> str:
    """A table; columns and rows without a number are left out."""
    lines = []
    for labels, records in rows:
        found = [[column.value(r) for r in having(records, **column.wanted)]
                 for column in columns.values()]  # fmt: skip
        counts = [sum(value is not None for value in each) for each in found]
        if most := max(counts, default=0):
            seeds = ", ".join(map(str, sorted({record["seed"] for record in records})))
            cells = [text(each, column.form, most)
                     for each, column in zip(found, columns.values(), strict=True)]  # fmt: skip
            lines.append([*labels, *cells, str(most), seeds])
    every = [*heads, *columns, "n", "seeds"]
    kept = [k for k in range(len(every)) if any(line[k] != "-" for line in lines)]
    rule = ["---" if k < len(heads) or every[k] == "seeds" else "---:" for k in kept]
    body = [[line[k] for k in kept] for line in lines]
    return "".join(f"| {' | '.join(r)} |\n" for r in ([every[k] for k in kept], rule, *body))


def by_basis(study: Study, kind: str) -> Rows:
    """A row for each kind of models, basis and M."""
    return [
        ((TITLES[models], named(basis, count)), having(found, num_bases=count))
        for models in MODELS for basis in BASES
        for found in [study.find(models, kind=kind, basis=basis)]
        for count in sorted({r["cell"]["num_bases"] for r in found})
    ]  # fmt: skip


def by_way(study: Study, ways: Mapping[str, str], **wanted: Any) -> Rows:
    """A row for each kind of models and way, with its title."""
    return [((TITLES[models], title), study.find(models, how=how, **wanted))
            for models in MODELS for how, title in ways.items()]  # fmt: skip


# ------------------------------------------------------------------------------------------ tables


def specialists(study: Study) -> str:
    """Scores of each task: base, specialists and some merges."""
    rows: list[Any] = []
    for models, (_, tasks) in MODELS.items():
        if models in (*LESS, "lora16"):  # as the twelve in full
            continue
        given = study.find(models, kind="reference")
        bases = [record | {"result": record["result"]["base"]} for record in given]
        rows += [((TITLES[models], "base"), bases), ((TITLES[models], "specialists"), given)]
        wudi = "wudi_30" if models == "full" else "wudi_auto"
        ways = {"addition": ("ta", "none"), MERGES[wudi].title: (wudi, "none"),
                "the same over `groups`, M = T/2": (wudi, "groups")}  # fmt: skip
        for title, (how, basis) in ways.items():
            count = len(tasks) // (1 if basis == "none" else 2)
            wanted = {"kind": "merge", "how": how, "basis": basis, "num_bases": count}
            rows.append(((TITLES[models], title), study.find(models, **wanted)))

    def score(task: str) -> Value:
        return lambda record: (means(record["result"]) or {}).get(task)

    columns = {"kept": Column(study.tuned)}
    columns |= {f"`{task}`": Column(score(task), {}, ".2f") for task in MODELS["full"][1]}
    return grid(("models", "model"), columns, rows)


def merges(study: Study) -> str:
    """Merges over all task vectors."""
    rows, tests = list[Any](), dict[int, float | None]()
    for models in (key for key in MODELS if key not in LESS):
        sums = study.find(models, kind="merge", how="ta", basis="none")
        for how, merge in MERGES.items():
            found = study.find(models, kind="merge", how=how, basis="none")
            rows.append(((TITLES[models], merge.title), found))
            tests |= {id(found[0]): study.p(found, sums)} if found else {}

    columns = {"kept": Column(study.tuned), "p": Column(lambda r: tests.get(id(r)), {}, ".2g"),
               "lambda": Column(result("lambda"), {}, ".2f"),
               "default / best": Column(result("default"))}  # fmt: skip
    table = grid(("models", "merge"), columns, rows)
    return re.sub(r" \(n=1\)", "", re.sub(r"\| 0\.0001 ", "| <= 0.0001 ", table))


def bases(study: Study) -> str:
    """Merges over few vectors."""
    columns = {m.title: Column(study.tuned, {"kind": "merge", "how": how})
               for how, m in MERGES.items()
               if "_cts" not in how and not how.startswith("wudi_30_")}  # fmt: skip
    rows = [row for row in by_basis(study, "merge") if row[0][0] not in map(TITLES.get, LESS)]
    return grid(("models", "vectors"), columns, rows)


def flows(study: Study) -> str:
    """WUDI's times at lambda 1, over specialists too weak to divide by."""

    def right(record: Record) -> float:
        return statistics.fmean((means(record["result"]) or {}).values())

    columns = {f"{title}: {time}": Column(value, {"how": f"wudi_{time}"})
               for title, value in (("right", right), ("loss", result("loss at 1")),
                                    ("loss at 2", result("loss at 2")))
               for time in ("auto", "300", "30")}  # fmt: skip
    rows = [row for row in by_basis(study, "merge") if row[0][0] == TITLES["short-4"]]
    return grid(("models", "vectors"), columns, rows)


def learned(study: Study) -> str:
    """Merges that learn."""
    columns = {way.title: Column(study.tuned, {"how": how}) for how, way in WAYS.items()}
    return grid(("models", "vectors"), columns, by_basis(study, "learned"))


def stores(study: Study) -> str:
    def merged(how: str) -> Value:
        return lambda record: study.kept(record, record["result"]["merges"].get(how))

    columns = {
        "MB": Column(lambda r: r["result"]["bytes"] / 1e6, {}, ".0f"),
        "bits": Column(result("bits"), {}, ".2f"),
        "error": Column(result("error"), {}, ".2f"),
        "each task alone": Column(lambda r: study.kept(r, r["result"]["specialists"])),
        "addition": Column(merged("ta")),
        "WUDI, t = 30": Column(merged("wudi_30")),
    }
    ways = {"lossless": "lossless"}
    ways |= {f"keep_{s}": f"a sample of {100 * s:g} %" for s in (0.25, 0.1, 0.05)}
    ways["bases"] = "`balanced`, M = T/2, bfloat16"
    return grid(("models", "kept as"), columns, by_way(study, ways, kind="kept"))


def forgetting(study: Study) -> str:
    def mean(key: str) -> Value:
        return lambda r: statistics.fmean(each[key] for each in r["result"]["tasks"].values())

    columns = {"before": Column(lambda r: statistics.fmean(r["result"]["before"].values())),
               "forgotten task": Column(mean("after")),
               "other tasks": Column(mean("control")),
               "error of the vector": Column(mean("error"))}  # fmt: skip
    return grid(("models", "subtracted, from"), columns, by_basis(study, "forget"))


def online(study: Study) -> str:
    columns = {
        f"{MERGES[how].title} at {MERGES[how].default:g}": Column(
            lambda r, how=how: study.kept(r, r["result"]["merges"][how])  # type: ignore[misc]
        )
        for how in ONLINE
    }
    ways = {"ae": "Algorithm 1, `ae`, M = T/2", "rand_select": "random buffer, M = T/2"}
    return grid(("models", "held"), columns, by_way(study, ways, kind="online"))


def routing(study: Study) -> str:
    """The right task of prompts by the weights alone."""

    def right(of: Callable[[Iterable[float]], float]) -> Value:
        return lambda r: of((means(r["result"]) or {}).values()) if "kept" in r["result"] else None

    columns = {"right task": Column(right(statistics.fmean)), "worst task": Column(right(min)),
               "worst pair": Column(result("pair")), "AUROC, no task": Column(result("none")),
               "answered": Column(result("kept")),
               "no task, answered": Column(result("others kept")),
               "score kept": Column(study.tuned, {"how": "answers"})}  # fmt: skip
    ways = {"templates": "as they are", "answers": "the same, answered",
            "stripped": "without their templates", "common": "one template for all",
            "german": "after a German sentence",
            "long": f"before {LONG} tokens of text", "long_all": "the same, all tokens count",
            "quickstart": "the quickstart's, full fine-tunes",
            "quickstart_common": "the same, one template for all"}  # fmt: skip
    return grid(("models", "prompts"), columns, by_way(study, ways, kind="routed"))


def cost(study: Study) -> str:
    """CPU seconds of one thread for a prompt of 100 tokens, and tokens that one second writes."""
    columns = {title: Column(result(key), {}, form) for key, title, form in (
        ("pass", "a pass of the base", ".2f"), ("choice", "a choice", ".2f"),
        ("change", "a change of weights", ".2f"), ("plain", "tokens a second", ".1f"),
        ("routed", "the same, routed", ".1f"))}  # fmt: skip
    return grid(
        ("models", "prompt"), columns, by_way(study, {"speed": "100 tokens"}, kind="routed")
    )


def theory(study: Study) -> str:
    """Constants and bounds of the paper, and the losses that were seen, for two of the tasks."""
    records = [r for m in MODELS for r in study.find(m, kind="theory")]
    if not records:
        return ""
    (record,) = records
    found, count = record["result"], record["cell"]["num_bases"]
    every = bounds(found, count)
    heads = ["task", "norm", "of the base's", "largest cosine", "L", "addition", "bound",
             "negation", "bound", "over bases", "bound"]  # fmt: skip
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    tasks = list(found["tasks"])
    lengths = {task: each["norm"] for task, each in found["tasks"].items()}
    for task in (min(tasks, key=lengths.__getitem__), max(tasks, key=lengths.__getitem__)):
        place, each = tasks.index(task), found["tasks"][task]
        numbers = [f"{each['norm']:.2f}", f"{each['ratio']:.2%}", f"{each['largest cosine']:.2f}",
                   f"{abs(each['smoothness']):.0f}"]  # fmt: skip
        for pairs in every.values():
            numbers += [f"{pairs[place][1]:.2f}", f"{pairs[place][0]:.0f}"]
        lines.append([f"`{task}`", *numbers])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + (
        f"\nC {found['C']:.3g}; epsilon {found['epsilon']:.3g}; "
        f"lambda_(M+1) {found['eigenvalues'][count]:.3g}; seed {record['seed']}, n = 1.\n"
    )


TABLES = {"specialists": specialists, "merges": merges, "bases": bases, "flows": flows,
          "learned": learned,
          "stores": stores, "routing": routing, "cost": cost, "forgetting": forgetting,
          "online": online, "theory": theory}  # fmt: skip
# Merge -> its colour, Okabe and Ito's
BARS = {"ta": "#0072b2", "ties": "#d55e00", "iso": "#009e73", "tsvm": "#cc79a7",
        "wudi_auto": "#222222"}  # fmt: skip


def picture(study: Study, models: str, file: Path) -> None:
    """Draw the share of its specialist's score that each task keeps under merges of all."""
    own = study.own[models, 0]
    with matplotlib.rc_context({"svg.hashsalt": "tvb-mergekit", "font.size": 9}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        axes = figure.subplots()
        for k, (how, colour) in enumerate(BARS.items()):
            (record,) = study.find(models, kind="merge", how=how, basis="none")
            found = means(record["result"]) or {}
            heights = [found[task] / own[task].mean() for task in own]
            places = [place + 0.16 * (k - 2) for place in range(len(own))]
            axes.bar(places, heights, 0.16, color=colour, label=MERGES[how].title)
        axes.set_xticks(range(len(own)), [task.replace("_", "\n") for task in own])
        axes.set_ylabel("score over the specialist's")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=len(BARS), frameon=False)
        figure.savefig(file, metadata={"Date": None})


def report(records: Sequence[Record], page: Path) -> None:
    """Renew the marked tables of a page, and the picture next to it."""
    study = Study(records)
    renew(page, study, TABLES)
    picture(study, "lora4-8", page.with_name("kept.svg"))


def renew(page: Path, study: Any, known: Mapping[str, Callable[[Any], str]]) -> None:
    """Renew the tables of a page that are known; other marks belong to other studies."""

    def renewed(mark: re.Match[str]) -> str:
        table = known[mark[1]](study) if mark[1] in known else mark[2]
        return f"<!-- {mark[1]} -->\n{table}<!-- end -->"

    given = page.read_text(encoding="utf-8")
    made = re.sub(r"<!-- (\w+) -->\n(.*?)<!-- end -->", renewed, given, flags=re.DOTALL)
    page.write_text(made, encoding="utf-8")
