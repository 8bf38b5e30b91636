"""The reference page of the metrics, made of the catalogue that the programs show them by."""

from collections.abc import Callable, Iterable

from qinfer.observe import catalogue, latencies, triton_metrics
from qinfer.observe.catalogue import Info, MetricScope

HEAD = """
# Metrics

`GET /metrics` on any gateway, in Prometheus' text format, on the port of `QINFER_METRICS__PORT` (8002) and on that of
HTTP; neither asks for a key.

## Scopes

| query | what it gives | scrape it |
|---|---|---|
| `/metrics?scope=cluster` | what is true of the whole installation, made of what is in Redis | once, from any gateway |
| `/metrics?scope=process` | what the gateway that answers counts itself | from each gateway |
| `/metrics` | both | where there is one gateway |

Each series is in one of the two scopes. Every gateway gives the same numbers of the cluster: scrape them through the
service or load balancer, as one target, and nothing is counted twice. Those of a process have its name in the label
`process`, but for the three of the machine that have Triton's names: add them up with `sum`. A gateway that is started
again has another name, so its counters never go back.

Counters of the cluster are totals that workers, gateways and bridges add to Redis about once a second. They outlive
whoever counted: they never fall while Redis keeps its data, and what a killed process had not added yet, about a second
of counts, is missing. A counter of one worker, with the label `worker`, ends with that worker: a worker that is started
again is another one. `increase` and `rate` of such counters are right; to compare totals use those of the models.

While Redis is away, or does not answer within 3 s, a gateway still answers: `qinfer_store_up` is 0, and totals and
backlogs are left out rather than 0. Make alerts on them tell a missing series from a small one.

A scrape takes a few round trips to Redis, however many models there are. Depths and ages are of the moment; what
workers say of themselves (`qinfer_worker_*`, `qinfer_executing_requests`, devices) is up to a few seconds old.

## Words for queries

- Seconds of work, by which to scale: `sum by (model) (qinfer_backlog_work_seconds)`. It is right with no worker.
- Mean batch: `rate(qinfer_batch_size_rows_sum[1m]) / rate(qinfer_batch_size_rows_count[1m])`.
- Share of each batch that was used: `rate(qinfer_batch_fill_ratio_sum[5m]) / rate(qinfer_batch_fill_ratio_count[5m])`.
- Refusals: `sum by (model, reason) (rate(qinfer_refused_requests_total[5m]))`.
"""
CLUSTER_HEAD = """
## Of the cluster
"""
PROCESS_HEAD = """
## Of a process
"""
TRITON_HEAD = f"""
## Triton's names

The same numbers once more, under the names that Triton's users have dashboards for, with Triton's types and labels:
counters have no `_total`. Those of models are there from 0 on as long as a version is to be loaded. They count what the
whole installation did since the version was first loaded: a reload or a restart does not set them back. Durations are
those of requests that succeeded.

`nv_inference_pending_request_count` is what is in the queue less what executed at the workers' last heartbeats, up to a
second ago; `nv_model_load_duration_secs` is that of the worker in which the last load took longest. `nv_cpu_*` are of
the machine of the gateway that is asked (scope `process`), on Linux; its utilisation is since the scrape before.
`nv_gpu_*` and `nv_energy_consumption` are of the GPUs that workers tell of, each GPU once; workers read them with NVML
every 2 seconds where `pip install 'qinfer-ml[gpu]'` and NVIDIA's driver are there. Else there are no such series.

Metrics of latencies can be chosen as with Triton's `--metrics-config`; give gateways and workers the same settings:

| setting | Triton's | what it shows, and whether it does by default |
|---|---|---|
| `QINFER_METRICS__COUNTER_LATENCIES` | `counter_latencies` | `nv_inference_*_duration_us`; on |
| `QINFER_METRICS__SUMMARY_LATENCIES` | `summary_latencies` | `nv_inference_*_summary_us`; off |
| `QINFER_METRICS__SUMMARY_QUANTILES` | `summary_quantiles` | the quantiles of the summaries |
| `QINFER_METRICS__HISTOGRAM_LATENCIES` | `histogram_latencies` | `nv_inference_first_response_histogram_ms`; off |

Quantiles of an installation can't be computed from those of its workers, so workers count each latency in a bucket,
each {latencies.GROWTH - 1:.0%} wider than the one before, and those counts add up. A quantile is the middle of its
bucket: it differs from the true value by at most {latencies.ERROR:.1%} of it, wherever it lies; what takes a
microsecond or less is shown as 1. The error that `summary_quantiles` names, which is one of rank, has no effect.
Quantiles are of the last {latencies.WINDOW_S:.0f} seconds, as far as the gateway was asked meanwhile: of the time
since its last scrape, if that is longer ago; of all time in its first minute. Without requests they are `Nan`. Requests
of workers that did not count, because the setting was off, are left out. Without the setting nothing is counted, and
it costs nothing.

The buckets of the histogram are Triton's ({", ".join(map(str, latencies.FIRST_RESPONSE_BUCKETS_MS))} ms). Triton has it
for decoupled models only; here every model has it: where a model answers once, it is the time to that answer. The time
is from entering the queue.

There are no metrics of pinned memory or of a response cache, and no labels of `metric_tags`.
"""
REASONS_HEAD = """
The reasons of `nv_inference_request_failure`, by the code of the error, which is the reason of qinfer's own metrics.
For codes that a model may give its own errors it matters whether a worker counted the failure or a gateway.

| reason | codes |
|---|---|"""
BRIDGE_HEAD = """
## Bridge

All [bridges](../how-to/bridge-a-queue.md) together are among the metrics of the cluster above: their counters outlive
them, and a route is shown until 30 days after the last report of it; what they have in hand is the sum over those that
reported within the last 15 seconds. Each bridge also serves its own series, for a look at one of several: `GET
/metrics` on the port that its file names. They have the same names and the label `process`; where both are scraped, ask
for `process=""`.
"""


