"""Writes the reference page of the Redis keys: their names come from the code that spells them; no key may be missing.

The purpose and the lifetime of each key are written here.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qinfer.jobs.tasks import QUEUE
from qinfer.queue import keys
from qinfer.queue.entries import Lane

HEAD = """
# Redis keys

This page lists all keys, for inspection with `redis-cli`. Only `qinfer/queue/keys.py` spells them. The layout may
change between minor versions.

The keys of a model begin with `qinfer:{<model>#<partition>}:`, written as `…:` here. The part in braces is the hash
tag: in a cluster, keys with the same tag are on one node.

| key | type | lifetime | contents |
|---|---|---|---|"""
FOOT = """
A payload or result in a [payload store](../how-to/large-tensors.md) is a hash with the fields `v` (the version of this
format, 1), `name` (of the object, below `QINFER_LIMITS__PAYLOAD_URL`) and `size`. Its dead letter has the fields
`object`, `object_size` and `v`.

`XLEN` of a lane is the number of waiting entries plus those in flight, because entries are deleted when they are
finished; its shares, `<lane>~<n>`, count too. Scale workers by this number, which is also in the metrics; do not use
the `lag` of the consumer group: Redis cannot compute it after entries were deleted in the middle.

The keys beside a Redis list that a bridge reads are in [its guide](../how-to/bridge-a-queue.md#redis-lists).
"""
NOT_KEYS = {"lane_slot", "reply_stream", "slot", "prefix"}
"""Functions of `keys` that spell no key of their own."""

BROKER = (
    f"| `{QUEUE}`, `unacked*`, `_kombu.*` | Celery's | while tasks wait "
    "| tasks of bulk jobs, in the Redis of `QINFER_BULK__BROKER_URL` |"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `kind`, `lifetime` and `holds` are its other cells.

    Attributes:
        spell: The function of `keys` that spells the key.
        names: Arguments of `spell` besides model, version and partition, for each key of this line.
        kind: The type in Redis.
        lifetime: How long the key exists.
        holds: Its contents.
        suffix: An optional end of the key.
    """

    spell: Callable[..., str | bytes]
    kind: str
    lifetime: str
    holds: str
    names: tuple[Mapping[str, str | int], ...] = ({},)
    suffix: str = ""


_SEQUENCE = ({"name": "<name>"},)
_ID = ({"request_id": "<id>"},)
_JOB = ({"job_id": "<id>"},)
_VALUE = "string, or hash"
_AS_JOB = "as long as the job"
_PROJECT: Mapping[str, str | int] = {"project": 8888, "tenant": "<tenant>"}


def _parts(*parts: str) -> tuple[Mapping[str, str | int], ...]:
    return tuple({"job_id": "<id>", "part": part} for part in parts)


def _boards(*parts: str) -> tuple[Mapping[str, str | int], ...]:
    return tuple({**_PROJECT, "part": part} for part in parts)


ROWS = (
    Row(
        keys.lane,
        "stream",
        "permanent",
        "one entry per request, with a field for the frame; consumer group `workers`. Lanes `p1` … `p32`, each with "
        "one for delayed requests, are for requests; `shadow` is for requests that a target executes as a shadow; "
        "`bulk1`, `bulk2`, `bulk3` are for shards of bulk jobs of high, normal and low priority. Lanes without the "
        "group: `seq` and `seq.handed`, the sequences that wait for an owner (`seq~<tenant>` has those of a tenant), "
        "until a week after the last entry; `seq@<worker>`, the steps for an owner, and tickets, until a day after its "
        "lease; `0:closed:<version>:seq@<worker>:<number>`, what such a lane held when its worker died or left, until "
        "the next owners have answered it, a day at most; `0:steps:<name>`, the steps of a sequence that had no owner, "
        "until a day after they expire",
    ),
    Row(
        keys.lane,
        "stream, like its lane",
        "until no tenant has it, and it is empty",
        "the entries of a tenant, if several use the lane: `p1~1` … `p1~15`; one tenant has the lane itself. Beside "
        "the lane are `p1~`, `p1~tenants`, `p1~seen` and `p1~leads`: the shares, the tenant of each, the last time at "
        "which each tenant submitted, and the leads, which decide the next turn",
        suffix="~<n>",
    ),
    Row(
        keys.lane,
        "set",
        "until no entry executes",
        "the executing entries of a level with a `max_queue_size`; all other entries count against this limit",
        suffix="~executing",
    ),
    Row(
        keys.payload,
        _VALUE,
        "removed with its entry; expires after its deadline",
        "a request's tensors, if they are too large for the stream; a hash refers to an object",
        _ID,
    ),
    Row(
        keys.request,
        "hash",
        "until its deadline, then the result's and the tombstone's time to live",
        "the record of an asynchronous request",
        _ID,
    ),
    Row(
        keys.result,
        _VALUE,
        "its time to live",
        "an asynchronous request's outcome, or a synchronous one's large outputs until they are read",
        _ID,
    ),
    Row(
        keys.stored_responses,
        "list",
        "as long as its request's record; after the end, the result's time to live",
        "the responses of an asynchronous request to a decoupled model, except the final one",
        _ID,
    ),
    Row(
        keys.stored,
        "hash",
        "as long as the last result",
        "bytes of the results of a tenant, by request: results of stored requests, if several tenants have keys, and "
        "large answers that no gateway has read yet; the sorted set `stored-until:<tenant>` has their expiry times",
        ({"tenant": "<tenant>"},),
    ),
    Row(
        keys.stored_files,
        "hash",
        "as long as the last result",
        "the same of results in files of a local directory; its sorted set is `file-stored-until:<tenant>`",
        ({"tenant": "<tenant>"},),
    ),
    Row(
        keys.staged,
        _VALUE,
        "at most ten minutes",
        "a large value before it is renamed to the key without the nonce",
        ({"key": "…:payload:<id>", "nonce": "<nonce>"}, {"key": "…:result:<id>", "nonce": "<nonce>"}),
    ),
    Row(
        keys.idempotency,
        "string",
        "expires",
        "an idempotency key's request id, and the hash of its body",
        ({"tenant": "<tenant>", "key_hash": "<hash>"},),
    ),
    Row(
        keys.sent,
        "string",
        "until some time after the request's deadline",
        "a mark: a response of this entry's stream has left, so a worker that reclaims the entry does not execute it",
        ({"entry_id": "<entry>"},),
    ),
    Row(
        keys.cancels,
        "stream",
        "an hour after the last",
        "the entries that were cancelled while a worker held them, the last thousand",
    ),
    Row(
        keys.moved,
        "hash",
        "an hour after the last",
        "the old and new address, `<version>:<lane>:<entry>`, of each entry that was moved from one version's lane "
        "to another's; for an asynchronous request, its record has the new address",
    ),
    Row(
        keys.operation,
        "hash",
        "a week after its last change",
        "an operation on many stored requests or dead letters of the model: its description, place and counts",
        ({"operation_id": "<id>"},),
    ),
    Row(
        keys.operation_lease,
        "string",
        "5 s after the last renewal",
        "the gateway that works on the operation",
        ({"operation_id": "<id>"},),
    ),
    Row(keys.due, "sorted set", "permanent", "asynchronous requests that have not ended, by deadline"),
    Row(
        keys.ended,
        "sorted set",
        "as long as the last record",
        "asynchronous requests that have ended in this state, by the expiry of their records, in 140 bytes each. One "
        "that was replayed stays until then, and counts no longer",
        ({"state": "<state>"},),
    ),
    Row(
        keys.deliveries,
        "stream",
        "a day longer than the longest-kept record of its items; `jobs`: permanent",
        "pending deliveries by kind: `webhooks`; `jobs`, bulk jobs that must be examined; `outbox:<name>`, ended "
        "requests whose answers a program such as a bridge publishes, with its notes on them; "
        "`labels:<project>:<tenant>`, waiting tasks. With the suffix `|later`, a sorted set of taken deliveries, by "
        "the time at which they are due again",
        ({"kind": "<kind>"},),
    ),
    Row(
        keys.job,
        "hash",
        "`QINFER_BULK__RECORD_TTL_S` after its end",
        "the record of a bulk job; its fields `resume:<index>` have the progress of interrupted shards",
        ({"job_id": "<id>"},),
    ),
    Row(
        keys.job_part,
        "sorted set",
        "as long as the job, or until no shard waits",
        "the shards that wait for a place in the lane, by index",
        _parts("todo"),
    ),
    Row(
        keys.job_part,
        "hash",
        "as long as the job",
        "the shards in the lane, waiting or delivered: index and entry",
        _parts("in_lane"),
    ),
    Row(
        keys.job_part,
        "hash",
        "as long as the job",
        "the settled shards: rows, failed rows, and the reason if the shard failed",
        _parts("outcomes"),
    ),
    Row(keys.job_part, "list", "as long as the job", "the job's log, the latest 200 lines", _parts("log")),
    Row(
        keys.label_board,
        "hash",
        "twice `QINFER_LABELING__RECORD_TTL_S` after the last change; ended tasks: once",
        "the tasks of a Label Studio project whose predictions are pushed",
        _boards("entries"),
    ),
    Row(
        keys.label_board,
        "hash",
        "the same; ended tasks: none",
        "the tasks' data, if at most 64 KiB",
        _boards("data"),
    ),
    Row(
        keys.label_board,
        "sorted set",
        "the same",
        "the ended tasks, by the time of their end",
        _boards("ended"),
    ),
    Row(
        keys.label_board,
        "sorted sets",
        "the same",
        "the tasks in each state, by their ids",
        _boards("waiting", "open", "sending", "done", "failed"),
    ),
    Row(keys.label_boards, "sorted set", "the same", "the projects of which a model has tasks"),
    Row(
        keys.sequence,
        "hash",
        "a day longer than its steps and its idle time; five minutes after its end",
        "the record of a sequence: owner, fencing token, version, steps accepted and committed, its state, responses",
        _SEQUENCE,
    ),
    Row(
        keys.sequence_state,
        _VALUE,
        "until its life ends",
        "the committed state of a sequence, if it is above 1 MiB or in the payload store",
        _SEQUENCE,
    ),
    Row(
        keys.sequence_answer,
        _VALUE,
        "until the next step is committed; a day at most",
        "the response to a committed step, if it is above 1 MiB or in the payload store",
        ({"name": "<name>", "step": "<step>"},),
    ),
    Row(keys.sequences, "sorted set", "permanent", "open sequences, by the time of the janitor's next check"),
    Row(
        keys.sequence_endings,
        "sorted set",
        "permanent",
        "sequences with unanswered steps of an ended life, by the time at which these are answered next",
    ),
    Row(keys.sequence_owners, "sorted set", "permanent", "the workers that own sequences, by the ends of their leases"),
    Row(
        keys.sequence_owned,
        "set",
        "until its last sequence has ended",
        "the sequences that a worker owns; the key without an id has those of workers whose lease has ended",
        ({"worker_id": "<worker>"},),
    ),
    Row(
        keys.sequence_lanes,
        "set",
        "permanent",
        "the lanes of workers to which gateways append steps",
    ),
    Row(
        keys.sequence_closed,
        "set",
        "until the steps are answered, two days at most",
        "the closed lanes of such workers",
    ),
    Row(keys.sequence_counts, "hash", "permanent", "counts of sequences: handed over, lost"),
    Row(
        keys.sequences_of,
        "set",
        "until its last sequence has ended",
        "the open sequences of a tenant; the key without a name is a hash with the weights of tenants that have any",
        ({"tenant": "<tenant>"},),
    ),
    Row(
        keys.sequence_turn,
        "string",
        "half a second",
        "a worker has just given up a slot for a tenant",
        ({"tenant": "<tenant>"},),
    ),
    Row(
        keys.sequence_numbers,
        "hash",
        "permanent",
        "the first tenant that had a sequence at the model, and the count of numbers allotted to other tenants",
    ),
    Row(
        keys.sequence_number,
        "string",
        "as long as the record of its sequence",
        "the name of the sequence that the model sees under this number",
        ({"number": "<n>"},),
    ),
    Row(
        keys.sequence_told,
        "string",
        "five minutes after the last request",
        "the number that a model without sequences sees for requests that name a sequence",
        ({"name": "<name>"},),
    ),
    Row(
        keys.dead_letters,
        "stream",
        "seven days after the last dead letter, bounded by bytes",
        "dead letters, with their payloads",
    ),
    Row(keys.confirm, "string", "a minute", "empty; it is written before a wait for replicas or the disk"),
    Row(
        keys.config,
        "hash",
        "permanent",
        "the normalised configuration of the model, and the measured speed of its versions",
    ),
    Row(keys.stats, "hash", "permanent", "statistics, which never decrease"),
    Row(
        keys.installation,
        "string",
        "permanent",
        "a random id of the data in this Redis; `restoring:` and an id, for at most ten seconds, while a gateway "
        "restores data that Redis has lost",
    ),
    Row(
        keys.segment_secret,
        "string",
        "permanent",
        "a secret of the processes that share [memory](../how-to/large-tensors.md)",
    ),
    Row(keys.desired, "hash", "permanent", "the desired models, with their generations"),
    Row(keys.control, "stream", "bounded", "wakes the readers of the desired state"),
    Row(
        keys.doorbell,
        "stream",
        "bounded; an hour after the last",
        "wakes workers that sleep before idle lanes, for entries that were given back and for new streams of tenants",
    ),
    Row(keys.endpoints, "hash", "permanent", "endpoints by name; the empty name has the number of the last change"),
    Row(
        keys.trials,
        "hash",
        "permanent",
        "the trials of canaries by endpoint: the revision, the steps and the evidence so far",
    ),
    Row(
        keys.trial_counts,
        "hash",
        "an hour after the last",
        "the counts of gateways and bridges for a trial at a revision of its endpoint",
        ({"endpoint": "<endpoint>", "revision": 7},),
    ),
    Row(
        keys.trial_latencies,
        "list",
        "bounded; an hour after the last",
        "latencies of the stable target, from which limits are computed",
        ({"endpoint": "<endpoint>", "revision": 7},),
    ),
    Row(
        keys.trial_events,
        "list",
        "bounded; 90 days after the last",
        "the events of the canaries of an endpoint, as JSON",
        ({"endpoint": "<endpoint>"},),
    ),
    Row(keys.trial_lease, "string", "5 s after the last renewal", "the gateway that decides about canaries"),
    Row(
        keys.heard_revisions,
        "hash",
        "3 s after the last",
        "the revision of endpoints that each gateway, bridge, and worker whose models call others uses",
    ),
    Row(
        keys.kept_target,
        "string",
        "as long as the record of the request",
        "the target of a request to an endpoint that may be repeated: by its id, and by its idempotency key",
        ({"endpoint": "<endpoint>", "tenant": "<tenant>", "name": "<id:… or key:…>"},),
    ),
    Row(
        keys.console_session,
        "string",
        "`QINFER_CONSOLE__SESSION_S` after the last request",
        "the SHA-256 of the API key with which a browser signed in to the console; the name is that of its cookie",
        ({"digest": "<sha256>"},),
    ),
    Row(
        keys.console_sessions,
        "sorted set",
        "`QINFER_CONSOLE__SESSION_S` after the last sign-in",
        "session → time of the sign-in (µs): an API key's sessions, of which the oldest ends",
        ({"digest": "<sha256>"},),
    ),
    Row(
        keys.count_history,
        "hash",
        "an hour",
        "for the console's charts: the counts of each gateway in five seconds, and the waiting work",
        ({"slot": 358012345},),
    ),
    Row(keys.audit, "stream", "the last 10,000 lines", "administrative acts and refused keys, as in the audit log"),
    Row(
        keys.completions,
        "hash",
        "permanent",
        "configurations that a runtime completed, by the hash of the model's files",
    ),
    Row(keys.settings, "hash", "permanent", "settings that clients change: logging, tracing"),
    Row(keys.workers, "sorted set", "permanent", "ids of workers by the time of their last heartbeat"),
    Row(keys.jobs, "sorted set", "permanent", "ids of bulk jobs by the time of their creation"),
    Row(keys.open_jobs, "sorted set", "permanent", "ids of bulk jobs that may not have ended, by deadline"),
    Row(keys.sweep, "string", "`bulk.sweep_every_s`", "the turn of a bulk worker to look for stuck jobs"),
    Row(keys.job_places, "hash", "permanent", "the partition and model of each bulk job"),
    Row(
        keys.worker,
        "hash",
        "expires after the last heartbeat",
        "device, models with their state, throughput; the models' own metrics; the key that asks the worker to drain",
        ({"worker_id": "<id>"},),
    ),
    Row(
        keys.worker_log,
        "string",
        "an hour after the worker's end",
        "a worker's last warnings and errors, newest first, at most 50 and 64 KiB",
        ({"worker_id": "<id>"},),
    ),
    Row(keys.operations, "sorted set", "permanent", "ids of the operations of the last week by their creation"),
    Row(keys.open_operations, "sorted set", "permanent", "ids of the operations that run, by their creation"),
    Row(keys.pauses, "hash", "until resumed", "the paused models and versions: since when, by whom and why"),
    Row(keys.recordings, "hash", "expires with its last record", "the recordings that run, by model"),
    Row(
        keys.recorded,
        "stream",
        "ten minutes after the end of the recording",
        "copies of requests: inputs, parameters and arrival",
        ({"recording_id": "<id>"},),
    ),
    Row(
        keys.recorded_counts,
        "hash",
        "the same",
        "the recording, its bytes and its counts",
        ({"recording_id": "<id>"},),
    ),
    Row(
        keys.pins,
        "hash",
        "expires with its last record",
        "pins, which keep model versions loaded: model, version, content hash, reason, holder, expiry time",
    ),
    Row(
        keys.scalers,
        "hash",
        "expires with its last record",
        "the live autoscalers: the record of each, and its expiry time",
    ),
    Row(keys.scaler_counts, "hash", "permanent", "counts of all autoscalers: steps up and down, restarts, kills"),
    Row(
        keys.liveness,
        "sorted set",
        "15 s after the last heartbeat",
        "the live gateways, bulk workers and bridges, and the addresses at which others read "
        "[tensors](../how-to/large-tensors.md), by the time at which they no longer count as alive",
        ({"program": "gateway"}, {"program": "bulk"}, {"program": "bridge"}, {"program": "tensors"}),
    ),
    Row(
        keys.bridges,
        "hash",
        "15 s after the last report; its number an hour longer",
        "the live bridges: expiry time, number of the last report, and gauges by route of each",
    ),
    Row(
        keys.routes,
        "sorted set",
        "a route: 30 days after its last report",
        "the routes of bridges, by the time of their last report",
    ),
    Row(
        keys.route_counts,
        "hash",
        "30 days after the last report of the route",
        "counts of all bridges for a route, which never decrease",
        ({"route": "<route>"},),
    ),
    Row(
        keys.reply,
        "stream",
        "expires with its reader",
        "responses for one gateway, or for one worker whose models call others; credits for a worker's streams",
        ({"reply_to": "reply:<owner>"},),
    ),
    Row(
        keys.cached_response,
        "string",
        "the time to live in `QINFER_CACHE__CONFIG`",
        "a response of a model with `response_cache`, of at most 1 MiB, if the cache is in Redis; its key is a hash of "
        "the request",
        ({"key": "<hash>"},),
    ),
    Row(
        keys.quota,
        "hash",
        "until its bucket is full again, and a minute",
        "the remaining quota of a tenant, and the part that each gateway holds",
        ({"tenant": "<tenant>"},),
    ),
    Row(keys.counts_asked, "stream", "permanent", "reads of statistics, the last 256: workers add their counts then"),
    Row(
        keys.counts_added,
        "stream",
        "permanent",
        "the workers' answers to these reads, with their executing requests, the last 256",
    ),
    Row(
        keys.cached_bytes,
        "string",
        "a quarter of that time",
        "the number of bytes cached in an eighth of that time, each with a limit, so that the sum is limited",
        ({"span": "<span>"},),
    ),
)


def keys_page(notice: str) -> str:
    """Returns the text of `redis-keys.md`.

    Args:
        notice: The comment that says where the page comes from.

    Raises:
        ValueError: A function of `qinfer.queue.keys` is in no row.
    """
    told = {row.spell.__name__ for row in ROWS}
    if untold := sorted(spelling() - told):
        raise ValueError(f"scripts/reference_keys.py has no row for {', '.join(untold)} of qinfer/queue/keys.py")
    lines = [notice + HEAD]
    for row in ROWS:
        names = ", ".join(f"`{_key(row.spell, given)}{row.suffix}`" for given in row.names).replace("|", "\\|")
        lines.append(f"| {names} | {row.kind} | {row.lifetime} | {row.holds} |")
    return "\n".join([*lines, BROKER, FOOT.rstrip("\n")]) + "\n"


def spelling() -> set[str]:
    """Returns the names of what spells a key in `qinfer.queue.keys`."""
    public = {name for name, value in vars(keys).items() if callable(value) and value.__module__ == keys.__name__}
    return {name for name in public if not name.startswith("_")} - NOT_KEYS


def _key(spell: Callable[..., str | bytes], given: Mapping[str, str | int]) -> str:
    """Calls what spells a key with words in place of names, and returns it as the page writes it."""
    standing: dict[str, object] = {"of": Lane("M", 7777, "<lane>"), "model": "M", "partition": 0, "version": 7777}
    wanted = inspect.signature(spell).parameters
    spelt = spell(**{name: value for name, value in {**standing, **given}.items() if name in wanted})
    text = spelt.decode() if isinstance(spelt, bytes) else spelt
    for number, word in (("7777", "<version>"), ("8888", "<project>")):
        text = text.replace(number, word)
    return text.replace("qinfer:{M#0}:", "…:")
