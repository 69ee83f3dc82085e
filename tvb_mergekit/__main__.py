"""`tvb`; with `python -m tvb_mergekit` too, which launchers take."""

import gc

# Libraries make a million objects that stay: to look through them time and again takes a tenth of a
# short command.
gc.set_threshold(50_000)

from tvb_mergekit.cli.commands import main  # noqa: E402

if __name__ == "__main__":
    main(prog_name="tvb")
