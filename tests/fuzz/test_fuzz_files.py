"""What repositories, load requests and clients of gRPC hand over: refused with an error of ours, or usable."""

import contextlib
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.settings import RepositorySettings
from qinfer.errors import InvalidRequest, ModelLoadFailed, OutputMismatch, QinferError, RequestError
from qinfer.models.config.config import from_json
from qinfer.models.repository.files import LocalFiles
from qinfer.models.repository.open import ModelFiles, open_repositories, read_model
from qinfer.tensors import Tensor
from qinfer.wire.frame import encode_request
from qinfer.wire.kserve_grpc import decode_infer, parse_infer
from qinfer.wire.outputs import NO_REGIONS, classify
from qinfer_api.rest.services import read_preferences

patient = settings(deadline=None, suppress_health_check=list(HealthCheck))
SURROGATES = st.text(st.characters(categories=["Cs", "Lu", "Nd"]), max_size=3)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | SURROGATES
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SURROGATES, inner, max_size=3), max_leaves=5
)
FIELDS = ("name", "max_batch_size", "input", "parameters", "version_policy", "instance_group", "optimization")


@given(st.dictionaries(st.sampled_from(FIELDS) | SURROGATES, JSON, max_size=3))
@example({"\ud800": 1})
@example({"parameters": {"\ud800": {"string_value": "\udfff"}}})
def test_overrides_with_halves_of_surrogate_pairs(fields: dict[str, Any]) -> None:
    """JSON can spell text that no encoding has."""
    with contextlib.suppress(ModelLoadFailed):
        from_json(json.dumps(fields))


CONFIG = (
    b'backend: "stub" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
    b'output { name: "y" data_type: TYPE_FP32 dims: 1 label_filename: "%b" }'
)
PATHS = st.sampled_from(
    ["labels.txt", "config.pbtxt", "1/model.stub", "01/model.stub", "0/x", "configs/a.pbtxt", "warmup/w"]
)
CONTENTS = (
    st.binary(max_size=30)
    | st.sampled_from(
        [b"a\r\nb\n\n", b"\xff", b"\x00", CONFIG % b"labels.txt", CONFIG % b"../labels.txt", CONFIG % b"/etc/x"]
    )
    | SURROGATES.map(lambda text: text.encode(errors="surrogatepass"))
)


def no_other_model(name: str) -> ModelFiles:
    """Stands for the other models of a repository that has one only."""
    raise ModelLoadFailed(f"there is no model '{name}'")


@patient
@given(st.dictionaries(PATHS, CONTENTS, max_size=4), st.sampled_from(["", "a", "../a"]))
def test_model_directories(tmp_path_factory: Any, contents: dict[str, bytes], config_name: str) -> None:
    """A model is read, or says why it can't be; labels are lines of text."""
    root = Path(tmp_path_factory.mktemp("repository"))
    for path, content in {"1/model.stub": b"", **contents}.items():
        (root / "m" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "m" / path).write_bytes(content)
    files = LocalFiles(root)
    listing = files.listing("m")
    assert listing is not None

    model = read_model(ModelFiles(files, "m", listing), RepositorySettings(config_name=config_name), no_other_model)

    assert model.error or model.config
    assert str(root) not in model.error
    for lines in model.labels.values():
        "".join(lines).encode()


FILES = st.dictionaries(
    st.sampled_from(
        [
            "1/model.stub",
            "../x",
            "/etc/x",
            "1/../../x",
            "1",
            "1/",
            "",
            "1/a/b",
            "-1/x",
            "a/b",
            "1/\x00",
            "\ud800",
            "1/\ud800",
        ]
    )
    | st.text(st.characters(), max_size=6),
    st.binary(max_size=4),
    max_size=3,
)


@patient
@given(FILES)
def test_files_of_load_requests(tmp_path_factory: Any, files: dict[str, bytes]) -> None:
    """They are written below the overlay and nowhere else, or refused."""
    base = Path(tmp_path_factory.mktemp("overlay"))
    overlay, repository = base / "overlay", base / "models"
    overlay.mkdir()
    repository.mkdir()
    before = {path for path in base.rglob("*") if path.is_file()}
    repositories = open_repositories(RepositorySettings(path=str(repository), overlay=str(overlay)))

    with contextlib.suppress(QinferError):
        location = repositories.put_files("m", files)
        repositories.drop_files(location)

    left = {path for path in base.rglob("*") if path.is_file()} - before
    assert all(path.is_relative_to(overlay) for path in left)


