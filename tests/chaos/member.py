"""A gateway or a worker as a process that is killed, stopped and drained, and started again each time it ends."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

_PAUSE_S = 0.2  # before what ended by itself is started again


class Role(StrEnum):
    """What a process does."""

    WORKER = "worker"
    GATEWAY = "gateway"
    BROKER = "broker"
    BULK = "bulk"
    BRIDGE = "bridge"
    SOURCE = "source"
    """The broker that a bridge takes messages from."""
    WIRE = "wire"
    """The network to a process, for those of other machines."""


MODULES = {
    Role.WORKER: "qinfer_workers.inference",
    Role.GATEWAY: "qinfer_api",
    Role.BULK: "qinfer_workers.jobs",
    Role.BRIDGE: "qinfer_workers.bridge",
}


class Member:
    """A gateway or a worker that is started again and again.

    Args:
        role: What it is.
        env: Its whole environment.
        log: Where its output goes.
        module: Another program than its role's.
        arguments: Of the program.
        enter: The beginning of its command, which runs the rest in another namespace.
    """

    def __init__(
        self,
        role: Role,
        env: dict[str, str],
        log: Path,
        module: str = "",
        arguments: Sequence[str] = (),
        enter: Sequence[str] = (),
    ) -> None:
        self.role = role
        self._enter = enter
        self._program = (module or MODULES[role], *arguments)
        self.exits: Counter[int] = Counter()
        self.starts = 0
        self._started_s = 0.0
        self._env = env
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._ended = asyncio.Event()
        self._is_over = False

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started_s

    async def run(self) -> None:
        """Keeps it running until `end_for_good`."""
        child = (sys.executable, "-P", "-m", "qinfer.cli.local.child", "")  # it ends with this process
        argv = [*self._enter, *child, *self._program]
        while not self._is_over:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *argv, env=self._env, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log
                )
            self.starts += 1
            self._started_s = time.monotonic()
            code = await self._process.wait()
            self.exits[code] += 1
            if code > 0:
                await asyncio.sleep(_PAUSE_S)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def end(self) -> None:
        self.send(signal.SIGTERM)

    async def stop_for(self, seconds: float) -> None:
        """Stops it, and lets it go on, unless it was killed meanwhile."""
        process = self._process
        self.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        if process is self._process:
            self.send(signal.SIGCONT)

    def end_for_good(self) -> None:
        """Drains it, and starts it no more."""
        self._is_over = True
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self.runs:
            # Not `send_signal`: it polls, and may take the exit code that asyncio waits for.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""
