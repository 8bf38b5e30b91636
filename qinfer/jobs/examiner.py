"""The examiner: the process in which qinfer parses files that others have written, `python -m qinfer.jobs.examiner`.

Whoever may create jobs chooses the files, and native code parses them. A file that makes the parser crash, or ask for
memory without end, ends this process only, and a process that hangs is ended by its parent. Gateways have new jobs
checked here; bulk workers have jobs planned, and the parts of outputs read. Each starts examiners for itself
(`qinfer.jobs.examiner_pool`), and talks to them by their standard input and output:

    parent ── Hello, then a Request at a time ──▶ stdin │ examiner │ stdout ── Answer, two for a Request ──▶ parent

An examiner ends with its standard input, so with its parent, however that ended.
"""

import faulthandler
import itertools
import logging
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from qinfer.core.processes import LENGTH, packed, protect_process
from qinfer.core.store_urls import Grant
from qinfer.errors import QinferError, UnsupportedFeature
from qinfer.jobs.job import JobSpec
from qinfer.jobs.plan import ExpectedParts, PartInfo, Shard, Unplanned, encode_plan
from qinfer.jobs.shards import Pace
from qinfer.models.spec import ModelSpec

NO_MEMORY = 3
"""The exit code of an examiner that would have needed more memory than it may have."""
DEFECT = "defect"
"""Stands for the class of an error that is none of qinfer's."""
NOTE_BYTES = 4096
"""The room of one URL in the file of `Hello.notes`."""


class Hello(msgspec.Struct, array_like=True):
    """Settings for all requests, sent as the first message. Credentials of stores come by the environment.

    Attributes:
        allow: The URL prefixes of the stores whose drivers are loaded at once.
        max_bytes: Memory that this process may have.
        notes: The descriptor of the file in which this process keeps the URLs of the files that it is reading.
        footer_bytes: The size that the footer of an input file may have.
    """

    allow: tuple[str, ...]
    max_bytes: int
    notes: int
    footer_bytes: int


class CheckJob(msgspec.Struct, array_like=True, tag=True):
    """Asks whether a job can be taken; answered with nothing (`qinfer.jobs.planning.examine`)."""

    spec: JobSpec
    model: ModelSpec
    grant: Grant


class PlanJob(msgspec.Struct, array_like=True, tag=True):
    """Asks for the plan of a job; answered with its JSON (`qinfer.jobs.planning.make_plan`)."""

    job: Unplanned
    pace: Pace
    threads: int


class EstimateJob(msgspec.Struct, array_like=True, tag=True):
    """Asks whether a job can be taken, and its size; answered with an `Estimate` (`qinfer.jobs.planning.estimate`)."""

    job: Unplanned
    pace: Pace
    threads: int


class ReadParts(msgspec.Struct, array_like=True, tag=True):
    """Asks what is at the URLs of parts; answered with a `PartInfo` or what is wrong, for each shard in order."""

    parts: ExpectedParts
    threads: int


class SetAside(msgspec.Struct, array_like=True, tag=True):
    """Asks to set broken parts aside; answered with nothing."""

    parts: ExpectedParts
    threads: int


Work = CheckJob | PlanJob | EstimateJob | ReadParts | SetAside


class Request(msgspec.Struct, array_like=True):
    """Something to do.

    Attributes:
        work: What.
        limit_s: Seconds after which the kernel ends the examiner: with it, the parent, and Python fail.
    """

    work: Work
    limit_s: int


class Answer(msgspec.Struct, array_like=True):
    """The reply to a message: to `Hello` that all is ready; to a `Request` that it has come, then its result.

    Attributes:
        error: The name of an error's class, or `DEFECT`; empty = there is none.
        message: The error's text, or the traceback of a defect.
        result: What `Work` says.
    """

    error: str = ""
    message: str = ""
    result: bytes = b""


class _Notes:
    """The URLs of the files that this process is reading, in a file that outlives it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.clear()

    def clear(self) -> None:
        """Forgets all."""
        os.ftruncate(self._descriptor, 0)
        self._unused = itertools.count()
        self._free: list[int] = []

    @contextmanager
    def reading(self, url: str) -> Iterator[None]:
        """Notes a file for as long as it is read; one that could not be read stays noted."""
        try:
            place = NOTE_BYTES * self._free.pop()
        except IndexError:
            place = NOTE_BYTES * next(self._unused)
        os.pwrite(self._descriptor, url.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0"), place)
        yield
        os.pwrite(self._descriptor, bytes(NOTE_BYTES), place)
        self._free.append(place // NOTE_BYTES)


def notes_of(descriptor: int) -> list[str]:
    """Returns the URLs that an examiner has noted last."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    notes = (data[begin : begin + NOTE_BYTES].rstrip(b"\0") for begin in range(0, len(data), NOTE_BYTES))
    return [note.decode(errors="replace") for note in notes if note]


