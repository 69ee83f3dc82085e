"""The methods in mergekit's registry: names and parameters, for merges of whole models."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from mergekit.merge_methods.base import (
    BasePolicy,
    InputContract,
    MergeMethod,
    MergeMethodSpec,
    OptionalTensorPolicy,
    ParameterScope,
    ParameterSpec,
)

from tvb_mergekit.core.settings import GLOBAL_KEYS, METHODS, VARYING_KEYS, check_value
from tvb_mergekit.errors import MergeRefused


class Parameter(ParameterSpec):
    """A parameter whose complaint names the key, unlike mergekit's own."""

    def validate(self, value: Any) -> Any:
        return None if value is None else check_value(self.name, value)


class BasisMethod(MergeMethod):
    """One of METHODS. mergekit's planner uses its name and its parameters; see `planner`."""

    def __init__(self, name: str) -> None:
        # A global key that is not given has no value: `resolve_settings` applies its default.
        # `plugin.recipe` reads the keys of models: mergekit would compare every two models for
        # each tensor.
        rows = [(key, None) for key in GLOBAL_KEYS.values()]
        rows += [(key, key.default_for(name)) for key in VARYING_KEYS.values()]
        self.spec = MergeMethodSpec(
            name=name,
            parameters=tuple(
                Parameter(key.name, Any, ParameterScope.SHARED, default, key.help)
                for key, default in rows
                if name in key.methods
            ),
            contract=InputContract(base=BasePolicy.REQUIRED, min_inputs=2, min_non_base=1),
            pretty_name=METHODS[name].title,
            reference_url="https://openreview.net/forum?id=zkc7u3mIaE",
            optional_tensor_policy=OptionalTensorPolicy.BASE_OR_SKIP,
        )

    def validate_inputs(
        self, input_ids: Any, base_id: Any = None, *, group_name: Any = None
    ) -> None:
        if group_name is None:  # mergekit-pytorch and merge_state_dicts, before they read a tensor
            self._execute()
        super().validate_inputs(input_ids, base_id, group_name=group_name)

    def _execute(self, *args: Any, **kwargs: Any) -> NoReturn:
        # mergekit calls this for single tensors, each of which would get a basis of its own.
        raise MergeRefused(
            f"{self.spec.name} needs all tensors of the models at once: use mergekit-yaml, or "
            "tvb_mergekit.merge for weight files and state dicts"
        )


def register(registry: ModuleType) -> None:
    """Add the methods to mergekit's registry (again after a reload)."""
    for name in METHODS:
        if name not in registry._METHODS:
            registry.register(BasisMethod(name))
