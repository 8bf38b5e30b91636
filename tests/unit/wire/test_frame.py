"""Frames: the golden files fix all versions for good; what is damaged or newer is told apart."""

import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from qinfer.core.messages import (
    CalledTensor,
    CallRecord,
    CallTraces,
    Credit,
    Failure,
    InferRequest,
    MemoryReference,
    OutgoingRequest,
    ResourceHolder,
    Response,
    SequenceFlags,
    Timing,
)
from qinfer.errors import CorruptEntry
from qinfer.tensors import Tensor, from_numpy, pack_bytes, to_numpy
from qinfer.wire.frame import (
    ALIGNMENT,
    FRAME_VERSION,
    MAX_HEADER_BYTES,
    PayloadApart,
    decode_credits,
    decode_request,
    decode_responses,
    encode_credits,
    encode_referring_request,
    encode_request,
    encode_request_apart,
    encode_responses,
    is_credits,
    landed_places,
    take_apart,
    tensor_parts,
    usual_places,
)
from qinfer.wire.versions import NewerVersion

GOLDEN = Path(__file__).parent / "golden"

MINIMAL = InferRequest(model="m", inputs=())
FULL = InferRequest(
    model="classifier",
    inputs=(
        Tensor("image", "FP32", (1, 3), struct.pack("<3f", 0.5, -1.0, 3.25)),
        Tensor("text", "BYTES", (1, 2), pack_bytes([b"\xff\x00", "é".encode()])),
        Tensor("empty", "INT64", (1, 0), b""),
        Tensor("flag", "BOOL", (1, 1), b"\x01"),
    ),
    version=7,
    id="01ARZ3NDEKTSV4RRFFQ69G5FAV.2.classifier",
    client_id="mine",
    outputs=("scores", "labels"),
    parameters={"flag": True, "count": -3, "ratio": 0.25, "name": "x"},
    priority=2,
    timeout_s=1.5,
    reply_to="reply:gateway-1",
    tenant="acme",
    trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    partition=2,
    generation=11,
    attempt=1,
    sequence=SequenceFlags("s-1", start=True, end=False),
)
LIMITED = InferRequest(  # the first request with a field that was appended
    model="m", inputs=(Tensor("x", "UINT8", (1, 2), b"\x07\x08"),), id="r", timeout_s=2.0, queue_timeout_s=0.25
)
CALLED = InferRequest(
    model="m",
    inputs=(Tensor("x", "UINT8", (1, 2), b"\x07\x08"),),
    id="r",
    timeout_s=2.0,
    holders=(ResourceHolder("w-1", "front", {"gpu": 2}, 3, 1), ResourceHolder("", "pipeline", {}, 1, 2)),
)
SPARING = InferRequest(
    model="m",
    inputs=(Tensor("x", "UINT8", (1, 2), b"\x07\x08"),),
    id="r",
    timeout_s=2.0,
    outputs=("y",),
    spares_outputs=True,
)
TRACED = InferRequest(
    model="m",
    inputs=(Tensor("x", "UINT8", (1, 2), b"\x07\x08"),),
    id="r",
    timeout_s=2.0,
    calls=CallTraces(has_tensors=True),
)
TIMED = InferRequest(model="m", inputs=(), calls=CallTraces(has_tensors=False))
NUMBERED = InferRequest(model="m", inputs=(), sequence=SequenceFlags(7, end=True, step=3))
APART = InferRequest(
    model="m",
    inputs=(
        Tensor("x", "UINT8", (1, 3), b"\x01\x02\x03"),
        Tensor("text", "BYTES", (1, 1), pack_bytes([b"beside"])),
        Tensor("y", "FP64", (1,), struct.pack("<d", -2.5)),
    ),
    id="01ARZ3NDEKTSV4RRFFQ69G5FAV.0.m",
    timeout_s=2.0,
    payload=True,
)
HELD = msgspec.structs.replace(APART, payload=False, memory=MemoryReference("gateway-01M8", 3, 131_072, 32, 2**40))
RESPONSES = [
    Response(
        request_id="01ARZ3NDEKTSV4RRFFQ69G5FAV.0.m",
        model="m",
        version=3,
        outputs=(
            Tensor("scores", "FP32", (1, 3), struct.pack("<3f", 1.0, 2.0, 3.0)),
            Tensor("labels", "BYTES", (1,), pack_bytes([b"cat"])),
        ),
        attempt=2,
        index=1,
        final=False,
        timing=Timing(1_000, 2_000, 3_000, 4_000, 8),
    ),
    Response(request_id="b", failure=Failure("inference_failed", "it broke", retryable=True)),
    Response(request_id="c"),
]
STORED = [
    Response(request_id="a", outputs=(Tensor("y", "UINT8", (3,), b"\x01\x02\x03"),)),
    Response(request_id="b", model="m", version=3, timing=Timing(1, 2, 3, 4, 5), stored=True),
    Response(request_id="c"),
]
SPOKEN = [
    Response(request_id="a", model="m", version=1, parameters={"lang": "en", "score": 0.5, "rank": 3, "sure": True}),
    Response(request_id="b", stored=True, parameters={"x": -1}),
    Response(request_id="c"),
]
STREAMED = [
    Response(
        request_id="a",
        model="m",
        version=2,
        outputs=(Tensor("y", "UINT8", (2,), b"\x05\x06"),),
        attempt=1,
        index=4,
        final=False,
        credit_to="reply:worker-1",
    ),
    Response(request_id="a", model="m", version=2, index=5),
]
CALLING = [
    Response(
        request_id="a",
        model="m",
        version=1,
        called=(
            CallRecord(
                "callee",
                2,
                "mine",
                1769850000.25,
                1769850001.5,
                Timing(1, 2, 3, 4, 5),
                (CalledTensor(is_output=True, name="y", datatype="UINT8", shape=(2,), data=b"\x05\x06"),),
                (CallRecord("inner", 1, "", 1769850000.5, 1769850001.0),),
            ),
        ),
    ),
    Response(request_id="b"),
]
CREDITS = [Credit("01ARZ3NDEKTSV4RRFFQ69G5FAV.0.m", 1, 0), Credit("b", 3, 2**40)]


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("request_minimal", MINIMAL),
        ("request_full", FULL),
        ("request_limited", LIMITED),
        ("request_numbered", NUMBERED),
        ("request_called", CALLED),
        ("request_sparing", SPARING),
        ("request_traced", TRACED),
        ("request_timed", TIMED),
    ],
)
def test_golden_requests(name: str, request_: InferRequest) -> None:
    """The committed frame decodes to the request with every field, and is what encoding it gives, bit by bit."""
    frame = (GOLDEN / f"{name}.v1.bin").read_bytes()

    assert decode_request(frame) == request_
    assert encode_request(request_) == frame
    assert encode_request(decode_request(frame)) == frame


