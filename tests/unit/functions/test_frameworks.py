"""Models of frameworks in this process: the answers are the framework's own, and what it does not say is an error."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pandas as pd
import pytest
import torch
from onnx import TensorProto, helper
from sklearn.cluster import DBSCAN, KMeans
from sklearn.compose import make_column_transformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import qinfer
from qinfer.errors import InferenceFailed
from qinfer.functions.hints import HintError, Signature, read_function

X = np.array([[0.0, 1.0], [1.0, 0.0], [4.0, 5.0], [5.0, 4.0]])
WORDS = np.array(["low", "low", "high", "high"])
TWINS = pd.DataFrame({"a b": [1], "a_b": [2]})
TABLE = pd.DataFrame({"size (cm)": [1.0, 2.0, 8.0, 9.0], "colour": ["red", "blue", "red", "green"]})


def ports(model: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    signature: Signature = read_function(model).signature
    return [(port.name, port.datatype, port.shape) for port in (*signature.inputs, *signature.outputs)]


def test_an_estimator_says_its_features_and_its_labels() -> None:
    estimator = LogisticRegression().fit(X, WORDS)

    model = qinfer.from_sklearn(estimator, method=["predict", "predict_proba"])

    assert ports(model) == [("x", "FP64", (2,)), ("predict", "BYTES", ()), ("predict_proba", "FP64", (2,))]
    found = qinfer.local(model)(X)
    assert found["predict"] == WORDS.tolist()
    np.testing.assert_allclose(found["predict_proba"], estimator.predict_proba(X))


def test_the_method_of_an_estimator_without_predict_is_transform() -> None:
    model = qinfer.from_sklearn(StandardScaler().fit(X), example=X[:1].astype(np.float32))

    assert ports(model) == [("x", "FP32", (2,)), ("transform", "FP32", (2,))]
    assert qinfer.local(model)(x=X.astype(np.float32))["transform"].mean() == pytest.approx(0)


def test_each_column_of_a_table_is_an_input() -> None:
    encode = make_column_transformer((OneHotEncoder(), ["colour"]), remainder="passthrough")
    estimator = make_pipeline(encode, LinearRegression()).fit(TABLE, [1, 2, 3, 4])

    model = qinfer.from_sklearn(estimator, example=TABLE[:2])

    assert ports(model) == [("size_cm", "FP64", ()), ("colour", "BYTES", ()), ("predict", "FP64", ())]
    found = qinfer.local(model)(size_cm=[2.0, 9.0], colour=["blue", "green"])["predict"]
    np.testing.assert_allclose(found, estimator.predict(TABLE[1:4:2]))


def test_texts_and_sparse_results() -> None:
    texts = ["a good day", "a bad day", "so bad"]
    vectors = TfidfVectorizer().fit(texts)
    classes = make_pipeline(TfidfVectorizer(), LogisticRegression(class_weight="balanced")).fit(texts, [1, 0, 0])

    found = qinfer.local(qinfer.from_sklearn(vectors, example=pd.Series(texts)))(["good", "é"])["transform"]

    np.testing.assert_allclose(found, vectors.transform(["good", "é"]).toarray())
    assert qinfer.local(qinfer.from_sklearn(classes, example=texts))(["good"])["predict"].tolist() == [1]


@pytest.mark.parametrize(
    ("estimator", "more", "message"),
    [
        (LogisticRegression(), {}, "it is not fitted, or does not say what features it takes; fit it, and give"),
        (TfidfVectorizer(), {"example": ["a"]}, "it does not run on the example; fit it"),
        (TfidfVectorizer().fit(["a text"]), {}, "does not say what features it takes"),
        (LinearRegression().fit(TABLE[["size (cm)"]], [1, 2, 3, 4]), {}, r"unknown types, size \(cm\); give example"),
        (LinearRegression().fit(X, [1, 2, 3, 4]), {"example": X[0]}, "does not run on the example; .*Expected 2D"),
        (
            LinearRegression().fit(X, [1, 2, 3, 4]),
            {"method": "predict_proba"},
            "no method 'predict_proba'; give method=",
        ),
        (DBSCAN().fit(X), {}, "no method 'transform'; give method="),
        (OneHotEncoder().fit([["a"], ["b"]]), {"example": [["a"]]}, "is an array of texts; give a table"),
        (
            MultiOutputClassifier(LogisticRegression()).fit(X, [[0, 1], [1, 0], [0, 0], [1, 1]]),
            {"method": "predict_proba"},
            "'predict_proba' returns a list of arrays, one for each target; write a function",
        ),
        (StandardScaler().fit(TWINS), {"example": TWINS}, "have one name as arguments"),
    ],
)
def test_an_estimator_that_says_too_little_is_an_error_with_the_remedy(
    estimator: Any, more: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(HintError, match=rf"test_frameworks\.py:\d+: from_sklearn\(\w+\): .*{message}"):
        qinfer.from_sklearn(estimator, **more)


class Result(NamedTuple):
    total: torch.Tensor
    each: torch.Tensor


class Two(torch.nn.Module):
    """Gives what it is told to."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.form, self.dropout = form, torch.nn.Dropout(0.9)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        total, each = self.dropout((ids * mask).sum(1).float()), ids * 2
        if self.form == "named":
            return Result(total, each)
        return {"total": total, "each": each} if self.form == "dict" else (total, each)


