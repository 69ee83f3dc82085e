"""`tvb learn` in order: the request, the data, learning, the merged model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from random import Random

from transformers import AutoConfig

from tvb_mergekit.core.gram import NO_TENSOR
from tvb_mergekit.core.settings import MATRIX_METHODS
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.learn.data import Example, encode, open_tokenizer, read_data
from tvb_mergekit.learn.gradients import coefficients, localize, wemoe
from tvb_mergekit.learn.job import Job, LearnedMerge, Request
from tvb_mergekit.learn.statistics import weighted_mean
from tvb_mergekit.plugin.planner import planned
from tvb_mergekit.plugin.run import say, write_model
from tvb_mergekit.tensors.output import check_output_folder, staged

LOG = logging.getLogger(__name__)
METHODS: dict[str, Callable[[Job], LearnedMerge]] = {
    "fisher": weighted_mean,
    "regmean": weighted_mean,
    "localize": localize,
    "adamerging": coefficients,
    "atlas": coefficients,
    "wemoe": wemoe,
}


def learn(request: Request) -> None:
    """Merge by data into the folder `request.out`."""
    started, recipe, method = time.perf_counter(), request.document.recipe, request.method
    known = ["basis_ta", *(MATRIX_METHODS if method == "wemoe" else ())]
    if recipe.settings.method not in known:
        found = f"`merge_method` is {recipe.settings.method}"
        raise UserError(f"{found}: {method} needs {' or '.join(known)}")
    if request.document.config.slices and method not in ("fisher", "regmean"):
        raise UserError(f"{method} learns on the base's layers: list `models`, not `slices`")
    begins = method in ("adamerging", "wemoe")  # at the recipe's merge
    unused = [key for key in request.document.recipe.varying if key != "lambda" or not begins]
    if unused and recipe.bases is None:  # a store's own recipes have some
        LOG.warning("%s does not use the recipe's `%s`", method, listed(unused))
    check_output_folder(request.out)
    with planned(request.document, request.options) as plan:
        if not plan.tasks.items:
            raise UserError(NO_TENSOR)
        for name in plan.tensors.changed:
            raise UserError(f"the tokenizer changes `{name}`; leave out `tokenizer_source`")
        job = Job(plan, request)
        job.examples = _read(job)
        plan.build(inner=True)  # statistics are mixed by the encoder itself
        with staged(request.out) as folder:
            job.place = folder.with_name(f"{folder.name}.learned")
            began = time.perf_counter()
            plan.learned = METHODS[method](job)
            plan.basis.seconds["learn"] = time.perf_counter() - began
            facts = write_model(plan, request.document, folder, started)
        say(plan, facts, request.out)


def _read(job: Job) -> dict[str, list[Example]]:
    """The examples in use of each task."""
    request, trust = job.request, job.plan.options.trust_remote_code
    found, method = dict[str, list[Example]](), request.method
    if request.dataless:
        return found
    tasks = None if method == "atlas" else job.tasks
    unlabeled = method == "adamerging" or request.unlabeled
    data = read_data(request.data, tasks, unlabeled, texts=method != "wemoe")
    share = job.count / len(job.tasks) if request.subsample else 1.0  # paper, section 3.2
    for task, records in data.items():
        own = job.folder(task if method in ("fisher", "regmean") else None)
        tokenizer = open_tokenizer([own, job.folder(None)], trust)
        config = AutoConfig.from_pretrained(own, trust_remote_code=trust).get_text_config()
        context = int(getattr(config, "max_position_embeddings", None) or 2**31)
        every = encode(records, tokenizer, context)
        count, chance = max(1, int(len(every) * share + 0.5)), Random(f"{request.seed} {task}")
        found[task] = [every[k] for k in sorted(chance.sample(range(len(every)), count))]
    return found
