"""The calls about models that both clients have: metadata, readiness, index, statistics, load, unload."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from qinfer.client import model_flows
from qinfer.client.results import ModelIndexEntry, ModelMetadata, ModelStatistics
from qinfer.client.steps import Flow, Policy

T = TypeVar("T")


class ModelCalls(ABC):
    """The calls of `Client` about models."""

    _policy: Policy

    @abstractmethod
    def _run_flow(self, flow: Flow[T]) -> T:
        """Executes a flow."""

    def metadata(self, model: str, version: int | None = None) -> ModelMetadata:
        """Returns a model's versions, inputs and outputs.

        Raises:
            ModelNotFound: The model or version does not exist.
            QinferError: As `infer`.
        """
        return self._run_flow(model_flows.metadata(self._policy, model, version))

    def config(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Returns a model's configuration in Triton's JSON.

        Raises:
            ModelNotFound: The model or version does not exist.
            QinferError: As `infer`.
        """
        return self._run_flow(model_flows.config(self._policy, model, version))

    def index(self, *, ready: bool = False) -> list[ModelIndexEntry]:
        """Returns the models of the repositories: an entry per version that was ever loaded, or one for the model.

        Args:
            ready: Only versions that are ready.
        """
        return self._run_flow(model_flows.index(self._policy, ready=ready))

    def statistics(self, model: str | None = None, version: int | None = None) -> list[ModelStatistics]:
        """Returns the statistics of a model's versions, or those of all models.

        Args:
            model: The model's name; `None` = all models.
            version: The version; `None` = every version.

        Raises:
            InvalidRequest: The model or version is not available.
            QinferError: As `infer`.
        """
        return self._run_flow(model_flows.statistics(self._policy, model, version))

    def load(
        self,
        model: str,
        *,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Loads a model, or its changes, and waits until it is ready; needs the server's control mode explicit.

        Args:
            model: The model's name.
            config: A configuration in Triton's JSON, which replaces the model's `config.pbtxt`.
            files: Files that replace the model's files in the repository, by `version/name`; they need `config`.
            timeout_s: How long it may take; `None` = the client's `timeout_s`.

        Raises:
            ControlDisabled: The server's control mode is none or poll.
            QinferError: The model can't be loaded; as `infer`.
        """
        self._run_flow(model_flows.load(self._policy.within(timeout_s), model, config, files))

    def unload(self, model: str, *, unload_dependents: bool = False) -> None:
        """Unloads a model: new requests are refused, waiting requests are answered.

        Args:
            model: The model's name.
            unload_dependents: Unload the models of an ensemble, too.

        Raises:
            ControlDisabled: The server's control mode is none or poll.
            QinferError: As `infer`.
        """
        self._run_flow(model_flows.unload(self._policy, model, unload_dependents=unload_dependents))

    def is_ready(self, model: str | None = None, version: int | None = None) -> bool:
        """Returns whether a model can answer now; without a model, whether all models of the server can.

        A model unknown to the server is not ready.

        Raises:
            Unreachable: No gateway answers.
            QinferError: As `infer`.
        """
        return self._run_flow(model_flows.is_ready(self._policy, model, version))

    def is_live(self) -> bool:
        """Returns whether a gateway answers."""
        return self._run_flow(model_flows.is_live(self._policy))


class AsyncModelCalls(ABC):
    """The calls of `AsyncClient` about models."""

    _policy: Policy

    @abstractmethod
    async def _run_flow(self, flow: Flow[T]) -> T:
        """Executes a flow."""

    async def metadata(self, model: str, version: int | None = None) -> ModelMetadata:
        """Returns a model's versions, inputs and outputs; see `Client.metadata`."""
        return await self._run_flow(model_flows.metadata(self._policy, model, version))

    async def config(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Returns a model's configuration; see `Client.config`."""
        return await self._run_flow(model_flows.config(self._policy, model, version))

    async def index(self, *, ready: bool = False) -> list[ModelIndexEntry]:
        """Returns the models of the repositories; see `Client.index`."""
        return await self._run_flow(model_flows.index(self._policy, ready=ready))

    async def statistics(self, model: str | None = None, version: int | None = None) -> list[ModelStatistics]:
        """Returns the statistics of a model's versions, or those of all models; see `Client.statistics`."""
        return await self._run_flow(model_flows.statistics(self._policy, model, version))

    async def load(
        self,
        model: str,
        *,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Loads a model, or its changes, and waits until it is ready; see `Client.load`."""
        await self._run_flow(model_flows.load(self._policy.within(timeout_s), model, config, files))

    async def unload(self, model: str, *, unload_dependents: bool = False) -> None:
        """Unloads a model; see `Client.unload`."""
        await self._run_flow(model_flows.unload(self._policy, model, unload_dependents=unload_dependents))

    async def is_ready(self, model: str | None = None, version: int | None = None) -> bool:
        """Returns whether a model, or the whole server, can answer now; see `Client.is_ready`."""
        return await self._run_flow(model_flows.is_ready(self._policy, model, version))

    async def is_live(self) -> bool:
        """Returns whether a gateway answers; see `Client.is_live`."""
        return await self._run_flow(model_flows.is_live(self._policy))
