"""The reference page of the metrics, generated from the catalogue that the programs use."""

from collections.abc import Callable, Iterable

from qinfer.observe import catalogue, latencies, triton_metrics
from qinfer.observe.catalogue import Info, MetricScope

HEAD = """
# Metrics

`GET /metrics` on any gateway returns metrics in Prometheus' text format, on the port of `QINFER_METRICS__PORT` (8002)
and on that of HTTP; neither requires a key.

## Scopes

| query | series | scrape |
|---|---|---|
| `/metrics?scope=cluster` | those of the whole installation, computed from Redis | once, from any gateway |
| `/metrics?scope=process` | those that the answering gateway counts itself | from each gateway |
| `/metrics` | both | if there is only one gateway |

Each series is in one of the two scopes. Every gateway returns the same numbers for the cluster: scrape them through the
service or load balancer, as one target, so that nothing is counted twice. Series of a process have the process' name in
the label `process`, except the three of the machine with Triton's names: combine them with `sum`. A restarted gateway
has another name, so that its counters never decrease.

Counters of the cluster are totals that workers, gateways and bridges add to Redis about once a second. They outlive
these processes: they never decrease while Redis keeps its data. If a process is killed, the counts that it had not
added yet, about a second of counts, are missing. A counter of one worker, with the label `worker`, ends with it: a
restarted worker is a new one. `increase` and `rate` of such counters are correct; to compare totals, use those of the
models.

While Redis is away, or does not answer within 3 s, a gateway still answers: `qinfer_store_up` is 0, and totals and
backlogs are omitted, not 0. Alerts on them must distinguish a missing series from a small value.

A scrape takes a few round trips to Redis, independent of the number of models. Depths and ages are current; values that
workers report (`qinfer_worker_*`, `qinfer_executing_requests`, devices) are up to a few seconds old.

## Example queries

- Seconds of work, for scaling: `sum by (model) (qinfer_backlog_work_seconds)`. It is correct without any worker.
- Mean batch size: `rate(qinfer_batch_size_rows_sum[1m]) / rate(qinfer_batch_size_rows_count[1m])`.
- Used share of each batch: `rate(qinfer_batch_fill_ratio_sum[5m]) / rate(qinfer_batch_fill_ratio_count[5m])`.
- Refusals: `sum by (model, reason) (rate(qinfer_refused_requests_total[5m]))`.
"""
CLUSTER_HEAD = """
## Metrics of the cluster
"""
PROCESS_HEAD = """
## Metrics of a process
"""
TRITON_HEAD = f"""
## Triton's names

The same numbers are also exported under the names that dashboards for Triton use, with Triton's types and labels:
counters have no `_total`. Series of models exist, from 0 on, while a version is desired. They count for the
whole installation since the version was first loaded: a reload or a restart does not reset them. Durations are
those of successful requests.

`nv_inference_pending_request_count` is the number of requests in the queue, and of steps of sequences, without those
that execute: a read of the metrics asks the workers, at most four times a second. Of a worker that does not answer
within 0.25 s it is what executed at its last heartbeat. `nv_model_load_duration_secs` is the load time of the worker
whose last load took longest. `nv_cpu_*` are of the machine of the answering gateway (scope `process`), on Linux; the
utilisation is that since the previous scrape. `nv_gpu_*` and `nv_energy_consumption` are of the GPUs that workers
report, each GPU once; workers read them with NVML every 2 seconds if `pip install 'qinfer-ml[gpu]'` was run and
NVIDIA's driver is installed. Otherwise these series do not exist.

Metrics of latencies are selected as with Triton's `--metrics-config`; gateways and workers need the same settings:

| setting | Triton's | metrics, and default |
|---|---|---|
| `QINFER_METRICS__COUNTER_LATENCIES` | `counter_latencies` | `nv_inference_*_duration_us`, counters of the cache; on |
| `QINFER_METRICS__SUMMARY_LATENCIES` | `summary_latencies` | the summaries, `nv_*_summary_*`; off |
| `QINFER_METRICS__SUMMARY_QUANTILES` | `summary_quantiles` | the quantiles of the summaries |
| `QINFER_METRICS__HISTOGRAM_LATENCIES` | `histogram_latencies` | `nv_inference_first_response_histogram_ms`; off |

Quantiles of an installation cannot be computed from those of its workers. Therefore workers count each latency in a
bucket, each {latencies.GROWTH - 1:.0%} wider than the previous one, and the counts are added up. A quantile is the
middle of its bucket: it differs from the true value by at most {latencies.ERROR:.1%}; a latency of a microsecond or
less is shown as 1. The error in `summary_quantiles`, which is one of rank, has no effect. Quantiles cover the last
{latencies.WINDOW_S:.0f} seconds; if the previous scrape of the gateway is longer ago, the time since then; and in the
first minute of the gateway, all time. Without requests they are `Nan`. Requests of workers that did not count, because
the setting was off, are not included. Without the setting nothing is counted, and there is no cost.

The buckets of the histogram are Triton's ({", ".join(map(str, latencies.FIRST_RESPONSE_BUCKETS_MS))} ms). Triton has
it only for decoupled models, qinfer for every model: if a model answers once, it is the time until that answer, from
entering the queue.

Series of a model have a label for each of its `metric_tags`, with `_` in front. The metrics of the cache are those of
models with `response_cache`, where the server has a cache, and of models that have used it. As in a Triton built
without GPUs, there are no metrics of pinned memory.
"""
REASONS_HEAD = """
This table maps error codes, the reasons of qinfer's own metrics, to reasons of `nv_inference_request_failure`.
For codes that a model may use for its own errors, the reason depends on who counted the failure, a worker or a gateway.

| reason | codes |
|---|---|"""
BRIDGE_HEAD = """
## Bridge

The totals of all [bridges](../how-to/bridge-a-queue.md) are among the metrics of the cluster above: their counters
outlive the bridges, and a route is shown until 30 days after its last report; gauges are sums over the bridges that
reported within the last 15 seconds. Each bridge also serves its own series, to show one of several bridges: `GET
/metrics` on the port in its file. They have the same names and the label `process`; if both are scraped, select those
of the cluster with `process=""`.
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
    for reason in triton_metrics.FailureReason:
        codes = [
            f"`{code}`" + ("" if of.worker is of.gateway else f" ({'worker' if of.worker is reason else 'gateway'})")
            for code, of in triton_metrics.REASONS.items()
            if reason in of
        ]
        rest = ["all others"] if reason is triton_metrics.FailureReason.OTHER else []
        rows.append(f"| {reason} | {', '.join([*codes, *rest])} |")
    return rows
