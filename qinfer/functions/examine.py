"""Lists an app's models in a child process, which imports it: `python -P -m qinfer.functions.examine APP[:NAME]`."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from qinfer.backends.python_host.errors import environment_remedy
from qinfer.errors import ModelLoadFailed
from qinfer.functions.app import import_app, models_of, short_trace
from qinfer.functions.declare import ModelOptions
from qinfer.functions.hints import Signature, read_function

EXAMINE_S = 300.0
"""Limits the import of an app, which may import a whole framework."""


class Declared(msgspec.Struct, frozen=True):
    """A model of an app: the app's absolute path, the name of the object, and all that its configuration says."""

    path: str
    name: str
    options: ModelOptions
    signature: Signature


Examined = tuple[Declared, ...] | str
"""The models of an app, or the error."""


def examine(app: str, environment: Mapping[str, str]) -> tuple[Declared, ...]:
    """Returns the models of `app.py`, `app.py:Embed` or a package; its output goes to stderr.

    The app gets exactly this environment: `model_environment` makes that of its served models. Raises
    `ModelLoadFailed`.
    """
    command = [sys.executable, "-P", "-B", "-m", "qinfer.functions.examine", app]
    try:
        done = subprocess.run(  # noqa: S603  our own interpreter and module
            command, stdout=subprocess.PIPE, env=environment, timeout=EXAMINE_S, check=False
        )
        examined: Examined = msgspec.json.decode(done.stdout, type=Examined)
    except subprocess.TimeoutExpired:
        raise ModelLoadFailed(f"the import of app '{app}' took more than {EXAMINE_S:g} s") from None
    except msgspec.DecodeError:
        raise ModelLoadFailed(f"the import of app '{app}' ended the process (status {done.returncode})") from None
    if isinstance(examined, str):
        raise ModelLoadFailed(examined)
    return examined


def examined_here(app: str) -> Examined:
    """Imports an app in this process."""
    path, _, only = app.partition(":")
    try:
        found = models_of(import_app(Path(path).absolute()), only)
        functions = [(name, read_function(target)) for name, target in found.items()]
    except ModelLoadFailed as error:
        return error.message
    except BaseException as error:  # noqa: BLE001  the boundary to the app's code, which may even call `sys.exit`
        return f"app '{app}' can't be imported:\n{short_trace(error).rstrip()}{environment_remedy(error)}"
    return tuple(Declared(str(Path(path).absolute()), name, f.options, f.signature) for name, f in functions)


def main(app: str) -> int:
    """Writes the answer to the stdout of the start; what the app prints goes to stderr."""
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        answer.write(msgspec.json.encode(examined_here(app)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
