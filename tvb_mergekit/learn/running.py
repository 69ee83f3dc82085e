"""`tvb learn` in order: the request, the costs, learning, the merged model."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.fisher_regmean import StatisticsMethod
from tvb_mergekit.learn.gradients import CoefficientMethod
from tvb_mergekit.learn.localize import Localize
from tvb_mergekit.learn.wemoe import Wemoe
from tvb_mergekit.learn.work import LEARNED, CostEstimate, Request, Work
from tvb_mergekit.plugin.planner import input_folders, planned
from tvb_mergekit.plugin.run import staged, write_model
from tvb_mergekit.store.facts import FOLDER
from tvb_mergekit.store.writer import lock
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.output import check_output_folder, warn_of_stale_parts

METHODS: dict[str, type[Work]] = {
    "fisher": StatisticsMethod,
    "regmean": StatisticsMethod,
    "localize": Localize,
    "adamerging": CoefficientMethod,
    "atlas": CoefficientMethod,
    "wemoe": Wemoe,
}


def learn(request: Request, dry: bool = False) -> CostEstimate:
    """Merge by data into the folder `request.out`.

    Args:
        dry: only estimate the costs.

    Raises:
        UserError, MergeRefused: the request, the inputs or the machine refuse it.
    """
    started, world = time.perf_counter(), ranks.world()
    request.check()
    with ExitStack() as stack:
        if world.leads and not dry:
            _check_places(request)
        plan = stack.enter_context(planned(request.document, request.options, request.memory))
        work = METHODS[request.method](request, plan)
        if dry:
            return work.costs()
        if world.leads:
            warn_of_stale_parts(request.out)
        costs = work.check()
        if world.leads:
            stack.callback(lock(request.out).release)
            _check_places(request)  # another process may have written there
        plan.build()
        began = time.perf_counter()
        if request.source is None:
            world.share(work.begin)
        work.learn()
        plan.learned = work
        work.seconds = plan.basis.seconds["learn"] = time.perf_counter() - began
        with staged(request.out) as stage:
            write_model(plan, request.document, stage, started)
        if request.source is None:
            shutil.rmtree(request.partial, ignore_errors=True)
    return costs


def _check_places(request: Request) -> None:
    out, inputs = request.out, input_folders(request.document.recipe)
    if request.resume and (Path(out) / FOLDER / LEARNED).is_file():
        raise UserError(f"--resume: {out} is complete already")
    check_output_folder(out, inputs)
