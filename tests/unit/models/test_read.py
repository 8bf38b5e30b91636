"""What is read of one model beside its tensors: configurations by name, overrides, labels, warm-up files, model.py."""

import json
from pathlib import Path

import pytest

from qinfer.core.settings import LimitSettings, RepositorySettings
from qinfer.errors import InvalidRequest, ModelLoadFailed, ModelNotFound, SettingsError, UnsupportedFeature
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.repository.open import Repositories, open_repositories
from qinfer.models.spec import Device, InstanceSpec, WarmupInput
from qinfer.models.state import StoredModel
from tests.support import models

PYTHON = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
HOOK = "    @staticmethod\n    def auto_complete_config(config):\n        return config\n"
IO = """
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }
"""


def opened(path: Path | str, **settings: object) -> Repositories:
    return open_repositories(RepositorySettings.model_validate({"path": str(path), "gpus": 0, **settings}))


def write(path: Path, content: str | bytes = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, name: str = "m", **settings: object) -> StoredModel:
    return opened(path, **settings).read(name)


def stub(repository: Path, config: str = "", name: str = "m") -> Path:
    """Writes a model of a third party's backend; returns its directory."""
    directory = repository / name
    (directory / "1").mkdir(parents=True)
    write(directory / "config.pbtxt", f'backend: "stub" {config}')
    write(directory / "labels.txt", "cat\n dog \n\nbird\n")
    return directory


def test_labels_are_read(tmp_path: Path) -> None:
    """By position: an empty line is an empty label, and the last line need not end."""
    stub(tmp_path, IO)

    model = read(tmp_path)

    assert model.error == ""
    assert model.labels == {"y": ("cat", "dog", "", "bird")}
    assert model.config
    assert to_spec(from_json(model.config), LimitSettings(), model.labels).outputs[0].labels == (
        "cat",
        "dog",
        "",
        "bird",
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("missing.txt", None, "has no label file 'missing.txt' for output 'y'"),
        ("../secret.txt", "secret", "must be a path within the model's directory"),
        ("/etc/hostname", None, "must be a path within the model's directory"),
        ("binary.txt", b"\xff\xfe", "binary.txt is not UTF-8 text"),
    ],
)
def test_label_files_stay_inside_the_model(
    tmp_path: Path, file: str, content: str | bytes | None, message: str
) -> None:
    """A configuration can't be used to read other files of the machine."""
    directory = stub(tmp_path, IO.replace("labels.txt", file))
    if content is not None:
        write(directory / file, content)

    assert message in read(tmp_path).error


def test_texts_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As editors on Windows write them."""
    directory = stub(tmp_path)
    write(directory / "config.pbtxt", b'\xef\xbb\xbfbackend: "stub" ' + IO.encode())
    write(directory / "labels.txt", b"\xef\xbb\xbfcat\r\ndog\r\n")

    model = read(tmp_path)

    assert (model.error, model.labels) == ("", {"y": ("cat", "dog")})
    assert not opened(tmp_path).read("m", "\ufeff" + json.dumps({"backend": "stub", "input": [], "output": []})).config
    assert from_json('\ufeff{"backend": "stub"}').backend == "stub"


def test_a_label_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger one is named, not read."""
    monkeypatch.setattr("qinfer.models.repository.open.LABEL_BYTES", 4)
    stub(tmp_path, IO)

    assert read(tmp_path).error == "labels.txt is larger than 4 bytes"


def test_a_configuration_is_chosen_by_name(tmp_path: Path) -> None:
    """Models that have none of the name use config.pbtxt."""
    directory = stub(tmp_path, IO)
    stub(tmp_path, IO, "other")
    write(directory / "configs" / "gpu.pbtxt", f'backend: "stub" max_batch_size: 7 {IO}')

    one, other = opened(tmp_path, config_name="gpu").scan()

    assert [m.config and from_json(m.config).max_batch_size for m in (one, other)] == [7, 0]
    assert read(tmp_path).content_hash != one.content_hash


def test_a_mistake_in_a_chosen_configuration_names_its_file(tmp_path: Path) -> None:
    """So that the right one is corrected."""
    write(stub(tmp_path, IO) / "configs" / "gpu.pbtxt", "nonsense: 1")

    assert read(tmp_path, config_name="gpu").error.startswith("configs/gpu.pbtxt, line 1")


def test_the_name_of_a_configuration_is_no_path(tmp_path: Path) -> None:
    """It is a setting, and refused at the start."""
    with pytest.raises(SettingsError, match="QINFER_REPOSITORY__CONFIG_NAME"):
        opened(tmp_path, config_name="../other")


