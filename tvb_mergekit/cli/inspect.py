"""What the task vectors of a merge or a basis store are like, and what its bases lose.

From `basis.json` (`facts`) and `basis.safetensors` (`tensors`) to numbers, tables on the terminal
and plain JSON. `plot` draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from torch import Tensor

from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.encoders.balanced import completion
from tvb_mergekit.core.encoders.linear import NULL
from tvb_mergekit.errors import UserError, counted, listed, megabytes
from tvb_mergekit.store.bits import Loss, Losses, losses
from tvb_mergekit.store.facts import TENSORS, Facts, StoreFacts, check_shapes
from tvb_mergekit.store.report import WIDE, cosine_sheet, cosines, measures, row_sums
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tables import Sheet, matrix, printable, shortened, show

SHARES = (0.8, 0.9, 0.95, 0.99)  # of the energy, whose smallest M are told
CRITERION = (
    "Negating task i costs an error of at most about lambda_{M+1}(G), the first eigenvalue that M "
    "bases leave out: take the smallest M after which lambda drops off."
)


class Choice(NamedTuple):
    """What M bases can do at best, whatever the encoder.

    `spectral_bound` is the least loss and `next_eigenvalue` lambda_{M+1}(G), 0 for M = T;
    `balanced_energy` is what the best balanced bases retain, None where G is not known.
    """

    num_bases: int
    retained_energy: float
    spectral_bound: float
    next_eigenvalue: float
    balanced_energy: float | None


class Sizes(NamedTuple):
    """Bytes of weights; `saved` is negative where a store takes more than its models."""

    models: int
    store: int
    saved: int
    saved_percent: float | None


@dataclass(frozen=True, eq=False)
class Inspection:
    """The numbers of a merge, a store or a recipe, and what follows from them.

    Args:
        facts: of a merge or a store.
        tensors: float64 on the CPU, as `docs/files.md` describes them. A store that has grown
            online has no `gram` and no `eigenvalues`.
        built: false where the facts tell what a recipe would give.
        codes: what the codes of a quantized store lose.

    Raises:
        UserError: a shape does not fit the facts, a tensor is not finite, or there are neither
            Gram matrix nor `decoder` and `gram_bases`.
    """

    facts: Facts
    tensors: Mapping[str, Tensor]
    built: bool = True
    codes: Losses | None = None

    @classmethod
    def of(cls, bases: Bases) -> Inspection:
        """Of a store."""
        return cls(bases.facts, bases.tensors, codes=losses(bases))

    def __post_init__(self) -> None:
        check_shapes(TENSORS, len(self.tasks), self.num_bases, self.tensors)
        for name, tensor in self.tensors.items():
            if not tensor.isfinite().all():
                raise UserError(f"basis.safetensors: `{name}` holds NaN or infinity")
        if "gram" not in self.tensors and not {"decoder", "gram_bases"} <= set(self.tensors):
            raise UserError(
                "basis.safetensors holds neither `gram` nor `decoder` and `gram_bases`: "
                "is it what a merge or `tvb build` wrote?"
            )

    @property
    def tasks(self) -> list[str]:
        return self.facts.tasks

    @property
    def num_bases(self) -> int:
        return self.facts.num_bases

    @property
    def basis(self) -> str:
        return str(self.facts.parameters.get("basis", "ae"))

    @property
    def keeps_tasks(self) -> bool:
        """Whether a store holds all task vectors, as codes."""
        return isinstance(self.facts, StoreFacts) and self.facts.keeps_tasks

    @property
    def what(self) -> str:
        return "store" if self.facts.store else "merge" if self.built else "recipe"

    @cached_property
    def _gram(self) -> Gram | None:
        return Gram.of(self.tensors["gram"]) if "gram" in self.tensors else None

    @property
    def norms(self) -> list[float | None]:
        """||tau|| of each task, from the Gram matrix where it is known."""
        if self._gram is not None:
            return [math.sqrt(max(value, 0.0)) for value in self._gram.matrix.diagonal().tolist()]
        return [self.facts.norms.get(task) for task in self.tasks]

    @property
    def base_norm(self) -> float | None:
        """||theta_0||; None where a task called `base` has taken its place in `norms`."""
        return None if "base" in self.tasks else self.facts.norms.get("base")

    @cached_property
    def cosines(self) -> tuple[Tensor, str]:
        """Cosines [T, T] float64, and of what: reconstructions where G is not known.

        The diagonal is 1, but rows and columns of a zero vector are 0.
        """
        if self._gram is not None:
            return cosines(self._gram.matrix), "task vectors"
        decoder = self.tensors["decoder"].numpy()
        root = Gram.of(self.tensors["gram_bases"]).root
        # what cancels to a rounding error is zero, and has no direction
        noise = NULL * float(np.linalg.norm(root) * np.linalg.norm(decoder))
        vectors = root @ decoder
        return cosines(vectors.T @ vectors, noise), "reconstructed task vectors"

    @property
    def reconstruction(self) -> Tensor | None:
        """R with T_hat = T R, [T, T] float64; None for rand_proj and before the bases are built."""
        if {"encoder", "decoder"} <= set(self.tensors):
            return self.tensors.get(
                "reconstruction", self.tensors["encoder"] @ self.tensors["decoder"]
            )
        return None

    @cached_property
    def errors(self) -> dict[str, tuple[float, float]]:
        """||tau_hat - tau|| / ||tau|| of each task: at least, at most; equal where known exactly.

        What a store has measured, or else what G and the decoder give. Infinite for a zero task
        vector that is not reconstructed as zero; empty before the bases are built.
        """
        if self.facts.errors:
            return {
                task: (of.at_least or 0.0, math.inf if of.at_most is None else of.at_most)
                for task, of in self.facts.errors.items()
            }
        if self._gram is None or "decoder" not in self.tensors:
            return {}
        norms = np.sqrt(np.maximum(self._gram.matrix.diagonal(), 0.0))
        if self.reconstruction is not None:
            # by the root of G: the difference of nearly equal squares would leave nothing
            residual = self._gram.root @ (self.reconstruction.numpy() - np.eye(len(norms)))
            lengths = np.linalg.norm(residual, axis=0)
        else:  # rand_proj: Q is orthonormal, and the decoder Q^T T holds all that is reconstructed
            inside = np.square(self.tensors["decoder"].numpy()).sum(axis=0)
            lengths = np.sqrt(np.maximum(norms**2 - inside, 0.0))
        noise = NULL * float(np.linalg.norm(self._gram.root))
        ratios = [
            float(length / norm) if norm > 0 else (math.inf if length > noise else 0.0)
            for length, norm in zip(lengths, norms, strict=True)
        ]
        return {task: (ratio, ratio) for task, ratio in zip(self.tasks, ratios, strict=True)}

    @property
    def row_sums(self) -> list[float] | None:
        """The weight of each task in the sum of the bases, [T]; None without an encoder."""
        encoder = self.tensors.get("encoder")
        return None if encoder is None else row_sums(self.facts, encoder)

    @cached_property
    def choices(self) -> list[Choice]:
        """One for each M = 1..T; empty where the eigenvalues are not known."""
        if "eigenvalues" not in self.tensors:
            return []
        values = self.tensors["eigenvalues"].clamp(min=0.0).tolist()
        found = []
        for count in range(1, len(values) + 1):
            bound, balanced = math.fsum(values[count:]), None
            if self._gram is not None:
                _, least = completion(self._gram, count, np.ones(len(values)))
                balanced = _energy(least, self._gram.total)
            following = values[count] if count < len(values) else 0.0
            found.append(Choice(count, _energy(bound, sum(values)), bound, following, balanced))
        return found

    @property
    def smallest(self) -> dict[float, int]:
        """The smallest M that can retain each of SHARES of the energy."""
        return {
            share: next(c.num_bases for c in self.choices if c.retained_energy >= share - 1e-12)
            for share in (SHARES if self.choices else ())
        }

    @property
    def sizes(self) -> Sizes | None:
        """The weights of a store against those of its models; None without a store."""
        if self.facts.store is None:
            return None
        files = self.facts.store.files.items()
        stored = sum(file.bytes for name, file in files if name.endswith(".safetensors"))
        models = self.facts.store.model_bytes
        saved = models - stored
        return Sizes(models, stored, saved, 100 * saved / models if models else None)

    def why_unknown(self, what: str) -> str:
        """In a few words, why `gram`, `encoder` or `errors` are missing here."""
        if what != "gram" and "decoder" not in self.tensors:
            return "not known: the bases are not built yet"
        if what == "encoder" and self.basis == "rand_proj":
            return "none: the bases are random directions"
        grown = "gram" not in self.tensors
        return "not known: the store has grown online" if grown else "not known"


def as_json(inspection: Inspection) -> dict[str, Any]:
    """The facts and all that follows, in plain JSON types: null where unknown or infinite.

    Matrices are lists of rows; what goes by task is in the order of `tasks`, except `errors`.
    """
    matrices = ("eigenvalues", "encoder", "decoder", "reconstruction", "mixing", "gram_bases")
    known = set(Facts.model_fields) - {"seconds", "checksum"}
    values, of = inspection.cosines
    sizes, tensors = inspection.sizes, inspection.tensors
    return {
        "what": inspection.what,
        "num_tasks": len(inspection.tasks),
        **inspection.facts.model_dump(mode="json", include=known),
        "base_norm": inspection.base_norm,
        "norms": inspection.norms,
        "sizes": None if sizes is None else sizes._asdict(),
        "codes": _codes_json(inspection.codes),
        "cosines": values.tolist(),
        "cosines_of": of,
        "choices": [choice._asdict() for choice in inspection.choices],
        "smallest": {f"{share:g}": count for share, count in inspection.smallest.items()},
        "row_sums": inspection.row_sums,
        "errors": {
            task: {
                "at_least": low if math.isfinite(low) else None,
                "at_most": high if math.isfinite(high) else None,
            }
            for task, (low, high) in inspection.errors.items()
        },
        **{name: tensors[name].tolist() if name in tensors else None for name in matrices},
    }


def _codes_json(codes: Losses | None) -> dict[str, Any] | None:
    if codes is None:
        return None
    vectors, groups = ([each._asdict() for each in part] for part in (codes.vectors, codes.groups))
    return {"vectors": vectors, "sum": codes.sum, "groups": groups}


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Tables and sentences as wide as the terminal; ASCII where its encoding asks for it."""
    ascii_only, most = console.options.ascii_only, max(console.width // 4, 10)
    names = [shortened(printable(task, ascii_only), most, ascii_only) for task in inspection.tasks]
    cosines, of = inspection.cosines
    show([headline(inspection)], console, "bold")
    show(remarks(inspection), console)
    for part in (
        [_task_sheet(inspection, names)],
        _vectors_told(inspection),
        _groups_told(inspection.codes),
        [cosine_sheet(of, names, cosines)],
        [] if inspection.keeps_tasks else _encoder_told(inspection, names),
        _choices_told(inspection),
    ):
        if part:
            console.print()
            show(part, console)


def headline(inspection: Inspection) -> str:
    """What this is, in one line: kind, M of T, dtype, base."""
    facts, store = inspection.facts, inspection.facts.store
    dtype = facts.dtype if store is None else _stored_as(facts)
    if inspection.keeps_tasks:
        tasks = counted(len(inspection.tasks), "task vector")
        return f"Zoo: T = {tasks} at {dtype}, base {facts.base_model}"
    kind = {
        "store": "Basis store",
        "merge": f"Merge by {facts.method}",
        "recipe": f"Recipe for {facts.method}, not built",
    }[inspection.what]
    bases = counted(inspection.num_bases, f"{inspection.basis} basis vector")
    return (
        f"{kind}: M = {bases} of T = {counted(len(inspection.tasks), 'task vector')}"
        f"{f', {dtype}' if dtype else ''}, base {facts.base_model}"
    )


def remarks(inspection: Inspection) -> list[str]:
    """Sizes, how the store has grown, loss against the bounds, tensors left out; a line each."""
    facts, store = inspection.facts, inspection.facts.store
    lines = []
    if store is not None:
        lines.append(size_line(inspection))
        if store.added:
            whole = store.budget is None or inspection.keeps_tasks
            within = "" if whole else f" within a budget of {store.budget}"
            lines.append(f"{counted(store.added, 'task')} added online{within}")
        if store.basis_weights and not inspection.keeps_tasks:
            terms = [f"{weight:.4g} B{m}" for m, weight in enumerate(store.basis_weights)]
            lines.append(f"The sum of all task vectors is {' + '.join(terms)}")
    if facts.relative_error:
        line = f"{error_line(facts)}{_sum_told(inspection.codes)}"
        lines.append(line[0].upper() + line[1:])
    lines.append(f"{facts.num_parameters:,} parameters in each task vector")
    lines += [] if inspection.keeps_tasks else measures(facts)
    if facts.left_out:
        lines.append(f"{counted(len(facts.left_out), 'tensor')} left out: see basis.json")
    return lines


def size_line(inspection: Inspection) -> str:
    """How many bases and bytes of a store replace how many models and bytes."""
    facts, store, sizes = inspection.facts, inspection.facts.store, inspection.sizes
    assert store is not None and sizes is not None
    held = f"{counted(inspection.num_bases, 'basis')} of {counted(len(inspection.tasks), 'task')}"
    if inspection.keeps_tasks:
        held = counted(len(inspection.tasks), "task vector")
    return (
        f"{held}: {megabytes(sizes.store)} in {_stored_as(facts)}, "
        f"{megabytes(abs(sizes.saved))} {'less' if sizes.saved >= 0 else 'more'} than the "
        f"models' {megabytes(sizes.models)}"
    )


def error_line(facts: Facts) -> str:
    """Of a quantized store, the largest relative error of a task, and whose it is."""
    worst = max(facts.relative_error, key=lambda task: facts.relative_error[task])
    return f"largest relative error of a task: {facts.relative_error[worst]:.3g} ({worst})"


def _sum_told(codes: Losses | None) -> str:
    if codes is None or codes.sum is None:
        return ""
    return f"; the codes change the sum that addition adds by {codes.sum:.3g} of its norm"


def _stored_as(facts: Facts) -> str:
    """The dtype of a store and how many entries it keeps, or the bits of its codes."""
    assert facts.store is not None
    if facts.density is not None:
        return f"sparse {facts.store.dtype} ({100 * facts.density:.2g} % of the entries)"
    return facts.store.dtype if facts.bits is None else counted(facts.bits, "bit")


def smallest_line(inspection: Inspection) -> str:
    """The smallest M for each of SHARES."""
    found = ", ".join(f"{100 * share:g} %: {count}" for share, count in inspection.smallest.items())
    return f"Smallest M that can retain {found}"


def _vectors_told(inspection: Inspection) -> list[Sheet | str]:
    """What the codes keep of each basis; a zoo's are in the table of tasks."""
    if inspection.codes is None or inspection.keeps_tasks:
        return []
    rows = [_kept(each) for each in inspection.codes.vectors]
    return [Sheet("Codes of the bases", ("", "bytes", "bits", "error"), rows)]


def _groups_told(codes: Losses | None) -> list[Sheet | str]:
    """What the codes keep of each group of tensors, in all vectors."""
    if codes is None:
        return []
    every = sum(group.bytes for group in codes.groups) or 1
    rows = [
        (group.name, f"{100 * group.bytes / every:.1f}", *_kept(group)[2:])
        for group in codes.groups
    ]
    return [Sheet("Codes by kind of tensor", ("", "bytes %", "bits", "error"), rows)]


def _kept(loss: Loss) -> tuple[str, str, str, str]:
    error = "?" if loss.relative_error is None else f"{loss.relative_error:.3g}"
    return loss.name, megabytes(loss.bytes), f"{loss.bits:.3g}", error


def _task_sheet(inspection: Inspection, names: list[str]) -> Sheet:
    """Of each task; in a zoo its codes take the place of its weight in the sum of the bases."""
    base, unknown, codes = inspection.base_norm, [None] * len(names), inspection.codes
    weights, last = inspection.row_sums or unknown, ["row sum"]
    cells = [["?" if weight is None else f"{round(weight, 3) + 0.0:.3f}"] for weight in weights]
    if inspection.keeps_tasks and codes is not None:
        last, cells = ["bits", "bytes"], [list(_kept(each)[2:0:-1]) for each in codes.vectors]
    rows = []
    for task, name, model, norm, cell in zip(
        inspection.tasks, names, inspection.facts.models, inspection.norms, cells, strict=True
    ):
        error = inspection.errors.get(task)
        rows.append(
            (
                name,
                "?" if norm is None else f"{norm:.4g}",
                "?" if norm is None or not base else f"{100 * norm / base:.2f} %",
                "?" if error is None else error_text(*error),
                *cell,
                model,
            )
        )
    head = ("task", "||tau||", "of base", "error", *last, "model")
    return Sheet("Tasks", head, rows, left=("model",))


def _encoder_told(inspection: Inspection, names: list[str]) -> list[Sheet | str]:
    """The weights as a table; of many bases the largest of each."""
    encoder = inspection.tensors.get("encoder")
    if encoder is None:
        return [f"Encoder weights: {inspection.why_unknown('encoder')}"]
    bases = [f"B{m}" for m in range(inspection.num_bases)]
    if len(bases) <= WIDE:
        return [matrix("Encoder weights", names, bases, encoder.tolist())]
    told: list[Sheet | str] = ["Encoder weights, the largest of each basis"]
    for basis, column in zip(bases, encoder.T.tolist(), strict=True):
        order = sorted(range(len(column)), key=lambda i: -abs(column[i]))
        told.append(f"{basis}: {listed([f'{names[i]} {column[i]:.3f}' for i in order])}")
    return told


def _choices_told(inspection: Inspection) -> list[Sheet | str]:
    """What each M would retain."""
    if not inspection.choices:
        return [f"What other M would retain: {inspection.why_unknown('gram')}"]
    current = None if inspection.keeps_tasks else inspection.num_bases
    rows = [
        (
            f"{'>' if choice.num_bases == current else ' '} {choice.num_bases}",
            f"{100 * choice.retained_energy:.2f}",
            "?" if choice.balanced_energy is None else f"{100 * choice.balanced_energy:.2f}",
            f"{choice.spectral_bound:.4g}",
            f"{choice.next_eigenvalue:.4g}",
        )
        for choice in inspection.choices
    ]
    head = ("M", "best %", "balanced %", "loss >=", "lambda_{M+1}")
    sheet = Sheet("Energy that M bases can retain", head, rows)
    return [sheet, smallest_line(inspection), CRITERION]


def error_text(low: float, high: float) -> str:
    """One number where two digits tell the error, else the range, or its known end."""
    for digits in (3, 2):
        least, most = (f"{round(value, 9):.{digits}g}" for value in (low, high))
        if least == most:
            return most
    if math.isinf(high):
        return f"at least {least}" if low > 0 else "?"
    return f"{least} to {most}"


def _energy(loss: float, total: float) -> float:
    return 1.0 - loss / total if total > 0 else 1.0
