"""Redis keys: the only place that spells them.

The keys of a partition share the hash tag `{<model>#<partition>}`, hence a cluster slot. Configuration and statistics
of a model live with its partition 0. docs/builders/redis-keys.md describes all keys.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

from redis.crc import key_slot

if TYPE_CHECKING:  # keeps a worker's renewer, which imports this module, small
    from qinfer.queue.entries import Lane

GROUP = b"workers"

RELEASED = b"released"
"""The consumer that owns released entries, from which `fetch` takes first; no worker has this name."""

SUSPECTS = b"suspects"
"""The consumer that owns released suspects, for `reclaim`."""

_BRIDGES = "qinfer:{bridges}:"
_COUNTS = "qinfer:{counts}:"
_CONSOLE = "qinfer:{console}:"

ENDPOINTS = ".endpoints"
"""Stands for a model in the deliveries of endpoints."""

_ENDPOINTS = f"qinfer:{{{ENDPOINTS}#0}}:"


def prefix(model: str, number: int) -> str:
    """Prefix of a partition's keys."""
    return f"qinfer:{{{model}#{number}}}:"


@lru_cache(maxsize=65536)
def lane(of: "Lane") -> bytes:
    """Stream of a lane."""
    return f"{prefix(of.model, of.partition)}{of.version}:{of.name}".encode()


@lru_cache(maxsize=65536)
def lane_slot(of: "Lane") -> int:
    """Cluster slot of a lane."""
    return slot(lane(of))


def slot(key: str | bytes) -> int:
    """Cluster slot of a key, 0 … 16383."""
    return key_slot(key if isinstance(key, bytes) else key.encode())


def dead_letters(model: str, partition: int = 0) -> str:
    """Stream of dead letters."""
    return f"{prefix(model, partition)}dlq"


def payload(model: str, partition: int, request_id: str) -> str:
    """String, or hash, of a request's tensors."""
    return f"{prefix(model, partition)}payload:{request_id}"


def result(model: str, partition: int, request_id: str) -> str:
    """String of an outcome or of large outputs."""
    return f"{prefix(model, partition)}result:{request_id}"


def stored_responses(model: str, partition: int, request_id: str) -> str:
    """List of a request's stored responses."""
    return f"{prefix(model, partition)}responses:{request_id}"


def stored(model: str, partition: int, tenant: str) -> str:
    """Hash of a tenant's stored bytes; the sorted set `stored-until` has their expiry."""
    return f"{prefix(model, partition)}stored:{tenant}"


def stored_files(model: str, partition: int, tenant: str) -> str:
    """The same of results in files."""
    return f"{prefix(model, partition)}file-stored:{tenant}"


def request(model: str, partition: int, request_id: str) -> str:
    """Hash of an asynchronous request."""
    return f"{prefix(model, partition)}request:{request_id}"


def staged(key: str, nonce: str) -> str:
    """String that a script renames to `key`; no request id contains a `|`."""
    return f"{key}|{nonce}"


def idempotency(model: str, partition: int, tenant: str, key_hash: str) -> str:
    """String of a request id and, on a second line, its body's hash."""
    return f"{prefix(model, partition)}idem:{tenant}:{key_hash}"


def sent(of: "Lane", entry_id: str) -> str:
    """String: a response was sent."""
    return f"{prefix(of.model, of.partition)}sent:{of.version}:{of.name}:{entry_id}"


def cancels(model: str, partition: int = 0) -> str:
    """Stream of cancelled entries."""
    return f"{prefix(model, partition)}cancels"


def moved(model: str, partition: int = 0) -> str:
    """Hash of moved entries."""
    return f"{prefix(model, partition)}moved"


def due(model: str, partition: int = 0) -> str:
    """Sorted set of requests, by deadline."""
    return f"{prefix(model, partition)}due"


def ended(model: str, partition: int, state: str) -> str:
    """Sorted set of ended requests, by the expiry of their records."""
    return f"{prefix(model, partition)}ended:{state}"


def operation(model: str, partition: int, operation_id: str) -> str:
    """Hash of an operation on many requests."""
    return f"{prefix(model, partition)}operation:{operation_id}"


def operation_lease(model: str, partition: int, operation_id: str) -> str:
    """String with the gateway that works on an operation."""
    return f"{prefix(model, partition)}operation-lease:{operation_id}"


def operations() -> str:
    """Sorted set of operations, by the time of their creation."""
    return "qinfer:operations"


def open_operations() -> str:
    """Sorted set of the operations that run."""
    return "qinfer:operations:open"