def test_an_override_replaces_the_configuration(tmp_path: Path) -> None:
    """Whole, as in Triton; numbers may be strings."""
    models.add_sub(tmp_path)
    repositories = opened(tmp_path)

    model = repositories.read("add_sub", json.dumps({"backend": "onnxruntime", "max_batch_size": "16"}))

    assert model.error == ""
    assert model.config
    assert from_json(model.config).max_batch_size == 16
    assert [i.name for i in from_json(model.config).input] == ["a", "b"]
    assert model.content_hash != repositories.read("add_sub").content_hash


@pytest.mark.parametrize("override", ["{", "[]", '{"max_batch": 1}', '{"name": "other"}', '{"backend": 1}', "null"])
def test_a_wrong_override_is_an_error_of_the_model(tmp_path: Path, override: str) -> None:
    """Nothing is raised, and what is in the repository is not used in its place."""
    models.add_sub(tmp_path)

    assert opened(tmp_path).read("add_sub", override).error


def test_files_of_a_load_request(tmp_path: Path) -> None:
    """They are kept in the overlay, in place of the repository's, until they are dropped."""
    models.add_sub(tmp_path / "models")
    content = (tmp_path / "models" / "add_sub" / "1" / "model.onnx").read_bytes()
    repositories = opened(tmp_path / "models", overlay=str(tmp_path / "overlay"))

    location = repositories.put_files("new", {"3/model.onnx": content, "3/sub/extra.txt": b"x"})
    model = repositories.read("new", '{"backend": "onnxruntime"}', location)

    assert (model.model, model.versions, model.error, model.location) == ("new", (3,), "", location)
    directory = repositories.version_dir("new", 3, location, model.content_hash)
    assert (directory / "model.onnx").read_bytes() == content
    assert (directory / "sub" / "extra.txt").read_bytes() == b"x"

    repositories.drop_files(location)
    with pytest.raises(ModelNotFound):
        repositories.read("new", "", location)


@pytest.mark.parametrize(
    "path",
    [
        *("model.onnx", "1", "1/", "0/model.onnx", "1/../x", "1//x", "../1/x", "/1/x", "", "1/./x", "1/a\\b", "1/\0"),
    ],
)
def test_the_files_names_stay_inside_the_overlay(tmp_path: Path, path: str) -> None:
    """Anything but `<version>/<file>` is refused by name, before a file is written."""
    repositories = opened(tmp_path / "models", overlay=str(tmp_path / "overlay"))

    with pytest.raises(InvalidRequest, match="is not the name of a file of a model"):
        repositories.put_files("m", {"1/good": b"", path: b""})
    assert not (tmp_path / "overlay").exists()


@pytest.mark.parametrize(
    "path", ["A" * 256, "1/" + "A" * 256, "1" * 256 + "/x", "1/" + "ä" * 128, "1/" + "x/" * 600 + "x"]
)
def test_names_of_files_that_no_file_system_takes(tmp_path: Path, path: str) -> None:
    """An internal error, as in Triton, where the file system refuses them."""
    repositories = opened(tmp_path / "models", overlay=str(tmp_path / "overlay"))

    with pytest.raises(ModelLoadFailed, match="Invalid file path: 'file:"):
        repositories.put_files("m", {"1/good": b"", path: b""})
    assert not (tmp_path / "overlay").exists()


@pytest.mark.parametrize("name", ["..", "a/b", "", "a\\b"])
def test_the_models_name_stays_inside_the_overlay(tmp_path: Path, name: str) -> None:
    """With Triton's text."""
    with pytest.raises(InvalidRequest, match="model name must not contain path traversal characters"):
        opened(tmp_path, overlay=str(tmp_path)).put_files(name, {"1/x": b""})


def test_a_models_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    """It is the request's mistake, not the overlay's."""
    with pytest.raises(InvalidRequest, match="model name is 256 bytes long; at most 255"):
        opened(tmp_path, overlay=str(tmp_path)).put_files("m" * 256, {"1/x": b""})


def test_without_an_overlay_files_are_refused(tmp_path: Path) -> None:
    """The error names the setting."""
    with pytest.raises(UnsupportedFeature, match="QINFER_REPOSITORY__OVERLAY"):
        opened(tmp_path).put_files("m", {"1/x": b""})


@pytest.mark.parametrize("location", ["../m", "m/../../etc", "other/01M7Z28B4BHVPJMQ71ANZJ0000", "m/1"])
def test_a_location_is_one_of_the_models_own(tmp_path: Path, location: str) -> None:
    """Whatever else is stored leads nowhere, and removes nothing."""
    write(tmp_path / "keep")
    repositories = opened(tmp_path, overlay=str(tmp_path / "overlay"))

    repositories.drop_files(location)
    with pytest.raises(ModelNotFound):
        repositories.read("m", "", location)
    assert (tmp_path / "keep").exists()


