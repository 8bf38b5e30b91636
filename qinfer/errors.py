"""The error tree. Every failure that leaves a function of qinfer is one of these.

    QinferError(code, retryable)
    ├─ RequestError    InvalidRequest (InputMissing · InvalidStep) · MalformedJson · UnsupportedDatatype
    │                  UnsupportedFeature · PayloadTooLarge · ModelNotFound · RequestNotFound · JobNotFound
    │                  EndpointNotFound · Conflict · AlreadyExists · RegionNotFound · RegionUnavailable
    ├─ Overloaded(retry_after_s)   QueueFull · QuotaExceeded · DeadlineInfeasible
    ├─ DeadlineExceeded · Cancelled · Unauthorized · Forbidden · Restricted · ValueRefused
    ├─ ModelError      ModelNotReady · ModelLoadFailed (ModelFilesUnreachable · LoadOverdue · VersionsFailed)
    │                  ControlDisabled · BackendUnavailable · InferenceFailed (ExecutionOverdue) · OutputMismatch
    │                  UnknownFailure
    ├─ DeliveryError   BrokerUnavailable · LeaseLost · CorruptEntry · StreamBroken
    ├─ ResultError     ResultNotFound · ResultExpired
    ├─ StoreError      StoreUnavailable · StoreDenied · StoreNotFound · StoreChanged
    └─ SettingsError · Unreachable · JobFailed(state)

Codes are neutral: HTTP and gRPC numbers live in `qinfer_api.status` only. A message says what happened, the value,
and what to do; it never carries a path, a host or stack text, because clients read it.
"""

from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    """Names a kind of failure on the wire, in metrics and in `qinfer_api.status`."""

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
    """The root of the tree; `code` and `retryable` are fixed by the class."""

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
    """A URL or pattern of a bulk job's inputs names no file, or not yet."""

    code = ErrorCode.INPUT_MISSING


class MalformedJson(RequestError):
    """A JSON value has the wrong type; Triton reports these as internal errors (reference §1.2)."""

    code = ErrorCode.MALFORMED_JSON


class UnsupportedDatatype(RequestError):
    """The datatype is unknown, or can't travel in this encoding."""

    code = ErrorCode.UNSUPPORTED_DATATYPE


class UnsupportedFeature(RequestError):
    """The protocol knows the feature; this server does not offer it."""

    code = ErrorCode.UNSUPPORTED_FEATURE


class PayloadTooLarge(RequestError):
    """The body exceeds a documented limit."""

    code = ErrorCode.PAYLOAD_TOO_LARGE


class ModelNotFound(RequestError):
    """No model, or no version, of that name is known."""

    code = ErrorCode.MODEL_NOT_FOUND


class RequestNotFound(RequestError):
    """No asynchronous request of that id is known."""

    code = ErrorCode.REQUEST_NOT_FOUND


class JobNotFound(RequestError):
    """No bulk job of that id is known."""

    code = ErrorCode.JOB_NOT_FOUND


class EndpointNotFound(RequestError):
    """There is no endpoint of that name."""

    code = ErrorCode.ENDPOINT_NOT_FOUND


class Conflict(RequestError):
    """The id or idempotency key belongs to another request already."""

    code = ErrorCode.CONFLICT


class AlreadyExists(RequestError):
    """An object of the same name already exists."""

    code = ErrorCode.ALREADY_EXISTS


class RegionNotFound(RequestError):
    """No shared memory region of that name is registered."""

    code = ErrorCode.REGION_NOT_FOUND


class RegionUnavailable(RequestError):
    """The shared memory can't be opened, or is too small for an output; Triton reports both as internal errors."""

    code = ErrorCode.REGION_UNAVAILABLE


class Overloaded(QinferError):
    """The server refuses work it could not finish in time; try again after `retry_after_s` seconds."""

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
"""Triton's text for the requests of a sequence one of which has expired before the sequence got a slot."""


LEFT = "the request was cancelled"
"""The text for a request whose caller went away, or cancelled it."""


class DeadlineExceeded(QinferError):
    """The request's deadline passed before it was executed."""

    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(QinferError):
    """The caller cancelled the request, or went away."""

    code = ErrorCode.CANCELLED


class Unauthorized(QinferError):
    """The request carries no valid key."""

    code = ErrorCode.UNAUTHORIZED


class Forbidden(QinferError):
    """The key does not allow this operation."""

    code = ErrorCode.FORBIDDEN


class Restricted(QinferError):
    """The operator restricted this group of calls; the request lacks the header that opens it."""

    code = ErrorCode.RESTRICTED


class ValueRefused(QinferError):
    """A setting that clients change does not take this value, and Triton calls that unavailable (reference §1.17)."""

    code = ErrorCode.VALUE_REFUSED


class ModelError(QinferError):
    """Something about the model, not about the request."""

    code = ErrorCode.INFERENCE_FAILED


