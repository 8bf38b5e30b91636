"""qinfer: a durable, queue-backed inference server that speaks NVIDIA Triton's protocol.

`qinfer.Client`, `qinfer.AsyncClient` and what they return are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncSequence",
    "Client",
    "InferResult",
    "Job",
    "JobLogLine",
    "JobStatus",
    "ModelMetadata",
    "RequestHandle",
    "RequestStatus",
    "Sequence",
    "TensorMetadata",
    "__version__",
]

if TYPE_CHECKING:
    from qinfer.client import (
        AsyncClient,
        AsyncJob,
        AsyncSequence,
        Client,
        InferResult,
        Job,
        JobLogLine,
        JobStatus,
        ModelMetadata,
        RequestHandle,
        RequestStatus,
        Sequence,
        TensorMetadata,
    )
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            from qinfer import client

            return getattr(client, name)
        raise AttributeError(f"module 'qinfer' has no attribute '{name}'")
