"""What the task vectors of a merge or a basis store are like, and what its bases lose.

From the two files that merges and stores write, `basis.json` (`facts`) and `basis.safetensors`
(`tensors`), to numbers, tables on the terminal and plain JSON. `plots` draws the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tvb_mergekit.encoders import Gram
from tvb_mergekit.encoders.balanced import completion
from tvb_mergekit.encoders.linear import NULL, Array
from tvb_mergekit.errors import UserError
from tvb_mergekit.facts import TENSORS, check_shapes
from tvb_mergekit.output import listed, megabytes
from tvb_mergekit.report import WIDE, decoders, row_sums

NEEDED = ("tasks", "models", "num_bases", "num_parameters")  # in basis.json
STORE_NEEDED = ("model_bytes", "files")  # in its `store`
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


@dataclass(frozen=True)
class Sheet:
    """A table before it is set: the first column holds names, the others numbers."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Inspection:
    """`basis.json` and `basis.safetensors` of a merge, a store or a recipe, and what follows.

    Args:
        facts: as `report.facts` gives them; a store's also have `store` and `errors`; `built` is
            false where they tell what a recipe would give.
        tensors: float64 on the CPU: `gram` [T, T] and `eigenvalues` [T] (not in a store that has
            grown online), `encoder` [T, M] (not of rand_proj), `decoder` [M, T], `reconstruction`
            [T, T] (pca), `gram_bases` [M, M] (stores), `mixing` (rand_proj). All but the first two
            are missing before the bases are built.

    Raises:
        UserError: a fact is missing, a shape does not fit the facts, a tensor is not finite, or
            there are neither Gram matrix nor `decoder` and `gram_bases`.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for facts, keys in ((self.facts, NEEDED), (self.store or {}, STORE_NEEDED)):
            if facts and (missing := [key for key in keys if key not in facts]):
                raise UserError(f"basis.json is not whole: `{missing[0]}` is missing in it")
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
        return list(self.facts["tasks"])

    @property
    def num_bases(self) -> int:
        return int(self.facts["num_bases"])

    @property
    def basis(self) -> str:
        """`ae`, `balanced` and so on."""
        return str(self.facts.get("parameters", {}).get("basis", "ae"))

    @property
    def store(self) -> Mapping[str, Any] | None:
        """What `basis.json` says of a store; None for merges and recipes."""
        store: Mapping[str, Any] | None = self.facts.get("store")
        return store

    @property
    def norms(self) -> list[float | None]:
        """||tau|| of each task, from the Gram matrix where it is known."""
        if self._gram is not None:
            return [math.sqrt(max(value, 0.0)) for value in self._gram.matrix.diagonal().tolist()]
        return [_float(self.facts.get("norms", {}).get(task)) for task in self.tasks]

    @property
    def base_norm(self) -> float | None:
        """||theta_0||; None where a task called `base` has taken its place in `norms`."""
        return None if "base" in self.tasks else _float(self.facts.get("norms", {}).get("base"))

    @cached_property
    def _gram(self) -> Gram | None:
        return Gram.of(self.tensors["gram"]) if "gram" in self.tensors else None

    @cached_property
    def cosines(self) -> tuple[Tensor, bool]:
        """Cosines [T, T] float64, and whether they are those of the reconstructed task vectors.

        Those are what is left to know once a store has grown online: W_d^T (B^T B) W_d. The
        diagonal is 1, but rows and columns of a zero vector are 0.
        """
        if self._gram is not None:
            return _cosines(self._gram.matrix, 0.0), False
        decoder = self.tensors["decoder"].numpy()
        root = Gram.of(self.tensors["gram_bases"]).root
        # what cancels to a rounding error is zero, and has no direction
        noise = NULL * float(np.linalg.norm(root) * np.linalg.norm(decoder))
        vectors = root @ decoder
        return _cosines(vectors.T @ vectors, noise), True

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
        if measured := self.facts.get("errors"):
            return {
                task: (_float(of.get("at_least")) or 0.0, _or_infinity(of.get("at_most")))
                for task, of in measured.items()
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
                balanced = _energy(
                    completion(self._gram, count, np.ones(len(values)))[1], self._gram.total
                )
            found.append(
                Choice(
                    num_bases=count,
                    retained_energy=_energy(bound, total),
                    spectral_bound=bound,
                    next_eigenvalue=values[count] if count < len(values) else 0.0,
                    balanced_energy=balanced,
                )
            )
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
        if self.store is None:
            return None
        files = self.store.get("files", {})
        stored = sum(int(f["bytes"]) for name, f in files.items() if name.endswith(".safetensors"))
        models = int(self.store["model_bytes"])
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
    """All of it in plain JSON types: null where something is unknown, NaN or infinite.

    Matrices are lists of rows; what goes by task is in the order of `tasks`, except `errors`.
    """
    facts, tensors = inspection.facts, inspection.tensors
    cosines, _ = inspection.cosines
    copied = (
        *("method", "parameters", "base_model", "dtype", "num_parameters", "tasks", "models"),
        *("loss", "spectral_bound", "balanced_bound", "relative_gap", "retained_energy"),
        *("decoder_losses", "left_out", "store"),
    )
    matrices = ("eigenvalues", "encoder", "decoder", "reconstruction", "mixing", "gram_bases")
    sizes = inspection.sizes
    result = {
        "what": _what(inspection),
        "num_tasks": len(inspection.tasks),
        "num_bases": inspection.num_bases,
        "base_norm": inspection.base_norm,
        "norms": inspection.norms,
        "sizes": None if sizes is None else dataclasses.asdict(sizes),
        "cosines": cosines.tolist(),
        "cosines_of": cosines_of(inspection),
        "choices": [dataclasses.asdict(choice) for choice in inspection.choices],
        "smallest": {f"{share:g}": count for share, count in inspection.smallest.items()},
        "row_sums": inspection.row_sums,
        "errors": {
            task: {"at_least": low, "at_most": high}
            for task, (low, high) in inspection.errors.items()
        },
        **{name: tensors[name].tolist() if name in tensors else None for name in matrices},
        **{name: facts.get(name) for name in copied},
    }
    plain: dict[str, Any] = _plain_json(result)
    return plain


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Tables and sentences as wide as the terminal; ASCII where its encoding asks for it."""
    _Printer(inspection, console).all()


