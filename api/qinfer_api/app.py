"""The gateway's composition root: settings in, a serving process out.

`Gateway` owns tasks and servers; `build` creates the Redis adapters, and `build_app` the FastAPI application. If a task
dies the gateway ends with its error, and the supervisor restarts it.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI

import qinfer
from qinfer.core.api_keys import check_exposure
from qinfer.core.messages import IdFactory
from qinfer.core.retry import PATIENCE_S, OutageLog
from qinfer.core.settings import BulkSettings, HttpSettings, RepositorySettings, Settings
from qinfer.core.settings_sections import SegmentSettings
from qinfer.errors import BrokerUnavailable, Overloaded, QinferError
from qinfer.jobs.examiner_pool import ExaminerPool
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.shards import ShardPace, pace_of
from qinfer.jobs.tasks import BulkTasks
from qinfer.models.catalog import Catalog
from qinfer.models.control import ModelControl
from qinfer.models.repository.open import Repositories, open_repositories
from qinfer.models.spec import ModelSpec
from qinfer.models.state import GATEWAY as PROGRAM
from qinfer.models.store import ControlStore, report_liveness
from qinfer.models.sync import SyncedModel, start, sync
from qinfer.observe.stats import GatewayTally
from qinfer.observe.tracing import GATEWAY, open_tracer
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import reply_address
from qinfer.queue.lanes import Queue
from qinfer.queue.tenants import Quotas
from qinfer.segments.sharing import SegmentSharing
from qinfer.submission.memory import TensorMemory
from qinfer.submission.pending import PendingCall
from qinfer.submission.response_cache import ResponseCache
from qinfer.submission.submit import Submission
from qinfer.traffic.controller import CanaryController, EndpointWatch
from qinfer.traffic.recordings import RecordingStore
from qinfer.traffic.store import EndpointStore, KeptTargets
from qinfer_api.auth import Auth, RefusedKeys, Restrictions, load_auth
from qinfer_api.console.access import Access
from qinfer_api.console.audit import AuditTrail
from qinfer_api.console.history import CountHistory
from qinfer_api.console.live import Live
from qinfer_api.console.prometheus import LongHistory
from qinfer_api.console.routes import Console, ConsoleParts, console_app, mount_console
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.endpoints.routes import EndpointFiles, EndpointService, declared_here, endpoint_routes
from qinfer_api.endpoints.shadows import OnlineShadows, StoredEnds
from qinfer_api.http.fast import FastPath
from qinfer_api.http.infer import InferCodec
from qinfer_api.http.server import HttpServer, bound_socket, live_only, netloc, patiently, read_certificate
from qinfer_api.jobs.records import message_of
from qinfer_api.jobs.routes import job_routes
from qinfer_api.jobs.service import BulkJobs, JobJanitor
from qinfer_api.labeling.routes import label_studio_routes
from qinfer_api.labeling.service import Labeling, check_labeling
from qinfer_api.observe.reporting import Reporting
from qinfer_api.observe.tracing import TraceStage, Tracing
from qinfer_api.quotas import Quota
from qinfer_api.receiving import ReceivingBudget, Reservation
from qinfer_api.recordings import Recorder, recording_routes
from qinfer_api.reloading import KeyFile, Reloading
from qinfer_api.requests.janitor import Janitor
from qinfer_api.requests.letters import letter_routes
from qinfer_api.requests.operations import RequestOperations, operation_routes
from qinfer_api.requests.routes import list_routes, request_routes
from qinfer_api.requests.service import AsyncRequests, Waits
from qinfer_api.requests.webhooks import Targets, Webhooks, read_secret
from qinfer_api.rest.infer import infer_routes
from qinfer_api.rest.management import (
    model_routes,
    pause_routes,
    repository_routes,
    server_routes,
    settings_routes,
    shared_memory_routes,
    statistics_routes,
)
from qinfer_api.rest.openapi import docs_routes, document_of
from qinfer_api.rest.plain import PlainCodec, plain_routes, with_models
from qinfer_api.rest.services import ERROR_HANDLERS, Services, guarded
from qinfer_api.rest.side_ports import MetricsPort, SidePort, console_port, open_console_port, open_metrics_port
from qinfer_api.rest.tf_serving import tf_serving_routes
from qinfer_api.rest.torchserve import torchserve_routes
from qinfer_api.rest.workers import worker_routes
from qinfer_api.scaling import backlog_routes
from qinfer_api.shared_memory import SharedMemory
from qinfer_api.stages import AccessLog, TenantStage, TenantTally

if TYPE_CHECKING:
    from qinfer_api.rpc.server import RpcServer

logger = logging.getLogger(__name__)

# Reading the reply stream normally begins within milliseconds; after this time, only liveness is served.
_LISTEN_S = 2.0


async def build(settings: Settings) -> "Gateway":
    """Connects to Redis, synchronises a local repository, and creates the gateway.

    While Redis is unreachable it is live and not ready.
    """
    load_auth(settings.auth, settings.http.host)  # reports errors early
    read_secret(settings.webhooks)
    check_labeling(settings.labeling)
    declared_here(settings)
    Restrictions.for_http(settings.http.restricted)
    if settings.grpc.enabled:
        Restrictions.for_grpc(settings.grpc.restricted)
        check_exposure(settings.auth, settings.grpc.host or settings.http.host, "QINFER_GRPC__HOST")
    async with contextlib.AsyncExitStack() as opened:
        listener = opened.enter_context(bind(settings.http))
        metrics_listener = open_metrics_port(settings)
        if metrics_listener is not None:
            opened.enter_context(metrics_listener)
        console_listener = open_console_port(settings)
        if console_listener is not None:
            opened.enter_context(console_listener)
        rpc = None
        if settings.grpc.enabled:
            from qinfer_api.rpc.server import open_port

            rpc = open_port(settings)  # an unstarted server frees its port when collected
        step = partial(patiently, settings.http, listener)
        delivery = await step(partial(Queue.connect, settings.redis, settings.limits))
        opened.push_async_callback(delivery.close)
        store = ControlStore(admin_client(settings.redis))
        opened.push_async_callback(store.close)
        source = open_here(settings.repository)
        if source is not None:
            await step(partial(start, source, store, delivery, settings.repository))
        gateway = Gateway(settings, delivery, store, listener, source, rpc)
        if metrics_listener is not None:
            gateway.serve_metrics(metrics_listener)
        if console_listener is not None:
            gateway.serve_console(console_listener, settings)
        opened.pop_all()
    return gateway


def bind(http: HttpSettings) -> socket.socket:
    """Opens the HTTP socket."""
    read_certificate("HTTP", http.tls_certfile, http.tls_keyfile)  # reports errors early
    listener = bound_socket("HTTP", http.host, http.port, "choose another, 0 is any")
    # Connections inherit it; asyncio sets it only for sockets with a named protocol. Without it a reply's body, a
    # separate write, waits up to 40 ms for the acknowledgement of the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class Gateway:
    """One gateway; `started` is set once connections are accepted. `name` is used in leases and replies.

    Attributes:
        metrics: The port of metrics, if there is one.
        console: The console's own port, if it has one.
    """

    metrics: MetricsPort | None = None
    console: SidePort | None = None

    def __init__(
        self,
        settings: Settings,
        delivery: Queue,
        store: ControlStore,
        listener: socket.socket,
        source: Repositories | None = None,
        rpc: "RpcServer | None" = None,
    ) -> None:
        self._delivery = delivery
        self._store = store
        self._http, self._listener = settings.http, listener
        self._drain_s = settings.http.drain_s
        self.name = f"gateway-{IdFactory().ulid()}"
        self.catalog = Catalog(store, settings.limits, delivery)
        self.catalog.missed = self._missed
        self.models = ModelControl(source, store, delivery, settings.repository, self.catalog.refresh)
        self._watch = self._watch_of(source, settings.repository)
        tally = GatewayTally(self.name)
        auth = load_auth(settings.auth, settings.http.host)
        self._tracing = Tracing(settings.trace, open_tracer(os.environ, GATEWAY, self.name))
        self.dispatcher = self._open_dispatcher(settings, tally, auth)
        self.shadows, self._ends = self._watch_endpoints(settings, tally)
        self._endpoints = EndpointWatch(EndpointStore(store), self.dispatcher.endpoints, delivery.clock.now_s)
        self._files = EndpointFiles(self._endpoints, declared_here(settings))
        self._reporting = self._open_reporting(settings, tally)
        self._tasks = BulkTasks(settings)
        self.receiving = ReceivingBudget(settings.limits.max_receiving_bytes)
        self.requests, self._janitor = self._asynchronous(settings, tally)
        self._examiners = ExaminerPool(settings, os.environ)
        self.jobs = self._bulk_jobs(settings)
        self._labeling = Labeling(settings, delivery, self.dispatcher, self.requests, tally.refusals, auth)
        self._pending = self.dispatcher.submission.pending
        self._pending.unclaimed, self._pending.lend = self.requests.waits.wake, self._lend
        self.memory = SharedMemory(allowed=settings.allow_client_shm)
        restrictions = Restrictions.for_http(settings.http.restricted)
        fast = self._open_fast_path(settings, restrictions)
        services = self._services(settings, fast, restrictions)
        self.started, self._stopping, self._listening = asyncio.Event(), asyncio.Event(), asyncio.Event()
        scheme = "https" if settings.http.tls_certfile else "http"
        self.url = f"{scheme}://{netloc(*listener.getsockname()[:2])}"
        specs = self.catalog.specs if auth is None else dict  # the document needs no key
        app = build_app(services, self._features(settings, services, tally, auth), specs)
        self._server = HttpServer(settings.http, app, fast, self._serving)
        self.rpc = rpc
        if rpc is not None:
            rpc.set_services(services)
        self._reloading = self._reloading_of(settings, auth)
        self._quotas = None if auth is None else auth.lease(Quotas(delivery.router, self.name))

    async def _lend(self, pending: PendingCall, nbytes: int) -> Reservation:
        """Without keys, each request counts as an owner."""
        owner = pending.quota.tenant if isinstance(pending.quota, Quota) else pending
        return await self.receiving.lent(owner, nbytes)

    def _open_fast_path(self, settings: Settings, restrictions: Restrictions) -> FastPath:
        codec = InferCodec(self.dispatcher, self.memory, settings)
        fast = FastPath(self.dispatcher, settings, codec, restrictions, self.receiving)
        fast.call_type = self._tracing.call_type
        fast.plain = partial(PlainCodec, self.dispatcher, codec.bounds, {})
        return fast

    def _open_dispatcher(self, settings: Settings, tally: GatewayTally, auth: Auth | None) -> Dispatcher:
        limits, queue = settings.limits, self._delivery
        dispatcher = Dispatcher(queue, self.catalog, tally, limits, self.name, auth)
        if auth is not None:
            auth.refused = RefusedKeys().note
            queue.places.weigh = auth.weight
        if self._tracing.is_on:
            traces = dispatcher.traces = TraceStage(self._tracing, queue.clock, tally)
            dispatcher.stages = (traces, *dispatcher.stages)
        if settings.log.access:
            dispatcher.stages += (AccessLog(settings.log.access),)
        self._tenants = None
        if settings.metrics.tenants and auth is not None:
            self._tenants = TenantTally(settings.metrics.tenants, self.name)
            self._tenants.in_flight = auth.in_flight
            dispatcher.stages += (TenantStage(self._tenants),)
        if (plan := settings.cache.plan) is not None:
            summaries = settings.metrics.summary_latencies
            cache = ResponseCache(plan, queue, tally.refusals, limits.max_in_flight, summaries=summaries)
            dispatcher.submission.set_cache(cache)
        self._segments = self._share_memory(settings.segments, dispatcher.submission)
        self._recorder = Recorder(RecordingStore(self._store), dispatcher.submission, settings, queue.clock.now_s)
        return dispatcher

    def _share_memory(self, settings: SegmentSettings, submission: Submission) -> SegmentSharing | None:
        if not settings.directory:
            return None
        secret, registry = self._store.segment_secret, self._store
        sharing = SegmentSharing(settings, self.name, ("worker-",), secret, reader=self.name, registry=registry)
        submission.set_memory(TensorMemory(sharing, settings.least_bytes, self.catalog))
        return sharing

    def _watch_endpoints(self, settings: Settings, tally: GatewayTally) -> tuple[OnlineShadows, StoredEnds]:
        submission, endpoints, targets = self.dispatcher.submission, self.dispatcher.endpoints, self.dispatcher.targets
        shadows = OnlineShadows(submission, endpoints, targets, settings.endpoints, settings.limits.max_in_flight)
        self.dispatcher.endpoint_stages = (*self.dispatcher.stages, shadows)
        tally.in_flight = lambda: self.dispatcher.in_flight - shadows.waiting
        return shadows, StoredEnds(targets, shadows)

    def _open_reporting(self, settings: Settings, tally: GatewayTally) -> Reporting:
        reporting = Reporting(settings, self.catalog, self._store, self._delivery, tally, self._tracing.file)
        reporting.tenants, reporting.targets = self._tenants, self.dispatcher.targets
        reporting.memory = self.dispatcher.submission.memory
        reporting.statistics.endpoints = self.dispatcher.endpoints
        return reporting

    def _endpoint_service(self) -> EndpointService:
        dispatcher, now_s, check = self.dispatcher, self._delivery.clock.now_s, self.requests.targets.check
        return EndpointService(self._endpoints, dispatcher.targets, now_s, check, self.shadows)

    def _canaries(self) -> CanaryController:
        view, observed = self.dispatcher.endpoints, self.dispatcher.targets.observed
        return CanaryController(self._endpoints.store, view, observed, self.name, self._delivery)

    def _reloading_of(self, settings: Settings, auth: Auth | None) -> Reloading:
        keys = KeyFile(Path(settings.auth.keys_file), auth) if auth is not None and settings.auth.keys_file else None
        certificates = [self._server.show_certificate] if settings.http.tls_certfile else []
        if self.rpc is not None and settings.grpc.tls_certfile:
            certificates.append(self.rpc.show_certificate)
        return Reloading(keys, certificates)

    def _watch_of(self, source: Repositories | None, repository: RepositorySettings) -> "RepositoryWatch | None":
        if source is None or repository.control_mode != "poll":
            return None
        return RepositoryWatch(source, self._store, self._delivery, repository.poll_s, repository.min_workers)

    def _asynchronous(self, settings: Settings, tally: GatewayTally) -> tuple[AsyncRequests, Janitor]:
        targets = Targets(settings.webhooks)
        webhooks = Webhooks(settings.webhooks, self._delivery, targets, partial(message_of, Jobs(self._delivery)))
        jobs = JobJanitor(self._delivery, self.catalog, self._tasks.finalise) if settings.bulk.enabled else None
        advance = jobs.round if jobs is not None else None
        janitor = Janitor(self._delivery, self.catalog, tally, settings.requests.sweep_every_s, webhooks, advance)
        requests = AsyncRequests(
            delivery=self._delivery,
            catalog=self.catalog,
            dispatcher=self.dispatcher,
            tally=tally,
            settings=settings.requests,
            inline_max_bytes=settings.limits.inline_max_bytes,
            targets=targets,
            waits=Waits(self._delivery.requests, reply_address(self.name)),
            kept=KeptTargets(self._delivery),
            watch_end=self._ends.watch,
            receiving=self.receiving,
        )
        self._operations = RequestOperations(requests, self.name)
        return requests, janitor

    def _features(self, settings: Settings, services: Services, tally: GatewayTally, auth: Auth | None) -> "Features":
        queue, endpoints = self._delivery, self._endpoint_service()
        history = CountHistory(queue.router, tally, queue.clock.now_s)
        parts = ConsoleParts(
            services=services,
            store=self._store,
            jobs=self.jobs,
            labeling=self._labeling,
            endpoints=endpoints,
            operations=self._operations,
            auth=auth,
            access=Access(settings, auth, queue.router),
            history=history,
            long=LongHistory(settings.console, queue.clock.now_s),
            live=Live(self.catalog, self._store, queue, history),
            audit=AuditTrail(queue.router),
        )
        self._console = Console(parts)
        shared = self._console if settings.console.port is None else None
        return Features(self.jobs, self._labeling, endpoints, self._operations, self._recorder, shared)

    def _bulk_jobs(self, settings: Settings) -> BulkJobs:
        return BulkJobs(
            jobs=Jobs(self._delivery),
            now_s=self._delivery.clock.now_s,
            resolve=self.requests.of_model,
            dispatcher=self.dispatcher,
            settings=settings,
            targets=self.requests.targets,
            tasks=self._tasks,
            check=self._examiners.check,
            estimate=self._examiners.estimate,
            look=self._examiners.preview,
            pace=partial(self._pace, settings.bulk),
        )

    async def _pace(self, settings: BulkSettings, model: str, version: int) -> ShardPace:
        return pace_of(settings, await self._store.stats(model, version), self.catalog.capacity(model, version).workers)

    def _services(self, settings: Settings, fast: FastPath, restrictions: Restrictions) -> Services:
        return Services(
            settings=settings,
            dispatcher=self.dispatcher,
            requests=self.requests,
            catalog=self.catalog,
            codec=fast.codec,
            forward=fast.forward,
            models=self.models,
            reporting=self._reporting,
            restrictions=restrictions,
            receiving=self.receiving,
        )

    def serve_metrics(self, listener: socket.socket) -> None:
        """Lets `serve` serve metrics on their own port."""
        self.metrics = MetricsPort(listener, self._reporting.metrics, self._server.port.visitors)

    def serve_console(self, listener: socket.socket, settings: Settings) -> None:
        """Lets `serve` serve the console on its own port."""
        self.console = console_port(listener, console_app(self._console), settings)
        if settings.http.tls_certfile:
            self._reloading.certificates.append(self.console.show_certificate)

    async def serve(self) -> None:
        """Serves until `stop`, then drains for at most `http.drain_s`."""
        try:
            with contextlib.suppress(BrokerUnavailable):
                await patiently(self._http, self._listener, self._load_models, self._stopping)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._replies()),
                    group.create_task(self.catalog.run()),
                    group.create_task(self._endpoints.run()),
                    group.create_task(self._files.run()),
                    group.create_task(self._canaries().run()),
                    group.create_task(self.dispatcher.submission.run()),
                    group.create_task(self._janitor.run()),
                    group.create_task(self._operations.run()),
                    group.create_task(self._reporting.run()),
                    group.create_task(self._examiners.run(self.started)),
                    group.create_task(self._reloading.run()),
                    group.create_task(self._console.run()),
                    group.create_task(report_liveness(self._store, f"{self.name}@{socket.gethostname()}", PROGRAM)),
                ]
                more = (self._segments, self._quotas, self._watch, self._recorder)
                tasks += [group.create_task(one.run()) for one in more if one is not None]
                tasks += [group.create_task(port.serve()) for port in self._side_ports()]
                if self._labeling.pusher is not None:
                    tasks.append(group.create_task(self._labeling.pusher.run()))
                await self._until_replies()
                await self._serve_all()
                self._give_up()
                await self._pending.discard()
                await self._reporting.flush()
                for task in tasks:
                    task.cancel()
        finally:
            self._give_up()
            self._server.turn_away()
            self._listener.close()
            for port in self._side_ports():
                port.close()
            if self.rpc is not None:
                await self.rpc.close()
            self.memory.close()
            if self._segments is not None:
                self._segments.close()
            self._tasks.close()
            await self._tracing.close()
            await self._ends.close()
            await self._labeling.close()
            await self._delivery.close()
            await self._store.close()

    def _side_ports(self) -> list[SidePort]:
        return [port for port in (self.metrics, self.console) if port is not None]

    async def _load_models(self) -> None:
        await self.catalog.refresh()
        await self._endpoints.refresh_endpoints()
        await self._files.write()

    def _replies(self) -> Coroutine[Any, Any, None]:
        pending = self._pending
        return self._delivery.listen(self.name, pending.receive, self._listening.set, pending.lose_all)

    async def _until_replies(self) -> None:
        """Serves liveness if Redis is unreachable again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_S):
                await self._listening.wait()
        if not self._listening.is_set():
            async with live_only(self._http, self._listener):
                await self._listening.wait()

    async def _serve_all(self) -> None:
        if self._stopping.is_set():
            return
        async with asyncio.TaskGroup() as group:
            if self.rpc is not None:
                await self.rpc.start()
                group.create_task(self._serve_rpc(self.rpc))
            await self._server.serve(self._listener)

    async def _serve_rpc(self, rpc: "RpcServer") -> None:
        await self._stopping.wait()
        await rpc.turn_away()
        self._drain()
        await rpc.stop(self._drain_s)

    def reload(self) -> None:
        """Reloads API keys and certificates, on SIGHUP."""
        self._reloading.ask()

    def stop(self) -> None:
        """Drains once gRPC's clients know; a gateway that does not serve yet ends at once."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._listening.set()
            if self.rpc is None:
                self._drain()

    def _drain(self) -> None:
        """Begins to drain; health answers 503 from here on."""
        self.dispatcher.draining = True
        self.requests.waits.end_waits()
        self._server.turn_away()
        asyncio.get_running_loop().call_later(self._drain_s, self._give_up)

    def _missed(self, away_s: float) -> None:
        """Gives up draining while Redis is unreachable, because no answers can come."""
        if self.dispatcher.draining and away_s >= PATIENCE_S:
            self._give_up()

    def _give_up(self) -> None:
        self.models.cancel_loads()
        self._pending.fail_all(Overloaded("Server exiting"))
        self.shadows.close()

    def _serving(self) -> None:
        where = {"url": self.url} if self.rpc is None else {"url": self.url, "grpc": self.rpc.url}
        if self.metrics is not None:
            where["metrics"] = self.metrics.url
        if self.console is not None:
            where["console"] = self.console.url
        logger.info("gateway serving", extra=where)
        self.started.set()


def open_here(settings: RepositorySettings) -> Repositories | None:
    """Opens the repositories, if there are any."""
    places = [place.strip() for place in settings.path.split(",")]
    if settings.overlay or any("://" in place or Path(place).is_dir() for place in places):
        return open_repositories(settings)
    return None


class RepositoryWatch:
    """Follows the repositories, perhaps in several gateways."""

    def __init__(
        self, source: Repositories, store: ControlStore, delivery: Queue, every_s: float, min_workers: int = 1
    ) -> None:
        self._source = source
        self._store = store
        self._delivery = delivery
        self._every_s = every_s
        self._min_workers = min_workers
        self._outage = OutageLog(logger, "model repository can't be read", "model repository is read again")

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.sync_models()

    async def sync_models(self) -> None:
        """Writes the changes since the last poll."""
        try:
            found = await sync(self._source, self._store, self._delivery, min_workers=self._min_workers)
        except QinferError as error:
            self._outage.failed(error.message)
        except Exception as error:  # noqa: BLE001 - the loop boundary: one odd file must not end the gateway
            self._outage.failed(repr(error), error)
        else:
            self._outage.over()
            self.note(found)

    def note(self, models: Sequence[SyncedModel]) -> None:
        """Logs a sync's changes."""
        for model in models:
            if model.changed and not model.error:
                what = "model removed" if model.removed else "model changed"
                logger.info(what, extra={"model": model.model, "generation": model.generation})


