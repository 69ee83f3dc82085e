"""A loaded model that changes tasks: its weights are those of exports of a store, written in place.

Every change begins at theta_0 as it is on disk, never at the current weights, so nothing drifts.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.store import routing
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.api import Model, base_of, open_model
from tvb_mergekit.store.export import combine, items_of, task_column
from tvb_mergekit.store.routing import THRESHOLD, Gate, Routed, Routing, end_routing
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.stream import Item, Sink, StateDict, Weights

ATTACHED = "tvb_attached"  # attribute of a module: its layout, of the last `Live` that has it


def attach(
    model: nn.Module, store: Bases | str | os.PathLike[str], base: Model | None = None
) -> Live | Routed:
    """The model as one that changes tasks in place: `.use("math")`, `.route()`, `.reset()`.

    Args:
        model: any module with the base's weights in a dtype of 16 to 64 bits, whose state dict
            names its tensors as the base's files do.
        store: a store. Or the model of `tvb learn wemoe` that `model` was loaded from, a folder:
            it gets its routers, `.route()`, `.reset()`.
        base: theta_0 of a store; by default where the store says that it is.

    >>> import torch, tvb_mergekit as tvb
    >>> base = {"weight": torch.zeros(1, 2)}
    >>> tuned = {"a": {"weight": torch.tensor([[1.0, 0.0]])}, "b": {"weight": torch.ones(1, 2)}}
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> _ = model.load_state_dict(base)
    >>> live = attach(model, tvb.build(base, tuned, basis="none"), base)
    >>> live.use({"a": 0.5, "b": 2}).weight.tolist()
    [[2.5, 2.0]]
    >>> live.reset().weight.tolist()
    [[0.0, 0.0]]
    """
    model = getattr(model, "_orig_mod", model)  # without torch.compile
    if not isinstance(store, Bases) and (routed := routing.routed_model(model, store)):
        check_weights(model, open_model(store))
        return routed
    bases = store if isinstance(store, Bases) else stores.load(store)
    return Live(model, bases, base_of(bases, base))


@dataclass(eq=False, repr=False)
class Live(Routing):
    """A loaded model, its base and the store of its tasks; see `attach`. Threads take turns."""

    bases: Bases
    base: Weights
    # Task -> scale. None during a change and after an interruption, which the next one mends.
    current: dict[str, float] | None = field(init=False, default_factory=dict)
    scores: list[dict[str, float]] = field(init=False)  # by task, of each of the last prompts
    chosen: list[str | None] = field(init=False)  # of each of the last prompts; None: the base

    def __post_init__(self) -> None:
        self.tasks, self._ones = list(self.bases.tasks), dict[int, Tensor]()
        end_routing(self.model)
        self._live = live = moving_tensors(self.model, self.bases, self.base)
        every = items_of(self.bases, self.base, self.bases.sources)
        self._items = [replace(i, out=live[i.name].dtype) for i in every if i.name in live]
        self._layout = layout_of(self.model.state_dict(keep_vars=True))
        vars(self.model)[ATTACHED] = self._layout

    def use(self, tasks: str | Mapping[str, float]) -> nn.Module:
        """The model with the weights theta_0 + sum_j scale_j * tau_hat_j, rounded once.

        One task (scale 1) gives the bits of `tvb export --task`, except for tensors that a lossless
        store leaves out, or aligned with the base's tokenizer. tau_hat_j has no weight of a recipe.
        If a value overflows the model's dtype, the model has the base's weights again.
        """
        if not isinstance(tasks, str | Mapping):
            raise UserError(f"expected one task, or a mapping task -> scale; found {tasks!r}")
        with self._lock:
            end_routing(self.model)
            return self._change({tasks: 1.0} if isinstance(tasks, str) else dict(tasks))

    def reset(self) -> nn.Module:
        """The model with the base's weights, to the bit."""
        return self.use({})

    def _change(self, scales: dict[str, float], again: bool = True) -> nn.Module:
        """Change the weights; also to those of now, if `again`."""
        column = torch.zeros(len(self.bases.sources), 1, dtype=torch.float64, device="cpu")
        for task, scale in scales.items():
            if not math.isfinite(scale):
                raise UserError(f"the scale of {task!r} is {scale}; give a finite number")
            column += scale * task_column(self.bases, task)
        read = [s for s, scale in zip(self.bases.sources, column, strict=True) if scale]
        with self._lock:
            if vars(self.model).get(ATTACHED) is not self._layout:
                raise UserError("a later `attach` of this model has replaced this one: use that")
            layout = layout_of(self.model.state_dict(keep_vars=True))
            if changed := layout.items() ^ self._layout.items():
                said = f"`{min(dict(changed))}` is not what was attached (moved, cast, wrapped?)"
                raise UserError(f"{said}; load the base's weights, and `attach` again")
            if not again and self.current == scales:
                return self.model
            for weights in (self.base, *read):
                weights.check_unchanged()
            self.current = None
            try:
                # On the CPU wherever the model is: a GPU's sums may differ in the last bit
                combine(self._items, column, writing(self._live))
                for weights in (self.base, *read):
                    weights.check_unchanged()
            except UserError:
                combine(self._items, torch.zeros_like(column), writing(self._live))
                self.current = {}
                raise
            self.current = scales
        return self.model

    def route(
        self, tasks: str | Sequence[str] = (), threshold: float = THRESHOLD, explain: bool = False
    ) -> nn.Module:
        """The model, which chooses a task for each prompt that it or `generate` is called with.

        Half a pass of the base finds it by the weights; see `store.routing`. A batch is grouped by
        tasks, and the weights change for each. If all tasks are adapters of linear layers, no
        weights change: each sequence gets the updates of its task. `use` and `reset` end it.

        Args:
            tasks: to choose from; by default all.
            threshold: how far the best score must be above all others and above 0, that of
                texts of no task; else the base answers.
            explain: print the scores.
        """
        self.reset()
        if math.isnan(threshold):  # the base would answer all prompts
            raise UserError("the threshold is nan; give a number")
        if not self.bases.facts.whole:
            raise UserError(f"{self.bases.path} holds bases: `route` needs a store of all tasks")
        names = [tasks] if isinstance(tasks, str) else [*dict.fromkeys(tasks or self.tasks)]
        linear = routing.linear_layers(self.model)
        gates = {name: routing.gates_in(self.bases, name, linear) for name in names}
        if not any(gates.values()):
            raise UserError(f"{listed(names)}: no linear layer changed, so prompts show none")
        moved = [i for i in self._items if any(part.factors != () for part in i.inputs)]
        # Adapters of linear layers alone add to the outputs of these
        self._added = all(item.factored and item.name in linear for item in moved)
        theta = {} if self._added else routing.theta_of(self._live, {*chain(*gates.values())})
        texts = routing.plain_texts(self.model, self.base.folder)
        self.gate = Gate(self.model, gates, theta, texts)
        self.threshold, self.explain = threshold, explain
        pairs = {i.name: [(u.left, u.right) for u in i.updates()] for i in moved if self._added}
        numbers = [self.bases.index(name) for name in names]
        self._route({name: [own[k] for k in numbers] for name, own in pairs.items()})
        return self.model

    def choose(self, **given: Any) -> list[str | None]:
        """The task of each prompt, by the arguments of a call, after `route`."""
        main = getattr(self.model, "main_input_name", "")  # `generate` calls it `inputs`
        given = {main if key == "inputs" else key: value for key, value in given.items()}
        with self._inside():
            self._ones = {}
            scores = self.gate.scores(given)
            self.scores = [dict(zip(self.gate.tasks, row, strict=True)) for row in scores.tolist()]
            self.chosen = []
            for own in self.scores:
                best, *others = sorted(own, key=own.__getitem__, reverse=True)
                ahead = own[best] - max([0.0, *(own[task] for task in others)])
                self.chosen.append(best if ahead > self.threshold else None)
                if self.explain:
                    told = ", ".join(f"{task} {own[task]:.2f}" for task in (best, *others))
                    print(f"{self.chosen[-1] or 'the base'}: {told}", file=sys.stderr)
            return self.chosen

    def _answer(self, call: Callable[..., Any], given: dict[str, Any]) -> Any:
        """The output for all prompts at once, or for those of one task after another."""
        chosen = self.choose(**given)
        if self._added:
            self._change({}, again=False)
            tasks = ((m, task) for m, task in enumerate(self.gate.tasks) if task in chosen)
            self._ones = {m: torch.tensor([float(own == t) for own in chosen]) for m, t in tasks}
            return call(**given)
        groups = {task: [k for k, own in enumerate(chosen) if own == task] for task in chosen}
        if len(groups) > 1 and given.get("labels") is not None:
            raise UserError("prompts of several tasks have no common loss: leave `labels` out")
        split = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.dim() > 1}
        outputs = []
        for task, rows in groups.items():
            self._change({} if task is None else {task: 1.0}, again=False)
            own = {key: v[rows] for key, v in split.items() if len(v) == len(chosen)}
            outputs.append(call(**given | own))
        order = torch.tensor([*chain(*groups.values())]).argsort()
        config = given.get("generation_config") or getattr(self.model, "generation_config", self)
        return joined(outputs, order, vars(config) | given) if len(outputs) > 1 else outputs[0]

    def _used(self, name: str) -> Mapping[int, Tensor]:
        return self._ones


