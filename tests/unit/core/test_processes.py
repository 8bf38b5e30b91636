"""What others may see of a process, and of the files that it makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DUMPABLE = """
import ctypes, os
from qinfer.core.processes import protect_process
protect_process(os.environ)
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prctl")
@pytest.mark.parametrize(
    ("variables", "dumpable"),
    [
        ({}, "0"),
        ({"QINFER_ALLOW_INSPECTION": "false"}, "0"),
        ({"QINFER_ALLOW_INSPECTION": "True"}, "1"),
        ({"qinfer_allow_inspection": "1"}, "1"),
    ],
)
def test_nobody_looks_into_a_process_unless_it_is_allowed(variables: dict[str, str], dumpable: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", DUMPABLE], env=os.environ | variables, capture_output=True, text=True, check=True
    )

    assert said.stdout.strip() == dumpable


FILES = """
import os, pathlib, sys
from qinfer.core.processes import protect_process
protect_process(os.environ)
pathlib.Path("folder").mkdir()
pathlib.Path("folder/file").touch()
print(*(oct(pathlib.Path(name).stat().st_mode & 0o777) for name in ("folder", "folder/file")))
"""


@pytest.mark.parametrize(
    ("umask", "modes"),
    [(0o000, "0o750 0o640"), (0o022, "0o750 0o640"), (0o077, "0o700 0o600"), (0o002, "0o750 0o640")],
)
def test_files_are_for_user_and_group_at_most(tmp_path: Path, umask: int, modes: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", FILES], umask=umask, cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert said.stdout.strip() == modes
