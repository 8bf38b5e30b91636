"""From Celery's threads to the one event loop of the process, where the adapters of queue and control store live."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class Stopped(Exception):
    """The work was broken off because the process ends; it is to be done by another."""


class Bridge:
    """An event loop in a thread of its own; begins with the object, ends with `close`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="bulk-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it; for any thread but the loop's.

        Raises:
            Stopped: `stop` was called before it ended.
        """
        with self._lock:
            if self._stopping:
                work.close()
                raise Stopped
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
        try:
            return future.result()
        except (CancelledError, asyncio.CancelledError):
            raise Stopped from None
        finally:
            with self._lock:
                self._running.discard(future)

    def stop(self) -> None:
        """Breaks off what runs, and takes nothing new but `close`'s; safe in a handler of signals."""
        self._loop.call_soon_threadsafe(self._cancel)

    def close(self, *last: Coroutine[Any, Any, None]) -> None:
        """Runs what closes the adapters, and ends the loop."""
        for work in last:
            asyncio.run_coroutine_threadsafe(work, self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _cancel(self) -> None:
        with self._lock:
            self._stopping = True
            running = list(self._running)
        for future in running:
            future.cancel()
