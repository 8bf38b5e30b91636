"""The process beside `qinfer up` that runs its `Preparation`, called over a pipe.

Its imports would make the long-running supervisor five times as large.
"""

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Self

import msgspec

from qinfer import errors
from qinfer.cli.local.plan import Launch, Ports, StartProgress, SupervisionPlan, UpOptions
from qinfer.errors import QinferError

_CALLS: Mapping[str, tuple[Any, Any]] = {  # method → arguments, result
    "check_settings": (tuple[()], SupervisionPlan),
    "write_desired": (tuple[str, Ports], Launch),
    "read_progress": (tuple[int, float], StartProgress),
    "summary": (tuple[Launch, Ports, str], list[str]),
}
_BUILT_IN = {error.__name__: error for error in (ModuleNotFoundError, ImportError, OSError)}


class _PreparerResult(msgspec.Struct, omit_defaults=True):
    """A method's result or error; `module` is the one that an `ImportError` misses."""

    result: Any = None
    error: str = ""
    args: list[int | str | None] = []
    module: str | None = None

    @classmethod
    def from_error(cls, error: Exception) -> Self:
        args = [each if isinstance(each, int | str | None) else str(each) for each in error.args]
        if isinstance(error, OSError) and error.filename is not None:
            args.append(str(error.filename))
        return cls(error=_known(type(error)), args=args, module=getattr(error, "name", None))

    def raised(self) -> Exception:
        if self.error in _BUILT_IN:
            error = _BUILT_IN[self.error](*self.args)
            if isinstance(error, ImportError):
                error.name = self.module
            return error
        kind: type[QinferError] = getattr(errors, self.error)
        found = kind.__new__(kind)
        found.args = tuple(self.args)
        return found


def _known(kind: type[Exception]) -> str:
    """Returns an error's nearest class known to the other process."""
    return next(each.__name__ for each in kind.__mro__ if each.__name__ in _BUILT_IN or hasattr(errors, each.__name__))


class Preparer:
    """A `Preparation` in its own process; a context manager."""

    def __init__(self, options: UpOptions) -> None:
        self._options = options

    def __enter__(self) -> Self:
        """Starts the process."""
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve_pipe, args=(theirs, self._pipe, self._options), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, at most once."""
        self._pipe.close()
        # it may wait for Redis
        self._process.kill()
        self._process.join()

    def check_settings(self) -> SupervisionPlan:
        """Calls `Preparation.check_settings`."""
        plan: SupervisionPlan = self._call_process("check_settings")
        return plan

    def write_desired(self, redis_url: str, ports: Ports) -> Launch:
        """Calls `Preparation.write_desired`."""
        launch: Launch = self._call_process("write_desired", redis_url, ports)
        return launch

    def read_progress(self, least: int, up_s: float) -> StartProgress:
        """Calls `Preparation.read_progress`."""
        progress: StartProgress = self._call_process("read_progress", least, up_s)
        return progress

    def summary(self, launch: Launch, ports: Ports, workers: str) -> Sequence[str]:
        """Calls `Preparation.summary`."""
        lines: list[str] = self._call_process("summary", launch, ports, workers)
        return lines

    def _call_process(self, method: str, *args: object) -> Any:
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode((method, args)))
            answer = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=_PreparerResult)
        except (EOFError, OSError):
            raise QinferError("the process that prepares the start ended; its own message is above") from None
        if answer.error:
            raise answer.raised()
        return msgspec.convert(answer.result, _CALLS[method][1])


def _serve_pipe(pipe: "Connection[Any, Any]", theirs: "Connection[Any, Any]", options: UpOptions) -> None:
    theirs.close()
    for number in (signal.SIGINT, signal.SIGHUP):
        # the supervisor ends this process
        signal.signal(number, signal.SIG_IGN)
    preparation = None
    with suppress(EOFError, ConnectionError):
        while True:
            method, given = msgspec.msgpack.decode(pipe.recv_bytes())
            try:
                from qinfer.cli.local.preparation import Preparation

                preparation = preparation or Preparation(options)
                args = msgspec.convert(given, _CALLS[method][0])
                answer = _PreparerResult(getattr(preparation, method)(*args))
            except (QinferError, OSError, ImportError) as error:
                answer = _PreparerResult.from_error(error)
            pipe.send_bytes(msgspec.msgpack.encode(answer))
