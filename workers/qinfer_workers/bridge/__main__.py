"""The bridge's composition root: `python -m qinfer_workers.bridge CONFIG [--check]`.

At the start it waits for Redis. After SIGTERM or SIGINT it finishes the messages in hand. Exit codes: 0 after a stop, 1
when a check fails, 2 for a wrong setting, 70 when a part of it died.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from prometheus_client import CollectorRegistry, start_http_server

from qinfer.bridge.reports import BridgeCollector, BridgeReports, ReportSequence, RouteTally
from qinfer.core.messages import IdFactory
from qinfer.core.processes import protect_process
from qinfer.core.retry import OutageLog
from qinfer.core.settings import Settings, load_settings
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.models.catalog import Catalog
from qinfer.models.state import BRIDGE
from qinfer.models.store import ControlStore, report_liveness
from qinfer.observe import logs
from qinfer.queue.clients import admin_client, wait_for_redis
from qinfer.queue.lanes import Queue
from qinfer.traffic.controller import EndpointFollower
from qinfer_workers.bridge.config import BridgeConfig, RouteOptions, load_config
from qinfer_workers.bridge.kombu import find_missing_queues
from qinfer_workers.bridge.reading import RouteVersions, body_codec
from qinfer_workers.bridge.route import BridgeRoute
from qinfer_workers.liveness import exit_process, open_health

REPORT_EVERY_S = 1.0

REPORT_TTL_S = 15.0
"""A bridge without a report for this long is not live."""

CLOSE_S = 5.0


class Reporter:
    """Adds the bridge's counts to the installation's metrics; without Redis they grow."""

    def __init__(
        self, process: str, tallies: Sequence[RouteTally], reports: BridgeReports, every_s: float = REPORT_EVERY_S
    ) -> None:
        self._sequence = ReportSequence(process, tallies)
        self._reports = reports
        self._every_s = every_s
        self._outage = OutageLog(logger, "the bridge's counts are not stored", "the bridge's counts are stored again")

    async def run(self, stop: asyncio.Event) -> None:
        """Reports until `stop`, and then what is left."""
        while not stop.is_set():
            await self._report(REPORT_TTL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await stop.wait()
        await self._report(0.0)
        if not self._sequence.is_complete:  # the report repeated an earlier report
            await self._report(0.0)

    async def _report(self, ttl_s: float) -> None:
        try:
            await self._reports.put(self._sequence.next(), ttl_s)
        except QinferError as error:
            self._outage.failed(error.message)
            return
        except Exception:  # metrics must not end a bridge
            logger.exception("the bridge's counts are not stored")
            return
        self._outage.over()
        self._sequence.stored()


class Bridge:
    """A bridge process."""

    def __init__(self, config: BridgeConfig, delivery: Queue, endpoints: EndpointFollower, settings: Settings) -> None:
        self._config = config
        self._delivery = delivery
        self._endpoints = endpoints
        self.process = endpoints.owner
        inline_max_bytes = settings.limits.inline_max_bytes
        self.routes = [
            BridgeRoute(
                options=options,
                config=config,
                delivery=delivery,
                endpoints=endpoints,
                inline_max_bytes=inline_max_bytes,
            )
            for options in config.routes
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Runs all routes until `stop` is set."""
        self._serve_metrics()
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self._delivery.listen(self.process, self._on_hint)),
                group.create_task(self._endpoints.catalog.run()),
                group.create_task(self._endpoints.run()),
                group.create_task(self._refresh_tallies()),
            ]
            running = [group.create_task(route.run()) for route in self.routes]
            group.create_task(self._stop_with(stop))
            await asyncio.gather(*running)
            stop.set()
            for task in background:
                task.cancel()

    def _on_hint(self, _: bytes) -> None:
        for route in self.routes:
            route.wake()

    async def _stop_with(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for route in self.routes:
            route.stop()

    async def _refresh_tallies(self) -> None:
        while True:
            for route in self.routes:
                route.refresh_tally()
            await asyncio.sleep(1.0)

    def _serve_metrics(self) -> None:
        config = self._config
        if not config.metrics_port:
            return
        registry = CollectorRegistry(auto_describe=False)
        registry.register(BridgeCollector(self.process, [route.tally for route in self.routes]))
        try:
            start_http_server(config.metrics_port, config.metrics_host, registry)
        except OSError as error:
            raise SettingsError(
                f"metrics_host {config.metrics_host}, metrics_port {config.metrics_port}: {error.strerror}; "
                "choose another port, or 0 for none"
            ) from None


class Links(NamedTuple):
    """A bridge's connections to Redis."""

    delivery: Queue
    store: ControlStore
    endpoints: EndpointFollower


async def _once(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


@asynccontextmanager
async def open_links(settings: Settings, *, waits: bool = True) -> AsyncIterator[Links]:
    """Connects to Redis, and reads models and endpoints once."""
    step = wait_for_redis if waits else _once
    async with AsyncExitStack() as opened:
        delivery = await step(partial(Queue.connect, settings.redis, settings.limits))
        opened.push_async_callback(delivery.close)
        store = ControlStore(admin_client(settings.redis))
        opened.push_async_callback(store.close)
        catalog = Catalog(store, settings.limits)
        endpoints = EndpointFollower(catalog, store, f"bridge-{IdFactory().ulid()}", delivery)
        await step(catalog.refresh)
        await step(endpoints.load_endpoints)
        yield Links(delivery, store, endpoints)


async def serve(config: BridgeConfig, settings: Settings, links: Links, stop: asyncio.Event) -> None:
    """Runs a bridge until `stop` is set."""
    delivery, store, endpoints = links
    bridge, ended = Bridge(config, delivery, endpoints, settings), asyncio.Event()
    tallies = [route.tally for route in bridge.routes]
    reporter = asyncio.create_task(Reporter(bridge.process, tallies, BridgeReports(store.client)).run(ended))
    logger.info("bridge started", extra={"routes": [route.name for route in config.routes]})
    liveness = asyncio.create_task(
        report_liveness(store, f"qinfer-bridge-{os.getpid()}@{socket.gethostname()}", BRIDGE)
    )
    try:
        await bridge.run(stop)
    finally:
        ended.set()
        liveness.cancel()
        await asyncio.wait([liveness, reporter], timeout=CLOSE_S)
        reporter.cancel()
        await asyncio.wait([reporter])  # its client is closed next
    logger.info("bridge stopped")


async def check(config: BridgeConfig, settings: Settings, say: Callable[[str], None]) -> bool:
    """Tries everything without moving a message; returns whether all is well. `say` gets each check's line."""
    async with open_links(settings, waits=False) as links:
        results = [await _check_route(route, links.endpoints, say) for route in config.routes]
    return all(results)


async def _check_route(route: RouteOptions, endpoints: EndpointFollower, say: Callable[[str], None]) -> bool:
    is_well = True
    try:
        versions = RouteVersions(route, endpoints.view)
        served = versions.resolve()
        body_codec(route, served)
        what = "endpoint" if route.model in endpoints.view.by_name else "model"
        say(f"route '{route.name}': {what} '{route.model}' version {served.version}: well")
        for other in versions.left_out():
            say(f"route '{route.name}': endpoint '{route.model}': {other}")
    except QinferError as error:
        is_well = False
        say(f"route '{route.name}': {error.message}")

    source, sink = route.source, route.sink
    fixed = [sink.routing_key] if sink.routing_key and not sink.exchange else []
    for what, declare, words in (
        ("source", source.declare, (route.source_url, source.options, [source.queue, route.dead_letters])),
        ("sink", sink.declare, (route.sink_url, route.sink_options, fixed, sink.exchange)),
    ):
        try:
            missing = ", ".join(f"'{queue}'" for queue in await asyncio.to_thread(find_missing_queues, *words))
        except Exception as error:  # noqa: BLE001 - the boundary to kombu, whose transports raise what they like
            is_well = False
            say(f"route '{route.name}': {what}: {type(error).__name__}: {error}")
            continue
        if missing and not declare:
            is_well = False
            say(f"route '{route.name}': {what}: there is no queue {missing}; make it, or set {what}.declare: true")
        else:
            say(f"route '{route.name}': {what}: well" + (f"; the bridge will make {missing}" if missing else ""))
    return is_well


logger = logging.getLogger("qinfer_workers.bridge")

GC_THRESHOLD = 50_000


async def _run_bridge(config: BridgeConfig, settings: Settings) -> int:
    stop = asyncio.Event()
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    assert starting is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, starting.cancel)  # the start may wait for Redis
    touching = None if (health := open_health(settings)) is None else loop.create_task(health.run())
    async with open_links(settings) as links:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 20, 50)
        await serve(config, settings, links, stop)
    if touching is not None:
        touching.cancel()
    return os.EX_OK


async def _check_config(config: BridgeConfig, settings: Settings) -> int:
    return os.EX_OK if await check(config, settings, print) else 1


def main() -> int:
    """Runs the program and returns the exit status."""
    protect_process(os.environ)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for gateways
    parser = argparse.ArgumentParser(prog="python -m qinfer_workers.bridge")
    parser.add_argument("config", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        settings = load_settings()
        config = load_config(options.config, os.environ)
        is_quiet = options.check and settings.log.level == "INFO"
        log = settings.log.model_copy(update={"level": "WARNING"}) if is_quiet else settings.log
        logs.configure(log, "bridge", unknown=settings.unknown)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run((_check_config if options.check else _run_bridge)(config, settings))
    except SettingsError as error:
        logs.cannot_start(os.environ, "qinfer bridge", error.message)
        return 2
    except asyncio.CancelledError:
        return os.EX_OK
    except BrokerUnavailable as error:
        logs.cannot_start(os.environ, "qinfer bridge", error.message)
        return 1
    except Exception:  # such threads would keep the process alive
        logger.exception("bridge failed")
        return os.EX_SOFTWARE


if __name__ == "__main__":
    exit_process(main())
