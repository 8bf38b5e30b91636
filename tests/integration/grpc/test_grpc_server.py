"""The gRPC server of a real gateway: health, keys, TLS, its port, and how it ends."""

import asyncio
import contextlib
import socket
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.aio import InferenceServerClient

from qinfer.core.api_keys import hash_key, revoke_key
from qinfer.core.messages import Response
from qinfer.core.settings import AuthSettings, GrpcSettings, HttpSettings, Settings
from qinfer.errors import BrokerUnavailable, CorruptEntry, SettingsError
from qinfer.models.state import DesiredState, State, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.entries import Lane, Lease
from qinfer.testing import eventually
from qinfer.wire.frame import decode_request, encode_responses
from qinfer_api.app import Gateway, bind, build
from qinfer_api.rpc import frames
from qinfer_api.rpc.http2 import Http2Connection
from qinfer_api.rpc.server import open_port
from tests.support.certificates import write_certificate
from tests.support.gateway import MODELS, settings_of
from tests.support.http2 import (
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    SETTINGS,
    Frame,
    Requests,
    prefixed,
    settings_frame,
    window,
)
from tests.support.rpc import Rpc, infer_request, rpc, stub_of, value_of
from tests.support.servers.servers import Database

INFER = "/inference.GRPCInferenceService/ModelInfer"


def _health(server: Rpc) -> Any:
    stub: Any = HealthStub
    return stub(server.channel)


async def _all_ready(server: Rpc) -> None:
    models = {
        name: {version: VersionState(State.READY, 1) for version in versions} for name, (_, versions) in MODELS.items()
    }
    await server.running.store.heartbeat(WorkerRecord(id="w1", started_at=0.0, models=models), ttl_s=3600)
    await server.running.refresh()


async def test_health_follows_the_models() -> None:
    """SERVING if and only if the server is ready; other services are not known."""
    async with rpc(repository={"strict_readiness": True}) as server:
        health = _health(server)
        before = await health.Check(health_pb2.HealthCheckRequest())
        await _all_ready(server)
        after = await health.Check(health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await health.Check(health_pb2.HealthCheckRequest(service="other"))
        async with InferenceServerClient(server.running.grpc_target) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()

    assert before.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert after.status == health_pb2.HealthCheckResponse.SERVING
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_in_flight_calls_end_and_new_ones_find_no_server() -> None:
    """While the gateway drains: health says so to those who watch it, and nobody can connect."""
    async with rpc() as server:
        await _all_ready(server)
        watch = _health(server).Watch(health_pb2.HealthCheckRequest())
        before = await watch.read()
        call = server.stub.ModelInfer(infer_request("stuck"))
        lease = await _fetch(server)
        server.running.gateway.stop()

        after = await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await server.stub.ModelInfer(infer_request())
        await _answer(server, lease)
        reply = await call

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert before.status == health_pb2.HealthCheckResponse.SERVING
    assert after.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert value_of(reply) == 1.0


async def test_clients_are_told_to_go_before_anything_is_refused() -> None:
    """By a GOAWAY that takes every stream; what comes before its PING is answered is served, then a second ends it."""
    client = Requests()
    message = infer_request().SerializeToString()
    path = "/inference.GRPCInferenceService/ModelInfer"
    async with rpc() as server:
        host, _, port = server.running.grpc_target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frames.PREFACE + settings_frame() + client.call(1, message, path))
        await _read_until(reader, 1)
        server.running.gateway.stop()
        first = await _read_until(reader, 0, GOAWAY)
        ping = await _read_until(reader, 0, PING)

        was_draining = server.running.gateway.dispatcher.draining
        writer.write(client.call(3, message, path) + frames.frame(PING, frames.ACK, 0, ping.payload))
        second = await _read_until(reader, 0, GOAWAY)
        in_time = await _read_until(reader, 3)
        rest = await reader.read()
        writer.close()
        await writer.wait_closed()

    assert (first.payload[:4], second.payload[:4]) == (b"\x7f\xff\xff\xff", b"\0\0\0\3")
    assert not was_draining
    assert in_time.payload.startswith(b"\0")
    assert rest == b""


