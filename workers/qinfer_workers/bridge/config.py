"""The bridge's configuration: a YAML or TOML file of routes, each with one source, model and sink.

`${NAME}` in a URL or a transport option stands for an environment variable, so that no password is in the file.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit

from kombu.transport import TRANSPORT_ALIASES
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from qinfer.core.documents import Unreadable, parse, problems_of, read_limited
from qinfer.errors import InvalidRequest, SettingsError
from qinfer.jobs.job import JobSpec, Output, check_spec
from qinfer.tabular.spec import Columns, Null

BodyFormat = Literal["auto", "kserve", "row", "jsonl", "arrow", "raw"]
"""`auto` = by the content type; `row` = a JSON object, `jsonl` = one on each line, `raw` = the data of one input."""

ReplyForm = Literal["same", "kserve", "jsonl", "arrow"]
"""`same` = as the request: a row for a row, rows for rows, Arrow for Arrow, KServe for all else."""


class _ConfigPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class InputMap(_ConfigPart):
    """The columns that one input tensor is made of, and the shape of a row.

    Attributes:
        columns: One column, or several scalar columns that become the elements of a row in this order.
        shape: The shape of one row, without the batch dimension; empty = the shape of the tensor.
        null: The treatment of nulls: `error`, `nan`, or the value that replaces them, for all columns or by column.
    """

    columns: tuple[str, ...]
    shape: tuple[int, ...] = ()
    null: Null | dict[str, Null] = "error"


class BodyOptions(_ConfigPart):
    """The `body` part of a route: how bodies are read, and replies written.

    Attributes:
        format: The format of all bodies; overrides their content type.
        input: The input for raw bodies; empty = the model's only one of BYTES or UINT8.
        columns: Input → its column, its scalar columns, or columns and shape, for JSON objects, JSON lines and Arrow;
        default: the column of the input's name. As in bulk jobs.
        reply: The form of replies.
        content_type: The content type of messages without one; empty = `application/json` if they begin with `{`, raw
        otherwise.
        max_bytes: Larger bodies are refused, before and after decompression.
        max_json_depth: Deepest JSON nesting.
    """

    format: BodyFormat = "auto"
    input: str = ""
    columns: Mapping[str, str | tuple[str, ...] | InputMap] = Field(default_factory=dict)
    reply: ReplyForm = "same"
    content_type: str = ""
    max_bytes: int = Field(64 * 2**20, gt=0, le=2**31)
    max_json_depth: int = Field(100, gt=0, le=1000)

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            check_spec(_job("model", columns))
        except InvalidRequest as error:
            raise ValueError(error.message) from None
        return columns

    def job(self, model: str) -> JobSpec:
        """Returns the bulk job that would read the same columns."""
        return _job(model, self.columns)


def _job(model: str, columns: Mapping[str, str | tuple[str, ...] | InputMap]) -> JobSpec:
    given = {
        tensor: Columns(value.columns, value.shape, value.null) if isinstance(value, InputMap) else value
        for tensor, value in columns.items()
    }
    return JobSpec(model=model, inputs=("message",), output=Output(url="reply"), columns=given)


MAX_NAME = 64
"""The longest name of a route, which is part of the outbox's name."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


_MAX_QUEUE_BYTES = 255  # the limit of AMQP


def _short(name: str) -> str:
    if len(name.encode()) > _MAX_QUEUE_BYTES:
        raise ValueError(f"it takes {len(name.encode())} bytes; use at most {_MAX_QUEUE_BYTES}")
    return name


_ShortName = Annotated[str, AfterValidator(_short)]


def _checked(url: SecretStr) -> SecretStr:
    text = url.get_secret_value()
    scheme, separator, _ = text.partition("://")
    if not separator or scheme.partition("+")[0] not in TRANSPORT_ALIASES:
        raise ValueError("expected a URL of kombu, such as amqp://…, redis://… or sqs://…")
    for part in text.split(";"):  # kombu separates several brokers by semicolons
        try:
            _ = urlsplit(part).port
        except ValueError:  # it may have a part of the password
            raise ValueError(
                "the port can't be read; in a password write / as %2F, @ as %40, : as %3A, # as %23 and ? as %3F, or "
                "give it as ${NAME}, which is quoted for you"
            ) from None
    return url


_Url = Annotated[SecretStr, AfterValidator(_checked)]


