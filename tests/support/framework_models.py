"""Real models of frameworks for tests, with the frameworks' own answers.

`python -m tests.support.framework_models <framework> <directory>` builds a repository in a process of its own, so that
no test imports a framework: `<directory>/<model>/1/…`, and `<directory>.answers/<model>.npz`, which holds an array
`in.<input>` or `out.<output>` for each tensor.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]
SEED = 7
PACKAGES = {
    "tensorflow": ("tensorflow",),
    "litert": ("ai_edge_litert", "tensorflow"),
    "forest": ("treelite", "xgboost", "lightgbm", "sklearn"),
    "jax": ("jax",),
    "mlflow": ("mlflow", "pandas"),
    "mixed": ("tensorflow", "jax", "treelite", "xgboost", "ai_edge_litert"),
}


class Sample(NamedTuple):
    """Inputs, and what the framework makes of them in its own process."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def needs(framework: str) -> pytest.MarkDecorator:
    """Skips tests where the framework's packages are missing."""
    missing = [name for name in PACKAGES[framework] if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: run scripts/setup frameworks")


def build(framework: str, directory: Path) -> Path:
    """Builds a framework's repository; blocking, for seconds."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.framework_models", framework, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


def sample(repository: Path, model: str) -> Sample:
    """Reads the sample of a model."""
    with np.load(_answers(repository) / f"{model}.npz") as found:
        arrays = {name: _plain(found[name]) for name in found.files}
    return Sample(
        {name[3:]: array for name, array in arrays.items() if name.startswith("in.")},
        {name[4:]: array for name, array in arrays.items() if name.startswith("out.")},
    )


def _answers(repository: Path) -> Path:
    return repository.with_name(f"{repository.name}.answers")


def _plain(array: Array) -> Array:
    return array.astype(object) if array.dtype.kind == "S" else array


class _Builder:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rng = np.random.default_rng(SEED)
        _answers(directory).mkdir(parents=True, exist_ok=True)

    def version(self, model: str, config: str = "") -> Path:
        path = self.directory / model / "1"
        path.mkdir(parents=True, exist_ok=True)
        if config:
            (path.parent / "config.pbtxt").write_text(config)
        return path

    def keep(self, model: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        named = {f"in.{name}": np.asarray(array) for name, array in inputs.items()}
        named |= {f"out.{name}": np.asarray(array) for name, array in outputs.items()}
        plain = {name: array.astype("S") if array.dtype == object else array for name, array in named.items()}
        np.savez(_answers(self.directory) / f"{model}.npz", allow_pickle=False, **plain)

    def features(self, rows: int, columns: int) -> Array:
        return self.rng.normal(size=(rows, columns)).astype(np.float32)


def parameter(key: str, value: str) -> str:
    """Returns a parameter of a `config.pbtxt`."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def _saved_model(made: _Builder) -> Any:
    import tensorflow as tf

    class Model(tf.Module):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.weights = tf.Variable(made.features(4, 3))

        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])  # type: ignore[untyped-decorator,unused-ignore]
        def classify(self, x: Any) -> Any:
            return {"scores": tf.nn.softmax(x @ self.weights), "top": tf.argmax(x @ self.weights, axis=1)[:, None]}

        @tf.function(input_signature=[tf.TensorSpec([None, None], tf.string, name="text")])  # type: ignore[untyped-decorator,unused-ignore]
        def shout(self, text: Any) -> Any:
            return {"upper": tf.strings.upper(text), "length": tf.strings.length(text)}

        @tf.function(
            input_signature=[tf.TensorSpec([2, 2], tf.float32, name="m"), tf.TensorSpec([], tf.float32, name="k")]
        )  # type: ignore[untyped-decorator,unused-ignore]
        def scale(self, m: Any, k: Any) -> Any:
            tf.debugging.assert_greater(k, -100.0, message="k must be above -100")
            return {"scaled": m * k}

    return tf, Model()


