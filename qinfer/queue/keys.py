"""Redis keys: the only place that spells them.

The keys of a queue partition share the hash tag `{<model>#<partition>}`, hence a cluster slot, so that one script may
touch several. Configuration and statistics of a model live with its partition 0.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

from redis.crc import key_slot

if TYPE_CHECKING:  # a worker's renewer imports this module, which must stay small
    from qinfer.queue.entries import Lane

GROUP = b"workers"
"""The consumer group of every lane."""

RELEASED = b"released"
"""The consumer that owns released entries, from which `fetch` takes first. No worker may have this name."""

SUSPECTS = b"suspects"
"""The consumer that owns released suspects; only `reclaim` takes them."""

_BRIDGES = "qinfer:{bridges}:"
_RESOURCES = "qinfer:{resources}:"
_COUNTS = "qinfer:{counts}:"

ENDPOINTS = ".endpoints"
"""Stands for a model in the deliveries of endpoints; no model has such a name."""

_ENDPOINTS = f"qinfer:{{{ENDPOINTS}#0}}:"


@lru_cache(maxsize=65536)  # one call per request
def lane(of: "Lane") -> bytes:
    """Returns the stream of a lane."""
    return f"{_partition(of.model, of.partition)}{of.version}:{of.name}".encode()


@lru_cache(maxsize=65536)  # one call per request
def lane_slot(of: "Lane") -> int:
    """Returns the cluster slot of a lane and its partition."""
    return slot(lane(of))


def slot(key: str | bytes) -> int:
    """Returns the cluster slot of a key, 0 … 16383."""
    return key_slot(key if isinstance(key, bytes) else key.encode())


def prefix(model: str, number: int) -> str:
    """Returns the prefix of a partition's keys, for scripts that derive a lane from a record."""
    return _partition(model, number)


def dead_letters(model: str, partition: int = 0) -> str:
    """Returns the dead-letter stream of a partition."""
    return f"{_partition(model, partition)}dlq"


def payload(model: str, partition: int, request_id: str) -> str:
    """Returns the string of a request's large body."""
    return f"{_partition(model, partition)}payload:{request_id}"


def result(model: str, partition: int, request_id: str) -> str:
    """Returns the string of an asynchronous request's outcome, or of a synchronous one's large outputs."""
    return f"{_partition(model, partition)}result:{request_id}"


def responses(model: str, partition: int, request_id: str) -> str:
    """Returns the list of a decoupled model's stored responses to a request before the final one."""
    return f"{_partition(model, partition)}responses:{request_id}"


def stored(model: str, partition: int, tenant: str) -> str:
    """Returns the hash of the bytes of a tenant's stored results; the sorted set `stored-until` has their expiry."""
    return f"{_partition(model, partition)}stored:{tenant}"


def request(model: str, partition: int, request_id: str) -> str:
    """Returns the hash of an asynchronous request's state."""
    return f"{_partition(model, partition)}request:{request_id}"


def staged(key: str, nonce: str) -> str:
    """Returns the string of a staged value, which a script renames to `key`; no request id contains a `|`."""
    return f"{key}|{nonce}"


def idempotency(model: str, partition: int, tenant: str, key_hash: str) -> str:
    """Returns the string that maps an idempotency key to a request id and, on a second line, its body's hash."""
    return f"{_partition(model, partition)}idem:{tenant}:{key_hash}"


def sent(of: "Lane", entry_id: str) -> str:
    """Returns the string that marks an entry with a sent response."""
    return f"{_partition(of.model, of.partition)}sent:{of.version}:{of.name}:{entry_id}"


def cancels(model: str, partition: int = 0) -> str:
    """Returns the stream of entries that were cancelled while a worker held them."""
    return f"{_partition(model, partition)}cancels"


def moved(model: str, partition: int = 0) -> str:
    """Returns the hash of the new places of entries that were moved to another version."""
    return f"{_partition(model, partition)}moved"


def due(model: str, partition: int = 0) -> str:
    """Returns the sorted set of the deadlines of asynchronous requests."""
    return f"{_partition(model, partition)}due"


def deliveries(model: str, partition: int, kind: str) -> str:
    """Returns the stream of pending deliveries of a kind; the suffix `|later` is the sorted set of taken ones."""
    return f"{_partition(model, partition)}deliveries:{kind}"


def confirm(model: str, partition: int = 0) -> str:
    """Returns the string that is written before a wait for replicas or the disk; see `durability`."""
    return f"{_partition(model, partition)}confirm"


