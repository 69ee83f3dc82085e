"""lm-eval 0.4.13: tasks by name, the items that choose a coefficient, a model and its scores.

Only this module and `served.py` depend on lm-eval. lm-eval scores the test split of a task, or the
validation split if there is no test split. To choose by items that are scored later would flatter
the result. So a task with both splits is scored on its validation split here. For other tasks a
seeded part of the scored split is used, and the rest is recorded for the test.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tqdm

from tvb_mergekit.errors import UserError, hint, listed, one_line
from tvb_mergekit.learn.data import open_tokenizer
from tvb_mergekit.score.benchmark import check_known

SEEDS = (0, 1234, 1234, 1234)  # lm-eval's: random, numpy, torch, few-shot
BOOTSTRAP = 1000  # for metrics whose standard error has no formula
USUAL = ("score,none", "score,keyword")  # of tasks with several metrics
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, kw_only=True)
class LmEval:
    """lm-eval's own options; see `tvb tune --help`."""

    include_path: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    num_fewshot: int | None = None
    chat_template: bool = False
    unsafe_code: bool = False
    device: str = "cpu"
    batch_size: str = "1"
    model_args: str = ""

    @property
    def model_keys(self) -> dict[str, Any]:
        from lm_eval.utils import simple_parse_args_string

        given: dict[str, Any] = simple_parse_args_string(self.model_args or "")
        return given


@dataclass(frozen=True)
class ItemChoice:
    """The rule by which items are chosen."""

    limit: float | None = None  # items per task, or below 1 a share of them, or all
    share: float = 1.0  # M / T, the part of the limited items that is used
    test_share: float = 0.2  # used of the scored split of tasks without a validation split
    seed: int = 0

    def part(self, task: str, total: int, validation: bool) -> tuple[list[int], list[int] | None]:
        """Return the chosen items of a split of `total`, and those left to the test (None: all).

        If two choices differ in `limit` or `share`, the smaller is part of the larger.
        """
        order = random.Random(f"{self.seed}/{task}").sample(range(total), total)
        pool = order
        if not validation and self.test_share < 1:
            pool = order[: max(1, min(round(total * self.test_share), total - 1))]
        count = len(pool)
        if self.limit is not None:
            wanted = math.ceil(count * self.limit) if self.limit < 1 else int(self.limit)
            count = min(count, wanted)
        chosen = sorted(pool[: max(1, round(count * self.share))])
        return chosen, None if validation else sorted(order[len(pool) :])


@dataclass(frozen=True)
class TaskPart:
    """The items of one lm-eval task: `chosen` of `items` in `split`."""

    task: str
    split: str
    items: int
    chosen: list[int]
    left_to_test: list[int] | None  # None: the test has a split of its own


@dataclass(frozen=True)
class EvalTask:
    """One task of an objective, or a group that lm-eval averages over its items."""

    name: str
    metrics: Sequence[str]  # `metric,filter`
    lower: Sequence[str]  # metrics that are better when they are lower
    parts: Sequence[TaskPart]
    content: str  # checksum of the definition and of the chosen items
    loaded: Any  # for lm-eval's `evaluate`


@dataclass(frozen=True)
class Scored:
    """A model's scores on one task: metric -> value, and metric -> standard error if known."""

    values: Mapping[str, float]
    stderrs: Mapping[str, float]


def require() -> None:
    """Raise UserError unless lm-eval can be imported."""
    for name in ("lm_eval", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tvb tune needs {name}: pip install 'tvb-mergekit[eval]'")


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("lm_eval", "mergekit", "torch", "transformers")}


def manager(include_path: Sequence[str], metadata: Mapping[str, Any]) -> Any:
    """Return lm-eval's list of tasks: its own, and those below the given folders."""
    import datasets
    import transformers
    from lm_eval.tasks import TaskManager

    # their logs are long, and their errors come as exceptions
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    for path in include_path:
        if not Path(path).is_dir():
            raise UserError(f"--include-path {path}: no such folder")
    return TaskManager(include_path=list(include_path) or None, metadata=dict(metadata))


def full_metadata(options: LmEval, base: Path | None) -> dict[str, Any]:
    """Add --model_args to --metadata, as lm-eval's command does; `base` stands for the models."""
    model = {} if base is None else {"pretrained": str(base)}
    return {**options.metadata, **model, **options.model_keys}


