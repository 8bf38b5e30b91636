"""The text of /metrics."""

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from qinfer.bridge.reports import BridgeCollector, RouteTally, RouteTotals, families
from qinfer.core.messages import Response
from qinfer.errors import ErrorCode, InvalidRequest
from qinfer.models.state import State, VersionState, WorkerRecord
from qinfer.observe import catalogue
from qinfer.observe.catalogue import MetricScope
from qinfer.observe.exposition import render
from qinfer.observe.host import GpuUse, HostUse, ProcessUse
from qinfer.observe.stats import GatewayTally, ModelCounts, Objective, StatsTally, add
from qinfer.observe.triton_metrics import MetricsChoice
from qinfer.queue import nodes
from qinfer.queue.entries import Lane
from qinfer.scaling.work import LaneWork, SequenceWork, VersionWork
from qinfer.submission.memory import TensorMemory
from qinfer.traffic.canary import Trial, initial_state
from qinfer.traffic.endpoints import CanaryPlan, Endpoint, Role, Step, Target
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.store import DeclaredEndpoints
from qinfer.traffic.tally import ShadowOutcome, TargetTally
from qinfer_api.observe.metrics import MetricsSnapshot, scopes_of, shown_metrics
from qinfer_api.stages import TenantTally

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

ROUTE = {"accepted": 5, "paused_ms": 1500, "refused:conflict": 3, "replied:succeeded": 2, "unroutable:sink": 1}
NODE = nodes.parse_info(
    b"# Server\r\nredis_version:7.0.15\r\nrole:master\r\nloading:0\r\nmaxmemory:100\r\nmaxmemory_policy:noeviction\r\n"
    b"used_memory:90\r\nmem_not_counted_for_evict:10\r\nevicted_keys:3\r\naof_last_write_status:err\r\n"
    b"rdb_last_bgsave_status:ok\r\nconnected_clients:7\r\nmaxclients:50\r\nblocked_clients:2\r\nrejected_connections:4\r\n"
    b"total_error_replies:9\r\nerrorstat_MISCONF:count=6\r\nconnected_slaves:3\r\nslave0:ip=10.0.0.2,port=6379,state=online,offset=990,lag=0\r\n"
    b"slave1:ip=10.0.0.3,port=6379,state=online,offset=400,lag=5\r\n"
    b"slave2:ip=10.0.0.4,port=6379,state=send_bulk,offset=0,lag=0\r\nmaster_repl_offset:1000\r\n"
)
M1 = (("model", "m"), ("version", "1"))
READY = VersionState(State.READY, 1)
OURS = (("model", "m"), ("process", "g"), ("version", "1"))


