"""A live model that changes tasks: its weights are those of exports of a store, written in place.

Every change begins at theta_0 as it is on disk, never at the weights of before, so nothing drifts
and nothing must be remembered: one base in memory, and T specialists on disk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor, nn

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.api import Model, check_types, name_of, open_model
from tvb_mergekit.store.export import combine, items_of, task_column
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item


class Live:
    """A loaded model, its base and the store of its tasks; see `attach`."""

    def __init__(self, model: nn.Module, bases: Bases, base: Weights) -> None:
        self.model, self.bases = model, bases
        live = _checked(model, bases, base)
        self._sink = LiveSink(live)
        self._items = [
            replace(item, out=live[item.name].dtype)
            for item in items_of(bases, base, None, bases.sources)
            if item.name in live
        ]
        self._current: dict[str, float] | None = {}

    @property
    def tasks(self) -> list[str]:
        """What `use` knows."""
        return list(self.bases.tasks)

    @property
    def current(self) -> dict[str, float] | None:
        """Task -> scale, as in use; empty for the base; None where a change was interrupted."""
        return None if self._current is None else dict(self._current)

    def use(self, tasks: str | Mapping[str, float]) -> nn.Module:
        """The model with the weights theta_0 + sum_j scale_j * tau_hat_j, each rounded once to its
        dtype: for one task those of `tvb export --task`, to the bit.

        tau_hat_j is the reconstructed task vector without the weight that it was built with.

        Args:
            tasks: one task, whose scale is 1; or task -> scale.

        Raises:
            UserError: no task, an unknown one, a scale that is not finite (the model stays as it
                is); an overflow of the model's dtype, a file that was changed (it is the base
                again).
        """
        if not isinstance(tasks, str | Mapping):
            raise UserError(f"`use` got {tasks!r}: expected a task, or a mapping of task to scale")
        scales = {tasks: 1.0} if isinstance(tasks, str) else dict(tasks)
        if not scales:
            raise UserError("`use` got no task; `reset` brings the base back")
        column = torch.zeros(len(self.bases.sources), dtype=torch.float64, device="cpu")
        for task, scale in scales.items():
            if not (isinstance(scale, Real) and math.isfinite(scale)):
                raise UserError(
                    f"the scale of task {task!r} is {scale!r}: expected a finite number"
                )
            column += float(scale) * task_column(self.bases, task)[:, 0]
        try:
            self._move(column, {task: float(scale) for task, scale in scales.items()})
        except UserError as error:
            self.reset()
            raise UserError(f"{error}; the model has the base's weights again") from error
        return self.model

    def reset(self) -> nn.Module:
        """The model with the base's weights, to the bit.

        Raises:
            UserError: the base's files were changed.
        """
        none = torch.zeros(len(self.bases.sources), dtype=torch.float64, device="cpu")
        self._move(none, {})
        return self.model

    def _move(self, column: Tensor, current: dict[str, float]) -> None:
        self._current = None
        # On the CPU wherever the model is: what an accelerator adds up may differ in the last bit.
        combine(self._items, column[:, None], self._sink)
        self._current = current


class LiveSink:
    """A `stream.Sink` that writes its one output into tensors in use, on any device."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = live

    def place(self, item: Item, start: int, stop: int) -> Tensor | None:
        """A tensor in the CPU's memory is written where it is."""
        tensor = self._live[item.name]
        if tensor.is_contiguous() and tensor.device.type == "cpu":
            return tensor.view(1, -1)[:, start:stop]
        return None

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        tensor = self._live[item.name]
        if tensor.is_contiguous():
            tensor.view(-1)[start:stop].copy_(values[0])
        else:
            places = torch.arange(start, stop, device=tensor.device)
            tensor.put_(places, values[0].to(tensor.device))


