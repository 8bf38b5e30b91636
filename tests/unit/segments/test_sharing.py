"""Gateways that hand out their segments, and workers that read them, in one process."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from qinfer.core.messages import MemoryReference
from qinfer.core.settings_sections import SegmentSettings
from qinfer.errors import CorruptEntry, SettingsError
from qinfer.segments.memory import HeldTensors, OwnMemory
from qinfer.segments.reading import SegmentReader, TensorsGone, TensorsUnreachable
from qinfer.segments.sharing import SegmentSharing
from qinfer.segments.shelf import Shelf, proof, socket_path
from qinfer.testing import eventually

MIB = 2**20
SECRET = b"of gateways and workers"


class Gateway:
    """The memory of a gateway."""

    def __init__(self, directory: Path, name: str) -> None:
        self.memory = OwnMemory(name, 128 * MIB)
        self.changes = 0
        self._is_closed = False
        self.shelf = Shelf(directory, self.memory)
        self.shelf.changed = self._changed
        self.shelf.secret = SECRET

    def _changed(self) -> None:
        self.changes += 1

    def write(self, data: bytes) -> HeldTensors:
        held = self.memory.write([data], len(data), "")
        assert held is not None
        return held

    def close(self) -> None:
        """Ends it; may be repeated."""
        if not self._is_closed:
            self._is_closed = True
            self.shelf.close()
            self.memory.close()


class Scene:
    """A directory, its gateways and its workers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._tasks: list[asyncio.Task[None]] = []
        self._gateways: list[Gateway] = []

    def gateway(self, name: str = "a") -> Gateway:
        self._gateways.append(Gateway(self.directory, f"gateway-{name}"))
        return self._gateways[-1]

    async def worker(self, name: str, *gateways: Gateway) -> SegmentReader:
        """Starts a worker; returns once these gateways know it."""
        reader = SegmentReader(self.directory, name, ("gateway-",))
        reader.secret = SECRET
        self._tasks.append(asyncio.create_task(reader.run()))
        await eventually(lambda: all(name in each.shelf.readers for each in gateways), description="a known worker")
        return reader

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for gateway in self._gateways:
            gateway.close()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path / "m")
    yield scene
    await scene.close()


async def test_a_worker_reads_what_a_gateway_has_written(scene: Scene) -> None:
    """A segment may be opened before the worker comes, or after."""
    gateway = scene.gateway()
    early = gateway.write(b"early")
    worker = await scene.worker("w", gateway)
    late = gateway.write(bytes(63 * MIB))

    assert late.reference.segment == 2
    assert worker.read(early.reference) == b"early"
    assert worker.read(late.reference) == bytes(63 * MIB)


async def test_each_worker_reads_each_gateway(scene: Scene) -> None:
    gateways = [scene.gateway(name) for name in "ab"]
    workers = [await scene.worker(name, *gateways) for name in ("w1", "w2")]
    held = [gateway.write(gateway.memory.owner.encode()) for gateway in gateways]

    assert [[worker.read(one.reference) for one in held] for worker in workers] == [[b"gateway-a", b"gateway-b"]] * 2
    assert gateways[0].shelf.readers == {"w1", "w2"}


async def test_what_was_read_is_confirmed(scene: Scene) -> None:
    """All of one turn of the loop together, as many as there are."""
    gateway, confirmed = scene.gateway(), list[int]()
    worker = await scene.worker("w", gateway)
    gateway.shelf.confirmed = confirmed.extend
    held = [gateway.write(b"x") for _ in range(600)]
    for one in held:
        worker.confirm(one.reference)
    await eventually(lambda: len(confirmed) == 600, description="all confirmations")

    assert confirmed == [one.reference.generation for one in held]
    assert gateway.shelf.readers == {"w"}


async def test_processes_of_another_kind_are_left_alone(scene: Scene) -> None:
    """A worker does not read the outputs of workers."""
    other = Gateway(scene.directory, "worker-b")
    scene._gateways.append(other)
    gateway = scene.gateway()
    await scene.worker("w", gateway)

    assert other.shelf.readers == frozenset()


async def secret() -> bytes:
    return SECRET


@asynccontextmanager
async def sharing(directory: Path, *names: str) -> AsyncIterator[list[SegmentSharing]]:
    """Runs workers that read one another's memory, once each has found all others; closes those left in the list."""
    settings = SegmentSettings(directory=str(directory), most_bytes=8 * MIB)
    kinds = ("gateway-", "worker-")
    workers = [SegmentSharing(settings, f"worker-{name}", kinds, secret, reader=f"worker-id-{name}") for name in names]
    running = asyncio.gather(*[worker.run() for worker in workers])
    everyone = {f"worker-id-{name}" for name in names}
    await eventually(lambda: all(each.shelf.readers == everyone for each in workers), description="all workers")
    yield workers
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for worker in workers:
        worker.close()


