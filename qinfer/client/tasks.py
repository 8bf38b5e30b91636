"""Many calls at a time in tasks, for the asynchronous client's `stream`."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from qinfer.client.order import Reorder, check_concurrency
from qinfer.errors import QinferError

T = TypeVar("T")
R = TypeVar("R")


def stream_in_tasks(
    items: Iterable[T] | AsyncIterable[T],
    call: Callable[[int, T], Awaitable[R]],
    *,
    concurrency: int,
    ordered: bool,
) -> AsyncIterator[tuple[int, R | QinferError]]:
    """Awaits `call(index, item)` for each item, at most `concurrency` at a time.

    What the items' iterator raises is raised here, after the answers to what it gave before. Any error of `call` but a
    `QinferError` ends the iteration.

    Args:
        items: What to call with; read only when there is a place.
        call: The call; runs in a task of its own, which is cancelled when the iteration ends early.
        concurrency: The most items taken and not handed out.
        ordered: Hand out in the items' order.

    Yields:
        The index of an item, and what the call returned, or the `QinferError` that it raised.

    Raises:
        InvalidRequest: `concurrency` is not positive.
    """
    check_concurrency(concurrency)
    return _stream(_Calls(items, call, concurrency), Reorder(ordered=ordered))


async def _stream(calls: "_Calls[T, R]", order: Reorder[R | QinferError]) -> AsyncIterator[tuple[int, R | QinferError]]:
    # A task group can't be open across a `yield`: leaving the iteration would come out of it as an exception group.
    # So it lives in one task, which ends with the iteration.
    running = asyncio.create_task(calls.run())
    try:
        while (found := await calls.done.get()) is not None:
            for answer in order.take(*found):
                calls.places.release()
                yield answer
        try:
            await running
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the first ended the others
    finally:
        running.cancel()
        await asyncio.wait([running])
    if calls.broken is not None:
        raise calls.broken


class _Calls(Generic[T, R]):
    """Starts the calls, and reports what becomes of them; `done` ends with `None`."""

    def __init__(
        self, items: Iterable[T] | AsyncIterable[T], call: Callable[[int, T], Awaitable[R]], concurrency: int
    ) -> None:
        self._items = items
        self._call = call
        self.places = asyncio.Semaphore(concurrency)
        self.done: asyncio.Queue[tuple[int, R | QinferError] | None] = asyncio.Queue()  # `places` bounds it
        self.broken: Exception | None = None

    async def run(self) -> None:
        """Makes all calls."""
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
            except Exception as error:  # noqa: BLE001  # the caller's own; raised again by `_stream`
                self.broken = error
                return
            group.create_task(self._one(index, item))
            index += 1

    async def _one(self, index: int, item: T) -> None:
        outcome: R | QinferError
        try:
            outcome = await self._call(index, item)
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
