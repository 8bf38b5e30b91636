"""Sections of the settings with rules or types of their own, and the base of all."""

import re
from typing import Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

_OPTIONS = {"local": ("size",), "redis": ("size", "ttl")}
_SIZE_BYTES, _TTL_S = 256 * 2**20, 3600
"""The defaults in Redis."""

ANY = "*"
"""Stands for all origins."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[!#$%&'+.^_`|~0-9A-Za-z-]+")  # RFC 9110 §5.6.2, but for `*`
_AUTHORITY = re.compile(r"[a-z0-9._~:\[\]-]+")
_QUANTILES = "0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001"
_FORM = "'<resource_name>:<count>:<device>' or '<resource_name>:<count>'"
_MAX_DIGITS = 10
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - refused, not bound


class Section(BaseModel):
    """A section: its fields are set once, and unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CachePlan(NamedTuple):
    """`local`, in the memory of each process, or `redis`; `ttl_s` 0 = for ever."""

    kind: Literal["local", "redis"]
    size_bytes: int
    ttl_s: int = 0


class CacheSettings(Section):
    """The response cache, of models whose configuration enables it; gateways and workers need the same."""

    config: str = Field(
        "",
        description="`local,size=BYTES`: in the memory of each gateway, and of each worker for calls between models. "
        "`redis,ttl=SECONDS,size=BYTES`: in the queue's Redis, shared; by default 3600 s and 256 MiB. Empty = no cache "
        "(Triton's --cache-config).",
    )

    @field_validator("config")
    @classmethod
    def _check_config(cls, text: str) -> str:
        plan_of(text)
        return text

    @property
    def plan(self) -> CachePlan | None:
        """The cache, if any."""
        return plan_of(self.config)


def plan_of(text: str) -> CachePlan | None:
    """Parses the text of `--cache-config`."""
    if not text:
        return None
    name, *words = [word.strip() for word in text.split(",")]
    if name not in _OPTIONS:
        raise ValueError(f"unknown cache '{name[:40]}'; use local,size=BYTES or redis,ttl=SECONDS,size=BYTES")
    options: dict[str, int] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in _OPTIONS[name]:
            known = " and ".join(_OPTIONS[name])
            raise ValueError(f"the {name} cache has no option '{key[:40]}'; it takes {known}")
        if not (value.isascii() and value.isdigit() and len(value) < 16 and int(value)):
            raise ValueError(f"the option '{key}' of the {name} cache must be an integer above 0, got '{value[:40]}'")
        options[key] = int(value)
    if name == "redis":
        return CachePlan("redis", options.get("size", _SIZE_BYTES), options.get("ttl", _TTL_S))
    if "size" not in options:
        raise ValueError("the local cache needs its size, such as local,size=104857600")
    return CachePlan("local", options["size"])


class ConsoleSettings(Section):
    """The console: web pages at `/console` of a gateway."""

    enabled: bool = Field(
        True,
        description="Serve the console where API keys are required, and without keys where all ports, or its own port, "
        "are on loopback addresses and `QINFER_HTTP__ALLOW_HOSTS` is not `*`.",
    )
    host: str = Field("", description="Address of the console's own port; empty = that of HTTP.")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the console alone, which that of HTTP then does not serve; with HTTP's certificate, if it "
        "has one. 0 picks a free one and prints it; unset = the port of HTTP.",
    )
    prometheus_url: SecretStr = Field(
        SecretStr(""),
        description="Prometheus that scrapes this installation, such as http://prometheus:9090, with user and password "
        "if it asks for them; charts then go back a week. No other address is asked. Never logged.",
    )
    prometheus_match: str = Field(
        "",
        description='Label matchers that tell this installation from others in that Prometheus: `namespace="ml"`.',
    )
    session_s: float = Field(
        3600.0, gt=0, description="Seconds after a browser's last request after which it must sign in again."
    )

    @field_validator("prometheus_url")
    @classmethod
    def _check_prometheus(cls, url: SecretStr) -> SecretStr:
        parts = urlsplit(text := url.get_secret_value())
        if text and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment):
            raise ValueError("QINFER_CONSOLE__PROMETHEUS_URL must be http://host:port or https://host/path")
        return url


