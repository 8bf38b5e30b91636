"""The responses of a decoupled model to the rows of a bulk batch: collected by row, within bounds, until the end."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qinfer.backends.base import Batch, Context
from qinfer.core.messages import RESPONSE_OVERHEAD_BYTES
from qinfer.errors import Cancelled, DeadlineExceeded, InferenceFailed, OutputMismatch, PayloadTooLarge
from qinfer.jobs.queue.records import ShardOutcome
from qinfer.tensors import Tensor, from_numpy
from qinfer.testing import stub_spec
from qinfer_workers.inference.bulk.scoring import RowStreams, StreamBounds
from tests.support.backends import Answers
from tests.support.jobs.shard_runs import read_parts
from tests.unit.workers.inference.bulk.test_shard_run import Ground, Model, one_shard

BOUNDS = StreamBounds(10_000, 60.0)


class Stoppable(Answers):
    """The context of a shard that may be stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stopped = False

    def cancelled(self, item: int) -> bool:
        return self.is_stopped


def outputs(*values: float) -> tuple[Tensor, ...]:
    return (from_numpy("y", np.array([values], np.float32)),)


def fine(_: Sequence[Tensor]) -> str | None:
    return None


def values(streams: RowStreams, *, is_batched: bool = True) -> list[list[Any]]:
    """Returns, for each row, its responses."""
    found = streams.outputs(["y"], is_batched=is_batched)["y"]
    return [[array.tolist() for array in row] for row in found]


def test_rows_have_their_responses_in_order() -> None:
    """Those without outputs are none: an empty final one only ends its row."""
    streams = RowStreams(3, BOUNDS, fine, Answers())
    streams.respond(1, outputs(1.0), final=False)
    streams.offer(0, ())
    streams.offer(1, (), final=False)
    streams.respond(2, outputs(3.0, 4.0))
    streams.respond(1, outputs(2.0))
    streams.wait(lambda: None)

    assert values(streams) == [[], [[1.0], [2.0]], [[3.0, 4.0]]]
    assert values(streams, is_batched=False)[2] == [[[3.0, 4.0]]]
    assert not streams.errors()


def test_a_response_is_a_copy() -> None:
    """The model's process uses its memory again once it has been told that nobody looks at it."""
    array = np.array([[1.0]], np.float32)
    streams = RowStreams(1, BOUNDS, fine, Answers())
    streams.respond(0, (from_numpy("y", array),))
    array[:] = 2.0

    assert values(streams) == [[[1.0]]]


def test_an_error_ends_its_row() -> None:
    streams = RowStreams(2, BOUNDS, fine, Answers())
    streams.respond(0, outputs(1.0), final=False)
    streams.respond(0, InferenceFailed("no"), final=False)
    with pytest.raises(Cancelled):
        streams.respond(0, outputs(2.0))
    streams.respond(1, outputs(3.0))
    streams.wait(lambda: None)

    assert {row: error.message for row, error in streams.errors().items()} == {0: "no"}
    assert streams.cancelled(0)
    assert not streams.cancelled(1)


def test_no_response_comes_after_the_final_one() -> None:
    streams = RowStreams(1, BOUNDS, fine, Answers())
    streams.respond(0, ())
    with pytest.raises(OutputMismatch, match="after its final response"):
        streams.respond(0, outputs(1.0))


def test_outputs_that_are_not_the_configuration_s_fail_the_row() -> None:
    streams = RowStreams(1, BOUNDS, lambda _: "the model returned 1 outputs where 2 are due", Answers())
    streams.respond(0, outputs(1.0))

    assert isinstance(streams.errors()[0], OutputMismatch)


