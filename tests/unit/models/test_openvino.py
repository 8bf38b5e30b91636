"""What is read of OpenVINO's `model.xml` is what the runtime says of the same file."""

from pathlib import Path
from typing import Any

import pytest

from qinfer.core.settings import RepositorySettings
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import from_json
from qinfer.models.config.file_tensors import FileTensor, read_openvino
from qinfer.models.repository.open import open_repositories
from tests.support import models

openvino = pytest.importorskip("openvino")
opset = pytest.importorskip("openvino.opset13")

DATATYPES = {"float32": "FP32", "int64_t": "INT64", "char": "BOOL", "string": "BYTES", "float16": "FP16"}


def parameter(name: str, shape: Any, datatype: Any, *names: str) -> Any:
    node = opset.parameter(shape, datatype, name=name)
    node.output(0).get_tensor().set_names(set(names or (name,)))
    return node


def save(path: Path, *, batch: int = -1) -> Path:
    """Writes a model with an output for each input, and names that are easily mistaken."""
    shape, types = openvino.PartialShape, openvino.Type
    path.parent.mkdir(parents=True)
    inputs = [
        parameter("layer", shape([batch, 4]), types.f32, "zeta", "alpha,b"),
        parameter("ranged", shape([openvino.Dimension(1, 9), 3]), types.boolean),
        parameter("text", shape([-1, 1]), types.string),
        parameter("half", shape([-1, 2, -1]), types.f16),
        parameter("number", shape([-1]), types.i64),
    ]
    relu = opset.relu(inputs[0], name="relu")
    relu.output(0).get_tensor().set_names({"y"})
    results = [opset.result(relu, name="first"), *(opset.result(node) for node in inputs[1:])]
    openvino.save_model(openvino.Model(results, inputs, "m"), path, compress_to_fp16=False)
    return path


def as_the_runtime_reads_it(path: Path) -> list[FileTensor]:
    model = openvino.Core().read_model(path)
    return [
        FileTensor(
            name=port.get_any_name(),
            datatype=DATATYPES[str(port.element_type).split("'")[1]],
            dims=tuple(-1 if d.is_dynamic else d.get_length() for d in port.partial_shape),
        )
        for port in (*model.inputs, *model.outputs)
    ]


def test_names_datatypes_and_dimensions(tmp_path: Path) -> None:
    """As the runtime tells them, without it."""
    path = save(tmp_path / "1" / "model.xml")

    found = read_openvino(path.read_bytes(), "model.xml")

    assert [*found.inputs, *found.outputs] == as_the_runtime_reads_it(path)


def test_a_model_without_configuration_is_completed(tmp_path: Path) -> None:
    """With the rules of all other backends: a variable first dimension is the batch's."""
    save(tmp_path / "m" / "1" / "model.xml")

    (model,) = open_repositories(RepositorySettings(path=str(tmp_path))).scan()

    assert model.error == ""
    assert model.config
    assert (from_json(model.config).backend, from_json(model.config).max_batch_size) == ("openvino", 4)
    assert [(i.name, list(i.dims)) for i in from_json(model.config).input][:2] == [("alpha,b", [4]), ("ranged", [3])]
    assert from_json(model.config).output[0].name == "y"


def test_a_fixed_first_dimension_is_no_batch(tmp_path: Path) -> None:
    """Of one tensor is enough."""
    save(tmp_path / "m" / "1" / "model.xml", batch=2)

    (model,) = open_repositories(RepositorySettings(path=str(tmp_path))).scan()

    assert model.config
    assert from_json(model.config).max_batch_size == 0
    assert list(from_json(model.config).input[0].dims) == [2, 4]


def test_a_configuration_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    """It would fail at the first request."""
    save(tmp_path / "m" / "1" / "model.xml")
    (tmp_path / "m" / "config.pbtxt").write_text(
        'backend: "openvino" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 4 }'
    )

    (model,) = open_repositories(RepositorySettings(path=str(tmp_path))).scan()

    assert "unable to load model 'm', configuration expects 1 inputs, model provides 5" in model.error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<net>",
        b"<net/>",
        b"<!DOCTYPE net [<!ENTITY a 'b'>]><net><layers/></net>",
        b'<net><layers><layer id="0" type="Parameter"/></layers></net>',
        b'<net><layers><layer id="0" type="Result"/></layers></net>',
        b'<net><layers><layer type="Result"/></layers></net>',
    ],
)
def test_what_is_no_ir_is_refused(content: bytes) -> None:
    """Whatever is missing, the answer is one clear error; entities are not expanded."""
    with pytest.raises(ModelLoadFailed, match=r"^'model\.xml' can't be read: it is not an OpenVINO IR"):
        read_openvino(content, "model.xml")


def test_an_element_type_that_can_not_travel(tmp_path: Path) -> None:
    """It is named."""
    content = save(tmp_path / "1" / "model.xml").read_bytes().replace(b'precision="FP16"', b'precision="U4"')

    with pytest.raises(ModelLoadFailed, match="'half' of the OpenVINO model has element type 'U4'"):
        read_openvino(content, "model.xml")


def test_an_onnx_file_that_a_configuration_names_is_read(tmp_path: Path) -> None:
    """OpenVINO executes ONNX files too; their inputs and outputs are completed as those of a `model.xml` are."""
    directory = tmp_path / models.add_sub(tmp_path)
    (directory / "config.pbtxt").write_text('backend: "openvino" default_model_filename: "model.onnx"')
    config = open_repositories(RepositorySettings(path=str(tmp_path))).read("add_sub").config

    assert config
    assert [port.name for port in from_json(config).input] == ["a", "b"]
    assert [list(port.dims) for port in from_json(config).output] == [[4], [4]]
