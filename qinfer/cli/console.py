"""Common parts of all commands: options, completion of model names, errors as text, JSON output.

Exit codes are those of sysexits(3): 0 done, 1 failed, 64 refused (wrong usage, wrong settings, not allowed), 66 an
input of a bulk job is missing, 69 the server can't be reached, is overloaded or can't do it now: the same command may
work later.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from qinfer.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    Forbidden,
    InputMissing,
    QinferError,
    RequestError,
    Restricted,
    SettingsError,
    Unauthorized,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from qinfer.cli.client import GatewayClient

F = TypeVar("F", bound=Callable[..., Any])

FAILED, USAGE, NO_INPUT, UNREACHABLE = 1, 64, 66, 69

COMPLETION_TIMEOUT_S = 0.3
"""Completion must not delay typing."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DEFAULT_URL = ""
"""The nearest `qinfer up`'s gateway, else the usual port."""


def gateway_url(url: str = DEFAULT_URL) -> str:
    """Returns the given gateway URL, else the nearest `qinfer up`'s, else port 8000."""
    if url:
        return url
    from qinfer.cli.local.machine import nearest_run

    run = nearest_run()
    return "http://127.0.0.1:8000" if run is None else run.url


def gateway_client(url: str, **options: Any) -> "GatewayClient":
    """Returns a client of the gateway, which loads only when a command runs."""
    from qinfer.cli import client

    return client.GatewayClient(url, **options)


UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="QINFER_URL",
        callback=gateway_url,
        show_default="the one in the nearest .qinfer/up.json, else http://127.0.0.1:8000",
        help="URL of the gateway.",
    ),
]
RedisOption = Annotated[
    str,
    typer.Option(
        "--redis",
        envvar="QINFER_REDIS__URL",
        help="URL of the Redis that the command reads; default: the one of the `qinfer up` running in --data-dir.",
    ),
]
DataDirOption = Annotated[
    Path, typer.Option("--data-dir", help="The data directory of a running `qinfer up`, here or above.")
]

_COLOURS = {
    "green": ("READY", "ready", "completed"),
    "red": ("UNAVAILABLE", "trouble", "failed", "expired"),
}

_KEY_REMEDY = "; the command line sends the key in QINFER_API_KEY"
_TRY_AGAIN, _REDIS_REMEDY = "; try again", "; `qinfer doctor` finds problems of Redis"
_REFUSALS = (SettingsError, RequestError, Unauthorized, Forbidden, Restricted)
_WORDS = (
    ("Value error, ", ""),
    ("Input should be a valid integer, unable to parse string as an integer", "expected a whole number"),
    ("Input should be a valid number, unable to parse string as a number", "expected a number"),
    ("Input should be greater than or equal to", "expected at least"),
    ("Input should be less than or equal to", "expected at most"),
    ("Input should be", "expected"),
)
_CommandError: Any = typer.BadParameter.__mro__[2]
"""click's usage error; some versions of typer bring their own click."""


def model_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns names of models for completion; none for a slow cluster or Sentinels."""
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from qinfer.cli.local.machine import DATA_DIR, nearest_run
        from qinfer.queue import keys

        url = str(ctx.params.get("redis") or os.environ.get("QINFER_REDIS__URL") or "")
        if not url:
            run = nearest_run(Path(ctx.params.get("data_dir") or DATA_DIR))
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
    # completion shows no errors
    except Exception:  # noqa: BLE001
        return []
    return [name for name in names if name.startswith(incomplete)]


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.", autocompletion=model_names)]


class CommandFailed(QinferError):
    """A command failed; the message has the remedy."""


class Command(TyperCommand):
    """A command with a usage line such as `qinfer submit [OPTIONS] MODEL INPUT... OUTPUT`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the usage line after the command's name."""
        arguments = [one for one in self.params if one.param_type_name == "argument"]
        return ["[OPTIONS]", *map(usage_of, arguments)]


def usage_of(argument: Any) -> str:
    """Returns an argument as `NAME`, `NAME...`, `[NAME]` or `[NAME...]`."""
    name = (argument.metavar or argument.name.upper()) + ("" if argument.nargs == 1 else "...")
    return name if argument.required else f"[{name}]"


class Commands(typer.Typer):
    """A group of `Command`s."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """Returns typer's decorator."""
        return super().command(name, **{"cls": Command, **options})


Options = Mapping[str, tuple[Any, Any]]
"""Parameter of a command → its type and the option."""


def option(kind: Any, default: Any, help_: str, *names: str, **more: Any) -> tuple[Any, Any]:
    """Returns an option of `Options`; without `names` it has the name of its parameter."""
    return kind, typer.Option(default, *names, help=help_, **more)


def with_options(*groups: Options) -> Callable[[F], F]:
    """Adds options to a command, which takes them as `**given`, by their names."""

    def decorate(command: F) -> F:
        signature = inspect.signature(command)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for group in groups
            for name, (kind, default) in group.items()
        ]
        first = sum(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in own)
        changed = signature.replace(parameters=[*own[:first], *added, *own[first:]])
        command.__signature__ = changed  # type: ignore[attr-defined]  # read by typer
        return command

    return decorate


