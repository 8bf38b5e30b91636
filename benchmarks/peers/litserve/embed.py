"""The embedding in LitServe, batched; its quicker queue is on."""

import os
from typing import Any

import litserve

from benchmarks.peers.embedding import MAX_BATCH_SIZE, Embedder, Vectors


class Embed(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self._embedder = Embedder()

    def decode_request(self, request: dict[str, Any]) -> str:
        return request["text"]

    def batch(self, inputs: list[str]) -> list[str]:
        return inputs

    def predict(self, x: list[str]) -> Vectors:
        return self._embedder.embed(x)

    def unbatch(self, output: Vectors) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"embedding": output.tolist()}


if __name__ == "__main__":
    api = Embed(max_batch_size=MAX_BATCH_SIZE, batch_timeout=0)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(os.environ["BENCH_PORT"]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
