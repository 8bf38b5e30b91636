"""`qinfer up`: the options; `qinfer.cli.local.deployment` does the work."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qinfer.cli.console import exit_code
from qinfer.cli.local.plan import UpOptions
from qinfer.cli.models import RepositoryOption
from qinfer.errors import QinferError

EXAMPLE = "Example: qinfer up --model-repository ./models --workers 2"

_MOST = 256


DurabilityOption = Annotated[
    Literal["everysec", "always"],
    typer.Option(
        envvar="QINFER_REDIS__DURABILITY",
        help="everysec may lose about the last second at power loss; always loses nothing and is slower.",
    ),
]
ModelControlModeOption = Annotated[
    Literal["none", "poll", "explicit"],
    typer.Option(
        envvar="QINFER_REPOSITORY__CONTROL_MODE",
        help="none: load all models once. poll: load all and follow changes. explicit: load those of --load-model, "
        "and others on request.",
    ),
]
LoadModelOption = Annotated[
    list[str] | None,
    typer.Option(help="A model to load at start in mode explicit; repeatable, * loads all."),
]
RepositoryPollSecsOption = Annotated[
    float, typer.Option(envvar="QINFER_REPOSITORY__POLL_S", min=0.1, help="Seconds between two polls in mode poll.")
]
StrictReadinessOption = Annotated[
    bool,
    typer.Option(envvar="QINFER_REPOSITORY__STRICT_READINESS", help="Report ready only while every model is ready."),
]
DataDirOption = Annotated[
    Path, typer.Option(help="Directory of the private Redis' data; one `up` at a time may use it.")
]
HostOption = Annotated[
    str, typer.Option(envvar="QINFER_HTTP__HOST", help="Address to bind; 0.0.0.0 serves other machines.")
]
HttpPortOption = Annotated[
    int, typer.Option(envvar="QINFER_HTTP__PORT", min=0, max=65535, help="Port; 0 picks a free one.")
]
GrpcPortOption = Annotated[
    int, typer.Option(envvar="QINFER_GRPC__PORT", min=0, max=65535, help="Port of gRPC; 0 picks a free one.")
]
MetricsPortOption = Annotated[
    int, typer.Option(envvar="QINFER_METRICS__PORT", min=0, max=65535, help="Port of metrics; 0 picks a free one.")
]
AllowClientShmOption = Annotated[
    bool,
    typer.Option(
        "--allow-client-shm",
        envvar="QINFER_ALLOW_CLIENT_SHM",
        help="Let clients on this host pass tensors in system shared memory.",
    ),
]
CacheConfigOption = Annotated[
    str,
    typer.Option(
        envvar="QINFER_CACHE__CONFIG",
        help="The response cache: local,size=BYTES, or redis,ttl=SECONDS,size=BYTES; for models that enable it.",
    ),
]
RateLimitOption = Annotated[
    Literal["off", "execution_count"],
    typer.Option(
        envvar="QINFER_RATE_LIMIT__MODE",
        case_sensitive=False,
        help="execution_count: instances execute only while they hold the resources of their configuration.",
    ),
]
RateLimitResourceOption = Annotated[
    list[str] | None,
    typer.Option(
        help="How many units of a resource each worker has: NAME:COUNT, or NAME:COUNT:DEVICE; repeatable. By default "
        "as many as the largest need."
    ),
]
RedisOption = Annotated[
    str,
    typer.Option(
        envvar="QINFER_REDIS__URL",
        help="Use this Redis instead of a private one. Put a URL with a password into the environment variable.",
    ),
]
RedisMemoryOption = Annotated[
    int,
    typer.Option(
        min=0,
        show_default="half of this machine's, or of its cgroup's",
        help="Megabytes of memory above which the private Redis takes no new requests.",
    ),
]
AllowStoreOption = Annotated[
    list[str] | None,
    typer.Option(help="A location bulk jobs may read and write, such as ./data or s3://bucket/folder; repeatable."),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", "-w", min=1, max=_MOST, show_default="1", help="Worker processes.")
]
AutoscaleOption = Annotated[
    str,
    typer.Option(
        metavar="MIN:MAX",
        help="MIN:MAX workers, as the waiting work needs, in place of --workers; 0:4 stops all workers when idle. "
        "Tuned by QINFER_AUTOSCALE__TARGET_S and its siblings.",
    ),
]
LogFormatOption = Annotated[Literal["text", "json"], typer.Option(envvar="QINFER_LOG__FORMAT", help="Log format.")]
LogLevelOption = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"],
    typer.Option(envvar="QINFER_LOG__LEVEL", case_sensitive=False, help="Lowest level to log."),
]
ModelOutputOption = Annotated[
    bool,
    typer.Option(
        "--model-output/--no-model-output",
        envvar="QINFER_LOG__MODEL_OUTPUT",
        help="Show what Python models print and log, at any log level.",
    ),
]
ReadyTimeoutOption = Annotated[float, typer.Option(min=1, help="Seconds to wait until the models are loaded.")]


def up(
    *,
    model_repository: RepositoryOption = None,
    model_control_mode: ModelControlModeOption = "none",
    load_model: LoadModelOption = None,
    repository_poll_secs: RepositoryPollSecsOption = 15.0,
    strict_readiness: StrictReadinessOption = False,
    data_dir: DataDirOption = Path(".qinfer"),
    host: HostOption = "127.0.0.1",
    http_port: HttpPortOption = 8000,
    grpc_port: GrpcPortOption = 8001,
    metrics_port: MetricsPortOption = 8002,
    allow_client_shm: AllowClientShmOption = False,
    cache_config: CacheConfigOption = "",
    rate_limit: RateLimitOption = "off",
    rate_limit_resource: RateLimitResourceOption = None,
    redis: RedisOption = "",
    redis_memory: RedisMemoryOption = 0,
    durability: DurabilityOption = "everysec",
    workers: WorkersOption = None,
    autoscale: AutoscaleOption = "",
    allow_store: AllowStoreOption = None,
    log_format: LogFormatOption = "text",
    log_level: LogLevelOption = "WARNING",
    model_output: ModelOutputOption = True,
    ready_timeout: ReadyTimeoutOption = 120.0,
) -> None:
    """Run everything on this machine: a private Redis, the gateway, workers, the bulk worker; all supervised.

    A crashed process is restarted. Ctrl-C drains: accepted requests are answered first. A second Ctrl-C
    ends at once. The queue survives both, and kill -9.
    """
    options = UpOptions(
        settings={
            "redis": {"durability": durability},
            "http": {"host": host, "port": http_port},
            "grpc": {"port": grpc_port},
            "metrics": {"port": metrics_port},
            "cache": {"config": _cache(cache_config)},
            "rate_limit": {"mode": rate_limit, "resources": _resources(rate_limit_resource)},
            "stores": {"allow": tuple(allow_store or ())},
            "repository": _repository(model_repository, model_control_mode, load_model)
            | {"poll_s": repository_poll_secs, "strict_readiness": strict_readiness},
            "log": {"format": log_format, "level": log_level, "model_output": model_output},
        },
        allow_client_shm=allow_client_shm,
        data_dir=data_dir,
        redis_url=redis,
        redis_memory_bytes=redis_memory * 2**20,
        workers=workers or 1,
        autoscale=_range(autoscale, workers),
        ready_timeout_s=ready_timeout,
    )
    _run_up(options)


def _run_up(options: UpOptions) -> None:
    from qinfer.cli.local.deployment import run_deployment

    try:
        run_deployment(options)
    except QinferError as error:
        if options.settings["log"]["format"] == "text":
            raise
        from qinfer.cli.local.messages import JsonMessages

        JsonMessages().fail(error.message)
        raise typer.Exit(exit_code(error)) from None


def _repository(places: list[str] | None, mode: str, models: list[str] | None) -> dict[str, Any]:
    if models and mode != "explicit":
        raise typer.BadParameter("it needs --model-control-mode explicit as well", param_hint="--load-model")
    return {"path": ",".join(places or ()), "control_mode": mode, "load_models": tuple(models or ())}


def _cache(text: str) -> str:
    from qinfer.core.settings_sections import plan_of

    try:
        plan_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--cache-config") from None
    return text


def _resources(texts: list[str] | None) -> tuple[str, ...]:
    from qinfer.core.settings_sections import maximum_of

    try:
        for text in texts or ():
            maximum_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate-limit-resource") from None
    return tuple(texts or ())


def _range(text: str, workers: int | None) -> tuple[int, int] | None:
    if not text:
        return None
    if workers is not None:
        raise typer.BadParameter("give this or --workers, not both", param_hint="--autoscale")
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 0 <= int(least) <= int(most) <= _MOST and int(most)):
        raise typer.BadParameter(
            f"it must be MIN:MAX, such as 0:4, with MIN from 0 to MAX and MAX from 1 to {_MOST}, got {text!r}",
            param_hint="--autoscale",
        )
    return int(least), int(most)