@pytest.mark.parametrize("rows", [1, 100_000])
async def test_what_comes_in_slowly_is_still_taken(rows: int) -> None:
    """A call whose head came before the second GOAWAY is answered, small or large, once its message is complete."""
    client = Requests()
    request = pb.ModelInferRequest(model_name="wide", raw_input_contents=[bytes(4 * rows)])
    request.inputs.add(name="x", datatype="FP32", shape=[rows, 1])
    body = prefixed(request.SerializeToString())
    pieces = [body[at : at + 60_000] for at in range(20, len(body), 60_000)]
    async with rpc() as server:
        host, _, port = server.running.grpc_target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = client.headers(1, client.block("/inference.GRPCInferenceService/ModelInfer"))
        writer.write(frames.PREFACE + settings_frame() + window(0, 2**20) + head + frames.frame(DATA, 0, 1, body[:20]))
        await _read_until(reader, 0, SETTINGS)
        server.running.gateway.stop()
        ping = await _read_until(reader, 0, PING)
        writer.write(frames.frame(PING, frames.ACK, 0, ping.payload))
        await eventually(lambda: server.running.gateway.dispatcher.draining)
        writer.writelines(frames.frame(DATA, 0, 1, piece) for piece in pieces)
        writer.write(frames.frame(DATA, frames.END_STREAM, 1))
        reply = await _read_until(reader, 1, HEADERS)
        writer.close()
        await writer.wait_closed()

    assert not reply.flags & frames.END_STREAM, "an answer, no status alone"


async def _read_until(reader: asyncio.StreamReader, number: int, kind: int = DATA) -> Frame:
    """Reads frames up to the first of a kind on a stream; DATA with its trailers."""
    found = None
    while True:
        word, flags, stream = frames.HEAD.unpack(await reader.readexactly(frames.HEAD_BYTES))
        one = Frame(word & 0xFF, flags, stream, await reader.readexactly(word >> 8))
        if (one.kind, one.number) == (kind, number):
            found = one
        if found is not None and (kind != DATA or (one.flags & frames.END_STREAM and one.number == number)):
            return found