def series(tally: GatewayTally, snapshot: MetricsSnapshot, tenants: TenantTally | None = None) -> Series:
    """Parses the text as Prometheus does: (sample name, sorted labels) → value."""
    more = tenants.families() if tenants is not None else ()
    families = text_string_to_metric_families(render(shown_metrics(tally, snapshot, more=more)).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def work_of(model: str, entries: dict[str, int], ages_s: dict[str, float] | None = None, **more: Any) -> VersionWork:
    """Returns the work of a model's version 1 by lane."""
    lanes = tuple(
        LaneWork(lane=Lane(model, 1, name), entries=count, oldest_age_s=(ages_s or {}).get(name, 0.0))
        for name, count in entries.items()
    )
    return VersionWork(model=model, version=1, lanes=lanes, **more)


def busy() -> tuple[GatewayTally, MetricsSnapshot]:
    tally = GatewayTally("g")
    for seconds in (0.0001, 0.004, 0.2, 100.0):
        tally.count_answered("m", 1, seconds)
    tally.failed("m", 1, ErrorCode.QUEUE_FULL)
    worker = StatsTally()
    worker.executed(6, [1_000_000, 2_000_000, 70 * 10**9], 1_000_000, 8_000_000, 1_000_000)
    worker.failed("inference_failed", 2)
    worker.buried()
    return tally, MetricsSnapshot(
        stats={("m", 1): worker.drain(), ("idle", 2): {}},
        work=[work_of("m", {"p1": 7})],
        ready={("m", 1): True, ("idle", 2): False},
        workers=[WorkerRecord(id="w", started_at=0.0, models={}, executing=3)],
    )


def test_the_gateway_counts_answers_and_failures() -> None:
    """Requests include failures; failures have their reason; durations are of answers with outputs."""
    shown = series(*busy())

    assert shown[catalogue.REQUESTS.name, OURS] == 5
    assert shown[catalogue.REQUEST_FAILURES.name, (*OURS[:2], ("reason", "queue_full"), OURS[2])] == 1
    assert shown[f"{catalogue.REQUEST_DURATION.name}_count", OURS] == 4
    assert shown[f"{catalogue.REQUEST_DURATION.name}_sum", OURS] == 100.2041


def test_requests_in_flight_are_asked_for_at_the_scrape() -> None:
    """The gauge calls the gateway back."""
    tally = GatewayTally("g")
    tally.in_flight = lambda: 42

    assert series(tally, MetricsSnapshot())[catalogue.REQUESTS_IN_FLIGHT.name, (("process", "g"),)] == 42


def test_shared_numbers_are_shown() -> None:
    """Backlog by lane, workers, readiness, and what workers counted, in base units."""
    shown = series(*busy())

    assert shown[catalogue.BACKLOG.name, (("lane", "p1"), *M1)] == 7
    assert shown[catalogue.WORKER_UP.name, (("device", "cpu"), ("worker", "w"))] == 1
    assert shown[catalogue.WORKER_EXECUTING.name, (("worker", "w"),)] == 3
    assert shown[catalogue.MODEL_READY.name, M1] == 1
    assert shown[catalogue.MODEL_READY.name, (("model", "idle"), ("version", "2"))] == 0
    assert shown[catalogue.EXECUTED_REQUESTS.name, M1] == 3
    assert shown[catalogue.EXECUTION_FAILURES.name, (M1[0], ("reason", "inference_failed"), M1[1])] == 2
    assert shown[catalogue.DEAD_LETTERS_TOTAL.name, M1] == 1
    assert shown[f"{catalogue.QUEUE_WAIT.name}_sum", M1] == 70.003
    assert shown[f"{catalogue.EXECUTION.name}_sum", M1] == 0.01
    assert shown[f"{catalogue.BATCH_SIZE.name}_sum", M1] == 6
    assert shown[f"{catalogue.BATCH_SIZE.name}_count", M1] == 1


def test_a_model_that_did_nothing_has_its_histograms() -> None:
    """Series exist from the start, at zero, so that rates are right from the first request on."""
    shown = series(*busy())

    assert shown[f"{catalogue.QUEUE_WAIT.name}_count", (("model", "idle"), ("version", "2"))] == 0


def test_histograms_are_cumulative() -> None:
    """Buckets of a series grow with their bound, and the infinite one is the count."""
    shown = series(*busy())
    grouped: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    for (name, labels), value in shown.items():
        if name.endswith("_bucket"):
            rest = tuple(pair for pair in labels if pair[0] != "le")
            grouped.setdefault((name, rest), []).append((float(dict(labels)["le"]), value))

    assert len(grouped) == 13
    for (name, labels), pairs in grouped.items():
        ordered = sorted(pairs)

        assert all(a[1] <= b[1] for a, b in pairwise(ordered))
        assert ordered[-1] == (float("inf"), shown[name.replace("_bucket", "_count"), labels])


def test_every_metric_has_help_and_follows_the_conventions() -> None:
    """One prefix, counters end in _total, each family has a help text and appears once."""
    text = render(shown_metrics(*busy())).decode()
    text, triton = text.split("# HELP nv_", 1)
    typed = [line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE ")]
    helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP ") and len(line.split()) > 3]

    assert [name for name, _ in typed] == helped
    assert len(set(helped)) == len(helped)
    assert all(name.startswith("qinfer_") for name in helped)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in typed)
    assert text.endswith("\n")
    assert triton.endswith("\n")


def test_an_objective_counts_what_the_server_answers_for() -> None:
    """Errors of the server and late answers miss it, what callers did wrong is not counted; from 0 on."""
    tally = GatewayTally("g")
    key = {"model": "m", "process": "g", "version": "1"}
    tally.aim({("m", 1): Objective(0.5, 0.99), ("idle", 2): Objective(1.0, 0.9)})
    for seconds in (0.1, 0.5, 0.6, 70.0):
        tally.count_answered("m", 1, seconds)
    for code in (ErrorCode.MODEL_NOT_READY, ErrorCode.BROKER_UNAVAILABLE, ErrorCode.INVALID_REQUEST):
        tally.failed("m", 1, code)

    shown = series(tally, MetricsSnapshot())

    assert shown[catalogue.SLO_REQUESTS.name, tuple(sorted(key.items()))] == 6
    assert shown[catalogue.SLO_MISSED.name, tuple(sorted(key.items()))] == 4
    idle = tuple(sorted({**key, "model": "idle", "version": "2"}.items()))
    assert [shown[info.name, idle] for info in (catalogue.SLO_REQUESTS, catalogue.SLO_MISSED)] == [0, 0]


def test_tenants_without_requests_in_flight_have_none() -> None:
    """A zero each, also of those that share a series: dashboards offer the tenants that are there."""
    tenants = TenantTally(1, "g")
    for name in ("first", "second"):
        tenants.failed(name, "m", "queue_full")

    shown = series(GatewayTally("g"), MetricsSnapshot(), tenants)

    in_flight = {labels: value for (name, labels), value in shown.items() if name == catalogue.TENANT_IN_FLIGHT.name}
    assert in_flight == {(("process", "g"), ("tenant", name)): 0 for name in ("first", "(others)")}


def test_an_objective_that_changes_counts_from_then_on() -> None:
    """A counter never falls because the threshold was raised."""
    tally = GatewayTally("g")
    tally.aim({("m", 1): Objective(0.5, 0.99)})
    tally.count_answered("m", 1, 0.7)
    tally.aim({("m", 1): Objective(1.0, 0.99)})
    tally.count_answered("m", 1, 0.7)

    shown = series(tally, MetricsSnapshot())

    assert shown[catalogue.SLO_MISSED.name, (("model", "m"), ("process", "g"), ("version", "1"))] == 1


def test_labels_are_escaped() -> None:
    """A model's name may hold quotes and backslashes."""
    tally = GatewayTally("g")
    tally.count_answered('a"b\\c\n', 1, 0.1)

    assert (
        series(tally, MetricsSnapshot())[
            catalogue.REQUESTS.name, (("model", 'a"b\\c\n'), ("process", "g"), ("version", "1"))
        ]
        == 1
    )


def test_without_the_store_the_gateways_own_numbers_are_shown() -> None:
    """And a gauge says why the others are missing."""
    tally, _ = busy()

    shown = series(tally, MetricsSnapshot(store_up=False))

    assert shown[catalogue.STORE_UP.name, (("process", "g"),)] == 0
    assert shown[catalogue.REQUESTS.name, OURS] == 5


def everything() -> tuple[GatewayTally, MetricsSnapshot]:
    """A gateway and an installation that have something to show of each metric."""
    tally, busy_snapshot = busy()
    gpu = GpuUse(
        number=1,
        uuid="GPU-1",
        memory_used_bytes=10,
        memory_total_bytes=80,
        utilization=0.25,
        power_w=71.5,
        energy_j=9.0,
    )
    fields = dict(busy_snapshot.stats["m", 1]) | {"job_rows_done": 7, "job_rows_failed": 2, "redeliveries": 1}
    fields |= {"job_put_off:store_unavailable": 3}
    fields |= {"label_queued": 9, "label_pushed": 2, "label_failed:refused": 1}
    fields |= {"cache_hit_count": 2, "cache_hit_ns": 9000, "cache_miss_count": 1, "cache_miss_ns": 4000}
    publishing = ModelCounts()
    publishing.published("m", 1, 3_000_000)
    add(fields, publishing.drain()["m", 1])
    return tally, MetricsSnapshot(
        stats={("m", 1): fields},
        work=[work_of("m", {"p1": 7, "bulk2": 3}, {"p1": 2.5}, rows=40, work_s=4.5)],
        ready={("m", 1): True},
        load_failed={("m", 1): True},
        objectives={("m", 1): Objective(0.5, 0.99)},
        workers=[
            WorkerRecord(
                id="w",
                started_at=0.0,
                models={"m": {1: READY, 2: READY, 3: VersionState(State.LOADING, 1)}},
                device="cpu, gpu 1",
                executing=3,
                renewals=11,
                leases_lost=1,
                cpu_s=12.5,
                memory_bytes=4096,
                gpus=(gpu,),
                busy={"m": {1: 3}},
                load_s={"m": {1: 0.5}},
                tensor_bytes=64,
                tensor_ways={"memory": 5},
            )
        ],
        letters={("m", 1): 2, ("m", 0): 1},
        sequences=[SequenceWork(model="m", open=5, waiting=2, handed_over=8, lost=1, slots=1)],
        jobs={"running": 1},
        scaled={"up": 4, "down": 3},
        wanted_workers=2,
        host=HostUse(0.5, 100, 50),
        use=ProcessUse(1.5, 2048),
        features=[
            *families({"r": RouteTotals(ROUTE, processes=2, unacknowledged=7, unconfirmed=4, connected={"source": 1})}),
            *nodes.families([nodes.RedisNode("h:1", NODE), nodes.RedisNode("h:2", None)]),
        ],
        labeling={"m": 6},
    )


def test_what_workers_and_queues_tell() -> None:
    """Each number of the snapshot under its name."""
    shown = series(*everything())

    def value(info: catalogue.Info, **labels: str) -> float:
        return shown[info.name, tuple(sorted(labels.items()))]

    model = {"model": "m", "version": "1"}
    assert value(catalogue.OLDEST_AGE, lane="p1", **model) == 2.5
    assert value(catalogue.BACKLOG, lane="bulk2", **model) == 3
    assert value(catalogue.BACKLOG_ROWS, **model) == 40
    assert value(catalogue.BACKLOG_WORK, **model) == 4.5
    assert value(catalogue.EXECUTING, **model) == 3
    assert value(catalogue.REDELIVERIES, **model) == 1
    assert value(catalogue.MODEL_LOAD_FAILED, **model) == 1
    assert value(catalogue.SLO_LATENCY, **model) == 0.5
    assert value(catalogue.SLO_TARGET, **model) == 0.99
    assert value(catalogue.JOB_ROWS, outcome="done", **model) == 7
    assert value(catalogue.JOB_ROWS, outcome="failed", **model) == 2
    assert value(catalogue.JOB_PUT_OFF, reason="store_unavailable", **model) == 3
    assert value(catalogue.DEAD_LETTERS, **model) == 2
    assert value(catalogue.DEAD_LETTERS, model="m", version="") == 1
    assert value(catalogue.SEQUENCES_OPEN, model="m") == 5
    assert value(catalogue.SEQUENCES_WAITING, model="m") == 2
    assert value(catalogue.SEQUENCES_HANDED_OVER, model="m") == 8
    assert value(catalogue.SEQUENCES_LOST, model="m") == 1
    assert value(catalogue.JOBS, state="running") == 1
    assert value(catalogue.AUTOSCALE_DECISIONS, direction="up") == 4
    assert value(catalogue.AUTOSCALE_TARGET) == 2
    assert value(catalogue.WORKER_READY_MODELS, worker="w") == 2
    assert value(catalogue.WORKER_RENEWALS, worker="w") == 11
    assert value(catalogue.WORKER_LEASES_LOST, worker="w") == 1
    assert value(catalogue.WORKER_CPU, worker="w") == 12.5
    assert value(catalogue.WORKER_MEMORY, worker="w") == 4096
    assert value(catalogue.WORKER_SEGMENT_BYTES, worker="w") == 64
    assert value(catalogue.WORKER_SEGMENT_REQUESTS, worker="w", way="memory") == 5
    assert value(catalogue.DEVICE_MEMORY_USED, worker="w", device="gpu 1") == 10
    assert value(catalogue.DEVICE_UTILIZATION, worker="w", device="gpu 1") == 0.25
    assert value(catalogue.BRIDGE_ACCEPTED, route="r") == 5
    assert value(catalogue.BRIDGE_PAUSED, route="r") == 1.5
    assert value(catalogue.BRIDGE_REFUSED, reason="conflict", route="r") == 3
    assert value(catalogue.BRIDGE_REPLIED, route="r", state="succeeded") == 2
    assert value(catalogue.BRIDGE_UNACKNOWLEDGED, route="r") == 7
    assert value(catalogue.BRIDGE_UNCONFIRMED, route="r") == 4
    assert value(catalogue.BRIDGE_CONNECTED, connection="source", route="r") == 1
    assert value(catalogue.BRIDGE_PROCESSES, route="r") == 2
    assert value(catalogue.LABEL_WAITING, model="m") == 6
    assert value(catalogue.LABEL_QUEUED, **model) == 9
    assert value(catalogue.LABEL_PUSHED, **model) == 2
    assert value(catalogue.LABEL_FAILED, reason="refused", **model) == 1
    assert value(catalogue.LABEL_FAILED, reason="not_queued", **model) == 0
    assert value(catalogue.PROCESS_CPU, process="g") == 1.5
    assert shown["qinfer_publish_seconds_sum", M1] == 0.003
    assert shown["qinfer_assemble_seconds_sum", M1] == 0.001


def test_what_a_node_of_redis_tells() -> None:
    """Memory without what Redis does not count, the worst of the replicas that follow; a silent node is only down."""
    found = {key: value for key, value in series(*everything()).items() if key[0].startswith("qinfer_redis_")}
    of = {
        name.removeprefix("qinfer_redis_"): value
        for (name, labels), value in found.items()
        if dict(labels) == {"node": "h:1"}
    }

    assert of == {
        "up": 1,
        "loading": 0,
        "memory_used_bytes": 90,
        "memory_max_bytes": 100,
        "memory_used_ratio": 0.8,
        "evicted_keys_total": 3,
        "replicas": 2,
        "replica_lag_bytes": 600,
        "replica_lag_seconds": 5,
        "clients": 7,
        "clients_max": 50,
        "blocked_clients": 2,
        "rejected_connections_total": 4,
    }
    assert found["qinfer_redis_persistence_failed", (("file", "aof"), ("node", "h:1"))] == 1
    assert found["qinfer_redis_persistence_failed", (("file", "rdb"), ("node", "h:1"))] == 0
    refused = {dict(labels)["error"]: value for (name, labels), value in found.items() if "refused_writes" in name}
    assert refused == {"MISCONF": 6, "NOREPLICAS": 0, "OOM": 0}
    assert [(name, value) for (name, labels), value in found.items() if ("node", "h:2") in labels] == [
        ("qinfer_redis_up", 0)
    ]


def test_tenants_have_series_up_to_a_number() -> None:
    """Those that come first; the others share one, however many there are."""
    tenants = TenantTally(2, "g")
    tenants.in_flight = lambda: {"t0": 3, "t1": 0, "t7": 4, "t8": 5, "t9": 0}
    for number in range(50):
        tenants.count_answered(f"t{number}", "m", 0.3)
    tenants.failed("t0", "m", "quota_exceeded")
    tenants.failed("t30", "m", "queue_full")
    tenants.accepted("t1", "m")

    shown = series(GatewayTally("g"), MetricsSnapshot(), tenants)

    def of(metric: str) -> dict[str, float]:
        return {dict(labels)["tenant"]: value for (name, labels), value in shown.items() if name == metric}

    assert of("qinfer_tenant_requests_total") == {"t0": 2, "t1": 2, "(others)": 49}
    assert of("qinfer_tenant_requests_in_flight") == {"t0": 3, "t1": 0, "(others)": 9}
    failures = {
        (dict(labels)["tenant"], dict(labels)["reason"]): value
        for (name, labels), value in shown.items()
        if name == "qinfer_tenant_request_failures_total"
    }
    assert failures == {("t0", "quota_exceeded"): 1, ("(others)", "queue_full"): 1}
    latency = "qinfer_tenant_request_duration_seconds_bucket"
    assert shown[latency, (("le", "0.5"), ("process", "g"), ("tenant", "(others)"))] == 48
    assert shown[latency, (("le", "0.25"), ("process", "g"), ("tenant", "t0"))] == 0


def test_openmetrics_is_what_its_parser_takes() -> None:
    """Strict as it is: with all metrics, the exemplars of buckets, and Triton's counters, which have no suffix."""
    tally, snapshot = everything()
    tally.count_answered("m", 1, 0.3)
    tally.traced("m", 1, 0.3, "0af7651916cd43dd8448eb211c80319c")

    wanted = MetricsChoice(quantiles=(0.5,), histogram=True)
    page = render(shown_metrics(tally, snapshot, wanted=wanted), as_openmetrics=True).decode()
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(page)}  # type: ignore[no-untyped-call]

    shown = families["qinfer_request_duration_seconds"].samples
    (sample,) = [sample for sample in shown if sample.exemplar]
    assert (sample.labels["le"], sample.exemplar.value) == ("0.5", 0.3)
    assert sample.exemplar.labels == {"trace_id": "0af7651916cd43dd8448eb211c80319c"}
    assert families["qinfer_slo_requests"].type == "counter"
    assert families["nv_inference_request_success"].type == "unknown"
    assert page.endswith("# EOF\n")
    assert "trace_id" not in render(shown_metrics(tally, snapshot)).decode()


