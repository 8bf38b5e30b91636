"""Renewal of leases, as the renewer of a worker does it: by the same script, over a connection of its own."""

from collections.abc import Sequence

import redis
from redis.exceptions import ResponseError

from qinfer.queue import keys
from qinfer.queue.clients import Login, blocking_client
from qinfer.queue.entries import Lease
from qinfer.queue.lanes import RENEW, Queue


def renew(queue: Queue, leases: Sequence[Lease]) -> list[Lease]:
    """Renews leases; returns those that are lost: finished by another, or owned by another."""
    client = blocking_client(Login.from_settings(queue.router._settings))
    try:
        return [lease for lease in leases if _is_lost(client, lease)]
    finally:
        client.close()


def _is_lost(client: "redis.Redis | redis.RedisCluster", lease: Lease) -> bool:
    words = (keys.lane(lease.entry.lane), keys.GROUP, lease.consumer, lease.entry.entry_id)
    try:
        return bool(client.eval(RENEW.text.decode(), 1, *words))
    except ResponseError as error:
        if "NOGROUP " not in str(error):
            raise
        return True
