"""A loaded model that changes tasks: its weights are those of exports of a store, written in place.

Every change begins at theta_0 as it is on disk, never at the current weights, so nothing drifts.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
from tvb_mergekit.store.routing import ROUTING, Routed, linear_layers, routed_model, routers_in
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.stream import Item, StateDict, Weights

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
    return Live(model, bases, base_of(bases, bases.base_name if base is None else base))


class Live:
    """A loaded model, its base and the store of its tasks; see `attach`. Threads take turns."""

    def __init__(self, model: nn.Module, bases: Bases, base: Weights) -> None:
        self.model, self.bases, self._base = model, bases, base
        self.tasks = list(bases.tasks)
        # Task -> scale. None during a change and after an interruption, which the next one mends.
        self.current: dict[str, float] | None = {}
        self._module: nn.Module = getattr(model, "_orig_mod", model)  # without torch.compile
        self._end_routing()
        self._live = live = moving_tensors(self._module, bases, base)
        every = items_of(bases, base, None, bases.sources)
        self._items = [replace(i, out=live[i.name].dtype) for i in every if i.name in live]
        self._layout, self._lock = layout_of(self._module), threading.Lock()
        self._key = vars(self._module)[ATTACHED] = object()
        self.router: Router | None = None
        left = bases.facts.left_out
        out = [name for name in left if left[name].startswith(("excluded", "missing"))]
        if out and any(source.holds == "weight" for source in bases.sources):
            said = "%s: left out of %s, so the base's; exports have the models' own"
            logging.getLogger(__name__).warning(said, listed(out), bases.place)

    def use(self, tasks: str | Mapping[str, float]) -> nn.Module:
        """The model with the weights theta_0 + sum_j scale_j * tau_hat_j, rounded once.

        One task (scale 1) gives the bits of `tvb export --task`, except for tensors that a lossless
        store leaves out, or aligned with the base's tokenizer. tau_hat_j has no weight of a recipe.
        If a value overflows the model's dtype, the model has the base's weights again.
        """
        self._end_routing()
        return self._change({tasks: 1.0} if isinstance(tasks, str) else dict(tasks))

    def reset(self) -> nn.Module:
        """The model with the base's weights, to the bit."""
        self._end_routing()
        return self._change({})

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
        if not isinstance(threshold, int | float) or not -math.inf < threshold < math.inf:
            raise UserError(f"`threshold` is {threshold!r}: expected a finite number")
        self.reset()
        names = [tasks] if isinstance(tasks, str) else [*(tasks or self.tasks)]
        if self.router is None or self.router.gate.tasks != names:
            self.router = self._router(names)
        self.router.threshold, self.router.explain = threshold, explain
        self.router.route()
        return self.model

    def _router(self, tasks: Sequence[str]) -> Router:
        if not self.bases.whole:
            raise UserError(f"{self.bases.place} holds bases: `route` needs a store of all tasks")
        numbers = [self.bases.index(task) for task in tasks]
        linear = linear_layers(self._module)
        items = [item for item in self._items if item.name in linear]
        turned = {name for name in linear if not isinstance(linear[name], nn.Linear)}  # Conv1D
        gates = {t: gates_in(self.bases, items, self.bases.index(t), turned) for t in tasks}
        updates = updates_of(self._items, numbers, linear)
        theta = self._seen([*gates.values()]) if updates is None else {}
        texts = plain_texts(self._module, self._base.folder)
        return Router(Gate(self._module, gates, theta, texts), self._use, updates)

    def _seen(self, gates: Sequence[Iterable[str]]) -> dict[str, Tensor]:
        """Copies of the base's tensors for a pass up to the last matrix with a gate."""
        last = dict[str, int]()  # layer of each stack
        for match in filter(None, map(LAYER.match, itertools.chain(*gates))):
            last[match[2]] = max(last.get(match[2], 0), int(match[3]))
        places = {n: LAYER.match(n) for n in self._live if not OUTPUT_EMBEDDING.search(n)}
        later = {n for n, m in places.items() if m and int(m[3]) > last.get(m[2], int(m[3]))}
        return {name: self._live[name].clone() for name in places if name not in later}

    def _use(self, task: str | None) -> None:
        scales = {} if task is None else {task: 1.0}
        if self.current != scales:
            self._change(scales)

    def _end_routing(self) -> None:
        if routing := vars(self._module).get(ROUTING):
            routing.reset()

    def _change(self, scales: dict[str, float]) -> nn.Module:
        with self._lock:
            if vars(self._module).get(ATTACHED) is not self._key:
                raise UserError("a later `attach` of this model has replaced this one: use that")
            if changed := layout_of(self._module).items() ^ self._layout.items():
                said = f"`{min(dict(changed))}` is not what was attached (moved, cast, wrapped?)"
                raise UserError(f"{said}; load the base's weights, and `attach` again")
            try:
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
        combine(self._items, column, LiveSink(self._live))
        for weights in (self._base, *read):
            weights.check_unchanged()
        self.current = scales


