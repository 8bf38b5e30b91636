"""Beat's composition root: `python -m qinfer_workers.jobs.beat`.

It sends a sweep to the bulk workers every `bulk.sweep_every_s` seconds; `QINFER_…` variables configure it. Run one; a
second is harmless. Without beat, stuck jobs wait.

Exit codes: 0 after SIGTERM or SIGINT, 2 for a wrong setting, 70 if it can't send any more and has to be restarted.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from typing import Any

from celery.beat import EmbeddedService, Scheduler

from qinfer.core.processes import protect_process
from qinfer.core.settings import Settings, load_settings
from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.jobs.tasks import BulkTasks
from qinfer.models.state import BEAT
from qinfer.models.store import LIVENESS_EVERY_S, LIVENESS_HOLDS_S, ControlStore
from qinfer.observe import logs
from qinfer.queue.clients import admin_client
from qinfer_workers.jobs.app import plain_app
from qinfer_workers.liveness import exit_process, open_health

logger = logging.getLogger("qinfer_workers.jobs.beat")

QUIET_S = 300.0
"""The longest time without a message while Redis is reachable."""

MOST_WAITING = 100
"""The waiting tasks above which nothing is sent: without bulk workers, Redis would fill."""

_QUIET_SWEEPS = 5
_LEVELS = {"celery.beat": logging.WARNING}  # it logs each sweep


class Beat:
    """Celery's beat in a thread."""

    def __init__(self, settings: Settings) -> None:
        self._sent_s = time.monotonic()
        outer, tasks = self, BulkTasks(settings)

        class Telling(Scheduler):  # keeps its schedule in memory
            """Sends tasks while few are waiting, and reports each round."""

            def apply_async(self, *args: Any, **kwargs: Any) -> Any:
                with contextlib.suppress(BrokerUnavailable):  # sending raises the error
                    if tasks.waiting() >= MOST_WAITING:
                        outer.excuse()
                        return None
                result = super().apply_async(*args, **kwargs)
                outer.excuse()
                return result

        self._thread = EmbeddedService(plain_app(settings), thread=True, scheduler_cls=Telling)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is alive."""
        return bool(self._thread.is_alive())

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread without waiting."""
        self._thread.service.stop(wait=False)

    def quiet_s(self) -> float:
        """Returns the time since the last sending."""
        return time.monotonic() - self._sent_s

    def excuse(self) -> None:
        """Restarts the count of silence."""
        self._sent_s = time.monotonic()


async def look_after(beat: Beat, store: ControlStore, stop: asyncio.Event, *, longest_s: float) -> int:
    """Reports liveness until `stop` or a failure; returns the exit code."""
    name = f"qinfer-beat-{os.getpid()}@{socket.gethostname()}"
    while not stop.is_set():
        if not beat.is_alive:
            logger.error("beat has died")
            return os.EX_SOFTWARE
        try:
            await store.report_liveness(BEAT, name, LIVENESS_HOLDS_S)
        except BrokerUnavailable:
            beat.excuse()  # a restart does not bring Redis back
        if (quiet_s := beat.quiet_s()) > longest_s:
            logger.error("beat stops", extra={"reason": f"nothing could be sent for {quiet_s:.0f} s"})
            return os.EX_SOFTWARE
        try:
            async with asyncio.timeout(LIVENESS_EVERY_S):
                await stop.wait()
        except TimeoutError:
            pass
    return os.EX_OK


async def serve(settings: Settings) -> int:
    """Runs beat until a signal; returns the exit code."""
    beat = Beat(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    store = ControlStore(admin_client(settings.redis))
    touching = None if (health := open_health(settings)) is None else asyncio.create_task(health.run())
    beat.start()
    logger.info("beat started")
    try:
        longest_s = max(QUIET_S, _QUIET_SWEEPS * settings.bulk.sweep_every_s)
        return await look_after(beat, store, stop, longest_s=longest_s)
    finally:
        if touching is not None:
            touching.cancel()
        beat.stop()
        await store.close()
        logger.info("beat stopped")


def main() -> int:
    """Reads the settings, serves, and returns the exit status."""
    protect_process(os.environ)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # for gateways
    try:
        settings = load_settings()
        logs.configure(settings.log, "beat", unknown=settings.unknown)
        if settings.log.level != "DEBUG":
            for name, level in _LEVELS.items():
                logging.getLogger(name).setLevel(level)
        return asyncio.run(serve(settings))
    except SettingsError as error:
        logs.cannot_start(os.environ, "qinfer_workers.jobs.beat", error.message)
        return 2
    except Exception:  # the thread that waits for a broker would keep the process alive
        logger.exception("beat failed")
        return os.EX_SOFTWARE


if __name__ == "__main__":
    exit_process(main())