def headline(inspection: Inspection) -> str:
    """What this is, in one line: kind, M of T, dtype, base."""
    facts, store = inspection.facts, inspection.store
    dtype = facts.get("dtype") if store is None else store.get("dtype")
    kind = {
        "store": "Basis store",
        "merge": f"Merge by {facts.get('method')}",
        "recipe": f"Recipe for {facts.get('method')}, not built",
    }[_what(inspection)]
    tasks, bases = len(inspection.tasks), inspection.num_bases
    return (
        f"{kind}: M = {bases} {inspection.basis} {_plural('basis vector', bases)} of T = {tasks} "
        f"{_plural('task vector', tasks)}{f', {dtype}' if dtype else ''}, "
        f"base {facts.get('base_model')}"
    )


def cosines_of(inspection: Inspection) -> str:
    """What `inspection.cosines` are the cosines of."""
    if not inspection.cosines[1]:
        return "task vectors"
    pca = inspection.basis == "pca"  # whose mean is not in `gram_bases`
    return "reconstructions less their mean" if pca else "reconstructed task vectors"


def remarks(inspection: Inspection) -> list[str]:
    """Sizes, how the store has grown, loss against the bounds, tensors left out; a line each."""
    facts, store, sizes = inspection.facts, inspection.store, inspection.sizes
    lines = []
    if store is not None and sizes is not None:
        bases, tasks = inspection.num_bases, len(inspection.tasks)
        kind = {"adapters": "adapter basis"}.get(str(store.get("contents")), "basis")
        lines.append(
            f"{bases} {_plural(kind, bases)} of {megabytes(sizes.store // bases)}"
            f"{' each' if bases > 1 else ''} in {store.get('dtype')} "
            f"{'replace' if bases > 1 else 'replaces'} {tasks} {_plural('model', tasks)} of "
            f"{megabytes(sizes.models // tasks)}: {megabytes(abs(sizes.saved))} "
            f"{'less' if sizes.saved >= 0 else 'more'}"
            + ("" if sizes.saved_percent is None else f", {abs(sizes.saved_percent):.0f} %")
        )
        lines += _growth(store)
    lines += [f"{facts['num_parameters']:,} parameters in each task vector"]
    lines += [*_losses(facts), *decoders(facts)]
    if left_out := facts.get("left_out"):
        count = len(left_out)
        lines.append(f"{count} {_plural('tensor', count)} left out: see basis.json")
    return lines


