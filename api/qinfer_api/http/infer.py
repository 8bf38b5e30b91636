"""What the fast path and the routes share of an infer request: bytes to a request, a response to a reply.

Nothing here waits; what takes long (a large body, shared memory) is called in a thread by whoever knows that it does.
"""

from collections.abc import Mapping
from typing import NamedTuple

from qinfer.codec.kserve_json import decode_infer, encode_infer
from qinfer.codec.outputs import OutputPlan, bind
from qinfer.control.catalog import Served
from qinfer.errors import InvalidRequest, QinferError
from qinfer.messages import InferRequest, Response
from qinfer.settings import Settings
from qinfer.tensors import Bytes
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.replies import Reply, failure_reply, refusal
from qinfer_api.raw_request import read_raw
from qinfer_api.shared_memory import SharedMemory

JSON_LENGTH_HEADER = "Inference-Header-Content-Length"

DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
"""The answer to a request for a model that gives several responses."""

_IN_SHARED_MEMORY = b"shared_memory_region"


class Target(NamedTuple):
    """What an infer URL names; version 0 is the highest ready one."""

    model: str
    version: int


class InferCodec:
    """Decodes requests and encodes responses; one per gateway.

    Args:
        dispatcher: Knows the models, for requests that can't be read without their configuration.
        memory: What clients share with this gateway.
        settings: How deep JSON may be, and how large the inputs of one request in shared memory.

    Attributes:
        memory: As given.
        shares_memory: Whether clients may use shared memory.
    """

    def __init__(self, dispatcher: Dispatcher, memory: SharedMemory, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._max_json_depth = settings.limits.max_json_depth
        self._max_input_bytes = settings.http.max_input_bytes
        self.memory = memory
        self.shares_memory = memory.allowed

    def decode(
        self, target: Target, body: Bytes, json_length: str | None, served: Served | None = None
    ) -> tuple[InferRequest, OutputPlan]:
        """Decodes the body of an infer request.

        Args:
            target: What its URL names.
            body: The body, without its encoding.
            json_length: The text of the header `Inference-Header-Content-Length`.
            served: What the request is for, if that was looked up already.

        Raises:
            QinferError: It is no infer request; or its model, whose configuration it needs, is unknown or not ready.
        """
        length = parse_json_length(json_length, len(body))
        if length == 0:
            served = served or self._dispatcher.resolve(target.model, target.version)
            return read_raw(body, target.model, target.version, served.spec)
        regions = self.memory.limited(self._max_input_bytes) if self.shares_memory else self.memory
        request, plan = decode_infer(body, length, target.model, target.version, self._max_json_depth, regions)
        if plan.special is not None:
            served = served or self._dispatcher.resolve(target.model, target.version)
            labels = {output.name: output.labels for output in served.spec.outputs}
            plan = bind(plan, labels, batched=served.spec.max_batch_size > 0)
        return request, plan

    def encode(self, response: Response, client_id: str, plan: OutputPlan) -> Reply:
        """Encodes a response as the client asked for it; a failure becomes its error reply."""
        if response.failure is not None:
            return refusal(response.failure)
        try:
            encoded = encode_infer(response, client_id, plan, self.memory)
        except QinferError as error:
            return failure_reply(error)
        return Reply(200, encoded.body, encoded.json_length)

    def reads_memory(self, body: bytes) -> bool:
        """Tells whether decoding a body may copy inputs from shared memory, however small the body is."""
        return self.shares_memory and _IN_SHARED_MEMORY in body


def with_headers(request: InferRequest, forwarded: Mapping[str, str]) -> None:
    """Adds the headers that are forwarded to a request's parameters; they replace those of the same name."""
    request.parameters = {**request.parameters, **forwarded}


def parse_version(text: str) -> int:
    """Reads the version of a URL.

    Raises:
        InvalidRequest: It is not an integer > 0.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) < 2**63):
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:100]}', "
            "version should be an integral value > 0"
        )
    return int(text)


def parse_json_length(text: str | None, body_length: int) -> int | None:
    """Reads the `Inference-Header-Content-Length` of a body; `None` when there is no such header.

    Raises:
        InvalidRequest: It is not an integer, or not within the body.
    """
    if text is None:
        return None
    try:
        length = int(text)
    except ValueError:
        raise InvalidRequest(f"Unable to parse {JSON_LENGTH_HEADER}, got: {text[:100]}") from None
    if not 0 <= length <= body_length:
        raise InvalidRequest(f"inference header size should be in range (0, {body_length}), got: {length}")
    return length
