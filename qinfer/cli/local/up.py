"""`qinfer up` and `qinfer dev`: the options; `qinfer.cli.local.deployment` does the work."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qinfer.cli.console import Options, exit_code, option, with_options
from qinfer.cli.models import RepositoryOption
from qinfer.errors import QinferError

EXAMPLE = "Example: qinfer up app.py --model-repository ./models --workers 2"
DEV_EXAMPLE = "Example: qinfer dev app.py"

_MOST = 256

_text, _texts = partial(option, str), partial(option, list[str] | None, None)
_port = partial(option, int, min=0, max=65535)
_APPS = typer.Argument(
    help="Apps with functions or classes under @qinfer.model: app.py, app.py:Embed or a package's directory.",
    show_default=False,
    metavar="[APP]...",
)
UP_OPTIONS: Options = {
    "apps": (Annotated[list[str] | None, _APPS], None),
    "model_repository": (RepositoryOption, None),
    "model_control_mode": option(
        Literal["none", "poll", "explicit"],
        "none",
        "none: load all models once. poll: load all and follow changes. explicit: load those of --load-model, and "
        "others on request.",
        envvar="QINFER_REPOSITORY__CONTROL_MODE",
    ),
    "load_model": _texts("A model to load at start in mode explicit; repeatable, * loads all."),
    "repository_poll_secs": option(
        float, 15.0, "Seconds between two polls in mode poll.", envvar="QINFER_REPOSITORY__POLL_S", min=0.1
    ),
    "strict_readiness": option(
        bool, False, "Report ready only while every model is ready.", envvar="QINFER_REPOSITORY__STRICT_READINESS"
    ),
    "data_dir": option(
        Path,
        Path(".qinfer"),
        "Directory of the private Redis' data and of large tensors; one `up` at a time may use it.",
    ),
    "host": _text("127.0.0.1", "Address to bind; 0.0.0.0 serves other machines.", envvar="QINFER_HTTP__HOST"),
    "http_port": _port(8000, "Port; 0 picks a free one.", envvar="QINFER_HTTP__PORT"),
    "grpc_port": _port(8001, "Port of gRPC; 0 picks a free one.", envvar="QINFER_GRPC__PORT"),
    "metrics_port": _port(8002, "Port of metrics; 0 picks a free one.", envvar="QINFER_METRICS__PORT"),
    "console_port": option(
        int | None,
        None,
        "Port of the console alone, which --http-port then does not serve; 0 picks a free one.",
        envvar="QINFER_CONSOLE__PORT",
        min=0,
        max=65535,
        show_default="that of --http-port",
    ),
    "allow_client_shm": option(
        bool,
        False,
        "Let clients on this host pass tensors in system shared memory.",
        "--allow-client-shm",
        envvar="QINFER_ALLOW_CLIENT_SHM",
    ),
    "cache_config": _text(
        "",
        "The response cache: local,size=BYTES, or redis,ttl=SECONDS,size=BYTES; for models that enable it.",
        envvar="QINFER_CACHE__CONFIG",
    ),
    "rate_limit": option(
        Literal["off", "execution_count"],
        "off",
        "execution_count: instances execute only while they hold the resources of their configuration.",
        envvar="QINFER_RATE_LIMIT__MODE",
        case_sensitive=False,
    ),
    "rate_limit_resource": _texts(
        "How many units of a resource each worker has: NAME:COUNT, or NAME:COUNT:DEVICE; repeatable. By default as "
        "many as the largest need."
    ),
    "redis": _text(
        "",
        "Use this Redis instead of a private one. Put a URL with a password into the environment variable.",
        envvar="QINFER_REDIS__URL",
    ),
    "redis_memory": option(
        int,
        0,
        "Megabytes of memory above which the private Redis takes no new requests.",
        min=0,
        show_default="half of this machine's, or of its cgroup's",
    ),
    "durability": option(
        Literal["everysec", "always"],
        "everysec",
        "everysec may lose about the last second at power loss; always loses nothing and is slower.",
        envvar="QINFER_REDIS__DURABILITY",
    ),
    "workers": option(int | None, None, "Worker processes.", *("--workers", "-w"), min=1, max=_MOST, show_default="1"),
    "autoscale": _text(
        "",
        "MIN:MAX workers, as the waiting work needs, in place of --workers; 0:4 stops all workers when idle. Tuned by "
        "QINFER_AUTOSCALE__TARGET_S and its siblings.",
        metavar="MIN:MAX",
    ),
    "allow_store": _texts("A location bulk jobs may read and write, such as ./data or s3://bucket/folder; repeatable."),
    "log_format": option(Literal["text", "json"], "text", "Log format.", envvar="QINFER_LOG__FORMAT"),
    "log_level": option(
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        "WARNING",
        "Lowest level to log.",
        envvar="QINFER_LOG__LEVEL",
        case_sensitive=False,
    ),
    "model_output": option(
        bool,
        True,
        "Show what Python models print and log, at any log level.",
        "--model-output/--no-model-output",
        envvar="QINFER_LOG__MODEL_OUTPUT",
    ),
    "edge": option(
        bool,
        False,
        "For a small device: all processes share one core and allocate sparingly, there is no bulk worker, and the "
        "private Redis takes 64 MB unless --redis-memory says otherwise.",
        "--edge",
    ),
    "open_console": option(bool, False, "Open the console in a browser once the models are loaded.", "--open"),
    "ready_timeout": option(float, 120.0, "Seconds to wait until the models are loaded.", min=1),
}
"""The options of `qinfer up`."""


@with_options(UP_OPTIONS)
def up(**given: Any) -> None:
    """Run everything on this machine: a private Redis, the gateway, workers, the bulk worker; all supervised.

    A crashed process is restarted. Ctrl-C drains: accepted requests are answered first. A second Ctrl-C
    ends at once. The queue survives both, and kill -9.
    """
    _deploy(given, _small(given) if given["edge"] else {})


_EDGE_REDIS_MB = 64
_EDGE_RECEIVING_BYTES = 32 * 2**20
_ONE_ARENA = "MALLOC_ARENA_MAX"


def _small(given: dict[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Prepares this process and its children for a small device; returns further settings."""
    import os

    from qinfer.cli.local.machine import usable_cpus

    if cpus := usable_cpus():
        os.sched_setaffinity(0, cpus[:1])
    os.environ.setdefault(_ONE_ARENA, "1")  # threads of one core gain nothing by heaps of their own
    given["redis_memory"] = given["redis_memory"] or _EDGE_REDIS_MB
    return {"bulk": {"enabled": False}, "limits": {"max_receiving_bytes": _EDGE_RECEIVING_BYTES}}


