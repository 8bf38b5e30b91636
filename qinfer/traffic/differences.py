"""The differences between the outputs of two targets, row by row: pure, on whole batches with numpy.

    values of both ──▶ compared ──▶ RowComparison: agreement and distance of each row ──▶ Summary, Samples
    answers of shadow and stable target ──▶ Differences: summary of each output, samples (one thread a gateway)

Rows agree by one of three rules: `equal` (all elements are the same), `argmax` (the greatest element of each vector is
the same one), or `within` (no element exceeds the tolerance). A row's distance is the largest one of its elements;
`equal` has no distances. Rows of different shapes, or with a NaN of only one target, are unmeasured and disagree.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest
from qinfer.tensors import Tensor, to_numpy

Array = npt.NDArray[Any]
Values = Array | Sequence[Array]
"""`[rows, …]`, or an array for each row where shapes differ."""

_ELEMENTS, _CHARACTERS = 8, 200


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The condition under which rows of an output agree.

    Attributes:
        agree: `argmax`, `equal` or `within`; empty = `equal` for texts and whole numbers, `argmax` for one vector of
            floats a row, and `within` for other floats.
        tolerance: The distance up to which `within` counts elements as equal.
        relative: The same as a share of the stable target's element; the two are added.
        nan: Whether a NaN of both targets at the same place is `equal`, or `differs`.
    """

    agree: Literal["", "argmax", "equal", "within"] = ""
    tolerance: float = 0.0
    relative: float = 0.0
    nan: Literal["equal", "differs"] = "equal"

    def for_values(self, values: Values) -> "Rule":
        """Fills in the default for these values, or raises `InvalidRequest`."""
        one = values if isinstance(values, np.ndarray) else next(iter(values), np.empty(0))
        axes = one.ndim - isinstance(values, np.ndarray)
        if self.agree in ("argmax", "within") and one.dtype.kind in "OSU":
            raise InvalidRequest(f"texts can't be compared by '{self.agree}'; leave it out, or say 'equal'")
        if self.agree == "argmax" and axes < 1:
            raise InvalidRequest("an output of one value a row has no argmax; say 'equal' or 'within'")
        if self.agree:
            return self
        is_vector = axes == 1 and (isinstance(values, list) or one.shape[1] > 1)
        by = "equal" if one.dtype.kind != "f" else "argmax" if is_vector else "within"
        return msgspec.structs.replace(self, agree=by)


class RowComparison(NamedTuple):
    """bool[rows], and float64[rows]: infinite where unmeasured, NaN by `equal`."""

    agrees: npt.NDArray[np.bool_]
    distances: npt.NDArray[np.float64]

    def most_different(self, count: int) -> list[int]:
        """Returns rows that differ, the most different first."""
        rank = np.nan_to_num(self.distances, nan=0.0, posinf=math.inf)
        order = np.lexsort((-rank, self.agrees))[:count]
        return [int(row) for row in order if not self.agrees[row] or rank[row] > 0]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of an output: numbers of rows, and the sum of `measured` distances."""

    rows: int = 0
    agreeing: int = 0
    unmeasured: int = 0
    measured: int = 0
    largest: float = 0.0
    total: float = 0.0

    @property
    def agreement(self) -> float:
        """The share of rows that agree; 1 without rows."""
        return self.agreeing / self.rows if self.rows else 1.0

    @property
    def mean(self) -> float:
        """The mean distance."""
        return self.total / self.measured if self.measured else 0.0

    def with_rows(self, rows: RowComparison) -> "Summary":
        """Adds the rows of a batch."""
        finite = rows.distances[np.isfinite(rows.distances)]
        return self + Summary(
            rows=len(rows.agrees),
            agreeing=int(np.count_nonzero(rows.agrees)),
            unmeasured=int(np.count_nonzero(np.isinf(rows.distances))),
            measured=finite.size,
            largest=float(finite.max(initial=0.0)),
            total=float(finite.sum()),
        )

    def __add__(self, other: "Summary") -> "Summary":
        return Summary(
            rows=self.rows + other.rows,
            agreeing=self.agreeing + other.agreeing,
            unmeasured=self.unmeasured + other.unmeasured,
            measured=self.measured + other.measured,
            largest=max(self.largest, other.largest),
            total=self.total + other.total,
        )


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A row in which an output differs.

    Attributes:
        row: The name of the row: the id of a request, or the key of a row.
        output: The output.
        stable: The stable target's value, shortened; empty = redacted.
        canary: The canary's value, likewise.
        agrees: Whether they agree.
        distance: The distance, if there is one.
    """

    row: str
    output: str
    stable: str
    canary: str
    agrees: bool
    distance: float | None

    @property
    def size_bytes(self) -> int:
        """Returns the approximate size in bytes."""
        return sum(len(text.encode()) for text in (self.row, self.output, self.stable, self.canary)) + 32


