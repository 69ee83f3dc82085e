"""A request, the planned merge that it learns for, and the result of a method.

A `Job` is all that the methods ask of a recipe or a store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tvb_mergekit import __version__
from tvb_mergekit.core.basis import Basis, Step
from tvb_mergekit.errors import UserError, listed, one_line
from tvb_mergekit.learn.data import Example
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import SAVE_AGAIN, Options
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.store.attach import Live, attach, untie
from tvb_mergekit.store.facts import FOLDER
from tvb_mergekit.store.routing import LEARNED
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.merging import merge_items, merge_one
from tvb_mergekit.tensors.output import in_memory
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Item, Sink

LOG = logging.getLogger(__name__)
Parameters = Mapping[str, nn.Parameter]
WEIGHTS = "look at the models' weights (`tvb inspect RECIPE`)"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A method and its options, as in `tvb learn RECIPE METHOD --help`.

    Options of other methods have no effect. None stands for the method's own default.
    """

    document: Document
    method: Literal["fisher", "regmean", "localize", "adamerging", "atlas", "wemoe"]
    out: str
    data: Sequence[str] = ()
    mixture: Literal["encoder", "equal", "positive"] = "encoder"
    subsample: bool = True
    normalize: bool = False
    off_diagonal: float = 0.9
    epochs: int = 10
    learning_rate: float | None = None
    batch_size: int | None = None
    held_out: float = 0.2
    patience: int = 3
    density: float = 0.05
    dataless: bool = False
    penalty: float = 0.0
    blocks: int = 1
    nonnegative: bool = False
    unlabeled: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    spread: bool = False
    seed: int = 0
    options: Options = field(default_factory=Options)


class Job:
    """A planned merge: M bases, `count`, of T `tasks`, and the examples in use of each task.

    The bases are those of a store, `recipe.store`, or those that the plan builds over T models or
    over the task vectors in a store.
    """

    def __init__(self, plan: Plan, request: Request) -> None:
        self.plan, self.request, self.store = plan, request, plan.recipe.store
        self.place = Path()  # a folder for files that are deleted after the merge
        self.examples: Mapping[str, Sequence[Example]] = {}
        self.tasks = list(plan.recipe.tasks if self.store is None else self.store.tasks)
        built = plan.recipe.settings.bases_of(len(self.tasks)) if self.store is None else 0
        self.count = built or len(plan.recipe.order)
        AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier call
        self.accelerator = Accelerator(
            cpu=plan.engine.device.type == "cpu",
            mixed_precision="bf16" if request.precision == "bfloat16" else "no",
        )

    def progress(self, total: int) -> Any:
        return self.plan.engine.progress(self.request.method, total, "example")

    def mine(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The examples of this process."""
        return examples[self.accelerator.process_index :: self.accelerator.num_processes]

    @property
    def columns(self) -> Tensor:
        """The bases as combinations of the plan's vectors, [N, M] float64."""
        weights, built = self.plan.recipe.weights, self.plan.basis.weighted_encoder
        return torch.diag(torch.tensor(weights).double()) if self.store else built

    @property
    def encoder(self) -> Tensor:
        """W_e [T, M] float64."""
        if self.store is not None:
            return self.store.encoder[:, list(self.plan.recipe.order)]
        return cast(Basis, self.plan.basis).encoding.encoder

    @property
    def sizes(self) -> Tensor:
        """v [M]: the weight of each basis in addition, if it may stand for several tasks."""
        known = [self.store.facts.shares[k] for k in self.plan.recipe.order] if self.store else None
        return torch.tensor(known or [1.0] * self.count, dtype=torch.float64)

    @property
    def mixture(self) -> Tensor:
        """The weight of each task's data in each basis, [T, M] float64: W_e times v, or 1/T, or the
        softmax of a column's positive entries (PCA>=0 in the paper's appendix)."""
        encoder, mixture = self.encoder, self.request.mixture
        if mixture == "equal":
            return torch.full_like(encoder, 1 / len(encoder))
        if float(encoder.amax(0).min()) <= 0:
            raise UserError("a basis has no positive weight in W_e; choose --mixture equal")
        if mixture == "positive":
            return torch.where(encoder > 0, encoder, -torch.inf).softmax(0)
        if float(encoder.min()) < 0:  # no ratio of the tasks' data
            said = "the encoder of this `basis` has negative weights"
            raise UserError(f"{said}: choose another, or --mixture equal or positive")
        return encoder * self.sizes

    def bases(
        self, parameters: Parameters | None, scale: float = 1.0, some: slice = slice(None)
    ) -> dict[str, Tensor]:
        """Bases [M, n] float32, or some, times `scale`, where the parameter of a tensor is.

        Args:
            parameters: of the tensors; None for all, on the CPU.
        """
        every = self.plan.tasks.items
        every = [item for item in every if parameters is None or item.name in parameters]
        items = [replace(item, out=torch.float32) for item in every]
        columns = self.columns[:, some] * scale
        held, sink = in_memory(items, columns.shape[1])
        steps = dict.fromkeys((item.name for item in items), Step.of(columns))
        combine_pass(items, steps, sink, self.plan.engine, title="Bases")
        rows = {name: each.view(len(each), each[0].numel()) for name, each in held.items()}
        return {n: b.to(parameters[n].device) if parameters else b for n, b in rows.items()}

    def folder(self, task: str | None) -> Path:
        """The folder with configuration and tokenizer of a task's model; None is the base."""
        recipe, held = self.plan.recipe, self.plan.tensors.checkpoints
        alone = task is not None and recipe.bases is None
        model = recipe.models[self.tasks.index(str(task))] if alone else recipe.base
        return Path(str(held[model].folder))

    def load(self, task: str | None) -> tuple[nn.Module, Parameters]:
        """A task's model, or with None the base's, and its parameters that the merge moves.

        Over a store it is the base plus the task's vector, which a store of bases reconstructs.
        """
        recipe, place, folder = self.plan.recipe, 0, self.folder(task)
        disable_progress_bar()  # ours counts examples
        try:
            model: nn.Module = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, trust_remote_code=self.plan.options.trust_remote_code,
                device_map="auto" if self.request.spread else self.plan.engine.device,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"{folder}: not a causal language model: {one_line(error)}") from error
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UserError(f"{folder}: the GPUs cannot hold this model in float32")
        if task is not None and recipe.bases is not None:
            cast(Live, attach(model, recipe.bases, self.folder(None))).use(task)
        elif task is not None:
            place = 1 + self.tasks.index(task)
            source = self.plan.tensors.checkpoints[recipe.models[place - 1]]
            if isinstance(source, Adapter):
                tuned: Any = PeftModel.from_pretrained(model, source.file.folder)
                model = tuned.merge_and_unload()
        return model.eval().requires_grad_(False), self._named(model, place)

    def _named(self, model: nn.Module, place: int) -> Parameters:
        """The parameters of a model that the merge moves, by their names in the merge.

        Tensors whose names in memory differ from the files are left out, with a warning.

        Args:
            place: of the model in `Item.parts`.
        """
        state = model.state_dict(keep_vars=True)
        stored = {item.name: str(item.parts[place].name) for item in self.plan.tasks.items}
        found = {name: state[own] for name, own in stored.items() if own in state}
        if missing := [name for name, own in stored.items() if own not in state]:
            text = f"in memory the model names {listed(missing)} otherwise than its files"
            if 2 * len(missing) > len(stored):
                raise UserError(f"{text}; {SAVE_AGAIN}")
            LOG.warning("%s: nothing is learned of them, unless you %s", text, SAVE_AGAIN)
        first: dict[int, str] = {}
        for name, parameter in found.items():  # tied in this model, and two tensors in others
            if first.setdefault(id(parameter), name) != name:
                found[name] = untie(model, stored[name])
        return found


