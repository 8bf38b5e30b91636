"""A tenant that asks plainly beside attacks, and sees that nothing of its is seen, changed or refused."""

import http.client
import json
import threading
import time
from typing import Any, Self

import numpy as np

from qinfer.testing import wait_until
from tests.fuzz.outliers import Outliers
from tests.fuzz.server import WholeServer

ANSWER_S = 30.0
PAUSE_S = 0.02
PLAIN = "identity_fp32"
EVERY = 50
"""Plain requests for each look at what is kept: a stored result, and a sequence."""


class Beside:
    """Asks in a thread while the block runs.

    Args:
        server: The server.
        who: The tenant.

    Attributes:
        latencies_s: Of each plain request.
        wrong: What was not as it should be.
        outliers: Its slowest requests, explained.
    """

    def __init__(self, server: WholeServer, who: str = "acme") -> None:
        self._server, self._who = server, who
        self.latencies_s: list[float] = []
        self.wrong: list[str] = []
        self.outliers = Outliers(server, PLAIN)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._connection = http.client.HTTPConnection(server.http, timeout=ANSWER_S)
        self._stored: dict[str, float] = {}
        self._sum = 0.0

    def __enter__(self) -> Self:
        self.outliers.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2 * ANSWER_S)
        self._connection.close()
        self.outliers.__exit__()
        if not self.latencies_s:
            self.wrong.append("no request was answered")

    def more(self, count: int = 20) -> None:
        """Waits for so many more answers."""
        wanted = len(self.latencies_s) + count
        wait_until(lambda: len(self.latencies_s) >= wanted, 2 * ANSWER_S, "answers")

    def quantile_ms(self, quantile: float) -> float:
        """Returns a quantile of the latencies."""
        return float(np.quantile(self.latencies_s, quantile)) * 1000 if self.latencies_s else float("nan")

    def _run(self) -> None:
        number = 0
        while not self._over.wait(PAUSE_S):
            begin_s = time.monotonic()
            with self.outliers.watching(number):
                self._check(number)
            self.latencies_s.append(time.monotonic() - begin_s)
            number += 1
            if number % EVERY == 0:
                self._keep(number)

    def _check(self, number: int) -> None:
        reply = self._post(f"/v2/models/{PLAIN}/infer", infer("x", number))
        if value_of(reply) != number:
            self.wrong.append(f"{number}: {reply}"[:300])

    def _keep(self, number: int) -> None:
        """Has a result stored, reads one that was stored before, and takes a step of its sequence."""
        for identity, value in self._stored.items():
            reply = self._ask("GET", f"/v1/requests/{identity}/result?wait=10", None)
            if value_of(reply) != value:
                self.wrong.append(f"stored {value}: {reply}"[:300])
        status, body = self._post(f"/v1/models/{PLAIN}/requests", infer("x", number))
        self._stored = {body["id"]: float(number)} if status == 202 else {}
        if status != 202:
            self.wrong.append(f"{number} was not stored: {status} {body}"[:300])
        is_first = number == EVERY
        step = infer("INPUT", 1, {"sequence_id": 1000, "sequence_start": is_first})
        self._sum += 1
        reply = self._post("/v2/models/accumulator/infer", step)
        if value_of(reply) != self._sum:
            self.wrong.append(f"sum {self._sum}: {reply}"[:300])

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        headers = {"x-api-key": self._server.keys[self._who]}
        try:
            self._connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = self._connection.getresponse()
            return reply.status, json.loads(reply.read() or b"null")
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            return 0, repr(error)


def infer(name: str, value: float, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a plain infer request."""
    entry = {"name": name, "shape": [1, 1], "datatype": "FP32", "data": [float(value)]}
    return {"inputs": [entry], "parameters": parameters or {}}


def value_of(reply: tuple[int, Any]) -> float | None:
    """Returns the number in an answer; `None` where there is none."""
    status, body = reply
    return float(body["outputs"][0]["data"][0]) if status == 200 else None
