"""The memory that a gateway or worker shares: its own, that of its machine, and that of other machines."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from qinfer.core.settings_sections import SegmentSettings
from qinfer.errors import BrokerUnavailable
from qinfer.segments.connector import TensorConnector
from qinfer.segments.listener import TensorListener
from qinfer.segments.memory import OwnMemory
from qinfer.segments.reading import SegmentReader
from qinfer.segments.shelf import Shelf
from qinfer.tensors import Bytes

SECRET_EVERY_S = 5.0
"""Redis may have lost the secret, and have another."""


class TensorRegistry(Protocol):
    """Where processes say at which address others reach their tensors, while they live."""

    def announce_tensors(self, process: str) -> Coroutine[Any, Any, Any]:
        """Tells `<name>@<host>:<port>` until cancelled."""
        ...

    async def announced_tensors(self) -> Sequence[str]:
        """Returns what live processes tell."""
        ...


class SegmentSharing:
    """The memory of this process, `name`, and of those whose names begin with one of `kinds`.

    `reader` is the name by which they know this process, and to which replies are addressed.
    `secret` returns what these processes know and code of models does not. With a `registry`, this process listens for
    other machines if the settings say so, and a worker connects to those that do.
    """

    def __init__(
        self,
        settings: SegmentSettings,
        name: str,
        kinds: tuple[str, ...],
        secret: Callable[[], Awaitable[bytes]],
        *,
        reader: str,
        registry: TensorRegistry | None = None,
    ) -> None:
        directory = Path(settings.directory)
        self._secret, self._registry = secret, registry
        self.own = OwnMemory(name, settings.most_bytes)
        self.far: TensorConnector | None = None
        self.listener: TensorListener | None = None
        if registry is not None and name.startswith("worker-"):  # its connections bring replies to gateways
            self.far = TensorConnector(settings, reader, kinds, self._is_near, registry.announced_tensors)
        if registry is not None and settings.listen_host:
            self.listener = TensorListener(self.own, reader, settings)
        self.shelf = Shelf(directory, self.own)
        reads_own = name.startswith(kinds)
        self.shelf.itself = reader if reads_own else ""
        self.others = SegmentReader(directory, reader, kinds, self.shelf if reads_own else None)

    @property
    def readers(self) -> AbstractSet[str]:
        """The names of the processes that read the memory of this one, and of those that did until lately."""
        return self.shelf.known if self.listener is None else self.shelf.known | self.listener.readers

    def serve_readers(self, changed: Callable[[], None], replied: Callable[[Bytes], None]) -> None:
        """Calls `changed` when a reader comes or goes; `replied` gets replies of other machines."""
        self.shelf.changed = changed
        if self.listener is not None:
            self.listener.changed, self.listener.replied = changed, replied

    async def run(self) -> None:
        """Finds other processes, and gives back idle memory, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.own.run())
            tasks.create_task(self.others.run())
            if self.listener is not None and self._registry is not None:
                tasks.create_task(self.listener.run(self._registry.announce_tensors))
            if self.far is not None:
                tasks.create_task(self.far.run())
            while True:
                with suppress(BrokerUnavailable):  # the last one stays
                    self._use(await self._secret())
                await asyncio.sleep(SECRET_EVERY_S)

    def close(self) -> None:
        """Ends all connections."""
        if self.listener is not None:
            self.listener.close()
        self.shelf.close()
        self.own.close()

    def _is_near(self, owner: str) -> bool:
        return self.others.is_near(owner)

    def _use(self, secret: bytes) -> None:
        self.shelf.secret = self.others.secret = secret
        self.others.scan()
        if self.listener is not None:
            self.listener.secret = secret
        if self.far is not None:
            self.far.secret = secret
