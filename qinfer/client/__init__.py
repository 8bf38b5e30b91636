"""The Python client: `qinfer.Client` and `qinfer.AsyncClient`, numpy in and out, tensors as binary on the wire.

What a call does is written once, in `flows`, as generators that say what to send and how long to pause; the two clients
carry that out. The client knows the protocol and nothing of queues, brokers or workers.
"""

from qinfer.client.async_jobs import AsyncJob
from qinfer.client.asynchronous import AsyncClient
from qinfer.client.blocking import Client
from qinfer.client.job_flows import JobLogLine, JobStatus
from qinfer.client.jobs import Job
from qinfer.client.results import InferResult, ModelMetadata, RequestHandle, RequestStatus, TensorMetadata

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Client",
    "InferResult",
    "Job",
    "JobLogLine",
    "JobStatus",
    "ModelMetadata",
    "RequestHandle",
    "RequestStatus",
    "TensorMetadata",
]
