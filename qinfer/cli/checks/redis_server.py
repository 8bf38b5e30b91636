"""Checks that Redis is configured for a durable queue, and what its user may do; `examine_node` is pure."""

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoPermissionError, RedisClusterException, RedisError, ResponseError

from qinfer.cli.checks.doctor import Finding, ok, problem, warning
from qinfer.core.settings import RedisSettings
from qinfer.queue import MINIMUM_VERSION, keys
from qinfer.queue.nodes import failed_files, memory_share, replicas_of

ERRORS: tuple[type[Exception], ...] = (RedisError, RedisClusterException, OSError)
SKEW_WARNING_S = 1.0
SKEW_PROBLEM_S = 300.0
"""Object stores refuse clocks this wrong."""

_MEMORY_WARNING, _MEMORY_PROBLEM = 0.8, 0.95
_LAG_WARNING_S = 10
_SETTINGS = ("maxmemory-policy", "appendonly", "appendfsync", "no-appendfsync-on-rewrite")
_IN_FILE = "and put it into redis.conf"
_SCRATCH_MODEL = "qinfer-doctor"
"""No request is ever queued for it."""


class NodeReport(NamedTuple):
    """The state of a node; empty parts are forbidden to this user.

    `offset_s` is the node's clock minus this machine's clock; `is_private` marks the node of `qinfer up`; `at` is a
    prefix of texts.
    """

    place: str
    info: Mapping[str, Any]
    config: Mapping[str, str]
    offset_s: float
    is_private: bool = False
    at: str = ""


def nodes_of(client: "redis.Redis | redis.RedisCluster", place: str) -> list[NodeReport]:
    """Reads the state of a node, or of a cluster's primaries; blocking."""
    if isinstance(client, redis.RedisCluster):
        client.ping()
        primaries = client.get_primaries()  # type: ignore[no-untyped-call]  # redis-py has no types for it
        nodes = [_query_node(client.get_redis_connection(node), f"{node.host}:{node.port}") for node in primaries]
        return [node._replace(at=f"{node.place}: ") for node in nodes]
    return [_query_node(client, place)]


def examine_node(node: NodeReport, settings: RedisSettings) -> Iterator[Finding]:
    """Yields findings about one node."""
    if not node.info:
        yield warning("Redis", f"{node.at}INFO is forbidden: version, memory and role are not checked")
    else:
        yield _version(node)
        yield from _role(node, settings)
        yield from _memory(node)
        yield from _files(node)
    policy = node.config.get("maxmemory-policy") or node.info.get("maxmemory_policy", "")
    if policy:
        yield _policy(node, policy)
    if node.config:
        yield _durability(node, settings)
    else:
        unchecked = "durability is" if policy else "eviction and durability are"
        yield warning("Redis settings", f"{node.at}CONFIG GET is forbidden: {unchecked} not checked")
    yield clock("clock of Redis", node.offset_s, f"{node.at}Redis minus this machine")


def clock(subject: str, offset_s: float, what: str) -> Finding:
    """Returns the finding about clocks that differ."""
    text = f"{what}: {offset_s:+.2f} s"
    if abs(offset_s) >= SKEW_PROBLEM_S:
        return problem(subject, text, "set the clocks by NTP: object stores and TLS refuse wrong ones")
    if abs(offset_s) >= SKEW_WARNING_S:
        return warning(subject, text, "set the clocks by NTP: the queue uses Redis' clock, but logs do not")
    return ok(subject, text)


def reason_of(error: Exception, place: str) -> tuple[str, str]:
    """Returns the reason of an error, and the remedy."""
    if isinstance(error, redis.exceptions.AuthenticationError):
        return f"{place} refuses the user name or password", "correct them in QINFER_REDIS__URL"
    if isinstance(error, NoPermissionError):
        return f"{place}: {error}", "allow this user what qinfer needs"
    remedy = "start it, or `qinfer up`, which has its own; or correct QINFER_REDIS__URL or --redis"
    if isinstance(error, redis.exceptions.TimeoutError):
        return f"{place} does not answer in time", remedy
    return f"{place} can't be reached: {error}", remedy


def _query_node(client: redis.Redis, place: str) -> NodeReport:
    begin_s = time.time()
    seconds, microseconds = client.time()
    end_s = time.time()
    offset_s = seconds + microseconds / 1e6 - (begin_s + end_s) / 2
    try:
        info = dict(client.info())
    except ResponseError:
        info = {}
    config: dict[str, str] = {}
    for name in _SETTINGS:
        try:
            config |= {_decode_value(key): _decode_value(value) for key, value in dict(client.config_get(name)).items()}
        except ResponseError:
            config = {}
            break
    return NodeReport(place, info, config, offset_s, is_private=place.startswith("/"))


