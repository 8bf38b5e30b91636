"""Settings: typed, validated at start, read from the environment by composition roots only.

`QINFER_` prefix, sections nested by `__`: `QINFER_REDIS__URL=redis://queue:6379/0`, `QINFER_HTTP__PORT=8000`.
"""

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableValue

from qinfer.core.store_urls import normalised
from qinfer.errors import SettingsError

PREFIX = "QINFER_"

_OF_COMMANDS = "QINFER_API_KEY"
"""The key that commands present (`qinfer.cli.console`); no setting, for it must not reach the programs."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RedisSettings(_Section):
    """The queue."""

    url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        description="redis://, rediss:// or unix:// URL; with `cluster` any node of it; with Sentinels "
        "redis+sentinel://host:port,host:port/service/db. Its password is never logged.",
    )
    sentinel_password: SecretStr = Field(
        SecretStr(""), description="The Sentinels' own password; the one in the URL is Redis'. Never logged."
    )
    cluster: bool = Field(False, description="The URL names a node of a Redis Cluster.")
    durability: Literal["everysec", "always"] = Field(
        "everysec",
        description="What an accepted asynchronous request survives: `everysec` the kill of any gateway or worker; "
        "about a second is lost at power loss, and milliseconds may be when Redis is killed. `always` survives these "
        "too (it takes a Redis with appendfsync always, or with WAITAOF).",
    )
    min_replicas: int = Field(
        0, ge=0, description="Replicas that must have an asynchronous request before it is accepted (WAIT)."
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="Seconds to wait for a connection.")
    command_timeout_s: float = Field(5.0, gt=0, description="Seconds to wait for a command's reply.")
    max_buffered_bytes: int = Field(
        256 * 2**20, gt=0, description="Bytes that may wait to be written to Redis before new requests are refused."
    )


class HttpSettings(_Section):
    """The gateway's HTTP side."""

    host: str = Field("127.0.0.1", description="Address to bind; 0.0.0.0 to serve other machines.")
    port: int = Field(8000, ge=0, le=65535, description="Port; 0 picks a free one and prints it.")
    max_input_bytes: int = Field(
        64 * 2**20, gt=0, description="Largest body, also after decompression (Triton's --http-max-input-size)."
    )
    fast_path: bool = Field(True, description="Answer small infer requests below ASGI; off sends all through FastAPI.")
    keep_alive_s: float = Field(75.0, gt=0, description="Seconds an idle connection stays open.")
    request_read_timeout_s: float = Field(60.0, gt=0, description="Seconds a client may take to send one request.")
    drain_s: float = Field(30.0, ge=0, description="Seconds that requests in flight get to end at shutdown.")
    header_forward_pattern: str = Field(
        "", description="Headers whose names match this regular expression become request parameters."
    )
    restricted: tuple[str, ...] = Field(
        (),
        description="APIs that need a header, as `group,group:name=value` (Triton's --http-restricted-api); groups are "
        "health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace, logging.",
    )
    tls_certfile: str = Field("", description="PEM certificate; with `tls_keyfile` serves HTTPS.")
    tls_keyfile: str = Field("", description="PEM private key.")


class GrpcSettings(_Section):
    """The gateway's gRPC side."""

    enabled: bool = Field(True, description="Serve gRPC (Triton's --allow-grpc).")
    host: str = Field("", description="Address to bind; empty = that of HTTP.")
    port: int = Field(8001, ge=0, le=65535, description="Port; 0 picks a free one and prints it.")
    max_message_bytes: int = Field(2**31 - 1, gt=0, le=2**31 - 1, description="Largest message, both ways.")
    tls_certfile: str = Field("", description="PEM certificate chain; with `tls_keyfile` serves TLS.")
    tls_keyfile: str = Field("", description="PEM private key.")
    tls_client_ca_file: str = Field(
        "", description="PEM certificates of the authorities that clients must have theirs from (mutual TLS)."
    )
    header_forward_pattern: str = Field(
        "", description="Metadata whose names match this regular expression become request parameters."
    )
    restricted: tuple[str, ...] = Field(
        (),
        description="APIs that need a header, as `group,group:name=value` (Triton's --grpc-restricted-protocol); the "
        "metadata key is `triton-grpc-protocol-<name>`.",
    )


