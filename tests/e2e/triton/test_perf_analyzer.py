"""NVIDIA's `perf_analyzer`, unchanged, against the whole server: it ends well, and reads the server's statistics.

It measures window by window until three of them agree, however many that takes on a busy machine. The load is tiny, and
what it measures is not judged.
"""

import csv
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import Stack, clean_environment, running
from tests.support import decoupled_models, models, python_models, real_models
from tests.support.certificates import write_certificate
from tests.support.ensembles import chain, scale

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

_DIRECTORY = Path(__file__).parents[3] / ".venv" / "tools" / "perf_analyzer"
_MEASURE = ("--measurement-mode", "count_windows", "--measurement-request-count", "50", "-s", "150", "-r", "100")
SERVER = ("Server Queue", "Server Compute Input", "Server Compute Infer")
"""Columns of the server's statistics; there is `Server Compute Output` too, which rounds to 0 µs for a small model."""
CALLER = python_models.execute(
    """responses = []
for request in requests:
    inputs = [pb_utils.Tensor(name, x(request)) for name in "ab"]
    call = pb_utils.InferenceRequest(model_name="add_sub", requested_output_names=["sum"], inputs=inputs)
    responses.append(reply(pb_utils.get_output_tensor_by_name(call.exec(), "sum").as_numpy()))
return responses"""
)


@pytest.fixture(scope="module")
def analyzer() -> Path:
    binary = _DIRECTORY / "perf_analyzer"
    if not binary.exists():
        pytest.skip("no perf_analyzer in .venv/tools: `scripts/tools` fetches it")
    return binary


