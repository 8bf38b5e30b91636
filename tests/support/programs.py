"""Programs that start at once: processes forked from one that has imported what they run.

The imports take most of a program's start. A process that has imported a program forks a watcher for each start; the
watcher forks the program, and sends its process id, and its status when it has ended. The command line of a program in
/proc is that of the process with the imports. Starts by `python -m` are tested by the files `test_process.py` of
gateway, worker and Python models, by `test_examiner_pool.py`, and by each `qinfer up`.
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest import mock

import msgspec

_SERVERS = tuple(f"qinfer_{name}.__main__" for name in ("api", "workers.inference", "workers.jobs", "workers.bridge"))
_MODEL, _EXAMINER = "qinfer.backends.python_host", "qinfer.jobs.examiner"
_READING = ("qinfer.jobs.shard_rows", "qinfer.jobs.parts", "qinfer.jobs.planning", "qinfer.storage.local")
_IMPORTED = {_MODEL: (f"{_MODEL}.__main__",), _EXAMINER: (_EXAMINER, *_READING)}
"""A program → the modules that are imported before it starts; those of `_SERVERS` before any other."""
_READ_AT_IMPORT = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_DEFAULT_MEMORY_POOL", "MALLOC_MMAP_THRESHOLD_"}
_MAX_BYTES = 1 << 17
_MAX_DESCRIPTORS = 16
_NUMBER = struct.Struct("<i")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Start(msgspec.Struct, array_like=True):
    """`numbers` are those of the descriptors in the program; a word that is the id of `starter` becomes its parent."""

    options: list[str]
    words: list[str]
    environment: dict[str, str]
    directory: str
    numbers: list[int]
    starter: str
    in_new_session: bool


class _Forked(subprocess.Popen[bytes]):
    """`Popen` of `python … -m module …`, but for the fork."""

    def poll(self) -> int | None:
        lock: threading.Lock = self._waitpid_lock  # type: ignore[attr-defined]
        if lock.acquire(blocking=False):  # no thread waits
            try:
                if self.returncode is None and self._try_wait(os.WNOHANG)[0]:
                    self.returncode = os.waitstatus_to_exitcode(self._status)
            finally:
                lock.release()
        return self.returncode

    def await_end(self, timeout_s: float | None = None) -> bool:
        """Waits until the program has ended, and leaves its status to `wait`."""
        return bool(select.select([self._watcher], [], [], timeout_s)[0])

    def _execute_child(self, *given: Any) -> None:
        """Stands for fork and exec in `subprocess.Popen`, whose arguments it has."""
        (_, *words), pass_fds, cwd, env, in_new_session = (given[number] for number in (0, 4, 5, 6, 21))
        handles = given[10:16]
        at = words.index("-m")
        descriptors = {0: handles[0], 1: handles[3], 2: handles[5], **{number: number for number in pass_fds}}
        descriptors |= {number: number for number in (1, 2) if descriptors[number] == -1}
        descriptors = {number: descriptor for number, descriptor in descriptors.items() if descriptor != -1}
        environment = dict(os.environ if env is None else env)
        start = _Start(
            options=words[:at],
            words=words[at + 1 :],
            environment=environment,
            directory=str(cwd or Path.cwd()),
            numbers=list(descriptors),
            starter=str(os.getpid()),
            in_new_session=in_new_session,
        )
        read = tuple(sorted((name, environment[name]) for name in _READ_AT_IMPORT & environment.keys()))
        self._watcher = _parent(_IMPORTED.get(start.words[0], _SERVERS), read).start(start, list(descriptors.values()))
        self._close_pipe_fds(*handles)  # type: ignore[attr-defined]
        (self.pid,) = _NUMBER.unpack(os.read(self._watcher, _NUMBER.size))
        self._child_created = True
        _running[self.pid] = self

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """Stands for waitpid in `subprocess.Popen`."""
        if not self.await_end(0 if flags else None):
            return 0, 0
        (self._status,) = _NUMBER.unpack(os.read(self._watcher, _NUMBER.size))
        os.close(self._watcher)
        _running.pop(self.pid, None)
        return self.pid, self._status


_running: "weakref.WeakValueDictionary[int, _Forked]" = weakref.WeakValueDictionary()


class ForkedProgram(_Forked):
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
        super().__init__([sys.executable, "-m", *words], env=env, cwd=cwd, stdout=log, stderr=log)


@contextmanager
def forked_children() -> Iterator[None]:
    """Has this process fork the processes of its Python models and its examiners, until the block ends."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": _Started})
    with (
        mock.patch.object(os, "waitid", functools.partial(_waitid, os.waitid)),
        mock.patch(f"{_MODEL}.process.subprocess", forking),
        mock.patch(f"{_EXAMINER}_pool.subprocess", forking),
    ):
        yield


