"""A live model that changes tasks: its weights are those of exports of a store, written in place.

Every change begins at theta_0 as it is on disk, never at the current weights. So nothing drifts and
nothing must be remembered. Memory holds one base, and the disk T specialists.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from numbers import Rational, Real
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.store.export import combine, items_of, task_column
from tvb_mergekit.store.loaded import (
    check_weights,
    elements,
    live_tensors,
    moving_tensors,
    parameters_of,
)
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item

LOG = logging.getLogger(__name__)
# Model -> tensor that a task has moved -> a key of the `Live` that did.
IN_USE: WeakKeyDictionary[nn.Module, dict[str, object]] = WeakKeyDictionary()


class Live:
    """A loaded model, its base and the store of its tasks; see `attach`. Threads take turns."""

    def __init__(self, model: nn.Module, bases: Bases, base: Weights) -> None:
        self.model, self.bases, self._base = model, bases, base
        moving_tensors(model, bases, base)
        check_weights(live_tensors(model, base)[0], base)
        self._items = items_of(bases, base, None, bases.sources)
        self._known = {plain for plain, _ in parameters_of(model)}
        reasons = bases.facts.left_out.items()
        out = [name for name, why in reasons if why.startswith(("excluded", "missing"))]
        if out and bases.facts.store.codec == "lossless":
            LOG.warning(
                "%s: left out of %s, so the base's under every task; `tvb export` writes the "
                "models' own",
                listed(out),
                bases.place,
            )
        self._key = object()
        self._in_use = IN_USE.setdefault(getattr(model, "_orig_mod", model), {})
        self._in_use.clear()  # all tensors are the base's
        self._lock = threading.RLock()
        self._current: dict[str, float] | None = {}
        self._blocks: list[dict[str, float]] = []  # for each open `using`, the earlier tasks

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
            UserError: an unknown task, a scale that is not finite, or a model that no longer fits;
                the model stays as it is. After an overflow of its dtype, or if a file changes
                meanwhile, the message says which weights the model has.
        """
        return self._change(_scales(tasks))

    def reset(self) -> nn.Module:
        """The model with the base's weights, to the bit."""
        return self._change({})

    @contextmanager
    def using(self, tasks: str | Mapping[str, float]) -> Iterator[nn.Module]:
        """`use` for the time of a `with` block; changes by other threads wait for its end.

        The end, by an error too, brings back the tasks that were in use before the block, or the
        base if a change had been interrupted. If both fail, the block's error is raised and the
        other is logged. A block must not span an `await`: blocks that end out of order bring the
        base back and raise an error.
        """
        scales = _scales(tasks)
        with self._lock:
            before = dict(self._current or {})
            self._change(scales, before)
            self._blocks.append(before)
            try:
                yield self.model
            except BaseException:
                try:
                    self._end(before)
                except Exception as error:  # Python 3.10 has no `add_note`
                    LOG.error("the end of a `using` block has failed too: %s", error)
                raise
            self._end(before)

    def verify(self) -> None:
        """Raise UserError if a tensor differs in any bit from the weights of `current`."""
        with self._lock:
            if self._current is None:
                raise UserError(
                    "a change was interrupted and the model's weights are a mixture; `use` a task, "
                    "or `reset`"
                )
            self._stream(self._current, writing=False)

    def _end(self, before: Mapping[str, float]) -> None:
        """Bring back the tasks in use before the innermost block; for other blocks the base."""
        if self._blocks and self._blocks.pop() is before:
            self._change(before)
            return
        self._blocks.clear()  # the ends of the others say so too
        self._change({})
        raise UserError(
            "`using` blocks ended out of order, and the model has the base's weights again; a "
            "block must not span an `await`"
        )

    def _change(
        self, scales: Mapping[str, float], back: Mapping[str, float] | None = None
    ) -> nn.Module:
        """Write these weights; if that fails, those of `back` (after Ctrl-C too) or the base's."""
        with self._lock:
            try:
                self._stream(scales, writing=True)
            except BaseException as error:
                interrupted = not isinstance(error, UserError)
                if self._current is not None or (interrupted and back is None):
                    raise  # nothing was written, or the next change mends it
                for kept in (back or {}, {}):
                    if self._current is None:
                        with suppress(UserError):
                            self._stream(kept, writing=True)
                if interrupted:
                    raise
                now = "the model's weights are a mixture; load it again, and `attach`"
                if self._current is not None:
                    now = f"the model has {_named(self._current)} again"
                raise UserError(f"{error}; {now}") from error
        return self.model

    def _stream(self, scales: Mapping[str, float], writing: bool) -> None:
        """Write the weights of these scales into the model, or compare the model with them."""
        column = torch.zeros(len(self.bases.sources), dtype=torch.float64, device="cpu")
        for task, scale in scales.items():
            column += scale * task_column(self.bases, task)[:, 0]
        live = moving_tensors(self.model, self.bases, self._base, self._known)
        items = [replace(i, out=live[i.name].dtype) for i in self._items if i.name in live]
        used = zip(self.bases.sources, column.tolist(), strict=True)
        read = [self._base, *(source for source, scale in used if scale)]
        for weights in read:
            weights.check_unchanged()
        sink = LiveSink(live) if writing else ComparingSink(live, scales)
        if writing:
            others = {name for name, key in self._in_use.items() if key is not self._key}
            if not others.isdisjoint(live) and (left := others - live.keys()):
                raise UserError(
                    f"another `attach` of this model has moved {listed(sorted(left))}, which this "
                    "one would leave behind: `reset` that first"
                )
            self._in_use.update(dict.fromkeys(live, self._key))
            self._current = None
            for tensor in live.values():  # gradients through the old weights are an error
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
        # On the CPU wherever the model is: what an accelerator adds up may differ in the last bit.
        combine(items, column[:, None], sink)
        for weights in read:
            weights.check_unchanged()
        if writing:
            self._current = dict(scales)
            for name in live if not scales else ():
                self._in_use.pop(name, None)


class LiveSink:
    """A `stream.Sink` that writes its one output into tensors in use, on any device."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = live

    def place(self, item: Item, start: int, stop: int) -> Tensor | None:
        """A tensor in the CPU's memory is written where it is."""
        tensor = self._live[item.name]
        on_cpu = tensor.device.type == "cpu" and not tensor.is_inference()
        return tensor.view(1, -1)[:, start:stop] if on_cpu and tensor.is_contiguous() else None

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        tensor = self._live[item.name]
        with torch.inference_mode(tensor.is_inference()):
            if tensor.is_contiguous():
                tensor.view(-1)[start:stop].copy_(values[0])
            else:
                places = torch.arange(start, stop, device=tensor.device)
                tensor.put_(places, values[0].to(tensor.device))


class ComparingSink:
    """A `stream.Sink` that compares its one output with tensors in use."""

    def __init__(self, live: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        self._live, self._weights = live, _named(scales)

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        found, want = elements(self._live[item.name], start, stop), values[0]
        bits = (tensor.contiguous().view(torch.uint8) for tensor in (found, want))
        if len(differing := torch.ne(*bits).nonzero()):
            at = int(differing[0]) // want.itemsize
            raise UserError(
                f"tensor `{item.name}`: element {start + at} is {found[at].item()} in the model, "
                f"{want[at].item()} in {self._weights}; `use` a task, or `reset`"
            )


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


def _named(scales: Mapping[str, float]) -> str:
    return f"the weights of {dict(scales)}" if scales else "the base's weights"
