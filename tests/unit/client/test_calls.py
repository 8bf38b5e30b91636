"""The client's calls, against a gateway that answers by a script: what is sent, what is repeated, what comes back."""

import json
from collections.abc import Iterable

import httpx
import pytest

import qinfer
from qinfer import errors
from qinfer.client import RequestHandle
from qinfer.client.steps import backoff_s
from qinfer.errors import QinferError
from qinfer.tensors import from_numpy
from qinfer.wire.kserve_json import decode_infer
from tests.support.scripted_gateway import Scripted, Server, X, accepted, answer, reply


def test_infer_sends_binary_and_returns_arrays() -> None:
    """Arrays in, arrays out; the key and the version travel along."""
    server = Server(answer())

    with server.client(api_key="secret") as client:
        result = client.infer("a model", {"x": X}, version=2, outputs=["y"], priority=1, parameters={"k": 1}, id="7")

    (sent,) = server.requests
    request, _ = decode_infer(sent.content, int(sent.headers["Inference-Header-Content-Length"]), "m", 2)
    assert server.paths == ["POST /v2/models/a%20model/versions/2/infer"]
    assert sent.headers["Authorization"] == "Bearer secret"
    assert (request.priority, request.parameters, request.outputs, request.client_id) == (1, {"k": 1}, ("y",), "7")
    assert (result["y"].tolist(), result.model, result.version, result.id) == ([4.0], "m", 1, "7")


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(status: int) -> None:
    """The client waits as long as it is asked to, a little longer, and asks again."""
    refused = reply(status, {"Retry-After": "3"}, error="Exceeds maximum queue size")
    server = Server(refused, refused, answer())

    result = server.client().infer("m", {"x": X})

    assert result["y"].tolist() == [4.0]
    assert len(server.pauses) == 2
    assert all(3.0 <= pause <= 3.3 for pause in server.pauses)


def test_no_time_to_wait_is_said_at_once() -> None:
    """A pause longer than the call's time is not begun; the caller learns how long it would have been."""
    server = Server(reply(503, {"Retry-After": "100"}, error="Exceeds maximum queue size"))

    with pytest.raises(errors.Overloaded, match="Exceeds maximum queue size") as caught:
        server.client().infer("m", {"x": X})

    assert caught.value.retry_after_s == 100.0
    assert server.pauses == []


def test_retries_are_counted() -> None:
    """`max_retries` ends them where time does not."""
    server = Server(reply(503, error="busy"))

    with pytest.raises(errors.Overloaded, match="busy"):
        server.client(max_retries=3).infer("m", {"x": X})

    assert len(server.requests) == 4


def test_backoff_doubles_and_ends() -> None:
    """Without `Retry-After` the pauses grow up to 5 s; the server's word counts where there is one."""
    assert [backoff_s(n, None, 0.0) for n in (0, 1, 2, 20)] == [0.1, 0.2, 0.4, 5.0]
    assert backoff_s(0, None, 0.5) == pytest.approx(0.075)
    assert backoff_s(5, 2.0, 0.5) == pytest.approx(2.1)
    assert backoff_s(0, 0.0, 0.0) == 0.1  # "Retry-After: 0" names no time; at once would be a flood


@pytest.mark.parametrize(
    "error",
    [httpx.ConnectError("refused"), httpx.ReadError("cut"), httpx.RemoteProtocolError("left")],
    ids=["refused", "cut", "left"],
)
def test_a_broken_connection_is_tried_again(error: httpx.TransportError) -> None:
    """A gateway that restarts is no reason to fail."""
    server = Server(error, answer())

    assert server.client().infer("m", {"x": X})["y"].tolist() == [4.0]
    assert len(server.requests) == 2


def test_a_submission_is_repeated_with_its_key() -> None:
    """The gateway knows by the key that both are one."""
    server = Server(httpx.ReadError("cut"), accepted())

    handle = server.client().submit("m", {"x": X}, timeout_s=2.5, webhook="https://example.org/hook")

    first, second = server.requests
    assert handle == RequestHandle(id="ID.0.m", url="/v1/requests/ID.0.m")
    assert server.paths[0] == "POST /v1/models/m/requests"
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"] != ""
    assert (first.headers["Request-Timeout"], first.headers["Webhook-Url"]) == ("2.5", "https://example.org/hook")
    assert first.content == second.content


def test_an_id_of_the_callers_own_replaces_the_key() -> None:
    """The id makes repetitions safe already; the handle is where the gateway says."""
    server = Server(reply(202, {"Location": "/v1/models/m/requests/mine"}, id="mine", state="queued"))

    handle = server.client().submit("m", {"x": X}, request_id="mine")

    assert handle == RequestHandle.named("m", "mine")
    assert server.requests[0].headers["Request-Id"] == "mine"
    assert "Idempotency-Key" not in server.requests[0].headers


def test_a_result_is_waited_for() -> None:
    """202 is asked again, without a storm where the gateway does not hold the answer back."""
    server = Server(reply(202, state="queued"), reply(202, state="running"), answer())

    result = server.client().result("ID.0.m", wait_s=60)

    assert result["y"].tolist() == [4.0]
    assert server.paths[0] == "GET /v1/requests/ID.0.m/result?wait=20"
    assert server.pauses == [0.5, 0.5]


@pytest.mark.parametrize("wait_s", [0.0, 2.0])
def test_no_result_yet_is_an_error(wait_s: float) -> None:
    """When the wait is over the caller gets the state."""
    server = Server(reply(202, state="running"))

    with pytest.raises(errors.ResultNotFound, match=r"request 'ID\.0\.m' is running"):
        server.client().result("ID.0.m", wait_s=wait_s)

    assert sum(server.pauses) == wait_s


