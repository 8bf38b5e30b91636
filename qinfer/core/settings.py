"""Settings: typed, validated at start, read from the environment by composition roots only.

`QINFER_` prefix, sections nested by `__`: `QINFER_REDIS__URL=redis://queue:6379/0`, `QINFER_HTTP__PORT=8000`.
"""

import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableValue

from qinfer.core.processes import PREFIX
from qinfer.core.settings_sections import (
    CacheSettings,
    ConsoleSettings,
    CorsSettings,
    EndpointSettings,
    MetricsSettings,
    RateLimitSettings,
    Section,
    SegmentSettings,
    TraceSettings,
)
from qinfer.core.store_urls import UrlGrant, contains, do_meet, folders_of, normalised
from qinfer.core.wrong_values import is_lenient, not_json, unknown_names, wrong_values
from qinfer.errors import SettingsError

_OF_COMMANDS = ("QINFER_API_KEY", "QINFER_URL")
"""Variables of commands (`qinfer.cli.console`)."""


class RedisSettings(Section):
    """The queue."""

    url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        description="redis://, rediss:// or unix:// URL; with `cluster`, that of any node; with Sentinels "
        "redis+sentinel://host:port,host:port/service/db. The password is never logged.",
    )
    sentinel_password: SecretStr = Field(
        SecretStr(""), description="The Sentinels' own password; the one in the URL is Redis'. Never logged."
    )
    cluster: bool = Field(False, description="The URL names a node of a Redis Cluster.")
    durability: Literal["everysec", "always"] = Field(
        "everysec",
        description="Durability of accepted asynchronous requests. `everysec`: they survive the kill of any gateway or "
        "worker; power loss loses about a second of requests, a kill of Redis perhaps milliseconds. `always`: they "
        "survive these too (requires a Redis with appendfsync always, or with WAITAOF).",
    )
    min_replicas: int = Field(
        0, ge=0, description="Replicas that must confirm an asynchronous request before it is accepted (WAIT)."
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="Seconds to wait for a connection.")
    command_timeout_s: float = Field(5.0, gt=0, description="Seconds to wait for a command's reply.")
    max_buffered_bytes: int = Field(
        256 * 2**20, gt=0, description="Bytes that may wait to be written to Redis before new requests are refused."
    )


class HttpSettings(Section):
    """The gateway's HTTP side."""

    host: str = Field("127.0.0.1", description="Address to bind; 0.0.0.0 to serve other machines.")
    port: int = Field(8000, ge=0, le=65535, description="Port; 0 picks a free one and prints it.")
    max_input_bytes: int = Field(
        64 * 2**20, gt=0, description="Largest body, also after decompression (Triton's --http-max-input-size)."
    )
    allow_hosts: tuple[str, ...] = Field(
        (),
        description="Names by which clients call this server (`Host`, `:authority`), beside localhost and addresses; "
        "`*` = any. Empty = any; but without keys, where all ports are on loopback addresses, none, so that no page's "
        "name can be pointed at this machine (DNS rebinding).",
    )
    fast_path: bool = Field(True, description="Answer small infer requests below ASGI; if off, FastAPI answers all.")
    keep_alive_s: float = Field(75.0, gt=0, description="Seconds an idle connection stays open.")
    request_read_timeout_s: float = Field(60.0, gt=0, description="Seconds a client may take to send one request.")
    drain_s: float = Field(30.0, ge=0, description="Seconds that requests in flight have to end at shutdown.")
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


