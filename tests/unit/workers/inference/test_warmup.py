"""Warm-up of models that call others: it ends where they call, and fails nothing."""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest

from qinfer.backends.base import Array, Batch, Context
from qinfer.backends.stub import StubBackend
from qinfer.batching.policy import LatencyModel
from qinfer.errors import ModelLoadFailed
from qinfer.models.sequence_spec import ControlKind, ControlSpec, DirectSpec, SequenceSpec, StateSpec
from qinfer.models.spec import Device, ModelSpec, WarmupInput, WarmupSpec
from qinfer.tensors import Tensor, pack_bytes
from qinfer.testing import stub_spec
from qinfer_workers.inference.loader import warm_up, warm_up_with_zeros

SAMPLE = WarmupSpec(name="zeros", batch_size=1, inputs={"x": WarmupInput("FP32", (2,))}, count=2)


def warmed(spec: ModelSpec) -> tuple[StubBackend, LatencyModel]:
    backend, latency = StubBackend(), LatencyModel()
    backend.load(spec, Path(), Device())
    warm_up(backend, spec)
    warm_up_with_zeros(backend, spec, latency, 0.0)
    return backend, latency


@pytest.mark.parametrize("samples", [(), (SAMPLE,)])
def test_a_call_ends_the_warm_up(samples: tuple[WarmupSpec, ...], caplog: pytest.LogCaptureFixture) -> None:
    """The model that is called may not be loaded yet: the load goes on, and nothing is learned from it."""
    with caplog.at_level(logging.WARNING):
        backend, latency = warmed(dataclasses.replace(stub_spec(mode="call:other"), warmup=samples))

    assert backend.sizes == [1] * (len(samples) + 1)
    assert not latency.known
    assert caplog.text == ""


def test_another_failure_of_a_sample_fails_the_load() -> None:
    """As in Triton."""
    with pytest.raises(ModelLoadFailed, match="sample 'zeros'"):
        warmed(dataclasses.replace(stub_spec(mode="raise"), warmup=(SAMPLE,)))


def test_a_model_that_calls_nobody_is_timed() -> None:
    """The last run tells how long a row takes."""
    assert warmed(stub_spec())[1].known


def test_a_decoupled_model_runs_its_samples_only() -> None:
    """Nobody knows for how long it sends responses to zeros."""
    backend, latency = warmed(dataclasses.replace(stub_spec(), decoupled=True, warmup=(SAMPLE,)))

    assert len(backend.sizes) == SAMPLE.count
    assert not latency.known


def test_code_is_never_run_with_zeros() -> None:
    """It may count what it executes, or send it somewhere; its samples run."""
    backend, latency = warmed(dataclasses.replace(stub_spec(), backend="python", warmup=(SAMPLE,)))

    assert len(backend.sizes) == SAMPLE.count
    assert not latency.known


def test_zeros_that_a_model_does_not_take_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The load goes on."""
    with caplog.at_level(logging.INFO):
        warmed(stub_spec(mode="raise"))

    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", "automatic warm-up failed")]


def with_file(file: str = "x.bin", datatype: str = "FP32", dims: tuple[int, ...] = (2,)) -> ModelSpec:
    sample = WarmupSpec(name="w", batch_size=3, inputs={"x": WarmupInput(datatype, dims, file=file)})
    return dataclasses.replace(stub_spec(), warmup=(sample,))


class Recorder(StubBackend):
    """Keeps what it executes."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[dict[str, Array]] = []

    def execute(self, batch: Batch, ctx: Context) -> None:
        self.inputs.append(dict(batch.inputs))


def run(spec: ModelSpec, directory: Path) -> Array:
    backend = Recorder()
    warm_up(backend, spec, directory)
    return backend.inputs[0]["x"]


def test_a_sample_may_be_a_file(tmp_path: Path) -> None:
    """Of the model's directory `warmup`: one row, which is repeated; as in Triton, nobody reads what follows it."""
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "x.bin").write_bytes(np.array([1, 2], "<f4").tobytes())
    (tmp_path / "warmup" / "long").write_bytes(np.array([1, 2, 3], "<f4").tobytes())
    (tmp_path / "warmup" / "text").write_bytes(pack_bytes([b"a", b"bc"]))

    for file in ("x.bin", "long"):
        assert run(with_file(file), tmp_path).tolist() == [[1, 2]] * 3
    assert run(with_file("text", "BYTES"), tmp_path).tolist() == [[b"a", b"bc"]] * 3


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"1234", "'x'")])
def test_a_file_that_does_not_fit_fails_the_load(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """The message names it, and not where it is."""
    (tmp_path / "warmup").mkdir()
    if content is not None:
        (tmp_path / "warmup" / "x.bin").write_bytes(content)

    with pytest.raises(
        ModelLoadFailed, match=f"warm-up file 'x.bin' can't be used for input 'x': .*{reason}"
    ) as failed:
        run(with_file(), tmp_path)
    assert str(tmp_path) not in failed.value.message


def test_a_batch_is_requests_of_one_row() -> None:
    """As in Triton, which code can see."""
    seen: list[list[int]] = []

    class Counter(StubBackend):
        def execute(self, batch: Batch, ctx: Context) -> None:
            assert len(batch.requests) == len(batch.rows)
            seen.append(list(batch.rows))

    warm_up(Counter(), dataclasses.replace(stub_spec(), warmup=(dataclasses.replace(SAMPLE, batch_size=3),)))

    assert seen == [[1, 1, 1]] * SAMPLE.count


def test_a_model_with_sequences_sees_one_of_a_single_step() -> None:
    """Control inputs and initial states are filled in, unless a sample has them."""
    state = StateSpec(input="si", output="so", datatype="FP32", dims=(2,), initial_dims=(2,))
    start = ControlSpec(name="start", kind=ControlKind.START, datatype="INT32", true=1)
    sequences = SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=4, states=(state,), controls=(start,))
    sample = WarmupSpec(
        name="w", batch_size=2, inputs={name: WarmupInput("FP32", (2,)) for name in ("x", "si")}, count=1
    )
    spec = dataclasses.replace(stub_spec(), warmup=(sample,), sequences=sequences)
    backend = Recorder()
    backend.load(spec, Path(), Device())

    initial = [Tensor("si", "FP32", (1, 2), np.ones(2, "<f4").tobytes())]

    warm_up(backend, spec, states=initial)
    warm_up_with_zeros(backend, spec, LatencyModel(), 0.0, initial)

    own, automatic = backend.inputs[:2]
    assert (own["si"].tolist(), own["start"].tolist()) == ([[0, 0], [0, 0]], [[1], [1]])
    assert (automatic["si"].tolist(), automatic["start"].tolist()) == ([[1, 1]], [[1]])


def test_a_stateful_model_is_timed() -> None:
    state = StateSpec(input="si", output="so", datatype="FP32", dims=(2,), initial_dims=(2,))
    sequences = SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=4, states=(state,))
    spec, latency, backend = dataclasses.replace(stub_spec(), sequences=sequences), LatencyModel(), StubBackend()
    backend.load(spec, Path(), Device())

    warm_up_with_zeros(backend, spec, latency, 0.0, [state.initial(None, batched=True)])

    assert latency.known
