"""An examiner with something else to do for a job: what the name of its first input says.

    python -m tests.support.jobs.examiner_stub [library that is missing]

The name of an error's class raises it; else it is that of a function below, up to a hyphen. `STUB` is its command.
"""

import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from qinfer import errors
from qinfer.jobs import examiner
from qinfer.jobs.job import JobSpec
from qinfer.jobs.plan import JobPlan, UnplannedJob
from qinfer.jobs.planning import Reading
from qinfer.wire.bodies import JobPreview

STUB = (sys.executable, "-m", "tests.support.jobs.examiner_stub")


def looking() -> set[int]:
    """Returns the processes of this one that look at jobs, also those that are dead and that nobody waited for."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE or any("examiner" in word for word in child.cmdline()):
                found.add(child.pid)
    return found


def mark(url: str) -> None:
    """Leaves a file where the first input would be."""
    Path(url.partition("://")[2]).touch()


def hang(url: str) -> None:
    mark(url)
    threading.Event().wait()


def wait(url: str) -> None:
    """Ends when the file is gone that it leaves."""
    mark(url)
    while Path(url.partition("://")[2]).exists():
        threading.Event().wait(0.01)


def crash(_: str) -> None:
    ctypes.string_at(0)


def abort(_: str) -> None:
    os.abort()


def leave(_: str) -> None:
    os._exit(7)


def grow(_: str) -> None:
    grown = [bytes(2**20)]
    while True:
        grown += [bytes(2**20) for _ in range(16)]


def arrow(_: str) -> None:
    import pyarrow as pa

    try:
        pa.allocate_buffer(2**40)
    except pa.ArrowException:
        return


def babble(_: str) -> None:
    """Says what is no answer, where answers go: that is where jobs come from, too."""
    os.write(sys.stdin.fileno(), b"\xff" * 64)
    threading.Event().wait()


def lock(_: str) -> None:
    """Keeps the interpreter's lock, for as long as the kernel lets it; that is shortened here."""
    if not signal.alarm(1):
        os._exit(1)
    re.match("(a+)+$", "a" * 64 + "b")


def chatter(_: str) -> None:
    sys.stdout.write("x" * 2**20)
    logging.getLogger("s3fs").error("https://key:secret@host")


def divide(_: str) -> None:
    1 / 0  # noqa: B018


def fine(_: str) -> None:
    """Has nothing to say."""


_JOBS = (mark, hang, wait, crash, abort, leave, grow, arrow, babble, lock, chatter, divide, fine)
JOBS: Mapping[str, Callable[[str], None]] = {job.__name__: job for job in _JOBS}


def _plan(job: UnplannedJob, *_: object, reading: Reading, **__: object) -> JobPlan:
    with reading(job.spec.inputs[0]):
        _examine(job.spec)
    return JobPlan(
        job_id=job.job_id, spec=job.spec, model_hash=job.model_hash, schema="", sources=(), shards=(), rows=0
    )


def _preview(work: examiner.PreviewJob, *_: object) -> JobPreview:
    _examine(work.spec)
    return JobPreview(of=work.of)


def _examine(spec: JobSpec, *_: object) -> None:
    name = spec.inputs[0].rpartition("/")[2].partition("-")[0]
    if name not in JOBS:
        raise vars(errors)[name](f"'{spec.inputs[0]}' is wrong: größe")
    JOBS[name](spec.inputs[0])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.modules[sys.argv[1]] = None  # type: ignore[assignment]  # as `import` marks what is not there
    else:
        from qinfer.jobs import planning, preview

        preview.preview = _preview  # type: ignore[assignment]
        planning.examine = _examine  # type: ignore[assignment]
        planning.make_plan = _plan  # type: ignore[assignment]
    examiner.main()
