"""Frames under Hypothesis: everything survives, nothing but `CorruptEntry` comes out of rubbish."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from qinfer.core.messages import Failure, InferRequest, ResourceHolder, Response, SequenceFlags, Timing
from qinfer.errors import CorruptEntry
from qinfer.tensors import DATATYPES, Tensor
from qinfer.wire.frame import decode_request, decode_responses, encode_request, encode_responses

NATURAL = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TENSORS = st.lists(
    st.builds(
        Tensor,
        TEXT,
        st.sampled_from(sorted(DATATYPES)),
        st.lists(NATURAL, max_size=4).map(tuple),
        st.binary(max_size=40),
    ),
    max_size=4,
).map(tuple)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
UNITS = st.dictionaries(TEXT, NATURAL, max_size=2)
REQUESTS = st.builds(
    InferRequest,
    model=TEXT,
    inputs=TENSORS,
    version=NATURAL,
    id=TEXT,
    client_id=TEXT,
    outputs=st.lists(TEXT, max_size=3).map(tuple),
    parameters=st.dictionaries(TEXT, SCALARS, max_size=3),
    priority=NATURAL,
    timeout_s=st.integers(0, 10**10).map(lambda us: us / 1e6),
    reply_to=TEXT,
    tenant=TEXT,
    trace=TEXT,
    partition=NATURAL,
    generation=NATURAL,
    attempt=NATURAL,
    sequence=st.none() | st.builds(SequenceFlags, NATURAL | TEXT, st.booleans(), st.booleans()),
    holders=st.lists(st.builds(ResourceHolder, TEXT, TEXT, UNITS, NATURAL, NATURAL), max_size=3).map(tuple),
)
RESPONSES = st.builds(
    Response,
    request_id=TEXT,
    model=TEXT,
    version=NATURAL,
    outputs=TENSORS,
    failure=st.none() | st.builds(Failure, TEXT, TEXT, st.booleans()),
    attempt=NATURAL,
    index=NATURAL,
    final=st.booleans(),
    timing=st.none() | st.builds(Timing, NATURAL, NATURAL, NATURAL, NATURAL, NATURAL),
)


@given(REQUESTS)
def test_requests_survive(request: InferRequest) -> None:
    """Any request comes back equal."""
    assert decode_request(encode_request(request)) == request


@given(st.lists(RESPONSES, max_size=4))
def test_responses_survive(responses: list[Response]) -> None:
    """Any batch of responses comes back equal and in order."""
    assert decode_responses(encode_responses(responses)) == responses


def _decode_or_corrupt(frame: bytes) -> None:
    for decode in (decode_request, decode_responses):
        with contextlib.suppress(CorruptEntry):
            decode(frame)


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"\x01\x00\x00\x00\x20\x00\x00\x00" + tail))
def test_random_bytes_are_corrupt_at_worst(frame: bytes) -> None:
    """Random bytes, also behind a good prelude, raise nothing but `CorruptEntry`."""
    _decode_or_corrupt(frame)


@given(REQUESTS, st.data())
def test_truncated_frames_are_corrupt_at_worst(request: InferRequest, data: st.DataObject) -> None:
    """A frame cut anywhere raises nothing but `CorruptEntry`."""
    frame = encode_request(request)

    _decode_or_corrupt(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(st.lists(RESPONSES, min_size=1, max_size=3), st.data())
def test_flipped_bytes_are_corrupt_at_worst(responses: list[Response], data: st.DataObject) -> None:
    """A blob with one byte changed raises nothing but `CorruptEntry`."""
    blob = bytearray(encode_responses(responses))
    blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))

    _decode_or_corrupt(bytes(blob))