class ErrorsAsText(TyperGroup):
    """Turns errors into one red line and an exit code; a traceback is a bug.

    `--json` prints them as JSON, too. A missing package is reported with its extra.
    """

    def main(self, args: Any = None, prog_name: str | None = None, *_: Any, **extra: Any) -> Any:
        """Runs the command line, and ends the program."""
        arguments = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in arguments
        extra["standalone_mode"] = False
        try:
            code = super().main(arguments, prog_name, **extra) or 0
        except QinferError as error:
            code = fail(_with_remedy(error), error.code, exit_code(error), as_json=as_json)
        except ModuleNotFoundError as error:
            package = (error.name or "qinfer").partition(".")[0]
            if package.startswith("qinfer"):
                raise
            text = f"{package}, which this command needs, is not installed: pip install 'qinfer-ml[server]'"
            code = fail(text, "not_installed", FAILED, as_json=as_json)
        except _CommandError as error:
            error.message = in_words(error.message)
            if _are_json(arguments):
                from qinfer.cli.local.deployment import JsonMessages

                JsonMessages().fail(error.format_message())
            else:
                error.show()
            code = fail(error.format_message(), "usage", USAGE, as_json=as_json, is_shown=True)
        except typer.Abort:
            code = fail("aborted", "aborted", FAILED, as_json=as_json)
        sys.exit(code)


def _are_json(arguments: Sequence[str]) -> bool:
    """Returns whether a possibly wrong command line of `qinfer up` or `dev` asks for JSON messages."""
    if arguments[:1] not in (["up"], ["dev"]):
        return False
    chosen = [os.environ.get("QINFER_LOG__FORMAT", "")]
    chosen += [value for option, value in pairwise(arguments) if option == "--log-format"]
    chosen += [word.partition("=")[2] for word in arguments if word.startswith("--log-format=")]
    return chosen[-1] == "json"


def _with_remedy(error: QinferError) -> str:
    if isinstance(error, BrokerUnavailable) and error.message.endswith(_TRY_AGAIN):  # Redis answers, and refuses
        return error.message.removesuffix(_TRY_AGAIN) + _REDIS_REMEDY
    return error.message + (_KEY_REMEDY if isinstance(error, Unauthorized) else "")


def in_words(message: str) -> str:
    """Returns a message without pydantic's wording."""
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
    return message


def exit_code(error: QinferError) -> int:
    """Returns the exit code for an error."""
    if isinstance(error, InputMissing):
        return NO_INPUT
    if isinstance(error, _REFUSALS):
        return USAGE
    return UNREACHABLE if error.retryable or isinstance(error, DeadlineExceeded) else FAILED


def fail(message: str, code: str, status: int, *, as_json: bool, is_shown: bool = False) -> int:
    """Prints an error, once, with `as_json` on stdout, too; returns the exit code."""
    if not is_shown:
        print_error(message)
    if as_json:
        print_json({"error": {"code": str(code), "message": message, "exit_code": status}})
    return status


def print_error(message: str) -> None:
    """Prints an error as text on stderr."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Error: ", "bold red"), message))


def print_json(value: object) -> None:
    """Prints a value as one line of strict JSON, unbuffered."""
    import msgspec

    # only msgspec's encoder writes NaN and infinities as null
    print(json.dumps(msgspec.json.decode(msgspec.json.encode(value))), flush=True)


def show(value: object, view: "str | Callable[[], RenderableType]", *, as_json: bool) -> None:
    """Prints a value as JSON, or its text, or its terminal view."""
    if as_json:
        print_json(value)
    elif isinstance(view, str):
        print(view)
    else:
        from rich.console import Console

        Console().print(view())


def table(title: str, columns: str, rows: "Iterable[Sequence[object]]", *, has_header: bool = True) -> "RenderableType":
    """Returns a table; of the `columns`, `name>` is right-justified, and `name!` is whole on any terminal."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    found = Table(
        title=Text(title, "bold") if title else None,
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_header=has_header,
    )
    cells = [
        [one if isinstance(one, Text) else Text(f"{one:,}" if isinstance(one, int) else str(one)) for one in row]
        for row in rows
    ]
    if not cells:
        return Text(f"{title}: none")
    for number, name in enumerate(columns.split(", ")):
        found.add_column(
            Text(name.rstrip(">!")),
            justify="right" if name.endswith(">") else "left",
            overflow="fold",
            no_wrap=name.endswith((">", "!")),
            min_width=max(row[number].cell_len for row in cells) if name.endswith("!") else None,
        )
    for row in cells:
        found.add_row(*row)
    return found


def facts(title: str, values: "Mapping[str, object]") -> "RenderableType":
    """Returns names and values as a table without a header."""
    return table(title, "name, value", values.items(), has_header=False)


def state(name: str) -> "Text":
    """Returns the state of a model, worker or job in its colour."""
    from rich.text import Text

    return Text(name, next((colour for colour, names in _COLOURS.items() if name in names), "yellow"))
