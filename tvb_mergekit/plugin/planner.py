"""The plan of a merge, by mergekit's own planner.

mergekit's planner knows the place of each merged tensor in each model, and resolves `lambda`,
`alpha` and `density` for the tensor. Our passes replace mergekit's own tasks. Models on this disk
are checked before a tensor is read or a file downloaded.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import glob
from typing import Any

from huggingface_hub.constants import HF_HUB_OFFLINE
from mergekit.architecture import WeightInfo, get_architecture_info
from mergekit.architecture.json_definitions import _load_architecture_json
from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.merge import _model_out_config
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner

from tvb_mergekit.errors import UserError, hint, one_line, refusing
from tvb_mergekit.hub import may_be_on_the_hub, snapshot
from tvb_mergekit.names import LAYER, tied_uses
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.plan import MergedTensors, Plan
from tvb_mergekit.plugin.recipe import Recipe, identity_of
from tvb_mergekit.plugin.sources import give_loaders, stored_names
from tvb_mergekit.progress import bars
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.checkpoint import TOKENIZER_FILES, Checkpoint, tie
from tvb_mergekit.tensors.merging import settings_over
from tvb_mergekit.tensors.stream import Engine, Weights, device_of
from tvb_mergekit.tensors.taskset import ALIKE, EXCLUDED, check_words, doubts

LOG = logging.getLogger(__name__)
# mergekit's definition of an architecture without any tensor: all are planned by name.
UNKNOWN = """{"model_type": "", "architectures": [], "pre_weights": [], "post_weights": [],
"layer_templates": {"weights": []}, "override_num_layers": 0}"""


@contextmanager
def planned(
    document: Document, options: MergeOptions, zeros: Collection[str] = ()
) -> Iterator[Plan]:
    """The plan of a merge, which may be run within the context.

    The document is used up: mergekit rewrites its configuration.

    Args:
        zeros: Tensors that take part although no adapter changes them.

    Raise UserError or MergeRefused for a reason that stops the merge before its first pass.
    """
    LoaderCache.loaders.clear()  # what earlier merges of this process opened
    try:
        yield _plan(document, options, zeros)
    finally:
        LoaderCache.loaders.clear()


def plan_only(document: Document, options: MergeOptions, zeros: Collection[str] = ()) -> Plan:
    """The plan of a merge that nothing will run; see `planned`."""
    with planned(document, options, zeros=zeros) as plan:
        return plan


@refusing(planning=True)
def _plan(document: Document, options: MergeOptions, zeros: Collection[str]) -> Plan:
    engine = Engine(device_of(options.device or "cpu"), bars(options.quiet))
    held, planner = ranks.first(lambda: _opened(document, options))
    recipe = document.recipe
    settings = settings_over(held[recipe.base], recipe.settings)  # with the defaults of this base
    recipe = replace(recipe, settings=settings)
    task = planner._tokenizer_task
    # mergekit orders new tokens by a set, whose order differs between processes.
    tokenizer = None if task is None else ranks.led(lambda: _tokenizer(task, recipe))
    saved, dtype = document.config.out_dtype, document.config.dtype
    tensors = MergedTensors(recipe, held, saved or dtype, saved, zeros=zeros)
    tensors.fill(planner._tensors, tokenizer, options, planner.extra)
    for weights in held.values():
        if isinstance(weights, Adapter):
            weights.check_claimed()
    models, names = [*held.values()], [i.name for i in tensors.items if i.tunables is not None]
    told = doubts(models, recipe.tasks, options.trust_remote_code)
    for line in told + recipe.idle_patterns(names, EXCLUDED in tensors.left_out.values()):
        LOG.warning("%s", line)
    if tokenizer is None:
        check_words(models, recipe.tasks, names)
    own = planner.arch_info, planner.out_model_config
    return Plan(recipe, options, engine, tensors, tokenizer, *own)


def _tokenizer(task: Any, recipe: Recipe) -> Any:
    """mergekit's `TokenizerInfo`, whose permutations have a row, or -1, for each token and model.

    Models without tokenizer files have the base's rows: for some architectures transformers makes
    up a tokenizer of a few tokens instead of failing.
    """
    found = task.execute()
    for rows in found.permutations.values():  # mergekit leaves out tokens beyond a model's rows
        rows |= {n: -1 for n in found.tokenizer.get_vocab().values() if n not in rows}
    for model in recipe.models:
        path = model.model.path
        if os.path.isdir(path) and not _has_tokenizer(path):
            found.permutations[model] = found.permutations[recipe.base]
    return found


def _opened(
    document: Document, options: MergeOptions
) -> tuple[dict[ModelReference, Weights], _Planner]:
    """The open models, and mergekit's plan; local files are checked before any download."""
    recipe, opened = document.recipe, dict[object, Checkpoint]()

    def weights(model: ModelReference) -> Checkpoint:  # of an adapter those of its model
        bare = ModelReference(model=model.model)
        if (key := identity_of(bare)) not in opened:
            opened[key] = Checkpoint.open(_folder(bare, options))
        return opened[key]

    for model in recipe.every:
        check_configuration(model, options)
        if recipe.bases is None and os.path.isdir(model.model.path):
            weights(model)
    check_tokenizer_source(document.config)
    base = weights(recipe.base)
    held: dict[ModelReference, Weights] = {recipe.base: base}
    if recipe.bases is not None:
        recipe.bases.check_base(base, str(recipe.base))
        vectors = recipe.bases.sources
        held |= {m: vectors[k] for m, k in zip(recipe.models, recipe.order, strict=True)}
    else:
        for model in recipe.models:
            held[model] = under = weights(model)
            if model.lora is not None:
                held[model] = Adapter(_adapter_folder(model, options), base, under)
    tie([*held.values()])
    give_loaders(held)  # mergekit's planner looks at the names of tensors
    planner = planned_by_mergekit(document.config, base, options)
    tie([*held.values()], [weight.name for weight, _ in planner._tensors if not weight.optional])
    give_loaders(held)
    return held, planner


