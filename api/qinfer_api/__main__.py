"""Runs one gateway, configured by `QINFER_…` variables, until SIGTERM or SIGINT: `python -m qinfer_api`.

SIGHUP reloads API keys and certificates. Exit codes: 0 after a drain, or SIGTERM before it serves; 1 if a part of the
gateway died; 2 for a wrong setting; 130 for SIGINT before it serves.
"""

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys

import uvloop

from qinfer.core.processes import SWITCH_INTERVAL_S, protect_process
from qinfer.core.settings import Settings, load_settings
from qinfer.errors import SettingsError
from qinfer.observe import logs
from qinfer_api.app import build

logger = logging.getLogger("qinfer_api")

GC_THRESHOLDS = (5_000, 2, 1_000)
"""A look begins when more objects than the first are new. It includes the middle generation when more looks than the
second have been without it, and the oldest after more of those than the third."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h


def main() -> int:
    """Runs the program; returns its exit code."""
    protect_process(os.environ)
    argparse.ArgumentParser(
        prog="python -m qinfer_api",
        description="The qinfer gateway: Triton's protocol, over HTTP and gRPC, in front of Redis Streams.",
        epilog="Configured by QINFER_… variables, such as QINFER_REDIS__URL and QINFER_HTTP__PORT; "
        "`qinfer.core.settings` documents all of them.",
    ).parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the first reload; child processes inherit it
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core logs are not JSON
    try:
        settings = load_settings()
        logs.configure(settings.log, "gateway", unknown=settings.unknown)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run_gateway(settings))
    except SettingsError as error:
        logs.cannot_start(os.environ, "qinfer_api", error.message)
        return 2
    except asyncio.CancelledError:
        return 0
    except KeyboardInterrupt:  # during the start; later, it drains
        return 130
    except BaseExceptionGroup:
        logger.exception("gateway died")
        return 1
    return 0


async def _run_gateway(settings: Settings) -> None:
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    assert starting is not None
    loop.add_signal_handler(signal.SIGTERM, starting.cancel)
    gateway = await build(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gateway.stop)
    loop.add_signal_handler(signal.SIGHUP, gateway.reload)
    _tune_garbage_collector()
    _tune_allocator()
    await gateway.serve()


def _tune_allocator() -> None:
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, 8 * 2**20)
        mallopt(_TRIM_THRESHOLD, 16 * 2**20)
        mallopt(_ARENA_MAX, 2)  # threads wait for one another


def _tune_garbage_collector() -> None:
    """Requests leave no reference cycles, and FastAPI has many objects to scan.

    Floods do leave some: one look through 50,000 young objects would hold up all others for 24 to 77 ms. So each look
    is short: the youngest are few, and the middle generation is looked through before it grows.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


if __name__ == "__main__":
    sys.exit(main())
