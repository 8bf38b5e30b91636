"""A gateway that measures its console: `python -m tests.e2e.console.metered_gateway`.

The console's requests and roles, and the tasks that they start, are measured step by step with `time.thread_time`; so
is the work that they give to threads. The file of the variable `CONSOLE_METER` has the sum in seconds, as a double.
"""

import asyncio
import contextlib
import contextvars
import mmap
import os
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import uvloop

from qinfer_api import __main__ as program
from qinfer_api.console.routes import Console

METER = "CONSOLE_METER"

_is_console = contextvars.ContextVar("is_console", default=False)


class Meter:
    """The sum of processor time, in a file that other processes read at any time."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self.sum_s = 0.0

    @contextlib.contextmanager
    def on_console(self) -> Iterator[None]:
        """Measures the consoles of this process during the block."""
        with (
            mock.patch.object(Console, "__call__", _of_console(self, Console.__call__)),
            mock.patch.object(Console, "run", _of_console(self, Console.run)),
        ):
            yield

    def make_task(self, loop: Any, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        """Makes a task, which is measured if the console starts it; a task factory."""
        if not _is_console.get():
            return asyncio.Task(coroutine, loop=loop, **options)
        task = asyncio.Task(_measured(self, coroutine), loop=loop, **options)
        task.add_done_callback(lambda _: coroutine.close())  # it may be cancelled before its first step
        return task

    def run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a step of the console."""
        began_s = time.thread_time()
        try:
            return step(*arguments)
        finally:
            self.sum_s += time.thread_time() - began_s
            struct.pack_into("d", self._memory, 0, self.sum_s)


def read_meter(path: Path) -> float:
    """Returns the seconds that a meter has counted."""
    (seconds,) = struct.unpack("d", path.read_bytes())
    return float(seconds)


class Steps:
    """Awaits a coroutine of the console, and measures each of its steps."""

    def __init__(self, meter: Meter, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._meter, self._coroutine = meter, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[..., Any] = self._coroutine.send
        given: Any = None
        while True:
            try:
                awaited = self._meter.run(step, given)
            except StopIteration as end:
                return end.value
            try:
                given, step = (yield awaited), self._coroutine.send
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                given, step = error, self._coroutine.throw


async def _measured(meter: Meter, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await Steps(meter, coroutine)


class MeteredLoop(uvloop.Loop):
    """The loop of a gateway, whose tasks and threads that the console starts are measured."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self.set_task_factory(meter.make_task)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # any function
        """Runs a function in a thread."""
        if _is_console.get():
            return super().run_in_executor(executor, self._meter.run, func, *args)
        return super().run_in_executor(executor, func, *args)


def _of_console(meter: Meter, inner: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
    async def outer(*arguments: Any) -> Any:
        token = _is_console.set(True)
        try:
            return await Steps(meter, inner(*arguments))
        finally:
            _is_console.reset(token)

    return outer


def main() -> int:
    """Runs the gateway."""
    meter = Meter(Path(os.environ[METER]))
    with mock.patch.object(uvloop, "new_event_loop", partial(MeteredLoop, meter)), meter.on_console():
        return program.main()


if __name__ == "__main__":
    sys.exit(main())