def _folder(model: ModelReference, options: MergeOptions) -> str:
    """A model's folder. mergekit downloads no chat template, and asks the Hub for a list of files
    even offline."""
    path, revision, cache = model.model.path, model.model.revision, options.transformers_cache
    if os.path.exists(path):
        return str(path)
    found = snapshot(path, revision, cache)
    if HF_HUB_OFFLINE or glob(f"{found}/*.safetensors"):
        return found
    return str(model.local_path(cache))


def _adapter_folder(model: ModelReference, options: MergeOptions) -> str:
    try:
        return _folder(ModelReference(model=model.lora), options)
    except (OSError, ValueError) as error:
        plus = "mergekit reads `+` in a model as MODEL+ADAPTER"
        raise UserError(f"adapter {model.lora}: {plus}: {one_line(error)}") from error


def planned_by_mergekit(
    config: MergeConfiguration, base: Weights, options: MergeOptions
) -> _Planner:
    """mergekit's planner, with its task for each tensor of the base in `_tensors`.

    Args:
        config: used up, since mergekit rewrites it.
    """
    LoaderCache().setup(options=options)
    try:
        architecture = get_architecture_info(config, options)
    except (AssertionError, AttributeError, NotImplementedError, TypeError):
        # mergekit's search reads no adapter's model, needs `architectures` in config.json, and asks
        # classes for embeddings that CLIP, wav2vec 2 or a model's own code may not name
        if not config.models:
            raise
        architecture = _load_architecture_json(UNKNOWN)
    except RuntimeError as error:  # its own
        every, trust = config.referenced_models(), options.trust_remote_code
        kinds = {model: model.config(trust_remote_code=trust).architectures for model in every}
        known = kinds[config.base_model]
        for model in (model for model in every if kinds[model] != known):
            told = f"{model} is {kinds[model]}, the base {config.base_model} {known}: {ALIKE}"
            raise UserError(
                f"`architectures` in config.json of {told}, or --allow-crimes"
            ) from error
        raise
    if config.modules and config.modules.keys() != architecture.modules.keys():
        given, known = ", ".join(config.modules), ", ".join(architecture.modules)
        raise UserError(f"`modules` are {given}, but a whole model has {known}: list these")
    sliced = config.slices or any(each.slices for each in (config.modules or {}).values())
    out = _model_out_config(config, architecture, trust_remote_code=options.trust_remote_code)
    if config.slices:
        given = config.base_model.config(trust_remote_code=options.trust_remote_code)
        _slice_layers(config, given.get_text_config(), out.get_text_config())
    with tempfile.TemporaryDirectory() as folder:  # transformers checks it when it is saved
        try:
            out.save_pretrained(folder)
        except Exception as error:  # of its own kind in each class
            raise UserError(f"the merge's configuration: {one_line(error)}") from error
    planner = _Planner(config, architecture, options, out)
    planner.find_unknown(base, bool(sliced))
    planner._plan()  # its plan_in_memory fails for all methods of mergekit's own
    planner.plan_others()
    return planner


