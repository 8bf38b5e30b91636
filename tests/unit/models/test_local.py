"""Model repositories in directories, and what is read from ONNX files."""

import os
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from qinfer.backends.onnx import OnnxBackend
from qinfer.core.settings import LimitSettings, RepositorySettings
from qinfer.errors import ModelLoadFailed, SettingsError
from qinfer.models.config.config import from_json, parse, to_spec
from qinfer.models.config.file_tensors import FileTensor, FileTensors, read_onnx
from qinfer.models.repository.files import LocalFiles
from qinfer.models.repository.open import Repositories, open_repositories, select_versions
from qinfer.models.spec import Device
from qinfer.models.state import ErrorKind, StoredModel
from tests.support import models

FLOAT = TensorProto.FLOAT


def write_onnx(path: Path, batch: str | int = "N", width: int = 4) -> None:
    """Writes y = x + w, where `w` is an initializer that is listed as an input, as old exporters do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weight = helper.make_tensor("w", FLOAT, [width], [0.5] * width)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "add",
        [helper.make_tensor_value_info(n, FLOAT, s) for n, s in (("x", [batch, width]), ("w", [width]))],
        [helper.make_tensor_value_info("y", FLOAT, [batch, width])],
        [weight],
    )
    onnx.save(helper.make_model(graph), path)


def repositories(path: Path, *, autocomplete: bool = True, gpus: int = 0) -> Repositories:
    return open_repositories(RepositorySettings(path=str(path), autocomplete=autocomplete, gpus=gpus))


def only(repository: Path) -> StoredModel:
    (model,) = repositories(repository).scan()
    return model


def read(path: Path) -> FileTensors:
    return read_onnx(memoryview(path.read_bytes()), path.name)


def test_a_model_without_configuration_is_completed(tmp_path: Path) -> None:
    """The ONNX file alone is a servable model."""
    write_onnx(tmp_path / "m" / "1" / "model.onnx")

    model = only(tmp_path)

    assert (model.model, model.versions, model.error) == ("m", (1,), "")
    assert model.config
    assert (from_json(model.config).backend, from_json(model.config).max_batch_size) == ("onnxruntime", 4)
    assert [i.name for i in from_json(model.config).input] == ["x"]


def test_a_file_that_is_made_shorter_while_it_is_read(tmp_path: Path) -> None:
    """As by another that is copied over it; looking at it where it was mapped would end the process."""
    path = models.weighty(tmp_path, 32 * 2**20)
    expected, size = read(path), path.stat().st_size
    files = LocalFiles(tmp_path)

    with files.blob(path.name, size) as whole, files.blob(path.name, size) as cut, files.blob(path.name, 4) as small:
        assert read_onnx(whole, path.name) == expected
        os.truncate(path, size // 2)
        assert small.tobytes() == whole[:4].tobytes()
        with pytest.raises(ModelLoadFailed, match="it is not an ONNX model"):
            read_onnx(cut, path.name)


def test_without_autocomplete_a_configuration_must_be_complete(tmp_path: Path) -> None:
    """Then the model file is not read."""
    write_onnx(tmp_path / "m" / "1" / "model.onnx")

    (model,) = repositories(tmp_path, autocomplete=False).scan()

    assert not model.config
    assert "the configuration has no 'input'" in model.error


def test_one_bad_model_hides_no_other(tmp_path: Path) -> None:
    """Each model has its own error."""
    write_onnx(tmp_path / "good" / "1" / "model.onnx")
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
    (tmp_path / "typo" / "1").mkdir(parents=True)
    (tmp_path / "typo" / "config.pbtxt").write_text("max_batch: 1")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "config.pbtxt").write_bytes(b"\xff\xfe")
    (tmp_path / "{brace}" / "1").mkdir(parents=True)

    errors = {model.model: model.error for model in repositories(tmp_path).scan()}

    assert errors["good"] == ""
    assert errors["broken"] == "'model.onnx' can't be read: it is not an ONNX model"
    assert "line 1" in errors["typo"]
    assert errors["binary"] == "config.pbtxt is not UTF-8 text"
    assert "a model name" in errors["{brace}"]


def test_directories_that_are_no_versions_are_ignored(tmp_path: Path) -> None:
    """Versions are integers that do not begin with 0."""
    for version in ("0", "01", "v2", "3", "x", "²"):
        write_onnx(tmp_path / "m" / version / "model.onnx")
    (tmp_path / "m" / "7").write_text("a file")

    assert only(tmp_path).versions == (3,)


def test_a_model_without_a_version_has_an_error(tmp_path: Path) -> None:
    """Its text is Triton's."""
    (tmp_path / "m").mkdir()

    found = only(tmp_path)
    assert found.error == "at least one version must be available under the version policy of model 'm'"
    assert found.error_kind == ErrorKind.NO_VERSION


