"""Records in Redis that are damaged, or of another type: the gateway goes on, and serves again once they are whole."""

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis

from qinfer.core.settings import StoreSettings
from qinfer.errors import CorruptEntry, QinferError
from qinfer.jobs.plan import Shard, ShardTicket, decode_ticket, encode_ticket
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobAddress, ShardOutcome, granted, spec_of
from qinfer.models.state import DesiredState
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.entries import Lane, bulk_lanes
from qinfer.queue.lanes import Queue
from qinfer.tabular.spec import Range
from qinfer.testing import wait_until
from qinfer.wire.versions import decode_document
from tests.support.bulk_jobs import planned, record
from tests.support.fuzzing import NASTY, damaged, fuzz, within_limits
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.inline_workers import value as value_of
from tests.support.jobs.shard_runs import job_spec, outcomes, scored_rows, shards_of, submit_job, write_rows
from tests.support.requests import accept, address
from tests.support.sequences_served import SequencesServed, sequences_served
from tests.support.servers.servers import Database
from tests.support.threaded_gateway import Server, settings

pytestmark = within_limits

ANSWER_S = 15.0
RECOVERED_S = 20.0
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
STATUSES = {200, 202, 400, 404, 409, 410, 429, 500, 503}
"""Statuses that tell callers of damage: 500 has the code `corrupt_entry`."""


@pytest.mark.parametrize("text", [b'"\xff"', b"[" * 100_000])
def test_a_document_that_is_no_text(text: bytes) -> None:
    """Such a document counts as damaged, as any other that can't be read."""
    with pytest.raises(msgspec.DecodeError):
        decode_document(b'{"wire":1,"model":"m","generation":1,"more":' + text, DesiredState)