def _slice_layers(config: MergeConfiguration, given: Any, out: Any) -> None:
    """Let the number of layers, and lists with an entry for each, follow the recipe's slices.

    mergekit sets the number alone, and not for models without a definition.

    Args:
        given: The base's configuration.
        out: The merge's.
    """
    listed = (source for each in config.slices or () for source in each.sources)
    ranges = [source.layer_range for source in listed if source.model == config.base_model]
    order, count = [n for each in ranges for n in range(*each)], given.num_hidden_layers
    for key, value in given.to_dict().items():
        if isinstance(value, list) and len(value) == count and "layer" in key:
            setattr(out, key, [value[layer] for layer in order])
    out.num_hidden_layers = len(order)


class _Planner(MergePlanner):
    """mergekit's planner, which also plans what its definition of the architecture lacks.

    Attributes:
        of_layers: Module -> beginnings and endings of names in its layers, around the number.
        others: Other names that the definition lacks -> their place in a gradient, from 0 to 1.
        seen: The tensors of the merge that are planned.
        extra: Tensors that base and definition lack -> a model that has them.
    """

    def find_unknown(self, base: Weights, sliced: bool) -> None:
        """Find the tensors of the base that the definition lacks; no slice may hold one."""
        model = self._model_arch(self.config.base_model)
        known = stored_names(base, model.config.model_type, model.all_weights())
        modules = {name: model.get_module(name) for name in self.arch_info.modules}
        owners = {  # beginning of the names in layers -> the module and its number of layers
            found[2]: (name, module.num_layers())
            for name, module in modules.items()
            for weight in (module.layer_weights(0) if module.num_layers() else ())
            if (found := LAYER.match(weight.name))
        }
        layers = {name: found for name in base.tensors if (found := LAYER.match(name))}
        last: dict[str, int] = {}
        for found in layers.values():
            last[found[2]] = max(int(found[3]), last.get(found[2], 1))
        self.of_layers: dict[str, dict[tuple[str, str], None]] = {name: {} for name in modules}
        self.others: dict[str, float] = {}
        for name in (name for name in base.tensors if name not in known):
            if (place := layers.get(name)) is None:
                self.others[name] = 0.0
                continue
            stem, number = place[2], int(place[3])
            owner, count = owners.get(stem, ("", 0))
            if number < count:
                self.of_layers[owner][stem, name[place.end() :]] = None
            elif not sliced:
                self.others[name] = number / last[stem]
            elif not owner:
                raise UserError(
                    f"`slices`: mergekit does not know the layer of tensor `{name}`; list the "
                    "models under `models`"
                )
        self.seen, self.extra = set[str](), dict[str, str]()
        for reference in self.config.referenced_models():
            weights = LoaderCache().get(reference).checkpoint
            if extra := weights.tensors.keys() - base.tensors.keys():
                own = self._model_arch(reference)
                read = stored_names(weights, own.config.model_type, own.all_weights())
                self.extra |= dict.fromkeys(sorted(extra - read), str(reference))

    def plan_tensor(
        self, weight: WeightInfo, weights_in: Any, models: Any, cfg_reader: ConfigReader
    ) -> None:
        """As mergekit's, whose own search for optional tensors with aliases fails (BERT), and
        which plans a tensor of two modules twice (Qwen2.5-VL)."""
        if weight.name in self.seen:
            return
        self.seen.add(weight.name)
        stored = [LoaderCache().get(model).index.tensor_paths for model in models]
        pairs = zip(weights_in, stored, strict=True)
        if not weight.optional or any(
            {each.name, *(each.aliases or ())} & names.keys() for each, names in pairs
        ):
            needed = weight.model_copy(update={"optional": False})
            super().plan_tensor(needed, weights_in, models, cfg_reader)

    def plan_layer(
        self, sources: Any, layer_offset: int, t: float, cfg_reader: ConfigReader, module_name: str
    ) -> None:
        """As mergekit's, with the tensors of the layer that its definition lacks."""
        layer = self._current_module_layers
        super().plan_layer(sources, layer_offset, t, cfg_reader, module_name)
        models = [source.model for source in sources]
        here = [source.layer_range[0] + layer_offset for source in sources]
        for stem, ending in self.of_layers[module_name]:
            inputs = [WeightInfo(name=f"{stem}.{number}.{ending}") for number in here]
            out = WeightInfo(name=f"{stem}.{layer}.{ending}")
            self.plan_tensor(out, inputs, models, cfg_reader.with_t(t))

    def plan_others(self) -> None:
        """Plan the tensors outside the layers of modules by their names in the base."""
        module = next(iter(self.config.modules.values()))
        whole = module.slices[0]
        reader = ConfigReader(config=self.config, t=0, module=module).for_out_slice(whole)
        models = [source.model for source in whole.sources]
        over_tokens = tied_uses(self.others)
        for name, t in self.others.items():
            weight = WeightInfo(name=name, vocabulary_axis=0 if name in over_tokens else None)
            self.plan_tensor(weight, [weight] * len(models), models, reader.with_t(t))


