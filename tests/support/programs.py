"""Programs that start at once: processes forked from one that has imported gateway, workers and bridge.

The imports take most of a program's start. The process with the imports forks a watcher for each program; the watcher
forks the program, and sends its process id, and its status when it has ended. Its command line in /proc is that of the
process with the imports. Starts by `python -m` are tested by the files `test_process.py` of gateway and worker, and by
each `qinfer up`.
"""

import atexit
import functools
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

_IMPORTED = ("qinfer_api", "qinfer_workers.inference", "qinfer_workers.jobs", "qinfer_workers.bridge")
_MAX_BYTES = 1 << 17
_NUMBER = struct.Struct("<i")


class _Start(msgspec.Struct, array_like=True):
    words: list[str]
    environment: dict[str, str]
    directory: str


class ForkedProgram(subprocess.Popen[bytes]):
    """A module that runs as `__main__`, with arguments.

    Args:
        words: The module and its arguments.
        env: All of its environment.
        cwd: Its working directory; this process's one by default.
        log: Takes its output and its errors; they go where this process's own go by default.
    """

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], *, cwd: Path | None = None, log: BinaryIO | None = None
    ) -> None:
        self._start = _Start(list(words), dict(env), str(cwd or Path.cwd()))
        self._outputs = [log.fileno()] * 2 if log else [1, 2]
        super().__init__(words)

    def poll(self) -> int | None:
        lock: threading.Lock = self._waitpid_lock  # type: ignore[attr-defined]
        if lock.acquire(blocking=False):  # no thread waits
            try:
                if self.returncode is None and self._try_wait(os.WNOHANG)[0]:
                    self.returncode = os.waitstatus_to_exitcode(self._status)
            finally:
                lock.release()
        return self.returncode

    def _execute_child(self, *_: object) -> None:
        """Stands for fork and exec in `subprocess.Popen`."""
        self._watcher = _parent().start(self._start, self._outputs)
        (self.pid,) = _NUMBER.unpack(os.read(self._watcher, _NUMBER.size))
        self._child_created = True

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """Stands for waitpid in `subprocess.Popen`."""
        if not select.select([self._watcher], [], [], 0 if flags else None)[0]:
            return 0, 0
        (self._status,) = _NUMBER.unpack(os.read(self._watcher, _NUMBER.size))
        os.close(self._watcher)
        return self.pid, self._status


class _Parent:
    """The process that has imported the programs; it ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=theirs.fileno(), cwd=Path(__file__).parents[2]
            )
        atexit.register(self._end)

    def start(self, start: _Start, outputs: list[int]) -> int:
        """Returns the descriptor of a pipe from which the process id comes, and the status at the end."""
        ours, theirs = os.pipe()
        socket.send_fds(self._socket, [msgspec.msgpack.encode(start)], [*outputs, theirs])
        os.close(theirs)
        return ours

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _parent() -> _Parent:
    return _Parent()


def main() -> None:
    """Forks programs as messages on the standard input ask it to."""
    for package in _IMPORTED:
        importlib.import_module(f"{package}.__main__")
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(fileno=os.dup(0)) as requests, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        while True:
            body, received, _, _ = socket.recv_fds(requests, _MAX_BYTES, 3)
            if not body:
                return
            *outputs, report = received
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                if program := os.fork():
                    _watch(program, report)
                os.close(report)
                _run(msgspec.msgpack.decode(body, type=_Start), outputs)
                return
            for one in (*outputs, report):
                os.close(one)


def _reap(*_: object) -> None:
    """Reaps watchers, so that the CPU of programs is that of the tests; the kernel would not count it."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _watch(program: int, report: int) -> None:
    os.closerange(0, report)
    os.write(report, _NUMBER.pack(program))
    os.write(report, _NUMBER.pack(os.waitpid(program, 0)[1]))
    os._exit(0)


def _run(start: _Start, outputs: list[int]) -> None:
    for number, one in enumerate(outputs, 1):
        os.dup2(one, number)
        os.close(one)
    os.chdir(start.directory)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.path[:0] = [path for path in start.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = list(start.words)
    sys.modules.pop(f"{start.words[0]}.__main__", None)  # it runs again, as `__main__`
    runpy.run_module(start.words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
