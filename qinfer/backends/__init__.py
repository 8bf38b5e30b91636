"""The backend contract and its adapters; authors of backends import the names of this package.

`docs/how-to/write-a-backend.md` shows a whole backend.
"""

from qinfer.backends.base import Array, Backend, BackendFactory, Batch, Context, respond_rows
from qinfer.core.messages import InferRequest, Response
from qinfer.models.spec import Device, ModelSpec, TensorSpec
from qinfer.observe.host import MemoryUse

__all__ = [
    "Array",
    "Backend",
    "BackendFactory",
    "Batch",
    "Context",
    "Device",
    "InferRequest",
    "MemoryUse",
    "ModelSpec",
    "Response",
    "TensorSpec",
    "respond_rows",
]
