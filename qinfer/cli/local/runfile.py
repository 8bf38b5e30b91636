"""`up.json` in a data directory: how other commands, and the next `qinfer up`, find a running or killed one."""

import json
import os
from pathlib import Path

import msgspec

NAME = "up.json"


class RunFile(msgspec.Struct, frozen=True):
    """The content of the run file of a `qinfer up`.

    Attributes:
        pid: The process id of `qinfer up`.
        url: The gateway's URL.
        redis_url: The private Redis' URL.
    """

    pid: int
    url: str
    redis_url: str

    def is_alive(self) -> bool:
        """Tells whether a process of that id exists; after a crash it may be another program."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def read(data_dir: Path) -> RunFile | None:
    """Returns the run file; `None` if it does not exist or can't be read."""
    try:
        return msgspec.json.decode((data_dir / NAME).read_bytes(), type=RunFile)
    except (OSError, msgspec.MsgspecError):
        return None


def write(data_dir: Path, run: RunFile) -> None:
    """Writes the run file, whole or not at all."""
    temporary = data_dir / f"{NAME}.new"
    temporary.write_text(json.dumps(msgspec.to_builtins(run)) + "\n", encoding="utf-8")
    temporary.replace(data_dir / NAME)


def remove(data_dir: Path) -> None:
    """Removes the run file."""
    (data_dir / NAME).unlink(missing_ok=True)