def sequence(model: str, partition: int, name: str) -> str:
    """Returns the hash of a sequence; `name` has its tenant and its correlation id."""
    return f"{_partition(model, partition)}sequence:{name}"


def sequence_state(model: str, partition: int, name: str) -> str:
    """Returns the key of a sequence's large state."""
    return f"{_partition(model, partition)}sequence-state:{name}"


def sequence_answer(model: str, partition: int, name: str, step: str) -> str:
    """Returns the key of the large response to the committed step `<life>.<number>`."""
    return f"{_partition(model, partition)}sequence-answer:{step}:{name}"


def sequences(model: str, partition: int) -> str:
    """Returns the sorted set of open sequences, by the time of the janitor's next look."""
    return f"{_partition(model, partition)}sequences"


def sequence_endings(model: str, partition: int) -> str:
    """Returns the sorted set of sequences with unanswered steps of an ended life, by when to answer them."""
    return f"{_partition(model, partition)}sequence-endings"


def sequence_owners(model: str, partition: int) -> str:
    """Returns the sorted set of workers that own sequences, by the ends of their leases."""
    return f"{_partition(model, partition)}sequence-owners"


def sequence_owned(model: str, partition: int, worker_id: str) -> str:
    """Returns the set of the sequences that a worker owns."""
    return f"{_partition(model, partition)}sequence-owned:{worker_id}"


def sequence_counts(model: str, partition: int) -> str:
    """Returns the hash of the counts of handed-over and lost sequences."""
    return f"{_partition(model, partition)}sequence-counts"


def sequences_of(model: str, partition: int, tenant: str) -> str:
    """Returns the set of a tenant's open sequences; without a tenant, the hash of weights."""
    return f"{sequences(model, partition)}~{tenant}"


def sequence_turn(model: str, partition: int, tenant: str) -> str:
    """Returns the string that marks a slot just given up for a tenant."""
    return f"{_partition(model, partition)}sequence-turn:{tenant}"


def sequence_numbers(model: str, partition: int) -> str:
    """Returns the hash of a model's first tenant and of the count of allotted numbers."""
    return f"{_partition(model, partition)}sequence-numbers"


def sequence_number(model: str, partition: int, number: int) -> str:
    """Returns the string with the sequence that has a number."""
    return f"{_partition(model, partition)}sequence-number:{number}"


def sequence_told(model: str, partition: int, name: str) -> str:
    """Returns the string with a sequence's number for a model without sequences."""
    return f"{_partition(model, partition)}sequence-told:{name}"


def config(model: str) -> str:
    """Returns the hash of a model's normalised configuration and latency model."""
    return f"{_partition(model, 0)}config"


def stats(model: str, version: int) -> str:
    """Returns the hash of a model version's statistics."""
    return f"{_partition(model, 0)}stats:{version}"


def desired() -> str:
    """Returns the hash of the desired state of all models."""
    return "qinfer:desired"


def doorbell() -> str:
    """Returns the stream of rings; see `qinfer.queue.doorbell`."""
    return "qinfer:doorbell"


def installation() -> str:
    """Returns the string of the random id of the data in this Redis."""
    return "qinfer:installation"


def control() -> str:
    """Returns the stream that wakes the readers of the desired state."""
    return "qinfer:control"


def completions() -> str:
    """Returns the hash of runtime-completed configurations, by the hash of the model's files."""
    return "qinfer:completions"


def settings() -> str:
    """Returns the hash of the settings that clients change and all gateways follow."""
    return "qinfer:settings"


def worker(worker_id: str) -> str:
    """Returns the hash of a worker's heartbeat."""
    return f"qinfer:worker:{worker_id}"


def workers() -> str:
    """Returns the sorted set of worker ids by last heartbeat."""
    return "qinfer:workers"


def pins() -> str:
    """Returns the hash of the pins of model versions, with their expiry (ms of Redis' time)."""
    return "qinfer:pins"


def scalers() -> str:
    """Returns the hash of the live autoscalers, with their expiry (ms of Redis' time)."""
    return "qinfer:scalers"


def scaler_counts() -> str:
    """Returns the hash of the counts of all autoscalers."""
    return "qinfer:scaler-counts"


def liveness(program: str) -> str:
    """Returns the sorted set of a program's live processes, by the ends of their liveness."""
    return f"qinfer:signs:{program}"


def bridges() -> str:
    """Returns the hash of bridges: expiry (ms of Redis' time), last report, gauges."""
    return f"{_BRIDGES}live"


def routes() -> str:
    """Returns the sorted set of the bridges' routes, by last report."""
    return f"{_BRIDGES}routes"