@pytest.mark.parametrize(
    ("status", "state", "code", "raised"),
    [
        (503, "expired", "deadline_exceeded", errors.DeadlineExceeded),
        (400, "cancelled", "cancelled", errors.Cancelled),
        (500, "failed", "inference_failed", errors.InferenceFailed),
        (500, "failed", "output_mismatch", errors.OutputMismatch),
        (500, "failed", "", errors.InferenceFailed),
        (503, "failed", "model_not_ready", errors.InferenceFailed),
    ],
    ids=["expired", "cancelled", "failed", "mismatch", "no-code", "not-ready"],
)
def test_how_a_request_ended_is_what_is_raised(status: int, state: str, code: str, raised: type[QinferError]) -> None:
    """The status alone could mean that the gateway failed; the request's state says that it did not."""
    server = Server(
        reply(status, error="why"), reply(200, id="ID.0.m", state=state, error={"code": code, "message": "why"})
    )

    with pytest.raises(QinferError, match="why") as caught:
        server.client().result("ID.0.m")

    assert type(caught.value) is raised
    assert server.paths == ["GET /v1/requests/ID.0.m/result?wait=20", "GET /v1/requests/ID.0.m"]


def test_an_overloaded_gateway_is_asked_again_for_a_result() -> None:
    """503 of the gateway itself, while the request is only queued."""
    server = Server(reply(503, {"Retry-After": "1"}, error="busy"), reply(200, id="ID.0.m", state="queued"), answer())

    assert server.client().result("ID.0.m")["y"].tolist() == [4.0]


def test_asking_how_a_request_ended_takes_no_time_of_its_own() -> None:
    """The second question has the time that was left of the call's."""
    server = Server(reply(503, {"Retry-After": "7"}, error="busy"))

    with pytest.raises(errors.Overloaded):
        server.client(timeout_s=60.0).result("ID.0.m", wait_s=0)

    assert sum(server.pauses) < 60.0


@pytest.mark.parametrize(("status", "raised"), [(404, errors.RequestNotFound), (410, errors.ResultExpired)])
def test_a_result_that_is_gone(status: int, raised: type[QinferError]) -> None:
    """Unknown and expired are told apart."""
    with pytest.raises(raised):
        Server(reply(status, error="gone")).client().result("ID.0.m")


def test_status_and_cancel() -> None:
    """Both take a handle or an id."""
    server = Server(
        reply(200, id="ID.0.m", model="m", version="2", state="running", attempts=1), reply(200, state="cancelled")
    )
    client = server.client()

    status = client.status("ID.0.m")
    state = client.cancel(RequestHandle.named("m", "mine"))

    assert (status.id, status.model, status.version, status.state) == ("ID.0.m", "m", 2, "running")
    assert status.fields["attempts"] == 1
    assert not status.has_ended
    assert state == "cancelled"
    assert server.paths == ["GET /v1/requests/ID.0.m", "DELETE /v1/models/m/requests/mine"]


@pytest.mark.parametrize(("status", "ready"), [(200, True), (400, False), (404, False), (503, False)])
def test_readiness_is_a_question_not_an_error(status: int, *, ready: bool) -> None:
    """A model that is not ready yet is no failure, and is not asked twice."""
    server = Server(httpx.Response(status))

    assert server.client().is_ready("m") is ready
    assert server.client().is_ready() is ready
    assert server.paths == ["GET /v2/models/m/ready", "GET /v2/health/ready"]


def test_readiness_needs_a_gateway() -> None:
    """Where nobody answers, nobody can say that the model is not ready."""
    with pytest.raises(errors.Unreachable):
        Server(httpx.ConnectError("refused")).client().is_ready("m")


@pytest.mark.parametrize(("outcome", "live"), [(httpx.Response(200), True), (httpx.ConnectError("no"), False)])
def test_liveness(outcome: Scripted, *, live: bool) -> None:
    """A gateway that can't be reached is not live."""
    assert Server(outcome).client().is_live() is live


def test_metadata() -> None:
    """The metadata names the inputs and outputs of a model."""
    x = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    metadata = Server(reply(200, name="m", versions=["1"], inputs=[x], outputs=[])).client().metadata("m")

    assert (metadata.name, metadata.versions, metadata.inputs[0].shape) == ("m", ("1",), (-1, 2))


def test_a_tensor_says_its_datatype_itself() -> None:
    """BF16 has no numpy type: a tensor is sent as it is, under the input's name."""
    server = Server(answer())

    server.client().infer("m", {"x": from_numpy("other", X, "BF16")})

    sent = server.requests[0]
    header = json.loads(sent.content[: int(sent.headers["Inference-Header-Content-Length"])])
    assert [(i["name"], i["datatype"]) for i in header["inputs"]] == [("x", "BF16")]


def headers_of(requests: Iterable[httpx.Request], name: str) -> list[str]:
    return [request.headers[name] for request in requests]


async def test_the_asynchronous_client_does_the_same() -> None:
    """One description of each call; the other client awaits."""
    server = Server(reply(503, {"Retry-After": "2"}, error="busy"), accepted(), reply(202, state="queued"), answer())

    async def sleep(seconds: float) -> None:
        server.sleep(seconds)

    async with qinfer.AsyncClient(
        "http://gateway", transport=httpx.MockTransport(server), clock=server.clock, sleep=sleep
    ) as client:
        handle = await client.submit("m", {"x": X}, idempotency_key="k")
        result = await client.result(handle)

    assert result["y"].tolist() == [4.0]
    assert headers_of(server.requests[:2], "Idempotency-Key") == ["k", "k"]
    assert len(server.pauses) == 2
