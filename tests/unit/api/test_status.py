"""The table of errors → HTTP and gRPC codes."""

import pytest

from qinfer.backends.python_host.errors import TritonError, to_qinfer
from qinfer.errors import BrokerUnavailable, ErrorCode, Overloaded, QinferError, QueueFull, QuotaExceeded
from qinfer_api.status import STATUSES, grpc_status, http_status, retry_after_s

GRPC_CODES = {
    "ALREADY_EXISTS",
    "CANCELLED",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "UNAUTHENTICATED",
    "UNKNOWN",
}


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_has_a_status(code: ErrorCode) -> None:
    """No failure leaves the gateway without an HTTP status and a gRPC code."""
    status = STATUSES[code]

    assert 400 <= status.http <= 599
    assert status.grpc in GRPC_CODES


@pytest.mark.parametrize(
    ("code", "status"),
    [("malformed_json", 500), ("model_not_found", 404), ("deadline_exceeded", 503), ("cancelled", 400)],
)
def test_the_numbers_are_tritons(code: str, status: int) -> None:
    """The surprising ones of reference §1.2 are as Triton has them."""
    assert http_status(code) == status


@pytest.mark.parametrize(
    ("code", "http", "grpc"),
    [
        (TritonError.UNKNOWN, 400, "UNKNOWN"),
        (TritonError.INTERNAL, 500, "INTERNAL"),
        (TritonError.NOT_FOUND, 404, "NOT_FOUND"),
        (TritonError.INVALID_ARG, 400, "INVALID_ARGUMENT"),
        (TritonError.UNAVAILABLE, 503, "UNAVAILABLE"),
        (TritonError.UNSUPPORTED, 501, "UNIMPLEMENTED"),
        (TritonError.ALREADY_EXISTS, 400, "ALREADY_EXISTS"),
        (TritonError.CANCELLED, 400, "CANCELLED"),
    ],
)
def test_the_codes_of_a_models_own_errors_are_tritons(code: int, http: int, grpc: str) -> None:
    error = to_qinfer("no", code)

    assert (http_status(error.code), grpc_status(error.code)) == (http, grpc)


@pytest.mark.parametrize("code", ["malformed_json", "region_unavailable"])
def test_mistakes_of_callers_are_400_on_routes_of_our_own(code: str) -> None:
    assert (http_status(code), http_status(code, v1=True)) == (500, 400)


def test_an_unknown_code_is_an_internal_error() -> None:
    """A newer worker may send a code that this gateway does not know."""
    assert http_status("from_the_future") == 500
    assert grpc_status("from_the_future") == "INTERNAL"


@pytest.mark.parametrize(
    ("code", "status"),
    [("invalid_request", "INVALID_ARGUMENT"), ("queue_full", "UNAVAILABLE"), ("internal", "INTERNAL")],
)
def test_grpc_has_its_own_names(code: str, status: str) -> None:
    """Triton's, too."""
    assert grpc_status(code) == status


@pytest.mark.parametrize(
    ("code", "v2", "v1"),
    [("queue_full", 503, 429), ("quota_exceeded", 503, 429), ("deadline_infeasible", 503, 503), ("conflict", 409, 409)],
)
def test_too_many_is_429_on_v1_only(code: str, v2: int, v1: int) -> None:
    """Triton's clients know 503."""
    assert (http_status(code), http_status(code, v1=True)) == (v2, v1)


@pytest.mark.parametrize(
    ("code", "error", "seconds"),
    [
        ("queue_full", None, 1),
        ("broker_unavailable", BrokerUnavailable("gone"), 1),
        ("model_not_ready", None, 1),
        ("queue_full", QueueFull("full", 0.01), 1),
        ("queue_full", Overloaded("Server exiting"), 1),
        ("quota_exceeded", QuotaExceeded("used up", 12.1), 13),
        ("deadline_exceeded", None, 0),
        ("model_not_found", None, 0),
        ("from_the_future", None, 0),
    ],
)
def test_when_to_try_again(code: str, error: QinferError | None, seconds: int) -> None:
    """Whole seconds, and only where it can help."""
    assert retry_after_s(code, error) == seconds
