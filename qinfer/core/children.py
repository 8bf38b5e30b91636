"""Child processes from their parents' side; `qinfer.core.processes` is theirs."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any, Self, TypeVar

import msgspec

from qinfer.core.processes import LENGTH, LINE_BYTES, signal_name

T = TypeVar("T")

_END_S = 5.0


class ChildEnded(Exception):
    """A child ended, or was killed because it sent no message."""


class ChildProcess:
    """A process in a session of its own.

    One thread starts and awaits it, because the kernel may end it with the *thread* that started it
    (`end_with_parent`). `Popen` uses vfork(2); asyncio with uvloop forks, which blocks large programs.
    """

    pid: int
    code: int | None = None

    def __init__(self) -> None:
        self._has_ended = threading.Event()
        self._reaping = threading.Lock()

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
        """Signals the process and those that it started."""
        with self._reaping:
            if not self._has_ended.is_set():
                self._signal_group(number)

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str], inherited: Collection[int], **streams: Any
    ) -> None:
        options = {"env": environment, "pass_fds": inherited, **streams}
        options["start_new_session"] = True  # Ctrl-C in a terminal is for the parent, which drains
        started: Future[None] = Future()
        try:
            threading.Thread(target=self._live, args=(command, options, started), name="child", daemon=True).start()
            started.result()
        except RuntimeError:  # there are too many threads
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None

    def _live(self, command: Sequence[str], options: dict[str, Any], started: Future[None]) -> None:
        process = None
        try:
            process = subprocess.Popen(command, **options)  # noqa: S603  our own interpreter and module
            self.pid = process.pid
            if output := process.stdout or process.stderr:
                self._listener = threading.Thread(target=self._listen, args=(output,), name="output", daemon=True)
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
            self.code = process.wait()
            self._has_ended.set()
        self._on_end()

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _listen(self, output: IO[bytes]) -> None:
        with output:
            while line := output.readline(LINE_BYTES):
                self._hear(line)

    def _hear(self, line: bytes) -> None:
        """Takes a line of output."""

    def _on_end(self) -> None:
        """Runs in a thread after the end."""


class MessageChild(ChildProcess):
    """A child that reads `parent_messages`, for an event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._is_gone = asyncio.Event()

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], inherited: Collection[int], **streams: Any
    ) -> Self:
        """Starts the process, or raises `OSError`."""
        mine, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=mine)
            try:
                self._spawn(command, environment, inherited, stdin=theirs, stdout=theirs, **streams)
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

    async def receive(self, kind: type[T], max_bytes: int = 2**32 - 1) -> T:
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
        """Kills the process."""
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
