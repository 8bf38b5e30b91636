"""`qinfer submit` and `qinfer jobs` as people type them: what is sent, printed, and how they exit."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from qinfer.cli import client
from qinfer.cli.jobs.jobs import pairs, read_columns
from qinfer.cli.main import app
from qinfer.client import Client, Job
from qinfer.client.job_flows import JobStatus
from qinfer.core.settings import variable_names
from qinfer.errors import InvalidRequest
from tests.support.scripted_gateway import Scripted, Server, reply
from tests.unit.client.test_jobs import job, shown

IN, OUT = "s3://b/in/*.parquet", "s3://b/out"
Talk = Callable[..., Server]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Makes the gateway that every command finds, with what it answers."""
    monkeypatch.setenv("COLUMNS", "250")
    for name in variable_names():
        monkeypatch.delenv(name, raising=False)

    def answering(*replies: Scripted) -> Server:
        server = Server(*replies)

        def connected(url: str) -> Client:
            return server.client(max_retries=0)

        monkeypatch.setattr(client, "GatewayClient", connected)
        return server

    return answering


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def sent(server: Server) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(server.requests[0].content)
    return body


# --- submit ---


def test_a_job_is_submitted(gateway: Talk) -> None:
    """Several inputs and one output; what to do next is printed."""
    server = gateway(job("planning", 201))

    code, out, _ = run("submit", "m", IN, "in/rows.csv", OUT, "--column", "x=a,b", "--key", "id", "--passthrough", "*")

    body = sent(server)
    assert code == 0, out
    assert body["inputs"] == [IN, f"file://{os.getcwd()}/in/rows.csv"]
    assert body["output"] == {"url": OUT, "format": "parquet"}
    assert (body["columns"], body["key"], body["passthrough"]) == ({"x": ["a", "b"]}, "id", ["*"])
    assert "job j1: planning" in out
    assert "qinfer jobs wait j1" in out


def test_a_missing_input_has_an_exit_code_of_its_own(gateway: Talk) -> None:
    gateway(reply(400, error="input 's3://b/in' does not exist", code="input_missing"))

    code, _, err = run("submit", "m", IN, OUT)

    assert (code, err.split()) == (66, ["Error:", "input", "'s3://b/in'", "does", "not", "exist"])


def test_inputs_are_waited_for_with_progress(gateway: Talk) -> None:
    missing = [reply(400, error=f"input '{name}' does not exist", code="input_missing") for name in "aab"]
    server = gateway(*missing, job("planning", 201))

    code, out, err = run("submit", "m", IN, OUT, "--wait-for-inputs", "3600")

    assert (code, len(server.requests)) == (0, 5)
    assert "job j1: planning" in out
    assert err.splitlines() == [
        "waits for inputs, 1:00:00 left: input 'a' does not exist",
        "waits for inputs, 0:59:58 left: input 'b' does not exist",
    ]


def test_the_wait_for_inputs_ends(gateway: Talk) -> None:
    server = gateway(reply(400, error="input 'a' does not exist", code="input_missing"))

    code, _, err = run("submit", "m", IN, OUT, "--wait-for-inputs", "60")

    assert (code, sum(server.pauses)) == (66, 60.0)
    assert "input 'a' does not exist; waited 60 s for it" in " ".join(err.split())


