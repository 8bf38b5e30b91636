"""The loop that one would write by hand: read, score, write, in two processes that share the files.

By somebody who knows pyarrow: without the dictionaries that it would try to make of floats, the loop is twice as fast.

    python loop.py --model model.onnx --out DIR --batch N --columns f0,f1 --processes 2 FILE…

Prints one JSON line: seconds from the first to the last row, CPU seconds, largest resident memory of a process.
"""

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq


def features(batch: pa.RecordBatch, columns: list[str]) -> np.ndarray:
    """Returns float32[rows, width] of number columns side by side, or of one column of lists."""
    if len(columns) > 1:
        return np.stack([batch.column(name).to_numpy() for name in columns], axis=1)
    lists = batch.column(columns[0])
    return lists.flatten().to_numpy().reshape(len(lists), -1)


def score(options: argparse.Namespace, files: list[str], ready, go, done) -> None:
    """Scores files one after the other; tells when it began and ended, on the system's monotonic clock."""
    threads = ort.SessionOptions()
    threads.intra_op_num_threads = threads.inter_op_num_threads = 1
    columns = options.columns.split(",")
    session = ort.InferenceSession(options.model, threads, providers=["CPUExecutionProvider"])
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    width = session.get_outputs()[0].shape[1]
    schema = pa.schema([("y", pa.list_(pa.float32(), width))])
    ready.wait()
    go.wait()
    began_s = time.monotonic()
    cpu_s = time.process_time()
    for file in files:
        with pq.ParquetWriter(Path(options.out) / Path(file).name, schema, use_dictionary=False) as writer:
            for batch in pq.ParquetFile(file).iter_batches(options.batch, columns=columns, use_threads=False):
                (y,) = session.run(None, {"x": features(batch, columns)})
                values = pa.FixedSizeListArray.from_arrays(pa.array(y.reshape(-1)), width)
                writer.write_batch(pa.record_batch([values], schema=schema), row_group_size=1_000_000)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    done.put((began_s, time.monotonic(), time.process_time() - cpu_s, usage.ru_maxrss * 1024))


def main() -> None:
    """Runs the processes and prints what they measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--columns", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ready, go, done = context.Barrier(options.processes + 1), context.Event(), context.Queue()
    processes = [
        context.Process(target=score, args=(options, options.files[number :: options.processes], ready, go, done))
        for number in range(options.processes)
    ]
    for process in processes:
        process.start()
    ready.wait()
    go.set()
    times = [done.get() for _ in processes]
    for process in processes:
        process.join()
    began_s, ended_s, cpu_s, memory = zip(*times, strict=True)
    seconds = max(ended_s) - min(began_s)
    print(json.dumps({"seconds": seconds, "startup_s": 0.0, "cpu_s": sum(cpu_s), "memory_bytes": max(memory)}))


if __name__ == "__main__":
    main()
