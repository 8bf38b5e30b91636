"""The gRPC client of a recording: connections that each make one call at a time, in a process of its own.

`python -m benchmarks.replay HOST PORT RECORDING SECONDS REPLY_BYTES` prints a line for `load.parse`. h2load can't do
this: its headers are the same in every call. What a call sends was laid out before.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.connections import GrpcConnection, Run
from benchmarks.proxied import REQUESTS_EACH, read_recording


def replay(address: tuple[str, int], requests: list[bytes], seconds: float, reply_bytes: int) -> dict[str, Any]:
    """Makes calls for `seconds`, and returns what `load.parse` reads."""
    run = Run(address, reply_bytes)
    for first in range(0, len(requests), REQUESTS_EACH):
        GrpcConnection(run, requests[first : first + REQUESTS_EACH])
    return run.until(seconds)


def main(arguments: list[str]) -> None:
    host, port, recording, seconds, reply_bytes = arguments
    result = replay((host, int(port)), read_recording(Path(recording)), float(seconds), int(reply_bytes))
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main(sys.argv[1:])