class GrpcSettings(Section):
    """The gateway's gRPC side."""

    enabled: bool = Field(True, description="Serve gRPC (Triton's --allow-grpc).")
    host: str = Field("", description="Address to bind; empty = that of HTTP.")
    port: int = Field(8001, ge=0, le=65535, description="Port; 0 picks a free one and prints it.")
    max_message_bytes: int = Field(
        64 * 2**20,
        gt=0,
        le=2**31 - 1,
        description="Largest message of a client, decompressed; a `RepositoryModelLoad` may have 2^31-1 bytes.",
    )
    max_connection_age_s: float = Field(
        0.0,
        ge=0,
        description="Seconds after which a connection takes no more calls, so that its client connects anew and "
        "balancers spread the load; varied by a tenth; 0 = never.",
    )
    max_connection_idle_s: float = Field(
        0.0, ge=0, description="Seconds without a call after which a connection ends; 0 = never."
    )
    keepalive_s: float = Field(
        7200.0,
        gt=0,
        description="Seconds without a byte from a client after which it is asked for a sign of life "
        "(Triton's --grpc-keepalive-time).",
    )
    keepalive_timeout_s: float = Field(
        20.0,
        gt=0,
        description="Seconds that the sign of life may take before the connection is closed "
        "(Triton's --grpc-keepalive-timeout).",
    )
    infer_response_compression: Literal["none", "low", "medium", "high"] = Field(
        "none",
        description="How hard infer responses are compressed for clients that accept gzip or deflate "
        "(Triton's --grpc-infer-response-compression-level).",
    )
    tls_certfile: str = Field("", description="PEM certificate chain; with `tls_keyfile` serves TLS.")
    tls_keyfile: str = Field("", description="PEM private key.")
    tls_client_ca_file: str = Field(
        "", description="PEM certificates of the authorities that must have signed clients' certificates (mutual TLS)."
    )
    header_forward_pattern: str = Field(
        "", description="Metadata whose names match this regular expression become request parameters."
    )
    restricted: tuple[str, ...] = Field(
        (),
        description="APIs that need a header, as `group,group:name=value` (Triton's --grpc-restricted-protocol); the "
        "metadata key is `triton-grpc-protocol-<name>`.",
    )


class LimitSettings(Section):
    """Limits: requests beyond them are refused."""

    default_timeout_s: float = Field(60.0, gt=0, description="Timeout of a request without one.")
    max_timeout_s: float = Field(3600.0, gt=0, description="Longest timeout a request may ask for.")
    max_json_depth: int = Field(100, gt=0, description="Deepest JSON nesting (Triton's limit).")
    max_in_flight: int = Field(100_000, gt=0, description="Unanswered requests that one gateway may have.")
    max_sequences: int = Field(20_000, gt=0, description="Open sequences of one partition of a model.")
    max_sequence_steps: int = Field(1000, gt=0, description="Requests of one sequence that may wait.")
    max_call_depth: int = Field(16, gt=0, description="Deepest nesting of calls between models.")
    lane_capacity: int = Field(
        10_000, gt=0, description="Requests that may wait in one lane; a model's `qinfer.lane_capacity` overrides it."
    )
    max_receiving_bytes: int = Field(
        160 * 2**20,
        ge=2**20,
        description="Bytes of requests that one gateway receives or decodes at a time, and of large answers that "
        "clients have not read yet. Further requests wait for their turn; a larger body is received alone.",
    )
    max_strings: int = Field(
        1_000_000,
        gt=0,
        description="Elements that the BYTES inputs of one request may have together, as each becomes an object in "
        "workers and models; a model's `qinfer.max_strings` overrides it.",
    )
    inline_max_bytes: int = Field(
        2**18, gt=0, description="Larger tensors of a request are stored outside the stream; outputs above 1 MiB."
    )
    stream_window_bytes: int = Field(
        2**20,
        gt=0,
        description="Bytes of one stream's outputs on their way to its caller; beyond them, the model waits.",
    )
    stream_stall_s: float = Field(
        60.0, gt=0, description="Seconds after which a waiting stream is cancelled if its caller reads nothing."
    )
    stream_result_bytes: int = Field(
        64 * 2**20, gt=0, description="Bytes of all stored responses of one asynchronous request."
    )
    payload_url: str = Field(
        "",
        description="Store of the largest tensors: an fsspec URL such as s3://bucket/qinfer or file:///shared "
        "that gateways and workers can reach; empty = in Redis. Credentials come from the store's own variables. "
        "Unless it is set, `qinfer up` uses the folder `payloads` of its data directory, from 1 MiB on.",
    )
    payload_url_min_bytes: int = Field(
        16 * 2**20, gt=0, description="Larger tensors are stored at `payload_url`, if it is set."
    )
    execute_timeout_s: float = Field(
        0.0, ge=0, description="Limit of an execution, 0 = none; a model's `qinfer.execute_timeout_s` overrides it."
    )
    cold_start_s: float = Field(
        60.0, gt=0, description="Assumed start time of a model without a live worker, until one was measured."
    )
    wait_for_workers_s: float = Field(
        10.0,
        ge=0,
        description="Seconds that a synchronous request waits for a worker that has its model loaded; where an "
        "autoscaler starts workers for the model, the time that takes and 10 s. Never longer than the request's "
        "timeout; 0 = it is refused at once.",
    )


