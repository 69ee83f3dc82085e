"""Tasks whose scores depend on variables of the environment, which lm-eval does not keep."""

import os
from typing import Any

from lm_eval.api.task import ConfigurableTask


class RecordedTask(ConfigurableTask):
    """A YAML task; the variables that its key `recorded` names go into the results' metadata."""

    def __init__(self, config: dict[str, Any]) -> None:
        own = ("class", "recorded")
        super().__init__(config={key: value for key, value in config.items() if key not in own})
        settings = {name: os.environ.get(name) or "default" for name in config["recorded"]}
        self.config.metadata = {**(self.config.metadata or {}), **settings}
