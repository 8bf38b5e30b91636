"""The table of errors → HTTP and gRPC codes."""

import pytest

from qinfer.errors import ErrorCode
from qinfer_api.status import STATUSES, http_status

GRPC_CODES = {"CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNIMPLEMENTED", "INTERNAL"} | {
    "UNAVAILABLE",
    "UNAUTHENTICATED",
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


def test_an_unknown_code_is_an_internal_error() -> None:
    """A newer worker may send a code that this gateway does not know."""
    assert http_status("from_the_future") == 500
