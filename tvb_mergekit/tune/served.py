"""lm-eval's model type `tvb`, which the start-up hook registers when lm-eval is imported."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.attach import Live, attach


class Served(HFLM):
    """lm-eval's model type `hf`, with tasks of a store, or the routers of `tvb learn wemoe`.

    Args:
        pretrained, base: a model of `tvb learn wemoe`, or the base of a store; either name.
        store: a store's folder, for `task` or `route`.
        route: whether each context chooses its task by the weights.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        store: str | None = None,
        task: str | None = None,
        base: str | None = None,
        route: bool = False,
        **others: Any,
    ) -> None:
        own = base or pretrained
        super().__init__(own, **others)
        self.live: Live | None = None  # if contexts choose
        try:
            live = attach(self.model, store or str(own), base=own if store else None)
            if not isinstance(live, Live) or route:
                live.route()
                self.live = live if isinstance(live, Live) else None
            else:
                live.use(str(task))
        except UserError as error:  # lm-eval would show a traceback
            sys.exit(f"Error: {error}")

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **others: Any) -> Any:
        contexts = [given if len(given) > 1 else given + said for _, given, said in requests]
        return self._by_task(super()._loglikelihood_tokens, contexts, requests, *args, **others)

    def generate_until(self, requests: Any, *args: Any, **others: Any) -> Any:
        contexts = [self.tok_encode(request.args[0]) for request in requests if self.live]
        return self._by_task(super().generate_until, contexts, requests, *args, **others)

    def _by_task(
        self,
        answer: Callable[..., Sequence[Any]],
        contexts: Sequence[Sequence[int]],
        requests: Sequence[Any],
        *args: Any,
        **others: Any,
    ) -> Sequence[Any]:
        """The answers to requests; the weights change once for each task."""
        if (live := self.live) is None:
            return answer(requests, *args, **others)
        live.reset()

        @cache  # choices of one question have one context
        def choose(*tokens: int) -> str | None:
            return live.choose(input_ids=torch.tensor([tokens], device=self.device))[0]

        places, found = defaultdict[str | None, list[int]](list), dict[int, Any]()
        for place, context in enumerate(contexts):
            places[choose(*context)].append(place)
        for task, own in places.items():
            live.use({task: 1.0} if task else {})
            found |= zip(own, answer([requests[k] for k in own], *args, **others), strict=True)
        return [found[place] for place in range(len(requests))]
