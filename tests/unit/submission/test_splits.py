"""Requests that are split: the parts of their tensors, the whole of the responses, and who ends whom."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import InferenceFailed, InvalidRequest, OutputMismatch
from qinfer.models.spec import MAX_PARTS, ModelSpec, TensorSpec
from qinfer.submission.pending import PendingCall, PendingRequests
from qinfer.submission.splits import PartSink, Whole, check_whole, merged, parts_of
from qinfer.submission.validate import validate
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer.testing import FakeClock

X = TensorSpec(name="x", datatype="FP32", dims=(1,))
SPEC = ModelSpec(name="m", backend="stub", inputs=(X,), outputs=(), max_batch_size=4, splits=True)


def request(rows: int) -> OutgoingRequest:
    return OutgoingRequest(model="m", inputs=(from_numpy("x", np.zeros((rows, 1), "f4")),))


def answer(*values: float, **fields: object) -> Response:
    output = from_numpy("y", np.array([values], "f4").T)
    return Response(**{"request_id": "p", "outputs": (output,), **fields})  # type: ignore[arg-type]


@given(
    texts=st.lists(st.lists(st.binary(max_size=5), min_size=3, max_size=3), min_size=1, max_size=40),
    max_rows=st.integers(1, 9),
)
def test_parts_are_the_request_again(texts: list[list[bytes]], max_rows: int) -> None:
    """Of numbers and of texts, all parts but the last as large as may be."""
    numbers = np.arange(len(texts) * 2, dtype="f8").reshape(len(texts), 2)
    whole = (from_numpy("n", numbers), from_numpy("t", np.array(texts, object)))

    parts = parts_of(OutgoingRequest(model="m", inputs=whole), max_rows)

    sizes = [part.inputs[0].shape[0] for part in parts]
    assert sizes[:-1] == [max_rows] * (len(parts) - 1)
    assert sum(sizes) == len(texts)
    again = merged([Response(request_id="p", outputs=part.inputs) for part in parts]).outputs
    for tensor, original in zip(again, whole, strict=True):
        assert (tensor.name, tensor.shape, bytes(tensor.data)) == (original.name, original.shape, bytes(original.data))


def test_all_parts_are_one_versions() -> None:
    """None is moved to another one while it waits."""
    request = OutgoingRequest(model="m", inputs=(from_numpy("n", np.zeros((3, 1))),), endpoint="e", moves=True)

    assert [part.moves_by for part in parts_of(request, 1)] == ["", "", ""]


def test_parts_of_what_was_received_into_memory_know_where_their_rows_lie() -> None:
    """Each tensor's rows lie one behind the other."""
    inputs = from_numpy("n", np.zeros((5, 3), "f8")), from_numpy("m", np.zeros((5, 1), "f4"))
    request = OutgoingRequest(model="m", inputs=inputs, landed_at=(64, 184))

    assert [part.landed_at for part in parts_of(request, 2)] == [(64, 184), (112, 192), (160, 200)]
    assert parts_of(OutgoingRequest(model="m", inputs=inputs), 2)[1].landed_at == ()


def test_the_number_of_parts_is_bounded() -> None:
    most = SPEC.max_request_rows

    assert most == 4 * MAX_PARTS
    assert validate(request(most), SPEC, most) == most
    with pytest.raises(InvalidRequest, match=f"batch-size must be <= {most} for 'm'"):
        validate(request(most + 1), SPEC, most)
    with pytest.raises(InvalidRequest, match="batch-size must be <= 4 for 'm'"):
        validate(request(5), SPEC)


def test_stored_requests_are_not_split() -> None:
    check_whole(request(4), SPEC)
    with pytest.raises(InvalidRequest, match="batch-size must be <= 4 for 'm': requests that are stored are not split"):
        check_whole(request(5), SPEC)
    check_whole(request(5), dataclasses.replace(SPEC, max_batch_size=0))


@pytest.mark.parametrize(
    "other", [(from_numpy("y", np.zeros((1, 2), "f4")),), (from_numpy("z", np.zeros((1, 1), "f4")),), ()]
)
def test_parts_with_other_outputs_are_no_whole(other: tuple[Tensor, ...]) -> None:
    with pytest.raises(OutputMismatch, match="the parts of the request have"):
        merged([answer(1.0), Response(request_id="p", outputs=other)])


class Scene:
    """A whole of some parts in a table, without a queue."""

    def __init__(self, count: int) -> None:
        self.responses: list[Response] = []
        self.errors: list[Exception] = []
        self.clock = FakeClock()
        self.table = PendingRequests(
            None,  # type: ignore[arg-type]  # nothing is fetched or cancelled in the queue
            self.clock,
            lambda _, callback: NoTimer(callback),
            self._answered,
            self._failed,
        )
        self.pending = self._add("whole", None)
        self.whole = self.pending.shared = Whole(self.table, self.pending, count)
        self.parts = [self._add(f"part-{place}", PartSink(self.whole, place)) for place in range(count)]
        for part in self.parts:
            self.whole.started(part)

    def deliver(self, place: int, response: Response) -> None:
        """Delivers the response of a part."""
        self.table.remove(self.parts[place])
        self.whole.landed(place, response)

    @property
    def waiting(self) -> Sequence[str]:
        return [one.request_id for one in (self.pending, *self.parts) if one in self.table]

    def _add(self, name: str, sink: PartSink | None) -> PendingCall:
        pending = PendingCall(name, "", "m", 1, sink, 0.0)  # type: ignore[arg-type]
        self.table.add(pending, 10.0)
        return pending

    def _answered(self, pending: PendingCall, response: Response) -> None:
        assert pending is self.pending
        self.responses.append(response)

    def _failed(self, pending: PendingCall, error: Exception) -> None:
        assert pending is self.pending
        self.errors.append(error)


class NoTimer:
    """A timer that never ends."""

    def __init__(self, callback: Callable[[], None]) -> None:
        del callback

    def cancel(self) -> None:
        pass


def test_answers_in_any_order_make_one_in_order() -> None:
    scene = Scene(3)

    for place in (2, 0, 1):
        scene.deliver(place, answer(place, place + 0.5))

    (response,) = scene.responses
    assert response.request_id == "whole"
    assert to_numpy(response.outputs[0]).ravel().tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert not scene.waiting


def test_the_first_failure_ends_all() -> None:
    scene = Scene(3)
    failed = answer(1.0, outputs=(), failure=_failure())

    scene.deliver(1, failed)
    scene.whole.crashed(InferenceFailed("another"))

    (response,) = scene.responses
    assert response.failure is not None
    assert response.failure.message == "bad"
    assert (scene.waiting, scene.errors) == ([], [])


def test_a_part_that_is_lost_fails_the_whole() -> None:
    scene = Scene(2)

    scene.whole.crashed(InferenceFailed("lost"))

    assert [str(error) for error in scene.errors] == ["lost"]
    assert not scene.waiting


def test_a_caller_that_leaves_cancels_the_parts() -> None:
    scene = Scene(2)

    scene.table.cancel(scene.pending)

    assert not scene.waiting
    assert (scene.responses, scene.errors) == ([], [])


def test_several_responses_to_a_part_fail_the_whole() -> None:
    scene = Scene(2)

    scene.deliver(0, answer(1.0, index=1))

    assert "several responses" in str(scene.errors[0])


def _failure() -> object:
    from qinfer.core.messages import Failure

    return Failure.from_error(InferenceFailed("bad"))
