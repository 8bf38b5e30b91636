"""Redis keys: the only place that spells them.

The keys of a partition share the hash tag `{<model>#<partition>}`, hence a cluster slot. Configuration and statistics
of a model live with its partition 0.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

from redis.crc import key_slot

if TYPE_CHECKING:  # keeps a worker's renewer, which imports this module, small
    from qinfer.queue.entries import Lane

GROUP = b"workers"
"""The consumer group of every lane."""

RELEASED = b"released"
"""The consumer that owns released entries, from which `fetch` takes first; no worker has this name."""

SUSPECTS = b"suspects"
"""The consumer that owns released suspects, for `reclaim`."""

_BRIDGES = "qinfer:{bridges}:"
_RESOURCES = "qinfer:{resources}:"
_COUNTS = "qinfer:{counts}:"

ENDPOINTS = ".endpoints"
"""Stands for a model in the deliveries of endpoints."""

_ENDPOINTS = f"qinfer:{{{ENDPOINTS}#0}}:"


@lru_cache(maxsize=65536)
def lane(of: "Lane") -> bytes:
    """Stream of a lane."""
    return f"{_partition(of.model, of.partition)}{of.version}:{of.name}".encode()


@lru_cache(maxsize=65536)
def lane_slot(of: "Lane") -> int:
    """Cluster slot of a lane."""
    return slot(lane(of))


def slot(key: str | bytes) -> int:
    """Cluster slot of a key, 0 … 16383."""
    return key_slot(key if isinstance(key, bytes) else key.encode())


def prefix(model: str, number: int) -> str:
    """Prefix of a partition's keys, for scripts."""
    return _partition(model, number)


def dead_letters(model: str, partition: int = 0) -> str:
    """Dead-letter stream of a partition."""
    return f"{_partition(model, partition)}dlq"


def payload(model: str, partition: int, request_id: str) -> str:
    """String of a request's large body."""
    return f"{_partition(model, partition)}payload:{request_id}"


def result(model: str, partition: int, request_id: str) -> str:
    """String of an asynchronous request's outcome, or of a synchronous one's large outputs."""
    return f"{_partition(model, partition)}result:{request_id}"


def responses(model: str, partition: int, request_id: str) -> str:
    """List of a stored decoupled request's responses before the final one."""
    return f"{_partition(model, partition)}responses:{request_id}"


def stored(model: str, partition: int, tenant: str) -> str:
    """Hash of the bytes of a tenant's stored results; the sorted set `stored-until` has their expiry."""
    return f"{_partition(model, partition)}stored:{tenant}"


def request(model: str, partition: int, request_id: str) -> str:
    """Hash of an asynchronous request's state."""
    return f"{_partition(model, partition)}request:{request_id}"


def staged(key: str, nonce: str) -> str:
    """String of a staged value, which a script renames to `key`; no request id contains a `|`."""
    return f"{key}|{nonce}"


def idempotency(model: str, partition: int, tenant: str, key_hash: str) -> str:
    """String that maps an idempotency key to a request id and, on a second line, its body's hash."""
    return f"{_partition(model, partition)}idem:{tenant}:{key_hash}"


def sent(of: "Lane", entry_id: str) -> str:
    """String that marks an entry with a sent response."""
    return f"{_partition(of.model, of.partition)}sent:{of.version}:{of.name}:{entry_id}"


def cancels(model: str, partition: int = 0) -> str:
    """Stream of entries that were cancelled while a worker held them."""
    return f"{_partition(model, partition)}cancels"


def moved(model: str, partition: int = 0) -> str:
    """Hash of the new places of moved entries."""
    return f"{_partition(model, partition)}moved"


def due(model: str, partition: int = 0) -> str:
    """Sorted set of the deadlines of asynchronous requests."""
    return f"{_partition(model, partition)}due"


def deliveries(model: str, partition: int, kind: str) -> str:
    """Stream of pending deliveries of a kind; `|later` is the sorted set of taken ones."""
    return f"{_partition(model, partition)}deliveries:{kind}"


def confirm(model: str, partition: int = 0) -> str:
    """String that is written before a wait for replicas or the disk."""
    return f"{_partition(model, partition)}confirm"


def sequence(model: str, partition: int, name: str) -> str:
    """Hash of a sequence; `name` has tenant and correlation id."""
    return f"{_partition(model, partition)}sequence:{name}"