def test_golden_request_apart() -> None:
    """The committed frame and payload decode to the request, and are what encoding it gives, bit by bit."""
    frame = (GOLDEN / "request_apart.v1.bin").read_bytes()
    payload = (GOLDEN / "request_apart_payload.v1.bin").read_bytes()

    assert decode_request(frame, payload) == APART
    assert encode_request_apart(APART) == (frame, payload)
    assert encode_request_apart(decode_request(frame, payload)) == (frame, payload)


def test_golden_request_in_memory() -> None:
    """It has version 2, so that who can't read it releases it; the tensors lie as those of a payload."""
    frame = (GOLDEN / "request_in_memory.v2.bin").read_bytes()
    payload = (GOLDEN / "request_apart_payload.v1.bin").read_bytes()
    parts, size = tensor_parts(HELD.inputs)
    assert HELD.memory is not None

    assert decode_request(frame, payload) == HELD
    assert encode_referring_request(HELD, HELD.memory, usual_places(HELD.inputs)) == frame
    assert (b"".join(parts), size) == (payload, len(payload))


def test_a_request_in_memory_names_the_place() -> None:
    frame = (GOLDEN / "request_in_memory.v2.bin").read_bytes()

    with pytest.raises(PayloadApart) as caught:
        decode_request(frame)

    assert caught.value.request == msgspec.structs.replace(HELD, inputs=())


LANDED = MemoryReference("gateway-01M8", 3, 131_072, 64 + 40, 7)


def landed(*tensors: tuple[str, int]) -> InferRequest:
    """A request whose tensors lie one behind the other, 64 bytes behind the beginning of the memory."""
    body, position, inputs = memoryview(bytes(range(104))), 64, []
    for number, (datatype, size) in enumerate(tensors):
        inputs.append(Tensor(f"x{number}", datatype, (1, size), body[position : position + size]))
        position += size
    return msgspec.structs.replace(APART, payload=False, inputs=tuple(inputs))


