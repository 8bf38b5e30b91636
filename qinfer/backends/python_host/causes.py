"""Causes of unanswered requests: exceptions that end a thread, a future or a task that used a sender.

Python at most prints such an exception, and drops the sender; here the request ends with it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from itertools import islice
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import asyncio


class Cause(NamedTuple):
    """An exception's text, and its traceback unless logged."""

    text: str
    trace: str = ""


_here = threading.local()


def of_this_thread() -> Cause | None:
    """Returns this thread's exception, if any."""
    return getattr(_here, "cause", None)


def watch(noted: Callable[[BaseException, str], Cause]) -> None:
    """Calls `noted` with exceptions of threads and futures, and the event."""

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            _here.cause = noted(args.exc_value, "a thread of the model raised")

    def in_future(future: "Future[Any]", error: BaseException | None) -> None:
        if error is not None:
            noted(error, "")
        set_exception(future, error)

    set_exception = Future.set_exception
    threading.excepthook = in_thread
    Future.set_exception = in_future  # type: ignore[method-assign, assignment]  # the only place that a pool tells it to


def watch_loop(loop: "asyncio.AbstractEventLoop", noted: Callable[[BaseException, str], Cause]) -> None:
    """Calls `noted` with unretrieved exceptions of tasks."""

    def in_task(loop: "asyncio.AbstractEventLoop", context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            noted(error, "a task of the model raised")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(in_task)


_MOST = 1000

_OTHERS = frozenset(("asyncio", "concurrent", "qinfer", "threading"))
"""Unsearched packages."""


def held(error: BaseException) -> Iterator[object]:
    """Yields the objects in an exception's frames."""
    seen: BaseException | None = error
    while seen is not None:
        trace: TracebackType | None = seen.__traceback__
        while trace is not None:
            # Reading a frame's variables makes the frame refer to them: for frames that hold the exception, a cycle.
            if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _OTHERS:
                yield from _values(trace.tb_frame)
            trace = trace.tb_next
        seen = seen.__cause__ or seen.__context__


def _values(frame: FrameType) -> Iterator[object]:
    for value in list(frame.f_locals.values()):
        yield value
        if isinstance(value, Mapping):
            yield from islice(value.values(), _MOST)
        elif isinstance(value, list | tuple):
            yield from islice(value, _MOST)
        elif not isinstance(value, type | ModuleType | FunctionType):
            yield from islice(getattr(value, "__dict__", {}).values(), _MOST)