@pytest.fixture(scope="module")
def stack(analyzer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    real_models.build_digits(repository)
    models.add_sub(repository)
    models.add_sub(repository, "unbatched", max_batch_size=0)
    models.greet(repository)
    models.identity(repository, "FP16")
    python_models.write_model(repository, python_models.ECHO, "echo")
    models.accumulator(repository, "oldest", strategy=models.OLDEST)
    models.accumulator(repository, "direct", controls=True)
    models.accumulator(repository, "plain")
    python_models.write_accumulator(repository, "explicit")
    python_models.write_model(repository, CALLER, "caller", dims=4)
    decoupled_models.write_examples(repository)
    scale(repository, "twice", 2.0)
    scale(repository, "thrice", 3.0)
    chain(repository, "inner", "twice", "thrice")
    chain(repository, "outer", "inner", "twice")
    directory = tmp_path_factory.mktemp("up")
    settings = {"QINFER_ALLOW_CLIENT_SHM": "true", "QINFER_TRACE__FILE": str(directory / "trace")}
    with running(repository, directory, **settings) as stack:
        yield stack


def measure(analyzer: Path, stack: Stack, report: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    protocol = options[options.index("-i") + 1]
    address = stack.address if protocol == "http" else stack.grpc_address
    command = [str(analyzer), *_MEASURE, "-u", address, "-f", str(report), *options]
    environment = clean_environment() | {"LD_LIBRARY_PATH": os.fspath(_DIRECTORY)}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=170, env=environment)


@pytest.mark.parametrize(
    "options",
    [
        "-m digits -i http --concurrency-range 4",
        "-m digits -i http -a --concurrency-range 4 -b 8",
        "-m digits -i grpc --concurrency-range 4",
        "-m digits -i grpc -a --concurrency-range 4",
        "-m add_sub -x 1 -i grpc -a --streaming --percentile=95",
        "-m add_sub -i http --input-tensor-format json --output-tensor-format json --percentile=95",
        "-m add_sub -i http --shared-memory system",
        "-m unbatched -i grpc --shared-memory system -a --streaming",
        "-m unbatched -i http -a --request-rate-range 50 --measurement-request-count 20",
        "-m greet -i http --shape greeting:3 --shape name:3 --string-length 8",
        "-m identity_fp16 -i grpc --shape x:5 -b 3 --grpc-compression-algorithm gzip",
        "-m echo -i http --shape x:7",
        "-m add_sub -i grpc --grpc-compression-algorithm deflate --percentile=95",
        "-m add_sub -i grpc --request-rate-range 50 --request-distribution poisson --measurement-request-count 20",
        "-m add_sub -i grpc -a --request-intervals {intervals} --measurement-request-count 20",
        "-m add_sub -i grpc --input-data {data}",
        "-m add_sub -i grpc -a --concurrency-range 2 --max-threads 1 --request-parameter a:1:int",
        "-m add_sub -i grpc --request-count 60",
        "-m add_sub -i http -a --input-tensor-format json --output-tensor-format binary",
        "-m add_sub -i http --output-tensor-format json --request-rate-range 50 --measurement-request-count 20",
        "-m add_sub -i http --request-intervals {intervals} --measurement-request-count 20",
        "-m add_sub -i http -a --shared-memory system --output-shared-memory-size 4096",
        "-m add_sub -i grpc --shared-memory system",
        "-m greet -i grpc --shape greeting:2 --shape name:2 --string-data hello",
        "-m add_sub -i grpc --sync --input-data zero --measurement-mode time_windows -p 500",
        "-m add_sub -i http --input-data {directory} -H accept-language:en -v",
        "-m add_sub -i grpc -a --streaming --request-rate-range 50 --measurement-request-count 20",
        "-m add_sub -i http --trace-level TIMESTAMPS --trace-rate 10 --trace-count 5 --log-frequency 5",
        "-m add_sub -i grpc --collect-metrics --metrics-url {metrics} --metrics-interval 100 --verbose-csv",
    ],
)
def test_it_measures(analyzer: Path, stack: Stack, tmp_path: Path, options: str) -> None:
    """It ends with a stable result, whose throughput, latency and server columns are not zero."""
    report, intervals, data = tmp_path / "report.csv", tmp_path / "intervals", tmp_path / "data.json"
    intervals.write_text("10000\n20000\n30000\n")
    data.write_text(json.dumps({"data": [{name: [1.0, 2.0, 3.0, 4.0] for name in "ab"}] * 3}))
    directory = tmp_path / "data"
    directory.mkdir()
    for name in "ab":
        (directory / name).write_bytes(np.arange(4, dtype=np.float32).tobytes())
    places = {"intervals": intervals, "data": data, "directory": directory, "metrics": f"{stack.address}/metrics"}

    finished = measure(analyzer, stack, report, *options.format_map(places).split())

    assert finished.returncode == 0, finished.stdout + finished.stderr
    (row,) = csv.DictReader(report.read_text().splitlines())
    assert float(row["Inferences/Second"]) > 0
    assert int(row["p95 latency"]) > 0
    assert {column: int(row[column]) for column in SERVER if int(row[column]) == 0} == {}, row
    if "digits" in options:
        assert int(row["Server Compute Output"]) > 0, row
    assert f"Batch size: {8 if '-b 8' in options else 3 if '-b 3' in options else 1}" in finished.stdout


@pytest.mark.parametrize("options", ["-m outer -i http --concurrency-range 2", "-m outer -i grpc -a"])
def test_it_prints_the_composing_models_of_an_ensemble(
    analyzer: Path, stack: Stack, tmp_path: Path, options: str
) -> None:
    """Each with statistics of its own, those of the ensemble within the ensemble, too; what runs twice counts twice."""
    finished = measure(analyzer, stack, tmp_path / "report.csv", *options.split())

    assert finished.returncode == 0, finished.stdout + finished.stderr
    counts: dict[str, int] = {"outer": 0}
    name = "outer"
    for line in finished.stdout.splitlines():
        if line.endswith(", version: 1"):
            name = line.strip().removesuffix(", version: 1")
        elif "Successful request count: " in line:
            counts[name] = int(line.rpartition(" ")[2])
    assert counts.keys() == {"outer", "inner", "twice", "thrice"}, finished.stdout
    assert counts["outer"] > 0
    # Windows of measurement end while requests are under way.
    assert counts["inner"] == pytest.approx(counts["outer"], rel=0.1)
    assert counts["thrice"] == pytest.approx(counts["outer"], rel=0.1)
    assert counts["twice"] == pytest.approx(2 * counts["outer"], rel=0.1)


@pytest.mark.parametrize(
    "options",
    [
        "-m oldest -i http --concurrency-range 3",
        "-m direct -i http -a --concurrency-range 6",
        "-m oldest -i grpc --concurrency-range 3 --sequence-length-variation 80",
        "-m direct -i grpc -a --concurrency-range 3 --sequence-id-range 1:50",
        "-m explicit -i grpc -a --streaming --concurrency-range 3",
        "-m explicit -i http -a --request-rate-range 50 --num-of-sequences 3",
        "-m oldest -i grpc -a --streaming --request-rate-range 50 --num-of-sequences 3 --serial-sequences",
    ],
)
def test_it_measures_sequences(analyzer: Path, stack: Stack, tmp_path: Path, options: str) -> None:
    """Those that it has open at the end it ends itself: no request fails."""
    report = tmp_path / "report.csv"
    fewer = ("--measurement-request-count", "20") if "rate" in options else ()

    finished = measure(analyzer, stack, report, *options.split(), "--sequence-length", "5", *fewer)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "error" not in finished.stdout + finished.stderr
    (row,) = csv.DictReader(report.read_text().splitlines())
    assert float(row["Inferences/Second"]) > 0
    assert {column: int(row[column]) for column in SERVER if int(row[column]) == 0} == {}, row


@pytest.mark.parametrize("options", ["-m oldest -i http", "-m plain -i grpc -a --streaming", "-m explicit -i grpc"])
def test_it_checks_the_sums_of_sequences(analyzer: Path, stack: Stack, tmp_path: Path, options: str) -> None:
    """It ends badly at the first output that is not what the data says.

    At its own end it breaks off sequences that are open, with their last step: it calls those outputs wrong, and
    ends well.
    """
    x, y = ("x", "y") if "explicit" in options else ("INPUT", "OUTPUT")
    numbers, sums = [[1.0, 2.0, 3.0], [10.0, 20.0]], [[1.0, 3.0, 6.0], [10.0, 30.0]]
    outcomes = []
    for name, expected in (("right", sums), ("wrong", [[1.0, 3.0, 7.0], [10.0, 30.0]])):
        path = tmp_path / name
        path.write_text(json.dumps({"data": streams(x, numbers), "validation_data": streams(y, expected)}))
        command = f"{options} --concurrency-range 3 --input-data {path}"
        outcomes.append(measure(analyzer, stack, tmp_path / "report", *command.split()))

    right, wrong = outcomes
    assert right.returncode == 0, right.stdout + right.stderr
    assert wrong.returncode != 0
    assert "Output doesn't match expected output" in wrong.stderr


def streams(name: str, sequences: Sequence[Sequence[float]]) -> list[list[dict[str, list[float]]]]:
    """Writes sequences as its input files have them."""
    return [[{name: [number]} for number in numbers] for numbers in sequences]


@pytest.mark.parametrize(("model", "responses"), [("repeat_int32", 3), ("square_int32", 4)])
def test_it_measures_decoupled_models(analyzer: Path, stack: Stack, tmp_path: Path, model: str, responses: int) -> None:
    """It counts their responses, too: each request has several."""
    report, data = tmp_path / "report.csv", tmp_path / "data.json"
    three = {"IN": {"content": [4, 5, 6], "shape": [3]}, "DELAY": {"content": [0, 0, 0], "shape": [3]}, "WAIT": [0]}
    data.write_text(json.dumps({"data": [three if model == "repeat_int32" else {"IN": [4]}]}))

    options = f"-m {model} -i grpc -a --streaming --concurrency-range 2 --input-data {data}"
    finished = measure(analyzer, stack, report, *options.split())

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "error" not in finished.stdout + finished.stderr
    (row,) = csv.DictReader(report.read_text().splitlines())
    assert float(row["Response Throughput"]) == pytest.approx(responses * float(row["Inferences/Second"]), rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("search", ["--concurrency-range 1:3", "--concurrency-range 1:4 --binary-search -l 2000"])
def test_it_searches(analyzer: Path, stack: Stack, tmp_path: Path, search: str) -> None:
    """Several loads after one another; the report has a line for each."""
    report = tmp_path / "report.csv"

    finished = measure(analyzer, stack, report, *f"-m add_sub -i grpc {search}".split())

    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = list(csv.DictReader(report.read_text().splitlines()))
    assert len(rows) > 1
    assert all(float(row["Inferences/Second"]) > 0 for row in rows)


@pytest.mark.long
def test_it_measures_over_tls(analyzer: Path, tmp_path: Path) -> None:
    """Over gRPC with certificates of both sides, also on a stream."""
    authority = write_certificate(tmp_path, "ca")
    for name in ("server", "client"):
        write_certificate(tmp_path, name, authority)
    settings = {"CERTFILE": "server.pem", "KEYFILE": "server.key", "CLIENT_CA_FILE": "ca.pem"}
    environment = {f"QINFER_GRPC__TLS_{name}": str(tmp_path / file) for name, file in settings.items()}
    environment |= {f"QINFER_HTTP__TLS_{name}": str(tmp_path / settings[name]) for name in ("CERTFILE", "KEYFILE")}
    files = {"root-certifications": "ca.pem", "private-key": "client.key", "certificate-chain": "client.pem"}
    options = [part for name, file in files.items() for part in (f"--ssl-grpc-{name}-file", str(tmp_path / file))]
    models.add_sub(tmp_path / "models")

    checked = ("--ssl-https-verify-peer", "1", "--ssl-https-verify-host", "2")
    authorities = ("--ssl-https-ca-certificates-file", str(tmp_path / "ca.pem"))

    with running(tmp_path / "models", tmp_path, **environment) as stack:
        grpc = ("-i", "grpc", "--ssl-grpc-use-ssl", *options)
        https = ("-i", "http", "-u", f"https://{stack.address}", *checked, *authorities)
        for protocol in (grpc, (*grpc, "-a", "--streaming"), https):
            finished = measure(analyzer, stack, tmp_path / "report", "-m", "add_sub", *protocol)
            assert finished.returncode == 0, finished.stdout + finished.stderr


def test_it_prints_the_models_that_a_model_calls(analyzer: Path, stack: Stack, tmp_path: Path) -> None:
    finished = measure(
        analyzer, stack, tmp_path / "report.csv", *["-m", "caller", "-i", "grpc", "--bls-composing-models", "add_sub"]
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    _, composing, counts = finished.stdout.partition("Composing models:")
    assert composing, finished.stdout
    assert "add_sub, version: 1" in counts
    assert int(counts.partition("Successful request count: ")[2].split()[0]) > 0


def test_it_exports_a_profile(analyzer: Path, stack: Stack, tmp_path: Path) -> None:
    """Each request with its begin and that of its response."""
    export = tmp_path / "profile.json"

    options = f"-m add_sub -i http --concurrency-range 2 --profile-export-file {export}"
    finished = measure(analyzer, stack, tmp_path / "report.csv", *options.split())

    assert finished.returncode == 0, finished.stdout + finished.stderr
    (experiment,) = json.loads(export.read_text())["experiments"]
    assert experiment["requests"]
    assert all(len(request["response_timestamps"]) == 1 for request in experiment["requests"])


def test_it_adds_requests_in_periods(analyzer: Path, stack: Stack, tmp_path: Path) -> None:
    """One more at every second response to the ones before; each has all its responses, and the empty last one."""
    export, data = tmp_path / "profile.json", tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{"IN": [6]}]}))
    periods = f"--periodic-concurrency-range 1:4:1 --request-period 2 --profile-export-file {export}"

    options = f"-m square_int32 -i grpc -a --streaming --input-data {data} {periods}"
    finished = measure(analyzer, stack, tmp_path / "report.csv", *options.split())

    assert finished.returncode == 0, finished.stdout + finished.stderr
    (experiment,) = json.loads(export.read_text())["experiments"]
    assert [len(request["response_timestamps"]) for request in experiment["requests"]] == [7] * 4


def test_it_is_told_what_is_wrong(analyzer: Path, stack: Stack, tmp_path: Path) -> None:
    """An unknown model, and a batch that is too large, in the server's own words."""
    unknown = measure(analyzer, stack, tmp_path / "a", "-m", "nothing", "-i", "grpc")
    large = measure(analyzer, stack, tmp_path / "b", "-m", "add_sub", "-i", "http", "-b", "9")

    assert unknown.returncode != 0
    assert "Request for unknown model: 'nothing' is not found" in unknown.stdout + unknown.stderr
    assert large.returncode != 0
    assert "inference request batch-size must be <= 8 for 'add_sub'" in large.stdout + large.stderr
