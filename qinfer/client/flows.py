"""The client's calls as flows (`qinfer.client.steps`), without I/O.

Each step of a sequence has a number, so that it can be sent again after a broken connection: the server executes it
once, and answers a repetition with the stored response.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import randbelow
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import numpy as np

from qinfer.client.model_flows import Inputs, forget_datatypes, model_path, with_datatypes
from qinfer.client.results import Follower, InferResult, RequestHandle, RequestStatus
from qinfer.client.steps import BY_CODE, JSON, Flow, Pause, Policy, Problem, Send, call, encode_json, json_object, make
from qinfer.core.messages import Scalar
from qinfer.errors import (
    START_MISSING,
    Cancelled,
    DeadlineExceeded,
    InferenceFailed,
    InvalidRequest,
    OutputMismatch,
    QinferError,
    RequestError,
    RequestNotFound,
    ResultNotFound,
    SequenceEnded,
    Unreachable,
)
from qinfer.tensors import Tensor, from_numpy
from qinfer.wire.kserve_client import JSON_LENGTH_HEADER, decode_response, encode_request

Keys = Callable[[int, Inputs], str]

POLL_S = 20.0
"""Proxies cut idle connections, so gateways hold a result back no longer."""
EARLY_PAUSE_S = 0.5
"""Pause after a poll that the gateway answered early without a result."""

T = TypeVar("T")

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

_OWN = frozenset({"sequence_id", "sequence_start", "sequence_end", "qinfer_step"})


@dataclass(frozen=True, slots=True)
class Ask:
    """The arguments that `infer`, `submit` and `stream` share."""

    model: str
    inputs: Inputs
    version: int | None = None
    outputs: Sequence[str] | None = None
    parameters: Mapping[str, Scalar] | None = None
    priority: int = 0
    id: str | None = None
    timeout_s: float | None = None
    headers: Mapping[str, str] | None = None

    def send(self, path: str, headers: dict[str, str]) -> Send:
        """Encodes the request for one of the model's routes."""
        self._check_arguments()
        parameters = dict(self.parameters or {})
        if self.priority:
            parameters["priority"] = self.priority
        body, json_length = encode_request(
            [_to_tensor(name, value) for name, value in self.inputs.items()],
            outputs=self.outputs or (),
            parameters=parameters,
            client_id=self.id or "",
        )
        own = {JSON_LENGTH_HEADER: str(json_length), "Content-Type": "application/octet-stream"} | headers
        return Send("POST", path, checked_headers(self.headers) | own, body)

    def _check_arguments(self) -> None:
        """The gateway's errors would be about its own format."""
        if not isinstance(self.inputs, Mapping):
            raise InvalidRequest(f"inputs are of type {type(self.inputs).__name__}; make them a dict of arrays by name")
        if not all(isinstance(name, str) for name in self.inputs):
            raise InvalidRequest(f"inputs have the names {list(self.inputs)}; make each a text")
        # A text is a sequence of strings, too.
        if isinstance(self.outputs, str):
            raise InvalidRequest(f"outputs is the text '{self.outputs}'; make it a list of names")
        if not all(isinstance(name, str) for name in self.outputs or ()):
            raise InvalidRequest(f"outputs is {self.outputs!r}; make it a list of names")
        if self.parameters is not None and not isinstance(self.parameters, Mapping):
            raise InvalidRequest(f"parameters are of type {type(self.parameters).__name__}; make them a dict by name")
        if not isinstance(self.priority, int) or not 0 <= self.priority < 2**64:
            raise InvalidRequest(f"priority is {self.priority!r}; make it 0 or a positive integer below 2**64")
        if self.id is not None and not isinstance(self.id, str):
            raise InvalidRequest(f"id is {self.id!r}; make it a text")


@dataclass(frozen=True, slots=True)
class SubmitArguments:
    """The arguments of `submit` besides those of `infer`."""

    idempotency_key: str | None = None
    request_id: str | None = None
    timeout_s: float | None = None
    webhook: str | None = None

    def headers(self) -> dict[str, str]:
        """Returns the headers; a submission without id and key gets its own key."""
        is_named = self.idempotency_key is not None or self.request_id is not None
        found = {
            "Idempotency-Key": self.idempotency_key if is_named else str(uuid4()),
            "Request-Id": self.request_id,
            "Request-Timeout": None if self.timeout_s is None else _seconds(self.timeout_s),
            "Webhook-Url": self.webhook,
        }
        return {name: header_value(name, value) for name, value in found.items() if value is not None}


