"""The local deployment of `qinfer up`: the processes of one machine, started, awaited, supervised and stopped.

    private Redis ◀── gateway (qinfer_api)             each a child of the supervisor, configured by QINFER_… variables
                  ◀── workers (qinfer_workers.inference)      each with its own environment of the variables it reads
                  ◀── bulk worker (qinfer_workers.jobs)

The gateway stops first, so that requests in flight are answered, then the workers, then Redis. The bulk worker starts
when models are loaded. This process imports little; `preparation` runs in another one.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Union

from qinfer.cli.local import runfile
from qinfer.cli.local.machine import claim_ports, share_cpus, usable_cpus
from qinfer.cli.local.messages import JsonMessages, Messages
from qinfer.cli.local.preparer import Ports, Preparer, SupervisionPlan, UpOptions
from qinfer.cli.local.supervisor import KILL_MARGIN_S, Program, RestartPolicy, Supervisor
from qinfer.core.clock import SystemClock
from qinfer.core.environments import system_environment
from qinfer.core.processes import protect_process
from qinfer.queue.embedded import EmbeddedRedis

if TYPE_CHECKING:
    from qinfer.cli.scaling.scaler import Autoscaler

POLL_S = 0.25
GATEWAY_POLICY = RestartPolicy(give_up_after=3)
REDIS_POLICY = RestartPolicy(give_up_after=5)
WORKER_POLICY = RestartPolicy()
PORT_WAIT_S = 10.0
"""Time for a killed `qinfer up`'s gateway to end."""


def run_deployment(options: UpOptions) -> None:
    """Runs everything until a signal asks to stop."""
    protect_process(os.environ)
    messages = JsonMessages() if options.settings["log"]["format"] == "json" else Messages()
    with (
        Preparer(options) as preparer,
        Supervisor(messages.warn) as supervisor,
    ):
        plan = preparer.check_settings()
        if options.redis_url:
            LocalDeployment(options, plan, preparer, supervisor, messages).serve(options.redis_url)
            return
        redis = EmbeddedRedis(
            options.data_dir,
            durability=options.settings["redis"]["durability"],
            environment=system_environment(os.environ),
            max_memory_bytes=options.redis_memory_bytes,
        )
        before = runfile.read(options.data_dir)
        supervisor.add(redis, REDIS_POLICY, stop_s=KILL_MARGIN_S)
        try:
            deployment = LocalDeployment(options, plan, preparer, supervisor, messages)
            deployment.serve(redis.url, after_a_kill=before is not None)
        finally:
            supervisor.stop([redis])
            runfile.remove(options.data_dir)


class FixedPool:
    """A worker pool of fixed size."""

    def __init__(self, supervisor: Supervisor, env: Mapping[str, str], count: int, drain_s: float) -> None:
        self._supervisor = supervisor
        self._stop_s = drain_s + KILL_MARGIN_S
        self.least = count
        self.about = str(count)
        self.processes = [
            Program(f"worker {number}", "qinfer_workers.inference", env, cpus)
            for number, cpus in enumerate(share_cpus(usable_cpus(), count), start=1)
        ]

    def start(self) -> None:
        """Starts the workers."""
        for worker in self.processes:
            self._supervisor.add(worker, WORKER_POLICY, stop_s=self._stop_s)

    def step(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing: the supervisor stops workers."""


WorkerPool = Union[FixedPool, "Autoscaler"]


class LocalDeployment:
    """The gateway, the workers and the bulk worker of one `qinfer up`."""

    def __init__(
        self, options: UpOptions, plan: SupervisionPlan, preparer: Preparer, supervisor: Supervisor, messages: Messages
    ) -> None:
        self._options = options
        self._plan = plan
        self._preparer = preparer
        self._supervisor = supervisor
        self._messages = messages
        self._clock = SystemClock()

    def serve(self, redis_url: str, *, after_a_kill: bool = False) -> None:
        """Starts, waits until ready, serves until a signal, drains."""
        options, supervisor = self._options, self._supervisor
        ports = self._claim_ports(PORT_WAIT_S if after_a_kill else 0.0)
        launch = self._preparer.write_desired(redis_url, ports)
        if not options.redis_url:
            payloads = (launch.payload_url, launch.payload_url_min_bytes)
            runfile.write(options.data_dir, runfile.RunFile(os.getpid(), launch.url, redis_url, *payloads))
        gateway = Program("gateway", "qinfer_api", launch.gateway)
        bulk = Program("bulk worker", "qinfer_workers.jobs", launch.bulk)
        pool = self._worker_pool(launch.worker, redis_url)
        try:
            supervisor.add(gateway, GATEWAY_POLICY, stop_s=self._plan.gateway_drain_s + KILL_MARGIN_S)
            pool.start()
            self._wait_until_settled(pool)
            lines = [] if supervisor.stop_asked else self._preparer.summary(pool.about)
            self._preparer.close()
            if lines:
                self._messages.show(lines)
            if not (launch.no_bulk or supervisor.stop_asked):
                supervisor.add(bulk, WORKER_POLICY, stop_s=self._plan.worker_drain_s + KILL_MARGIN_S)
            supervisor.run(pool.step)
            self._messages.say("stopping; accepted requests are answered first")
        finally:
            # the last requests may need a new worker
            supervisor.stop([gateway], meanwhile=pool.step)
            pool.close()
            supervisor.stop([*pool.processes, bulk])

    def _worker_pool(self, env: Mapping[str, str], redis_url: str) -> WorkerPool:
        if self._options.autoscale is None:
            return FixedPool(self._supervisor, env, self._options.workers, self._plan.worker_drain_s)
        from qinfer.cli.local.preparation import scaling_settings
        from qinfer.cli.scaling.scaler import make_autoscaler
        from qinfer.observe import logs

        settings = scaling_settings(self._options, redis_url)
        logs.configure(settings.log, "up", unknown=settings.unknown)
        return make_autoscaler(settings, self._supervisor, env, self._messages.say)

    def _wait_until_settled(self, pool: WorkerPool) -> None:
        began_s = self._clock.monotonic_s()
        with self._messages.progress("starting…") as status:
            while not self._supervisor.stop_asked:
                self._supervisor.wait(POLL_S)
                pool.step()
                elapsed_s = self._clock.monotonic_s() - began_s
                seen = self._preparer.read_progress(pool.least, elapsed_s)
                settled = seen.workers >= pool.least and not seen.pending and seen.is_live
                if settled or elapsed_s >= self._options.ready_timeout_s:
                    break
                status.update(f"loading {seen.pending} models…" if seen.pending else "starting…")

    def _claim_ports(self, wait_s: float) -> Ports:
        deadline_s = self._clock.monotonic_s() + wait_s

        def try_again() -> bool:
            if wait_s:
                self._supervisor.wait(POLL_S)
            return self._clock.monotonic_s() < deadline_s and not self._supervisor.stop_asked

        addresses = self._plan.addresses
        claimed = claim_ports(addresses, try_again)
        ports = {address.option: port for address, port in zip(addresses, claimed, strict=True)}
        return Ports(ports["--http-port"], ports.get("--grpc-port", 0), ports.get("--metrics-port", 0))
