"""Triton's metrics, line by line."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from qinfer.backends.python_host.errors import NAMES, to_qinfer
from qinfer.errors import ErrorCode
from qinfer.models.state import WorkerRecord
from qinfer.models.store import Underway
from qinfer.observe.exposition import render
from qinfer.observe.host import GpuUse, HostUse
from qinfer.observe.stats import GatewayTally, StatsTally, add
from qinfer.observe.triton_metrics import FailureReason, MetricsChoice, failures
from qinfer.queue.entries import Lane
from qinfer.scaling.work import LaneWork, VersionWork
from qinfer_api.observe.metrics import MetricsSnapshot, shown_metrics

REJECTED = {"queue_full", "quota_exceeded", "deadline_infeasible", "deadline_exceeded"}

IDLE = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="m",version="1"} 0
# HELP nv_inference_request_failure Number of failed inference requests, all batch sizes
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 0
nv_inference_request_failure{model="m",reason="CANCELED",version="1"} 0
nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 0
nv_inference_request_failure{model="m",reason="OTHER",version="1"} 0
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 0
# HELP nv_inference_exec_count Number of model executions performed (does not include cached requests)
# TYPE nv_inference_exec_count counter
nv_inference_exec_count{model="m",version="1"} 0
# HELP nv_inference_request_duration_us Cumulative inference request duration in microseconds (includes cached requests)
# TYPE nv_inference_request_duration_us counter
nv_inference_request_duration_us{model="m",version="1"} 0
# HELP nv_inference_queue_duration_us Cumulative inference queuing duration in microseconds (includes cached requests)
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{model="m",version="1"} 0
# HELP nv_inference_compute_input_duration_us Cumulative compute input duration in microseconds (does not include \
cached requests)
# TYPE nv_inference_compute_input_duration_us counter
nv_inference_compute_input_duration_us{model="m",version="1"} 0
# HELP nv_inference_compute_infer_duration_us Cumulative compute inference duration in microseconds (does not include \
cached requests)
# TYPE nv_inference_compute_infer_duration_us counter
nv_inference_compute_infer_duration_us{model="m",version="1"} 0
# HELP nv_inference_compute_output_duration_us Cumulative inference compute output duration in microseconds (does not \
include cached requests)
# TYPE nv_inference_compute_output_duration_us counter
nv_inference_compute_output_duration_us{model="m",version="1"} 0
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="m",version="1"} 0
# HELP nv_model_load_duration_secs Model load time in seconds
# TYPE nv_model_load_duration_secs gauge
nv_model_load_duration_secs{model="m",version="1"} 0.004683712
"""


def work_of(lanes: dict[tuple[str, int, str], int]) -> list[VersionWork]:
    """Returns the work of versions by their lanes."""
    return [
        VersionWork(
            model=model,
            version=version,
            lanes=(LaneWork(lane=Lane(model, version, lane), entries=count, oldest_age_s=0.0),),
        )
        for (model, version, lane), count in lanes.items()
    ]


def worker(name: str = "w", **more: Any) -> WorkerRecord:
    """Returns a worker's heartbeat."""
    return WorkerRecord(id=name, started_at=0.0, models={}, **more)


def lines(snapshot: MetricsSnapshot) -> list[str]:
    """Returns the samples that have Triton's names."""
    return [
        line for line in render(shown_metrics(GatewayTally(), snapshot)).decode().splitlines() if line.startswith("nv_")
    ]


def worked() -> dict[str, int]:
    """Two executions of three requests, and failures."""
    tally = StatsTally()
    tally.executed(5, [1_000_000, 3_000_999], 10_000, 2_000_000, 1_500)
    tally.executed(2, [7_000_000], 20_000, 3_000_000, 2_600)
    tally.failed("inference_failed", 2)
    tally.failed("output_mismatch")
    tally.failed("corrupt_entry")
    tally.failed("deadline_exceeded", 3)
    gateway = GatewayTally()
    gateway.count_ended("m", 1, "queue_full")
    gateway.count_ended("m", 1, "cancelled")
    gateway.count_ended("m", 1, "broker_unavailable")
    fields = tally.drain()
    add(fields, gateway.refusals.drain()["m", 1])
    return fields