def check_configuration(model: ModelReference, options: MergeOptions) -> None:
    """Raise UserError if a model's folder or configuration is missing, or its tensors are codes."""
    path = model.model.path
    if not os.path.isdir(path) and not may_be_on_the_hub(path):
        raise UserError(
            f"model {path}: no such folder (from {os.getcwd()}); recipes expand neither `~` nor `$`"
        )
    try:
        config = model.config(trust_remote_code=options.trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            f"model {path} has no configuration to read (an adapter goes as BASE+ADAPTER): "
            f"{one_line(error)}"
        ) from error
    if scheme := getattr(config, "quantization_config", None):
        kind = scheme.get("quant_method") if isinstance(scheme, dict) else scheme
        raise UserError(
            f"model {path} is stored quantized ({kind}): its tensors are codes, not weights; take "
            "an unquantized checkpoint"
        )


def check_tokenizer_source(config: MergeConfiguration) -> None:
    """Raise UserError if a folder of `tokenizer_source` has no tokenizer.

    For some architectures transformers would make one up.
    """
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    models = config.referenced_models() if source == "union" else [source] if source else []
    for model in [config.base_model if model == "base" else model for model in models]:
        path, found = model.model.path, model in config.referenced_models()
        near = hint(path, ("base", "union")) if path.isalpha() else ""
        if not (found or os.path.isdir(path)) and (near or not may_be_on_the_hub(path)):
            raise UserError(f"`tokenizer_source` is {source}{near}: no such folder, no model here")
        if os.path.isdir(path) and not _has_tokenizer(path):
            raise UserError(
                f"`tokenizer_source` is {source}: model {path} has no tokenizer files "
                "(tokenizer.json ...); use `base`, or copy them there if it is in no store"
            )


def _has_tokenizer(path: str) -> bool:
    return any(os.path.isfile(os.path.join(path, name)) for name in TOKENIZER_FILES)
