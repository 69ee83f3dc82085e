"""OUT/points.jsonl: a line for each point and task, on the disk before the next task begins.

The first line holds the facts that decide the scores: recipe, checkpoints, tasks and items,
versions. Scores under other facts are never used. A line that a kill has cut is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvb_mergekit.atomic import write_file
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.tune.harness import Scored

POINTS = "points.jsonl"
FORMAT_VERSION = 2  # 1 had a weight for each basis


class ScoreFile:
    """The scores in a file that was begun under the same facts, which are plain JSON."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self._found: dict[tuple[float, str], Scored] = {}
        head = json.loads(json.dumps({"format_version": FORMAT_VERSION, **facts}))
        if not path.exists():
            write_file(path, (json.dumps(head) + "\n").encode())
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        complete = text[: text.rfind("\n") + 1]
        try:
            begun, *rows = [json.loads(line) for line in complete.splitlines()]
            differing = [key for key in head if begun.get(key) != head[key]]
            for row in () if differing else rows:
                self._found[row["point"], row["task"]] = Scored(row["values"], row["stderrs"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); name another --out") from error
        if differing:
            raise UserError(
                f"{path} holds scores of another tuning ({listed(differing)} differ): name another "
                "--out, or delete that folder"
            )
        if complete != text:
            os.truncate(path, len(complete.encode()))

    def get(self, point: float, task: str) -> Scored | None:
        return self._found.get((point, task))

    def add(self, point: float, task: str, scored: Scored) -> None:
        """Keep one score; it is on the disk when this returns."""
        row = {"point": point, "task": task, **asdict(scored)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._found[point, task] = scored
