"""`tvb learn` in order: the request, learning, the merged model."""

from __future__ import annotations

import time

from tvb_mergekit.learn.fisher_regmean import StatisticsMethod
from tvb_mergekit.learn.gradients import CoefficientMethod
from tvb_mergekit.learn.localize import Localize
from tvb_mergekit.learn.wemoe import Wemoe
from tvb_mergekit.learn.work import Request, Work
from tvb_mergekit.plugin.planner import input_folders, planned
from tvb_mergekit.plugin.run import staged, write_model
from tvb_mergekit.tensors.output import check_disk, check_output_folder, warn_of_stale_parts

METHODS: dict[str, type[Work]] = {
    "fisher": StatisticsMethod,
    "regmean": StatisticsMethod,
    "localize": Localize,
    "adamerging": CoefficientMethod,
    "atlas": CoefficientMethod,
    "wemoe": Wemoe,
}


def learn(request: Request) -> None:
    """Merge by data into the folder `request.out`.

    Raises:
        UserError, MergeRefused: the request, the inputs or the machine refuse it.
    """
    started = time.perf_counter()
    request.check()
    check_output_folder(request.out, input_folders(request.document.recipe))
    with planned(request.document, request.options) as plan:
        work = METHODS[request.method](request, plan)
        warn_of_stale_parts(request.out)
        check_disk(request.out, plan.output_bytes + work.disk)
        plan.build(inner=True)  # statistics are mixed by the encoder itself
        with staged(request.out) as stage:
            work.place = stage.path.with_name(f"{stage.path.name}.learned")
            work.place.mkdir()
            began = time.perf_counter()
            work.learn()
            plan.learned = work
            work.seconds = plan.basis.seconds["learn"] = time.perf_counter() - began
            write_model(plan, request.document, stage, started)
