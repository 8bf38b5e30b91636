"""Forests of decision trees by treelite's general inference: XGBoost, LightGBM, and treelite's checkpoints.

Parameters, defaults and the names `input__0` and `output__0` are those of Triton's FIL backend: `model_type`
(`xgboost_json`, `xgboost_ubj`, `lightgbm`, `treelite_checkpoint`; by the file's name if absent), `output_class` (or
`is_classifier`), `predict_proba`, `threshold`, `xgboost_allow_unknown_field`. NaN is a missing value.
https://github.com/triton-inference-server/fil_backend/blob/main/docs/model_config.md
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import treelite

from qinfer.backends.frameworks.base import flag, number, taken
from qinfer.backends.python_host.messages import DeclaredTensor, LoadFramework
from qinfer.backends.python_host.tensor import Array
from qinfer.errors import InferenceFailed, ModelLoadFailed

INPUT, OUTPUT = "input__0", "output__0"
_XGBOOST_JSON, _XGBOOST_UBJ, _LIGHTGBM, _CHECKPOINT = "xgboost_json", "xgboost_ubj", "lightgbm", "treelite_checkpoint"
_TYPES = {".json": _XGBOOST_JSON, ".ubj": _XGBOOST_UBJ, ".txt": _LIGHTGBM, ".tl": _CHECKPOINT}
_OTHERS = ("FP64",)
_HALF = 0.5


def load(asked: LoadFramework) -> "Forest":
    """Loads a forest."""
    kind = asked.parameters.get("model_type") or _TYPES.get(Path(asked.path).suffix, "")
    if kind not in _TYPES.values():
        raise ModelLoadFailed(
            f"parameter 'model_type' is '{kind}'; it must be one of {', '.join(_TYPES.values())}"
            f"{'; save the model of XGBoost as JSON or UBJ' if kind == 'xgboost' else ''}"
        )
    try:
        model = _model(kind, asked)
    except (treelite.TreeliteError, OSError) as error:
        raise ModelLoadFailed(f"treelite can't load the forest: {_without_place(error)}") from error
    return Forest(model, asked)


def _model(kind: str, asked: LoadFramework) -> Any:
    if kind == _CHECKPOINT:
        return treelite.Model.deserialize(asked.path)
    if kind == _LIGHTGBM:
        return treelite.frontend.load_lightgbm_model(asked.path)
    return treelite.frontend.load_xgboost_model(
        asked.path,
        format_choice="json" if kind == _XGBOOST_JSON else "ubjson",
        allow_unknown_field=flag(asked, "xgboost_allow_unknown_field"),
    )


class Forest:
    """A forest, and the kind of its answers."""

    def __init__(self, model: Any, asked: LoadFramework) -> None:
        self._model = model
        header = model.get_header_accessor()
        classes, targets = header.get_field("num_class").tolist(), int(header.get_field("num_target")[0])
        if targets != 1:
            raise ModelLoadFailed(f"the forest has {targets} targets; only forests with one are supported")
        self._classes = int(classes[0])
        self._threads = number(asked, "num_threads", asked.threads)
        is_classifier = flag(asked, "output_class") or flag(asked, "is_classifier")
        self._gives_scores = flag(asked, "predict_proba") or not is_classifier
        self._threshold = _threshold(asked)
        self._is_wide = {meta.name for meta in (*asked.inputs, *asked.outputs) if meta.datatype == "FP64"}
        width = self._classes if self._gives_scores else 1
        self.inputs: Sequence[DeclaredTensor] = [DeclaredTensor(INPUT, "FP32", (-1, int(model.num_feature)), _OTHERS)]
        self.outputs: Sequence[DeclaredTensor] = [DeclaredTensor(OUTPUT, "FP32", (-1, width), _OTHERS)]

    def execute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Predicts a batch of rows."""
        rows = taken(inputs, INPUT)
        dtype = np.float64 if self._model.input_type == "float64" else np.float32
        try:
            found = treelite.gtil.predict(self._model, np.ascontiguousarray(rows, dtype), nthread=self._threads)
        except treelite.TreeliteError as error:
            raise InferenceFailed(f"treelite error: {_without_place(error)}") from error
        scores = np.asarray(found).reshape(len(rows), self._classes)
        outputs = scores if self._gives_scores else self._chosen(scores)
        return {OUTPUT: outputs.astype(np.float64 if OUTPUT in self._is_wide else np.float32)}

    def _chosen(self, scores: Array) -> Array:
        """Returns each row's class: the one with the highest score, or of two the second above the threshold."""
        if self._classes == 1:
            return scores > self._threshold
        if self._classes == 2 and self._threshold != _HALF:
            return scores[:, 1:] > self._threshold
        best: Array = scores.argmax(axis=1, keepdims=True)
        return best


def _threshold(asked: LoadFramework) -> float:
    text = asked.parameters.get("threshold", str(_HALF))
    try:
        return float(text)
    except ValueError:
        raise ModelLoadFailed(f"parameter 'threshold' is '{text}'; it must be a number") from None


def _without_place(error: BaseException) -> str:
    """Returns the message without the place in treelite's source."""
    return str(error).partition("Check failed: ")[2].partition(": ")[2] or str(error)