def sequence_state(model: str, partition: int, name: str) -> str:
    """Large state of a sequence."""
    return f"{_partition(model, partition)}sequence-state:{name}"


def sequence_answer(model: str, partition: int, name: str, step: str) -> str:
    """Large response to the committed step `<life>.<number>`."""
    return f"{_partition(model, partition)}sequence-answer:{step}:{name}"


def sequences(model: str, partition: int) -> str:
    """Sorted set of open sequences, by the janitor's next look."""
    return f"{_partition(model, partition)}sequences"


def sequence_endings(model: str, partition: int) -> str:
    """Sorted set of sequences with unanswered steps of an ended life, by when to answer them."""
    return f"{_partition(model, partition)}sequence-endings"


def sequence_owners(model: str, partition: int) -> str:
    """Sorted set of workers that own sequences, by their leases' ends."""
    return f"{_partition(model, partition)}sequence-owners"


def sequence_owned(model: str, partition: int, worker_id: str) -> str:
    """Set of a worker's sequences."""
    return f"{_partition(model, partition)}sequence-owned:{worker_id}"


def sequence_counts(model: str, partition: int) -> str:
    """Hash of counts of handed-over and lost sequences."""
    return f"{_partition(model, partition)}sequence-counts"


def sequences_of(model: str, partition: int, tenant: str) -> str:
    """Set of a tenant's open sequences; without a tenant, the hash of weights."""
    return f"{sequences(model, partition)}~{tenant}"


def sequence_turn(model: str, partition: int, tenant: str) -> str:
    """String that marks a slot just given up for a tenant."""
    return f"{_partition(model, partition)}sequence-turn:{tenant}"


def sequence_numbers(model: str, partition: int) -> str:
    """Hash of a model's first tenant and of the count of allotted numbers."""
    return f"{_partition(model, partition)}sequence-numbers"


def sequence_number(model: str, partition: int, number: int) -> str:
    """String with the sequence that has a number."""
    return f"{_partition(model, partition)}sequence-number:{number}"


def sequence_told(model: str, partition: int, name: str) -> str:
    """String with a sequence's number for a model without sequences."""
    return f"{_partition(model, partition)}sequence-told:{name}"


def config(model: str) -> str:
    """Hash of a model's configuration and latency model."""
    return f"{_partition(model, 0)}config"


def stats(model: str, version: int) -> str:
    """Hash of a model version's statistics."""
    return f"{_partition(model, 0)}stats:{version}"


def desired() -> str:
    """Hash of the desired state of all models."""
    return "qinfer:desired"


def doorbell() -> str:
    """Stream of rings."""
    return "qinfer:doorbell"


def installation() -> str:
    """String with a random id of the data in this Redis."""
    return "qinfer:installation"


def control() -> str:
    """Stream that wakes readers of the desired state."""
    return "qinfer:control"


def completions() -> str:
    """Hash of runtime-completed configurations, by the hash of the model's files."""
    return "qinfer:completions"


def settings() -> str:
    """Hash of settings that clients change."""
    return "qinfer:settings"


def worker(worker_id: str) -> str:
    """Hash of a worker's heartbeat."""
    return f"qinfer:worker:{worker_id}"


def workers() -> str:
    """Sorted set of workers by last heartbeat."""
    return "qinfer:workers"


def pins() -> str:
    """Hash of pins of model versions, with their expiry (ms of Redis' time)."""
    return "qinfer:pins"


def scalers() -> str:
    """Hash of live autoscalers, with their expiry (ms of Redis' time)."""
    return "qinfer:scalers"


def scaler_counts() -> str:
    """Hash of the counts of all autoscalers."""
    return "qinfer:scaler-counts"


def liveness(program: str) -> str:
    """Sorted set of a program's live processes, by the ends of their liveness."""
    return f"qinfer:signs:{program}"


def bridges() -> str:
    """Hash of bridges: expiry (ms of Redis' time), last report, gauges."""
    return f"{_BRIDGES}live"


def routes() -> str:
    """Sorted set of the bridges' routes, by last report."""
    return f"{_BRIDGES}routes"


def route_counts(route: str) -> str:
    """Hash of all bridges' counts for a route."""
    return f"{_BRIDGES}counts:{route}"


