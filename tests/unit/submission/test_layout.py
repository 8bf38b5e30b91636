"""Requests that are alike: what they share is laid out once, and nothing else is taken for it."""

import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from qinfer.core.messages import CallTraces, IdFactory, OutgoingRequest, Scalar, SequenceFlags
from qinfer.errors import PayloadTooLarge
from qinfer.queue.entries import Lane
from qinfer.submission.memory import MAX_HEAD_BYTES, Kind, Layouts, kind_of
from qinfer.tensors import Tensor, pack_bytes
from qinfer.wire.frame import RequestForm, decode_request, encode_flags, encode_request

LANE = Lane("m", 3, partition=1)
IDS = IdFactory()
STRING = Tensor("x0", "BYTES", (1, 1), pack_bytes([b"abc"]))


def request(*sizes: int, **changes: Any) -> OutgoingRequest:
    """A stamped request with inputs of so many bytes."""
    inputs = tuple(Tensor(f"x{n}", "UINT8", (1, size), bytes([n + 1]) * size) for n, size in enumerate(sizes))
    fields = {"version": 3, "timeout_s": 2.0, "reply_to": "reply:me", "partition": 1, "generation": 5, **changes}
    return OutgoingRequest(model="m", inputs=fields.pop("inputs", inputs), id=IDS.request_id("m", 1), **fields)


def kind(one: OutgoingRequest, *, lane: Lane = LANE, generation: int = 5) -> Kind | None:
    return kind_of(one, (lane, generation), one.timeout_s)


def test_what_is_alike_has_the_same_kind() -> None:
    """Ids and elements don't count."""
    first, second = request(4, 2), request(4, 2)
    second.inputs = tuple(msgspec.structs.replace(tensor, data=bytes(len(tensor.data))) for tensor in second.inputs)

    assert kind(first) == kind(second) is not None


@pytest.mark.parametrize("timeout_s", [0.065536, 59.999, 4000.0])
def test_timeouts_and_traces_of_the_same_length_are_alike(timeout_s: float) -> None:
    """Behind a proxy, no two requests have the same."""
    layouts = Layouts(inline_max_bytes=100)
    first, second = request(4, trace="00-" + "a" * 52), request(4, trace="00-" + "b" * 52, timeout_s=timeout_s)
    found = kind(first)
    assert found is not None
    assert found == kind(second)
    for _ in range(2):
        layouts.lay_out(first, found)
    form = layouts.find(found)
    assert isinstance(form, RequestForm)

    assert form.fill(second) == encode_request(second)


@pytest.mark.parametrize(
    "changes", [{"timeout_s": 0.0655}, {"timeout_s": 4295.0}, {"timeout_s": 1e-4}, {"trace": "00"}]
)
def test_what_takes_more_or_fewer_bytes_has_another_kind(changes: Mapping[str, Any]) -> None:
    """Whatever follows it would lie elsewhere; and it can be laid out by itself."""
    layouts, one = Layouts(inline_max_bytes=100), request(4, **changes)
    found = kind(one)
    assert found != kind(request(4))
    for _ in range(2):
        layouts.lay_out(one, found)
    assert found is not None
    form = layouts.find(found)
    assert isinstance(form, RequestForm)

    assert form.fill(one) == encode_request(one)


@pytest.mark.parametrize(
    "changes",
    [
        {"outputs": ("y",)},
        {"inputs": (Tensor("x1", "UINT8", (1, 4), bytes(4)),)},
        {"inputs": (Tensor("x0", "INT8", (1, 4), bytes(4)),)},
        {"inputs": (Tensor("x0", "UINT8", (4, 1), bytes(4)),)},
        {"inputs": (Tensor("x0", "UINT8", (1, 4), bytes(3)),)},
        {"inputs": (Tensor("x0", "UINT8", (1, 4), bytes(4)), Tensor("x1", "UINT8", (1,), b"1"))},
        {"inputs": ()},
    ],
)
def test_what_a_frame_or_the_model_tells_apart_has_another_kind(changes: Mapping[str, Any]) -> None:
    """A name, a datatype, a shape, a size, one more."""
    other = kind(request(4, **changes))

    assert other is not None
    assert other != kind(request(4))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SequenceFlags(1, start=True), SequenceFlags(127, end=True)),
        (SequenceFlags(2**40), SequenceFlags(2**64 - 1, start=True, end=True)),
        (SequenceFlags("ab"), SequenceFlags("cd", start=True)),
        (SequenceFlags("ab", step=1), SequenceFlags("cd", step=100)),
    ],
)
def test_steps_of_sequences_are_alike(one: SequenceFlags, other: SequenceFlags) -> None:
    """What their frames have in common is laid out once."""
    layouts, first, second = Layouts(inline_max_bytes=100), request(4, sequence=one), request(4, sequence=other)
    found = kind(first)
    assert found is not None
    assert found == kind(second)
    for _ in range(2):
        layouts.lay_out(first, found)
    form = layouts.find(found)
    assert isinstance(form, RequestForm)

    assert form.fill(second) == encode_request(second)


