"""What `qinfer up` checks and prepares on this machine before it starts anything: repository, port, environment."""

import errno
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from qinfer.errors import SettingsError

LAYOUT = """\
a model repository looks like this:
    models/
      digits/              one directory per model, named like it
        config.pbtxt       optional for ONNX models
        1/                 one directory per version
          model.onnx"""


def check_repository(path: Path) -> None:
    """Checks that there is a repository.

    Raises:
        SettingsError: There is none; the message shows what one looks like.
    """
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise SettingsError(f"the model repository {path} {what}; give --model-repository DIR; {LAYOUT}")


def claim_port(host: str, port: int, try_again: Callable[[], bool]) -> int:
    """Makes sure that the gateway can have a port.

    Args:
        host: The address to bind.
        port: The port; 0 for any.
        try_again: Asked while the port is in use, and may wait first.

    Returns:
        The port; that of 0 is chosen here, because its number is told to people.

    Raises:
        SettingsError: The port is in use, or can't be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            with socket.create_server((host, port), family=family) as server:
                return int(server.getsockname()[1])
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                if try_again():
                    continue
                raise SettingsError(
                    f"port {port} of {host} is in use; stop the program that has it, or give another: "
                    f"--http-port {port + 1 if port < 65535 else 0} (0 picks a free one)"
                ) from None
            raise SettingsError(f"port {port} of {host} can't be bound: {error.strerror or error}") from None


def local_url(host: str, port: int, *, tls: bool = False) -> str:
    """Returns the URL by which this machine reaches a gateway bound to `host`."""
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104  (compared, not bound)
        host = "127.0.0.1"
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def share_cpus(cpus: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    """Divides the cores among processes that compute: runtimes start a thread for each core that they may use.

    Returns:
        The cores of each process; empty for a single one, which needs no limit. With more processes than cores, one
        core each, some of them twice.
    """
    if processes == 1 or not cpus:
        return [()] * processes
    if processes >= len(cpus):
        return [(cpus[n % len(cpus)],) for n in range(processes)]
    bounds = [n * len(cpus) // processes for n in range(processes + 1)]
    return [tuple(cpus[begin:end]) for begin, end in pairwise(bounds)]


def usable_cpus() -> list[int]:
    """Returns the cores that this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def child_environment(base: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with `settings` in place of variables of the same name, in whatever case."""
    return {name: value for name, value in base.items() if name.upper() not in settings} | dict(settings)