async def test_names_that_are_no_text(database: Database) -> None:
    """Damaged names hide no other: a gateway goes on with what it can read."""
    store = database.store()
    await store.set_desired(DesiredState("m", 1))
    for key, value in ((keys.desired(), b"{"), (keys.settings(), b"1")):
        await store.client.hset(key, b"\xff", value)

    assert list(await store.desired()) == ["m"]
    assert len(await store.settings()) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "x"),
        ("state", "?"),
        ("created_at", "9" * 400),
        ("deadline_at", "9" * 5000),
        ("webhook", b"\xff"),
    ],
)
async def test_a_request_whose_record_is_damaged(delivery: Queue, store: ControlStore, field: str, value: Any) -> None:
    """Damage of a record is told as such, not as a defect of the server's."""
    await accept(delivery)
    await store.client.hset(keys.request("digits", 0, "r1"), field, value)

    with pytest.raises(CorruptEntry, match="record of request 'r1' is damaged"):
        await delivery.requests.record(address())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("about", b""),
        ("about", b"\x01x"),
        ("state", b"\xff"),
        ("rows", "9" * 5000),
        ("deadline_at", "9" * 400),
        ("deadline_at", "x"),
        ("kept_ms", "?"),
    ],
)
async def test_a_job_whose_record_is_damaged(
    delivery: Queue, store: ControlStore, caplog: pytest.LogCaptureFixture, field: str, value: Any
) -> None:
    """It hides no other, and is logged once by who looks at all again and again."""
    jobs = Jobs(delivery)
    for job_id in ("j1", "j2"):
        await planned(delivery, 2, job_id)
    await store.client.hset(JobAddress("digits", 0, "j1").record, field, value)

    for _ in range(3):
        assert [record.id for record in await jobs.unfinished()] == ["j2"]
        assert [record.id for record in (await jobs.list()).records] == ["j2"]
        assert len(await jobs.open_rows()) in (1, 2)  # it reads but a few of the fields
    with pytest.raises(CorruptEntry, match=r"job 'j1' is damaged|record of a bulk job"):
        await jobs.get("j1")
    assert len([record for record in caplog.records if record.message == "job unreadable"]) == 1


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[]", b"[" * 100_000])
def test_a_specification_or_grant_that_is_damaged(text: bytes) -> None:
    job = record(spec=text, grant=text)

    with pytest.raises(CorruptEntry):
        spec_of(job)
    with pytest.raises(CorruptEntry):
        granted(job, StoreSettings())


@pytest.mark.parametrize(
    ("shard", "part"),
    [
        ({"index": -1}, {}),
        ({"rows": 11}, {}),
        ({"rows": -1}, {"rows": -1}),
        ({}, {"row_group": -2}),
        ({}, {"first_row": -1}),
        ({}, {"first_in_group": -1}),
        ({}, {"begin": -1}),
    ],
)
def test_a_ticket_with_numbers_that_no_plan_has(shard: dict[str, int], part: dict[str, int]) -> None:
    whole = Shard(0, "part-00000.parquet", 10, (Range("file:///in.parquet", "etag", 0, 0, 10, 0),))
    assert decode_ticket(encode_ticket(ShardTicket("j1", whole))).shard == whole
    ranges = (msgspec.structs.replace(whole.ranges[0], **part),)
    damaged_one = msgspec.structs.replace(whole, ranges=ranges, **shard)

    with pytest.raises(CorruptEntry, match="a shard's ticket"):
        decode_ticket(encode_ticket(ShardTicket("j1", damaged_one)))


class Damage:
    """The records of a gateway's database.

    Args:
        url: The database.
    """

    def __init__(self, url: str) -> None:
        self._client: Any = redis.Redis.from_url(url, protocol=2)

    def keys(self) -> list[bytes]:
        """Returns the keys but for those of the requests, whose worker here is a test's."""
        of_requests = (b":p1", b":request:", b":due", b":result:")
        return sorted(key for key in self._client.scan_iter(count=1000) if not any(part in key for part in of_requests))

    def make(self, chance: random.Random, key: bytes) -> bytes | None:
        """Damages a record; returns what it was."""
        was: bytes | None = self._client.dump(key)
        kind = self._client.type(key)
        if chance.random() < 0.1 and not key.startswith(b"qinfer:reply:"):  # to which the test's worker writes
            self._client.delete(key)
            chance.choice((self._client.set, self._client.rpush))(key, b"x")
        elif kind == b"hash":
            name, value = chance.choice(list(self._client.hgetall(key).items()) or [(b"a", b"b")])
            self._client.hset(key, damaged(chance, name) if chance.random() < 0.2 else name, damaged(chance, value))
        elif kind == b"string":
            self._client.set(key, damaged(chance, self._client.get(key) or b""), keepttl=True)
        elif kind == b"zset":
            members = self._client.zrange(key, 0, -1) or [b"a"]
            self._client.zadd(
                key, {damaged(chance, chance.choice(members)): chance.choice((0, -1, 1e300, time.time()))}
            )
        elif kind == b"stream":
            entries = self._client.xrevrange(key, count=1)
            fields = entries[0][1] if entries else {b"r": b"x"}
            self._client.xadd(key, {name: damaged(chance, value) for name, value in fields.items()})
        return was

    def mend(self, key: bytes, was: bytes | None) -> None:
        """Makes a record what it was."""
        if was is not None and not key.startswith(b"qinfer:reply:"):
            self._client.restore(key, 0, was, replace=True)

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    server = Server(settings())
    with server as url:
        yield server, url


def refresh(server: Server) -> None:
    """Has the gateway look at its records; one that it can't read is told of as an error of qinfer's."""
    assert server.running is not None
    looking = asyncio.run_coroutine_threadsafe(server.running.refresh(), server._loop)
    with contextlib.suppress(QinferError):
        looking.result(ANSWER_S)


def test_damaged_records(server: tuple[Server, str], caplog: pytest.LogCaptureFixture) -> None:
    running, url = server
    assert running.running is not None
    queue = running.running.delivery
    damage = Damage(queue.router._settings.url.get_secret_value())

    def ask(client: httpx.Client, path: str, method: str = "GET", body: Any = None) -> httpx.Response:
        reply = client.request(method, path, json=body)
        assert reply.status_code in STATUSES, f"{path}: {reply.status_code} {reply.text}"
        assert "internal error" not in reply.text, path
        return reply

    with httpx.Client(base_url=url, timeout=ANSWER_S) as client:

        def is_well() -> bool:
            reply = client.post("/v2/models/echo/infer", json=BODY)
            return reply.status_code == 200

        def one(chance: random.Random) -> None:
            accepted = ask(client, "/v1/models/echo/requests", "POST", BODY)
            key = chance.choice(damage.keys())
            was = damage.make(chance, key)
            try:
                ask(client, "/v2/models/echo/infer", "POST", BODY)
                ask(client, "/v2/models/stats")
                ask(client, "/v2/repository/index", "POST", {})
                if accepted.status_code == 202:
                    ask(client, json.loads(accepted.text)["links"]["result"])
                refresh(running)
                ask(client, "/v2/models/echo/config")
                ask(client, "/v2/models/echo/infer", "POST", BODY)
            except AssertionError as error:
                error.add_note(f"damaged: {key!r}")
                raise
            damage.mend(key, was)
            refresh(running)
            wait_until(is_well, RECOVERED_S, f"an answer after {key!r} was mended")
            raised = [record.exc_info[1] for record in caplog.records if record.exc_info]
            assert all(isinstance(error, QinferError) for error in raised), (key, raised)

        fuzz(0.05, one)
    damage.close()


ROWS, GROUP = 40, 20


def damaged_ticket(chance: random.Random, job_id: str, shards: Sequence[Shard]) -> bytes:
    """Returns a ticket with other bytes, or one of which a field has a value that no plan has."""
    ticket = ShardTicket(job_id, chance.choice(shards))
    if chance.random() < 0.3:
        return damaged(chance, encode_ticket(ticket))
    fields = msgspec.to_builtins(ticket)
    place = fields[1]
    if chance.random() < 0.7:
        place = place[3][0]
    at = chance.choice([number for number, was in enumerate(place) if not isinstance(was, list)])
    numbers = (-(2**63), -1, 0, 1, 19, 2**31, 2**62, 2**63 - 1)
    texts = (
        "",
        "/",
        "/etc/passwd",
        "../../escaped",
        "a/../../escaped",
        "file:///etc/passwd",
        "s3://bucket/x",
        "x" * 5000,
    )
    text = chance.choice((*texts, chance.choice(NASTY).decode("latin-1")))
    place[at] = chance.choice(numbers) if isinstance(place[at], int) else text
    return msgspec.msgpack.encode(fields)


async def steal(chance: random.Random, store: ControlStore, lane: Lane) -> None:
    """Has a stranger take the leases that a worker holds, with another count of deliveries, or with none."""
    key, group, pending = keys.lane(lane), keys.GROUP, []
    with contextlib.suppress(redis.ResponseError):  # no worker has asked for a shard yet
        pending = await store.client.xpending_range(key, group, "-", "+", 10)
    for lease in pending:
        count = chance.choice((0, 1))
        await store.client.execute_command(
            "XCLAIM", key, group, "stranger", 0, lease["message_id"], "RETRYCOUNT", count
        )


@pytest.mark.parametrize(
    "part", ["", "/", ".", "..", "/a", "a/", "a//b", "./a", "a/./b", "a/../../b", "../\nb", "a/..", "a\0b"]
)
def test_a_part_outside_of_its_output_is_no_ticket(part: str) -> None:
    ticket = ShardTicket("j1", Shard(0, part, 1, (Range("file:///in", "e", 0, 0, 1, 0),)))

    with pytest.raises(CorruptEntry, match="can't be read"):
        decode_ticket(encode_ticket(ticket))


async def test_damaged_tickets_and_leases(
    delivery: Queue, store: ControlStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker goes on with the shards of other jobs: each of their rows is scored once, and nothing lies elsewhere."""
    url, loop = write_rows(tmp_path / "in.parquet", ROWS, group=GROUP), asyncio.get_running_loop()
    shards, lane = shards_of(url), bulk_lanes("stub", 1)[1]

    async def one(scene: InlineWorkers, chance: random.Random) -> None:
        name = f"{chance.getrandbits(64):x}"
        bad, good = f"bad-{name}", f"good-{name}"
        await submit_job(delivery, job_spec([url], tmp_path / bad), shards, job_id=bad)
        for _ in range(5):
            await store.client.xadd(keys.lane(lane), {"f": damaged_ticket(chance, bad, shards)})
        await submit_job(delivery, job_spec([url], tmp_path / good), shards, job_id=good)
        if chance.random() < 0.3:
            await steal(chance, store, lane)
        found = await outcomes(delivery, len(shards), job_id=good)
        assert found == [ShardOutcome(shard.index, shard.rows) for shard in shards]
        assert scored_rows(tmp_path / good) == [(row, float(row)) for row in range(ROWS)]
        assert await Jobs(delivery).stop(bad, "cancelled", in_hand=True)

    async with inline_workers(delivery, store) as scene:
        await scene.model()
        await scene.worker(lease_s=0.4, renew_every_s=0.1, max_deliveries=100)
        await asyncio.to_thread(
            fuzz, 0.05, lambda chance: asyncio.run_coroutine_threadsafe(one(scene, chance), loop).result(ANSWER_S)
        )
        assert value_of(await scene.submit(7.0)) == 7.0

    assert all(name.startswith(("in.parquet", "bad-", "good-")) for name in os.listdir(tmp_path))
    raised = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert not raised


async def damage_a_sequence(chance: random.Random, store: ControlStore, key: bytes) -> None:
    """Damages a field, a member or an entry of a key of sequences."""
    client = store.client
    kind = await client.type(key)
    if kind == b"hash":
        name, value = chance.choice(list((await client.hgetall(key)).items()))
        await client.hset(
            key, name, chance.choice((damaged(chance, value), msgspec.msgpack.encode(odd_record(chance))))
        )
    elif kind == b"stream":
        entries = await client.xrevrange(key, count=1)
        of_bad = {name: value.replace(b"good-", b"bad-") for name, value in (entries[0][1] if entries else {}).items()}
        fields = of_bad or {b"s": b":n1", b"l": b"1", b"n": b"1", b"e": b"1-1", b"t": b"1"}
        name = chance.choice(list(fields))
        changed = {**fields, name: chance.choice((damaged(chance, fields[name]), *NASTY, b"0", b"nan"))}
        if len(changed) > 1 and chance.random() < 0.3:
            del changed[name]
        await client.xadd(key, changed)
    elif kind == b"string":
        await client.set(key, damaged(chance, await client.get(key) or b""), keepttl=True)
    elif kind == b"zset":
        await client.zadd(key, {damaged(chance, b":n1"): chance.choice((0, -1, 1e300, 1))})
    elif kind == b"set":
        await client.sadd(key, damaged(chance, b":n1"))


def odd_record(chance: random.Random) -> dict[str, Any]:
    """Returns a record of a sequence, with a field of another type or of a value that none has."""
    record: dict[str, Any] = {"state": "open", "life": 1, "tail": 1, "token": 1, "committed": 1, "accepted": 1}
    record |= {"idle": 60_000, "used": 1, "version": "1", "generation": "1", "kind": "implicit", "owner": "w1-1-1"}
    odd: tuple[Any, ...] = (
        -1,
        1.5,
        2**62,
        1e300,
        float("nan"),
        float("inf"),
        "",
        "x",
        "%s %d",
        None,
        True,
        [],
        {"a": 1},
    )
    return {**record, chance.choice([*record, "ticket", "failed", "text", "tail"]): chance.choice(odd)}


async def test_damaged_sequences(caplog: pytest.LogCaptureFixture) -> None:
    """What is damaged fails or ends its own sequence; others begin, go on and end, in the same worker."""
    loop = asyncio.get_running_loop()

    async def one(sums: SequencesServed, chance: random.Random) -> None:
        store, prefix = sums.scene.store, keys.prefix("stub", 0)
        bad, good = f"bad-{chance.getrandbits(64):x}", f"good-{chance.getrandbits(64):x}"
        for of in (bad, good):
            assert (await sums.post(1, of, start=True)).status_code == 200
        found = [key async for key in store.client.scan_iter(f"{prefix}*") if b"seq" in key or b"steps" in key]
        mine = sorted(key for key in found if b"good-" not in key and b"lanes" not in key)
        key = chance.choice([key for key in mine if bad.encode() in key or b"bad-" not in key])
        await damage_a_sequence(chance, store, key)
        options = {"start": chance.random() < 0.3, "end": chance.random() < 0.3, "step": chance.choice((1, 2, 2, 3))}
        try:
            reply = await sums.post(2, bad, **options)
            assert reply.status_code in STATUSES, reply.text
            assert "internal error" not in reply.text
            second = await sums.post(2, good, end=True)
            assert second.status_code == 200, second.text
            assert second.json()["outputs"][0]["data"][0] == 3
            assert await sums.sum(1, 2, 3, correlation_id=good) == [1, 3, 6]
        except AssertionError as error:
            error.add_note(f"damaged: {key!r}")
            raise

    slots = "oldest { max_candidate_sequences: 10000 }"
    async with sequences_served(strategy=slots, limits={"default_timeout_s": 1.0}) as sums:
        await sums.start(lease_s=5.0)
        await asyncio.to_thread(
            fuzz, 0.1, lambda chance: asyncio.run_coroutine_threadsafe(one(sums, chance), loop).result(ANSWER_S)
        )

    raised = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert all(isinstance(error, QinferError) for error in raised), raised


async def test_a_step_that_redis_refuses_to_commit() -> None:
    """Its sequence fails; those whose steps are committed together with it go on."""
    async with sequences_served(limits={"default_timeout_s": 5.0}) as sums:
        await sums.start()
        for of in range(1, 5):
            assert (await sums.post(1, of, start=True)).status_code == 200
        sums.scene.hold()
        steps = [asyncio.create_task(sums.post(2, of, end=True)) for of in range(1, 5)]
        await sums.submitted(4)
        await sums.scene.started()
        await sums.scene.store.client.set(keys.sequence("stub", 0, ":n1"), "x")
        sums.scene.go()
        replies = await asyncio.gather(*steps)

        assert replies[0].status_code == 503
        assert [reply.json()["outputs"][0]["data"][0] for reply in replies[1:]] == [3, 3, 3]
        assert await sums.sum(1, 2, correlation_id=9) == [1, 3]
        await sums.scene.store.client.delete(keys.sequence("stub", 0, ":n1"))
