"""Checks the permissions of a Redis user: tries commands of each kind on scratch keys, and every kind of key.

Of shared keys, the check removes only members with a random name.
"""

import secrets
from collections.abc import Iterator
from typing import Any

import redis
from redis.exceptions import NoPermissionError, ResponseError

from qinfer.cli.checks.report import Finding, ok, problem
from qinfer.core.settings import RedisSettings
from qinfer.models.state import BRIDGE, BULK, GATEWAY
from qinfer.queue import keys

Words = tuple[str | int, ...]

_OF_CLIENT = ("CLIENT UNBLOCK", "INFO")

MODEL = "qinfer-doctor"
"""No request is ever queued for it."""


def examine_permissions(
    client: "redis.Redis | redis.RedisCluster", settings: RedisSettings, user: str, broker_db: int | None
) -> Iterator[Finding]:
    """Tries commands of each kind, and every kind of key; blocking.

    `broker_db` is the database of Celery's tasks, if they are in this Redis.
    """
    subject = "permissions"
    nonce = secrets.token_hex(8)
    scratch = keys.prefix(MODEL, 0) + nonce
    commands = [*_commands(scratch), *([("WAIT", 0, 1)] if settings.min_replicas else [])]
    places = [*_places(nonce), *(_broker_places(broker_db, nonce) if broker_db is not None else ())]
    try:
        refused = [str(words[0]) for words in commands if not _may(client, words)]
        closed = [] if len(refused) == len(commands) else [str(words[1]) for words in places if not _may(client, words)]
    finally:
        for name in _scratch_keys(scratch):
            _may(client, ("UNLINK", name))
    names = sorted(set(refused))
    if names:
        allow = " ".join(f"+{name.lower().replace(' ', '|')}" for name in names)
        text = f"user '{user}' may not run {', '.join(names)}, or not on keys such as {scratch.replace(nonce, '…')}"
        yield problem(subject, text, f"ACL SETUSER {user} {allow} ~qinfer:*")
    if closed:
        shown = ", ".join(name.replace(nonce, "…") for name in closed)
        grants = " ".join(
            dict.fromkeys(_grant(name, words[0]) for words in places if (name := str(words[1])) in closed)
        )
        yield problem(subject, f"user '{user}' may not use {shown}", f"ACL SETUSER {user} {grants}")
    if not (names or closed):
        yield ok(subject, f"user '{user}' may use all keys, with commands of each kind")


def _commands(scratch: str) -> Iterator[Words]:
    """Yields commands of each kind, in an order in which each can use the results of earlier commands."""
    text, table, row, ranks, group, stream = _scratch_keys(scratch)
    yield from (("CLIENT UNBLOCK", 0), ("INFO", "replication"))
    yield from (("SET", text, "1", "PX", 60_000), ("EXISTS", text), ("UNLINK", text), ("RPUSH", row, "a"))
    yield from (("HSET", table, "a", 1), ("HDEL", table, "a"), ("SADD", group, "a"))
    yield from (("ZADD", ranks, 1, "a"), ("ZREM", ranks, "a"))
    yield from (("XADD", stream, "1-1", "f", "x"), ("XGROUP CREATE", stream, "g", "0"))
    yield ("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "STREAMS", stream, ">")
    yield from (("XDEL", stream, "1-1"), ("EVAL", "return 1", 1, stream))


def _scratch_keys(scratch: str) -> tuple[str, ...]:
    return tuple(f"{scratch}:{kind}" for kind in ("text", "table", "row", "ranks", "group", "stream"))


def _places(nonce: str) -> Iterator[Words]:
    yield from (
        ("HDEL", name, nonce) for name in (keys.desired(), keys.completions(), keys.settings(), keys.job_places())
    )
    yield from (("HDEL", name, nonce) for name in (keys.endpoints(), keys.trials(), keys.heard_revisions()))
    yield ("EXISTS", keys.installation())
    live = map(keys.liveness, (GATEWAY, BULK, BRIDGE))
    yield from (("ZREM", name, nonce) for name in (keys.workers(), *live, keys.jobs(), keys.open_jobs()))
    yield from (
        ("HDEL", keys.bridges(), nonce),
        ("ZREM", keys.routes(), nonce),
        ("HDEL", keys.route_counts(nonce), nonce),
    )
    yield ("XDEL", keys.control(), "0-1")
    yield ("HDEL", keys.worker(nonce), nonce)
    yield ("XDEL", keys.reply(f"reply:{nonce}"), "0-1")


def _broker_places(db: int, nonce: str) -> Iterator[Words]:
    from qinfer.jobs.tasks import QUEUE

    yield ("LREM", QUEUE, 0, nonce)
    yield from (("HDEL", "unacked", nonce), ("ZREM", "unacked_index", nonce), ("GET", "unacked_mutex"))
    yield from (("SREM", f"_kombu.binding.{name}", nonce) for name in (QUEUE, "celeryev", "celery.pidbox"))
    yield ("PUBLISH", f"/{db}.{MODEL}/{nonce}", "")


def _grant(name: str, command: str | int) -> str:
    if command == "PUBLISH":
        return "&*"
    return "~qinfer:*" if name.startswith("qinfer:") else f"~{name.split('.', maxsplit=1)[0]}*"


def _may(client: Any, words: Words) -> bool:
    """Returns whether Redis allows a command, even if the command fails."""
    if isinstance(client, redis.RedisCluster) and words[0] in _OF_CLIENT:
        # a connected client may use these
        return True
    try:
        client.execute_command(*words)
    except NoPermissionError:
        return False
    except ResponseError as error:
        return not str(error).startswith("NOPERM")
    return True