class CorsSettings(Section):
    """Pages of other origins that may call HTTP from a browser (CORS); a gateway's answers do not depend on it."""

    allow_origins: tuple[str, ...] = Field(
        (),
        description="Origins whose pages may call, as browsers write them: https://app.example.org, "
        "http://localhost:3000; `*` alone = all. Empty = CORS is off, and browsers let only pages of this server call.",
    )
    allow_methods: tuple[str, ...] = Field(
        ("GET", "POST", "PUT", "DELETE"), description="Methods that such pages may use."
    )
    allow_headers: tuple[str, ...] = Field(
        (
            "Accept",
            "Authorization",
            "Content-Encoding",
            "Content-Type",
            "Endpoint-Load-Metrics-Format",
            "Idempotency-Key",
            "Inference-Header-Content-Length",
            "Last-Event-ID",
            "Prefer",
            "Request-Id",
            "Request-Timeout",
            "Traceparent",
            "Tracestate",
            "Webhook-Url",
            "X-API-Key",
        ),
        description="Headers that such pages may send. Add the headers of `http.header_forward_pattern` and "
        "`http.restricted` that pages should send.",
    )
    expose_headers: tuple[str, ...] = Field(
        (
            "Endpoint-Load-Metrics",
            "Idempotent-Replayed",
            "Inference-Header-Content-Length",
            "Location",
            "Preference-Applied",
            "Qinfer-Cache",
            "Qinfer-Request-Id",
            "Qinfer-Request-State",
            "Qinfer-Target",
            "Retry-After",
        ),
        description="Headers of replies that such pages may read.",
    )
    allow_credentials: bool = Field(
        False,
        description="Browsers send cookies and client certificates along, for a proxy that asks for them; API keys do "
        "not need it. Not with the origin `*`.",
    )
    max_age_s: int = Field(
        600, ge=0, le=86400, description="Seconds that browsers remember what they may send; 0 = they ask each time."
    )

    @field_validator("allow_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        if ANY in origins and len(origins) > 1:
            raise ValueError("`*` stands for all origins, and stands alone; leave out the others, or leave out `*`")
        return tuple(origin if origin == ANY else origin_of(origin) for origin in origins)

    @field_validator("allow_methods", "allow_headers", "expose_headers")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _NAME.fullmatch(name):
                raise ValueError(f"'{name[:80]}' is no name of a method or header, such as X-Request-Id; list each one")
        return names

    @model_validator(mode="after")
    def _check_credentials(self) -> Self:
        if self.allow_credentials and ANY in self.allow_origins:
            raise ValueError(
                "QINFER_CORS__ALLOW_CREDENTIALS is not possible with the origin `*`: any page could act as its "
                "reader; name the origins in QINFER_CORS__ALLOW_ORIGINS"
            )
        return self


def origin_of(text: str) -> str:
    """Returns an origin as browsers send it: lower case, no default port."""
    scheme, _, rest = text.lower().partition("://")
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not (scheme and host and _AUTHORITY.fullmatch(rest)):
        shown = text.rpartition("@")[2]  # a password may precede it
        raise ValueError(
            f"'{shown[:80]}' is no origin; write scheme://host or scheme://host:port, without a path or `/` at the end"
        )
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}" + ("" if port in (None, _DEFAULT_PORTS.get(scheme)) else f":{port}")


class EndpointSettings(Section):
    """Endpoints: names that stand for several models or versions (`/v1/endpoints`)."""

    path: str = Field(
        "",
        description="Directory of declarations of endpoints, one file (YAML, TOML, JSON) each; a gateway stores "
        "each new content of a file when it starts. Empty = endpoints are declared by the API only.",
    )
    max_shadows: int = Field(
        256, gt=0, description="Maximum shadows in flight in one gateway; further ones are dropped and counted."
    )
    max_shadow_bytes: int = Field(
        64 * 2**20, gt=0, description="Maximum bytes of inputs and outputs of the shadows in flight in one gateway."
    )
    sample_bytes: int = Field(
        65_536,
        ge=0,
        description="Bytes of samples of disagreement that a gateway keeps of a shadow target; 0 = no samples.",
    )
    redact_samples: bool = Field(
        False, description="Keep no values in samples of disagreement, which may be secret; only where outputs differ."
    )


class MetricsSettings(Section):
    """Metrics: their port, and Triton's optional metrics; gateways and workers need the same values."""

    enabled: bool = Field(True, description="Serve metrics on a separate port (Triton's --allow-metrics).")
    host: str = Field("", description="Address to bind; empty = that of HTTP.")
    port: int = Field(8002, ge=0, le=65535, description="Port; 0 picks a free one and prints it.")
    counter_latencies: bool = Field(
        True,
        description="Show the counters `nv_inference_*_duration_us` (Triton's --metrics-config, as the next three).",
    )
    summary_latencies: bool = Field(
        False, description="Show the summaries, `nv_*_summary_*`; workers and gateways count latencies for them."
    )
    summary_quantiles: str = Field(
        _QUANTILES,
        description="Quantiles of the summaries, each with an error as in Triton; the error has no effect.",
    )
    histogram_latencies: bool = Field(
        False, description="Show `nv_inference_first_response_histogram_ms`; workers count for it."
    )

    slo_latency_s: float = Field(
        1.0,
        gt=0,
        description="Seconds within which a request should be answered, waits included; a model's "
        "`qinfer.slo_latency_s` overrides it. See [objectives](../how-to/monitor.md#objectives).",
    )
    slo_target: float = Field(
        0.99,
        gt=0,
        lt=1,
        description="The share of requests that should be answered without a server error, and in that time; a model's "
        "`qinfer.slo_target` overrides it.",
    )

    tenants: int = Field(
        0,
        ge=0,
        le=1000,
        description="Tenants with metrics of their own in each gateway, where callers have keys; further ones share "
        "the label `(others)`. 0 = no metrics by tenant.",
    )

    @field_validator("summary_quantiles")
    @classmethod
    def _check_quantiles(cls, text: str) -> str:
        quantiles_of(text)
        return text

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The summaries' quantiles."""
        return quantiles_of(self.summary_quantiles) if self.summary_latencies else ()