class ModelNotReady(ModelError):
    """The model is known, and no instance of it can run now."""

    code = ErrorCode.MODEL_NOT_READY
    retryable = True


class ModelLoadFailed(ModelError):
    """The model's configuration or file can't be loaded."""

    code = ErrorCode.MODEL_LOAD_FAILED


class LoadOverdue(ModelLoadFailed):
    """The load or the warm-up of an instance lasted longer than its model may take, and was given up."""


class VersionsFailed(ModelLoadFailed):
    """Versions of the model can't be loaded by any worker."""

    code = ErrorCode.VERSIONS_FAILED


class ModelFilesUnreachable(ModelLoadFailed):
    """The place where the model's files are can't be reached now."""

    retryable = True


class ControlDisabled(ModelError):
    """Models are not loaded and unloaded on request in the present control mode."""

    code = ErrorCode.CONTROL_DISABLED


class BackendUnavailable(ModelError):
    """The backend's runtime is not installed; the message has the command that installs it."""

    code = ErrorCode.BACKEND_UNAVAILABLE


class InferenceFailed(ModelError):
    """The model raised while executing a batch."""


class ExecutionOverdue(InferenceFailed):
    """An execution lasted longer than its model may take, and was ended."""


class OutputMismatch(ModelError):
    """The model returned another number, shape or datatype of outputs than its configuration says."""

    code = ErrorCode.OUTPUT_MISMATCH


class UnknownFailure(ModelError):
    """The model answered with an error of Triton's code UNKNOWN."""

    code = ErrorCode.UNKNOWN


class DeliveryError(QinferError):
    """The queue could not do what was asked."""

    code = ErrorCode.BROKER_UNAVAILABLE


class BrokerUnavailable(DeliveryError):
    """Redis can't be reached, or its reply did not come in time."""

    retryable = True


class LeaseLost(DeliveryError):
    """Another worker owns the entry now; discard the work done on it."""

    code = ErrorCode.LEASE_LOST


class CorruptEntry(DeliveryError):
    """A frame can't be decoded."""

    code = ErrorCode.CORRUPT_ENTRY


class StreamBroken(DeliveryError):
    """The worker that sent the first responses of a stream ended; the request has to be sent again."""

    code = ErrorCode.STREAM_BROKEN
    retryable = True


BEGIN_AGAIN = "begin it again with the START flag"
"""The text of a failure of a sequence ends so; the errors of `/v2` have no code that would tell it from others."""

START_MISSING = "must specify the START flag on the first request of the sequence"
"""Triton's text for a request without START where no such sequence is open."""


class SequenceEnded(DeliveryError):
    """The sequence of this request has ended, by an error or by its idle time; it can be begun again."""

    code = ErrorCode.SEQUENCE_ENDED


class SequenceLost(SequenceEnded):
    """The state of the sequence is lost with the worker, or with the Redis, that had it."""

    code = ErrorCode.SEQUENCE_LOST
    retryable = True


class ResultError(QinferError):
    """The result of an asynchronous request can't be given."""

    code = ErrorCode.RESULT_NOT_FOUND


class ResultNotFound(ResultError):
    """There is no result yet."""


class ResultExpired(ResultError):
    """There was a result; its time to live is over."""

    code = ErrorCode.RESULT_EXPIRED


class StoreError(QinferError):
    """An object store refuses what was asked; the message names the URL, never credentials or an endpoint.

    Attributes:
        reason: What the store's driver said, for operators only; empty where qinfer itself found out.
    """

    code = ErrorCode.STORE_REFUSED
    reason: str = ""


class StoreUnavailable(StoreError):
    """The store can't be reached, is overloaded, or has no space now."""

    code = ErrorCode.STORE_UNAVAILABLE
    retryable = True


class StoreDenied(StoreError):
    """The store does not let this server in: there are no credentials, or they do not allow it."""

    code = ErrorCode.STORE_DENIED


class StoreNotFound(StoreError):
    """There is no such bucket, or nothing of that name in it."""

    code = ErrorCode.STORE_NOT_FOUND


class StoreChanged(StoreError):
    """The object at the URL has changed since it was last read."""

    code = ErrorCode.STORE_CHANGED


class SettingsError(QinferError):
    """A setting is missing or wrong; the message names the variable, its value and what it accepts."""

    code = ErrorCode.SETTINGS


class Unreachable(QinferError):
    """Seen by clients only: no gateway answers at the URL, or what answers there is none."""

    code = ErrorCode.UNREACHABLE
    retryable = True


class JobFailed(QinferError):
    """Seen by clients only: a bulk job has ended, and is not completed.

    Attributes:
        state: The job's state: `failed`, `cancelled` or `expired`.
    """

    code = ErrorCode.JOB_FAILED

    def __init__(self, message: str, state: str = "failed") -> None:
        super().__init__(message)
        self.state = state
