"""Fakes for tests of code that uses qinfer, and for qinfer's own: no broker, no model runtime, no sleeping.

clock = FakeClock()
delivery, store = MemoryDelivery(clock), MemoryControlStore(clock)
clock.advance(10)          # leases end when a test says so
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping

from qinfer.backends.stub import StubBackend
from qinfer.control.memory_store import MemoryControlStore
from qinfer.delivery.memory import MemoryDelivery
from qinfer.repository.spec import BatchingSpec, ModelSpec, TensorSpec

__all__ = [
    "FakeClock",
    "MemoryControlStore",
    "MemoryDelivery",
    "StubBackend",
    "eventually",
    "stub_spec",
    "wait_until",
]


class FakeClock:
    """A monotonic clock that moves when it is told to.

    Args:
        start_s: Where it starts.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()

    def monotonic_s(self) -> float:
        """Returns the present."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the present."""
        with self._lock:
            self._now_s += seconds


def stub_spec(
    name: str = "stub",
    *,
    mode: str = "echo",
    dims: tuple[int, ...] = (2,),
    max_batch_size: int = 8,
    max_queue_delay_s: float = 0.0,
    parameters: Mapping[str, str] | None = None,
) -> ModelSpec:
    """Returns a model for `StubBackend`: `y = f(x)`, both `float32[batch, *dims]`, with dynamic batching.

    Args:
        name: Its name.
        mode: What `StubBackend` does: `echo`, `add`, `raise` or `call:<model>`.
        dims: Dimensions of input and output; -1 is variable.
        max_batch_size: 0 = no batch dimension.
        max_queue_delay_s: How long a request may wait for company.
        parameters: Further parameters.
    """
    return ModelSpec(
        name=name,
        backend="stub",
        max_batch_size=max_batch_size,
        inputs=(TensorSpec(name="x", datatype="FP32", dims=dims),),
        outputs=(TensorSpec(name="y", datatype="FP32", dims=dims),),
        batching=BatchingSpec(preferred_sizes=(max_batch_size,), max_queue_delay_s=max_queue_delay_s)
        if max_batch_size
        else None,
        parameters={"mode": mode, **(parameters or {})},
    )


def wait_until(
    predicate: Callable[[], bool], timeout_s: float = 10.0, description: str | Callable[[], str] = "the condition"
) -> None:
    """Blocks until something outside this process is so; inside it, wait for an event instead.

    Args:
        predicate: What to wait for.
        timeout_s: How long.
        description: What is missing when it does not come true; a callable is asked then.

    Raises:
        TimeoutError: It did not come true in time.
    """
    until_s = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > until_s:
            text = description if isinstance(description, str) else description()
            raise TimeoutError(f"not within {timeout_s} s: {text}")
        time.sleep(0.01)


async def eventually(
    predicate: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10.0, description: str = "the condition"
) -> None:
    """Like `wait_until`, for conditions that this event loop brings about.

    Raises:
        TimeoutError: It did not come true in time.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        result = predicate()
        if result if isinstance(result, bool) else await result:
            return
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {timeout_s} s: {description}")
        await asyncio.sleep(0.002)
