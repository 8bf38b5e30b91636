"""Writes the reference page of the Redis keys: the code that spells a key is called for its name, and none is left out.

What a key is for, and how long it lives, is said here.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qinfer.jobs.tasks import QUEUE
from qinfer.queue import keys
from qinfer.queue.entries import Lane

HEAD = """
# Redis keys

Spelled in `qinfer/queue/keys.py`, and nowhere else. For looking around with `redis-cli`; the layout may change
between minor versions.

The keys of a model begin with `qinfer:{<model>#<partition>}:`, written as `…:` here. The part in braces is the hash
tag: in a cluster, keys with the same tag are on one node.

| key | type | lifetime | holds |
|---|---|---|---|"""
FOOT = """
A payload or result that is kept in a [payload store](../how-to/large-tensors.md) is a hash with the fields `v` (of this
form, 1), `name` (of the object, below `QINFER_LIMITS__PAYLOAD_URL`) and `size`. A dead letter has the fields `object`,
`object_size` and `v` then.

`XLEN` of a lane is what waits plus what is in flight: entries are deleted when they are finished. It is the number to
scale workers by, and the metrics show it. The `lag` of the consumer group is not: Redis can't tell it once entries were
deleted in the middle.
"""
NOT_KEYS = {"lane_slot", "reply_stream", "slot", "prefix"}
"""What `keys` has besides, that spells no key of its own."""

BROKER = (
    f"| `{QUEUE}`, `unacked*`, `_kombu.*` | Celery's | while tasks wait "
    "| tasks of bulk jobs, in the Redis of `QINFER_BULK__BROKER_URL` |"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `kind`, `lifetime` and `holds` are its other cells.

    Attributes:
        spell: What of `keys` spells the key.
        names: Arguments of it besides model, version and partition, for each key of this line.
        kind: The type in Redis.
        lifetime: How long it is there.
        holds: What is in it.
        suffix: What the key may go on with.
    """

    spell: Callable[..., str | bytes]
    kind: str
    lifetime: str
    holds: str
    names: tuple[Mapping[str, str | int], ...] = ({},)
    suffix: str = ""