def header_value(name: str, value: str) -> str:
    """Checks a header's value; the error does not show it, because it may be secret."""
    if not isinstance(value, str):
        raise InvalidRequest(f"the value for {name} is of type {type(value).__name__}; make it a text")
    if not (value.isascii() and value.isprintable() and value.strip() == value and value):
        raise InvalidRequest(f"the value for {name} has to be printable ASCII text without spaces around it")
    return value


def checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Checks the caller's headers."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise InvalidRequest(f"headers are of type {type(headers).__name__}; make them a dict by name")
    for name in headers:
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidRequest(f"{name!r} is not a header name; use letters, digits and hyphens")
    return {name: header_value(name, value) for name, value in headers.items()}


def infer(policy: Policy, ask: Ask) -> Flow[InferResult]:
    """Sends a request to a model, and returns the answer."""
    policy = policy.within(ask.timeout_s)
    parameters = ask.parameters or {}
    is_step = "sequence_id" in parameters and "qinfer_step" in parameters
    if "sequence_id" in parameters and not is_step:
        # The server would take a repeated step without a number for another one.
        policy = policy._replace(max_retries=0)
    ask = yield from _typed(policy, ask)
    send = infer_request(ask)._replace(repeats=policy.resend or is_step)
    return (yield from _refreshing(policy, ask, send_encoded(policy, send)))


def infer_request(ask: Ask) -> Send:
    """Encodes a request with one answer."""
    return ask.send(f"{model_path(ask.model, ask.version)}/infer", {})


def send_encoded(policy: Policy, send: Send) -> Flow[InferResult]:
    """Sends an encoded request to a model, and returns the answer."""
    return _result_of((yield from call(policy, send)))


def infer_stream(policy: Policy, ask: Ask) -> Flow[httpx.Response]:
    """Sends a request to a model; returns the reply with its stream of responses."""
    policy = policy.within(ask.timeout_s)
    ask = yield from _typed(policy, ask)
    send = ask.send(f"{model_path(ask.model, ask.version, 'v1')}/infer_stream", {})
    return (yield from _refreshing(policy, ask, call(policy, send._replace(repeats=policy.resend, streams=True))))


def generate(policy: Policy, ask: Ask) -> Flow[dict[str, Any]]:
    """Sends free-form JSON to a model, and returns the answer's object."""
    policy = policy.within(ask.timeout_s)
    reply = yield from call(policy, _generate_request(policy, ask, "generate"))
    return json_object(policy, reply)


def generate_stream(policy: Policy, ask: Ask) -> Flow[httpx.Response]:
    """Sends free-form JSON to a model; returns the reply with its stream of responses."""
    policy = policy.within(ask.timeout_s)
    return (yield from call(policy, _generate_request(policy, ask, "generate_stream")._replace(streams=True)))


def submit(policy: Policy, ask: Ask, submission: SubmitArguments) -> Flow[RequestHandle]:
    """Submits a request, and returns its handle once the gateway has accepted it."""
    path = f"{model_path(ask.model, ask.version, 'v1')}/requests"
    headers = submission.headers()
    ask = yield from _typed(policy, ask)
    send = ask.send(path, headers)._replace(hedges=True)
    reply = yield from _refreshing(policy, ask, call(policy, send))
    request_id = str(json_object(policy, reply).get("id", ""))
    location = urlsplit(reply.headers.get("Location", "")).path
    if not request_id:
        raise Unreachable(f"the server at {policy.url} accepted the request without an id; is it a gateway?")
    handle = RequestHandle.of(request_id)
    return replace(handle, url=location) if location.startswith("/v1/") else handle


def result(policy: Policy, handle: RequestHandle, wait_s: float) -> Flow[InferResult]:
    """Waits for a request's end, and returns its result."""
    if not isinstance(wait_s, int | float) or math.isnan(wait_s):
        raise InvalidRequest(f"wait_s is {wait_s!r}; make it a number of seconds, 0 to only look, or math.inf")
    now_s = policy.clock.monotonic_s
    ends_s = now_s() + wait_s

    def explain(problem: Problem, left_s: float) -> Flow[Problem]:
        return _ending(policy._replace(timeout_s=left_s), handle, problem)

    while True:
        asked_at = now_s()
        hold_s = min(POLL_S, max(0.0, ends_s - asked_at))
        send = Send("GET", f"{handle.url}/result?wait={hold_s:g}", {}, hold_s=hold_s, hedges=True)
        reply = yield from call(policy, send, not_found=RequestNotFound, explain=explain)
        if reply.status_code != 202:
            return _result_of(reply)
        if now_s() >= ends_s or not hold_s:
            state = json_object(policy, reply).get("state", "not ended")
            raise ResultNotFound(f"request '{handle.id}' is {state}; ask again later, or with a longer wait_s")
        if now_s() - asked_at < hold_s / 2:
            yield Pause(min(EARLY_PAUSE_S, ends_s - now_s()))