def test_tensors_that_lie_in_memory_are_told_where_they_are() -> None:
    request = landed(("FP32", 8), ("UINT8", 24), ("INT64", 8))
    frame = encode_referring_request(request, LANDED, landed_places(request.inputs, 64, LANDED.size))

    decoded = decode_request(frame, bytes(range(104)))

    assert decoded == msgspec.structs.replace(request, memory=LANDED)


@pytest.mark.parametrize(
    "request_",
    [
        landed(("UINT8", 3), ("FP32", 37)),  # not aligned
        landed(("UINT8", 39)),  # not all of it
        landed(("UINT8", 20), ("UINT8", 10)),
        msgspec.structs.replace(landed(("UINT8", 40)), inputs=(Tensor("x", "UINT8", (1, 40), bytes(40)),)),  # elsewhere
    ],
)
def test_tensors_that_lie_otherwise_are_copied(request_: InferRequest) -> None:
    assert landed_places(request_.inputs, 64, LANDED.size) == ()


@pytest.mark.parametrize("begin", [64, 68])
def test_tensors_in_memory_are_taken_apart(begin: int) -> None:
    """Their bytes are cut from those around, and stay aligned."""
    request = landed(("UINT8", 4), ("FP32", 16))
    frame = encode_referring_request(request, LANDED, [begin, begin + 4])

    apart, payload = take_apart(frame, bytes(range(104)))

    found = decode_request(apart, payload)
    assert [bytes(tensor.data)[0] for tensor in found.inputs] == [begin, begin + 4]
    assert (found.payload, found.memory, len(payload)) == (True, None, 20 + begin % ALIGNMENT)
    with pytest.raises(CorruptEntry, match="leaves the frame"):
        take_apart(frame, bytes(begin + 19))


@pytest.mark.parametrize("request_", [FULL, msgspec.structs.replace(HELD, inputs=())])
def test_a_request_without_tensors_in_memory_is_not_taken_apart(request_: InferRequest) -> None:
    frame = encode_request(request_) if request_.memory is None else encode_referring_request(request_, LANDED, ())

    with pytest.raises(CorruptEntry, match="no tensors in memory"):
        take_apart(frame, b"")


def test_a_request_that_was_in_memory_can_travel_in_one_piece() -> None:
    frame = encode_request(HELD)

    assert frame[0] == 1
    assert decode_request(frame) == msgspec.structs.replace(HELD, memory=None)


@pytest.mark.parametrize(
    ("name", "responses"),
    [
        ("responses", RESPONSES),
        ("responses_stored", STORED),
        ("responses_spoken", SPOKEN),
        ("responses_streamed", STREAMED),
        ("responses_calling", CALLING),
    ],
)
def test_golden_responses(name: str, responses: list[Response]) -> None:
    """The committed blob decodes to the responses, and is what encoding them gives, bit by bit."""
    blob = (GOLDEN / f"{name}.v1.bin").read_bytes()

    assert decode_responses(blob) == responses
    assert encode_responses(responses) == blob
    assert encode_responses(decode_responses(blob)) == blob


def test_golden_credits() -> None:
    """The committed blob decodes to the credits, and is what encoding them gives, bit by bit."""
    blob = (GOLDEN / "credits.v1.bin").read_bytes()

    assert decode_credits(blob) == CREDITS
    assert encode_credits(CREDITS) == blob


def test_a_cancelled_credit_comes_back() -> None:
    """Its field is written where it is set, so that older workers read the others as before."""
    credits_ = [Credit("a", 1, 8, cancelled=True), *CREDITS]

    assert decode_credits(encode_credits(credits_)) == credits_


def test_credits_are_told_from_responses() -> None:
    assert is_credits(encode_credits(CREDITS))
    assert not is_credits(encode_responses(RESPONSES))
    assert not is_credits(b"")


@pytest.mark.parametrize("damage", [b"", b"\x01\x02", encode_responses(RESPONSES), encode_credits(CREDITS)[:-1]])
def test_damaged_credits_are_told(damage: bytes) -> None:
    with pytest.raises(CorruptEntry):
        decode_credits(damage)


def test_every_field_is_set_in_a_golden_frame() -> None:
    """A field added to `InferRequest` or `Response` without a place in a golden frame is noticed here."""
    request, response = InferRequest(model="", inputs=()), Response(request_id="")

    asked = (FULL, LIMITED, APART, CALLED, SPARING, TRACED, HELD)
    for field in InferRequest.__struct_fields__:
        assert any(getattr(r, field) != getattr(request, field) for r in asked), field
    golden = (*RESPONSES, *STORED, *SPOKEN, *STREAMED, *CALLING)
    for field in set(Response.__struct_fields__) - {"cache"}:
        assert any(getattr(r, field) != getattr(response, field) for r in golden), field