@pytest.mark.slow
@pytest.mark.parametrize("has_call", [True, False])
async def test_clients_may_ask_for_signs_of_life_as_often_as_they_like(
    monkeypatch: pytest.MonkeyPatch, *, has_call: bool
) -> None:
    """A gRPC server of Google's ends a connection at the third ping within five minutes: `too_many_pings`."""
    pings, read = 0, Http2Connection._read_ping

    def counted(self: Http2Connection, flags: int, number: int, payload: bytes) -> None:
        nonlocal pings
        pings += 1
        read(self, flags, number, payload)

    monkeypatch.setattr(Http2Connection, "_read_ping", counted)
    options = [
        ("grpc.keepalive_time_ms", 20),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with rpc() as server, grpc.aio.insecure_channel(server.running.grpc_target, options) as channel:
        stub = stub_of(channel)
        await stub.ModelInfer(infer_request())
        connections = set(_connections(server))
        call = stub.ModelInfer(infer_request("stuck"), timeout=60) if has_call else None
        await eventually(lambda: pings >= 5, 50.0)  # the client sends one a second at most

        await stub.ModelInfer(infer_request())
        assert connections == set(_connections(server))
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        if call is not None:
            assert not call.done()
            call.cancel()


async def test_a_client_that_is_gone_gives_up_its_call() -> None:
    """One that does not answer within the time that is set; one that does is waited for."""
    settings = {"keepalive_s": 1.0, "keepalive_timeout_s": 1.0}
    async with rpc(settings) as server:
        alive = server.stub.ModelInfer(infer_request("stuck"), timeout=60)
        await eventually(lambda: len(_connections(server)) == 1)
        client = Requests()
        reader, writer = await asyncio.open_connection(*server.running.grpc_target.rsplit(":", 1))
        call = client.call(1, infer_request("stuck").SerializeToString(), INFER)
        writer.write(frames.PREFACE + settings_frame() + call)
        await eventually(partial(_is_depth, server, "stuck", 2))

        received = await reader.read()  # up to the connection's end
        writer.close()

        await eventually(partial(_is_depth, server, "stuck", 1))
        assert PING in [frame.kind for frame in frames_of(received)]
        assert not alive.done()
        alive.cancel()


def frames_of(data: bytes) -> list[Frame]:
    """Reads the frames that a server has sent."""
    found, position = [], 0
    while position < len(data):
        word, flags, number = frames.HEAD.unpack_from(data, position)
        position += frames.HEAD_BYTES + (word >> 8)
        found.append(Frame(word & 0xFF, flags, number, data[position - (word >> 8) : position]))
    return found


def _connections(server: Rpc) -> set[Http2Connection]:
    assert server.running.gateway.rpc is not None
    return server.running.gateway.rpc._calls.connections


async def _is_depth(server: Rpc, model: str, count: int) -> bool:
    return await server.running.depth(model) == count


async def test_a_load_under_way_is_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway that drains waits for every call, not only for infer calls."""
    started, loaded = asyncio.Event(), asyncio.Event()

    async def load(*_: Any) -> None:
        started.set()
        await loaded.wait()

    async with rpc() as server:
        monkeypatch.setattr(server.running.gateway.models, "load", load)
        monkeypatch.setattr("qinfer_api.rpc.server._LAST_REPLIES_S", 0.0)
        call = asyncio.ensure_future(server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m")))
        await started.wait()
        server.running.gateway.stop()
        await eventually(lambda: server.running.gateway.dispatcher.draining)
        for _ in range(3):
            await asyncio.sleep(0)
        loaded.set()
        await call


async def test_what_is_not_answered_in_time_is_refused() -> None:
    """The drain time over, calls end with UNAVAILABLE, and the gateway ends."""
    async with rpc(http={"drain_s": 0.2}) as server:
        call = server.stub.ModelInfer(infer_request("stuck"))
        await _fetch(server)
        server.running.gateway.stop()

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def _fetch(server: Rpc) -> Any:
    leases: list[Lease] = []
    while not leases:
        leases = await server.running.delivery.fetch([Lane("stuck", 1)], "hand", 1, 100)
    return decode_request(leases[0].frame)


async def _answer(server: Rpc, request: Any) -> None:
    response = Response(request_id=request.id, model="stuck", version=1, outputs=request.inputs)
    with contextlib.suppress(BrokerUnavailable):  # it is the gateway's own: with its last reply the gateway closes it
        await server.running.delivery.publish(request.reply_to, encode_responses([response]))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    entries = [
        f'{{"id": "{scope}", "tenant": "t", "sha256": "{hash_key(scope + "-key")}", "scopes": ["{scope}"]}}'
        for scope in ("infer", "admin")
    ]
    path.write_text(f'{{"keys": [{", ".join(entries)}]}}')
    return path


async def _code(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_keys_are_asked_for(keys: Path) -> None:
    """In either header; readiness needs none, loading an `admin` one."""
    async with rpc(auth={"mode": "keys", "keys_file": str(keys)}) as server:
        stub = server.stub
        bearer, plain = (("authorization", "Bearer infer-key"),), (("x-api-key", "infer-key"),)
        admin = (("x-api-key", "admin-key"),)
        load = pb.RepositoryModelLoadRequest(model_name="m")

        assert await _code(stub.ModelInfer(infer_request())) == "UNAUTHENTICATED"
        assert await _code(stub.ModelInfer(infer_request(), metadata=(("x-api-key", "wrong"),))) == "UNAUTHENTICATED"
        assert await _code(stub.ModelInfer(infer_request(), metadata=bearer)) == "OK"
        assert await _code(stub.ModelInfer(infer_request(), metadata=plain)) == "OK"
        assert await _code(stub.ModelStreamInfer().read()) == "UNAUTHENTICATED"
        assert await _code(stub.ModelConfig(pb.ModelConfigRequest(name="echo"))) == "UNAUTHENTICATED"
        assert await _code(stub.ServerReady(pb.ServerReadyRequest())) == "OK"
        assert await _code(stub.RepositoryModelLoad(load, metadata=plain)) == "PERMISSION_DENIED"
        assert await _code(stub.RepositoryModelLoad(load, metadata=admin)) == "UNAVAILABLE"  # the control mode is none


@pytest.mark.parametrize("strict", ["false", "true"])
async def test_a_stream_ends_when_its_key_is_revoked(keys: Path, strict: str) -> None:
    """With what it has in flight, whether or not another message comes; other streams go on."""
    metadata = (("x-api-key", "infer-key"), ("triton_grpc_error", strict))
    async with rpc(auth={"mode": "keys", "keys_file": str(keys)}) as server:
        call = server.stub.ModelStreamInfer(metadata=metadata)
        other = server.stub.ModelStreamInfer(metadata=(("x-api-key", "admin-key"),))
        for stream in (call, other):
            await stream.write(infer_request())
            assert value_of((await stream.read()).infer_response) == 1.0
        await call.write(infer_request("stuck"))
        await eventually(lambda: server.running.gateway.dispatcher.in_flight == 1, description="a request in flight")

        revoke_key(keys, "infer")

        assert await _code(call.read()) == "UNAUTHENTICATED"
        assert await call.details() == "key 'infer' was revoked; use another"
        assert server.running.gateway.dispatcher.in_flight == 0
        await other.write(infer_request(value=2.0))
        assert value_of((await other.read()).infer_response) == 2.0
        assert await _code(server.stub.ModelInfer(infer_request(), metadata=metadata)) == "UNAUTHENTICATED"
        await other.done_writing()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """`server` and `client` issued by `ca`, and `stranger` by another."""
    authority = write_certificate(tmp_path, "ca")
    write_certificate(tmp_path, "server", authority)
    write_certificate(tmp_path, "client", authority)
    write_certificate(tmp_path, "stranger")
    return tmp_path


def _tls(directory: Path, *, mutual: bool) -> dict[str, Any]:
    settings = {"tls_certfile": str(directory / "server.pem"), "tls_keyfile": str(directory / "server.key")}
    return settings | ({"tls_client_ca_file": str(directory / "ca.pem")} if mutual else {})


async def _ask(server: Rpc, directory: Path, client: str = "") -> str:
    def read(name: str) -> bytes:
        return (directory / name).read_bytes()

    chain = (read(f"{client}.key"), read(f"{client}.pem")) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(read("ca.pem"), *chain)
    async with grpc.aio.secure_channel(server.running.grpc_target, credentials) as channel:
        return await _code(stub_of(channel).ModelInfer(infer_request(), timeout=10))


async def test_tls(certificates: Path) -> None:
    """Clients that trust the authority are answered; those without TLS are not."""
    async with rpc(_tls(certificates, mutual=False)) as server:
        assert await _ask(server, certificates) == "OK"
        assert await _code(server.stub.ModelInfer(infer_request(), timeout=10)) == "UNAVAILABLE"
        async with InferenceServerClient(
            server.running.grpc_target, ssl=True, root_certificates=str(certificates / "ca.pem")
        ) as client:
            assert await client.is_server_live()


async def test_mutual_tls(certificates: Path) -> None:
    """Only clients with a certificate of the authority are answered."""
    async with rpc(_tls(certificates, mutual=True)) as server:
        assert await _ask(server, certificates, "client") == "OK"
        assert await _ask(server, certificates) == "UNAVAILABLE"
        assert await _ask(server, certificates, "stranger") == "UNAVAILABLE"


async def test_certificates_are_read_again(certificates: Path) -> None:
    """New connections are shown the new one, and trusted by the new authority; open ones stay."""
    async with rpc(_tls(certificates, mutual=True)) as server:
        gateway = server.running.gateway
        old = [(certificates / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")]
        credentials = grpc.ssl_channel_credentials(*old)
        async with grpc.aio.secure_channel(server.running.grpc_target, credentials) as channel:
            assert await _code(stub_of(channel).ModelInfer(infer_request(), timeout=10)) == "OK"

            authority = write_certificate(certificates, "ca")
            write_certificate(certificates, "client", authority)
            write_certificate(certificates, "server", authority)
            gateway.reload()

            async def is_trusted() -> bool:
                return await _ask(server, certificates, "client") == "OK"

            await eventually(is_trusted, description="the new certificate")
            assert await _code(stub_of(channel).ModelInfer(infer_request(), timeout=10)) == "OK"
        async with grpc.aio.secure_channel(server.running.grpc_target, credentials) as channel:
            assert await _code(stub_of(channel).ModelInfer(infer_request(), timeout=10)) == "UNAVAILABLE"


async def test_certificates_that_cannot_be_read_change_nothing(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says which."""
    async with rpc(_tls(certificates, mutual=True)) as server:
        ca = (certificates / "ca.pem").read_bytes()
        for broken in ("server.pem", "server.key", "ca.pem"):
            good = (certificates / broken).read_bytes()
            (certificates / broken).write_bytes(b"")
            caplog.clear()
            server.running.gateway.reload()
            await eventually(lambda: "certificate can't be read" in caplog.text, description="the error")
            (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
            assert str(certificates / broken) in error.__dict__["reason"]
            (certificates / broken).write_bytes(good)

        assert (certificates / "ca.pem").read_bytes() == ca
        assert await _ask(server, certificates, "client") == "OK"
        assert await _ask(server, certificates, "stranger") == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tls_certfile": "server.pem"}, "QINFER_GRPC__TLS_KEYFILE is not set"),
        ({"tls_keyfile": "server.key"}, "QINFER_GRPC__TLS_CERTFILE is not set"),
        ({"tls_client_ca_file": "ca.pem"}, "QINFER_GRPC__TLS_CLIENT_CA_FILE is set without"),
        ({"tls_certfile": "none", "tls_keyfile": "server.key"}, "QINFER_GRPC__TLS_CERTFILE=.*none: there is no such"),
        ({"tls_certfile": "server.pem", "tls_keyfile": "client.key"}, "QINFER_GRPC__TLS_KEYFILE=.*client.key: not a"),
        (
            {"tls_certfile": "server.pem", "tls_keyfile": "server.key", "tls_client_ca_file": "ca.key"},
            "QINFER_GRPC__TLS_CLIENT_CA_FILE=.*it does not contain PEM certificates",
        ),
    ],
)
async def test_wrong_tls_settings_are_named(certificates: Path, fields: dict[str, str], named: str) -> None:
    """With the variable and the file."""
    paths = {name: str(certificates / file) for name, file in fields.items()}

    with pytest.raises(SettingsError, match=named):
        open_port(Settings(grpc=GrpcSettings(port=0, **paths)))


