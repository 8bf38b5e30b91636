"""Many calls at a time in threads, for the blocking client's `stream`."""

from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import Generic, NamedTuple, TypeVar

from qinfer.client.order import Reorder, check_concurrency
from qinfer.errors import QinferError

T = TypeVar("T")
R = TypeVar("R")


def stream_in_threads(
    items: Iterable[T], call: Callable[[int, T], R], stop: Event, *, concurrency: int, ordered: bool
) -> Iterator[tuple[int, R | QinferError]]:
    """Calls `call(index, item)` for each item, at most `concurrency` at a time.

    What the items' iterator raises is raised here, after the answers to what it gave before. Any error of `call` but a
    `QinferError` ends the iteration.

    Args:
        items: What to call with; read in the caller's thread, and only when there is a place.
        call: The call; runs in a thread of its own.
        stop: Set when the iteration ends, so that calls under way end too. The program's end does not wait for them.
        concurrency: The most items taken and not handed out.
        ordered: Hand out in the items' order.

    Yields:
        The index of an item, and what the call returned, or the `QinferError` that it raised.

    Raises:
        InvalidRequest: `concurrency` is not positive.
    """
    check_concurrency(concurrency)
    return _stream(items, call, stop, concurrency, Reorder(ordered=ordered))


def _stream(
    items: Iterable[T], call: Callable[[int, T], R], stop: Event, concurrency: int, order: Reorder[R | QinferError]
) -> Iterator[tuple[int, R | QinferError]]:
    iterator = enumerate(items)
    broken: Exception | None = None
    has_more = True
    calls = _Calls(call)
    try:
        while has_more or calls.running:
            if has_more and calls.running + order.held < concurrency:
                try:
                    index, item = next(iterator)
                except StopIteration:
                    has_more = False
                except Exception as error:  # noqa: BLE001  # the caller's own; raised again below
                    has_more, broken = False, error
                else:
                    calls.start(index, item)
                if not calls.has_ended:
                    continue
            if calls.running:
                yield from order.take(*calls.take())
    finally:
        stop.set()
        calls.close()
    if broken is not None:
        raise broken


class _Raised(NamedTuple):
    """What a call raised that is no answer."""

    error: BaseException


class _Calls(Generic[T, R]):
    """Calls in threads: daemons, unlike those of `concurrent.futures`, so that Ctrl-C need not wait for an answer."""

    def __init__(self, call: Callable[[int, T], R]) -> None:
        self._call = call
        self._threads = 0
        self._todo: SimpleQueue[tuple[int, T] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, R | QinferError | _Raised]] = SimpleQueue()
        self.running = 0
        """Calls that were started and not taken."""

    @property
    def has_ended(self) -> bool:
        """Whether `take` would return at once."""
        return not self._done.empty()

    def start(self, index: int, item: T) -> None:
        """Makes a call, in a new thread where each of the others may be busy."""
        self.running += 1
        if self.running > self._threads:
            self._threads += 1
            Thread(target=self._serve, name=f"qinfer-stream-{self._threads}", daemon=True).start()
        self._todo.put((index, item))

    def take(self) -> tuple[int, R | QinferError]:
        """Waits until a call has ended; returns its index and answer, or raises what it raised."""
        index, outcome = self._done.get()
        self.running -= 1
        if isinstance(outcome, _Raised):
            raise outcome.error
        return index, outcome

    def close(self) -> None:
        """Lets the threads end, each after the call that it is in."""
        for _ in range(self._threads):
            self._todo.put(None)

    def _serve(self) -> None:
        while (job := self._todo.get()) is not None:
            index, item = job
            try:
                outcome: R | QinferError | _Raised = self._call(index, item)
            except QinferError as error:
                outcome = error
            except BaseException as error:  # noqa: BLE001  # raised again by `take`
                outcome = _Raised(error)
            self._done.put((index, outcome))
            del job, item, outcome  # an idle thread must not keep its last tensors alive
