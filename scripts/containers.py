"""Builds images and runs containers with what the machine has: docker, podman, or buildah without any daemon.

buildah runs in chroot isolation: network and process ids are the machine's; user, environment and files the image's.
Where buildah has no registry to pull from, it gets a base image that debootstrap makes: a Debian with its own Python,
under the tag that the Dockerfile names. So the Dockerfile is tried, and not the base image of the registry.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
BUILD_WITHIN_S, COMMAND_WITHIN_S, START_WITHIN_S = 1800.0, 120.0, 10.0

_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}")
_BASE = re.compile(r"^FROM (python:([0-9]+\.[0-9]+)\S*-([a-z]+)) AS wheel$", re.MULTILINE)
_CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
# As in the registry's image: apt keeps no cache beside its lists.
_APT = 'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";\n'


class ImageFailed(Exception):
    """An image could not be built, or does not work; the message says what, and what was printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The part of an image's configuration that decides how it runs.

    Attributes:
        user: Whom its program runs as, such as `10001:10001`.
        command: Entry point and command.
        health: The command of the health check; empty = there is none.
        labels: Its labels.
    """

    user: str
    command: list[str]
    health: list[str]
    labels: Mapping[str, str] = field(default_factory=dict)


class Container(ABC):
    """A container that was started; its program may have ended since."""

    @abstractmethod
    def uid(self) -> int:
        """Returns the user id of the program."""

    @abstractmethod
    def run(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Runs a command beside the program, as the same user in the same environment."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Tells whether the program has ended."""

    @abstractmethod
    def stop(self, within_s: float) -> int:
        """Sends SIGTERM to the program, and returns its exit status; raises `ImageFailed` when it is not in time."""

    @abstractmethod
    def log(self) -> str:
        """Returns what the program has printed."""

    @abstractmethod
    def remove(self) -> None:
        """Removes the container."""


class Engine(ABC):
    """A program that builds images and runs containers."""

    @abstractmethod
    def build(self, target: str) -> str:
        """Builds a target of the Dockerfile; returns the image."""

    @abstractmethod
    def config(self, image: str) -> Config:
        """Returns the configuration of an image."""

    @abstractmethod
    def size(self, image: str) -> str:
        """Returns the size of an image, such as `700 MB`."""

    @abstractmethod
    def start(
        self, image: str, command: Sequence[str], environment: Mapping[str, str], volumes: Sequence[str]
    ) -> Container:
        """Starts a container on the machine's network.

        Args:
            image: The image.
            command: In place of the image's command; its entry point stays.
            environment: Variables beside the image's.
            volumes: Directories or files of the machine, such as `/data:/data` or `/models:/models:ro`.
        """


def find_engine(name: str = "") -> Engine:
    """Returns the engine with a name, or the first that works here.

    Raises:
        ImageFailed: There is none.
    """
    makers: dict[str, Callable[[], Engine]] = {
        "docker": lambda: Docker("docker"),
        "podman": lambda: Docker("podman"),
        "buildah": Buildah,
    }
    for each in [name] if name else makers:
        if shutil.which(each) and subprocess.run([each, "info"], capture_output=True, check=False).returncode == 0:
            return makers[each]()
    wanted = name or "docker, podman or buildah"
    raise ImageFailed(f"no {wanted} works here; as root on Debian: apt-get install buildah crun debootstrap")


class Docker(Engine):
    """docker, or podman, which has the same commands."""

    def __init__(self, program: str) -> None:
        self._program = program

    def build(self, target: str) -> str:
        """Implements `Engine.build`."""
        image = f"qinfer-{target}:test"
        # podman's own format has no health checks.
        options = ["--format", "docker"] if self._program == "podman" else []
        _checked([self._program, "build", *options, "-f", str(DOCKERFILE), "--target", target, "-t", image, str(ROOT)])
        return image

    def config(self, image: str) -> Config:
        """Implements `Engine.config`."""
        found = self._inspect(image)
        health = {"Healthcheck": found["Healthcheck"]} if found.get("Healthcheck") else {}  # where podman has it
        return _config_of(found["Config"] | health)

    def size(self, image: str) -> str:
        """Implements `Engine.size`."""
        return f"{self._inspect(image)['Size'] / 1e6:.0f} MB"

    def start(
        self, image: str, command: Sequence[str], environment: Mapping[str, str], volumes: Sequence[str]
    ) -> Container:
        """Implements `Engine.start`."""
        options = ["--detach", "--network", "host", "--no-healthcheck", *_options(environment, volumes)]
        return _DockerContainer(self._program, _checked([self._program, "run", *options, image, *command]).strip())

    def _inspect(self, image: str) -> dict[str, Any]:
        (found,) = json.loads(_checked([self._program, "image", "inspect", image]))
        return dict(found)


