"""How a worker keeps its renewer going, and how often what fails is tried and logged."""

import asyncio
import logging
import os
import select
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Iterator
from itertools import pairwise
from typing import IO, Any

import msgspec
import pytest
from pydantic import SecretStr

from qinfer.batching.execution import WorkItem
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest
from qinfer.core.processes import LENGTH, packed
from qinfer.core.settings import RedisSettings, Settings
from qinfer.queue.clients import Login
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer_workers import renewer
from qinfer_workers.inference import renewals
from qinfer_workers.inference.publisher import LeaseKeeper
from qinfer_workers.inference.renewals import ProcessRenewals
from qinfer_workers.renewer import HeldLeases, RenewalReport, RenewerHello

LANE = Lane("stub", 1)
NOWHERE = "redis://127.0.0.1:1"
EVERY_S = 0.2


def keeper_of(renews: ProcessRenewals) -> LeaseKeeper:
    return LeaseKeeper(renews, ServerClock(offset_s=0.0), 10.0, lambda: [LANE], lambda _: None)


def item() -> WorkItem:
    request = InferRequest(model="stub", inputs=(), id="r")
    lease = Lease(Entry(LANE, "1000-0"), "w", b"")
    return WorkItem(rows=1, key=None, enqueued_s=1.0, deadline_s=time.monotonic() + 60.0, lease=lease, request=request)


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A renewer whose Redis is away."""
    command = [sys.executable, "-m", "qinfer_workers.renewer", str(os.getpid())]
    one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield one
    one.kill()
    one.communicate()


def tell(child: "subprocess.Popen[bytes]", *messages: msgspec.Struct) -> None:
    assert child.stdin is not None
    child.stdin.write(b"".join(packed(message) for message in messages))
    child.stdin.flush()


def report_of(stream: IO[bytes]) -> RenewalReport:
    (size,) = LENGTH.unpack(stream.read(LENGTH.size))
    return msgspec.msgpack.decode(stream.read(size), type=RenewalReport)


@pytest.mark.parametrize("cluster", [False, True])
def test_who_asks_after_each_failure_does_not_make_it_fail_faster(
    child: "subprocess.Popen[bytes]", *, cluster: bool
) -> None:
    """A pause comes after each; and a cluster that is away at the start does not end the renewer."""
    assert child.stdout is not None
    lane = b"qinfer:{stub#0}:1:p1"
    tell(child, RenewerHello(Login(NOWHERE, "", cluster, 1.0, 1.0), b"workers", b"w", b"", EVERY_S, 100.0))
    reports = []
    for _ in range(4):
        tell(child, HeldLeases({lane: {b"1-0": float("inf")}}, True))
        reports.append(report_of(child.stdout))

    assert [list(report.failed) for report in reports] == [[lane]] * 4
    begun = [report.began_s for report in reports]
    assert all(later - earlier >= EVERY_S for earlier, later in pairwise(begun))


async def test_a_renewer_that_can_not_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends neither the worker nor in a flood of lines."""
    caplog.set_level(logging.INFO)
    start, tries = asyncio.create_subprocess_exec, 0

    async def refusing(*command: Any, **options: Any) -> Process:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise OSError(12, "Cannot allocate memory")
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refusing)
    monkeypatch.setattr(renewals, "_RETRY_S", 0.01)
    keeper = keeper_of(ProcessRenewals(Settings(redis=RedisSettings(url=SecretStr(NOWHERE))), "w", os.environ))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(keeper.run())
        await keeper.watch([])
        running.cancel()

    assert tries == 4
    lines = [record for record in caplog.records if "renewer of leases" in record.message]
    assert [record.levelno for record in lines] == [logging.ERROR, logging.INFO]
    assert vars(lines[0])["reason"] == "it can't be started: Cannot allocate memory"


def test_a_worker_that_does_not_read_keeps_nobody_from_renewing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe is full after a while; what is lost is told once there is room."""
    reading, writing = os.pipe()

    class Output:
        @staticmethod
        def fileno() -> int:
            return writing

    monkeypatch.setattr(sys, "stdout", Output)
    outbox = renewer._Outbox()
    sent = 0
    while select.select([], [writing], [], 0)[1]:
        sent += 1
        outbox.send(RenewalReport(float(sent), [], {b"lane": "x" * 1000}))
    outbox.send(RenewalReport(-1.0, [(b"lane", b"1-0")], {}))
    outbox.send(RenewalReport(-2.0, [(b"lane", b"2-0")], {}))
    with open(reading, "rb") as stream:
        for number in range(sent):
            assert report_of(stream).began_s == number + 1.0
        outbox.send(RenewalReport(-3.0, [(b"lane", b"3-0")], {}))
        outbox.send(RenewalReport(-4.0, [], {}))
        last = [report_of(stream) for _ in range(2)]
    os.close(writing)

    assert [report.began_s for report in last] == [-3.0, -4.0]
    assert [[entry_id for _, entry_id in report.lost] for report in last] == [[b"1-0", b"2-0", b"3-0"], []]
