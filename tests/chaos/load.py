"""Clients with numbered requests, synchronous and asynchronous, and what they saw of them.

Each behaves as behind a load balancer: where a gateway does not answer, or answers that it can't now, it goes to the
next one, with the same number and the same id. Pauses bound the rate, so that the machine has time for the rest.
"""

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from tests.chaos.receiver import Receiver
from tests.chaos.verdict import TERMINAL, Call, Ledger, Sighting, Wish, expected

FAST, SLOW = "fast", "slow"

_AGAIN = {429, 503}
_CLIENT_TIMEOUT_S = 40.0
"""Far more than leases and restarts can take: who waits longer waits for something that was lost."""
_LAST_TRIES_S = 60.0
"""So long after the end of the load requests are handed in again, at most."""
_PAUSE_S = 0.1
_SYNCHRONOUS_CLIENTS, _SYNCHRONOUS_PAUSE_S = 12, 0.08
_SUBMITTERS, _SUBMIT_PAUSE_S = 4, 0.15
_READERS = 24
_WISHES = (Wish.ANSWER,) * 7 + (Wish.CANCEL, Wish.EXPIRE)
_WEBHOOKS = 0.2  # of all asynchronous requests
_OTHERS = 0.33
_WAIT_S = 5
_HURRY_S = 2.0


def body_of(number: int) -> bytes:
    """Returns the request whose answer is 2n + 1."""
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": "FP32", "data": [value]}
        for name, value in (("a", number), ("b", number + 1))
    ]
    return json.dumps({"inputs": inputs, "outputs": [{"name": "sum"}]}).encode()


def infer_path(model: str) -> str:
    """Returns where to ask a model; with its version, for without one a model that no live worker has is 404."""
    return f"/v2/models/{model}/versions/1/infer"


