"""ONNX Runtime tells its makers nothing."""

import os
import subprocess
import sys
from pathlib import Path


def test_onnx_runtime_keeps_no_device_id(tmp_path: Path) -> None:
    """Its telemetry would, in the home directory, as soon as it is imported."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    subprocess.run([sys.executable, "-c", "import qinfer.backends.onnx"], env=environment, check=True)

    assert list(tmp_path.iterdir()) == []
