"""The host process: `python -m qinfer.backends.python_host <descriptor> <asks> <metrics> <parent>`.

Args:
    descriptor: The inherited socket to the worker.
    asks: The inherited socket for questions about the model's readiness.
    metrics: The inherited memory of the model's own metrics.
    parent: The worker's process id; the kernel ends this process with the worker.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from qinfer.backends.python_host import utils
from qinfer.backends.python_host.channel import Channel
from qinfer.backends.python_host.host import ModelHost
from qinfer.backends.python_host.telemetry import MetricTable, connect_metrics

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

IGNORED = (signal.SIGTERM, signal.SIGINT)


def _ignore(number: int, frame: FrameType | None) -> None:
    del number, frame


def _heed() -> None:
    """Lets a forked child heed signals, because `multiprocessing` ends its processes by SIGTERM."""
    for signum in IGNORED:
        if signal.getsignal(signum) is _ignore:
            signal.signal(signum, signal.SIG_DFL)


def main(descriptor: int, asks: int, metrics: int, parent: int) -> int:
    """Serves one model; returns the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    faulthandler.enable()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for signum in IGNORED:  # the draining worker decides, not the group's signals
        signal.signal(signum, _ignore)
    os.register_at_fork(after_in_child=_heed)
    sys.modules["triton_python_backend_utils"] = utils
    sys.modules["c_python_backend_utils"] = utils
    sys.path.append(str(Path(__file__).with_name("modules")))
    sys.argv = [sys.executable]
    connect_metrics(MetricTable(metrics))
    ModelHost(Channel(socket.socket(fileno=descriptor)), socket.socket(fileno=asks)).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:5])))