class _DockerContainer(Container):
    def __init__(self, program: str, name: str) -> None:
        self._program, self._name = program, name

    def uid(self) -> int:
        return int(self.run(["id", "-u"]).stdout)

    def run(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return _ran([self._program, "exec", self._name, *command], COMMAND_WITHIN_S)

    def has_ended(self) -> bool:
        return self._state("Running") == "false"

    def stop(self, within_s: float) -> int:
        _checked([self._program, "stop", "--time", str(round(within_s)), self._name])
        return int(self._state("ExitCode"))

    def log(self) -> str:
        done = _ran([self._program, "logs", self._name], COMMAND_WITHIN_S)
        return done.stdout + done.stderr

    def remove(self) -> None:
        _ran([self._program, "rm", "--force", self._name], COMMAND_WITHIN_S)

    def _state(self, name: str) -> str:
        return _checked([self._program, "inspect", "--format", f"{{{{.State.{name}}}}}", self._name]).strip()


class Buildah(Engine):
    """buildah in chroot isolation, which needs neither a daemon nor namespaces."""

    def build(self, target: str) -> str:
        """Implements `Engine.build`."""
        text = _DIGEST.sub("", DOCKERFILE.read_text())  # a base image that is made here has another
        found = _BASE.search(text)
        assert found is not None
        self._provide_base(f"docker.io/library/{found[1]}", found[2], found[3])
        image = f"localhost/qinfer-{target}:test"
        # OCI's format has no health checks.
        options = ["--pull=never", "--isolation", "chroot", "--format", "docker", "--layers", "--target", target]
        with tempfile.NamedTemporaryFile("w", prefix="qinfer-", suffix=".Dockerfile") as file:
            file.write(text)
            file.flush()
            _checked(["buildah", "build", *options, "-t", image, "-f", file.name, str(ROOT)])
        return image

    def config(self, image: str) -> Config:
        """Implements `Engine.config`."""
        return _config_of(json.loads(_checked(["buildah", "inspect", "--type", "image", image]))["Docker"]["config"])

    def size(self, image: str) -> str:
        """Implements `Engine.size`."""
        return str(json.loads(_checked(["buildah", "images", "--json", image]))[0]["size"])

    def start(
        self, image: str, command: Sequence[str], environment: Mapping[str, str], volumes: Sequence[str]
    ) -> Container:
        """Implements `Engine.start`."""
        config = self.config(image)
        name = _checked(["buildah", "from", "--pull-never", image]).strip()
        # The program is no process 1 here; tini takes care of orphans all the same when it is told to.
        options = _options({**environment, "TINI_SUBREAPER": ""}, volumes)
        prefix = ["buildah", "run", "--isolation", "chroot", *options, name, "--"]
        return _BuildahContainer(name, prefix, [*config.command[:2], *command] if command else config.command)

    def _provide_base(self, image: str, python: str, suite: str) -> None:
        """Makes the base image, unless there is one."""
        if _ran(["buildah", "inspect", "--type", "image", image], COMMAND_WITHIN_S).returncode == 0:
            return
        with tempfile.TemporaryDirectory(prefix="qinfer-base-") as name:
            root = Path(name) / "root"
            _debootstrap(root, python, suite)
            container = _checked(["buildah", "from", "scratch"]).strip()
            try:
                _checked(["buildah", "add", "--quiet", container, str(root), "/"])
                path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
                _checked(["buildah", "config", "--env", path, "--cmd", "python3", container])
                _checked(["buildah", "commit", "--quiet", container, image])
            finally:
                _checked(["buildah", "rm", container])


class _BuildahContainer(Container):
    def __init__(self, name: str, prefix: list[str], command: list[str]) -> None:
        self._name, self._prefix, self._command = name, prefix, command
        self._output = tempfile.NamedTemporaryFile(mode="w+b", prefix="qinfer-container-")  # noqa: SIM115  `remove` closes it
        self._process = subprocess.Popen([*prefix, *command], stdout=self._output, stderr=self._output)

    def uid(self) -> int:
        status = Path(f"/proc/{self._program()}/status").read_text()
        return int(status.partition("Uid:")[2].split()[0])

    def run(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return _ran([*self._prefix, *command], COMMAND_WITHIN_S)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self, within_s: float) -> int:
        if not self.has_ended():
            os.kill(self._program(), signal.SIGTERM)
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise ImageFailed(f"it did not end within {within_s} s of SIGTERM") from None

    def log(self) -> str:
        return Path(self._output.name).read_text(errors="replace")

    def remove(self) -> None:
        for pid in [] if self.has_ended() else [*_descendants(self._process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(COMMAND_WITHIN_S)
        _ran(["buildah", "rm", self._name], COMMAND_WITHIN_S)
        self._output.close()

    def _program(self) -> int:
        """Returns the process of the image's command, below those of buildah, once it is there."""
        until_s = time.monotonic() + START_WITHIN_S
        while time.monotonic() < until_s and not self.has_ended():
            for pid in _descendants(self._process.pid):
                with suppress(OSError):  # it has ended
                    if Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1] == self._command:
                        return pid
            time.sleep(0.1)
        raise ImageFailed(f"{shlex.join(self._command)} does not run")


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in map(int, path.read_text().split()):
                yield child
                yield from _descendants(child)


def _debootstrap(root: Path, python: str, suite: str) -> None:
    """Makes a minimal Debian with Python, as the registry's image has it."""
    wanted = f"python{python},python{python}-venv,python3-pip,ca-certificates"
    _checked(["debootstrap", "--variant=minbase", f"--include={wanted}", suite, str(root), _mirror()])
    (root / "usr/bin/python").symlink_to("python3")
    (root / f"usr/lib/python{python}/EXTERNALLY-MANAGED").unlink(missing_ok=True)
    (root / "etc/apt/apt.conf.d/docker-clean").write_text(_APT)
    if (own := Path("/") / _CERTIFICATES).exists():  # of a proxy, perhaps
        shutil.copy(own, root / _CERTIFICATES)
    for folder, pattern in (("var/cache/apt", "**/*.*"), ("var/lib/apt/lists", "*_*"), ("var/log", "*.log")):
        for path in (root / folder).glob(pattern):
            path.unlink()


def _mirror() -> str:
    """Returns the mirror of Debian that apt uses here."""
    lines = _checked(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"])
    for line in lines.splitlines():
        address, _, release = line.partition(" ")
        if "-" not in release and address.rstrip("/").endswith("debian"):
            return address
    raise ImageFailed("apt knows no mirror of Debian on this machine")


def _config_of(found: Mapping[str, Any]) -> Config:
    health = (found.get("Healthcheck") or {}).get("Test") or []
    return Config(
        user=found.get("User") or "",
        command=[*(found.get("Entrypoint") or []), *(found.get("Cmd") or [])],
        health=health[1:] if health[:1] == ["CMD"] else [],
        labels=found.get("Labels") or {},
    )


def _options(environment: Mapping[str, str], volumes: Sequence[str]) -> list[str]:
    variables = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    return [*variables, *(word for volume in volumes for word in ("--volume", volume))]


def _ran(command: Sequence[str], within_s: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=within_s)


def _checked(command: Sequence[str]) -> str:
    done = _ran(command, BUILD_WITHIN_S)
    if done.returncode:
        printed = (done.stdout + done.stderr)[-4000:]
        raise ImageFailed(f"{shlex.join(command)} ended with {done.returncode}:\n{printed}")
    return done.stdout


@contextmanager
def removed_after(container: Container) -> Iterator[Container]:
    """Gives a container, and removes it at the end."""
    try:
        yield container
    finally:
        container.remove()
