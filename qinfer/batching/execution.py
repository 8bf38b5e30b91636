"""One batch on its way through a model instance: the items, what the backend answered, and where the time went.

It is the `Context` that backends answer through. One thread at a time touches it: the event loop makes it, an
instance's thread runs it, the event loop reads it.
"""

import logging
import time
from collections.abc import Sequence

from qinfer.backends.base import Backend, Batch
from qinfer.batching.policy import Item
from qinfer.delivery.base import Lease
from qinfer.errors import InferenceFailed, OutputMismatch, QinferError
from qinfer.messages import InferRequest
from qinfer.tensors import Tensor

logger = logging.getLogger(__name__)

Answer = tuple[Tensor, ...] | QinferError
"""What an item gets: its outputs, or why there are none."""


class Pending(Item, kw_only=True, eq=False):
    """A request in a worker's hands.

    Attributes:
        lease: The lease on its entry.
        request: The decoded request.
        lost: The lease is lost: somebody else answers, so whatever was done for it is discarded.
    """

    lease: Lease
    request: InferRequest
    lost: bool = False


class Execution:
    """A batch that runs, or ran; see the module docstring for who may touch it when.

    Args:
        items: The batch's items, in batch order.
        batch: The assembled arrays.
        input_ns: How long assembling took.
    """

    __slots__ = ("answers", "batch", "begin_ns", "earlier", "end_ns", "error", "input_ns", "items", "respond_ns")

    def __init__(self, items: Sequence[Pending], batch: Batch, input_ns: int) -> None:
        self.items = items
        self.batch = batch
        self.input_ns = input_ns
        self.answers: list[Answer | None] = [None] * len(items)
        self.earlier: list[tuple[int, Answer]] = []
        """Responses that were not final, as (item, answer), in order."""
        self.error: QinferError | None = None
        self.begin_ns = self.respond_ns = self.end_ns = 0

    def respond(self, item: int, outputs: Answer, *, final: bool = True) -> None:
        """Takes an answer from the backend; see `Context.respond`.

        Raises:
            OutputMismatch: The item has its final answer already.
        """
        if not self.respond_ns:
            self.respond_ns = time.perf_counter_ns()
        if self.answers[item] is not None:
            raise OutputMismatch(f"the model answered item {item} of its batch after that item's final answer")
        if final:
            self.answers[item] = outputs
        else:
            self.earlier.append((item, outputs))

    def cancelled(self, item: int) -> bool:
        """Tells whether nobody waits for this item any more."""
        return self.items[item].lost

    def run(self, backend: Backend) -> None:
        """Executes the batch; afterwards every item has an answer. Raises nothing: the instance's thread must live."""
        self.begin_ns = time.perf_counter_ns()
        try:
            backend.execute(self.batch, self)
            if None in self.answers:
                self.error = OutputMismatch(
                    f"the model answered {len(self.items) - self.answers.count(None)} of the {len(self.items)} items "
                    "of its batch; every item needs a final answer"
                )
        except QinferError as error:
            self.error = error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the boundary to the model's code, which may even call `sys.exit`
            logger.exception("execution failed", extra={"model": self.items[0].request.model})
            self.error = InferenceFailed(str(error) or type(error).__name__)
        self.end_ns = time.perf_counter_ns()
        if self.error is not None:
            self.answers = [self.error if answer is None else answer for answer in self.answers]

    @property
    def infer_ns(self) -> int:
        """Time from the start of the execution to the first answer."""
        return (self.respond_ns or self.end_ns) - self.begin_ns

    @property
    def output_ns(self) -> int:
        """Time from the first answer to the end of the execution."""
        return self.end_ns - (self.respond_ns or self.end_ns)
