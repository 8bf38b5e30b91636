"""The process that renews a worker's leases: a model that keeps the GIL would stop a thread."""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from qinfer.core.processes import helper_environment, packed, received
from qinfer.core.retry import Backoff, OutageLog
from qinfer.core.settings import Settings
from qinfer.observe.stats import OVERDUE
from qinfer.queue import keys
from qinfer.queue.clients import Login
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import RENEW
from qinfer.queue.sequences.ownership import RENEW_OWNER
from qinfer_workers import renewer
from qinfer_workers.inference.publisher import LeaseKeeper
from qinfer_workers.renewer import DueTable

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_LONGEST_RETRY_S = 5.0


class ProcessRenewals:
    """Renews leases in a process, which also ends a worker over the limits in `due`."""

    def __init__(
        self, settings: Settings, consumer: str, environment: Mapping[str, str], due: DueTable | None = None
    ) -> None:
        self._inherited = () if due is None else (due.fd,)
        self._environment = helper_environment(environment)
        self._hello = renewer.RenewerHello(
            redis=Login.from_settings(settings.redis),
            group=keys.GROUP,
            consumer=consumer.encode(),
            script=RENEW.text,
            every_s=settings.worker.renew_every_s,
            longest_s=max(settings.limits.max_timeout_s, settings.requests.max_timeout_s),
            owner_script=RENEW_OWNER.text,
            lease_s=settings.worker.lease_s,
            due=0 if due is None else due.fd,
            log_format=settings.log.format,
            overdue_field=OVERDUE,
        )
        self._lanes: dict[bytes, Lane] = {}
        self._asked = asyncio.Event()
        self._outage = OutageLog(logger, "leases not renewed", "leases are renewed again")
        self._endings = OutageLog(
            logger,
            "the renewer of leases ended, starting another; without one nothing is fetched",
            "a renewer of leases is running",
            level=logging.ERROR,
        )
        self._backoff = Backoff(_RETRY_S, _LONGEST_RETRY_S)

    async def run(self, keeper: LeaseKeeper) -> None:
        """Renews until cancelled, and restarts the process."""
        while True:
            try:
                self._endings.failed(f"it ended with status {await self._run_one(keeper)}")
            except OSError as error:  # no memory, or too many processes or files
                self._endings.failed(f"it can't be started: {error.strerror}")
            await asyncio.sleep(self._backoff.next_s())

    async def _run_one(self, keeper: LeaseKeeper) -> int | None:
        command = [sys.executable, "-P", "-m", renewer.__name__, str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            *command, env=self._environment, stdin=PIPE, stdout=PIPE, pass_fds=self._inherited
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                sender = tasks.create_task(self._send_leases(process, keeper))
                await self._listen(process, keeper)
                sender.cancel()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return process.returncode

    def ask(self) -> None:
        """Renews at once."""
        self._asked.set()

    async def _send_leases(self, process: Process, keeper: LeaseKeeper) -> None:
        assert process.stdin is not None
        pause_s = self._hello.every_s / renewer.REPORTS_PER_RENEWAL
        with suppress(ConnectionError):  # `_listen` handles its end
            process.stdin.write(packed(self._hello))
            while not process.stdin.is_closing():  # uvloop refuses writes then, with a RuntimeError
                held = self._held(keeper)
                held.now = self._asked.is_set()
                self._asked.clear()
                process.stdin.write(packed(held))
                await process.stdin.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._asked.wait()

    def _held(self, keeper: LeaseKeeper) -> renewer.HeldLeases:
        held = renewer.HeldLeases({}, owners={owner: list(lease.keys) for owner, lease in keeper.owners.items()})
        for lane in keeper.lanes():
            self._lanes[keys.lane(lane)] = lane
            held.lanes[keys.lane(lane)] = {}
        for item, until_s in keeper.wanted():
            entry = item.lease.entry
            self._lanes[keys.lane(entry.lane)] = entry.lane
            held.lanes.setdefault(keys.lane(entry.lane), {})[entry.entry_id.encode()] = until_s
        return held

    async def _listen(self, process: Process, keeper: LeaseKeeper) -> None:
        assert process.stdout is not None
        decoder = msgspec.msgpack.Decoder(renewer.RenewalReport)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self._handle_report(decoder.decode(await received(process.stdout)), keeper)

    def _handle_report(self, report: renewer.RenewalReport, keeper: LeaseKeeper) -> None:
        self._backoff.reset()
        self._endings.over()
        for reason in report.failed.values():
            self._outage.failed(reason)
        if not report.failed:
            self._outage.over()
        lost = {(self._lanes[lane], entry_id.decode()) for lane, entry_id in report.lost}
        failed = [self._lanes[lane] for lane in report.failed if lane in self._lanes]
        keeper.renewed(report.began_s, lost, failed, report.renewed)
        for owner in report.ended:
            if (lease := keeper.owners.get(owner)) is not None:
                lease.ended()
