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
from qinfer.tensors import Bytes
from qinfer.wire.kserve_grpc import (
    Decoded,
    Message,
    decode_infer,
    encode_infer,
    encode_streamed,
    encode_streamed_error,
    parse_infer,
)
from qinfer.wire.outputs import OutputPlan, bind
from qinfer_api.auth import Context
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.infer import InferCodec, parse_version
from qinfer_api.rpc.calls import INFERENCE, LARGE_BYTES, SHUTTING_DOWN, Call, Guard, fail, refuse

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


class Infer:
    """Converts a message to a queued request, and a response to a message.

    Args:
        dispatcher: The use case.
        codec: Knows the memory that clients share with this gateway.
        max_input_bytes: How large the inputs of one request in shared memory may be.

    Attributes:
        dispatcher: As given.
    """

    def __init__(self, dispatcher: Dispatcher, codec: InferCodec, max_input_bytes: int) -> None:
        self.dispatcher = dispatcher
        self._memory = codec.memory
        self._reads_memory = codec.reads_memory
        self._max_input_bytes = max_input_bytes

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
                spec = self.dispatcher.resolve(request.model, version).spec
                labels = {output.name: output.labels for output in spec.outputs}
                plan = bind(plan, labels, batched=spec.max_batch_size > 0)
            sink.plan, sink.empty_final = plan, decoded.empty_final
            return self.dispatcher.submit(context, request, sink, math.inf if within_s is None else within_s)
        except QinferError as error:
            raise self.dispatcher.refuse(message.fields.model_name, version, error) from None

    async def encode(self, response: Response, sink: InferSink) -> list[Bytes]:
        """Encodes a response that carries outputs as a ModelInferResponse, in pieces.

        Raises:
            QinferError: An output can't be given back as the request wants it.
        """
        arguments = (response, sink.client_id, sink.plan, self._memory)
        if sink.plan.special is not None and sum([tensor.nbytes for tensor in response.outputs]) > LARGE_BYTES:
            return await asyncio.to_thread(encode_infer, *arguments)
        return encode_infer(*arguments)

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


async def join(parts: list[Bytes]) -> bytes:
    """Puts the pieces of a message together, off the event loop if they are large."""
    if sum([len(part) for part in parts]) > LARGE_BYTES:
        return await asyncio.to_thread(b"".join, parts)
    return b"".join(parts)


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


class ModelInfer:
    """The handler of ModelInfer.

    Args:
        guard: Decides who may call.
        infer: The way into the queue and back.
    """

    def __init__(self, guard: Guard, infer: Infer) -> None:
        self._guard = guard
        self._infer = infer

    async def answer(self, blob: bytes, call: Call) -> bytes:
        """Answers a call; one that its client cancels, or whose deadline passes, is taken out of the queue."""
        context = await self._guard.enter(call, INFERENCE, Scope.INFER)
        self._guard.in_flight.enter()
        pending: Pending | None = None
        try:
            sink = _Answer()
            forwarded = self._guard.forwarded(call)
            pending = await self._infer.submit(blob, context, forwarded, call.time_remaining(), sink)
            response = await sink.first
            if response.failure is not None:
                await fail(call, response.failure)
            if not response.final:
                raise UnsupportedFeature(_DECOUPLED)
            return await join(await self._infer.encode(response, sink))
        except QinferError as error:
            await refuse(call, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the boundary of a call: clients see no stack text
            logger.exception("request failed")
            await refuse(call, error)
        finally:
            self._guard.in_flight.leave()
            if pending is not None:
                self._infer.dispatcher.cancel(pending)  # does nothing once it is answered


MAX_IN_FLIGHT = 1000
"""Requests of one stream that may be without their last response; more are not read."""

MAX_UNWRITTEN_BYTES = 64 * 2**20
"""Outputs of one stream that may wait to be written before no more requests are read."""

_STRICT = ("triton_grpc_error", "true")  # metadata: the first error ends the stream with its status

_EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs do not know of it


class ModelStreamInfer:
    """The handler of ModelStreamInfer.

    Args:
        guard: Decides who may call.
        infer: The way into the queue and back.
    """

    def __init__(self, guard: Guard, infer: Infer) -> None:
        self._guard = guard
        self._infer = infer
        self._streams: set[_Stream] = set()

    async def serve(self, _: object, call: Call) -> None:
        """Serves a stream until its client ends it; what is in flight when it breaks is taken out of the queue."""
        context = await self._guard.enter(call, INFERENCE, Scope.INFER)
        stream = _Stream(self._infer, call, context, self._guard.forwarded(call))
        self._streams.add(stream)
        self._guard.in_flight.enter()
        try:
            await stream.serve()
        finally:
            self._streams.discard(stream)
            self._guard.in_flight.leave()

    def drain(self) -> None:
        """Ends every stream after the requests that it has in flight."""
        for stream in self._streams:
            stream.drain()


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
        """Returns what is written for a response; `None` = nothing."""
        failure = response.failure
        if failure is None:
            if response.final and response.index and not response.outputs and not slot.empty_final:
                return None
            try:
                return await join(encode_streamed(await self._infer.encode(response, slot), final=response.final))
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