def test_a_route_without_a_bridge_keeps_its_counts() -> None:
    """What nobody has in hand is not shown, not even as 0; that nobody serves the route is."""
    shown = {
        name
        for (name, labels) in series(
            GatewayTally(), MetricsSnapshot(features=list(families({"r": RouteTotals(ROUTE)})))
        )
        if ("route", "r") in labels
    }

    assert {catalogue.BRIDGE_ACCEPTED.name, catalogue.BRIDGE_RECEIVED.name, catalogue.BRIDGE_PROCESSES.name} <= shown
    assert not shown & {info.name for info in catalogue.OF_BRIDGES if info.kind == "gauge"}


def test_a_bridge_shows_its_own_with_its_name() -> None:
    """The same series as of the cluster, from the port of the bridge, but for how many live."""
    tally = RouteTally("r", received=3, refused={"conflict": 1}, paused_s=0.5, connected={"source": True})
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BridgeCollector("b1", [tally]))
    page = text_string_to_metric_families(generate_latest(registry).decode())
    shown = {sample.name: (sample.labels, sample.value) for family in page for sample in family.samples}

    assert shown[catalogue.BRIDGE_RECEIVED.name] == ({"process": "b1", "route": "r"}, 3)
    assert shown[catalogue.BRIDGE_PAUSED.name] == ({"process": "b1", "route": "r"}, 0.5)
    assert shown[catalogue.BRIDGE_REFUSED.name] == ({"process": "b1", "reason": "conflict", "route": "r"}, 1)
    assert shown[catalogue.BRIDGE_CONNECTED.name] == ({"connection": "source", "process": "b1", "route": "r"}, 1)
    assert catalogue.BRIDGE_PROCESSES.name not in shown
    assert all(list(info.labels) == sorted(info.labels) and "process" in info.labels for info in catalogue.OF_BRIDGES)


