"""`qinfer example`: writes a model and inputs for it, for whoever has installed qinfer and has no model yet."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from qinfer.cli.console import CommandFailed, JsonOption, show

EXAMPLE = "Example: qinfer example digits"

_NEXT = """\
wrote {files}
serve it:  qinfer up --model-repository {models} --allow-store {folder}
then:      curl -s localhost:8000/v2/models/digits/infer -d @{request}
           qinfer submit digits {rows} {out} --column image=pixels --key id --wait"""


class Name(StrEnum):
    """The models that there are."""

    digits = "digits"


def example(
    name: Annotated[Name, typer.Argument(metavar="NAME", help="digits: a classifier of handwritten digits, in ONNX.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write.")] = Path(),
    *,
    as_json: JsonOption = False,
) -> None:
    """Write an example: a model repository with one model, a request, and rows for a bulk job.

    Below FOLDER these are models/digits, digit.json and digits.jsonl. Serving the model needs the extra `onnx`.
    """
    written = write(name, folder)
    models, request, rows = (folder / path for path in ("models", "digit.json", "digits.jsonl"))
    text = _NEXT.format(
        files=", ".join(map(str, written)), models=models, folder=folder, request=request, rows=rows, out=folder / "out"
    )
    show({"written": [str(path) for path in written]}, text, as_json=as_json)


def write(name: str, folder: Path) -> list[Path]:
    """Writes the files of an example; returns their paths.

    Raises:
        CommandFailed: A file can't be written.
    """
    source = Path(__file__).parent / name
    rows = (source / f"{name}.jsonl").read_text()
    files = {
        folder / "models" / name / "config.pbtxt": (source / "config.pbtxt").read_bytes(),
        folder / "models" / name / "1" / "model.onnx": (source / "model.onnx").read_bytes(),
        folder / "digit.json": json.dumps(_request(json.loads(rows.partition("\n")[0]))).encode(),
        folder / f"{name}.jsonl": rows.encode(),
    }
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise CommandFailed(f"the example can't be written to {folder}: {error.strerror or error}") from None
    return list(files)


def _request(row: dict[str, Any]) -> dict[str, Any]:
    image = {"name": "image", "shape": [1, len(row["pixels"])], "datatype": "FP32", "data": row["pixels"]}
    return {"inputs": [image], "outputs": [{"name": "label"}]}
