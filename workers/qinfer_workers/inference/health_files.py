"""Two files whose ages tell how a worker is: a probe that looks at them starts no Python.

`live` is touched while the event loop runs, also while Redis is away. `ready` is touched with each heartbeat that was
written while the models are loaded, and removed when one is not.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import NoReturn

from qinfer.errors import SettingsError
from qinfer.models.state import WorkerRecord

LIVE, READY = "live", "ready"
_EVERY_S = 5.0


class HealthFiles:
    """The files in a directory of the worker's own.

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
