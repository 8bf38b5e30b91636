"""ONNX Runtime, imported with its telemetry off.

The official builds of 1.31 send events about sessions to their makers, and keep a device id in the home directory,
unless `ORT_DISABLE_TELEMETRY` is set before they are loaded (Privacy.md of the package).
"""

import os

os.putenv("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

__all__ = ["ort"]
