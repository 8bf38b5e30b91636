"""The model of a host process that runs a function of an app: Triton's `initialize` and `execute`, by a `Runner`.

It also runs in Triton's own Python backend, whose classes `pb_utils` has there.
"""

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import triton_python_backend_utils as pb_utils

from qinfer.backends.python_host.errors import code_of, message_of
from qinfer.backends.python_host.inference import InferenceRequest, RowsModel
from qinfer.backends.python_host.telemetry import emit
from qinfer.errors import QinferError
from qinfer.functions.app import import_app, models_of, short_trace
from qinfer.functions.declare import State
from qinfer.functions.hints import read_function
from qinfer.functions.runner import Arguments, Runner, joined
from qinfer.functions.values import Array
from qinfer.models.spec import Device

STATES_OF_A_SLOT = 16
"""Limits the kept states, of which one is in use: no END tells of sequences that were idle too long."""

Call = Callable[[], Any]
# Triton adds its classes to the module after the import of a model.
Responses = list["pb_utils.InferenceResponse"]
Outcome = dict[str, Array] | Responses
"""The outputs of all items, or the responses of all requests."""

T = TypeVar("T")
Steps = Generator[list[Call], list[Any], T]


class Hosted(RowsModel):
    """The class that `model.py` calls `TritonPythonModel`; a subclass names the app and the object in it."""

    path = ""
    name = ""

    def initialize(self, args: dict[str, str]) -> None:
        """Imports the app and sets up the model."""
        function = read_function(models_of(import_app(Path(self.path)), self.name)[self.name])
        kind: Any = args["model_instance_kind"].lower()
        self._runner = Runner(function, Device(kind, int(args["model_instance_device_id"])))
        self._function = function
        self._states: dict[int | str, State] = {}

    def execute(self, requests: list[InferenceRequest]) -> Any:
        """Answers requests; of an `async` function and a stream, on the host's loop."""
        if self._function.is_decoupled:
            return self._stream_all(requests) if self._function.is_async else self._stream(requests)
        return self._run(self._by_request(requests))

    def execute_rows(self, inputs: Mapping[str, Array], rows: Sequence[int], ids: Sequence[str]) -> Any:
        """See `RowsModel`; a state is of one request."""
        if self._function.state:
            return None
        try:
            given = self._arguments(inputs, sum(rows))
        except QinferError:
            return None  # `execute` finds whose input it is
        return self._run(self._called(given, rows, ids))

    def _by_request(self, requests: Sequence[InferenceRequest]) -> "Steps[Responses]":
        responses: list[Any] = [None] * len(requests)
        given: list[Arguments] = []
        good: dict[int, int] = {}
        for at, request in enumerate(requests):
            try:
                inputs, count = self._inputs(request)
                given += [one | self._state(request) for one in self._arguments(inputs, count)]
                good[at] = count
            except QinferError as error:
                responses[at] = _failed(error)
        if not good:
            return responses
        found = yield from self._called(given, [*good.values()], [_id_of(requests[at]) for at in good])
        if isinstance(found, dict):
            cut = zip(good.values(), accumulate(good.values()), strict=True)
            arrays = list(found.values())
            found = [self._response([array[end - own : end] for array in arrays]) for own, end in cut]
        for at, response in zip(good, found, strict=True):
            responses[at] = response
        return responses

    def _arguments(self, inputs: Mapping[str, Array], count: int) -> list[Arguments]:
        """Returns the arguments of all items, or those of each one."""
        items = self._runner.read(inputs)
        return (
            [self._runner.batch_arguments(items, count)]
            if self._function.is_batched
            else self._runner.item_arguments(items, count)
        )

    def _called(self, given: list[Arguments], rows: Sequence[int], ids: Sequence[str]) -> "Steps[Outcome]":
        """Calls the function for all items, or for each, whose failure concerns its request only."""
        runner, names = self._runner, [port.name for port in self._function.result.ports]
        if self._function.is_batched:
            (result,) = yield [partial(runner.call, **joined(given))]
            if isinstance(result, BaseException):
                raise result  # the worker executes halves of the batch
            return dict(zip(names, runner.outputs(result, sum(rows)), strict=True))
        results = yield [partial(runner.call, **one) for one in given]
        if not any(isinstance(result, BaseException) for result in results):
            with suppress(QinferError):  # it may concern one request
                return dict(zip(names, runner.item_outputs(results), strict=True))
        ends = accumulate(rows)
        return [self._answer(name, results[end - own : end]) for name, own, end in zip(ids, rows, ends, strict=True)]

    def _answer(self, request_id: str, results: Sequence[Any]) -> "pb_utils.InferenceResponse":
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        try:
            if failed is None:
                return self._response(self._runner.item_outputs(results))
        except QinferError as error:
            failed = error
        _report(failed, request_id)
        return _failed(failed)

    def _inputs(self, request: InferenceRequest) -> tuple[Mapping[str, Array], int]:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if self._function.is_decoupled:  # it has no batch dimension
            arrays = {name: array[None] for name, array in arrays.items()}
        return arrays, len(next(iter(arrays.values()))) if arrays else 1

    def _state(self, request: InferenceRequest) -> Arguments:
        if not self._function.state:
            return {}
        key, flags = request.correlation_id(), request.flags()
        state = self._states.pop(key, State())
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            state = State()
        if not flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            self._states[key] = state
            if len(self._states) > STATES_OF_A_SLOT * self._function.options.max_batch_size:
                del self._states[next(iter(self._states))]
        return {self._function.state: state}

    def _response(self, outputs: Sequence[Array]) -> "pb_utils.InferenceResponse":
        named = zip(self._function.result.ports, outputs, strict=True)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(port.name, array, *(["BF16"] * (port.datatype == "BF16"))) for port, array in named]
        )

    def _part(self, result: Any) -> "pb_utils.InferenceResponse":
        return self._response([array[0] for array in self._runner.item_outputs([result])])

    def _run(self, steps: "Steps[Any]") -> Any:
        if self._function.is_async:
            return self._run_async(steps)
        try:
            calls = next(steps)
            while True:
                calls = steps.send([_attempt(call) for call in calls])
        except StopIteration as end:
            return end.value

    async def _run_async(self, steps: "Steps[Any]") -> Any:
        async def attempt(call: Call) -> Any:
            try:
                return await call()
            except Exception as error:  # noqa: BLE001  the boundary to the app's code
                return error

        try:
            calls = next(steps)
            while True:
                calls = steps.send(list(await asyncio.gather(*map(attempt, calls))))
        except StopIteration as end:
            return end.value

    def _stream(self, requests: Sequence[InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            last = None
            try:
                for result in self._runner.call(**self._arguments(*self._inputs(request))[0]):
                    sender.send(self._part(result))
                    if request.is_cancelled():
                        break
            except Exception as error:  # noqa: BLE001  the boundary to the app's code
                _report(error, _id_of(request))
                last = _failed(error)
            sender.send(last, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _stream_all(self, requests: Sequence[InferenceRequest]) -> None:
        await asyncio.gather(*map(self._stream_async, requests))

    async def _stream_async(self, request: InferenceRequest) -> None:
        sender = request.get_response_sender()
        last = None
        try:
            async for result in self._runner.call(**self._arguments(*self._inputs(request))[0]):
                # It waits while the reader is behind, which must not stop the other streams.
                await asyncio.to_thread(sender.send, self._part(result))
                if await asyncio.to_thread(request.is_cancelled):
                    break
        except Exception as error:  # noqa: BLE001  the boundary to the app's code
            _report(error, _id_of(request))
            last = _failed(error)
        await asyncio.to_thread(sender.send, last, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def serves(path: str, name: str, file: str) -> type[Hosted]:
    """Returns the model that runs the object `name` of the app at `path`, absolute or from the folder of `file` on."""
    return type("TritonPythonModel", (Hosted,), {"path": str(Path(file).parent / path), "name": name})


def _attempt(call: Call) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  the boundary to the app's code
        return error


def _failed(error: BaseException) -> "pb_utils.InferenceResponse":
    is_ours = isinstance(error, QinferError)
    text = message_of(error) if is_ours else f"{type(error).__name__}: {message_of(error)}"
    usual = pb_utils.TritonError.INTERNAL
    code = type(usual)(code_of(error)) if isinstance(error, QinferError) else usual  # Triton's are an enumeration
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))


def _id_of(request: InferenceRequest) -> str:
    return request._server_id if isinstance(request, InferenceRequest) else ""  # Triton's


def _report(error: BaseException, request_id: str) -> None:
    event, trace = "the function failed", short_trace(error)
    if request_id:
        emit("ERROR", event, trace, [request_id])
    else:
        pb_utils.Logger.log_error(f"{event}: {trace}")