async def test_a_taken_port_is_named() -> None:
    """Also when it is another gRPC server's: the port is not shared."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"QINFER_GRPC__PORT={port}"):
            open_port(Settings(grpc=GrpcSettings(port=port)))

    first = open_port(Settings(grpc=GrpcSettings(port=0)))
    await first.start()
    with pytest.raises(SettingsError, match="in use"):
        open_port(Settings(grpc=GrpcSettings(port=int(first.url.rpartition(":")[2]))))
    await first.close()


async def test_a_gateway_that_can_not_start_ends(database: Database) -> None:
    """With its error, though the gRPC server was made and never started."""

    class Broken(ControlStore):
        async def desired(self) -> dict[str, DesiredState]:
            raise CorruptEntry("the desired state can't be read")

    settings = settings_of(grpc={})
    delivery, store = await database.delivery(), database.store(Broken)
    gateway = Gateway(settings, delivery, store, bind(settings.http), rpc=open_port(settings))

    with pytest.raises(CorruptEntry):
        await gateway.serve()


async def test_other_machines_are_served_on_purpose_only() -> None:
    """The address of gRPC counts as that of HTTP does, and before Redis is looked for."""
    settings = Settings(http=HttpSettings(port=0), grpc=GrpcSettings(host="0.0.0.0", port=0), auth=AuthSettings())

    with pytest.raises(SettingsError, match=r"QINFER_GRPC__HOST=0\.0\.0\.0 serves other machines"):
        await build(settings)


async def test_a_wrong_pattern_is_named() -> None:
    """At the start, not at the first request."""
    with pytest.raises(SettingsError, match="QINFER_GRPC__HEADER_FORWARD_PATTERN"):
        async with rpc({"header_forward_pattern": "("}):
            pass


async def test_refused_connections_are_retried_elsewhere(server: Rpc) -> None:
    """A client that repeats what is UNAVAILABLE loses nothing while one gateway takes another's place."""
    async with rpc() as second:
        answered, refusals = 0, set()
        stubs = [server.stub, second.stub]
        for number in range(50):
            if number == 25:
                server.running.gateway.stop()
            for stub in stubs:
                try:
                    reply = await stub.ModelInfer(infer_request(value=number))
                except grpc.aio.AioRpcError as error:
                    refusals.add(error.code())
                    continue
                assert value_of(reply) == number
                answered += 1
                break
        assert answered == 50
        assert refusals <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