class RequestSettings(Section):
    """Asynchronous requests (`/v1`)."""

    default_timeout_s: float = Field(3600.0, gt=0, description="Timeout of an asynchronous request without one.")
    max_timeout_s: float = Field(86400.0, gt=0, description="Longest timeout an asynchronous request may ask for.")
    result_ttl_s: float = Field(3600.0, gt=0, description="Seconds that a result can be read.")
    tombstone_ttl_s: float = Field(86400.0, gt=0, description="Seconds after that during which its record answers 410.")
    idempotency_ttl_s: float = Field(86400.0, gt=0, description="Seconds that an idempotency key is remembered.")
    max_wait_s: float = Field(60.0, gt=0, description="Longest `?wait=` and `Prefer: wait=`.")
    sweep_every_s: float = Field(0.5, gt=0, description="Seconds between the janitor's rounds.")


class WebhookSettings(Section):
    """Webhooks: notifications of other servers that a request has ended."""

    allow: tuple[str, ...] = Field(
        (),
        description="Hosts that may receive webhooks: `example.org`, `*.example.org`, `host:port`; without a port, "
        "that of http or https. Empty = no webhooks.",
    )
    allow_private: bool = Field(False, description="Hosts may resolve to loopback, private or link-local addresses.")
    secret: SecretStr = Field(
        SecretStr(""), description="Signs webhooks (HMAC-SHA256, Standard Webhooks); never logged."
    )
    timeout_s: float = Field(10.0, gt=0, description="Seconds that a receiver has to answer.")
    max_attempts: int = Field(12, gt=0, description="Attempts to deliver a webhook before it is given up.")


