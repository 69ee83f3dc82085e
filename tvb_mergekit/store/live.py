"""A live model that changes tasks: its weights are those of exports of a store, written in place.

Every change begins at theta_0 as it is on disk, never at the current weights. So nothing drifts and
nothing must be remembered. Memory holds one base, and the disk T specialists.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from numbers import Rational, Real
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.store.export import combine, items_of, task_column
from tvb_mergekit.store.loaded import check_weights, live_tensors, moving_tensors, places_of
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item

LOG = logging.getLogger(__name__)
ATTACHED: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()  # model -> key of its `Live`


class Live:
    """A loaded model, its base and the store of its tasks; see `attach`. Threads take turns."""

    def __init__(self, model: nn.Module, bases: Bases, base: Weights) -> None:
        self.model, self.bases, self._base = model, bases, base
        self._module: nn.Module = getattr(model, "_orig_mod", model)  # without torch.compile
        self._live = moving_tensors(self._module, bases, base)
        check_weights(live_tensors(self._module, base)[0], base)
        self._places = places_of(self._module, bases, base)
        self._items = [
            replace(item, out=self._live[item.name].dtype)
            for item in items_of(bases, base, None, bases.sources)
            if item.name in self._live
        ]
        reasons = bases.facts.left_out.items()
        out = [name for name, why in reasons if why.startswith(("excluded", "missing"))]
        if out and bases.facts.store.codec == "lossless":
            LOG.warning(
                "%s: left out of %s, so the base's under every task; `tvb export` writes the "
                "models' own",
                listed(out),
                bases.place,
            )
        self._key = ATTACHED[self._module] = object()
        self._lock = threading.Lock()
        self._current: dict[str, float] | None = {}

    @property
    def tasks(self) -> list[str]:
        return list(self.bases.tasks)

    @property
    def current(self) -> dict[str, float] | None:
        """Task -> scale; empty for the base. None during a change and after an interruption."""
        return None if self._current is None else dict(self._current)

    def use(self, tasks: str | Mapping[str, float]) -> nn.Module:
        """The model with the weights theta_0 + sum_j scale_j * tau_hat_j, each rounded once to its
        dtype: for one task those of `tvb export --task`, to the bit, except for tensors that a
        lossless store leaves out of its task vectors, and tensors that it aligned with the
        base's tokenizer.

        tau_hat_j is the reconstructed task vector without the weight that it was built with.

        Args:
            tasks: one task, whose scale is 1; or task -> scale.

        Raises:
            UserError: an unknown task, a scale that is not finite, or a model that is not what was
                attached; the model stays as it is. After an overflow of its dtype, or if a file
                changes meanwhile, the message says which weights the model has.
        """
        return self._change(_scales(tasks))

    def reset(self) -> nn.Module:
        """The model with the base's weights, to the bit."""
        return self._change({})

    def _change(self, scales: Mapping[str, float]) -> nn.Module:
        """Write these weights; after a mistake those of the base. A later change mends Ctrl-C."""
        with self._lock:
            self._check()
            try:
                self._write(scales)
            except UserError as error:
                if self._current is not None:  # nothing was written
                    raise
                with suppress(UserError):
                    self._write({})
                now = "the model's weights are a mixture; load it again, and `attach`"
                if self._current is not None:
                    now = "the model has the base's weights again"
                raise UserError(f"{error}; {now}") from error
        return self.model

    def _check(self) -> None:
        """Raise UserError unless the model is what was attached."""
        if ATTACHED.get(self._module) is not self._key:
            raise UserError("a later `attach` of this model has replaced this one: use that")
        places = places_of(self._module, self.bases, self._base)
        if changed := dict(places.items() ^ self._places.items()):
            raise UserError(
                f"tensor `{min(changed)}` is not what was attached: the model was moved, cast or "
                "wrapped, or the tensor replaced; load the base's weights, and `attach` again"
            )

    def _write(self, scales: Mapping[str, float]) -> None:
        """Write the weights of these scales into the model."""
        column = torch.zeros(len(self.bases.sources), dtype=torch.float64, device="cpu")
        for task, scale in scales.items():
            column += scale * task_column(self.bases, task)[:, 0]
        used = zip(self.bases.sources, column.tolist(), strict=True)
        read = [self._base, *(source for source, scale in used if scale)]
        for weights in read:
            weights.check_unchanged()
        self._current = None
        for tensor in self._live.values():  # gradients through the old weights are an error
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        # On the CPU wherever the model is: what an accelerator adds up may differ in the last bit.
        combine(self._items, column[:, None], LiveSink(self._live))
        for weights in read:
            weights.check_unchanged()
        self._current = dict(scales)


class LiveSink:
    """A `stream.Sink` that writes its one output into tensors in use, on any device."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = live

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        tensor = self._live[item.name]
        with torch.inference_mode(tensor.is_inference()):
            if tensor.is_contiguous():
                tensor.view(-1)[start:stop].copy_(values[0])
            else:
                places = torch.arange(start, stop, device=tensor.device)
                tensor.put_(places, values[0].to(tensor.device))


def _scales(tasks: str | Mapping[str, float]) -> dict[str, float]:
    """Task -> scale. Raises UserError: see `Live.use`."""
    if not isinstance(tasks, str | Mapping):
        raise UserError(f"`use` got {tasks!r}: expected a task, or a mapping of task to scale")
    scales = {tasks: 1.0} if isinstance(tasks, str) else dict(tasks)
    if not scales:
        raise UserError("`use` got no task; `reset` brings the base back")
    for task, scale in scales.items():
        with suppress(OverflowError):
            if isinstance(scale, Real) and math.isfinite(scale):
                scales[task] = float(scale)
                continue
        found = "beyond float64" if isinstance(scale, Rational) else repr(scale)
        raise UserError(f"the scale of task {task!r} is {found}: expected a finite number")
    return scales
