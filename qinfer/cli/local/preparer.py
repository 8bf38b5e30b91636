"""The process beside `qinfer up` that runs its `Preparation`, called over a pipe with plain values.

Its imports would make the long-running supervisor five times as large.
"""

import builtins
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from qinfer import errors
from qinfer.cli.local.machine import GatewayAddress
from qinfer.errors import QinferError

T = TypeVar("T")

Sections = Mapping[str, Mapping[str, Any]]
"""Section of the settings → field → value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of `qinfer up`.

    `settings` replace those of the environment; empty settings of the repository replace nothing. Without `redis_url` a
    private Redis runs, with at most `redis_memory_bytes` (0 = half of the memory).
    """

    settings: Sections
    allow_client_shm: bool
    data_dir: Path
    redis_url: str
    redis_memory_bytes: int
    workers: int
    autoscale: tuple[int, int] | None
    ready_timeout_s: float


class Ports(NamedTuple):
    """The gateway's ports; 0 = off."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionPlan:
    """The settings that supervision needs."""

    addresses: Sequence[GatewayAddress]
    gateway_drain_s: float
    worker_drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The gateway's URL, the programs' environments, why no bulk worker can run, and the payload store."""

    url: str
    gateway: Mapping[str, str]
    worker: Mapping[str, str]
    bulk: Mapping[str, str]
    no_bulk: str
    payload_url: str
    payload_url_min_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """The state of a start; `pending` models are loading or unreported."""

    pending: int
    workers: int
    is_live: bool


class _Answer(msgspec.Struct, omit_defaults=True):
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
        known = next(
            kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__) or _is_builtin(kind)
        )
        return cls(error=known, args=args, module=getattr(error, "name", None))

    def raised(self) -> Exception:
        kind: type[Exception] = getattr(errors, self.error, None) or getattr(builtins, self.error)
        found = kind.__new__(kind, *self.args)
        found.args = tuple(self.args)
        if isinstance(found, ImportError):
            found.name = self.module
        return found


def _is_builtin(kind: type) -> bool:
    return kind.__module__ == "builtins"


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
        return self._call(SupervisionPlan, "check_settings")

    def write_desired(self, redis_url: str, ports: Ports) -> Launch:
        """Calls `Preparation.write_desired`."""
        return self._call(Launch, "write_desired", redis_url, *ports)

    def read_progress(self, least: int, up_s: float) -> StartProgress:
        """Calls `Preparation.read_progress`."""
        return self._call(StartProgress, "read_progress", least, up_s)

    def summary(self, workers: str) -> Sequence[str]:
        """Calls `Preparation.summary`."""
        return self._call(list[str], "summary", workers)

    def _call(self, kind: type[T], method: str, *args: str | float) -> T:
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode((method, args)))
            answer = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=_Answer)
        except (EOFError, OSError):
            raise QinferError("the process that prepares the start ended; its own message is above") from None
        if answer.error:
            raise answer.raised()
        return msgspec.convert(answer.result, kind)


def _serve_pipe(pipe: "Connection[Any, Any]", theirs: "Connection[Any, Any]", options: UpOptions) -> None:
    theirs.close()
    for number in (signal.SIGINT, signal.SIGHUP):
        # the supervisor ends this process
        signal.signal(number, signal.SIG_IGN)
    preparation = None
    with suppress(EOFError, ConnectionError):
        while True:
            method, args = msgspec.msgpack.decode(pipe.recv_bytes())
            try:
                from qinfer.cli.local.preparation import Preparation

                preparation = preparation or Preparation(options)
                answer = _Answer(getattr(preparation, method)(*args))
            except (QinferError, OSError, ImportError) as error:
                answer = _Answer.from_error(error)
            pipe.send_bytes(msgspec.msgpack.encode(answer))