def numbered(number: int, width: int) -> tuple[dict[str, str], bytes]:
    """Returns headers and body of a request with so many numbers in each input, in binary."""
    nbytes = 4 * width
    inputs = [
        {"name": name, "shape": [1, width], "datatype": "FP32", "parameters": {"binary_data_size": nbytes}}
        for name in "ab"
    ]
    head = json.dumps({"inputs": inputs, "outputs": [{"name": "sum", "parameters": {"binary_data": True}}]}).encode()
    tensors = (np.full(width, value, "<f4").tobytes() for value in (number, number + 1))
    return {"Inference-Header-Content-Length": str(len(head))}, head + b"".join(tensors)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a gateway answered."""

    status: int
    headers: httpx.Headers
    text: str

    @property
    def value(self) -> float | None:
        """The first number of an answer."""
        found = json.loads(self.text) if self.status == 200 else {}
        return float(found["outputs"][0]["data"][0]) if found.get("outputs") else None


@dataclass(slots=True)
class Habits:
    """How clients behave.

    Attributes:
        others: Models that a third of the asynchronous requests ask for, beside `fast` and `slow`.
        pace: Pauses are so many times as long; it may change meanwhile.
        patience_s: Longest time that an answer may take.
    """

    others: Sequence[str] = ()
    pace: float = 1.0
    patience_s: float = _CLIENT_TIMEOUT_S


class Clients:
    """See the module docstring.

    Args:
        urls: Where the gateways are.
        ledger: Where everything that is seen is written.
        seed: Decides what each number asks for.
        receiver: Where webhooks go.
        habits: How they behave.
    """

    def __init__(
        self, urls: Sequence[str], ledger: Ledger, seed: int, receiver: Receiver, habits: Habits | None = None
    ) -> None:
        self._urls = urls
        self._habits = habits or Habits()
        self.explain: Callable[[], str] = lambda: ""
        """Says, blocking, who holds what when a request has no answer."""
        self._ledger = ledger
        self._receiver = receiver
        self._with_webhooks: dict[int, Call] = {}
        receiver.note = self._note_webhook
        self._rng = random.Random(seed)
        self._numbers = iter(range(1, 8_000_000))  # float32 has 2n + 1 exactly
        self._turn = 0
        self._is_over = asyncio.Event()
        self._is_too_late = asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(timeout=self._habits.patience_s, limits=limits)

    async def run(self) -> None:
        """Sends until `stop`; then every request that was begun is carried to its end."""
        async with asyncio.TaskGroup() as group:
            readers = asyncio.Semaphore(_READERS)
            for _ in range(_SYNCHRONOUS_CLIENTS):
                group.create_task(self._ask_on())
            for _ in range(_SUBMITTERS):
                group.create_task(self._submit_on(group, readers))

    def stop(self) -> None:
        """Lets no new request begin; what is still refused long after that is given up."""
        self._is_over.set()
        asyncio.get_running_loop().call_later(_LAST_TRIES_S, self._is_too_late.set)

    async def close(self) -> None:
        await self._http.aclose()

    async def read_all(self) -> None:
        """Reads every accepted request's result and record until each was seen twice, however long that takes."""
        self._is_too_late = asyncio.Event()
        calls = iter([call for call in self._ledger.calls if call.link])

        async def read() -> None:
            for call in calls:
                for _ in range(max(2 - len(call.sightings), 1)):
                    await self._read(call, wait_s=0)
                await self._read_record(call)

        async with asyncio.TaskGroup() as group:
            for _ in range(_READERS):
                group.create_task(read())

    async def _ask_on(self) -> None:
        while not self._is_over.is_set():
            number = next(self._numbers)
            model = SLOW if self._rng.random() < 0.3 else FAST
            reply = await self._send("POST", infer_path(model), body_of(number))
            self._note_answer(number, reply)
            await self._pause(_SYNCHRONOUS_PAUSE_S)

    def _note_answer(self, number: int, reply: Reply) -> None:
        if reply.status == 500:
            self._ledger.failures.append(reply.text[:200])
        elif reply.status != 200 or reply.value != expected(number):
            self._ledger.problems.append(f"{number} was answered with {reply.status} {reply.text[:200]}")
        else:
            self._ledger.answered += 1

    async def _submit_on(self, group: asyncio.TaskGroup, readers: asyncio.Semaphore) -> None:
        while not self._is_over.is_set():
            call = Call(number=next(self._numbers), wish=self._rng.choice(_WISHES))
            if self._rng.random() < _WEBHOOKS:
                call.webhook = self._receiver.url_of(call.number)
                self._with_webhooks[call.number] = call
            self._ledger.calls.append(call)
            await self._submit(call)
            if call.wish is Wish.CANCEL or (call.link and not readers.locked()):
                group.create_task(self._follow(call, readers))
            await self._pause(_SUBMIT_PAUSE_S)

    async def _pause(self, mean_s: float) -> None:
        await asyncio.sleep(mean_s * self._habits.pace * self._rng.uniform(0.5, 1.5))

    async def _submit(self, call: Call) -> None:
        model = SLOW if self._rng.random() < (0.25 if call.wish is Wish.ANSWER else 0.8) else FAST
        if self._habits.others and self._rng.random() < _OTHERS:
            model = self._rng.choice(self._habits.others)
        name = "Request-Id" if call.number % 2 else "Idempotency-Key"
        headers = {name: f"request-{call.number}"}
        if call.wish is Wish.EXPIRE:
            headers["Request-Timeout"] = f"{self._rng.uniform(0.02, 0.6):.3f}"
        if call.webhook:
            headers["Webhook-Url"] = call.webhook
        patience_s = _HURRY_S if call.wish is Wish.EXPIRE else math.inf
        reply = await self._send("POST", f"/v1/models/{model}/requests", body_of(call.number), headers, patience_s)
        if reply.status == 202:
            call.link = reply.headers["location"]
            call.accepted_s = asyncio.get_running_loop().time()
        elif reply.status in _AGAIN:  # refused: its time would not suffice
            self._ledger.calls.remove(call)
        else:
            self._ledger.problems.append(f"{call.number} was not accepted: {reply.status} {reply.text[:200]}")

    async def _follow(self, call: Call, readers: asyncio.Semaphore) -> None:
        """Reads until the request has ended; cancels it before, if that is the wish."""
        async with readers:
            if call.wish is Wish.CANCEL:
                await asyncio.sleep(self._rng.uniform(0, 0.2))
                reply = await self._send("DELETE", call.link)
                self._see_record(call, reply)
            while not self._is_over.is_set() and await self._read(call, wait_s=_WAIT_S) not in (*TERMINAL, "unknown"):
                pass

    async def _read(self, call: Call, *, wait_s: int) -> str:
        """Reads the result; returns the state that goes with it."""
        reply = await self._send("GET", f"{call.link}/result?wait={wait_s}" if wait_s else f"{call.link}/result")
        if reply.status == 202:
            return "running"
        if reply.status == 410 and call.wish is Wish.CANCEL:
            return "unknown"  # it had ended when the DELETE came, which has removed its result
        state: str = reply.headers.get("qinfer-request-state", "unknown")
        if reply.status != 200:
            call.reason = f"{reply.status} {reply.text[:200]}"
        self._see(call, state, reply.value)
        return state

    async def _read_record(self, call: Call) -> None:
        self._see_record(call, await self._send("GET", call.link))

    def _see_record(self, call: Call, reply: Reply) -> None:
        if reply.status != 200:
            call.reason = f"{reply.status} {reply.text[:200]}"
        self._see(call, json.loads(reply.text)["state"] if reply.status == 200 else "unknown")

    def _note_webhook(self, number: int, state: str) -> None:
        call = self._with_webhooks[number]
        call.told += 1
        self._see(call, state)

    def _see(self, call: Call, state: str, value: float | None = None) -> None:
        call.sightings.append(Sighting(asyncio.get_running_loop().time(), state, value))

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        patience_s: float = math.inf,
    ) -> Reply:
        """Sends a request to one gateway after the other until one takes it.

        After `patience_s` a refusal is returned too, and in the end status 0.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience_s
        while True:
            self._turn += 1
            url = self._urls[self._turn % len(self._urls)]
            try:
                reply = await self._http.request(method, url + path, content=content, headers=headers)
            except httpx.ReadTimeout:
                held = await asyncio.to_thread(self.explain)
                told = f"{method} {url}{path} was not answered within {self._habits.patience_s} s"
                self._ledger.problems.append(f"{told}; {held}" if held else told)
            except httpx.TransportError as error:
                self._ledger.refusals[type(error).__name__] += 1
            else:
                if reply.status_code not in _AGAIN or _is_outcome(reply) or loop.time() > until_s:
                    return Reply(reply.status_code, reply.headers, reply.text)
                self._note_refusal(reply)
            if self._is_too_late.is_set():
                return Reply(0, httpx.Headers(), "given up")
            await asyncio.sleep(_PAUSE_S)

    def _note_refusal(self, reply: httpx.Response) -> None:
        text = re.sub(r"[0-9.]+ s\b", "N s", reply.text.rpartition("] ")[2])[:60]
        self._ledger.refusals[f"{reply.status_code} {text}"] += 1
        if reply.headers.get("retry-after", "1").isdecimal() is False:
            self._ledger.problems.append(f"Retry-After is {reply.headers['retry-after']!r}")


def _is_outcome(reply: httpx.Response) -> bool:
    """Tells whether a refusal's status is how an asynchronous request has ended: an expired one is read as 503."""
    return "qinfer-request-state" in reply.headers