def test_a_file_beside_the_versions_is_told_its_place(tmp_path: Path) -> None:
    """The first thing that people try."""
    write_onnx(tmp_path / "m" / "model.onnx")

    assert only(tmp_path).error.endswith("of model 'm'; put model.onnx into m/1/")


@pytest.mark.parametrize(
    ("policy", "selected"),
    [
        ("", (10,)),
        ("version_policy { latest { num_versions: 2 } }", (2, 10)),
        ("version_policy { all { } }", (1, 2, 10)),
        ("version_policy { specific { versions: [ 10, 1, 5 ] } }", (1, 10)),
    ],
)
def test_version_policies(policy: str, selected: tuple[int, ...]) -> None:
    """The latest versions are counted numerically; specific ones are taken if they are there."""
    assert select_versions(parse(policy), [10, 1, 2]) == selected


def test_the_hash_changes_with_configuration_and_files(tmp_path: Path) -> None:
    """So a change is noticed, and only a change."""
    file = tmp_path / "m" / "1" / "model.onnx"
    write_onnx(file)
    first = only(tmp_path).content_hash

    assert only(tmp_path).content_hash == first

    os.utime(file, ns=(1, 1))
    second = only(tmp_path).content_hash
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: 8")
    third = only(tmp_path).content_hash

    assert len({first, second, third}) == 3


def test_links_are_followed_once(tmp_path: Path) -> None:
    """Versions and files may be links, as a Kubernetes volume has them; one that leads back is not followed."""
    write_onnx(tmp_path / "elsewhere" / "model.onnx")
    directory = tmp_path / "models" / "m"
    directory.mkdir(parents=True)
    (directory / "1").symlink_to(tmp_path / "elsewhere")
    (directory / "2").mkdir()
    (directory / "2" / "model.onnx").symlink_to(tmp_path / "elsewhere" / "model.onnx")
    (directory / "2" / "back").symlink_to(directory)
    (directory / "2" / "gone").symlink_to(tmp_path / "nothing")
    (directory / "config.pbtxt").write_text("version_policy { all { } }")

    model = only(tmp_path / "models")

    assert (model.versions, model.error) == ((1, 2), "")


def test_what_python_leaves_behind_is_no_change(tmp_path: Path) -> None:
    """Else a Python model would be loaded anew after each load, for ever."""
    file = tmp_path / "m" / "1" / "model.onnx"
    write_onnx(file)
    before = only(tmp_path)
    (file.parent / "__pycache__").mkdir()
    (file.parent / "__pycache__" / "model.pyc").write_bytes(b"")

    assert only(tmp_path) == before


