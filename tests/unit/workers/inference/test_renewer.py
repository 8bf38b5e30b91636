"""What the process beside a worker renews, and what it does not."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from pydantic import SecretStr
from redis.exceptions import ConnectionError as Away
from redis.exceptions import ResponseError

from qinfer.core.processes import packed
from qinfer.core.settings import RedisSettings
from qinfer.queue.clients import Login
from qinfer.testing import wait_until
from qinfer_workers import renewer
from qinfer_workers.renewer import HeldLeases, RenewalReport, Renewer, RenewerHello

LANE, OTHER = b"qinfer:{a#0}:1:p1", b"qinfer:{b#0}:1:p1"
HELLO = RenewerHello(Login("redis://127.0.0.1:1", "", False, 1.0, 1.0), b"workers", b"w", b"the script", 3.0, 100.0)


class FakeRedis:
    """Answers what a test says.

    Attributes:
        pending: Lane → (entry id, idle milliseconds) of the worker's entries.
        lost: What renewals find lost.
        errors: Lane → what is raised.
        renewed: (lane, entry ids) of each renewal.
        counts: How many of the worker's entries were asked for at most, each time.
    """

    def __init__(self) -> None:
        self.pending: dict[bytes, list[tuple[bytes, int]]] = {}
        self.lost: list[bytes] = []
        self.errors: dict[bytes, Exception] = {}
        self.renewed: list[tuple[bytes, list[bytes]]] = []
        self.counts: list[int] = []

    def xpending_range(
        self, lane: bytes, _group: bytes, _start: str, _end: str, count: int, _consumer: bytes
    ) -> list[dict[str, Any]]:
        self.counts.append(count)
        if lane in self.errors:
            raise self.errors[lane]
        return [{"message_id": name, "time_since_delivered": idle} for name, idle in self.pending.get(lane, [])]

    def eval(self, script: bytes, count: int, lane: bytes, group: bytes, consumer: bytes, *ids: bytes) -> list[bytes]:
        assert (script, count, group, consumer) == (b"the script", 1, b"workers", b"w")
        if lane in self.errors:
            raise self.errors[lane]
        self.renewed.append((lane, list(ids)))
        return [name for name in ids if name in self.lost]


class Time:
    """Stands in for `time`."""

    now_s = 1000.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now_s


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> FakeRedis:
    monkeypatch.setattr(renewer, "time", Time)
    monkeypatch.setattr(Time, "now_s", 1000.0)
    return FakeRedis()


def kinds(report: RenewalReport) -> dict[bytes, str]:
    """Returns what failed, without the words of each failure."""
    return {what: text.partition(":")[0] for what, text in report.failed.items()}


def test_what_was_told_is_renewed_until_its_end(redis: FakeRedis) -> None:
    """And what is lost is reported."""
    one = Renewer(HELLO, redis)
    one.report(HeldLeases({LANE: {b"1-0": 2000.0, b"2-0": 999.0, b"3-0": 2000.0}, OTHER: {}}))
    redis.lost = [b"3-0"]

    report = one.renew()

    assert redis.renewed == [(LANE, [b"1-0", b"3-0"])]
    assert (report.began_s, report.lost, report.failed) == (1000.0, [(LANE, b"3-0")], {})


def test_what_was_fetched_since_is_renewed_when_the_worker_is_silent(
    redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not what the worker had long had and did not tell: it has let it go."""
    one = Renewer(HELLO, redis)
    one.report(HeldLeases({LANE: {b"1-0": 2000.0, b"2-0": 1001.0}}))
    redis.pending[LANE] = [(b"1-0", 100), (b"2-0", 100), (b"5-0", 60_000), (b"8-0", 4_000), (b"9-0", 10)]
    one.renew()
    assert redis.renewed.pop() == (LANE, [b"1-0", b"2-0"])

    monkeypatch.setattr(Time, "now_s", 1002.5)
    one.renew()
    assert redis.renewed.pop() == (LANE, [b"1-0", b"8-0", b"9-0"])

    monkeypatch.setattr(Time, "now_s", 1103.0)
    redis.pending[LANE] = []
    one.renew()
    assert redis.renewed.pop() == (LANE, [b"1-0"])


