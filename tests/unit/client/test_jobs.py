"""The client's calls about bulk jobs: what is sent, how a job is waited for, how its output is read."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

import qinfer
from qinfer import errors
from qinfer.client import JobStatus, job_flows, job_output
from qinfer.client.job_flows import Lines, job_body, progress_line, shown_progress
from qinfer.client.job_output import MANIFEST, PARTIAL, read_output
from tests.support.scripted_gateway import Server, policy_of, reply


def shown(state: str = "running", **fields: Any) -> dict[str, Any]:
    rows = {"total": 100, "done": 40, "failed": 10}
    shards = {"total": 4, "done": 2, "failed": 0}
    known = {"id": "j1", "model": "m", "version": 1, "state": state, "rows": rows, "shards": shards}
    return {
        **known,
        "progress": 0.5,
        "rows_per_s": 5.0,
        "eta_s": 90.4,
        "error": None,
        "output_url": "s3://b/out",
        **fields,
    }


def job(state: str = "running", status: int = 200, **fields: Any) -> httpx.Response:
    return reply(status, **shown(state, **fields))


def status_of(state: str, **fields: Any) -> JobStatus:
    """Returns a status as the client reads it."""
    flow = job_flows.job(policy_of(timeout_s=1.0, max_retries=0), "j1")
    next(flow)
    with pytest.raises(StopIteration) as end:
        flow.send(job(state, **fields))
    found: JobStatus = end.value.value
    return found


# --- submit ---


def test_a_job_is_submitted() -> None:
    """Given options go where the API has them; the server fills in the others."""
    server = Server(job("planning", 201))

    made = server.client().submit_job(
        "m",
        ["s3://b/in/*.parquet"],
        "s3://b/out",
        columns={"x": ["a", "b"]},
        output_columns={"y": "score"},
        compression="snappy",
        key="id",
        error_threshold=0.1,
    )

    (sent,) = server.requests
    assert made.id == "j1"
    assert server.paths == ["POST /v1/jobs"]
    assert json.loads(sent.content) == {
        "model": "m",
        "inputs": ["s3://b/in/*.parquet"],
        "output": {"url": "s3://b/out", "compression": "snappy", "columns": {"y": "score"}},
        "columns": {"x": ["a", "b"]},
        "key": "id",
        "error_threshold": 0.1,
    }


def test_a_submission_may_be_repeated() -> None:
    """One without an id has a key, the same each time; one with an id needs none."""
    server = Server(httpx.ReadError("cut"), job("planning", 201))
    named = Server(job("planning", 201))

    server.client().submit_job("m", "s3://b/in", "s3://b/out")
    named.client().submit_job("m", "s3://b/in", "s3://b/out", id="nightly")

    first, second = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first == second
    assert "Idempotency-Key" not in named.requests[0].headers
    assert json.loads(named.requests[0].content)["id"] == "nightly"


@pytest.mark.parametrize(
    ("rows_per_s", "text"), [(1234.5, "1,234"), (10.4, "10"), (2.51, "2.5"), (0.3, "0.3"), (0.0123, "0.012")]
)
def test_slow_models_have_rates_with_decimals(rows_per_s: float, text: str) -> None:
    assert f", {text} rows/s, " in progress_line(status_of("running", rows_per_s=rows_per_s))


def test_inputs_are_waited_for_through_outages() -> None:
    missing = reply(400, error="input 'a' does not exist", code="input_missing")
    server = Server(missing, reply(503, error="no", code="store_unavailable"), missing, job("planning", 201))
    looks: list[tuple[str, float]] = []

    made = server.client(max_retries=0).submit_job(
        "m", "s3://b/in", "s3://b/out", wait_for_inputs_s=60.0, on_missing=lambda *look: looks.append(look)
    )

    assert made.id == "j1"
    assert looks == [("input 'a' does not exist", left_s) for left_s in (60.0, 59.0, 57.5)]
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 1


async def test_the_asynchronous_client_waits_for_inputs() -> None:
    server = Server(reply(400, error="input 'a' does not exist", code="input_missing"))
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        server.clock.advance(seconds)

    transport = httpx.MockTransport(server)
    async with qinfer.AsyncClient("http://g", transport=transport, clock=server.clock, sleep=sleep) as client:
        with pytest.raises(errors.InputMissing, match="waited 3 s"):
            await client.submit_job("m", "s3://b/in", "s3://b/out", wait_for_inputs_s=3.0)

    assert sum(pauses) == 3.0


def test_a_job_is_resumed_by_its_id() -> None:
    """One that stays `cancelling` is not waited for without end."""
    server = Server(job("cancelling"))

    with pytest.raises(errors.DeadlineExceeded, match="'j1' is still being cancelled"):
        server.client(timeout_s=5.0).submit_job("m", "s3://b/in", "s3://b/out", id="nightly", resume=True)
    with pytest.raises(errors.InvalidRequest, match="by its id"):
        server.client().submit_job("m", "s3://b/in", "s3://b/out", resume=True)

    assert set(server.paths) == {"POST /v1/jobs?resume=true"}


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled", "expired"])
def test_a_wait_raises_where_that_is_asked_for(state: str) -> None:
    server = Server(job(state, error="it broke" if state == "failed" else None))
    client = server.client()

    quiet = client.job("j1").wait()
    if state == "completed":
        assert client.job("j1").wait(raise_on_failure=True) == quiet
        return
    with pytest.raises(errors.JobFailed, match=f"job 'j1' is {state}" + (": it broke" * (state == "failed"))) as caught:
        client.job("j1").wait(raise_on_failure=True)

    assert caught.value.state == state


def test_paths_become_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute ones, of which patterns stay patterns."""
    monkeypatch.chdir(tmp_path)

    body = job_body("m", ["in/*.parquet", Path("/data/x.csv"), "S3://b/x"], "out/", {})

    assert body["inputs"] == [f"file://{os.getcwd()}/in/*.parquet", "file:///data/x.csv", "S3://b/x"]
    assert body["output"] == {"url": f"file://{os.getcwd()}/out"}


