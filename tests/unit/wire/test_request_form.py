"""What frames have in common is encoded and decoded once: nobody can tell by what comes of it."""

import struct
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.messages import (
    CallTraces,
    IdFactory,
    MemoryReference,
    OutgoingRequest,
    ResourceHolder,
    SequenceFlags,
)
from qinfer.errors import QinferError
from qinfer.tensors import Bytes, Tensor, pack_bytes
from qinfer.wire import frame as request_form
from qinfer.wire.frame import (
    PayloadApart,
    ReferringForm,
    RequestForm,
    RequestReader,
    decode_request,
    encode_flags,
    encode_referring_request,
    encode_request,
    encode_request_apart,
    tensors_at,
)

GOLDEN = Path(__file__).parent / "golden"
IDS = IdFactory()


def request(*sizes: int, **changes: Any) -> OutgoingRequest:
    """A stamped request with inputs of so many bytes."""
    inputs = tuple(Tensor(f"x{n}", "UINT8", (1, size), bytes([n + 1]) * size) for n, size in enumerate(sizes))
    fields = {"id": IDS.request_id("model", 1), "version": 3, "timeout_s": 2.0, "reply_to": "reply:me", **changes}
    return OutgoingRequest(model="model", inputs=fields.pop("inputs", inputs), generation=5, **fields)


def outcome(decode: Any, frame: Bytes) -> object:
    """What decoding gives or raises."""
    try:
        return decode(frame)
    except QinferError as error:
        return type(error), error.message


@pytest.mark.parametrize("sizes", [(), (1,), (8,), (13,), (3, 8, 5), (0, 7)])
def test_a_filled_form_is_the_frame(sizes: tuple[int, ...]) -> None:
    """To the byte, padding and all."""
    first, second = request(*sizes, tenant="t", outputs=("y",)), request(*sizes, tenant="t", outputs=("y",))

    assert RequestForm(first).fill(second) == encode_request(second)


class Kept:
    """Tensors in memory."""

    tenant, rests = "", False

    def __init__(self, offset: int, generation: int) -> None:
        self.reference = MemoryReference("api-1", 2, offset, 700_000, generation)

    def view(self) -> memoryview:
        """They have no bytes."""
        return memoryview(b"")

    def hold(self) -> "Kept":
        """They are not counted here."""
        return self

    def release(self, *, unanswered: bool = False) -> None:
        """As `hold`."""


def landed(offset: int, generation: int, **changes: Any) -> OutgoingRequest:
    """A stamped request whose tensors landed in memory."""
    one = request(13, 5, tenant="t", outputs=("y",), queue_timeout_s=0.5, **changes)
    one.landed, one.landed_at = Kept(offset, generation), (192, 208)
    return one


@pytest.mark.parametrize("offset", [0, 4096, 655_360, 2**33])
@pytest.mark.parametrize("generation", [1, 200, 70_000, 2**40])
@pytest.mark.parametrize("timeout_s", [0.001, 2.0, 5000.0])
@pytest.mark.parametrize(("first_trace", "trace"), [("", ""), ("00-" + "a" * 52, "00-" + "b" * 52)])
def test_a_form_of_tensors_in_memory_is_the_frame(
    offset: int, generation: int, timeout_s: float, first_trace: str, trace: str
) -> None:
    """Wherever they lie: the numbers of the place take more or fewer bytes."""
    first = landed(655_360, 7, trace=first_trace, timeout_s=timeout_s)
    assert first.landed is not None
    form = ReferringForm(first, first.landed.reference, first.landed_at)
    one = landed(offset, generation, trace=trace, timeout_s=timeout_s)
    assert one.landed is not None

    assert form.fill(one, one.landed.reference) == encode_referring_request(one, one.landed.reference, one.landed_at)


def apart(decode: Any, frame: Bytes) -> Any:
    """The request and the places of its tensors in memory."""
    with pytest.raises(PayloadApart) as found:
        decode(frame)
    return found.value.request, found.value.places