def _one_spelling(urls: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(normalised(f"file://{os.path.realpath(url)}" if url[:1] in ("/", ".") else url) for url in urls)
    except SettingsError as error:
        raise ValueError(error.message) from None


_Prefixes = Annotated[tuple[str, ...], AfterValidator(_one_spelling)]


class TenantStores(Section):
    """The URL prefixes that one tenant may use; a prefix outside of `stores.allow` allows nothing."""

    read: _Prefixes = ()
    write: _Prefixes = ()


class StoreSettings(Section):
    """Object stores that requests may name."""

    allow: _Prefixes = Field(
        (),
        description="URL prefixes and directories that requests may read and write, such as s3://bucket/folder or "
        "./data; empty = none. `payload_url` and the repository need not be listed.",
    )
    deny: _Prefixes = Field(
        (),
        description="URL prefixes and directories within `allow` that no request may read and write; `qinfer up` adds "
        "its payload store.",
    )
    tenants: dict[str, TenantStores] = Field(
        {},
        description="Prefixes within `allow` that a tenant may read and write: "
        '{"acme": {"read": ["s3://data/acme", "s3://data/common"], "write": ["s3://data/acme"]}}. A tenant without an '
        "entry has the folder of its name in each allowed store if the keys are of several tenants, else all that is "
        "allowed. Gateways, workers and bulk workers need the same.",
    )

    def grant_of(self, tenant: str, *, is_shared: bool = False) -> UrlGrant:
        """Returns a tenant's URL prefixes; `is_shared` = other tenants have keys.

        A worker does not know that: it narrows the gateway's grant to its own prefixes.
        """
        every = UrlGrant(self.allow, self.allow, deny=self.deny)
        if (own := self.tenants.get(tenant)) is not None:
            return UrlGrant(own.read, own.write, tenant).narrowed(every)
        if not is_shared:
            return every
        folders = folders_of(tenant, self.allow)
        return UrlGrant(folders, folders, tenant, self.deny)


class BulkSettings(Section):
    """Bulk jobs."""

    enabled: bool = Field(True, description="Accept bulk jobs; they also need `stores.allow` and a bulk worker.")
    broker_url: SecretStr = Field(
        SecretStr(""), description="The Redis of Celery's tasks, not a cluster; empty = `redis.url`. Never logged."
    )
    spool_dir: str = Field("", description="Directory of parts before their upload; empty = the system's.")
    batch_ms: float = Field(
        20.0, gt=0, description="Longest bulk batch, or twice a row's time; online requests wait for at most one batch."
    )
    shard_s: float = Field(30.0, gt=0, description="Seconds of work in one shard, once the model's speed is known.")
    default_rows_per_shard: int = Field(250_000, gt=0, description="Most rows of a shard while the speed is unknown.")
    max_rows_per_shard: int = Field(5_000_000, gt=0, description="Maximum number of rows of a shard, and so of a part.")
    max_read_bytes: int = Field(
        64 * 2**20, gt=0, description="Approximate number of decoded bytes in memory while a shard is read."
    )
    max_footer_bytes: int = Field(
        16 * 2**20,
        ge=2**20,
        le=256 * 2**20,
        description="Largest footer of an input file of Parquet or Arrow; it may take eight times as much in memory.",
    )
    plan_threads: int = Field(16, gt=0, description="Number of threads that read footers when a job is planned.")
    plan_timeout_s: float = Field(3600.0, gt=0, description="Seconds that planning or finishing a job may take.")
    max_jobs: int = Field(1000, gt=0, description="Maximum unfinished jobs of a tenant; further ones are refused.")
    max_examine_bytes: int = Field(
        768 * 2**20,
        ge=512 * 2**20,
        description="Memory of a process that reads new jobs' files; four times as much where jobs are planned.",
    )
    record_ttl_s: float = Field(30 * 86400.0, gt=0, description="Seconds that the record of an ended job is kept.")
    sweep_every_s: float = Field(10.0, gt=0, description="Seconds between checks for stuck and expired jobs.")


class LabelingSettings(Section):
    """Label Studio (`/label-studio`)."""

    mappings: str = Field(
        "",
        description="Directory of mapping files, one for each project; empty = Label Studio is not served. Changes are "
        "noticed within seconds.",
    )
    url: str = Field(
        "",
        description="URL of Label Studio, such as https://label.example.org: predictions are pushed there, and files "
        "of tasks are downloaded from there. Addresses in requests are ignored.",
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
        86400.0, gt=0, description="Timeout of a task whose prediction is pushed; at most the model's longest."
    )
    result_ttl_s: float = Field(
        7 * 86400.0, gt=0, description="Seconds that a prediction is kept until Label Studio accepts it."
    )
    record_ttl_s: float = Field(30 * 86400.0, gt=0, description="Seconds that the record of an ended task is kept.")
    call_timeout_s: float = Field(30.0, gt=0, description="Seconds that Label Studio has to answer a call.")
    push_batch: int = Field(500, gt=0, le=500, description="Predictions in one push call.")
    max_attempts: int = Field(10, gt=0, description="Maximum number of failed pushes of a prediction.")
    file_hosts: tuple[str, ...] = Field(
        (),
        description="Hosts from which files of tasks may be downloaded: `example.org`, `*.example.org`, `host:port`. "
        "The hosts of `url` and of the stores in `stores.allow` need not be listed.",
    )
    file_hosts_private: bool = Field(
        False, description="File hosts may resolve to loopback, private or link-local addresses."
    )
    max_file_bytes: int = Field(32 * 2**20, gt=0, description="Largest file of a task.")
    file_timeout_s: float = Field(20.0, gt=0, description="Seconds that the download of one file may take.")


class AuthSettings(Section):
    """Authentication and authorization."""

    mode: Literal["", "none", "keys"] = Field(
        "",
        description="`none` = no keys, `keys` = an API key is required; unset = `none`, only on loopback addresses and "
        "without a key file.",
    )
    keys_file: str = Field("", description="JSON file of API keys, which gateways follow; `qinfer keys` writes it.")


class WorkerSettings(Section):
    """The inference worker."""

    models: tuple[str, ...] = Field(
        ("*",), description="Globs of the models that this worker loads; names with `~` need a glob with `~`."
    )
    gpus: tuple[int, ...] | None = Field(
        None, description="GPUs that this worker may use, by index; unset = all of this machine, [] = none."
    )
    warm_up: bool = Field(
        True,
        description="Run models of the built-in runtimes with zeros before they are ready; `python` models, and those "
        "of other backends, only run with their `model_warmup`.",
    )
    health_dir: str = Field(
        "",
        description="Directory, of this process alone, of files that probes look at: `live` is younger than a minute "
        "while the worker, bulk worker or bridge runs; `ready`, of a worker only, younger than half a minute "
        "while its models are loaded. Empty = none.",
    )
    load_threads: int = Field(4, gt=0, description="Concurrent loads of models (Triton's --model-load-thread-count).")
    lease_s: float = Field(10.0, gt=0, description="Seconds without renewal after which another worker takes an entry.")
    renew_every_s: float = Field(3.0, gt=0, description="Seconds between renewals.")
    heartbeat_every_s: float = Field(1.0, gt=0, description="Seconds between heartbeats and statistics.")
    heartbeat_ttl_s: float = Field(
        10.0, gt=0, description="Seconds after its last heartbeat that a worker counts as live."
    )
    max_deliveries: int = Field(3, gt=0, description="Executions of a request before it becomes a dead letter.")
    drain_s: float = Field(30.0, ge=0, description="Seconds that batches and streams have to end at shutdown.")
    max_wait_s: float = Field(
        0.5,
        gt=0,
        le=0.5,
        description="Longest fetch: an idle worker looks that often whether it is to fetch something else.",
    )
    model_env: tuple[str, ...] = Field(
        (),
        description="Further variables that code of `python` models gets, by name or pattern: HF_TOKEN, ACME_*. It "
        "never gets settings, and by default no credentials. `qinfer up` and `qinfer autoscale` pass them to workers.",
    )
    model_terminal: str = Field(
        "",
        description="Terminal that processes of `python` models read from and print to, as for breakpoint(): "
        "/dev/pts/1. Empty = their output is in the log. `qinfer dev` sets it.",
    )
    max_environment_bytes: int = Field(
        8 * 2**30,
        gt=0,
        description="Largest packed environment of a `python` model (`EXECUTION_ENV_PATH`), unpacked; all unused "
        "environments together have the same limit.",
    )
    max_environment_files: int = Field(
        200_000, gt=0, description="Files, directories and links that such an environment may have."
    )
    triton_directory: str = Field(
        "",
        description="Directory of NVIDIA's server, for models of its C backends; empty = /opt/tritonserver, or the "
        "package nvidia-pytriton.",
    )
    triton_backends: str = Field(
        "",
        description="Directory of C backends, `<name>/libtriton_<name>.so` (Triton's --backend-directory); empty = "
        "`backends` of Triton's directory.",
    )


class RepositorySettings(Section):
    """The model repositories."""

    path: str = Field(
        "models",
        description="The model repository, in Triton's layout: a directory or an fsspec URL (s3://, gs://, az://, "
        "file://); several are separated by commas, and a model may be in one of them only.",
    )
    autocomplete: bool = Field(True, description="Complete a missing or partial config.pbtxt from the model file.")
    control_mode: Literal["none", "poll", "explicit"] = Field(
        "none",
        description="Loaded models: `none` = all, as they are at the start; `poll` = all, with later changes; "
        "`explicit` = those that are requested (Triton's --model-control-mode).",
    )
    poll_s: float = Field(15.0, gt=0, description="Seconds between two polls of the repository, in mode `poll`.")
    load_models: tuple[str, ...] = Field(
        (), description="Models to load at the start, in mode `explicit`; `*` = all (Triton's --load-model)."
    )
    load_timeout_s: float = Field(
        600.0, gt=0, description="Seconds that a requested load or unload may take before it is answered 503."
    )
    config_name: str = Field(
        "", description="Use configs/<name>.pbtxt of a model that has it (Triton's --model-config-name)."
    )
    overlay: str = Field(
        "",
        description="Store of files that load requests contain: a directory or fsspec URL that gateways and workers "
        "can reach; empty = such requests are refused.",
    )
    cache_dir: str = Field(
        "",
        description="Directory of workers' copies of remote model files, compiled engines and unpacked environments; "
        "empty = one in the user's cache.",
    )
    strict_readiness: bool = Field(
        False,
        description="The server is ready only while every model is (Triton's --strict-readiness, on by default there): "
        "one broken model takes every gateway out of its load balancer. Also for `qinfer healthcheck worker --ready`.",
    )
    min_workers: int = Field(
        1,
        ge=0,
        description="`qinfer.min_workers` of models whose configuration has none: 0 = they are ready without a live "
        "worker, and their requests wait until one has started. All gateways and `qinfer models sync` need the same.",
    )
    gpus: int = Field(
        -1,
        ge=-1,
        description="Number of GPUs for models that name none (KIND_AUTO, KIND_GPU); -1 = those of this machine.",
    )


class AutoscaleSettings(Section):
    """The choice of the number of workers by `qinfer autoscale` and `qinfer up --autoscale`."""

    min_workers: int = Field(0, ge=0, description="Minimum number of workers.")
    max_workers: int = Field(0, ge=0, description="Maximum number of workers; 0 = one for each core of this machine.")
    target_s: float = Field(
        10.0, gt=0, description="Seconds of work per worker; if there is more, another worker is started."
    )
    up_after_s: float = Field(
        0.0, ge=0, description="Seconds that more workers must be wanted; the first one is always started at once."
    )
    down_after_s: float = Field(60.0, ge=0, description="Seconds that fewer workers must suffice.")
    idle_s: float = Field(300.0, ge=0, description="Seconds without work after which the number falls to the minimum.")
    cooldown_s: float = Field(
        30.0,
        ge=0,
        description="Seconds after a step up in which there is no step down; 1.5 times the load time, if that is more.",
    )
    every_s: float = Field(1.0, gt=0, le=5, description="Seconds between two readings of the queue; at most 5.")


class LogSettings(Section):
    """Logs."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least severe level logged.")
    format: Literal["json", "text"] = Field("json", description="`json`: an object per line; `text`: for people.")
    model_output: bool = Field(
        False, description="Log the output of Python models, and their log messages at INFO and above, at any level."
    )
    access: float = Field(
        0.0,
        ge=0,
        le=1,
        description="The access log of gateways: the share of requests that get a line; above 0, all that fail do.",
    )


class Settings(BaseSettings):
    """All settings; the fields of each section describe them."""

    model_config = SettingsConfigDict(env_prefix="QINFER_", env_nested_delimiter="__", frozen=True, extra="forbid")

    redis: RedisSettings = Field(default_factory=RedisSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    cors: CorsSettings = Field(default_factory=CorsSettings)
    console: ConsoleSettings = Field(default_factory=ConsoleSettings)
    grpc: GrpcSettings = Field(default_factory=GrpcSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    rate_limit: RateLimitSettings = Field(default_factory=RateLimitSettings)
    requests: RequestSettings = Field(default_factory=RequestSettings)
    webhooks: WebhookSettings = Field(default_factory=WebhookSettings)
    stores: StoreSettings = Field(default_factory=StoreSettings)
    bulk: BulkSettings = Field(default_factory=BulkSettings)
    endpoints: EndpointSettings = Field(default_factory=EndpointSettings)
    labeling: LabelingSettings = Field(default_factory=LabelingSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    repository: RepositorySettings = Field(default_factory=RepositorySettings)
    autoscale: AutoscaleSettings = Field(default_factory=AutoscaleSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    trace: TraceSettings = Field(default_factory=TraceSettings)
    segments: SegmentSettings = Field(default_factory=SegmentSettings)
    allow_client_shm: bool = Field(
        False, description="Clients on this host may pass tensors by system shared memory (--allow-client-shm)."
    )
    server_id: str = Field("triton", description="The server name in GET /v2 (Triton's --id).")
    pass_env: tuple[str, ...] = Field(
        (),
        description="Further variables that `qinfer up` and `qinfer autoscale` pass to the programs that they start, "
        "by name or pattern such as ACME_*, for drivers of stores and third-party backends.",
    )
    allow_inspection: bool = Field(
        False,
        description="Let other processes of the same user read the memory, environment and open files of qinfer's "
        "processes, as debuggers (gdb, py-spy) and core dumps need; Linux only. Code of models can then read secrets.",
    )
    strict_settings: bool = Field(
        True,
        description="End with an error when a QINFER_ variable is unknown; if off, a warning names it, so that a "
        "rollback may meet settings of a newer version.",
    )
    _unknown: tuple[str, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """A message for each unknown variable."""
        return self._unknown

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, env_settings: Any, *_: Any, **__: Any
    ) -> tuple[Any, ...]:
        """Leaves out unknown variables, which `load_settings` reports."""
        own = [name for name in env_settings.env_vars if name.upper().startswith(PREFIX)]
        unknown = {name for name in own if unknown_variables([name])}
        env_settings.env_vars = {name: v for name, v in env_settings.env_vars.items() if name not in unknown}
        return init_settings, env_settings


def load_settings() -> Settings:
    """Reads the environment; `SettingsError` names each unknown or wrong variable."""
    unknown = unknown_variables(os.environ)
    if unknown and not is_lenient(os.environ):
        raise SettingsError("; ".join(unknown))
    try:
        settings = Settings()
    except UnreadableValue as error:
        problems = not_json(os.environ, Settings) or [f"{error}; sections and lists are written as JSON"]
        raise SettingsError("; ".join(problems)) from None
    except ValidationError as error:
        raise SettingsError("; ".join(wrong_values(error, Settings))) from None
    _check_payload_store(settings)
    settings._unknown = tuple(unknown)
    return settings


def _check_payload_store(settings: Settings) -> None:
    """Refuses a location that meets the payload store, whose tensors of all tenants jobs may not read."""
    payloads = settings.limits.payload_url.rpartition("::")[2]  # the last driver of a chain has the location
    if any(contains(place, payloads) for place in settings.stores.deny):
        return
    for allowed in settings.stores.allow:
        if payloads and do_meet(payloads, allowed):
            raise SettingsError(
                "QINFER_LIMITS__PAYLOAD_URL: the payload store and a location of QINFER_STORES__ALLOW are within one "
                "another, so that jobs could read the tensors of others; give each a folder of its own, or add the "
                "store to QINFER_STORES__DENY"
            )


def variable_names() -> list[str]:
    """Returns every setting's environment variable."""
    names = []
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            names += [f"{PREFIX}{name}__{inner}".upper() for inner in section.model_fields]
        else:
            names.append(f"{PREFIX}{name}".upper())
    return names


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Returns a message for each unknown `QINFER_…` variable, without its value, which may be secret.

    pydantic-settings ignores them: a misspelt one would silently leave the default.
    """
    return unknown_names(names, variable_names(), _OF_COMMANDS)