class Samples:
    """The most different rows, up to a number and a size."""

    def __init__(self, most: int = 20, most_bytes: int = 65_536, *, redact: bool = False) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._redact = redact
        self._kept: list[Sample] = []

    def add_rows(self, output: str, names: Sequence[str], stable: Values, canary: Values, rows: RowComparison) -> None:
        """Adds the most different rows of a batch."""
        for row in rows.most_different(self._most):
            distance = float(rows.distances[row])
            self._kept.append(
                Sample(
                    row=names[row][:_CHARACTERS],
                    output=output,
                    stable="" if self._redact else shown(stable[row]),
                    canary="" if self._redact else shown(canary[row]),
                    agrees=bool(rows.agrees[row]),
                    distance=distance if math.isfinite(distance) else None,
                )
            )
        self._kept.sort(key=_rank)
        del self._kept[self._most :]
        while sum(sample.size_bytes for sample in self._kept) > self._most_bytes:
            self._kept.pop()

    def all(self) -> list[Sample]:
        """Returns the rows, the most different first."""
        return list(self._kept)


def compared(rule: Rule, stable: Values, canary: Values) -> RowComparison:
    """Compares one output, or raises `InvalidRequest`."""
    if len(stable) != len(canary):
        raise InvalidRequest(
            f"the targets have {len(stable)} and {len(canary)} rows; only equal numbers can be compared"
        )
    rule = rule.for_values(stable)
    if isinstance(stable, np.ndarray) and isinstance(canary, np.ndarray) and stable.shape == canary.shape:
        return _alike(rule, stable, canary)
    rows = len(stable)
    found = RowComparison(np.zeros(rows, np.bool_), np.full(rows, math.nan if rule.agree == "equal" else math.inf))
    shapes = [(stable[row].shape, canary[row].shape) for row in range(rows)]
    for shape in {one for one, other in shapes if one == other}:
        chosen = [row for row in range(rows) if shapes[row] == (shape, shape)]
        part = _alike(rule, np.stack([stable[row] for row in chosen]), np.stack([canary[row] for row in chosen]))
        found.agrees[chosen], found.distances[chosen] = part
    return found


def _alike(rule: Rule, stable: Array, canary: Array) -> RowComparison:
    if rule.agree == "equal":
        return RowComparison(_equal(rule, stable, canary), np.full(len(stable), math.nan))
    ours, theirs = stable.astype(np.float64), canary.astype(np.float64)
    apart = _distances(rule, ours, theirs)
    distances = apart.reshape(len(apart), math.prod(apart.shape[1:])).max(axis=1, initial=0.0)
    if rule.agree == "argmax":
        return RowComparison(np.isfinite(distances) & _same_places(ours, theirs), distances)
    # Infinity and NaN have no share.
    allowed = rule.tolerance + rule.relative * np.nan_to_num(np.abs(ours), posinf=0.0)
    return RowComparison(_in_all(apart <= allowed), distances)


def _equal(rule: Rule, stable: Array, canary: Array) -> Array:
    same = np.asarray(stable == canary, np.bool_)
    if rule.nan == "equal" and stable.dtype.kind == canary.dtype.kind == "f":
        same |= np.isnan(stable) & np.isnan(canary)
    return _in_all(same)


def _in_all(marks: Array) -> Array:
    return np.asarray(marks.reshape(len(marks), math.prod(marks.shape[1:])).all(axis=1))