def quantiles_of(text: str) -> tuple[float, ...]:
    """Parses quantiles such as `0.5:0.05,0.9:0.01`."""
    found: list[float] = []
    for part in text.split(","):
        words = part.split(":")
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 2 or not all(0 <= number <= 1 for number in numbers):
            raise ValueError(f"'{part.strip()[:40]}' is no quantile with its error, each from 0 to 1, such as 0.9:0.01")
        found.append(numbers[0])
    return tuple(dict.fromkeys(found))


class Maximum(NamedTuple):
    """A resource's units; without a `device`, of each device."""

    name: str
    units: int
    device: int | None = None


class RateLimitSettings(Section):
    """The rate limiter, of models whose instances need resources; each worker has its own."""

    mode: Literal["off", "execution_count"] = Field(
        "off",
        description="`execution_count`: an instance executes only while it holds the resources that its configuration "
        "names (Triton's --rate-limit).",
    )
    resources: tuple[str, ...] = Field(
        (),
        description="Units of each worker's resources, as NAME:COUNT or NAME:COUNT:DEVICE; global resources ignore the "
        "device. By default, a resource has as many units as the largest need (Triton's --rate-limit-resource).",
    )

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            maximum_of(text)
        return texts

    @property
    def maxima(self) -> tuple[Maximum, ...]:
        """The maxima in `resources`."""
        return tuple(map(maximum_of, self.resources))


def maximum_of(text: str) -> Maximum:
    """Parses one `--rate-limit-resource`."""
    name, *numbers = text.split(":")
    if not name or not 1 <= len(numbers) <= 2 or not all(map(_is_count, numbers)):
        raise ValueError(f"--rate-limit-resource option format is {_FORM}. Got {text[:80]}")
    return Maximum(name, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


class SegmentSettings(Section):
    """Memory that gateways share with workers of their machine, for tensors of synchronous requests."""

    directory: str = Field(
        "",
        description="Directory of mode 0700 in which gateways and workers of one machine find one another, such as "
        "/run/qinfer; in containers, a volume that they share. Empty = tensors travel through Redis.",
    )
    least_bytes: int = Field(
        16 * 1024, gt=0, description="Requests with fewer bytes of tensors travel through Redis, which is faster."
    )
    most_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        description="Bytes that a gateway or worker keeps for pending requests, and half of that for one tenant beside "
        "others; further tensors travel through Redis.",
    )
    listen_host: str = Field(
        "",
        description="Address to bind, such as 0.0.0.0, at which workers of other machines read the tensors, and send "
        "replies, over TCP. Empty = no port is opened. The workers of `qinfer up` do not listen.",
    )
    listen_port: int = Field(8004, ge=0, le=65535, description="Port of `listen_host`; 0 picks a free one.")
    advertise_host: str = Field(
        "", description="Name or address at which workers reach `listen_host`, if it differs, as behind 0.0.0.0."
    )
    tls_certfile: str = Field("", description="PEM certificate chain; with `tls_keyfile`, `listen_host` speaks TLS.")
    tls_keyfile: str = Field("", description="PEM private key.")
    tls_ca_file: str = Field(
        "",
        description="PEM certificates of the authorities that must have signed those of other machines; workers then "
        "connect by TLS only.",
    )

    @model_validator(mode="after")
    def _check_listen(self) -> Self:
        if bool(self.tls_certfile) != bool(self.tls_keyfile):
            raise ValueError("QINFER_SEGMENTS__TLS_CERTFILE and QINFER_SEGMENTS__TLS_KEYFILE need each other")
        if self.listen_host and not self.directory:
            raise ValueError("QINFER_SEGMENTS__LISTEN_HOST needs QINFER_SEGMENTS__DIRECTORY")
        if self.listen_host in _ANY_ADDRESS and not self.advertise_host:
            raise ValueError("QINFER_SEGMENTS__LISTEN_HOST is any address; set QINFER_SEGMENTS__ADVERTISE_HOST, too")
        return self


class TraceSettings(Section):
    """Triton's traces."""

    file: str = Field(
        "",
        description="Trace file of the trace extension, and the prefix of the names of further files, such as "
        "/var/log/qinfer/trace.json; its directory must exist. Empty = no such traces. Clients cannot change it.",
    )
    level: Literal["OFF", "TIMESTAMPS", "TENSORS"] = Field(
        "OFF", description="Trace level at the start (Triton's --trace-config level); clients may change it."
    )
    rate: int = Field(1000, ge=0, lt=2**32, description="One in this many requests is traced at the start.")
    count: int = Field(-1, ge=-1, lt=2**31, description="Traces that each gateway makes at the start; -1 = unlimited.")

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if self.level != "OFF" and not self.file:
            raise ValueError("QINFER_TRACE__LEVEL needs QINFER_TRACE__FILE: traces are written to it")
        return self
