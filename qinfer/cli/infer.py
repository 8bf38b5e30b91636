"""`qinfer infer` and `qinfer bench`: one inference request, and a quick load test, from the command line."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from qinfer.cli.console import (
    DEFAULT_URL,
    JsonOption,
    ModelArgument,
    Options,
    UrlOption,
    facts,
    gateway_client,
    option,
    show,
    table,
    with_options,
)

if TYPE_CHECKING:
    from qinfer.cli.client import GatewayClient
    from qinfer.cli.load import Load, LoadReport, LoadTarget
    from qinfer.cli.request_data import DataRequest
    from qinfer.client import InferResult
    from qinfer.core.messages import Scalar
    from qinfer.tensors import Tensor


class RepeatedCall(TypedDict):
    """The arguments of a call that a load test repeats."""

    model: str
    inputs: "dict[str, Tensor]"
    version: int
    parameters: "Mapping[str, Scalar]"


INFER_EXAMPLE = "Example: qinfer infer digits --input image=digit.npy   or   --input 'x=[[1.0, 2.0]]'"


def infer(
    model: ModelArgument,
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            help="name=VALUE, where VALUE is a .npy file, a .json file, JSON text, or zeros; once per input.",
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    version: Annotated[int, typer.Option(min=0, help="The version; 0 is the highest ready one.")] = 0,
    outputs: Annotated[
        list[str] | None, typer.Option("--output", "-o", help="An output to return; default: all.")
    ] = None,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Print each response of a decoupled model as it comes; JSON in a line each."),
    ] = False,
    sequence_id: Annotated[
        str, typer.Option("--sequence-id", help="The sequence of a stateful model; decimal digits are a number.")
    ] = "",
    sequence_start: Annotated[bool, typer.Option("--sequence-start", help="The first step of the sequence.")] = False,
    sequence_end: Annotated[bool, typer.Option("--sequence-end", help="The last step of the sequence.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run one inference: send tensors, print the response.

    Datatypes come from the model's metadata, and a missing batch dimension is added. One number (x=3) gets all
    dimensions of an input with one element.
    """
    from qinfer.cli.client import read_inputs, read_sequence

    parameters = read_sequence(sequence_id, start=sequence_start, end=sequence_end)

    with gateway_client(url) as client:
        metadata = client.metadata(model, version)
        tensors = read_inputs(inputs or [], metadata.inputs, model)
        by_name = {t.name: t for t in tensors}
        if stream:
            for answer in client.infer_stream(model, by_name, version=version, outputs=outputs, parameters=parameters):
                _print(answer, as_json=as_json)
            return
        answer = client.infer(model, by_name, version=version, outputs=outputs, parameters=parameters)
    _print(answer, as_json=as_json)


def _print(answer: "InferResult", *, as_json: bool) -> None:
    import numpy as np

    from qinfer.cli.client import as_json_object
    from qinfer.tensors import to_numpy

    rows = [
        (
            one.name,
            one.datatype,
            str(list(one.shape)),
            np.array2string(to_numpy(one), threshold=64, precision=6, suppress_small=True),
        )
        for one in answer.tensors
    ]
    title = f"{answer.model} version {answer.version}"
    show(
        as_json_object(answer) if as_json else None,
        lambda: table(title, "output, datatype, shape, value", rows),
        as_json=as_json,
    )


BENCH_EXAMPLE = "Example: qinfer bench digits --concurrency 64 --duration 10"


MOST_RATE = 1_000_000
"""The most arrivals a second."""
BENCH_OPTIONS: Options = {
    "url": (UrlOption, DEFAULT_URL),
    "concurrency": option(int, 64, "Connections.", "--concurrency", "-c", min=1, max=10_000),
    "duration": option(float, 10.0, "Seconds.", "--duration", "-d", min=0.1),
    "binary": option(bool, True, "Send tensors as binary, or all as JSON.", "--binary/--json-body"),
    "inputs": option(
        list[str] | None, None, "name=VALUE as in `qinfer infer`; default: one item of random data.", "--input", "-i"
    ),
    "version": option(int, 0, "The version; 0 is the highest ready one.", min=0),
    "streaming": option(
        bool, False, "Stream the responses; report the times to the first, and between two.", "--streaming"
    ),
    "sequences": option(
        int, 0, "Sequences of a stateful model open at a time, a connection for each.", min=0, max=10_000
    ),
    "per_sequence": option(int, 20, "Steps from START to END.", "--steps-per-sequence", min=1),
    "data": option(
        Path | None,
        None,
        "Requests to send in turn: .jsonl, .parquet, or the .json of perf_analyzer's --input-data.",
    ),
    "rate": option(
        float,
        0.0,
        "Requests a second that arrive at random, whether or not others are answered.",
        min=0,
        max=MOST_RATE,
    ),
    "arrivals": option(
        Path | None,
        None,
        "Instead of --rate: a file with seconds between two arrivals, a number a line; it repeats. trace: as recorded.",
    ),
    "deadline_ms": option(float, 0.0, "Report the goodput, too: answers a second within the deadline.", min=0),
}


