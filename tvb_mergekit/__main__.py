"""`tvb`, and `python -m tvb_mergekit` for launchers."""

import gc

# Libraries create a million permanent objects: frequent collections cost a short command a tenth.
gc.set_threshold(50_000)

from tvb_mergekit.cli.commands import main  # noqa: E402

if __name__ == "__main__":
    main(prog_name="tvb")
