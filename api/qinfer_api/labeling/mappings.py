"""A gateway's mapping files, reloaded when one changes."""

import asyncio
import logging
import time
from pathlib import Path

from qinfer.errors import Forbidden, InvalidRequest, SettingsError, UnsupportedFeature
from qinfer.labeling.mapping import SUFFIXES, Mapping, Mappings, load_mappings

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0

_NAME = "QINFER_LABELING__MAPPINGS"
_Signature = tuple[tuple[str, int, int], ...]


class MappingBook:
    """One gateway's mappings; off without a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory) if directory else None
        self._signature: _Signature = ()
        self._looked_s = time.monotonic()
        self._looking = asyncio.Lock()
        self._mappings = Mappings()
        if self._directory is not None:
            self._mappings = load_mappings(self._directory)
            self._signature = _signature(self._directory)

    @property
    def is_open(self) -> bool:
        """Whether Label Studio is served."""
        return self._directory is not None

    async def current(self) -> Mappings:
        """Returns the mappings; invalid files change nothing."""
        if self._directory is None:
            raise UnsupportedFeature(
                f"Label Studio is not served here; {_NAME} names the directory of its mapping files"
            )
        async with self._looking:
            if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
                await asyncio.to_thread(self._reload_changed, self._directory)
                self._looked_s = time.monotonic()
        return self._mappings

    async def mapping_for(self, model: str, project: int | None) -> Mapping:
        """Returns a model's mapping for a project."""
        try:
            return (await self.current()).for_model(model, project)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error.message}; write one into the directory that {_NAME} names") from None

    async def for_tenant(self, model: str, project: int | None, tenant: str, *, is_shared: bool) -> Mapping:
        """Returns the mapping, if the tenant may use it.

        If several tenants have keys, a mapping without tenants is refused: it leads to all that Label Studio shows.
        """
        mapping = await self.mapping_for(model, project)
        if mapping.tenant and tenant not in mapping.tenant:
            raise Forbidden(f"the labeling mapping '{mapping.name}' is for other tenants than '{tenant}'")
        if is_shared and not mapping.tenant:
            raise Forbidden(
                f"the labeling mapping '{mapping.name}' names no tenant, and several use this server; its operator "
                f"writes 'tenant: {tenant}' into it"
            )
        return mapping

    def _reload_changed(self, directory: Path) -> None:
        signature = _signature(directory)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._mappings = load_mappings(directory)
        except SettingsError as error:
            logger.error("mappings can't be read; the previous ones stay in use", extra={"error": error.message})
        else:
            logger.info("mappings read", extra={"count": len(self._mappings)})


def _signature(directory: Path) -> _Signature:
    found = []
    try:
        for path in directory.iterdir():
            if path.suffix in SUFFIXES:
                about = path.stat()
                found.append((path.name, about.st_mtime_ns, about.st_size))
    except OSError:
        return ()
    return tuple(sorted(found))
