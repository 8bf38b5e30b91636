"""ModelInfer and ModelStreamInfer: one request and its answer, and many on one call (reference §2.2, §2.3).

The requests of a stream are executed concurrently. A request that gets one response is answered in its turn, in the
order in which the requests arrived; the responses of one that gets several are passed on as they come. A client that
does not read its answers, or has too many requests in flight, is not read from any more. What is in flight is then
still executed.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque

import grpc
import grpc.aio

from qinfer.core.api_keys import Scope
from qinfer.core.messages import Failure, Response, Scalar
from qinfer.errors import Overloaded, QinferError, UnsupportedFeature
from qinfer.submission.pending import Pending
from qinfer.wire.kserve_grpc import (
    Decoded,
    Message,
    decode_infer,
    encode_infer,
    encode_streamed,
    encode_streamed_error,
    parse_infer,
)
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import Context
from qinfer_api.http.infer import bound, parse_version
from qinfer_api.rest.services import Services
from qinfer_api.rpc.calls import INFERENCE, LARGE_BYTES, SHUTTING_DOWN, Call, Guard, fail

logger = logging.getLogger(__name__)

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
_NO_PLAN = OutputPlan()


class InferSink:
    """State of a request between its arrival and its answer.

    Attributes:
        client_id: The id that its client gave.
        plan: How its outputs are given back.
        empty_final: A decoupled model that ends without a last response gives an empty one.
    """

    frontend = "GRPC"
    __slots__ = ("client_id", "empty_final", "plan")

    def __init__(self) -> None:
        self.client_id = ""
        self.plan = _NO_PLAN
        self.empty_final = False

    def deliver(self, response: Response) -> None:
        """Takes a response."""
        raise NotImplementedError


class _Answer(InferSink):
    """The sink of a call that takes one response."""

    __slots__ = ("first",)

    def __init__(self) -> None:
        super().__init__()
        self.first: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def deliver(self, response: Response) -> None:
        """Takes the first response."""
        if not self.first.done():
            self.first.set_result(response)


class Infer:
    """The infer calls; converts a message to a queued request, and a response to a message.

    Args:
        guard: Decides who may call.
        services: The use cases.

    Attributes:
        dispatcher: The use case.
        streams: The calls of ModelStreamInfer that are served.
    """

    def __init__(self, guard: Guard, services: Services) -> None:
        self._guard = guard
        self.dispatcher = services.dispatcher
        self._memory = services.codec.memory
        self._reads_memory = services.codec.reads_memory
        self._max_input_bytes = services.settings.http.max_input_bytes
        self.streams: set[_Stream] = set()

    async def answer(self, blob: bytes, call: Call, context: Context) -> bytes:
        """Answers ModelInfer; one that its client cancels, or whose deadline passes, is taken out of the queue."""
        sink = _Answer()
        pending = await self.submit(blob, context, self._guard.forwarded(call), call.time_remaining(), sink)
        try:
            response = await sink.first
        finally:
            self.dispatcher.cancel(pending)  # does nothing once it is answered
        if response.failure is not None:
            await fail(call, response.failure)
        if not response.final:
            raise UnsupportedFeature(_DECOUPLED)
        return await self.encode(response, sink)

    async def stream(self, _: object, call: Call) -> None:
        """Serves ModelStreamInfer until its client ends it; what is in flight when it breaks leaves the queue."""
        context = await self._guard.enter(call, INFERENCE, Scope.INFER)
        stream = _Stream(self, call, context, self._guard.forwarded(call))
        self.streams.add(stream)
        with self._guard.in_flight:
            try:
                await stream.serve()
            finally:
                self.streams.discard(stream)

    def drain(self) -> None:
        """Ends every stream after the requests that it has in flight."""
        for stream in self.streams:
            stream.drain()

    async def submit(
        self,
        blob: bytes,
        context: Context,
        forwarded: dict[str, Scalar] | None,
        within_s: float | None,
        sink: InferSink,
    ) -> Pending:
        """Decodes a request and puts it into the queue.

        Args:
            blob: The ModelInferRequest.
            context: Who asks; authorized.
            forwarded: Metadata that becomes parameters.
            within_s: How long its caller will wait; `None` = for ever.
            sink: Gets what is needed to encode the responses, and then the responses.

        Raises:
            QinferError: It is refused.
        """
        is_large = len(blob) > LARGE_BYTES
        message = await asyncio.to_thread(parse_infer, blob) if is_large else parse_infer(blob)
        sink.client_id = message.fields.id
        version = 0
        try:
            if not is_large and not self._reads_memory(blob):
                decoded = self._decode(message, forwarded)
            else:
                decoded = await asyncio.to_thread(self._decode_and_check, message, forwarded)
            request, plan = decoded.request, decoded.plan
            version = request.version
            if plan.special is not None:
                plan = bound(plan, self.dispatcher.resolve(request.model, version))
            sink.plan, sink.empty_final = plan, decoded.empty_final
            return self.dispatcher.submit(context, request, sink, math.inf if within_s is None else within_s)
        except QinferError as error:
            raise self.dispatcher.refuse(message.fields.model_name, version, error) from None

    async def encode(self, response: Response, sink: InferSink, *, streamed: bool = False) -> bytes:
        """Encodes a response that carries outputs as a ModelInferResponse, or as a ModelStreamInferResponse.

        Raises:
            QinferError: An output can't be given back as the request wants it.
        """
        arguments = (response, sink.client_id, sink.plan, self._memory)
        if sink.plan.special is not None and _nbytes(response) > LARGE_BYTES:
            parts = await asyncio.to_thread(encode_infer, *arguments)
        else:
            parts = encode_infer(*arguments)
        if streamed:
            parts = encode_streamed(parts, final=response.final)
        if sum([len(part) for part in parts]) > LARGE_BYTES:
            return await asyncio.to_thread(b"".join, parts)
        return b"".join(parts)

    def _decode(self, message: Message, forwarded: dict[str, Scalar] | None) -> Decoded:
        memory = self._memory
        decoded = decode_infer(message, memory.limited(self._max_input_bytes) if memory.allowed else memory)
        request = decoded.request
        if decoded.version:
            request.version = parse_version(decoded.version)
        if forwarded:
            request.parameters = {**request.parameters, **forwarded}
        return decoded

    def _decode_and_check(self, message: Message, forwarded: dict[str, Scalar] | None) -> Decoded:
        decoded = self._decode(message, forwarded)
        request = decoded.request
        self.dispatcher.check(request, self.dispatcher.resolve(request.model, request.version))
        return decoded


MAX_IN_FLIGHT = 1000
"""Requests of one stream that may be without their last response; more are not read."""

MAX_UNWRITTEN_BYTES = 64 * 2**20
"""Outputs of one stream that may wait to be written before no more requests are read."""

_STRICT = ("triton_grpc_error", "true")  # metadata: the first error ends the stream with its status

_EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs do not know of it


class _Slot(InferSink):
    """A request of a stream: its place in the order, and its response if that has come before its turn."""

    __slots__ = ("answer", "is_ordered", "pending", "stream")

    def __init__(self, stream: "_Stream") -> None:
        super().__init__()
        self.stream = stream
        self.pending: Pending | None = None
        self.answer: Response | None = None
        self.is_ordered = True

    def deliver(self, response: Response) -> None:
        """Takes a response."""
        self.stream.deliver(self, response)


class _Stream:
    """One call of ModelStreamInfer."""

    def __init__(self, infer: Infer, call: Call, context: Context, forwarded: dict[str, Scalar] | None) -> None:
        self._infer = infer
        self._call = call
        self._context = context
        self._forwarded = forwarded
        self._is_strict = _STRICT in (call.invocation_metadata() or ())
        self._order: deque[_Slot] = deque()
        self._open: set[_Slot] = set()
        self._ready: deque[tuple[_Slot, Response]] = deque()
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._unwritten_bytes = 0
        self._written = asyncio.Event()
        self._change = asyncio.Event()
        self._is_read = False
        self._is_draining = False
        self._reader: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Reads requests and writes responses until both have ended."""
        self._reader = asyncio.create_task(self._read())
        try:
            await self._write()
            if self._is_draining:
                await self._call.abort(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        finally:
            for slot in self._open:
                if slot.pending is not None:
                    self._infer.dispatcher.cancel(slot.pending)
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    def drain(self) -> None:
        """Reads no more requests; a stream whose client has sent all that it will simply ends."""
        if self._reader is not None and not self._is_read:
            self._is_draining = True
            self._reader.cancel()

    def deliver(self, slot: _Slot, response: Response) -> None:
        """Takes a response; it is written when it is its request's turn."""
        self._unwritten_bytes += _nbytes(response)
        if slot.is_ordered and not response.final:
            slot.is_ordered = False
            self._order.remove(slot)
        if not slot.is_ordered:
            self._ready.append((slot, response))
        else:
            slot.answer = response
        order = self._order
        while order and (answer := order[0].answer) is not None:
            self._ready.append((order.popleft(), answer))
        self._change.set()

    async def _read(self) -> None:
        try:
            while True:
                await self._room.acquire()
                while self._unwritten_bytes > MAX_UNWRITTEN_BYTES:
                    self._written.clear()
                    await self._written.wait()
                blob = await self._call.read()
                if blob is _EOF:
                    return
                slot = _Slot(self)
                self._order.append(slot)
                self._open.add(slot)
                await self._submit(blob, slot)
        finally:
            self._is_read = True
            self._change.set()

    async def _submit(self, blob: bytes, slot: _Slot) -> None:
        try:
            slot.pending = await self._infer.submit(
                blob, self._context, self._forwarded, self._call.time_remaining(), slot
            )
        except QinferError as error:
            self._fail(slot, error)
        except asyncio.CancelledError:  # the gateway drains
            self._fail(slot, Overloaded(SHUTTING_DOWN))
            raise
        except Exception as error:  # the boundary of a request: its stream goes on
            logger.exception("request failed")
            self._fail(slot, error)

    def _fail(self, slot: _Slot, error: Exception) -> None:
        self.deliver(slot, Response(request_id="", failure=Failure.of(error)))

    async def _write(self) -> None:
        """Writes responses until there are none to come."""
        while True:
            while self._ready:
                slot, response = self._ready.popleft()
                message = await self._message(slot, response)
                if message is not None:
                    await self._call.write(message)
                self._unwritten_bytes -= _nbytes(response)
                self._written.set()
                if response.final:
                    self._open.discard(slot)
                    self._room.release()
            if self._is_read and not self._open:
                return
            self._change.clear()
            await self._change.wait()

    async def _message(self, slot: _Slot, response: Response) -> bytes | None:
        """Returns the message for a response; `None` = none is sent."""
        failure = response.failure
        if failure is None:
            if response.final and response.index and not response.outputs and not slot.empty_final:
                return None
            try:
                return await self._infer.encode(response, slot, streamed=True)
            except QinferError as error:
                failure = Failure.of(error)
            except Exception as error:  # the boundary of a request, as in `_submit`
                logger.exception("answer failed")
                failure = Failure.of(error)
        if self._is_strict:
            await fail(self._call, failure)
        return encode_streamed_error(failure.message, slot.client_id)


def _nbytes(response: Response) -> int:
    return sum([tensor.nbytes for tensor in response.outputs])
