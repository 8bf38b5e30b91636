"""The channel between worker and host process: what arrives, whose memory it is, and how ends are noticed."""

import gc
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from qinfer.backends.python_host import channel
from qinfer.backends.python_host.channel import Channel, Joined, UnreadError
from qinfer.backends.python_host.messages import CompletedConfig, ModelLoaded

LARGE = 300_000

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = (Channel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def large(value: int, size: int = LARGE) -> bytes:
    return bytes([value]) * size


def test_small_buffers_arrive_aligned(ends: Ends) -> None:
    """Each begins where an array of any datatype may; all are writable."""
    ends[0].send(CompletedConfig("text"), [b"abc", b"", b"defghijk"])

    message, buffers = ends[1].receive()

    assert message == CompletedConfig("text")
    assert [bytes(b) for b in buffers] == [b"abc", b"", b"defghijk"]
    assert buffers[2].ctypes.data % 8 == 0
    buffers[0][0] = 1


def test_large_buffers_arrive_in_shared_memory(ends: Ends) -> None:
    """Aligned, writable, any number of them."""
    ends[0].send(ModelLoaded(), [large(1), b"", b"abc", large(2)])

    _, buffers = ends[1].receive()

    assert [bytes(b) for b in buffers] == [large(1), b"", b"abc", large(2)]
    assert all(b.ctypes.data % 64 == 0 for b in buffers if b.size)
    buffers[0][0] = 9


def test_memory_is_used_again_once_nobody_looks_at_it(ends: Ends) -> None:
    """The receiver says so with its next message."""
    for value in range(10):
        ends[0].send(ModelLoaded(), [large(value)])
        _, buffers = ends[1].receive()
        assert bytes(buffers[0]) == large(value)
        del buffers
        ends[1].send(ModelLoaded())
        ends[0].receive()

    assert ends[0]._count == 1


def test_memory_that_somebody_looks_at_stays(ends: Ends) -> None:
    """However it is looked at."""
    views = []
    for value in range(5):
        ends[0].send(ModelLoaded(), [large(value)])
        (buffer,) = ends[1].receive()[1]
        views.append((buffer.view("<i4").reshape(-1, 4)[1:], buffer.data[10:20])[value % 2])
        del buffer
        gc.collect(0)  # young as it is; all generations take seconds in a large suite
        ends[1].send(ModelLoaded())
        ends[0].receive()

    assert [bytes(view)[0] for view in views] == [0, 1, 2, 3, 4]
    assert ends[0]._count == 5


def test_what_is_written_into_reserved_memory_is_sent_as_it_is(ends: Ends) -> None:
    """The other end maps the same bytes, and buffers in other places are copied."""
    for value in range(1, 4):
        first, second = ends[0].reserve([LARGE, 3])
        first[:], second[:] = value, value
        ends[0].send(ModelLoaded(), [first.data, second.data] if value < 3 else [second.data, first.data])
        _, buffers = ends[1].receive()
        assert {*bytes(buffers[0]), *bytes(buffers[1])} == {value}
        first[0] = 9
        assert (max(buffers[0][0], buffers[1][0]) == 9) == (value < 3)
        del buffers
        ends[1].send(ModelLoaded())
        ends[0].receive()


def test_reserved_memory_that_is_not_sent_is_used_again(ends: Ends) -> None:
    """A message that has its buffers elsewhere leaves the memory to the next one."""
    for _ in range(3):
        ends[0].reserve([LARGE])
        ends[0].send(ModelLoaded(), [large(1)])
        _, buffers = ends[1].receive()
        assert bytes(buffers[0]) == large(1)
        del buffers
        ends[1].send(ModelLoaded())
        ends[0].receive()

    assert len(ends[1]._seen) <= 2


def test_several_messages_in_one_read(ends: Ends) -> None:
    """Small ones, and ones with new memory, whose descriptors come along."""
    sent = [[b"abc"], [large(1)], [large(2), b"x"], [b"d" * 30_000], [b"e" * 30_000], [b"f" * 30_000], []]
    for buffers in sent:
        ends[0].send(CompletedConfig("text"), buffers)

    assert [[bytes(b) for b in ends[1].receive()[1]] for _ in sent] == sent
    assert not ends[1].has_message()


def test_parts_are_joined(ends: Ends) -> None:
    """In a small message, and in a large one."""
    for count in (3, LARGE):
        parts: list[Any] = [b"abc", np.arange(count, dtype="<u2")]
        ends[0].send(ModelLoaded(), [Joined(parts, 3 + 2 * count), b"end"])

        _, buffers = ends[1].receive()

        assert [bytes(b) for b in buffers] == [b"".join(parts), b"end"]


def test_little_memory_is_kept(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some segments, of some size; the receiver lets go of the others."""
    monkeypatch.setattr(channel, "KEPT_BYTES", 3 * 1024 * 1024)
    monkeypatch.setattr(channel, "KEPT_COUNT", 2)
    kept = []
    for size in (LARGE, LARGE, LARGE, 5_000_000):
        ends[0].send(ModelLoaded(), [large(1, size)])
        kept.append(ends[1].receive())
    kept.clear()
    ends[1].send(ModelLoaded())
    ends[0].receive()
    ends[0].send(ModelLoaded())
    ends[1].receive()

    assert [segment.capacity for segment in ends[0]._free] == [524_288, 524_288]
    assert sorted(ends[1]._seen) == sorted(segment.number for segment in ends[0]._free)


def test_memory_that_is_not_kept_is_given_back(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its descriptors, on both sides."""
    monkeypatch.setattr(channel, "KEPT_BYTES", 0)
    before = len(os.listdir("/proc/self/fd"))

    ends[0].send(ModelLoaded(), [large(1)])
    ends[1].receive()
    during = len(os.listdir("/proc/self/fd"))
    ends[1].send(ModelLoaded())
    ends[0].receive()
    ends[0].send(ModelLoaded())
    ends[1].receive()

    assert during > before
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_end_is_noticed(ends: Ends) -> None:
    """By who receives and by who sends."""
    ends[1].close()

    with pytest.raises(EOFError):
        ends[0].receive()
    with pytest.raises(OSError, match="pipe"):
        ends[0].send(ModelLoaded())


def test_an_end_before_a_message_was_read(ends: Ends) -> None:
    """Is another than one after it: the message did nothing."""
    ends[0].send(ModelLoaded())
    ends[1]._socket.close()

    with pytest.raises(UnreadError):
        ends[0].receive()
