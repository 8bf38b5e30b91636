"""The largest memory of a worker for one data set of 1 GB, with its row groups and with ten times as many.

Run it as `python -m benchmarks.bulk.memory`; it prints, and takes about 2 minutes.
"""

import dataclasses
import shutil
import sys

from benchmarks import environments, processes
from benchmarks.bulk.contestants import Task, serving
from benchmarks.bulk.data import DATA_SETS
from benchmarks.models import MODELS, write_repository

WORK = environments.HERE / ".work" / "memory"
ROWS = 500_000
BAR = 0.2


def main() -> int:
    found = {}
    with processes.alone(WORK):
        for share in (1, 10):
            data = DATA_SETS["lists"]
            data = dataclasses.replace(data, name=f"lists-{share}", group_rows=data.group_rows // share)
            files, out = data.write(WORK, ROWS), WORK / "out"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            model_file = write_repository(MODELS[data.model], WORK / "peers")
            with serving(WORK, [data.model], {data.model: data.batch}) as qinfer:
                run = qinfer(Task(data=data, model_file=model_file, files=files, out=out, batch=data.batch))
            found[share] = run.memory_bytes
            print(f"row groups of {data.group_rows:,} rows: {run.memory_bytes / 2**20:.0f} MiB", flush=True)
    change = found[10] / found[1] - 1
    print(f"{'PASS' if abs(change) <= BAR else 'MISS'}: {change:+.0%} with ten times the row groups, at most {BAR:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
