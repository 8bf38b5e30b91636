"""Hedging: when a request is sent a second time, whose answer counts, and what becomes of the other one."""

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from queue import Queue
from threading import Event, Thread
from typing import Any

import httpx
import pytest

import qinfer
from qinfer import errors
from qinfer.client import flows
from qinfer.client.connection import Pool
from qinfer.client.flows import Ask, SubmitArguments
from qinfer.client.hedging import LEAST_LATENCIES, Attempt, HedgedTasks, HedgedThreads, Hedging, is_answer
from qinfer.client.results import RequestHandle
from qinfer.client.steps import Flow, Outcome, Send
from tests.support.scripted_gateway import X, policy_of

OK, BUSY, BROKEN = httpx.Response(200), httpx.Response(503), httpx.ReadError("cut")
HANDLE = RequestHandle.of("ID.0.m")
GATEWAYS = ["http://gateway", "http://other"]
WITHIN_S = 20.0
LATE_S = 0.01
CONNECTED_S = 0.3
"""The hanging gateway has read its request by then."""


def get(**fields: Any) -> Send:
    return Send("GET", "/v1/requests/ID", {}, base=GATEWAYS[0], timeout_s=60.0, hedges=True)._replace(**fields)


def hedging(after: Any = LATE_S, **limits: Any) -> Hedging:
    return Hedging(after, policy_of(GATEWAYS, timeout_s=60.0, max_retries=None, **limits))


# --- when ---


@pytest.mark.parametrize("after", [0, -1.0, float("inf"), True, "p99"])
def test_a_time_that_is_none(after: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="hedge_after is"):
        qinfer.Client("http://gateway", hedge_after=after)


def test_only_what_is_executed_once_is_hedged() -> None:
    policy = policy_of(timeout_s=60.0, max_retries=None)
    ask = Ask("m", {"x": X})

    def first(flow: Flow[Any]) -> bool:
        send = next(flow)
        assert isinstance(send, Send)
        return hedging().after_s(send) is not None

    assert first(flows.submit(policy, ask, SubmitArguments()))
    assert first(flows.result(policy, HANDLE, 0.0))
    assert first(flows.status(policy, HANDLE))
    assert first(flows.infer_or_resume(policy, ask, "key"))
    assert not first(flows.infer(policy, ask))
    assert not first(flows.infer(policy, Ask("m", {"x": X}, parameters={"sequence_id": 1, "qinfer_step": 1})))
    assert not first(flows.generate(policy, ask))
    assert not first(flows.cancel(policy, HANDLE))


def test_a_request_that_is_held_back_is_late_after_that() -> None:
    assert hedging(0.5).after_s(get(hold_s=20.0)) == 20.5
    assert hedging(0.5).after_s(get(timeout_s=0.4)) is None, "its time is over before"


def test_p95_is_of_the_latest_answers_of_its_method() -> None:
    one = hedging("p95")
    clock = one._policy.clock

    def answered(send: Send, seconds: float, outcome: Outcome = OK) -> None:
        began_s = one.now_s()
        clock.advance(seconds)  # type: ignore[attr-defined]
        one.record_latency(send, outcome, began_s)

    for n in range(1, LEAST_LATENCIES):
        answered(get(), n / 10)
    answered(get(), 99.0, BUSY)
    answered(get(hold_s=20.0), 99.0)
    assert one.after_s(get()) is None, "too few"

    answered(get(), 2.0)

    assert one.after_s(get()) == pytest.approx(1.9)
    assert one.after_s(get(method="POST")) is None
    for _ in range(1000):
        answered(get(), 0.1)
    assert one.after_s(get()) == pytest.approx(0.1)


def test_the_second_request_goes_to_another_gateway() -> None:
    both = ["http://a", "http://b"]
    client = qinfer.Client(both)
    one = Hedging(1.0, client._policy)

    found = [one.second(get(base=base)) for base in both]

    assert [send.base for send in found if send] == ["http://b", "http://a"]