async def test_workers_read_one_another_and_themselves(tmp_path: Path) -> None:
    async with sharing(tmp_path / "m", "a", "b") as workers:
        held = [worker.own.write([worker.own.owner.encode()], 8, "") for worker in workers]
        references = [one.reference for one in held if one is not None]

        for worker in workers:
            assert list(map(worker.others.read, references)) == [b"worker-a", b"worker-b"]
            assert len(worker.shelf._readers) == 1  # not itself
            assert worker.others.view(references[0]).tensors.readonly


async def test_a_worker_confirms_its_own_outputs(tmp_path: Path) -> None:
    async with sharing(tmp_path / "m", "a") as workers:
        worker = workers.pop()
        confirmed = list[int]()
        worker.shelf.confirmed = confirmed.extend
        held = worker.own.write([b"mine"], 4, "")
        assert held is not None
        worker.others.confirm(held.reference)
        await eventually(lambda: confirmed == [held.reference.generation], description="a confirmation")

        held.release()
        with pytest.raises(TensorsGone):
            worker.others.read(held.reference)
        worker.close()
        with pytest.raises(TensorsGone):
            worker.others.read(held.reference)


async def test_a_worker_that_has_ended_has_no_pending_requests(tmp_path: Path) -> None:
    async with sharing(tmp_path / "m", "a", "b") as workers:
        first, second = workers.pop(0), workers[0]
        held = first.own.write([b"x"], 1, "")
        assert held is not None
        first.close()

        with pytest.raises(TensorsGone):
            await until_gone(second.others, held.reference)


async def test_a_gateway_that_starts_later_is_found(scene: Scene) -> None:
    worker = await scene.worker("w")
    gateway = scene.gateway()
    await eventually(lambda: gateway.shelf.readers == {"w"}, description="the worker at the new gateway")

    assert worker.read(gateway.write(b"x").reference) == b"x"
    assert gateway.changes == 1


async def test_what_has_ended_is_not_read(scene: Scene) -> None:
    """Not while it lies there, and not once others' tensors lie there."""
    gateway = scene.gateway()
    worker = await scene.worker("w", gateway)
    held = gateway.write(b"mine")
    held.release()
    with pytest.raises(TensorsGone):
        worker.read(held.reference)

    gateway.write(b"others")

    with pytest.raises(TensorsGone):
        worker.read(held.reference)


async def test_a_gateway_that_has_ended_has_no_pending_requests(scene: Scene) -> None:
    gateway = scene.gateway()
    worker = await scene.worker("w", gateway)
    held = gateway.write(b"x")
    gateway.close()

    with pytest.raises(TensorsGone):
        await until_gone(worker, held.reference)


async def until_gone(worker: SegmentReader, reference: MemoryReference) -> None:
    """Reads until the worker has heard of the end."""
    async with asyncio.timeout(5.0):
        while True:
            worker.read(reference)
            await asyncio.sleep(0.01)


async def test_a_gateway_that_was_never_reached_may_live(scene: Scene) -> None:
    """A socket may be of another machine whose files are here, or be left by a killed gateway."""
    gateway = scene.gateway()
    reference = gateway.write(b"x").reference
    worker = await scene.worker("w", gateway)
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(os.fspath(socket_path(scene.directory, "gateway-far")))
    left.close()

    for name in ("gateway-far", "gateway-unknown"):
        with pytest.raises(TensorsUnreachable):
            worker.read(
                MemoryReference(name, *[getattr(reference, field) for field in reference.__struct_fields__[1:]])
            )


async def test_a_worker_whose_connection_broke_connects_again(scene: Scene) -> None:
    """A gateway ends the connection of a worker that does not read; it lives on, and so do its requests."""
    gateway = scene.gateway()
    worker = await scene.worker("w", gateway)
    held = gateway.write(b"x")
    for connection in list(gateway.shelf._readers):
        gateway.shelf._forget(connection)
    assert (gateway.shelf.readers, set(gateway.shelf.known)) == (frozenset(), {"w"})
    await eventually(lambda: gateway.shelf.readers == {"w"}, description="the worker again")

    await eventually(lambda: worker.read(held.reference) == b"x", description="tensors")


@pytest.mark.parametrize(("offset", "size"), [(0, 100 * MIB), (64 * MIB - 64, 1), (2**62, 8)])
async def test_a_reference_beyond_its_segment_is_refused(scene: Scene, offset: int, size: int) -> None:
    gateway = scene.gateway()
    worker = await scene.worker("w", gateway)
    reference = gateway.write(b"x").reference

    with pytest.raises(CorruptEntry, match="leave a segment"):
        worker.read(MemoryReference(reference.owner, reference.segment, offset, size, reference.generation))


