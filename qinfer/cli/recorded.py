"""`qinfer record`: writes real requests for a model into a file for `qinfer bench` and `qinfer analyze`.

.parquet    a column for each input as nested lists of its datatype, the arrival in milliseconds and the parameters
.json       the form of perf_analyzer's `--input-data`; arrivals and parameters are lists beside `data`
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.console import DEFAULT_URL, CommandFailed, JsonOption, ModelArgument, UrlOption, gateway_client, show

if TYPE_CHECKING:
    from qinfer.client import RecordedRequest, TensorMetadata
    from qinfer.tensors import Tensor

EXAMPLE = "Example: qinfer record digits requests.parquet -n 1000 --seconds 60"
ARRIVAL, PARAMETERS = "qinfer.arrival_ms", "qinfer.parameters"
"""Columns beside those of the inputs; the parameters are a JSON object."""

ARRIVALS_OF_JSON, PARAMETERS_OF_JSON = "arrivals_ms", "parameters"
"""Lists beside `data` in JSON."""

PIECE = 256
"""Requests that are written together."""

Write = Callable[[Sequence["RecordedRequest"]], None]


def record(
    model: ModelArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file; its name ends with .parquet or .json.")],
    *,
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=1, max=100_000, help="End after so many requests.")
    ] = 1000,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=3600, help="End after so many seconds.")] = 60.0,
    megabytes: Annotated[int, typer.Option("--mib", min=1, max=256, help="End after so many MiB of requests.")] = 64,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Record the requests for a model that arrive at any gateway while the command runs; Ctrl-C ends it.

    The file has inputs, parameters and times of arrival, and no headers, keys, tenants or ids. Needs a key with the
    scope `admin`. Requests above 4 MiB are left out.
    """
    if file.suffix not in (".parquet", ".json"):
        raise typer.BadParameter(f"{file} ends with neither .parquet nor .json", param_hint="FILE")
    written, dropped, last_ms = 0, [0], 0.0

    with gateway_client(url) as client, opened_writer(file, client.metadata(model).inputs) as write:
        found = client.record(
            model,
            requests=requests,
            max_bytes=megabytes * 2**20,
            duration_s=seconds,
            on_page=lambda page: dropped.append(page.dropped),
        )
        piece: list[RecordedRequest] = []
        try:
            with closing(found):
                for one in found:
                    piece.append(one)
                    last_ms = max(last_ms, one.arrival_ms)
                    if len(piece) == PIECE:
                        write(piece)
                        written += len(piece)
                        piece.clear()
                        _tell_progress(written)
        except KeyboardInterrupt:
            _tell_progress(written + len(piece))
        write(piece)
        written += len(piece)
    about = {"file": str(file), "requests": written, "dropped": dropped[-1], "seconds": round(last_ms / 1000, 3)}
    text = f"{written} requests for {model} in {last_ms / 1000:.1f} s, in {file}"
    lost = f"; {dropped[-1]} more were too large or came too fast" if dropped[-1] else ""
    show(about, text + lost, as_json=as_json)
    if not written:
        raise CommandFailed(f"no request for {model} arrived within {seconds:g} s; give more --seconds")


