"""A client in C++, made with Debian's gRPC and the .proto, against the whole server; see `clients/client.cc`."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Stack, running
from tests.support import models
from tests.support.foreign import cpp_build

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NO_ID = "[request id: <id_unknown>] "
TOLD = f"""\
BOOL: 1 0
INT8: -7 9
INT16: -7 9
UINT64: 18446744073709551615
FP64: 0.5 -2
BYTES: <one><><three>
gzip: same
deflate: same
empty: 0 0
no data: 3 unable to find data for input tensor 'x' for model 'identity_fp32' in request.
too few bytes: 3 {NO_ID}input byte size mismatch for input 'x' for model 'identity_fp32'. Expected 8, got 4
datatype: 3 {NO_ID}inference input 'x' data-type is 'INT32', but model 'identity_fp32' expects 'FP32'
unknown: 5 Request for unknown model: 'nothing' is not found
one: 1
other: 10
one: 3
other: 30
one: 6
other: 60
"""
LATE = (
    "late: inference request for sequence 7 to model 'accumulator' must specify the START flag on "
    "the first request of the sequence"
)
ENDS = """\
stream: OK
strict: 5 Request for unknown model: 'nothing' is not found
"""


@pytest.fixture
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    for datatype in ("BOOL", "INT8", "INT16", "UINT64", "FP32", "FP64", "BYTES"):
        models.identity(repository, datatype)
    models.accumulator(repository)
    with running(repository, tmp_path_factory.mktemp("up")) as one:
        yield one


def test_tensors_sequences_and_errors(stack: Stack, tmp_path: Path) -> None:
    client = cpp_build(tmp_path, Path(__file__).parent / "clients" / "client.cc")

    done = subprocess.run(
        [*client.command, stack.grpc_address],
        env=os.environ | client.environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )

    said = re.sub(r"\[request id: [0-9A-Z]{26}[^\]]*\] ", NO_ID, done.stdout)
    assert said == f"{TOLD}{LATE}\n{ENDS}"
