"""A process that looks at jobs, as the gateway sees it: started, asked, ended."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

import msgspec

from qinfer.bulk.examiner import NO_MEMORY, Answer
from qinfer.children import packed, received, signal_name

_START_S = 60.0
_END_S = 5.0
_MAX_ANSWER_BYTES = 2**20
_TAIL_BYTES = 4096


class ChildEnded(Exception):
    """A process ended before it answered.

    Attributes:
        how: How, such as `SIGSEGV`.
    """

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Child:
    """A process that looks at jobs.

    Args:
        process: The process, just started; its stderr is a pipe.
        reader: What it writes.
        writer: What it reads.

    Attributes:
        output: The end of what it wrote to stderr; once it has ended.
        has_ended: Set by `end`.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._is_gone = asyncio.Event()
        self.output = ""
        self.has_ended = False
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="examiner-end", daemon=True).start()

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Starts a process.

        Not by asyncio: with uvloop that forks, which holds a gateway of some hundred megabytes for tens of
        milliseconds. `subprocess` does without a copy (vfork(2)).

        Args:
            command: The program and its arguments.
            environment: Its whole environment.

        Raises:
            OSError: There is no such program, no memory, or there are too many processes or files.
        """
        mine, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=mine)
            try:
                process = subprocess.Popen(  # noqa: ASYNC220, S603  see above; our own interpreter and module
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,  # Ctrl-C in a terminal means the gateway, which drains
                )
            except OSError:
                writer.transport.abort()
                raise
        try:
            return cls(process, reader, writer)
        except RuntimeError:  # no thread can be started
            process.kill()
            process.communicate()
            writer.transport.abort()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None

    @property
    def how(self) -> str:
        """How it ended."""
        code = self._process.returncode or 0
        if code == NO_MEMORY:
            return "it needs more memory than QINFER_BULK__MAX_EXAMINE_BYTES"
        return signal_name(-code) or f"exit code {code}"

    async def greet(self, hello: msgspec.Struct) -> None:
        """Sends the first message, and waits until the process has loaded what it needs.

        Raises:
            ChildEnded: It can't, or not in time.
        """
        try:
            async with asyncio.timeout(_START_S):
                await self._say(packed(hello))
                await self._answer()
        except TimeoutError:
            raise ChildEnded(f"it is not ready after {_START_S:g} s") from None

    async def ask(self, job: bytes) -> Answer | None:
        """Has it look at a job.

        Args:
            job: The message, as it travels.

        Returns:
            What came of it; `None` = it had ended before it took the job.

        Raises:
            ChildEnded: It ended, or said what can't be understood, and was ended for that.
        """
        try:
            await self._say(job)
            await self._answer()
        except ChildEnded:
            return None
        return await self._answer()

    async def wait(self) -> None:
        """Waits for its end."""
        await self._is_gone.wait()

    def kill(self) -> None:
        """Ends it: it has nothing to lose."""
        if not self._is_gone.is_set():  # afterwards its number may be another's
            os.kill(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Sees to it that nothing is left of it, as far as that can be waited for."""
        self.kill()
        with suppress(TimeoutError):  # a store that hangs may hold it within the kernel
            async with asyncio.timeout(_END_S):
                await self.wait()
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        self.has_ended = True

    async def _say(self, message: bytes) -> None:
        with suppress(ConnectionError):  # `_answer` knows
            self._writer.write(message)
            await self._writer.drain()

    async def _answer(self) -> Answer:
        try:
            return msgspec.msgpack.decode(await received(self._reader, _MAX_ANSWER_BYTES), type=Answer)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, msgspec.MsgspecError):
            self.kill()
            await self.wait()
            raise ChildEnded(self.how) from None

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keeps the last of what it writes to stderr, as C++ says there why it gives up, and waits for its end.

        The loop takes note of the end, so that `kill` never means a process that has the same number since.
        """
        assert self._process.stderr is not None
        tail = b""
        with self._process.stderr as stderr:
            while text := os.read(stderr.fileno(), _TAIL_BYTES):
                tail = (tail + text)[-_TAIL_BYTES:]
        self.output = tail.decode(errors="replace").strip()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        try:
            loop.call_soon_threadsafe(self._ended)
        except RuntimeError:  # the loop is closed
            self._process.wait()

    def _ended(self) -> None:
        self._process.wait()
        self._is_gone.set()
