"""The liveness of a program: two files whose ages probes read without Python, and an end that waits for no thread.

`live` is touched while the event loop runs, even without Redis. Workers also touch `ready` at each written heartbeat,
and remove it when a model is not loaded.
"""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from qinfer.core.settings import Settings
from qinfer.errors import SettingsError
from qinfer.models.state import WorkerRecord

LIVE, READY = "live", "ready"
_EVERY_S = 5.0


class HealthFiles:
    """The health files in a directory of the process.

    With `strict`, a model that failed to load makes the worker not ready.
    """

    def __init__(self, directory: Path, *, strict: bool) -> None:
        self._live, self._ready, self._strict = directory / LIVE, directory / READY, strict
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._ready.unlink(missing_ok=True)
            self._live.touch()
        except OSError as error:
            raise SettingsError(f"QINFER_WORKER__HEALTH_DIR={directory}: {error.strerror}") from None

    async def run(self) -> NoReturn:
        """Touches `live` every few seconds until cancelled."""
        while True:
            with contextlib.suppress(OSError):  # the file grows old, and the probe fails
                self._live.touch()
            await asyncio.sleep(_EVERY_S)

    def beaten(self, record: WorkerRecord) -> None:
        """Touches or removes `ready`."""
        with contextlib.suppress(OSError):
            if record.lacks(strict=self._strict):
                self._ready.unlink(missing_ok=True)
            else:
                self._ready.touch()


def open_health(settings: Settings) -> HealthFiles | None:
    """Opens the health files, if the settings name a directory.

    Raises:
        SettingsError: They can't be written.
    """
    directory = settings.worker.health_dir
    return HealthFiles(Path(directory), strict=settings.repository.strict_readiness) if directory else None


def exit_process(code: int) -> NoReturn:
    """Ends the process without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
