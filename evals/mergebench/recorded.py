"""Tasks whose scores depend on more than their YAML: on variables of the environment, which lm-eval
does not keep, or on the model's tokenizer."""

import os
from typing import Any

from lm_eval.api.task import ConfigurableTask


class RecordedTask(ConfigurableTask):
    """A YAML task; the variables that its key `recorded` names go into the results' metadata.

    Its key `requires` is a function of the metadata, which holds `--model_args`. It may end the
    program before data are loaded.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        own = ("class", "recorded", "requires")
        if "requires" in config:
            config["requires"](**config.get("metadata", {}))
        super().__init__(config={key: value for key, value in config.items() if key not in own})
        settings = {name: os.environ.get(name) or "default" for name in config["recorded"]}
        self.config.metadata = {**(self.config.metadata or {}), **settings}
