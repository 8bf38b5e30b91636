"""TensorFlow: one signature of a SavedModel, on the CPU.

Parameters have the names of Triton's backend, whose last release was 25.02: `TF_SIGNATURE_DEF`, `TF_GRAPH_TAG`,
`TF_NUM_INTRA_THREADS`, `TF_NUM_INTER_THREADS`. A positive `optimization.graph.level` turns XLA on, as there.
https://github.com/triton-inference-server/tensorflow_backend#parameters
"""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qinfer.backends.frameworks.base import datatype_of, number, taken
from qinfer.backends.python_host.messages import DeclaredTensor, LoadFramework
from qinfer.backends.python_host.tensor import Array
from qinfer.errors import InferenceFailed, ModelLoadFailed

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read at the import, as is XLA_FLAGS

SIGNATURE, TAG = "TF_SIGNATURE_DEF", "TF_GRAPH_TAG"
_INTRA, _INTER = "TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS"
_DEFAULT_SIGNATURE, _DEFAULT_TAG = "serving_default", "serve"


def load(asked: LoadFramework) -> "SavedModel":
    """Loads a SavedModel."""
    intra, inter = number(asked, _INTRA, asked.threads), number(asked, _INTER, 1)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(intra)
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    tf.config.set_visible_devices([], "GPU")
    try:
        loaded = tf.saved_model.load(asked.path, tags={asked.parameters.get(TAG, _DEFAULT_TAG)})
    except (tf.errors.OpError, OSError, RuntimeError, ValueError) as error:
        raise ModelLoadFailed(f"TensorFlow can't load the SavedModel: {_without_trace(error)}") from error
    signature = asked.parameters.get(SIGNATURE) or _default(loaded.signatures)
    if signature not in loaded.signatures:
        known = ", ".join(sorted(loaded.signatures)) or "no signatures"
        raise ModelLoadFailed(f"parameter '{SIGNATURE}' is '{signature}'; the SavedModel has {known}")
    return SavedModel(tf, loaded, loaded.signatures[signature], has_xla=(asked.graph_level or 0) > 0)


def _default(signatures: Mapping[str, Any]) -> str:
    """Returns the default signature, or the only one."""
    names = [name for name in signatures if not name.startswith("__saved_model")]
    return names[0] if len(names) == 1 else _DEFAULT_SIGNATURE


class SavedModel:
    """A signature of a SavedModel."""

    def __init__(self, tf: Any, loaded: object, signature: Any, *, has_xla: bool) -> None:
        self._tf = tf
        self._loaded = loaded  # the signature does not keep the variables
        specs = signature.structured_input_signature[1]
        self._dtypes = {name: each.dtype for name, each in specs.items()}
        self.inputs: Sequence[DeclaredTensor] = [_declared(name, each) for name, each in sorted(specs.items())]
        outputs = signature.structured_outputs
        self.outputs: Sequence[DeclaredTensor] = [_declared(name, each) for name, each in sorted(outputs.items())]
        self._run = tf.function(lambda **inputs: signature(**inputs), jit_compile=True) if has_xla else signature

    def execute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Runs the signature."""
        tf = self._tf
        given = {name: tf.cast(tf.constant(taken(inputs, name)), dtype) for name, dtype in self._dtypes.items()}
        try:
            outputs = self._run(**given)
        except (tf.errors.OpError, ValueError, TypeError) as error:
            raise InferenceFailed(f"TensorFlow error: {_without_trace(error)}") from error
        return {name: outputs[name].numpy() for name in wanted if name in outputs}


def _declared(name: str, spec: Any) -> DeclaredTensor:
    dims = None if spec.shape.rank is None else tuple(-1 if d is None else int(d) for d in spec.shape)
    return DeclaredTensor(name, datatype_of(name, spec.dtype.as_numpy_dtype), dims)


def _without_trace(error: BaseException) -> str:
    """Returns the message without the trace of the graph's nodes."""
    text = str(getattr(error, "message", "") or error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(_OF_TRACES)]
    return (told or lines or [type(error).__name__])[0]


_OF_TRACES = ("Graph execution error", "Detected at node", "File ", "<stack traces unavailable>", "[[{{node")