class LimitSettings(_Section):
    """Limits: requests beyond them are refused."""

    default_timeout_s: float = Field(60.0, gt=0, description="Timeout of a request that names none.")
    max_timeout_s: float = Field(3600.0, gt=0, description="Longest timeout a request may ask for.")
    max_json_depth: int = Field(100, gt=0, description="Deepest JSON nesting (Triton's limit).")
    max_in_flight: int = Field(100_000, gt=0, description="Requests one gateway may have unanswered.")
    lane_capacity: int = Field(
        10_000, gt=0, description="Requests that may wait in one lane; a model's `qinfer.lane_capacity` overrides it."
    )
    inline_max_bytes: int = Field(
        256 * 1024,
        gt=0,
        description="Tensors of a request above this travel beside the stream; outputs of an answer do above 1 MiB.",
    )
    payload_url: str = Field(
        "",
        description="Where larger tensors still are kept: an fsspec URL such as s3://bucket/qinfer or file:///shared "
        "that gateways and workers reach; empty = in Redis. Credentials come from the store's own variables.",
    )
    payload_url_min_bytes: int = Field(
        16 * 2**20, gt=0, description="Tensors above this go to `payload_url`, where it is set."
    )
    cold_start_s: float = Field(
        60.0, gt=0, description="Assumed time until a model without a live worker executes, until one was measured."
    )


class RequestSettings(_Section):
    """Asynchronous requests (`/v1`)."""

    default_timeout_s: float = Field(3600.0, gt=0, description="Timeout of an asynchronous request that names none.")
    max_timeout_s: float = Field(86400.0, gt=0, description="Longest timeout an asynchronous request may ask for.")
    result_ttl_s: float = Field(3600.0, gt=0, description="Seconds that a result can be read.")
    tombstone_ttl_s: float = Field(86400.0, gt=0, description="Seconds after that in which 410 tells it was there.")
    idempotency_ttl_s: float = Field(86400.0, gt=0, description="Seconds that an idempotency key is remembered.")
    max_wait_s: float = Field(60.0, gt=0, description="Longest `?wait=` and `Prefer: wait=`.")
    sweep_every_s: float = Field(0.5, gt=0, description="Seconds between the janitor's rounds.")


class WebhookSettings(_Section):
    """Telling other servers that a request has ended."""

    allow: tuple[str, ...] = Field(
        (),
        description="Hosts that webhooks may go to: `example.org`, `*.example.org`, `host:port`; without a port that "
        "of http or https. Empty = no webhooks.",
    )
    allow_private: bool = Field(False, description="Hosts may resolve to loopback, private or link-local addresses.")
    secret: SecretStr = Field(
        SecretStr(""), description="Signs webhooks (HMAC-SHA256, Standard Webhooks); never logged."
    )
    timeout_s: float = Field(10.0, gt=0, description="Seconds that a receiver has to answer.")
    max_attempts: int = Field(12, gt=0, description="Deliveries of one webhook before it is given up.")