def route_counts(route: str) -> str:
    """Returns the hash of the counts of all bridges for a route."""
    return f"{_BRIDGES}counts:{route}"


def endpoints() -> str:
    """Returns the hash of endpoint declarations by name; the empty name has their latest revision."""
    return f"{_ENDPOINTS}declared"


def trials() -> str:
    """Returns the hash of canary trials by endpoint: the revision of each, and its record."""
    return f"{_ENDPOINTS}trials"


def trial_counts(endpoint: str, revision: int) -> str:
    """Returns the hash of the gateways' counts of a trial at one revision of the endpoint."""
    return f"{_ENDPOINTS}counts:{revision}:{endpoint}"


def trial_latencies(endpoint: str, revision: int) -> str:
    """Returns the list of the stable target's latest latencies."""
    return f"{_ENDPOINTS}latencies:{revision}:{endpoint}"


def trial_events(endpoint: str) -> str:
    """Returns the list of the latest events of an endpoint's canaries, newest first."""
    return f"{_ENDPOINTS}events:{endpoint}"


def trial_lease() -> str:
    """Returns the string with the gateway that decides about canaries."""
    return f"{_ENDPOINTS}lease"


def heard_revisions() -> str:
    """Returns the hash of the endpoint revisions that gateways apply, with their expiry."""
    return f"{_ENDPOINTS}heard"


def kept_target(endpoint: str, tenant: str, name: str) -> str:
    """Returns the string with the target of a repeatable request."""
    return f"qinfer:{{{endpoint}|targets}}:{tenant}:{name}"


def reply(reply_to: str) -> str:
    """Returns the reply stream at an address such as `reply:<owner>`."""
    return f"qinfer:{reply_to}"


@lru_cache(maxsize=1024)
def reply_stream(reply_to: str) -> tuple[int, bytes]:
    """Returns the slot and the key of a reply stream."""
    key = reply(reply_to).encode()
    return slot(key), key


def cached_response(key: str) -> str:
    """Returns the string of the cached response to a request of some hash."""
    return f"qinfer:cache:{key}"


def cached_bytes(span: int) -> str:
    """Returns the count of bytes that were cached in a span of time."""
    return f"qinfer:cache-bytes:{span}"


def counts_asked() -> str:
    """Returns the stream by which readers of statistics ask workers to add their counts."""
    return f"{_COUNTS}asked"


def counts_added() -> str:
    """Returns the stream of the workers' answers to `counts_asked`."""
    return f"{_COUNTS}added"


def resource_leases() -> str:
    """Returns the sorted set of workers that use global resources, by the ends of their leases."""
    return f"{_RESOURCES}leases"


def resource_units() -> str:
    """Returns the hash of the resource units that each worker holds."""
    return f"{_RESOURCES}units"


def resource_maxima() -> str:
    """Returns the hash of the total units, as each worker configures them."""
    return f"{_RESOURCES}maxima"


def resource_line() -> str:
    """Returns the sorted set of waiting requests for resources, by since when."""
    return f"{_RESOURCES}line"


def resource_news() -> str:
    """Returns the stream that tells workers of freed units and of waiting workers."""
    return f"{_RESOURCES}news"


def quota(tenant: str) -> str:
    """Returns the hash of a tenant's remaining quota and of the gateways' parts."""
    return f"qinfer:quota:{tenant}"


def job(model: str, partition: int, job_id: str) -> str:
    """Returns the hash of a bulk job."""
    return f"{_partition(model, partition)}job:{job_id}"


def job_part(model: str, partition: int, job_id: str, part: str) -> str:
    """Returns a key of a bulk job: its `todo`, `in_lane`, `outcomes` or `log`."""
    return f"{_partition(model, partition)}job-{part}:{job_id}"


def jobs() -> str:
    """Returns the sorted set of all bulk jobs by creation time."""
    return "qinfer:jobs"


def job_places() -> str:
    """Returns the hash of each bulk job's partition and model."""
    return "qinfer:jobs:places"


def open_jobs() -> str:
    """Returns the sorted set of bulk jobs that may not have ended, by deadline."""
    return "qinfer:jobs:open"


def label_board(model: str, tenant: str, project: int, part: str) -> str:
    """Returns a key of a labeling project's tasks: `entries`, `data`, `ended`, or a state's index."""
    return f"{_partition(model, 0)}label-{part}:{project}:{tenant}"


def label_boards(model: str) -> str:
    """Returns the sorted set of the labeling projects of a model, by expiry."""
    return f"{_partition(model, 0)}label-boards"


def _partition(model: str, number: int) -> str:
    return f"qinfer:{{{model}#{number}}}:"
