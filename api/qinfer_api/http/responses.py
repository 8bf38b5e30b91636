"""Several responses to one request, as one JSON list or as server-sent events.

    list    {"responses": [each as infer would answer it]} ‖ the bytes of all binary outputs, in the responses' order
    event   `data:` each as infer would answer it; binary outputs follow in a second `data:`, their bytes in base64

Each response reads like a reply of infer.
"""

from base64 import b64encode
from collections.abc import Sequence

import msgspec

from qinfer.core.messages import Failure, Response
from qinfer.wire.outputs import OutputPlan
from qinfer_api.http.infer import HttpReply, InferCodec, refusal


def encode_list(codec: InferCodec, responses: Sequence[Response], client_id: str, plan: OutputPlan) -> HttpReply:
    """Encodes all responses as one reply, or the error of one."""
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
    return HttpReply(200, text + binary, len(text) if binary else None, target=target)


def encode_event(codec: InferCodec, response: Response, client_id: str, plan: OutputPlan) -> HttpReply:
    """Encodes an event's data; binary outputs are a second line."""
    reply = codec.encode(response, client_id, plan)
    text, binary = _parts(reply)
    data = b"%b\n%b" % (text, b64encode(binary)) if binary else text
    return HttpReply(reply.status, data, cache=reply.cache, target=reply.target)


def coded_refusal(failure: Failure) -> HttpReply:
    """Returns a failure's reply with its code."""
    body = msgspec.json.encode({"error": failure.message, "code": failure.code})
    return msgspec.structs.replace(refusal(failure), body=body)


def event_text(name: bytes, data: bytes, event_id: bytes = b"") -> bytes:
    """Formats a server-sent event (WHATWG HTML, "Server-sent events")."""
    lines = data.replace(b"\n", b"\ndata: ")
    return b"event: %b\n%bdata: %b\n\n" % (name, b"id: %b\n" % event_id if event_id else b"", lines)


def _parts(reply: HttpReply) -> tuple[bytes, bytes]:
    length = reply.json_length
    return (reply.body, b"") if length is None else (reply.body[:length], reply.body[length:])
