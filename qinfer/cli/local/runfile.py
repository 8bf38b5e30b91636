"""`up.json` in a data directory: other commands, and the next `qinfer up`, find a `qinfer up` by it."""

import json
import os
from pathlib import Path

import msgspec

NAME = "up.json"
DATA_DIR = Path(".qinfer")


class RunFile(msgspec.Struct, frozen=True):
    """The content of the run file; `payload_url` is a directory that other programs must know, or ''."""

    pid: int
    url: str
    redis_url: str
    payload_url: str = ""
    payload_url_min_bytes: int = 0

    def is_alive(self) -> bool:
        """Returns whether that process id exists; maybe as another program."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def read(data_dir: Path) -> RunFile | None:
    """Returns the run file; `None` if missing or unreadable."""
    try:
        return msgspec.json.decode((data_dir / NAME).read_bytes(), type=RunFile)
    except (OSError, msgspec.MsgspecError):
        return None


def nearest(data_dir: Path = DATA_DIR) -> RunFile | None:
    """Returns the run file of the `qinfer up` in this directory or above."""
    here = Path.cwd()
    for directory in dict.fromkeys(above / data_dir for above in (here, *here.parents)):
        run = read(directory)
        if run is not None and run.is_alive():
            return run
    return None


def write(data_dir: Path, run: RunFile) -> None:
    """Writes the run file atomically."""
    temporary = data_dir / f"{NAME}.new"
    temporary.write_text(json.dumps(msgspec.to_builtins(run)) + "\n", encoding="utf-8")
    temporary.replace(data_dir / NAME)


def remove(data_dir: Path) -> None:
    """Removes the run file."""
    (data_dir / NAME).unlink(missing_ok=True)