PARAMETER = st.one_of(
    st.builds(lambda v: pb.InferParameter(int64_param=v), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda v: pb.InferParameter(uint64_param=v), st.integers(0, 2**64 - 1)),
    st.builds(lambda v: pb.InferParameter(string_param=v), st.text(max_size=4)),
    st.builds(lambda v: pb.InferParameter(double_param=v), st.floats()),
    st.builds(lambda v: pb.InferParameter(bool_param=v), st.booleans()),
    st.just(pb.InferParameter()),
)
KEYS = st.sampled_from(
    ["priority", "timeout", "sequence_id", "sequence_start", "triton_enable_empty_final_response", "triton_x",
     "classification", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "binary_data"]
) | st.text(max_size=3)  # fmt: skip
PARAMETERS = st.dictionaries(KEYS, PARAMETER, max_size=4)
CONTENTS_OF_TENSORS = st.builds(
    pb.InferTensorContents,
    int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2),
    uint_contents=st.lists(st.integers(0, 2**32 - 1), max_size=2),
    bytes_contents=st.lists(st.binary(max_size=3), max_size=2),
    fp32_contents=st.lists(st.floats(width=32), max_size=2),
    bool_contents=st.lists(st.booleans(), max_size=2),
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Messages that are protobuf, at least."""
    message = pb.ModelInferRequest(model_name="m", model_version=draw(st.sampled_from(["", "1", "-1", "x", "9" * 30])))
    for _ in range(draw(st.integers(0, 3))):
        tensor = message.inputs.add(
            name=draw(st.sampled_from(["x", ""])),
            datatype=draw(st.sampled_from(["FP32", "BYTES", "UINT8", "INT16", "BOOL", "FP16", "BF16", "?"])),
            shape=draw(st.lists(st.integers(-2, 3) | st.sampled_from([2**62, -(2**63)]), max_size=3)),
        )
        if draw(st.booleans()):
            tensor.contents.CopyFrom(draw(CONTENTS_OF_TENSORS))
        _put(draw(PARAMETERS), tensor.parameters)
    for _ in range(draw(st.integers(0, 2))):
        _put(draw(PARAMETERS), message.outputs.add(name=draw(st.sampled_from(["y", ""]))).parameters)
    _put(draw(PARAMETERS), message.parameters)
    message.raw_input_contents.extend(draw(st.lists(st.binary(max_size=8), max_size=3)))
    return bytes(message.SerializeToString())


def _put(drawn: dict[str, Any], parameters: Any) -> None:
    for name, value in drawn.items():
        parameters[name].CopyFrom(value)


@patient
@given(messages(), st.data())
def test_grpc_requests(blob: bytes, data: st.DataObject) -> None:
    """Whatever is in the right fields, and with a byte changed: a request that can be queued, or a `RequestError`."""
    changed = bytearray(blob)
    if changed:
        changed[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    for message in (blob, bytes(changed)):
        with contextlib.suppress(RequestError):
            encode_request(decode_infer(parse_infer(message), NO_REGIONS).request)


@given(
    st.lists(st.integers(0, 3) | st.sampled_from([2**31, 2**62]), max_size=4).map(tuple),
    st.sampled_from(["FP32", "INT8", "UINT64", "BYTES", "FP16"]),
    st.binary(max_size=24),
    st.integers(0, 5) | st.just(2**63),
    st.booleans(),
)
def test_classification(shape: tuple[int, ...], datatype: str, data: bytes, count: int, batched: bool) -> None:  # noqa: FBT001
    """Outputs of any shape, bytes and number of classes."""
    with contextlib.suppress(InvalidRequest, OutputMismatch):
        classify(Tensor("y", datatype, shape, data), count, ("a",), batched=batched)


@given(st.lists(st.text(st.characters(codec="latin-1"), max_size=30) | st.from_regex(r"(wait=\d*[,;] ?)*"), max_size=3))
@example(['"' + "\\" * 999])
@example(["a=" * 500])
def test_preferences(headers: list[str]) -> None:
    """No `Prefer` fails, or takes long."""
    preferences = read_preferences(headers)

    assert preferences.wait_s is None or 0 <= preferences.wait_s < 10**9
