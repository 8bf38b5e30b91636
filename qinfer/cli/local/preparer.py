"""The process beside `qinfer up` that prepares a start: a `Preparation` that is asked over a pipe.

Memory that Python has taken for imports is given back by the end of a process only. The supervisor runs for months and
needs none of them; with them it would be five times as large.
"""

import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Self

from qinfer.cli.local.plan import Launch, Plan, Ports, Progress, UpOptions
from qinfer.errors import QinferError

if TYPE_CHECKING:
    from rich.text import Text


class Preparer:
    """A `Preparation` in a process of its own; a context manager. Its methods raise what those of `Preparation` raise.

    Args:
        options: The options of `qinfer up`.
    """

    def __init__(self, options: UpOptions) -> None:
        self._options = options

    def __enter__(self) -> Self:
        """Starts the process."""
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe, self._options), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process; a second time changes nothing."""
        self._pipe.close()
        # It may be waiting for Redis, and has nothing to save.
        self._process.kill()
        self._process.join()

    def plan(self) -> Plan:
        """See `Preparation.plan`."""
        plan: Plan = self._ask("plan")
        return plan

    def begin(self, redis_url: str, ports: Ports) -> Launch:
        """See `Preparation.begin`."""
        launch: Launch = self._ask("begin", redis_url, ports)
        return launch

    def look(self, least: int, up_s: float) -> Progress:
        """See `Preparation.look`."""
        progress: Progress = self._ask("look", least, up_s)
        return progress

    def summary(self, launch: Launch, ports: Ports, workers: str) -> "Sequence[Text]":
        """See `Preparation.summary`."""
        lines: list[Text] = self._ask("summary", launch, ports, workers)
        return lines

    def _ask(self, method: str, *args: object) -> Any:
        try:
            self._pipe.send((method, args))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise QinferError("the process that prepares the start ended; its own message is above") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: "Connection[Any, Any]", theirs: "Connection[Any, Any]", options: UpOptions) -> None:
    """Answers until the other end of the pipe is closed, by intent or by the supervisor's death."""
    theirs.close()
    for number in (signal.SIGINT, signal.SIGHUP):
        # They mean the supervisor, which ends this process.
        signal.signal(number, signal.SIG_IGN)
    preparation = None
    with suppress(EOFError, ConnectionError):
        while True:
            method, args = pipe.recv()
            answer: object
            try:
                from qinfer.cli.local.preparation import Preparation

                preparation = preparation or Preparation(options)
                answer = getattr(preparation, method)(*args)
            except (QinferError, OSError, ImportError) as error:
                answer = error
            pipe.send(answer)
