"""`qinfer example`: writes example files for new users.

`scripts/generate_example.py` makes those of `digits`; rules and dashboards of `monitoring` are links into `deploy/`.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from qinfer.cli.console import CommandFailed, JsonOption, show

EXAMPLE = "Example: qinfer example digits"

_HERE = Path(__file__).parent


class Name(StrEnum):
    """The names of the examples."""

    digits = "digits"
    monitoring = "monitoring"


_NEXT = {
    Name.digits: """\
serve it:  qinfer up --model-repository {models} --allow-store {folder}
then:      curl -s localhost:8000/v2/models/digits/infer -d @{request}
           qinfer submit digits {rows} {out} --column image=pixels --key id --wait""",
    Name.monitoring: """\
watch it:  prometheus --config.file={monitoring}/prometheus.yml --storage.tsdb.path={monitoring}/data
then:      http://localhost:9090/alerts""",
}


def example(
    name: Annotated[
        Name,
        typer.Argument(
            metavar="NAME",
            help="digits: a classifier of handwritten digits, in ONNX. monitoring: alerts for Prometheus, dashboards "
            "for Grafana.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write.")] = Path(),
    *,
    as_json: JsonOption = False,
) -> None:
    """Write an example to begin with, below FOLDER.

    digits is a model repository with one model (models/digits), a request (digit.json), and rows for a bulk job
    (digits.jsonl). Serving the model needs the extra `onnx`.

    monitoring is a configuration of Prometheus for the gateway on this machine, with alerts (monitoring/prometheus.yml,
    monitoring/rules), and dashboards of Grafana (monitoring/dashboards).
    """
    written = write(name, folder)
    paths = {
        "folder": folder,
        "models": folder / "models",
        "request": folder / "digit.json",
        "rows": folder / "digits.jsonl",
        "out": folder / "out",
        "monitoring": folder / "monitoring",
    }
    text = f"wrote {', '.join(map(str, written))}\n{_NEXT[name].format(**paths)}"
    show({"written": [str(path) for path in written]}, text, as_json=as_json)


def write(name: Name, folder: Path) -> list[Path]:
    """Writes the files of an example; returns their paths."""
    files = _digits() if name == Name.digits else _monitoring()
    written = {folder / path: content for path, content in files.items()}
    try:
        for path, content in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise CommandFailed(f"the example can't be written to {folder}: {error.strerror or error}") from None
    return list(written)


def _digits() -> Mapping[str, bytes]:
    source = _HERE / "digits"
    rows = (source / "digits.jsonl").read_text()
    return {
        "models/digits/config.pbtxt": (source / "config.pbtxt").read_bytes(),
        "models/digits/1/model.onnx": (source / "model.onnx").read_bytes(),
        "digit.json": json.dumps(_request(json.loads(rows.partition("\n")[0]))).encode(),
        "digits.jsonl": rows.encode(),
    }


def _monitoring() -> Mapping[str, bytes]:
    names = ("prometheus.yml", *(f"{kind}/*" for kind in ("rules", "dashboards")))
    found = [path for name in names for path in sorted((_HERE / "monitoring").glob(name))]
    return {str(path.relative_to(_HERE)): path.read_bytes() for path in found}


def _request(row: dict[str, Any]) -> dict[str, Any]:
    image = {"name": "image", "shape": [1, len(row["pixels"])], "datatype": "FP32", "data": row["pixels"]}
    return {"inputs": [image], "outputs": [{"name": "label"}]}