def test_a_repository_that_is_a_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models have an error, instead of being walked for ever."""
    monkeypatch.setattr("qinfer.models.repository.files.MAX_FILES", 2)
    for name in ("1", "2", "3"):
        write_onnx(tmp_path / "m" / name / "model.onnx")

    assert only(tmp_path).error == "can't be read: its directory holds more than 2 files"


def test_an_onnx_model_may_be_a_directory(tmp_path: Path) -> None:
    """As Triton has it for models with weights in files of their own."""
    models.add_sub(tmp_path, "m")
    file = tmp_path / "m" / "1" / "model.onnx"
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    (file / "model.onnx").write_bytes(content)

    model = only(tmp_path)

    assert model.error == ""
    assert model.config
    assert from_json(model.config).default_model_filename == "model.onnx"
    OnnxBackend().load(to_spec(from_json(model.config), LimitSettings()), tmp_path / "m" / "1", Device())


def test_a_model_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """Not the place where it should be."""
    write_onnx(tmp_path / "m" / "1" / "other.onnx")
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "onnxruntime"')

    assert only(tmp_path).error == "version 1 of model 'm' has no file 'model.onnx'"


def test_torch_models_of_both_kinds(tmp_path: Path) -> None:
    """The file tells the platform, also where the backend is named."""
    for name, file in (("a", "model.pt"), ("b", "model.pt2")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / file).write_bytes(b"")
        (tmp_path / name / "config.pbtxt").write_text(
            'backend: "pytorch" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
            'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
        )

    found = [from_json(m.config) for m in repositories(tmp_path).scan()]

    assert [(c.platform, c.default_model_filename) for c in found] == [
        ("pytorch_libtorch", "model.pt"),
        ("torch_aoti", "model.pt2"),
    ]


def test_a_missing_repository_is_a_wrong_setting(tmp_path: Path) -> None:
    """Nothing is synced from a directory that is not there."""
    with pytest.raises(SettingsError, match="can't be read"):
        repositories(tmp_path / "missing").scan()


def test_version_dirs_stay_inside_the_repository(tmp_path: Path) -> None:
    """A name can't lead out of it."""
    repository = repositories(tmp_path)

    assert repository.version_dir("m", 3) == tmp_path / "m" / "3"
    for name in ("..", "a/b", ""):
        with pytest.raises(ModelLoadFailed):
            repository.version_dir(name, 1)


def test_onnx_tensors_are_those_of_the_onnx_package(tmp_path: Path) -> None:
    """Names, datatypes and dimensions as onnx itself reads them; initializers are no inputs; weights do not matter."""
    path = tmp_path / "model.onnx"
    types = {
        "f": FLOAT,
        "h": TensorProto.FLOAT16,
        "s": TensorProto.STRING,
        "b": TensorProto.BOOL,
        "bf": TensorProto.BFLOAT16,
    }
    infos = [helper.make_tensor_value_info(name, type_, ["N", 3, None]) for name, type_ in types.items()]
    scalar = helper.make_tensor_value_info("scalar", TensorProto.INT64, [])
    unknown = helper.make_tensor_value_info("unknown", TensorProto.INT64, None)
    weights = helper.make_tensor("weights", FLOAT, [1 << 16], b"\x0b" * (4 << 16), raw=True)
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in types]
    outputs = [helper.make_tensor_value_info(f"{name}_out", type_, ["N", 3, None]) for name, type_ in types.items()]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [*infos, scalar, unknown], outputs, [weights])), path)

    found = read(path)

    assert found.inputs[:5] == tuple(
        FileTensor(name=name, datatype=datatype, dims=(-1, 3, -1))
        for name, datatype in zip(types, ("FP32", "FP16", "BYTES", "BOOL", "BF16"), strict=True)
    )
    assert [t.dims for t in found.inputs[5:]] == [(), None]
    assert [t.name for t in found.outputs] == [o.name for o in onnx.load(path).graph.output]


