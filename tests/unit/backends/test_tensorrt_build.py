"""What is decided about a TensorRT engine before TensorRT is asked."""

from pathlib import Path
from typing import Any

import pytest

from qinfer.backends.tensorrt_build import Build, build_of, cache_key, parse_shapes
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.file_tensors import FileTensor, FileTensors
from qinfer.models.spec import Accelerator, BatchingSpec, ModelSpec
from tests.support.backends import spec, tensors

IMAGE = tensors(("image", "FP32", (3, 224, 224)))
TEXT = tensors(("ids", "INT64", (-1,)))


def declared(name: str, *dims: int) -> FileTensors:
    return FileTensors(inputs=(FileTensor(name=name, datatype="FP32", dims=dims),), outputs=())


def model(inputs: Any = IMAGE, *, options: dict[str, str] | None = None, **changes: Any) -> ModelSpec:
    accelerators = (Accelerator("tensorrt", options),) if options is not None else ()
    return spec("tensorrt", inputs, IMAGE, gpu_accelerators=accelerators, **changes)


def test_the_batch_goes_up_to_its_maximum() -> None:
    """Without preferred sizes the largest batch is the one to be best at; with them the largest of those."""
    build = build_of(model(), declared("image", -1, 3, 224, 224))
    assert build.profiles == {"image": ((1, 3, 224, 224), (8, 3, 224, 224), (8, 3, 224, 224))}
    batching = BatchingSpec(preferred_sizes=(2, 4))
    build = build_of(model(batching=batching), declared("image", -1, 3, 224, 224))
    assert build.profiles["image"][1] == (4, 3, 224, 224)


def test_without_a_batch_dimension_every_shape_is_the_same() -> None:
    """`max_batch_size: 0` adds no dimension."""
    build = build_of(model(max_batch_size=0), declared("image", 3, 224, 224))
    assert build.profiles == {"image": ((3, 224, 224),) * 3}


def test_the_file_fills_what_the_configuration_leaves_open() -> None:
    """A dimension that is variable to the client may be fixed in the file."""
    assert build_of(model(TEXT), declared("ids", -1, 128)).profiles["ids"] == ((1, 128), (8, 128), (8, 128))


def test_variable_dimensions_need_limits() -> None:
    """Those that neither tells are asked for, with an example; the options then decide alone."""
    with pytest.raises(ModelLoadFailed, match=r"'ids' has variable dimensions \[-1\], .* such as 'ids:1x1'"):
        build_of(model(TEXT), declared("ids", -1, -1))
    options = {
        "trt_profile_min_shapes": "ids:1x1",
        "trt_profile_opt_shapes": "ids:4x64",
        "trt_profile_max_shapes": "ids:8x512",
    }
    assert build_of(model(TEXT, options=options), declared("ids", -1, -1)).profiles["ids"] == (
        (1, 1),
        (4, 64),
        (8, 512),
    )


def test_options() -> None:
    """They have the names of the onnxruntime backend."""
    options = {"precision_mode": "fp16", "max_workspace_size_bytes": "1024", "trt_builder_optimization_level": "5"}
    build = build_of(model(options=options), declared("image", -1, 3, 224, 224))
    assert (build.precision, build.workspace_bytes, build.level) == ("FP16", 1024, 5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision_mode": "FP8"}, "precision_mode is 'FP8'; it must be one of FP32, FP16, BF16, INT8"),
        ({"max_workspace_size_bytes": "1G"}, "'max_workspace_size_bytes' is '1G'; it must be a number"),
        ({"trt_dla_enable": "1"}, "'trt_dla_enable' of accelerator 'tensorrt' is not known here"),
        ({"trt_profile_min_shapes": "image"}, "'image' in trt_profile_min_shapes must be of the form"),
    ],
)
def test_wrong_options(options: dict[str, str], text: str) -> None:
    """Each is named, with what it may be."""
    with pytest.raises(ModelLoadFailed, match=text):
        build_of(model(options=options), declared("image", -1, 3, 224, 224))


def test_shapes_in_the_notation_of_trtexec() -> None:
    """Names may hold colons; blanks do not matter."""
    assert parse_shapes("m", "k", "a:1x3, b:0:2") == {"a": (1, 3), "b:0": (2,)}


def test_an_engine_is_kept_for_what_it_fits_only(tmp_path: Path) -> None:
    """GPU, version, options, model and weights beside it each make another key; paths do not."""
    (tmp_path / "model.onnx").write_bytes(b"model")
    profile = ((1, 2), (4, 2), (8, 2))
    build = Build(onnx="a", plan="b", profiles={"x": profile})

    def key(**changes: Any) -> str:
        given = {"build": build, "gpu": "H100 9.0", "tensorrt": "10.13", **changes}
        return cache_key(given["build"], tmp_path, given["gpu"], given["tensorrt"])

    first = key()
    assert key() == first
    assert key(build=Build(onnx="other", plan="other", device=1, profiles={"x": profile})) == first
    others = {
        first,
        key(gpu="H200 9.0"),
        key(tensorrt="11.0"),
        key(build=Build(profiles={"x": profile}, precision="FP16")),
        key(build=Build(profiles={"x": profile}, level=5)),
        key(build=Build(profiles={"x": ((1, 2), (2, 2), (8, 2))})),
    }
    (tmp_path / "weights.bin").write_bytes(b"weights")
    others.add(key())
    (tmp_path / "model.onnx").write_bytes(b"other")
    others.add(key())
    assert len(others) == 8
