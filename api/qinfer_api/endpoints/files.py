"""Endpoints that are declared by files: written when a gateway starts, each content of a file once.

What is changed later, by the API or because a canary was promoted, therefore survives the restart of a gateway; a file
that was edited replaces it. An endpoint whose file was removed stays until it is removed by the API.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from qinfer.core.settings import Settings
from qinfer.errors import BrokerUnavailable, Conflict, EndpointNotFound
from qinfer.traffic.endpoints import Endpoint
from qinfer.traffic.files import read_directory
from qinfer.traffic.routing import EndpointWatch

logger = logging.getLogger(__name__)

AGAIN_S = 2.0
"""Seconds after which a declaration is tried again whose models are not there yet."""


def declared_here(settings: Settings) -> list[Endpoint]:
    """Reads the files of this gateway's directory, if it has one.

    Raises:
        SettingsError: The directory can't be read, or a file is no declaration.
    """
    return read_directory(settings.endpoints.path) if settings.endpoints.path else []


class EndpointFiles:
    """Writes the declarations of files.

    Args:
        watch: Reads and writes declarations.
        declared: What the files say.
    """

    def __init__(self, watch: EndpointWatch, declared: Iterable[Endpoint]) -> None:
        self._watch = watch
        self._left = {endpoint.name: endpoint for endpoint in declared}
        self._reasons: dict[str, str] = {}

    async def run(self) -> None:
        """Writes what `write` has left, until all is written, or cancelled."""
        while self._left:
            await asyncio.sleep(AGAIN_S)
            with suppress(BrokerUnavailable):  # others log it
                await self.write()

    async def write(self) -> None:
        """Writes the declarations whose models are there; what was written of the same file before stays as it is.

        Raises:
            BrokerUnavailable: Redis can't be reached.
        """
        for name, endpoint in list(self._left.items()):
            reason = "; ".join(self._watch.view.refusals(endpoint))
            if not reason and await self._write(endpoint):
                del self._left[name]
            elif reason and self._reasons.get(name) != reason:
                self._reasons[name] = reason
                logger.error("endpoint of a file not used yet", extra={"endpoint": name, "reason": reason})
        await self._watch.look()

    async def _write(self, endpoint: Endpoint) -> bool:
        """Writes a declaration, unless its file was; `False` = somebody else has changed it meanwhile."""
        before = (await self._watch.store.read()).endpoints.get(endpoint.name)
        if before is not None and before.file == endpoint.file:
            return True
        try:
            await self._watch.store.put(endpoint, 0 if before is None else before.revision)
        except (Conflict, EndpointNotFound):
            return False
        logger.info("endpoint of a file written", extra={"endpoint": endpoint.name})
        return True
