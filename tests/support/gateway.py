"""A gateway in this process, on the embedded server, with a worker that echoes: what the gateway's tests run against.

Models, all `x` → `y`, at most 8 rows: `echo` (FP32[4], versions 1 and 2), `text` (BYTES[-1]), `half` (FP16[2]), `pair`
(`a`, `b`, given back as outputs), `fails` (every request), `stuck` (never answered), `loading` (no live worker).
Never answered either: `small` (50 may wait), `bounded` (3 may wait, by its queue policy), `levels` (1 … 3, of which the
default 2 refuses what has waited for 50 ms, and 3 is delayed), `patient` (a queue timeout of 15 minutes, which requests
may shorten), `asleep` (no live worker, and READY: `min_workers` 0), `flow` and `resuming` (FP32[-1], decoupled; the
latter with `qinfer.stream_resume`), `stateful` (with sequences).
Without a batch dimension: `one` (BYTES[1]), `vary` (INT32[2, -1]), `wide` (FP32[-1, -1]). The output of `echo` has the
labels zero, one and two. A request's parameters whose names begin with `told_` come back with its response, and one
named `responses` says how many responses it gets; `fails_in` names the version that fails it.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import httpx
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from qinfer.core import api_keys
from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.core.settings import AuthSettings, GrpcSettings, HttpSettings, LimitSettings, RepositorySettings, Settings
from qinfer.errors import BrokerUnavailable
from qinfer.models.config.config import normalise, parse, to_json, to_spec
from qinfer.models.spec import lanes_of
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.entries import EntryAddress, Lane, Lease, RequestOutcome, RequestState, Settlement
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer.wire.frame import PayloadApart, decode_request, encode_responses
from qinfer_api.app import Gateway, bind, build_app
from qinfer_api.rpc.server import open_port
from tests.support.servers.servers import Database

_ONE = 'input {{ name: "x" data_type: {0} dims: [{1}] }} output {{ name: "y" data_type: {0} dims: [{1}] }}'
_FP32 = _ONE.format("TYPE_FP32", 4)
_PAIR = " ".join(
    f'{kind} {{ name: "{name}" data_type: TYPE_INT32 dims: [2] }}' for kind in ("input", "output") for name in "ab"
)
_LEVELS = """
dynamic_batching {
  priority_levels: 3 default_priority_level: 2
  priority_queue_policy { key: 2 value { default_timeout_microseconds: 50000 allow_timeout_override: true } }
  priority_queue_policy { key: 3 value { default_timeout_microseconds: 50000 timeout_action: DELAY } }
}
"""


_PATIENT = """
dynamic_batching {
  default_queue_policy { default_timeout_microseconds: 900000000 allow_timeout_override: true }
}
"""


def _parameter(key: str, value: int) -> str:
    return _text_parameter(key, str(value))


def _text_parameter(key: str, value: str) -> str:
    return f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


_FLOW = _ONE.format("TYPE_FP32", -1) + " model_transaction_policy { decoupled: true }"

MODELS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "echo": (_FP32, (1, 2)),
    "text": (_ONE.format("TYPE_STRING", -1), (1,)),
    "half": (_ONE.format("TYPE_FP16", 2), (1,)),
    "pair": (_PAIR, (1,)),
    "fails": (_FP32, (1,)),
    "stuck": (_FP32, (1,)),
    "loading": (_FP32, (1,)),
    "späte modelle": (_FP32, (1,)),
    "small": (_FP32 + _parameter("qinfer.lane_capacity", 50), (1,)),
    "bounded": (_FP32 + " dynamic_batching { default_queue_policy { max_queue_size: 3 } }", (1,)),
    "levels": (_FP32 + _LEVELS, (1,)),
    "patient": (_FP32 + _PATIENT, (1,)),
    "one": (_ONE.format("TYPE_STRING", 1), (1,)),
    "vary": (_ONE.format("TYPE_INT32", "2, -1"), (1,)),
    "wide": (_ONE.format("TYPE_FP32", "-1, -1"), (1,)),
    "flow": (_FLOW, (1,)),
    "resuming": (_FLOW + _text_parameter("qinfer.stream_resume", "skip"), (1,)),
    "stateful": (_FP32 + " sequence_batching { direct { } }", (1,)),
    "asleep": (_FP32 + _parameter("qinfer.min_workers", 0), (1,)),
    "hasty": (_FP32 + _parameter("qinfer.default_timeout_s", 30) + _parameter("qinfer.max_timeout_s", 40), (1,)),
}
UNBATCHED = ("one", "vary", "wide")
LABELS: dict[str, tuple[str, ...]] = {"y": ("zero", "one", "two")}
ANSWERING = ("echo", "text", "half", "pair", "fails", "späte modelle", *UNBATCHED)


@dataclass(kw_only=True)
class Running:
    """A gateway that serves, and what is behind it."""

    gateway: Gateway
    delivery: Queue
    store: ControlStore
    requests: list[InferRequest]
    database: Database
    serving: "asyncio.Task[None] | None" = None

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def grpc_target(self) -> str:
        """Where gRPC is served, as channels want it."""
        assert self.gateway.rpc is not None
        return self.gateway.rpc.url.partition("://")[2]

    async def refresh(self) -> None:
        """Lets the catalog see the store as it is now."""
        await self.gateway.catalog.refresh()

    async def depth(self, model: str, version: int = 1) -> int:
        return (await self.delivery.depth([Lane(model, version)]))[0]

    async def emptied(self, model: str) -> None:
        """Waits until no request of a model is queued: the gateway takes out soon what nobody waits for."""

        async def is_empty() -> bool:
            return await self.depth(model) == 0

        await eventually(is_empty, description="an empty lane")


def lean_gateway(*arguments: Any, **named: Any) -> Gateway:
    """Returns a gateway that builds its HTTP routes at their first use.

    To build them takes more than half of a gateway's start, and most tests call few: the fast path and gRPC need none.
    """
    with mock.patch("qinfer_api.app.build_app", _LateApp):
        return Gateway(*arguments, **named)


class _LateApp:
    def __init__(self, *services: Any) -> None:
        self._services = services

    @functools.cached_property
    def _app(self) -> ASGIApp:
        return build_app(*self._services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def settings_of(
    http: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    auth: Mapping[str, Any] | None = None,
    grpc: Mapping[str, Any] | None = None,
    repository: Mapping[str, Any] | None = None,
) -> Settings:
    """Returns settings on free ports; gRPC is served if `grpc` is given; nobody waits for workers unless told to."""
    return Settings(
        http=HttpSettings(port=0, **(http or {})),
        grpc=GrpcSettings(port=0, **grpc) if grpc is not None else GrpcSettings(enabled=False),
        limits=LimitSettings(**{"wait_for_workers_s": 0, **(limits or {})}),
        auth=AuthSettings(**(auth or {})),
        repository=RepositorySettings(**(repository or {})),
    )


@contextlib.asynccontextmanager
async def running_gateway(
    settings: Settings | None = None, delivery: Queue | None = None, store: ControlStore | None = None
) -> AsyncIterator[Running]:
    """Runs a gateway and its echo worker until the block ends, then drains it.

    Its queue and its control store are in a database of its own unless they are given.
    """
    settings = settings or settings_of()
    async with Database() as database:
        delivery, store = delivery or await database.delivery(), store or database.store()
        await declare_models(store, delivery)
        rpc = open_port(settings) if settings.grpc.enabled else None
        listener = bind(settings.http)
        try:
            gateway = lean_gateway(settings, delivery, store, listener, rpc=rpc)
        except BaseException:  # a setting is wrong, as a test may want it
            listener.close()
            if rpc is not None:
                await rpc.close()
            raise
        running = Running(gateway=gateway, delivery=delivery, store=store, requests=[], database=database)
        async with asyncio.TaskGroup() as group:
            serving = running.serving = group.create_task(gateway.serve())
            workers = [group.create_task(_work(running, lane)) for lane in _lanes(ANSWERING)]
            try:
                await gateway.started.wait()
                yield running
            finally:
                gateway.stop()
                await asyncio.wait([serving])
                for worker in workers:
                    worker.cancel()


class TenantScene:
    """A gateway with keys: of two tenants, of a viewer of the first, and of an administrator; `clients` send them."""

    def __init__(self, running: Running, keys: dict[str, str]) -> None:
        self.running, self.keys = running, keys
        self.clients = {
            name: httpx.AsyncClient(base_url=running.url, headers={"x-api-key": key}) for name, key in keys.items()
        }

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, file: Path) -> AsyncIterator[Self]:
        """Runs the gateway until the block ends; its keys are in `file`."""
        scopes = api_keys.Scope
        keys = {name: api_keys.add_key(file, name, (scopes.INFER,), name)[1] for name in ("acme", "other")}
        keys["viewer"] = api_keys.add_key(file, "acme", (scopes.VIEWER,), "viewer")[1]
        keys["admin"] = api_keys.add_key(file, "ops", (scopes.ADMIN,), "admin")[1]
        async with running_gateway(settings_of(auth={"mode": "keys", "keys_file": str(file)})) as running:
            scene = cls(running, keys)
            yield scene
            for client in scene.clients.values():
                await client.aclose()


async def declare_models(store: ControlStore, delivery: Queue) -> None:
    """Writes the models and their lanes, and the heartbeat of a worker that has most of them."""
    for name in MODELS:  # at once each would have a connection of its own, which takes longer
        await _declare(store, delivery, *_stored(name, *MODELS[name]))
    ready = {
        name: {version: VersionState(State.READY, 1) for version in versions}
        for name, (_, versions) in MODELS.items()
        if name not in ("loading", "asleep")
    }
    await store.heartbeat(WorkerRecord(id="w1", started_at=0.0, models=ready), ttl_s=3600)


async def declare_more(
    running: Running, *names: str, versions: tuple[int, ...] = (1,), is_ready: bool = False, more: str = ""
) -> None:
    """Writes models like `echo` that nobody serves, unless they are said to be READY; `more` is configuration."""
    for name in names:
        await _declare(running.store, running.delivery, *_stored(name, f"{_FP32} {more}", versions))
    if is_ready:
        states = {version: VersionState(State.READY, 1) for version in versions}
        models = dict.fromkeys(names, states)
        await running.store.heartbeat(WorkerRecord(id=f"of {names[0]}", started_at=0.0, models=models), ttl_s=3600)
    await running.store.wake()


async def _declare(store: ControlStore, delivery: Queue, stored: StoredModel, lanes: list[Lane]) -> None:
    await store.put_model(stored)
    await store.set_desired(DesiredState(stored.model, 1))
    await delivery.ensure(lanes)


@functools.cache
def _stored(name: str, tensors: str, versions: tuple[int, ...]) -> tuple[StoredModel, list[Lane]]:
    rows = 0 if name in UNBATCHED else 8
    config = normalise(parse(f'name: "{name}" backend: "stub" max_batch_size: {rows} {tensors}'), name)
    spec = to_spec(config, LimitSettings())
    labels = LABELS if name == "echo" else {}
    stored = StoredModel(name, 1, to_json(config), versions, min_workers=spec.min_workers, labels=labels)
    return stored, [lane for version in versions for lane in lanes_of(spec, version)]


def _lanes(names: Any) -> list[Lane]:
    return [Lane(name, version) for name in names for version in MODELS[name][1]]


async def work(running: Running, model: str) -> None:
    """Answers the requests of a model that no worker has yet."""
    await _work(running, Lane(model, 1))


async def _work(running: Running, lane: Lane) -> None:
    with contextlib.suppress(BrokerUnavailable):  # the gateway has closed it
        while True:
            if leases := await running.delivery.fetch([lane], "w1", 64, 3600):
                await _serve(running, leases)


async def _serve(running: Running, leases: list[Lease]) -> None:
    requests = [await _read(running, lease) for lease in leases]
    running.requests += requests
    for lease, request in zip(leases, requests, strict=True):
        if request.reply_to:
            await running.delivery.publish(request.reply_to, encode_responses(_answers(request)))
        else:
            await running.delivery.requests.settle([_settlement(lease, request)])
    await running.delivery.finish([lease.entry for lease in leases])


def _settlement(lease: Lease, request: InferRequest) -> Settlement:
    answer = _answer(request)
    failure = answer.failure
    outcome = RequestOutcome(
        state=RequestState.FAILED if failure else RequestState.SUCCEEDED,
        blob=encode_responses([answer]),
        code=failure.code if failure else "",
        message=failure.message if failure else "",
        attempt=1,
    )
    return Settlement(
        address=EntryAddress(request.model, request.partition, request.id), outcome=outcome, entry=lease.entry
    )


async def _read(running: Running, lease: Lease) -> InferRequest:
    """Decodes a request, with its tensors from beside the stream if they are there, for the version of its lane."""
    try:
        request = decode_request(lease.frame)
    except PayloadApart as apart:
        request = decode_request(lease.frame, await running.delivery.payload(lease.entry, apart.request.id))
    request.version = lease.entry.lane.version
    return request


def _answers(request: InferRequest) -> list[Response]:
    """Returns the answer so often as the request says; none is an empty response that is the last."""
    answer = _answer(request)
    count = int(request.parameters.get("responses", 1))
    if not count:
        return [msgspec.structs.replace(answer, outputs=())]
    return [msgspec.structs.replace(answer, index=index, final=index == count - 1) for index in range(count)]


def _answer(request: InferRequest) -> Response:
    if request.model == "fails" or request.parameters.get("fails_in") == request.version:
        failure = Failure("inference_failed", "the model raised: boom")
        return Response(request_id=request.id, model=request.model, version=request.version, failure=failure)
    outputs = tuple(
        tensor if request.model == "pair" else msgspec.structs.replace(tensor, name="y")
        for tensor in request.inputs
        if not request.outputs or tensor.name in request.outputs or request.model != "pair"
    )
    told = {name: value for name, value in request.parameters.items() if name.startswith("told_")}
    return Response(
        request_id=request.id, model=request.model, version=request.version, outputs=outputs, parameters=told
    )