IDS = torch.tensor([[1, 2, 3]])


def test_a_module_gets_the_batch_and_two_examples_say_which_dimensions_vary() -> None:
    model = qinfer.from_torch(Two(), (IDS, IDS > 1), (IDS[:, :2], IDS[:, :2] > 1))

    assert ports(model) == [
        ("ids", "INT64", (-1,)),
        ("mask", "BOOL", (-1,)),
        ("total", "FP32", ()),
        ("each", "INT64", (-1,)),
    ]
    found = qinfer.local(model)(np.array([[1, 2], [3, 4]]), np.array([[True, False], [True, True]]))
    assert (found["total"].tolist(), found["each"].tolist()) == ([1, 7], [[2, 4], [6, 8]])


@pytest.mark.parametrize(("form", "output"), [("named", "output"), ("tuple", ("total", "each"))])
def test_outputs_have_the_names_of_a_named_tuple_or_given_names(form: str, output: Any) -> None:
    model = qinfer.from_torch(Two(form), {"ids": IDS, "mask": IDS}, output=output)

    assert [port[0] for port in ports(model)] == ["ids", "mask", "total", "each"]


def test_names_for_a_tuple_do_not_name_the_rows_of_one_tensor() -> None:
    with pytest.raises(HintError, match=r"its result has 1 parts, and output=\('a', 'b'\) names 2"):
        qinfer.from_torch(torch.nn.Linear(2, 2), torch.zeros(1, 2), output=("a", "b"))


def test_half_floats_cross_as_floats() -> None:
    model = qinfer.from_torch(torch.nn.Linear(2, 3, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.bfloat16))

    assert ports(model) == [("input", "FP32", (2,)), ("output", "FP32", (3,))]
    assert qinfer.local(model)(np.ones((5, 2), np.float32))["output"].shape == (5, 3)


@pytest.mark.parametrize(
    ("module", "examples", "message"),
    [
        (torch.nn.Linear(2, 3), (), "needs an example"),
        (torch.nn.Linear(2, 3), (torch.zeros(1, 4),), "does not run on an example repeated as a batch of two"),
        (
            torch.nn.Linear(2, 3),
            (torch.zeros(1, 2), torch.zeros(1, 2, 2)),
            "'input' has another type or rank in another example",
        ),
        (torch.nn.Linear(2, 3), ([1.0, 2.0],), "names too few arguments"),
        (torch.nn.Linear(2, 3), (torch.tensor(1.0),), "'input' of the example is no tensor with a batch dimension"),
        (torch.nn.Flatten(0), (torch.zeros(1, 2),), r"'output' has shape \[4\] for 2 items"),
        (Two("tuple"), ((IDS, IDS),), "its result has a tuple where a named tensor must be"),
        (torch.nn.LSTM(2, 3), (torch.zeros(1, 4, 2),), "its result has a tuple where a named tensor must be"),
    ],
)
def test_a_module_that_says_too_little_is_an_error_with_the_remedy(module: Any, examples: Any, message: str) -> None:
    with pytest.raises(HintError, match=rf"test_frameworks\.py:\d+: from_torch\(\w+\): .*{message}"):
        qinfer.from_torch(module, *examples)


