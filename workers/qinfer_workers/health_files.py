"""Two files whose ages tell how a program is: a probe that looks at them starts no Python.

`live` is touched while the event loop runs, also while Redis is away: by workers, bulk workers, beat and bridges. Only
workers touch `ready`, with each heartbeat that was written while the models are loaded; it is removed when one is not.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import NoReturn

from qinfer.core.settings import Settings
from qinfer.errors import SettingsError
from qinfer.models.state import WorkerRecord

LIVE, READY = "live", "ready"
_EVERY_S = 5.0


class HealthFiles:
    """The files in a directory of the process's own.

    Args:
        directory: Where they are; made if it is not there.
        strict: A model that failed to load makes the worker not ready.

    Raises:
        SettingsError: They can't be written.
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
            with contextlib.suppress(OSError):  # the file grows old, which the probe sees
                self._live.touch()
            await asyncio.sleep(_EVERY_S)

    def beaten(self, record: WorkerRecord) -> None:
        """Takes a heartbeat that was written."""
        with contextlib.suppress(OSError):
            if record.lacks(strict=self._strict):
                self._ready.unlink(missing_ok=True)
            else:
                self._ready.touch()


def open_health(settings: Settings) -> HealthFiles | None:
    """Opens the files for probes, if there are to be any.

    Raises:
        SettingsError: They can't be written.
    """
    directory = settings.worker.health_dir
    return HealthFiles(Path(directory), strict=settings.repository.strict_readiness) if directory else None