def _decode_value(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _version(node: NodeReport) -> Finding:
    version = str(node.info.get("valkey_version") or node.info.get("redis_version", ""))
    name = "Valkey" if "valkey_version" in node.info else "Redis"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < MINIMUM_VERSION:
        return problem("Redis version", f"{name} {version} at {node.place}", "upgrade it to 6.2 or newer")
    return ok("Redis version", f"{name} {version} at {node.place}")


def _role(node: NodeReport, settings: RedisSettings) -> Iterator[Finding]:
    is_cluster = node.info.get("redis_mode") == "cluster"
    if is_cluster != settings.cluster:
        wanted = "true" if is_cluster else "false"
        text = f"{node.at}it runs in {node.info.get('redis_mode')} mode"
        yield problem("Redis mode", text, f"set QINFER_REDIS__CLUSTER={wanted}")
    if node.info.get("role") in ("slave", "replica"):
        text = f"{node.at}it is a replica, which takes no writes"
        yield problem("Redis role", text, "name the primary, or the Sentinels, in QINFER_REDIS__URL")
    replicas = int(node.info.get("connected_slaves", 0))
    if replicas < settings.min_replicas:
        text = f"{node.at}it has {replicas} replicas; QINFER_REDIS__MIN_REPLICAS requires {settings.min_replicas}"
        yield problem("Redis replicas", text, "no asynchronous request is accepted: start replicas, or require fewer")
    for replica in replicas_of(node.info):
        if not replica.is_online or replica.lag_s >= _LAG_WARNING_S:
            text = f"{node.at}replica {replica.place} is {replica.lag_s} s and {_size(replica.lag_bytes)} behind"
            yield warning("Redis replicas", text, "check its log and its network: a failover to it would lose that")
    if node.info.get("loading"):
        yield problem("Redis", f"{node.at}it is loading its data", "wait for it")


def _policy(node: NodeReport, policy: str) -> Finding:
    if policy == "noeviction":
        return ok("eviction", f"{node.at}maxmemory-policy noeviction")
    text = f"{node.at}Redis may evict queued requests (maxmemory-policy {policy})"
    return problem("eviction", text, f"run CONFIG SET maxmemory-policy noeviction, {_IN_FILE}")


def _durability(node: NodeReport, settings: RedisSettings) -> Finding:
    """Judges as `qinfer.queue.durability` does."""
    subject = "durability"
    keeps, syncs = node.config.get("appendonly"), node.config.get("appendfsync")
    text = f"{node.at}appendonly {keeps}, appendfsync {syncs}; QINFER_REDIS__DURABILITY={settings.durability}"
    wants_always = settings.durability == "always"
    make = problem if wants_always else warning
    if keeps == "no":
        return make(
            subject, f"{text}: a restart of Redis loses queued requests", f"run CONFIG SET appendonly yes, {_IN_FILE}"
        )
    if syncs == "no":
        return make(
            subject,
            f"{text}: power loss costs about 30 s of requests",
            f"run CONFIG SET appendfsync {settings.durability}, {_IN_FILE}",
        )
    if wants_always and syncs == "always" and node.config.get("no-appendfsync-on-rewrite") == "yes":
        return problem(subject, f"{text}: it does not sync during rewrites", "set no-appendfsync-on-rewrite no")
    if wants_always and syncs != "always" and not _knows_waitaof(node.info):
        return problem(
            subject,
            f"{text}: this Redis has no WAITAOF",
            "set appendfsync always, or upgrade to Redis 7.2, or set QINFER_REDIS__DURABILITY=everysec",
        )
    return ok(subject, text)


def _knows_waitaof(info: Mapping[str, Any]) -> bool:
    numbers = str(info.get("redis_version", "")).split(".")[:2]
    return not info or tuple(int(part) for part in numbers if part.isdecimal()) >= (7, 2)


def _memory(node: NodeReport) -> Iterator[Finding]:
    used, limit = int(node.info.get("used_memory", 0)), int(node.info.get("maxmemory", 0))
    share = memory_share(node.info)
    if share is None:
        return
    of = f"maxmemory {_size(limit)}" if limit else f"the machine's {_size(int(node.info['total_system_memory']))}"
    text = f"{node.at}{_size(used)} of {of} used ({share:.0%})"
    remedy = "give Redis more memory, or let workers catch up: a full Redis refuses requests"
    if share >= _MEMORY_PROBLEM:
        yield problem("memory of Redis", text, remedy)
    elif share >= _MEMORY_WARNING:
        yield warning("memory of Redis", text, remedy)
    elif not limit and not node.is_private:
        yield warning(
            "memory of Redis",
            f"{text}; there is no maxmemory",
            "set maxmemory below the machine's memory: otherwise the system may kill Redis for lack of memory",
        )
    else:
        yield ok("memory of Redis", text)


def _files(node: NodeReport) -> Iterator[Finding]:
    failed = [file for file, has_failed in failed_files(node.info).items() if has_failed]
    if "aof" in failed and node.info.get("aof_enabled"):
        yield problem("files of Redis", f"{node.at}it can't write its append-only file", "check its disk and log")
    elif failed:
        text = f"{node.at}its last write of {', '.join(failed)} failed"
        yield warning("files of Redis", text, "check its disk, memory and log: it may refuse writes, or its files grow")


def examine_permissions(
    client: "redis.Redis | redis.RedisCluster", settings: RedisSettings, user: str, broker_db: int | None
) -> Iterator[Finding]:
    """Tries commands of each kind on scratch keys, and keys without a model's hash tag; blocking.

    `broker_db` is the database of Celery's tasks, if they are in this Redis. Of shared keys it removes only members
    with a random name.
    """
    subject, nonce = "permissions", secrets.token_hex(8)
    scratch = keys.prefix(_SCRATCH_MODEL, 0) + nonce
    commands = [*_commands(scratch), *([("WAIT", 0, 1)] if settings.min_replicas else [])]
    try:
        refused = sorted({str(words[0]) for words in commands if not _may(client, *words)})
    finally:
        _may(client, "UNLINK", scratch)
    if len(refused) == len({words[0] for words in commands}):
        places = []
    else:
        places = [*_places(nonce), *(() if broker_db is None else _broker_places(broker_db, nonce))]
    closed = {words[1]: grant for words, grant in places if not _may(client, *words)}
    if refused:
        allow = " ".join(f"+{name.lower().replace(' ', '|')}" for name in refused)
        text = f"user '{user}' may not run {', '.join(refused)}, or not on keys such as {scratch.replace(nonce, '…')}"
        yield problem(subject, text, f"ACL SETUSER {user} {allow} ~qinfer:*")
    if closed:
        text = f"user '{user}' may not use {', '.join(closed).replace(nonce, '…')}"
        yield problem(subject, text, f"ACL SETUSER {user} {' '.join(dict.fromkeys(closed.values()))}")
    if not (refused or closed):
        yield ok(subject, f"user '{user}' may use all keys, with commands of each kind")


_Words = tuple[str | int, ...]


def _commands(key: str) -> Iterator[_Words]:
    """Yields commands of each kind; the wrong type of a key is refused after the permission is checked."""
    yield from (("CLIENT UNBLOCK", 0), ("INFO", "replication"), ("XADD", key, "1-1", "f", "x"), ("EXISTS", key))
    yield from (("XGROUP CREATE", key, "g", "0"), ("XREADGROUP", "GROUP", "g", "c", "STREAMS", key, ">"))
    yield from (("XDEL", key, "1-1"), ("EVAL", "return 1", 1, key), ("UNLINK", key))
    yield from (("HSET", key, "a", 1), ("ZADD", key, 1, "a"), ("SADD", key, "a"), ("RPUSH", key, "a"))
    yield ("SET", key, "1", "PX", 60_000)


def _places(nonce: str) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yields commands on keys, and the rules that allow them."""
    for command, key, member in (
        ("HDEL", keys.desired(), nonce),
        ("ZREM", keys.workers(), nonce),
        ("XDEL", keys.reply(f"reply:{nonce}"), "0-1"),
    ):
        yield (command, key, member), "~qinfer:*"


def _broker_places(db: int, nonce: str) -> Iterator[tuple[tuple[str, ...], str]]:
    from qinfer.jobs.tasks import QUEUE

    yield ("LREM", QUEUE, "0", nonce), f"~{QUEUE}*"
    yield ("HDEL", "unacked", nonce), "~unacked*"
    yield ("SREM", f"_kombu.binding.{QUEUE}", nonce), "~_kombu*"
    yield ("PUBLISH", f"/{db}.{_SCRATCH_MODEL}/{nonce}", ""), "&*"


def _may(client: Any, *words: str | int) -> bool:
    """Returns whether Redis allows a command, even if the command fails."""
    if isinstance(client, redis.RedisCluster) and words[0] in ("CLIENT UNBLOCK", "INFO"):
        # a connected client may use these
        return True
    try:
        client.execute_command(*words)
    except NoPermissionError:
        return False
    except ResponseError as error:
        return not str(error).startswith("NOPERM")
    return True


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
