"""A router that needs no data: the task of a prompt, by the weights alone.

V_ml are the gates of task m (see `gates`), and x the inputs of matrix l in one pass of the base
over the prompt, which ends at the last of these matrices:

    a_ml = mean over the first and the last tokens of ||V_ml x||^2 / ||x||^2
    score_m = mean over l of (log a_ml - mean) / deviation, divided by one number for all tasks,

mean and deviation over texts of no task: plain sentences and random tokens. Their scores have mean
0, and the number gives them deviation 1 (root mean square over tasks). Adapters that began at
random turn little to their task, so each matrix says little, but all err in their own ways.
SMILE (arXiv 2408.10174) has such a gate in each layer for each token. Here a prompt has one vote.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map

from tvb_mergekit.core.gram import Factors
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.routing import Routing, is_cache, is_turned, kept
from tvb_mergekit.tensors.stream import Item

PLAIN = Path(__file__).with_name("plain.txt")  # sentences of no task
TEXTS, LENGTH = 24, 40  # random ones, and the most tokens of each
ENDS = 32  # tokens that count at each end of a prompt: a document between them hides its task
THRESHOLD = 1.0  # deviation of texts of no task
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
        self._rows = dict[str, Tensor]()  # V of all tasks [T, k, inputs], 0 where a task has fewer
        for name in dict.fromkeys(chain(*gates.values())):
            none = next(own[name] for own in gates.values() if name in own)[:0]
            rows = pad_sequence([own.get(name, none) for own in gates.values()], True)
            self._rows[name] = rows.to(model.get_parameter(name).device)
        self._mean, self._deviation = torch.zeros(()), torch.ones(())
        if texts:
            seen = torch.cat([self.shares({"input_ids": text}) for text in texts])
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
        left_out = "labels", "cache", "past_key_values"
        given = {key: x for key, x in given.items() if key in known and key not in left_out}
        given |= {"use_cache": False} if "use_cache" in known else {}

        def look(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x, rows = args[0].float(), self._rows[name]
            x = x if x.dim() == 3 else x[:, None]
            mask = kept(given.get("attention_mask"), x, name).bool()
            later = mask & (mask.cumsum(1) > 1)
            mask = torch.where(later.any(1, True), later, mask)
            place = mask.cumsum(1)
            mask = (mask & ((place <= ENDS) | (place > place[:, -1:] - ENDS)))[..., None]
            a = (x @ rows.flatten(0, 1).T).square().unflatten(2, rows.shape[:2]).sum(3)
            a = a / x.square().sum(2, True).clamp(min=TINY)
            a = (a * mask).sum(1) / mask.sum(1).clamp(min=1)
            held = rows.any(2).any(1)
            seen[name] = torch.where(held, a.clamp(min=TINY).log(), torch.nan).cpu()
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


def updates_of(
    items: Sequence[Item], tasks: Sequence[int], layers: Mapping[str, Any]
) -> dict[str, list[Factors]] | None:
    """Weight -> the update of each of these tasks; None unless they change linear layers alone.

    Args:
        layers: the linear layers, by the names of their weights.
    """
    found = dict[str, list[Factors]]()
    for item in (i for i in items if any(part.factors != () for part in i.inputs)):
        if not item.factored or item.name not in layers:
            return None
        own, like = [item.updates()[k] for k in tasks], layers[item.name].weight.detach()
        if is_turned(layers[item.name]):
            own = [Factors(each.right.T, each.left.T) for each in own]
        found[item.name] = [Factors(each.left.to(like), each.right.to(like)) for each in own]
    return found


class Router(Routing):
    """A model that looks at each prompt, and answers with the weights of its task; see `attach`.

    Attributes:
        gate: the scores.
        use: changes the model's weights to those of a task, or of the base.
        updates: weight of a linear layer -> the update of each task; then no weights change.
        threshold: how far a task's score must be above all others, and above 0.
        explain: whether to print scores.
        scores: task -> score, for each of the last prompts.
        chosen: the task of each of the last prompts; None: the base.
    """

    def __init__(
        self,
        gate: Gate,
        use: Callable[[str | None], object],
        updates: Mapping[str, Sequence[Factors]] | None,
    ) -> None:
        super().__init__(gate.model)
        self.gate, self.use, self.updates = gate, use, updates
        self.threshold, self.explain = THRESHOLD, False
        self.scores, self.chosen = list[dict[str, float]](), list[str | None]()
        self._groups = dict[str | None, list[int]]()  # task -> sequences, during a call

    def route(self) -> nn.Module:
        super().route()
        for name, own in (self.updates or {}).items():
            layer = self.model.get_submodule(name.removesuffix(".weight"))
            self._undo.callback(layer.register_forward_hook(partial(self._add, own)).remove)
        return self.model

    def choose(self, **given: Any) -> list[str | None]:
        """The task of each prompt, by the arguments of a call."""
        main = getattr(self.model, "main_input_name", "")  # `generate` calls it `inputs`
        given = {main if key == "inputs" else key: value for key, value in given.items()}
        with self._inside():
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

    def _answer(self, call: Callable[..., Any], given: dict[str, Any], chosen: Any) -> Any:
        chosen = self.choose(**given) if chosen is None else chosen
        groups = {t: [k for k, each in enumerate(chosen) if each == t] for t in chosen}
        if self.updates is not None or len(groups) == 1:
            self.use(chosen[0] if self.updates is None else None)
            self._groups = groups
            try:
                return call(**given), chosen
            finally:
                self._groups = {}
        if any(map(is_cache, given.values())):
            raise UserError("prompts of several tasks share no cache: leave `past_key_values` out")
        outputs = []
        for task, rows in groups.items():
            self.use(task)
            split = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.dim() > 1}
            own = {k: v[rows] for k, v in split.items() if len(v) == len(chosen)}
            outputs.append(call(**(given | own)))
        order = torch.tensor([*chain(*groups.values())]).argsort()
        config = given.get("generation_config") or getattr(self.model, "generation_config", None)
        ends = (getattr(config, key, None) for key in ("pad_token_id", "eos_token_id"))
        filler = next((x for x in (given.get("pad_token_id"), *ends) if x is not None), 0)
        filler = filler[0] if isinstance(filler, list) else filler
        return tree_map(partial(joined, order, filler), *outputs, is_leaf=is_cache), chosen

    def _add(
        self, own: Sequence[Factors], layer: nn.Module, args: tuple[Tensor, ...], y: Tensor
    ) -> Tensor:
        """W x + left right x, with the update of each sequence's task."""
        if not (size := sum(map(len, self._groups.values()))):
            return y
        # `generate` makes beams of a sequence, and some models have tokens of all in one dimension
        x, found = (each.reshape(size, -1, each.shape[-1]) for each in (args[0], y))
        for task in self._groups.keys() - {None}:
            update, rows = own[self.gate.tasks.index(str(task))], self._groups[task]
            found[rows] += x[rows] @ update.right.T @ update.left.T
        return found.view_as(y)


def joined(order: Tensor, filler: int, *parts: Any) -> Any:
    """The outputs of groups as one; shorter texts end with `filler`, as those of `generate`."""
    if not isinstance(parts[0], Tensor):  # no call goes on with a cache of one group
        return parts[0]
    if parts[0].dim() == 0:
        raise UserError("prompts of several tasks have no common loss: leave `labels` out")
    several = parts[0].dim() > 1
    rows = pad_sequence([*chain(*parts)], True, filler) if several else torch.cat(parts)
    rows = rows.unflatten(0, (len(order), -1))
    return rows[order.to(rows.device)].flatten(0, 1)
