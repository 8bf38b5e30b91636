"""The Python client: `qinfer.Client` and `qinfer.AsyncClient`, numpy in and out, tensors as binary on the wire.

`flows` has the steps of each call as generators that yield requests and pauses; both clients execute them. The client
knows only the protocol, no queues, brokers or workers.
"""

from qinfer.client.asynchronous import AsyncClient
from qinfer.client.blocking import Client
from qinfer.client.job_flows import JobEstimate, JobLogLine, JobStatus
from qinfer.client.jobs import AsyncJob, Job
from qinfer.client.results import (
    InferResult,
    ModelIndexEntry,
    ModelMetadata,
    ModelStatistics,
    RequestHandle,
    RequestStatus,
    TensorMetadata,
)
from qinfer.client.sequences import AsyncSequence, Sequence

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncSequence",
    "Client",
    "InferResult",
    "Job",
    "JobEstimate",
    "JobLogLine",
    "JobStatus",
    "ModelIndexEntry",
    "ModelMetadata",
    "ModelStatistics",
    "RequestHandle",
    "RequestStatus",
    "Sequence",
    "TensorMetadata",
]
