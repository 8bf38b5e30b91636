"""ModelInfer and ModelStreamInfer (reference §2.2, §2.3).

The requests of a stream run concurrently. Single responses are sent in the order of the requests, those of decoupled
models as they come. A stream whose client does not read, or has too many requests in flight, is not read; a decoupled
model pauses when a window of its responses is unsent.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from qinfer.core.api_keys import Scope
from qinfer.core.messages import Failure, Response
from qinfer.errors import Forbidden, Overloaded, QinferError, Unauthorized, UnsupportedFeature
from qinfer.submission.memory import Landing
from qinfer.submission.pending import Memory, PendingCall
from qinfer.submission.validate import check_announced
from qinfer.tensors import Bytes
from qinfer.wire.kserve_grpc import (
    DecodedRequest,
    ParsedRequest,
    Repetitions,
    decode_infer,
    encode_infer,
    encode_streamed,
    encode_streamed_error,
    parse_infer,
)
from qinfer.wire.outputs import OutputPlan
from qinfer_api.dispatcher import NO_PLAN, bound
from qinfer_api.http.infer import (
    IN_SHARED_MEMORY,
    answered_by,
    fills_its_memory,
    parse_version,
    regions_of,
    reply_bytes,
    with_headers,
)
from qinfer_api.receiving import AGAIN_S
from qinfer_api.rest.services import Services
from qinfer_api.rpc.calls import INFERENCE, SHUTTING_DOWN, CallGuard
from qinfer_api.rpc.headers import Abort, Method
from qinfer_api.rpc.protocol import LARGE_BYTES, GrpcCall
from qinfer_api.shared_memory import MOST_KNOWN_BYTES, KnownRequest, Land, RequestRegions, TakesLong, forgets_regions

logger = logging.getLogger(__name__)

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
_UNREAD = "the responses were read too slowly while others waited for memory: read 64 KiB a second"
_MOST_OF_CONTENTS = 8  # tensor bytes per byte of typed contents

LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}


class InferSink(msgspec.Struct, eq=False, kw_only=True):
    """State of a request; `empty_final` asks for an empty message when a decoupled model ends."""

    frontend = "GRPC"
    no_stream = ""
    client_id: str = ""
    plan: OutputPlan = NO_PLAN
    empty_final: bool = False

    def deliver(self, response: Response) -> None:
        """Handles a response."""
        raise NotImplementedError


class _UnaryAnswer(InferSink, eq=False):
    no_stream = _DECOUPLED
    infer: "Infer"
    call: GrpcCall
    pending: PendingCall | None = None

    def wait(self, pending: PendingCall) -> None:
        if not self.call.is_closed:
            self.call.request_id = pending.request_id
            self.pending = pending
            pending.holder = self
            self.call.on_cancel = self.cancel

    def is_behind(self) -> bool:
        return False

    def cancel(self) -> None:
        pending, self.pending, self.plan = self.pending, None, NO_PLAN
        if pending is not None:
            self.infer.dispatcher.cancel(pending)
            pending.forget_memory()

    def deliver(self, response: Response) -> None:
        call = self.call
        if not response.final:
            call.fail(UnsupportedFeature(_DECOUPLED))  # also cancels the request
            return
        if self.pending is not None and (memory := self.pending.memory) is not None:
            call.keep(memory)
        self.pending = call.on_cancel = None
        call.request_id, call.cache = response.request_id, response.cache
        if self.plan.endpoint:
            call.target = answered_by(response, self.plan.endpoint)
        try:
            if response.failure is not None:
                call.fail(call.status_of(response.failure))
            elif call.head.packing is not None or (self.plan.special is not None and _is_slow(response, self.plan)):
                call.run(self._finish(response))
                return
            else:
                call.finish(self.infer.encode(response, self))
        except Exception as error:  # noqa: BLE001 - the boundary of a call: `fail` reports it
            call.fail(error)
        self.plan = NO_PLAN

    async def _finish(self, response: Response) -> None:
        try:
            parts, is_compressed = await asyncio.to_thread(self._packed, response)
            self.call.finish(parts, is_compressed=is_compressed)
        finally:
            self.plan = NO_PLAN

    def _packed(self, response: Response) -> tuple[Sequence[Bytes], bool]:
        return self.call.packed(self.infer.encode(response, self))


class Infer:
    """Converts infer messages to queued requests, and back."""

    def __init__(self, guard: CallGuard, services: Services) -> None:
        self._guard = guard
        self.dispatcher = services.dispatcher
        self._memory = services.codec.memory
        self._receiving = services.receiving
        self._max_typed_bytes = services.settings.grpc.max_message_bytes
        self._max_input_bytes = services.settings.http.max_input_bytes
        self._compression = LEVELS[services.settings.grpc.infer_response_compression]
        self._repetitions = Repetitions()
        self.streams: set[_StreamCall] = set()

    def methods(self) -> dict[str, Method]:
        """Returns the methods by name."""
        one = self._guard.method(self._start_infer, INFERENCE, Scope.INFER)
        stream = self._guard.method(self._start_stream, INFERENCE, Scope.INFER, takes_stream=True)
        return {
            "ModelInfer": one._replace(compression=self._compression, land=self._land_message),
            "ModelStreamInfer": stream._replace(compression=self._compression),
        }

    def _start_infer(self, call: GrpcCall, blob: Bytes) -> None:
        sink = _UnaryAnswer(self, call)
        if (landing := call.landing) is not None:
            call.landing = None
            known = self._repetitions.decode(blob)
            if known is not None and not self.dispatcher.reads_all(known.request.model):
                sink.wait(self._submit_known(known, call, sink, landing))
                return
            blob = bytes(blob)
            landing.leave()
        may_be_slow = len(blob) > LARGE_BYTES or self._memory.allowed
        pending = None if may_be_slow and self.is_slow(blob) else self.submit(blob, call, sink)
        if pending is None:
            call.run(self._infer_slowly(call, blob, sink))
        else:
            sink.wait(pending)

    def _land_message(self, call: GrpcCall, size: int) -> Landing | None:
        """Returns memory for a message of the size of an earlier one."""
        expected = self._repetitions.expected(size)
        if expected is None or self.dispatcher.reads_all(expected[0]):
            return None
        model, version, begin = expected
        try:
            number = parse_version(version) if version else 0
            return self.dispatcher.landing(model, number, size, begin, call.context.tenant)
        except QinferError:
            return None

    async def _infer_slowly(self, call: GrpcCall, blob: Bytes, sink: _UnaryAnswer) -> None:
        sink.wait(await self.submit_slowly(blob, call, sink))

    def _start_stream(self, call: GrpcCall, _: Bytes) -> None:
        call.run(self._stream(call))

    async def _stream(self, call: GrpcCall) -> None:
        stream = _StreamCall(self, call)
        self.streams.add(stream)
        try:
            await stream.serve()
        finally:
            self.streams.discard(stream)
        call.finish_stream()

    def drain(self) -> None:
        """Ends every stream after its requests in flight."""
        for stream in self.streams:
            stream.drain()

    def check_callers(self) -> None:
        """Ends the streams of refused callers."""
        for stream in tuple(self.streams):
            stream.check_caller()

    def is_slow(self, blob: Bytes) -> bool:
        """Returns whether decoding is slow: of a large new request, or of strings in shared memory."""
        if len(blob) > LARGE_BYTES:
            known = self._repetitions.decode(blob)
            if known is None or self.dispatcher.reads_all(known.request.model):
                return True
        return self._memory.allowed and IN_SHARED_MEMORY in blob and b"BYTES" in blob

    def submit(self, blob: Bytes, call: GrpcCall, sink: InferSink) -> PendingCall | None:
        """Decodes and submits a request for `sink`; `None` if a thread is to read it."""
        decoded = self._repetitions.decode(blob)
        if decoded is not None:
            return self._submit_known(decoded, call, sink)
        known = None
        if self._memory.allowed and len(blob) <= MOST_KNOWN_BYTES:
            known = self._memory.for_tenant(call.context.tenant).messages.get(bytes(blob))
        if known is not None:
            sink.client_id = known.client_id
            return self._submit_read(partial(_repeated, known), known.model, known.version, call, sink)
        message = parse_infer(blob)
        fields = message.fields
        sink.client_id = fields.id
        decode = partial(self._decode, blob, message, call)
        return self._submit_read(decode, fields.model_name, fields.model_version, call, sink)

    def _submit_read(
        self, decode: Callable[[Land], DecodedRequest], model: str, asked: str, call: GrpcCall, sink: InferSink
    ) -> PendingCall | None:
        landings: list[Landing] = []
        try:
            decoded = decode(partial(self._land_region, landings, model, asked, call))
            self._complete(decoded, call)
            return self._submit(decoded, call, sink, landings[0] if landings else None)
        except TakesLong:
            return None
        except QinferError as error:
            raise self._refuse_request(model, asked, error, call) from None
        finally:
            for landing in landings:
                landing.leave()

    def _land_region(
        self, landings: list[Landing], model: str, asked: str, call: GrpcCall, nbytes: int
    ) -> memoryview | None:
        """See `FastCall._land`."""
        version = parse_version(asked) if asked else 0
        if landings or self.dispatcher.reads_all(model):
            return None
        landing = self.dispatcher.landing(model, version, nbytes, 0, call.context.tenant)
        if landing is None:
            return None
        landings.append(landing)
        return landing.body

    def _submit_known(
        self, decoded: DecodedRequest, call: GrpcCall, sink: InferSink, landing: Landing | None = None
    ) -> PendingCall:
        try:
            if decoded.version or self._guard.forwards:
                self._complete(decoded, call)
            return self._submit(decoded, call, sink, landing)
        except QinferError as error:
            raise self._refuse_request(decoded.request.model, decoded.version, error, call) from None
        finally:
            if landing is not None:
                landing.leave()

    async def submit_slowly(self, blob: Bytes, call: GrpcCall, sink: InferSink) -> PendingCall:
        """Submits a request, decoded in a thread."""
        message = await asyncio.to_thread(parse_infer, blob)
        sink.client_id = message.fields.id
        try:
            if message.typed:
                self._check_announced(message)
            async with self._turn(message.typed_bytes):
                decoded = await asyncio.to_thread(self._decode_and_check, blob, message, call)
            return self._submit(decoded, call, sink)
        except QinferError as error:
            fields = message.fields
            raise self._refuse_request(fields.model_name, fields.model_version, error, call) from None

    def _check_announced(self, message: ParsedRequest) -> None:
        fields = message.fields
        version = parse_version(fields.model_version) if fields.model_version else 0
        spec = self.dispatcher.resolve(fields.model_name, version, is_taken=True).spec
        if spec.name == fields.model_name:
            for place in message.typed:
                entry = fields.inputs[place]
                check_announced(entry.name, entry.datatype, entry.shape, spec)

    def _turn(self, typed_bytes: int) -> contextlib.AbstractAsyncContextManager[None]:
        if not typed_bytes:
            return contextlib.nullcontext()
        return self._receiving.decoding(min(_MOST_OF_CONTENTS * typed_bytes, self._max_typed_bytes))

    def encode(self, response: Response, sink: InferSink) -> list[Bytes]:
        """Encodes a response, in pieces."""
        plan = sink.plan
        regions = self._memory if plan.special is None else regions_of(plan, self._memory)
        pieces = encode_infer(response, sink.client_id, plan, regions)
        if sum(map(len, pieces)) > LARGE_BYTES and not fills_its_memory(response):
            return [b"".join(pieces)]
        return pieces

    def _decode(self, blob: Bytes, message: ParsedRequest, call: GrpcCall, land: Land | None = None) -> DecodedRequest:
        memory = self._memory.for_tenant(call.context.tenant)
        regions = memory.limited(self._max_input_bytes, land) if memory.allowed else memory
        decoded = decode_infer(message, regions, self._max_typed_bytes)
        self._repetitions.learn(blob, message, decoded)
        if isinstance(regions, RequestRegions) and regions.used:
            decoded.plan = msgspec.structs.replace(decoded.plan, held=regions)
            if land is not None and not decoded.empty_final:
                regions.learn(memory.messages, blob, decoded.request, decoded.plan, decoded.version)
        return decoded

    def _complete(self, decoded: DecodedRequest, call: GrpcCall) -> None:
        request = decoded.request
        if decoded.version:
            request.version = parse_version(decoded.version)
        forwarded = self._guard.forwarded(call.head)
        if forwarded:
            with_headers(request, forwarded)

    @forgets_regions
    def _decode_and_check(self, blob: Bytes, message: ParsedRequest, call: GrpcCall) -> DecodedRequest:
        decoded = self._decode(blob, message, call)
        self._complete(decoded, call)
        decoded.plan = self.dispatcher.aim(call.context, decoded.request, call.head.first, decoded.plan)
        self.dispatcher.check(decoded.request)
        return decoded

    def _submit(
        self, decoded: DecodedRequest, call: GrpcCall, sink: InferSink, landing: Landing | None = None
    ) -> PendingCall:
        request, plan = decoded.request, decoded.plan
        if self.dispatcher.endpoints.by_name:
            plan = self.dispatcher.aim(call.context, request, call.head.first, plan)
        if plan.special is not None and plan.ranks:
            plan = bound(plan, self.dispatcher.of_model(request.model, request.version))
        sink.plan, sink.empty_final = plan, decoded.empty_final
        # Draining closes streams: every admitted request is answered.
        if landing is not None:
            landing.enter(request)
        within_s = math.inf if call.until_s == math.inf else call.time_remaining()
        try:
            pending = self.dispatcher.submit(call.context, request, sink, within_s, is_taken=True)
        except QinferError:
            call.request_id = request.id
            raise
        return pending

    def _refuse_request(self, model: str, asked: str, error: QinferError, call: GrpcCall) -> QinferError:
        version = 0
        with contextlib.suppress(QinferError):
            version = parse_version(asked) if asked else 0
        return self.dispatcher.refuse(model, version, error, call.context)


def _is_slow(response: Response, plan: OutputPlan) -> bool:
    """Returns whether outputs with options are to be written in a thread; raw ones are written from where they are."""
    return reply_bytes(response, plan) > LARGE_BYTES


def _repeated(known: KnownRequest, land: Land) -> DecodedRequest:
    return DecodedRequest(known.read(known.model, 0, land), known.version, known.plan, empty_final=False)


MAX_IN_FLIGHT = 1000
"""A stream with as many unfinished requests is not read any further."""

MAX_UNWRITTEN_BYTES = 64 * 2**20
"""A stream with as many unwritten bytes is not read any further."""

_STRICT = "triton_grpc_error"  # metadata: "true" = the first error ends the stream


class _Slot(InferSink, eq=False):
    rpc_method = "ModelStreamInfer"
    stream: "_StreamCall"
    pending: PendingCall | None = None
    answer: Response | None = None
    is_ordered: bool = True

    def is_behind(self) -> bool:
        return self.is_ordered and self.stream.is_behind(self)

    def deliver(self, response: Response) -> None:
        self.stream.deliver(self, response)


class _StreamCall:
    def __init__(self, infer: Infer, call: GrpcCall) -> None:
        self._infer = infer
        self._call = call
        self._is_strict = call.head.first(_STRICT) == "true"
        self._order: deque[_Slot] = deque()
        self._open: set[_Slot] = set()
        self._ready: deque[tuple[_Slot, Response]] = deque()
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._unwritten_bytes = 0
        self._written = asyncio.Event()
        self._change = asyncio.Event()
        self._is_read = self._writes = False
        self._is_draining = False
        self._reader: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        self._reader = asyncio.create_task(self._read_requests())
        try:
            await self._write_responses()
            if self._is_draining:
                raise Abort("UNAVAILABLE", SHUTTING_DOWN, AGAIN_S)
        finally:
            for slot in self._open:
                slot.plan = NO_PLAN
                if slot.pending is not None:
                    self._infer.dispatcher.cancel(slot.pending)
                    slot.pending.forget_memory()
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    def drain(self) -> None:
        if self._reader is not None and not self._is_read:
            self._is_draining = True
            self._reader.cancel()

    def check_caller(self) -> None:
        try:
            self._infer.dispatcher.recheck(self._call.context)
        except (Unauthorized, Forbidden) as error:
            self._call.fail(error)

    def deliver(self, slot: _Slot, response: Response) -> None:
        self._unwritten_bytes += response.nbytes
        if not response.final:
            self._leave_order(slot)
        if not slot.is_ordered:
            self._ready.append((slot, response))
        else:
            slot.answer = response
        self._take_turns()

    def _leave_order(self, slot: _Slot) -> None:
        """Writes a slot's responses as they come."""
        if slot.is_ordered:
            slot.is_ordered = False
            self._order.remove(slot)
            self._take_turns()

    def _take_turns(self) -> None:
        order = self._order
        while order and (answer := order[0].answer) is not None:
            self._ready.append((order.popleft(), answer))
        if order and order[0].pending is not None and not self._is_writing:
            order[0].pending.comes_first()
        self._change.set()

    def is_behind(self, slot: _Slot) -> bool:
        return self._is_writing or (bool(self._order) and self._order[0] is not slot)

    @property
    def _is_writing(self) -> bool:
        return self._writes or bool(self._ready)

    async def _read_requests(self) -> None:
        try:
            while True:
                await self._room.acquire()
                while self._unwritten_bytes > MAX_UNWRITTEN_BYTES:
                    self._written.clear()
                    await self._written.wait()
                blob = await self._call.read()
                if blob is None:
                    return
                slot = _Slot(self)
                self._order.append(slot)
                self._open.add(slot)
                await self._submit(blob, slot)
        finally:
            self._is_read = True
            self._change.set()

    async def _submit(self, blob: Bytes, slot: _Slot) -> None:
        try:
            infer = self._infer
            pending = None if infer.is_slow(blob) else infer.submit(blob, self._call, slot)
            slot.pending = pending = pending or await infer.submit_slowly(blob, self._call, slot)
            self._call.taken()
            pending.holder = slot
            if pending.stream is not None:
                self._leave_order(slot)
        except QinferError as error:
            self._call.taken()
            self._fail(slot, error)
        except asyncio.CancelledError:  # the gateway drains
            self._fail(slot, Overloaded(SHUTTING_DOWN))
            raise
        except Exception as error:  # the stream continues
            logger.exception("request failed")
            self._fail(slot, error)

    def _fail(self, slot: _Slot, error: Exception) -> None:
        self.deliver(slot, Response(request_id="", failure=Failure.from_error(error)))

    async def _write_responses(self) -> None:
        while True:
            while self._ready:
                slot, response = self._ready.popleft()
                self._writes = True
                message = await self._message(slot, response)
                if message is not None:
                    parts, is_compressed = message
                    if slot.pending is not None and slot.pending.memory is not None:
                        self._lend(slot.pending.memory, sum(map(len, parts)))
                    await self._call.write(parts, is_compressed=is_compressed)
                self._writes = False
                nbytes = response.nbytes
                self._unwritten_bytes -= nbytes
                self._written.set()
                if response.final:
                    self._open.discard(slot)
                    if slot.pending is not None:
                        slot.pending.forget_memory()
                    slot.plan = NO_PLAN
                    self._room.release()
                elif slot.pending is not None and slot.pending.stream is not None:
                    slot.pending.stream.took(nbytes)
            if self._is_read and not self._open:
                return
            self._change.clear()
            if self._order and self._order[0].pending is not None:
                self._order[0].pending.comes_first()
            await self._change.wait()

    def _lend(self, memory: Memory, size: int) -> None:
        call = self._call
        memory.become(size)
        begin = call.unsent_bytes + size
        memory.watch(lambda: begin - call.unsent_bytes, lambda: call.fail(Abort("CANCELLED", _UNREAD)))

    def _packed(self, slot: _Slot, response: Response) -> tuple[Sequence[Bytes], bool]:
        return self._call.packed(encode_streamed(self._infer.encode(response, slot), final=response.final))

    async def _message(self, slot: _Slot, response: Response) -> tuple[Sequence[Bytes], bool] | None:
        """Returns `None` for an empty last message, which is not sent."""
        failure = response.failure
        if failure is None:
            if response.final and not (response.says_something or slot.is_ordered or slot.empty_final):
                return None
            try:
                plan = slot.plan
                if self._call.head.packing is not None or (plan.special is not None and _is_slow(response, plan)):
                    return await asyncio.to_thread(self._packed, slot, response)
                return self._packed(slot, response)
            except QinferError as error:
                failure = Failure.from_error(error)
            except Exception as error:
                logger.exception("a response can't be encoded")
                failure = Failure.from_error(error)
        if self._is_strict:
            raise self._call.status_of(failure)
        return [encode_streamed_error(failure.message, slot.client_id)], False