def test_a_signal_ends_the_wait_for_inputs(gateway: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = reply(400, error="input 'a' does not exist", code="input_missing")
    server = gateway(missing)
    sleep = server.sleep

    def stopped(seconds: float) -> None:
        sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(server, "sleep", stopped)

    code, _, _ = run("submit", "m", IN, OUT, "--wait", "--cancel-on-exit", "--wait-for-inputs", "3600")

    assert (code, len(server.requests)) == (128 + signal.SIGTERM, 2)


def test_schemas_are_merged_on_demand(gateway: Talk) -> None:
    server = gateway(job("planning", 201))

    run("submit", "m", IN, OUT, "--merge-schema")

    assert sent(server)["merge_schema"] is True


def test_columns_get_types(gateway: Talk) -> None:
    server = gateway(job("planning", 201))

    run("submit", "m", IN, OUT, "--type", "id=int64", "--type", "at=timestamp[us, tz=UTC]")

    assert sent(server)["types"] == {"id": "int64", "at": "timestamp[us, tz=UTC]"}


def test_all_that_can_be_said(gateway: Talk) -> None:
    """Each option has its field."""
    server = gateway(job("planning", 201))
    options = (
        "--input-compression gzip --delimiter ; --quote ' --decimal-point , --encoding latin-1 --no-header "
        "--column-names x,y --format arrow --input-format csv --shape x=2,2 --null x=0 --bad-files skip "
        "--partitioning hive --partition-by day --failed-rows separate --output-column y=score --exclude name "
        "--compression lz4 --compression-level 3 --output-tensor y --output-tensor p --top-k p=2 "
        "--rows-per-part 100 --priority high --on-version-change fail "
        "--error-threshold 0.5 --max-parallel 2 --deadline 60 --metadata who=me "
        "--webhook https://x/y --id nightly --version 3 --passthrough * --limit 100"
    )

    code, out, err = run("submit", "m", IN, OUT, *options.split())

    assert code == 0, out + err
    assert sent(server) == {
        "model": "m",
        "inputs": [IN],
        "output": {
            "url": OUT,
            "format": "arrow",
            "compression": "lz4",
            "compression_level": 3,
            "tensors": ["y", "p"],
            "top_k": {"p": 2},
            "failed_rows": "separate",
            "rows_per_part": 100,
            "partition_by": ["day"],
            "columns": {"y": "score"},
        },
        "input_format": "csv",
        "input_compression": "gzip",
        "csv": {
            "delimiter": ";",
            "quote": "'",
            "decimal_point": ",",
            "encoding": "latin-1",
            "header": False,
            "column_names": ["x", "y"],
        },
        "columns": {"x": {"columns": ["x"], "shape": [2, 2], "null": 0}},
        "passthrough": ["*"],
        "exclude": ["name"],
        "bad_files": "skip",
        "partitioning": "hive",
        "priority": "high",
        "on_version_change": "fail",
        "error_threshold": 0.5,
        "max_parallel": 2,
        "deadline_s": 60.0,
        "metadata": {"who": "me"},
        "webhook": "https://x/y",
        "id": "nightly",
        "version": 3,
        "limit": 100,
    }


@pytest.mark.parametrize(
    ("columns", "shapes", "nulls", "expected"),
    [
        (["x=a"], [], [], {"x": "a"}),
        (["x=a,b", "y=c"], [], [], {"x": ["a", "b"], "y": "c"}),
        (["x=a"], ["x=2,3"], [], {"x": {"columns": ["a"], "shape": [2, 3]}}),
        ([], ["x=4"], [], {"x": {"columns": ["x"], "shape": [4]}}),
        ([], ["x=-1,64"], [], {"x": {"columns": ["x"], "shape": [-1, 64]}}),
        (["x=a=b"], [], [], {"x": "a=b"}),
        (["x=a"], ["x=4"], ["x=nan"], {"x": {"columns": ["a"], "shape": [4], "null": "nan"}}),
        ([], [], ["x=0", "y=-0.5"], {"x": {"columns": ["x"], "null": 0}, "y": {"columns": ["y"], "null": -0.5}}),
        ([], [], ["x=true"], {"x": {"columns": ["x"], "null": True}}),
        ([], [], ['x="0"', "y=a=b"], {"x": {"columns": ["x"], "null": "0"}, "y": {"columns": ["y"], "null": "a=b"}}),
    ],
)
def test_columns_are_read(columns: list[str], shapes: list[str], nulls: list[str], expected: dict[str, object]) -> None:
    """As the API has them."""
    assert read_columns(columns, shapes, nulls) == expected


@pytest.mark.parametrize(("columns", "shapes", "said"), [(["x"], [], "'x'"), (["x=a", "x=b"], [], "'x' twice")])
def test_columns_that_can_not_be(columns: list[str], shapes: list[str], said: str) -> None:
    """The text has what was typed."""
    with pytest.raises(InvalidRequest, match=said):
        read_columns(columns, shapes)


@pytest.mark.parametrize("shape", ["x=", "x=a", "x=-2", "x=2x3", "x=9999999999"])
def test_shapes_that_can_not_be(shape: str) -> None:
    """The text has what was typed, and an example."""
    with pytest.raises(InvalidRequest, match=f"{shape}' can't be read; expected sizes such as x=3,4"):
        read_columns([], [shape])


def test_pairs_may_be_empty() -> None:
    """A text may be; a name may not."""
    assert pairs("--metadata", ["a="]) == {"a": ""}
    with pytest.raises(InvalidRequest, match="--metadata '=b'"):
        pairs("--metadata", ["=b"])


@pytest.mark.parametrize(
    ("status", "code"), [(400, 64), (403, 64), (404, 64), (409, 64), (429, 69), (501, 64), (503, 69)]
)
def test_a_refusal_is_printed(gateway: Talk, status: int, code: int) -> None:
    """On stderr, with the server's text; 64 where the command is to be changed, 69 where it may work later."""
    gateway(reply(status, error="the inputs have no column 'x'"))

    found, out, err = run("submit", "m", IN, OUT)

    assert (found, out) == (code, "")
    assert "the inputs have no column 'x'" in err


@pytest.mark.parametrize(
    "arguments", [["m"], ["m", IN], ["m", IN, OUT, "--rows-per-part", "-1"], ["m", IN, OUT, "--x"]]
)
def test_wrong_usage(gateway: Talk, arguments: list[str]) -> None:
    server = gateway(job())

    code, _, err = run("submit", *arguments)

    assert code == 64
    assert "Usage" in err
    assert server.requests == []


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("failed", 1), ("cancelled", 1), ("expired", 1)])
def test_waiting_for_the_end(gateway: Talk, state: str, code: int) -> None:
    """Lines on stderr where there is no terminal, the end on stdout; the exit code tells how it ended."""
    gateway(job("planning", 201), job("running"), job(state, error="it broke" if state == "failed" else None))

    found, out, err = run("submit", "m", IN, OUT, "--wait")

    assert found == code
    assert "j1: running, 50 of 100 rows" in err
    assert f"job j1: {state}" in out
    assert ("output: s3://b/out" in out, "it broke" in out) == (state == "completed", state == "failed")


