"""The examiner: a process beside a gateway that looks at new jobs' inputs, `python -m qinfer.bulk.examiner`.

Whoever may create jobs chooses the files, and native code parses them. Here it harms nobody: a file that makes it
crash, or ask for memory without end, ends this process, and one on which it hangs has the gateway end it. Each gateway
starts examiners for itself (`qinfer_api.examiner`), and talks to them by their standard input and output:

    gateway ── Hello, then a Job at a time ──▶ stdin │ examiner │ stdout ── Answer, two for a Job ──▶ gateway

It ends with its standard input, so with the gateway, however that ended.
"""

import faulthandler
import logging
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from qinfer.bulk.job import JobSpec
from qinfer.children import LENGTH, packed
from qinfer.errors import QinferError, UnsupportedFeature
from qinfer.repository.spec import ModelSpec

LONGEST_S = 120
"""Seconds after which the kernel ends an examiner that is at one job: with it, the gateway, and Python fail."""
NO_MEMORY = 3
"""The exit code of an examiner that a job would have needed more memory than it may have."""
DEFECT = "defect"
"""Stands for the class of an error that is none of qinfer's."""

_Examine = Callable[[JobSpec, ModelSpec, Sequence[str]], object]


class Hello(msgspec.Struct, array_like=True):
    """What holds for all jobs; the first message. Credentials of stores come by the environment.

    Attributes:
        allow: The URL prefixes that jobs may read and write.
        max_bytes: Memory that this process may have.
    """

    allow: tuple[str, ...]
    max_bytes: int


class Job(msgspec.Struct, array_like=True):
    """A job to look at.

    Attributes:
        spec: What is asked for.
        model: Its model's configuration.
    """

    spec: JobSpec
    model: ModelSpec


class Answer(msgspec.Struct, array_like=True):
    """What came of a message: of `Hello` that all is ready; of a `Job` that it has come, then whether it can be taken.

    Attributes:
        error: The name of an error's class, or `DEFECT`; empty = there is none.
        message: The error's text, or the traceback of a defect.
    """

    error: str = ""
    message: str = ""


_decoder = msgspec.msgpack.Decoder(Job)


def main() -> int:
    """Serves the process that started it."""
    outbox = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # they mean the gateway, which has jobs looked at while it drains
    faulthandler.enable()
    logging.getLogger().addHandler(logging.NullHandler())
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, messages), daemon=True).start()
    hello = msgspec.msgpack.decode(messages.get(), type=Hello)
    _limit(hello.max_bytes)
    examine = _loaded(hello.allow)
    has_come = packed(Answer())
    os.write(outbox, has_come)
    while True:
        job = messages.get()
        os.write(outbox, has_come)
        signal.alarm(LONGEST_S)
        answer = _answered(examine, job, hello.allow)
        signal.alarm(0)
        os.write(outbox, packed(answer))


def _listen(inbox: BinaryIO, messages: "queue.SimpleQueue[bytes]") -> None:
    """Reads what the gateway says; ends this process when it says no more, whatever that is at."""
    while len(length := inbox.read(LENGTH.size)) == LENGTH.size:
        messages.put(inbox.read(LENGTH.unpack(length)[0]))
    os._exit(0)


def _limit(max_bytes: int) -> None:
    """Has this process fail to get memory, rather than others; and be the first to go where the machine has none."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a file that crashes it must not fill the disk as well
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _loaded(allow: Sequence[str]) -> _Examine:
    """Loads what looks at jobs, and the drivers of the stores that they may use."""
    try:
        from qinfer.bulk.intake import examine
        from qinfer.storage import local, open  # noqa: F401  what the first job would load else
    except ImportError as error:
        name = error.name

        def refuse(*_: object) -> None:
            raise UnsupportedFeature(f"bulk jobs need {name}: pip install 'qinfer-ml[bulk]'")

        return refuse
    import fsspec

    for scheme in sorted({url.partition(":")[0] for url in allow}):
        with suppress(ImportError, ValueError):  # the first job that names such a store is told
            fsspec.get_filesystem_class(scheme)
    return examine


def _answered(examine: _Examine, message: bytes, allow: Sequence[str]) -> Answer:
    try:
        job = _decoder.decode(message)
        examine(job.spec, job.model, allow)
    except QinferError as error:
        return Answer(type(error).__name__, error.message)
    except MemoryError:
        os._exit(NO_MEMORY)  # what is half made would be in the way of the next job
    except Exception:  # noqa: BLE001  the gateway logs it
        return Answer(DEFECT, traceback.format_exc())
    return Answer()


if __name__ == "__main__":
    sys.exit(main())