def test_what_the_check_of_a_step_tells_apart_has_another_kind() -> None:
    """No ID, text or a number, text that is too long; also where numbers make the flags equally long."""
    flags = [
        None,
        SequenceFlags(0),
        SequenceFlags(""),
        SequenceFlags(1),
        SequenceFlags("1"),
        SequenceFlags(1, step=1),
        SequenceFlags("x" * 128, step=1),
        SequenceFlags("x" * 129),
        SequenceFlags("é" * 64),
        SequenceFlags("é" * 65),
    ]

    assert len({kind(request(4, sequence=one)) for one in flags}) == len(flags)


def test_an_id_that_a_stateful_model_refuses_is_not_remembered() -> None:
    """It may be as large as a request, and is laid out before it is refused."""
    before = encode_flags.cache_info().currsize

    assert kind(request(4, sequence=SequenceFlags("x" * 2**20))) is None
    assert encode_flags.cache_info().currsize == before


def test_a_lane_a_generation_and_a_tenant_count() -> None:
    """The frame has them, or the check that is spared was another model's."""
    one = request(4)
    kinds = [
        kind(one),
        kind(one, lane=Lane("m", 4, partition=1)),
        kind(one, generation=6),
        kind(request(4, tenant="t")),
    ]

    assert len(set(kinds)) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"client_id": "mine"},
        {"parameters": {"a": 1}},
        {"priority": 1},
        {"calls": CallTraces(has_tensors=False)},
        {"trace": "é"},
        {"inputs": (STRING,), "generation": 0},
        {"inputs": (Tensor("x0", "UINT8", (1,), b"1"), STRING), "generation": 0},
    ],
)
def test_what_is_special_has_none(changes: Mapping[str, Any]) -> None:
    """What differs from request to request, and bytes that have to be checked each time."""
    assert kind(request(4, **changes)) is None


def test_checked_strings_of_the_same_length_are_alike() -> None:
    layouts, other = Layouts(inline_max_bytes=100), Tensor("x0", "BYTES", (1, 1), pack_bytes([b"xyz"]))
    first, second = request(inputs=(STRING,)), request(inputs=(other,))
    found = kind(first)
    assert found is not None
    assert found == kind(second) != kind(request(inputs=(Tensor("x0", "BYTES", (1, 1), pack_bytes([b"ab"])),)))
    for _ in range(2):
        layouts.lay_out(first, found)
    form = layouts.find(found)
    assert isinstance(form, RequestForm)

    assert form.fill(second) == encode_request(second)


def test_what_was_laid_out_is_known() -> None:
    """Within its entry only: what is beside the stream is another thing each time."""
    layouts = Layouts(inline_max_bytes=4)
    small, large = request(4), request(5)
    known, unknown = kind(small), kind(large)
    assert known is not None
    assert unknown is not None

    assert layouts.lay_out(small, known) == (encode_request(small), None)
    assert layouts.find(known) is None, "it may be the only one"
    assert layouts.lay_out(small, known) == (encode_request(small), None)
    for _ in range(2):
        _, payload = layouts.lay_out(large, unknown)
        assert payload is not None

    assert layouts.find(unknown) is None
    form = layouts.find(known)
    assert isinstance(form, RequestForm)
    assert form.fill(small) == encode_request(small)


def test_what_has_no_kind_is_not_remembered() -> None:
    """It is laid out all the same."""
    layouts = Layouts(inline_max_bytes=100)
    one = request(4, client_id="mine")

    assert layouts.lay_out(one, kind(one)) == (encode_request(one), None)


def test_there_is_an_end_of_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose the shapes, as many as they like."""
    monkeypatch.setattr("qinfer.submission.memory._MAX_LAYOUTS", 3)
    layouts = Layouts(inline_max_bytes=100)
    kinds = []
    for size in range(4):
        one = request(size)
        found = kind(one)
        assert found is not None
        kinds.append(found)
        layouts.lay_out(one, found)
        layouts.lay_out(one, found)

    assert [layouts.find(found) is not None for found in kinds] == [False, False, False, True]


def test_what_is_too_large_without_its_tensors_is_refused() -> None:
    """And not remembered."""
    layouts = Layouts(inline_max_bytes=100)
    parameters: dict[str, Scalar] = {"a": "b" * MAX_HEAD_BYTES}
    one = request(4, parameters=parameters)

    for _ in range(2):
        with pytest.raises(PayloadTooLarge, match="take 10"):
            layouts.lay_out(one, ("some kind",))
    assert layouts.find(("some kind",)) is None


def test_elements_keep_their_own_bytes() -> None:
    """Two that are alike and follow one another do not get one another's."""
    layouts = Layouts(inline_max_bytes=100)
    found = kind(request(8))
    assert found is not None
    layouts.lay_out(request(8), found)
    layouts.lay_out(request(8), found)
    form = layouts.find(found)
    assert isinstance(form, RequestForm)

    frames = [
        form.fill(request(inputs=(Tensor("x0", "UINT8", (1, 8), struct.pack("<Q", value)),))) for value in range(3)
    ]

    assert [bytes(decode_request(frame).inputs[0].data) for frame in frames] == [
        struct.pack("<Q", value) for value in range(3)
    ]
