"""The Python client: `qinfer.Client` and `qinfer.AsyncClient`, numpy in and out, tensors as binary on the wire.

`flows` has the steps of each call as generators that yield requests and pauses; both clients execute them. `_async` is
written by hand, and `scripts.generate_client` makes `_sync` from it; `hedging` and `streams` have what needs tasks in
one and threads in the other. The client knows only the protocol, no queues, brokers or workers.
"""

from qinfer.client._async.client import AsyncClient
from qinfer.client._async.handles import AsyncJob, AsyncModelFunction, AsyncSequence
from qinfer.client._sync.client import Client
from qinfer.client._sync.handles import Job, ModelFunction, Sequence
from qinfer.client.job_flows import JobStatus
from qinfer.client.request_flows import OperationStatus
from qinfer.client.results import InferResult, ModelStatistics, RequestHandle, RequestStatus
from qinfer.wire.bodies import (
    JobEstimate,
    JobLogLine,
    JobPreview,
    ModelIndexEntry,
    ModelMetadata,
    RecordedRequest,
    TensorMetadata,
)

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncModelFunction",
    "AsyncSequence",
    "Client",
    "InferResult",
    "Job",
    "JobEstimate",
    "JobLogLine",
    "JobPreview",
    "JobStatus",
    "ModelFunction",
    "ModelIndexEntry",
    "ModelMetadata",
    "ModelStatistics",
    "OperationStatus",
    "RecordedRequest",
    "RequestHandle",
    "RequestStatus",
    "Sequence",
    "TensorMetadata",
]