def test_what_only_a_process_knows_does_not_travel() -> None:
    fields = msgspec.structs.asdict(FULL)
    request = OutgoingRequest(**fields, inputs_digest=b"x", step_key="r/m", endpoint="e", moves=True)
    response = Response(request_id="r", cache="hit")

    assert encode_request(request) == encode_request(FULL)
    assert decode_responses(encode_responses([response]))[0].cache == ""


def test_tensors_are_aligned_views_of_the_frame() -> None:
    """Each tensor begins at a multiple of 8 and becomes an array without a copy."""
    arrays = [np.arange(3, dtype="<f4"), np.arange(5, dtype="|u1"), np.arange(4, dtype="<f8")]
    frame = encode_request(InferRequest(model="m", inputs=tuple(from_numpy(f"x{i}", a) for i, a in enumerate(arrays))))
    base = np.frombuffer(frame, dtype="u1").__array_interface__["data"][0]

    decoded = [to_numpy(tensor) for tensor in decode_request(frame).inputs]

    assert all(np.array_equal(a, b) for a, b in zip(arrays, decoded, strict=True))
    offsets = [a.__array_interface__["data"][0] - base for a in decoded]
    assert [offset % 8 for offset in offsets] == [0, 0, 0]
    assert all(0 < offset < len(frame) for offset in offsets)


def test_rows_of_a_batch_sit_back_to_back() -> None:
    """Rows that fill multiples of 8 bytes are neither padded nor reordered."""
    rows = np.arange(32, dtype="<f4").reshape(4, 8)

    blob = encode_responses(
        [Response(request_id=str(i), outputs=(from_numpy("y", rows[i : i + 1]),)) for i in range(4)]
    )

    assert blob.endswith(rows.tobytes())


def test_a_batch_survives_in_order() -> None:
    """32 responses come back equal and in order."""
    responses = [
        Response(request_id=f"r{i}", outputs=(Tensor("y", "UINT8", (i,), bytes(range(i))),)) for i in range(32)
    ]

    assert decode_responses(encode_responses(responses)) == responses


def test_a_newer_frame_is_told_from_a_corrupt_one() -> None:
    """A worker releases what a newer writer wrote, instead of dead-lettering it."""
    frame = bytes([FRAME_VERSION + 1]) + encode_request(FULL)[1:]

    with pytest.raises(NewerVersion, match=r"version 3 .* reads version 2: upgrade"):
        decode_request(frame)
    with pytest.raises(NewerVersion, match=r"version 3 .* reads version 2: upgrade"):
        decode_responses(frame)


def header_fields(frame: bytes) -> list[Any]:
    (size,) = struct.unpack_from("<I", frame, 4)
    fields: list[Any] = msgspec.msgpack.decode(frame[8 : 8 + size])
    return fields


def test_header_fields_may_be_appended() -> None:
    """A reader of this version skips fields that a later one appends to the same header."""
    newest = (GOLDEN / "request_in_memory.v2.bin").read_bytes()
    header = msgspec.msgpack.encode([*header_fields(newest), "later", 42])

    grown = struct.pack("<BBHI", 2, 0, 0, len(header)) + header

    assert decode_request(grown, (GOLDEN / "request_apart_payload.v1.bin").read_bytes()) == HELD


def test_an_older_reader_skips_what_was_appended() -> None:
    """The fields of the first release are where they were; the new one is behind them."""
    plain, limited = header_fields(encode_request(MINIMAL)), header_fields(encode_request(LIMITED))

    assert (len(plain), len(limited), limited[17]) == (17, 18, 250_000)


# --- tensors beside the stream ---


def test_a_request_apart_names_itself_without_its_payload() -> None:
    """Whoever has the frame knows id, model and timeout, and that the tensors are elsewhere."""
    frame, _ = encode_request_apart(FULL)

    with pytest.raises(PayloadApart) as caught:
        decode_request(frame)

    expected = msgspec.structs.replace(FULL, inputs=(), payload=True)
    assert caught.value.request == expected
    assert FULL.id in caught.value.message


def test_a_frame_without_its_tensors_is_small() -> None:
    """Whatever their size."""
    large = InferRequest(model="m", inputs=(Tensor("x", "UINT8", (1_000_000,), bytes(1_000_000)),))

    frame, payload = encode_request_apart(large)

    assert len(frame) < 200
    assert len(payload) == 1_000_000