def load_tasks(
    manager: Any,
    names: Sequence[str],
    metrics: Mapping[str, Sequence[str]],
    choice: ItemChoice,
    options: LmEval,
) -> list[EvalTask]:
    """Load tasks and groups of lm-eval.

    A group stands for its members, except a group that is averaged by the number of items
    (`mmlu_stem`): that is one task in parts.

    Args:
        metrics: task -> its metrics, if they are not the usual one.
    """
    tasks: dict[str, EvalTask] = {}
    for name in (match for asked in names for match in _matches(asked, manager)):
        try:
            with _without_bars():
                found = manager.load([name])
        except Exception as error:  # a task's own code: data sets, network, anything
            raise UserError(f"task {name} cannot be loaded: {one_line(error):.300}") from error
        group = found.get("groups", {}).get(name)
        members = found["tasks"].values() if group is None else [group]
        for member in (each for item in members for each in _members(item)):
            own = str(getattr(member, "name", None) or member.task_name)
            if own not in tasks:
                loaded = manager.load(member)
                _prepare(loaded["tasks"], options)
                tasks[own] = _eval_task(own, loaded, metrics.get(own), choice, options)
    return list(tasks.values())


def _matches(name: str, manager: Any) -> list[str]:
    matches: list[str] = manager.match_tasks([name])
    if not matches:
        known = hint(name, manager.all_tasks)
        raise UserError(f"lm-eval knows no task {name}{known}; your own need --include-path")
    return matches


def _members(item: Any) -> Iterator[Any]:
    from lm_eval.api.group import Group

    if not isinstance(item, Group) or (
        item.has_aggregation and all(m.weight_by_size for m in item.aggregate_metric_list or ())
    ):
        yield item
        return
    for child in item:
        yield from _members(child)


def _prepare(tasks: Mapping[str, Any], options: LmEval) -> None:
    """Set the shots as lm-eval does with --num_fewshot: a task with 0 shots stays at 0."""
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not options.unsafe_code:
            raise UserError(f"task {name} runs code: allow it with --confirm-run-unsafe-code")
        usual, asked = task.get_config("num_fewshot"), options.num_fewshot
        if usual is None or (asked is not None and usual != 0):
            task.set_config(key="num_fewshot", value=asked or 0)


def _eval_task(
    name: str, loaded: Any, asked: Sequence[str] | None, choice: ItemChoice, options: LmEval
) -> EvalTask:
    parts = []
    model = ({"pretrained"} | options.model_keys.keys()) - options.metadata.keys()
    digest = hashlib.sha256(name.encode())
    better: dict[str, bool | None] = {}
    for leaf, task in loaded["tasks"].items():
        split, validation = _to_validation(task)
        docs = task.eval_docs
        chosen, rest = choice.part(leaf, len(docs), validation)
        parts.append(TaskPart(leaf, split, len(docs), chosen, rest))
        config = task.dump_config()
        metadata = dict(config.get("metadata") or {})
        config["metadata"] = {key: metadata[key] for key in metadata if key not in model}
        shots = [*task.fewshot_docs()] if config["num_fewshot"] else []
        text = json.dumps([config, [docs[i] for i in chosen], shots], sort_keys=True, default=str)
        digest.update(ADDRESS.sub("", text).encode())
        better |= task.higher_is_better() or {}
    metrics = _pick(name, asked, _emitted(loaded))
    lower = [metric for metric in metrics if better.get(metric.partition(",")[0]) is False]
    return EvalTask(name, metrics, lower, parts, digest.hexdigest(), loaded)


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


def _emitted(loaded: Any) -> list[str]:
    """Return `metric,filter` of a task, or of its group if there is one."""
    found: list[str] = []
    for task in loaded["tasks"].values():
        filters = [each.name for each in getattr(task, "_filters", ())] or ["none"]
        found += [f"{metric},{name}" for metric in task.aggregation() for name in filters]
    for group in loaded.get("groups", {}).values():
        if group.has_aggregation:
            wanted = {m.metric for m in group.aggregate_metric_list}
            found = [metric for metric in found if metric.partition(",")[0] in wanted]
    return list(dict.fromkeys(found))


def _pick(name: str, asked: Sequence[str] | None, emitted: Sequence[str]) -> Sequence[str]:
    for metric in asked or ():
        check_known(metric, emitted, f"task {name} has no metric {metric}")
    if asked:
        return list(dict.fromkeys(asked))
    usual = [metric for metric in USUAL if metric in emitted][:1]
    if usual or len(emitted) == 1:
        return usual or emitted
    raise UserError(f"task {name}: choose --metric {name}:METRIC, one of {', '.join(emitted)}")


