"""A loaded model that changes tasks: its weights are those of exports of a store, written in place.

Every change begins at theta_0 as it is on disk, never at the current weights, so nothing drifts.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.names import LAYER, OUTPUT_EMBEDDING
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.api import Model, base_of, open_model
from tvb_mergekit.store.export import combine, items_of, task_column
from tvb_mergekit.store.gates import gates_in
from tvb_mergekit.store.router import THRESHOLD, Gate, Router, plain_texts, updates_of
from tvb_mergekit.store.routing import (
    Routed,
    end_routing,
    linear_layers,
    routed_model,
    routers_in,
)
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.stream import Item, Sink, StateDict, Weights

ATTACHED = "tvb_attached"  # attribute of a module: the key of the last `Live` that has it


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
    if not isinstance(store, Bases) and (file := routers_in(store)):
        check_weights(model, open_model(store))
        return routed_model(model, file)
    bases = store if isinstance(store, Bases) else stores.load(store)
    return Live(model, bases, base_of(bases, base))


class Live:
    """A loaded model, its base and the store of its tasks; see `attach`. Threads take turns."""

    def __init__(self, model: nn.Module, bases: Bases, base: Weights) -> None:
        self.model, self.bases, self._base = model, bases, base
        self.tasks = list(bases.tasks)
        # Task -> scale. None during a change and after an interruption, which the next one mends.
        self.current: dict[str, float] | None = {}
        self.router: Router | None = None
        self._module: nn.Module = getattr(model, "_orig_mod", model)  # without torch.compile
        end_routing(self._module)
        self._live = live = moving_tensors(self._module, bases, base)
        every = items_of(bases, base, bases.sources)
        self._items = [replace(i, out=live[i.name].dtype) for i in every if i.name in live]
        self._layout, self._lock = layout_of(self._module), threading.Lock()
        self._key = vars(self._module)[ATTACHED] = object()
        left = bases.facts.left_out
        out = [name for name in left if left[name].startswith(("excluded", "missing"))]
        if out and any(source.holds == "weight" for source in bases.sources):
            said = "%s: left out of %s, so the base's; exports have the models' own"
            logging.getLogger(__name__).warning(said, listed(out), bases.path)

    def use(self, tasks: str | Mapping[str, float]) -> nn.Module:
        """The model with the weights theta_0 + sum_j scale_j * tau_hat_j, rounded once.

        One task (scale 1) gives the bits of `tvb export --task`, except for tensors that a lossless
        store leaves out, or aligned with the base's tokenizer. tau_hat_j has no weight of a recipe.
        If a value overflows the model's dtype, the model has the base's weights again.
        """
        end_routing(self._module)
        return self._change({tasks: 1.0} if isinstance(tasks, str) else dict(tasks))

    def reset(self) -> nn.Module:
        """The model with the base's weights, to the bit."""
        return self.use({})

    def route(
        self, tasks: str | Sequence[str] = (), threshold: float = THRESHOLD, explain: bool = False
    ) -> nn.Module:
        """The model, which chooses a task for each prompt that it or `generate` is called with.

        Half a pass of the base finds it by the weights; see `store.router`. A batch is grouped by
        tasks, and the weights change for each. If all tasks are adapters of linear layers, no
        weights change: each sequence gets the updates of its task. `use` and `reset` end it.

        Args:
            tasks: to choose from; by default all.
            threshold: how far the best score must be above all others and above 0, that of
                texts of no task; else the base answers.
            explain: print the scores. `live.router` has the last ones as `scores`, and `chosen`.
        """
        if math.isnan(threshold):
            raise UserError("`threshold` is not a number")
        self.reset()
        names = [tasks] if isinstance(tasks, str) else [*dict.fromkeys(tasks or self.tasks)]
        if self.router is None or self.router.gate.tasks != names:
            self.router = self._router(names)
        self.router.threshold, self.router.explain = threshold, explain
        self.router.route()
        return self.model

    def _router(self, tasks: Sequence[str]) -> Router:
        if not self.bases.whole:
            raise UserError(f"{self.bases.path} holds bases: `route` needs a store of all tasks")
        linear, numbers = linear_layers(self._module), [self.bases.index(t) for t in tasks]
        gates = {task: gates_in(self.bases, task, linear) for task in tasks}
        if not any(gates.values()):
            raise UserError(f"{listed(tasks)}: no linear layer changed, so prompts show none")
        updates = updates_of(self._items, numbers, linear)
        theta = self._seen({*chain(*gates.values())}) if updates is None else {}
        texts = plain_texts(self._module, self._base.folder)
        gate = Gate(self._module, gates, theta, texts)
        return Router(gate, lambda task: self._change({task: 1.0} if task else {}, False), updates)

    def _seen(self, gates: Collection[str]) -> dict[str, Tensor]:
        """Copies of the base's tensors for a pass up to the last matrix with a gate."""
        places = {n: (m[2], int(m[3])) for n in self._live if (m := LAYER.match(n))}
        last = dict(sorted(places[name] for name in gates if name in places))  # of each stack
        later = {n for n, (stack, number) in places.items() if number > last.get(stack, number)}
        every = (n for n in self._live if n not in later and not OUTPUT_EMBEDDING.search(n))
        return {name: self._live[name].clone() for name in every}

    def _change(self, scales: dict[str, float], again: bool = True) -> nn.Module:
        """Change the weights; also to those of now, if `again`."""
        with self._lock:
            if vars(self._module).get(ATTACHED) is not self._key:
                raise UserError("a later `attach` of this model has replaced this one: use that")
            if changed := layout_of(self._module).items() ^ self._layout.items():
                said = f"`{min(dict(changed))}` is not what was attached (moved, cast, wrapped?)"
                raise UserError(f"{said}; load the base's weights, and `attach` again")
            try:
                if again or self.current != scales:
                    self._write(scales)
            except UserError:
                if self.current is None:  # some tensors are written
                    self._write({})
                raise
        return self.model

    def _write(self, scales: dict[str, float]) -> None:
        column = torch.zeros(len(self.bases.sources), 1, dtype=torch.float64, device="cpu")
        for task, scale in scales.items():
            column += scale * task_column(self.bases, task)
        read = [s for s, scale in zip(self.bases.sources, column, strict=True) if scale]
        for weights in (self._base, *read):
            weights.check_unchanged()
        self.current = None
        # On the CPU wherever the model is: what an accelerator adds up may differ in the last bit.
        combine(self._items, column, writing(self._live))
        for weights in (self._base, *read):
            weights.check_unchanged()
        self.current = scales


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