def attach(
    model: nn.Module, store: Bases | str | os.PathLike[str], base: Model | None = None
) -> Live:
    """The model as one that changes tasks in place: `.use("math")`, `.reset()`.

    A change reads theta_0 and the store's vectors in pieces, within TVB_MERGEKIT_BLOCK_MB of memory
    (256 MB), and writes each parameter that the store holds, in its own dtype and on its device.
    All other tensors of the model are left alone.

    Args:
        model: any module whose state dict names its tensors as the base's files do, with the
            base's weights in any of float16, bfloat16, float32 and float64.
        store: a store's folder or bases in memory: a zoo, dense or sparse bases, adapters.
        base: theta_0; by default where the store says that it is.

    Returns:
        An object with `use`, `reset`, `tasks` and `current`.

    Raises:
        UserError: a base that is not the store's; a model that names its tensors otherwise, or with
            other shapes or weights than the base; a parameter to be moved that is quantized, on the
            meta device, or tied to one that moves otherwise.

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
    check_types(attach, locals())
    bases = store if isinstance(store, Bases) else stores.load(store)
    if base is None and not os.path.exists(bases.base_name):
        raise UserError(
            f"base {bases.base_name}: no such file or folder (from {os.getcwd()}); say with `base` "
            f"where the base of {bases.path or 'these bases'} is"
        )
    given: Model = bases.base_name if base is None else base
    found = open_model(given)
    bases.check_base(found, name_of(given))
    if isinstance(given, Mapping):
        _check_apart(model, given)
    return Live(model, bases, found)


def live_tensors(model: nn.Module, files: Weights) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a loaded model under the names of its files, without their gradients, and the
    parameters that have no such name, nor are tied to one that has."""
    state = model.state_dict(keep_vars=True)
    live = {name: state[name] for name in files.tensors if name in state}
    reached = {_place(tensor) for tensor in live.values()}
    others = [name for name, p in model.named_parameters() if _place(p) not in reached]
    return {name: tensor.detach() for name, tensor in live.items()}, others


def _place(tensor: Tensor) -> object:
    """The same for tensors that are tied, and for no others."""
    if tensor.is_meta or type(tensor.detach()) is not Tensor or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr()


def _checked(model: nn.Module, bases: Bases, base: Weights) -> dict[str, Tensor]:
    """The tensors of the model that move, one name for those that are tied.

    Raises:
        UserError: see `attach`.
    """
    live, others = live_tensors(model, base)
    missing = [name for name in base.tensors if bases.stored_name(name) and name not in live]
    if missing or others:
        said = [f"{listed(missing)} of the base's files are not in it"] if missing else []
        said += [f"its {listed(others)} are not in the base's files"] if others else []
        raise UserError(
            f"the model names its tensors otherwise than the base: {', and '.join(said)}; load it "
            "from the base's folder, by the class that its config.json names"
        )
    moving: dict[str, Tensor] = {}
    tied: dict[object, str] = {}
    for name, tensor in live.items():
        held = bases.stored_name(name)
        if why := _unfit(tensor):
            if held is None:
                continue
            raise UserError(
                f"tensor `{name}`: the model holds it {why}, and the store moves it; load the "
                "model with its weights in float32, bfloat16 or float16"
            )
        if tuple(tensor.shape) != base.tensors[name].shape:
            raise UserError(
                f"tensor `{name}`: the model has shape {list(tensor.shape)}, the base "
                f"{list(base.tensors[name].shape)}; attach to the base as it was loaded"
            )
        first = tied.setdefault(_place(tensor), name)
        if bases.stored_name(first) != held:
            raise UserError(
                f"tensors `{first}` and `{name}`: the model ties them, and the store moves them "
                "apart; load the model with `tie_word_embeddings=False`"
            )
        if held is not None and first == name:
            moving[name] = tensor
    _check_weights(live, base)
    return moving


def _unfit(tensor: Tensor) -> str:
    """Why a tensor cannot be written; empty where it can be."""
    if tensor.is_meta:
        return "on the meta device, without data"
    plain = type(tensor) is Tensor and tensor.layout == torch.strided
    if not (plain and tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        return f"as {str(tensor.dtype).removeprefix('torch.')}, quantized or not as plain numbers"
    return ""


def _check_weights(live: Mapping[str, Tensor], base: Weights) -> None:
    """Raise UserError where a sample of a live tensor is not what the base has, in its dtype."""
    for name, start, stop in _samples(live, base):
        base.ahead(name, start, stop)
    for name, start, stop in _samples(live, base):
        tensor, info = live[name], base.tensors[name]
        want = base.read(name, start, stop, torch.empty(stop - start, dtype=info.dtype))
        found = tensor.take(torch.arange(start, stop, device=tensor.device)).cpu()
        if not torch.equal(found, want.to(tensor.dtype)):
            raise UserError(
                f"tensor `{name}`: the model's weights are not the base's; attach to the base as "
                "it was loaded, before anything changes it"
            )


def _samples(live: Mapping[str, Tensor], base: Weights) -> Iterator[tuple[str, int, int]]:
    for name, start, stop in base.samples():
        floating = base.tensors[name].dtype.is_floating_point
        if floating and name in live and not _unfit(live[name]):
            yield name, start, stop


def _check_apart(model: nn.Module, base: Mapping[str, Tensor]) -> None:
    """Raise UserError where the base in memory is the model's own weights, which will change."""
    places = {_place(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for name, tensor in base.items():
        if isinstance(tensor, Tensor) and tensor.numel() and _place(tensor) in places:
            raise UserError(
                f"tensor `{name}`: the base is the model's own memory; give a folder, or a copy"
            )
