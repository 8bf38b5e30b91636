"""`qinfer up`: its options. What it does is in `qinfer.cli.stack`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.models import RepositoryOption

EXAMPLE = "Example: qinfer up --model-repository ./models --workers 2"

_MOST = 256


class LogFormat(StrEnum):
    """How the programs log."""

    text = "text"
    json = "json"


class LogLevel(StrEnum):
    """The least severe level that the programs log."""

    debug = "DEBUG"
    info = "INFO"
    warning = "WARNING"
    error = "ERROR"


class ControlMode(StrEnum):
    """Which models are loaded."""

    none = "none"
    poll = "poll"
    explicit = "explicit"


class Durability(StrEnum):
    """What an accepted request survives."""

    everysec = "everysec"
    always = "always"


DurabilityOption = Annotated[
    Durability,
    typer.Option(
        envvar="QINFER_REDIS__DURABILITY",
        help="What an accepted request survives: everysec may lose about a second at power loss, always nothing, "
        "and is slower.",
    ),
]
ModelControlModeOption = Annotated[
    ControlMode,
    typer.Option(
        envvar="QINFER_REPOSITORY__CONTROL_MODE",
        help="none: all models, as they are now. poll: all, and changes are followed. explicit: those of "
        "--load-model, and what is loaded on request.",
    ),
]
LoadModelOption = Annotated[
    list[str] | None,
    typer.Option(help="A model to load at the start in mode explicit; more than once for several, * is all."),
]
RepositoryPollSecsOption = Annotated[
    float, typer.Option(envvar="QINFER_REPOSITORY__POLL_S", min=0.1, help="Seconds between two looks in mode poll.")
]
StrictReadinessOption = Annotated[
    bool, typer.Option(envvar="QINFER_REPOSITORY__STRICT_READINESS", help="Ready only when every model is.")
]
DataDirOption = Annotated[Path, typer.Option(help="Where the private Redis keeps the queue; one `up` at a time.")]
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
        help="Clients on this host may pass tensors by system shared memory.",
    ),
]
RedisOption = Annotated[
    str,
    typer.Option(
        envvar="QINFER_REDIS__URL",
        help="Use this Redis instead of a private one. A URL with a password belongs in the variable.",
    ),
]
AllowStoreOption = Annotated[
    list[str] | None,
    typer.Option(
        help="What bulk jobs may read and write, such as ./data or s3://bucket/folder; more than once for several."
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", "-w", min=1, max=_MOST, show_default="1", help="Worker processes.")
]
AutoscaleOption = Annotated[
    str,
    typer.Option(
        metavar="MIN:MAX",
        help="As many workers as the work asks for, in place of --workers; with 0:4 none where there is nothing to do. "
        "QINFER_AUTOSCALE__TARGET_S and others say how.",
    ),
]
LogFormatOption = Annotated[LogFormat, typer.Option(envvar="QINFER_LOG__FORMAT", help="Log format.")]
LogLevelOption = Annotated[
    LogLevel, typer.Option(envvar="QINFER_LOG__LEVEL", case_sensitive=False, help="Least severe level logged.")
]
ReadyTimeoutOption = Annotated[float, typer.Option(min=1, help="Seconds to wait for the models to load.")]


def up(
    *,
    model_repository: RepositoryOption = None,
    model_control_mode: ModelControlModeOption = ControlMode.none,
    load_model: LoadModelOption = None,
    repository_poll_secs: RepositoryPollSecsOption = 15.0,
    strict_readiness: StrictReadinessOption = True,
    data_dir: DataDirOption = Path(".qinfer"),
    host: HostOption = "127.0.0.1",
    http_port: HttpPortOption = 8000,
    grpc_port: GrpcPortOption = 8001,
    metrics_port: MetricsPortOption = 8002,
    allow_client_shm: AllowClientShmOption = False,
    redis: RedisOption = "",
    durability: DurabilityOption = Durability.everysec,
    workers: WorkersOption = None,
    autoscale: AutoscaleOption = "",
    allow_store: AllowStoreOption = None,
    log_format: LogFormatOption = LogFormat.text,
    log_level: LogLevelOption = LogLevel.warning,
    ready_timeout: ReadyTimeoutOption = 120.0,
) -> None:
    """Run everything on this machine: a private Redis, the gateway, workers, the bulk worker; all supervised.

    A crashed process is restarted. Ctrl-C drains: what was accepted is answered first. A second Ctrl-C
    ends at once. What waits in the queue survives both, and kill -9.
    """
    from qinfer.cli.stack import StackOptions, run_stack

    if load_model and model_control_mode is not ControlMode.explicit:
        raise typer.BadParameter("it needs --model-control-mode explicit as well", param_hint="--load-model")
    run_stack(
        StackOptions(
            model_repositories=tuple(model_repository or ()),
            control_mode=model_control_mode.value,
            load_models=tuple(load_model or ()),
            poll_s=repository_poll_secs,
            strict_readiness=strict_readiness,
            data_dir=data_dir,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            allow_client_shm=allow_client_shm,
            redis_url=redis,
            workers=workers or 1,
            autoscale=_range(autoscale, workers),
            allow_stores=tuple(allow_store or ()),
            log_format=log_format.value,
            log_level=log_level.value,
            ready_timeout_s=ready_timeout,
            durability=durability.value,
        )
    )


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