class SourceOptions(_ConfigPart):
    """The queue that messages come from.

    Attributes:
        url: The broker, in kombu's notation: `amqp://…`, `redis://…`, `sqs://…`.
        queue: The queue.
        prefetch: The most messages taken before they are accepted.
        declare: Make a durable queue if it is missing.
        id_header: The header with the message's id, used without `message_id`, or `reply_to` with `correlation_id`.
        options: kombu's options of the transport, such as `visibility_timeout`.
    """

    url: _Url
    queue: _ShortName = Field(min_length=1)
    prefetch: int = Field(500, ge=1, le=65535)
    declare: bool = True
    id_header: str | None = None
    options: Mapping[str, Any] = Field(default_factory=dict, repr=False)


class SinkOptions(_ConfigPart):
    """The queues that predictions go to.

    Attributes:
        url: The broker; by default the broker of the source.
        reply_to: A message's own `reply_to` takes precedence.
        exchange: The exchange for other predictions; empty = the default exchange, whose routing keys are queue names.
        routing_key: The routing key for the exchange; empty, with no exchange: only `reply_to` is answered.
        declare: Make a durable queue if it is missing; an exchange must exist.
        carry_headers: Headers of a message that are copied to its reply.
        options: kombu's options of the transport; by default those of the source, if the broker is the same.
    """

    url: _Url | None = None
    reply_to: bool = True
    exchange: _ShortName = ""
    routing_key: _ShortName = ""
    declare: bool = True
    carry_headers: tuple[str, ...] = ()
    options: Mapping[str, Any] = Field(default_factory=dict, repr=False)

    @property
    def is_fixed(self) -> bool:
        """Whether predictions can go elsewhere than to `reply_to`."""
        return bool(self.exchange or self.routing_key)

    @model_validator(mode="after")
    def _somewhere(self) -> "SinkOptions":
        if not (self.reply_to or self.is_fixed):
            raise ValueError("predictions have nowhere to go: give a routing_key, or set reply_to: true")
        return self


def _route_name(name: str) -> str:
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(f"use up to {MAX_NAME} of a-z, 0-9 and '-'")
    return name


class RouteOptions(_ConfigPart):
    """A route: one source → model → sink.

    Attributes:
        name: The name in metrics, logs, and ids of requests.
        model: The model, or an endpoint.
        version: The version of the model; 0 = the newest, or the version that the endpoint chooses.
        priority: The priority level of the requests; 0 = the model's default.
        tenant: The tenant that owns the requests, if keys of several tenants can look at them.
        timeout_s: Seconds from a message's acceptance after which its prediction is not needed.
        max_waiting: The most requests that wait in the model's lane; default: half of the lane's capacity.
        source: The source of messages.
        sink: The destination of predictions.
        responses: The replies for a decoupled model, once its stream has ended: `one` = a message with the list of all
        responses, `each` = a message for each of them. Other models give one response, and it has no effect.
        dead_letter: The queue, on the source's broker, for messages that can't be answered; default `<queue>.dead`.
        body: The options for reading bodies and writing replies.
    """

    name: Annotated[str, AfterValidator(_route_name)]
    model: str = Field(min_length=1)
    version: int = Field(0, ge=0)
    priority: int = Field(0, ge=0)
    tenant: str = ""
    timeout_s: float = Field(3600.0, gt=0)
    max_waiting: int | None = Field(None, ge=1)
    source: SourceOptions
    sink: SinkOptions = Field(default_factory=SinkOptions)
    responses: Literal["one", "each"] = "one"
    dead_letter: _ShortName = ""
    body: BodyOptions = Field(default_factory=BodyOptions)

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
        """Returns (broker, queue) of the source, then of known destinations."""
        queues = [(self.source_url, self.source.queue), (self.source_url, self.dead_letters)]
        if self.sink.routing_key and not self.sink.exchange:
            queues.append((self.sink_url, self.sink.routing_key))
        return queues

    @property
    def source_url(self) -> str:
        """The source's broker, with its password."""
        return self.source.url.get_secret_value()

    @property
    def sink_url(self) -> str:
        """The sink's broker, with its password."""
        return self.source_url if self.sink.url is None else self.sink.url.get_secret_value()

    @property
    def sink_options(self) -> Mapping[str, Any]:
        """The sink's transport options."""
        return self.sink.options or (self.source.options if self.sink_url == self.source_url else {})

    @property
    def dead_letters(self) -> str:
        """The dead letters' queue."""
        return self.dead_letter or f"{self.source.queue}.dead"

    @property
    def outbox(self) -> str:
        """The outbox of the route's requests."""
        return f"bridge:{self.name}"