def test_what_was_fetched_since_is_found_behind_all_that_was_told(
    redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis lists the oldest first, of a worker with large batches thousands."""
    one = Renewer(HELLO, redis)
    one.report(HeldLeases({LANE: {b"%d-0" % number: 2000.0 for number in range(5000)}}))
    monkeypatch.setattr(Time, "now_s", 1002.5)
    one.renew()

    assert redis.counts[0] > 5000


def test_the_worker_tells_again(redis: FakeRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then only that counts."""
    one = Renewer(HELLO, redis)
    one.report(HeldLeases({LANE: {}}))
    redis.pending[LANE] = [(b"9-0", 10)]
    monkeypatch.setattr(Time, "now_s", 1002.5)
    one.renew()
    one.report(HeldLeases({LANE: {b"1-0": 2000.0}}))
    one.renew()

    assert redis.renewed == [(LANE, [b"9-0"]), (LANE, [b"1-0"])]


def test_a_node_that_is_away_is_told_and_the_others_renewed(redis: FakeRedis) -> None:
    """By the name of the error only, which has no address in it."""
    one = Renewer(HELLO, redis)
    one.report(HeldLeases({LANE: {b"1-0": 2000.0}, OTHER: {b"2-0": 2000.0}}))
    redis.errors[LANE] = Away("to 10.0.0.1:6379")

    report = one.renew()

    assert redis.renewed == [(OTHER, [b"2-0"])]
    assert kinds(report) == {LANE: "ConnectionError"}


def test_a_node_that_was_away_is_told_until_it_is_there_again(redis: FakeRedis) -> None:
    """Though nothing is held there any more: or the worker would fetch what can't be renewed."""
    one = Renewer(HELLO, redis)
    one.report(HeldLeases({LANE: {b"1-0": 2000.0}}))
    redis.errors[LANE] = Away("to 10.0.0.1:6379")
    one.renew()
    one.report(HeldLeases({LANE: {}}))

    still = one.renew()
    del redis.errors[LANE]

    assert kinds(still) == {LANE: "ConnectionError"}
    assert [one.renew().failed for _ in range(2)] == [{}, {}]
    assert redis.renewed == [(LANE, [])]


def test_entries_of_a_deleted_lane_are_lost(redis: FakeRedis) -> None:
    """Redis knows no group then."""
    one = Renewer(HELLO, redis)
    one.report(HeldLeases({LANE: {b"1-0": 2000.0}}))
    redis.errors[LANE] = ResponseError("NOGROUP No such key")

    report = one.renew()

    assert (report.lost, report.failed) == ([(LANE, b"1-0")], {})


def test_a_login_has_the_secrets_of_the_settings() -> None:
    """They come over a pipe, and pydantic is not imported there."""
    settings = RedisSettings(url=SecretStr("redis://:word@host"), sentinel_password=SecretStr("other"))

    login = Login.from_settings(settings)

    assert (login.url, login.sentinel_password) == ("redis://:word@host", "other")


def test_it_ends_with_the_process_that_started_it_and_not_by_its_signals() -> None:
    """SIGTERM means the worker, which drains."""
    child = _start(os.getpid())
    assert child.stdin is not None
    try:
        wait_until(lambda: _ignores(child.pid, signal.SIGTERM), description="a renewer that ignores SIGTERM")
        child.terminate()
        child.stdin.close()
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.wait()


def test_it_ends_where_its_worker_was_gone_before_it_began() -> None:
    """Its parent is then another process, which is not its worker."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with _start(gone.pid) as child:
        try:
            assert child.wait(10) == 0
        finally:
            child.kill()


def _start(worker: int) -> "subprocess.Popen[bytes]":
    """Starts a renewer for a worker, and tells it how to renew."""
    command = [sys.executable, "-m", "qinfer_workers.renewer", str(worker)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert child.stdin is not None
    child.stdin.write(packed(HELLO))
    child.stdin.flush()
    return child


def _ignores(pid: int, signum: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        (mask,) = [line.split()[1] for line in file if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_owners_of_sequences_are_renewed_while_the_worker_is_silent() -> None:
    """One that can't be renewed is reported, and one whose lease has ended."""
    calls: list[tuple[Any, ...]] = []

    class OwnersRedis:
        def eval(self, *words: Any) -> int:
            calls.append(words)
            if len(calls) == 2:
                raise Away("gone")
            return int(len(calls) == 1)

    hello = RenewerHello(HELLO.redis, b"workers", b"w", b"", 3.0, 100.0, b"the owners' script", 10.0)
    one = Renewer(hello, OwnersRedis())
    one.report(HeldLeases({}, owners={"w.1": [b"owners", b"orphans", b"lane"]}))

    assert one.renew().failed == {}
    assert kinds(one.renew()) == {b"w.1": "ConnectionError"}
    assert one.renew().ended == ["w.1"]
    assert calls[0] == (b"the owners' script", 3, b"owners", b"orphans", b"lane", "w.1", 10000, 0)


def test_it_knows_whether_a_process_runs() -> None:
    """Stopped counts as gone."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert renewer._is_running(child.pid)
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: not renewer._is_running(child.pid))
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: renewer._is_running(child.pid))
    finally:
        child.kill()
        child.communicate()
    assert not renewer._is_running(child.pid)
    assert renewer._is_running(os.getpid())
