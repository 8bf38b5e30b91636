"""Recordings of requests: what is copied, within which bounds, and that nothing is left in the way afterwards."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from qinfer import AsyncClient, RecordedRequest
from qinfer.cli.request_data import read_requests
from qinfer.client import TensorMetadata
from qinfer.core.messages import OutgoingRequest, SequenceFlags
from qinfer.errors import Conflict, InvalidRequest, ModelNotFound
from qinfer.observe.logs import AUDIT
from qinfer.submission.submit import LaneEntrance
from qinfer.tensors import to_numpy
from qinfer.testing import eventually
from qinfer.wire.bodies import Recording
from qinfer_api.recordings import RecordingEntrance, RunningRecording
from tests.support.gateway import Running, running_gateway, settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

X = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
FORWARDED = {"header_forward_pattern": "x-user-.*"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_gateway(settings_of(FORWARDED, grpc={})) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: Running) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.url) as opened:
        yield opened
    async with httpx.AsyncClient(base_url=running.url) as http:
        for one in (await http.get("/v1/recordings")).json():
            await http.delete(f"/v1/recordings/{one['id']}")


def entrance(running: Running, model: str = "echo") -> type:
    return type(running.gateway.dispatcher.submission.asked(model, 0))


async def recorded(client: AsyncClient, count: int, send: Any, model: str = "echo") -> list[RecordedRequest]:
    """Returns the copies of what `send` sends once the model is recorded."""
    found: list[RecordedRequest] = []
    async with httpx.AsyncClient(base_url=client._policy.url) as http:

        async def is_recorded() -> bool:
            return any(one["model"] == model for one in (await http.get("/v1/recordings")).json())

        async with asyncio.TaskGroup() as group:

            async def read() -> None:
                found.extend([one async for one in client.record(model, requests=count, duration_s=30)])

            group.create_task(read())
            await eventually(is_recorded, description="a recording")
            await send(http)
    return found


async def test_copies_have_inputs_parameters_and_arrivals_and_nothing_of_the_caller(
    running: Running, client: AsyncClient
) -> None:
    async def send(http: httpx.AsyncClient) -> None:
        headers = {"x-user-name": "somebody", "x-api-key": "secret"}
        await client.infer("echo", {"x": X}, parameters={"tone": "kind"}, id="mine", headers=headers)
        await client.result(await client.submit("echo", {"x": 2 * X}, request_id="mine-too"))
        with pytest.raises(InvalidRequest):
            await client.infer("echo", {"x": X.astype(np.float64)})
        await client.infer("echo", {"x": 3 * X}, version=1)

    one, two, three = await recorded(client, 3, send)

    assert [to_numpy(each.tensors[0])[0, 0] for each in (one, two, three)] == [1.0, 2.0, 3.0]
    assert (dict(one.parameters), dict(two.parameters)) == ({"tone": "kind"}, {})
    assert 0 <= one.arrival_ms <= two.arrival_ms <= three.arrival_ms < 30_000
    await eventually(lambda: entrance(running) is LaneEntrance, description="the end of a full recording")


async def test_a_model_that_is_not_recorded_keeps_its_entrance(running: Running, client: AsyncClient) -> None:
    """Recording one model costs the others nothing, and the end of it leaves nothing in the way."""
    async with aclosing(client.record("echo", duration_s=30)) as copies:
        reading = asyncio.ensure_future(anext(copies))

        async def is_in_place() -> bool:
            return entrance(running) is RecordingEntrance

        await eventually(is_in_place, description="a recording entrance")
        assert entrance(running, "text") is LaneEntrance
        await client.infer("echo", {"x": X})
        assert to_numpy((await reading).tensors[0]).tolist() == X.tolist()

    await eventually(lambda: entrance(running) is LaneEntrance, description="the end of a recording that was left")


async def test_steps_of_a_sequence_have_a_number_in_place_of_the_callers_id() -> None:
    made = Recording(id="r", model="m", requests=9, nbytes=999, begins_at=0.0, ends_at=60.0)
    running = RunningRecording(made, lambda: 1.5, asyncio.Event())

    def copied(name: str, *, start: bool = False) -> dict[str, Any]:
        request = OutgoingRequest(model="m", inputs=(), sequence=SequenceFlags(name, start=start))
        copy = running.copy_of(request, ())
        assert copy is not None
        assert copy.arrival_ms == 1500.0
        return dict(copy.parameters)

    first, next_, other = copied("customer 17", start=True), copied("customer 17"), copied("customer 18")

    assert (first["sequence_start"], first["sequence_end"], next_["sequence_start"]) == (True, False, False)
    assert isinstance(first["sequence_id"], int)
    assert first["sequence_id"] == next_["sequence_id"] != other["sequence_id"]


async def test_requests_that_are_too_large_are_counted_and_not_copied(running: Running, client: AsyncClient) -> None:
    dropped: list[int] = []
    large = np.zeros((1, 2**20 + 1024), np.float32)
    async with aclosing(
        client.record("wide", requests=1, duration_s=30, on_page=lambda page: dropped.append(page.dropped))
    ) as copies:
        reading = asyncio.ensure_future(anext(copies))

        async def is_in_place() -> bool:
            return entrance(running, "wide") is RecordingEntrance

        await eventually(is_in_place, description="a recording entrance")
        await client.infer("wide", {"x": large})
        await client.infer("wide", {"x": X})
        found = [await reading, *[one async for one in copies]]

    assert [one.tensors[0].shape for one in found] == [(1, 4)]
    assert dropped[-1] == 1


async def test_a_recording_of_bytes_ends_when_they_are_full(client: AsyncClient) -> None:
    async with httpx.AsyncClient(base_url=client._policy.url) as http:
        made = (await http.post("/v1/models/echo/recordings", json={"bytes": 300})).json()
        for _ in range(5):
            await client.infer("echo", {"x": X})

        async def page() -> Any:
            return (await http.get(f"/v1/recordings/{made['id']}?after={first['next']}")).json()

        first = (await http.get(f"/v1/recordings/{made['id']}")).json()
        while not (last := await page())["ended"]:
            pass

    assert 0 < len(first["requests"]) < 5
    assert last["requests"] == []
    assert last["recording"]["model"] == "echo"


async def test_a_model_has_one_recording_at_a_time(client: AsyncClient) -> None:
    async with httpx.AsyncClient(base_url=client._policy.url) as http:
        assert (await http.post("/v1/models/echo/recordings")).status_code == 200
        with pytest.raises(Conflict, match="'echo' is being recorded"):
            await anext(client.record("echo"))
        with pytest.raises(ModelNotFound):
            await anext(client.record("no-such"))


@pytest.mark.parametrize("bounds", [{"requests": 0}, {"bytes": 2**40}, {"seconds": 0}, {"seconds": 1e9}])
async def test_bounds_are_bounded(client: AsyncClient, bounds: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=client._policy.url) as http:
        assert (await http.post("/v1/models/echo/recordings", json=bounds)).status_code == 400


async def test_an_endpoint_is_no_model(client: AsyncClient) -> None:
    async with httpx.AsyncClient(base_url=client._policy.url) as http:
        targets = [{"model": "echo", "version": 1, "role": "stable"}]
        assert (await http.put("/v1/endpoints/reader", json={"targets": targets})).status_code == 200
        refused = await http.post("/v1/models/reader/recordings")
        await http.delete("/v1/endpoints/reader")

    assert (refused.status_code, "record the model of a target" in refused.text) == (400, True)


async def test_an_unknown_recording_or_place_is_refused(client: AsyncClient) -> None:
    async with httpx.AsyncClient(base_url=client._policy.url) as http:
        assert (await http.get("/v1/recordings/none")).status_code == 404
        assert (await http.delete("/v1/recordings/none")).status_code == 404
        made = (await http.post("/v1/models/echo/recordings")).json()
        wrong = await http.get(f"/v1/recordings/{made['id']}?after=xyz")

    assert (wrong.status_code, "give the 'next' of the page before" in wrong.text) == (400, True)


async def test_the_audit_log_names_begin_first_page_and_end(
    client: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, AUDIT):
        async with httpx.AsyncClient(base_url=client._policy.url) as http:
            made = (await http.post("/v1/models/echo/recordings")).json()
            await client.infer("echo", {"x": X})
            page = (await http.get(f"/v1/recordings/{made['id']}")).json()
            await http.get(f"/v1/recordings/{made['id']}?after={page['next'] or '0-0'}")
            await http.delete(f"/v1/recordings/{made['id']}")

    lines = [(vars(one)["act"], vars(one)["path"]) for one in caplog.records if "act" in vars(one)]
    assert lines == [
        ("POST", "/v1/models/echo/recordings"),
        ("GET", f"/v1/recordings/{made['id']}"),
        ("DELETE", f"/v1/recordings/{made['id']}"),
    ]


async def test_other_gateways_record_too(running: Running, client: AsyncClient) -> None:
    async with (
        running_gateway(settings_of(), await running.database.delivery(), running.database.store()) as other,
        AsyncClient(other.url) as beside,
    ):

        async def is_in_place() -> bool:
            return entrance(other) is RecordingEntrance

        async def send(_: httpx.AsyncClient) -> None:
            await eventually(is_in_place, description="a recording entrance at the other gateway")
            await beside.infer("echo", {"x": 5 * X})
            await client.infer("echo", {"x": 6 * X})

        found = await recorded(client, 2, send)

    assert {to_numpy(one.tensors[0])[0, 0] for one in found} == {5.0, 6.0}


async def test_the_command_writes_a_file_for_load_tests(running: Running, client: AsyncClient, tmp_path: Path) -> None:
    file = tmp_path / "requests.parquet"
    command = (sys.executable, "-m", "qinfer.cli.main", "record", "echo", str(file), "-n", "5", "--url", running.url)
    process = await asyncio.create_subprocess_exec(*command, "--json", stdout=asyncio.subprocess.PIPE)
    while process.returncode is None and not file.exists():
        await client.infer("echo", {"x": X})
        await asyncio.sleep(0.01)
    out, _ = await process.communicate()

    assert json.loads(out)["requests"] == 5
    found = read_requests(file, [TensorMetadata(name="x", datatype="FP32", shape=(-1, 4))])
    assert [to_numpy(one.tensors[0]).tolist() for one in found] == [X.tolist()] * 5
    assert all(one.arrival_ms is not None for one in found)
    load = ("bench", "echo", "--data", str(file), "--arrivals", "trace", "-d", "0.5", "--url", running.url)
    bench = await asyncio.create_subprocess_exec(*command[:3], *load, "--json", stdout=asyncio.subprocess.PIPE)
    out, _ = await bench.communicate()
    assert (bench.returncode, json.loads(out)["errors"]) == (0, 0)
