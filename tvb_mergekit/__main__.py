"""`python -m tvb_mergekit` is the `tvb` command: what launchers take with `-m`."""

from tvb_mergekit.cli import main

main(prog_name="tvb")
