"""The renewer: a process beside a worker that renews its leases, `python -m qinfer_workers.renewer PID`.

A thread would need the GIL, which model code may hold for longer than a lease. The worker
(`renewals.ProcessRenewals`) sends `RenewerHello`, then `HeldLeases` each second, to its standard input, and reads a
`RenewalReport` after each renewal from its standard output.

The renewer renews the last reported leases. While a model holds the GIL, the worker can't report: the renewer asks
Redis for entries that the worker has fetched since, and renews those too. When the worker is gone, or stopped
(SIGSTOP), the renewer renews nothing, so that others take over.

It also kills a worker that does not end by itself when an execution exceeds its model's limit (decision 0031): in
shared memory (`DueTable`), the worker writes in advance until when it may be silent, 8 bytes at the begin and end of
each execution, without a system call. Instants are on the monotonic clock, which processes of a machine share. It
imports neither numpy nor pydantic.
"""

import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, MutableSequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import msgspec
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from qinfer.core.processes import LENGTH, packed, protect_process
from qinfer.queue import keys
from qinfer.queue.clients import Login, blocking_client

SLOTS = 1024
"""Further instances are watched by the worker only."""

NAME_BYTES = 256

_DOUBLES = SLOTS * 8

GRACE_S = 5.0
"""Seconds that the worker has to give back its entries and end by itself."""


class DueTable:
    """The worker's side; the reader inherits the descriptor `fd`."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("qinfer-due")
        os.ftruncate(self.fd, _DOUBLES + SLOTS * NAME_BYTES)
        self._memory = mmap.mmap(self.fd, 0)
        self._due = cast("MutableSequence[float]", memoryview(self._memory)[:_DOUBLES].cast("d"))
        self._free = list(range(SLOTS))
        self._lock = threading.Lock()

    def place(self, name: str) -> tuple[MutableSequence[float], int]:
        """Returns an instance's sequence, and the index in it."""
        with self._lock:
            if not self._free:
                return [0.0], 0
            place = self._free.pop()
        begin = _DOUBLES + place * NAME_BYTES
        self._memory[begin : begin + NAME_BYTES] = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        return self._due, place

    def free(self, place: tuple[MutableSequence[float], int]) -> None:
        """Takes a place back."""
        due, number = place
        if due is self._due:
            due[number] = 0.0
            with self._lock:
                self._free.append(number)


