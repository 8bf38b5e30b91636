"""The examiner: a process that parses files of users, started as `python -m qinfer.jobs.examiner`.

Gateways and bulk workers have it check files, workers have it read rows (`qinfer.jobs.shard_rows`). A file that
crashes its native parser, or makes it allocate without end, kills only this process; the parent kills it if it hangs
(`qinfer.jobs.examiner_pool`):

    parent ── ExaminerHello, then one ExaminerRequest at a time ──▶ stdin │ examiner
    examiner │ stdout ── ExaminerReply, two for each ExaminerRequest ──▶ parent

An examiner ends when its standard input does, so with its parent.
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
from typing import BinaryIO, Literal

import msgspec

from qinfer.core.processes import LENGTH, packed, protect_process
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import QinferError, UnsupportedFeature
from qinfer.jobs.job import JobSpec
from qinfer.jobs.plan import ExpectedParts, PartInfo, Shard, UnplannedJob, encode_plan
from qinfer.jobs.shards import ShardPace
from qinfer.models.spec import ModelSpec

NO_MEMORY = 3
"""The exit code at the memory limit."""
DEFECT = "defect"
"""Stands for the class of other errors than `QinferError`."""
NOTE_BYTES = 4096
"""The space for one URL."""
PART_BYTES = 256 * 2**20
"""The memory to read a worker's part, beyond the libraries."""
PreviewOf = Literal["input", "output", "failed"]
_STACK_BYTES = 2 * 2**20  # of a thread, which the limit of memory counts whole


class ExaminerHello(msgspec.Struct, array_like=True):
    """Settings for all requests; the environment has the stores' credentials.

    Drivers of the stores in `allow` are loaded at once; `notes` and `rows` are descriptors. `max_bytes` 0 =
    `PART_BYTES`, and from the first `OpenShard` on its limit.
    """

    allow: tuple[str, ...]
    max_bytes: int
    notes: int
    rows: int
    footer_bytes: int


class CheckJob(msgspec.Struct, array_like=True, tag=True):
    """Runs `qinfer.jobs.planning.examine`."""

    spec: JobSpec
    model: ModelSpec
    grant: UrlGrant


class PlanJob(msgspec.Struct, array_like=True, tag=True):
    """Runs `qinfer.jobs.planning.make_plan`, or `estimate`; the result is the plan's JSON, or an `Estimate`."""

    job: UnplannedJob
    pace: ShardPace
    threads: int
    is_estimate: bool = False


class ReadParts(msgspec.Struct, array_like=True, tag=True):
    """Validates parts, or sets broken ones aside; the result of the former has a `PartInfo` or a message for each."""

    parts: ExpectedParts
    threads: int
    sets_aside: bool = False


class PreviewJob(msgspec.Struct, array_like=True, tag=True):
    """Runs `qinfer.jobs.preview.preview` on the inputs, or the files of `shards`; the result is a `JobPreview`."""

    of: PreviewOf
    rows: int
    spec: JobSpec
    grant: UrlGrant
    shards: tuple[int, ...] = ()


class OpenShard(msgspec.Struct, array_like=True, tag=True):
    """Opens a shard for `ReadShard`; rows at the positions `unreadable` failed before, for these reasons."""

    shard: Shard
    columns: tuple[str, ...]
    schema: str
    spec: JobSpec
    grant: UrlGrant
    read_bytes: int
    unreadable: dict[int, str] = {}


class ReadShard(msgspec.Struct, array_like=True, tag=True):
    """Reads the next rows of the open shard; the result is `RowsRead`, empty at the end."""

    rows: int


class CloseShard(msgspec.Struct, array_like=True, tag=True):
    """Closes the open shard."""


class RowsRead(msgspec.Struct, array_like=True):
    """A `RowBatch`; its columns are Arrow streams between `ends` in `ExaminerHello.rows`."""

    ends: Sequence[int]
    segments: Sequence[tuple[str, int, int, int]]
    too_large: Sequence[int]
    faults: Sequence[tuple[int, int, str]]


Work = CheckJob | PlanJob | ReadParts | PreviewJob | OpenShard | ReadShard | CloseShard


class ExaminerRequest(msgspec.Struct, array_like=True):
    """Work; after `limit_s` the kernel kills the examiner, even if parent and Python hang."""

    work: Work
    limit_s: int


class ExaminerReply(msgspec.Struct, array_like=True):
    """One for `ExaminerHello`, two for an `ExaminerRequest`: at its receipt, and with its result.

    `error` is a class name, or `DEFECT` with a traceback.
    """

    error: str = ""
    message: str = ""
    result: bytes = b""


class _ReadingNotes:
    """URLs that are being read, in a file that outlives the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.clear()

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self._unused = itertools.count()
        self._free: list[int] = []

    @contextmanager
    def reading(self, url: str) -> Iterator[None]:
        """Notes a file while it is read; the note stays after an error."""
        try:
            place = NOTE_BYTES * self._free.pop()
        except IndexError:
            place = NOTE_BYTES * next(self._unused)
        os.pwrite(self._descriptor, url.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0"), place)
        yield
        os.pwrite(self._descriptor, bytes(NOTE_BYTES), place)
        self._free.append(place // NOTE_BYTES)

    def note(self, text: str) -> None:
        """Replaces all notes."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)


