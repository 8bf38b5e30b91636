"""LitServe: a FastAPI process that hands requests to one batching inference process, with its quicker queue."""

from typing import Any

import litserve

from benchmarks.peers import kserve


class Inference(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self._model = kserve.Model()

    def decode_request(self, request: dict[str, Any]) -> kserve.FloatArray:
        return kserve.read_tensor(request)

    def batch(self, inputs: list[kserve.FloatArray]) -> list[kserve.FloatArray]:
        return inputs

    def predict(self, x: list[kserve.FloatArray]) -> list[kserve.FloatArray]:
        return self._model.run_many(x)

    def unbatch(self, output: list[kserve.FloatArray]) -> list[kserve.FloatArray]:
        return output

    def encode_response(self, output: kserve.FloatArray) -> dict[str, Any]:
        return kserve.answer(output)


if __name__ == "__main__":
    # A `batch_timeout` of 0 takes what is in the queue and waits for no more; an idle server asks its queue in a loop.
    api = Inference(max_batch_size=kserve.MAX_BATCH_SIZE, batch_timeout=0, api_path=kserve.INFER_PATH)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=kserve.PORT,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
