"""Triton's metrics: its names, labels and texts (reference §4), made of the same numbers as qinfer's own.

They come from the statistics that everyone adds to the shared store, so that they only grow, whichever process dies,
and every gateway shows the same ones: combine gateways with `max`. Only CPU and memory are those of its own machine.
Counters have no `_total` and integers no `.0`, as in Triton; a client library for Prometheus would write both, so the
text is made here.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from qinfer.errors import ErrorCode
from qinfer.observability import stats
from qinfer.observability.host import HostUse

SUCCESS = "nv_inference_request_success"
FAILURE = "nv_inference_request_failure"
COUNT = "nv_inference_count"
EXEC_COUNT = "nv_inference_exec_count"
REQUEST_DURATION = "nv_inference_request_duration_us"
QUEUE_DURATION = "nv_inference_queue_duration_us"
INPUT_DURATION = "nv_inference_compute_input_duration_us"
INFER_DURATION = "nv_inference_compute_infer_duration_us"
OUTPUT_DURATION = "nv_inference_compute_output_duration_us"
PENDING = "nv_inference_pending_request_count"
LOAD_DURATION = "nv_model_load_duration_secs"
CPU_UTILIZATION = "nv_cpu_utilization"
CPU_MEMORY_TOTAL = "nv_cpu_memory_total_bytes"
CPU_MEMORY_USED = "nv_cpu_memory_used_bytes"

Key = tuple[str, int]
"""A model version: (model, version)."""


class Reason(StrEnum):
    """Why a request failed, as Triton tells it apart."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class _Reasons(NamedTuple):
    """The reason of a code: where a worker counted it, and where a gateway did."""

    worker: Reason
    gateway: Reason


_REJECTED = _Reasons(Reason.REJECTED, Reason.REJECTED)
_CANCELED = _Reasons(Reason.CANCELED, Reason.CANCELED)
_BACKEND = _Reasons(Reason.BACKEND, Reason.BACKEND)
_OF_MODEL = _Reasons(Reason.BACKEND, Reason.OTHER)  # codes that a model may give its own errors
_OTHER = _Reasons(Reason.OTHER, Reason.OTHER)

REASONS: Mapping[str, _Reasons] = {
    ErrorCode.QUEUE_FULL: _REJECTED,
    ErrorCode.QUOTA_EXCEEDED: _REJECTED,
    ErrorCode.DEADLINE_INFEASIBLE: _REJECTED,
    ErrorCode.DEADLINE_EXCEEDED: _REJECTED,
    ErrorCode.CANCELLED: _CANCELED,
    ErrorCode.INFERENCE_FAILED: _BACKEND,
    ErrorCode.OUTPUT_MISMATCH: _BACKEND,
    ErrorCode.INVALID_REQUEST: _OF_MODEL,
    ErrorCode.MODEL_NOT_FOUND: _OF_MODEL,
    ErrorCode.MODEL_NOT_READY: _OF_MODEL,
    ErrorCode.UNSUPPORTED_FEATURE: _OF_MODEL,
    ErrorCode.CONFLICT: _OF_MODEL,
}
"""Code of an error → Triton's reason; the codes that are not here are OTHER."""


class Sample(NamedTuple):
    """One line: labels in the order of their names, and a value."""

    labels: tuple[tuple[str, str], ...]
    value: int | float


class Family(NamedTuple):
    """One metric; `kind` is `counter` or `gauge`."""

    name: str
    kind: str
    text: str
    samples: list[Sample]


class _Counter(NamedTuple):
    """A counter that is one field of the statistics; `divisor` makes the field's unit the metric's."""

    name: str
    text: str
    field: str
    divisor: int = 1000  # ns → µs


_CACHED, _NOT_CACHED = "(includes cached requests)", "(does not include cached requests)"

