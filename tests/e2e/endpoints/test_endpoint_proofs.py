"""The proofs of endpoints and canaries, with gateways, workers and Redis as processes; what is measured is printed.

Shares, keys, repetitions, and one canary of each kind. The same under faults is `tests/chaos/test_chaos_canaries.py`;
that canaries as good as stable stay, two hundred times, `tests/integration/endpoints/test_false_rollbacks.py`.
"""

import asyncio
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import pytest
import pytest_asyncio

from qinfer.testing import eventually
from tests.chaos import canary_load
from tests.chaos.canary_load import MODEL, PACED, STEPS, WITHOUT_SHADOW, CanaryCallers, Trial, Version, body_of
from tests.chaos.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1500)]

REQUESTS, CONNECTIONS, TOGETHER = 100_000, 4, 8
KEYS, TRIES = 6000, 10
STORED = 300
EXECUTION_S = 0.03
LONG = ({"weight": 0.5, "least_s": 1, "least_requests": 5000},)
WITHIN_S = 900.0
"""For one trial, on a machine that has much else to do."""

CACHED = "cached"
"""A model whose answers mostly come from the response cache, so that the machine has time for many requests."""
SETTINGS = {"QINFER_CACHE__CONFIG": "local,size=10000000"}

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_TARGET = re.compile(rb"qinfer-target: (\S+)", re.IGNORECASE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("proofs")
    canary_load.write_models(directory / "models")
    canary_load.write_models(directory / "models", CACHED, "response_cache { enable: true }\n")
    canary_load.write_paced(directory / "models", EXECUTION_S)
    async with running_cluster(directory, directory / "models", gateways=3, workers=2, settings=SETTINGS) as cluster:
        await cluster.ready((MODEL, CACHED, PACED))
        yield cluster


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints what was measured."""

    def printed(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="")  # noqa: T201

    return printed


async def declare(cluster: Cluster, name: str, canary: float, model: str = CACHED) -> None:
    """Declares an endpoint of two versions; returns once every gateway goes by it."""
    targets = [
        {"model": model, "version": 1, "role": "stable"},
        {"model": model, "version": 2, "weight": canary},
    ]
    async with httpx.AsyncClient() as http:
        declaration = {"targets": targets, "sticky": "header:x-user-id"}
        reply = await http.put(f"{cluster.urls[0]}/v1/endpoints/{name}", json=declaration)
        assert reply.status_code == 200, reply.text
        revision: int = reply.json()["endpoint"]["revision"]

        async def is_known() -> bool:
            await asyncio.sleep(0.1)
            texts = [(await http.get(f"{url}/metrics")).text for url in cluster.urls]
            return all(_value_of(text, "qinfer_endpoints_revision") >= revision for text in texts)

        await eventually(is_known, WITHIN_S, "the endpoint at all gateways")


def _value_of(metrics: str, name: str) -> int:
    found = re.search(rf"^{name}\{{.*\}} (\d+)", metrics, re.MULTILINE)
    assert found is not None, name
    return int(found[1])


async def unheard(cluster: Cluster) -> int:
    """Returns how many requests went to stable targets because their gateway did not come to look for changes."""
    async with httpx.AsyncClient() as http:
        texts = [(await http.get(f"{url}/metrics")).text for url in cluster.urls]
    return sum(_value_of(text, "qinfer_endpoints_unheard_total") for text in texts)


async def ask(url: str, name: str, keys: Sequence[str]) -> list[str]:
    """Sends a request for each key, on one connection and some at a time; returns the targets that answered."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body, found = json.dumps(body_of(7)).encode(), []
    try:
        for first in range(0, len(keys), TOGETHER):
            some = keys[first : first + TOGETHER]
            writer.write(b"".join(_request(name, key, body) for key in some))
            for _ in some:
                head = await reader.readuntil(b"\r\n\r\n")
                length, target = _LENGTH.search(head), _TARGET.search(head)
                assert head.startswith(b"HTTP/1.1 200"), head
                assert length, head
                assert target, head
                answer = await reader.readexactly(int(length[1]))
                version = target[1].decode().rpartition(":")[2]
                assert json.loads(answer)["outputs"][1]["data"] == [float(version)], answer
                found.append(target[1].decode())
    finally:
        writer.close()
    return found


def _request(name: str, key: str, body: bytes) -> bytes:
    user = f"x-user-id: {key}\r\n" if key else ""
    head = f"POST /v2/models/{name}/infer HTTP/1.1\r\nhost: localhost\r\n{user}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def ask_all(cluster: Cluster, name: str, keys: Sequence[str], turn: int = 0) -> list[str]:
    """Shares keys out among the gateways; `turn` moves each key to another one. Returns their targets in order."""
    parts = 3 * CONNECTIONS
    urls = [cluster.urls[(part + turn) % 3] for part in range(parts)]
    each = await asyncio.gather(*(ask(url, name, keys[part::parts]) for part, url in enumerate(urls)))
    found = [""] * len(keys)
    for part, targets in enumerate(each):
        found[part::parts] = targets
    return found


async def ask_heard(cluster: Cluster, name: str, keys: Sequence[str], turn: int = 0) -> list[str]:
    """Is `ask_all`, again until no gateway has missed a look meanwhile, as on a machine that has too much to do."""
    for _ in range(TRIES):
        before = await unheard(cluster)
        found = await ask_all(cluster, name, keys, turn)
        if await unheard(cluster) == before:
            return found
    raise AssertionError(f"gateways have missed a look in each of {TRIES} passes")


def assert_share(count: int, total: int, share: float) -> None:
    """A count is within the binomial's 99.9 % interval (which is normal for so many)."""
    deviation = 3.29 * math.sqrt(total * share * (1 - share))
    assert abs(count - total * share) <= deviation, f"{count} of {total} is not {share}"


async def test_shares_are_as_declared(cluster: Cluster, say: Callable[[str], None]) -> None:
    """Over three gateways; the target is chosen before the cache is asked."""
    await declare(cluster, "shares", 0.3)

    before = await unheard(cluster)
    found = Counter(await ask_all(cluster, "shares", [""] * REQUESTS))

    missed = await unheard(cluster) - before
    say(f"{found[f'{CACHED}:2']:,} of {REQUESTS:,} requests went to the weight of 0.3; unheard: {missed:,}")
    assert found.total() == REQUESTS
    assert missed < REQUESTS / 4
    assert_share(found[f"{CACHED}:2"], REQUESTS - missed, 0.3)


async def test_keys_move_with_a_change_of_weights_only(cluster: Cluster, say: Callable[[str], None]) -> None:
    """The same at every gateway; and only the share that the weight gains or loses."""
    stable, canary = f"{CACHED}:1", f"{CACHED}:2"
    users = [f"user-{number}" for number in range(KEYS)]
    await declare(cluster, "sticky", 0.1)
    before = await ask_heard(cluster, "sticky", users)
    elsewhere = await ask_heard(cluster, "sticky", users, turn=1)
    await declare(cluster, "sticky", 0.25)
    after = await ask_heard(cluster, "sticky", users, turn=2)
    await declare(cluster, "sticky", 0.1)
    again = await ask_heard(cluster, "sticky", users, turn=1)

    moved = Counter(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    say(f"{moved.total()} of {KEYS} keys moved with a weight of 0.1 that became 0.25, all to that target")
    assert elsewhere == before == again
    assert set(moved) == {(stable, canary)}
    assert_share(moved.total(), KEYS, 0.15)


async def test_a_stored_request_is_executed_once_whatever_the_weights_become(
    cluster: Cluster, say: Callable[[str], None]
) -> None:
    """Each is sent to three gateways, while the weights change; executions are counted by the workers."""
    await declare(cluster, "moving", 0.5, MODEL)
    before = await executed(cluster)
    weights = itertools.cycle([0.9, 0.1, 0.5])
    changes = 0

    async with httpx.AsyncClient(timeout=60.0) as http:

        async def send(number: int) -> set[str]:
            order = [cluster.urls[(number + turn) % 3] for turn in range(3)]
            replies = [await _store(http, url, number) for url in order]
            return {reply.headers["location"] for reply in replies}

        some = asyncio.Semaphore(8)

        async def limited(number: int) -> set[str]:
            async with some:
                return await send(number)

        async def change() -> None:
            nonlocal changes
            for weight in weights:
                await declare(cluster, "moving", weight, MODEL)
                changes += 1

        changing = asyncio.create_task(change())
        links = await asyncio.gather(*map(limited, range(STORED)))
        changing.cancel()
        await asyncio.wait([changing])
        results = [await http.get(f"{cluster.urls[0]}{link}/result?wait=60") for each in links for link in each]

    after = await executed(cluster)
    say(
        f"{STORED} stored requests, each sent to 3 gateways while the weights changed {changes} times: "
        f"{after - before} executions"
    )
    assert [len(each) for each in links] == [1] * STORED
    assert {reply.status_code for reply in results} == {200}
    assert changes > 0
    assert after - before == STORED


async def _store(http: httpx.AsyncClient, url: str, number: int) -> httpx.Response:
    path, headers = f"{url}/v1/models/moving/requests", {"request-id": f"moving-{number}"}
    reply = await http.post(path, json=body_of(1000 + number), headers=headers)
    assert reply.status_code == 202, reply.text
    return reply


async def executed(cluster: Cluster) -> int:
    """Returns how many requests the versions of the model have executed."""
    async with httpx.AsyncClient() as http:
        found = (await http.get(f"{cluster.urls[0]}/v2/models/{MODEL}/stats")).json()["model_stats"]
    return sum(int(one["inference_stats"]["compute_infer"]["count"]) for one in found)


@pytest.mark.parametrize(
    ("trial", "most"),
    [
        (Trial(name="failing", version=Version.FAILING, steps=WITHOUT_SHADOW), 200),
        (Trial(name="wrong", version=Version.WRONG, steps=STEPS), 200),
        (Trial(name="slower", version=Version.SLOWER, model=PACED, steps=LONG), 5000),
        (Trial(name="good", version=Version.GOOD, steps=STEPS), 0),
    ],
    ids=lambda one: one.name if isinstance(one, Trial) else "",
)
async def test_canaries_end_as_they_should(
    cluster: Cluster, trial: Trial, most: int, say: Callable[[str], None]
) -> None:
    """Bad ones within so many of their requests; a wrong one answers nobody, as a shadow step catches it."""
    callers = CanaryCallers(cluster.urls, seed=1)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(callers.run())
            await callers.declare(trial)
            await cluster.ready((trial.name,))
            await callers.follow(trial, WITHIN_S)
            callers.stop()
        await callers.read_all()
    finally:
        await callers.close()

    by_canary = trial.answered[trial.version]
    say(f"{trial.name}: {trial.state} after {trial.tried} requests, it answered {by_canary}; {trial.reason[:200]}")
    assert canary_load.judge([trial], callers, kills=0).problems == []
    if most:
        assert max(trial.tried, by_canary) <= most
