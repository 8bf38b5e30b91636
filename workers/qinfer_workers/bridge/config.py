"""What can be configured of a bridge: its routes, each of them one source → model → sink."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from kombu.transport import TRANSPORT_ALIASES
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from qinfer_workers.bridge.bodies.options import BodyOptions

MAX_NAME = 64
"""The longest name of a route: it is part of the name of its outbox."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


_MAX_QUEUE_BYTES = 255  # of AMQP


def _short(name: str) -> str:
    """Checks the name of a queue or an exchange."""
    if len(name.encode()) > _MAX_QUEUE_BYTES:
        raise ValueError(f"it takes {len(name.encode())} bytes; use at most {_MAX_QUEUE_BYTES}")
    return name


_ShortName = Annotated[str, AfterValidator(_short)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceOptions(_Part):
    """Where messages come from.

    Attributes:
        url: The broker, as kombu writes it: `amqp://…`, `redis://…`, `sqs://…`.
        queue: The queue.
        prefetch: So many messages are taken before they are accepted.
        declare: Make the queue, durable, where there is none.
        id_header: The header with the message's id, where there is neither `message_id`, nor `reply_to` with
            `correlation_id`.
        options: kombu's options of the transport, such as `visibility_timeout`.
    """

    url: SecretStr
    queue: _ShortName = Field(min_length=1)
    prefetch: int = Field(500, ge=1, le=65535)
    declare: bool = True
    id_header: str | None = None
    options: Mapping[str, Any] = Field(default_factory=dict, repr=False)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        return _checked(url)


class SinkOptions(_Part):
    """Where predictions go.

    Attributes:
        url: The broker; default: the source's.
        reply_to: A message's own `reply_to` goes first.
        exchange: Where other predictions go; empty = the default exchange, whose routing keys are names of queues.
        routing_key: As the exchange needs it; empty, with no exchange: only `reply_to` is answered.
        declare: Make the queue, durable, where there is none; an exchange must be there.
        carry_headers: Headers of a message that its reply has too.
        options: kombu's options of the transport; default: the source's, where the URL is.
    """

    url: SecretStr | None = None
    reply_to: bool = True
    exchange: _ShortName = ""
    routing_key: _ShortName = ""
    declare: bool = True
    carry_headers: tuple[str, ...] = ()
    options: Mapping[str, Any] = Field(default_factory=dict, repr=False)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr | None) -> SecretStr | None:
        return None if url is None else _checked(url)

    @property
    def is_fixed(self) -> bool:
        """Whether there is a place for predictions besides `reply_to`."""
        return bool(self.exchange or self.routing_key)

    @model_validator(mode="after")
    def _somewhere(self) -> "SinkOptions":
        if not (self.reply_to or self.is_fixed):
            raise ValueError("predictions have nowhere to go: give a routing_key, or set reply_to: true")
        return self


class RouteOptions(_Part):
    """One source → model → sink.

    Attributes:
        name: Of the route; in metrics, logs, and the ids of requests.
        model: The model.
        version: Its version; 0 = the newest.
        priority: The priority level of the requests; 0 = the model's default.
        tenant: Whose requests they are, where keys of several tenants can look at them.
        timeout_s: How long a message's prediction is worth waiting for, from its acceptance.
        max_waiting: So many requests may wait in the model's lane; default: half of what the lane holds.
        source: Where messages come from.
        sink: Where predictions go.
        dead_letter: The queue, on the source's broker, for messages that can't be answered; default `<queue>.dead`.
        body: How bodies are read, and replies written.
    """

    name: str
    model: str = Field(min_length=1)
    version: int = Field(0, ge=0)
    priority: int = Field(0, ge=0)
    tenant: str = ""
    timeout_s: float = Field(3600.0, gt=0)
    max_waiting: int | None = Field(None, ge=1)
    source: SourceOptions
    sink: SinkOptions = Field(default_factory=SinkOptions)
    dead_letter: _ShortName = ""
    body: BodyOptions = Field(default_factory=BodyOptions)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if len(name) > MAX_NAME or not _NAME.fullmatch(name):
            raise ValueError(f"use up to {MAX_NAME} of a-z, 0-9 and '-'")
        return name

    @model_validator(mode="after")
    def _check_loops(self) -> "RouteOptions":
        source, *others = self.queues
        if source in others or len(set(others)) < len(others):
            raise ValueError("source.queue, sink.routing_key and dead_letter must be three queues")
        return self

    @model_validator(mode="after")
    def _check_dead_letter(self) -> "RouteOptions":
        try:
            _short(self.dead_letters)
        except ValueError as error:
            raise ValueError(f"the name of the queue for dead letters: {error}") from None
        return self

    @property
    def queues(self) -> Sequence[tuple[str, str]]:
        """The source, then where its messages go: broker and queue, as far as they are known by name."""
        queues = [(self.source_url, self.source.queue), (self.source_url, self.dead_letters)]
        if self.sink.routing_key and not self.sink.exchange:
            queues.append((self.sink_url, self.sink.routing_key))
        return queues

    @property
    def source_url(self) -> str:
        """The broker that messages come from, with its password."""
        return self.source.url.get_secret_value()

    @property
    def sink_url(self) -> str:
        """The broker that predictions go to, with its password."""
        return self.source_url if self.sink.url is None else self.sink.url.get_secret_value()

    @property
    def sink_options(self) -> Mapping[str, Any]:
        """The options of the sink's transport."""
        return self.sink.options or (self.source.options if self.sink_url == self.source_url else {})

    @property
    def dead_letters(self) -> str:
        """The queue for what can't be answered."""
        return self.dead_letter or f"{self.source.queue}.dead"

    @property
    def outbox(self) -> str:
        """The name of the outbox that the requests' ends go to."""
        return f"bridge:{self.name}"


class BridgeConfig(_Part):
    """The whole file.

    Attributes:
        result_ttl_s: How long an answer is kept after its request's end, to be told to a repetition.
        retry_s: An answer that the sink's broker has not confirmed is published again after so many seconds.
        metrics_host: Where metrics are served.
        metrics_port: The port; 0 = they are not.
        routes: The routes.
    """

    result_ttl_s: float = Field(86400.0, gt=0)
    retry_s: float = Field(10.0, ge=1)
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(0, ge=0, le=65535)
    routes: tuple[RouteOptions, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self) -> "BridgeConfig":
        names = [route.name for route in self.routes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two routes are called {twice[0]}; names are unique")
        return self

    @model_validator(mode="after")
    def _no_circle(self) -> "BridgeConfig":
        for route in self.routes:
            source, *reached = route.queues
            for queue in reached:  # grows
                following = [each for other in self.routes if other.queues[0] == queue for each in other.queues[1:]]
                reached += [each for each in following if each not in reached]
            if source in reached:
                raise ValueError(
                    f"what route {route.name} publishes comes back to its queue '{source[1]}' by way of other routes; "
                    "give one of them another sink or dead_letter"
                )
        return self


def _checked(url: SecretStr) -> SecretStr:
    text = url.get_secret_value()
    scheme, separator, _ = text.partition("://")
    if not separator or scheme.partition("+")[0] not in TRANSPORT_ALIASES:
        raise ValueError("expected a URL of kombu, such as amqp://…, redis://… or sqs://…")
    for part in text.split(";"):  # kombu's way to name several brokers
        try:
            _ = urlsplit(part).port
        except ValueError:  # its text may have a part of the password
            raise ValueError(
                "the port can't be read; in a password write / as %2F, @ as %40, : as %3A, # as %23 and ? as %3F, or "
                "give it as ${NAME}, which is quoted for you"
            ) from None
    return url
