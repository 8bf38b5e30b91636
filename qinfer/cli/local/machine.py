"""What `qinfer up` checks and prepares on this machine before it starts anything: repository, port, environment."""

import errno
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from qinfer.errors import SettingsError

CHOSEN_PORTS = range(16384, 32768)
"""A free port is one of these, if possible: the kernel gives the higher ones to outgoing connections, which could have
it before the gateway does, or while one that crashed is started again."""

_TRIES = 16

LAYOUT = """\
a model repository looks like this:
    models/
      digits/              one directory per model, named like it
        config.pbtxt       optional for ONNX models
        1/                 one directory per version
          model.onnx"""


def repository_places(path: str) -> list[str]:
    """Returns the repositories of a setting: directories made absolute, for children may run elsewhere, and URLs."""
    places = [place.strip() for place in path.split(",") if place.strip()]
    return [place if "://" in place else str(Path(place).resolve()) for place in places]


def check_repository(place: str) -> None:
    """Checks that there is a repository; one that is named by a URL is left to be found out.

    Raises:
        SettingsError: There is none; the message shows what one looks like.
    """
    path = Path(place)
    if "://" not in place and not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise SettingsError(f"the model repository {path} {what}; give --model-repository DIR; {LAYOUT}")


class Address(NamedTuple):
    """Where the gateway is to listen.

    Attributes:
        host: The address to bind.
        port: The port; 0 for any.
        option: The option that chooses another.
    """

    host: str
    port: int
    option: str = "--http-port"


def claim_ports(addresses: Sequence[Address], try_again: Callable[[], bool]) -> list[int]:
    """Makes sure that the gateway can have its ports.

    Args:
        addresses: What it needs.
        try_again: Asked while a port is in use, and may wait first.

    Returns:
        The port of each; that of 0 is chosen here, because its number is told to people.

    Raises:
        SettingsError: A port is in use, or can't be bound.
    """
    with ExitStack() as held:  # until all are chosen, so that none is chosen twice
        chosen: dict[Address, int] = {}
        for address in sorted(addresses, key=lambda one: not one.port):  # any port must not be one that is asked for
            chosen[address] = int(held.enter_context(_bound(address, try_again)).getsockname()[1])
        return [chosen[address] for address in addresses]


def _bound(address: Address, try_again: Callable[[], bool]) -> socket.socket:
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
    """Binds a port, or, if it is 0, one that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(0 if port else _TRIES):
        with suppress(OSError):
            return socket.create_server((host, secrets.choice(CHOSEN_PORTS)), family=family)
    return socket.create_server((host, port), family=family)


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