def test_tensors_are_aligned_views_of_the_payload() -> None:
    """As those in a frame."""
    arrays = [np.arange(3, dtype="|u1"), np.arange(4, dtype="<f8")]
    request = InferRequest(model="m", inputs=tuple(from_numpy(f"x{i}", a) for i, a in enumerate(arrays)))
    frame, payload = encode_request_apart(request)
    base = np.frombuffer(payload, dtype="u1").__array_interface__["data"][0]

    decoded = [to_numpy(tensor) for tensor in decode_request(frame, payload).inputs]

    assert all(np.array_equal(a, b) for a, b in zip(arrays, decoded, strict=True))
    assert [a.__array_interface__["data"][0] - base for a in decoded] == [0, 8]


@pytest.mark.parametrize("payload", [b"", bytes(8)], ids=["empty", "short"])
def test_a_payload_that_is_too_short_is_corrupt(payload: bytes) -> None:
    """Offsets are checked against it as against a frame."""
    frame, _ = encode_request_apart(APART)

    with pytest.raises(CorruptEntry, match="leaves"):
        decode_request(frame, payload)


def test_a_payload_is_ignored_where_the_frame_has_the_tensors() -> None:
    """So that a reader may pass what it has."""
    assert decode_request(encode_request(FULL), b"anything") == FULL


def test_a_request_that_was_apart_can_travel_in_one_piece() -> None:
    """`encode_request` always takes the tensors along."""
    again = decode_request(encode_request(APART))

    assert again == msgspec.structs.replace(APART, payload=False)


def _with_tensors(*tensors: tuple[int, int]) -> bytes:
    """A request frame with 16 bytes of tensor area whose tensors claim these (offset, size)."""
    frame = encode_request(MINIMAL)
    (size,) = struct.unpack_from("<I", frame, 4)
    fields = msgspec.msgpack.decode(frame[8 : 8 + size])
    fields[4] = [["x", "UINT8", [size], offset, size] for offset, size in tensors]
    header = msgspec.msgpack.encode(fields)
    return struct.pack("<BBHI", 1, 0, 0, len(header)) + header + bytes(-len(header) % 8) + bytes(16)


def test_tensors_that_follow_one_another_are_read() -> None:
    """The helper of the next test makes good frames too."""
    assert [t.nbytes for t in decode_request(_with_tensors((0, 8), (8, 8))).inputs] == [8, 8]


@pytest.mark.parametrize(
    "tensors",
    [[(0, 17)], [(17, 0)], [(-1, 4)], [(0, -4)], [(0, 8), (4, 8)], [(8, 8), (0, 8)], [(2**63, 8)], [(0, 2**63)]],
)
def test_tensors_outside_the_frame_or_over_another_are_corrupt(tensors: list[tuple[int, int]]) -> None:
    """Offsets and sizes are never trusted."""
    with pytest.raises(CorruptEntry):
        decode_request(_with_tensors(*tensors))


@pytest.mark.parametrize(
    "frame", [b"", b"\x01", bytes(8), b"\x00" + bytes(range(40)), b"\x01\x00\x00\x00\xff\xff\xff\xff"]
)
def test_garbage_is_corrupt(frame: bytes) -> None:
    """Short, zeroed or random bytes are corrupt entries, not crashes."""
    with pytest.raises(CorruptEntry):
        decode_request(frame)
    with pytest.raises(CorruptEntry):
        decode_responses(frame)


def test_a_request_is_not_read_as_responses() -> None:
    """The kind in the prelude is checked, both ways."""
    with pytest.raises(CorruptEntry, match="kind"):
        decode_responses(encode_request(FULL))
    with pytest.raises(CorruptEntry, match="kind"):
        decode_request(encode_responses(RESPONSES))


def test_deep_headers_are_corrupt() -> None:
    """A header nested without end does not exhaust the stack."""
    header = b"\x91" * 100_000

    with pytest.raises(CorruptEntry):
        decode_request(struct.pack("<BBHI", 1, 0, 0, len(header)) + header)


def test_a_header_of_many_objects_is_corrupt_unread() -> None:
    """No request has such a large one; its objects would take a multiple."""
    header = msgspec.msgpack.encode(["id", "", "m", 0, [[]] * MAX_HEADER_BYTES])
    frame = struct.pack("<BBHI", 1, 0, 0, len(header)) + header

    with pytest.raises(CorruptEntry, match=f"frame header of {len(header) + 8} bytes is larger than"):
        decode_request(frame)