class BridgeConfig(_ConfigPart):
    """The whole file.

    Attributes:
        result_ttl_s: How long an answer is kept after its request's end, for repeated messages.
        retry_s: Seconds after which an unconfirmed answer is published again.
        metrics_host: The address that serves metrics.
        metrics_port: The port; 0 = no metrics.
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
                    f"messages of route {route.name} return to its queue '{source[1]}' by way of other routes; "
                    "give one of them another sink or dead_letter"
                )
        return self


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_MAX_FILE_BYTES = 2**20
_SHOWN = frozenset({"prefetch", "declare", "reply_to", "version", "priority", "timeout_s", "max_waiting", "max_bytes"})
"""Other fields may hold a password by mistake."""


def load_config(path: Path, environment: Mapping[str, str]) -> BridgeConfig:
    """Reads a file; `${NAME}` stands for a variable of `environment`.

    Raises:
        SettingsError: Names all errors, without passwords.
    """
    return parse_config(_read_config(path), environment, path.name)


def parse_config(document: object, environment: Mapping[str, str], name: str = "configuration") -> BridgeConfig:
    """Checks the parsed content of a file."""
    if not isinstance(document, dict):
        raise SettingsError(f"{name}: expected a mapping with 'routes'")
    routes = document.get("routes")
    filled = dict(document)
    if isinstance(routes, list):
        filled["routes"] = [
            _filled(route, environment, f"{name}: {_who(number, route)}") for number, route in enumerate(routes)
        ]
    try:
        return BridgeConfig.model_validate(filled)
    except ValidationError as error:
        problems = [
            f"{_where(item['loc'], routes)}: {_describe_error(text, item)}" for text, item in problems_of(error)
        ]
        raise SettingsError(f"{name}: " + "; ".join(problems)) from None


def _read_config(path: Path) -> object:
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise SettingsError(f"{path}: expected a name that ends with .yaml, .yml or .toml")
    try:
        return parse(read_limited(path, _MAX_FILE_BYTES), path.suffix, is_typed=True)
    except OSError as error:
        raise SettingsError(f"{path}: {os.strerror(error.errno or 0)}") from None
    except Unreadable as error:
        raise SettingsError(f"{path}: can't be read: {error}") from None


def _filled(route: Any, environment: Mapping[str, str], who: str) -> Any:
    if not isinstance(route, dict):
        return route
    filled = dict(route)
    for end in ("source", "sink"):
        if isinstance(part := route.get(end), dict):
            values = {key: part[key] for key in ("url", "options") if key in part}
            filled[end] = part | {
                key: _substituted(value, environment, f"{who}.{end}.{key}", is_url=key == "url")
                for key, value in values.items()
            }
    return filled


def _substituted(value: Any, environment: Mapping[str, str], where: str, *, is_url: bool) -> Any:
    if isinstance(value, dict):
        return {key: _substituted(each, environment, f"{where}.{key}", is_url=False) for key, each in value.items()}
    if isinstance(value, list):
        return [_substituted(each, environment, where, is_url=False) for each in value]
    if not isinstance(value, str):
        return value

    def fill(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise SettingsError(f"{where}: the environment has no {found[1]}; set it")
        given = environment[found[1]]
        return quote(given, safe="") if is_url and found[0] != value else given

    return _VARIABLE.sub(fill, value)


def _who(number: int, route: Any) -> str:
    name = route.get("name") if isinstance(route, dict) else None
    return f"route '{name}'" if isinstance(name, str) else f"route {number + 1}"


def _where(location: tuple[int | str, ...], routes: Any) -> str:
    if len(location) > 1 and location[0] == "routes" and isinstance(location[1], int) and isinstance(routes, list):
        return ".".join([_who(location[1], routes[location[1]]), *map(str, location[2:])])
    return ".".join(map(str, location)) or "file"


def _describe_error(text: str, error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return text
    value, name = error["input"], error["loc"][-1] if error["loc"] else ""
    is_shown = isinstance(value, int | float) or (isinstance(value, str) and name in _SHOWN)
    return f"{text}, got {value!r}" if is_shown or error["type"] == "literal_error" else text