@pytest.mark.parametrize("content", [b"", b"\x00", b"PK\x03\x04 a zip file", b"\x3a\xff\xff\xff\x7f", b"\x3a\x00"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    """Whatever the bytes, the answer is one clear error."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    if content == b"\x3a\x00":  # an empty graph is a valid, useless model
        assert read(path).inputs == ()
    else:
        with pytest.raises(ModelLoadFailed, match=r"^'model\.onnx' can't be read"):
            read(path)


def test_a_file_without_inputs_is_refused_for_that(tmp_path: Path) -> None:
    """With and without a configuration: not for what the configuration lacks, or has too much."""
    constant = helper.make_tensor("c", FLOAT, [2], [1.0, 2.0])
    output = helper.make_tensor_value_info("y", FLOAT, [2])
    graph = helper.make_graph([helper.make_node("Identity", ["c"], ["y"])], "g", [], [output], [constant])
    for name in ("bare", "configured"):
        (tmp_path / name / "1").mkdir(parents=True)
        onnx.save(helper.make_model(graph), tmp_path / name / "1" / "model.onnx")
    io = '{ name: "%s" data_type: TYPE_FP32 dims: 2 }'
    (tmp_path / "configured" / "config.pbtxt").write_text(f"input {io % 'x'} output {io % 'y'}")

    errors = [model.error for model in repositories(tmp_path).scan()]

    assert ["declares no input" in error for error in errors] == [True, True]


@pytest.mark.parametrize("operator", ["NonZero", "Reshape"])
def test_an_output_without_a_declared_shape_is_of_any_shape(tmp_path: Path, operator: str) -> None:
    """The runtime infers that of NonZero, and not that of Reshape; neither becomes [1]."""
    names = ["x", "shape"][: 2 if operator == "Reshape" else 1]
    inputs = [helper.make_tensor_value_info("x", FLOAT, ["N", 2]), helper.make_tensor_value_info("shape", 7, ["R"])]
    output = helper.make_tensor_value_info("y", 7 if operator == "NonZero" else FLOAT, None)
    graph = helper.make_graph([helper.make_node(operator, names, ["y"])], "g", inputs[: len(names)], [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    (tmp_path / "m" / "1").mkdir(parents=True)
    onnx.save(model, tmp_path / "m" / "1" / "model.onnx")

    stored = only(tmp_path)
    spec = to_spec(from_json(stored.config or ""))
    OnnxBackend().load(spec, tmp_path / "m" / "1", Device())

    assert (spec.max_batch_size, spec.outputs[0].dims) == (0, (-1,))


@pytest.mark.parametrize("autocomplete", [True, False])
def test_a_scalar_may_be_configured_as_one_element(tmp_path: Path, autocomplete: bool) -> None:  # noqa: FBT001  a case
    """Dims may not be empty, so `[1]` stands for what the file declares without dimensions."""
    ports = [helper.make_tensor_value_info(name, FLOAT, dims) for name, dims in (("x", []), ("z", [1]), ("y", []))]
    nodes = [helper.make_node("ReduceSum", ["z"], ["s"], keepdims=0), helper.make_node("Add", ["x", "s"], ["y"])]
    (tmp_path / "m" / "1").mkdir(parents=True)
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", ports[:2], ports[2:])), tmp_path / "m" / "1/model.onnx")
    io = '{ name: "%s" data_type: TYPE_FP32 dims: 1 }'
    text = f'backend: "onnxruntime" input {io % "x"} input {io % "z"} output {io % "y"}'
    (tmp_path / "m" / "config.pbtxt").write_text(text)

    (stored,) = repositories(tmp_path, autocomplete=autocomplete).scan()
    spec = to_spec(from_json(stored.config or ""))

    assert [(tensor.name, tensor.dims, tensor.reshape) for tensor in (*spec.inputs, *spec.outputs)] == [
        ("x", (1,), ()),
        ("z", (1,), None),
        ("y", (1,), ()),
    ]


def test_every_cut_of_a_file_is_refused_or_read(tmp_path: Path) -> None:
    """A file that is being written raises nothing else than `ModelLoadFailed`."""
    path = tmp_path / "model.onnx"
    write_onnx(path)
    content = path.read_bytes()

    for length in range(len(content)):
        path.write_bytes(content[:length])
        try:
            read(path)
        except ModelLoadFailed:
            continue


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    """A sequence can't travel in the protocol."""
    path = tmp_path / "model.onnx"
    sequence = helper.make_tensor_sequence_value_info("s", FLOAT, None)
    onnx.save(helper.make_model(helper.make_graph([], "g", [sequence], [])), path)

    with pytest.raises(
        ModelLoadFailed, match=r"'s' of the ONNX model is not a tensor; of scikit-learn.*'zipmap': False"
    ):
        read(path)