def _tell_progress(written: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{written} requests …", end="", file=sys.stderr, flush=True)


@contextmanager
def opened_writer(path: Path, inputs: "Sequence[TensorMetadata]") -> "Iterator[Write]":
    """Opens the file, which gets its name when it is whole."""
    part = path.with_name(f"{path.name}.part")
    try:
        opened = part.open("wb")
    except OSError as error:
        raise CommandFailed(f"{part} can't be written: {error.strerror}; give another FILE") from None
    try:
        with opened, (_parquet if path.suffix == ".parquet" else _perf_analyzer)(opened, inputs) as write:
            yield write
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _parquet(file: IO[bytes], inputs: "Sequence[TensorMetadata]") -> "Iterator[Write]":
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    kinds = {one.name: _column_type(one) for one in inputs}
    schema = pa.schema([*kinds.items(), (ARRIVAL, pa.float64()), (PARAMETERS, pa.string())])

    def write(requests: "Sequence[RecordedRequest]") -> None:
        if not requests:
            return
        rows = [{tensor.name: tensor for tensor in one.tensors} for one in requests]
        columns = [_column([row.get(one.name) for row in rows], one) for one in inputs]
        arrivals = pa.array([one.arrival_ms for one in requests], pa.float64())
        parameters = pa.array([json.dumps(one.parameters) for one in requests], pa.string())
        writer.write_table(pa.Table.from_arrays([*columns, arrivals, parameters], schema=schema))

    with ParquetWriter(file, schema, compression="zstd") as writer:
        yield write


def _leaf_type(datatype: str) -> Any:
    import pyarrow as pa

    from qinfer.tensors import numpy_dtype

    return pa.binary() if datatype == "BYTES" else pa.from_numpy_dtype(numpy_dtype(datatype))


def _column_type(of: "TensorMetadata") -> Any:
    import pyarrow as pa

    found = _leaf_type(of.datatype)
    for _ in of.shape:
        found = pa.list_(found)
    return found


def _column(tensors: "Sequence[Tensor | None]", of: "TensorMetadata") -> Any:
    """Returns the tensors of an input as nested lists, without Python objects for numbers; null = none was sent."""
    import numpy as np
    import pyarrow as pa

    from qinfer.tensors import numpy_dtype, to_numpy

    shapes = [(0,) * len(of.shape) if one is None else one.shape for one in tensors]
    flat = [to_numpy(one).ravel() for one in tensors if one is not None]
    elements = np.concatenate(flat) if flat else np.empty(0, numpy_dtype(of.datatype))
    found = pa.array(elements, _leaf_type(of.datatype))
    for depth in reversed(range(len(of.shape))):
        lengths = [np.full(int(np.prod(shape[:depth])), shape[depth]) for shape in shapes]
        offsets = np.concatenate([[0], *lengths]).cumsum().astype(np.int32)
        mask = pa.array([one is None for one in tensors]) if depth == 0 and None in tensors else None
        found = pa.ListArray.from_arrays(pa.array(offsets), found, mask=mask)
    return found


@contextmanager
def _perf_analyzer(file: IO[bytes], inputs: "Sequence[TensorMetadata]") -> "Iterator[Write]":
    arrivals: list[float] = []
    parameters: list[dict[str, Any]] = []
    ranks = {one.name: len(one.shape) for one in inputs if one.shape and one.shape[0] == -1}
    file.write(b'{"data": [')

    def write(requests: "Sequence[RecordedRequest]") -> None:
        for one in requests:
            row = {tensor.name: _content(tensor, ranks.get(tensor.name, -1)) for tensor in one.tensors}
            file.write((",\n" if arrivals else "\n").encode() + json.dumps(row).encode())
            arrivals.append(one.arrival_ms)
            parameters.append(dict(one.parameters))

    yield write
    lists = {ARRIVALS_OF_JSON: arrivals, PARAMETERS_OF_JSON: parameters}
    file.write(b"],\n" + json.dumps(lists)[1:].encode())


def _content(tensor: "Tensor", batched_rank: int) -> dict[str, Any]:
    """Returns a tensor as perf_analyzer reads it: one item of a model with batches has no batch dimension."""
    from qinfer.tensors import to_numpy

    is_item = len(tensor.shape) == batched_rank and tensor.shape[0] == 1
    elements = to_numpy(tensor).ravel().tolist()
    if tensor.datatype == "BYTES":
        try:
            elements = [element.decode() for element in elements]
        except UnicodeDecodeError:
            raise CommandFailed(f"input '{tensor.name}' has bytes that are no UTF-8; give a FILE.parquet") from None
    return {"content": elements, "shape": list(tensor.shape[1:] if is_item else tensor.shape)}