@pytest.mark.parametrize("timeout_s", [0.001, 2.0, 5000.0])
@pytest.mark.parametrize("trace", ["", "00-" + "a" * 52])
def test_a_reader_gives_each_its_own_place_in_memory(timeout_s: float, trace: str) -> None:
    """Generations and offsets take more bytes as they grow."""
    reader = RequestReader()
    for generation in (1, 2, 3, 127, 128, 129, 70_000, 70_001, 2**33):
        for offset in (0, 4096, 655_360):
            one = landed(offset, generation, trace=trace, timeout_s=timeout_s)
            assert one.landed is not None
            frame = encode_referring_request(one, one.landed.reference, one.landed_at)
            request, places = found = apart(reader.decode, frame)

            assert found == apart(decode_request, frame)
            assert request.memory == one.landed.reference
            memory = memoryview(bytes(range(256)))
            assert tensors_at(places, memory) == decode_request(frame, memory).inputs
    assert reader._known


def test_a_damaged_place_in_memory_is_refused_as_ever() -> None:
    """Also if frames like it were read before."""
    reader, one = RequestReader(), landed(4096, 200)
    assert one.landed is not None
    frame = encode_referring_request(one, one.landed.reference, one.landed_at)
    for _ in range(3):
        apart(reader.decode, frame)
    end = 8 + int.from_bytes(frame[4:8], "little")
    for position in range(len(frame)):
        for byte in (0, 0xC1, 0xFF):
            damaged = frame[:position] + bytes([byte]) + frame[position + 1 :]
            if position < 13 or position >= end - 20:
                assert outcome(reader.decode, damaged) == outcome(decode_request, damaged), position


STEPS = [
    (SequenceFlags(7, start=True), SequenceFlags(8, end=True)),
    (SequenceFlags(2**63), SequenceFlags(2**64 - 1, start=True, end=True)),
    (SequenceFlags("one"), SequenceFlags("two", end=True)),
    (SequenceFlags("é" * 60, step=300), SequenceFlags("ü" * 60, end=True, step=301)),
    (SequenceFlags(1, start=True, step=1), SequenceFlags(2, step=127)),
]


@pytest.mark.parametrize(("first", "second"), STEPS)
@pytest.mark.parametrize("changes", [{}, {"queue_timeout_s": 0.5}, {"spares_outputs": True}, {"trace": "00"}])
def test_steps_of_sequences_fill_a_form(first: SequenceFlags, second: SequenceFlags, changes: dict[str, Any]) -> None:
    form = RequestForm(request(8, 3, sequence=first, **changes))
    timeout_s = 4000.0
    for one in (first, second):
        step = request(8, 3, sequence=one, timeout_s=timeout_s, **changes)

        assert form.fill(step) == encode_request(step)


@pytest.mark.parametrize(("first", "second"), STEPS)
def test_steps_of_sequences_whose_tensors_are_in_memory_fill_a_form(
    first: SequenceFlags, second: SequenceFlags
) -> None:
    one, other = landed(4096, 1, sequence=first), landed(8192, 2, sequence=second)
    assert one.landed is not None
    assert other.landed is not None
    form = ReferringForm(one, one.landed.reference, one.landed_at)

    filled = form.fill(other, other.landed.reference)

    assert filled == encode_referring_request(other, other.landed.reference, other.landed_at)


@pytest.mark.parametrize(("first", "second"), STEPS)
def test_a_reader_gives_each_step_its_own_sequence(first: SequenceFlags, second: SequenceFlags) -> None:
    """The frames have the same layout, which is remembered once."""
    reader = RequestReader()
    for sequence in (first, second, first, second):
        frame = encode_request(request(3, 8, sequence=sequence))

        assert reader.decode(frame) == decode_request(frame)
    assert len(reader._known) == 1


