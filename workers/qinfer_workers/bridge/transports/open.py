"""Opens the connections to other queues: AMQP where the URL says so, kombu's channels for all else."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kombu import Connection

from qinfer_workers.bridge.config import SourceOptions
from qinfer_workers.bridge.transports.amqp import CONNECT_S, HEARTBEAT_S, AmqpSink, AmqpSource, missing_queues
from qinfer_workers.bridge.transports.base import Sink, Source
from qinfer_workers.bridge.transports.kombu import KombuSink, KombuSource

_SQS_WAIT_S = 1  # kombu's own 10 s would keep acknowledgements, and the end of the program, waiting


def open_source(options: SourceOptions, epoch: int) -> Source:
    """Connects, makes the queue where it is missing, and begins to consume.

    Args:
        options: The queue, and where it is.
        epoch: Of the connection.

    Raises:
        Exception: Of kombu, its transport, or the system: the broker is away or refuses.
    """
    with _connected(options.url.get_secret_value(), options.options) as client:
        return (AmqpSource if _is_amqp(client) else KombuSource)(client, options, epoch)


def open_sink(url: str, options: Mapping[str, Any], queues: Sequence[str], exchange: str = "") -> Sink:
    """Connects to publish.

    Args:
        url: The broker.
        options: kombu's options of the transport.
        queues: To be made where they are missing.
        exchange: Must be there, where the transport knows exchanges; empty = the default one.

    Raises:
        Exception: As `open_source`.
    """
    with _connected(url, options) as client:
        return AmqpSink(client, queues, exchange) if _is_amqp(client) else KombuSink(client, queues)


def look(url: str, options: Mapping[str, Any], queues: Sequence[str], exchange: str = "") -> list[str]:
    """Connects, moves no message, and returns those queues that are missing, where the transport can tell.

    Args:
        url: The broker.
        options: kombu's options of the transport.
        queues: Names of queues.
        exchange: Must be there, where the transport knows exchanges; empty = the default one.

    Raises:
        Exception: As `open_source`.
    """
    missing: list[str] = []
    with _connected(url, options) as client:
        if _is_amqp(client):
            missing = missing_queues(client, queues, exchange)
        else:
            client.channel()
        client.collect()
    return missing


@contextmanager
def _connected(url: str, options: Mapping[str, Any]) -> Iterator[Connection]:
    """Connects; an exception in the block, as when connecting, closes the connection."""
    if url.lower().startswith("sqs"):
        options = {"wait_time_seconds": _SQS_WAIT_S, **options}
    client = Connection(url, connect_timeout=CONNECT_S, heartbeat=HEARTBEAT_S, transport_options=options)
    try:
        client.ensure_connection(max_retries=1, interval_start=0.0, interval_step=0.0, timeout=2 * CONNECT_S)
        yield client
    except BaseException:
        client.collect()
        raise


def _is_amqp(client: Connection) -> bool:
    return bool(client.transport.driver_name == "py-amqp")