def test_warm_up_files_must_be_there(tmp_path: Path) -> None:
    """A sample may read a file of the directory `warmup`, which is looked for at once."""
    sample = """model_warmup { name: "w" batch_size: 1 inputs { key: "x" value {
        data_type: TYPE_FP32 dims: 4 input_data_file: "x.bin" } } }"""
    directory = stub(tmp_path, IO + sample)

    assert read(tmp_path).error == "model 'm' has no file 'x.bin' in its directory 'warmup'"

    write(directory / "warmup" / "x.bin", bytes(16))
    model = read(tmp_path)
    assert model.config
    assert to_spec(from_json(model.config), LimitSettings()).warmup[0].inputs == {
        "x": WarmupInput("FP32", (4,), file="x.bin")
    }


@pytest.mark.parametrize(
    ("source", "pending"),
    [
        (PYTHON, ""),
        (PYTHON + HOOK, "python"),
        (PYTHON + "# auto_complete_config is not needed\n", ""),
        ("def broken(:\n    auto_complete_config\n", ""),
    ],
)
def test_a_python_model_that_completes_itself_is_pending(tmp_path: Path, source: str, pending: str) -> None:
    """Found without running it: the worker does that."""
    write(tmp_path / "m" / "1" / "model.py", source)

    model = read(tmp_path, gpus=1)

    assert (model.pending, model.error) == (pending, "")
    if pending:
        assert (from_json(model.config).backend, from_json(model.config).default_model_filename) == (
            "python",
            "model.py",
        )
        assert list(from_json(model.config).instance_group[0].gpus) == [0]


def test_without_autocomplete_nothing_is_pending(tmp_path: Path) -> None:
    """Then the configuration must be complete, as for all other backends."""
    write(tmp_path / "m" / "1" / "model.py", PYTHON + HOOK)
    write(tmp_path / "m" / "config.pbtxt", f'backend: "python" {IO.replace("labels.txt", "")}')

    model = read(tmp_path, autocomplete=False)

    assert (model.pending, model.error) == ("", "")


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("", 0, [("cpu", 0, 1)]),
        ("", 2, [("cpu", 0, 1)]),  # a third party's backend says itself what it can: KIND_GPU
        ("instance_group { count: 2 }", 2, [("cpu", 0, 2)]),
        ("instance_group { kind: KIND_GPU }", 2, [("gpu", 0, 1), ("gpu", 1, 1)]),
        ("instance_group { kind: KIND_GPU gpus: 1 count: 3 }", 0, [("gpu", 1, 3)]),
        ("instance_group { gpus: [ 0, 2 ] }", 0, [("gpu", 0, 1), ("gpu", 2, 1)]),
        ("instance_group { kind: KIND_MODEL }", 1, [("cpu", 0, 1)]),
        ("instance_group [ { kind: KIND_CPU }, { passive: true } ]", 0, [("cpu", 0, 1)]),
    ],
)
def test_instances(tmp_path: Path, text: str, gpus: int, expected: list[tuple[str, int, int]]) -> None:
    """One entry for each device of each group."""
    stub(tmp_path, IO + text)

    model = read(tmp_path, gpus=gpus)

    assert model.config, model.error
    found = to_spec(from_json(model.config), LimitSettings()).instances
    assert [(i.device.kind, i.device.number, i.count) for i in found] == expected


def test_known_backends_use_the_gpus_there_are(tmp_path: Path) -> None:
    """KIND_AUTO is every GPU where there are some, else two instances on the CPU for ONNX Runtime."""
    models.add_sub(tmp_path)

    def instances(gpus: int) -> tuple[InstanceSpec, ...]:
        model = opened(tmp_path, gpus=gpus).read("add_sub")
        assert model.config
        return to_spec(from_json(model.config), LimitSettings()).instances

    assert instances(0) == (InstanceSpec(count=2, name="add_sub"),)
    assert instances(2) == tuple(InstanceSpec(device=Device("gpu", n), name="add_sub") for n in (0, 1))


def test_several_repositories(tmp_path: Path) -> None:
    """Their models are served together; a name that two have is an error for both."""
    for repository, name in (("a", "one"), ("a", "both"), ("b", "two"), ("b", "both")):
        stub(tmp_path / repository, IO, name)
    repositories = opened(f"{tmp_path / 'a'}, file://{tmp_path / 'b'}")

    assert repositories.names() == ["both", "one", "two"]
    assert {m.model: m.error for m in repositories.scan()} == {
        "one": "",
        "two": "",
        "both": "model appears in two or more repositories",
    }
    assert repositories.read("both").error == "model appears in two or more repositories"
    assert repositories.version_dir("two", 1) == tmp_path / "b" / "two" / "1"
    assert repositories.read("two").error == ""
    with pytest.raises(ModelNotFound, match="no model repository has a model 'three'"):
        repositories.read("three")


@pytest.mark.parametrize("path", ["", " , ", "models,models"])
def test_the_path_names_repositories(path: str) -> None:
    """An empty list, or one that names a repository twice, is a mistake."""
    with pytest.raises(SettingsError, match="QINFER_REPOSITORY__PATH"):
        opened(path)