_ID = ({"request_id": "<id>"},)
_JOB = ({"job_id": "<id>"},)
_VALUE = "string, or hash"
_AS_JOB = "as the job"
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
        "one request an entry, in the field of its frame; consumer group `workers`. Lanes `p1` … `p8` and theirs for "
        "the delayed are of requests; `bulk1`, `bulk2`, `bulk3`, of the shards of bulk jobs of high, normal and low "
        "priority",
    ),
    Row(
        keys.payload,
        _VALUE,
        "removed with its entry; expires after its deadline",
        "a request's tensors, where they are too large for the stream; a hash refers to an object",
        _ID,
    ),
    Row(
        keys.request,
        "hash",
        "its deadline, then its result's and the tombstone's time to live",
        "what is known of an asynchronous request",
        _ID,
    ),
    Row(
        keys.result,
        _VALUE,
        "its time to live",
        "an asynchronous request's outcome, or a synchronous one's large outputs until they are taken",
        _ID,
    ),
    Row(
        keys.staged,
        _VALUE,
        "ten minutes at most",
        "a large value on its way to be the one without the nonce",
        ({"key": "…:payload:<id>", "nonce": "<nonce>"}, {"key": "…:result:<id>", "nonce": "<nonce>"}),
    ),
    Row(
        keys.idempotency,
        "string",
        "expires",
        "an idempotency key's request id, and the hash of its body",
        ({"tenant": "<tenant>", "key_hash": "<hash>"},),
    ),
    Row(keys.due, "sorted set", "permanent", "asynchronous requests that have not ended, by deadline"),
    Row(
        keys.deliveries,
        "stream",
        "a day longer than the longest-kept record that an item of it is about; of `jobs` permanent",
        "what is to be delivered, until it is, by kind: `webhooks`; `jobs`, bulk jobs that are to be looked at; "
        "`outbox:<name>`, requests that ended and whose answers a program such as a bridge is to pass on, with what it "
        "noted of them; `labels:<project>:<tenant>`, tasks that wait. With `|later` behind, a sorted set of what was "
        "taken, by when it is due again",
        ({"kind": "<kind>"},),
    ),
    Row(
        keys.job,
        "hash",
        "from its end on, `QINFER_BULK__RECORD_TTL_S`",
        "what is known of a bulk job",
        ({"job_id": "<id>"},),
    ),
    Row(
        keys.job_part,
        "sorted set",
        "as the job, or until nothing waits",
        "its shards that wait for a place in the lane, by index",
        _parts("todo"),
    ),
    Row(
        keys.job_part,
        "hash",
        "as the job",
        "its shards in the lane, waiting or in a worker's hand: index and entry",
        _parts("in_lane"),
    ),
    Row(
        keys.job_part,
        "hash",
        "as the job",
        "its settled shards: rows, failed rows, whether it was given up, and why",
        _parts("outcomes"),
    ),
    Row(keys.job_part, "list", "as the job", "its log, the latest 200 lines", _parts("log")),
    Row(
        keys.label_board,
        "hash",
        "twice `QINFER_LABELING__RECORD_TTL_S` after the last change; what is over goes after the one",
        "the tasks of a Label Studio project whose predictions are pushed",
        _boards("entries"),
    ),
    Row(
        keys.label_board,
        "hash",
        "the same; of what is over none",
        "their data, as far as it is no more than 64 KiB",
        _boards("data"),
    ),
    Row(
        keys.label_board,
        "sorted set",
        "the same",
        "the tasks that are over, by when they ended",
        _boards("ended"),
    ),
    Row(
        keys.label_board,
        "sorted sets",
        "the same",
        "the tasks in each state, by their ids",
        _boards("waiting", "open", "sending", "done", "failed"),
    ),
    Row(keys.label_boards, "sorted set", "the same", "the projects that a model has tasks of"),
    Row(
        keys.dead_letters,
        "stream",
        "seven days after the last burial, bounded by bytes",
        "dead letters, with their payloads",
    ),
    Row(keys.confirm, "string", "a minute", "nothing; it is written before a wait for replicas or the disk"),
    Row(
        keys.config,
        "hash",
        "permanent",
        "the normalised configuration of the model, and how fast its versions were found to be",
    ),
    Row(keys.stats, "hash", "permanent", "statistics; they only grow"),
    Row(keys.desired, "hash", "permanent", "which models should be loaded, at which generation"),
    Row(keys.control, "stream", "bounded", "wakes the readers of the desired state"),
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
    Row(keys.job_places, "hash", "permanent", "the partition and model of each bulk job"),
    Row(
        keys.worker,
        "hash",
        "expires after the last heartbeat",
        "device, models with their state, throughput",
        ({"worker_id": "<id>"},),
    ),
    Row(
        keys.scalers,
        "hash",
        "expires with its last record",
        "the live autoscalers: until when each one's record holds, and the record",
    ),
    Row(keys.scaler_counts, "hash", "permanent", "what all autoscalers counted: steps up and down, restarts, kills"),
    Row(
        keys.liveness,
        "sorted set",
        "15 s after the last sign",
        "the live bulk workers, beats and bridges, by when their last sign of life is over",
        ({"program": "bulk"}, {"program": "beat"}, {"program": "bridge"}),
    ),
    Row(
        keys.bridges,
        "hash",
        "15 s after the last report; its number is known for an hour more",
        "the live bridges: until when each one lives, the number of its last report, what it has in hand by route",
    ),
    Row(
        keys.routes,
        "sorted set",
        "a route: 30 days after the last report of it",
        "the routes of bridges, by the time of their last report",
    ),
    Row(
        keys.route_counts,
        "hash",
        "30 days after the last report of the route",
        "what all bridges counted for a route; it only grows",
        ({"route": "<route>"},),
    ),
    Row(
        keys.reply,
        "stream",
        "expires with its reader",
        "responses for one gateway, or for one worker whose models call others",
        ({"reply_to": "reply:<owner>"},),
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
        names = ", ".join(f"`{_key(row.spell, given)}`" for given in row.names).replace("|", "\\|")
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
