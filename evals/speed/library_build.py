"""A store by the library, in a few lines as a user's own script has them: see README.md.

python library_build.py BASIS M OUT BASE MODEL [MODEL ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import tvb_mergekit

build = tvb_mergekit.build
if sys.argv[1] != "start-up":  # which ends here: the imports alone
    basis, bases, out, base, *models = sys.argv[1:]
    tasks = {Path(model).name: model for model in models}
    build(base, tasks, out, basis=basis, num_bases=int(bases))
