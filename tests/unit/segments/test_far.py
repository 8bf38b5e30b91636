"""Tensors that travel between processes of two machines over TCP: read, answered, cut, stalled, refused."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from qinfer.core.messages import MemoryReference
from qinfer.core.settings_sections import SegmentSettings
from qinfer.errors import CorruptEntry, SettingsError
from qinfer.segments import connector, link, sharing
from qinfer.segments.connector import TensorConnector
from qinfer.segments.link import SECRET_BYTES, MessageKind, network_proof
from qinfer.segments.memory import HeldTensors
from qinfer.segments.reading import TensorsGone, TensorsUnreachable
from qinfer.segments.sharing import SegmentSharing, TensorListener
from qinfer.testing import eventually
from tests.support.certificates import write_certificate
from tests.support.tensor_proxy import TensorProxy

MIB = 2**20
HEAD = struct.Struct("<IIQB")
OWNER, READER = "gateway-g", "worker-w"


class Registry:
    """The addresses that processes have announced; `replaced` ones stand for a proxy in between."""

    def __init__(self) -> None:
        self.live: dict[str, str] = {}
        self.replaced: dict[str, str] = {}
        self.secrets = {OWNER: b"of gateways and workers"}

    async def announce(self, process: str) -> None:
        name, _, address = process.partition("@")
        self.live[name] = address
        try:
            await asyncio.Event().wait()
        finally:
            del self.live[name]

    def announce_tensors(self, process: str) -> Coroutine[Any, Any, None]:
        return self.announce(process)

    async def announced_tensors(self) -> list[str]:
        return [f"{name}@{self.replaced.get(name, address)}" for name, address in self.live.items()]


class Scene:
    """Processes, each with a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registry = Registry()
        self.replies: list[bytes] = []
        self.changes = 0
        self._running: dict[str, tuple[SegmentSharing, asyncio.Task[None]]] = {}

    def start(self, name: str, *, secret: bytes = b"of gateways and workers", **options: Any) -> SegmentSharing:
        """Starts a process; a gateway listens."""
        if name.startswith("gateway"):
            options = {"listen_host": "127.0.0.1", "listen_port": 0, **options}
        settings = SegmentSettings(directory=str(self.directory / name), **options)

        async def told() -> bytes:
            return secret

        kinds = ("worker-",) if name.startswith("gateway") else ("gateway-",)
        sharing = SegmentSharing(settings, name, kinds, told, reader=name, registry=self.registry)
        sharing.serve_readers(self._changed, lambda reply: self.replies.append(bytes(reply)))
        self._running[name] = sharing, asyncio.create_task(sharing.run())
        return sharing

    def _changed(self) -> None:
        self.changes += 1

    async def pair(self, **options: Any) -> tuple[SegmentSharing, TensorConnector]:
        """Starts a gateway and a worker that is connected to it."""
        gateway, worker = self.start(OWNER, **options.pop("gateway", {})), self.start(READER, **options)
        await self.connected(gateway)
        assert worker.far is not None
        return gateway, worker.far

    async def connected(self, gateway: SegmentSharing, *names: str) -> None:
        """Waits until just these read the gateway's memory."""
        wanted = set(names or (READER,))
        await eventually(lambda: gateway.readers == wanted, description=f"{wanted} as readers")

    async def end(self, name: str) -> None:
        """Ends a process; may be repeated."""
        if name in self._running:
            sharing, task = self._running.pop(name)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            sharing.close()

    async def close(self) -> None:
        for name in list(self._running):
            await self.end(name)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all waits short."""
    for module in (link, sharing, connector):
        monkeypatch.setattr(module, "TICK_S", 0.05)
    for name in ("AGAIN_S", "REGISTRY_EVERY_S"):
        monkeypatch.setattr(connector, name, 0.1)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    await scene.close()
    while Stranger.opened_ones:
        Stranger.opened_ones.pop().close()


@asynccontextmanager
async def proxied(scene: Scene, gateway: SegmentSharing) -> AsyncIterator[TensorProxy]:
    """Puts a proxy before a gateway."""
    assert gateway.listener is not None
    host, _, port = gateway.listener.address.rpartition(":")
    proxy = TensorProxy((host, int(port)))
    scene.registry.replaced[OWNER] = await proxy.start()
    yield proxy
    await proxy.close()


def written(owner: SegmentSharing, nbytes: int) -> tuple[HeldTensors, bytes]:
    data = bytes(number * 7 % 251 for number in range(1000)) * (nbytes // 1000) + b"e" * (nbytes % 1000)
    held = owner.own.write([data], nbytes, "")
    assert held is not None
    return held, data


async def until_gone(far: TensorConnector, reference: MemoryReference) -> None:
    with pytest.raises(TensorsGone):
        await far.read(reference)


@pytest.mark.parametrize("nbytes", [1, 602_112, link.CHUNK_BYTES, 8 * MIB, 40 * MIB])
async def test_a_worker_of_another_machine_reads_tensors(scene: Scene, nbytes: int) -> None:
    gateway, far = await scene.pair()
    held, data = written(gateway, nbytes)

    assert far.knows(OWNER)
    assert bytes(await far.read(held.reference)) == data
    held.release()


async def test_an_owner_is_known_while_it_is_connected(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may have lost the registry: its requests would be put back without a word to it."""
    gateway, far = await scene.pair()
    held, data = written(gateway, 20_000)
    monkeypatch.setattr(scene.registry, "live", {})
    await eventually(lambda: not far._addresses, description="an empty registry")

    assert far.knows(OWNER)
    assert bytes(await far.read(held.reference)) == data
    assert not far.knows("gateway-other")
    scene.registry.live[OWNER] = ""