def sheets(inspection: Inspection) -> list[Sheet]:
    """All tables, whole and with names as they are; what is unknown is not among them."""
    tasks, encoder = inspection.tasks, inspection.tensors.get("encoder")
    cosines, _ = inspection.cosines
    found = [
        _task_sheet(inspection, tasks, [str(model) for model in inspection.facts["models"]]),
        _matrix(_cosine_title(inspection), tasks, tasks, cosines),
    ]
    if encoder is not None:
        found.append(_matrix("Encoder weights", tasks, _basis_names(inspection), encoder))
    if inspection.choices:
        found.append(_choice_sheet(inspection.choices, inspection.num_bases))
    return found


def smallest_line(inspection: Inspection) -> str:
    """The smallest M for each of SHARES; empty where the eigenvalues are not known."""
    if not inspection.smallest:
        return ""
    shares = ", ".join(
        f"{100 * share:g} %: {count}" for share, count in inspection.smallest.items()
    )
    return f"Smallest M that can retain {shares}"


def shortened(text: str, width: int, ascii_only: bool = False) -> str:
    """`text` in at most `width` >= 4 characters, with dots in its middle where it was longer."""
    dots = "..." if ascii_only else "…"
    if len(text) <= width:
        return text
    kept = width - len(dots)
    tail = kept // 2
    return text[: kept - tail] + dots + text[len(text) - tail :]


def printable(text: str, ascii_only: bool = False) -> str:
    """`text` without what would steer a terminal, and in ASCII where that is all it can show."""

    def fits(character: str) -> bool:
        return character.isprintable() and (character.isascii() or not ascii_only)

    return "".join(c if fits(c) else ascii(c)[1:-1] for c in text)


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


