"""A decoupled model's responses to a bulk batch: each row is a request with any number of them."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from qinfer.backends.base import Array, Context
from qinfer.batching.execution import Answer
from qinfer.batching.streams import nbytes_of
from qinfer.core.messages import RESPONSE_OVERHEAD_BYTES, InferRequest, Response, Scalar
from qinfer.errors import Cancelled, DeadlineExceeded, OutputMismatch, PayloadTooLarge, QinferError
from qinfer.tensors import Tensor, to_numpy

_LOOK_S = 0.5


class StreamBounds(NamedTuple):
    """Limits of the responses to a row, and of the model's silence."""

    row_bytes: int
    idle_s: float


class _RowStream:
    __slots__ = ("error", "is_open", "nbytes", "responses")

    def __init__(self) -> None:
        self.responses: list[dict[str, Array]] = []
        self.nbytes = 0
        self.is_open = True
        self.error: QinferError | None = None


class RowStreams:
    """The `Context` of a decoupled bulk batch; an item is a row. Thread-safe."""

    def __init__(
        self, rows: int, bounds: StreamBounds, problem: Callable[[Sequence[Tensor]], str | None], calls: Context
    ) -> None:
        self._rows = [_RowStream() for _ in range(rows)]
        self._bounds = bounds
        self._problem = problem
        self._calls = calls
        self._changed = threading.Condition()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._heard_s = time.monotonic()
        self._is_over = False

    @property
    def is_decoupled(self) -> bool:
        """Always true."""
        return True

    @property
    def window_bytes(self) -> int:
        """0: responses never wait."""
        return 0

    def respond(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Stores a response."""
        self.offer(item, outputs, final=final, parameters=parameters)

    def offer(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Stores a response; an error ends its row, even if not final."""
        del parameters
        row = self._rows[item]
        with self._changed:
            self._heard_s = time.monotonic()
            if self._is_over or row.error is not None:
                raise Cancelled("the row was abandoned")
            if not row.is_open:
                raise OutputMismatch("the model answered a row after its final response")
            self._add_response(row, outputs)
            row.is_open = row.error is None and not final
            self._changed.notify_all()
            if isinstance(row.error, PayloadTooLarge):
                raise Cancelled(row.error.message)

    def reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        """Refuses: a row is executed once."""
        self._calls.reschedule(item, states)

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        """Calls back when the row is abandoned."""
        with self._changed:
            self._callbacks[item] = callback

    def cancelled(self, item: int) -> bool:
        """Returns whether the row is abandoned."""
        return self._is_over or self._rows[item].error is not None or self._calls.cancelled(item)

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        """Runs another model."""
        return self._calls.call(request, made_for)

    def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
        """Runs another decoupled model."""
        return self._calls.stream(request, made_for)

    def wait(self, progress: Callable[[], None]) -> None:
        """Waits for final responses; late rows fail."""
        with self._changed:
            while any(row.is_open for row in self._rows):
                if self._calls.cancelled(0):
                    raise Cancelled("the batch was abandoned")
                left_s = self._heard_s + self._bounds.idle_s - time.monotonic()
                if left_s <= 0:
                    self._give_up()
                    return
                self._changed.wait(min(left_s, _LOOK_S))
                progress()

    def close(self) -> None:
        """Rejects further responses, and tells the model."""
        with self._changed:
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks.values():
            callback(0)

    def outputs(self, names: Sequence[str], *, is_batched: bool) -> dict[str, Array]:
        """Returns outputs as `[rows]` of tuples with an array per response."""
        arrays = {}
        for name in names:
            arrays[name] = np.empty(len(self._rows), object)
            for number, row in enumerate(self._rows):
                values = (response[name] for response in row.responses)
                arrays[name][number] = tuple(v.reshape(v.shape[1:]) for v in values) if is_batched else tuple(values)
        return arrays

    def errors(self) -> dict[int, QinferError]:
        """Returns errors by position in the batch."""
        return {number: row.error for number, row in enumerate(self._rows) if row.error is not None}

    def _add_response(self, row: _RowStream, outputs: Answer) -> None:
        if isinstance(outputs, QinferError):
            row.error = outputs
            return
        row.nbytes += nbytes_of(outputs) + RESPONSE_OVERHEAD_BYTES
        if row.nbytes > self._bounds.row_bytes:
            row.error = PayloadTooLarge(
                f"the responses of the row take more than {self._bounds.row_bytes} bytes; ask for less, or raise "
                "QINFER_BULK__MAX_READ_BYTES, which is 16 times as much"
            )
        elif outputs and (problem := self._problem(outputs)) is not None:
            row.error = OutputMismatch(problem)
        elif outputs:
            # Copied: it may be memory of the model's process, which waits for the return.
            row.responses.append({tensor.name: np.array(to_numpy(tensor)) for tensor in outputs})

    def _give_up(self) -> None:
        text = f"the model sent no response for {self._bounds.idle_s:g} s, and no final one for the row"
        for row in self._rows:
            if row.is_open:
                row.is_open, row.error = False, DeadlineExceeded(text)
