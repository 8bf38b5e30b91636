"""A gateway in a thread of its own, for tests that call it from outside any event loop; and what it may fail with."""

import asyncio
import re
import threading
from typing import Any

from qinfer.core.settings import Settings
from tests.support.gateway import Running, running_gateway, settings_of

PRESCRIBED = {
    500: [
        r"attempt to (access|get)",  # a JSON value of the wrong type (§1.2)
        r"Unable to parse",  # the same
        r"Expected JSON object for keyword: 'parameters'",  # the same, §1.18
        r"failed to (load|unload) '|load failed for model '|Invalid file path",  # §1.14
        r"Invalid value for 'ready': expected a boolean",  # the same
        r"Unable to open shared memory region",  # §1.15
        r"the model raised: boom",  # the model `fails`
    ],
    501: [
        r"Unsupported compression type",  # §1.11
        r"'repository_name' specification is not supported",  # §1.1
        r"Label Studio is not served here",
        r"Client shared memory is disabled",  # §1.15
        r"CUDA shared memory is not supported",
        r"(trace|log) (file location|mode) can not be updated through network protocol",  # §1.16, §1.17
        r"traces are not written on this server",
    ],
    503: [
        r"explicit model load / unload is not allowed",  # §1.14
        r"log_format",  # §1.17
        r"is not at ready state",  # §1.3
        r"is paused",
        r"queue of the bulk tasks can't be reached",  # there is no Celery
    ],
}
"""What the reference answers with 5xx, and where it says so."""


def is_prescribed(status: int, text: str) -> bool:
    return any(re.search(pattern, text) for pattern in PRESCRIBED.get(status, []))


class Server:
    """A gateway in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.running: Running | None = None

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with running_gateway(self._settings) as self.running:
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(20)
        assert self.running is not None
        return self.running.url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()


def settings(**more: Any) -> Settings:
    base = settings_of(limits={"default_timeout_s": 2.0, "max_timeout_s": 2.0})
    return base.model_copy(update=more)
