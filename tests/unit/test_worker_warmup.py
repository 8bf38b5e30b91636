"""Warm-up of models that call others: it ends where they call, and fails nothing."""

import dataclasses
import logging
from pathlib import Path

import pytest

from qinfer.backends.stub import StubBackend
from qinfer.batching.latency import LatencyModel
from qinfer.errors import ModelLoadFailed
from qinfer.repository.spec import Device, ModelSpec, WarmupSpec
from qinfer.testing import stub_spec
from qinfer_workers.inference.warmup import warm_up

SAMPLE = WarmupSpec(name="zeros", batch_size=1, inputs={"x": ("FP32", (2,), False)}, count=2)


def warmed(spec: ModelSpec) -> tuple[StubBackend, LatencyModel]:
    backend, latency = StubBackend(), LatencyModel()
    backend.load(spec, Path(), Device())
    warm_up(backend, spec, latency, 0.0)
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
