"""The error tree: every failure that leaves a function of qinfer is one of these.

    QinferError(code, retryable)
    ├─ RequestError    InvalidRequest (InputMissing · InvalidStep) · MalformedJson · UnsupportedDatatype
    │                  UnsupportedFeature · PayloadTooLarge · ModelNotFound · RequestNotFound · JobNotFound
    │                  EndpointNotFound · WorkerNotFound · Conflict · AlreadyExists · RegionNotFound · RegionUnavailable
    ├─ Overloaded(retry_after_s)   QueueFull · QuotaExceeded · DeadlineInfeasible
    ├─ DeadlineExceeded · Cancelled · Unauthorized · Forbidden · Restricted · ValueRefused
    ├─ ModelError      ModelNotReady · ModelLoadFailed (ModelFilesUnreachable · LoadOverdue · VersionsFailed)
    │                  ControlDisabled · BackendUnavailable · InferenceFailed (ExecutionOverdue) · OutputMismatch
    │                  UnknownFailure
    ├─ DeliveryError   BrokerUnavailable · LeaseLost · CorruptEntry · StreamBroken
    ├─ ResultError     ResultNotFound · ResultExpired
    ├─ StoreError      StoreUnavailable (StoreFull) · StoreDenied · StoreNotFound · StoreChanged
    └─ SettingsError · Unreachable · JobFailed(state)

Codes are neutral: only `qinfer_api.status` has HTTP and gRPC numbers. A message says what happened, the value, and what
to do; clients read it, and so it never carries a path, a host or a stack trace.
"""

from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    """The kinds of failures, as they are named on the wire, in metrics and in `qinfer_api.status`."""

    INVALID_REQUEST = "invalid_request"
    INPUT_MISSING = "input_missing"
    MALFORMED_JSON = "malformed_json"
    UNSUPPORTED_DATATYPE = "unsupported_datatype"
    UNSUPPORTED_FEATURE = "unsupported_feature"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    MODEL_NOT_FOUND = "model_not_found"
    REQUEST_NOT_FOUND = "request_not_found"
    JOB_NOT_FOUND = "job_not_found"
    ENDPOINT_NOT_FOUND = "endpoint_not_found"
    WORKER_NOT_FOUND = "worker_not_found"
    CONFLICT = "conflict"
    ALREADY_EXISTS = "already_exists"
    REGION_NOT_FOUND = "region_not_found"
    REGION_UNAVAILABLE = "region_unavailable"
    QUEUE_FULL = "queue_full"
    QUOTA_EXCEEDED = "quota_exceeded"
    DEADLINE_INFEASIBLE = "deadline_infeasible"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    RESTRICTED = "restricted"
    VALUE_REFUSED = "value_refused"
    MODEL_NOT_READY = "model_not_ready"
    MODEL_LOAD_FAILED = "model_load_failed"
    VERSIONS_FAILED = "versions_failed"
    CONTROL_DISABLED = "control_disabled"
    BACKEND_UNAVAILABLE = "backend_unavailable"
    INFERENCE_FAILED = "inference_failed"
    OUTPUT_MISMATCH = "output_mismatch"
    UNKNOWN = "unknown"
    BROKER_UNAVAILABLE = "broker_unavailable"
    LEASE_LOST = "lease_lost"
    CORRUPT_ENTRY = "corrupt_entry"
    SEQUENCE_ENDED = "sequence_ended"
    SEQUENCE_LOST = "sequence_lost"
    STREAM_BROKEN = "stream_broken"
    RESULT_NOT_FOUND = "result_not_found"
    RESULT_EXPIRED = "result_expired"
    STORE_REFUSED = "store_refused"
    STORE_UNAVAILABLE = "store_unavailable"
    STORE_DENIED = "store_denied"
    STORE_NOT_FOUND = "store_not_found"
    STORE_CHANGED = "store_changed"
    SETTINGS = "settings"
    UNREACHABLE = "unreachable"
    JOB_FAILED = "job_failed"
    INTERNAL = "internal"


class QinferError(Exception):
    """The root of the tree; the class sets `code` and `retryable`."""

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    retryable: ClassVar[bool] = False

    @property
    def message(self) -> str:
        """The text that clients see."""
        return str(self.args[0]) if self.args else self.code.value


class RequestError(QinferError):
    """The caller's request can't be served as it is."""

    code = ErrorCode.INVALID_REQUEST