def notes_of(descriptor: int) -> list[str]:
    """Returns the URLs in an examiner's notes."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    notes = (data[begin : begin + NOTE_BYTES].rstrip(b"\0") for begin in range(0, len(data), NOTE_BYTES))
    return [note.decode(errors="replace") for note in notes if note]


def _found(parts: Iterable[PartInfo | str | None]) -> bytes:
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
    """Decodes the result of `ReadParts`."""
    schema, found = "", _parts.decode(result)
    for number, part in enumerate(found):
        if isinstance(part, PartInfo):
            schema = part.schema or schema
            found[number] = part._replace(schema=schema)
    return found


_Do = Callable[[Work, _ReadingNotes], bytes]
_decoder = msgspec.msgpack.Decoder(ExaminerRequest)
_parts = msgspec.msgpack.Decoder(list[PartInfo | str])


def main() -> int:
    """Serves the parent process."""
    _be_first_to_go()
    protect_process(os.environ)
    outbox = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints of libraries must not mix with answers
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the parent handles them, and needs this process while it drains
    faulthandler.enable()
    logging.getLogger().addHandler(logging.NullHandler())
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, messages), daemon=True).start()
    hello = msgspec.msgpack.decode(messages.get(), type=ExaminerHello)
    threading.stack_size(_STACK_BYTES)
    if hello.max_bytes:
        limit_memory(hello.max_bytes)
    do, notes = _loaded(hello), _ReadingNotes(hello.notes)
    if not hello.max_bytes:
        limit_memory(data_bytes() + PART_BYTES, hard=False)  # until a shard has its own
    has_come = packed(ExaminerReply())
    _write_all(outbox, has_come)
    while True:
        message = messages.get()
        notes.clear()
        _write_all(outbox, has_come)
        answer = _handle_request(do, message, notes)
        signal.alarm(0)
        _write_all(outbox, packed(answer))


def _listen(inbox: BinaryIO, messages: "queue.SimpleQueue[bytes]") -> None:
    """Ends this process at the end of input, even amid work."""
    # A parent that dies with an unread answer resets the connection.
    with suppress(ConnectionError):
        while len(length := inbox.read(LENGTH.size)) == LENGTH.size:
            messages.put(inbox.read(LENGTH.unpack(length)[0]))
    os._exit(0)


def _write_all(outbox: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(outbox, rest) :]


def limit_memory(max_bytes: int, *, hard: bool = True) -> None:
    """Limits this process's memory, as `data_bytes` counts it; unless `hard`, the limit may be raised later."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = max_bytes if most == resource.RLIM_INFINITY else min(max_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit if hard else most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core files: they could fill the disk


def data_bytes() -> int:
    """Returns the memory that `RLIMIT_DATA` counts."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def _be_first_to_go() -> None:
    """Makes the OOM killer choose this process first; `protect_process` gives the permission up."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _loaded(hello: ExaminerHello) -> _Do:
    try:
        from qinfer.jobs.parts import part_of, set_aside
        from qinfer.jobs.planning import estimate, examine, make_plan
        from qinfer.jobs.preview import preview
        from qinfer.jobs.shard_rows import ShardRows
        from qinfer.storage import local  # noqa: F401  what the first job would load else
        from qinfer.storage.open import writable
        from qinfer.storage.store import patiently
    except ImportError as error:
        name = error.name

        def refuse(*_: object) -> bytes:
            raise UnsupportedFeature(f"bulk jobs need {name}: pip install 'qinfer-ml[bulk]'")

        return refuse
    import fsspec

    for scheme in sorted({url.partition(":")[0] for url in hello.allow}):
        with suppress(ImportError, ValueError):  # the first job with such a store gets the error
            fsspec.get_filesystem_class(scheme)

    footer_bytes, base_bytes = hello.footer_bytes, data_bytes()
    rows = ShardRows(hello.rows, footer_bytes, lambda more_bytes: limit_memory(base_bytes + more_bytes, hard=False))

    def do(work: Work, notes: _ReadingNotes) -> bytes:
        if isinstance(work, OpenShard | ReadShard | CloseShard):
            return rows.answer(work, notes.note)
        if isinstance(work, CheckJob):
            examine(work.spec, work.model, work.grant, footer_bytes)
            return b""
        if isinstance(work, PreviewJob):
            return msgspec.msgpack.encode(preview(work, footer_bytes))
        if isinstance(work, PlanJob):
            if work.is_estimate:
                return msgspec.msgpack.encode(estimate(work.job, work.pace, work.threads, footer_bytes))
            options = {"threads": work.threads, "footer_bytes": footer_bytes}
            return encode_plan(make_plan(work.job, work.pace, **options, reading=notes.reading))
        stores, function = writable(work.parts.grant), set_aside if work.sets_aside else part_of
        return _of_parts(work, lambda url, shard: patiently(lambda: function(stores(url), work.parts, shard)), notes)

    return do


def _of_parts(work: ReadParts, read: Callable[[str, Shard], PartInfo | str | None], notes: _ReadingNotes) -> bytes:
    def one(shard: Shard) -> PartInfo | str | None:
        url = work.parts.url_of(shard)
        with notes.reading(url):
            return read(url, shard)

    with ThreadPoolExecutor(work.threads, thread_name_prefix="qinfer-parts") as pool:
        return _found(pool.map(one, work.parts.shards))


def _handle_request(do: _Do, message: bytes, notes: _ReadingNotes) -> ExaminerReply:
    try:
        request = _decoder.decode(message)
        signal.alarm(request.limit_s)
        return ExaminerReply(result=do(request.work, notes))
    except QinferError as error:
        public = next(kind for kind in type(error).__mro__ if kind.__module__ == QinferError.__module__)
        return ExaminerReply(public.__name__, error.message)
    except MemoryError:
        os._exit(NO_MEMORY)  # half-made objects would burden the next request
    except Exception:  # noqa: BLE001  the parent logs it
        return ExaminerReply(DEFECT, traceback.format_exc())


if __name__ == "__main__":
    from qinfer.jobs import examiner  # noqa: PLW0406  the module whose messages others import

    sys.exit(examiner.main())
