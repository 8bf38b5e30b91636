"""A steady load of asynchronous requests to models that add: number `n` asks for `n + 1`."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx


class Load(threading.Thread):
    """Submits requests to some models in turn, each again until it is accepted.

    Args:
        url: The gateway.
        models: The models, which add inputs `a` and `b` of four elements.
        pause_s: Between two requests.
        first: The number of its first request, which tells its requests from those of another load.

    Attributes:
        accepted: Number of a request → where it is.
    """

    def __init__(self, url: str, models: Sequence[str], pause_s: float = 0.0, first: int = 0) -> None:
        super().__init__(daemon=True)
        self.accepted: dict[int, str] = {}
        self._ended = threading.Event()
        self._url, self._models, self._pause_s, self._first = url, models, pause_s, first

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=15.0) as client:
            number = self._first
            while not self._ended.wait(self._pause_s):
                if (place := self._submit(client, number)) is None:
                    self._ended.wait(0.05)
                else:
                    self.accepted[number] = place
                    number += 1

    def stop(self) -> None:
        """Ends it, when what is under way is answered."""
        self._ended.set()
        if self.ident is not None:
            self.join(30.0)

    def _submit(self, client: httpx.Client, number: int) -> str | None:
        model, key = self._models[number % len(self._models)], {"idempotency-key": f"k{number}"}
        try:
            reply = client.post(f"/v1/models/{model}/requests", json=body(number), headers=key)
        except httpx.HTTPError:
            return None
        return reply.headers["location"] if reply.status_code in (200, 202) else None


def body(number: int) -> dict[str, Any]:
    values = (("a", float(number)), ("b", 1.0))
    return {"inputs": [{"name": n, "shape": [1, 4], "datatype": "FP32", "data": [v] * 4} for n, v in values]}


def wrong(url: str, accepted: Mapping[int, str]) -> dict[int, object]:
    """Waits for the ends of all requests; returns what did not end with its own sum."""
    found: dict[int, object] = {}
    with httpx.Client(base_url=url, timeout=40.0) as client:
        for number, place in accepted.items():
            reply = client.get(f"{place}/result?wait=30")
            if reply.status_code != 200:
                found[number] = reply.text
            elif (data := reply.json()["outputs"][0]["data"]) != [number + 1.0] * 4:
                found[number] = data
    return found