async def test_a_name_of_a_gateway_is_no_path(scene: Scene) -> None:
    """Entries may be written by others who reach Redis."""
    worker = await scene.worker("w")
    outside = scene.directory.parent / "x.memory"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(outside))
    listener.listen()

    with pytest.raises(CorruptEntry):
        worker.read(MemoryReference("../x", 1, 0, 1, 1))

    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


async def test_the_socket_of_a_killed_gateway_is_removed_by_the_next(scene: Scene) -> None:
    scene.directory.mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(os.fspath(socket_path(scene.directory, "gateway-killed")))
    left.close()

    first, second = scene.gateway("a"), scene.gateway("b")

    assert sorted(path.name for path in scene.directory.iterdir()) == ["gateway-a.memory", "gateway-b.memory"]
    first.close()
    second.close()
    assert list(scene.directory.iterdir()) == []


@asynccontextmanager
async def stranger(path: Path) -> AsyncIterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection:
        connection.connect(os.fspath(path))
        yield connection


async def test_another_user_gets_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = scene.gateway()
    gateway.write(b"secret")
    mine = os.geteuid()
    monkeypatch.setattr("qinfer.segments.shelf.os.geteuid", lambda: mine + 1)

    async with stranger(socket_path(scene.directory, "gateway-a")) as connection:
        await eventually(lambda: is_closed(connection), description="a closed connection")

    assert gateway.shelf.readers == frozenset()


@pytest.mark.parametrize(
    "answer",
    [
        lambda challenge: b"w",
        lambda challenge: b"w" * 300,
        lambda challenge: proof(b"guessed", challenge, "gateway-a", os.getpid(), "w"),
        lambda challenge: proof(SECRET, challenge, "gateway-b", os.getpid(), "w"),  # meant for another gateway
        lambda challenge: proof(SECRET, challenge, "gateway-a", os.getppid(), "w"),  # passed on by a process between
        lambda challenge: proof(SECRET, challenge, "gateway-a", 0, "w"),
        lambda challenge: proof(SECRET, bytes(32), "gateway-a", os.getpid(), "w"),  # of an earlier connection
        lambda challenge: proof(SECRET, challenge, "gateway-a", os.getpid(), "w" * 300),
        lambda challenge: proof(SECRET, challenge, "gateway-a", os.getpid(), "w")[:-1] + b"v",
    ],
)
async def test_who_can_not_prove_to_be_a_worker_gets_nothing(scene: Scene, answer: Callable[[bytes], bytes]) -> None:
    """Code of a model may run as the same user; it does not know the secret."""
    gateway = scene.gateway()
    gateway.write(b"of another tenant")
    async with stranger(socket_path(scene.directory, "gateway-a")) as connection:
        connection.send(answer(await challenge_of(connection)))
        await eventually(lambda: is_closed(connection), description="a closed connection")

    assert gateway.shelf.readers == frozenset()


async def test_who_confirms_half_a_generation_is_no_reader(scene: Scene) -> None:
    gateway = scene.gateway()
    async with stranger(socket_path(scene.directory, "gateway-a")) as connection:
        connection.send(proof(SECRET, await challenge_of(connection), "gateway-a", os.getpid(), "w"))
        await eventually(lambda: gateway.shelf.readers == {"w"}, description="the reader")
        connection.send(b"abc")
        await eventually(lambda: is_closed(connection), description="a closed connection")

    assert gateway.shelf.readers == frozenset()


async def test_without_a_secret_nothing_is_shared(scene: Scene) -> None:
    """A process that has not read Redis yet has no secret."""
    gateway = scene.gateway()
    gateway.shelf.secret = b""
    async with stranger(socket_path(scene.directory, "gateway-a")) as connection:
        await eventually(lambda: is_closed(connection), description="a closed connection")
    assert gateway.shelf.readers == frozenset()


async def challenge_of(connection: socket.socket) -> bytes:
    """Waits for the challenge of a gateway."""
    found: list[bytes] = []

    def has_come() -> bool:
        with suppress(BlockingIOError):
            found.append(connection.recv(100))
        return bool(found)

    await eventually(has_come, description="a challenge")
    return found[0]


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: path.mkdir(mode=0o755), "0700"),
        (lambda path: path.write_text(""), "can't be used"),
    ],
)
async def test_a_directory_that_can_not_be_used(tmp_path: Path, make: Callable[[Path], None], text: str) -> None:
    make(tmp_path / "m")

    with pytest.raises(SettingsError, match=text):
        Shelf(tmp_path / "m", OwnMemory("a", MIB))


async def test_a_directory_with_a_long_name(tmp_path: Path) -> None:
    """A socket's own name has at most 107 bytes."""
    directory = tmp_path / ("m" * 100) / ("n" * 100)
    scene = Scene(directory)
    gateway = scene.gateway()
    worker = await scene.worker("w", gateway)

    assert worker.read(gateway.write(b"x").reference) == b"x"
    await scene.close()
