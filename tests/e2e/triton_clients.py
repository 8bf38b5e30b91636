"""Triton's four clients behind one set of calls, so that a test can be written once for all of them.

Each call is passed to the client as it is; what differs is only what the clients themselves do differently: a call is
awaited or not, an answer is a dictionary or a message, a status is a number or a word.
"""

import gc
import importlib
import inspect
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import Stack

Array = npt.NDArray[Any]

KINDS = ("http", "http.aio", "grpc", "grpc.aio")
DATATYPES = {"f": "FP", "i": "INT", "u": "UINT"}
_CODES = {
    "400": "INVALID_ARGUMENT",
    "404": "NOT_FOUND",
    "500": "INTERNAL",
    "501": "UNIMPLEMENTED",
    "503": "UNAVAILABLE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonClient:
    """One of the clients, connected.

    Attributes:
        kind: Its module within `tritonclient`.
        raw: The client itself.
    """

    kind: str
    raw: Any

    @property
    def is_http(self) -> bool:
        return self.kind.startswith("http")

    @property
    def is_aio(self) -> bool:
        return self.kind.endswith("aio")

    @property
    def module(self) -> Any:
        return importlib.import_module(f"tritonclient.{self.kind}")

    async def call(self, method: str, /, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the client, and waits for it if it has to be waited for."""
        result = getattr(self.raw, method)(*arguments, **options)
        return await result if inspect.isawaitable(result) else result

    async def ask(self, method: str, /, *arguments: Any, **options: Any) -> Any:
        """Calls a method whose answer is a dictionary, or a message that has that form."""
        return await self.call(method, *arguments, **options, **({} if self.is_http else {"as_json": True}))

    async def infer(self, model: str, arrays: Mapping[str, Array], **options: Any) -> "Answer":
        """Sends tensors as the client's defaults are."""
        inputs = [self.input(name, array) for name, array in arrays.items()]
        return Answer(client=self, result=await self.call("infer", model, inputs, **options))

    async def refusal(self, method: str, /, *arguments: Any, **options: Any) -> tuple[str, str]:
        """Calls what must be refused; returns gRPC's name of the status, and the text."""
        with pytest.raises(InferenceServerException) as raised:
            await self.call(method, *arguments, **options)
        status = str(raised.value.status())
        return _CODES.get(status, status.removeprefix("StatusCode.")), str(raised.value.message())

    def input(self, name: str, array: Array, datatype: str = "", **options: Any) -> Any:
        """Makes an input that carries an array."""
        one = self.module.InferInput(name, list(array.shape), datatype or datatype_of(array))
        one.set_data_from_numpy(array, **options)
        return one

    def output(self, name: str, **options: Any) -> Any:
        """Asks for an output."""
        return self.module.InferRequestedOutput(name, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an infer call gave."""

    client: TritonClient
    result: Any

    @property
    def id(self) -> str:
        response = self.result.get_response()
        return str(response.get("id", "") if self.client.is_http else response.id)

    @property
    def parameters(self) -> dict[str, Any]:
        response = self.result.get_response()
        if self.client.is_http:
            return dict(response.get("parameters", {}))
        return {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in response.parameters.items()}

    def array(self, name: str) -> Array:
        return np.asarray(self.result.as_numpy(name))


def datatype_of(array: Array) -> str:
    """Returns the wire name of an array's datatype."""
    if array.dtype == object:
        return "BYTES"
    return f"{DATATYPES[array.dtype.kind]}{8 * array.dtype.itemsize}"


def texts(array: Array) -> list[str]:
    """Returns the elements of a BYTES array as text."""
    return [element.decode() for element in array.reshape(-1)]


def log_settings(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns settings as HTTP shows them; gRPC wraps each."""
    if "settings" not in answer:
        return answer
    return {name: next(iter(wrapped.values())) for name, wrapped in answer["settings"].items()}


def trace_settings(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns settings as HTTP shows them; every one of gRPC's is a list."""
    if "settings" not in answer:
        return answer
    values = {name: list(one.get("value", [])) for name, one in answer["settings"].items()}
    return {name: value if name == "trace_level" else "".join(value) for name, value in values.items()}


@asynccontextmanager
async def connected(kind: str, stack: Stack, **options: Any) -> AsyncIterator[TritonClient]:
    """Connects one of the clients until the block ends."""
    module = importlib.import_module(f"tritonclient.{kind}")
    raw = module.InferenceServerClient(stack.address if kind.startswith("http") else stack.grpc_address, **options)
    try:
        yield TritonClient(kind=kind, raw=raw)
    finally:
        closed = raw.close()
        if inspect.isawaitable(closed):
            await closed
        if kind == "http.aio":
            gc.collect()  # it forgets connections, which must not be told in another test
