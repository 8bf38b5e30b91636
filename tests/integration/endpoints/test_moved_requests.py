"""What waits for a version when it is rolled back: the stable version answers it, and what executes ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from tests.support.endpoints import split
from tests.support.python_models import CONFIG, HEADER
from tests.support.served_models import ServedModels, models_served

BACKLOG = 50
STORED = 10
HELD = 8
"""More than a worker holds of what it has not begun to execute."""
LANES = [Lane("guess", version) for version in (1, 2)]
CANARY = {"model": "guess", "version": 2, "when": [{"headers": {"X-Try": "new"}}]}
PLAN = {"steps": [{"weight": 0.5, "least_s": 3600}], "checks": [{"of": "errors"}]}
TRY = {"X-Try": "new"}

EXECUTE = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            with open({log!r}, "a") as log:
                log.write(f"{version}:{{x(request).flat[0]:.0f}} ")
            while {version} == 2 and not os.path.exists({gate!r}):
                time.sleep(0.01)
        return [reply(x(request)) for request in requests]
"""


class Scene:
    """A model of two versions, the second of which stands still until it is let go on, and an endpoint of both."""

    def __init__(self, served: ServedModels, client: httpx.AsyncClient, log: Path, gate: Path) -> None:
        self.served = served
        self.client = client
        self._log = log
        self._gate = gate

    def go_on(self) -> None:
        self._gate.touch()

    def executed(self, version: int) -> list[int]:
        """Returns the numbers that a version has been asked, warming up left out."""
        each = (word.split(":") for word in self._log.read_text().split())
        return sorted(int(number) for of, number in each if int(of) == version and int(number))

    async def ask(self, number: int, path: str = "endpoint/infer", **headers: str) -> tuple[int, str]:
        """Asks for a number; returns the one that came back, and the version that has answered."""
        reply = await self.client.post(f"/v2/models/{path}", json=body(number), headers=headers)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        assert reply.headers.get("qinfer-target") in (None, f"guess:{found['model_version']}")
        return int(found["outputs"][0]["data"][0]), found["model_version"]

    async def wait_for(self, *depths: int) -> None:
        """Waits until so many are in the lanes of the versions."""

        async def are_there() -> bool:
            return await self.served.gateway._delivery.depth(LANES) == list(depths)

        await eventually(are_there, timeout_s=60, description=f"{depths} requests")

    async def rolled_back(self) -> dict[str, Any]:
        """Rolls the canary back, and waits for the end of that; returns what is known of the endpoint then."""
        reply = await self.client.post("/v1/endpoints/endpoint/rollback")
        assert reply.status_code == 200, reply.text
        return await self.until("rolled back")

    async def until(self, state: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def is_so() -> bool:
            found.update((await self.client.get("/v1/endpoints/endpoint")).json())
            return (found["canary"] or {}).get("state") == state

        await eventually(is_so, timeout_s=60, description=state)
        return found


def body(number: int) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [number] * 4}]}


@asynccontextmanager
async def scene(repository: Path) -> AsyncIterator[Scene]:
    log, gate = repository / "log", repository / "gate"
    for version in (1, 2):
        directory = repository / "guess" / str(version)
        directory.mkdir(parents=True)
        text = HEADER + EXECUTE.format(version=version, log=str(log), gate=str(gate))
        (directory / "model.py").write_text(text)
    config = CONFIG.format(name="guess", max_batch_size=2, datatype="FP32", dims=4, scheduling="", more="")
    (repository / "guess" / "config.pbtxt").write_text(config + "version_policy: { all { } }")
    gate.touch()  # warming up goes through
    limits = httpx.Limits(max_connections=2 * BACKLOG)
    async with (
        models_served(repository) as served,
        httpx.AsyncClient(base_url=served.gateway.url, timeout=60, limits=limits) as client,
    ):
        await served.http.load_model("guess")
        gate.unlink()
        one = Scene(served, client, log, gate)
        declaration = split(CANARY, stable="guess:1", canary=PLAN)
        assert (await client.put("/v1/endpoints/endpoint", json=declaration)).status_code == 200
        await one.until("running")
        try:
            yield one
        finally:
            one.go_on()


