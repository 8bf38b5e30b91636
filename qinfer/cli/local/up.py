"""`qinfer up`: the options; `qinfer.cli.local.deployment` does the work."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qinfer.cli.console import exit_code, with_options
from qinfer.cli.models import RepositoryOption
from qinfer.errors import QinferError

EXAMPLE = "Example: qinfer up --model-repository ./models --workers 2"

_MOST = 256


class UpFlags:
    """The options of `qinfer up`."""

    model_repository: RepositoryOption = None
    model_control_mode: Annotated[
        Literal["none", "poll", "explicit"],
        typer.Option(
            envvar="QINFER_REPOSITORY__CONTROL_MODE",
            help="none: load all models once. poll: load all and follow changes. explicit: load those of --load-model, "
            "and others on request.",
        ),
    ] = "none"
    load_model: Annotated[
        list[str] | None,
        typer.Option(help="A model to load at start in mode explicit; repeatable, * loads all."),
    ] = None
    repository_poll_secs: Annotated[
        float, typer.Option(envvar="QINFER_REPOSITORY__POLL_S", min=0.1, help="Seconds between two polls in mode poll.")
    ] = 15.0
    strict_readiness: Annotated[
        bool,
        typer.Option(
            envvar="QINFER_REPOSITORY__STRICT_READINESS", help="Report ready only while every model is ready."
        ),
    ] = False
    data_dir: Annotated[
        Path,
        typer.Option(help="Directory of the private Redis' data and of large tensors; one `up` at a time may use it."),
    ] = Path(".qinfer")
    host: Annotated[
        str, typer.Option(envvar="QINFER_HTTP__HOST", help="Address to bind; 0.0.0.0 serves other machines.")
    ] = "127.0.0.1"
    http_port: Annotated[
        int, typer.Option(envvar="QINFER_HTTP__PORT", min=0, max=65535, help="Port; 0 picks a free one.")
    ] = 8000
    grpc_port: Annotated[
        int, typer.Option(envvar="QINFER_GRPC__PORT", min=0, max=65535, help="Port of gRPC; 0 picks a free one.")
    ] = 8001
    metrics_port: Annotated[
        int, typer.Option(envvar="QINFER_METRICS__PORT", min=0, max=65535, help="Port of metrics; 0 picks a free one.")
    ] = 8002
    allow_client_shm: Annotated[
        bool,
        typer.Option(
            "--allow-client-shm",
            envvar="QINFER_ALLOW_CLIENT_SHM",
            help="Let clients on this host pass tensors in system shared memory.",
        ),
    ] = False
    cache_config: Annotated[
        str,
        typer.Option(
            envvar="QINFER_CACHE__CONFIG",
            help="The response cache: local,size=BYTES, or redis,ttl=SECONDS,size=BYTES; for models that enable it.",
        ),
    ] = ""
    rate_limit: Annotated[
        Literal["off", "execution_count"],
        typer.Option(
            envvar="QINFER_RATE_LIMIT__MODE",
            case_sensitive=False,
            help="execution_count: instances execute only while they hold the resources of their configuration.",
        ),
    ] = "off"
    rate_limit_resource: Annotated[
        list[str] | None,
        typer.Option(
            help="How many units of a resource each worker has: NAME:COUNT, or NAME:COUNT:DEVICE; repeatable. By "
            "default as many as the largest need."
        ),
    ] = None
    redis: Annotated[
        str,
        typer.Option(
            envvar="QINFER_REDIS__URL",
            help="Use this Redis instead of a private one. Put a URL with a password into the environment variable.",
        ),
    ] = ""
    redis_memory: Annotated[
        int,
        typer.Option(
            min=0,
            show_default="half of this machine's, or of its cgroup's",
            help="Megabytes of memory above which the private Redis takes no new requests.",
        ),
    ] = 0
    durability: Annotated[
        Literal["everysec", "always"],
        typer.Option(
            envvar="QINFER_REDIS__DURABILITY",
            help="everysec may lose about the last second at power loss; always loses nothing and is slower.",
        ),
    ] = "everysec"
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", min=1, max=_MOST, show_default="1", help="Worker processes.")
    ] = None
    autoscale: Annotated[
        str,
        typer.Option(
            metavar="MIN:MAX",
            help="MIN:MAX workers, as the waiting work needs, in place of --workers; 0:4 stops all workers when idle. "
            "Tuned by QINFER_AUTOSCALE__TARGET_S and its siblings.",
        ),
    ] = ""
    allow_store: Annotated[
        list[str] | None,
        typer.Option(help="A location bulk jobs may read and write, such as ./data or s3://bucket/folder; repeatable."),
    ] = None
    log_format: Annotated[Literal["text", "json"], typer.Option(envvar="QINFER_LOG__FORMAT", help="Log format.")] = (
        "text"
    )
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        typer.Option(envvar="QINFER_LOG__LEVEL", case_sensitive=False, help="Lowest level to log."),
    ] = "WARNING"
    model_output: Annotated[
        bool,
        typer.Option(
            "--model-output/--no-model-output",
            envvar="QINFER_LOG__MODEL_OUTPUT",
            help="Show what Python models print and log, at any log level.",
        ),
    ] = True
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until the models are loaded.")] = 120.0


@with_options(UpFlags)
def up(**given: Any) -> None:
    """Run everything on this machine: a private Redis, the gateway, workers, the bulk worker; all supervised.

    A crashed process is restarted. Ctrl-C drains: accepted requests are answered first. A second Ctrl-C
    ends at once. The queue survives both, and kill -9.
    """
    from qinfer.cli.local.deployment import UpOptions, run_deployment

    _check_plans(given["cache_config"], given["rate_limit_resource"] or ())
    options = UpOptions(
        settings={
            "redis": {"durability": given["durability"]},
            "http": {"host": given["host"], "port": given["http_port"]},
            "grpc": {"port": given["grpc_port"]},
            "metrics": {"port": given["metrics_port"]},
            "cache": {"config": given["cache_config"]},
            "rate_limit": {"mode": given["rate_limit"], "resources": tuple(given["rate_limit_resource"] or ())},
            "stores": {"allow": tuple(given["allow_store"] or ())},
            "repository": _repository(given),
            "log": {"format": given["log_format"], "level": given["log_level"], "model_output": given["model_output"]},
        },
        allow_client_shm=given["allow_client_shm"],
        data_dir=given["data_dir"],
        redis_url=given["redis"],
        redis_memory_bytes=given["redis_memory"] * 2**20,
        workers=given["workers"] or 1,
        autoscale=_range(given["autoscale"], given["workers"]),
        ready_timeout_s=given["ready_timeout"],
    )
    try:
        run_deployment(options)
    except QinferError as error:
        if given["log_format"] == "text":
            raise
        from qinfer.cli.local.deployment import JsonMessages

        JsonMessages().fail(error.message)
        raise typer.Exit(exit_code(error)) from None


def _repository(given: Mapping[str, Any]) -> dict[str, Any]:
    mode, models = given["model_control_mode"], tuple(given["load_model"] or ())
    if models and mode != "explicit":
        raise typer.BadParameter("it needs --model-control-mode explicit as well", param_hint="--load-model")
    return {
        "path": ",".join(given["model_repository"] or ()),
        "control_mode": mode,
        "load_models": models,
        "poll_s": given["repository_poll_secs"],
        "strict_readiness": given["strict_readiness"],
    }


def _check_plans(cache: str, resources: Sequence[str]) -> None:
    from qinfer.core.settings_sections import maximum_of, plan_of

    checks: list[tuple[str, Callable[[str], object], Sequence[str]]] = [
        ("--cache-config", plan_of, [cache]),
        ("--rate-limit-resource", maximum_of, resources),
    ]
    for option, check, texts in checks:
        for text in texts:
            try:
                check(text)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint=option) from None


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
