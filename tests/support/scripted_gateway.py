"""A gateway that answers by a script: what the tests of the client's calls run against."""

from typing import Any

import httpx
import numpy as np

import qinfer
from qinfer.client.connection import options
from qinfer.client.steps import Policy
from qinfer.core.messages import Response
from qinfer.tensors import from_numpy
from qinfer.testing import FakeClock
from qinfer.wire.kserve_json import encode_infer
from qinfer.wire.outputs import OutputPlan

X = np.array([[1.0, 2.0]], dtype=np.float32)
Scripted = httpx.Response | Exception


class Server:
    """Answers by a list of replies, and keeps what it was sent; the last reply is given again and again."""

    def __init__(self, *replies: Scripted) -> None:
        self._replies = list(replies)
        self.requests: list[httpx.Request] = []
        self.clock = FakeClock()
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)

    def client(self, url: str | list[str] = "http://gateway", **options: Any) -> qinfer.Client:
        transport = httpx.MockTransport(self)
        options = {"timeout_s": 60.0, **options}
        return qinfer.Client(url, transport=transport, clock=self.clock, sleep=self.sleep, **options)

    @property
    def paths(self) -> list[str]:
        return [f"{request.method} {request.url.raw_path.decode()}" for request in self.requests]


def policy_of(url: str | list[str] = "http://gateway", **limits: Any) -> Policy:
    given = {"api_key": "", "headers": None, "ca_file": None, "resend": True, "retry_share": None, **limits}
    given.setdefault("clock", FakeClock())
    return options(url, **given)[1]


def answer(value: float = 4.0) -> httpx.Response:
    output = from_numpy("y", np.array([value], np.float32))
    encoded = encode_infer(
        Response(request_id="r", model="m", version=1, outputs=(output,)), "7", OutputPlan(binary=True)
    )
    return httpx.Response(
        200, content=encoded.body, headers={"Inference-Header-Content-Length": str(encoded.json_length)}
    )


def reply(status: int, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.Response(status, json=body, headers=headers)


def accepted() -> httpx.Response:
    return reply(202, {"Location": "/v1/requests/ID.0.m"}, id="ID.0.m", state="queued")
