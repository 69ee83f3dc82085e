"""Localize-and-Stitch, AdaMerging and aTLAS: masks or coefficients of the bases, by gradients."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn import kept
from tvb_mergekit.learn.batches import (
    Split,
    amount,
    drawn,
    entropy,
    held_out,
    response_loss,
    shuffled,
)
from tvb_mergekit.learn.descent import Descent, History, Schedule
from tvb_mergekit.learn.merging import ByCoefficients, ByMasks, base_names, bases_of, mixtures_of
from tvb_mergekit.learn.models import load_model
from tvb_mergekit.learn.moving import LAYER, PER, Coefficients, Mask, Moving, Rows
from tvb_mergekit.learn.running import Costs, Request, Work
from tvb_mergekit.plugin.inputs import dense_of
from tvb_mergekit.plugin.plan import Learned, Plan
from tvb_mergekit.progress import bars
from tvb_mergekit.store.facts import FOLDER
from tvb_mergekit.store.sparse import sparse_store
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.sparse import DTYPES, write_sparse

LOG = logging.getLogger(__name__)
COEFFICIENTS = "coefficients.safetensors"
RECIPE = "learned.yml"  # in basis/ of a merged model
STATE = "state-"  # begins the name of a file in OUT.partial, which ends as that which is learned

SCHEDULES = {
    "localize": Schedule(epochs=10, rate=3.0, batch=8, mask=True),
    "adamerging": Schedule(epochs=10, rate=0.001, batch=16),
    "atlas": Schedule(epochs=10, rate=0.1, batch=16, decay=0.1, clip=1.0, cosine=True),
}


class Descents(Work):
    """What is learned by gradients, of a model that begins as the base's."""

    folder = "learned"

    def __init__(self, request: Request, plan: Plan) -> None:
        super().__init__(request, plan)
        given = {
            "epochs": request.epochs,
            "rate": request.learning_rate,
            "batch": request.batch_size,
            "patience": request.patience,
        }
        changes: Any = {key: value for key, value in given.items() if value is not None}
        self.schedule = replace(SCHEDULES[request.method], **changes)
        self.histories: list[History] = []
        self.told: dict[str, Any] = {}
        every = self.models.named(self.models.empty)
        first = {id(parameter): name for name, parameter in reversed(every.items())}
        if twice := [name for name, p in every.items() if first[id(p)] != name]:
            other = first[id(every[twice[0]])]
            raise UserError(
                f"tensors `{other}` and `{twice[0]}` are one in the base's model, and two in "
                f"others: they cannot be learned apart; set `exclude` to one of them"
            )

    @property
    def localizes(self) -> bool:
        return self.request.method == "localize"

    def costs(self) -> Costs:
        request, schedule = self.request, self.schedule
        train, _ = self._counts
        rows = Rows.of(self.plan.tasks.names, self.per, request.blocks).count
        model = self.model_bytes
        numel = sum(item.numel for item in self.plan.tasks.items)
        largest = max(item.numel for item in self.plan.tasks.items)
        bases = 1 if self.localizes else self.most_bases
        memory = 4 * bases * numel
        if self.files:
            memory += 2 * model  # theta and theta_0
        if self.localizes:  # S, its gradient, the best S, what of it is compared, and the masks
            memory += 20 * numel
        else:  # coefficients, their gradients, moments and best, and where they begin
            memory += 32 * rows * bases
        memory += 24 * largest  # a gradient, theta as it is made, and the places of a mask
        disk = 0
        if self.localizes:  # counts and places, and of a state S and the best, while it is replaced
            size = 2 / 256 + request.density * (1 + self._dtype.itemsize)
            disk = int(self.most_bases * size * numel) + 16 * numel * bool(self.files)
        if request.source is not None:
            disk = 0
        activations: int | None = 0
        if self.files:
            activations = self.models.activations(
                min(schedule.batch, train), self.longest, checkpointing=request.checkpointing
            )
        return Costs(
            self._forward,
            self._runs * schedule.epochs * train,
            memory if request.source is None else 0,
            activations,
            disk,
        )

    @property
    def _runs(self) -> int:
        """How many descents there are."""
        return self.most_bases if self.localizes else 1

    @property
    def _counts(self) -> tuple[int, int]:
        """Examples of an epoch of one descent, and of what is held out of it."""
        used = [some for some, _ in self.examples_used.values()]
        if not used:
            return 0, 0
        held = [held_out(some, self.request.held_out) for some in used]
        train = [some - apart for some, apart in zip(used, held, strict=True)]
        factor = len(used) / self.most_bases if self.localizes else len(used)
        return amount(factor, train), amount(factor, held) if any(held) else 0

    @property
    def _forward(self) -> int:
        """Passes, if nothing ends them early."""
        train, held = self._counts
        last = held or min(self.schedule.batch, train)
        return self._runs * (self.schedule.epochs * (train + held) + last)

    @property
    def outputs(self) -> list[Path]:
        """Where what is learned lies: of each basis, or in one file."""
        if not self.localizes:
            return [self.place / COEFFICIENTS]
        count = bases_of(self.plan).shape[1]
        return [self.place / f"basis-{number:03d}.safetensors" for number in range(count)]

    def learn(self) -> Learned:
        request = self.request
        if request.source is not None:
            self._check_known()
        elif self.localizes:
            self._masks()
        else:
            self._coefficients()
        if self.localizes:
            return ByMasks(request.method, self.outputs, self.write)
        held, told = load_file(self.outputs[0])["coefficients"], self.told
        rows = Rows.of(self.plan.tasks.names, told["per"], told["blocks"])
        if rows.titles != told["rows"]:
            raise UserError(f"{self.outputs[0]}: coefficients of other tensors than this recipe's")
        return ByCoefficients(request.method, held, rows, self.write)

    def _check_known(self) -> None:
        """Raise UserError where what is in --from was learned of other bases."""
        for file in self.outputs:
            told = kept.told_in(file, kept.LEARNED)
            if told is None:
                raise UserError(f"{file}: not what {self.request.method} has learned; learn anew")
            bases, found = self._bases_told(), told["bases"]
            same = found | {"encoder": None} == bases | {"encoder": None}
            one, other = np.array(found["encoder"]), np.array(bases["encoder"])
            same &= one.shape == other.shape
            if not same or not np.allclose(one, other, 1e-5, 1e-9):
                raise UserError(
                    f"{file}: learned of other bases than this recipe's; take the recipe or store "
                    "of that run, or learn anew"
                )
            self.histories.append(History(**told["history"]))
            self.told = told

    def _bases_told(self) -> dict[str, Any]:
        """What tells the bases from others."""
        plan = self.plan
        assert plan.basis is not None
        tensors = json.dumps([[item.name, list(item.shape)] for item in plan.tasks.items])
        return {
            "fingerprints": list(plan.tasks.fingerprints.values()),
            "encoder": bases_of(plan).tolist(),
            "scale": plan.basis.scale if self.localizes else None,
            "tensors": hashlib.sha256(tensors.encode()).hexdigest(),
        }

    def _wanted(self) -> dict[str, Any]:
        """What a file or a state must be of, as JSON has it."""
        request = self.request
        found = {
            "bases": self._bases_told(),
            "data": [[file.task, file.sha256] for file in self.files],
            "method": request.method,
            "mixture": request.mixture,
            "seed": request.seed,
            "subsample": request.subsample,
            "held_out": request.held_out,
            "precision": request.precision,
            "schedule": asdict(self.schedule),
        }
        if self.localizes:
            names = ("density", "penalty", "dataless")
            own = {name: getattr(request, name) for name in names}
            return {**found, **own, "dtype": str(self._dtype)}
        own = {"per": self.per, "blocks": request.blocks, "nonnegative": request.nonnegative}
        start = {"start": self._start().tolist()} if request.method == "adamerging" else {}
        return {**found, **own, **start}

    @property
    def per(self) -> PER:
        """For what each basis has a coefficient."""
        return "layer" if self.request.method == "adamerging" else "tensor"

    def _model(self) -> tuple[nn.Module, dict[str, nn.Parameter], dict[str, Tensor]]:
        """The base's model, its parameters that are moved, and theta_0 of each, flattened."""
        trust = self.request.options.trust_remote_code
        model = load_model(self.models.base_folder, self.device, trust)
        if self.request.checkpointing:
            layers = [
                each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)
            ]
            if not layers:
                raise UserError("--checkpointing: this model's code has no layers for it")
            for layer in layers:  # not transformers' way, which works in training mode alone
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        parameters = self.models.named(model)
        base = {name: p.detach().clone().view(-1) for name, p in parameters.items()}
        return model, parameters, base

    def _splits(self) -> list[Split]:
        """Of each task, what is learned from and what is held out."""
        request = self.request
        return [
            Split.of(examples, request.held_out, f"{request.seed} {task}")
            for task, examples in self.examples.items()
        ]

    def _descent(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], moving: Moving, tell: Any
    ) -> Descent:
        loss = entropy if self.unlabeled else response_loss
        return Descent(model, parameters, moving, loss, self.schedule, self.dtype, tell)

    def _bar(self) -> Any:
        return bars(self.request.options.quiet)(self.request.method, self._forward, "example")

    def _is_there(self, file: Path, wanted: Mapping[str, Any]) -> bool:
        """Whether an interrupted run has finished a file."""
        if not file.is_file():
            return False
        kept.check_same(file, kept.LEARNED, wanted)
        told = kept.told_in(file, kept.LEARNED)
        assert told is not None
        LOG.warning("--resume: %s is there", file.stem)
        self._remember(History(**told["history"]), told)
        return True

    def _state(self, file: Path) -> Path:
        """What an interrupted run goes on from, of the descent whose end is a file."""
        return self.request.partial / f"{STATE}{file.name}"

    @property
    def unfinished(self) -> list[Path]:
        return [*self.outputs, *map(self._state, self.outputs)]

    def _coefficients(self) -> None:
        """Learn coefficients into their file."""
        request, wanted, file = self.request, self._wanted(), self.outputs[0]
        if self._is_there(file, wanted):
            return
        model, parameters, base = self._model()
        bases = self.models.stacked(bases_of(self.plan))
        rows = Rows.of(self.plan.tasks.names, self.per, request.blocks)
        moving = Coefficients(base, bases, rows, self._start(), request.nonnegative)
        splits, seed = self._splits(), request.seed
        train = [split.train for split in splits]
        held = [example for split in splits for example in split.held]
        descent = self._descent(model, parameters, moving, self._bar())
        state = self._state(file)
        history = descent.run(lambda epoch: shuffled(train, f"{seed} {epoch}"), held, state, wanted)
        told = {**wanted, "history": asdict(history), "rows": list(rows.titles)}
        told["tasks"] = self._tasks_told()
        self._remember(history, told)
        if ranks.world().leads:
            values = {"coefficients": moving.values.detach()}
            kept.save(file, kept.LEARNED, values, told)
            state.unlink(missing_ok=True)
        ranks.world().share(lambda: None)

    def write(self, folder: Path) -> None:
        super().write(folder)
        recipe = None if self.localizes else self._recipe()
        if recipe is not None:
            text = yaml.safe_dump(recipe, sort_keys=False)
            (folder / FOLDER / RECIPE).write_text(text, encoding="utf-8")

    def _recipe(self) -> dict[str, Any] | None:
        """What mergekit's own `task_arithmetic` makes the same model of, but for rounding; None
        where a recipe cannot say it: blocks, and the vectors of a store."""
        plan, told = self.plan, self.told
        if told["blocks"] > 1 or plan.recipe.vectors is not None:
            return None
        held = load_file(self.outputs[0])["coefficients"].double()
        weights = (held @ bases_of(plan).T).T.tolist()  # of each model, in each row
        rows = Rows.of(plan.tasks.names, told["per"])
        filters = dict[str, int | None]()
        for item in plan.items():
            name = item.name
            layer = LAYER.match(name) if told["per"] == "layer" else None
            row = rows.first[item.counted_as] if item.counted_as else None
            filters[f"{layer[1]}." if layer and row is not None else name] = row
        # The first filter that is found in a name counts: the longest come first.
        order = sorted(filters.items(), key=lambda each: -len(each[0]))
        models = [
            {
                "model": str(model),
                "parameters": {
                    "weight": [
                        *(
                            {"filter": text, "value": 0.0 if row is None else own[row]}
                            for text, row in order
                        ),
                        {"value": 0.0},
                    ]
                },
            }
            for model, own in zip(plan.recipe.models, weights, strict=True)
        ]
        return {
            "merge_method": "task_arithmetic",
            "base_model": str(plan.recipe.base),
            "models": models,
            "parameters": {"normalize": False, "lambda": 1.0},
            "dtype": plan.out_dtype or "float32",
        }

    def _start(self) -> Tensor:
        """Where coefficients begin, [rows, M] float64: aTLAS at 0, and AdaMerging at the recipe's
        addition, of each row with the mean of its tensors' lambda."""
        plan, basis = self.plan, self.plan.basis
        assert basis is not None
        rows = Rows.of(plan.tasks.names, self.per, self.request.blocks)
        columns = bases_of(plan).shape[1]
        if self.request.method != "adamerging":  # a square has no gradient at 0
            start = 0.1 if self.request.nonnegative else 0.0
            return torch.full((rows.count, columns), start).double()
        found: list[list[float]] = [[] for _ in range(rows.count)]
        for item in plan.items():
            if item.tunables is not None:
                found[rows.first[str(item.counted_as)]].append(item.tunables.lambda_)
        lambdas = torch.tensor([sum(some) / len(some) for some in found], dtype=torch.float64)
        counted = torch.ones(columns, dtype=torch.float64)
        if plan.recipe.store is not None:  # whose bases may stand for several tasks
            counted = basis.addition[:columns] / torch.tensor(plan.recipe.weights).double()
        return basis.scale * torch.outer(lambdas, counted)

    def _masks(self) -> None:
        """Learn the mask of each basis, one after the other, into files."""
        request, plan = self.request, self.plan
        matrix, wanted, world = bases_of(plan), self._wanted(), ranks.world()
        assert plan.basis is not None
        matrix = matrix * plan.basis.scale
        weights, splits = torch.zeros(0), list[Split]()
        if not request.dataless:
            weights, splits = mixtures_of(plan, request.mixture), self._splits()
            weights = weights / weights.sum(0)
        if request.store is not None:
            dense_of(request.document, plan)  # refuses what a store cannot hold
        model, parameters, base = self._model() if splits else (nn.Module(), {}, {})
        names = base_names(plan)
        tell, factor = self._bar() if splits else None, len(self.tasks) / matrix.shape[1]

        def one(number: int, file: Path, own: Mapping[str, Any]) -> None:
            bases = self.models.stacked(matrix[:, number : number + 1])
            mask = Mask(base, bases, request.density, penalty=request.penalty)
            history = History()
            if splits:
                column: list[float] = weights[:, number].tolist()
                train, held = [s.train for s in splits], [s.held for s in splits]
                seed = f"{request.seed} {number}"
                descent = self._descent(model, parameters, mask, tell)
                history = descent.run(
                    lambda epoch: drawn(column, train, factor, f"{seed} {epoch}"),
                    drawn(column, held, factor, seed),
                    self._state(file),
                    own,
                )
            told = {**own, "history": asdict(history), "tasks": self._tasks_told()}
            self._remember(history, told)
            if world.leads:
                chosen = mask.kept()
                shapes = {item.name: item.shape for item in plan.tasks.items}
                masked = (
                    (names[name], (bases[name][0] * chosen[name]).view(shapes[name]).cpu())
                    for name in chosen
                )
                write_sparse(file, masked, self._dtype, {kept.LEARNED: kept.described(told)})
                self._state(file).unlink(missing_ok=True)
            world.share(lambda: None)

        for number, file in enumerate(self.outputs):
            own = {**wanted, "basis": number}
            if not self._is_there(file, own):
                one(number, file, own)  # returns before the next basis is read: its memory is free

    @property
    def _dtype(self) -> torch.dtype:
        """Of the values of masked bases: of the output, if it can be."""
        wanted = getattr(torch, self.plan.out_dtype or "float32")
        return wanted if wanted in DTYPES else torch.float32

    def after(self) -> None:
        if self.request.store is not None:
            dense = dense_of(self.request.document, self.plan)
            try:
                sparse_store(dense, self.outputs, self.request.store, **self.plan.means)
            except UserError as error:
                done = self.request.out
                again = f"another --out with --from {done} --store {self.request.store}"
                told = f"{done} is whole, its store is not: {error}; give {again}"
                raise UserError(told) from error

    def _remember(self, history: History, told: dict[str, Any]) -> None:
        self.histories.append(history)
        self.told = told
        self.passes = self.passes[0] + history.forward, self.passes[1] + history.backward

    def _tasks_told(self) -> list[dict[str, Any]]:
        return [
            {
                "task": file.task,
                "file": os.path.abspath(file.path),
                "sha256": file.sha256,
                "lines": len(file.records),
                "examples": file.count(self.share),
            }
            for file in self.files
        ]

    def facts(self) -> dict[str, Any]:
        left = ("bases", "data", "history", "rows", "basis", "method", "dtype")
        told = {key: value for key, value in self.told.items() if key not in left}
        return {**told, "history": [asdict(history) for history in self.histories]}
