"""Every metric that qinfer exposes: its name, kind, labels (in alphabetical order), help text, and scope.

A *cluster* metric is about the installation and comes from Redis: one scrape suffices. A *process* metric is about the
answering gateway, named by the label `process`; Triton's have only Triton's labels. Each bridge also shows the metrics
in `OF_BRIDGES` on its own port.
"""

from enum import StrEnum
from functools import partial
from typing import NamedTuple


class MetricScope(StrEnum):
    """The scope of a metric."""

    CLUSTER = "cluster"
    PROCESS = "process"
    BRIDGE = "bridge"


class Info(NamedTuple):
    """One metric; `labels` lack `le` and `quantile`, and `text` is its `# HELP`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    scope: MetricScope


ALL: list[Info] = []
"""All metrics, in the order of this module."""

_CLUSTER, _PROCESS, _BRIDGE = MetricScope.CLUSTER, MetricScope.PROCESS, MetricScope.BRIDGE
_MODEL, _REASON, _LANE = ("model", "version"), ("model", "reason", "version"), ("lane", "model", "version")
_WORKER, _GPU, _ROUTE, _NODE = ("worker",), ("device", "worker"), ("route",), ("node",)
_CACHED, _NOT_CACHED = "(includes cached requests)", "(does not include cached requests)"
_ENDS = "The series ends with its worker: a restarted worker is a new one."


def _listed(kind: str, name: str, text: str, labels: tuple[str, ...] = _MODEL, scope: MetricScope = _CLUSTER) -> Info:
    info = Info(name, kind, labels, text, scope)
    ALL.append(info)
    return info


def _own(kind: str, name: str, text: str, labels: tuple[str, ...] = _MODEL) -> Info:
    return _listed(kind, name, text, tuple(sorted((*labels, "process"))), _PROCESS)


_counter, _gauge = partial(_listed, "counter"), partial(_listed, "gauge")
_histogram, _summary = partial(_listed, "histogram"), partial(_listed, "summary")
_own_counter, _own_gauge, _own_histogram = partial(_own, "counter"), partial(_own, "gauge"), partial(_own, "histogram")

REQUESTS = _own_counter("qinfer_requests_total", "Requests answered by this gateway, failures included.")
REQUEST_FAILURES = _own_counter(
    "qinfer_request_failures_total", "Requests answered with an error by this gateway.", _REASON
)
REQUEST_DURATION = _own_histogram(
    "qinfer_request_duration_seconds", "Seconds from receiving a request to its outputs, in this gateway."
)
SLO_REQUESTS = _own_counter(
    "qinfer_slo_requests_total",
    "Requests answered by this gateway that count for the objective of the version: all but failures that are the "
    "caller's fault.",
)
SLO_MISSED = _own_counter(
    "qinfer_slo_missed_requests_total",
    "Requests of `qinfer_slo_requests_total` that failed, or were answered later than `qinfer_slo_latency_seconds`.",
)
TENANT_REQUESTS = _own_counter(
    "qinfer_tenant_requests_total",
    "Requests of a tenant that this gateway answered or accepted, failures included; with QINFER_METRICS__TENANTS.",
    ("model", "tenant"),
)
TENANT_FAILURES = _own_counter(
    "qinfer_tenant_request_failures_total",
    "Requests of a tenant answered with an error by this gateway; with QINFER_METRICS__TENANTS.",
    ("reason", "tenant"),
)
TENANT_DURATION = _own_histogram(
    "qinfer_tenant_request_duration_seconds",
    "Seconds from receiving a tenant's request to its outputs, in this gateway; with QINFER_METRICS__TENANTS.",
    ("tenant",),
)
TENANT_IN_FLIGHT = _own_gauge(
    "qinfer_tenant_requests_in_flight",
    "Requests of a tenant that this gateway has not answered yet; with QINFER_METRICS__TENANTS.",
    ("tenant",),
)
TENANT_BACKLOG = _gauge(
    "qinfer_tenant_backlog_requests",
    "Requests in a tenant's share of a lane, or shards in that of a bulk lane; with QINFER_METRICS__TENANTS.",
    ("lane", "model", "tenant", "version"),
)
TENANT_SHARE = _gauge(
    "qinfer_tenant_share_ratio",
    "A tenant's share of a lane by weight, of those that have a share now; with QINFER_METRICS__TENANTS.",
    ("lane", "model", "tenant", "version"),
)
ENDPOINT_REQUESTS = _own_counter(
    "qinfer_endpoint_requests_total",
    "Requests to an endpoint that a target answered or accepted, failures included, in this gateway.",
    ("endpoint", "target"),
)
ENDPOINT_FAILURES = _own_counter(
    "qinfer_endpoint_request_failures_total",
    "Requests to an endpoint that its target answered with an error, in this gateway.",
    ("endpoint", "reason", "target"),
)
ENDPOINT_SHADOWS = _own_counter(
    "qinfer_endpoint_shadows_total",
    "Requests of an endpoint for a shadow target, by outcome: agreed, disagreed, failed, dropped.",
    ("endpoint", "outcome", "target"),
)
ENDPOINT_DURATION = _own_histogram(
    "qinfer_endpoint_request_duration_seconds",
    "Seconds from submitting a request of an endpoint to the outputs of its target, in this gateway.",
    ("endpoint", "target"),
)
ENDPOINT_WEIGHT = _own_gauge(
    "qinfer_endpoint_weight",
    "A target's share of the requests of an endpoint, in this gateway's view.",
    ("endpoint", "role", "target"),
)
ENDPOINT_REVISION = _own_gauge(
    "qinfer_endpoints_revision", "The last change of any endpoint in this gateway's view.", ()
)
ENDPOINTS_UNHEARD = _own_counter(
    "qinfer_endpoints_unheard_total",
    "Requests that this gateway sent to a stable target because it had not read the endpoints for 2 seconds.",
    (),
)
CANARY_STEP = _own_gauge(
    "qinfer_endpoint_canary_step",
    "The step of an endpoint's canary on trial, in this gateway's view; 0 = no trial.",
    ("endpoint",),
)
CANARY_PAUSED = _own_gauge(
    "qinfer_endpoint_canary_paused",
    "1 if an endpoint's canary on trial is paused for this reason, no_data or by_hand, in this gateway's view.",
    ("endpoint", "reason"),
)
CANARY_ROLLED_BACK = _own_gauge(
    "qinfer_endpoint_canary_rolled_back",
    "1 if the last canary of an endpoint was rolled back, in this gateway's view.",
    ("endpoint",),
)
REQUESTS_IN_FLIGHT = _own_gauge("qinfer_requests_in_flight", "Requests that this gateway has not answered yet.", ())
SEGMENT_BYTES = _own_gauge(
    "qinfer_segment_bytes",
    "Memory for tensors beside the queue: held by pending requests, or idle; with QINFER_SEGMENTS__DIRECTORY.",
    ("state",),
)
SEGMENT_OLDEST = _own_gauge(
    "qinfer_segment_oldest_seconds",
    "Seconds that the oldest pending request has had tensors in this gateway's memory.",
    (),
)
SEGMENT_REQUESTS = _own_counter(
    "qinfer_segment_requests_total",
    "Requests with large tensors: kept in this gateway's memory (memory), or sent through Redis because the memory was "
    "full (no_memory), a worker does not read it (old_worker), or one could not for half a minute (unreachable).",
    ("way",),
)
STORE_UP = _own_gauge("qinfer_store_up", "1 if this gateway could read the shared store at this scrape.", ())
PROCESS_CPU = _own_counter("qinfer_process_cpu_seconds_total", "CPU time of this gateway.", ())
PROCESS_MEMORY = _own_gauge("qinfer_process_memory_bytes", "Resident memory of this gateway.", ())
OPEN_FDS = _own_gauge("qinfer_process_open_fds", "File descriptors that this gateway has open.", ())
MAX_FDS = _own_gauge("qinfer_process_max_fds", "File descriptors that this gateway may have open.", ())
BACKLOG = _gauge(
    "qinfer_backlog_requests",
    "Requests in a lane, or shards of bulk jobs in a bulk lane, waiting and in flight.",
    _LANE,
)
OLDEST_AGE = _gauge(
    "qinfer_backlog_oldest_age_seconds",
    "Seconds that the oldest entry of a lane has been in the queue; 0 if the lane is empty.",
    _LANE,
)
BACKLOG_ROWS = _gauge(
    "qinfer_backlog_rows", "Estimated rows of the requests in the queue, and the remaining rows of open bulk jobs."
)
BACKLOG_WORK = _gauge("qinfer_backlog_work_seconds", "Seconds that one worker would need for `qinfer_backlog_rows`.")
EXECUTING = _gauge("qinfer_executing_requests", "Requests that model instances execute.")
EXECUTING_SECONDS = _gauge(
    "qinfer_executing_seconds",
    "Seconds that the longest execution, load or warm-up under way has lasted; 0 where none has lasted for a second.",
)
LATE_EXECUTIONS = _gauge(
    "qinfer_late_executions",
    "Executions, loads and warm-ups under way that have lasted for half of their limit, or for 300 s without one.",
)
OVERDUE_EXECUTIONS = _counter(
    "qinfer_overdue_executions_total",
    "Executions, loads and warm-ups that were ended because they lasted longer than their limit.",
)
MODEL_READY = _gauge(
    "qinfer_model_ready",
    "1 if a live worker can execute the version, or requests may wait for one (qinfer.min_workers 0).",
)
MODEL_LOAD_FAILED = _gauge(
    "qinfer_model_load_failed",
    "1 while a worker can't load the newest configuration or files of the version, though an earlier one may serve on.",
)
MODEL_LOAD_FAILURES = _counter("qinfer_model_load_failures_total", "Loads of the version that failed in a worker.")
SLO_LATENCY = _gauge(
    "qinfer_slo_latency_seconds", "Seconds within which a request should be answered: `qinfer.slo_latency_s`."
)
SLO_TARGET = _gauge(
    "qinfer_slo_target_ratio", "Share of requests that should succeed in that time: `qinfer.slo_target`."
)
EXECUTED_REQUESTS = _counter("qinfer_executed_requests_total", "Requests that workers executed successfully.")
EXECUTION_FAILURES = _counter(
    "qinfer_execution_failures_total", "Requests that failed in a worker, by error code.", _REASON
)
EXPIRED = _counter("qinfer_expired_requests_total", "Requests whose deadline passed before they were answered.")
REFUSED = _counter(
    "qinfer_refused_requests_total",
    "Requests that gateways did not admit, by error code: queue_full, deadline_infeasible, quota_exceeded.",
    _REASON,
)
RETRIES = _counter("qinfer_retries_total", "Repeated executions of requests whose batch raised an exception.")
REDELIVERIES = _counter(
    "qinfer_redeliveries_total", "Repeated deliveries of requests that the previous worker had not finished."
)
DEAD_LETTERS_TOTAL = _counter("qinfer_dead_letters_total", "Requests that became dead letters.")
DEAD_LETTERS = _gauge(
    "qinfer_dead_letters", "Dead letters that are kept, of requests and shards; without a version: not looked at yet."
)
QUEUE_WAIT = _histogram("qinfer_queue_wait_seconds", "Seconds from enqueueing a request to the start of its execution.")
ASSEMBLE = _histogram("qinfer_assemble_seconds", "Seconds that preparing the inputs of a batch took.")
EXECUTION = _histogram("qinfer_execution_seconds", "Seconds that executing a batch took.")
PUBLISH = _histogram(
    "qinfer_publish_seconds", "Seconds from the end of an execution until its answers were published or stored."
)
BATCH_SIZE = _histogram("qinfer_batch_size_rows", "Rows of an executed batch.")
BATCH_FILL = _histogram(
    "qinfer_batch_fill_ratio", "Rows of an executed batch divided by max_batch_size; for models with a batch dimension."
)
JOBS = _gauge(
    "qinfer_jobs", "Bulk jobs by state: all unfinished ones, and those of the newest 500 that have ended.", ("state",)
)
JOB_ROWS = _counter(
    "qinfer_job_rows_total",
    "Settled rows of bulk jobs: done (with an output) or failed.",
    ("model", "outcome", "version"),
)
JOB_PUT_OFF = _counter(
    "qinfer_job_shards_put_off_total",
    "Tries of a bulk job's shard, of committing its scored part, or of planning or finishing a job, that were put off, "
    "by error code.",
    _REASON,
)
SEQUENCES_OPEN = _gauge(
    "qinfer_sequences_open",
    "Sequences of a stateful model that have begun and not ended, those that wait for an owner among them.",
    ("model",),
)
SEQUENCES_WAITING = _gauge(
    "qinfer_sequences_waiting", "Sequences that wait for an owner: a worker with a free slot.", ("model",)
)
SEQUENCES_HANDED_OVER = _counter(
    "qinfer_sequences_handed_over_total",
    "Sequences that another worker went on with, because their owner drained or died.",
    ("model",),
)
SEQUENCES_LOST = _counter(
    "qinfer_sequences_lost_total",
    "Sequences that ended because their state was lost: with their worker, or in Redis.",
    ("model",),
)
AUTOSCALE_DECISIONS = _counter(
    "qinfer_autoscale_decisions_total",
    "Decisions of autoscalers for more workers (up) or fewer (down).",
    ("direction",),
)
AUTOSCALE_TARGET = _gauge(
    "qinfer_autoscale_target_workers", "Workers that the live autoscalers want; absent without a live autoscaler.", ()
)
WORKER_UP = _gauge("qinfer_worker_up", f"1 for each live worker. {_ENDS}", _GPU)
WORKER_EXECUTING = _gauge(
    "qinfer_worker_executing_requests", f"Requests in a worker's batches at its last heartbeat. {_ENDS}", _WORKER
)
WORKER_READY_MODELS = _gauge("qinfer_worker_ready_models", f"Model versions that a worker has ready. {_ENDS}", _WORKER)
WORKER_RENEWALS = _counter("qinfer_worker_lease_renewals_total", f"Renewals of leases by a worker. {_ENDS}", _WORKER)
WORKER_LEASES_LOST = _counter(
    "qinfer_worker_leases_lost_total",
    f"Leases that a worker lost, mostly because callers disconnected. {_ENDS}",
    _WORKER,
)
WORKER_CPU = _counter(
    "qinfer_worker_cpu_seconds_total", f"CPU time of a worker and its child processes. {_ENDS}", _WORKER
)
WORKER_MEMORY = _gauge(
    "qinfer_worker_memory_bytes", f"Resident memory of a worker and its child processes. {_ENDS}", _WORKER
)
WORKER_SEGMENT_BYTES = _gauge(
    "qinfer_worker_segment_held_bytes",
    "Memory in which a worker keeps tensors beside the queue: of requests that its ensembles and models made, and "
    f"outputs that were not read yet. {_ENDS}",
    _WORKER,
)
WORKER_SEGMENT_REQUESTS = _counter(
    "qinfer_worker_segment_requests_total",
    "Requests with large tensors that a worker's ensembles and models made, by way, as qinfer_segment_requests_total. "
    f"{_ENDS}",
    ("way", "worker"),
)
DEVICE_MEMORY_USED = _gauge(
    "qinfer_device_memory_used_bytes", f"Used memory of a worker's GPU, by all programs. {_ENDS}", _GPU
)
DEVICE_MEMORY_TOTAL = _gauge("qinfer_device_memory_total_bytes", f"Memory of a worker's GPU. {_ENDS}", _GPU)
DEVICE_UTILIZATION = _gauge(
    "qinfer_device_utilization_ratio", f"Share of the time that a worker's GPU was busy, 0 to 1. {_ENDS}", _GPU
)
REDIS_UP = _gauge("qinfer_redis_up", "1 if a node of Redis that owns keys answers this gateway.", _NODE)
REDIS_INFO = _gauge(
    "qinfer_redis_info",
    "1, with the version of a node, its role (primary or replica), and what it does when its memory is full.",
    ("maxmemory_policy", "node", "role", "version"),
)
REDIS_LOADING = _gauge("qinfer_redis_loading", "1 while a node reads its files after a start.", _NODE)
REDIS_MEMORY_USED = _gauge("qinfer_redis_memory_used_bytes", "Memory that a node has allocated.", _NODE)
REDIS_MEMORY_MAX = _gauge("qinfer_redis_memory_max_bytes", "`maxmemory` of a node; 0 = no limit.", _NODE)
REDIS_MEMORY_RATIO = _gauge(
    "qinfer_redis_memory_used_ratio",
    "Share of `maxmemory` that a node uses, or of the machine's memory where it has none; at 1 it refuses writes.",
    _NODE,
)
REDIS_EVICTED = _counter(
    "qinfer_redis_evicted_keys_total", "Keys that a node has deleted because its memory was full.", _NODE
)
REDIS_PERSISTENCE_FAILED = _gauge(
    "qinfer_redis_persistence_failed",
    "1 if the last attempt to write a file failed: the append-only file (aof), its rewrite (aof_rewrite), a snapshot "
    "(rdb).",
    ("file", "node"),
)
REDIS_REPLICAS = _gauge("qinfer_redis_replicas", "Replicas that follow a node.", _NODE)
REDIS_REPLICA_LAG_BYTES = _gauge(
    "qinfer_redis_replica_lag_bytes", "Bytes that the last of a node's replicas has not confirmed.", _NODE
)
REDIS_REPLICA_LAG = _gauge(
    "qinfer_redis_replica_lag_seconds",
    "Seconds since a node heard of its replicas, of the one that it has not heard of for longest.",
    _NODE,
)
REDIS_CLIENTS = _gauge("qinfer_redis_clients", "Connections to a node.", _NODE)
REDIS_CLIENTS_MAX = _gauge("qinfer_redis_clients_max", "`maxclients` of a node.", _NODE)
REDIS_CLIENTS_BLOCKED = _gauge(
    "qinfer_redis_blocked_clients",
    "Connections to a node that wait in a blocking read, as those of idle workers.",
    _NODE,
)
REDIS_REJECTED = _counter(
    "qinfer_redis_rejected_connections_total", "Connections that a node refused because of `maxclients`.", _NODE
)
REDIS_REFUSED = _counter(
    "qinfer_redis_refused_writes_total",
    "Writes that a node refused: its files can't be written (MISCONF), no memory (OOM), too few replicas (NOREPLICAS).",
    ("error", "node"),
)
NV_SUCCESS = _counter("nv_inference_request_success", "Number of successful inference requests, all batch sizes")
NV_FAILURE = _counter("nv_inference_request_failure", "Number of failed inference requests, all batch sizes", _REASON)
NV_COUNT = _counter("nv_inference_count", f"Number of inferences performed {_NOT_CACHED}")
NV_EXEC_COUNT = _counter("nv_inference_exec_count", f"Number of model executions performed {_NOT_CACHED}")
NV_REQUEST_DURATION = _counter(
    "nv_inference_request_duration_us", f"Cumulative inference request duration in microseconds {_CACHED}"
)
NV_QUEUE_DURATION = _counter(
    "nv_inference_queue_duration_us", f"Cumulative inference queuing duration in microseconds {_CACHED}"
)
NV_INPUT_DURATION = _counter(
    "nv_inference_compute_input_duration_us", f"Cumulative compute input duration in microseconds {_NOT_CACHED}"
)
NV_INFER_DURATION = _counter(
    "nv_inference_compute_infer_duration_us", f"Cumulative compute inference duration in microseconds {_NOT_CACHED}"
)
NV_OUTPUT_DURATION = _counter(
    "nv_inference_compute_output_duration_us",
    f"Cumulative inference compute output duration in microseconds {_NOT_CACHED}",
)
NV_CACHE_HITS = _counter("nv_cache_num_hits_per_model", "Number of cache hits per model")
NV_CACHE_MISSES = _counter("nv_cache_num_misses_per_model", "Number of cache misses per model")
NV_CACHE_HIT_DURATION = _counter(
    "nv_cache_hit_duration_per_model", "Total cache hit duration per model, in microseconds"
)
NV_CACHE_MISS_DURATION = _counter(
    "nv_cache_miss_duration_per_model", "Total cache miss duration per model, in microseconds"
)
NV_REQUEST_SUMMARY = _summary(
    "nv_inference_request_summary_us", f"Summary of inference request duration in microseconds {_CACHED}"
)
NV_QUEUE_SUMMARY = _summary(
    "nv_inference_queue_summary_us", f"Summary of inference queuing duration in microseconds {_CACHED}"
)
NV_INPUT_SUMMARY = _summary(
    "nv_inference_compute_input_summary_us",
    f"Summary of inference compute input duration in microseconds {_NOT_CACHED}",
)
NV_INFER_SUMMARY = _summary(
    "nv_inference_compute_infer_summary_us",
    f"Summary of inference compute infer duration in microseconds {_NOT_CACHED}",
)
NV_OUTPUT_SUMMARY = _summary(
    "nv_inference_compute_output_summary_us",
    f"Summary of inference compute output duration in microseconds {_NOT_CACHED}",
)
NV_CACHE_HIT_SUMMARY = _summary(
    "nv_cache_hit_summary_per_model", "Summary of cache hit duration per model, in microseconds"
)
NV_CACHE_MISS_SUMMARY = _summary(
    "nv_cache_miss_summary_per_model", "Summary of cache miss duration per model, in microseconds"
)
NV_FIRST_RESPONSE = _histogram(
    "nv_inference_first_response_histogram_ms", "Duration from request to first response in milliseconds"
)
NV_PENDING = _gauge(
    "nv_inference_pending_request_count", "Instantaneous number of pending requests awaiting execution per-model."
)
NV_LOAD = _gauge("nv_model_load_duration_secs", "Model load time in seconds")
NV_GPU_UTILIZATION = _gauge("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", ("gpu_uuid",))
NV_GPU_MEMORY_TOTAL = _gauge("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", ("gpu_uuid",))
NV_GPU_MEMORY_USED = _gauge("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", ("gpu_uuid",))
NV_GPU_POWER = _gauge("nv_gpu_power_usage", "GPU power usage in watts", ("gpu_uuid",))
NV_GPU_POWER_LIMIT = _gauge("nv_gpu_power_limit", "GPU power management limit in watts", ("gpu_uuid",))
NV_GPU_ENERGY = _counter(
    "nv_energy_consumption", "GPU energy consumption in joules since its driver was loaded", ("gpu_uuid",)
)
NV_CPU_UTILIZATION = _gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", (), _PROCESS)
NV_CPU_MEMORY_TOTAL = _gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", (), _PROCESS)
NV_CPU_MEMORY_USED = _gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", (), _PROCESS)
BRIDGE_RECEIVED = _counter("qinfer_bridge_received_messages_total", "Deliveries of messages from the source.", _ROUTE)
BRIDGE_ACCEPTED = _counter("qinfer_bridge_accepted_messages_total", "Messages that became requests.", _ROUTE)
BRIDGE_REPEATED = _counter(
    "qinfer_bridge_repeated_messages_total", "Messages that had been accepted before, recognised by their id.", _ROUTE
)
BRIDGE_UNIDENTIFIED = _counter(
    "qinfer_bridge_unidentified_messages_total",
    "Messages without an id, which cannot be recognised at another delivery.",
    _ROUTE,
)
BRIDGE_PAUSED = _counter(
    "qinfer_bridge_paused_seconds_total",
    "Seconds without accepting messages, because the model's lane was full or Redis away.",
    _ROUTE,
)
BRIDGE_REFUSED = _counter(
    "qinfer_bridge_refused_messages_total",
    "Messages that could not become requests and were sent to the dead letters.",
    ("reason", "route"),
)
BRIDGE_REPLIED = _counter(
    "qinfer_bridge_replies_total",
    "Requests whose reply or dead letter the broker has confirmed, by their state.",
    ("route", "state"),
)
BRIDGE_UNROUTABLE = _counter(
    "qinfer_bridge_unroutable_messages_total",
    "Published messages that no queue took: reply (dropped, its caller is gone), sink or dead_letter (tried again).",
    ("place", "route"),
)
BRIDGE_UNACKNOWLEDGED = _gauge(
    "qinfer_bridge_unacknowledged_messages", "Messages that the bridge has received and not acknowledged.", _ROUTE
)
BRIDGE_UNCONFIRMED = _gauge(
    "qinfer_bridge_unconfirmed_replies", "Ended requests whose reply is published and not confirmed.", _ROUTE
)
BRIDGE_CONNECTED = _gauge(
    "qinfer_bridge_connected",
    "Open connections to a queue; for the cluster, normally the number of live bridges.",
    ("connection", "route"),
)
OF_BRIDGES = tuple(
    info._replace(labels=tuple(sorted((*info.labels, "process"))), scope=_BRIDGE)
    for info in ALL
    if info.name.startswith("qinfer_bridge_")
)
"""A bridge shows these of itself."""
BRIDGE_PROCESSES = _gauge("qinfer_bridge_processes", "Live bridges that serve a route.", _ROUTE)
LABEL_QUEUED = _counter(
    "qinfer_labeling_queued_tasks_total", "Tasks of Label Studio that were stored for pushed predictions."
)
LABEL_PUSHED = _counter("qinfer_labeling_pushed_tasks_total", "Tasks whose prediction Label Studio has accepted.")
LABEL_RETRIES = _counter(
    "qinfer_labeling_push_retries_total", "Failed pushes that are repeated, because Label Studio was away or failed."
)
LABEL_FAILED = _counter(
    "qinfer_labeling_failed_tasks_total",
    "Tasks of Label Studio that failed: they could not be queued (not_queued), the request gave no prediction "
    "(not_predicted), Label Studio refused the prediction (refused) or failed too often (push_failed).",
    _REASON,
)
LABEL_WAITING = _gauge(
    "qinfer_labeling_waiting_tasks", "Tasks of Label Studio that are stored and neither pushed nor failed.", ("model",)
)
