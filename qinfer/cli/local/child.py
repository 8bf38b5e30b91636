"""Runs a program as a child of `qinfer up` that ends with it: `python -m qinfer.cli.local.child CPUS MODULE`.

The child's standard input is a pipe that only the supervisor holds. When the supervisor dies, even by SIGKILL, the
kernel closes it: the program gets SIGTERM and drains, so that no orphan holds the port of the next `qinfer up`.
(`PR_SET_PDEATHSIG` needs Linux and code between fork and exec, and misses a parent that dies before the call.)
"""

import os
import runpy
import signal
import sys
import threading

from qinfer.core.processes import protect_process

ORPHAN_DRAIN_S = 60.0
"""An orphan's drain limit, above the programs' own."""


def main() -> None:
    """Runs the module of the second argument, on the cores in the first one."""
    protect_process(os.environ)
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
