"""Follows a page of the documentation literally: `python -m tests.support.docs.doc_runner PAGE DIRECTORY [VENV]`.

Its blocks run in order, in DIRECTORY, where variables of the shell stay from block to block as in a terminal. What
keeps running (`qinfer up` or `dev`, `prometheus`) gets a terminal of its own, and is waited for; it is stopped when the
page starts another one of its kind, or ends. Ports are those that the page says: run this in a network of its own,
`unshare --net`. With VENV, a virtual environment, nothing but what is installed in it is there: no clone.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from qinfer.testing import wait_until
from tests.support.deploy.deployments import TOOLS
from tests.support.docs import doc_scenes
from tests.support.docs.doc_blocks import ROOT, Block, blocks

READY_URLS = {"qinfer up": "http://127.0.0.1:8000/v2/health/ready", "prometheus": "http://127.0.0.1:9090/-/ready"}
READY_WITHIN_S, STOP_WITHIN_S, BLOCK_WITHIN_S = 60.0, 60.0, 150.0
SERVED = re.compile(r"^((?:[A-Z_]+=\S+ +)*)(qinfer (?:up|dev)\b|prometheus(?= ))", re.MULTILINE)
CONTINUED = re.compile(r"\\\n\s*")
PUBLIC = ("LANG", "TERM", "TZ", "XDG_RUNTIME_DIR")  # what a block may see of the environment of whoever runs the tests

SHELL = """
set -a
source {state}
cd "$(cat {cwd})"
set -euo pipefail
trap 'export -p >{state}; pwd >{cwd}' EXIT
"""
MAKE = """#!/bin/sh
# In the place of make: what a page sets up by it is there already.
[ "$*" = setup ] || { echo "make $* is not part of this test" >&2; exit 2; }
"""


class Terminal:
    """Runs the blocks of a page in a directory.

    Attributes:
        directory: Where the page begins.
        environment: Variables of the scene.
        venv: The virtual environment whose programs run.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], venv: Path) -> None:
        self._directory = directory / "work"
        self._state, self._cwd, self._code = (directory / name for name in ("state", "cwd", "block.py"))
        self._state.touch()
        self._cwd.write_text(f"{self._directory}\n")
        path = ":".join((str(directory / "bin"), str(venv / "bin"), os.environ["PATH"], str(TOOLS / "promtool")))
        self._environment = {name: os.environ[name] for name in PUBLIC if name in os.environ} | {
            "PATH": path,
            "HOME": str(directory),
            "PYTHONPATH": str(self._directory),
            "QINFER_REPOSITORY__STRICT_READINESS": "true",  # a page begins when all its models are loaded
            **environment,
        }
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = {program: directory / f"{program.partition(' ')[0]}.log" for program in READY_URLS}

    def run(self, block: Block) -> None:
        """Does what a block says.

        Raises:
            RuntimeError: It failed; the message has what it printed.
        """
        if block.not_run:
            return
        printed = self._shell(block.first, block) if block.first else ""
        if block.saved_as:
            path = self._directory / block.saved_as
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
        elif block.is_shell:
            for part in _parts(CONTINUED.sub(" ", block.code)):
                if served := SERVED.match(part):
                    self.serve(part, served[2].replace("qinfer dev", "qinfer up"))
                else:
                    printed += self._shell(part, block)
        elif block.is_executed:
            self._code.write_text(block.code)
            printed += self._shell(f"python {self._code}", block)
        if block.prints not in printed:
            raise RuntimeError(f"{block.name} did not print {block.prints!r}")

    def serve(self, command: str, program: str = "qinfer up") -> None:
        """Starts a server beside the blocks that follow, and waits until it is ready; the one before is stopped."""
        self.stop(program)
        script, url = self._script() + SERVED.sub(r"\1exec \2", command), READY_URLS[program]
        with self._logs[program].open("wb") as log:
            server = subprocess.Popen(
                ["bash", "-c", script], env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        self._servers[program] = server
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: server.poll() is not None or _is_ready(url), READY_WITHIN_S, "readiness")
        if server.poll() is not None or not _is_ready(url):
            raise RuntimeError(f"{command}\nis not ready; its log:\n{self._logs[program].read_text()}")

    def stop(self, program: str) -> None:
        """Stops a server as Ctrl-C does, if it runs."""
        if (server := self._servers.pop(program, None)) is None:
            return
        server.send_signal(signal.SIGINT)
        try:
            status = server.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            status = server.wait()
        if status:
            raise RuntimeError(f"{program} ended with {status}; its log:\n{self._logs[program].read_text()}")

    def close(self) -> None:
        """Stops all servers."""
        for program in READY_URLS:
            self.stop(program)

    def _shell(self, code: str, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-c", self._script() + code],
            check=False,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=BLOCK_WITHIN_S,
        )
        sys.stdout.write(f"--- {block.name}\n{code}\n{done.stdout}{done.stderr}\n")
        sys.stdout.flush()
        if done.returncode and not block.may_end_early:
            served = self._logs["qinfer up"]
            log = served.read_text()[-4000:] if served.exists() else ""
            raise RuntimeError(f"{block.name} ended with {done.returncode}; the server's log:\n{log}")
        return done.stdout

    def _script(self) -> str:
        return SHELL.format(state=self._state, cwd=self._cwd)


def follow(page: Path, directory: Path, venv: Path | None = None) -> None:
    """Runs all blocks of a page.

    Args:
        page: The document.
        directory: An empty directory.
        venv: The virtual environment of somebody without a clone; `None` = there is a clone, with its own.
    """
    work, tools = directory / "work", directory / "bin"
    tools.mkdir()
    (tools / "make").write_text(MAKE)
    (tools / "make").chmod(0o755)
    work.mkdir()
    for part in () if venv else ("examples", "docs", "deploy"):
        shutil.copytree(ROOT / part, work / part, ignore=shutil.ignore_patterns("__pycache__"))
    (work / ".venv").symlink_to(venv or ROOT / ".venv")
    scene = doc_scenes.SCENES.get(str(page.relative_to(ROOT)), doc_scenes.Scene())
    with doc_scenes.set_up(scene, work) as environment:
        terminal = Terminal(directory, environment, venv or ROOT / ".venv")
        try:
            if scene.serves:
                terminal.serve(scene.serves)
            for block in blocks(page):
                terminal.run(block)
        finally:
            terminal.close()


def raise_loopback() -> None:
    """Switches the loopback interface on, which is off in a new network."""
    up = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, up + bytes(8))  # SIOCSIFFLAGS


def _parts(code: str) -> list[str]:
    """Cuts a block before and after each line that starts a server; what is between stays together."""
    parts: list[str] = [""]
    for line in code.splitlines(keepends=True):
        if SERVED.match(line):
            parts += [line, ""]
        else:
            parts[-1] += line
    return [part for part in parts if part.strip()]


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    raise_loopback()
    follow(ROOT / sys.argv[1], Path(sys.argv[2]), *map(Path, sys.argv[3:]))
