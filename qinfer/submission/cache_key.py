"""The cache key of a response: a hash of everything on which a model's answer may depend.

    SHA-256( tenant · model · version · generation · outputs · parameters · SHA-256(inputs by name) ), cut to 128 bits

The parts are MessagePack, which is self-delimiting. Ids, priorities, timeouts and tensor encodings are left out.
"""

from collections.abc import Iterable
from hashlib import sha256
from operator import attrgetter

import msgspec

from qinfer.core.messages import OutgoingRequest
from qinfer.models.catalog import ServedVersion
from qinfer.tensors import Tensor

KEY_BYTES = 16

_FORM = 1  # keys of different forms never match
_encode = msgspec.msgpack.Encoder().encode
_by_name = attrgetter("name")


def response_key(request: OutgoingRequest, served: ServedVersion) -> bytes | None:
    """Returns a request's key; `None` if its parameters can't be encoded."""
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
    except (OverflowError, ValueError):  # an integer of more than 64 bits, or half of a surrogate pair
        return None
    return sha256(about + (request.inputs_digest or inputs_digest(request.inputs))).digest()[:KEY_BYTES]


def inputs_digest(inputs: Iterable[Tensor]) -> bytes:
    """Hashes a request's inputs, independent of their order."""
    digest = sha256()
    for tensor in sorted(inputs, key=_by_name):
        digest.update(_encode((tensor.name, tensor.datatype, tensor.shape, len(tensor.data))))
        digest.update(tensor.data)
    return digest.digest()