def test_models_without_labeling_have_no_series_of_it() -> None:
    """They would be many, and all 0."""
    page = render(shown_metrics(GatewayTally(), MetricsSnapshot(stats={("m", 1): {"success_count": 1}}))).decode()

    assert "qinfer_labeling_queued_tasks_total{" not in page


def test_what_expired_and_what_was_refused() -> None:
    """Expired, whoever noticed; refused at the door, each reason from 0 on."""
    fields = {
        "failures:deadline_exceeded": 2,
        "refusals:deadline_exceeded": 3,
        "refusals:queue_full": 4,
        "refusals:cancelled": 5,
    }
    shown = series(GatewayTally(), MetricsSnapshot(stats={("m", 1): fields}))

    assert shown[catalogue.EXPIRED.name, M1] == 5
    refused = {
        dict(labels)["reason"]: value for (name, labels), value in shown.items() if name == catalogue.REFUSED.name
    }
    assert refused == {"queue_full": 4, "deadline_infeasible": 0, "quota_exceeded": 0}


def test_how_full_batches_are() -> None:
    """Rows divided by the model's largest batch; a model that takes none has no such series to speak of."""
    worker = StatsTally()
    worker.executed(3, [0], 0, 0, 0)
    worker.max_rows = 8
    worker.executed(2, [0], 0, 0, 0)
    worker.executed(8, [0], 0, 0, 0)

    shown = series(GatewayTally(), MetricsSnapshot(stats={("m", 1): worker.drain()}))

    assert shown["qinfer_batch_fill_ratio_count", M1] == 2
    assert shown["qinfer_batch_fill_ratio_sum", M1] == 1.25
    assert shown["qinfer_batch_fill_ratio_bucket", (("le", "0.25"), *M1)] == 1