def joined(outputs: Sequence[Any], order: Tensor, settings: Mapping[str, Any]) -> Any:
    """The outputs of groups as one: texts, logits, or the last hidden states of an encoder."""
    if isinstance(outputs[0], tuple):  # `return_dict=False`
        return (joined([each[0] for each in outputs], order, settings),)
    key = None if isinstance(outputs[0], Tensor) else next(iter(outputs[0]))
    parts = chain(*(each if key is None else each[key] for each in outputs))
    # Shorter texts end as those of `generate`
    fillers = (settings.get("pad_token_id"), settings.get("eos_token_id"), 0)
    filler = next(filler for filler in fillers if filler is not None)
    filler = filler if isinstance(filler, int) else filler[0]
    rows = pad_sequence([*parts], True, filler).unflatten(0, (len(order), -1))
    found = rows[order.to(rows.device)].flatten(0, 1)
    return found if key is None else type(outputs[0])(**{key: found})


def writing(live: Mapping[str, Tensor]) -> Sink:
    """A sink that writes its one output into tensors in use, on any device."""

    def write(item: Item, start: int, stop: int, values: Tensor) -> None:
        tensor = live[item.name]
        with torch.inference_mode(tensor.is_inference()):
            if tensor.is_contiguous():
                tensor.view(-1)[start:stop].copy_(values[0])
            else:
                places = torch.arange(start, stop, device=tensor.device)
                tensor.put_(places, values[0].to(tensor.device))

    return write