def metrics_page(notice: str) -> str:
    """Returns the text of `metrics.md`.

    Args:
        notice: What generated pages begin with.
    """
    lines = [
        notice + HEAD,
        CLUSTER_HEAD,
        *_table(lambda info: info.scope is MetricScope.CLUSTER and not _is_tritons(info)),
        PROCESS_HEAD,
        *_table(lambda info: info.scope is MetricScope.PROCESS and not _is_tritons(info)),
        TRITON_HEAD,
        *_table(_is_tritons),
        REASONS_HEAD,
        *_reasons(),
        BRIDGE_HEAD,
        *_rows(catalogue.OF_BRIDGES),
    ]
    return "\n".join(lines) + "\n"


def _is_tritons(info: Info) -> bool:
    return info.name.startswith("nv_")


def _table(is_shown: Callable[[Info], bool]) -> list[str]:
    return _rows(filter(is_shown, catalogue.ALL))


def _rows(infos: Iterable[Info]) -> list[str]:
    rows = [
        f"| `{info.name}` | {info.kind} | {', '.join(info.labels)} | {info.text.replace('|', chr(92) + '|')} |"
        for info in infos
    ]
    return ["| metric | type | labels | meaning |", "|---|---|---|---|", *rows]


def _reasons() -> list[str]:
    """Returns a row for each of Triton's reasons, with the codes that lead to it."""
    rows = []
    for reason in triton_metrics.Reason:
        codes = [
            f"`{code}`" + ("" if of.worker is of.gateway else f" ({'worker' if of.worker is reason else 'gateway'})")
            for code, of in triton_metrics.REASONS.items()
            if reason in of
        ]
        rest = ["all others"] if reason is triton_metrics.Reason.OTHER else []
        rows.append(f"| {reason} | {', '.join([*codes, *rest])} |")
    return rows
