"""This machine's part of `qinfer up`: repository, ports, environment, and the run file, by which it is found.

`up.json` in a data directory tells other commands, and the next `qinfer up`, of a running one.
"""

import errno
import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from qinfer.errors import SettingsError

if TYPE_CHECKING:
    from qinfer.core.settings import Settings

CHOSEN_PORTS = range(16384, 32768)
"""The kernel gives higher ports to outgoing connections."""

_TRIES = 16

LAYOUT = """\
a model repository looks like this:
    models/
      digits/              one directory per model, named like it
        config.pbtxt       optional for ONNX models
        1/                 one directory per version
          model.onnx"""


def repository_places(path: str) -> list[str]:
    """Returns a setting's repositories, directories made absolute for children."""
    places = [place.strip() for place in path.split(",") if place.strip()]
    return [place if "://" in place else str(Path(place).resolve()) for place in places]


def check_repository(place: str) -> None:
    """Checks that a repository's directory exists."""
    path = Path(place)
    if "://" not in place and not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        remedy = "give an app, such as app.py, or --model-repository DIR"
        raise SettingsError(f"the model repository {path} {what}; {remedy}; {LAYOUT}")


class GatewayAddress(NamedTuple):
    """An address of the gateway (port 0 = any), and its option."""

    host: str
    port: int
    option: str = "--http-port"


def gateway_addresses(settings: "Settings") -> list[GatewayAddress]:
    """Returns the enabled addresses of HTTP, gRPC, metrics and a console apart."""
    host = settings.http.host
    found = [GatewayAddress(host, settings.http.port, "--http-port")]
    if settings.grpc.enabled:
        found.append(GatewayAddress(settings.grpc.host or host, settings.grpc.port, "--grpc-port"))
    if settings.metrics.enabled:
        found.append(GatewayAddress(settings.metrics.host or host, settings.metrics.port, "--metrics-port"))
    if settings.console.port is not None and settings.console.enabled:
        found.append(GatewayAddress(settings.console.host or host, settings.console.port, "--console-port"))
    return found


def claim_ports(addresses: Sequence[GatewayAddress], try_again: Callable[[], bool]) -> list[int]:
    """Checks that the gateway's ports are free, and chooses those given as 0.

    `try_again` may wait for a used port, and returns whether to retry.
    """
    # hold all ports until they are chosen; requested ports first
    with ExitStack() as held:
        chosen: dict[GatewayAddress, int] = {}
        for address in sorted(addresses, key=lambda one: not one.port):
            chosen[address] = int(held.enter_context(_bound(address, try_again)).getsockname()[1])
        return [chosen[address] for address in addresses]


def _bound(address: GatewayAddress, try_again: Callable[[], bool]) -> socket.socket:
    host, port, option = address
    while True:
        try:
            return _listener(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                if try_again():
                    continue
                raise SettingsError(
                    f"port {port} of {host} is in use; stop the program that has it, or give another: "
                    f"{option} {port + 1 if port < 65535 else 0} (0 picks a free one)"
                ) from None
            raise SettingsError(f"port {port} of {host} can't be bound: {error.strerror or error}") from None


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(0 if port else _TRIES):
        with suppress(OSError):
            return socket.create_server((host, secrets.choice(CHOSEN_PORTS)), family=family)
    return socket.create_server((host, port), family=family)


def local_url(host: str, port: int, *, tls: bool = False) -> str:
    """Returns the local URL of a gateway bound to `host`."""
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104  (compared, not bound)
        host = "127.0.0.1"
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def share_cpus(cpus: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    """Divides the cores among workers, because a runtime starts a thread for each; empty = no limit."""
    if processes == 1 or not cpus:
        return [()] * processes
    if processes >= len(cpus):
        return [(cpus[n % len(cpus)],) for n in range(processes)]
    bounds = [n * len(cpus) // processes for n in range(processes + 1)]
    return [tuple(cpus[begin:end]) for begin, end in pairwise(bounds)]


def usable_cpus() -> list[int]:
    """Returns this process' cores; empty = unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def child_environment(base: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with `settings` in place of same-named variables, in any case."""
    return {name: value for name, value in base.items() if name.upper() not in settings} | dict(settings)


RUN_FILE = "up.json"
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


def read_run(data_dir: Path) -> RunFile | None:
    """Returns the run file; `None` if missing or unreadable."""
    try:
        return msgspec.json.decode((data_dir / RUN_FILE).read_bytes(), type=RunFile)
    except (OSError, msgspec.MsgspecError):
        return None


def nearest_run(data_dir: Path = DATA_DIR) -> RunFile | None:
    """Returns the run file of the `qinfer up` in this directory or above."""
    here = Path.cwd()
    for directory in dict.fromkeys(above / data_dir for above in (here, *here.parents)):
        run = read_run(directory)
        if run is not None and run.is_alive():
            return run
    return None


def write_run(data_dir: Path, run: RunFile) -> None:
    """Writes the run file atomically."""
    temporary = data_dir / f"{RUN_FILE}.new"
    temporary.write_text(json.dumps(msgspec.to_builtins(run)) + "\n", encoding="utf-8")
    temporary.replace(data_dir / RUN_FILE)


def remove_run(data_dir: Path) -> None:
    """Removes the run file."""
    (data_dir / RUN_FILE).unlink(missing_ok=True)
