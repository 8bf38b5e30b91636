"""What all commands share: how errors look, exit codes, JSON output.

Exit codes: 0 done, 1 failed, 2 refused: wrong usage, wrong settings, or not allowed.
"""

import json
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from qinfer.errors import Forbidden, QinferError, RequestError, Restricted, SettingsError, Unauthorized

API_KEY_VARIABLE = "QINFER_API_KEY"
"""The key that commands present to gateways: an option would show it in the list of processes."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DEFAULT_URL = "http://127.0.0.1:8000"
UrlOption = Annotated[str, typer.Option("--url", help="URL of the gateway.")]


_REFUSALS = (SettingsError, RequestError, Unauthorized, Forbidden, Restricted)


class CommandFailed(QinferError):
    """A command could not do what it was asked; the message has the remedy."""


class ErrorsAsText(TyperGroup):
    """Turns each failure of a command into one red line and an exit code; a traceback is a bug.

    The installation without extras has the client's packages only: a command that needs more says what to install.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except QinferError as error:
            print_error(error.message + (_key_remedy() if isinstance(error, Unauthorized) else ""))
            raise typer.Exit(2 if isinstance(error, _REFUSALS) else 1) from None
        except ModuleNotFoundError as error:
            package = (error.name or "qinfer").partition(".")[0]
            if package.startswith("qinfer"):
                raise
            print_error(f"{package}, which this command needs, is not installed: pip install 'qinfer-ml[server]'")
            raise typer.Exit(1) from None


def _key_remedy() -> str:
    return f"; the command line sends the key that is in {API_KEY_VARIABLE}"


def print_error(message: str) -> None:
    """Prints an error for people, on stderr."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Error: ", "bold red"), message))


def print_json(value: object) -> None:
    """Prints a value as one line of JSON, on stdout."""
    print(json.dumps(value))
