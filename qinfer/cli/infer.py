"""`qinfer infer`: one inference request from the command line."""

from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.console import DEFAULT_URL, JsonOption, ModelArgument, UrlOption, print_json

if TYPE_CHECKING:
    from qinfer.client import InferResult

EXAMPLE = "Example: qinfer infer digits --input image=digit.npy   or   --input 'x=[[1.0, 2.0]]'"


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
    as_json: JsonOption = False,
) -> None:
    """Run one inference: send tensors, print the response.

    Datatypes come from the model's metadata, and a missing batch dimension is added.
    """
    from qinfer.cli.client import GatewayClient, as_json_object
    from qinfer.cli.inputs import read_inputs

    with GatewayClient(url) as client:
        metadata = client.metadata(model, version)
        tensors = read_inputs(inputs or [], metadata.inputs, model)
        answer = client.infer(model, {t.name: t for t in tensors}, version=version, outputs=outputs)
    if as_json:
        print_json(as_json_object(answer))
    else:
        _print_table(answer)


def _print_table(answer: "InferResult") -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from qinfer.tensors import to_numpy

    table = Table("output", "datatype", "shape", "value", title=f"{answer.model} version {answer.version}")
    for tensor in answer.tensors:
        text = np.array2string(to_numpy(tensor), threshold=64, precision=6, suppress_small=True)
        table.add_row(Text(tensor.name), tensor.datatype, str(list(tensor.shape)), Text(text))
    Console().print(table)
