"""Rows of single runs in, medians and pairwise ratios and Markdown tables out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import measure

QUANTITIES = {  # what is compared: its heading, decimals
    "wall_s": ("whole, s", 2),
    "net_s": ("net, s", 2),
    "cpu_s": ("CPU, s", 2),
    "peak_rss_mb": ("peak RSS, MB", 0),
    "peak_rss_anon_mb": ("peak RssAnon, MB", 0),
}
PHASES = ("gram", "encode", "trim", "merge")
Row = dict[str, Any]


def spread(values: Iterable[float | None]) -> Row | None:
    """Median, least and largest; None where a value is missing or makes no sense."""
    found = list(values)
    if not found or any(value is None for value in found):
        return None
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def ratio(a: float, b: float) -> float | None:
    """a / b; None where the start-up's noise has eaten a net time."""
    return a / b if a > 0 and b > 0 else None


def summarize(rows: Sequence[Row]) -> Row:
    """Medians of each command, and ratios of the two runs of each pair."""
    counted = [row for row in rows if row["counted"]]
    merges = [row for row in counted if row["what"] == "merge"]
    medians, ratios = [], []
    for name, state in dict.fromkeys((row["pair"], row["cache"]) for row in merges):
        here = [row for row in merges if (row["pair"], row["cache"]) == (name, state)]
        a, b = here[::2], here[1::2]
        for runs in (a, b):
            entry = {"pair": name, "cache": state, "method": runs[0]["method"]}
            more = ("read_mb", "resident_before", "others_cpu_s", "output_mb")
            for key in (*QUANTITIES, *more):
                entry[key] = statistics.median(row[key] for row in runs)
            if "phases" in runs[0]:
                phases = [row["phases"] for row in runs]
                entry["phases"] = {
                    key: statistics.median(each[key] for each in phases) for key in phases[0]
                }
            medians.append(entry)
        entry = {"pair": name, "cache": state, "rounds": len(a)}
        for key in QUANTITIES:
            entry[key] = spread(ratio(x[key], y[key]) for x, y in zip(a, b, strict=True))
        ratios.append(entry)
    starts = [row for row in counted if row["what"] == "start-up"]
    start_up = {
        kind: spread(row["wall_s"] for row in starts if row["kind"] == kind)
        for kind in dict.fromkeys(row["kind"] for row in starts)
    }
    return {"start_up_s": start_up, "medians": medians, "ratios": ratios}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 2) -> str:
    """Markdown; all but the first `words` columns are numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"


def between(value: Row | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f}..{value['max']:.{digits}f})"


def render(summary: Row, settings: Row) -> str:
    """The tables."""
    gigabytes = settings["input_bytes"] / 1e9
    rounds = summary["ratios"][0]["rounds"]
    start_up = summary["start_up_s"]
    names = {"ours": "ours", "tvb": "`tvb`", "mergekit": "mergekit's"}
    starts = ", ".join(f"{names[kind]} {between(took)} s" for kind, took in start_up.items())
    parts = [
        f"{settings['tasks']} models and a base, {gigabytes:.2f} GB in bf16. Medians of {rounds} "
        f"rounds. Start-up (imports only), taken off for `net`: {starts}. RssAnon is polled every "
        f"{1000 * measure.POLL:.0f} ms.\n"
    ]
    heads = [title for title, _ in QUANTITIES.values()]
    rows = [
        [row["pair"], row["cache"], f"`{row['method']}`"]
        + [f"{row[key]:.{digits}f}" for key, (_, digits) in QUANTITIES.items()]
        + [f"{100 * row['resident_before']:.1f} %", f"{row['read_mb']:.0f}"]
        + [f"{row['others_cpu_s']:.2f}"]
        for row in summary["medians"]
    ]
    head = ["pair", "page cache", "method", *heads]
    head += ["input cached before", "read from disk, MB", "others' CPU, s"]
    parts.append(table(head, rows, 3))
    parts.append("Ratios, ours / mergekit's, pair by pair: median (least..largest).\n")
    titles = [title.split(",")[0] for title in heads]
    rows = [
        [row["pair"], row["cache"], *(between(row[key]) for key in QUANTITIES)]
        for row in summary["ratios"]
    ]
    parts.append(table(["pair", "page cache", *titles], rows))
    parts.append("Seconds of the commands' phases: ours from `basis.json`.\n")
    timed = [row for row in summary["medians"] if "phases" in row]
    phases = [p for p in PHASES if any(p in row["phases"] for row in timed)]
    rows = [
        [row["pair"], row["cache"], f"`{row['method']}`"]
        + [f"{row['phases'][p]:.2f}" if p in row["phases"] else "-" for p in phases]
        for row in timed
    ]
    parts.append(table(["pair", "page cache", "method", *phases], rows, 3))
    return "\n".join(parts)