def tensorflow(made: _Builder) -> None:
    tf, model = _saved_model(made)
    signatures = {"serving_default": model.classify, "shout": model.shout, "scale": model.scale}
    own = {"": "default", "shout": "shouting", "scale": "scaling"}
    for signature, name in own.items():
        config = 'backend: "tensorflow"\n' + parameter("TF_SIGNATURE_DEF", signature) if signature else ""
        tf.saved_model.save(model, str(made.version(name, config) / "model.savedmodel"), signatures=signatures)
    xla = (
        'platform: "tensorflow_savedmodel" max_batch_size: 8 optimization { graph { level: 1 } }\n'
        'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }\n'
        'output { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] }\n'
        'output { name: "top" data_type: TYPE_INT64 dims: [ 1 ] }\n'
    )
    tf.saved_model.save(model, str(made.version("xla", xla) / "model.savedmodel"), signatures=signatures)
    x = made.features(3, 4)
    answers = {name: value.numpy() for name, value in model.classify(tf.constant(x)).items()}
    for name in ("default", "xla"):
        made.keep(name, {"x": x}, answers)
    text = np.array([[b"ab", b"\xc3\xa9\xff"], [b"", b"Z"]], object)
    shouted = {name: value.numpy() for name, value in model.shout(tf.constant(text)).items()}
    made.keep("shouting", {"text": text}, shouted)
    m = made.features(2, 2)
    made.keep("scaling", {"m": m, "k": np.array([2.5], np.float32)}, {"scaled": m * np.float32(2.5)})