@pytest.mark.parametrize(
    ("options", "said"),
    [({"colums": {}}, "'colums'"), ({"passthrough": "a"}, "passthrough"), ({"metadata": {"a": object()}}, "JSON")],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    """Before anything is sent."""
    server = Server(job())

    with pytest.raises(errors.InvalidRequest, match=said):
        server.client().submit_job("m", "s3://b/in", "s3://b/out", **options)

    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, errors.InvalidRequest), (403, errors.Forbidden), (404, errors.ModelNotFound), (409, errors.Conflict)],
)
def test_a_refusal_is_raised(status: int, error: type[Exception]) -> None:
    """With the server's text."""
    with pytest.raises(error, match="no column 'x'"):
        Server(reply(status, error="no column 'x'")).client().submit_job("m", "s3://b/in", "s3://b/out")


# --- look, change ---


def test_a_job_is_looked_at() -> None:
    """An unknown figure is 0, or None."""
    status = status_of("planning", rows={"total": None, "done": 0, "failed": 0}, rows_per_s=None, eta_s=None)

    assert (status.rows, status.rows_done, status.rows_per_s, status.eta_s) == (0, 0, 0.0, None)
    assert (status.has_ended, status_of("expired").has_ended) == (False, True)
    assert status.fields["output_url"] == status.output_url == "s3://b/out"


def test_a_job_is_changed() -> None:
    """By the paths of the API, its id quoted."""
    log = reply(200, log=[{"at": "2026-01-31T12:00:00.000Z", "text": "planned"}])
    rows = reply(200, of="failed", file="s3://b/o/a", columns=[{"name": "c", "type": "int64"}], rows=[["1"], [None]])
    server = Server(job("cancelling"), job("planning"), httpx.Response(204), log, rows)
    made = server.client().job("a~b")

    assert (made.cancel().state, made.resume().state) == ("cancelling", "planning")
    made.delete()
    assert [(line.at, line.text) for line in made.log()] == [("2026-01-31T12:00:00.000Z", "planned")]
    assert made.preview("failed", 5).rows == (("1",), (None,))
    assert server.paths == [
        "POST /v1/jobs/a~b/cancel",
        "POST /v1/jobs/a~b/resume",
        "DELETE /v1/jobs/a~b",
        "GET /v1/jobs/a~b/log",
        "GET /v1/jobs/a~b/preview?of=failed&rows=5",
    ]


def test_a_job_is_resumed_with_changes() -> None:
    """Those that are given; 0 is one, too."""
    server = Server(job("planning"))

    server.client().job("j1").resume(error_threshold=-1, deadline_s=0)

    assert json.loads(server.requests[0].content) == {"error_threshold": -1, "deadline_s": 0}


@pytest.mark.parametrize("call", ["status", "cancel", "resume", "delete", "log", "preview", "wait", "to_arrow"])
def test_a_job_that_is_not_there(call: str) -> None:
    """404 is about the job."""
    made = Server(reply(404, error="job 'j1' is not known")).client().job("j1")

    with pytest.raises(errors.JobNotFound, match="'j1'"):
        getattr(made, call)()