async def test_many_tensors_come_by_turns(scene: Scene) -> None:
    """A small one does not wait for the large one before it."""
    gateway, far = await scene.pair()
    kept = [written(gateway, nbytes) for nbytes in (8 * MIB, *range(20_000, 60_000, 1000))]
    ended: list[int] = []

    async def read(number: int) -> None:
        held, data = kept[number]
        assert bytes(await far.read(held.reference)) == data
        ended.append(number)

    await asyncio.gather(*[read(number) for number in range(len(kept))])

    assert ended.index(0) > 20


async def test_tensors_of_an_ended_request_are_gone(scene: Scene) -> None:
    """A reader learns it if the memory is free or has others, and while tensors are on their way."""
    gateway, far = await scene.pair()
    held, _ = written(gateway, 5000)
    held.release()
    await until_gone(far, held.reference)
    again, data = written(gateway, 5000)
    assert again.place == held.place
    await until_gone(far, held.reference)
    assert bytes(await far.read(again.reference)) == data

    large, _ = written(gateway, 8 * MIB)
    (own,) = gateway.listener.links  # type: ignore[union-attr]
    reading = asyncio.create_task(far.read(large.reference))
    await eventually(lambda: bool(own._outgoing), description="chunks on their way")
    large.release()
    with pytest.raises(TensorsGone):
        await reading
    assert far.knows(OWNER)
    assert bytes(await far.read(again.reference)) == data


async def test_a_read_that_is_cancelled_harms_no_other(scene: Scene) -> None:
    gateway, far = await scene.pair()
    (large, _), (small, data) = written(gateway, 4 * MIB), written(gateway, 5000)
    reading = asyncio.create_task(far.read(large.reference))
    await asyncio.sleep(0)
    reading.cancel()

    assert bytes(await far.read(small.reference)) == data
    held, data = written(gateway, 4 * MIB)
    assert bytes(await far.read(held.reference)) == data


@pytest.mark.parametrize("segment", [0, 7])
async def test_a_reference_beyond_its_segment_is_gone(scene: Scene, segment: int) -> None:
    gateway, far = await scene.pair()
    held, _ = written(gateway, 5000)
    place = {"segment": segment, "offset": 2**40}
    await until_gone(far, msgspec.structs.replace(held.reference, **place))
    with pytest.raises(CorruptEntry):
        await far.read(msgspec.structs.replace(held.reference, size=2**30))


async def test_replies_come_and_are_confirmed(scene: Scene) -> None:
    gateway, far = await scene.pair()
    sent = [b"a" * 20_000, b"b" * MIB, b"c" * 300_000]
    came = [far.send_reply(OWNER, lambda reply=reply: reply) for reply in sent]  # type: ignore[misc]

    assert await asyncio.gather(*[one for one in came if one is not None]) == [True] * 3
    assert sorted(scene.replies) == sent
    assert far.send_reply("gateway-other", lambda: b"x") is None
    assert gateway.readers == {READER}


async def test_replies_beyond_the_bound_are_not_sent(scene: Scene) -> None:
    _, far = await scene.pair()
    most = link.MOST_REPLY_BYTES // MIB
    came = [far.send_reply(OWNER, lambda: bytes(MIB)) for _ in range(most + 1)]

    assert [one is None for one in came] == [False] * most + [True]
    assert await asyncio.gather(*[one for one in came if one is not None]) == [True] * most


