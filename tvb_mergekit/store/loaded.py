"""The tensors of a loaded model, under the names of its files: those that a store moves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.source import StateDict, Weights


def live_tensors(model: nn.Module, files: Weights) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a loaded model under the names of its files, without their gradients, and the
    parameters that have no such name, nor are tied to one that has."""
    state = model.state_dict(keep_vars=True)
    live = {name: state[name] for name in files.tensors if name in state}
    reached = {_place(tensor) for tensor in live.values()}
    every = model.named_parameters(remove_duplicate=False)
    others = [name for name, p in every if _place(p) not in reached]
    return {name: tensor.detach() for name, tensor in live.items()}, others


def _place(tensor: Tensor) -> object:
    """A key of a tensor's memory, which tied tensors share."""
    if tensor.is_meta or type(tensor.detach()) is not Tensor or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr()


def places_of(model: nn.Module, bases: Bases, base: Weights) -> dict[str, object]:
    """Memory and dtype of each tensor that the bases hold, under each of its names, and of each
    parameter that the base's files lack, which was tied before."""
    live, others = live_tensors(model, base)
    held = {name: tensor for name, tensor in live.items() if bases.stored_name(name)}
    held |= {name: model.get_parameter(name) for name in others}
    return {n: (_place(t), t.dtype, t.shape, t.stride()) for n, t in held.items()}


def moving_tensors(model: nn.Module, bases: Bases, base: Weights) -> dict[str, Tensor]:
    """The tensors of the model that move, one name for those that are tied."""
    live, others = live_tensors(model, base)
    missing = [name for name in base.tensors if bases.stored_name(name) and name not in live]
    said = [f"{listed(missing)} of the base's files are not in it"] * bool(missing)
    said += [f"its {listed(others)} are not in the base's files"] * bool(others)
    if said:
        raise UserError(
            f"the model names its tensors otherwise than the base: {', and '.join(said)}; load it "
            "from the base's folder, by the class that its config.json names"
        )
    given = {_place(t) for t in base.state.values()} if isinstance(base, StateDict) else set()
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
        first = tied.setdefault(place := _place(tensor), name)
        if bases.stored_name(first) != held:
            raise UserError(
                f"tensors `{first}` and `{name}`: the model ties them, and the store moves them "
                "apart; load the model with `tie_word_embeddings=False`"
            )
        if held is None:
            continue
        if place in given:
            raise UserError(
                f"tensor `{name}`: the base is the model's own memory; give a folder, or a copy"
            )
        if first == name:
            moving[name] = tensor
    return moving


def _unfit(tensor: Tensor) -> str:
    """Reason why a tensor cannot be written; empty if it can be."""
    if tensor.is_meta:
        return "on the meta device, without data"
    plain = type(tensor) is Tensor and tensor.layout == torch.strided
    if not (plain and tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        return f"as {str(tensor.dtype).removeprefix('torch.')}, quantized or not as plain numbers"
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return "with elements that share memory"
        reach += stride * (size - 1)
    return ""


def check_weights(live: Mapping[str, Tensor], base: Weights) -> None:
    """Raise UserError if sampled weights differ from the base, in the model's dtype."""
    fit = {n for n, t in live.items() if base.tensors[n].dtype.is_floating_point and not _unfit(t)}
    for name, start, stop in (sample for sample in base.samples() if sample[0] in fit):
        tensor, info = live[name], base.tensors[name]
        want = base.read(name, start, stop, torch.empty(stop - start, dtype=info.dtype))
        if not torch.equal(elements(tensor, start, stop), want.to(tensor.dtype)):
            raise UserError(
                f"tensor `{name}`: the model's weights are not the base's; attach to the base as "
                "it was loaded, before anything changes it"
            )


def elements(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Elements of a flattened tensor on the CPU."""
    return tensor.take(torch.arange(start, stop, device=tensor.device)).cpu()
