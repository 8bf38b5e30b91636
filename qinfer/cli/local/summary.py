"""The summary that `qinfer up` prints once the models are loaded or failed: URLs, models, an example, how to stop."""

import json
import shlex
from typing import Any

from rich.console import Console
from rich.text import Text

from qinfer import __version__
from qinfer.cli.inputs import concrete, zeros
from qinfer.cli.overview import ModelRow, Overview
from qinfer.client import ModelMetadata, TensorMetadata
from qinfer.client.flows import model_path
from qinfer.models.state import State
from qinfer.tensors import element_count

INLINE_ELEMENTS = 16
"""Larger example tensors are made by a shell pipe instead of being written out."""


def print_summary(
    console: Console,
    *,
    url: str,
    data: str,
    workers: str,
    overview: Overview,
    example: ModelMetadata | None,
    grpc: str = "",
    metrics: str = "",
    jobs: str = "",
) -> None:
    """Prints the summary.

    Args:
        console: The console.
        url: The gateway's URL.
        data: Where the queue is kept, in words.
        workers: The number of workers, in words.
        overview: The models and their state.
        example: A READY model for the example of a request.
        grpc: The address of gRPC; empty = off.
        metrics: The URL of the metrics' own port; empty = off.
        jobs: The state of bulk jobs, in words; empty = no line about them.
    """
    ready = sum(model.state is State.READY for model in overview.models)
    others = len(overview.models) - ready
    state = ("is ready", "") if not others else (f"is running; models that are not ready: {others}", "yellow")
    lines = [
        Text.assemble(("qinfer", "bold"), f" {__version__} ", state),
        Text(),
        _fact("URL", (url, "bold cyan"), ("   /docs and /metrics too", "dim")),
        *([_fact("gRPC", (grpc, "cyan"))] if grpc else []),
        *([_fact("Metrics", (metrics, "cyan"))] if metrics else []),
        _fact("Models", f"{ready} of {len(overview.models)} ready" if overview.models else "none are to be loaded"),
        *(_fact("", *_model(model)) for model in overview.models),
        _fact("Workers", workers),
        *([_fact("Jobs", jobs)] if jobs else []),
        _fact("Data", data),
        _fact("Stop", "Ctrl-C", ("   answers what was accepted first; twice: at once", "dim")),
    ]
    if example is not None:
        lines += [Text(), _fact("Try", (example_line(url, example), "green"))]
    console.print()
    for line in lines:
        # A command that is cut into lines can't be pasted.
        console.print(Text("  ") + line, soft_wrap=True)
    console.print()


def example_line(url: str, model: ModelMetadata) -> str:
    """Returns a short shell line that sends zeros to a model, whatever the size of its inputs."""
    # JSON can't carry these datatypes.
    if any(i.datatype in {"FP16", "BF16"} for i in model.inputs):
        inputs = " ".join(f"--input {shlex.quote(i.name)}=zeros" for i in model.inputs)
        return f"qinfer infer {shlex.quote(model.name)} --url {url} {inputs}"
    body = shlex.quote(json.dumps({"inputs": [_input(i) for i in model.inputs]}))
    for tensor in model.inputs:
        count = element_count(concrete(tensor.shape))
        body = body.replace(f'"{_placeholder(count)}"', f"['$(yes 0 | head -n {count} | paste -sd, -)']")
    return f"curl -s {url}{model_path(model.name)}/infer -d {body}"


def _fact(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<9}", "dim"), *parts)


def _model(model: ModelRow) -> tuple[str | tuple[str, str], ...]:
    style = {State.READY: "green", State.UNAVAILABLE: "red"}.get(model.state, "yellow")
    name = f"{model.name} {model.version or ''}".rstrip()
    return f"{name:<24} ", (f"{model.state.value:<12}", style), model.reason


def _input(tensor: TensorMetadata) -> dict[str, Any]:
    shape = concrete(tensor.shape)
    count = element_count(shape)
    data: object = _placeholder(count)
    if tensor.datatype == "BYTES":
        data = [""] * count
    elif count <= INLINE_ELEMENTS:
        data = zeros(tensor.datatype, shape).ravel().tolist()
    return {"name": tensor.name, "shape": list(shape), "datatype": tensor.datatype, "data": data}


def _placeholder(count: int) -> str:
    return f"@zeros:{count}@"
