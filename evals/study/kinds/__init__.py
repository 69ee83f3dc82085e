"""What can be measured of any run: a function for each kind of cell.

addition   references, and the search along a merge
matrices   merges of matrices beside sums, along lambda, and of one vector online
negation   each task forgotten from the sum
learned    merges that learn from data
transfer   few-shot transfer to tasks without a specialist
stores     task vectors as exact entries and as bases
theirs     mergekit's own methods
theory     constants and bounds of the paper
"""

from study.cells import Measure
from study.kinds import (
    addition,
    learned,
    matrices,
    negation,
    stores,
    theirs,
    theory,
    transfer,
)

PARTS = (addition, learned, matrices, negation, stores, theirs, theory, transfer)
KINDS: dict[str, Measure] = {kind: of for part in PARTS for kind, of in part.KINDS.items()}