def test_no_series_is_in_both_scopes() -> None:
    """And each is in the one that the catalogue says; without a scope all are shown."""
    tally, snapshot = everything()
    of_name = {info.name: info for info in catalogue.ALL}

    def shown(*scopes: MetricScope) -> dict[str, int]:
        page = render(shown_metrics(tally, snapshot, scopes)).decode()
        return {line.split()[2]: page.count(f"\n{line.split()[2]}") for line in page.splitlines() if "# TYPE" in line}

    cluster, process = shown(MetricScope.CLUSTER), shown(MetricScope.PROCESS)

    assert not cluster.keys() & process.keys()
    assert cluster | process == shown(MetricScope.CLUSTER, MetricScope.PROCESS)
    for scope, names in ((MetricScope.CLUSTER, cluster), (MetricScope.PROCESS, process)):
        infos = [of_name[name] for name in names]
        assert {info.scope for info in infos} == {scope}
        own = [info for info in infos if not info.name.startswith("nv_")]
        assert all(("process" in info.labels) == (scope is MetricScope.PROCESS) for info in own)


def counted_targets() -> TargetTally:
    """Returns counts of everything that is counted by endpoint."""
    stable = Target(model="m", version=1, role=Role.STABLE)
    endpoints = Endpoints(Mock())
    plan = CanaryPlan(steps=(Step(weight=0.1),))
    endpoints.show(DeclaredEndpoints({"e": Endpoint(name="e", targets=(stable,), canary=plan, revision=7)}, 7))
    endpoints.trials = {"e": Trial(state=initial_state(plan, 1, 2, 7, 0.0))}
    tally = TargetTally(endpoints, "g")
    tally.count_answered(("e", "m:1"), 0.1, Response(request_id="r"))
    tally.shadow(("e", "m:2"), ShadowOutcome.AGREED)
    tally.failed(("e", "m:1"), ErrorCode.QUEUE_FULL)
    return tally


