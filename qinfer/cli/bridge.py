"""`qinfer bridge`: replaces its process by `qinfer_workers.bridge`."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import DataDirOption, RedisOption
from qinfer.errors import SettingsError

EXAMPLE = "Example: qinfer bridge routes.yaml --check   and then   qinfer bridge routes.yaml"

_MODULE = "qinfer_workers.bridge"
_NEEDED = ("kombu", "pyarrow", "yaml")

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="Configuration of the routes: a YAML or TOML file.")
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Check the file, the models and the queues without moving a message, then exit.")
]


def bridge(
    config: ConfigArgument,
    *,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    check: CheckOption = False,
) -> None:
    """Move messages from a queue to a model, and the predictions to a queue: RabbitMQ, Redis, SQS and others.

    Any number of bridges may run, also with the same file. SIGTERM drains: messages in progress are finished, all other
    messages stay in their queue.

    While Redis is unreachable at the start, a bridge waits for it.

    Exit codes: 0 stopped, or all checks passed; 1 a check failed; 2 the file or a setting is wrong, as for the other
    programs; 64 an option is wrong, or no Redis is known.
    """
    from qinfer.cli.overview import program_variables

    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise SettingsError(f"{' and '.join(missing)} is not installed: pip install 'qinfer-ml[bridge]'")
    environment = {**os.environ, **program_variables(redis, data_dir)}
    words = [sys.executable, "-P", "-m", _MODULE, str(config), *(["--check"] if check else [])]
    sys.stdout.flush()
    os.execve(sys.executable, words, environment)  # noqa: S606 - our own interpreter and module
