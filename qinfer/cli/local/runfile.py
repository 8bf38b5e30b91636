"""`up.json` in a data directory: what a running `qinfer up` tells other commands, and a killed one the next `up`."""

import json
import os
from pathlib import Path

import msgspec

NAME = "up.json"


class RunFile(msgspec.Struct, frozen=True):
    """What a running `up` wrote.

    Attributes:
        pid: Its process id.
        url: The gateway's.
        redis_url: The private Redis's.
    """

    pid: int
    url: str
    redis_url: str

    def is_alive(self) -> bool:
        """Tells whether a process of that id exists; after a crash it may be another's."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def read(data_dir: Path) -> RunFile | None:
    """Returns the run file; `None` when there is none, or none that can be read."""
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
