"""mosec: a Rust front that batches, one Python worker process.

`BENCH_JSON=stock` leaves reading and writing to mosec's own JSON (Python's `json`), as its documentation shows it;
`orjson` replaces it, which costs a user four lines.
"""

import os
import sys
from typing import Any

import orjson
from mosec import Server, Worker

from benchmarks.peers import kserve


class Inference(Worker):
    def __init__(self) -> None:
        self._model = kserve.Model()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [kserve.answer(y) for y in self._model.run_many([kserve.read_tensor(request) for request in data])]


class OrjsonInference(Inference):
    def deserialize(self, data: bytes) -> Any:
        return orjson.loads(data)

    def serialize(self, data: dict[str, Any]) -> bytes:
        return orjson.dumps(data)


if __name__ == "__main__":
    # mosec reads its options from the command line, and its own processes start this file again. `--wait 0` takes away
    # the delay for batches: a `max_wait_time` of 0 means the default of `--wait`, which is 10 ms.
    sys.argv += ["--address", "127.0.0.1", "--port", str(kserve.PORT), "--timeout", "30000", "--log-level", "error"]
    sys.argv += ["--wait", "0"]
    server = Server()
    server.append_worker(
        OrjsonInference if os.environ["BENCH_JSON"] == "orjson" else Inference,
        num=1,
        max_batch_size=kserve.MAX_BATCH_SIZE,
        route=kserve.INFER_PATH,
    )
    server.run()
