"""Twice as many images as a model can take, for as long as `CHAOS_SECONDS` says: no process grows, and none is wrong.

One tenant sends images at a steady rate. Another one sends larger bodies slowly, so that it holds memory for long.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import psutil
import pytest

from qinfer.core.api_keys import hash_key
from qinfer.testing import eventually
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.member import Role
from tests.support.images import held_bytes, ways_of
from tests.support.python_models import execute, write_model

SECONDS = float(os.environ.get("CHAOS_SECONDS", "10"))
WARM_STEADY, WARM_SLOW = 200, 12
"""So many answers are no part of it: allocators and arrays of batches grow at first."""
EVERY_S = 0.25

MODEL, DELAY_S, BATCH, CAPACITY = "slow", 0.2, 4, 24
OFFERED_RPS = 2 * BATCH / DELAY_S
IMAGE_BYTES, LARGE_BYTES = 602_112, 6 * 2**20
SLOW_CONNECTIONS = 8
PIECE_BYTES, PIECE_EVERY_S = 64 * 1024, 0.02
MIB = 2**20
MOST_BYTES = 64 * MIB
TOLERATED_BYTES = 64 * MIB
"""Between the medians of the first and the last third; one that keeps every image grows by more in ten seconds."""

KEYS = {"steady": "key-of-the-steady", "slow": "key-of-the-slow"}

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 1.2 + 240)]


def written(directory: Path) -> dict[str, str]:
    """Writes the model, whose lane is bounded, and the keys; returns the settings."""
    more = f'parameters {{ key: "qinfer.lane_capacity" value {{ string_value: "{CAPACITY}" }} }}'
    code = execute(f"time.sleep({DELAY_S})\nreturn [reply(x(request) * 2) for request in requests]")
    write_model(directory / "models", code, MODEL, max_batch_size=BATCH, more=more)
    records = [
        {"id": tenant, "tenant": tenant, "sha256": hash_key(key), "scopes": ["infer"]} for tenant, key in KEYS.items()
    ]
    (directory / "keys.json").write_text(json.dumps({"keys": records}))
    return {
        "QINFER_AUTH__MODE": "keys",
        "QINFER_AUTH__KEYS_FILE": str(directory / "keys.json"),
        "QINFER_SEGMENTS__DIRECTORY": str(directory / "m"),
        "QINFER_SEGMENTS__MOST_BYTES": str(MOST_BYTES),
    }


def sent_by(number: int, nbytes: int) -> np.ndarray:
    """Returns the tensor of a request."""
    return np.arange(nbytes // 4, dtype="f4") + number % 1000


def request_of(number: int, nbytes: int, tenant: str) -> tuple[dict[str, str], bytes]:
    """Returns headers and body."""
    parameters = {"binary_data_size": nbytes}
    about = {"name": "x", "shape": [1, nbytes // 4], "datatype": "FP32", "parameters": parameters}
    wanted = {"name": "y", "parameters": {"binary_data": True}}
    text = json.dumps({"inputs": [about], "outputs": [wanted]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Authorization": f"Bearer {KEYS[tenant]}"}
    return headers, text + sent_by(number, nbytes).tobytes()


@dataclass
class Load:
    """Both tenants' requests.

    Attributes:
        statuses: How often each tenant got which status.
        wrong: Answers that were wrong.
    """

    url: str
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def is_warm(self) -> bool:
        """Tells whether there were many answers of both kinds."""
        return self.statuses["steady 200"] >= WARM_STEADY and self.statuses["slow 200"] >= WARM_SLOW

    async def send_steadily(self) -> None:
        """Sends images at a rate, whatever becomes of them."""
        loop, begin_s, number = asyncio.get_running_loop(), asyncio.get_running_loop().time(), 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        connection = httpx.AsyncClient(base_url=self.url, timeout=60.0, limits=limits)
        async with connection as client, asyncio.TaskGroup() as group:
            while not self.is_over.is_set():
                number += 1
                group.create_task(self._send(client, number))
                await asyncio.sleep(max(begin_s + number / OFFERED_RPS - loop.time(), 0))

    async def _send(self, client: httpx.AsyncClient, number: int) -> None:
        headers, body = request_of(number, IMAGE_BYTES, "steady")
        reply = await client.post(f"/v2/models/{MODEL}/infer", content=body, headers=headers)
        begin = int(reply.headers.get("inference-header-content-length", 0))
        self._judge("steady", reply.status_code, reply.content[begin:], sent_by(number, IMAGE_BYTES))

    async def send_slowly(self) -> None:
        """Sends large bodies a piece at a time, one after the other on one connection."""
        address = httpx.URL(self.url)
        number = 0
        while not self.is_over.is_set():
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=2**24)
            number += 1
            headers, body = request_of(number, LARGE_BYTES, "slow")
            headers |= {"Host": address.host, "Content-Length": str(len(body)), "Connection": "close"}
            lines = [f"POST /v2/models/{MODEL}/infer HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            try:
                with contextlib.suppress(ConnectionError):  # a refusal may come before the end of the body
                    for begin in range(0, len(body), PIECE_BYTES):
                        writer.write(body[begin : begin + PIECE_BYTES])
                        await writer.drain()
                        await asyncio.sleep(PIECE_EVERY_S)
                await self._read(reader, number)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.statuses["slow broken off"] += 1
            finally:
                writer.close()

    async def _read(self, reader: asyncio.StreamReader, number: int) -> None:
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        headers = dict(line.split(": ", 1) for line in lines if line)
        content = await reader.readexactly(int(headers["content-length"]))
        begin = int(headers.get("inference-header-content-length", 0))
        self._judge("slow", int(status.split()[1]), content[begin:], sent_by(number, LARGE_BYTES))

    def _judge(self, tenant: str, status: int, outputs: bytes, sent: np.ndarray) -> None:
        self.statuses[f"{tenant} {status}"] += 1
        if status == 200:
            if not np.array_equal(np.frombuffer(outputs, "f4"), sent * 2):
                self.wrong.append(f"{tenant}: the answer of another")
        elif status not in (429, 503):
            self.wrong.append(f"{tenant}: {status} {outputs[:200]!r}")


def sample(cluster: Cluster) -> dict[str, int]:
    """Returns the bytes that gateway and worker have to themselves, and those of their segments, which both map."""
    found = dict[str, int]()
    for role in (Role.GATEWAY, Role.WORKER):
        (member,) = cluster.of(role)
        family = [member.pid, *(one.pid for one in psutil.Process(member.pid).children(recursive=True))]
        found[role] = sum(map(_private_bytes, family))
    sizes = dict[int, int]()
    for path in Path(f"/proc/{cluster.of(Role.GATEWAY)[0].pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(path).startswith("/memfd:qinfer"):
                about = path.stat()
                sizes[about.st_ino] = about.st_blocks * 512
    return found | {"segments": sum(sizes.values())}


def _private_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile") if name in fields)


def growth(samples: Sequence[dict[str, int]]) -> dict[str, int]:
    """Returns by how much the last third is above the first."""
    third = max(len(samples) // 3, 1)
    return {
        name: int(median(one[name] for one in samples[-third:]) - median(one[name] for one in samples[:third]))
        for name in samples[0]
    }


async def test_memory_is_flat_at_twice_the_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused requests get 429 or 503; the memory of gateway and worker, and of their segments, does not grow."""
    settings = written(tmp_path)
    async with running_cluster(tmp_path, tmp_path / "models", gateways=1, workers=1, settings=settings) as cluster:
        await cluster.ready((MODEL,))
        load, samples = Load(cluster.urls[0]), list[dict[str, int]]()
        async with asyncio.TaskGroup() as group:
            group.create_task(load.send_steadily())
            for _ in range(SLOW_CONNECTIONS):
                group.create_task(load.send_slowly())
            await eventually(load.is_warm, 120.0, "a server that is warm")
            until_s = time.monotonic() + SECONDS
            while time.monotonic() < until_s:
                samples.append(await asyncio.to_thread(sample, cluster))
                await asyncio.sleep(EVERY_S)
            load.is_over.set()

        async with httpx.AsyncClient(base_url=cluster.urls[0]) as client:

            async def holds_nothing() -> bool:
                return held_bytes((await client.get("/metrics?scope=process")).text) == 0

            await eventually(holds_nothing, 30.0, "a gateway that holds nothing")
            ways = ways_of((await client.get("/metrics?scope=process")).text)

    grown, most = growth(samples), max(one["segments"] for one in samples)
    with capsys.disabled():
        ends = [f"{name} {samples[-1][name] / MIB:.0f} ({nbytes / MIB:+.1f}) MiB" for name, nbytes in grown.items()]
        sys.stdout.write(f"\n{dict(load.statuses)}, by way {ways}; in the end {', '.join(ends)}\n")
    assert load.wrong == []
    assert load.statuses["steady 200"] > 0 < load.statuses["slow 200"]
    assert load.statuses["steady 503"] + load.statuses["steady 429"] > 0
    assert ways["memory"] > 0
    assert most <= 2 * MOST_BYTES
    assert {name: nbytes for name, nbytes in grown.items() if nbytes > TOLERATED_BYTES} == {}