def test_waiting_with_json(gateway: Talk) -> None:
    """Stdout is the job, and nothing else."""
    gateway(job("planning", 201), job("completed"))

    code, out, _ = run("submit", "m", IN, OUT, "--wait", "--json")

    assert (code, json.loads(out)) == (0, shown("completed"))


def test_an_interrupt_leaves_the_job(gateway: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how to look at it, and how to stop it; nothing is cancelled."""
    server = gateway(job("planning", 201))

    def interrupted(self: Job, *, progress: bool) -> JobStatus:
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "wait", interrupted)
    code, _, err = run("submit", "m", IN, OUT, "--wait", "--url", "http://other:8000")

    assert code == 130
    assert "qinfer jobs show j1 --url http://other:8000" in err
    assert "qinfer jobs cancel j1 --url http://other:8000" in err
    assert server.paths == ["POST /v1/jobs"]


def test_a_server_that_is_away_is_no_failed_job(gateway: Talk) -> None:
    gateway(httpx.ConnectError("refused"))
    before = run("submit", "m", IN, OUT)
    gateway(job("planning", 201), job("running"), httpx.ReadTimeout("slow"))
    meanwhile = run("submit", "m", IN, OUT, "--wait")

    assert (before[0], meanwhile[0]) == (69, 69)
    assert "no server answers" in before[2]


def test_the_same_command_resumes(gateway: Talk) -> None:
    """A job that is still being cancelled is waited for; a completed one is told at once."""
    command = ("submit", "m", IN, OUT, "--id", "nightly", "--resume", "--wait")
    server = gateway(job("cancelling"), job("cancelling"), job("planning"), job("completed"))
    resumed = run(*command)
    gateway(job("completed"))
    again = run(*command)

    assert (resumed[0], again[0]) == (0, 0)
    assert server.paths == ["POST /v1/jobs?resume=true"] * 3 + ["GET /v1/jobs/j1"]


@pytest.mark.parametrize(
    ("estimated_s", "said"), [(90.0, "about 0:01:30 with 2 workers"), (None, "not known yet, there are 2 workers")]
)
def test_a_job_is_only_validated(gateway: Talk, estimated_s: float | None, said: str) -> None:
    """The size is printed, and nothing is submitted."""
    size: dict[str, Any] = {
        "model": "m",
        "version": 3,
        "files": 2,
        "rows": 9000,
        "shards": 4,
        "workers": 2,
        "rows_per_s": 50.0,
    }
    server = gateway(reply(200, **size, estimated_s=estimated_s))

    code, out, _ = run("submit", "m", IN, OUT, "--validate-only", "--wait")
    as_json = run("submit", "m", IN, OUT, "--validate-only", "--json")[1]

    assert code == 0
    assert f"9,000 rows of 2 files, 4 shards; {said}" in " ".join(out.split()).replace("the time is ", "")
    assert json.loads(as_json) == {**size, "estimated_s": estimated_s}
    assert server.paths == ["POST /v1/jobs/validate"] * 2


@pytest.mark.parametrize(("option", "said"), [("--resume", "--id"), ("--cancel-on-exit", "--wait")])
def test_options_that_need_another(gateway: Talk, option: str, said: str) -> None:
    server = gateway(job())

    code, _, err = run("submit", "m", IN, OUT, option)

    assert (code, said in err, server.requests) == (64, True, [])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["submitting", "waiting"])
def test_signals_cancel_the_job(gateway: Talk, monkeypatch: pytest.MonkeyPatch, signum: int, when: str) -> None:
    """One that comes before the job's id is known is kept until then; the handlers are those of before afterwards."""
    server = gateway(job("planning", 201), job("cancelling"))
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    submit_job = Client.submit_job

    def submitted(self: Client, *arguments: Any, **options: Any) -> Job:
        if when == "submitting":
            os.kill(os.getpid(), signum)
        return submit_job(self, *arguments, **options)

    def waited(self: Job, *, progress: bool) -> JobStatus:
        os.kill(os.getpid(), signum)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(Client, "submit_job", submitted)
    monkeypatch.setattr(Job, "wait", waited)
    code, out, _ = run("submit", "m", IN, OUT, "--wait", "--cancel-on-exit")

    assert code == 128 + signum
    assert "job j1: cancelling" in out
    assert server.paths == ["POST /v1/jobs", "POST /v1/jobs/j1/cancel"]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


# --- jobs ---


def test_jobs_are_listed(gateway: Talk) -> None:
    """One line each, or all of it as JSON."""
    server = gateway(reply(200, jobs=[shown(), shown("planning", id="j2", shards={}, rows={})], next=None))

    code, out, _ = run("jobs", "list", "--state", "running", "--count", "5")
    as_json = json.loads(run("jobs", "list", "--json")[1])

    assert code == 0
    assert all(text in out for text in ("j1", "running", "m 1", "100", "50%", "s3://b/out", "j2", "planning"))
    assert server.paths[0] == "GET /v1/jobs?limit=5&state=running"
    assert [entry["id"] for entry in as_json] == ["j1", "j2"]


def test_a_wide_listing_has_times_and_outputs(gateway: Talk) -> None:
    times = {"created_at": "2026-01-31T12:00:00.000Z", "started_at": "2026-01-31T12:00:01.000Z"}
    gateway(reply(200, jobs=[shown("completed", **times, ended_at="2026-01-31T12:01:31.000Z")], next=None))

    _, out, _ = run("jobs", "list")

    assert all(text in out for text in ("2026-01-31 12:00", "0:01:30", "s3://b/out"))


def test_jobs_are_listed_by_model_output_and_metadata(gateway: Talk) -> None:
    server = gateway(reply(200, jobs=[], next=None))

    run("jobs", "list", "--model", "m", "--output", "s3://b/out", "--metadata", "a=1", "--metadata", "b=2")

    assert server.paths == ["GET /v1/jobs?limit=50&model=m&output=s3%3A%2F%2Fb%2Fout&metadata=a%3D1&metadata=b%3D2"]


OLD, YOUNG = "2026-01-31T12:00:00.000Z", "2999-01-31T12:00:00.000Z"


@pytest.mark.parametrize(("answer", "deleted"), [("y", ["DELETE /v1/jobs/j1"]), ("n", [])])
def test_old_records_are_pruned_if_that_is_wanted(gateway: Talk, answer: str, deleted: list[str]) -> None:
    jobs = [shown("completed", id="j1", ended_at=OLD), shown("failed", id="j2", ended_at=YOUNG), shown(id="j3")]
    server = gateway(reply(200, jobs=jobs, next=None), reply(204))

    result = CliRunner().invoke(app, ["jobs", "prune", "--older-than", "1m"], input=answer)

    assert "Delete the records of these 1 jobs? Their outputs are kept." in result.stdout
    assert server.paths[1:] == deleted


def test_pruning_does_not_ask_with_yes(gateway: Talk) -> None:
    gateway(reply(200, jobs=[shown("completed", id="j1", ended_at=OLD)], next=None), reply(204))

    code, out, _ = run("jobs", "prune", "--older-than", "1m", "--yes", "--json")

    assert (code, json.loads(out)) == (0, {"deleted": ["j1"]})


@pytest.mark.parametrize("age", ["", "30", "d", "-1d", "1y"])
def test_ages_that_can_not_be(gateway: Talk, age: str) -> None:
    server = gateway(reply(200, jobs=[], next=None))

    code, _, err = run("jobs", "prune", "--older-than", age, "--yes")

    assert (code, server.requests) == (64, [])
    assert "expected such as 90m" in err


def test_a_narrow_listing_keeps_the_model(gateway: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is no place for is left out, and no name is cut into letters."""
    monkeypatch.setenv("COLUMNS", "80")
    gateway(reply(200, jobs=[shown(id="01JX3M3TC8Z6Q5RYB7WS2K4D9F", model="digits-small")], next=None))

    _, out, _ = run("jobs", "list")

    assert "01JX3M3TC8Z6Q5RYB7WS2K4D9F" in out
    assert "digits-small" in out
    assert "s3://b/out" not in out


def test_no_jobs(gateway: Talk) -> None:
    """A sentence, and no empty table."""
    gateway(reply(200, jobs=[], next=None))

    assert run("jobs", "list") == (0, "there are no jobs\n", "")


def test_skipped_files_are_shown_with_their_reasons(gateway: Talk) -> None:
    first = [{"url": "s3://b/a.csv", "reason": "is damaged"}, {"url": "s3://b/b.csv", "reason": "is no CSV"}]
    answer = job("completed", skipped_files={"total": 3, "first": first})
    gateway(answer, answer)

    code, out, _ = run("jobs", "show", "j1")

    words = " ".join(out.replace("│", " ").split())
    assert code == 0, out
    assert "skipped files 3 's3://b/a.csv' is damaged 's3://b/b.csv' is no CSV and 1 more; " in words
    assert "3 files skipped" in run("jobs", "wait", "j1")[1]


def test_a_job_is_shown(gateway: Talk) -> None:
    """What it is, where it is, why it failed, and what was asked for."""
    spec = {"model": "m", "inputs": ["s3://b/in"]}
    gateway(job("failed", error="more than 5 rows failed", spec=spec, created_at="2026-01-31T12:00:00.000Z"))

    code, out, _ = run("jobs", "show", "j1")

    assert code == 0
    said = (
        "Job j1",
        "failed",
        "more than 5 rows failed",
        "40 done, 10 failed, of 100",
        "5 rows/s",
        "s3://b/in",
        "2026-",
    )
    assert [text for text in said if text not in out] == []
    assert json.loads(run("jobs", "show", "j1", "--json")[1])["state"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "answers", "path", "said"),
    [
        (["cancel", "j1"], [job("cancelling")], "POST /v1/jobs/j1/cancel", "job j1: cancelling"),
        (["resume", "j1"], [job("planning")], "POST /v1/jobs/j1/resume", "job j1: planning"),
        (["resume", "j1", "-w"], [job("planning"), job("completed")], "POST /v1/jobs/j1/resume", "job j1: completed"),
        (["resume", "j1", "--error-threshold", "-1"], [job("planning")], "POST /v1/jobs/j1/resume", "job j1: planning"),
        (["wait", "j1"], [job("completed")], "GET /v1/jobs/j1", "job j1: completed"),
        (["delete", "j1"], [httpx.Response(204)], "DELETE /v1/jobs/j1", "job j1 deleted; its output is kept"),
        (
            ["logs", "j1"],
            [reply(200, log=[{"at": "2026-01-31T12:00:00.000Z", "text": "planned"}])],
            "GET /v1/jobs/j1/log",
            "2026-01-31T12:00:00.000Z  planned",
        ),
        (
            ["preview", "j1", "--of", "failed", "--rows", "3"],
            [reply(200, of="failed", file="s3://o/a", columns=[{"name": "c, d", "type": "x"}], rows=[[None], ["7"]])],
            "GET /v1/jobs/j1/preview?of=failed&rows=3",
            "s3://o/a",
        ),
        (["preview", "j1"], [reply(200, of="output")], "GET /v1/jobs/j1/preview?of=output&rows=20", "no such row"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and isinstance(value[0], str) else "",
)
def test_jobs_are_changed(gateway: Talk, arguments: list[str], answers: list[Scripted], path: str, said: str) -> None:
    """Each command asks its route and says what came of it; as JSON, too."""
    server = gateway(*answers)
    code, out, _ = run("jobs", *arguments)
    gateway(*answers)
    json_code, as_json, _ = run("jobs", *arguments, "--json")

    assert (code, json_code) == (0, 0)
    assert server.paths[0] == path
    assert said in out
    assert json.loads(as_json)


@pytest.mark.parametrize("command", ["show", "wait", "cancel", "resume", "delete", "logs", "preview"])
def test_a_job_that_is_not_there(gateway: Talk, command: str) -> None:
    """The server's text, and 2."""
    gateway(reply(404, error="job 'j1' is not known"))

    code, out, err = run("jobs", command, "j1")

    assert (code, out) == (64, "")
    assert "job 'j1' is not known" in err
