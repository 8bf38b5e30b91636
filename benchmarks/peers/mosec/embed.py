"""The embedding in mosec, batched, with its own JSON or with orjson (`BENCH_JSON`)."""

import os
import sys
from typing import Any

import orjson
from mosec import Server, Worker

from benchmarks.peers.embedding import MAX_BATCH_SIZE, Embedder


class Embed(Worker):
    def __init__(self) -> None:
        self._embedder = Embedder()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        vectors = self._embedder.embed([request["text"] for request in data])
        return [{"embedding": vector} for vector in vectors.tolist()]


class OrjsonEmbed(Embed):
    def deserialize(self, data: bytes) -> Any:
        return orjson.loads(data)

    def serialize(self, data: dict[str, Any]) -> bytes:
        return orjson.dumps(data)


if __name__ == "__main__":
    # As in `server.py`: without `--wait 0`, mosec waits 10 ms for a batch.
    sys.argv += ["--address", "127.0.0.1", "--port", os.environ["BENCH_PORT"], "--timeout", "30000"]
    sys.argv += ["--log-level", "error", "--wait", "0"]
    server = Server()
    kind = OrjsonEmbed if os.environ["BENCH_JSON"] == "orjson" else Embed
    server.append_worker(kind, num=1, max_batch_size=MAX_BATCH_SIZE, route="/embed")
    server.run()