class InvalidRequest(RequestError):
    """A field of the request is missing, wrong or contradictory."""


class InvalidStep(InvalidRequest):
    """A request to a stateful model names no sequence, or does not fit its sequence."""


class InputMissing(InvalidRequest):
    """A URL or pattern of a bulk job's inputs names no file, at least not yet."""

    code = ErrorCode.INPUT_MISSING


class MalformedJson(RequestError):
    """A JSON value has the wrong type; Triton reports these as internal errors (reference §1.2)."""

    code = ErrorCode.MALFORMED_JSON


class UnsupportedDatatype(RequestError):
    """The datatype is unknown, or this encoding can't carry it."""

    code = ErrorCode.UNSUPPORTED_DATATYPE


class UnsupportedFeature(RequestError):
    """The protocol knows the feature; this server does not offer it."""

    code = ErrorCode.UNSUPPORTED_FEATURE


class PayloadTooLarge(RequestError):
    """The body exceeds a documented limit."""

    code = ErrorCode.PAYLOAD_TOO_LARGE


class ModelNotFound(RequestError):
    """The model or version is unknown."""

    code = ErrorCode.MODEL_NOT_FOUND


class RequestNotFound(RequestError):
    """No asynchronous request has this id."""

    code = ErrorCode.REQUEST_NOT_FOUND


class JobNotFound(RequestError):
    """No bulk job has this id."""

    code = ErrorCode.JOB_NOT_FOUND


class EndpointNotFound(RequestError):
    """No endpoint has this name."""

    code = ErrorCode.ENDPOINT_NOT_FOUND


class WorkerNotFound(RequestError):
    """No worker with this id is alive."""

    code = ErrorCode.WORKER_NOT_FOUND


class Conflict(RequestError):
    """The id or idempotency key already belongs to another request."""

    code = ErrorCode.CONFLICT


class AlreadyExists(RequestError):
    """An object of the same name already exists."""

    code = ErrorCode.ALREADY_EXISTS


class RegionNotFound(RequestError):
    """No registered shared memory region has this name."""

    code = ErrorCode.REGION_NOT_FOUND


class RegionUnavailable(RequestError):
    """The shared memory can't be opened, or is too small for an output; Triton reports both as internal errors."""

    code = ErrorCode.REGION_UNAVAILABLE


class Overloaded(QinferError):
    """The server refuses work that it could not finish in time; try again after `retry_after_s` seconds."""

    code = ErrorCode.QUEUE_FULL
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Overloaded):
    """The lane is at its capacity."""


class QuotaExceeded(Overloaded):
    """The tenant's rate or in-flight quota is used up."""

    code = ErrorCode.QUOTA_EXCEEDED


class DeadlineInfeasible(Overloaded):
    """The backlog ahead takes longer than the request's timeout."""

    code = ErrorCode.DEADLINE_INFEASIBLE


TIMED_OUT = "Request timeout expired"
"""Triton's text for a request whose deadline has passed."""

BACKLOG_TIMED_OUT = "timeout of the corresponding sequence has been expired"
"""Triton's text for the requests of a sequence if one has expired before the sequence got a slot."""


LEFT = "the request was cancelled"
"""The text for a request whose caller cancelled it or disconnected."""


class DeadlineExceeded(QinferError):
    """The request's deadline passed before it was executed."""

    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(QinferError):
    """The caller cancelled the request, or disconnected."""

    code = ErrorCode.CANCELLED


class Unauthorized(QinferError):
    """The request carries no valid key."""

    code = ErrorCode.UNAUTHORIZED


class Forbidden(QinferError):
    """The key does not allow this operation."""

    code = ErrorCode.FORBIDDEN


class Restricted(QinferError):
    """The operator restricted this group of calls, and the request lacks the required header."""

    code = ErrorCode.RESTRICTED


class ValueRefused(QinferError):
    """A setting that clients change does not accept this value; Triton calls that unavailable (reference §1.17)."""

    code = ErrorCode.VALUE_REFUSED


class ModelError(QinferError):
    """The model caused the failure, not the request."""

    code = ErrorCode.INFERENCE_FAILED


class ModelNotReady(ModelError):
    """The model is known, and no instance can execute it now."""

    code = ErrorCode.MODEL_NOT_READY
    retryable = True


class ModelLoadFailed(ModelError):
    """The model's configuration or file can't be loaded."""

    code = ErrorCode.MODEL_LOAD_FAILED