def test_jobs_are_listed() -> None:
    """Page by page, no more than wanted."""
    pages = [reply(200, jobs=[shown(), shown()], next="100-j1"), reply(200, jobs=[shown()], next=None)]
    server = Server(*pages)

    assert len(server.client().jobs(state="running", limit=600)) == 3
    assert server.paths == [
        "GET /v1/jobs?limit=500&state=running",
        "GET /v1/jobs?limit=500&state=running&after=100-j1",
    ]
    assert len(Server(*pages).client().jobs(limit=2)) == 2


@pytest.mark.parametrize(
    "body", [{}, {"id": "j1"}, {"id": 1, "state": "running"}, {"id": "j1", "state": "x", "rows": 7}]
)
def test_what_is_no_job(body: dict[str, Any]) -> None:
    """Something else answers at the URL."""
    with pytest.raises(errors.Unreachable, match="is it a gateway"):
        Server(reply(200, **body)).client().job("j1").status()


# --- wait ---


def test_a_job_is_waited_for() -> None:
    """It is looked at ever less often, up to each 2 s, until it has ended; each look is told."""
    server = Server(*[job()] * 12, job("failed", error="it broke"))
    told: list[str] = []

    status = server.client().job("j1").wait(on_status=lambda status: told.append(status.state))

    assert (status.state, status.error) == ("failed", "it broke")
    assert told == ["running"] * 12 + ["failed"]
    assert server.pauses[0] == 0.1
    assert server.pauses == sorted(server.pauses)
    assert server.pauses[-1] == 2.0


def test_a_wait_has_an_end() -> None:
    """The job continues, and the text says so."""
    server = Server(job())

    with pytest.raises(errors.DeadlineExceeded, match="'j1' is running after 5 s and continues"):
        server.client().job("j1").wait(timeout_s=5)

    assert sum(server.pauses) == pytest.approx(5)


def test_a_wait_has_an_end_though_nobody_answers() -> None:
    """A look may take a second longer than what is left of the time, no more."""
    server = Server(httpx.ConnectError("refused"))
    began_s = server.clock.monotonic_s()

    with pytest.raises(errors.Unreachable):
        server.client().job("j1").wait(timeout_s=3)

    assert server.clock.monotonic_s() - began_s <= 4


def test_a_gateway_that_restarts_is_waited_for() -> None:
    """A client that repeats nothing else waits too."""
    server = Server(job(), httpx.ConnectError("refused"), reply(503, error="Server exiting"), job("completed"))

    assert server.client(max_retries=0).job("j1").wait().state == "completed"


async def test_the_asynchronous_client_does_the_same(tmp_path: Path) -> None:
    """Submit, wait, change, list, read."""
    url = written(tmp_path)
    replies = [job("planning", 201), job(), job("completed"), job("completed", output_url=url)]
    replies += [
        job("cancelled"),
        job("planning"),
        httpx.Response(204),
        reply(200, log=[]),
        reply(200, jobs=[], next=None),
    ]
    server = Server(*replies)

    async def sleep(seconds: float) -> None:
        server.sleep(seconds)
        await asyncio.sleep(0)

    transport = httpx.MockTransport(server)
    async with qinfer.AsyncClient("http://gateway", transport=transport, clock=server.clock, sleep=sleep) as client:
        made = await client.submit_job("m", "s3://b/in", "s3://b/out", id="j1")
        assert (await made.wait()).state == "completed"
        assert (await made.to_arrow())["y"].to_pylist() == [1, 2, 3]
        assert (await made.cancel()).state == "cancelled"
        assert (await made.resume()).state == "planning"
        await made.delete()
        assert await made.log() == []
        assert await client.jobs() == []


# --- progress ---


def test_progress_in_a_line() -> None:
    """The line has the known figures, and no others."""
    assert progress_line(status_of("running")) == (
        "j1: running, 50 of 100 rows, 2 of 4 shards, 10 rows failed, 5 rows/s, 0:01:30 left"
    )
    assert progress_line(status_of("planning", shards={"total": None, "done": 0, "failed": 0})) == "j1: planning"


def test_lines_are_few() -> None:
    """One for each state, and one each five seconds while something is done."""
    written_lines: list[str] = []
    now = 0.0
    lines = Lines(written_lines.append, lambda: now)

    for state, seconds, done in [("running", 0, 1), ("running", 1, 2), ("running", 6, 3), ("running", 20, 3)]:
        now = seconds
        lines(status_of(state, rows={"total": 9, "done": done, "failed": 0}))
    lines(status_of("completed"))

    assert [line.partition(" rows")[0] for line in written_lines] == [
        "j1: running, 1 of 9",
        "j1: running, 3 of 9",
        "j1: completed, 50 of 100",
    ]