def endpoints() -> str:
    """Hash of endpoint declarations by name; the empty name has their latest revision."""
    return f"{_ENDPOINTS}declared"


def trials() -> str:
    """Hash of canary trials by endpoint: the revision of each, and its record."""
    return f"{_ENDPOINTS}trials"


def trial_counts(endpoint: str, revision: int) -> str:
    """Hash of the gateways' counts of a trial at one revision of the endpoint."""
    return f"{_ENDPOINTS}counts:{revision}:{endpoint}"


def trial_latencies(endpoint: str, revision: int) -> str:
    """List of the stable target's latest latencies."""
    return f"{_ENDPOINTS}latencies:{revision}:{endpoint}"


def trial_events(endpoint: str) -> str:
    """List of the latest events of an endpoint's canaries, newest first."""
    return f"{_ENDPOINTS}events:{endpoint}"


def trial_lease() -> str:
    """String with the gateway that decides about canaries."""
    return f"{_ENDPOINTS}lease"


def heard_revisions() -> str:
    """Hash of the endpoint revisions that gateways apply, with expiry."""
    return f"{_ENDPOINTS}heard"


def kept_target(endpoint: str, tenant: str, name: str) -> str:
    """String with the target of a repeatable request."""
    return f"qinfer:{{{endpoint}|targets}}:{tenant}:{name}"


def reply(reply_to: str) -> str:
    """Reply stream at an address such as `reply:<owner>`."""
    return f"qinfer:{reply_to}"


@lru_cache(maxsize=1024)
def reply_stream(reply_to: str) -> tuple[int, bytes]:
    """Slot and key of a reply stream."""
    key = reply(reply_to).encode()
    return slot(key), key


def cached_response(key: str) -> str:
    """String of a cached response."""
    return f"qinfer:cache:{key}"


def cached_bytes(span: int) -> str:
    """Count of the bytes cached in a span of time."""
    return f"qinfer:cache-bytes:{span}"


def counts_asked() -> str:
    """Stream by which readers of statistics ask workers for their counts."""
    return f"{_COUNTS}asked"


def counts_added() -> str:
    """Stream of the workers' answers to `counts_asked`."""
    return f"{_COUNTS}added"


def resource_leases() -> str:
    """Sorted set of workers that use global resources, by the ends of their leases."""
    return f"{_RESOURCES}leases"


def resource_units() -> str:
    """Hash of the resource units of each worker."""
    return f"{_RESOURCES}units"


def resource_maxima() -> str:
    """Hash of the total units that each worker configures."""
    return f"{_RESOURCES}maxima"


def resource_line() -> str:
    """Sorted set of waiting requests for resources, by since when."""
    return f"{_RESOURCES}line"


def resource_news() -> str:
    """Stream that tells workers of freed units and of waiting workers."""
    return f"{_RESOURCES}news"


def quota(tenant: str) -> str:
    """Hash of a tenant's remaining quota and the gateways' parts."""
    return f"qinfer:quota:{tenant}"


def job(model: str, partition: int, job_id: str) -> str:
    """Hash of a bulk job."""
    return f"{_partition(model, partition)}job:{job_id}"


def job_part(model: str, partition: int, job_id: str, part: str) -> str:
    """Key of a bulk job: its `todo`, `in_lane`, `outcomes` or `log`."""
    return f"{_partition(model, partition)}job-{part}:{job_id}"


def jobs() -> str:
    """Sorted set of all bulk jobs by creation time."""
    return "qinfer:jobs"


def job_places() -> str:
    """Hash of each bulk job's partition and model."""
    return "qinfer:jobs:places"


def open_jobs() -> str:
    """Sorted set of unended bulk jobs, by deadline."""
    return "qinfer:jobs:open"


def label_board(model: str, tenant: str, project: int, part: str) -> str:
    """Key of a labeling project's tasks: `entries`, `data`, `ended`, or a state's index."""
    return f"{_partition(model, 0)}label-{part}:{project}:{tenant}"


def label_boards(model: str) -> str:
    """Sorted set of a model's labeling projects, by expiry."""
    return f"{_partition(model, 0)}label-boards"


def _partition(model: str, number: int) -> str:
    return f"qinfer:{{{model}#{number}}}:"
