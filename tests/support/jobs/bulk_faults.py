"""Runs the bulk worker, and kills it at one step of a job.

`python -m tests.support.jobs.bulk_faults before|after NAME`

The step is the creation of a document such as `_SUCCESS`; the kill is one that nobody can catch. Instead, its
event loop hangs at the first job with `hang loop`, and its store never answers who reads a document with `hang store`.
"""

import os
import signal
import sys
import time
from typing import Any

from qinfer.storage.local import LocalStore
from qinfer_workers.jobs import __main__ as app
from qinfer_workers.jobs.__main__ import main
from qinfer_workers.jobs.steps import JobPlanner
from qinfer_workers.liveness import exit_process

_put = LocalStore.put_if_absent


def install(when: str, name: str) -> None:
    """Has this process killed before or after it makes a document, or hang."""
    if (when, name) == ("hang", "store"):
        LocalStore.read = _never  # type: ignore[method-assign,assignment]  # that is the purpose
        return
    if when == "hang":
        app.LOOK_EVERY_S, app.ANSWER_S, app.STOP_S = 0.1, 1.0, 0.5
        JobPlanner.run = _hang  # type: ignore[method-assign]  # that is the purpose
        return

    def put(self: LocalStore, data: bytes, url: str) -> Any:
        is_it = url.endswith(f"/{name}")
        if is_it and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = _put(self, data, url)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    LocalStore.put_if_absent = put  # type: ignore[method-assign]  # that is the purpose


def _never(*_: object, **__: object) -> None:
    sys.stderr.write("the store hangs\n")
    time.sleep(3600)


async def _hang(self: JobPlanner, job_id: str) -> None:
    time.sleep(3600)  # noqa: ASYNC251  a defect


if __name__ == "__main__":
    install(*sys.argv[1:])
    exit_process(main())
