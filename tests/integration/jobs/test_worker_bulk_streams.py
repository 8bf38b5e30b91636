"""Bulk jobs over decoupled Python models in real worker processes: the responses of each row, once and in order."""

from collections.abc import AsyncIterator
from pathlib import Path

import duckdb
import pytest

from qinfer.jobs.queue.records import ShardOutcome
from tests.support.jobs.shard_runs import job_spec, outcomes, read_parts, shards_of, submit_job, write_rows
from tests.support.python_models import DECOUPLED, execute, write_model
from tests.support.worker_processes import WorkerProcesses, worker_processes

ROWS, GROUP, MOST = 300, 100, 4
BAD, DEAD = 77, 155

# Row n has n % 4 responses, from a thread of its own: n, n + 0.25, …; an even one's last is final, else the flag
# comes alone. BAD fails after a response, DEAD ends the process after one.
RESPONSES = execute(
    f"""
import threading
def work(sender, number):
    count = int(number) % {MOST}
    for index in range(count):
        is_last = index == count - 1 and not number % 2
        sender.send(reply(np.array([[number + index / 4]], "f4")), **(dict(flags=1) if is_last else dict()))
        if is_last:
            return
    if number == {BAD}:
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("this row is bad")), flags=1)
        return
    if number == {DEAD}:
        os._exit(3)
    sender.send(flags=1)
for request in requests:
    arguments = (request.get_response_sender(), float(x(request).item()))
    threading.Thread(target=work, args=arguments, daemon=True).start()
"""
)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    write_model(tmp_path / "repository", RESPONSES, "responses", dims="1", max_batch_size=16, more=DECOUPLED)
    async with worker_processes(tmp_path) as one:
        await one.worker()
        yield one


async def test_a_row_has_the_list_of_its_responses(pool: WorkerProcesses, tmp_path: Path) -> None:
    """None, one or many; a row that fails in the middle, or takes the process with it, costs no other its own."""
    output = tmp_path / "out"
    output.mkdir()
    url = write_rows(tmp_path / "in.parquet", ROWS, group=GROUP)
    shards = shards_of(url)
    spec = job_spec([url], output, model="responses", columns={"x": "id"}, passthrough=("id",))
    model = await pool.store.model("responses")
    assert model is not None

    await submit_job(pool.delivery, spec, shards, model_hash=model.content_hash)
    found = await outcomes(pool.delivery, len(shards), timeout_s=50.0)

    assert found == [ShardOutcome(0, GROUP, 1), ShardOutcome(1, GROUP, 1), ShardOutcome(2, GROUP)]
    parts = read_parts(output)
    expected = [[row + index / 4 for index in range(row % MOST)] for row in range(ROWS)]
    messages = enumerate(parts["error_message"].to_pylist())
    failed = {row: message for row, message in messages if message}
    assert parts["y"].to_pylist() == [None if row in (BAD, DEAD) else expected[row] for row in range(ROWS)]
    assert sorted(failed) == [BAD, DEAD]
    assert "this row is bad" in failed[BAD]
    assert "died" in failed[DEAD]
    counts = f"""
        SELECT (SELECT count(*) FROM range({ROWS}) i ANTI JOIN parts p ON i.range = p.id) AS missing,
               (SELECT count(*) - count(DISTINCT id) FROM parts) AS duplicates"""
    found_rows = duckdb.sql(counts)
    assert found_rows is not None
    assert found_rows.fetchall() == [(0, 0)]
