"""A process that plans and reads files of bulk jobs, as examiners and workers do: `python -m tests.fuzz.file_reader`.

It takes a path per line, and answers with a line of JSON each: what the file was refused for, `""` where it was read,
or the traceback of a defect; and the most memory that it ever had.
"""

import json
import resource
import sys
import traceback
from contextlib import closing
from typing import Any

from qinfer.errors import QinferError
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import UnplannedJob
from qinfer.jobs.planning import make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.tabular.schemas import decode_schema
from qinfer.testing import stub_spec
from tests.support.jobs.bulk_data import ANY_FILE

MEMORY_BYTES = 3 * 2**30
"""Memory that the process may ask for: enough to see how much a file takes, too little to be in the others' way."""
BATCH_ROWS = 64
MODEL = stub_spec(dims=(2,))
PACE = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=1000, max_rows=1000)


def read(url: str) -> None:
    """Reads all columns of a file, through a plan of it.

    Raises:
        QinferError: It can't be planned, or not be read.
    """
    output = Output("file:///out")
    spec = JobSpec(model="stub", inputs=(url,), output=output, version=1, passthrough=("*",))
    plan = make_plan(UnplannedJob("job-1", spec, MODEL, "hash", ANY_FILE), PACE, threads=1)
    schema = decode_schema(plan.schema)
    for shard in plan.shards[:100]:
        with closing(ShardReader(shard, schema.names, schema)) as reader:
            while reader.read(BATCH_ROWS) is not None:
                pass


def outcome(path: str) -> dict[str, Any]:
    """Returns what became of a file."""
    refused = defect = ""
    try:
        read(f"file://{path}")
    except QinferError as error:
        refused = error.message
    except Exception:  # noqa: BLE001  it is what is looked for
        defect = traceback.format_exc()
    most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"refused": refused, "defect": defect, "most_bytes": most_bytes}


def main() -> None:
    """Runs the program."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(outcome(line.rstrip("\n"))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
