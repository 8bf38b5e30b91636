"""How far the answers of a configuration agree with those of the present one.

Rows of labels and scores agree as canaries' do (`qinfer.traffic.differences`): whole numbers and texts if they are
equal, a vector of floats if its greatest element is the same one. Other floats have a distance: the largest difference
as a part of the largest value.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from qinfer.cli.analyze.space import Candidate, computations
from qinfer.cli.client import GatewayClient
from qinfer.cli.request_data import DataRequest
from qinfer.errors import InvalidRequest
from qinfer.tensors import Tensor, to_numpy
from qinfer.traffic.differences import Array, Rule, compared

MOST, MOST_BYTES = 256, 64 * 2**20
"""Requests whose answers are compared, and the most bytes of the present configuration's answers."""

Answer = tuple[Tensor, ...]
AskedModel = tuple[str, Sequence[DataRequest]]


class Accuracy:
    """The agreement of each choice of computations, `known` once it is measured.

    `asked` has the models that get requests; the answers of the `present` configurations are read when needed.
    """

    def __init__(self, client: GatewayClient, asked: Sequence[AskedModel], present: Mapping[str, Candidate]) -> None:
        self._client, self._asked, self._present = client, asked, present
        self._first: list[list[Answer]] = []
        self.known = {computations(present): 1.0}

    def of(self, candidates: Mapping[str, Candidate], load: Callable[[Mapping[str, Candidate]], None]) -> float:
        """Returns the agreement of candidates that are loaded; `load` loads others.

        Raises:
            QinferError: A request failed.
        """
        key = computations(candidates)
        if key not in self.known:
            if not self._first:
                load(self._present)
                self._first = [
                    list(self._answers(model, requests[:MOST], MOST_BYTES)) for model, requests in self._asked
                ]
                load(candidates)
            self.known[key] = min(
                agreement(list(zip(first, self._answers(model, requests[: len(first)]), strict=True)))
                for (model, requests), first in zip(self._asked, self._first, strict=True)
            )
        return self.known[key]

    def _answers(self, model: str, requests: Sequence[DataRequest], most_bytes: float = math.inf) -> Iterator[Answer]:
        for one in requests:
            inputs = {tensor.name: tensor for tensor in one.tensors}
            answer = self._client.infer(model, inputs, parameters=one.parameters).tensors
            yield answer
            most_bytes -= sum(tensor.nbytes for tensor in answer)
            if most_bytes < 0:
                break


def agreement(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    """Returns how far pairs of answers to the same requests agree, from 0 to 1: the least of all outputs.

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
