"""lm-eval's model type `tvb`, which the start-up hook registers when lm-eval is imported."""

from __future__ import annotations

import sys
from typing import Any

from lm_eval.models.huggingface import HFLM

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.attach import attach
from tvb_mergekit.store.routing import Routed


class Served(HFLM):
    """lm-eval's model type `hf`, with a task of a store, or the routers of `tvb learn wemoe`.

    Args:
        pretrained: a model of `tvb learn wemoe`, or the base of a store.
        store: a store's folder, for `task`.
    """

    def __init__(
        self, pretrained: str, store: str | None = None, task: str | None = None, **others: Any
    ) -> None:
        super().__init__(pretrained, **others)
        try:
            live = attach(self.model, store or pretrained, base=pretrained if store else None)
            if isinstance(live, Routed):
                live.route()
            else:
                live.use(str(task))
        except UserError as error:  # lm-eval would show a traceback
            sys.exit(f"Error: {error}")
