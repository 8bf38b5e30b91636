"""Loads and unloads models for model code, on the worker's event loop, by the desired state that all workers follow.

Like a gateway, the worker needs the repository's control mode and overlay in its settings.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from qinfer.errors import Cancelled, ModelNotFound, ModelNotReady
from qinfer.models.catalog import Catalog
from qinfer.models.control import ModelControl

T = TypeVar("T")

_ENDING = "the worker ends"


class ModelLoads:
    """The `ManagesModels` of a worker's models; called from other threads."""

    def __init__(self, control: ModelControl, catalog: Catalog) -> None:
        self._control = control
        self._catalog = catalog
        self._loop = asyncio.get_running_loop()
        self._is_over = False

    def load(self, model: str, config: str, files: Mapping[str, bytes]) -> None:
        """Loads a model."""
        self._done(self._control.load(model, config, files))

    def unload(self, model: str, *, unload_dependents: bool) -> None:
        """Unloads a model."""
        self._done(self._control.unload(model, unload_dependents=unload_dependents))

    def is_ready(self, model: str, version: int) -> bool:
        """Returns whether a model version is ready."""
        return self._done(self._is_ready(model, version))

    async def end_with(self, stop: asyncio.Event) -> None:
        """Waits for the worker's end, then ends current loads and refuses further loads."""
        await stop.wait()
        self._is_over = True
        self._control.cancel_loads()

    async def _is_ready(self, model: str, version: int) -> bool:
        await self._catalog.refresh()
        try:
            return self._catalog.says_ready(model, version)
        except (ModelNotFound, ModelNotReady):
            return False

    def _done(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_over:
            work.close()
            raise Cancelled(_ENDING)
        try:
            outcome = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise Cancelled(_ENDING) from None
        try:
            return outcome.result()
        except CancelledError:
            raise Cancelled(_ENDING) from None