def _unsigned(content: bytes) -> bytes:
    """Returns a model of LiteRT without its signatures."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    read = schema.ModelT.InitFromPackedBuf(content, 0)
    read.signatureDefs = None
    packed = flatbuffers.Builder()
    packed.Finish(read.Pack(packed), b"TFL3")
    return bytes(packed.Output())


def litert(made: _Builder) -> None:
    from ai_edge_litert.interpreter import Interpreter

    tf, model = _saved_model(made)

    def converted(function: Any, *, quantised: bool) -> bytes:
        converter = tf.lite.TFLiteConverter.from_concrete_functions([function], model)
        if quantised:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.representative_dataset = lambda: ([made.features(1, 4)] for _ in range(50))
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            converter.inference_input_type = converter.inference_output_type = tf.int8
        return bytes(converter.convert())

    @tf.function(input_signature=[tf.TensorSpec([1, 4], tf.float32, name="x")])  # type: ignore[untyped-decorator,unused-ignore]
    def fixed(x: Any) -> Any:
        return tf.nn.relu(x @ model.weights)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])  # type: ignore[untyped-decorator,unused-ignore]
    def open_rows(x: Any) -> Any:
        return tf.nn.softmax(x @ model.weights)

    directory = made.directory.with_name("saved")
    tf.saved_model.save(model, str(directory), signatures={"serving_default": model.classify, "double": fixed})
    keys = ["serving_default", "double"]
    signed = bytes(tf.lite.TFLiteConverter.from_saved_model(str(directory), signature_keys=keys).convert())
    plain = _unsigned(converted(fixed.get_concrete_function(), quantised=False))
    int8 = _unsigned(converted(open_rows.get_concrete_function(), quantised=True))
    resized = 'backend: "litert" max_batch_size: 8\n'
    for name, content, config in (
        ("signed", signed, ""),
        ("second", signed, 'backend: "litert"\n' + parameter("signature", "double")),
        ("fixed", plain, ""),
        ("resized", plain, resized),
        ("int8", int8, ""),
    ):
        (made.version(name, config) / "model.tflite").write_bytes(content)

    def names(content: bytes) -> tuple[Any, Any]:
        interpreter = Interpreter(model_content=content)
        return interpreter.get_input_details()[0], interpreter.get_output_details()[0]

    def run(content: bytes, x: Array) -> Array:
        interpreter = Interpreter(model_content=content, num_threads=1)
        given, got = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
        interpreter.resize_tensor_input(given["index"], x.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(given["index"], x)
        interpreter.invoke()
        return np.array(interpreter.get_tensor(got["index"]))

    x = made.features(3, 4)
    runner = Interpreter(model_content=signed).get_signature_runner("serving_default")
    made.keep("signed", {"x": x}, runner(x=x))
    second = Interpreter(model_content=signed).get_signature_runner("double")(x=x[:1])
    made.keep("second", {"x": x[:1]}, second)
    given, got = names(plain)
    made.keep("fixed", {given["name"]: x[:1]}, {got["name"]: run(plain, x[:1])})
    made.keep("resized", {given["name"]: x}, {got["name"]: run(plain, x)})
    given, got = names(int8)
    scale, zero = given["quantization"]
    stored = np.clip(np.rint(x / scale) + zero, -128, 127).astype(np.int8)
    raw = run(int8, stored)
    made.keep("int8", {given["name"]: stored}, {got["name"]: raw})
    config = (
        f'backend: "litert" max_batch_size: 8\n'
        f'input {{ name: "{given["name"]}" data_type: TYPE_FP32 dims: [ 4 ] }}\n'
        f'output {{ name: "{got["name"]}" data_type: TYPE_FP32 dims: [ 3 ] }}\n'
    )
    (made.version("real", config) / "model.tflite").write_bytes(int8)
    scale, zero = got["quantization"]
    made.keep("real", {given["name"]: x}, {got["name"]: (raw.astype(np.float32) - zero) * np.float32(scale)})


def forest(made: _Builder) -> None:
    import lightgbm
    import treelite
    import xgboost
    from sklearn.ensemble import ExtraTreesClassifier, RandomForestClassifier, RandomForestRegressor

    rows = made.features(400, 6)
    plain = rows.copy()
    rows[made.rng.random(rows.shape) < 0.1] = np.nan
    two = (plain[:, 0] + plain[:, 1] > 0).astype(int)
    three = two + (plain[:, 2] > 0)
    ask = rows[:40]

    def xgb(objective: str, labels: Array, **more: Any) -> Any:
        options = {"objective": objective, "max_depth": 4, "nthread": 1, "seed": SEED, **more}
        return xgboost.train(options, xgboost.DMatrix(rows, labels), 20)

    def put(model: str, save: Any, file: str, parameters: Mapping[str, str], answers: Array, x: Array = ask) -> None:
        config = 'backend: "forest"\n' + "".join(parameter(*pair) for pair in parameters.items()) if parameters else ""
        save(str(made.version(model, config) / file))
        made.keep(model, {"input__0": x}, {"output__0": answers.reshape(len(x), -1).astype(np.float32)})

    binary, multi = xgb("binary:logistic", two), xgb("multi:softprob", three, num_class=3)
    scores, of_three = binary.predict(xgboost.DMatrix(ask)), multi.predict(xgboost.DMatrix(ask))
    classes = {"output_class": "true"}
    put("binary", binary.save_model, "xgboost.json", {}, scores)
    put("chosen", binary.save_model, "xgboost.ubj", classes, scores > 0.5)
    put("strict", binary.save_model, "xgboost.ubj", {**classes, "threshold": "0.8"}, scores > 0.8)
    put("multi", multi.save_model, "xgboost.ubj", {**classes, "predict_proba": "true"}, of_three)
    put("best", multi.save_model, "xgboost.json", classes, of_three.argmax(axis=1))
    price = xgb("reg:squarederror", plain[:, 0] * 3 + 1)
    put("price", price.save_model, "xgboost.ubj", {}, price.predict(xgboost.DMatrix(ask)))

    kinds = rows.copy()
    kinds[:, 5] = made.rng.integers(0, 9, 400)
    options = {"objective": "binary", "verbose": -1, "num_threads": 1, "min_data_per_group": 1, "max_cat_to_onehot": 1}
    data = lightgbm.Dataset(kinds, (kinds[:, 5] % 3 == 0).astype(int), categorical_feature=[5], params=options)
    light = lightgbm.train(options, data, 20)
    unknown = kinds[:40].copy()
    unknown[:5, 5], unknown[5:10, 5] = np.nan, 77
    put("light", light.save_model, "model.txt", {}, light.predict(unknown), unknown)

    codes = {"feature_types": ["float"] * 5 + ["c"], "enable_categorical": True}
    labelled = xgboost.DMatrix(kinds, (kinds[:, 5] % 3 == 0).astype(int), **codes)
    coded = xgboost.train({"objective": "binary:logistic", "max_depth": 4, "nthread": 1}, labelled, 20)
    known = kinds[:40].copy()
    known[:5, 5] = np.nan
    put("coded", coded.save_model, "xgboost.ubj", {}, coded.predict(xgboost.DMatrix(known, **codes)), known)

    for name, model, labels in (
        ("forest", RandomForestClassifier(10, random_state=SEED), three),
        ("extra", ExtraTreesClassifier(10, random_state=SEED), two),
        ("mean", RandomForestRegressor(10, random_state=SEED), plain[:, 0]),
    ):
        model.fit(plain, labels)
        found = model.predict_proba(plain[:40]) if hasattr(model, "predict_proba") else model.predict(plain[:40])
        put(name, treelite.sklearn.import_model(model).serialize, "checkpoint.tl", {}, found, plain[:40])


def jax(made: _Builder) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    from jax import export

    (rows,) = export.symbolic_shape("rows")
    weights = made.features(4, 3)

    def classify(arrays: Any) -> Any:
        return {"scores": jax.nn.softmax(arrays["x"] @ weights), "sum": jnp.sum(arrays["x"], axis=-1, keepdims=True)}

    def pair(a: Any, b: Any) -> Any:
        return a + b, a * b

    def write(model: str, function: Any, *shapes: Any) -> None:
        (made.version(model) / "model.jax").write_bytes(export.export(jax.jit(function))(*shapes).serialize())

    write("classify", classify, {"x": jax.ShapeDtypeStruct((rows, 4), jnp.float32)})
    write("pair", pair, *[jax.ShapeDtypeStruct((2,), jnp.float32)] * 2)
    x = made.features(3, 4)
    made.keep("classify", {"x": x}, classify({"x": x}))
    a, b = made.features(2, 2)
    made.keep("pair", {"INPUT__0": a, "INPUT__1": b}, {"OUTPUT__0": a + b, "OUTPUT__1": a * b})


_CODE = """
import mlflow


