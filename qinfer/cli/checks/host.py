"""Checks of this machine: installation, ports and gateway, open files, disks."""

import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

from qinfer.cli.checks.health import gateway_health
from qinfer.cli.checks.report import Finding, ok, problem, warning
from qinfer.cli.local import runfile
from qinfer.cli.local.machine import Address, claim_ports, gateway_addresses
from qinfer.core.api_keys import check_exposure
from qinfer.core.settings import Settings
from qinfer.errors import SettingsError

FILES_WARNING, FILES_PROBLEM = 8192, 512
"""Numbers of file descriptors; a connection takes one."""
DISK_WARNING_BYTES, DISK_PROBLEM_BYTES = 2 * 2**30, 200 * 2**20

_TIMEOUT_S = 3.0


def examine_installation(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Yields a problem if the distribution `qinfer`, which is another project's, is installed beside qinfer-ml.

    Args:
        path: Folders to search for distributions; default: those of Python's imports.
    """
    where = sys.path if path is None else list(path)
    for other in distributions(name="qinfer", path=where):
        if any(file.parts[:1] == ("qinfer",) for file in other.files or ()):
            yield problem(
                "installation",
                f"the distribution qinfer {other.version} is installed beside qinfer-ml, and both own `import qinfer`",
                "pip uninstall --yes qinfer qinfer-ml, and install qinfer-ml with its extras again",
            )


def examine_files() -> Iterator[Finding]:
    """Yields the finding about the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield ok("open files", "no limit")
        return
    text = f"a process may have {soft:,} open (hard limit {hard:,}); each connection is one"
    remedy = "raise it: ulimit -n 65536, LimitNOFILE= of systemd, or ulimits of docker-compose"
    if soft < FILES_PROBLEM:
        yield problem("open files", text, remedy)
    elif soft < FILES_WARNING:
        yield warning("open files", text, remedy)
    else:
        yield ok("open files", text)


def examine_disks(settings: Settings, data_dir: Path) -> Iterator[Finding]:
    """Yields a finding for each location of large files: data, cached models, parts of bulk jobs."""
    places = {"data directory": data_dir if data_dir.exists() else None}
    places["model cache"] = Path(settings.repository.cache_dir) if settings.repository.cache_dir else None
    places["spool directory"] = Path(settings.bulk.spool_dir) if settings.bulk.spool_dir else None
    for name, path in places.items():
        if path is not None:
            yield _disk(name, path)


def examine_gateway(settings: Settings, data_dir: Path) -> Iterator[Finding]:
    """Yields findings about a running gateway, or about the ports of the settings."""
    try:
        check_exposure(settings.auth, settings.http.host)
    except SettingsError as error:
        yield problem("access", error.message)
    run = runfile.read(data_dir)
    if run is not None and run.is_alive():
        health = gateway_health(run.url, ready=False, timeout_s=_TIMEOUT_S)
        remedy = "see the output of `qinfer up`"
        yield (
            ok("gateway", f"`qinfer up` is running: {health.text}")
            if health.is_healthy
            else problem("gateway", health.text, remedy)
        )
        return
    health = gateway_health("", ready=False, timeout_s=_TIMEOUT_S)
    if health.is_healthy:
        yield ok("gateway", health.text)
        return
    addresses = gateway_addresses(settings)
    taken = [address for address in addresses if address.port and _is_taken(address)]
    for address in taken:
        variable = {"--http-port": "HTTP", "--grpc-port": "GRPC", "--metrics-port": "METRICS"}[address.option]
        yield problem(
            "ports",
            f"port {address.port} is in use, and no gateway of qinfer answers there",
            f"stop the program that has it, or set QINFER_{variable}__PORT",
        )
    if not taken:
        ports = ", ".join(str(address.port) for address in addresses)
        yield ok("gateway", f"none runs on this machine; its ports are free: {ports}")


def _is_taken(address: Address) -> bool:
    try:
        claim_ports([address], lambda: False)
    except SettingsError:
        return True
    return False


def _disk(name: str, path: Path) -> Finding:
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return problem(name, f"{path} can't be read: {error.strerror}")
    text = f"{path}: {free / 2**30:.1f} GiB free"
    remedy = "free some space: queued or copied data is written there"
    if free < DISK_PROBLEM_BYTES:
        return problem(name, text, remedy)
    return warning(name, text, remedy) if free < DISK_WARNING_BYTES else ok(name, text)