class _Started(subprocess.Popen[bytes]):
    """Stands for `subprocess.Popen` where programs start that may be forked."""

    def __new__(cls, command: Sequence[str], **options: Any) -> Any:
        return (_Forked if {_MODEL, _EXAMINER} & set(command) else subprocess.Popen)(command, **options)


def _waitid(wait: Any, kind: int, number: int, options: int) -> Any:
    """Waits for the end of a child, or of a program that is the child of its watcher."""
    program = _running.get(number)
    return wait(kind, number, options) if program is None else program.await_end()


class _Parent:
    """The process that has imported the programs; it ends with this one."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=theirs.fileno(),
                cwd=Path(__file__).parents[2],
                env={**os.environ, **environment},
            )
        self._socket.send(msgspec.msgpack.encode(modules))
        atexit.register(self._end)

    def start(self, start: _Start, descriptors: list[int]) -> int:
        """Returns the descriptor of a pipe from which the process id comes, and the status at the end."""
        ours, theirs = os.pipe()
        socket.send_fds(self._socket, [msgspec.msgpack.encode(start)], [*descriptors, theirs])
        os.close(theirs)
        return ours

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _parent(modules: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> _Parent:
    return _Parent(modules, dict(environment))


def main() -> None:
    """Imports what the first message on the standard input names, and forks programs as the others ask it to."""
    with socket.socket(fileno=os.dup(0)) as requests, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        for module in msgspec.msgpack.decode(requests.recv(_MAX_BYTES), type=list[str]):
            importlib.import_module(module)
        gc.freeze()
        signal.signal(signal.SIGCHLD, _reap)
        while True:
            body, received, _, _ = socket.recv_fds(requests, _MAX_BYTES, _MAX_DESCRIPTORS)
            if not body:
                return
            *descriptors, report = received
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                if program := os.fork():
                    _watch(program, report)
                os.close(report)
                _run(msgspec.msgpack.decode(body, type=_Start), descriptors)
                return
            for one in received:
                os.close(one)


def _reap(*_: object) -> None:
    """Reaps watchers, so that the CPU of programs is that of the tests; the kernel would not count it."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _watch(program: int, report: int) -> None:
    """Ends with the process that has the imports, because models' processes end with their parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.closerange(0, report)
    os.write(report, _NUMBER.pack(program))
    os.write(report, _NUMBER.pack(os.waitpid(program, 0)[1]))
    os._exit(0)


def _run(start: _Start, descriptors: list[int]) -> None:
    _place(descriptors, start.numbers)
    if start.in_new_session:
        os.setsid()
    os.chdir(start.directory)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.path[:0] = [path for path in start.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.dont_write_bytecode = "-B" in start.options
    if "-u" in start.options:
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True) for number in (1, 2)
        )
    sys.argv = [str(os.getppid()) if word == start.starter else word for word in start.words]
    sys.modules.pop(f"{start.words[0]}.__main__", None)  # it runs again, as `__main__`
    runpy.run_module(start.words[0], run_name="__main__", alter_sys=True)


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Gives descriptors their numbers, which others of them may have."""
    free = max(*descriptors, *numbers) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, free) for one in descriptors]
    for one in descriptors:
        os.close(one)
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)


if __name__ == "__main__":
    main()
