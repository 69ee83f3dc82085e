"""A loaded model with a folder that changes it: a store of tasks, or learned routers."""

from __future__ import annotations

import os

from torch import nn

from tvb_mergekit import hub
from tvb_mergekit.errors import UserError
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.api import Model, base_of, check_types, open_model
from tvb_mergekit.store.live import Live
from tvb_mergekit.store.loaded import check_weights, live_tensors
from tvb_mergekit.store.routing import Routed, routed_model, routers_in
from tvb_mergekit.store.store import Bases


def attach(
    model: nn.Module, store: Bases | str | os.PathLike[str], base: Model | None = None
) -> Live | Routed:
    """The model as one that changes tasks in place: `.use("math")`, `.reset()`.

    A model merged by `tvb learn wemoe` instead gets its routers: `.route()`, `.reset()`.

    A change reads theta_0 and the store's vectors in pieces. It writes only the parameters that the
    store holds, in their dtypes and on their devices. A model that was moved, cast or wrapped after
    `attach` is refused.

    Args:
        model: any module whose state dict names its tensors as the base's files do, with the
            base's weights in any of float16, bfloat16, float32 and float64.
        store: a store's folder, or bases in memory. Or the model merged by
            `tvb learn wemoe` that `model` was loaded from, a folder.
        base: theta_0 of a store; by default where the store says that it is.

    Returns:
        An object with `use`, `reset`, `tasks` and `current`; for routers one with `route`,
        `reset`, `prompts` and `coefficients`.

    Raises:
        UserError: The base is not the store's, or `base` is given for routers. The model has other
            names, shapes or weights. A parameter to be moved is quantized, on the meta device, in
            the memory of `base`, or tied to one that moves otherwise.

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
    if not isinstance(store, Bases) and (file := routers_in(store)):
        if base is not None:
            raise UserError(f"{store} has routers of its own weights: leave out `base`")
        files = open_model(store)
        check_weights(live_tensors(model, files)[0], files)
        return routed_model(model, file)
    bases = store if isinstance(store, Bases) else stores.load(store)
    place = hub.local(bases.base_name) if base is None else ""
    given: Model = place if base is None else base
    if base is None and not os.path.exists(place):
        raise UserError(
            f"base {place}: no such file or folder (from {os.getcwd()}); say with `base` where the "
            f"base of {bases.place} is"
        )
    return Live(model, bases, base_of(bases, given))
