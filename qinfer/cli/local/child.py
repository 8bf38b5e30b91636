"""Runs a program as a child of `qinfer up` that ends with it: `python -m qinfer.cli.local.child CPUS MODULE`.

Only the supervisor holds the pipe that is the child's standard input. When it dies, even by SIGKILL, the kernel closes
the pipe: the program gets SIGTERM and drains, so that no orphan holds a port. (`PR_SET_PDEATHSIG` needs Linux and code
between fork and exec, and misses a parent that dies before the call.)
"""

import gc
import os
import runpy
import signal
import sys
import threading

from qinfer.core.processes import protect_process

ORPHAN_DRAIN_S = 60.0
"""An orphan's drain limit."""
GC_THRESHOLD = 50_000
"""Imports make many objects and little garbage: Python's 700 would cost a seventh of their time.

Gateways and workers set their own when they have started; bulk workers keep this one.
"""


def main() -> None:
    """Runs the second argument's module on the first one's cores."""
    protect_process(os.environ)
    gc.set_threshold(GC_THRESHOLD)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the program sets a handler
    cpus, sys.argv = sys.argv[1], sys.argv[2:]
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(ORPHAN_DRAIN_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
