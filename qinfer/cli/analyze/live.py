"""A live installation on which configurations are tried beside the model that callers use.

A candidate is a copy of the model: a model of its own name over the model's files. An ensemble's copy refers to copies
of its steps. A worker that this command starts executes them, and no other: a name that begins with `~` is loaded only
by workers whose globs do. A guard watches the model itself.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from qinfer.cli.analyze.apply import copies_apart
from qinfer.cli.analyze.guard import GuardState, Probes
from qinfer.cli.analyze.loads import loaded_models
from qinfer.cli.analyze.stack import TrialServer, end_child
from qinfer.cli.client import GatewayClient
from qinfer.cli.console import CommandFailed
from qinfer.cli.local.machine import child_environment
from qinfer.core.processes import WORKER, program_environment
from qinfer.core.settings import load_settings
from qinfer.errors import QinferError
from qinfer.models.readiness import APART

BEFORE_S, CALM_S = 10.0, 1.0
"""Seconds of probes before the search, and after each window."""


class LiveGuard:
    """Watches the worker, and the model that callers use."""

    def __init__(self, worker: "subprocess.Popen[bytes]", probes: Probes) -> None:
        self._worker, self._probes = worker, probes
        self._state = GuardState.begun(probes.during(BEFORE_S) or [math.inf])
        if math.isinf(self._state.limit_ms):  # no latency would be beyond it
            raise CommandFailed(
                "requests to the model fail, or get no answer, before anything is tried; see `qinfer status`"
            )

    def check(self) -> None:
        """Raises `CommandFailed` if the worker has ended, or the model has become slower."""
        if self._worker.poll() is not None:
            raise CommandFailed(f"the worker ended with code {self._worker.returncode}; its log is above")
        loaded_ms = self._probes.taken()
        self._state = self._state.with_probes(self._probes.during(CALM_S), loaded_ms)
        if self._state.is_tripped:
            raise CommandFailed(
                f"stopped, because callers would notice: {self._state.reason()}; give a smaller --concurrency, or run "
                "the command on another machine"
            )


@contextmanager
def live_server(
    url: str, model: str, variables: Mapping[str, str], repositories: Sequence[str], data: Sequence[str]
) -> Iterator[TrialServer]:
    """Starts a worker beside an installation, loads copies of the model there, and removes all at the end.

    `variables` are settings of the installation's Redis and payload store, and its `repositories` are directories here.
    The first request of the `data` options probes the model.

    Raises:
        CommandFailed: The model does not answer well.
        QinferError: The gateway is not in mode explicit, or refuses the model.
    """
    with GatewayClient(url) as client, GatewayClient(url) as probing:
        one = loaded_models(client, {model: 1.0}, [], data)[0]
        one.ask_once(client)
        copies = copies_apart(client, model)
        worker = _started_worker(copies, variables, repositories)
        probes = Probes(partial(one.ask_once, probing))
        try:
            for name, config in copies.items():
                client.load(name, config=config)
            yield TrialServer(url, client, worker, LiveGuard(worker, probes).check, APART)
        finally:
            probes.close()
            for name in reversed(copies):
                with suppress(QinferError):
                    client.unload(name)
            end_child(worker)


def _started_worker(
    models: Iterable[str], variables: Mapping[str, str], repositories: Sequence[str]
) -> "subprocess.Popen[bytes]":
    settings = load_settings()
    own = {
        "QINFER_WORKER__MODELS": json.dumps(list(models)),
        "QINFER_REPOSITORY__PATH": ",".join(str(Path(one).absolute()) for one in repositories),
    }
    base = child_environment(os.environ, {**variables, **own})
    env = program_environment(WORKER, base, [*settings.pass_env, *settings.worker.model_env])
    command = [sys.executable, "-P", "-m", "qinfer.cli.local.child", "", "qinfer_workers.inference"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=env)  # noqa: S603  our own interpreter