def test_a_second_request_takes_a_token_of_the_budget() -> None:
    one = hedging(retry_share=0.0)
    sent = 0
    while one.second(get()) is not None:
        sent += 1

    assert sent == 100


@pytest.mark.parametrize(
    ("outcome", "ends"),
    [(OK, True), (httpx.Response(404), True), (BUSY, False), (httpx.Response(429), False), (BROKEN, False)],
)
def test_what_another_gateway_may_do_better_is_no_answer(outcome: Outcome, ends: bool) -> None:  # noqa: FBT001
    assert is_answer(outcome) is ends


# --- whose answer counts ---

Race = Callable[..., Outcome]


class Script:
    """Outcomes of the first and the second request, in an order that the test decides.

    Args:
        order: Which of them end, in order: 0 = the first; the others never do.
        outcomes: Their outcomes.
    """

    def __init__(self, order: list[int], *outcomes: Outcome | Exception) -> None:
        self.outcomes = outcomes
        self.cancelled: list[int] = []
        self.bases: list[str] = []
        self.turns = {number: place for place, number in enumerate(order)}
        self.reached = [Event() for _ in range(len(order) + 1)]
        self.reached[0].set()

    def outcome(self, number: int) -> Outcome:
        found = self.outcomes[number]
        if isinstance(found, errors.QinferError):
            raise found
        assert not isinstance(found, Exception) or isinstance(found, httpx.RequestError)
        return found


def in_tasks(one: Hedging, script: Script) -> Outcome:
    async def main() -> Outcome:
        reached = [asyncio.Event() for _ in script.reached]
        reached[0].set()
        both = asyncio.Event()

        async def transmit(_: httpx.AsyncClient, send: Send) -> Outcome:
            number = GATEWAYS.index(send.base)
            script.bases.append(send.base)
            if number == len(script.outcomes) - 1:
                both.set()
            try:
                await both.wait()
                if number not in script.turns:
                    await asyncio.Event().wait()
                turn = script.turns[number]
                await reached[turn].wait()
                asyncio.get_running_loop().call_soon(reached[turn + 1].set)
                return script.outcome(number)
            except asyncio.CancelledError:
                script.cancelled.append(number)
                raise

        return await HedgedTasks(one, Pool[Any](object), transmit).exchange(get())

    return asyncio.run(main())


class Connection:
    """A connection whose socket sets an event when it is shut down."""

    def __init__(self, cancelled: Event) -> None:
        self._cancelled = cancelled

    def get_extra_info(self, name: str) -> "Connection":
        return self

    def shutdown(self, how: int) -> None:
        self._cancelled.set()


def in_threads(one: Hedging, script: Script) -> Outcome:
    both = Event()

    def transmit(_: httpx.Client, send: Send, extensions: Mapping[str, Any]) -> Outcome:
        cancelled = Event()
        extensions["trace"]("connection.connect_tcp.complete", {"return_value": Connection(cancelled)})
        number = GATEWAYS.index(send.base)
        script.bases.append(send.base)
        if number == len(script.outcomes) - 1:
            both.set()
        assert both.wait(WITHIN_S)
        if number not in script.turns:
            assert cancelled.wait(WITHIN_S)
            script.cancelled.append(number)
            done.set()
            return BROKEN
        turn = script.turns[number]
        assert script.reached[turn].wait(WITHIN_S)
        script.reached[turn + 1].set()
        return script.outcome(number)

    done = Event()
    try:
        return HedgedThreads(one, Pool[Any](object), transmit).exchange(get())
    finally:
        if len(script.turns) < len(script.outcomes):
            assert done.wait(WITHIN_S)


@pytest.fixture(params=[in_tasks, in_threads])
def race(request: pytest.FixtureRequest) -> Race:
    found: Race = request.param
    return found


def test_an_answer_in_time_is_alone(race: Race) -> None:
    script = Script([0], OK)

    assert race(hedging(WITHIN_S), script) is OK
    assert len(script.bases) == 1


def test_the_second_answer_counts_where_the_first_is_late(race: Race) -> None:
    """The first one is cancelled."""
    script = Script([1], BROKEN, OK)

    assert race(hedging(), script) is OK
    assert script.cancelled == [0]