def kept_tensors() -> TensorMemory:
    """Returns counts of tensors in memory."""
    tensors = TensorMemory(Mock(own=Mock(owner="g", held_bytes=1, paged_bytes=2, oldest_s=0.5)), 1, Mock())
    tensors.ways["memory"] += 1
    return tensors


def test_the_catalogue_is_what_is_shown() -> None:
    """Every metric of it, of its kind, with its labels and no others."""
    tally, snapshot = everything()
    tenants = TenantTally(1, "g")
    tenants.in_flight = lambda: {"acme": 1}
    tenants.count_answered("acme", "m", 0.1)
    tenants.failed("acme", "m", ErrorCode.QUEUE_FULL)
    shares = tenants.of_shares([({"lane": "p1", "model": "m", "version": "1"}, ["acme"], 3, 1.0)])
    snapshot = replace(snapshot, features=[*snapshot.features, *shares])
    more = [*tenants.families(), *counted_targets().families(), *kept_tensors().families()]
    page = render(
        shown_metrics(tally, snapshot, wanted=MetricsChoice(quantiles=(0.5,), histogram=True), more=more)
    ).decode()
    families = {(family.name, family.type): family for family in text_string_to_metric_families(page)}

    for info in catalogue.ALL:
        assert list(info.labels) == sorted(info.labels), info.name
        family = families.pop((info.name.removesuffix("_total"), info.kind))
        assert family.documentation == info.text
        assert family.samples, info.name
        labels = {tuple(sorted(sample.labels.keys() - {"le", "quantile"})) for sample in family.samples}
        assert labels == {info.labels}, info.name
    assert not families
    assert len({info.name for info in catalogue.ALL}) == len(catalogue.ALL)


@pytest.mark.parametrize("text", ["Cluster", "all", "x" * 1000])
def test_a_wrong_scope_is_refused(text: str) -> None:
    """The error names the choices, and not all of a long value."""
    with pytest.raises(
        InvalidRequest, match=r"^unknown scope '\w{1,60}': it must be cluster or process, or be left out"
    ):
        scopes_of(text)
