"""The gateway's side of the model repositories: opened where there are any, and watched in control mode `poll`."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from qinfer.core.settings import RepositorySettings
from qinfer.errors import QinferError
from qinfer.models.repository.open import Repositories, open_repositories
from qinfer.models.state import ControlStore
from qinfer.models.sync import Source, SyncedModel, sync
from qinfer.queue.base import Delivery

logger = logging.getLogger(__name__)


def open_here(settings: RepositorySettings) -> Repositories | None:
    """Opens the repositories, if any is at hand: a gateway needs none when others write the desired state.

    Raises:
        SettingsError: A setting is wrong.
    """
    places = [place.strip() for place in settings.path.split(",")]
    if settings.overlay or any("://" in place or Path(place).is_dir() for place in places):
        return open_repositories(settings)
    return None


def note_errors(models: Iterable[SyncedModel]) -> None:
    """Logs the models that can't be read."""
    for model in models:
        if model.error:
            logger.error("model can't be read", extra={"model": model.model, "error": model.error})


class RepositoryWatch:
    """Follows changes of the repositories; several gateways that do it see the same and do no harm.

    Args:
        source: The repositories.
        store: Where the desired state is.
        delivery: Where lanes are made.
        every_s: Seconds between two looks.
        min_workers: `RepositorySettings.min_workers`.
    """

    def __init__(
        self, source: Source, store: ControlStore, delivery: Delivery, every_s: float, min_workers: int = 1
    ) -> None:
        self._source = source
        self._store = store
        self._delivery = delivery
        self._every_s = every_s
        self._min_workers = min_workers
        self._errors: dict[str, str] = {}

    async def run(self) -> None:
        """Looks every few seconds until cancelled; what fails is tried again at the next look."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()

    async def look(self) -> None:
        """Writes what has changed since the last look as the desired state."""
        try:
            self.note(await sync(self._source, self._store, self._delivery, min_workers=self._min_workers))
        except QinferError as error:
            logger.warning("model repository not looked through", extra={"reason": error.message})
        except Exception:  # the loop boundary: one odd file must not end the gateway
            logger.exception("model repository not looked through")

    def note(self, models: Sequence[SyncedModel]) -> None:
        """Logs what a sync has changed, and each error once."""
        for model in models:
            if model.changed and not model.error:
                what = "model removed" if model.removed else "model changed"
                logger.info(what, extra={"model": model.model, "generation": model.generation})
        note_errors(model for model in models if self._errors.get(model.model) != model.error)
        self._errors = {model.model: model.error for model in models if model.error}
