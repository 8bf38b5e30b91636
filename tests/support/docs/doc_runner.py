"""Follows a page of the documentation literally: `python -m tests.support.docs.doc_runner PAGE DIRECTORY`.

Its blocks run in order, in DIRECTORY, where variables of the shell stay from block to block as in a terminal. What
keeps running (`qinfer up`) gets a terminal of its own, and is waited for; it is stopped when the page starts another
one, or ends. Ports are those that the page says: run this in a network of its own, `unshare --net`.
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
from tests.support.docs import doc_scenes
from tests.support.docs.doc_blocks import ROOT, Block, blocks

READY_URL = "http://127.0.0.1:8000/v2/health/ready"
READY_WITHIN_S, STOP_WITHIN_S, BLOCK_WITHIN_S = 60.0, 60.0, 90.0
SERVED = re.compile(r"^((?:[A-Z_]+=\S+ +)*)(qinfer up\b)", re.MULTILINE)
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
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory / "work"
        self._state, self._cwd, self._code = (directory / name for name in ("state", "cwd", "block.py"))
        self._state.touch()
        self._cwd.write_text(f"{self._directory}\n")
        path = f"{directory / 'bin'}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        self._environment = {name: os.environ[name] for name in PUBLIC if name in os.environ} | {
            "PATH": path,
            "HOME": str(directory),
            "PYTHONPATH": str(self._directory),
            "QINFER_REPOSITORY__STRICT_READINESS": "true",  # a page begins when all its models are loaded
            **environment,
        }
        self._server: subprocess.Popen[bytes] | None = None
        self._log = directory / "server.log"

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
                if SERVED.match(part):
                    self.serve(part)
                else:
                    printed += self._shell(part, block)
        elif block.is_executed:
            self._code.write_text(block.code)
            printed += self._shell(f"python {self._code}", block)
        if block.prints not in printed:
            raise RuntimeError(f"{block.name} did not print {block.prints!r}")

    def serve(self, command: str) -> None:
        """Starts a server beside the blocks that follow, and waits until it is ready; the one before is stopped."""
        self.stop()
        script = self._script() + SERVED.sub(r"\1exec \2", command)
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", script], env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        server = self._server
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: server.poll() is not None or _is_ready(), READY_WITHIN_S, "readiness")
        if server.poll() is not None or not _is_ready():
            raise RuntimeError(f"{command}\nis not ready; its log:\n{self._log.read_text()}")

    def stop(self) -> None:
        """Stops the server as Ctrl-C does, if one runs."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.send_signal(signal.SIGINT)
        try:
            status = server.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            status = server.wait()
        if status:
            raise RuntimeError(f"the server ended with {status}; its log:\n{self._log.read_text()}")

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
            log = self._log.read_text()[-4000:] if self._log.exists() else ""
            raise RuntimeError(f"{block.name} ended with {done.returncode}; the server's log:\n{log}")
        return done.stdout

    def _script(self) -> str:
        return SHELL.format(state=self._state, cwd=self._cwd)


def follow(page: Path, directory: Path) -> None:
    """Runs all blocks of a page.

    Args:
        page: The document.
        directory: An empty directory.
    """
    work, tools = directory / "work", directory / "bin"
    tools.mkdir()
    (tools / "make").write_text(MAKE)
    (tools / "make").chmod(0o755)
    for part in ("examples", "docs", "deploy"):
        shutil.copytree(ROOT / part, work / part, ignore=shutil.ignore_patterns("__pycache__"))
    (work / ".venv").symlink_to(ROOT / ".venv")
    scene = doc_scenes.SCENES.get(str(page.relative_to(ROOT)), doc_scenes.Scene())
    with doc_scenes.set_up(scene, work) as environment:
        terminal = Terminal(directory, environment)
        try:
            if scene.serves:
                terminal.serve(scene.serves)
            for block in blocks(page):
                terminal.run(block)
        finally:
            terminal.stop()


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


def _is_ready() -> bool:
    try:
        with urllib.request.urlopen(READY_URL, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    raise_loopback()
    follow(ROOT / sys.argv[1], Path(sys.argv[2]))
