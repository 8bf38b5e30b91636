"""Opens the connections to other queues: AMQP where the URL says so, kombu's channels for all else."""

from collections.abc import Mapping, Sequence
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
    client = _connect(options.url.get_secret_value(), options.options)
    try:
        if _is_amqp(client):
            return AmqpSource(client, options, epoch)
        return KombuSource(client, options, epoch)
    except BaseException:
        client.collect()
        raise


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
    client = _connect(url, options)
    try:
        return AmqpSink(client, queues, exchange) if _is_amqp(client) else KombuSink(client, queues)
    except BaseException:
        client.collect()
        raise


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
    client = _connect(url, options)
    try:
        if _is_amqp(client):
            return missing_queues(client, queues, exchange)
        client.channel()
        return []
    finally:
        client.collect()


def _connect(url: str, options: Mapping[str, Any]) -> Connection:
    if url.lower().startswith("sqs"):
        options = {"wait_time_seconds": _SQS_WAIT_S, **options}
    client = Connection(url, connect_timeout=CONNECT_S, heartbeat=HEARTBEAT_S, transport_options=options)
    try:
        client.ensure_connection(max_retries=1, interval_start=0.0, interval_step=0.0, timeout=2 * CONNECT_S)
    except BaseException:
        client.collect()
        raise
    return client


def _is_amqp(client: Connection) -> bool:
    return bool(client.transport.driver_name == "py-amqp")
