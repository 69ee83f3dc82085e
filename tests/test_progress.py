"""Progress and messages on one stream: bars on a terminal, whole lines everywhere else."""

import io
import logging
import re
import sys
import time

import click
import pytest
import tqdm
from click.testing import CliRunner

from tvb_mergekit.cli.options import careful
from tvb_mergekit.errors import UserError
from tvb_mergekit.progress import bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end(monkeypatch):
    seconds, log = [0.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(sys, "stderr", log)
    short = bars(False)("Gram matrix", 100)
    for number in range(10):
        seconds[0] = number
        short(10)
    assert log.getvalue().count("\n") == 1 and log.getvalue().startswith("Gram matrix: 100%")
    log.truncate(log.seek(0))
    long = bars(False)("Bases", 4000)
    for _ in range(40):
        seconds[0] += 0.9
        long(100)
        with tqdm.tqdm.external_write_mode(file=log):  # as `tqdm.write` does
            pass
    found = [re.sub(r"\[.*\]", "[]", line) for line in log.getvalue().splitlines()]
    assert found == [f"Bases: {p}% {p * 40 / 1000:.2f}k/4.00k []" for p in (30, 60, 90, 100)]
    assert re.search(r"\[\d+:\d\d<\d+:\d\d, .*B/s\]\n", log.getvalue())
    assert "\r" not in log.getvalue() and "\n\n" not in log.getvalue()
    bars(True)("Bases", 1)(1)
    assert log.getvalue().count("\n") == 4


@pytest.mark.parametrize("error", [UserError("no such thing"), KeyboardInterrupt()], ids=repr)
def test_a_message_never_stands_on_the_line_of_a_bar(error, monkeypatch):
    """What has come since the last line is a bar that was wiped, or nothing."""
    shown: list[str] = []

    @click.command()
    @careful({})
    def command() -> None:
        update = bars(False)("Gram matrix", 100)
        update(10)
        logging.getLogger("tvb_mergekit").warning("take care")
        shown.append(terminal.getvalue())
        raise error

    terminal = Terminal()
    with CliRunner().isolation():
        monkeypatch.setattr(sys, "stderr", terminal)
        handler = logging.StreamHandler(terminal)
        monkeypatch.setattr(logging.root, "handlers", [handler])
        with pytest.raises(SystemExit):
            command.main([])
    before, _, after = shown[0].partition("take care\n")
    assert before.rpartition("\r")[2] == "" and "Gram matrix" in before
    assert after.startswith("\rGram matrix")  # drawn again, below
    closed, _, said = terminal.getvalue().removesuffix("\n").rpartition("\n")
    assert "Gram matrix" in closed.rpartition("\r")[2]
    assert said in ("Error: no such thing", "Interrupted.")
