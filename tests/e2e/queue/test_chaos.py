"""Processes are killed in the middle of their work; what was accepted is answered, once and rightly."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from qinfer.testing import wait_until
from scripts.load import Answer, ask_all
from tests.e2e.conftest import Stack, running
from tests.support import models

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(120)]

SHORT_LEASES = {"QINFER_WORKER__LEASE_S": "2", "QINFER_WORKER__RENEW_EVERY_S": "0.5"}
ITEMS, ROUNDS = 100, 60


def bodies() -> list[bytes]:
    """Returns requests that can be told apart by their answers: item i asks for i + 0.5."""
    return [
        json.dumps(
            {
                "inputs": [
                    {"name": name, "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}
                    for name, value in (("a", item), ("b", 0.5))
                ],
                "outputs": [{"name": "sum"}],
            }
        ).encode()
        for item in range(ITEMS)
    ]


def process_of(stack: Stack, program: str) -> psutil.Process:
    """Returns the child of `qinfer up` that runs a program."""
    (process,) = (p for p in psutil.Process(stack.pid).children(recursive=True) if program in " ".join(p.cmdline()))
    return process


def answered(stack: Stack) -> float:
    """Returns how many requests the gateway has answered."""
    with urllib.request.urlopen(f"http://{stack.address}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("qinfer_requests_total{"))


async def load_until_killed(stack: Stack, program: str) -> list[Answer]:
    """Sends the requests; kills the program when a tenth of them is answered."""
    load = asyncio.create_task(ask_all(stack.port, "/v2/models/add_sub/infer", bodies(), rounds=ROUNDS, connections=32))
    try:
        await asyncio.to_thread(wait_until, lambda: answered(stack) > ITEMS * ROUNDS / 10, 30.0, "a tenth answered")
        assert not load.done()
        process_of(stack, program).kill()
        return await load
    finally:
        load.cancel()


def wrong(answers: list[Answer]) -> list[Any]:
    """Returns the answers that are not what was asked for."""
    return [
        answer
        for answer in answers
        if answer.status != 200 or answer.reply["outputs"][0]["data"] != [answer.item + 0.5] * 4
    ]


@pytest.fixture
def add_sub(tmp_path: Path) -> Path:
    models.add_sub(tmp_path / "models")
    return tmp_path / "models"


async def test_a_killed_worker_loses_nothing(add_sub: Path, tmp_path: Path) -> None:
    """SIGKILL to the only worker under load: each request gets its own answer, some of them late."""
    with running(add_sub, tmp_path, **SHORT_LEASES) as stack:
        answers = await load_until_killed(stack, "qinfer_workers.inference")

    assert len(answers) == ITEMS * ROUNDS
    assert wrong(answers) == []


def serves(stack: Stack) -> bool:
    """Tells whether the server gives a right answer now."""
    url = f"http://{stack.address}/v2/models/add_sub/infer"
    try:
        with urllib.request.urlopen(url, data=bodies()[7], timeout=10) as reply:
            return bool(json.load(reply)["outputs"][0]["data"] == [7.5] * 4)
    except OSError:
        return False


def test_the_server_outlives_its_redis(add_sub: Path, tmp_path: Path) -> None:
    """SIGKILL to Redis: a new one has the data, and gateway and worker find it without being restarted."""
    with running(add_sub, tmp_path, **SHORT_LEASES) as stack:
        assert serves(stack)
        programs = [process_of(stack, program) for program in ("qinfer_api", "qinfer_workers.inference")]

        process_of(stack, "redis-server").kill()

        wait_until(lambda: serves(stack), 30.0, "a right answer")
        assert all(program.is_running() for program in programs)
