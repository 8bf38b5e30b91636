"""Many responses to one request, as JSON with exact tensors: in one list, and one by one as server-sent events.

    list    {"responses": [each as infer would answer it]} ‖ the bytes of all binary outputs, in the responses' order
    event   `data:` each as infer would answer it; binary outputs follow in a second `data:`, their bytes in base64

So each response reads as a reply of infer does: its JSON, then the bytes that the JSON gives the lengths of.
"""

from base64 import b64encode
from collections.abc import Sequence

import msgspec

from qinfer.core.messages import Failure, Response
from qinfer.wire.outputs import OutputPlan
from qinfer_api.http.infer import InferCodec, Reply, refusal


def encode_list(codec: InferCodec, responses: Sequence[Response], client_id: str, plan: OutputPlan) -> Reply:
    """Encodes the responses to a request as one reply; one that can't be encoded becomes its error reply.

    Args:
        codec: Encodes each.
        responses: The responses in their order.
        client_id: The `id` that each of them echoes.
        plan: The form in which outputs travel.
    """
    texts, outputs, target = list[bytes](), list[bytes](), ""
    for response in responses:
        reply = codec.encode(response, client_id, plan)
        if reply.status != 200:
            return reply
        target = reply.target
        text, binary = _parts(reply)
        texts.append(text)
        outputs.append(binary)
    text, binary = b'{"responses":[%b]}' % b",".join(texts), b"".join(outputs)
    return Reply(200, text + binary, len(text) if binary else None, target=target)


def encode_event(codec: InferCodec, response: Response, client_id: str, plan: OutputPlan) -> Reply:
    """Encodes a response, or its error, as the data of an event: one line, or two where outputs are binary."""
    reply = codec.encode(response, client_id, plan)
    text, binary = _parts(reply)
    data = b"%b\n%b" % (text, b64encode(binary)) if binary else text
    return Reply(reply.status, data, cache=reply.cache, target=reply.target)


def coded_refusal(failure: Failure) -> Reply:
    """Returns the reply of a failure that a response carries, with its code beside the text."""
    body = msgspec.json.encode({"error": failure.message, "code": failure.code})
    return msgspec.structs.replace(refusal(failure), body=body)


def event_text(name: bytes, data: bytes, event_id: bytes = b"") -> bytes:
    """Writes a server-sent event (WHATWG HTML, "Server-sent events"); each line of its data becomes a field."""
    lines = data.replace(b"\n", b"\ndata: ")
    return b"event: %b\n%bdata: %b\n\n" % (name, b"id: %b\n" % event_id if event_id else b"", lines)


def _parts(reply: Reply) -> tuple[bytes, bytes]:
    """Returns the JSON of a reply, and the binary outputs after it."""
    length = reply.json_length
    return (reply.body, b"") if length is None else (reply.body[:length], reply.body[length:])
