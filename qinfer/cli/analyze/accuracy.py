"""How far the answers of a configuration agree with those of the present one.

Rows of labels and scores agree as canaries' do (`qinfer.traffic.differences`): whole numbers and texts if they are
equal, a vector of floats if its greatest element is the same one. Other floats have a distance: the largest difference
as a part of the largest value.
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from qinfer.cli.analyze.space import Candidate, Computation
from qinfer.cli.client import GatewayClient
from qinfer.cli.request_data import DataRequest
from qinfer.errors import InvalidRequest
from qinfer.tensors import Tensor, to_numpy
from qinfer.traffic.differences import Array, Rule, compared

MOST, MOST_BYTES = 256, 64 * 2**20
"""Requests whose answers are compared, and the most bytes of the present configuration's answers."""

Answer = tuple[Tensor, ...]


class Accuracy:
    """The agreement of each `Computation`, measured once; the present configuration's answers are read when needed.

    `asked` has the models that are asked, and their requests.
    """

    def __init__(
        self, client: GatewayClient, asked: Sequence[tuple[str, Sequence[DataRequest]]], today: Candidate
    ) -> None:
        self._client, self._asked, self._today = client, asked, today
        self._first: list[list[Answer]] = []
        self.known: dict[Computation, float] = {today.computation: 1.0}

    def of(self, candidate: Candidate, load: Callable[[Candidate], None]) -> float:
        """Returns the agreement of a candidate that is loaded; `load` loads another one.

        Raises:
            QinferError: A request failed.
        """
        known = self.known.get(candidate.computation)
        if known is None:
            if not self._first:
                load(self._today)
                self._first = [self._answers(*each, MOST, MOST_BYTES) for each in self._asked]
                load(candidate)
            known = 1.0
            for each, first in zip(self._asked, self._first, strict=True):
                answers = self._answers(*each, len(first), math.inf)
                known = min(known, agreement(list(zip(first, answers, strict=True))))
            self.known[candidate.computation] = known
        return known

    def _answers(self, model: str, requests: Sequence[DataRequest], most: int, most_bytes: float) -> list[Answer]:
        found, nbytes = list[Answer](), 0
        for one in islice(requests, most):
            inputs = {tensor.name: tensor for tensor in one.tensors}
            found.append(self._client.infer(model, inputs, parameters=one.parameters).tensors)
            nbytes += sum(tensor.nbytes for tensor in found[-1])
            if nbytes > most_bytes:
                break
        return found


def agreement(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    """Returns how far answers agree, from 0 to 1: the least of all outputs.

    Args:
        pairs: The answers of the first and of the other configuration to each request.

    Raises:
        InvalidRequest: The answers have different outputs.
    """
    shares: dict[str, list[float]] = {}
    for first, other in pairs:
        ours, theirs = ({tensor.name: to_numpy(tensor) for tensor in answer} for answer in (first, other))
        if ours.keys() != theirs.keys():
            raise InvalidRequest(f"the outputs differ: {', '.join(sorted(ours.keys() ^ theirs.keys()))}")
        for name, values in ours.items():
            shares.setdefault(name, []).append(_agreement(values, theirs[name]))
    return min((float(np.mean(each)) for each in shares.values()), default=1.0)


def _agreement(first: Array, other: Array) -> float:
    if first.shape != other.shape:
        return 0.0
    rows = (first, other) if first.ndim else (first[np.newaxis], other[np.newaxis])
    rule = Rule().for_values(rows[0])
    if rule.agree != "within":
        return float(np.mean(compared(rule, *rows).agrees)) if len(rows[0]) else 1.0
    ours, theirs = (np.asarray(one, np.float64) for one in rows)
    with np.errstate(invalid="ignore"):
        differs = np.where((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)), 0.0, np.abs(ours - theirs))
    largest = float(np.max(np.abs(ours), initial=0.0, where=np.isfinite(ours)))
    distance = float(np.max(differs, initial=0.0)) / (largest or 1.0)
    return 1.0 - min(distance, 1.0) if np.isfinite(distance) else 0.0
