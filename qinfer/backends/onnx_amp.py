"""`auto_mixed_precision` of ONNX models: a copy in FP16, and the program that makes it.

The program keeps nodes in FP32 until the outputs of the warm-up samples, or of random data, differ from the FP32
model's by at most 1 % of an output's largest number; outputs of other types must be equal. The copy is cached by the
content of the version's files, the samples and the versions of the packages. Inputs and outputs keep their datatypes.
"""

import copy
import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qinfer.backends.base import Array
from qinfer.backends.parameters import build_once, content_digest, engine_cache, write_built
from qinfer.backends.samples import whole_samples
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.optimization import AUTO_MIXED_PRECISION
from qinfer.models.spec import ModelSpec
from qinfer.tensors import Tensor, from_numpy, to_numpy

KEPT = "qinfer.kept_fp32"
"""The key of a copy's metadata that says why none of its nodes is in FP16."""

_TOLERANCE = 0.01
_PACKAGE = "onnxconverter_common"


class Conversion(msgspec.Struct, kw_only=True):
    """The input of the program: a sample is name → (datatype, shape, raw data)."""

    onnx: str
    copy: str
    samples: list[dict[str, tuple[str, tuple[int, ...], bytes]]]


def half_copy(spec: ModelSpec, onnx: Path, model_dir: Path) -> Path:
    """Returns the cached copy of an ONNX file in FP16, or makes it; blocking."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ModelLoadFailed(
            f"accelerator '{AUTO_MIXED_PRECISION}' of model '{spec.name}' needs onnxconverter-common, which is not "
            "installed; run: pip install 'qinfer-ml[amp]', or remove the accelerator"
        )
    samples = [
        {name: _raw(from_numpy(name, array)) for name, array in sample.items()}
        for sample in whole_samples(spec, model_dir)
    ]
    job = Conversion(onnx=str(onnx), copy="", samples=samples)
    versions = [version(name) for name in ("onnx", "onnxconverter-common")]
    drawn = hashlib.sha256(msgspec.msgpack.encode(samples)).hexdigest()
    texts = (drawn, onnx.name, *versions)
    target = engine_cache() / "onnxruntime" / content_digest(onnx.parent, *texts) / "model.onnx"
    job.copy = str(target)
    build_once(spec, "FP16 copy", target, "qinfer.backends.onnx_amp", msgspec.msgpack.encode(job))
    return target


def _raw(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return tensor.datatype, tensor.shape, bytes(tensor.data)


def is_close(wanted: Array, found: Array) -> bool:
    """Tells whether an output is that of FP32, within 1 % of its largest number."""
    if wanted.dtype.kind != "f" or not wanted.size:
        return np.array_equal(wanted, found)
    largest = float(np.abs(wanted, where=np.isfinite(wanted), out=np.zeros_like(wanted)).max())
    return np.allclose(found, wanted, rtol=0, atol=_TOLERANCE * largest, equal_nan=True)


def main() -> int:
    """Makes the copy that standard input describes."""
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Conversion)
    return write_built(lambda: converted(job).SerializeToString(), job.onnx, job.copy)


def converted(job: Conversion) -> Any:
    """Returns the model with as many nodes in FP16 as the samples allow, by bisection."""
    import onnx
    import onnxruntime as ort
    from onnxconverter_common.float16 import convert_float_to_float16

    model = onnx.load(job.onnx)
    for number, node in enumerate(model.graph.node):
        node.name = f"qinfer_{number}"  # names select nodes, and may be missing
    samples = [{name: _fed(to_numpy(Tensor(name, *raw))) for name, raw in sample.items()} for sample in job.samples]

    def outputs(tried: Any) -> list[Array]:
        session = ort.InferenceSession(tried.SerializeToString(), providers=["CPUExecutionProvider"])
        return [output for sample in samples for output in session.run(None, sample)]

    def with_half(names: Sequence[str]) -> Any:
        exact = [node.name for node in model.graph.node if node.name not in names]
        made = convert_float_to_float16(copy.deepcopy(model), keep_io_types=True, node_block_list=exact)
        _restore_outputs(made.graph, model.graph)
        return made

    def fits(names: Sequence[str]) -> bool:
        try:
            found = outputs(with_half(names))
        except Exception as error:  # noqa: BLE001  an operator that FP16 has not
            failures.append(str(error).partition("\n")[0])
            return False
        return all(map(is_close, wanted, found))

    wanted = outputs(model)
    half: list[str] = []
    failures: list[str] = []
    waiting = [[node.name for node in model.graph.node]]
    while waiting:
        part = waiting.pop()
        if fits([*half, *part]):
            half += part
        elif len(part) > 1:
            middle = len(part) // 2
            waiting += [part[middle:], part[:middle]]
    if half:
        return with_half(half)
    reason = (
        f"it can't be converted ({failures[-1]})" if failures else f"its outputs differ by more than {_TOLERANCE:.0%}"
    )
    model.metadata_props.add(key=KEPT, value=f"no node is in FP16: {reason}")
    return model


def _restore_outputs(made: Any, original: Any) -> None:
    """Undoes the converter's casts to FP16 behind nodes in FP32 whose outputs are the model's."""
    for port, own in zip(made.output, original.output, strict=True):
        wanted = own.type.tensor_type.elem_type
        if port.type.tensor_type.elem_type != wanted:
            port.type.tensor_type.elem_type = wanted
            (cast,) = (node for node in made.node if own.name in node.output and node.op_type == "Cast")
            cast.attribute[0].i = wanted


def _fed(array: Array) -> Array:
    """Returns BYTES as onnxruntime's strings."""
    return np.vectorize(bytes.decode, otypes=[object])(array) if array.dtype == object and array.size else array


if __name__ == "__main__":
    sys.exit(main())