class DueReader:
    """The watching process's side."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        self._due = memoryview(self._memory)[:_DOUBLES].cast("d")

    def overdue(self, now_s: float) -> list[str]:
        """Returns the instances whose instant and grace have passed."""
        return [self._read_name(place) for place in overdue(self._due, now_s)]

    def _read_name(self, place: int) -> str:
        begin = _DOUBLES + place * NAME_BYTES
        return self._memory[begin : begin + NAME_BYTES].rstrip(b"\0").decode(errors="replace")


def overdue(due: Iterable[float], now_s: float) -> list[int]:
    """Returns the indices of passed instants, after the grace; 0 is no instant. Pure."""
    return [place for place, due_s in enumerate(due) if 0.0 < due_s < now_s - GRACE_S]


REPORTS_PER_RENEWAL = 3

GUARD_S = 0.5

_RETRY_S = 0.5
_PAGE = 1000
_READ_BYTES = 1 << 16


class RenewerHello(msgspec.Struct, array_like=True):
    """The first message: how to renew. It has Redis' password, so it uses the pipe, and is never logged.

    The scripts are the texts of `lanes/renew.lua` and `sequences/renew.lua`. Unreported leases are renewed for
    `longest_s` at most. `due` is the inherited descriptor of the worker's `DueTable`, or 0. The statistic
    `overdue_field` counts executions over their limit.
    """

    redis: Login
    group: bytes
    consumer: bytes
    script: bytes
    every_s: float
    longest_s: float
    owner_script: bytes = b""
    lease_s: float = 10.0
    due: int = 0
    log_format: str = "json"
    overdue_field: str = ""


class HeldLeases(msgspec.Struct, array_like=True):
    """The held leases: key of each lane that the worker fetches from → entry id → until when to renew it (monotonic).

    `owners` maps owners of sequences to their leases' keys; `now` asks for a renewal at once.
    """

    lanes: dict[bytes, dict[bytes, float]]
    now: bool = False
    owners: dict[str, list[bytes]] = {}


class RenewalReport(msgspec.Struct, array_like=True):
    """The outcome of a renewal.

    `lost` has (lane's key, entry id), `failed` the reason by lane or owner, `ended` the owners without a lease.
    """

    began_s: float
    lost: list[tuple[bytes, bytes]]
    failed: dict[bytes, str]
    renewed: int = 0
    ended: list[str] = []


class Renewer:
    """Renews the leases of one worker; blocking. Connects at the first renewal."""

    def __init__(self, hello: RenewerHello, client: Any = None) -> None:
        self._hello = hello
        self._client: Any = client
        self._reported = HeldLeases({})
        self._reported_s = time.monotonic()
        self._unreported: dict[bytes, dict[bytes, float]] = {}
        self._failed: set[bytes] = set()

    def report(self, held: HeldLeases) -> None:
        """Takes the leases that the worker holds now."""
        self._reported, self._reported_s = held, time.monotonic()
        self._unreported = {}

    def renew(self) -> RenewalReport:
        """Renews all leases once."""
        began_s = time.monotonic()
        is_silent = began_s - self._reported_s > 2 * self._hello.every_s / REPORTS_PER_RENEWAL
        report = RenewalReport(began_s, [], {})
        for lane, entries in self._reported.lanes.items():
            try:
                self._client = self._client or blocking_client(self._hello.redis)
                if is_silent:
                    self._note_fetched(lane, began_s)
                both = entries | self._unreported.get(lane, {})
                ids = [entry_id for entry_id, until_s in both.items() if until_s > began_s]
                for start in range(0, max(len(ids), int(lane in self._failed)), _PAGE):  # 1: tests a failed node
                    page = ids[start : start + _PAGE]
                    gone = self._renew(lane, page)
                    report.lost += [(lane, entry_id) for entry_id in gone]
                    report.renewed += len(page) - len(gone)
            except (RedisError, RedisClusterException, OSError) as error:  # the other lanes' nodes may work
                report.failed[lane] = f"{type(error).__name__}: {error}"
        for owner, names in self._reported.owners.items():
            try:
                self._client = self._client or blocking_client(self._hello.redis)
                lease_ms = int(self._hello.lease_s * 1000)
                if self._client.eval(self._hello.owner_script, len(names), *names, owner, lease_ms, 0) == 0:
                    report.ended.append(owner)
            except (RedisError, RedisClusterException, OSError) as error:
                report.failed[owner.encode()] = f"{type(error).__name__}: {error}"
        self._failed = set(report.failed)
        return report

    def _note_fetched(self, lane: bytes, now_s: float) -> None:
        group, consumer, known = self._hello.group, self._hello.consumer, self._reported.lanes[lane]
        unreported = self._unreported.setdefault(lane, {})
        since_s = now_s - self._reported_s + self._hello.every_s  # its reply may have been in transit
        try:
            rows = self._client.xpending_range(lane, group, "-", "+", len(known) + _PAGE, consumer)
        except ResponseError as error:
            if "NOGROUP " not in str(error):
                raise
            return
        for row in rows:
            entry_id, idle_s = row["message_id"], row["time_since_delivered"] / 1000
            if entry_id not in known and entry_id not in unreported and idle_s <= since_s:
                unreported[entry_id] = now_s + self._hello.longest_s

    def _renew(self, lane: bytes, ids: list[bytes]) -> list[bytes]:
        try:
            lost: list[bytes] = self._client.eval(
                self._hello.script, 1, lane, self._hello.group, self._hello.consumer, *ids
            )
        except ResponseError as error:
            if "NOGROUP " not in str(error):  # Redis 6.2 has it inside the text
                raise
            return ids  # the lane was deleted
        return lost


class _Inbox:
    def __init__(self) -> None:
        self._bytes = bytearray()

    def read(self, wait_s: float) -> bool:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], max(wait_s, 0.0))
        if not ready:
            return True
        found = os.read(sys.stdin.fileno(), _READ_BYTES)
        self._bytes += found
        return bool(found)

    def pop_messages(self) -> bytes | None:
        if len(self._bytes) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
        if len(self._bytes) < end:
            return None
        message = bytes(self._bytes[LENGTH.size : end])
        del self._bytes[:end]
        return message


class _Outbox:
    def __init__(self) -> None:
        self._unsent: list[tuple[bytes, bytes]] = []
        self._unreported = 0

    def send(self, report: RenewalReport) -> None:
        """Sends a report; while the pipe is full, keeps only lost leases and counts, so that no lease expires."""
        report.lost = self._unsent + report.lost
        report.renewed += self._unreported
        _, ready, _ = select.select([], [sys.stdout.fileno()], [], 0)
        if ready:
            os.write(sys.stdout.fileno(), packed(report))
        self._unsent = [] if ready else report.lost
        self._unreported = 0 if ready else report.renewed


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in b"TtZX"


def _guard(parent: int, due: DueReader, hello: RenewerHello) -> None:
    """Kills a worker that stays over a limit, and counts its executions."""
    while os.getppid() == parent:
        time.sleep(GUARD_S)
        if _is_running(parent) and (overdue := due.overdue(time.monotonic())):
            line = killed_line(overdue, parent, hello.log_format)
            os.write(sys.stderr.fileno(), line.encode())
            os.kill(parent, signal.SIGKILL)
            with suppress(RedisError, RedisClusterException, OSError):
                _count_overdue(overdue, hello)
            return


def _count_overdue(overdue: list[str], hello: RenewerHello) -> None:
    client: Any = blocking_client(hello.redis)
    for name in overdue:
        model, _, version = name.rpartition(":")
        if len(name.encode()) < NAME_BYTES:  # else the name is cut
            client.hincrby(keys.stats(model, int(version)), hello.overdue_field, 1)


def killed_line(models: list[str], pid: int, log_format: str) -> str:
    """Returns the line of the worker's log; qinfer's logging would import the large settings."""
    at, event = datetime.now(UTC).isoformat(timespec="milliseconds"), "worker killed: an execution is over its limit"
    if log_format == "text":
        return f"{at[11:23]} ERROR   renewer: {event} models={','.join(models)} pid={pid}\n"
    fields = {"at": f"{at[:23]}Z", "level": "ERROR", "logger": "qinfer_workers.renewer", "event": event}
    return msgspec.json.encode(fields | {"process": "renewer", "models": models, "pid": pid}).decode() + "\n"


def _renew_leases(parent: int) -> None:
    inbox, outbox, renewer, due_s, is_well = _Inbox(), _Outbox(), None, 0.0, True
    decoder = msgspec.msgpack.Decoder(HeldLeases)
    while inbox.read(due_s - time.monotonic() if renewer else _RETRY_S) and os.getppid() == parent:
        while (message := inbox.pop_messages()) is not None:
            if renewer is None:
                hello = msgspec.msgpack.decode(message, type=RenewerHello)
                renewer, due_s = Renewer(hello), time.monotonic() + hello.every_s
                if hello.due:
                    guard = partial(_guard, parent, DueReader(hello.due), hello)
                    threading.Thread(target=guard, name="guard").start()
                continue
            held = decoder.decode(message)
            renewer.report(held)
            if held.now and is_well:  # else a worker that waits for a success would ask in a loop
                due_s = 0.0
        if renewer is None or time.monotonic() < due_s:
            continue
        is_well = False
        if _is_running(parent):
            report = renewer.renew()
            outbox.send(report)
            is_well = not report.failed
        due_s = time.monotonic() + (hello.every_s if is_well else min(_RETRY_S, hello.every_s))


def main() -> int:
    """Serves the worker whose process id is the first argument."""
    protect_process(os.environ)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # they are for the worker, which needs its leases to drain
    try:
        _renew_leases(int(sys.argv[1]))
    except BrokenPipeError:
        return 0  # the worker is gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
