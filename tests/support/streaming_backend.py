"""A decoupled backend for tests: it answers from threads of its own, after `execute` has returned."""

import threading

import numpy as np

from qinfer.backends.base import Batch, Context, respond_rows
from qinfer.backends.stub import StubBackend
from qinfer.errors import QinferError
from qinfer.tensors import Tensor, from_numpy

DECOUPLED = "model_transaction_policy { decoupled: true }"
RESUMES = DECOUPLED + ' parameters { key: "qinfer.stream_resume" value { string_value: "skip" } }'
ENDLESS = 1_000_000.0


class StreamingBackend(StubBackend):
    """Answers `x` with as many responses as its first element says, and then with an empty final one.

    Attributes:
        steps: Responses that may be sent: each takes one.
        errors: What sending raised.
        raises: It raises in `execute`, after the first response of each item.
    """

    def __init__(self, gate: threading.Event | None = None) -> None:
        super().__init__(gate)
        self.steps = threading.Semaphore(0)
        self.sent = 0
        self.errors: list[QinferError] = []
        self.raises = False

    def execute(self, batch: Batch, ctx: Context) -> None:
        """See the class."""
        if not ctx.is_decoupled:  # a warm-up
            respond_rows(batch, ctx, {"y": batch.inputs["x"]}, {"y": "FP32"})
            return
        self.started.release()
        for item in range(len(batch.requests)):
            count = int(batch.inputs["x"][item].flat[0])
            if self.raises:
                ctx.respond(item, number(0), final=False)
                raise ValueError("the model is broken")
            threading.Thread(target=self._send, args=(ctx, item, count), daemon=True).start()

    def _send(self, ctx: Context, item: int, count: int) -> None:
        try:
            for index in range(count):
                self.steps.acquire()
                ctx.respond(item, number(index), final=False)
                self.sent += 1
            self.steps.acquire()
            ctx.respond(item, ())
        except QinferError as error:
            self.errors.append(error)

    def let(self, steps: int) -> None:
        """Lets so many responses more be sent."""
        self.steps.release(steps)


def number(index: int) -> tuple[Tensor, ...]:
    """Returns the outputs of a response: 8 bytes."""
    return (from_numpy("y", np.full((1, 2), index, "<f4")),)