def follow(policy: Policy, handle: RequestHandle, follower: Follower, tries: int) -> Flow[httpx.Response]:
    """Returns the reply with the events after those that `follower` has seen; a repeated try pauses first."""
    if tries:
        yield Pause(EARLY_PAUSE_S)
    headers = {"Last-Event-ID": follower.seen} if follower.seen else {}
    send = Send("GET", f"{handle.url}/events", headers, streams=True)
    reply = yield from call(policy, send, not_found=RequestNotFound)
    follower.has_ended = reply.status_code == 204
    return reply


def infer_or_resume(policy: Policy, ask: Ask, key: str | None) -> Flow[InferResult]:
    """Sends a request; with a key it is asynchronous, and its result may exist already."""
    if key is None:
        return (yield from infer(policy, ask))
    handle = yield from submit(policy, ask, SubmitArguments(key))
    return (yield from result(policy, handle, math.inf))


def status(policy: Policy, handle: RequestHandle) -> Flow[RequestStatus]:
    """Returns the state of a request."""
    reply = yield from call(policy, Send("GET", handle.url, {}, hedges=True), not_found=RequestNotFound)
    return status_of(json_object(policy, reply), handle.id)


def status_of(fields: Mapping[str, Any], request_id: str) -> RequestStatus:
    """Returns the state that a gateway's answer tells, of `request_id` unless it names another."""
    version = str(fields.get("version", ""))
    return RequestStatus(
        id=str(fields.get("id", request_id)),
        model=str(fields.get("model", "")),
        version=int(version) if version.isdecimal() else 0,
        state=str(fields.get("state", "")),
        fields=fields,
    )


def cancel(policy: Policy, handle: RequestHandle) -> Flow[str]:
    """Cancels a request; returns its state, perhaps an earlier end."""
    reply = yield from call(policy, Send("DELETE", handle.url, {}), not_found=RequestNotFound)
    return str(json_object(policy, reply).get("state", ""))


def _ending(policy: Policy, handle: RequestHandle, problem: Problem) -> Flow[Problem]:
    """Distinguishes the failure of a request from a failure to read its result, which may share a status."""
    try:
        found = yield from status(policy, handle)
    except QinferError:
        return problem
    ended = {"expired": DeadlineExceeded, "cancelled": Cancelled}.get(found.state)
    if ended is None and found.state == "failed":
        error = found.fields.get("error")
        code = str(error.get("code", "")) if isinstance(error, dict) else ""
        ended = BY_CODE.get(code, InferenceFailed)
    return problem if ended is None else Problem(_final(ended, problem.error.message))


def _final(error_class: type[QinferError], message: str) -> QinferError:
    """The error is never retryable: a repetition would only read the result again."""
    return InferenceFailed(message) if error_class.retryable else make(error_class, message)


def _typed(policy: Policy, ask: Ask) -> Flow[Ask]:
    inputs = yield from with_datatypes(policy, ask.model, ask.version, ask.inputs)
    return ask if inputs is ask.inputs else replace(ask, inputs=inputs)


def _refreshing(policy: Policy, ask: Ask, flow: Flow[T]) -> Flow[T]:
    """After a refusal, the next call reads the model's datatypes again."""
    try:
        return (yield from flow)
    except InvalidRequest:
        forget_datatypes(policy, ask.model, ask.version)
        raise


def _generate_request(policy: Policy, ask: Ask, route: str) -> Send:
    if not isinstance(ask.inputs, Mapping):
        raise InvalidRequest(f"inputs are of type {type(ask.inputs).__name__}; make them a dict by name")
    body: dict[str, Any] = dict(ask.inputs)
    if ask.parameters:
        body["parameters"] = dict(ask.parameters)
    if ask.id:
        body["id"] = ask.id
    content = encode_json("the inputs", body, _plain)
    path = f"{model_path(ask.model, ask.version)}/{route}"
    return Send("POST", path, checked_headers(ask.headers) | JSON, content, repeats=policy.resend)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")