def test_the_first_answer_counts_where_it_comes_first(race: Race) -> None:
    script = Script([0], OK, BROKEN)

    assert race(hedging(), script) is OK
    assert script.cancelled == [1]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("failure", [BUSY, BROKEN])
def test_a_failure_waits_for_the_other_answer(race: Race, order: list[int], failure: Outcome) -> None:
    outcomes: list[Outcome] = [OK, OK]
    outcomes[order[0]] = failure

    assert race(hedging(), Script(order, *outcomes)) is OK


def test_where_both_fail_the_first_failure_counts(race: Race) -> None:
    assert race(hedging(), Script([1, 0], BUSY, BROKEN)) is BUSY
    assert race(hedging(), Script([0, 1], BROKEN, BUSY)) is BROKEN


def test_without_a_token_the_first_is_waited_for(race: Race) -> None:
    one = hedging(retry_share=0.0)
    while one.second(get()) is not None:
        pass
    script = Script([0], OK)

    assert race(one, script) is OK
    assert len(script.bases) == 1


def test_other_errors_are_raised(race: Race) -> None:
    with pytest.raises(errors.InvalidRequest, match="closed"):
        race(hedging(WITHIN_S), Script([0], errors.InvalidRequest("closed")))


# --- on sockets ---


class Gateway:
    """A gateway on a socket that answers everything alike, or hangs.

    Args:
        hangs: Whether it hangs.
    """

    BODY = b'{"id": "ID.0.m", "state": "queued"}'
    REPLY = b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY

    def __init__(self, *, hangs: bool = False) -> None:
        self._hangs = hangs
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.keys: Queue[str] = Queue()
        self.left = Event()
        Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            data = b""
            while piece := connection.recv(65536):
                data += piece
                head, ends, body = data.partition(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
                if ends and len(body) >= int(fields.get(b"content-length", 0)):
                    self.keys.put(fields.get(b"idempotency-key", b"").decode())
                    data = b""
                    if not self._hangs:
                        connection.sendall(self.REPLY)
            self.left.set()


@pytest.fixture
def gateways() -> Iterator[list[Gateway]]:
    with ExitStack() as opened:
        found = [Gateway(hangs=True), Gateway()]
        for one in found:
            opened.callback(one.close)
        yield found


def submitted(urls: list[str]) -> RequestHandle:
    with qinfer.Client(urls, hedge_after=CONNECTED_S, timeout_s=WITHIN_S) as client:
        return client.submit("m", {"x": X})


def submitted_async(urls: list[str]) -> RequestHandle:
    async def main() -> RequestHandle:
        async with qinfer.AsyncClient(urls, hedge_after=CONNECTED_S, timeout_s=WITHIN_S) as client:
            return await client.submit("m", {"x": X})

    return asyncio.run(main())


@pytest.mark.parametrize("submit", [submitted, submitted_async])
def test_a_gateway_that_hangs_is_left(gateways: list[Gateway], submit: Callable[[list[str]], RequestHandle]) -> None:
    """The other one gets the same key, and the connection to the first is closed."""
    handle = submit([one.url for one in gateways])

    assert handle.id == "ID.0.m"
    keys = [one.keys.get(timeout=WITHIN_S) for one in gateways]
    assert keys[0] == keys[1] != ""
    assert gateways[0].left.wait(WITHIN_S)


def test_a_cancelled_attempt_leaves_the_connection_of_the_next(gateways: list[Gateway]) -> None:
    """An attempt that has ended has no connection any more, for it may be another request's."""
    answering = gateways[1]
    connections: dict[httpx.Client, Any] = {}
    with httpx.Client() as http:
        first = Attempt(connections)
        with first.using(http) as extensions:
            http.get(answering.url, extensions=extensions)
        first.cancel()

        with Attempt(connections).using(http) as extensions:
            assert http.get(answering.url, extensions=extensions).status_code == 202

    assert connections.keys() == {http}
    assert answering.keys.qsize() == 2
