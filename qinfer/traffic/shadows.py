"""The differences between shadows and the stable target; one thread compares all shadows of a gateway."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from qinfer.errors import InvalidRequest
from qinfer.tensors import Tensor, to_numpy
from qinfer.traffic.differences import Array, Rule, Sample, Samples, Summary, compared


class ShadowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Shadows of a target, in one gateway.

    Attributes:
        compared: Shadows whose answer was compared with that of the stable target.
        disagreed: Compared shadows of which an output has a row that disagrees.
        failed: The shadow target answered with an error, or with outputs that can't be compared.
        dropped: Not compared: too many shadows are in flight, the stable target has not answered, or the shadow was not
            executed in time.
    """

    compared: int = 0
    disagreed: int = 0
    failed: int = 0
    dropped: int = 0


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
