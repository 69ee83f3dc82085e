"""What the task vectors of a merge or a basis store are like, and what its bases lose.

From the two files that merges and stores write, `basis.json` (`facts`) and `basis.safetensors`
(`tensors`), to numbers, tables on the terminal and plain JSON. `plot` draws the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from rich.console import Console
from torch import Tensor

from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.encoders.balanced import completion
from tvb_mergekit.core.encoders.linear import NULL
from tvb_mergekit.errors import UserError, counted, listed, megabytes
from tvb_mergekit.store.facts import TENSORS, Facts, StoreRecord, check_shapes
from tvb_mergekit.store.report import WIDE, cosine_sheet, cosines, measures, row_sums
from tvb_mergekit.tables import Sheet, matrix, printable, shortened, show, width

SHARES = (0.8, 0.9, 0.95, 0.99)  # of the energy, whose smallest M are told
MOST_CHOICES = 20  # rows of the table of M on the terminal
MOST_PAIRS = 5  # most similar pairs told where the matrix of cosines is too large
NAME = 24  # characters of a task's name in the terminal's tables
GROWN = "not known: the store has grown online"
NOT_BUILT = "not known: the bases are not built yet"
DIRECTIONS = "none: the bases are random directions"
CRITERION = (
    "Negating task i costs an error of at most about lambda_{M+1}(G), the first eigenvalue that M "
    "bases leave out: take the smallest M after which lambda drops off."
)


@dataclass(frozen=True)
class Choice:
    """What M bases can do at best, whatever the encoder.

    `spectral_bound` is the least loss and `next_eigenvalue` lambda_{M+1}(G), 0 for M = T;
    `balanced_energy` is what the best balanced bases retain, None where G is not known.
    """

    num_bases: int
    retained_energy: float
    spectral_bound: float
    next_eigenvalue: float
    balanced_energy: float | None


@dataclass(frozen=True)
class Sizes:
    """Bytes of the weights; `saved` is negative, and `saved_percent` too, where a store is larger.

    `saved_percent` is None where the models' bytes are 0.
    """

    models: int
    store: int
    saved: int
    saved_percent: float | None


@dataclass(frozen=True, eq=False)
class Inspection:
    """`basis.json` and `basis.safetensors` of a merge, a store or a recipe, and what follows.

    Args:
        facts: of a merge or a store.
        tensors: float64 on the CPU: `gram` [T, T] and `eigenvalues` [T] (not in a store that has
            grown online), `encoder` [T, M] (not of rand_proj), `decoder` [M, T], `reconstruction`
            [T, T] (pca), `gram_bases` [M, M] (stores), `mixing` (rand_proj). All but the first two
            are missing before the bases are built.
        built: false where the facts tell what a recipe would give.

    Raises:
        UserError: a shape does not fit the facts, a tensor is not finite, or there are neither
            Gram matrix nor `decoder` and `gram_bases`.
    """

    facts: Facts
    tensors: Mapping[str, Tensor]
    built: bool = True

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
        """`ae`, `balanced` and so on."""
        return str(self.facts.parameters.get("basis", "ae"))

    @property
    def what(self) -> str:
        """`store`, `merge` or `recipe`."""
        return "store" if self.facts.store else "merge" if self.built else "recipe"

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
    def _gram(self) -> Gram | None:
        return Gram.of(self.tensors["gram"]) if "gram" in self.tensors else None

    @cached_property
    def cosines(self) -> tuple[Tensor, str]:
        """Cosines [T, T] float64, and of what: reconstructions where the store has grown online.

        Those are W_d^T (B^T B) W_d. The diagonal is 1, but rows and columns of a zero vector are 0.
        """
        if self._gram is not None:
            return cosines(self._gram.matrix), "task vectors"
        decoder = self.tensors["decoder"].numpy()
        root = Gram.of(self.tensors["gram_bases"]).root
        # what cancels to a rounding error is zero, and has no direction
        noise = NULL * float(np.linalg.norm(root) * np.linalg.norm(decoder))
        vectors = root @ decoder
        pca = self.basis == "pca"  # whose mean is not in `gram_bases`
        of = "reconstructions less their mean" if pca else "reconstructed task vectors"
        return cosines(vectors.T @ vectors, noise), of

    @property
    def reconstruction(self) -> Tensor | None:
        """R with T_hat = T R, [T, T] float64; None for rand_proj and before the bases are built."""
        if "reconstruction" in self.tensors:
            return self.tensors["reconstruction"]
        if {"encoder", "decoder"} <= set(self.tensors):
            return self.tensors["encoder"] @ self.tensors["decoder"]
        return None

    @cached_property
    def errors(self) -> dict[str, tuple[float, float]]:
        """||tau_hat - tau|| / ||tau|| of each task: at least, at most; equal where known exactly.

        What a store has measured, its rounding included, or else what G and R give. Infinite for a
        zero task vector that is not reconstructed as zero; empty before the bases are built.
        """
        if self.facts.errors:
            return {
                task: (of.at_least or 0.0, math.inf if of.at_most is None else of.at_most)
                for task, of in self.facts.errors.items()
            }
        if self._gram is None:
            return {}
        norms = np.sqrt(np.maximum(self._gram.matrix.diagonal(), 0.0))
        if self.reconstruction is not None:
            # by the root of G: the difference of nearly equal squares would leave nothing
            residual = self._gram.root @ (self.reconstruction.numpy() - np.eye(len(self.tasks)))
            lengths = np.linalg.norm(residual, axis=0)
        elif "mixing" in self.tensors and "decoder" in self.tensors:
            # Q is orthonormal, so the decoder Q^T T holds all of what is reconstructed
            inside = np.square(self.tensors["decoder"].numpy()).sum(axis=0)
            lengths = np.sqrt(np.maximum(norms**2 - inside, 0.0))
        else:
            return {}
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
        total = sum(values)
        found = []
        for count in range(1, len(values) + 1):
            bound = math.fsum(values[count:])
            balanced = None
            if self._gram is not None:
                _, least = completion(self._gram, count, np.ones(len(values)))
                balanced = _energy(least, self._gram.total)
            following = values[count] if count < len(values) else 0.0
            found.append(Choice(count, _energy(bound, total), bound, following, balanced))
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
        """A store's bytes against those of the models that it replaces; None without a store.

        Only weights count, on both sides: a store's files of other kinds do not.
        """
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
            return NOT_BUILT
        if what == "encoder" and self.basis == "rand_proj":
            return DIRECTIONS
        return GROWN if what == "gram" or "gram" not in self.tensors else "not known"


def as_json(inspection: Inspection) -> dict[str, Any]:
    """All of it in plain JSON types: null where something is unknown or infinite.

    Matrices are lists of rows; what goes by task is in the order of `tasks`, except `errors`.
    """
    tensors = inspection.tensors
    facts = inspection.facts.model_dump(mode="json", exclude_unset=True)
    values, of = inspection.cosines
    copied = (
        *("method", "parameters", "base_model", "dtype", "num_parameters", "tasks", "models"),
        *("loss", "spectral_bound", "balanced_bound", "relative_gap", "retained_energy"),
        *("decoder_losses", "left_out", "store"),
    )
    matrices = ("eigenvalues", "encoder", "decoder", "reconstruction", "mixing", "gram_bases")
    sizes = inspection.sizes
    return {
        "what": inspection.what,
        "num_tasks": len(inspection.tasks),
        "num_bases": inspection.num_bases,
        "base_norm": inspection.base_norm,
        "norms": inspection.norms,
        "sizes": None if sizes is None else dataclasses.asdict(sizes),
        "cosines": values.tolist(),
        "cosines_of": of,
        "choices": [dataclasses.asdict(choice) for choice in inspection.choices],
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
        **{name: facts.get(name) for name in copied},
    }


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Tables and sentences as wide as the terminal; ASCII where its encoding asks for it."""
    ascii_only, most = console.options.ascii_only, max(console.width, 40)
    names = [
        shortened(printable(task, ascii_only), min(NAME, most // 3), ascii_only)
        for task in inspection.tasks
    ]
    show([headline(inspection)], console, "bold")
    show(remarks(inspection), console)
    for part in (
        [_task_sheet(inspection, names)],
        _cosines_told(inspection, names),
        _encoder_told(inspection, names),
        _choices_told(inspection, most, "#" if ascii_only else "█"),
    ):
        console.print()
        show(part, console)


def headline(inspection: Inspection) -> str:
    """What this is, in one line: kind, M of T, dtype, base."""
    facts, store = inspection.facts, inspection.facts.store
    dtype = facts.dtype if store is None else store.dtype
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
    facts, store, sizes = inspection.facts, inspection.facts.store, inspection.sizes
    lines = []
    if store is not None and sizes is not None:
        bases, tasks = inspection.num_bases, len(inspection.tasks)
        kind = "adapter basis" if store.contents == "adapters" else "basis"
        line = (
            f"{counted(bases, kind)} of {megabytes(sizes.store // bases)}"
            f"{' each' if bases > 1 else ''} in {store.dtype} "
            f"{'replace' if bases > 1 else 'replaces'} {counted(tasks, 'model')} of "
            f"{megabytes(sizes.models // tasks)}: {megabytes(abs(sizes.saved))} "
            f"{'less' if sizes.saved >= 0 else 'more'}"
        )
        if sizes.saved_percent is not None:
            line += f", {abs(sizes.saved_percent):.0f} %"
        lines += [line, *_growth(store)]
    lines += [f"{facts.num_parameters:,} parameters in each task vector", *measures(facts)]
    if facts.left_out:
        lines.append(f"{counted(len(facts.left_out), 'tensor')} left out: see basis.json")
    return lines


def _growth(store: StoreRecord) -> list[str]:
    lines = []
    if store.added:
        how = f", compressed by {store.compress}" if store.compress else ""
        budget = "" if store.budget is None else f" within a budget of {store.budget}"
        lines.append(f"{counted(store.added, 'task')} added online{budget}{how}")
    if store.basis_weights:
        terms = [f"{weight:.4g} B{m}" for m, weight in enumerate(store.basis_weights[:WIDE])]
        terms += ["..."] * (len(store.basis_weights) > WIDE)
        lines.append(f"The sum of all task vectors is {' + '.join(terms)}")
    return lines


def sheets(inspection: Inspection) -> list[Sheet]:
    """All tables, whole and with names as they are; what is unknown is not among them."""
    tasks, encoder = inspection.tasks, inspection.tensors.get("encoder")
    values, of = inspection.cosines
    found = [
        _task_sheet(inspection, tasks),
        matrix(f"Cosines between the {of}", tasks, tasks, values.tolist()),
    ]
    if encoder is not None:
        found.append(matrix("Encoder weights", tasks, _basis_names(inspection), encoder.tolist()))
    if inspection.choices:
        found.append(_choice_sheet(inspection.choices, inspection.num_bases))
    return found


def _cosines_told(inspection: Inspection, names: Sequence[str]) -> list[Sheet | str]:
    values, of = inspection.cosines
    told = [cosine_sheet(of, names, values)]
    if len(names) > WIDE:
        pairs = [(float(values[i, j]), i, j) for i in range(len(names)) for j in range(i)]
        told.append("The most similar pairs:")
        for value, i, j in sorted(pairs, reverse=True)[:MOST_PAIRS]:
            told.append(f"{value + 0.0:7.3f}  {names[j]}, {names[i]}")
    return told


def _encoder_told(inspection: Inspection, names: Sequence[str]) -> list[Sheet | str]:
    encoder, bases = inspection.tensors.get("encoder"), _basis_names(inspection)
    if encoder is None:
        return [f"Encoder weights: {inspection.why_unknown('encoder')}"]
    if len(names) <= MOST_CHOICES and len(bases) <= WIDE:
        return [matrix("Encoder weights", names, bases, encoder.tolist())]
    told: list[Sheet | str] = ["Encoder weights, the largest of each basis"]
    for basis, column in zip(bases, encoder.T.tolist(), strict=True):
        order = sorted(range(len(column)), key=lambda i: -abs(column[i]))
        largest = [f"{names[i]} {column[i]:.3f}" for i in order if abs(column[i]) >= 5e-4]
        told.append(f"{basis}: {listed(largest) or 'none'}")
    return told


def _choices_told(inspection: Inspection, most: int, block: str) -> list[Sheet | str]:
    """The table of M, at most about MOST_CHOICES rows, with bars for the eigenvalues."""
    choices, current = inspection.choices, inspection.num_bases
    if not choices:
        return [f"What other M would retain: {inspection.why_unknown('gram')}"]
    counts = set(range(1, len(choices) + 1))
    if len(choices) > MOST_CHOICES:
        spaced = np.linspace(1, len(choices), MOST_CHOICES - 1 - len(SHARES))
        counts = {*spaced.round().astype(int), current, *inspection.smallest.values()}
    shown = [choices[count - 1] for count in sorted(counts)]
    sheet = _choice_sheet(shown, current)
    room = min(most - width(sheet) - 2, 30)
    if room >= 5:
        # Beside lambda_1, which no M leaves out, the others could all be small.
        top = max(choice.next_eigenvalue for choice in choices) or 1.0
        bars = [block * math.ceil(room * choice.next_eigenvalue / top) for choice in shown]
        rows = [(*row, bar) for row, bar in zip(sheet.rows, bars, strict=True)]
        sheet = Sheet(sheet.title, (*sheet.head, ""), rows, left=("",))
    return [sheet, smallest_line(inspection), CRITERION]


def smallest_line(inspection: Inspection) -> str:
    """The smallest M for each of SHARES; empty where the eigenvalues are not known."""
    if not inspection.smallest:
        return ""
    found = ", ".join(f"{100 * share:g} %: {count}" for share, count in inspection.smallest.items())
    return f"Smallest M that can retain {found}"


def _task_sheet(inspection: Inspection, names: Sequence[str]) -> Sheet:
    base, unknown = inspection.base_norm, [None] * len(names)
    sums: Sequence[float | None] = inspection.row_sums or unknown
    rows = []
    for task, name, model, norm, weight in zip(
        inspection.tasks, names, inspection.facts.models, inspection.norms, sums, strict=True
    ):
        error = inspection.errors.get(task)
        rows.append(
            (
                name,
                "?" if norm is None else _four(norm),
                "?" if norm is None or not base else f"{100 * norm / base:.2f} %",
                "?" if error is None else error_text(*error),
                "?" if weight is None else f"{round(weight, 3) + 0.0:.3f}",
                model,
            )
        )
    head = ("task", "||tau||", "of base", "error", "row sum", "model")
    return Sheet("Tasks", head, rows, left=("model",))


def _choice_sheet(choices: Iterable[Choice], current: int) -> Sheet:
    rows = [
        (
            f"{'>' if choice.num_bases == current else ' '} {choice.num_bases}",
            f"{100 * choice.retained_energy:.2f}",
            "?" if choice.balanced_energy is None else f"{100 * choice.balanced_energy:.2f}",
            _four(choice.spectral_bound),
            _four(choice.next_eigenvalue),
        )
        for choice in choices
    ]
    head = ("M", "best %", "balanced %", "loss >=", "lambda_{M+1}")
    return Sheet("Energy that M bases can retain", head, rows)


def error_text(low: float, high: float) -> str:
    """One number where the error is known exactly, else the range, or its known end."""
    for places in (3, 2):
        if low == high or _fixed(low, places) == _fixed(high, places):
            return _fixed(high, places)
    if high < 5e-4:
        return f"at most {_fixed(high, 3)}"
    if math.isinf(high):
        return f"at least {_fixed(low, 2)}" if low > 0 else "?"
    return f"{_fixed(low, 2)} to {_fixed(high, 2)}"


def _basis_names(inspection: Inspection) -> list[str]:
    return [f"B{m}" for m in range(inspection.num_bases)]


def _energy(loss: float, total: float) -> float:
    return 1.0 - loss / total if total > 0 else 1.0


def _fixed(value: float, places: int) -> str:
    """`places` decimals; one digit of what would vanish, but 0 for rounding errors beside 1."""
    if 1e-9 <= abs(value) < 0.5 * 10**-places:
        return f"{value:.0e}"
    return f"{value:.{places}f}" if abs(value) < 1e4 else f"{value:.{places + 1}g}"


def _four(value: float) -> str:
    return "0" if value == 0 else f"{value:#.4g}".removesuffix(".")