_ABOUT = """
A durable, queue-backed inference server that speaks NVIDIA Triton's protocol (KServe v2): every request is an entry of
a Redis Stream, which workers batch and execute.

Errors are always `{"error": "<what happened, the value, what to do>"}`.
"""


class Features(NamedTuple):
    """The use cases behind the routes beside inference."""

    jobs: BulkJobs
    labeling: Labeling
    endpoints: EndpointService
    operations: RequestOperations
    recorder: Recorder
    console: Console | None = None


def build_app(services: Services, features: Features, specs: Callable[[], Mapping[str, ModelSpec]] = dict) -> FastAPI:
    """Builds the application; paths match exactly, as with Triton (reference §1.1).

    The document shows the models of `specs`.
    """
    app = FastAPI(
        title="qinfer",
        version=qinfer.__version__,
        description=_ABOUT,
        redirect_slashes=False,
        exception_handlers=ERROR_HANDLERS,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
    )
    inference = guarded(services, "inference")
    busiest_first = (infer_routes, request_routes, list_routes, letter_routes, plain_routes)
    others = (
        statistics_routes,
        backlog_routes,
        model_routes,
        server_routes,
        repository_routes,
        pause_routes,
        settings_routes,
        worker_routes,
    )
    routers = [(routes(services), inference) for routes in busiest_first]
    routers.append((operation_routes(services, features.operations), inference))
    routers += [
        (job_routes(services, features.jobs), inference),
        (label_studio_routes(services, features.labeling), inference),
    ]
    routers += [(routes(services), []) for routes in (*others, shared_memory_routes)]
    routers.append((endpoint_routes(services, features.endpoints), []))
    routers.append((recording_routes(services, features.recorder), []))
    routers += [(routes(services), []) for routes in (tf_serving_routes, torchserve_routes)]
    for router, dependencies in routers:
        app.include_router(router, dependencies=dependencies)
    app.include_router(docs_routes())
    if features.console is not None:
        mount_console(app, features.console)
    document = document_of(app, [router for router, _ in routers])
    app.openapi = with_models(document, specs)  # type: ignore[method-assign]  # as FastAPI documents it
    return app