_COUNTERS = (
    _Counter(COUNT, f"Number of inferences performed {_NOT_CACHED}", stats.INFERENCE_COUNT, 1),
    _Counter(EXEC_COUNT, f"Number of model executions performed {_NOT_CACHED}", stats.EXECUTION_COUNT, 1),
    _Counter(REQUEST_DURATION, f"Cumulative inference request duration in microseconds {_CACHED}", stats.SUCCESS_NS),
    _Counter(QUEUE_DURATION, f"Cumulative inference queuing duration in microseconds {_CACHED}", stats.QUEUE_NS),
    _Counter(INPUT_DURATION, f"Cumulative compute input duration in microseconds {_NOT_CACHED}", stats.INPUT_NS),
    _Counter(INFER_DURATION, f"Cumulative compute inference duration in microseconds {_NOT_CACHED}", stats.INFER_NS),
    _Counter(
        OUTPUT_DURATION, f"Cumulative inference compute output duration in microseconds {_NOT_CACHED}", stats.OUTPUT_NS
    ),
)


def families(
    statistics: Mapping[Key, Mapping[str, int]], pending: Mapping[Key, int], load_s: Mapping[Key, float]
) -> Iterator[Family]:
    """Yields Triton's metrics.

    Args:
        statistics: Model version → the fields of `observability.stats`. All counters of each are there, from 0 on.
        pending: Model version → requests that wait.
        load_s: Model version → seconds that its last load took.
    """
    yield Family(
        SUCCESS,
        "counter",
        "Number of successful inference requests, all batch sizes",
        [Sample(_labels(key), fields.get(stats.SUCCESS_COUNT, 0)) for key, fields in statistics.items()],
    )
    yield Family(
        FAILURE,
        "counter",
        "Number of failed inference requests, all batch sizes",
        [
            Sample(_labels(key, reason), count)
            for key, fields in statistics.items()
            for reason, count in failures(fields).items()
        ],
    )
    for name, text, field, divisor in _COUNTERS:
        samples = [Sample(_labels(key), fields.get(field, 0) // divisor) for key, fields in statistics.items()]
        yield Family(name, "counter", text, samples)
    yield Family(
        PENDING,
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        [Sample(_labels(key), count) for key, count in pending.items()],
    )
    yield Family(
        LOAD_DURATION,
        "gauge",
        "Model load time in seconds",
        [Sample(_labels(key), seconds) for key, seconds in load_s.items()],
    )


def of_host(use: HostUse) -> Iterator[Family]:
    """Yields what Triton tells of its machine: here, of the one that this gateway runs on."""
    for name, text, value in (
        (CPU_UTILIZATION, "CPU utilization rate [0.0 - 1.0]", use.cpu),
        (CPU_MEMORY_TOTAL, "CPU total memory (RAM), in bytes", use.memory_total_bytes),
        (CPU_MEMORY_USED, "CPU used memory (RAM), in bytes", use.memory_used_bytes),
    ):
        yield Family(name, "gauge", text, [Sample((), value)])


def failures(fields: Mapping[str, int]) -> dict[Reason, int]:
    """Returns how many requests failed for each of the four reasons, from statistics."""
    counts = dict.fromkeys(Reason, 0)
    for name, count in fields.items():
        if name.startswith(stats.FAILURES):
            counts[REASONS.get(name.removeprefix(stats.FAILURES), _OTHER).worker] += count
        elif name.startswith(stats.REFUSALS):
            counts[REASONS.get(name.removeprefix(stats.REFUSALS), _OTHER).gateway] += count
    return counts


def render(shown: Iterable[Family]) -> bytes:
    """Returns metrics in the Prometheus text format, as Triton prints them."""
    lines: list[str] = []
    for family in shown:
        lines += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in family.samples:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
            told = f"{{{inside}}}" if inside else ""
            lines.append(f"{family.name}{told} {value if isinstance(value, int) else format(value, '.9g')}")
    return "".join(f"{line}\n" for line in lines).encode()


def _labels(key: Key, reason: str = "") -> tuple[tuple[str, str], ...]:
    model, version = key
    told = (("reason", reason),) if reason else ()
    return (("model", model), *told, ("version", str(version)))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
