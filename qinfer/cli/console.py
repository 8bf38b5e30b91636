"""Common parts of all commands: options, completion of model names, errors as text, JSON output.

Exit codes: 0 done, 1 failed, 2 refused: wrong usage, wrong settings, or not allowed, 3 unreachable: the server can't be
reached, is overloaded or can't do it now, and the same command may work later.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from qinfer.errors import (
    DeadlineExceeded,
    Forbidden,
    QinferError,
    RequestError,
    Restricted,
    SettingsError,
    Unauthorized,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

UNREACHABLE = 3
"""The exit code of a command that a server did not answer, or can't serve now."""

COMPLETION_TIMEOUT_S = 0.3
"""Completion answers while somebody waits after a key press."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DEFAULT_URL = "http://127.0.0.1:8000"
UrlOption = Annotated[str, typer.Option("--url", help="URL of the gateway.")]
RedisOption = Annotated[
    str,
    typer.Option(
        "--redis",
        envvar="QINFER_REDIS__URL",
        help="URL of the Redis; default: that of the `qinfer up` running in --data-dir.",
    ),
]
DataDirOption = Annotated[Path, typer.Option("--data-dir", help="The data directory of a running `qinfer up`.")]

_KEY_REMEDY = "; the command line sends the key in QINFER_API_KEY"
_REFUSALS = (SettingsError, RequestError, Unauthorized, Forbidden, Restricted)


def model_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns the names of models that begin with what was typed; typer's callback.

    The Redis is that of the command: --redis, QINFER_REDIS__URL, or a running `qinfer up` of its --data-dir. A cluster
    or Sentinels take too long to ask.
    """
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from qinfer.cli.local import runfile
        from qinfer.queue import keys

        url = str(ctx.params.get("redis") or os.environ.get("QINFER_REDIS__URL") or "")
        if not url:
            run = runfile.read(Path(ctx.params.get("data_dir") or ".qinfer"))
            if run is None:
                return []
            url = run.redis_url
        timeouts = {
            "socket_timeout": COMPLETION_TIMEOUT_S,
            "socket_connect_timeout": COMPLETION_TIMEOUT_S,
            "protocol": 2,
        }
        with Redis.from_url(url, retry=Retry(NoBackoff(), 0), **timeouts) as client:
            names = sorted(name.decode() for name in client.hgetall(keys.desired()))
    # A line that is being typed is no place for errors.
    except Exception:  # noqa: BLE001
        return []
    return [name for name in names if name.startswith(incomplete)]


ModelArgument = Annotated[str, typer.Argument(help="The model's name.", autocompletion=model_names)]


class CommandFailed(QinferError):
    """The failure of a command, with the remedy in its message."""


class ErrorsAsText(TyperGroup):
    """Turns each error of a command into one red line and an exit code; a traceback is a bug.

    The installation without extras has the client's packages only: the error of other commands names the extra.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except QinferError as error:
            print_error(error.message + (_KEY_REMEDY if isinstance(error, Unauthorized) else ""))
            raise typer.Exit(exit_code(error)) from None
        except ModuleNotFoundError as error:
            package = (error.name or "qinfer").partition(".")[0]
            if package.startswith("qinfer"):
                raise
            print_error(f"{package}, which this command needs, is not installed: pip install 'qinfer-ml[server]'")
            raise typer.Exit(1) from None


def exit_code(error: QinferError) -> int:
    """Returns the exit code of a command that ends with an error."""
    if isinstance(error, _REFUSALS):
        return 2
    return UNREACHABLE if error.retryable or isinstance(error, DeadlineExceeded) else 1


def print_error(message: str) -> None:
    """Prints an error as text on stderr."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Error: ", "bold red"), message))


def print_json(value: object) -> None:
    """Prints a value, msgspec's structs too, as one line of JSON on stdout, at once also into a pipe."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(value)), flush=True)


def show(value: object, view: "str | Callable[[], RenderableType]", *, as_json: bool) -> None:
    """Prints a value as JSON; else a text about it, or what a function makes of it for the terminal."""
    if as_json:
        print_json(value)
    elif isinstance(view, str):
        print(view)
    else:
        from rich.console import Console

        Console().print(view())
