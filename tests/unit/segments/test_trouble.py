"""Memory that is shared in trouble: no descriptors are left, or the other end of a socket stalls."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from qinfer.segments.reading import SegmentReader, TensorsUnreachable
from qinfer.segments.shelf import CHALLENGE_BYTES, Shelf, proof, socket_path
from qinfer.testing import eventually
from tests.unit.segments.test_sharing import MIB, SECRET, Gateway, Scene, challenge_of, is_closed, stranger


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path / "m")
    yield scene
    await scene.close()


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Leaves this process so many descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(count + 1)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1], before[1]))
    for descriptor in taken:
        os.close(descriptor)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("count", [0, 1, 2])
async def test_no_tensors_are_kept_in_a_segment_that_no_reader_can_get(scene: Scene, count: int) -> None:
    """A segment takes two descriptors, and one more while it is sent to readers."""
    gateway = scene.gateway()
    worker = await scene.worker("w", gateway)
    with descriptors_left(count):
        refused = gateway.memory.write([b"abc"], 3, "")

    assert refused is None
    assert (gateway.memory.held_bytes, gateway.memory.paged_bytes) == (0, 0)
    assert worker.read(gateway.write(b"abc").reference) == b"abc"
    assert gateway.shelf.readers == {"w"}


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_worker_that_can_not_map_a_segment_says_so_and_comes_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, is_taken: bool
) -> None:
    """It lives, so that its requests have to travel through Redis until it reads again."""
    monkeypatch.setattr("qinfer.segments.reading.AGAIN_S", 0.5)
    gateway = scene.gateway()
    worker = await scene.worker("w", gateway)
    with descriptors_left(3), ExitStack() as stack:
        held = gateway.write(b"abc")
        if is_taken:
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        await eventually(lambda: not gateway.shelf.known, description="a worker that is not known any more")
        with pytest.raises(TensorsUnreachable):
            worker.read(held.reference)

    await eventually(lambda: gateway.shelf.known == {"w"}, description="the worker again")
    await eventually(lambda: worker.read(held.reference) == b"abc", description="tensors")


async def test_a_worker_that_stays_away_is_not_known_for_ever(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may live, and be unable to connect."""
    monkeypatch.setattr("qinfer.segments.shelf.AWAY_S", 0.1)
    gateway = scene.gateway()
    await scene.worker("w", gateway)
    scene._tasks[0].cancel()
    await eventually(lambda: not gateway.shelf.readers, description="the end of the connection")

    assert gateway.shelf.known == {"w"}
    before = gateway.changes
    await eventually(lambda: not gateway.shelf.known, description="a worker that is not known any more")
    assert gateway.changes == before + 1


async def test_without_descriptors_a_gateway_waits_before_it_accepts_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop has other work than to fail."""
    monkeypatch.setattr("qinfer.segments.shelf._ACCEPT_AGAIN_S", 0.1)
    tries, accept = [0], Shelf._accept

    def counted(shelf: Shelf) -> None:
        tries[0] += 1
        accept(shelf)

    monkeypatch.setattr(Shelf, "_accept", counted)
    gateway = scene.gateway()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection:
        with descriptors_left(0):
            connection.connect(os.fspath(socket_path(scene.directory, "gateway-a")))
            await eventually(lambda: tries[0] > 0, description="a try")
            for _ in range(100):
                await asyncio.sleep(0)
            assert tries[0] < 5
        assert len(await challenge_of(connection)) == CHALLENGE_BYTES
    assert gateway.shelf.readers == frozenset()


async def test_peers_that_say_nothing_are_bounded_and_keep_no_worker_out(scene: Scene) -> None:
    """Code of a model may connect as often as it likes, and send nothing."""
    gateway = scene.gateway()
    path = socket_path(scene.directory, "gateway-a")
    with ExitStack() as stack:
        silent: list[socket.socket] = []
        for number in range(200):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            connection.connect(os.fspath(path))
            silent.append(stack.enter_context(connection))
            await eventually(lambda: is_heard(silent[-1]), description=f"the challenge of {number}")
        worker = await scene.worker("w", gateway)

        assert worker.read(gateway.write(b"abc").reference) == b"abc"
        assert len(gateway.shelf._readers) <= 65
        await eventually(lambda: is_closed(silent[0]), description="the end of the first")
    await eventually(lambda: len(gateway.shelf._readers) == 1, description="only the worker")


async def test_a_worker_that_stops_reading_is_left_and_the_others_are_not(scene: Scene) -> None:
    """It was stopped: what is sent to it fills its socket, and nothing waits for it."""
    gateway = scene.gateway()
    worker = await scene.worker("w", gateway)
    held = gateway.write(b"abc")
    (segment,) = gateway.memory.segments.values()
    async with stranger(socket_path(scene.directory, "gateway-a")) as stopped:
        stopped.send(proof(SECRET, await challenge_of(stopped), "gateway-a", os.getpid(), "stopped"))
        await eventually(lambda: gateway.shelf.readers == {"w", "stopped"}, description="both workers")
        for _ in range(5000):
            gateway.memory.opened(1, segment)
            await asyncio.sleep(0)
            if "stopped" not in gateway.shelf.readers:
                break

    assert gateway.shelf.readers == {"w"}
    assert worker.read(held.reference) == b"abc"


def is_heard(connection: socket.socket) -> bool:
    """Tells whether something has come, which is not taken."""
    try:
        return bool(connection.recv(100, socket.MSG_PEEK))
    except BlockingIOError:
        return False


@pytest.mark.parametrize("said", [b"", b"abc", bytes(CHALLENGE_BYTES)], ids=["nothing", "half", "challenge"])
async def test_a_gateway_that_stalls_holds_nothing_up(scene: Scene, said: bytes) -> None:
    """It was stopped at any point, or another program is in its place."""
    gateway = scene.gateway()
    with ExitStack() as stack:
        stalls = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        stalls.bind(os.fspath(socket_path(scene.directory, "gateway-stalls")))
        stalls.listen(1)
        worker = await scene.worker("w", gateway)
        if said:
            connection = stack.enter_context(stalls.accept()[0])
            connection.send(said)
        read = gateway.write(b"abc").reference

        assert worker.read(read) == b"abc"
        await eventually(lambda: worker.read(read) == b"abc", description="tensors")
        with pytest.raises(TensorsUnreachable):
            worker.read(msgspec.structs.replace(read, owner="gateway-stalls"))


async def test_a_connection_that_breaks_again_and_again_leaks_no_descriptor(scene: Scene) -> None:
    gateway = scene.gateway()
    worker = await scene.worker("w", gateway)
    held = gateway.write(bytes(MIB))
    await eventually(lambda: worker.read(held.reference) == bytes(MIB), description="tensors")
    before = _open_descriptors()
    for _ in range(5):
        for connection in list(gateway.shelf._readers):
            gateway.shelf._forget(connection)
        await eventually(lambda: gateway.shelf.readers == {"w"}, description="the worker again")
        await eventually(lambda: _can_read(worker, gateway), description="tensors")

    assert _open_descriptors() == before


def _can_read(worker: SegmentReader, gateway: Gateway) -> bool:
    held = gateway.write(b"x")
    try:
        return worker.read(held.reference) == b"x"
    except TensorsUnreachable:
        return False
    finally:
        held.release()


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
