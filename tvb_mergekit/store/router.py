"""A router that needs no data: the task of a prompt, by the weights alone.

V_ml are the gates of task m (see `gates`), and x the inputs of matrix l in one pass of the base
over the prompt, which ends at the last of these matrices:

    a_ml = mean over all tokens but the first of ||V_ml x||^2 / ||x||^2
    score_m = mean over l of (log a_ml - mean) / sqrt(deviation),

mean and deviation over texts of no task, which so have score 0: plain sentences and random tokens.
SMILE (arXiv 2408.10174) has such a gate in each layer for each token. Here a prompt has one vote.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.routing import Routing, is_cache, kept
from tvb_mergekit.tensors.stream import Item

PLAIN = Path(__file__).with_name("plain.txt")  # sentences of no task
TEXTS, LENGTH = 24, 40  # random ones, and the most tokens of each
THRESHOLD = 0.3  # keeps 98 % of prompts with templates, and 12 % of others (validation items)
TINY = 1e-12


class Seen(Exception):
    """Ends a pass when all inputs that count have been seen."""


class Gate:
    """The scores of tasks for prompts.

    Args:
        gates: task -> weight of a linear layer -> V [k, inputs].
        theta: the base's parameters, where the model's may be others.
        texts: of no task, each [1, tokens].
    """

    def __init__(
        self,
        model: nn.Module,
        gates: Mapping[str, Mapping[str, Tensor]],
        theta: Mapping[str, Tensor],
        texts: Sequence[Tensor],
    ) -> None:
        self.model, self.tasks, self._theta = model, [*gates], dict(theta)
        self._rows = dict[str, tuple[Tensor, Tensor]]()  # V of all [K, inputs], and of whom [K, T]
        for name in dict.fromkeys(name for own in gates.values() for name in own):
            rows = [own.get(name, torch.empty(0)) for own in gates.values()]
            counts = torch.tensor([*map(len, rows)])
            whose = torch.eye(len(rows)).repeat_interleave(counts, 0)
            every, weight = (
                torch.cat([each for each in rows if len(each)]),
                model.get_parameter(name),
            )
            self._rows[name] = every.to(weight.device), whose.to(weight.device)
        self._mean, self._root = torch.zeros(()), torch.ones(())
        if texts:
            seen = torch.cat([self.shares({"input_ids": text}) for text in texts])
            self._mean, self._root = seen.mean(0), seen.std(0).clamp(min=TINY).sqrt()

    def scores(self, given: Mapping[str, Any]) -> Tensor:
        """[sequences, T], for the named arguments of a call."""
        return ((self.shares(given) - self._mean) / self._root).nanmean(1)

    @torch.no_grad()
    def shares(self, given: Mapping[str, Any]) -> Tensor:
        """log a [sequences, matrices, T]; NaN where a task has no gate."""
        seen, known = dict[str, Tensor](), inspect.signature(self.model.forward).parameters
        left_out = "labels", "cache", "past_key_values"
        given = {key: x for key, x in given.items() if key in known and key not in left_out}
        given |= {"use_cache": False} if "use_cache" in known else {}

        def look(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x, (rows, whose) = args[0].float(), self._rows[name]
            x = x if x.dim() == 3 else x[:, None]
            mask = kept(given.get("attention_mask"), x, name).bool()
            later = mask & (mask.cumsum(1) > 1)
            mask = torch.where(later.any(1, True), later, mask)[..., None]
            a = (x @ rows.T).square() @ whose / x.square().sum(2, True).clamp(min=TINY)
            a = (a * mask).sum(1) / mask.sum(1).clamp(min=1)
            seen[name] = torch.where(whose.any(0), a.clamp(min=TINY).log(), torch.nan).cpu()
            if len(seen) == len(self._rows):
                raise Seen

        with ExitStack() as stack:
            for name in self._rows:
                module = self.model.get_submodule(name.removesuffix(".weight"))
                stack.callback(module.register_forward_pre_hook(partial(look, name)).remove)
            with suppress(Seen):
                functional_call(self.model, self._theta, (), given)
        missing = [name for name in self._rows if name not in seen]
        if missing:
            raise UserError(f"a prompt does not reach `{missing[0]}`, and its task is chosen there")
        return torch.stack([seen[name] for name in self._rows], 1)


def plain_texts(model: Any, folder: Path | None) -> list[Tensor]:
    """Texts of no task, each [1, tokens], in the words of the tokenizer that lies in a folder.

    Without a tokenizer random tokens alone, and nothing for a model that reads no tokens.
    """
    config: Any = getattr(model, "config", None)
    size = getattr(config and config.get_text_config(), "vocab_size", None)
    if size is None:
        return []
    from transformers import AutoTokenizer

    random = torch.randint(size, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(0))
    texts = [*random.split(1)]
    if folder is not None and any(folder.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        lines = PLAIN.read_text(encoding="utf-8").splitlines()
        ids = tokenizer(lines, truncation=True, max_length=LENGTH)["input_ids"]
        texts += [torch.tensor([each]) for each in ids]
    return [text.to(model.device) for text in texts]


def token_of(*given: Any) -> int:
    """The first token that a configuration gives, or 0."""
    found = next((each for each in given if each is not None), 0)
    return int(found[0] if isinstance(found, list) else found)


class LowRank(NamedTuple):
    """The updates left @ right of one layer by all tasks: left [out, K], right [K, in].

    `whose` [T, K] has a 1 where a direction is of a task.
    """

    left: Tensor
    right: Tensor
    whose: Tensor


def updates_of(
    items: Sequence[Item], tasks: Sequence[int], layers: Mapping[str, Any]
) -> dict[str, LowRank] | None:
    """Weight -> update, by the factors of these tasks; None unless they change no other tensor.

    Args:
        layers: the linear layers, by the names of their weights.
    """
    found = dict[str, LowRank]()
    for item in (i for i in items if any(part.factors != () for part in i.inputs)):
        if not item.factored or item.name not in layers:
            return None
        own, weight = [item.updates()[k] for k in tasks], layers[item.name].weight
        left, right = torch.cat([u.left for u in own], 1), torch.cat([u.right for u in own])
        if not isinstance(layers[item.name], nn.Linear):  # Conv1D: [in, out]
            left, right = right.T, left.T
        ranks = torch.tensor([each.rank for each in own])
        whose = torch.eye(len(own)).repeat_interleave(ranks, 1)
        found[item.name] = LowRank(*(each.to(weight.detach()) for each in (left, right, whose)))
    return found


class Router(Routing):
    """A model that looks at each prompt, and answers with the weights of its task; see `attach`.

    Attributes:
        gate: the scores.
        use: changes the model's weights to those of a task, or of the base.
        updates: layer -> its update; then no weights change.
        threshold: how far a task's score must be above all others, and above 0.
        explain: whether to print scores.
        scores: task -> score, for each of the last prompts.
        chosen: the task of each of the last prompts; None: the base.
    """

    def __init__(
        self,
        gate: Gate,
        use: Callable[[str | None], object],
        updates: Mapping[str, LowRank] | None,
    ) -> None:
        super().__init__(gate.model)
        self.gate, self.use, self.updates = gate, use, updates
        self.threshold, self.explain = THRESHOLD, False
        self.scores, self.chosen = list[dict[str, float]](), list[str | None]()
        self._shares: Tensor | None = None  # 1 for the task of a sequence, [sequences, T]

    def route(self) -> nn.Module:
        super().route()
        if hasattr(self.model, "generate"):
            self._replace(self.model, "generate", self._call)
        for name, update in (self.updates or {}).items():
            layer = self.model.get_submodule(name.removesuffix(".weight"))
            self._replace(layer, "forward", partial(self._linear, update))
        return self.model

    def choose(self, **given: Any) -> list[str | None]:
        """The task of each prompt, by the arguments of a call."""
        main = getattr(self.model, "main_input_name", "")  # `generate` calls it `inputs`
        given = {main if key == "inputs" else key: value for key, value in given.items()}
        with self._inside():
            scores = self.gate.scores(given)
        tasks, chosen = self.gate.tasks, list[str | None]()
        self.scores = [dict(zip(tasks, row, strict=True)) for row in scores.tolist()]
        for own in self.scores:
            best, *others = sorted(own, key=own.__getitem__, reverse=True)
            ahead = own[best] - max([0.0, *(own[task] for task in others)])
            chosen.append(best if ahead > self.threshold else None)
            if self.explain:
                told = ", ".join(f"{task} {own[task]:.2f}" for task in (best, *others))
                print(f"{chosen[-1] or 'the base'}: {told}", file=sys.stderr)
        self.chosen = chosen
        return chosen

    def _begin(self, given: Mapping[str, Any]) -> list[str | None]:
        return self.choose(**given)

    def _run(
        self, call: Callable[..., Any], args: Any, kwargs: Any, chosen: list[str | None], new: bool
    ) -> Any:
        if self.updates is not None:
            tasks = self.gate.tasks
            self._shares = torch.tensor([[float(t == each) for t in tasks] for each in chosen])
            try:
                return call(*args, **kwargs)
            finally:
                self._shares = None
        groups = defaultdict[str | None, list[int]](list)
        for row, task in enumerate(chosen):
            groups[task].append(row)
        if len(groups) == 1:
            self.use(chosen[0])
            return call(*args, **kwargs)
        if any(is_cache(x) and not isinstance(x, Apart) for x in (*args, *kwargs.values())):
            raise UserError("prompts of several tasks share no cache: leave `past_key_values` out")
        outputs = []
        for number, (task, rows) in enumerate(groups.items()):
            self.use(task)
            own = partial(part_of, len(chosen), rows, number)
            given, named = (tree_map(own, each, is_leaf=is_cache) for each in (args, kwargs))
            outputs.append(call(*given, **named))
        order = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
        config = getattr(self.model, "generation_config", None)
        ends = (getattr(config, key, None) for key in ("pad_token_id", "eos_token_id"))
        filler = token_of(kwargs.get("pad_token_id"), *ends)
        return tree_map(partial(joined, order, filler), *outputs, is_leaf=is_cache)

    def _linear(self, update: LowRank, old: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """W x + sum_m r_m left_m right_m x, r of the sequence."""
        y = old(x)
        if self._shares is None:
            return y
        left, right, whose = (each.to(x) for each in update)
        r = self._shares.to(x) @ whose
        r = r.repeat_interleave(len(x) // len(r), 0)  # of beams; of tokens in two dimensions
        return y + (x @ right.T * (r if x.dim() == 2 else r[:, None])) @ left.T


class Apart:
    """The caches of the groups of a batch with several tasks."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def get_seq_length(self) -> int:
        return int(self.parts[0].get_seq_length())


def part_of(size: int, rows: list[int], number: int, value: Any) -> Any:
    """The part of an argument for the sequences `rows` of `size`, the group `number`."""
    if isinstance(value, Apart):
        return value.parts[number]
    batched = isinstance(value, Tensor) and value.dim() > 1 and len(value) == size
    return value[rows] if batched else value


def joined(order: Tensor, filler: int, *parts: Any) -> Any:
    """The outputs of groups as one; shorter texts end with `filler`, as those of `generate`."""
    if is_cache(parts[0]):
        return Apart(parts)
    if not isinstance(parts[0], Tensor):
        return parts[0]
    if parts[0].dim() == 0:
        raise UserError("prompts of several tasks have no common loss: leave `labels` out")
    if parts[0].dim() == 2:
        longest = max(part.shape[1] for part in parts)
        parts = tuple(pad(part, (0, longest - part.shape[1]), value=filler) for part in parts)
    rows = torch.cat(parts).unflatten(0, (len(order), -1))
    return rows[order.to(rows.device)].flatten(0, 1)
