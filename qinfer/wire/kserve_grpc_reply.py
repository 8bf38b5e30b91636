"""The infer responses of the KServe v2 protocol over gRPC, single and streamed (reference §2.2, §2.3).

Replies are put together from encoded pieces: the part that describes the outputs is the same for many requests and is
kept, and the tensors' bytes are copied once, into the reply. All outputs are raw: Triton's client reads no others.
"""

from functools import lru_cache

from tritonclient.grpc import service_pb2 as pb

from qinfer.core.messages import Response
from qinfer.tensors import Bytes
from qinfer.wire.kserve_grpc_parameters import to_parameter
from qinfer.wire.outputs import OutputPlan, Regions, prepare
from qinfer.wire.protobuf_wire import prefix

_ID_FIELD = pb.ModelInferResponse.ID_FIELD_NUMBER
_RAW_FIELD = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_RESPONSE_FIELD = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER

_NOWHERE: frozenset[str] = frozenset()
_FINAL = "triton_final_response"


def encode_infer(response: Response, client_id: str, plan: OutputPlan, regions: Regions) -> list[Bytes]:
    """Encodes a response that carries outputs as a ModelInferResponse.

    Args:
        response: The response; its failure, if any, is not looked at.
        client_id: The request's `id`, echoed unless empty.
        plan: How its outputs are given back, as `bind` returned it.
        regions: The shared memory that clients registered.

    Returns:
        The message, in pieces.

    Raises:
        QinferError: An output can't be given back as the request wants it.
    """
    outputs, placed = response.outputs, _NOWHERE
    if plan.special is not None:
        outputs, placed = prepare(response, plan, regions)
    model, version, parameters = response.model, response.version, response.parameters
    parts: list[Bytes] = [_head(model, version, tuple([(o.name, o.datatype, o.shape) for o in outputs]))]
    if client_id:
        text = client_id.encode()
        parts += (prefix(_ID_FIELD, len(text)), text)
    if parameters:
        named = {name: pb.InferParameter(**to_parameter(value)) for name, value in parameters.items()}
        parts.append(pb.ModelInferResponse(parameters=named).SerializeToString())
    for output in outputs:
        data = b"" if output.name in placed else output.data
        parts += (prefix(_RAW_FIELD, len(data)), data)
    return parts


def encode_streamed(response: list[Bytes], *, final: bool) -> list[Bytes]:
    """Encodes a ModelStreamInferResponse that carries a response, in pieces.

    Args:
        response: What `encode_infer` returned.
        final: It is the last response to its request.
    """
    response = [*response, _FINAL_PARAMETER[final]]
    size = sum([len(part) for part in response])
    return [prefix(_RESPONSE_FIELD, size), *response]


def encode_streamed_error(message: str, client_id: str) -> bytes:
    """Encodes a ModelStreamInferResponse that tells of a failure, with the id of the request that failed."""
    reply = pb.ModelStreamInferResponse(error_message=message, infer_response=pb.ModelInferResponse(id=client_id))
    return bytes(reply.SerializeToString())


@lru_cache(maxsize=1024)
def _head(model: str, version: int, outputs: tuple[tuple[str, str, tuple[int, ...]], ...]) -> bytes:
    """Returns what describes a response, without id and data."""
    reply = pb.ModelInferResponse(model_name=model, model_version=str(version))
    for name, datatype, shape in outputs:
        reply.outputs.add(name=name, datatype=datatype, shape=shape)
    return bytes(reply.SerializeToString())


_FINAL_PARAMETER = {
    final: bytes(pb.ModelInferResponse(parameters={_FINAL: pb.InferParameter(bool_param=final)}).SerializeToString())
    for final in (False, True)
}
