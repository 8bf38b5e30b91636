"""What other processes of the same user may see of a process."""

import os
import subprocess
import sys

import pytest

DUMPABLE = """
import ctypes, os
from qinfer.core.processes import forbid_inspection
forbid_inspection(os.environ)
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
