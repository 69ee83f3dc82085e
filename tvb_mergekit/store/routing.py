"""The task of a prompt by the weights alone, and models whose calls are answered by their prompts.

V_ml are the first right singular vectors of the difference of task m in matrix l, [k, inputs]:
what training has seen there. x are the inputs of matrix l in a pass of the base over the prompt.

    a_ml = mean over the first and the last tokens of ||V_ml x||^2 / ||x||^2
    score_m = mean over l of (log a_ml - mean) / deviation, divided by one number for all tasks,

mean and deviation over texts of no task: sentences, four prompts and random tokens. Their scores
have mean 0, and the number gives them deviation 1 (root mean square over tasks). Adapters that
began at random turn little to their task, so each matrix says little, but all err in their own
ways. Without the prompts, each text in the form of one looks like a task.
SMILE (arXiv 2408.10174) has such a gate in each layer for each token. Here a prompt has one vote.

A routed linear layer with the weight W gives W x + sum_m B_m (c_m x), with its own c for each
sequence. In `attach.Live`, B_m is the adapter of task m, and c is 1 for the task of the prompt.
`Routed` is WEMoE over bases (Tang et al., ICML 2024; the paper's table 1): W is the merged weight,
B_m a basis of a layer in MLP l, and c = R_l(mean input of MLP l over the prompt).
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from tvb_mergekit.errors import UserError
from tvb_mergekit.names import LAYER, OUTPUT_EMBEDDING, TRANSPOSED, is_linear, looked_at
from tvb_mergekit.store.facts import FOLDER, StoredFile, check_files, record_of, write_tensors
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.checkpoint import metadata_of
from tvb_mergekit.tensors.taskset import TaskSet

MOST = 4  # directions of a matrix
LEAST = 0.1  # singular value, of the largest one
SKETCH = 12  # further columns of the random sketch, which make the first ones exact
PLAIN = Path(__file__).with_name("plain.txt")  # texts of no task, four in the form of prompts
TEXTS, LENGTH = 24, 40  # random ones, and the most tokens of each
ENDS = 32  # tokens that count at each end of a prompt: a document between them hides its task
THRESHOLD = 1.0  # deviation of texts of no task
TINY = 1e-12
HOOKS = "tvb_hooks"  # attribute of a routed model: what ends its routing
ROUTERS = "routers.safetensors"
LEARNED = "tvb_learned"  # key of the metadata of `tvb learn`


def gate_of(difference: Tensor) -> Tensor:
    """The first right singular vectors of a matrix [outputs, inputs], [k, inputs] float32."""
    # Randomized: Halko et al., SIAM Review 2011, algorithm 4.4 with six iterations
    matrix, start = difference.double(), torch.Generator().manual_seed(0)
    span = torch.randn(len(matrix), MOST + SKETCH, generator=start, dtype=torch.float64)
    for _ in range(6):
        span = torch.linalg.qr(matrix @ (matrix.T @ torch.linalg.qr(span)[0]))[0]
    _, sizes, rows = torch.linalg.svd(span.T @ matrix, full_matrices=False)
    large = (sizes > LEAST * sizes[:1]) & (sizes > 0)
    found: Tensor = rows[:MOST][large[:MOST]].float()
    return found


def write_gates(store: Path, place: str, inputs: TaskSet, number: int) -> StoredFile:
    """Write the gates of one task, of the model at `number`, at a place of a store.

    Few matrices have one (`looked_at`): a hundredth of the bytes of a lossless model.
    """
    turned = TRANSPOSED.get(inputs.base.model_type or "", "$^")  # stored as [inputs, outputs]
    every = {i.name: i for i in inputs.items if len(i.shape) == 2 and is_linear(i.name, 2)}
    found = dict[str, Tensor]()
    for names in looked_at([name for name, item in every.items() if item.inputs]):
        for name in names if not found else ():
            item = every[name].loaded()
            part, base = item.inputs[number], item.base
            difference = item.whole(part).float().view(item.shape)
            if part.holds == "weight" and base is not None:
                difference = difference - item.whole(base).float().view(item.shape)
            gate = gate_of(difference.T if re.search(turned, name) else difference)
            found |= {name: gate.half()} if len(gate) else {}
    write_tensors(store / place, found, {"format": "pt"})
    return record_of(store, place)


def gates_in(bases: Bases, task: str, names: Container[str]) -> dict[str, Tensor]:
    """The gates of one task of a store, for the matrices of these names."""
    stored = bases.facts.vectors[bases.index(task)].gates
    if stored is None:
        raise UserError(f"{bases.path} has no gates of {task}; build it again")
    check_files(bases.path, [stored], checksums=True)
    held = load_file(bases.path / stored.file)
    return {name: gate.float() for name, gate in held.items() if name in names}


class Seen(Exception):
    """Ends a pass when all inputs that count have been seen."""


@dataclass(eq=False)
class Gate:
    """The scores of tasks for prompts."""

    model: nn.Module
    gates: Mapping[str, Mapping[str, Tensor]]  # task -> weight of a linear layer -> V [k, inputs]
    theta: dict[str, Tensor]  # the base's parameters, where the model's may be others
    texts: Sequence[Tensor]  # of no task, each [1, tokens]

    def __post_init__(self) -> None:
        self.tasks = [*self.gates]
        self._rows = dict[str, Tensor]()  # V of all tasks [T, k, inputs], 0 where a task has fewer
        for name in dict.fromkeys(chain(*self.gates.values())):
            none = next(own[name] for own in self.gates.values() if name in own)[:0]
            rows = pad_sequence([own.get(name, none) for own in self.gates.values()], True)
            self._rows[name] = rows.to(self.model.get_parameter(name).device)
        seen = torch.cat([self.shares({"input_ids": text}) for text in self.texts])
        self._mean, deviation = seen.mean(0), seen.std(0).clamp(min=TINY)
        scores = ((seen - self._mean) / deviation).nanmean(1)
        self._deviation = deviation * scores.var(0).nanmean().clamp(min=TINY).sqrt()

    def scores(self, given: Mapping[str, Any]) -> Tensor:
        """[sequences, T], for the named arguments of a call."""
        scores = ((self.shares(given) - self._mean) / self._deviation).nanmean(1)
        return scores.nan_to_num(nan=-math.inf)  # a task without gates is never chosen

    @torch.no_grad()
    def shares(self, given: Mapping[str, Any]) -> Tensor:
        """log a [sequences, matrices, T]; NaN where a task has no gate."""
        seen, known = dict[str, Tensor](), inspect.signature(self.model.forward).parameters
        given = {key: x for key, x in given.items() if key in known}
        given |= {"use_cache": False} if "use_cache" in known else {}

        def look(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x, rows = args[0].float(), self._rows[name]
            mask = kept(given.get("attention_mask"), x, name)
            place = mask.long().cumsum(1)  # the first token counts only where it is alone
            size = place[:, -1:]
            near = (place <= ENDS + 1) | (place > size - ENDS)
            mask = (mask.bool() & near & ((place > 1) | (size == 1)))[..., None]
            a = (x @ rows.flatten(0, 1).T).square().unflatten(2, rows.shape[:2]).sum(3)
            a = a / x.square().sum(2, True).clamp(min=TINY)
            a = (a * mask).sum(1) / mask.sum(1).clamp(min=1)
            seen[name] = a.clamp(min=TINY).log().where(rows.any(2).any(1), torch.nan).cpu()
            if len(seen) == len(self._rows):
                raise Seen

        with ExitStack() as hooks, suppress(Seen):
            for name in self._rows:
                module = self.model.get_submodule(name.removesuffix(".weight"))
                hooks.callback(module.register_forward_pre_hook(partial(look, name)).remove)
            functional_call(self.model, self.theta, (), given)
        if missing := [name for name in self._rows if name not in seen]:
            raise UserError(f"a prompt does not reach `{missing[0]}`, and its task is chosen there")
        return torch.stack([seen[name] for name in self._rows], 1)


def kept(mask: Tensor | None, x: Tensor, name: str) -> Tensor:
    """1 for each token of the inputs x [sequences, tokens, n] that an attention mask keeps."""
    mask = x.new_ones(x.shape[:2]) if mask is None else mask.to(x.device)
    mask = mask.repeat_interleave(len(x) // len(mask), 0)  # `generate` makes beams of a sequence
    if x.dim() != 3 or mask.shape != x.shape[:2]:  # of one token it would be spread over all
        raise UserError(f"`{name}`: a mask {list(mask.shape)} for inputs {list(x.shape)}")
    return mask


def plain_texts(model: Any, folder: Path | None) -> list[Tensor]:
    """Texts of no task, each [1, tokens]: random tokens, and plain ones if there is a tokenizer."""
    from transformers import AutoTokenizer

    if getattr(model, "main_input_name", "") != "input_ids" or model.config.is_encoder_decoder:
        raise UserError("`route` needs a model that runs with `input_ids` alone")
    size, start = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    texts = [*torch.randint(size, (TEXTS, LENGTH), generator=start).split(1)]
    if folder is not None and any(folder.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        plain = PLAIN.read_text(encoding="utf-8").rstrip().split("\n\n")
        ids = tokenizer(plain, truncation=True, max_length=LENGTH)["input_ids"]
        texts += [torch.tensor([each]) for each in ids]
    return [text.to(model.device) for text in texts]


def theta_of(live: Mapping[str, Tensor], gates: Container[str]) -> dict[str, Tensor]:
    """Copies of the base's tensors for a pass up to the last matrix with a gate in its stack."""
    places = {name: (m[2], int(m[3])) for name in live if (m := LAYER.match(name))}
    last = dict(sorted(place for name, place in places.items() if name in gates))
    later = {n for n, (stack, number) in places.items() if number > last.get(stack, number)}
    every = (n for n in live if n not in later and not OUTPUT_EMBEDDING.search(n))
    return {name: live[name].clone() for name in every}


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers, by the names of their weights."""
    every = {f"{name}.weight": module for name, module in model.named_modules()}
    return {n: m for n, m in every.items() if isinstance(m, nn.Linear) or is_turned(m)}


def is_turned(layer: nn.Module) -> bool:
    """Whether the weight of a linear layer is [inputs, outputs]."""
    return type(layer).__name__ == "Conv1D"


def end_routing(model: nn.Module) -> ExitStack:
    """Let a model answer by its weights alone; returns a stack to end the next routing."""
    vars(model).pop(HOOKS, ExitStack()).close()
    hooks = vars(model)[HOOKS] = ExitStack()
    return hooks


@dataclass(eq=False)
class Routing(ABC):
    """A model whose calls are answered as their prompts choose. Threads take turns."""

    model: nn.Module
    _lock: Any = field(init=False, default_factory=threading.RLock)
    _within: bool = field(init=False, default=False)

    @abstractmethod
    def _answer(self, call: Callable[..., Any], given: dict[str, Any]) -> Any:
        """The output of a call of the model or of `generate`, with named arguments."""

    @abstractmethod
    def _used(self, name: str) -> Mapping[int, Tensor]:
        """m -> c_m [sequences] of the updates in use, for the layer with this weight."""

    def _route(self, updates: Mapping[str, Sequence[Sequence[Tensor]]]) -> ExitStack:
        """Route calls until the stack is closed; `updates`: weight -> the factors of each B_m."""
        model: Any = self.model
        hooks = end_routing(model)
        # PEFT calls `forward` of the model, and some users its body alone
        body = getattr(model, "base_model", model)
        for owner, name in {(model, "generate"), (model, "forward"), (body, "forward")}:
            if old := getattr(owner, name, None):
                hooks.callback(vars(owner).update, {name: old} if name in vars(owner) else {})
                hooks.callback(vars(owner).pop, name)
                vars(owner)[name] = functools.wraps(old)(partial(self._call, hooks, old))
        for name, own in updates.items():
            layer = model.get_submodule(name.removesuffix(".weight"))
            like, turned = layer.weight.detach(), is_turned(layer)  # where the model is by now
            moved = [[factor.to(like) for factor in factors] for factors in own]
            steps = [b if turned else [factor.mT for factor in reversed(b)] for b in moved]
            hooks.callback(layer.register_forward_hook(partial(self._add, name, steps)).remove)
        return hooks

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        """Let calls through as they are; yields whether an outer call does so already."""
        with self._lock:
            before, self._within = self._within, True
            try:
                yield before
            finally:
                self._within = before

    def _call(self, hooks: ExitStack, old: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._inside() as within:
            if within or vars(self.model)[HOOKS] is not hooks:  # ended while the call waited
                return old(*args, **kwargs)
            given = dict(zip(inspect.signature(old).parameters, args, strict=False)) | kwargs
            # What the prompts of a cache have chosen is not known
            if any(hasattr(value, "get_seq_length") for value in given.values()):
                raise UserError("routed calls begin with prompts: leave `past_key_values` out")
            return self._answer(old, given)

    def _add(
        self, name: str, updates: Sequence[Any], layer: Any, args: tuple[Tensor, ...], y: Tensor
    ) -> Tensor:
        """y + sum_m B_m (c_m x). For this a backward pass keeps x and c, and not each B_m x."""
        x = args[0]
        for m, c in self._used(name).items():
            if x.dim() != 3 or len(x) % len(c):
                said = f"`{name}`: inputs {list(x.shape)} for {len(c)} prompts, as of experts"
                raise UserError(f"{said}; `use` one task, or `exclude` the layer from bases")
            c = c.repeat_interleave(len(x) // len(c)).to(x)  # `generate` makes beams of each
            y = y + functools.reduce(torch.matmul, updates[m], c[:, None, None] * x)
        return y


@dataclass(eq=False)
class Routed(Routing):
    """A model with routers and bases for its MLPs; see `attach`."""

    routers: Mapping[str, Sequence[Tensor]]  # MLP -> weight and bias of R_l
    bases: Mapping[str, Tensor]  # weight -> B_m [M, ...]
    # [sequences, tokens], 1 in prompts; None: what the attention mask keeps in the first pass
    prompts: Tensor | None = None
    coefficients: dict[str, Tensor] = field(default_factory=dict)  # MLP -> c of the last prompts
    _mask: Tensor | None = None

    def reset(self) -> nn.Module:
        """The merged model, whose weights have never changed."""
        with self._lock:
            end_routing(self.model)
        return self.model

    def route(self) -> nn.Module:
        """The model, whose MLPs combine the bases for each sequence from now on."""
        hooks = self._route({name: [[basis] for basis in own] for name, own in self.bases.items()})
        for name in self.routers:
            mlp = self.model.get_submodule(name)
            hooks.callback(mlp.register_forward_pre_hook(partial(self._choose, name)).remove)
        return self.model

    def _answer(self, call: Callable[..., Any], given: dict[str, Any]) -> Any:
        self._mask = given.get("attention_mask") if self.prompts is None else self.prompts
        self.coefficients = {}
        return call(**given)

    def _choose(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Compute c in the first pass; in training again for the backward pass."""
        if name not in self.coefficients or self.coefficients[name].requires_grad:
            weight, bias = (each.to(args[0].device) for each in self.routers[name])
            mask = kept(self._mask, args[0], name)[..., None]
            total = (args[0] * mask).sum(1, dtype=weight.dtype)
            mean = total / mask.sum(1, dtype=weight.dtype).clamp(min=1)
            self.coefficients[name] = linear(mean, weight, bias)

    def _used(self, name: str) -> Mapping[int, Tensor]:
        own = next(c for mlp, c in self.coefficients.items() if name.startswith(f"{mlp}."))
        return dict(enumerate(own.T))


def routed_model(model: nn.Module, folder: str | os.PathLike[str]) -> Routed | None:
    """The model that `tvb learn wemoe` wrote into a folder, with its routers; None: no routers."""
    file, end = Path(folder) / FOLDER / "learned" / ROUTERS, ".router.0."
    if not file.is_file():
        return None
    if '"version": 1,' not in metadata_of(file).get(LEARNED, ""):
        why = "damaged, or written by another tvb-mergekit"
        raise UserError(f"{file}: {why}; copy it again, or repeat `tvb learn`")
    held = load_file(file)
    mlps = {name.partition(end)[0] for name in held if end in name}
    routers = {m: [held.pop(f"{m}{end}{kind}") for kind in ("weight", "bias")] for m in mlps}
    return Routed(model, routers, held)
