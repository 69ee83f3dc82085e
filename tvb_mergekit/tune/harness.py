"""lm-eval 0.4.13: tasks by name, the items that choose a coefficient, a model and its scores.

All that is known of lm-eval is here. lm-eval scores a task's test split, or its validation split
where there is none. Choosing by what is scored later would flatter the result, so a task that has
both is scored on its validation split here; of any other task a seeded part of the scored split is
taken, and the rest is recorded for the test.
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

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.score.benchmark import check_known
from tvb_mergekit.settings import nearest

SEEDS = (0, 1234, 1234, 1234)  # lm-eval's: random, numpy, torch, few-shot
BOOTSTRAP = 1000  # for metrics whose standard error has no formula
USUAL = ("score,none", "score,keyword")  # metrics of tasks that have others too
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


@dataclass(frozen=True)
class Choice:
    """Which items choose.

    Attributes:
        limit: n_i, items per task; below 1 a share of them; None for all.
        share: M / T, what is taken of n_i.
        test_share: of the scored split of a task without a validation split.
        seed: of what is drawn.
    """

    limit: float | None = None
    share: float = 1.0
    test_share: float = 0.2
    seed: int = 0

    def part(self, task: str, total: int, validation: bool) -> tuple[list[int], list[int] | None]:
        """The chosen items of a split of `total`, and those left to the test (None: all).

        Of two choices that differ in `limit` or `share`, the smaller is part of the larger.
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
class Part:
    """The items of one lm-eval task: `chosen` of `items` in `split`.

    `left_to_test` are the items that a test may use, where `split` is also the tested one.
    """

    task: str
    split: str
    items: int
    chosen: list[int]
    left_to_test: list[int] | None


@dataclass(frozen=True)
class Entry:
    """One task of an objective, or a group that lm-eval averages over its items.

    Attributes:
        metrics: as lm-eval names them, `metric,filter`.
        lower: those of them of which less is better.
        content: a checksum of the definition and of the chosen items.
        loaded: what lm-eval's `evaluate` takes.
    """

    name: str
    metrics: Sequence[str]
    lower: Sequence[str]
    parts: Sequence[Part]
    content: str
    loaded: Any


@dataclass(frozen=True)
class Scored:
    """What a model has on one entry: metric -> value, and metric -> standard error if known."""

    values: Mapping[str, float]
    stderrs: Mapping[str, float]


def require() -> None:
    """Raise UserError unless lm-eval can be imported."""
    for name in ("lm_eval", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tvb tune needs {name}: pip install 'tvb-mergekit[eval]'")


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("lm_eval", "torch", "transformers")}


def manager(include_path: Sequence[str], metadata: Mapping[str, Any]) -> Any:
    """lm-eval's list of tasks, its own and those below the given folders.

    Raises:
        UserError: no such folder.
    """
    import datasets
    import transformers
    from lm_eval.tasks import TaskManager

    # they tell at length what they do; their errors come as exceptions
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    for path in include_path:
        if not Path(path).is_dir():
            raise UserError(f"--include-path {path}: no such folder")
    return TaskManager(include_path=list(include_path) or None, metadata=dict(metadata))


def told(options: LmEval, base: Path | None) -> dict[str, Any]:
    """lm-eval's metadata: what its command makes of --metadata and --model_args, for tasks that
    look at the model. `base` stands for the models to come."""
    model = {} if base is None else {"pretrained": str(base)}
    return {**options.metadata, **model, **_model_args(options)}


def _model_args(options: LmEval) -> dict[str, Any]:
    from lm_eval.utils import simple_parse_args_string

    given: dict[str, Any] = simple_parse_args_string(options.model_args or "")
    return given


def load_entries(
    manager: Any,
    names: Sequence[str],
    metrics: Mapping[str, Sequence[str]],
    choice: Choice,
    options: LmEval,
) -> list[Entry]:
    """The entries of tasks and groups of lm-eval. A group stands for its members, but for one that
    is averaged by the number of items (`mmlu_stem`), which is one entry in parts.

    Args:
        metrics: task -> its metrics, for those whose are not to be the usual one.

    Raises:
        UserError: an unknown name or metric, data that cannot be loaded.
    """
    entries: dict[str, Entry] = {}
    for name in (match for asked in names for match in _matches(asked, manager)):
        try:
            with _without_bars():
                found = manager.load([name])
        except Exception as error:  # a task's own code: data sets, network, whatever it needs
            raise UserError(f"task {name} cannot be loaded: {_one_line(error)}") from error
        group = found.get("groups", {}).get(name)
        members = found["tasks"].values() if group is None else [group]
        for member in (each for item in members for each in _members(item)):
            own = str(getattr(member, "name", None) or member.task_name)
            if own not in entries:
                loaded = manager.load(member)
                _prepare(loaded["tasks"], options)
                entries[own] = _entry(own, loaded, metrics.get(own), choice, options)
    return list(entries.values())


def _matches(name: str, manager: Any) -> list[str]:
    """The tasks and groups that a name or a pattern stands for."""
    matches: list[str] = manager.match_tasks([name])
    if not matches:
        guess = nearest(name, manager.all_tasks)
        hint = f"; did you mean {guess}?" if guess else "."
        raise UserError(
            f"lm-eval knows no task {name}{hint} Your own are found with --include-path"
        )
    return matches


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


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
    """Set the shots as lm-eval does with --num_fewshot: a task that says 0 stays at 0."""
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not options.unsafe_code:
            raise UserError(
                f"task {name} runs code that the model wrote: allow it with "
                "--confirm-run-unsafe-code"
            )
        usual, asked = task.get_config("num_fewshot"), options.num_fewshot
        if usual is None or (asked is not None and usual != 0):
            task.set_config(key="num_fewshot", value=asked or 0)