def onnx_file(path: Path, nodes: list[Any], takes: list[Any], gives: list[Any]) -> Path:
    graph = helper.make_graph(nodes, "graph", takes, gives)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def test_a_graph_says_all_but_the_names_of_python(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    path = onnx_file(
        tmp_path / "my graph.onnx",
        [helper.make_node("Add", ["a:0", "b"], ["sum"]), helper.make_node("Identity", ["t"], ["same"])],
        [
            value("a:0", TensorProto.FLOAT, ["n", 2]),
            value("b", TensorProto.FLOAT, ["n", 1]),
            value("t", TensorProto.STRING, ["n", 1]),
        ],
        [value("sum", TensorProto.FLOAT, ["n", 2]), value("same", TensorProto.STRING, ["n", 1])],
    )

    model = qinfer.from_onnx(path)

    assert list(inspect.signature(model.predict).parameters) == ["self", "a_0", "b", "t"]
    found = qinfer.local(model)(a_0=np.array([[1, 2]], np.float32), b=[3.0], t=["é"])
    assert (found["sum"].tolist(), found["same"]) == ([[4, 5]], ["é"])


def test_a_graph_without_a_batch_or_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    fixed = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])
    path = onnx_file(tmp_path / "fixed.onnx", [helper.make_node("Identity", ["x"], ["y"])], [fixed], [fixed])

    with pytest.raises(HintError, match=r"'x' has the shape \[1, 2\]; make its first dimension variable"):
        qinfer.from_onnx(path)
    with pytest.raises(HintError, match="ONNX Runtime can't load"):
        qinfer.from_onnx(tmp_path / "none.onnx")


def pipeline_of(task: str, **more: Any) -> Any:
    """Returns a pipeline of random weights and a vocabulary of its own; nothing is downloaded."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, "a": 3, "good": 4, "day": 5}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    config = transformers.BertConfig(
        vocab_size=6, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    kinds = {
        "text-classification": transformers.BertForSequenceClassification,
        "token-classification": transformers.BertForTokenClassification,
        "feature-extraction": transformers.BertModel,
        "fill-mask": transformers.BertForMaskedLM,
    }
    torch.manual_seed(0)
    return transformers.pipeline(task, model=kinds[task](config).eval(), tokenizer=tokenizer, device="cpu", **more)


def test_a_pipeline_says_its_members() -> None:
    pipeline = pipeline_of("text-classification")

    model = qinfer.from_transformers(pipeline)

    assert ports(model) == [("text", "BYTES", ()), ("label", "BYTES", ()), ("score", "FP64", ())]
    found, own = qinfer.local(model)(["a good day", "day"]), pipeline(["a good day", "day"])
    assert found["label"] == [each["label"] for each in own]
    np.testing.assert_allclose(found["score"], [each["score"] for each in own], rtol=1e-5)


def test_a_pipeline_may_give_several_of_each_member() -> None:
    model = qinfer.from_transformers(pipeline_of("fill-mask", top_k=2), example=["a [MASK]", "[MASK] good day"])

    assert ports(model)[1:3] == [("score", "FP64", (2,)), ("token", "INT64", (2,))]
    assert qinfer.local(model)(["good [MASK]"])["token_str"].shape == (1, 2)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("token-classification", "it does not run on the example; give example=[…], or write a function"),
        ("feature-extraction", "'output' has another shape for each item; write a function with @qinfer.model"),
    ],
)
def test_a_pipeline_whose_results_vary_is_an_error_with_the_remedy(task: str, message: str) -> None:
    with pytest.raises(HintError, match=re.escape(message)):
        qinfer.from_transformers(pipeline_of(task))


def test_a_pipeline_of_other_inputs_is_an_error() -> None:
    class Other:
        task, tokenizer, feature_extractor = "automatic-speech-recognition", 1, 2

    with pytest.raises(HintError, match="speech-recognition takes more than texts or images; write a function"):
        qinfer.from_transformers(Other())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinfer.functions.frameworks.find_spec", lambda _: None)

    with pytest.raises(HintError, match=r"needs mlflow; install it by: pip install 'qinfer-ml\[mlflow\]'"):
        qinfer.from_mlflow("models:/iris/1")


def test_inputs_are_checked_as_hints_say() -> None:
    model = qinfer.from_sklearn(KMeans(2, n_init=1).fit(X), name="groups", max_batch_size=4)

    assert read_function(model).options.name == "groups"
    assert qinfer.local(model)(X)["predict"].dtype == np.int32
    with pytest.raises(InferenceFailed, match="input 'x' has items of"):
        qinfer.local(model)([[1.0, 2.0, 3.0]])
    with pytest.raises(TypeError, match="has no option 'batch'"):
        qinfer.from_sklearn(KMeans(2, n_init=1).fit(X), batch=3)  # type: ignore[call-arg]
