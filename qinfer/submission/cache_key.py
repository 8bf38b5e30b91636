"""The key of a response: everything that a model's answer may depend on, hashed; nothing that it may not.

    SHA-256( tenant · model · version · generation · outputs · parameters · SHA-256(inputs by name) ), cut to 128 bits

Each part is MessagePack, which ends where it ends: no two requests are spelled alike. Ids, priorities, timeouts and the
encoding of tensors are no parts.
"""

from collections.abc import Iterable
from hashlib import sha256
from operator import attrgetter

import msgspec

from qinfer.core.messages import InferRequest
from qinfer.models.catalog import Served
from qinfer.tensors import Tensor

KEY_BYTES = 16

_FORM = 1  # a key of another form never meets one of this
_encode = msgspec.msgpack.Encoder().encode
_by_name = attrgetter("name")


def response_key(request: InferRequest, served: Served) -> bytes | None:
    """Returns the key of the response to a request; `None` for one whose parameters can't be spelled.

    Takes as long as the inputs are large, unless they were hashed before.

    Args:
        request: The request, its tenant set.
        served: The model version that it is for.
    """
    spec = served.spec
    tenant = None if spec.cached_for_all else request.tenant
    try:
        about = _encode(
            (
                _FORM,
                tenant,
                spec.name,
                served.version,
                served.generation,
                request.outputs,
                sorted(request.parameters.items()),
                request.sequence,
            )
        )
    except (OverflowError, ValueError):  # an integer of more than 64 bits, half of a surrogate pair
        return None
    return sha256(about + (request.inputs_digest or inputs_digest(request.inputs))).digest()[:KEY_BYTES]


def inputs_digest(inputs: Iterable[Tensor]) -> bytes:
    """Returns the hash of the inputs of a request, in whichever order it names them."""
    digest = sha256()
    for tensor in sorted(inputs, key=_by_name):
        digest.update(_encode((tensor.name, tensor.datatype, tensor.shape, len(tensor.data))))
        digest.update(tensor.data)
    return digest.digest()