def test_steps_and_plain_requests_share_a_reader() -> None:
    """Their headers may have the same length."""
    reader = RequestReader()
    for _ in range(3):
        for sequence, model in ((None, "model"), (SequenceFlags(1), "mo"), (SequenceFlags("ab", step=3), "")):
            one = request(3, sequence=sequence)
            one.model = model
            frame = encode_request(one)

            assert reader.decode(frame) == decode_request(frame)


def test_an_id_that_a_stateful_model_refuses_is_not_remembered() -> None:
    """Models without sequences take it; it may be as large as a request."""
    reader, frame = RequestReader(), encode_request(request(4, sequence=SequenceFlags("x" * 2**16)))
    before = encode_flags.cache_info().currsize

    for _ in range(3):
        assert reader.decode(frame) == decode_request(frame)
    assert not reader._known
    assert encode_flags.cache_info().currsize == before


def test_flags_that_another_program_encodes_otherwise_are_not_remembered() -> None:
    """A number of 0 is left out here."""
    frame = encode_request(request(4, sequence=SequenceFlags(7, step=5)))
    place = frame.index(b"\x94\x07\xc2\xc2\x05")
    unusual = frame[: place + 4] + b"\0" + frame[place + 5 :]
    reader = RequestReader()
    for _ in range(3):
        assert reader.decode(unusual) == decode_request(unusual)

    assert decode_request(unusual).sequence == SequenceFlags(7)
    assert not reader._known


@pytest.mark.parametrize("sizes", [(), (1,), (8,), (13,), (3, 8, 5), (0, 7), (20_000, 3)])
def test_a_reader_gives_each_its_own(sizes: tuple[int, ...]) -> None:
    """Its id and its bytes; what it has in common with others is the same."""
    reader = RequestReader()
    for number in range(4):
        inputs = tuple(
            Tensor(f"x{n}", "UINT8", (size,), bytes([17 * n + number]) * size) for n, size in enumerate(sizes)
        )
        frame = encode_request(request(inputs=inputs, tenant="t", outputs=("y",)))

        assert reader.decode(frame) == decode_request(frame)


@pytest.mark.parametrize("length", [0, 1, 55, 300])
@pytest.mark.parametrize("tenant", ["", "t", "t" * 40])
def test_each_has_its_own_trace_and_timeout(length: int, tenant: str) -> None:
    """What is equal around them is remembered, once."""
    reader = RequestReader()
    for number in range(6):
        one = request(3, 8, trace=f"{number}" * length, timeout_s=1.5 + number, tenant=tenant)
        frame = encode_request(one)

        assert reader.decode(frame) == decode_request(frame)
    assert len(reader._known) == 1


def test_frames_of_one_length_may_be_laid_out_otherwise() -> None:
    """A longer tenant and a shorter model: the trace is elsewhere, and found."""
    reader = RequestReader()
    pairs = [request(4, tenant="t" * (5 + n), reply_to="r" * (15 - n), trace="x" * 55) for n in range(4)]
    for _ in range(3):
        for one in pairs:
            frame = encode_request(one)
            assert reader.decode(frame) == decode_request(frame)


def test_ids_may_differ_in_length() -> None:
    """A bridge makes its own: the tensors lie elsewhere then."""
    reader = RequestReader()
    lengths = (1, 30, 31, 32, 33, 40, 41, 100, 255, 256, 70_000)
    for length in (*lengths, *lengths, *lengths):
        frame = encode_request(request(5, 3, id="i" * length))

        assert reader.decode(frame) == decode_request(frame)


@pytest.mark.parametrize(
    "change",
    [
        "model",
        "version",
        "outputs",
        "priority",
        "timeout_s",
        "queue_timeout_s",
        "attempt",
        "holders",
        "spares_outputs",
        "calls",
    ],
)
def test_what_differs_is_read(change: str) -> None:
    """Everything that a header says counts."""
    values = {"model": "other", "outputs": ("z",), "timeout_s": 7.5, "queue_timeout_s": 0.5, "spares_outputs": True}
    values |= {"holders": (ResourceHolder("w/1", "m", {"g": 1}),), "calls": CallTraces(has_tensors=True)}
    reader = RequestReader()
    for one in [request(4) for _ in range(5)]:
        frame = encode_request(one)
        setattr(one, change, values.get(change, 9))

        assert reader.decode(frame) == decode_request(frame)
        assert reader.decode(encode_request(one)) == decode_request(encode_request(one))