def test_a_job_that_nobody_plans_gets_a_hint() -> None:
    """Else a bulk worker that is not there would be seen nowhere."""
    said: list[str] = []
    times = iter([0.0, 9.0, 10.0, 20.0])
    lines = Lines(said.append, lambda: next(times))
    planning = status_of("planning", shards={"total": None}, rows={"total": None})

    for _ in range(4):
        lines(planning)

    assert said[0] == "j1: planning"
    assert said[1:] == ["j1: planning; waits for the bulk worker, or for its inputs to be read; see its log"]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_progress_is_shown(capsys: pytest.CaptureFixture[str], *, on_terminal: bool) -> None:
    """On stderr: stdout is for results."""
    with shown_progress(on_terminal=on_terminal) as told:
        told(status_of("planning", shards={"total": None}, rows={"total": None}))
        told(status_of("running"))

    out, err = capsys.readouterr()
    assert out == ""
    assert ("50/100 rows, 2/4 shards, 10 failed, 5/s, 0:01:30" if on_terminal else "50 of 100 rows") in err


# --- output ---


def written(folder: Path, output_format: str = "parquet", name: str = MANIFEST) -> str:
    """Writes an output of two parts; returns its URL."""
    parts: list[dict[str, list[Any]]] = [{"y": [1, 2], "_file": ["a", "b"]}, {"y": [3], "_file": ["c"]}]
    for number, columns in enumerate(parts):
        table = pa.table({**columns, "_file": pa.array(columns["_file"]).dictionary_encode()})
        path = folder / f"part-{number:05d}.{output_format}"
        if output_format == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    found = [
        {"name": f"part-{n:05d}.{output_format}", "rows": len(part["y"]), "etag": ""} for n, part in enumerate(parts)
    ]
    manifest = {"format": 1, "output_format": output_format, "rows": 3, "ok": 3, "parts": found, "job": "j1"}
    (folder / name).write_text(json.dumps(manifest))
    return f"file://{folder}"


@pytest.mark.parametrize("output_format", ["parquet", "arrow"])
def test_an_output_is_read(tmp_path: Path, output_format: str) -> None:
    """All parts, in order; or some columns, in the order asked for."""
    url = written(tmp_path, output_format)
    made = Server(job("completed", output_url=url)).client().job("j1")

    assert made.to_arrow()["y"].to_pylist() == [1, 2, 3]
    assert made.to_arrow(columns=["_file", "y"]).column_names == ["_file", "y"]
    assert made.to_pandas()["_file"].tolist() == ["a", "b", "c"]


def test_part_of_an_output_is_read(tmp_path: Path) -> None:
    """Of a job that has ended early, on request."""
    url = written(tmp_path, name=PARTIAL)
    made = Server(job("cancelled", output_url=url)).client().job("j1")

    assert made.to_arrow(partial=True).num_rows == 3
    with pytest.raises(errors.ResultNotFound, match="partial=True"):
        made.to_arrow()


ENDED = "2026-01-31T12:00:00.250Z"
ENDED_S = 1769860800.25