_DEV: Mapping[str, Any] = {
    "workers": 1,
    "autoscale": "",
    "model_control_mode": "poll",
    "load_model": None,
    "repository_poll_secs": 0.5,
}
_DAY_S = 86400.0
_DEV_DRAIN_S = 1.0
DEV_OPTIONS: Options = {name: of for name, of in UP_OPTIONS.items() if name not in {*_DEV, "edge"}}


@with_options(DEV_OPTIONS)
def dev(**given: Any) -> None:
    """Develop models: `qinfer up` with one worker, which loads models again when one of their files is saved.

    The old models serve until the new ones are ready. Models in Python have this terminal: they print here, and
    breakpoint() works. No execution and no request has a time limit but the model's own and the caller's. A model of an
    app has one instance and no timeout. Ctrl-C stops at once.
    """
    with _terminal() as terminal:
        _deploy(
            {**given, **_DEV},
            {
                "http": {"drain_s": _DEV_DRAIN_S},
                "worker": {"drain_s": _DEV_DRAIN_S, "model_terminal": terminal},
                "limits": {"default_timeout_s": _DAY_S, "max_timeout_s": _DAY_S, "execute_timeout_s": 0.0},
            },
            is_dev=True,
        )


@contextmanager
def _terminal() -> Iterator[str]:
    """Lends the terminal of stdin, if it is one; a debugger that was killed leaves it without echo."""
    import os
    import termios

    if not os.isatty(0):
        yield ""
        return
    modes = termios.tcgetattr(0)
    try:
        yield os.ttyname(0)
    finally:
        with suppress(termios.error):  # it was closed
            termios.tcsetattr(0, termios.TCSADRAIN, modes)


def _deploy(given: Mapping[str, Any], more: Mapping[str, Mapping[str, Any]], *, is_dev: bool = False) -> None:
    from qinfer.cli.local.deployment import UpOptions, run_deployment

    _check_plans(given["cache_config"], given["rate_limit_resource"] or ())
    settings: Mapping[str, Mapping[str, Any]] = {
        "redis": {"durability": given["durability"]},
        "http": {"host": given["host"], "port": given["http_port"]},
        "grpc": {"port": given["grpc_port"]},
        "metrics": {"port": given["metrics_port"]},
        "console": {} if given["console_port"] is None else {"port": given["console_port"]},
        "cache": {"config": given["cache_config"]},
        "rate_limit": {"mode": given["rate_limit"], "resources": tuple(given["rate_limit_resource"] or ())},
        "stores": {"allow": tuple(given["allow_store"] or ())},
        "repository": _repository(given),
        "log": {"format": given["log_format"], "level": given["log_level"], "model_output": given["model_output"]},
    }
    options = UpOptions(
        settings={name: {**settings.get(name, {}), **more.get(name, {})} for name in {**settings, **more}},
        apps=tuple(given["apps"] or ()),
        is_dev=is_dev,
        allow_client_shm=given["allow_client_shm"],
        data_dir=given["data_dir"],
        redis_url=given["redis"],
        redis_memory_bytes=given["redis_memory"] * 2**20,
        workers=given["workers"] or 1,
        autoscale=_range(given["autoscale"], given["workers"]),
        open_console=given["open_console"],
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
    for name, check, texts in checks:
        for text in texts:
            try:
                check(text)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint=name) from None


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
