"""A live installation on which configurations are tried beside the model that callers use.

A candidate is a model of its own name over the model's files. A worker that this command starts executes it, and no
other: a name that begins with `~` is loaded only by workers whose globs do. A guard watches the model itself.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from qinfer.cli.analyze.apply import beside, without_files_of
from qinfer.cli.analyze.guard import GuardState, Probes
from qinfer.cli.analyze.loads import loaded_models
from qinfer.cli.analyze.stack import STOP_S
from qinfer.cli.client import GatewayClient
from qinfer.cli.console import CommandFailed
from qinfer.cli.local.machine import child_environment
from qinfer.core.processes import WORKER, program_environment
from qinfer.core.settings import load_settings
from qinfer.errors import QinferError
from qinfer.models.readiness import APART
from qinfer.observe.host import ProcessUse, read_use

BEFORE_S, CALM_S = 10.0, 1.0
"""Seconds of probes before the search, and after each window."""


class LiveServer:
    """A live installation; `client` is one of a gateway at `url`."""

    def __init__(self, url: str, client: GatewayClient, worker: "subprocess.Popen[bytes]", probes: Probes) -> None:
        self.url, self.client = url, client
        self._worker, self._probes = worker, probes
        self._guard = GuardState.begun(probes.during(BEFORE_S) or [math.inf])
        if math.isinf(self._guard.limit_ms):  # no latency would be beyond it
            raise CommandFailed(
                "requests to the model fail, or get no answer, before anything is tried; see `qinfer status`"
            )

    def configure(self, model: str, config: Mapping[str, Any]) -> None:
        """Loads a configuration of the model beside it."""
        self.client.load(model, config=config)

    def check(self) -> None:
        """Raises `CommandFailed` if the worker has ended, or the model has become slower."""
        if self._worker.poll() is not None:
            raise CommandFailed(f"the worker ended with code {self._worker.returncode}; its log is above")
        loaded_ms = self._probes.taken()
        self._guard = self._guard.with_probes(self._probes.during(CALM_S), loaded_ms)
        if self._guard.is_tripped:
            raise CommandFailed(
                f"stopped, because callers would notice: {self._guard.reason()}; give a smaller --concurrency, or run "
                "the command on another machine"
            )

    def use(self) -> ProcessUse:
        """Returns CPU time and memory of the worker."""
        return read_use(pid=self._worker.pid) or ProcessUse(0.0, 0)

    def files_digest(self, model: str) -> str:
        """Returns a digest of the model's versions."""
        return sha256(repr(self.client.metadata(model).versions).encode()).hexdigest()

    def told(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a configuration as the model's own."""
        return without_files_of(config)


@contextmanager
def live_server(
    url: str, model: str, variables: Mapping[str, str], repositories: Sequence[str], data: Sequence[str]
) -> Iterator[LiveServer]:
    """Starts a worker beside an installation, loads the model's configuration there, and removes both at the end.

    Args:
        url: A gateway's URL.
        model: The model.
        variables: Settings of the installation's Redis and payload store.
        repositories: The repositories that the installation serves.
        data: `--data` options; the first request probes the model.

    Raises:
        CommandFailed: The model is an ensemble.
        QinferError: The gateway is not in mode explicit, or refuses the model.
    """
    apart = f"{APART}{model}"
    with GatewayClient(url) as client, GatewayClient(url) as probing:
        one = loaded_models(client, {model: 1.0}, [], data)[0]
        if "ensemble_scheduling" in one.config:
            raise CommandFailed(f"{model} is an ensemble, whose steps are not tuned in place; analyse each by itself")
        one.ask_once(client)
        worker = _started_worker(apart, variables, repositories)
        probes = Probes(partial(one.ask_once, probing))
        try:
            client.load(apart, config=beside(one.config, model, apart))
            yield LiveServer(url, client, worker, probes)
        finally:
            probes.close()
            with suppress(QinferError):
                client.unload(apart)
            # a child ends with its standard input
            assert worker.stdin is not None
            worker.stdin.close()
            try:
                worker.wait(STOP_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def _started_worker(model: str, variables: Mapping[str, str], repositories: Sequence[str]) -> "subprocess.Popen[bytes]":
    settings = load_settings()
    own = {
        "QINFER_WORKER__MODELS": json.dumps([model]),
        "QINFER_REPOSITORY__PATH": ",".join(str(Path(one).absolute()) for one in repositories),
    }
    base = child_environment(os.environ, {**variables, **own})
    env = program_environment(WORKER, base, [*settings.pass_env, *settings.worker.model_env])
    command = [sys.executable, "-P", "-m", "qinfer.cli.local.child", "", "qinfer_workers.inference"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=env)  # noqa: S603  our own interpreter
