"""`tvb`, and `python -m tvb_mergekit` for launchers."""

import atexit
import gc

# Libraries create a million permanent objects. Frequent collections cost a short command a tenth of
# its time, and the last one, at the end of the process, a fifth.
gc.set_threshold(50_000)
atexit.register(gc.freeze)

from tvb_mergekit.cli.commands import main  # noqa: E402

if __name__ == "__main__":
    main(prog_name="tvb")
