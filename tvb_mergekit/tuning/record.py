"""What was scored, kept as it comes: OUT/points.jsonl, a line for each point and task.

The first line says what decides the scores: recipe, checkpoints, tasks and items, versions. What
was scored under another is never taken for it. A line is on the disk before the next task begins;
one that a kill has cut is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvb_mergekit.errors import UserError
from tvb_mergekit.output import listed
from tvb_mergekit.tuning.harness import Scored
from tvb_mergekit.tuning.line import Point

POINTS = "points.jsonl"
FORMAT_VERSION = 1


class Record:
    """The scores in a file; see the module.

    Args:
        facts: what decides them, plain JSON.

    Raises:
        UserError: the file was begun under other facts, or is none of this.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self._found: dict[tuple[Point, str], Scored] = {}
        head = json.loads(json.dumps({"format_version": FORMAT_VERSION, **facts}))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".partial")
            beside.write_text(json.dumps(head) + "\n", encoding="utf-8")
            os.replace(beside, path)
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        try:
            begun, *rows = [json.loads(line) for line in whole.splitlines()]
            for row in rows:
                point = Point(row["point"], tuple(row["weights"]))
                self._found[point, row["task"]] = Scored(row["values"], row["stderrs"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); name another --out") from error
        if not isinstance(begun, dict):
            raise UserError(f"{path}: cannot be read; name another --out")
        if begun != head:
            differing = [key for key in head if begun.get(key) != head[key]]
            raise UserError(
                f"{path} holds scores of another tuning ({listed(differing)} differ): name another "
                "--out, or delete that folder"
            )
        if whole != text:
            os.truncate(path, len(whole.encode()))

    def get(self, point: Point, task: str) -> Scored | None:
        return self._found.get((point, task))

    def add(self, point: Point, task: str, scored: Scored) -> None:
        """Keep one score: on the disk when this returns."""
        row = {
            "point": point.value,
            "weights": list(point.weights),
            "task": task,
            "values": dict(scored.values),
            "stderrs": dict(scored.stderrs),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._found[point, task] = scored
