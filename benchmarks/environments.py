"""The peers' own virtual environments, made on demand from their pinned requirements."""

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PEERS = ("fastapi_direct", "mosec", "litserve", "celery", "triton")


class SetupFailed(Exception):
    """A peer's environment could not be made."""


def requirements(peer: str) -> list[str]:
    """Returns the pinned requirements of a peer, one per element."""
    return (HERE / "peers" / peer / "requirements.txt").read_text().split()


def ensure(peer: str) -> Path:
    """Makes the peer's environment unless it is there with these requirements, and returns its Python.

    Raises:
        SetupFailed: The environment or an installation failed; the message has pip's last lines.
    """
    directory = HERE / ".venvs" / peer
    python, stamp = directory / "bin" / "python", directory / "requirements.sha256"
    wanted = hashlib.sha256("\n".join(requirements(peer)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    _run([str(base), "-m", "venv", "--clear", str(directory)], peer)
    _run([str(python), "-m", "pip", "install", "--quiet", *requirements(peer)], peer)
    stamp.write_text(wanted)
    return python


def _run(command: list[str], peer: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode != 0:
        raise SetupFailed(f"the environment of {peer} could not be made: {(done.stderr or done.stdout)[-800:]}")
