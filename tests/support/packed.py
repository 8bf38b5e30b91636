"""Environments of models for tests: a real venv, packed by `tar`, whose numpy is that of the tests."""

import subprocess
import venv
from pathlib import Path

import numpy as np

PACKAGE = "only_packed"
"""A module that only the environment has."""

MODULE = """
VERSION = "{version}"

def host():
    import msgspec
    import qinfer.backends.python_host.utils
    return qinfer.backends.python_host.utils.__name__
"""


def make_environment(directory: Path, version: str = "1") -> Path:
    """Makes a venv with numpy and the module; returns its directory."""
    root = directory / "env"
    venv.EnvBuilder(symlinks=False, with_pip=False).create(root)
    (packages,) = (root / "lib").glob("python3.*/site-packages")
    (packages / f"{PACKAGE}.py").write_text(MODULE.format(version=version))
    numpy = directory / "numpy"  # by itself: what is installed beside it is not in the environment
    numpy.mkdir()
    for found in Path(np.__file__).parent.parent.glob("numpy*"):
        (numpy / found.name).symlink_to(found)
    (packages / "numpy.pth").write_text(f"{numpy}\n")
    return root


def pack(root: Path, archive: Path) -> Path:
    """Packs an environment as `tar -czf archive -C root .` does."""
    subprocess.run(["tar", "-czf", str(archive), "-C", str(root), "."], check=True)
    return archive
