"""Checks and preparations on this machine before `qinfer up` starts processes: repository, ports, environment."""

import errno
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qinfer.errors import SettingsError

if TYPE_CHECKING:
    from qinfer.core.settings import Settings

CHOSEN_PORTS = range(16384, 32768)
"""The range of free ports: the kernel uses higher ones for outgoing connections, which could take a gateway's port."""

_TRIES = 16

LAYOUT = """\
a model repository looks like this:
    models/
      digits/              one directory per model, named like it
        config.pbtxt       optional for ONNX models
        1/                 one directory per version
          model.onnx"""


def repository_places(path: str) -> list[str]:
    """Returns the repositories of a setting: URLs, and directories made absolute, as children may run elsewhere."""
    places = [place.strip() for place in path.split(",") if place.strip()]
    return [place if "://" in place else str(Path(place).resolve()) for place in places]


def check_repository(place: str) -> None:
    """Checks that a directory of a repository exists; URLs are not checked."""
    path = Path(place)
    if "://" not in place and not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise SettingsError(f"the model repository {path} {what}; give --model-repository DIR; {LAYOUT}")


class GatewayAddress(NamedTuple):
    """An address at which the gateway listens (port 0 = any), and the option that sets it."""

    host: str
    port: int
    option: str = "--http-port"


def gateway_addresses(settings: "Settings") -> list[GatewayAddress]:
    """Returns the enabled addresses of HTTP, gRPC and metrics; HTTP's host is the default of the others."""
    host = settings.http.host
    found = [GatewayAddress(host, settings.http.port, "--http-port")]
    if settings.grpc.enabled:
        found.append(GatewayAddress(settings.grpc.host or host, settings.grpc.port, "--grpc-port"))
    if settings.metrics.enabled:
        found.append(GatewayAddress(settings.metrics.host or host, settings.metrics.port, "--metrics-port"))
    return found


def claim_ports(addresses: Sequence[GatewayAddress], try_again: Callable[[], bool]) -> list[int]:
    """Checks that the gateway can bind its ports, and chooses free ones in place of 0.

    While a port is in use, `try_again` may wait, and returns whether to retry.
    """
    # Ports are held until all are chosen, so that each is chosen once; requested ones go first.
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
    """Returns the URL at which this machine reaches a gateway bound to `host`."""
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104  (compared, not bound)
        host = "127.0.0.1"
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def share_cpus(cpus: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    """Divides the cores among workers: a runtime starts a thread for each core that it may use.

    A single process gets no limit (empty). With more processes than cores, each has one core, and some share it.
    """
    if processes == 1 or not cpus:
        return [()] * processes
    if processes >= len(cpus):
        return [(cpus[n % len(cpus)],) for n in range(processes)]
    bounds = [n * len(cpus) // processes for n in range(processes + 1)]
    return [tuple(cpus[begin:end]) for begin, end in pairwise(bounds)]


def usable_cpus() -> list[int]:
    """Returns the cores that this process may use; empty on systems without this information."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def child_environment(base: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with `settings` in place of variables of the same name in any case."""
    return {name: value for name, value in base.items() if name.upper() not in settings} | dict(settings)