def _seconds(value: float) -> str:
    try:
        return f"{value:.6f}".rstrip("0").rstrip(".")
    except (TypeError, ValueError):
        raise InvalidRequest(f"timeout_s is {value!r}; make it a number of seconds") from None


def _to_tensor(name: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value if value.name == name else Tensor(name, value.datatype, value.shape, value.data)
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidRequest(f"input '{name}' is a masked array; fill it first: array.filled(value)")
    if not isinstance(value, np.ndarray):
        raise InvalidRequest(
            f"input '{name}' is of type {type(value).__name__}; make it a numpy array, or lists of numbers or texts"
        )
    try:
        return from_numpy(name, value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a text in input '{name}' can't be written as UTF-8: {error.reason}") from None


def _result_of(reply: httpx.Response) -> InferResult:
    if reply.content.startswith(b'{"responses":'):
        raise InvalidRequest("the request is one to a decoupled model, which has several responses; read responses()")
    length = reply.headers.get(JSON_LENGTH_HEADER, "")
    response, client_id = decode_response(reply.content, int(length) if length.isdecimal() else None)
    return InferResult(response, client_id)


class StepFlags:
    """The flags and numbers of a sequence's steps; pure."""

    def __init__(self, policy: Policy, model: str, version: int | None, correlation_id: int | str | None) -> None:
        self._policy, self._model, self._version = policy, model, version
        self.correlation_id = _checked(correlation_id)
        self._number = 1
        self._has_ended = False
        self._unanswered: Send | None = None

    def infer(
        self, inputs: Inputs, outputs: Sequence[str] | None, parameters: Mapping[str, Scalar] | None, *, end: bool
    ) -> Flow[InferResult]:
        """Sends the next step, and returns its answer."""
        inputs = yield from with_datatypes(self._policy, self._model, self._version, inputs)
        send = self._request(inputs, outputs, parameters or {}, end=end)
        self._unanswered = send
        try:
            result = yield from send_encoded(self._policy, send)
        except (InferenceFailed, OutputMismatch):
            # The failure is the step's answer; the state is the one before the step.
            self._complete_step(end=end)
            raise
        except (RequestError, SequenceEnded) as error:
            self._unanswered = None
            if self._number > 1 and error.message.endswith(START_MISSING):
                raise SequenceEnded(self._over("the server no longer has it")) from None
            raise
        self._complete_step(end=end)
        return result

    def _request(
        self, inputs: Inputs, outputs: Sequence[str] | None, parameters: Mapping[str, Scalar], *, end: bool
    ) -> Send:
        if self._has_ended:
            raise InvalidRequest(self._over("a step had end=True"))
        if own := sorted(_OWN & set(parameters)):
            raise InvalidRequest(f"the sequence sets these parameters itself: {', '.join(own)}")
        flags = sequence_parameters(self.correlation_id, start=self._number == 1, end=end)
        flags["qinfer_step"] = self._number
        send = infer_request(Ask(self._model, inputs, self._version, outputs, {**parameters, **flags}))
        if self._unanswered not in (None, send):
            raise InvalidRequest(
                f"step {self._number} of sequence {self.correlation_id} has no answer yet, and may be executed: send "
                "it again with the same inputs, or begin another sequence"
            )
        return send

    def _complete_step(self, *, end: bool) -> None:
        self._number += 1
        self._has_ended = end
        self._unanswered = None

    def _over(self, why: str) -> str:
        return f"sequence {self.correlation_id} of model '{self._model}' has ended: {why}; begin another one"


def sequence_parameters(correlation_id: int | str, *, start: bool = False, end: bool = False) -> dict[str, Scalar]:
    """Returns the parameters of a request that is a step of a sequence (reference §3.4)."""
    flags: dict[str, Scalar] = {"sequence_id": correlation_id}
    flags |= {"sequence_start": True} if start else {}
    return flags | ({"sequence_end": True} if end else {})


def _checked(correlation_id: int | str | None) -> int | str:
    if correlation_id is None:
        return 1 + randbelow(2**63 - 1)
    is_number = type(correlation_id) is int and 0 < correlation_id < 2**64
    if not is_number and not (isinstance(correlation_id, str) and correlation_id):
        raise InvalidRequest(f"correlation_id is {correlation_id!r}; make it a positive integer below 2**64, or a text")
    return correlation_id