def deliveries(model: str, partition: int, kind: str) -> str:
    """Stream of deliveries; `|later` is the sorted set of deliveries that were taken."""
    return f"{prefix(model, partition)}deliveries:{kind}"


def confirm(model: str, partition: int = 0) -> str:
    """String that is written before a wait for replicas or the disk."""
    return f"{prefix(model, partition)}confirm"


def sequence(model: str, partition: int, name: str) -> str:
    """Hash of a sequence; `name` has tenant and correlation id."""
    return f"{prefix(model, partition)}sequence:{name}"


def sequence_state(model: str, partition: int, name: str) -> str:
    """Large state."""
    return f"{prefix(model, partition)}sequence-state:{name}"


def sequence_answer(model: str, partition: int, name: str, step: str) -> str:
    """Large response to the step `<life>.<number>`."""
    return f"{prefix(model, partition)}sequence-answer:{step}:{name}"


def sequences(model: str, partition: int) -> str:
    """Sorted set of open sequences."""
    return f"{prefix(model, partition)}sequences"


def sequence_endings(model: str, partition: int) -> str:
    """Sorted set of sequences with unanswered steps."""
    return f"{prefix(model, partition)}sequence-endings"


def sequence_owners(model: str, partition: int) -> str:
    """Sorted set of workers, by lease."""
    return f"{prefix(model, partition)}sequence-owners"


def sequence_owned(model: str, partition: int, worker_id: str) -> str:
    """Set of a worker's sequences."""
    return f"{prefix(model, partition)}sequence-owned:{worker_id}"


def sequence_lanes(model: str, partition: int) -> str:
    """Set of the lanes to which gateways append steps."""
    return f"{prefix(model, partition)}sequence-lanes"


def sequence_closed(model: str, partition: int) -> str:
    """Set of closed lanes with unanswered steps."""
    return f"{prefix(model, partition)}sequence-closed"


def sequence_counts(model: str, partition: int) -> str:
    """Hash of counts."""
    return f"{prefix(model, partition)}sequence-counts"


def sequences_of(model: str, partition: int, tenant: str) -> str:
    """Set of a tenant's open sequences; without a tenant, the hash of weights."""
    return f"{sequences(model, partition)}~{tenant}"


def sequence_turn(model: str, partition: int, tenant: str) -> str:
    """String: a slot was given up."""
    return f"{prefix(model, partition)}sequence-turn:{tenant}"


def sequence_numbers(model: str, partition: int) -> str:
    """Hash of the first tenant and the count of numbers."""
    return f"{prefix(model, partition)}sequence-numbers"


def sequence_number(model: str, partition: int, number: int) -> str:
    """String with a number's sequence."""
    return f"{prefix(model, partition)}sequence-number:{number}"


def sequence_told(model: str, partition: int, name: str) -> str:
    """String with a sequence's number."""
    return f"{prefix(model, partition)}sequence-told:{name}"


def config(model: str) -> str:
    """Hash of configuration and latency model."""
    return f"{prefix(model, 0)}config"


def stats(model: str, version: int) -> str:
    """Hash of a version's statistics."""
    return f"{prefix(model, 0)}stats:{version}"


def desired() -> str:
    """Hash of the desired state."""
    return "qinfer:desired"


def doorbell() -> str:
    """Stream of rings."""
    return "qinfer:doorbell"


def installation() -> str:
    """String with this Redis' random id."""
    return "qinfer:installation"


def segment_secret() -> str:
    """String that proves to processes of a machine that others may read their memory."""
    return "qinfer:segment-secret"


def control() -> str:
    """Stream that wakes readers of the desired state."""
    return "qinfer:control"


def completions() -> str:
    """Hash of completed configurations, by the hash of the model's files."""
    return "qinfer:completions"


def settings() -> str:
    """Hash of settings that clients change."""
    return "qinfer:settings"


def worker(worker_id: str) -> str:
    """Hash of a heartbeat."""
    return f"qinfer:worker:{worker_id}"


def worker_log(worker_id: str) -> str:
    """String with a worker's last warnings and errors."""
    return f"qinfer:worker-log:{worker_id}"


def workers() -> str:
    """Sorted set of workers, by heartbeat."""
    return "qinfer:workers"


def pauses() -> str:
    """Hash of paused models and versions."""
    return "qinfer:pauses"


def recordings() -> str:
    """Hash of the recordings that run, by model, with expiry (ms of Redis' time)."""
    return "qinfer:recordings"


def recorded(recording_id: str) -> str:
    """Stream of a recording's copies."""
    return f"qinfer:{{recorded|{recording_id}}}:copies"


