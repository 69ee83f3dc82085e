"""lm-eval's model type `tvb`: Hugging Face models with routers, or with a task of a store.

    lm_eval run --model tvb --model_args pretrained=./merged --tasks gsm8k
    lm_eval run --model tvb --model_args pretrained=./base,store=./store,task=math --tasks gsm8k

The start-up hook registers the type when lm-eval is imported.
"""

from __future__ import annotations

import sys
from typing import Any

from lm_eval.models.huggingface import HFLM

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.attach import attach
from tvb_mergekit.store.routing import Routed


class Served(HFLM):
    """lm-eval's model type `hf`, changed by `attach`.

    Args:
        pretrained: a model of `tvb learn wemoe`, or the base of a store.
        store: a store's folder.
        task: one of the store's tasks.
        others: arguments of `hf`.

    A mistake ends the process with one line, since lm-eval would show a traceback.
    """

    def __init__(
        self, pretrained: str, store: str | None = None, task: str | None = None, **others: Any
    ) -> None:
        if task is not None and store is None:
            sys.exit("Error: `task` is of a store: give `store` too")
        super().__init__(pretrained, **others)
        try:
            live = attach(self.model, store or pretrained, base=pretrained if store else None)
            if isinstance(live, Routed):
                live.route()
            elif task is None:
                raise UserError(f"`task` is missing; {store} has {', '.join(live.tasks)}")
            else:
                live.use(task)
        except UserError as error:
            sys.exit(f"Error: {error}")