async def test_a_worker_is_a_reader_only_while_it_is_connected(scene: Scene) -> None:
    gateway, _ = await scene.pair()
    await scene.end(READER)
    await eventually(lambda: not gateway.readers, description="no reader")
    scene.start(READER)
    await scene.connected(gateway)


async def test_a_gateway_that_ended_is_unreachable_and_its_successor_is_found(scene: Scene) -> None:
    gateway, far = await scene.pair()
    held, _ = written(gateway, 5000)
    await scene.end(OWNER)
    await eventually(lambda: OWNER not in far._links, description="no connection")
    with pytest.raises(TensorsUnreachable):
        await far.read(held.reference)
    await eventually(lambda: not far.knows(OWNER), description="no address")

    gateway = scene.start("gateway-h")
    await scene.connected(gateway)


async def test_processes_with_one_directory_need_no_network(scene: Scene) -> None:
    (scene.directory / READER).symlink_to(scene.directory / OWNER)
    (scene.directory / OWNER).mkdir(mode=0o700)
    gateway = scene.start(OWNER)
    far = scene.start(READER).far
    assert far is not None
    await scene.connected(gateway)
    await eventually(lambda: OWNER in far._addresses, description="an address")

    assert gateway.listener is not None
    assert not far.knows(OWNER)
    assert not gateway.listener.readers


@pytest.mark.parametrize("stalls", [False, True], ids=["cut", "stalled"])
@pytest.mark.parametrize("after", [10, 60, 300_000], ids=["handshake", "proof", "tensors"])
async def test_a_proxy_that_stalls_or_cuts(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, stalls: bool, after: int
) -> None:
    """In the middle of a message: the read fails in time, and the next connection is whole."""
    for module, name in ((connector, "STALLED_S"), (connector, "CONNECTED_WITHIN_S"), (sharing, "PROVEN_WITHIN_S")):
        monkeypatch.setattr(module, name, 0.3)
    gateway = scene.start(OWNER)
    held, data = written(gateway, 602_112)
    async with proxied(scene, gateway) as proxy:
        proxy.most_bytes, proxy.stalls = after, stalls
        worker = scene.start(READER)
        far = worker.far
        assert far is not None
        if after > 100:
            await scene.connected(gateway)
            with pytest.raises(TensorsUnreachable):
                await far.read(held.reference)
        await asyncio.wait_for(proxy.reached.wait(), 5)
        proxy.most_bytes = None
        monkeypatch.setattr(connector, "STALLED_S", 10.0)
        await eventually(lambda: proxy.connections > 1, description="another connection")
        await scene.connected(gateway)
        assert bytes(await far.read(held.reference)) == data


