"""lm-eval 0.4.13: tasks by name, the items that choose a coefficient, a model and its scores.

lm-eval scores the test split of a task if there is one. To choose by items that are scored later
would flatter the result. So a task is scored on its validation split here, if it has both. If not,
a seeded part of the scored split is used, and the rest is left to the test.
"""

from __future__ import annotations

import io
import logging
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvb_mergekit.errors import UserError, hint, one_line
from tvb_mergekit.tune.search import Estimate

CHOOSING = 0.2  # part of the scored items that chooses, if a task has no validation split
BOOTSTRAP = 1000  # for metrics whose standard error has no formula


@dataclass(frozen=True)
class Evaluation:
    """The options of `tvb tune` for items, and lm-eval's own."""

    model: Mapping[str, Any]  # arguments of lm-eval's `hf`, except `pretrained`
    metrics: Mapping[str, str] = field(default_factory=dict)  # if not a task's first one
    limit: float | None = None  # items per task, or below 1 a fraction of them
    seed: int = 0
    include_path: Sequence[str] = ()
    num_fewshot: int | None = None
    chat_template: bool = False
    unsafe_code: bool = False


@dataclass(frozen=True)
class EvalTask:
    """One task of lm-eval, and its items: `chosen` of `items` in `split`."""

    name: str
    control: bool  # to be kept by `basis_negate`
    metric: str  # `metric,filter`
    lower: bool  # lower scores are better
    split: str
    items: int
    chosen: list[int]
    left_to_test: list[int]  # empty if the test has a split of its own
    loaded: Any  # for lm-eval's `evaluate`


def choose(
    task: str, total: int, validation: bool, limit: float | None = None, seed: int = 0
) -> tuple[list[int], list[int]]:
    """The chosen items of a split of `total`, and those left to the test.

    The items of a smaller `limit` are part of those of a larger one.
    """
    order = random.Random(f"{seed}/{task}").sample(range(total), total)
    count = total if validation else max(1, round(total * CHOOSING))
    pool, rest = order[:count], sorted(order[count:])
    if limit is not None:
        pool = pool[: math.ceil(count * limit) if limit < 1 else int(limit)]
    return sorted(pool), rest


def load_tasks(
    targets: Sequence[str], controls: Sequence[str], options: Evaluation, base: str
) -> list[EvalTask]:
    """Load lm-eval's tasks, and those of its groups; `base` is the model in their metadata."""
    import transformers
    from lm_eval.tasks import TaskManager

    # their logs are long, and their errors come as exceptions
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    own, metadata = list(options.include_path) or None, {"pretrained": base, **options.model}
    manager = TaskManager(include_path=own, metadata=metadata)
    for name in (*targets, *controls):
        if not manager.match_tasks([name]):
            known = hint(name, manager.all_tasks)
            raise UserError(f"lm-eval knows no task {name}{known}; your own need --include-path")
    try:
        with redirect_stderr(io.StringIO()):  # bars, here and below, which no option hides
            some, others = (
                manager.load(manager.match_tasks([*names]))["tasks"]
                for names in (targets, controls)
            )
    except Exception as error:  # a task's own code: data sets, network, anything
        raise UserError(f"lm-eval cannot load the tasks: {one_line(error):.300}") from error
    if twice := some.keys() & others.keys():
        raise UserError(f"{min(twice)} is both in --tasks and --control")
    if unknown := options.metrics.keys() - some.keys() - others.keys():
        raise UserError(f"--metric {min(unknown)}: no such task here")
    return [_eval_task(task, name in others, options) for name, task in (some | others).items()]


def _eval_task(task: Any, control: bool, options: Evaluation) -> EvalTask:
    name = str(task.task_name)
    if getattr(task, "UNSAFE_CODE", False) and not options.unsafe_code:
        raise UserError(f"task {name} runs code: allow it with --confirm-run-unsafe-code")
    shots = task.get_config("num_fewshot")
    if shots is None or (options.num_fewshot is not None and shots != 0):
        task.set_config(key="num_fewshot", value=options.num_fewshot or 0)  # as lm-eval does
    split, validation = _to_validation(task)
    total = len(task.eval_docs)
    chosen, rest = choose(name, total, validation, options.limit, options.seed)
    filters = [each.name for each in getattr(task, "_filters", ())] or ["none"]
    emitted = [f"{metric},{each}" for metric in task.aggregation() for each in filters]
    metric = options.metrics.get(name, emitted[0])
    if metric not in emitted:
        raise UserError(f"task {name} has no metric {metric}: choose one of {', '.join(emitted)}")
    lower = (task.higher_is_better() or {}).get(metric.partition(",")[0]) is False
    return EvalTask(name, control, metric, lower, split, total, chosen, rest, task)


def _to_validation(task: Any) -> tuple[str, bool]:
    """Make lm-eval score the validation split, if the task has a test split as well.

    Returns:
        The split that lm-eval will score, and whether the test has another one.
    """
    if not (task.has_test_docs() and task.has_validation_docs()):
        return ("test" if task.has_test_docs() else "validation"), False
    config, examples = task.config, task.fewshot_cfg.split
    split = config.validation_split  # None if the task's own class finds it
    if split is not None and split == config.test_split:
        return str(split), False
    task.has_test_docs = lambda: False
    # lm-eval excludes an item from its own examples if both are of `test_split`; by default,
    # without a training split, examples are of the validation split
    config.test_split = examples if examples is None and not task.has_training_docs() else split
    return str(split or "validation"), True


def load_model(options: Evaluation, folder: Path) -> Any:
    """Load the model in a folder as `lm_eval --model hf` does: an HFLM."""
    from lm_eval.models.huggingface import HFLM

    try:
        lm = HFLM(pretrained=str(folder), **options.model)
    except Exception as error:  # the options may be wrong in any way
        raise UserError(f"lm-eval cannot load the model: {one_line(error):.300}") from error
    if options.chat_template and lm.tokenizer.chat_template is None:
        raise UserError("--apply-chat-template: the model's tokenizer has no chat template")
    return lm


def score(lm: Any, tasks: Sequence[EvalTask], chat_template: bool) -> dict[str, Estimate]:
    """Score a model as `lm_eval --samples` does. Nothing is cached, since the weights change."""
    import numpy as np
    import torch
    from lm_eval.evaluator import evaluate

    random.seed(0)  # and the other seeds of the command
    np.random.seed(1234)
    torch.manual_seed(1234)
    for task in tasks:
        task.loaded.set_fewshot_seed(seed=1234)
    with redirect_stderr(io.StringIO()):
        found = evaluate(
            lm=lm,
            task_dict={"tasks": {task.name: task.loaded for task in tasks}},
            samples={task.name: task.chosen for task in tasks},
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
            apply_chat_template=chat_template,
            fewshot_as_multiturn=chat_template,  # as the command has it
            confirm_run_unsafe_code=True,  # `_eval_task` has asked
        )
    return {task.name: _estimate(task, found["results"][task.name]) for task in tasks if found}


def _estimate(task: EvalTask, results: Mapping[str, Any]) -> Estimate:
    name, _, rest = task.metric.partition(",")
    value, stderr = results.get(task.metric), results.get(f"{name}_stderr,{rest}")
    if not isinstance(value, int | float) or math.isnan(value):
        raise UserError(f"task {task.name} gave no number for {task.metric}: {value!r}")
    known = isinstance(stderr, int | float) and math.isfinite(stderr)
    return Estimate(float(value), stderr if known else None)