def check_options(options: LmEval, base: Path | None, trust_remote_code: bool) -> None:
    """Raise UserError for options that would fail only with the first merged model.

    `base` is None if the recipe gives the merged model another tokenizer or chat template.
    """
    if not re.fullmatch(r"auto(:[\d.]+)?|[1-9]\d*", options.batch_size):
        raise UserError(f"--batch-size {options.batch_size}: expected a number, or `auto`")
    keys = options.model_keys
    if own := sorted(keys.keys() & {"batch_size", "device", "pretrained", "trust_remote_code"}):
        raise UserError(f"--model-args {own[0]}=...: tvb tune sets it; it has options of its own")
    if base is not None and options.chat_template and "tokenizer" not in keys:
        if open_tokenizer([base], trust_remote_code).chat_template is None:
            raise UserError("--apply-chat-template: the base's tokenizer has no chat template")


def load_model(options: LmEval, trust_remote_code: bool, folder: Path) -> Any:
    """Load the model in a folder as `lm_eval --model hf` does: an HFLM."""
    from lm_eval.models.huggingface import HFLM

    try:
        own: dict[str, Any] = {"device": options.device, "batch_size": options.batch_size}
        own |= {"pretrained": str(folder), "trust_remote_code": trust_remote_code}
        lm = HFLM(**own, **options.model_keys)
    except Exception as error:  # --model-args may be wrong in any way
        raise UserError(f"lm-eval cannot load the model: {one_line(error):.300}") from error
    if options.chat_template and lm.tokenizer.chat_template is None:
        raise UserError("--apply-chat-template: the model's tokenizer has no chat template")
    return lm


def score(lm: Any, task: EvalTask, chat_template: bool) -> Scored:
    """Score one task as `lm_eval --samples` does. Nothing is cached, since the weights change."""
    import numpy as np
    import torch
    from lm_eval.evaluator import evaluate
    from lm_eval.utils import set_torch_seed

    random.seed(SEEDS[0])
    np.random.seed(SEEDS[1])
    set_torch_seed(SEEDS[2])
    for each in task.loaded["tasks"].values():
        each.set_fewshot_seed(seed=SEEDS[3])
    try:
        with _without_bars():
            found = evaluate(
                lm=lm,
                task_dict=task.loaded,
                samples={p.task: p.chosen for p in task.parts if len(p.chosen) < p.items},
                cache_requests=False,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
                apply_chat_template=chat_template,
                fewshot_as_multiturn=chat_template,  # as the command has it
                confirm_run_unsafe_code=True,  # `_prepare` has asked
            )
    except torch.OutOfMemoryError as error:
        raise UserError(f"task {task.name}: too little memory; a smaller --batch-size?") from error
    assert found is not None
    return _scored(task, found["results"][task.name])


def _scored(task: EvalTask, results: Mapping[str, Any]) -> Scored:
    values, stderrs = {}, {}
    for metric in task.metrics:
        name, _, rest = metric.partition(",")
        if not isinstance(value := results.get(metric), int | float) or math.isnan(value):
            raise UserError(f"task {task.name} gave no number for {metric}: {value!r}")
        values[metric] = float(value)
        error = results.get(f"{name}_stderr,{rest}")
        if isinstance(error, int | float) and math.isfinite(error):
            stderrs[metric] = float(error)
    return Scored(values, stderrs)


def without_split(tasks: Sequence[EvalTask]) -> list[str]:
    """Describe the tasks that have no validation split, in one line."""
    parts = [(part, part.left_to_test) for task in tasks for part in task.parts]
    pools = [f"{p.task} ({p.items - len(rest)} of {p.items})" for p, rest in parts if rest]
    note = (
        f"no validation split in {listed(pools)}: a seeded part of the scored items chooses; "
        "test_samples.json has the rest, for `lm_eval --samples`"
    )
    return [note] if pools else []


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide lm-eval's two bars for each task and point, which no option hides."""
    usual = tqdm.tqdm.__init__

    def hidden(bar: Any, *args: Any, **options: Any) -> None:
        usual(bar, *args, **{**options, "disable": True})

    tqdm.tqdm.__init__ = hidden  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        tqdm.tqdm.__init__ = usual  # type: ignore[method-assign]