class StoreSettings(_Section):
    """Object stores that requests may name."""

    allow: tuple[str, ...] = Field(
        (),
        description="URL prefixes of what requests may read and write, such as s3://bucket/folder or file:///data; "
        "empty = none. `payload_url` and the repository are the operator's, and need not be here.",
    )

    @field_validator("allow")
    @classmethod
    def _one_spelling(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(map(normalised, allow))
        except SettingsError as error:
            raise ValueError(error.message) from None


class BulkSettings(_Section):
    """Bulk jobs."""

    enabled: bool = Field(True, description="Take bulk jobs; they need `stores.allow` too, and the bulk worker.")
    broker_url: SecretStr = Field(
        SecretStr(""), description="The Redis of Celery's tasks, no cluster; empty = `redis.url`. Never logged."
    )
    spool_dir: str = Field("", description="Where parts are written before they are uploaded; empty = the system's.")
    batch_ms: float = Field(
        20.0, gt=0, description="Longest bulk batch, or twice a row's time: online requests wait for one at most."
    )
    shard_s: float = Field(30.0, gt=0, description="Seconds of work in one shard, once the model's speed is known.")
    default_rows_per_shard: int = Field(250_000, gt=0, description="Rows of a shard before it is.")
    max_rows_per_shard: int = Field(5_000_000, gt=0, description="Most rows of a shard, and so of a part.")
    max_read_bytes: int = Field(
        64 * 2**20, gt=0, description="Decoded bytes that a shard holds at once while it reads, about."
    )
    plan_threads: int = Field(16, gt=0, description="Footers that are read at once when a job is planned.")
    plan_timeout_s: float = Field(3600.0, gt=0, description="Seconds that planning or finishing a job may take.")
    max_jobs: int = Field(1000, gt=0, description="Jobs that may be unfinished; more are refused.")
    max_examine_bytes: int = Field(
        768 * 2**20,
        ge=512 * 2**20,
        description="Memory of a process that reads new jobs' files; four times as much where jobs are planned.",
    )
    record_ttl_s: float = Field(30 * 86400.0, gt=0, description="Seconds that an ended job can be asked for.")
    sweep_every_s: float = Field(10.0, gt=0, description="Seconds between looks for jobs that are stuck or expired.")
    beat: bool = Field(
        True,
        description="Bulk workers have Celery's beat within; false where `qinfer_workers.jobs.beat` is running.",
    )


class LabelingSettings(_Section):
    """Label Studio (`/label-studio`)."""

    mappings: str = Field(
        "",
        description="Directory of mapping files, one for each project; empty = Label Studio is not served. Changes are "
        "seen within seconds.",
    )
    url: str = Field(
        "",
        description="Where Label Studio is, such as https://label.example.org: predictions are pushed there, and what "
        "it keeps for its tasks is fetched there. What a request says of its address is not believed.",
    )
    token: SecretStr = Field(
        SecretStr(""),
        description="An access token of a Label Studio user who may change the projects: a personal access token, or a "
        "legacy token. Never logged.",
    )
    predict_timeout_s: float = Field(
        90.0, gt=0, description="Seconds that one call of predict may take; Label Studio waits for 100."
    )
    max_waiting_tasks: int = Field(
        100_000,
        gt=0,
        description="Tasks of a project, for one model and tenant, that may wait to become requests; more are refused. "
        "Each has at most 64 KiB of data in Redis.",
    )
    task_timeout_s: float = Field(
        86400.0, gt=0, description="Timeout of a task whose prediction is pushed; a model's own longest goes before."
    )
    result_ttl_s: float = Field(
        7 * 86400.0, gt=0, description="Seconds that a prediction waits for Label Studio to take it."
    )
    record_ttl_s: float = Field(30 * 86400.0, gt=0, description="Seconds that a task which has ended can be asked for.")
    call_timeout_s: float = Field(30.0, gt=0, description="Seconds that Label Studio has to answer a call.")
    push_batch: int = Field(500, gt=0, le=500, description="Predictions that are pushed by one call.")
    max_attempts: int = Field(10, gt=0, description="Pushes of a prediction that Label Studio fails on.")
    file_hosts: tuple[str, ...] = Field(
        (),
        description="Hosts that the files of tasks may be fetched from: `example.org`, `*.example.org`, `host:port`. "
        "Those of `url`, and of the stores that `stores.allow` names, need not be here.",
    )
    file_hosts_private: bool = Field(
        False, description="File hosts may resolve to loopback, private or link-local addresses."
    )
    max_file_bytes: int = Field(32 * 2**20, gt=0, description="Largest file of a task.")
    file_timeout_s: float = Field(20.0, gt=0, description="Seconds that one file may take.")


class AuthSettings(_Section):
    """Authentication and authorization."""

    mode: Literal["", "none", "keys"] = Field(
        "", description="`none` = everyone, `keys` = with an API key; unset it is `none`, on loopback addresses only."
    )
    keys_file: str = Field("", description="JSON file of API keys; `qinfer keys new` writes its entries.")


class WorkerSettings(_Section):
    """The inference worker."""

    models: tuple[str, ...] = Field(("*",), description="Globs: the models this worker places.")
    gpus: tuple[int, ...] | None = Field(
        None, description="GPUs that this worker may use, by index; unset = all that are here, [] = none."
    )
    load_threads: int = Field(4, gt=0, description="Models that load at once (Triton's --model-load-thread-count).")
    lease_s: float = Field(10.0, gt=0, description="Seconds without renewal after which another worker takes an entry.")
    renew_every_s: float = Field(3.0, gt=0, description="Seconds between renewals.")
    heartbeat_every_s: float = Field(1.0, gt=0, description="Seconds between heartbeats and statistics.")
    heartbeat_ttl_s: float = Field(
        10.0, gt=0, description="Seconds after its last heartbeat that a worker counts as live."
    )
    max_deliveries: int = Field(3, gt=0, description="Executions of one entry before it is a dead letter.")
    drain_s: float = Field(30.0, ge=0, description="Seconds that the batches in hand get to end at shutdown.")
    max_wait_s: float = Field(
        0.5, gt=0, le=0.5, description="Longest blocking read; bounds how late a release is seen."
    )


class RepositorySettings(_Section):
    """The model repositories."""

    path: str = Field(
        "models",
        description="The model repository, in Triton's layout: a directory or an fsspec URL (s3://, gs://, az://, "
        "file://); several are separated by commas, and a model may be in one of them only.",
    )
    autocomplete: bool = Field(True, description="Complete a missing or partial config.pbtxt from the model file.")
    control_mode: Literal["none", "poll", "explicit"] = Field(
        "none",
        description="Which models are loaded: `none` all, as they are at the start; `poll` all, and changes are "
        "followed; `explicit` those that are asked for (Triton's --model-control-mode).",
    )
    poll_s: float = Field(15.0, gt=0, description="Seconds between two looks at the repository, in mode `poll`.")
    load_models: tuple[str, ...] = Field(
        (), description="Models to load at the start, in mode `explicit`; `*` is all (Triton's --load-model)."
    )
    load_timeout_s: float = Field(
        600.0, gt=0, description="Seconds that a load or unload that was asked for may take before it is answered 503."
    )
    config_name: str = Field(
        "", description="Use configs/<name>.pbtxt of a model that has it (Triton's --model-config-name)."
    )
    overlay: str = Field(
        "",
        description="Where files that come with a load request are kept: a directory or fsspec URL that gateways and "
        "workers reach; empty = such requests are refused.",
    )
    cache_dir: str = Field(
        "", description="Where workers keep copies of remote model files; empty = a directory of the user's cache."
    )
    strict_readiness: bool = Field(True, description="The server is ready when every model is (--strict-readiness).")
    min_workers: int = Field(
        1,
        ge=0,
        description="`qinfer.min_workers` of models whose configuration has none: 0 = they are ready without a live "
        "worker, and their requests wait until one has started. All gateways and `qinfer models sync` need the same.",
    )
    gpus: int = Field(
        -1,
        ge=-1,
        description="GPUs that a model may use that names none (KIND_AUTO, KIND_GPU); -1 = as many as here.",
    )


class AutoscaleSettings(_Section):
    """The choice of the number of workers by `qinfer autoscale` and `qinfer up --autoscale`."""

    min_workers: int = Field(0, ge=0, description="The fewest workers.")
    max_workers: int = Field(0, ge=0, description="The most workers; 0 = one for each core of this machine.")
    target_s: float = Field(
        10.0, gt=0, description="Seconds of work that one worker may have; with more than that, another is started."
    )
    up_after_s: float = Field(
        0.0, ge=0, description="Seconds that more workers must be wanted; the first one is always started at once."
    )
    down_after_s: float = Field(60.0, ge=0, description="Seconds that fewer workers must suffice.")
    idle_s: float = Field(300.0, ge=0, description="Seconds of nothing to do, after which the fewest are left.")
    cooldown_s: float = Field(
        30.0,
        ge=0,
        description="Seconds after a step up in which there is no step down; 1.5 times the load time, if that is more.",
    )
    every_s: float = Field(1.0, gt=0, le=5, description="Seconds between two looks at the queue; 5 at most.")
    record: str = Field(
        "",
        description="File to which a line of JSON with what was seen and decided is added at each look, for "
        "`qinfer autoscale --replay`; empty = none.",
    )


class LogSettings(_Section):
    """Logs."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least severe level logged.")
    format: Literal["json", "text"] = Field("json", description="One JSON object a line, or text for people.")


class TraceSettings(_Section):
    """Triton's traces."""

    file: str = Field(
        "",
        description="Where the trace extension writes its traces, and what the names of further files begin with, such "
        "as /var/log/qinfer/trace.json; its directory must be there. Empty = no such traces. Clients can't change it.",
    )


_QUANTILES = "0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001"


class MetricsSettings(_Section):
    """Metrics: their port, and the optional ones of Triton; give gateways and workers the same."""

    enabled: bool = Field(True, description="Serve metrics on a port of their own (Triton's --allow-metrics).")
    host: str = Field("", description="Address to bind; empty = that of HTTP.")
    port: int = Field(8002, ge=0, le=65535, description="Port; 0 picks a free one and prints it.")
    counter_latencies: bool = Field(
        True,
        description="Show the counters `nv_inference_*_duration_us` (Triton's --metrics-config; the next three, too).",
    )
    summary_latencies: bool = Field(
        False, description="Show the `nv_inference_*_summary_us` summaries; workers count latencies for them."
    )
    summary_quantiles: str = Field(
        _QUANTILES,
        description="Their quantiles, each with an error as in Triton; the error is ignored: qinfer's is fixed.",
    )
    histogram_latencies: bool = Field(
        False, description="Show `nv_inference_first_response_histogram_ms`; workers count for it."
    )

    @field_validator("summary_quantiles")
    @classmethod
    def _check_quantiles(cls, text: str) -> str:
        quantiles_of(text)
        return text

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The quantiles of the summaries; none where these are not shown."""
        return quantiles_of(self.summary_quantiles) if self.summary_latencies else ()


def quantiles_of(text: str) -> tuple[float, ...]:
    """Reads quantiles as Triton's `summary_quantiles` has them: `0.5:0.05,0.9:0.01`.

    Raises:
        ValueError: One of them is no quantile.
    """
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


class Settings(BaseSettings):
    """Everything that can be set; each section's fields say what they mean."""

    model_config = SettingsConfigDict(env_prefix="QINFER_", env_nested_delimiter="__", frozen=True, extra="forbid")

    redis: RedisSettings = Field(default_factory=RedisSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    grpc: GrpcSettings = Field(default_factory=GrpcSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    requests: RequestSettings = Field(default_factory=RequestSettings)
    webhooks: WebhookSettings = Field(default_factory=WebhookSettings)
    stores: StoreSettings = Field(default_factory=StoreSettings)
    bulk: BulkSettings = Field(default_factory=BulkSettings)
    labeling: LabelingSettings = Field(default_factory=LabelingSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    repository: RepositorySettings = Field(default_factory=RepositorySettings)
    autoscale: AutoscaleSettings = Field(default_factory=AutoscaleSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    trace: TraceSettings = Field(default_factory=TraceSettings)
    allow_client_shm: bool = Field(
        False, description="Clients on this host may pass tensors by system shared memory (--allow-client-shm)."
    )
    server_id: str = Field("triton", description="The server name in GET /v2 (Triton's --id).")


def load_settings() -> Settings:
    """Reads the settings from the environment.

    Raises:
        SettingsError: A variable is unknown or its value wrong; every such variable is named.
    """
    problems = unknown_variables(os.environ)
    if problems:
        raise SettingsError("; ".join(problems))
    try:
        return Settings()
    except UnreadableValue as error:
        raise SettingsError(_not_json(os.environ) or f"{error}; sections and lists are written as JSON") from None
    except ValidationError as error:
        problems = [
            f"{PREFIX}{'__'.join(str(p).upper() for p in e['loc'])}: {e['msg']}, got {e['input']!r}"
            for e in error.errors()
        ]
        raise SettingsError("; ".join(problems)) from None


def _not_json(environment: Mapping[str, str]) -> str:
    """Names the lists that are no JSON: pydantic-settings tells the section only. Values stay out, some are secret."""
    wrong = []
    for section, field in Settings.model_fields.items():
        for name, inner in getattr(field.annotation, "model_fields", {}).items():
            variable = f"{PREFIX}{section}__{name}".upper()
            if variable in environment and "tuple" in str(inner.annotation):
                try:
                    json.loads(environment[variable])
                except ValueError:
                    wrong.append(f"""{variable}: a list is written as JSON, such as '["first", "second"]'""")
    return "; ".join(wrong)


def variable_names() -> list[str]:
    """Returns the environment variable of every setting: `QINFER_REDIS__URL`, …, `QINFER_SERVER_ID`."""
    names = []
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            names += [f"{PREFIX}{name}__{inner}".upper() for inner in section.model_fields]
        else:
            names.append(f"{PREFIX}{name}".upper())
    return names


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Returns a message for each unknown `QINFER_…` variable; without its value, which may be secret.

    pydantic-settings looks only for the variables it knows: a misspelt one would silently leave the default.
    """
    known = variable_names()
    sections = {name.partition("__")[0] for name in known}  # a whole section may be given as JSON: QINFER_HTTP={…}
    problems = []
    for name in sorted(names):
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in known or upper in sections or upper == _OF_COMMANDS:
            continue
        nearest = difflib.get_close_matches(upper, known, n=1, cutoff=0.0)
        problems.append(f"unknown setting {name}; did you mean {nearest[0]}?")
    return problems