def layout_of(model: nn.Module) -> dict[str, object]:
    """Memory, dtype, shape and strides of each parameter and stored buffer, under all its names."""
    # Buffers that are not stored may change: some rotary embeddings replace theirs as they run.
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    return {n: (_memory(t), t.dtype, t.shape, t.stride()) for n, t in state.items()}


def _memory(tensor: Tensor) -> object:
    """A key of a tensor's memory, which tied tensors share."""
    return (tensor.device, tensor.data_ptr()) if tensor.numel() else id(tensor)


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
    given = base.state.values() if isinstance(base, StateDict) else ()
    if {*map(_memory, given)} & {*map(_memory, state.values())}:
        raise UserError("the base is the model's own memory: give copies of its tensors")
    first, moving = dict[object, str](), dict[str, Tensor]()
    for name in (name for name in held if name in state):
        other = first.setdefault(_memory(state[name]), name)
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
        tensor, info = state[name], base.tensors[name]
        if tensor.is_meta:
            raise UserError(f"the model's weights `{name}` are on `meta` (offloaded?); load them")
        want = base.read(name, start, stop, torch.empty(stop - start, dtype=info.dtype))
        places = torch.arange(start, stop, device=tensor.device)
        same = tensor.shape == info.shape
        if not (same and tensor.take(places).cpu().equal(want.to(tensor.dtype))):
            shapes = f"{list(tensor.shape)} are not the base's {list(info.shape)}"
            raise UserError(f"the model's weights `{name}` {shapes}; attach before any change")
