"""`tvb merge`: mergekit's own `run_merge`, with our stream in the place of its task graph.

mergekit reads the recipe, plans, and writes configuration, tokenizer and model card; what would run
the planned tasks is ours: all tensors go through `engine.merge_items` in one pass, in bounded
memory, and are written as they come. Every float is the one that `mergekit-yaml` writes. Of several
processes (see `ranks`) each plans all, and reads and writes its share; the leader writes the rest.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mergekit.merge
from mergekit.common import parse_kmb
from mergekit.graph import Executor, Task
from mergekit.io.tasks import FinalizeModel, SaveTensor
from mergekit.options import MergeOptions

from tvb_mergekit import ranks
from tvb_mergekit.engine import Job, merge_items
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.inputs import Document
from tvb_mergekit.plugin.planning import Plan, session
from tvb_mergekit.plugin.tasks import KeepBase, MergeTensor, torch_dtype
from tvb_mergekit.progress import bars
from tvb_mergekit.stream import Item
from tvb_mergekit.writing import FoldersSink, FolderWriter, plan_shards, run_of


def merge_recipe(
    document: Document,
    text: str,
    out: str,
    memory: int,
    *,
    out_shard_size: str,
    **options: Any,
) -> None:
    """Merge into the folder `out`, as `mergekit-yaml` does.

    Args:
        document: the recipe; used up, since mergekit rewrites its configuration.
        text: the recipe as a text, for the output folder.
        memory: bytes that the passes may allocate.
        out_shard_size: as a user writes it.
        options: others of mergekit's `MergeOptions`.

    Raises:
        UserError, MergeRefused: another method than ours, or what refuses the merge.
    """
    assert options.keys() <= MergeOptions.model_fields.keys()  # others would be dropped
    settings = MergeOptions(out_shard_size=shard_size(out_shard_size), **options)
    if document.raw:
        raise UserError(
            "the recipe's models are weight files: merge them with mergekit-pytorch, or list "
            "folders as Hugging Face writes them"
        )
    with streaming(memory):
        mergekit.merge.run_merge(document.config, out, settings, config_source=text)


def shard_size(text: str) -> int:
    """mergekit's sizes: `500M`, `5B`.

    Raises:
        UserError: it is none.
    """
    try:
        size: int = parse_kmb(text)
    except (ValueError, IndexError) as error:
        raise UserError(f"--out-shard-size {text}: expected a size such as 500M or 5B") from error
    return size


@contextmanager
def streaming(memory: int) -> Iterator[None]:
    """Let `run_merge` run the tasks of our methods by `StreamingExecutor`."""
    module: Any = mergekit.merge
    stock = module.Executor, module.MultiGPUExecutor

    def made(targets: Sequence[Task[Any]], **_devices: Any) -> StreamingExecutor:
        world = ranks.world()
        if world.leads:  # the others wait for it before they plan: see `run_merge`
            world.share(lambda: None)
        return StreamingExecutor(targets, memory)

    module.Executor = module.MultiGPUExecutor = made
    try:
        yield
    finally:
        module.Executor, module.MultiGPUExecutor = stock


class StreamingExecutor:
    """What `run_merge` asks of an executor: run the tasks that write a model."""

    def __init__(self, targets: Sequence[Task[Any]], memory: int) -> None:
        self.saves = [task for task in targets if isinstance(task, SaveTensor)]
        self.others = [task for task in targets if not isinstance(task, SaveTensor | FinalizeModel)]
        self.memory = memory

    def run(self, quiet: bool = False) -> Iterator[tuple[Task[Any], Any]]:
        """Write all tensors; yields the tasks that are no tensors (the tokenizer) and their
        values."""
        running = session.get()
        assert running is not None and running.plan is not None, "mergekit planned without us"
        plan = running.plan
        plan.memory = self.memory
        for task in self.others:
            # mergekit puts new tokens in the order of a set, which each process has another of.
            for _, value in ranks.world().share(functools.partial(_run, task)):
                plan.tokenizers[task] = value
                yield task, value
        if self.saves:
            self._merge(plan, quiet)

    def _merge(self, plan: Plan, quiet: bool) -> None:
        basis = self.saves[0].tensor_task.basis.execute()
        saves = {save.tensor_name: save for save in self.saves}
        items, jobs = [], {}
        for name, planned in plan.outputs.items():  # as they lie on the disk
            task = saves[name].tensor_task
            items.append(_as_saved(planned.item(), saves[name]))
            if isinstance(task, MergeTensor):
                jobs[name] = Job(task.counted_as, task.tunables)
            plan.note_read(planned)
        world = ranks.world()
        writer = self.saves[0].writer_task
        shards = plan_shards(items, writer.max_shard_size or sys.maxsize, world.size)
        world.agree([[shard.name, [i.name for i in shard.items]] for shard in shards], "tensors")
        path = Path(writer.out_path)
        folder = FolderWriter(path, shards, {"format": "pt"}, rank=world.rank)
        merge_items(
            basis,
            run_of(shards, world.rank),
            jobs,
            FoldersSink([folder]),
            devices=plan.devices,
            budget=plan.budget,
            progress=bars(quiet),
        )
        records = world.collect(folder.whole())
        world.dismiss()
        folder.finish(records)


def _run(task: Task[Any]) -> list[tuple[Task[Any], Any]]:
    return list(Executor([task]).run(quiet=True))


def _as_saved(item: Item, save: SaveTensor) -> Item:
    """The item in the dtype in which mergekit would write it."""
    task = save.tensor_task
    if isinstance(task, MergeTensor):
        item = task.typed(item)
    else:
        assert isinstance(task, KeepBase) and item.base is not None
        item = replace(item, out=task.out_dtype(item.base.dtype))
    return replace(item, out=torch_dtype(save.dtype) or item.out)
