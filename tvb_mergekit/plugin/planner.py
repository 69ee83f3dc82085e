"""mergekit's planner: where each tensor of the merged model comes from, and its parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from mergekit.architecture import get_architecture_info
from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration, OutputSliceDefinition
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from pydantic import PrivateAttr

from tvb_mergekit.plugin.names import replaced


def planned_by_mergekit(config: MergeConfiguration, options: MergeOptions) -> MergePlanner:
    """mergekit's planner, with its task for each tensor in `_tensors`.

    Args:
        config: used up, since mergekit rewrites it.
    """
    from mergekit.merge import _model_out_config  # not above: our hook on it needs this module

    LoaderCache().setup(options=options)
    architecture = get_architecture_info(config, options)
    out = _model_out_config(config, architecture, trust_remote_code=options.trust_remote_code)
    planner = _Planner(config, architecture, options, out)
    with replaced("mergekit.plan:ConfigReader", lambda _original: _Reader):
        planner._plan()  # its plan_in_memory fails for all methods of mergekit's own
    return planner


class _Planner(MergePlanner):
    """mergekit's planner, except that it keeps the configurations of all models: mergekit's own
    cache holds 128."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        architecture = MergePlanner._model_arch.__wrapped__
        self._model_arch = functools.cache(functools.partial(architecture, self))


class _Reader(ConfigReader):
    """mergekit's reader with the same settings in the same order, except that it finds a model by
    its hash: mergekit's own compares each model with each, for every tensor."""

    _of: dict[ModelReference, list[Any]] = PrivateAttr(default_factory=dict)
    _slice: OutputSliceDefinition | None = PrivateAttr(default=None)

    def parameter_sources(self, model: ModelReference | None = None) -> Iterator[Any]:
        if self.slice_out is not None:
            if self._slice is not self.slice_out:
                self._slice, self._of = self.slice_out, {}
                for source in self.slice_out.sources:
                    self._of.setdefault(source.model, []).append(source.parameters)
            if model is not None:
                yield from self._of.get(model, ())
            yield self.slice_out.parameters
        if self.module is not None:
            yield self.module.parameters
        yield self.config.parameters
