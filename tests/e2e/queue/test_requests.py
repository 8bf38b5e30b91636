"""Asynchronous requests against the whole server: real workers, a real queue."""

import json
from typing import Any

import httpx

from tests.e2e.conftest import Stack

BODY: dict[str, Any] = {
    "id": "e2e",
    "inputs": [
        {"name": name, "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]} for name in ("a", "b")
    ],
}
SUBMIT = "/v1/models/add_sub/requests"


def test_the_result_is_what_the_synchronous_call_says(stack: Stack) -> None:
    """Waited for by poll, by `Prefer`, and followed by its events."""
    with httpx.Client(base_url=f"http://{stack.address}", timeout=30) as client:
        expected = client.post("/v2/models/add_sub/infer", json=BODY).json()
        record = client.post(SUBMIT, json=BODY).json()

        polled = client.get(record["links"]["result"] + "?wait=20")
        preferred = client.post("/v2/models/add_sub/infer", json=BODY, headers={"prefer": "wait=20"})
        events = client.get(record["links"]["events"]).text

    assert (polled.status_code, polled.json()) == (200, expected)
    assert (preferred.status_code, preferred.json()) == (200, expected)
    assert json.loads(events.split("data: ")[1])["state"] == "succeeded"


def test_many_are_accepted_and_all_end(stack: Stack) -> None:
    """Each once, whoever submits it twice."""
    with httpx.Client(base_url=f"http://{stack.address}", timeout=30) as client:
        headers = [{"request-id": f"row-{number % 100}"} for number in range(200)]
        records = [client.post(SUBMIT, json=BODY, headers=one).json() for one in headers]

        ends = {record["id"]: client.get(record["links"]["result"] + "?wait=20").status_code for record in records}

    assert ends == {f"row-{number}": 200 for number in range(100)}
