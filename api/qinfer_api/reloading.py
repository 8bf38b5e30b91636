"""Files that a serving gateway reloads: API keys when their content changes, certificates on SIGHUP.

An unusable file changes nothing, and an ERROR names it. Messages contain no keys, hashes or private keys.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from qinfer.core.api_keys import ApiKey, parse_keys, read_key_file
from qinfer.errors import SettingsError
from qinfer_api.auth import Auth

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class KeyFile:
    """The keys of a file, opened at each check, because Kubernetes and editors replace it."""

    def __init__(self, path: Path, auth: Auth) -> None:
        self._path = path
        self._auth = auth
        self._content: bytes | None = None
        self._problem = ""

    async def refresh_keys(self) -> None:
        """Reloads a changed file; logs each problem once."""
        try:
            keys = await asyncio.to_thread(self._changed)
        except SettingsError as error:
            if error.message != self._problem:
                logger.error("API keys can't be read; the previous ones stay valid", extra={"reason": error.message})
            self._problem = error.message
            return
        if self._problem:
            self._problem = ""
            logger.info("API keys can be read again")
        if keys is not None:
            self._auth.replace_keys(keys)
            logger.info("API keys read", extra={"path": str(self._path), "count": len(keys)})

    def _changed(self) -> tuple[ApiKey, ...] | None:
        content = read_key_file(self._path)
        if content == self._content:
            return None
        keys = parse_keys(self._path, content)
        self._content = content
        return keys


class Reloading:
    """Checks the file of API keys, and reloads all files on request."""

    def __init__(self, keys: KeyFile | None, certificates: Iterable[Callable[[], Awaitable[None]]]) -> None:
        self._keys = keys
        self.certificates = list(certificates)
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Requests a reload, on SIGHUP."""
        self._asked.set()

    async def run(self) -> None:
        """Follows the files until cancelled."""
        while True:
            if self._keys is not None:
                await self._keys.refresh_keys()
            try:
                async with asyncio.timeout(LOOK_EVERY_S if self._keys is not None else None):
                    await self._asked.wait()
            except TimeoutError:
                continue
            self._asked.clear()
            logger.info("files are read again")
            for show in self.certificates:
                await self._show_certificate(show)

    async def _show_certificate(self, show: Callable[[], Awaitable[None]]) -> None:
        try:
            await show()
        except SettingsError as error:
            logger.error("certificate can't be read; the previous one stays in use", extra={"reason": error.message})
        except OSError as error:
            reason = error.strerror or str(error)
            logger.error("certificate can't be used; the previous one stays in use", extra={"reason": reason})
