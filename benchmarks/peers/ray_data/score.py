"""The same scoring with Ray Data: `read_parquet().map_batches(two actors).write_parquet()`.

    python score.py --model model.onnx --out DIR --batch N --columns f0,f1 FILE…

Prints one JSON line: seconds from the first batch to the end of the job, and seconds before that (start-up).
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import ray


class Scorer:
    """An actor with a session of one thread."""

    def __init__(self, model: str, columns: list[str], began: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._columns = columns
        self._began: Path | None = Path(began) / str(os.getpid())

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Scores one batch."""
        if self._began is not None:
            self._began.write_text(str(time.monotonic()))
            self._began = None
        if len(self._columns) > 1:
            x = np.stack([batch[name].to_numpy() for name in self._columns], axis=1)
        else:
            lists = batch[self._columns[0]].combine_chunks()
            x = lists.flatten().to_numpy().reshape(len(lists), -1)
        (y,) = self._session.run(None, {"x": x})
        return pa.table({"y": pa.FixedSizeListArray.from_arrays(pa.array(y.reshape(-1)), y.shape[1])})


def main() -> None:
    """Runs the job and prints what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--columns", required=True)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    columns = options.columns.split(",")
    begin_s = time.monotonic()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as began:
        (
            ray.data.read_parquet(options.files, columns=columns)
            .map_batches(
                Scorer,
                fn_constructor_args=(options.model, columns, began),
                batch_size=options.batch,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=2),
                num_cpus=0.5,
            )
            .write_parquet(options.out)
        )
        end_s = time.monotonic()
        first_s = min(float(path.read_text()) for path in Path(began).iterdir())
    print(json.dumps({"seconds": end_s - first_s, "startup_s": first_s - begin_s, "cpu_s": 0.0, "memory_bytes": 0}))
    ray.shutdown()


if __name__ == "__main__":
    main()