def _distances(rule: Rule, stable: Array, canary: Array) -> Array:
    """Returns the distances, infinite where only one target has a NaN, or infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart: Array = np.abs(stable - canary)
    apart[stable == canary] = 0.0  # two infinities
    nans = np.isnan(stable) & np.isnan(canary)
    apart[np.isnan(apart)] = math.inf
    if rule.nan == "equal":
        apart[nans] = 0.0
    return apart


def _same_places(stable: Array, canary: Array) -> Array:
    """Returns where both have their largest value in the same place; NaN is the least."""
    if not stable.size:
        return np.ones(len(stable), np.bool_)
    ours, theirs = (np.where(np.isnan(values), -math.inf, values).argmax(axis=-1) for values in (stable, canary))
    return _in_all(np.asarray(ours == theirs))


def shown(value: Any) -> str:
    """Returns a value as a short text."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str):
        return value if len(value) <= _CHARACTERS else f"{value[: _CHARACTERS - 1]}…"
    flat = np.asarray(value).reshape(-1)
    if flat.dtype.kind in "OSU":
        parts = [shown(one) for one in flat[:_ELEMENTS]]
    else:
        parts = [f"{one:.4g}" if flat.dtype.kind == "f" else str(one) for one in flat[:_ELEMENTS].tolist()]
    text = ", ".join([*parts, "…"] if flat.size > _ELEMENTS else parts)
    return text if np.ndim(value) == 0 else f"[{text}]"


def _rank(sample: Sample) -> tuple[bool, float]:
    return sample.agrees, -(math.inf if sample.distance is None else sample.distance)


class OutputDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between an output of a shadow and the same output of the stable target.

    Attributes:
        output: The output.
        rows: The rows that were compared.
        agreement: The share of rows that agree.
        mean_distance: The mean over rows with a distance.
        largest_distance: The largest distance.
        unmeasured: Rows without a distance: one target has a NaN or another shape.
    """

    output: str
    rows: int
    agreement: float
    mean_distance: float
    largest_distance: float
    unmeasured: int


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The differences at one moment."""

    outputs: list[OutputDifference] = []
    samples: list[Sample] = []


class Differences:
    """Compares a shadow with the stable target; `redact` keeps values out of the samples."""

    def __init__(self, rules: Mapping[str, Rule], sample_bytes: int, *, redact: bool) -> None:
        self.rules = rules
        self._summaries: dict[str, Summary] = {}
        self._samples = Samples(most_bytes=sample_bytes, redact=redact)

    def add(self, name: str, stable: Sequence[Tensor], shadow: Sequence[Tensor], *, is_batched: bool) -> bool:
        """Compares two answers; returns whether all agree, or raises `InvalidRequest`."""
        ours, theirs = _arrays(stable, is_batched=is_batched), _arrays(shadow, is_batched=is_batched)
        if ours.keys() != theirs.keys():
            raise InvalidRequest(f"the outputs differ: {', '.join(sorted(ours.keys() ^ theirs.keys()))}")
        agrees = True
        for output, values in ours.items():
            rows = compared(self.rules.get(output, Rule()), values, theirs[output])
            agrees = agrees and bool(rows.agrees.all())
            self._summaries[output] = self._summaries.get(output, Summary()).with_rows(rows)
            names = [name] if len(values) == 1 else [f"{name}[{row}]" for row in range(len(values))]
            if not rows.agrees.all():
                self._samples.add_rows(output, names, values, theirs[output], rows)
        return agrees

    def found(self) -> Found:
        """Returns the differences so far."""
        outputs = [
            OutputDifference(
                output=output,
                rows=summary.rows,
                agreement=summary.agreement,
                mean_distance=summary.mean,
                largest_distance=summary.largest,
                unmeasured=summary.unmeasured,
            )
            for output, summary in self._summaries.items()
        ]
        return Found(outputs=outputs, samples=[sample for sample in self._samples.all() if not sample.agrees])


def _arrays(tensors: Sequence[Tensor], *, is_batched: bool) -> dict[str, Array]:
    arrays = {tensor.name: to_numpy(tensor) for tensor in tensors}
    return arrays if is_batched else {name: array[np.newaxis] for name, array in arrays.items()}
