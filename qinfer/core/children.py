"""Child processes, from their parents' side: start, output, messages, death and end.

`qinfer.core.processes` is for the children.
"""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Self, TypeVar

import msgspec

from qinfer.core.processes import LENGTH, LINE_BYTES, signal_name

T = TypeVar("T")

MAX_BYTES = 2**32 - 1
_END_S = 5.0


class ChildEnded(Exception):
    """A child ended, by itself or because it sent something else than a message; the text says how."""


class ChildProcess:
    """A process in a session of its own; any thread may use this object.

    A thread starts and awaits it: the kernel ends some with the *thread* that started them (`end_with_parent`). It
    starts by vfork(2); asyncio with uvloop forks, which blocks large programs.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes]
        self._has_ended = threading.Event()
        self._reaping = threading.Lock()
        self._listener = threading.Thread(target=self._listen, name="child-output", daemon=True)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; a signal's number is negative."""
        return self._process.returncode

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return not self._has_ended.is_set()

    @property
    def how(self) -> str:
        """How the process ended, such as `SIGSEGV`."""
        code = self.code or 0
        return signal_name(-code) or f"exit code {code}"

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process, unless it has ended, and those that it started."""
        with self._reaping:
            if not self._has_ended.is_set():
                self._signal_group(number)

    def _spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        inherited: Collection[int],
        *,
        stdin: int,
        stdout: int,
        stderr: int | None,
    ) -> None:
        def start() -> "subprocess.Popen[bytes]":
            return subprocess.Popen(  # noqa: S603  our own interpreter and module
                command,
                env=environment,
                pass_fds=inherited,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent, which drains
            )

        started: Future[None] = Future()
        try:
            threading.Thread(target=self._live, args=(start, started), name="child", daemon=True).start()
            started.result()
        except RuntimeError:  # there are too many threads
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None

    def _live(self, start: "Callable[[], subprocess.Popen[bytes]]", started: Future[None]) -> None:
        process = None
        try:
            process = self._process = start()
            if process.stdout or process.stderr:
                self._listener.start()
        except BaseException as error:  # noqa: BLE001  it is raised where the process is wanted
            if process is not None:
                process.kill()
                process.communicate()
            started.set_exception(error)
            return
        started.set_result(None)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its number is not another's until `wait`
        with self._reaping:
            self._signal_group(signal.SIGKILL)
            process.wait()
            self._has_ended.set()
        self._on_end()

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _listen(self) -> None:
        output = self._process.stdout or self._process.stderr
        assert output is not None
        with output:
            while line := output.readline(LINE_BYTES):
                self._hear(line)

    def _hear(self, line: bytes) -> None:
        """Takes a line from the pipe of `stdout` or `stderr`."""

    def _on_end(self) -> None:
        """Runs in a thread after the end; the pipe may have more lines."""


class MessageChild(ChildProcess):
    """A child with messages over its standard input and output (`parent_messages`), for an event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._is_gone = asyncio.Event()

    async def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        inherited: Collection[int],
        stderr: int | None = None,
    ) -> Self:
        """Starts the process, or raises `OSError`."""
        mine, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=mine)
            try:
                ends = theirs.fileno()
                self._spawn(command, environment, inherited, stdin=ends, stdout=ends, stderr=stderr)
            except OSError:
                self._writer.transport.abort()
                self._on_gone()
                raise
        return self

    async def send(self, message: bytes) -> None:
        """Sends a message; `receive` notices the end."""
        with suppress(ConnectionError):
            self._writer.write(message)
            await self._writer.drain()

    async def receive(self, kind: type[T], max_bytes: int = MAX_BYTES) -> T:
        """Waits for a message, or raises `ChildEnded`."""
        try:
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if size > max_bytes:
                raise ValueError(size)
            return msgspec.msgpack.decode(await self._reader.readexactly(size), type=kind)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            self.kill()
            await self.wait()
            raise ChildEnded(self.how) from None

    async def wait(self) -> None:
        """Waits for the end."""
        await self._is_gone.wait()

    def kill(self) -> None:
        """Kills the process without waiting."""
        self.send_signal(signal.SIGKILL)

    async def end(self) -> None:
        """Kills the process, and closes the connection."""
        self.kill()
        with suppress(TimeoutError):  # a hanging store may hold it in the kernel
            async with asyncio.timeout(_END_S):
                await self.wait()
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    def _on_end(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_gone)

    def _on_gone(self) -> None:
        """Runs in the event loop after the end."""
        self._is_gone.set()
