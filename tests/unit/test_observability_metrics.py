"""The text of /metrics."""

from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from qinfer.errors import ErrorCode
from qinfer.observability import metrics
from qinfer.observability.metrics import GatewayTally, Snapshot, WorkerLoad, render
from qinfer.observability.stats import StatsTally

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

M1 = (("model", "m"), ("version", "1"))


def series(tally: GatewayTally, snapshot: Snapshot) -> Series:
    """Parses the text as Prometheus does: (sample name, sorted labels) → value."""
    families = text_string_to_metric_families(render(tally, snapshot).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def busy() -> tuple[GatewayTally, Snapshot]:
    tally = GatewayTally()
    for seconds in (0.0001, 0.004, 0.2, 100.0):
        tally.answered("m", 1, seconds)
    tally.failed("m", 1, ErrorCode.QUEUE_FULL)
    worker = StatsTally()
    worker.executed(6, [1_000_000, 2_000_000, 70 * 10**9], 1_000_000, 8_000_000, 1_000_000)
    worker.failed("inference_failed", 2)
    worker.buried()
    return tally, Snapshot(
        stats={("m", 1): worker.drain(), ("idle", 2): {}},
        depth={("m", 1, "p1"): 7},
        ready={("m", 1): True, ("idle", 2): False},
        workers={"w": WorkerLoad(device="cpu", executing=3)},
    )


def test_the_gateway_counts_answers_and_failures() -> None:
    """Requests include failures; failures have their reason; durations are of answers with outputs."""
    shown = series(*busy())

    assert shown[metrics.REQUESTS, M1] == 5
    assert shown[metrics.REQUEST_FAILURES, (M1[0], ("reason", "queue_full"), M1[1])] == 1
    assert shown[f"{metrics.REQUEST_DURATION}_count", M1] == 4
    assert shown[f"{metrics.REQUEST_DURATION}_sum", M1] == 100.2041


def test_requests_in_flight_are_asked_for_at_the_scrape() -> None:
    """The gauge calls the gateway back."""
    tally = GatewayTally()
    tally.in_flight = lambda: 42

    assert series(tally, Snapshot())[metrics.REQUESTS_IN_FLIGHT, ()] == 42


def test_shared_numbers_are_shown() -> None:
    """Backlog by lane, workers, readiness, and what workers counted, in base units."""
    shown = series(*busy())

    assert shown[metrics.BACKLOG, (("lane", "p1"), *M1)] == 7
    assert shown[metrics.WORKER_UP, (("device", "cpu"), ("worker", "w"))] == 1
    assert shown[metrics.WORKER_EXECUTING, (("worker", "w"),)] == 3
    assert shown[metrics.MODEL_READY, M1] == 1
    assert shown[metrics.MODEL_READY, (("model", "idle"), ("version", "2"))] == 0
    assert shown[metrics.EXECUTED_REQUESTS, M1] == 3
    assert shown[metrics.EXECUTION_FAILURES, (M1[0], ("reason", "inference_failed"), M1[1])] == 2
    assert shown[metrics.DEAD_LETTERS, M1] == 1
    assert shown[f"{metrics.QUEUE_WAIT}_sum", M1] == 70.003
    assert shown[f"{metrics.EXECUTION}_sum", M1] == 0.01
    assert shown[f"{metrics.BATCH_SIZE}_sum", M1] == 6
    assert shown[f"{metrics.BATCH_SIZE}_count", M1] == 1


def test_a_model_that_did_nothing_has_its_histograms() -> None:
    """Series exist from the start, at zero, so that rates are right from the first request on."""
    shown = series(*busy())

    assert shown[f"{metrics.QUEUE_WAIT}_count", (("model", "idle"), ("version", "2"))] == 0


def test_histograms_are_cumulative() -> None:
    """Buckets of a series grow with their bound, and the infinite one is the count."""
    shown = series(*busy())
    grouped: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    for (name, labels), value in shown.items():
        if name.endswith("_bucket"):
            rest = tuple(pair for pair in labels if pair[0] != "le")
            grouped.setdefault((name, rest), []).append((float(dict(labels)["le"]), value))

    assert len(grouped) == 7
    for (name, labels), pairs in grouped.items():
        ordered = sorted(pairs)

        assert all(a[1] <= b[1] for a, b in pairwise(ordered))
        assert ordered[-1] == (float("inf"), shown[name.replace("_bucket", "_count"), labels])


def test_every_metric_has_help_and_follows_the_conventions() -> None:
    """One prefix, counters end in _total, each family has a help text and appears once."""
    text = render(*busy()).decode()
    text, triton = text.split("# HELP nv_", 1)
    typed = [line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE ")]
    helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP ") and len(line.split()) > 3]

    assert [name for name, _ in typed] == helped
    assert len(set(helped)) == len(helped)
    assert all(name.startswith("qinfer_") for name in helped)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in typed)
    assert text.endswith("\n")
    assert triton.endswith("\n")


def test_names_that_clients_think_up_make_no_series() -> None:
    """Unknown models share one."""
    tally = GatewayTally()
    for number in range(100):
        tally.failed(f"guess{number}", number, ErrorCode.MODEL_NOT_FOUND)

    shown = series(tally, Snapshot())

    assert shown[metrics.REQUESTS, (("model", ""), ("version", ""))] == 100
    assert not any("guess" in str(key) for key in shown)


def test_labels_are_escaped() -> None:
    """A model's name may hold quotes and backslashes."""
    tally = GatewayTally()
    tally.answered('a"b\\c\n', 1, 0.1)

    assert series(tally, Snapshot())[metrics.REQUESTS, (("model", 'a"b\\c\n'), ("version", "1"))] == 1


def test_without_the_store_the_gateways_own_numbers_are_shown() -> None:
    """And a gauge says why the others are missing."""
    tally, _ = busy()

    shown = series(tally, Snapshot(store_up=False))

    assert shown[metrics.STORE_UP, ()] == 0
    assert shown[metrics.REQUESTS, M1] == 5