@pytest.mark.parametrize(
    "changes",
    [
        {"client_id": "mine"},
        {"trace": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
        {"parameters": {"a": 1}},
        {"sequence": SequenceFlags(1)},
        {"inputs": (Tensor("text", "BYTES", (1, 1), pack_bytes([b"abc"])),)},
    ],
)
def test_special_requests_are_read_as_well(changes: dict[str, Any]) -> None:
    """Remembered or not."""
    reader = RequestReader()
    for _ in range(4):
        frame = encode_request(request(4, **changes))

        assert reader.decode(frame) == decode_request(frame)


def test_requests_share_nothing_that_can_be_changed() -> None:
    """Else one model's code could write into the next request."""
    reader = RequestReader()
    frames = [encode_request(request(4)) for _ in range(5)]
    requests = [reader.decode(frame) for frame in frames]

    assert len({id(one.parameters) for one in requests}) == len(requests)
    assert len({id(one) for one in requests}) == len(requests)


@pytest.mark.parametrize("sequence", [None, SequenceFlags(300, start=True, step=9), SequenceFlags("one")])
def test_every_damage_is_found_as_before(sequence: SequenceFlags | None) -> None:
    """Each byte in turn is another one, and each length too short, with a reader that knows the good frame."""
    frame = encode_request(request(5, 3, trace="00-" + "a" * 52, sequence=sequence))
    reader = RequestReader()
    reader.decode(frame)
    reader.decode(frame)
    assert reader._known
    damaged = [frame[:length] for length in range(len(frame))]
    for position, byte in enumerate(frame):
        damaged += [frame[:position] + bytes([other]) + frame[position + 1 :] for other in {byte ^ 1, byte ^ 128, 255}]

    for bad in damaged:
        assert outcome(reader.decode, bad) == outcome(decode_request, bad)


@pytest.mark.parametrize("name", ["full", "limited", "minimal", "apart"])
def test_golden_frames_are_read(name: str) -> None:
    """Whatever is in them, a first time and again."""
    frame, reader = (GOLDEN / f"request_{name}.v1.bin").read_bytes(), RequestReader()

    def told(decode: Any) -> object:
        try:
            return decode(frame)
        except PayloadApart as apart:
            return apart.request

    assert [told(reader.decode), told(reader.decode)] == [told(decode_request)] * 2


def test_tensors_beside_the_stream_are_told_each_time() -> None:
    """With the request that they belong to."""
    reader = RequestReader()
    for _ in range(2):
        one = request(4, payload=True)
        with pytest.raises(PayloadApart) as caught:
            reader.decode(encode_request_apart(one)[0])
        assert caught.value.request.id == one.id


def test_frames_that_are_no_bytes_are_read() -> None:
    """Whatever holds bytes will do."""
    frame, reader = encode_request(request(4)), RequestReader()

    assert reader.decode(memoryview(frame)) == reader.decode(bytearray(frame)) == decode_request(frame)


def test_there_is_an_end_of_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose the shapes, as many as they like."""
    monkeypatch.setattr(request_form, "_MAX_KNOWN", 3)
    reader = RequestReader()
    for value in range(10):
        shape = (1,) * (value + 1)
        frame = encode_request(request(inputs=(Tensor("x", "FP64", shape, struct.pack("<d", value)),)))

        for _ in range(3):
            assert reader.decode(frame) == decode_request(frame)
        assert 1 <= len(reader._known) <= 3


def test_what_comes_once_is_not_remembered() -> None:
    """It would cost more than it gains."""
    reader = RequestReader()
    for size in range(10):
        reader.decode(encode_request(request(size)))

    assert not reader._known
