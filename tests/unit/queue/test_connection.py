"""What goes over a connection to Redis."""

import asyncio
import gc
import weakref

import pytest

from qinfer.queue.connection import Argument, CommandRefused, PairTemplate, Template, pack, pack_large
from qinfer.queue.lanes import Queue


@pytest.mark.parametrize("words", [(b"", b""), (b"12", b"frame"), (b"7", b"x" * 300)])
@pytest.mark.parametrize("between", [(b"f",), ("a", 1, b"b")])
def test_two_words_of_a_template_are_packed_as_the_others(
    words: tuple[bytes, bytes], between: tuple[Argument, ...]
) -> None:
    first, second = words

    packed = PairTemplate(b"XADD", "lane", 1, between=between).pack(first, second)

    assert packed == pack((b"XADD", "lane", 1, first, *between, second))


@pytest.mark.parametrize("last", [b"", b"frame", bytearray(b"\r\n"), memoryview(b"x" * 1000)])
def test_a_template_packs_what_pack_packs(last: bytes | bytearray | memoryview) -> None:
    """Only the way is shorter: the bytes are those of the whole command."""
    template = Template(b"XADD", "lane", b"*", 1, b"f")

    packed = template.pack(last)

    assert packed == pack((b"XADD", "lane", b"*", 1, b"f", bytes(last)))


@pytest.mark.parametrize(
    "words",
    [
        (b"TIME",),
        (b"SET", "schl\u00fcssel", memoryview(b"x" * 1_000_000), b"PX", 60_000),
        (b"EVALSHA", b"", 1.5, -3, memoryview(bytearray(b"\r\n")), b"y" * 300_000),
        (b"X", memoryview(bytes(8)).cast("I")),
    ],
    ids=["one word", "a large view", "every type", "items of four bytes"],
)
def test_a_large_command_is_packed_as_any_other(words: tuple[Argument, ...]) -> None:
    """Only faster, and in parts."""
    assert b"".join(pack_large(words)) == pack(words)


def test_a_large_word_is_not_copied() -> None:
    word = b"x" * 1_000_000

    assert any(part is word for part in pack_large((b"SET", b"key", word)))


async def test_a_refused_command_leaves_nothing_for_the_garbage_collector(delivery: Queue) -> None:
    """The error leads to its frames, and these to the command, which may be large."""

    async def ask() -> "weakref.ref[CommandRefused]":
        try:
            await delivery.router.call(0, b"EVALSHA", b"0" * 40, 0, b"x" * 10_000)
        except CommandRefused as error:
            return weakref.ref(error)
        raise AssertionError("it is no script that Redis knows")

    gc.disable()
    try:
        refused = await ask()
        await asyncio.sleep(0)  # the event loop holds what woke this task
    finally:
        gc.enable()

    assert refused() is None
