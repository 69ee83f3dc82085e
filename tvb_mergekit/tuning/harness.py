"""lm-eval 0.4.13: tasks by name, the items that choose a coefficient, a model and its scores.

All that is known of lm-eval is here. lm-eval scores a task's test split, or its validation split
where there is none. Choosing by what is scored later would flatter the result, so a task that has
both is scored on its validation split here; of any other task a seeded part of the scored split is
taken, and the rest is recorded for the test.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import logging
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tvb_mergekit.errors import UserError
from tvb_mergekit.output import listed
from tvb_mergekit.scoring.benchmark import SHIPPED, read_benchmark

SEEDS = (0, 1234, 1234, 1234)  # lm-eval's: random, numpy, torch, few-shot
BOOTSTRAP = 1000  # for metrics whose standard error has no formula
DOCS = ("has_test_docs", "test_docs", "has_validation_docs", "validation_docs")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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
        if not validation:
            count = round(total * self.test_share)
            pool = order[: max(1, min(count, total - 1 if self.test_share < 1 else total))]
        count = len(pool)
        if self.limit is not None:
            wanted = math.ceil(count * self.limit) if self.limit < 1 else int(self.limit)
            count = min(count, wanted)
        chosen = sorted(pool[: max(1, round(count * self.share))])
        return chosen, None if validation else sorted(set(order) - set(pool))


@dataclass(frozen=True)
class Part:
    """The items of one lm-eval task: `chosen` of `total` in `split`.

    `rest` are the items that a test may use, where `split` is also the tested one.
    """

    task: str
    split: str
    total: int
    chosen: tuple[int, ...]
    rest: tuple[int, ...] | None


@dataclass(frozen=True)
class Entry:
    """One task of an objective, or a group that lm-eval averages over its items.

    Attributes:
        metrics: as lm-eval names them, `metric,filter`.
        lower: whether less is better, of all of them.
        content: a checksum of the definition and of the chosen items.
        loaded: what lm-eval's `evaluate` takes.
    """

    name: str
    metrics: tuple[str, ...]
    lower: bool
    parts: tuple[Part, ...]
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
    from lm_eval.tasks import TaskManager

    _calm()
    for path in include_path:
        if not Path(path).is_dir():
            raise UserError(f"--include-path {path}: no such folder")
    return TaskManager(include_path=list(include_path) or None, metadata=dict(metadata))


def load_entries(
    manager: Any,
    names: Sequence[str],
    metrics: Mapping[str, Sequence[str]],
    choice: Choice,
    *,
    num_fewshot: int | None = None,
    unsafe_code: bool = False,
    option: str = "--metric",
) -> list[Entry]:
    """Tasks and groups of lm-eval by name; a group stands for its members, but for one that is
    averaged by the number of items (`mmlu_stem`), which is one task in parts.

    Args:
        metrics: task -> its metrics, for those whose are not to be the usual one.
        option: which says so, for messages.

    Raises:
        UserError: an unknown name or metric, data that cannot be loaded.
    """
    items: list[Any] = []
    for name in _known(names, manager):
        try:
            with _without_bars():
                found = manager.load([name])
        except Exception as error:  # a task's own code: data sets, network, whatever it needs
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"task {name} cannot be loaded: {reason:.300}") from error
        group = found.get("groups", {}).get(name)
        items += found["tasks"].values() if group is None else [group]
    entries: dict[str, Entry] = {}
    for item in items:
        for piece in _pieces(item):
            loaded = manager.load(piece)
            name = str(getattr(piece, "name", None) or piece.task_name)
            entries.setdefault(
                name, _entry(name, loaded, metrics.get(name), choice, num_fewshot, unsafe_code)
            )
    for name in metrics:
        if name not in entries:
            raise UserError(
                f"{option} {name}: it is none of {', '.join(entries)}{_near(name, entries)}"
            )
    return list(entries.values())


def _known(names: Sequence[str], manager: Any) -> list[str]:
    found: list[str] = []
    for name in names:
        if any(sign in name for sign in "*?["):
            matches = manager.match_tasks([name])
            if not matches:
                raise UserError(f"--tasks {name}: lm-eval knows no task like it")
            found += matches
        elif name in manager.all_tasks:
            found.append(name)
        else:
            raise UserError(
                f"lm-eval knows no task {name}{_near(name, manager.all_tasks)} Your own are found "
                "with --include-path"
            )
    return list(dict.fromkeys(found))


def _near(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 3)
    return f"; did you mean {' or '.join(close)}?" if close else "."


def _pieces(item: Any) -> Iterator[Any]:
    from lm_eval.api.group import Group

    if not isinstance(item, Group):
        yield item
    elif item.has_aggregation and all(m.weight_by_size for m in item.aggregate_metric_list or ()):
        yield item
    else:
        for child in item:
            yield from _pieces(child)


def _entry(
    name: str,
    loaded: Any,
    metrics: Sequence[str] | None,
    choice: Choice,
    num_fewshot: int | None,
    unsafe_code: bool,
) -> Entry:
    parts = []
    digest = hashlib.sha256(name.encode())
    for leaf, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not unsafe_code:
            raise UserError(
                f"task {leaf} runs code that the model wrote: allow it with "
                "--confirm-run-unsafe-code"
            )
        _set_shots(task, num_fewshot)
        split, validation = _to_validation(task)
        docs = task.eval_docs
        chosen, rest = choice.part(leaf, len(docs), validation)
        if rest is not None and not rest and choice.test_share < 1:
            raise UserError(
                f"task {leaf} has one item and no validation split: nothing to choose by"
            )
        parts.append(
            Part(leaf, split, len(docs), tuple(chosen), None if rest is None else tuple(rest))
        )
        facts = [task.dump_config(), [docs[i] for i in chosen]]
        text = json.dumps(facts, sort_keys=True, default=str)
        digest.update(ADDRESS.sub("", text).encode())
    emitted, better = _emitted(loaded)
    picked = tuple(_pick(name, metrics, emitted))
    directions = {better.get(metric.partition(",")[0], True) for metric in picked}
    if len(directions) > 1:
        raise UserError(
            f"task {name}: of {' and '.join(picked)} one is better when it is lower: they have no "
            "mean"
        )
    return Entry(name, picked, not directions.pop(), tuple(parts), digest.hexdigest(), loaded)


def _set_shots(task: Any, num_fewshot: int | None) -> None:
    """As lm-eval does with --num_fewshot: a task that says 0 stays at 0."""
    usual = task.get_config("num_fewshot")
    if usual is None or (num_fewshot is not None and usual != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)


def _to_validation(task: Any) -> tuple[str, bool]:
    """Have lm-eval score the validation split, if that is another than it would score; its name,
    and whether it is."""
    from lm_eval.api.task import ConfigurableTask

    if not (task.has_test_docs() and task.has_validation_docs()):
        return ("test" if task.has_test_docs() else "validation"), False
    config_decides = isinstance(task, ConfigurableTask) and all(
        getattr(type(task), name) is getattr(ConfigurableTask, name) for name in DOCS
    )
    if not config_decides:  # a class of its own finds them
        task.has_test_docs = lambda: False
        if isinstance(task, ConfigurableTask) and not task.has_training_docs():
            task.config.test_split = task.fewshot_cfg.split  # as below
        return "validation", True
    config = task.config
    split = str(config.validation_split)
    if split == config.test_split:
        return split, False
    config.test_split = split
    # lm-eval takes examples from here unless told otherwise: then an item must not be its own
    if task.fewshot_cfg.split is None and not task.has_training_docs():
        task.fewshot_cfg.split = split
    return split, True


def _emitted(loaded: Any) -> tuple[list[str], dict[str, bool]]:
    """`metric,filter` of an entry, the group's own where it is one; and metric -> whether higher
    is better."""
    better: dict[str, bool] = {}
    found: list[str] = []
    for task in loaded["tasks"].values():
        better |= {k: v for k, v in (task.higher_is_better() or {}).items() if v is not None}
        filters = [each.name for each in getattr(task, "_filters", ())] or ["none"]
        found += [f"{metric},{name}" for metric in task.aggregation() for name in filters]
    for group in loaded.get("groups", {}).values():
        if group.has_aggregation:
            wanted = {m.metric for m in group.aggregate_metric_list}
            found = [metric for metric in found if metric.partition(",")[0] in wanted]
    return list(dict.fromkeys(found)), better


def _pick(name: str, asked: Sequence[str] | None, emitted: Sequence[str]) -> Sequence[str]:
    if asked:
        for metric in asked:
            if metric not in emitted:
                raise UserError(
                    f"task {name} has no metric {metric}{_near(metric, emitted)} It has "
                    f"{', '.join(emitted)}"
                )
        return list(dict.fromkeys(asked))
    usual = {
        task.name: task.metric
        for benchmark in map(read_benchmark, SHIPPED)
        for task in benchmark.tasks
    }
    if usual.get(name) in emitted:
        return [usual[name]]
    if len(emitted) == 1:
        return emitted
    if "score,none" in emitted:
        return ["score,none"]
    raise UserError(
        f"task {name} has several metrics: say which with --metric {name}:METRIC, one of "
        f"{', '.join(emitted)}"
    )


def load_model(
    folder: Path,
    device: str,
    batch_size: str,
    model_args: str,
    *,
    chat_template: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """The model in a folder, as `lm_eval --model hf` loads it: an HFLM.

    Raises:
        UserError: lm-eval cannot load it, or it has no chat template where one is to be applied.
    """
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import simple_parse_args_string

    _calm()
    given = simple_parse_args_string(model_args) if model_args else {}
    try:
        lm = HFLM(
            pretrained=str(folder),
            device=device,
            batch_size=batch_size,
            trust_remote_code=trust_remote_code,
            **given,
        )
    except Exception as error:  # all that --model-args can make wrong
        reason = " ".join(str(error).split())
        raise UserError(f"lm-eval cannot load the model: {reason:.300}") from error
    if chat_template and lm.tokenizer.chat_template is None:
        raise UserError("--apply-chat-template: the base's tokenizer has no chat template")
    return lm


def score(lm: Any, entry: Entry, *, chat_template: bool = False) -> Scored:
    """One entry's metrics, as `lm_eval --samples` has them. Nothing is cached, since the weights
    change.

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
                samples={p.task: list(p.chosen) for p in entry.parts if len(p.chosen) < p.total},
                cache_requests=False,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
                apply_chat_template=chat_template,
                fewshot_as_multiturn=chat_template,  # as the command has it
                confirm_run_unsafe_code=True,  # `_entry` has asked
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
    parts = [part for entry in entries for part in entry.parts if part.rest is not None]
    if not parts:
        return []
    pools = [f"{part.task} ({part.total - len(part.rest or ())} of {part.total})" for part in parts]
    whole = all(not part.rest for part in parts)
    how = "all of what is scored" if whole else "a seeded part of what is scored"
    more = "" if whole else "; test_samples.json has the rest, for `lm_eval --samples`"
    return [f"no validation split in {listed(pools)}: {how} chooses{more}"]


def _calm() -> None:
    """lm-eval and what it uses tell at length what they do; their errors come as exceptions."""
    import datasets
    import transformers

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def _without_bars() -> Iterator[None]:
    """lm-eval draws two bars for each task and point, which no option leaves out."""
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.models.huggingface
    import tqdm

    def bar(*args: Any, **kwargs: Any) -> Any:
        return tqdm.tqdm(*args, **{**kwargs, "disable": True})

    modules: list[Any] = [lm_eval.api.model, lm_eval.api.task, lm_eval.models.huggingface]
    before = [module.tqdm for module in modules]
    try:
        for module in modules:
            module.tqdm = bar
        yield
    finally:
        for module, usual in zip(modules, before, strict=True):
            module.tqdm = usual