class LiveSink:
    """A sink that writes its one output into tensors in use, on any device."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = live

    def __call__(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        tensor = self._live[item.name]
        with torch.inference_mode(tensor.is_inference()):
            if tensor.is_contiguous():
                tensor.view(-1)[start:stop].copy_(values[0])
            else:
                places = torch.arange(start, stop, device=tensor.device)
                tensor.put_(places, values[0].to(tensor.device))


def live_tensors(model: nn.Module, files: Weights) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a loaded model under the names of its files, without their gradients, and the
    parameters that have no such name, nor are tied to one that has."""
    state = model.state_dict(keep_vars=True)
    live = {name: state[name] for name in files.tensors if name in state}
    reached = set(map(_memory, live.values()))
    every = model.named_parameters(remove_duplicate=False)
    others = [name for name, p in every if _memory(p) not in reached]
    return {name: tensor.detach() for name, tensor in live.items()}, others


def layout_of(model: nn.Module) -> dict[str, object]:
    """Memory, dtype, shape and strides of each parameter and stored buffer, under all its names."""
    # Buffers that are not stored may change: some rotary embeddings replace theirs as they run.
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    return {n: (_memory(t), t.dtype, t.shape, _fits(t) and t.stride()) for n, t in state.items()}


def _fits(tensor: Tensor) -> bool:
    """Whether a tensor is numbers in memory: not quantized, without data or sparse."""
    plain = type(tensor.detach()) is Tensor and tensor.layout == torch.strided
    return plain and not tensor.is_meta and tensor.is_floating_point() and tensor.itemsize > 1


def _memory(tensor: Tensor) -> object:
    """A key of a tensor's memory, which tied tensors share."""
    return (tensor.device, tensor.data_ptr()) if tensor.numel() and _fits(tensor) else id(tensor)


def moving_tensors(model: nn.Module, bases: Bases, base: Weights) -> dict[str, Tensor]:
    """The tensors of a model with the base's weights that the bases move, tied ones once.

    Tensors that the base ties and the store does not are untied in the model.
    """
    live, others = live_tensors(model, base)
    missing = [name for name in base.tensors if bases.stored_name(name) and name not in live]
    if names := [*missing, *others]:
        said = f"in memory the model names {listed(names)} otherwise than the base's files"
        raise UserError(f"{said}; load it from there, by the class that its config.json names")
    # The memory of tensors -> the first name; that of a given state dict is not to be moved.
    given = base.state.values() if isinstance(base, StateDict) else ()
    first, apart = {_memory(tensor): "the base" for tensor in given}, list[str]()
    for name, tensor in live.items():
        held = bases.stored_name(name)
        if held and not _fits(tensor):
            now = f"{tensor.dtype} on {tensor.device}"
            raise UserError(f"the model's `{name}` is {now}: load it as float32 or bfloat16")
        other = first.setdefault(_memory(tensor), name)
        if bases.stored_name(other) != held:
            if other not in live or base.canonical(other) != base.canonical(name):
                said = f"the model's `{name}` shares its memory with {other}, and the store moves"
                raise UserError(f"{said} one alone; load both apart (`tie_word_embeddings=False`)")
            apart.append(name)
    check_weights(model, base)
    live |= {name: untie(model, name).detach() for name in apart}
    return {n: t for n, t in live.items() if bases.stored_name(n) and first.get(_memory(t), n) == n}


def untie(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter that gets memory of its own."""
    owner, _, last = name.rpartition(".")
    own = nn.Parameter(model.get_parameter(name).detach().clone(), requires_grad=False)
    setattr(model.get_submodule(owner), last, own)
    getattr(model, "config", SimpleNamespace()).tie_word_embeddings = False
    return own


def check_weights(model: nn.Module, base: Weights) -> None:
    """Raise UserError if shapes or sampled weights differ from the base, in the model's dtype."""
    live = {name: t for name, t in live_tensors(model, base)[0].items() if _fits(t)}
    for name, start, stop in (sample for sample in base.samples() if sample[0] in live):
        tensor, info = live[name], base.tensors[name]
        want = base.read(name, start, stop, torch.empty(stop - start, dtype=info.dtype))
        places = torch.arange(start, stop, device=tensor.device)
        same = tensor.shape == info.shape
        if not (same and tensor.take(places).cpu().equal(want.to(tensor.dtype))):
            shapes = f"{list(tensor.shape)} are not the base's {list(info.shape)}"
            raise UserError(f"the model's weights `{name}` {shapes}; attach before any change")