class _Printer:
    """The terminal's version: what does not fit into its width is cut, split or told in short."""

    def __init__(self, inspection: Inspection, console: Console) -> None:
        self.inspection, self.console = inspection, console
        self.ascii_only, self.width = console.options.ascii_only, max(console.width, 40)
        room = min(NAME, self.width // 3)
        self.names = [
            shortened(printable(task, self.ascii_only), room, self.ascii_only)
            for task in inspection.tasks
        ]

    def all(self) -> None:
        self.say(headline(self.inspection), "bold")
        for line in remarks(self.inspection):
            self.say(line)
        for part in (self.print_tasks, self.print_cosines, self.print_encoder, self.print_choices):
            self.say("")
            part()

    def say(self, line: str, style: str = "") -> None:
        # a Text, so that brackets and colons in names are no markup
        self.console.print(Text(printable(line, self.ascii_only), style=style))

    def show(self, sheet: Sheet) -> None:
        if sheet.title:  # not the table's own, which would wrap at the table's width
            self.say(sheet.title, "italic")
        for part in blocks(sheet, self.width):
            self.show_block(part)

    def show_block(self, sheet: Sheet) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for index, column in enumerate(sheet.head):
            text = index == 0 or column in ("", "model")
            table.add_column(
                Text(printable(column, self.ascii_only)),
                justify="left" if text else "right",
                no_wrap=True,
                # rich's own ellipsis is not ASCII
                overflow="crop" if self.ascii_only else "ellipsis",
            )
        for row in sheet.rows:
            table.add_row(*(Text(printable(cell, self.ascii_only)) for cell in row))
        self.console.print(table, soft_wrap=False)

    def print_tasks(self) -> None:
        models = [printable(str(m), self.ascii_only) for m in self.inspection.facts["models"]]
        sheet = _task_sheet(self.inspection, self.names, models)
        if _width(sheet) <= self.width:
            self.show(sheet)
            return
        # Cut model names could not be told apart: they get lines of their own.
        rows = [row[:-1] for row in sheet.rows]
        self.show(Sheet(sheet.title, sheet.head[:-1], rows))
        self.say("")
        for task, model in zip(self.inspection.tasks, models, strict=True):
            self.say(f"{task}: {model}")

    def print_cosines(self) -> None:
        title, tasks = _cosine_title(self.inspection), self.inspection.tasks
        cosines, _ = self.inspection.cosines
        if len(tasks) <= WIDE:
            self.print_matrix(title, self.names, cosines)
            return
        pairs = [(float(cosines[i, j]), i, j) for i in range(len(tasks)) for j in range(i)]
        low, high = min(pairs), max(pairs)
        self.say(
            f"{title}: {low[0]:.3f} ({tasks[low[1]]}, {tasks[low[2]]}) to "
            f"{high[0]:.3f} ({tasks[high[1]]}, {tasks[high[2]]})"
        )
        self.say("The most similar pairs:")
        for value, i, j in sorted(pairs, reverse=True)[:MOST_PAIRS]:
            self.say(f"{value + 0.0:7.3f}  {self.names[j]}, {self.names[i]}")

    def print_encoder(self) -> None:
        encoder = self.inspection.tensors.get("encoder")
        if encoder is None:
            self.say(f"Encoder weights: {self.inspection.why_unknown('encoder')}")
            return
        bases = _basis_names(self.inspection)
        if len(self.names) <= MOST_CHOICES and len(bases) <= WIDE:
            self.print_matrix("Encoder weights", bases, encoder)
            return
        self.say("Encoder weights, the largest of each basis", "italic")
        for basis, column in zip(bases, encoder.T.tolist(), strict=True):
            order = sorted(range(len(column)), key=lambda i: -abs(column[i]))
            kept = [i for i in order if abs(column[i]) >= 5e-4]
            largest = listed([f"{self.names[i]} {column[i]:.3f}" for i in kept])
            self.say(f"{basis}: {largest or 'none'}")

    def print_choices(self) -> None:
        choices, current = self.inspection.choices, self.inspection.num_bases
        if not choices:
            self.say(f"What other M would retain: {self.inspection.why_unknown('gram')}")
            return
        shown = [choices[count - 1] for count in _thinned(self.inspection)]
        sheet = _choice_sheet(shown, current)
        room = min(self.width - _width(sheet) - 2, 30)
        if room >= 5:
            # Beside lambda_1, which no M leaves out, the others could all be small.
            top = max(choice.next_eigenvalue for choice in choices) or 1.0
            block = "#" if self.ascii_only else "█"
            bars = [block * math.ceil(room * choice.next_eigenvalue / top) for choice in shown]
            rows = [(*row, f"{bar:{room}}") for row, bar in zip(sheet.rows, bars, strict=True)]
            sheet = Sheet(sheet.title, (*sheet.head, ""), rows)
        self.show(sheet)
        self.say(smallest_line(self.inspection))
        self.say(CRITERION)

    def print_matrix(self, title: str, columns: list[str], values: Tensor) -> None:
        """In blocks of as many columns as fit; headings that are too long become numbers."""
        rows = self.names
        if max(map(len, columns)) > 8:
            columns = [str(number) for number in range(1, len(columns) + 1)]
            rows = [f"{number} {name}" for number, name in enumerate(rows, 1)]
        cell = max(6, *map(len, columns)) + 2
        count = max(1, (self.width - max(map(len, rows))) // cell)
        for start in range(0, len(columns), count):
            some = slice(start, start + count)
            self.show(_matrix(title if start == 0 else "", rows, columns[some], values[:, some]))


def _task_sheet(inspection: Inspection, names: Sequence[str], models: Sequence[str]) -> Sheet:
    base = inspection.base_norm
    sums: Sequence[float | None] = inspection.row_sums or [None] * len(names)
    rows = []
    for task, name, model, norm, weight in zip(
        inspection.tasks, names, models, inspection.norms, sums, strict=True
    ):
        share = None if norm is None or not base else 100 * norm / base
        error = inspection.errors.get(task)
        rows.append(
            (
                name,
                "?" if norm is None else _four(norm),
                "?" if share is None else f"{share:.2f} %",
                "?" if error is None else error_text(*error),
                "?" if weight is None else f"{round(weight, 3) + 0.0:.3f}",
                model,
            )
        )
    return Sheet("Tasks", ("task", "||tau||", "of base", "error", "row sum", "model"), rows)


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


def _matrix(title: str, rows: Sequence[str], columns: Sequence[str], values: Tensor) -> Sheet:
    # rounded first, so that no zero has a sign
    cells = [tuple(f"{round(value, 3) + 0.0:.3f}" for value in row) for row in values.tolist()]
    named = [(name, *row) for name, row in zip(rows, cells, strict=True)]
    return Sheet(title, ("", *columns), named)


def _width(sheet: Sheet) -> int:
    columns = zip(sheet.head, *sheet.rows, strict=True)
    return sum(max(map(len, column)) + 2 for column in columns) - 2


def blocks(sheet: Sheet, width: int) -> list[Sheet]:
    """The sheet, or sheets of as many of its columns as fit, each with the first one."""
    if _width(sheet) <= width or len(sheet.head) <= 2:
        return [sheet]
    count = len(sheet.head) - 1
    while count > 2 and _width(_columns(sheet, range(count))) > width:
        count -= 1
    rest = _columns(sheet, [0, *range(count, len(sheet.head))])
    return [_columns(sheet, range(count)), *blocks(rest, width)]


def _columns(sheet: Sheet, places: Iterable[int]) -> Sheet:
    kept = list(places)
    rows = [tuple(row[place] for place in kept) for row in sheet.rows]
    return Sheet(sheet.title, tuple(sheet.head[place] for place in kept), rows)


def _thinned(inspection: Inspection) -> list[int]:
    """At most about MOST_CHOICES values of M: the current one, those that matter, some between."""
    size, current = len(inspection.tasks), inspection.num_bases
    if size <= MOST_CHOICES:
        return list(range(1, size + 1))
    spaced = np.linspace(1, size, MOST_CHOICES - 1 - len(SHARES)).round().astype(int).tolist()
    return sorted({*spaced, current, *inspection.smallest.values()})


def _growth(store: Mapping[str, Any]) -> list[str]:
    lines = []
    if added := store.get("added"):
        how = f", compressed by {store['compress']}" if store.get("compress") else ""
        budget = "" if store.get("budget") is None else f" within a budget of {store['budget']}"
        lines.append(f"{added} {_plural('task', added)} added online{budget}{how}")
    if weights := store.get("basis_weights"):
        terms = [f"{weight:.4g} B{m}" for m, weight in enumerate(weights[:WIDE])]
        terms += ["..."] * (len(weights) > WIDE)
        lines.append(f"The sum of all task vectors is {' + '.join(terms)}")
    return lines


def _losses(facts: Mapping[str, Any]) -> list[str]:
    energy, loss = _float(facts.get("retained_energy")), _float(facts.get("loss"))
    bounds = [
        f"{name} {value:.6g}"
        for name, key in (
            ("spectral lower bound", "spectral_bound"),
            ("balanced bound", "balanced_bound"),
        )
        if (value := _float(facts.get(key))) is not None
    ]
    gap = _float(facts.get("relative_gap"))
    if gap is not None and bounds:
        bounds[0] += f" (relative gap {gap:.2e})"
    if loss is None or energy is None:
        return ["; ".join(bounds).capitalize()] if bounds else []
    return [
        f"Retained energy {100 * energy:.2f} %: reconstruction loss {loss:.6g}"
        + "".join(f", {bound}" for bound in bounds)
    ]


def _what(inspection: Inspection) -> str:
    if inspection.store is not None:
        return "store"
    built = inspection.facts.get("built", "decoder" in inspection.tensors)
    return "merge" if built else "recipe"


def _cosine_title(inspection: Inspection) -> str:
    count = f"{len(inspection.tasks)} " if len(inspection.tasks) > WIDE else ""
    return f"Cosines between the {count}{cosines_of(inspection)}"


def _basis_names(inspection: Inspection) -> list[str]:
    return [f"B{m}" for m in range(inspection.num_bases)]


def _cosines(products: Array, noise: float) -> Tensor:
    """From the inner products [T, T]; vectors no longer than `noise` count as zero."""
    lengths = np.sqrt(np.maximum(products.diagonal(), 0.0))
    known = lengths > noise
    inverse = np.divide(1.0, lengths, where=known, out=np.zeros_like(lengths))
    cosines = np.clip(products * np.outer(inverse, inverse), -1.0, 1.0)
    np.fill_diagonal(cosines, known.astype(np.float64))
    return torch.from_numpy(cosines)


def _energy(loss: float, total: float) -> float:
    return 1.0 - loss / total if total > 0 else 1.0


def _fixed(value: float, places: int) -> str:
    """`places` decimals; one digit of what would vanish, but 0 for rounding errors beside 1."""
    if 1e-9 <= abs(value) < 0.5 * 10**-places:
        return f"{value:.0e}"
    return f"{value:.{places}f}" if abs(value) < 1e4 else f"{value:.{places + 1}g}"


def _four(value: float) -> str:
    return "0" if value == 0 else f"{value:#.4g}".removesuffix(".")


def _plural(noun: str, count: int) -> str:
    if count == 1:
        return noun
    return noun[: -len("basis")] + "bases" if noun.endswith("basis") else f"{noun}s"


def _float(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _or_infinity(value: Any) -> float:
    return math.inf if value is None else float(value)


def _plain_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