@with_options(BENCH_OPTIONS)
def bench(model: ModelArgument, *, as_json: JsonOption = False, **given: Any) -> None:
    """Load-test a model: one request after another on each connection. Ctrl-C prints the result so far.

    With --sequences, each connection sends the steps of one sequence after another. With --rate or --arrivals,
    latencies count from a request's arrival. The client runs in one Python process: beyond about 20,000 requests per
    second the client is the bottleneck.
    """
    from qinfer.cli.load import LoadReport, batch_counts, mean_batch, run_load
    from qinfer.cli.request_data import requests_of

    _check_kinds(given)
    sequences, streaming = given["sequences"], given["streaming"]
    with gateway_client(given["url"]) as client:
        each = requests_of(client, model, given["version"], given["inputs"], given["data"])
        asked = [_call(model, given["version"], one) for one in each]
        gaps_s = _gaps(given, each)
        _ask_once(client, asked[0], streaming=streaming, is_stateful=sequences > 0)
        encoders = [_encoder(given["url"], one, binary=given["binary"], streaming=streaming) for one in asked]
        load = _load_of(encoders, given, gaps_s)._replace(watch=None if as_json else _bar(given["duration"]))
        before = batch_counts(client.metrics(), model)
        report = LoadReport(sequences or given["concurrency"], given["deadline_ms"] / 1000 or math.inf)
        run_load(encoders[0]({}), report, given["duration"], load)
        report.mean_batch = mean_batch(before, batch_counts(client.metrics(), model))
    title = f"{model}, {report.concurrency} connections, {report.duration_s:.1f} s"
    show(report.as_json(), lambda: facts(title, _report_facts(report)), as_json=as_json)
    if report.errors or not report.latencies_s:
        raise typer.Exit(1)


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Refuses options that exclude one another."""
    if given["streaming"] and given["sequences"]:
        raise typer.BadParameter("give this or --streaming, not both", param_hint="--sequences")
    if (given["rate"] or given["arrivals"]) and (given["streaming"] or given["sequences"]):
        raise typer.BadParameter("give this without --streaming and --sequences", param_hint="--rate, --arrivals")
    if given["rate"] and given["arrivals"]:
        raise typer.BadParameter("give this or --rate, not both", param_hint="--arrivals")
    if given["data"] and (given["inputs"] or given["sequences"]):
        raise typer.BadParameter("give this without --input and --sequences", param_hint="--data")


def _call(model: str, version: int, one: "DataRequest") -> RepeatedCall:
    inputs = {tensor.name: tensor for tensor in one.tensors}
    return {"model": model, "inputs": inputs, "version": version, "parameters": one.parameters}


def _ask_once(client: "GatewayClient", asked: RepeatedCall, *, streaming: bool, is_stateful: bool) -> None:
    if streaming:
        for _ in client.infer_stream(**asked):
            pass
    elif is_stateful:
        client.sequence(asked["model"], version=asked["version"]).infer(asked["inputs"], end=True)
    else:
        client.infer(**asked)


def _encoder(
    url: str, asked: RepeatedCall, *, binary: bool, streaming: bool
) -> "Callable[[Mapping[str, Scalar]], LoadTarget]":
    from qinfer.cli.client import api_key
    from qinfer.cli.load import LoadTarget
    from qinfer.client.model_flows import model_path
    from qinfer.wire.kserve_client import encode_request

    api, call = ("v1", "infer_stream") if streaming else ("v2", "infer")
    path = f"{model_path(asked['model'], asked['version'], api)}/{call}"

    def encode(parameters: "Mapping[str, Scalar]") -> LoadTarget:
        tensors, parameters = list(asked["inputs"].values()), {**asked["parameters"], **parameters}
        body, json_length = encode_request(tensors, parameters=parameters, binary=binary)
        return LoadTarget.for_url(url, path, body, json_length if binary else None, api_key())

    return encode


def _load_of(
    encoders: "Sequence[Callable[[Mapping[str, Scalar]], LoadTarget]]",
    given: Mapping[str, Any],
    gaps_s: "Iterator[float] | None",
) -> "Load":
    from qinfer.cli.load import (
        Arrivals,
        Load,
        LoadConnection,
        OpenConnection,
        SequenceConnection,
        StepRequests,
        StreamConnection,
    )

    if given["sequences"]:
        steps = StepRequests(lambda parameters: encoders[0](parameters).request, given["per_sequence"])
        return Load(partial(SequenceConnection, steps))
    following = cycle([encode({}).request for encode in encoders]).__next__
    if gaps_s is not None:
        arriving = Arrivals(gaps_s)
        return Load(partial(OpenConnection, following, arriving.free), arriving)
    return Load(partial(StreamConnection if given["streaming"] else LoadConnection, following))


def _gaps(given: Mapping[str, Any], requests: "Sequence[DataRequest]") -> "Iterator[float] | None":
    """Returns the seconds between two arrivals; `None` = a request follows an answer."""
    from qinfer.cli.load import poisson
    from qinfer.cli.request_data import gaps_of

    if given["rate"]:
        return poisson(given["rate"])
    path: Path | None = given["arrivals"]
    if path is None:
        return None
    return cycle(gaps_of(requests, given["data"]) if path == Path("trace") else _read_gaps(path))


def _read_gaps(path: Path) -> list[float]:
    from qinfer.errors import InvalidRequest

    try:
        found = [float(line) for line in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} has no number of seconds in each line: {error}") from None
    if not all(0 <= gap < math.inf for gap in found) or not sum(found):
        raise InvalidRequest(f"{path} has no seconds above 0, or some that are negative or infinite")
    if sum(found) * MOST_RATE < len(found):
        raise InvalidRequest(f"{path} has more than {MOST_RATE:,} arrivals a second")
    return found


def _bar(duration_s: float) -> "Callable[[LoadReport], None] | None":
    """Returns what draws the progress and the present rate on a terminal."""
    if not sys.stderr.isatty():
        return None
    last = [0.0, 0]

    def draw(report: "LoadReport") -> None:
        answered = len(report.latencies_s)
        rate = (answered - last[1]) / max(report.duration_s - last[0], 1e-9)
        last[:] = [report.duration_s, answered]
        done = min(report.duration_s / duration_s, 1.0)
        text = f"{'━' * int(30 * done):<30} {done:4.0%} {rate:10,.0f}/s  {report.errors} errors"
        print("\r\033[K" if done >= 1.0 else f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return draw


def _report_facts(report: "LoadReport") -> "dict[str, object]":
    from qinfer.cli.load import histogram, percentile

    unit = "requests" if report.sequences_ended is None else "steps"
    found: dict[str, object] = {unit: len(report.latencies_s), "errors": report.errors}
    found[f"{unit} per second"] = f"{report.requests_per_s:,.0f}"
    found |= {f"p{percent}": f"{report.percentile_s(percent) * 1000:.2f} ms" for percent in (50, 95, 99)}
    found["longest"] = f"{report.percentile_s(100) * 1000:.2f} ms"
    if report.first_s is not None:
        found["responses per second"] = f"{report.responses_per_s:,.0f}"
        for name, times_s in (("first response", report.first_s), ("between responses", report.between_s)):
            for percent in (50, 99):
                found[f"{name}, p{percent}"] = f"{percentile(times_s, percent) * 1000:.2f} ms"
    if report.sequences_ended is not None:
        found |= {"sequences ended": report.sequences_ended, "sequences lost": report.sequences_lost}
    if not math.isinf(report.deadline_s):
        found[f"within {report.deadline_s * 1000:g} ms, per second"] = f"{report.goodput_per_s:,.0f}"
    bars = histogram(report.latencies_s)
    most = max((count for _, count in bars), default=1)
    for bound_s, count in bars:
        found[f"up to {bound_s * 1000:g} ms"] = f"{'▇' * round(30 * count / most):<30} {count:,}"
    found["mean batch"] = "unknown" if report.mean_batch is None else f"{report.mean_batch:.1f}"
    return found | ({"first error": report.first_error} if report.first_error else {})