@dataclass
class LearnedMerge:
    """The merge that a method has learned, as a plan writes it.

    Attributes:
        direction: from the name of a tensor and its bases [M, ...] to D, its difference from
            theta_0; None for the recipe's own merge.
        own: the method's own entries of `learned.json`.
        tensors: file in `basis/learned` -> its tensors.
    """

    job: Job
    direction: Callable[[str, Tensor], Tensor] | None
    own: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return self.job.request.method

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        """Give `sink` the merged tensors, one whole tensor after another."""
        if self.direction is None:
            merge_items(plan.basis, items, sink, plan.engine)
            return
        combine_pass([item for item in items if not item.tunables], {}, sink, plan.engine)
        moving = [item for item in items if item.tunables]
        update = plan.engine.progress("Merged model", sum(item.nbytes for item in moving))
        for item in moving:
            merging = partial(self.direction, str(item.counted_as))
            merge_one(item, self.job.columns, merging, sink, plan.engine)
            update(item.nbytes)

    def write(self, folder: Path) -> None:
        """Write `learned.json`, the learned tensors, and a line in the model card."""
        job, place = self.job, folder / FOLDER
        hidden = ("document", "out", "options")
        facts = {
            "format_version": 1,
            "version": __version__,
            **{key: value for key, value in vars(job.request).items() if key not in hidden},
            **self.own,
            "examples": {task: len(some) for task, some in job.examples.items()},
            "seconds": round(job.plan.basis.seconds["learn"], 3),
        }
        (place / "learned.json").write_text(json.dumps(facts, indent=2) + "\n")
        for name, tensors in self.tensors.items():
            (place / "learned").mkdir(exist_ok=True)
            held = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
            told = json.dumps({"version": 1, "method": self.method})
            save_file(held, place / "learned" / name, {LEARNED: told})
            (place / "learned" / name).chmod(0o644)  # `save_file` lets only the owner read
        how = "with routers for its MLPs" if self.direction is None else "and not by addition"
        if (card := folder / "README.md").exists():
            with card.open("a", encoding="utf-8") as stream:
                made = f"Made by `tvb learn {self.method}`, {how}"
                stream.write(f"\n{made}: see `{FOLDER}/learned.json`.\n")