def test_a_version_that_did_nothing() -> None:
    """Everything is there from the start, as Triton writes it, after qinfer's own metrics."""
    snapshot = MetricsSnapshot(
        stats={("m", 1): {}},
        work=work_of({("m", 1, "p1"): 0}),
        ready={("m", 1): True},
        workers=[worker(load_s={"m": {1: 0.0046837120001}})],
    )

    page = render(shown_metrics(GatewayTally(), snapshot)).decode()

    assert page.partition("# HELP nv_")[2] == IDLE.removeprefix("# HELP nv_")


def test_values() -> None:
    """Integers without a decimal point; microseconds, charged to each request; four reasons of failures."""
    assert lines(MetricsSnapshot(stats={("m", 1): worked()})) == [
        'nv_inference_request_success{model="m",version="1"} 3',
        'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 4',
        'nv_inference_request_failure{model="m",reason="CANCELED",version="1"} 1',
        'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 3',
        'nv_inference_request_failure{model="m",reason="OTHER",version="1"} 2',
        'nv_inference_count{model="m",version="1"} 7',
        'nv_inference_exec_count{model="m",version="1"} 2',
        'nv_inference_request_duration_us{model="m",version="1"} 18046',
        'nv_inference_queue_duration_us{model="m",version="1"} 11000',
        'nv_inference_compute_input_duration_us{model="m",version="1"} 40',
        'nv_inference_compute_infer_duration_us{model="m",version="1"} 7000',
        'nv_inference_compute_output_duration_us{model="m",version="1"} 5',
    ]


def test_tags_are_labels_of_every_series_of_a_model() -> None:
    """In front, as the alphabet has them; other models have none."""
    snapshot = MetricsSnapshot(
        stats={("m", 1): {}, ("n", 1): {}},
        work=work_of({("m", 1, "p1"): 0, ("n", 1, "p1"): 0}),
        ready={("m", 1): True},
        workers=[worker(load_s={"m": {1: 1.0}})],
    )
    wanted = MetricsChoice(quantiles=(0.5,), histogram=True, cached={"m"}, tags={"m": {"team": "red", "Tier": 'a"b'}})

    shown = render(shown_metrics(GatewayTally(), snapshot, wanted=wanted)).decode()

    series = [line for line in shown.splitlines() if line.startswith("nv_") and 'model="m"' in line]
    assert all('{_Tier="a\\"b",_team="red",model="m",' in line for line in series)
    assert 'nv_inference_count{model="n",version="1"} 0' in shown
    assert series[-1].startswith("nv_model_load_duration_secs{_Tier=")


def test_models_that_are_cached_show_it_from_the_start() -> None:
    """As in Triton: hits and misses of 0, of no other model."""
    snapshot = MetricsSnapshot(stats={("m", 1): {}, ("n", 1): {}})

    shown = render(shown_metrics(GatewayTally(), snapshot, wanted=MetricsChoice(cached={"m"}))).decode()
    bare = render(shown_metrics(GatewayTally(), snapshot, wanted=MetricsChoice(cached={"m"}, counters=False))).decode()

    assert "nv_cache_" not in bare
    assert [line for line in shown.splitlines() if line.startswith("nv_cache_")] == [
        'nv_cache_num_hits_per_model{model="m",version="1"} 0',
        'nv_cache_hit_duration_per_model{model="m",version="1"} 0',
        'nv_cache_num_misses_per_model{model="m",version="1"} 0',
        'nv_cache_miss_duration_per_model{model="m",version="1"} 0',
    ]


def test_large_values_have_no_exponent() -> None:
    """Nor do they lose digits."""
    shown = lines(MetricsSnapshot(stats={("m", 1): {"success_count": 123_456_789_012_345_678}}))

    assert 'nv_inference_request_success{model="m",version="1"} 123456789012345678' in shown


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_of_a_gateway_has_a_reason(code: ErrorCode) -> None:
    """What queue and quotas refuse is rejected; what is in no table is OTHER."""
    reason = (
        FailureReason.REJECTED
        if code in REJECTED
        else FailureReason.CANCELED
        if code == "cancelled"
        else FailureReason.BACKEND
        if code in ("inference_failed", "output_mismatch", "unknown")
        else FailureReason.OTHER
    )

    assert failures({f"refusals:{code}": 2}) == dict.fromkeys(FailureReason, 0) | {reason: 2}