def listed(folder: Path, ended_s: float) -> None:
    """Writes the list that is made after an end."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    (folder / PARTIAL).write_text(json.dumps({**manifest, "ended_at": ended_s}))


@pytest.mark.parametrize("earlier", [[], [ENDED_S - 9]])
def test_the_list_of_the_last_end_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: list[float]
) -> None:
    """It is made after the end; that of an end before the job was resumed has fewer parts."""
    status = status_of("cancelled", output_url=written(tmp_path), ended_at=ENDED)
    for ended_s in earlier:
        listed(tmp_path, ended_s)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            listed(tmp_path, ENDED_S)

    monkeypatch.setattr(job_output, "sleep", pause)

    assert read_output(status, None, None, partial=True).num_rows == 3
    assert pauses == pytest.approx([0.1, 0.15, 0.225])


@pytest.mark.parametrize("earlier", [[], [ENDED_S - 9]])
def test_a_list_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: list[float]) -> None:
    """Is not waited for without end, and nothing else is taken for it."""
    status = status_of("failed", output_url=written(tmp_path), ended_at=ENDED)
    for ended_s in earlier:
        listed(tmp_path, ended_s)
    monkeypatch.setattr(job_output, "LISTED_S", 0.0)

    with pytest.raises(errors.ResultNotFound, match=f"{PARTIAL}, is still being written; try again"):
        read_output(status, None, None, partial=True)


def test_a_job_that_ended_before_it_was_planned(tmp_path: Path) -> None:
    """Has no list, and there will be none."""
    shards = {"total": None, "done": 0, "failed": 0}
    status = status_of("cancelled", output_url=f"file://{tmp_path}", ended_at=ENDED, shards=shards)

    with pytest.raises(errors.ResultNotFound, match="was cancelled before it was planned; it has written nothing"):
        read_output(status, None, None, partial=True)


def test_no_columns_can_be_read(tmp_path: Path) -> None:
    """A table of no columns would lose how many rows there are."""
    with pytest.raises(errors.InvalidRequest, match="columns is empty; name at least one"):
        read_output(status_of("completed", output_url=written(tmp_path)), [], None, partial=False)


def test_a_job_that_runs_has_no_output() -> None:
    """No part can be read: there is no list of the parts."""
    made = Server(job("running")).client().job("j1")

    for partial in (False, True):
        with pytest.raises(errors.ResultNotFound, match=r"is running: wait\(\)"):
            made.to_arrow(partial=partial)


def _remove_part(folder: Path) -> None:
    (folder / "part-00001.parquet").unlink()


def _remove_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def _tear(folder: Path) -> None:
    (folder / "part-00000.parquet").write_bytes(b"PAR1")


def _replace(folder: Path) -> None:
    pq.write_table(
        pa.table({"y": [3, 4], "_file": pa.array(["c", "d"]).dictionary_encode()}), folder / "part-00001.parquet"
    )


@pytest.mark.parametrize(
    ("harm", "error", "said"),
    [
        (_remove_part, errors.ResultNotFound, "part-00001.parquet"),
        (_remove_manifest, errors.ResultNotFound, MANIFEST),
        (_tear, errors.StoreError, "can't be read"),
        (_replace, errors.ResultNotFound, "has 4 rows; its _manifest.json says 3"),
    ],
)
def test_an_output_that_is_not_whole(
    tmp_path: Path, harm: Callable[[Path], None], error: type[Exception], said: str
) -> None:
    """Is never taken for a whole one."""
    url = written(tmp_path)
    harm(tmp_path)

    with pytest.raises(error, match=said):
        read_output(status_of("completed", output_url=url), None, None, partial=False)


def test_an_unknown_column(tmp_path: Path) -> None:
    """Is named, with those that there are."""
    with pytest.raises(errors.ResultNotFound, match="no column 'z'; it has y, _file"):
        read_output(status_of("completed", output_url=written(tmp_path)), ["z"], None, partial=False)


@pytest.mark.parametrize(
    ("module", "url", "said"),
    [
        ("fsspec", "", r"pip install 'qinfer-ml\[bulk\]'"),
        ("pyarrow", "", r"pip install 'qinfer-ml\[bulk\]'"),
        ("s3fs", "s3://b/out", r"pip install 'qinfer-ml\[s3\]'"),
    ],
)
def test_a_library_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, url: str, said: str
) -> None:
    """The text says how to install it."""
    status = status_of("completed", output_url=url or written(tmp_path))
    monkeypatch.setitem(sys.modules, module, None)
    if registry := sys.modules.get("fsspec.registry"):
        monkeypatch.delitem(registry._registry, "s3", raising=False)

    with pytest.raises(errors.UnsupportedFeature, match=said):
        read_output(status, None, None, partial=False)


def test_nobody_without_jobs_pays_for_them() -> None:
    """Gateway, client and command line start without the libraries that only jobs need."""
    heavy = "{'pyarrow', 'pandas', 'celery', 'kombu'} & set(sys.modules)"
    code = f"import sys, qinfer_api.app, qinfer.client, qinfer.cli.main; print({heavy})"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("wrong", [{"metadata": {"by": "\ud800"}}, {"key": object()}])
def test_an_option_that_json_can_not_carry_is_refused(wrong: Any) -> None:
    client = Server(reply(500, error="unused")).client()

    with pytest.raises(errors.InvalidRequest, match="the job can't be written as JSON"):
        client.submit_job("m", "s3://b/in", "s3://b/out", **wrong)


def test_a_change_that_json_can_not_carry_is_refused() -> None:
    client = Server(reply(500, error="unused")).client()

    with pytest.raises(errors.InvalidRequest, match="the changes can't be written as JSON"):
        client.job("j1").resume(max_parallel=object())  # type: ignore[arg-type]