def recorded_counts(recording_id: str) -> str:
    """Hash with a recording and its counts."""
    return f"qinfer:{{recorded|{recording_id}}}:counts"


def pins() -> str:
    """Hash of pins, with expiry (ms of Redis' time)."""
    return "qinfer:pins"


def scalers() -> str:
    """Hash of autoscalers, with expiry (ms of Redis' time)."""
    return "qinfer:scalers"


def scaler_counts() -> str:
    """Hash of the autoscalers' counts."""
    return "qinfer:scaler-counts"


def liveness(program: str) -> str:
    """Sorted set of a program's live processes."""
    return f"qinfer:signs:{program}"


def bridges() -> str:
    """Hash of bridges, with expiry (ms of Redis' time)."""
    return f"{_BRIDGES}live"


def routes() -> str:
    """Sorted set of bridges' routes."""
    return f"{_BRIDGES}routes"


def route_counts(route: str) -> str:
    """Hash of a route's counts."""
    return f"{_BRIDGES}counts:{route}"


def endpoints() -> str:
    """Hash of endpoints; the empty name has the latest revision."""
    return f"{_ENDPOINTS}declared"


def trials() -> str:
    """Hash of canary trials."""
    return f"{_ENDPOINTS}trials"


def trial_counts(endpoint: str, revision: int) -> str:
    """Hash of a trial's counts at a revision."""
    return f"{_ENDPOINTS}counts:{revision}:{endpoint}"


def trial_latencies(endpoint: str, revision: int) -> str:
    """List of the stable target's latencies."""
    return f"{_ENDPOINTS}latencies:{revision}:{endpoint}"


def trial_events(endpoint: str) -> str:
    """List of canary events, newest first."""
    return f"{_ENDPOINTS}events:{endpoint}"


def trial_lease() -> str:
    """String with the gateway that decides about canaries."""
    return f"{_ENDPOINTS}lease"


def heard_revisions() -> str:
    """Hash of gateways' revisions, with expiry."""
    return f"{_ENDPOINTS}heard"


def kept_target(endpoint: str, tenant: str, name: str) -> str:
    """String with a repeatable request's target."""
    return f"qinfer:{{{endpoint}|targets}}:{tenant}:{name}"


def reply(reply_to: str) -> str:
    """Stream at an address such as `reply:<owner>`."""
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
    """Count of a span's cached bytes."""
    return f"qinfer:cache-bytes:{span}"


def counts_asked() -> str:
    """Stream that asks workers for counts."""
    return f"{_COUNTS}asked"


def counts_added() -> str:
    """Stream of workers' answers."""
    return f"{_COUNTS}added"


def console_session(digest: str) -> str:
    """String with the hash of the API key of a browser's session."""
    return f"{_CONSOLE}session:{digest}"


def console_sessions(digest: str) -> str:
    """Sorted set of an API key's sessions, by the time of their sign-in."""
    return f"{_CONSOLE}sessions:{digest}"


def count_history(slot: int) -> str:
    """Hash of what each gateway counted in some seconds."""
    return f"{_CONSOLE}counts:{slot}"


def audit() -> str:
    """Stream of administrative acts and refused keys."""
    return f"{_CONSOLE}audit"


def quota(tenant: str) -> str:
    """Hash of a tenant's quota."""
    return f"qinfer:quota:{tenant}"


def job(model: str, partition: int, job_id: str) -> str:
    """Hash of a bulk job."""
    return f"{prefix(model, partition)}job:{job_id}"


def job_part(model: str, partition: int, job_id: str, part: str) -> str:
    """A job's `todo`, `in_lane`, `outcomes` or `log`."""
    return f"{prefix(model, partition)}job-{part}:{job_id}"


def jobs() -> str:
    """Sorted set of bulk jobs."""
    return "qinfer:jobs"


def job_places() -> str:
    """Hash of jobs' partitions and models."""
    return "qinfer:jobs:places"


def open_jobs() -> str:
    """Sorted set of open jobs, by deadline."""
    return "qinfer:jobs:open"


def sweep() -> str:
    """String while a bulk worker has the turn to look for stuck jobs."""
    return "qinfer:jobs:sweep"


def label_board(model: str, tenant: str, project: int, part: str) -> str:
    """A project's `entries`, `data`, `ended`, or a state's index."""
    return f"{prefix(model, 0)}label-{part}:{project}:{tenant}"


def label_boards(model: str) -> str:
    """Sorted set of a model's projects."""
    return f"{prefix(model, 0)}label-boards"