async def test_what_waits_is_answered_by_the_stable_version(tmp_path: Path) -> None:
    """While the bad one stands still; nothing is lost, nothing is executed twice, and what it has begun it ends."""
    async with scene(tmp_path) as one, asyncio.TaskGroup() as group:
        asked = [group.create_task(one.ask(number, **TRY)) for number in range(1, BACKLOG + 1)]
        by_number = group.create_task(one.ask(1000, "guess/versions/2/infer"))
        await one.wait_for(0, BACKLOG + 1)

        state = await one.rolled_back()

        (left,) = await one.served.gateway._delivery.in_flight(LANES[1:])
        await one.wait_for(0, left + 1)
        assert await one.ask(2000, **TRY) == (2000, "1")
        moved = [task.result() for task in asked if task.done()]
        assert (len(moved) + left, {version for _, version in moved}) == (BACKLOG, {"1"})
        assert left <= HELD
        assert f"; {len(moved)} requests that waited for it were moved to version 1" in state["events"][0]["reason"]
        one.go_on()

    answers = [task.result() for task in asked]
    assert [number for number, _ in answers] == list(range(1, BACKLOG + 1))
    assert by_number.result() == (1000, "2")
    assert one.executed(1) == [*(number for number, version in answers if version == "1"), 2000]
    assert one.executed(2) == [*(number for number, version in answers if version == "2"), 1000]


async def test_stored_requests_tell_who_answers_them(tmp_path: Path) -> None:
    """The record has the stable version from the move on, and a repetition finds it."""
    async with scene(tmp_path) as one, asyncio.TaskGroup() as group:
        ahead = [group.create_task(one.ask(number, **TRY)) for number in range(1, HELD + 1)]
        await one.wait_for(0, len(ahead))
        url = "/v1/models/endpoint/requests"
        tickets = []
        for number in range(STORED):
            headers = TRY | {"Idempotency-Key": f"k{number}"}
            tickets.append((await one.client.post(url, json=body(100 + number), headers=headers)).json())
        assert {ticket["version"] for ticket in tickets} == {2}

        await one.rolled_back()

        again = await one.client.post(url, json=body(100), headers=TRY | {"Idempotency-Key": "k0"})
        assert (again.json()["id"], again.json()["version"]) == (tickets[0]["id"], 1)
        for number, ticket in enumerate(tickets):
            result = await one.client.get(ticket["links"]["result"] + "?wait=30")
            assert (result.status_code, result.json()["model_version"]) == (200, "1"), result.text
            assert result.json()["outputs"][0]["data"][0] == 100 + number
        assert [number for number in one.executed(1) if number >= 100] == [100 + number for number in range(STORED)]
        one.go_on()
    assert not [number for number in one.executed(2) if number >= 100]
    await asyncio.gather(*ahead)


async def test_a_caller_who_leaves_takes_what_was_moved_along(tmp_path: Path) -> None:
    """It waits in a lane that its gateway did not put it into, and is found there."""
    async with scene(tmp_path) as one, asyncio.TaskGroup() as group:
        asked = [group.create_task(one.ask(number, **TRY)) for number in range(1, BACKLOG + 1)]
        await one.wait_for(0, BACKLOG)
        queue = one.served.gateway._delivery
        moved = await queue.moves.move([LANES[1]], 3, "endpoint")  # a lane that nobody reads
        assert moved >= BACKLOG - HELD

        for task in asked:
            task.cancel()
        elsewhere = Lane("guess", 3)

        async def is_empty() -> bool:
            return await queue.depth([elsewhere]) == [0]

        await eventually(is_empty, timeout_s=60, description="a lane without requests")
        one.go_on()
    assert one.executed(1) == []