def _found(parts: Iterable[PartInfo | str | None]) -> bytes:
    """Returns parts as they travel: columns are said once, for they are the same in most parts of a job."""
    schema = ""
    found: list[PartInfo | str | None] = []
    for part in parts:
        if isinstance(part, PartInfo):
            found.append(part._replace(schema="" if part.schema == schema else part.schema))
            schema = part.schema
        else:
            found.append(part)
    return msgspec.msgpack.encode(found)


def parts_found(result: bytes) -> list[PartInfo | str]:
    """Reads the result of `ReadParts`."""
    schema, found = "", _parts.decode(result)
    for number, part in enumerate(found):
        if isinstance(part, PartInfo):
            schema = part.schema or schema
            found[number] = part._replace(schema=schema)
    return found


_Do = Callable[[Work, _Notes], bytes]
_decoder = msgspec.msgpack.Decoder(Request)
_parts = msgspec.msgpack.Decoder(list[PartInfo | str])


def main() -> int:
    """Serves the process that started it."""
    _be_first_to_go()
    protect_process(os.environ)
    outbox = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # they mean the parent, which has work done while it drains
    faulthandler.enable()
    logging.getLogger().addHandler(logging.NullHandler())
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, messages), daemon=True).start()
    hello = msgspec.msgpack.decode(messages.get(), type=Hello)
    _limit(hello.max_bytes)
    do, notes = _loaded(hello.allow, hello.footer_bytes), _Notes(hello.notes)
    has_come = packed(Answer())
    _write(outbox, has_come)
    while True:
        message = messages.get()
        notes.clear()
        _write(outbox, has_come)
        answer = _answered(do, message, notes)
        signal.alarm(0)
        _write(outbox, packed(answer))


def _listen(inbox: BinaryIO, messages: "queue.SimpleQueue[bytes]") -> None:
    """Reads what the parent says; ends this process when the parent says no more, whatever this process is at."""
    # A parent that dies before it has read an answer resets the connection.
    with suppress(ConnectionError):
        while len(length := inbox.read(LENGTH.size)) == LENGTH.size:
            messages.put(inbox.read(LENGTH.unpack(length)[0]))
    os._exit(0)


def _write(outbox: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(outbox, rest) :]


def _limit(max_bytes: int) -> None:
    """Has this process fail to get memory, rather than others."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a file that crashes it must not fill the disk as well


def _be_first_to_go() -> None:
    """Has the kernel end this process before others where the machine has no memory.

    Before `protect_process`, which takes the right to write there.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _loaded(allow: Sequence[str], footer_bytes: int) -> _Do:
    """Loads what does the work, and the drivers of the stores that jobs may use."""
    try:
        from qinfer.jobs.parts import part_of, set_aside
        from qinfer.jobs.planning import estimate, examine, make_plan
        from qinfer.storage import local  # noqa: F401  what the first job would load else
        from qinfer.storage.errors import patiently
        from qinfer.storage.within import writable
    except ImportError as error:
        name = error.name

        def refuse(*_: object) -> bytes:
            raise UnsupportedFeature(f"bulk jobs need {name}: pip install 'qinfer-ml[bulk]'")

        return refuse
    import fsspec

    for scheme in sorted({url.partition(":")[0] for url in allow}):
        with suppress(ImportError, ValueError):  # the first job that names such a store is told
            fsspec.get_filesystem_class(scheme)

    def do(work: Work, notes: _Notes) -> bytes:
        if isinstance(work, CheckJob):
            examine(work.spec, work.model, work.grant, footer_bytes)
            return b""
        if isinstance(work, PlanJob):
            options = {"threads": work.threads, "footer_bytes": footer_bytes}
            return encode_plan(make_plan(work.job, work.pace, **options, reading=notes.reading))
        if isinstance(work, EstimateJob):
            return msgspec.msgpack.encode(estimate(work.job, work.pace, work.threads, footer_bytes))
        function = part_of if isinstance(work, ReadParts) else set_aside
        parts, stores = work.parts, writable(work.parts.grant)

        def one(shard: Shard) -> PartInfo | str | None:
            url = parts.url_of(shard)
            with notes.reading(url):
                return patiently(lambda: function(stores(url), parts, shard))

        with ThreadPoolExecutor(work.threads, thread_name_prefix="qinfer-parts") as pool:
            return _found(pool.map(one, parts.shards))  # the first error cancels the rest

    return do


def _answered(do: _Do, message: bytes, notes: _Notes) -> Answer:
    try:
        request = _decoder.decode(message)
        signal.alarm(request.limit_s)
        return Answer(result=do(request.work, notes))
    except QinferError as error:
        return Answer(type(error).__name__, error.message)
    except MemoryError:
        os._exit(NO_MEMORY)  # what is half made would be in the way of the next request
    except Exception:  # noqa: BLE001  the parent logs it
        return Answer(DEFECT, traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main())