@pytest.mark.parametrize("code", range(len(NAMES)))
def test_an_error_that_a_model_made_is_the_backends(code: int) -> None:
    """Whatever its code, but where it says that the request was cancelled."""
    reason = FailureReason.CANCELED if NAMES[code] == "CANCELLED" else FailureReason.BACKEND

    assert failures({f"failures:{to_qinfer('no', code).code}": 1})[reason] == 1


def test_codes_of_a_newer_qinfer_are_other() -> None:
    """Nothing is left out."""
    assert failures({"failures:new": 1, "refusals:newer": 2})[FailureReason.OTHER] == 3


def test_pending_is_what_waits_and_does_not_execute() -> None:
    """In all lanes, and past them; never below zero, though what executes is known of a moment ago only."""
    depth = {("m", 1, "p1"): 4, ("m", 1, "p2"): 3, ("n", 2, "p1"): 1, ("idle", 1, "p1"): 0, ("step", 1, "p1"): 1}
    workers = [
        worker("w1", busy={"m": {1: 9}}),
        worker("w2", busy={"n": {2: 5}}, direct={"step": {1: 4}}),
    ]
    underway = {"w1": Underway({"m": {1: 2}, "step": {1: 3}}, {})}
    snapshot = MetricsSnapshot(
        work=work_of({**depth, ("m", 1, "bulk2"): 8}),
        workers=workers,
        underway=underway,
        waiting_steps={("step", 1): 2},
    )

    assert lines(snapshot) == [
        'nv_inference_pending_request_count{model="m",version="1"} 5',
        'nv_inference_pending_request_count{model="n",version="2"} 0',
        'nv_inference_pending_request_count{model="idle",version="1"} 0',
        'nv_inference_pending_request_count{model="step",version="1"} 4',
    ]


def test_without_the_store_no_counter_falls() -> None:
    """There are none: zeros would look like a restart."""
    assert lines(MetricsSnapshot(store_up=False, ready={("m", 1): True}, workers=[worker(load_s={"m": {1: 2.0}})])) == [
        'nv_model_load_duration_secs{model="m",version="1"} 2'
    ]


def test_the_machine_has_no_labels() -> None:
    """CPU and memory, where they are known."""
    assert lines(MetricsSnapshot(host=HostUse(0.3125, 16_825_843_712, 0))) == [
        "nv_cpu_utilization 0.3125",
        "nv_cpu_memory_total_bytes 16825843712",
        "nv_cpu_memory_used_bytes 0",
    ]


def test_a_gpu_that_two_workers_tell_of_is_there_once() -> None:
    """By its UUID, as the one told of it that saw more energy used; watts and joules."""
    uses = [
        GpuUse(
            number=number,
            uuid="GPU-1",
            memory_used_bytes=used,
            memory_total_bytes=80,
            utilization=0.25,
            power_w=71.5,
            power_limit_w=700.0,
            energy_j=energy_j,
        )
        for number, used, energy_j in ((0, 20, 1500.5), (3, 10, 1400.0))
    ]
    workers = [worker(f"w{place}", gpus=(use,)) for place, use in enumerate(uses)]

    assert lines(MetricsSnapshot(workers=workers)) == [
        'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.25',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 80',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 20',
        'nv_gpu_power_usage{gpu_uuid="GPU-1"} 71.5',
        'nv_gpu_power_limit{gpu_uuid="GPU-1"} 700',
        'nv_energy_consumption{gpu_uuid="GPU-1"} 1500.5',
    ]


def test_prometheus_reads_the_page() -> None:
    """With qinfer's own on it, and a model's name that must be escaped."""
    name = 'a"b\\c\n'
    snapshot = MetricsSnapshot(
        stats={(name, 1): worked()}, ready={(name, 1): True}, workers=[worker(load_s={name: {1: 0.25}})]
    )
    page = render(shown_metrics(GatewayTally(), snapshot)).decode()

    found = {
        (family.name, sample.labels.get("reason")): (family.type, sample.labels["model"], sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.name.startswith("nv_")
    }

    assert len(found) == 13
    assert found["nv_inference_request_failure", "REJECTED"] == ("counter", name, 4)
    assert found["nv_model_load_duration_secs", None] == ("gauge", name, 0.25)
    assert "_total" not in page.partition("# HELP nv_")[2]
    assert "_created" not in page
