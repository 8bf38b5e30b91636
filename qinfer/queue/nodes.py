"""Nodes of Redis and their metrics: memory, files, replicas and connections, from INFO.

INFO costs a node about 0.1 ms; a node that refuses it has only `qinfer_redis_up`.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qinfer.core.settings import RedisSettings
from qinfer.errors import QinferError, SettingsError
from qinfer.observe import catalogue
from qinfer.observe.catalogue import Info
from qinfer.observe.exposition import Family, family
from qinfer.queue.connection import CommandRefused, Link, open_connection
from qinfer.queue.router import Router

KEPT_S = 5.0
_ANSWERS_WITHIN_S = 2.0  # below a scrape's timeout

Fields = Mapping[str, Any]


class RedisNode(NamedTuple):
    """A node that owns keys.

    `label` is host and port, `socket`, or the Sentinels' service. `info` is empty if forbidden, `None` without a reply.
    """

    label: str
    info: Fields | None


class Replica(NamedTuple):
    """A replica as its primary sees it; offline while it receives the data.

    `lag_s` counts from its last confirmation, due every second.
    """

    place: str
    is_online: bool
    lag_bytes: int
    lag_s: int


class Nodes:
    """The nodes of one Redis."""

    def __init__(self, router: Router, settings: RedisSettings) -> None:
        self._router = router
        self._settings = settings
        self._reading = asyncio.Lock()
        self._read: Sequence[RedisNode] = ()
        self._read_at = float("-inf")

    async def read(self) -> Sequence[RedisNode]:
        """Returns the nodes, at most `KEPT_S` old; never fails."""
        async with self._reading:
            if time.monotonic() - self._read_at >= KEPT_S:
                self._read = await asyncio.gather(*(self._ask_node(*each) for each in self._router.owners().items()))
                self._read_at = time.monotonic()
            return self._read

    async def _ask_node(self, label: str, link: Link) -> RedisNode:
        info: Fields | None
        try:
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                info = parse_info(await (link.call(b"INFO") if link.is_up else self._ask_anew(link)))
        except (CommandRefused, SettingsError):  # renamed, or forbidden; without a link the password is wrong
            info = {} if link.is_up else None
        except (QinferError, OSError):  # TimeoutError is an OSError
            info = None
        return RedisNode(label, info)

    async def _ask_anew(self, link: Link) -> bytes:
        """Asks by a connection of its own: a node that loads its data answers INFO, but `Link` refuses it."""
        address = await link.resolve()
        connection = await open_connection(address, self._settings, _ANSWERS_WITHIN_S)
        try:
            if address.password:
                await connection.call(b"AUTH", address.username or "default", address.password)
            answer: bytes = await connection.call(b"INFO")
            return answer
        finally:
            connection.abort()


def parse_info(text: bytes) -> dict[str, str]:
    """Parses the reply to INFO."""
    lines = text.decode(errors="replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def memory_share(info: Fields) -> float | None:
    """Returns the used memory's share as Redis computes it; `None` = unknown."""
    used, most = _number(info, "used_memory"), _number(info, "maxmemory") or _number(info, "total_system_memory")
    if used is None or not most:
        return None
    return (used - (_number(info, "mem_not_counted_for_evict") or 0)) / most


def failed_files(info: Fields) -> dict[str, bool]:
    """Returns for each kind of file whether the last write failed."""
    return {file: info[name] != "ok" for file, name in _FILES if name in info}


def replicas_of(info: Fields) -> list[Replica]:
    """Returns a node's replicas."""
    written = _number(info, "master_repl_offset") or 0
    found = []
    for number in range(int(_number(info, "connected_slaves") or 0)):
        about = info.get(f"slave{number}", {})
        if isinstance(about, str):
            about = dict(pair.split("=", 1) for pair in about.split(",") if "=" in pair)
        place, lag_s = f"{about.get('ip', '')}:{about.get('port', '')}", max(int(about.get("lag", 0)), 0)
        lag_bytes = max(int(written) - int(about.get("offset", 0)), 0)
        found.append(Replica(place, about.get("state") == "online", lag_bytes, lag_s))
    return found


def families(nodes: Iterable[RedisNode]) -> Iterator[Family]:
    """Yields the metrics of nodes."""
    nodes = list(nodes)
    yield family(catalogue.REDIS_UP, ((int(node.info is not None), {"node": node.label}) for node in nodes))
    known = [(node.label, node.info) for node in nodes if node.info]
    yield family(catalogue.REDIS_INFO, ((1, {"node": label} | _words(info)) for label, info in known))
    for info, value in _VALUES:
        read = [(label, value(fields)) for label, fields in known]
        yield family(info, ((found, {"node": label}) for label, found in read if found is not None))
    failed = Family(catalogue.REDIS_PERSISTENCE_FAILED)
    for label, fields in known:
        for file, has_failed in failed_files(fields).items():
            failed.add(int(has_failed), file=file, node=label)
    yield failed
    refused = Family(catalogue.REDIS_REFUSED)
    for label, fields in known:
        for error in _REFUSALS if "total_error_replies" in fields else ():  # the server counts errors by kind
            refused.add(_refusals(fields, error), error=error, node=label)
    yield refused


def _words(info: Fields) -> dict[str, str]:
    version = info.get("valkey_version") or info.get("redis_version", "")
    role = "primary" if info.get("role") == "master" else "replica"
    return {"maxmemory_policy": str(info.get("maxmemory_policy", "")), "role": role, "version": str(version)}


def _number(info: Fields, name: str) -> float | None:
    try:
        return float(info[name])
    except (KeyError, ValueError):
        return None


def _refusals(info: Fields, error: str) -> float:
    about = info.get(f"errorstat_{error}", "count=0")
    return float(about["count"] if isinstance(about, dict) else about.rpartition("=")[2])


def _field(name: str) -> Callable[[Fields], float | None]:
    return lambda info: _number(info, name)


def _online(info: Fields) -> list[Replica]:
    return [replica for replica in replicas_of(info) if replica.is_online]


_REFUSALS = ("MISCONF", "NOREPLICAS", "OOM")
_FILES = (
    ("aof", "aof_last_write_status"),
    ("aof_rewrite", "aof_last_bgrewrite_status"),
    ("rdb", "rdb_last_bgsave_status"),
)
_VALUES: tuple[tuple[Info, Callable[[Fields], float | None]], ...] = (
    (catalogue.REDIS_LOADING, _field("loading")),
    (catalogue.REDIS_MEMORY_USED, _field("used_memory")),
    (catalogue.REDIS_MEMORY_MAX, _field("maxmemory")),
    (catalogue.REDIS_MEMORY_RATIO, memory_share),
    (catalogue.REDIS_EVICTED, _field("evicted_keys")),
    (catalogue.REDIS_REPLICAS, lambda info: len(_online(info))),
    (catalogue.REDIS_REPLICA_LAG_BYTES, lambda info: max((each.lag_bytes for each in _online(info)), default=None)),
    (catalogue.REDIS_REPLICA_LAG, lambda info: max((each.lag_s for each in _online(info)), default=None)),
    (catalogue.REDIS_CLIENTS, _field("connected_clients")),
    (catalogue.REDIS_CLIENTS_MAX, _field("maxclients")),
    (catalogue.REDIS_CLIENTS_BLOCKED, _field("blocked_clients")),
    (catalogue.REDIS_REJECTED, _field("rejected_connections")),
)
