"""Runs the bulk worker, and kills it at one step of a job: `python -m tests.bulk_faults before|after NAME`.

The step is the creation of a document such as `_SUCCESS`; the kill is one that nobody can catch.
"""

import os
import signal
import sys
from typing import Any

from qinfer.bulk.store_local import LocalStore
from qinfer_workers.bulk.__main__ import main

_put = LocalStore.put_if_absent


def install(when: str, name: str) -> None:
    """Has this process killed before or after it makes a document."""

    def put(self: LocalStore, data: bytes, url: str) -> Any:
        is_it = url.endswith(f"/{name}")
        if is_it and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = _put(self, data, url)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    LocalStore.put_if_absent = put  # type: ignore[method-assign]  # that is the purpose


if __name__ == "__main__":
    install(*sys.argv[1:])
    sys.exit(main())