class Mixer(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input, params=None):
        return model_input["a"] * 2 + model_input["b"] + model_input["word"].str.len()


mlflow.models.set_model(Mixer())
"""


def mlflow(made: _Builder) -> None:
    import mlflow
    import pandas as pd
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    code = made.directory.with_name("mixer.py")
    code.write_text(_CODE)
    columns = Schema([ColSpec("double", "a"), ColSpec("long", "b"), ColSpec("string", "word")])
    signature = ModelSignature(inputs=columns, outputs=Schema([ColSpec("double", "mixed")]))
    version = made.version("mixer")
    version.rmdir()
    mlflow.pyfunc.save_model(str(version), python_model=str(code), signature=signature, pip_requirements=[])
    frame = pd.DataFrame({"a": [0.5, 1.5], "b": [3, 4], "word": ["é", "four"]})
    predicted = mlflow.pyfunc.load_model(str(version)).predict(frame)
    words = np.array([word.encode() for word in frame["word"]], object)
    inputs = {"a": frame["a"].to_numpy(), "b": frame["b"].to_numpy(np.int64), "word": words}
    made.keep("mixer", {n: c[:, None] for n, c in inputs.items()}, {"mixed": predicted.to_numpy(np.float64)[:, None]})


def mixed(made: _Builder) -> None:
    """Builds the ensemble `mixed`: TensorFlow's scores, bent by JAX, priced by a forest, scaled by LiteRT."""
    tf, model = _saved_model(made)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import xgboost
    from ai_edge_litert.interpreter import Interpreter
    from jax import export

    own, weights, x = made.directory, made.features(3, 3), made.features(64, 4)
    signatures = {"serving_default": model.classify}
    tf.saved_model.save(model, str(made.version("scores") / "model.savedmodel"), signatures=signatures)

    def bend(arrays: Any) -> Any:
        return {"bent": jnp.tanh(arrays["scores"] @ weights)}

    (rows,) = export.symbolic_shape("rows")
    shape = {"scores": jax.ShapeDtypeStruct((rows, 3), jnp.float32)}
    (made.version("bend") / "model.jax").write_bytes(export.export(jax.jit(bend))(shape).serialize())
    scores = model.classify(tf.constant(x))["scores"].numpy()
    bent = np.asarray(bend({"scores": scores})["bent"])
    options = {"objective": "reg:squarederror", "max_depth": 3, "nthread": 1, "seed": SEED}
    forest = xgboost.train(options, xgboost.DMatrix(bent, bent.sum(axis=1)), 10)
    forest.save_model(str(made.version("price") / "xgboost.ubj"))

    @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.float32, name="price")])  # type: ignore[untyped-decorator,unused-ignore]
    def scale(price: Any) -> Any:
        return {"total": price * 100.0 + 1.0}

    directory = own.with_name("scale")
    holder = tf.Module()
    holder.scale = scale
    tf.saved_model.save(holder, str(directory), signatures={"serving_default": scale})
    content = bytes(tf.lite.TFLiteConverter.from_saved_model(str(directory)).convert())
    (made.version("scale") / "model.tflite").write_bytes(content)
    made.version("mixed", _MIXED)
    prices = forest.predict(xgboost.DMatrix(bent))[:, None]
    totals = Interpreter(model_content=content).get_signature_runner("serving_default")(price=prices)
    made.keep("mixed", {"x": x}, {"scores": scores, "total": totals["total"]})


_MIXED = (
    """
platform: "ensemble" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "total" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling {
"""
    + "".join(
        f"""step {{
  model_name: "{model}" model_version: -1
  input_map {{ key: "{given}" value: "{value}" }} output_map {{ key: "{made}" value: "{name}" }}
}}
"""
        for model, given, value, made, name in (
            ("scores", "x", "x", "scores", "scores"),
            ("bend", "scores", "scores", "bent", "bent"),
            ("price", "input__0", "bent", "output__0", "price"),
            ("scale", "price", "price", "total", "total"),
        )
    )
    + "}"
)


if __name__ == "__main__":
    builders = {each.__name__: each for each in (tensorflow, litert, forest, jax, mlflow, mixed)}
    builders[sys.argv[1]](_Builder(Path(sys.argv[2])))
