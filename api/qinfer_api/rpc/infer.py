"""ModelInfer: one request, one answer; and what it shares with ModelStreamInfer (reference §2.2, §2.3)."""

import asyncio
import logging
import math

import grpc.aio

from qinfer.core.api_keys import Scope
from qinfer.core.messages import Response, Scalar
from qinfer.errors import QinferError, UnsupportedFeature
from qinfer.submission.pending import Pending
from qinfer.tensors import Bytes
from qinfer.wire.kserve_grpc import Decoded, Message, decode_infer, parse_infer
from qinfer.wire.kserve_grpc_reply import encode_infer
from qinfer.wire.outputs import OutputPlan, bind
from qinfer_api.auth import Context
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.infer import InferCodec, parse_version
from qinfer_api.rpc.calls import INFERENCE, LARGE_BYTES, Call, Guard, fail, refuse

logger = logging.getLogger(__name__)

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
_NO_PLAN = OutputPlan()


class InferSink:
    """What is known of a request between its arrival and its answer.

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
    """From a message into the queue, and from a response to a message.

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