def _entry(
    name: str, loaded: Any, asked: Sequence[str] | None, choice: Choice, options: LmEval
) -> Entry:
    parts = []
    model = ({"pretrained"} | _model_args(options).keys()) - options.metadata.keys()
    digest = hashlib.sha256(name.encode())
    better: dict[str, bool | None] = {}
    for leaf, task in loaded["tasks"].items():
        split, validation = _to_validation(task)
        docs = task.eval_docs
        chosen, rest = choice.part(leaf, len(docs), validation)
        parts.append(Part(leaf, split, len(docs), chosen, rest))
        config = task.dump_config()
        metadata = dict(config.get("metadata") or {})
        config["metadata"] = {key: metadata[key] for key in metadata if key not in model}
        facts = [config, [docs[i] for i in chosen]]
        text = json.dumps(facts, sort_keys=True, default=str)
        digest.update(ADDRESS.sub("", text).encode())
        better |= task.higher_is_better() or {}
    metrics = _pick(name, asked, _emitted(loaded))
    lower = [metric for metric in metrics if better.get(metric.partition(",")[0]) is False]
    return Entry(name, metrics, lower, parts, digest.hexdigest(), loaded)


def _to_validation(task: Any) -> tuple[str, bool]:
    """The split that lm-eval will score, and whether it is the validation split beside a test
    split, which it is made to score here."""
    if not (task.has_test_docs() and task.has_validation_docs()):
        return ("test" if task.has_test_docs() else "validation"), False
    config, examples = task.config, task.fewshot_cfg.split
    split = config.validation_split  # None where a class of the task's own finds it
    if split is not None and split == config.test_split:
        return str(split), False
    task.has_test_docs = lambda: False
    # lm-eval leaves an item out of its own examples where both are of `test_split`; without a
    # training split and a word on it, examples are of the validation split
    own = examples is None and not task.has_training_docs()
    config.test_split = examples if own else split
    return str(split or "validation"), True


def _emitted(loaded: Any) -> list[str]:
    """`metric,filter` of an entry, the group's own where it is one."""
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
    raise UserError(
        f"task {name} has several metrics: say which with --metric {name}:METRIC, one of "
        f"{', '.join(emitted)}"
    )


def load_model(options: LmEval, trust_remote_code: bool, folder: Path) -> Any:
    """The model in a folder, as `lm_eval --model hf` loads it: an HFLM.

    Raises:
        UserError: lm-eval cannot load it, or it has no chat template where one is to be applied.
    """
    from lm_eval.models.huggingface import HFLM

    try:
        lm = HFLM(
            pretrained=str(folder),
            device=options.device,
            batch_size=options.batch_size,
            trust_remote_code=trust_remote_code,
            **_model_args(options),
        )
    except Exception as error:  # all that --model-args can make wrong
        raise UserError(f"lm-eval cannot load the model: {_one_line(error)}") from error
    if options.chat_template and lm.tokenizer.chat_template is None:
        raise UserError("--apply-chat-template: the base's tokenizer has no chat template")
    return lm


def score(lm: Any, entry: Entry, chat_template: bool) -> Scored:
    """The metrics of one entry, as `lm_eval --samples` has them. Nothing is cached, since the
    weights change.

    Raises:
        UserError: a metric is not among the results, or the device's memory is too small.
    """
    import numpy as np
    import torch
    from lm_eval.evaluator import evaluate
    from lm_eval.utils import set_torch_seed

    random.seed(SEEDS[0])
    np.random.seed(SEEDS[1])
    set_torch_seed(SEEDS[2])
    for task in entry.loaded["tasks"].values():
        task.set_fewshot_seed(seed=SEEDS[3])
    try:
        with _without_bars():
            found = evaluate(
                lm=lm,
                task_dict=entry.loaded,
                samples={p.task: p.chosen for p in entry.parts if len(p.chosen) < p.items},
                cache_requests=False,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
                apply_chat_template=chat_template,
                fewshot_as_multiturn=chat_template,  # as the command has it
                confirm_run_unsafe_code=True,  # `_prepare` has asked
            )
    except torch.OutOfMemoryError as error:
        raise UserError(f"task {entry.name}: too little memory; a smaller --batch-size?") from error
    assert found is not None
    results = found["results"][entry.name]
    values, stderrs = {}, {}
    for metric in entry.metrics:
        name, _, rest = metric.partition(",")
        if not isinstance(value := results.get(metric), int | float) or math.isnan(value):
            raise UserError(f"task {entry.name} gave no number for {metric}: {value!r}")
        values[metric] = float(value)
        spread = results.get(f"{name}_stderr,{rest}")
        if isinstance(spread, int | float) and math.isfinite(spread):
            stderrs[metric] = float(spread)
    return Scored(values, stderrs)


def without_split(entries: Sequence[Entry]) -> list[str]:
    """A line about tasks that have no validation split."""
    parts = [(p, p.left_to_test) for e in entries for p in e.parts if p.left_to_test]
    if not parts:
        return []
    pools = [f"{p.task} ({p.items - len(rest)} of {p.items})" for p, rest in parts]
    return [
        f"no validation split in {listed(pools)}: a seeded part of what is scored chooses; "
        "test_samples.json has the rest, for `lm_eval --samples`"
    ]


@contextmanager
def _without_bars() -> Iterator[None]:
    """lm-eval draws two bars for each task and point, which no option leaves out."""
    usual = tqdm.tqdm.__init__

    def hidden(bar: Any, *args: Any, **options: Any) -> None:
        usual(bar, *args, **{**options, "disable": True})

    tqdm.tqdm.__init__ = hidden  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        tqdm.tqdm.__init__ = usual  # type: ignore[method-assign]
