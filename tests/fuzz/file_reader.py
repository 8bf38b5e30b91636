"""A process that plans and reads files of bulk jobs, as examiners and workers do: `python -m tests.fuzz.file_reader`.

It takes a path per line, and answers with a line of JSON each: what the file was refused for, `""` where it was read,
or the traceback of a defect. As examiners do, it has a limit of memory, and ends where a file takes more.
"""

import json
import os
import sys
import traceback
from contextlib import closing
from typing import Any

from qinfer.core.settings import BulkSettings
from qinfer.errors import QinferError
from qinfer.jobs.examiner import NO_MEMORY, data_bytes, limit_memory
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import UnplannedJob
from qinfer.jobs.planning import make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.source import ReadLimits
from qinfer.testing import stub_spec
from tests.support.jobs.bulk_data import ANY_FILE

MEMORY_BYTES = ReadLimits.from_read_bytes(BulkSettings().max_read_bytes).process_bytes
"""Memory of this process beyond its libraries."""
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
    except MemoryError:
        os._exit(NO_MEMORY)
    except Exception:  # noqa: BLE001  it is what is looked for
        defect = traceback.format_exc()
    return {"refused": refused, "defect": defect}


def main() -> None:
    """Runs the program."""
    limit_memory(data_bytes() + MEMORY_BYTES)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(outcome(line.rstrip("\n"))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
