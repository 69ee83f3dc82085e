"""Tasks that lm-eval scores by itself, with a metric `score` that groups can average.

A YAML task of another metric name would have to compute it again in `process_results`. This class
asks lm-eval for the value instead.
"""

from typing import Any

from lm_eval.api.task import ConfigurableTask


class HeadlineTask(ConfigurableTask):
    """A YAML task; its key `headline` names the metric that is also reported as `score`."""

    def __init__(self, config: dict[str, Any]) -> None:
        own = ("class", "headline")
        self.headline: str = config["headline"]
        super().__init__(config={key: value for key, value in config.items() if key not in own})
        for table in (self._aggregation_list, self._higher_is_better):
            table["score"] = table[self.headline]

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        found: dict[str, Any] = super().process_results(doc, results)
        if self.headline not in found:  # --predict_only measures nothing
            return found
        return {"score": found[self.headline], **found}