def layout_of(state: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    """Memory, dtype, shape and strides of each tensor, which tied ones share."""
    # Buffers that are not stored may change: some rotary embeddings replace theirs as they run.
    tensors = {n: t for n, t in state.items() if isinstance(t, Tensor) and t.numel()}
    return {n: (t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) for n, t in tensors.items()}


def moving_tensors(model: nn.Module, bases: Bases, base: Weights) -> dict[str, Tensor]:
    """The tensors of a model with the base's weights that the bases move, tied ones once.

    Tensors that the model ties and the store does not are untied in the model.
    """
    held = {name: bases.stored_name(name) for name in base.tensors}
    state = model.state_dict(keep_vars=True)
    if missing := [name for name in held if held[name] and name not in state]:
        said = f"in memory the model names {listed(missing)} otherwise than the base's files"
        raise UserError(f"{said}; load it from there, by the class that its config.json names")
    check_weights(model, base)
    layout, own = layout_of(state), layout_of(base.state if isinstance(base, StateDict) else {})
    if {*layout.values()} & {*own.values()}:
        raise UserError("the base is the model's own memory: give copies of its tensors")
    first, moving = dict[object, str](), dict[str, Tensor]()
    for name in (name for name in held if name in layout):
        other = first.setdefault(layout[name], name)
        if held[other] != held[name]:
            state[name] = untie(model, name)
        elif other != name:
            continue
        if held[name]:
            moving[name] = state[name].detach()
    return moving


def untie(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter that gets memory of its own."""
    owner, _, last = name.rpartition(".")
    own = nn.Parameter(model.get_parameter(name).detach().clone(), requires_grad=False)
    setattr(model.get_submodule(owner), last, own)
    getattr(model, "config", SimpleNamespace()).tie_word_embeddings = False
    return own


def check_weights(model: nn.Module, base: Weights) -> None:
    """Raise UserError if shapes or sampled weights differ from the base, in the model's dtype."""
    state = model.state_dict()
    for name, start, stop in (sample for sample in base.samples() if sample[0] in state):
        tensor, shape = state[name], base.tensors[name].shape
        same = tensor.shape == shape and not tensor.is_meta
        places = torch.arange(start, stop, device=tensor.device)
        want = base.elements(name, start, stop).to(tensor.dtype)
        if not (same and tensor.take(places).cpu().equal(want)):
            found = f"{list(tensor.shape)} on {tensor.device}"
            said = f"the model's weights `{name}` {found} are not the base's {list(shape)}"
            raise UserError(f"{said}; load them, and attach before any change")
