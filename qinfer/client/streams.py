"""Many concurrent calls within a bound: the `stream` of the blocking client in threads, of the other in tasks."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import Generic, NamedTuple, TypeVar

from qinfer.client.steps import AsyncFlowRunner, Flow, FlowRunner, Outcome, Pause
from qinfer.errors import Cancelled, InvalidRequest, QinferError

T = TypeVar("T")
R = TypeVar("R")

Plan = Callable[[int, T], Flow[R]]


def stream_in_threads(
    items: Iterable[T], plan: Plan[T, R], run: FlowRunner, *, concurrency: int, ordered: bool
) -> Iterator[tuple[int, R | QinferError]]:
    """Runs the flow `plan(index, item)` of each item in threads; yields indices with results, or `QinferError`s.

    The caller's thread reads items when there is room for a call. An error of their iterator is raised after the
    answers to earlier items; an error of a call other than a `QinferError` ends the iteration. Running calls end at
    their next step then; the program's exit does not wait for them.
    """
    _check_concurrency(concurrency)
    return _answers_of_threads(items, _ThreadCalls(plan, run), concurrency, _Reorder(ordered=ordered))


def stream_in_tasks(
    items: Iterable[T] | AsyncIterable[T],
    plan: Plan[T, R],
    run: AsyncFlowRunner,
    *,
    concurrency: int,
    ordered: bool,
) -> AsyncIterator[tuple[int, R | QinferError]]:
    """Runs each item's flow in a task, cancelled at the iteration's end; see `stream_in_threads`."""
    _check_concurrency(concurrency)
    return _answers_of_tasks(_TaskCalls(items, plan, run, concurrency), _Reorder(ordered=ordered))


def _check_concurrency(concurrency: int) -> None:
    if concurrency < 1:
        raise InvalidRequest(f"concurrency is {concurrency}; expected at least 1")


class _Reorder(Generic[T]):
    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._next = 0
        self._held: dict[int, T] = {}

    @property
    def held(self) -> int:
        return len(self._held)

    def add_answer(self, index: int, value: T) -> Iterator[tuple[int, T]]:
        """Yields all answers that can be handed out now; each index, from 0, comes once."""
        if not self._ordered:
            yield index, value
            return
        self._held[index] = value
        while self._next in self._held:
            index = self._next
            self._next += 1
            yield index, self._held.pop(index)


def _answers_of_threads(
    items: Iterable[T], calls: "_ThreadCalls[T, R]", concurrency: int, order: _Reorder[R | QinferError]
) -> Iterator[tuple[int, R | QinferError]]:
    iterator = enumerate(items)
    broken: Exception | None = None
    has_more = True
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
                yield from order.add_answer(*calls.next_answer())
    finally:
        calls.close()
    if broken is not None:
        raise broken


class _RaisedError(NamedTuple):
    """An unexpected error of a call."""

    error: BaseException


class _ThreadCalls(Generic[T, R]):
    """Calls in daemon threads, unlike those of `concurrent.futures`, so that Ctrl-C need not wait for an answer."""

    def __init__(self, plan: Plan[T, R], run: FlowRunner) -> None:
        self._plan, self._run = plan, run
        self._stop = Event()
        self._threads = 0
        self._todo: SimpleQueue[tuple[int, T] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, R | QinferError | _RaisedError]] = SimpleQueue()
        self.running = 0

    @property
    def has_ended(self) -> bool:
        """Whether `next_answer` would return at once."""
        return not self._done.empty()

    def start(self, index: int, item: T) -> None:
        self.running += 1
        if self.running > self._threads:
            self._threads += 1
            Thread(target=self._process_calls, name=f"qinfer-stream-{self._threads}", daemon=True).start()
        self._todo.put((index, item))

    def next_answer(self) -> tuple[int, R | QinferError]:
        """Waits for an ended call; returns its index and answer, or raises its error."""
        index, outcome = self._done.get()
        self.running -= 1
        if isinstance(outcome, _RaisedError):
            raise outcome.error
        return index, outcome

    def close(self) -> None:
        """Ends the threads, each after the present step of its call."""
        self._stop.set()
        for _ in range(self._threads):
            self._todo.put(None)

    def _process_calls(self) -> None:
        while (job := self._todo.get()) is not None:
            index, item = job
            try:
                outcome: R | QinferError | _RaisedError = self._run(_until(self._stop, self._plan(index, item)))
            except QinferError as error:
                outcome = error
            except BaseException as error:  # noqa: BLE001  # raised again by `take`
                outcome = _RaisedError(error)
            self._done.put((index, outcome))
            # An idle thread must not keep its last tensors alive.
            del job, item, outcome


def _until(stop: Event, flow: Flow[R]) -> Flow[R]:
    """Ends a flow between two steps, and its pauses, once `stop` is set."""
    outcome: Outcome = None
    while not stop.is_set():
        try:
            step = flow.send(outcome)
        except StopIteration as end:
            result: R = end.value
            return result
        if isinstance(step, Pause):
            stop.wait(step.seconds)
            outcome = None
        else:
            outcome = yield step
    flow.close()
    raise Cancelled("the stream was left before this answer came")


async def _answers_of_tasks(
    calls: "_TaskCalls[T, R]", order: _Reorder[R | QinferError]
) -> AsyncIterator[tuple[int, R | QinferError]]:
    # A task group can't be open across a `yield`: leaving the iteration would raise an exception group. So it lives in
    # a task, which ends with the iteration.
    running = asyncio.create_task(calls.run())
    try:
        while (found := await calls.done.get()) is not None:
            for answer in order.add_answer(*found):
                calls.places.release()
                yield answer
        try:
            await running
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    finally:
        running.cancel()
        await asyncio.wait([running])
    if calls.broken is not None:
        raise calls.broken


class _TaskCalls(Generic[T, R]):
    """Calls in tasks of one group; `done` ends with `None`."""

    def __init__(
        self, items: Iterable[T] | AsyncIterable[T], plan: Plan[T, R], run: AsyncFlowRunner, concurrency: int
    ) -> None:
        self._items, self._plan, self._run = items, plan, run
        self.places = asyncio.Semaphore(concurrency)
        # `places` bounds the queue.
        self.done: asyncio.Queue[tuple[int, R | QinferError] | None] = asyncio.Queue()
        self.broken: Exception | None = None

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self._start_all(group)
        finally:
            self.done.put_nowait(None)

    async def _start_all(self, group: asyncio.TaskGroup) -> None:
        iterator = _iterate(self._items)
        index = 0
        while True:
            await self.places.acquire()
            try:
                item = await anext(iterator)
            except StopAsyncIteration:
                return
            except Exception as error:  # noqa: BLE001  # the caller's own; raised again by `_answers_of_tasks`
                self.broken = error
                return
            group.create_task(self._one(index, item))
            index += 1

    async def _one(self, index: int, item: T) -> None:
        outcome: R | QinferError
        try:
            outcome = await self._run(self._plan(index, item))
        except QinferError as error:
            outcome = error
        self.done.put_nowait((index, outcome))


async def _iterate(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