async def test_a_worker_that_reads_nothing_is_left(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded."""
    monkeypatch.setattr(link, "SILENT_S", 0.5)
    gateway = scene.start(OWNER)
    held, _ = written(gateway, 8 * MIB)
    reader = await Stranger.proven(scene, gateway)
    (own,) = gateway.listener.links  # type: ignore[union-attr]
    place = (held.reference.segment, held.reference.offset, held.reference.size, held.reference.generation)
    for number in range(20):
        await reader.send(MessageKind.READ, number, msgspec.msgpack.encode(place))
    await eventually(lambda: own._is_paused, description="a full connection")
    assert own._transport.get_write_buffer_size() <= 4 * link.CHUNK_BYTES
    await eventually(lambda: not gateway.readers, description="no reader")


class Stranger:
    """A process that speaks the protocol by hand, until the test ends."""

    opened_ones: ClassVar[list["Stranger"]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def opened(cls, gateway: SegmentSharing) -> "Stranger":
        assert gateway.listener is not None
        host, _, port = gateway.listener.address.rpartition(":")
        await eventually(lambda: bool(gateway.listener and gateway.listener.secret), description="a secret")
        cls.opened_ones.append(cls(*await asyncio.open_connection(host, int(port))))
        return cls.opened_ones[-1]

    @classmethod
    async def proven(cls, scene: Scene, gateway: SegmentSharing) -> "Stranger":
        self = await cls.opened(gateway)
        challenge = await self.challenge()
        own = bytes(SECRET_BYTES)
        given = network_proof(scene.registry.secrets[OWNER], "reader", challenge + own, b"", OWNER, "worker-s")
        await self.send(MessageKind.PROOF, 0, own + given + b"worker-s")
        assert (await self.message())[0] is MessageKind.WELCOME
        await self.send(MessageKind.ALIVE)
        await eventually(lambda: "worker-s" in gateway.readers, description="a reader")
        return self

    async def challenge(self) -> bytes:
        kind, body = await self.message()
        assert kind is MessageKind.CHALLENGE
        return body

    async def message(self) -> tuple[MessageKind, bytes]:
        nbytes, _, _, kind = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        return MessageKind(kind), await self._reader.readexactly(nbytes)

    async def send(self, kind: int, number: int = 0, body: bytes = b"", *, whole: int = 0) -> None:
        self._writer.write(HEAD.pack(len(body), whole, number, kind) + body)
        await self._writer.drain()

    async def is_closed(self) -> bool:
        """Waits for the end."""
        try:
            async with asyncio.timeout(5):
                while await self._reader.read(65536):
                    pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._writer.close()
        self._writer.transport.abort()


def right(challenge: bytes, **changes: Any) -> bytes:
    """Returns a proof, right but for the changes."""
    own = bytes(SECRET_BYTES)
    said = {"secret": b"of gateways and workers", "role": "reader", "owner": OWNER, "name": "worker-s"} | changes
    certificate = said.get("certificate", b"")
    told = said.get("told", said["name"])
    proof = network_proof(said["secret"], said["role"], challenge + own, certificate, said["owner"], said["name"])
    return own + proof + str(told).encode()


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: b"",
        lambda _: bytes(100),
        lambda challenge: right(challenge, secret=b"another"),
        lambda challenge: right(challenge, owner="gateway-h"),
        lambda challenge: right(challenge, role="owner"),
        lambda challenge: right(challenge, told="worker-t"),
        lambda challenge: right(challenge, certificate=bytes(32)),
        lambda challenge: right(bytes(len(challenge))),
        lambda challenge: right(challenge, name=""),
        lambda challenge: right(challenge) + b"\xff",
    ],
    ids=["nothing", "zeros", "secret", "owner", "role", "name", "certificate", "challenge", "unnamed", "longer"],
)
async def test_a_process_without_the_proof_gets_nothing(scene: Scene, answer: Callable[[bytes], bytes]) -> None:
    gateway = scene.start(OWNER)
    stranger = await Stranger.opened(gateway)
    await stranger.send(MessageKind.PROOF, 0, answer(await stranger.challenge()))

    assert await stranger.is_closed()
    assert not gateway.readers


@pytest.mark.parametrize(
    "message",
    [
        (MessageKind.READ, 1, msgspec.msgpack.encode((0, 0, 5, 1)), 0),
        (MessageKind.CHUNK, 1, b"reply", 5),
        (MessageKind.ALIVE, 1, b"", 0),
        (99, 1, b"", 0),
        (MessageKind.PROOF, 1, bytes(1000), 0),
    ],
    ids=["read", "reply", "alive", "unknown", "long"],
)
async def test_an_unproven_process_may_say_nothing_else(scene: Scene, message: tuple[int, int, bytes, int]) -> None:
    gateway = scene.start(OWNER)
    stranger = await Stranger.opened(gateway)
    kind, number, body, whole = message
    await stranger.send(kind, number, body, whole=whole)

    assert await stranger.is_closed()
    assert not scene.replies


@pytest.mark.parametrize(
    "message",
    [
        (MessageKind.PROOF, b"", 0),
        (MessageKind.READ, b"\xc1", 0),
        (MessageKind.READ, msgspec.msgpack.encode((0, 0, 2**30, 1)), 0),
        (MessageKind.READ, msgspec.msgpack.encode((0, -1, 5, 1)), 0),
        (MessageKind.READ, msgspec.msgpack.encode((0, 0, 5, 0)), 0),
        (MessageKind.CHUNK, b"more than the whole", 5),
        (MessageKind.CHUNK, b"too large", link.MOST_REPLY_BYTES + 1),
        (MessageKind.CHUNK, b"", 5),
        (MessageKind.WELCOME, b"", 0),
    ],
)
async def test_a_reader_that_breaks_the_rules_is_left(scene: Scene, message: tuple[MessageKind, bytes, int]) -> None:
    gateway = scene.start(OWNER)
    reader = await Stranger.proven(scene, gateway)
    kind, body, whole = message
    await reader.send(kind, 1, body, whole=whole)

    assert await reader.is_closed()
    await eventually(lambda: not gateway.readers, description="no reader")
    assert not scene.replies


async def test_silent_strangers_are_bounded_and_keep_no_worker_out(scene: Scene) -> None:
    gateway = scene.start(OWNER)
    strangers = [await Stranger.opened(gateway) for _ in range(80)]
    scene.start(READER)
    await scene.connected(gateway)

    assert gateway.listener is not None
    assert len(gateway.listener._unproven) <= 64
    assert await strangers[0].is_closed()


async def test_a_silent_stranger_is_left_in_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "PROVEN_WITHIN_S", 0.1)
    stranger = await Stranger.opened(scene.start(OWNER))

    assert await stranger.is_closed()


async def test_a_worker_with_another_secret_is_no_reader(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    gateway = scene.start(OWNER)
    scene.start(READER, secret=b"another of somebody else")
    await eventually(lambda: "no connection to tensors" in caplog.text, description="a failure")

    assert not gateway.readers
    assert "another of somebody else" not in caplog.text


async def test_an_owner_without_the_proof_gets_no_replies(scene: Scene) -> None:
    """It is connected to, at the address of another, and knows the name that it should have."""
    gateway = scene.start(OWNER, secret=b"another")
    worker = scene.start(READER)
    real = TensorListener(gateway.own, OWNER, SegmentSettings(directory="d", listen_host="127.0.0.1", listen_port=0))
    real.close()
    server_saw = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.pack(SECRET_BYTES, 0, 0, MessageKind.CHALLENGE) + bytes(SECRET_BYTES))
        await reader.readexactly(HEAD.size + 2 * SECRET_BYTES + len(READER))
        body = bytes(SECRET_BYTES) + OWNER.encode()
        writer.write(HEAD.pack(len(body), 0, 0, MessageKind.WELCOME) + body)
        assert not await reader.read(1)
        server_saw.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    scene.registry.replaced[OWNER] = f"127.0.0.1:{port}"
    await asyncio.wait_for(server_saw.wait(), 5)
    assert worker.far is not None
    assert not worker.far._links
    server.close()


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """Certificates of two authorities."""
    authority = write_certificate(tmp_path, "ca")
    write_certificate(tmp_path, "own", authority)
    write_certificate(tmp_path, "other-ca")
    return {name: str(tmp_path / name) for name in ("ca.pem", "own.pem", "own.key", "other-ca.pem")}


def serving(certificates: dict[str, str]) -> dict[str, Any]:
    return {"tls_certfile": certificates["own.pem"], "tls_keyfile": certificates["own.key"]}


async def test_tensors_and_replies_travel_by_tls(scene: Scene, certificates: dict[str, str]) -> None:
    gateway = scene.start(OWNER, **serving(certificates))
    held, data = written(gateway, 602_112)
    async with proxied(scene, gateway) as proxy:
        worker = scene.start(READER, tls_ca_file=certificates["ca.pem"])
        await scene.connected(gateway)
        assert worker.far is not None
        assert bytes(await worker.far.read(held.reference)) == data
        came = worker.far.send_reply(OWNER, lambda: data)
        assert came is not None
        assert await came
        assert scene.replies == [data]
        assert READER.encode() not in proxy.seen
        assert data[:1000] not in proxy.seen


@pytest.mark.parametrize(
    ("gateway", "worker"),
    [(True, "other-ca.pem"), (True, ""), (False, "ca.pem")],
    ids=["another authority", "a worker without TLS", "a gateway without TLS"],
)
async def test_tls_is_all_or_nothing(
    scene: Scene, certificates: dict[str, str], caplog: pytest.LogCaptureFixture, *, gateway: bool, worker: str
) -> None:
    owner = scene.start(OWNER, **(serving(certificates) if gateway else {}))
    scene.start(READER, tls_ca_file=certificates.get(worker, ""))
    await eventually(lambda: "no connection to tensors" in caplog.text, description="a failure")

    assert not owner.readers


async def test_a_port_that_is_taken_is_named(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"QINFER_SEGMENTS__LISTEN_HOST '127.0.0.1:{port}'"):
            scene.start(OWNER, listen_port=port)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (OWNER, {"tls_certfile": "/none.pem", "tls_keyfile": "/none.key"}, "TLS_CERTFILE '/none.pem'"),
        (READER, {"tls_ca_file": "/none.pem"}, "TLS_CA_FILE '/none.pem'"),
    ],
)
async def test_certificates_that_can_not_be_read(scene: Scene, name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        scene.start(name, **options)