@pytest.mark.parametrize("response", [outputs(1.0), ()], ids=["outputs", "empty"])
def test_the_responses_of_a_row_are_bounded(response: tuple[Tensor, ...]) -> None:
    """Also those without outputs, so that a model which never ends is stopped."""
    streams = RowStreams(1, StreamBounds(10 * RESPONSE_OVERHEAD_BYTES, 60.0), fine, Answers())
    sent = 0
    with pytest.raises(Cancelled):  # noqa: PT012  the loop has no other end
        while sent < 11:
            streams.respond(0, response, final=False)
            sent += 1
    streams.wait(lambda: None)

    assert sent == (9 if response else 10)
    assert isinstance(streams.errors()[0], PayloadTooLarge)
    assert "take more than 2560 bytes" in streams.errors()[0].message


def test_rows_without_a_final_response_are_given_up() -> None:
    streams = RowStreams(2, StreamBounds(10_000, 0.0), fine, Answers())
    streams.respond(0, outputs(1.0))
    streams.respond(1, outputs(2.0), final=False)
    streams.wait(lambda: None)

    assert [(row, type(error)) for row, error in streams.errors().items()] == [(1, DeadlineExceeded)]


def test_a_shard_that_is_stopped_waits_no_longer() -> None:
    """The model is told."""
    shard = Stoppable()
    told: list[int] = []
    streams = RowStreams(1, BOUNDS, fine, shard)
    streams.on_taken(0, told.append)

    def stop() -> None:
        shard.is_stopped = True

    with pytest.raises(Cancelled):
        streams.wait(stop)
    streams.close()

    assert told == [0]
    assert streams.cancelled(0)
    with pytest.raises(Cancelled):
        streams.respond(0, outputs(1.0))


class Streaming(Model):
    """Responds to a row with as many responses as its value modulo 3 says, the final flag alone; 7 fails after one."""

    def execute(self, batch: Batch, ctx: Context) -> None:
        """See the class."""
        values = next(iter(batch.inputs.values()))
        self.sizes.append(batch.size)
        assert ctx.is_decoupled
        for item, value in enumerate(values.reshape(len(batch.requests), -1)[:, 0].tolist()):
            for index in range(int(value) % 3):
                array = np.full((1, 2) if values.ndim == 2 else (2,), value + index / 4, np.float32)
                ctx.respond(item, (from_numpy("y", array),), final=False)
            ctx.respond(item, InferenceFailed("no seven") if value == 7 else ())


@pytest.mark.parametrize("max_batch_size", [0, 64])
async def test_a_shard_of_a_decoupled_model(tmp_path: Path, max_batch_size: int) -> None:
    """A row that failed beside others is executed once more, alone; the others are not."""
    spec = replace(stub_spec(max_batch_size=max_batch_size), decoupled=True)
    ground, (shard, job) = Ground(tmp_path, Streaming(), spec=spec), one_shard(tmp_path, 200, nulls=[4])

    outcome = await ground.run(shard, job).run()

    table = read_parts(ground.output)
    expected = [[[row + index / 4] * 2 for index in range(row % 3)] for row in range(200)]
    assert outcome == ShardOutcome(0, 200, 2)
    assert table["y"].to_pylist() == [None if row in (4, 7) else expected[row] for row in range(200)]
    assert table["error_message"].to_pylist()[7] == "no seven"
    assert table["error_code"].to_pylist()[7] == "execution_failed"
    assert sum(ground.model.sizes) in (199, 200)


async def test_a_row_with_too_many_responses_fails_alone(tmp_path: Path) -> None:
    """Its model ends when nobody takes more of them; the shard goes on."""

    class Endless(Streaming):
        def execute(self, batch: Batch, ctx: Context) -> None:
            for item, value in enumerate(batch.inputs["x"][:, 0].tolist()):
                while value == 5:
                    ctx.respond(item, (), final=False)
                ctx.respond(item, ())

    spec = replace(stub_spec(max_batch_size=64), decoupled=True)
    ground, (shard, job) = Ground(tmp_path, Endless(), spec=spec), one_shard(tmp_path, 100)

    outcome = await ground.run(shard, job).run()

    table = read_parts(ground.output)
    assert outcome == ShardOutcome(0, 100, 1)
    assert table["y"].to_pylist() == [None if row == 5 else [] for row in range(100)]
    assert table["error_code"].to_pylist()[5] == "payload_too_large"
