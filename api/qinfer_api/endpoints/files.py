"""Endpoints declared by files: a gateway stores each content of a file once, at its start.

Later changes by the API or a promotion survive a restart; an edited file replaces them. An endpoint outlives its file.
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
"""The pause before the next look for missing models."""


def declared_here(settings: Settings) -> list[Endpoint]:
    """Reads the declarations of this gateway's directory."""
    return read_directory(settings.endpoints.path) if settings.endpoints.path else []


class EndpointFiles:
    """Writes the declarations of files."""

    def __init__(self, watch: EndpointWatch, declared: Iterable[Endpoint]) -> None:
        self._watch = watch
        self._left = {endpoint.name: endpoint for endpoint in declared}
        self._reasons: dict[str, str] = {}

    async def run(self) -> None:
        """Writes declarations until all are written."""
        while self._left:
            await asyncio.sleep(AGAIN_S)
            with suppress(BrokerUnavailable):  # other tasks log the outage
                await self.write()

    async def write(self) -> None:
        """Writes declarations whose models exist, once per file."""
        for name, endpoint in list(self._left.items()):
            reason = "; ".join(self._watch.view.refusals(endpoint))
            if not reason and await self._write_endpoint(endpoint):
                del self._left[name]
            elif reason and self._reasons.get(name) != reason:
                self._reasons[name] = reason
                logger.error("endpoint of a file can't be used yet", extra={"endpoint": name, "reason": reason})
        await self._watch.refresh_endpoints()

    async def _write_endpoint(self, endpoint: Endpoint) -> bool:
        before = (await self._watch.store.read()).endpoints.get(endpoint.name)
        if before is not None and before.file == endpoint.file:
            return True
        try:
            await self._watch.store.put(endpoint, 0 if before is None else before.revision)
        except (Conflict, EndpointNotFound):
            return False
        logger.info("endpoint of a file written", extra={"endpoint": endpoint.name})
        return True
