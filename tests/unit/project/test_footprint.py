"""What a process does not need it does not import: each would have its own copy in memory."""

import subprocess
import sys

import pytest

CLIENTS = {"httpx", "rich", "typer"}
GATEWAY = {"fastapi", "starlette"}
JOBS = {"celery", "kombu", "pyarrow", "pandas"}
OTHERS = {"fsspec", "grpc", "onnxruntime", "opentelemetry.exporter", "sklearn", "torch", "tritonclient"}

UNWANTED = {
    "qinfer.cli.local.deployment": {"asyncio", "httpx", "numpy", "pydantic", "redis", "ssl"} | GATEWAY | JOBS | OTHERS,
    "qinfer_api.__main__": CLIENTS | JOBS | OTHERS,
    "qinfer_workers.jobs.__main__": {"fastapi", "onnxruntime", "pandas", "sklearn", "torch", "tritonclient"},
    "qinfer_workers.inference.__main__": CLIENTS | GATEWAY | JOBS | OTHERS,
    "qinfer.jobs.shard_rows": {"pydantic", "redis"} | CLIENTS | GATEWAY | OTHERS,  # of an examiner
    "qinfer.backends.python_host.__main__": {"asyncio", "pydantic", "redis", "ssl"} | CLIENTS | GATEWAY | JOBS | OTHERS,
    "qinfer_workers.renewer": {"numpy", "pydantic"} | CLIENTS | GATEWAY | JOBS | OTHERS,
}


@pytest.mark.parametrize("process", UNWANTED)
def test_a_process_imports_what_it_needs(process: str) -> None:
    """The rest comes with the first use, or never."""
    source = f"import sys, {process}; print(*sorted(sys.modules))"

    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.split()

    assert process in loaded
    assert UNWANTED[process].intersection(loaded) == set()