class LoadOverdue(ModelLoadFailed):
    """The load or warm-up of an instance exceeded its model's time limit."""


class VersionsFailed(ModelLoadFailed):
    """No worker can load some versions of the model."""

    code = ErrorCode.VERSIONS_FAILED


class ModelFilesUnreachable(ModelLoadFailed):
    """The storage of the model's files can't be reached now."""

    retryable = True


class ControlDisabled(ModelError):
    """The control mode does not allow clients to load and unload models."""

    code = ErrorCode.CONTROL_DISABLED


class BackendUnavailable(ModelError):
    """The backend's runtime is not installed; the message has the command that installs it."""

    code = ErrorCode.BACKEND_UNAVAILABLE


class InferenceFailed(ModelError):
    """The model raised an exception while it executed a batch."""


class ExecutionOverdue(InferenceFailed):
    """An execution exceeded its model's time limit and was ended."""


class OutputMismatch(ModelError):
    """The number, shape or datatype of the model's outputs differs from its configuration."""

    code = ErrorCode.OUTPUT_MISMATCH


class UnknownFailure(ModelError):
    """The model answered with an error of Triton's code UNKNOWN."""

    code = ErrorCode.UNKNOWN


class DeliveryError(QinferError):
    """The queue operation failed."""

    code = ErrorCode.BROKER_UNAVAILABLE


class BrokerUnavailable(DeliveryError):
    """Redis can't be reached, or did not reply in time."""

    retryable = True


class LeaseLost(DeliveryError):
    """Another worker owns the entry now; discard the work done on it."""

    code = ErrorCode.LEASE_LOST


class CorruptEntry(DeliveryError):
    """A frame can't be decoded."""

    code = ErrorCode.CORRUPT_ENTRY


class StreamBroken(DeliveryError):
    """The worker died after the first responses of a stream; the caller has to send the request again."""

    code = ErrorCode.STREAM_BROKEN
    retryable = True


BEGIN_AGAIN = "begin it again with the START flag"
"""The end of the text of a sequence's failure, which identifies it: errors of `/v2` have no code."""

START_MISSING = "must specify the START flag on the first request of the sequence"
"""Triton's text for a request without START if no such sequence is open."""


class SequenceEnded(DeliveryError):
    """The sequence of this request has ended, by an error or its idle time; the caller may begin it again."""

    code = ErrorCode.SEQUENCE_ENDED


class SequenceLost(SequenceEnded):
    """The state of the sequence was lost with its worker or Redis."""

    code = ErrorCode.SEQUENCE_LOST
    retryable = True


class ResultError(QinferError):
    """The result of an asynchronous request is not available."""

    code = ErrorCode.RESULT_NOT_FOUND


class ResultNotFound(ResultError):
    """There is no result yet."""


class ResultExpired(ResultError):
    """The result has expired."""

    code = ErrorCode.RESULT_EXPIRED


class StoreError(QinferError):
    """An object store refuses an operation; the message names the URL, never credentials or an endpoint.

    Attributes:
        reason: The text of the store's driver, for operators only.
    """

    code = ErrorCode.STORE_REFUSED
    reason: str = ""


class StoreUnavailable(StoreError):
    """The store can't be reached, is overloaded, or has no space now."""

    code = ErrorCode.STORE_UNAVAILABLE
    retryable = True


class StoreFull(StoreUnavailable):
    """The store has no space now; reads and deletions work."""


class StoreDenied(StoreError):
    """The store denies access to this server: credentials are missing or insufficient."""

    code = ErrorCode.STORE_DENIED


class StoreNotFound(StoreError):
    """The bucket or object does not exist."""

    code = ErrorCode.STORE_NOT_FOUND


class StoreChanged(StoreError):
    """The object at the URL has changed since it was last read."""

    code = ErrorCode.STORE_CHANGED


class SettingsError(QinferError):
    """A setting is missing or wrong; the message names the variable, its value and what it accepts."""

    code = ErrorCode.SETTINGS


class Unreachable(QinferError):
    """No gateway answers at the URL; only clients raise it."""

    code = ErrorCode.UNREACHABLE
    retryable = True


class JobFailed(QinferError):
    """A bulk job has ended without completing; only clients raise it.

    Attributes:
        state: The job's state: `failed`, `cancelled` or `expired`.
    """

    code = ErrorCode.JOB_FAILED

    def __init__(self, message: str, state: str = "failed") -> None:
        super().__init__(message)
        self.state = state
