"""Splitting of requests with more rows than `max_batch_size`: the parts run as requests of their own.

Parts may run in different workers and batches. The whole is a pending request without an entry, whose answer joins
theirs in order. A failed part, the whole's deadline, or a caller that leaves ends all parts. Stored requests (`/v1`,
bridges, labeling) are not split.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import InferenceFailed, InvalidRequest, OutputMismatch, QinferError
from qinfer.models.spec import MAX_PARTS, ModelSpec
from qinfer.submission.pending import Inner, PendingCall, PendingRequests
from qinfer.tensors import Tensor, element_count, iter_bytes


class PartSink(Inner):
    """The sink of one part."""

    __slots__ = ("_place", "_whole")
    no_stream = "a request that is split takes one response of each part"

    def __init__(self, whole: "Whole", place: int) -> None:
        self._whole, self._place = whole, place

    def deliver(self, response: Response) -> None:
        """Passes the response to the whole."""
        self._whole.landed(self._place, response)

    def fail(self, error: Exception) -> None:
        """Fails the whole."""
        self._whole.crashed(error)


class Whole:
    """A request that is executed in parts."""

    def __init__(self, table: PendingRequests, pending: PendingCall, count: int) -> None:
        self._table, self._pending = table, pending
        self._responses: list[Response | None] = [None] * count
        self._parts: list[PendingCall] = []
        self._missing = count
        self._is_over = False

    def started(self, part: PendingCall) -> None:
        """Records a submitted part."""
        self._parts.append(part)
        if self._is_over:  # an earlier part has failed, or this one was answered at once
            self._cancel_parts()

    def landed(self, place: int, response: Response) -> None:
        """Takes a part's response; the last, or a failure, ends the request."""
        if self._is_over:
            return
        if response.failure is None and (response.index or not response.final):
            self.crashed(InferenceFailed(f"model '{response.model}' gave several responses to a part of the request"))
            return
        self._responses[place] = response
        self._missing -= 1
        if response.failure is not None:
            self._deliver_answer(response)
        elif not self._missing:
            try:
                self._deliver_answer(merged([each for each in self._responses if each is not None]))
            except QinferError as error:
                self.crashed(error)

    def crashed(self, error: Exception) -> None:
        """Fails the whole request."""
        if self._is_over:
            return
        self._cancel_parts()
        if self._table.remove(self._pending):
            self._table.fail(self._pending, error)

    def left(self, caller: PendingCall) -> None:
        """Cancels every part."""
        del caller
        self._cancel_parts()

    def _deliver_answer(self, response: Response) -> None:
        self._cancel_parts()
        if self._table.remove(self._pending):
            self._table.answer_caller(
                self._pending, msgspec.structs.replace(response, request_id=self._pending.request_id)
            )

    def _cancel_parts(self) -> None:
        self._is_over = True
        parts, self._parts = self._parts, []
        for part in parts:
            self._table.cancel(part)


def submit_parts(
    submit: Callable[[OutgoingRequest, Inner, float], PendingCall],
    table: PendingRequests,
    parts: Sequence[OutgoingRequest],
    pending: PendingCall,
    timeout_s: float,
) -> None:
    """Submits the parts of a checked request; a refusal cancels the other parts."""
    whole = pending.shared = Whole(table, pending, len(parts))
    table.add(pending, pending.started_s + timeout_s)
    try:
        for place, part in enumerate(parts):
            whole.started(submit(part, PartSink(whole, place), timeout_s))
    except QinferError:
        whole.left(pending)
        table.remove(pending)
        raise


def is_large(request: OutgoingRequest, spec: ModelSpec) -> bool:
    """Tells whether the first input has more rows than a batch."""
    inputs = request.inputs
    return bool(spec.max_batch_size and inputs and inputs[0].shape and inputs[0].shape[0] > spec.max_batch_size)


def check_whole(request: OutgoingRequest, spec: ModelSpec) -> None:
    """Raises `InvalidRequest` for a request that needs splitting."""
    if is_large(request, spec):
        raise InvalidRequest(
            f"inference request batch-size must be <= {spec.max_batch_size} for '{spec.name}': requests that are "
            "stored are not split; send it to the model's infer route, or in parts"
        )


def parts_of(request: OutgoingRequest, max_rows: int) -> list[OutgoingRequest]:
    """Cuts a request into parts that share its bytes; one version executes all."""
    rows = request.inputs[0].shape[0]
    starts = range(0, rows, max_rows)
    assert len(starts) <= MAX_PARTS, "the request was checked"
    columns = [_cut(tensor, max_rows) for tensor in request.inputs]
    landed = [(at, len(tensor.data) // rows) for at, tensor in zip(request.landed_at, request.inputs, strict=False)]
    return [
        msgspec.structs.replace(
            request,
            inputs=tuple(column[place] for column in columns),
            inputs_digest=b"",
            moves=False,
            landed_at=tuple(at + start * row_bytes for at, row_bytes in landed),
        )
        for place, start in enumerate(starts)
    ]


def merged(responses: Sequence[Response]) -> Response:
    """Joins the responses of parts: the rows of all, everything else from the first."""
    first = responses[0]
    columns = zip(*[response.outputs for response in responses], strict=False)
    outputs = tuple(_joined(column) for column in columns)
    if any(len(response.outputs) != len(first.outputs) for response in responses):
        raise OutputMismatch("the parts of the request have different outputs")
    return msgspec.structs.replace(first, outputs=outputs, cache="")


def _cut(tensor: Tensor, max_rows: int) -> list[Tensor]:
    rows, data = tensor.shape[0], memoryview(tensor.data)
    places = [*range(0, rows, max_rows), rows]
    if tensor.datatype == "BYTES":
        per_row = element_count(tensor.shape[1:])
        ends = list(accumulate((4 + len(element) for element in iter_bytes(data)), initial=0))
        offsets = [ends[place * per_row] for place in places]
    else:
        offsets = [place * (len(data) // rows) for place in places]
    return [
        Tensor(tensor.name, tensor.datatype, (end - start, *tensor.shape[1:]), data[begin:stop])
        for start, end, begin, stop in zip(places, places[1:], offsets, offsets[1:], strict=False)
    ]


def _joined(column: Sequence[Tensor]) -> Tensor:
    first = column[0]
    if any((t.name, t.datatype, t.shape[1:]) != (first.name, first.datatype, first.shape[1:]) for t in column):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in column)
        raise OutputMismatch(f"the parts of the request have output '{first.name}' in shapes that differ: {shapes}")
    shape = (sum(tensor.shape[0] for tensor in column), *first.shape[1:])
    return Tensor(first.name, first.datatype, shape, b"".join(tensor.data for tensor in column))
