"""Outputs of models → Label Studio's results, scores and versions."""

from typing import Any

import numpy as np
import pytest

from qinfer.core.messages import Failure, Response
from qinfer.errors import InferenceFailed, InvalidRequest, OutputMismatch
from qinfer.labeling.mapping import Mapping
from qinfer.labeling.results import Array, Prediction
from qinfer.labeling.rules import LabelConfig, parse_label_config
from qinfer.tensors import from_numpy

CHOICE: dict[str, Any] = {"type": "choices", "from_name": "mood", "to_name": "text"}
BOX: dict[str, Any] = {
    "type": "rectanglelabels",
    "from_name": "box",
    "to_name": "image",
    "boxes": "B",
    "units": "fraction",
    "labels": ["cat", "dog"],
}


def f32(*values: object) -> Array:
    return np.array(values, np.float32)


def predict(
    rule: dict[str, Any],
    outputs: dict[str, Array],
    *,
    config: LabelConfig | None = None,
    data: dict[str, Any] | None = None,
    score: str = "mean",
) -> Prediction:
    mapping = Mapping(name="n", model="m", results=[rule], score=score)
    return mapping.prediction_of({"id": 7, "data": data or {}}, outputs, "m:1", config)


def labels(prediction: Prediction) -> list[Any]:
    return [item["value"].get("choices") or item["value"].get("rectanglelabels") for item in prediction.result]


# --- choices ---

SCORES = {**CHOICE, "scores": "P", "labels": ["neg", "neutral", "pos"]}


def test_a_prediction_is_what_label_studio_takes() -> None:
    """Result, score and version; of a batched response, and the same each time."""
    mapping = Mapping(name="n", model="m", results=[SCORES])
    response = Response(
        request_id="r", model="m", version=3, outputs=(from_numpy("P", np.array([[0.25, 0.125, 0.625]], np.float32)),)
    )

    made = mapping.prediction({"id": 7, "data": {}}, response)

    assert made.as_json() == {
        "result": [
            {
                "id": "7676236331",
                "from_name": "mood",
                "to_name": "text",
                "type": "choices",
                "value": {"choices": ["pos"]},
                "score": 0.625,
            }
        ],
        "score": 0.625,
        "model_version": "m:3",
    }


def test_ids_tell_results_apart() -> None:
    """Of another task, another version, another box."""
    mapping = Mapping(name="n", model="m", results=[{**BOX, "labels": ["cat"]}])
    outputs = {"B": f32([0, 0, 1, 1], [0, 0, 0.5, 0.5])}

    ids = [
        item["id"]
        for task, version in ((1, "m:1"), (2, "m:1"), (1, "m:2"))
        for item in mapping.prediction_of({"id": task, "data": {}}, outputs, version).result
    ]

    assert len(set(ids)) == 6


@pytest.mark.parametrize(
    ("more", "expected", "score"),
    [
        ({}, [["pos"]], 0.6),
        ({"top": 2}, [["pos", "neg"]], 0.45),
        ({"top": 5, "threshold": 0.2}, [["pos", "neg"]], 0.45),
        ({"threshold": 0.7}, [], 0.6),
        ({"rename": {"pos": "Good"}}, [["Good"]], 0.6),
        ({"top": 2, "rename": {"pos": "Sure", "neg": "Sure"}}, [["Sure"]], 0.6),
    ],
)
def test_choices_of_scores(more: dict[str, Any], expected: list[Any], score: float) -> None:
    """The best, as many as may be, that are sure enough; without any, how sure the model was is still known."""
    made = predict({**SCORES, **more}, {"P": f32([0.3, 0.1, 0.6])})

    assert labels(made) == expected
    assert made.score == pytest.approx(score)


def test_scores_of_logits() -> None:
    """What is no score is made one when the mapping says how, and else refused."""
    logits = {"P": f32(0, 0, 2)}

    assert predict({**SCORES, "activation": "softmax"}, logits).score == pytest.approx(0.7870, abs=1e-4)
    assert predict({**SCORES, "activation": "sigmoid"}, logits).score == pytest.approx(0.8808, abs=1e-4)
    assert predict({**SCORES, "activation": "sigmoid"}, {"P": f32(0, 0, 1e4)}).score == 1.0
    with pytest.raises(OutputMismatch, match="'P' has the score 2; scores are 0 … 1: set activation"):
        predict(SCORES, logits)


def test_rounding_beyond_one_is_not_refused() -> None:
    """FP16 and FP32 sums are not exact."""
    assert predict(SCORES, {"P": f32(0, -1e-7, 1.0001)}).score == 1.0


LABEL = {**CHOICE, "label": "L"}


@pytest.mark.parametrize(
    ("more", "outputs", "expected", "score"),
    [
        ({}, {"L": np.array([[b"pdf"]], object)}, [["pdf"]], 0.0),
        ({"score": "S"}, {"L": np.array(["pdf"], object), "S": f32(0.9)}, [["pdf"]], 0.9),
        ({"score": "S", "top": 2}, {"L": np.array(["a", "b"], object), "S": f32(0.25, 0.75)}, [["b", "a"]], 0.5),
        ({"score": "S", "threshold": 0.95}, {"L": np.array(["pdf"], object), "S": f32(0.9)}, [], 0.9),
        ({"labels": ["a", "b"]}, {"L": np.array([1], np.int64)}, [["b"]], 0.0),
        ({}, {"L": np.array([b""], object)}, [], 0.0),
        ({}, {"L": np.array([], object)}, [], 0.0),
    ],
)
def test_choices_by_name(more: dict[str, Any], outputs: dict[str, Array], expected: list[Any], score: float) -> None:
    """Text, or numbers that count the labels; without scores the prediction has none."""
    made = predict({**LABEL, **more}, outputs)

    assert labels(made) == expected
    assert made.score == pytest.approx(score)
    assert all(("score" in item) == ("score" in more) for item in made.result)


CONFIG = parse_label_config('<View><Choices name="mood" toName="text"><Choice value="doc"/></Choices></View>')


def test_labels_that_the_label_config_lacks() -> None:
    """They fail the task with the remedy, unless they are renamed or dropped."""
    outputs = {"L": np.array(["pdf"], object)}

    with pytest.raises(InvalidRequest, match=r"the model says 'pdf', which control 'mood' .* does not have"):
        predict(LABEL, outputs, config=CONFIG)
    assert labels(predict({**LABEL, "rename": {"pdf": "doc"}}, outputs, config=CONFIG)) == [["doc"]]
    assert labels(predict({**LABEL, "unknown": "drop"}, outputs, config=CONFIG)) == []
    with pytest.raises(InvalidRequest, match="no control 'mood'"):
        predict(LABEL, outputs, config=parse_label_config(""))


# --- boxes ---


def place(prediction: Prediction) -> list[tuple[float, ...]]:
    return [tuple(item["value"][part] for part in ("x", "y", "width", "height")) for item in prediction.result]


@pytest.mark.parametrize(
    ("kind", "box"),
    [
        ("xyxy", (0.1, 0.2, 0.5, 0.4)),
        ("xywh", (0.1, 0.2, 0.4, 0.2)),
        ("cxcywh", (0.3, 0.3, 0.4, 0.2)),
        ("yxyx", (0.2, 0.1, 0.4, 0.5)),
    ],
)
@pytest.mark.parametrize(
    ("units", "factors", "more"),
    [
        ("fraction", (1, 1), {}),
        ("percent", (100, 100), {}),
        ("pixel", (200, 50), {"size": {"width": 200, "height": 50}}),
        ("pixel", (200, 50), {"size": "SIZE"}),
        ("pixel", (200, 50), {"size": {"output": "WH", "order": "wh"}}),
        ("pixel", (200, 50), {"size": {"width_field": "w", "height_field": "a.h"}}),
        ("pixel", (640, 320), {"resized_to": [640, 320]}),
    ],
)
def test_places(kind: str, box: tuple[float, ...], units: str, factors: tuple[int, int], more: dict[str, Any]) -> None:
    """Every format in every unit is the same place, in percent."""
    x, y = (1, 0) if kind == "yxyx" else (0, 1)
    scaled = [part * factors[(x, y)[i % 2]] for i, part in enumerate(box)]
    rule = {**BOX, "labels": ["cat"], "format": kind, "units": units, **more}
    outputs = {"B": f32([scaled]), "SIZE": np.array([[50, 200]], np.int64), "WH": np.array([200, 50], np.int64)}

    made = predict(rule, outputs, data={"w": 200, "a": {"h": 50}})

    assert place(made) == [pytest.approx((10, 20, 40, 20), abs=1e-4)]
    item = made.result[0]
    assert item["value"]["rotation"] == item["image_rotation"] == 0
    sizes = (item.get("original_width"), item.get("original_height"))
    assert sizes == ((200, 50) if "size" in more else (None, None))


def test_boxes_are_cut_at_the_edges() -> None:
    """Label Studio refuses what is beyond 100 %; what has no area is no box, and padding neither."""
    rule = {**BOX, "label": "C", "scores": "S"}
    boxes = f32(
        [-0.1, 0.5, 0.5, 1.2], [1.1, 0.1, 1.3, 0.2], [0, 0, 0, 0], [0.2, 0.2, 0.1, 0.3], [np.nan, 0, 1, 1], [0, 0, 1, 1]
    )
    outputs = {"B": boxes, "C": np.array([1, 0, -1, 0, 0, -1]), "S": f32(0.9, 0.8, 0, 0.7, 0.6, -1)}

    made = predict(rule, outputs)

    assert place(made) == [pytest.approx((0, 50, 50, 50))]
    assert labels(made) == [["dog"]]


@pytest.mark.parametrize(
    ("more", "outputs"),
    [
        ({"label": "C", "scores": "S"}, {"C": np.array([[0, 1, 1]]), "S": f32([0.2, 0.9, 0.5])}),
        ({"label": "C", "scores": "S"}, {"C": np.array([b"cat", b"dog", b"dog"], object), "S": f32(0.2, 0.9, 0.5)}),
        ({"scores": "S"}, {"S": f32([[0.2, 0.1], [0.3, 0.9], [0.1, 0.5]])}),
    ],
)
def test_labels_of_boxes(more: dict[str, Any], outputs: dict[str, Array]) -> None:
    """By number, by name, or the best of the scores; the best box first, above the threshold, as many as may be."""
    outputs |= {"B": f32([0, 0, 0.1, 1], [0, 0, 0.2, 1], [0, 0, 0.3, 1])}

    made = predict({**BOX, **more}, outputs, score="min")

    assert labels(made) == [["dog"], ["dog"], ["cat"]]
    assert [item["score"] for item in made.result] == pytest.approx([0.9, 0.5, 0.2])
    assert [width for *_, width, _ in place(made)] == pytest.approx([20, 30, 10])
    assert made.score == pytest.approx(0.2)
    assert labels(predict({**BOX, **more, "threshold": 0.4}, outputs)) == [["dog"], ["dog"]]
    assert labels(predict({**BOX, **more, "top": 1}, outputs)) == [["dog"]]


def test_no_boxes() -> None:
    """Nothing was found: an empty result, and no confidence."""
    outputs: dict[str, Array] = {
        "B": np.empty((1, 0, 4), np.float32),
        "S": np.empty((1, 0), np.float32),
        "C": np.empty((1, 0), np.int64),
    }

    ways: list[dict[str, Any]] = [{"scores": "S", "label": "C"}, {"scores": "S"}, {"labels": ["cat"], "size": "SIZE"}]
    for more in ways:
        assert predict({**BOX, **more}, outputs).as_json() == {"result": [], "score": 0.0, "model_version": "m:1"}


@pytest.mark.parametrize(
    ("more", "outputs", "said"),
    [
        ({"scores": "S", "label": "C"}, {"B": f32(1, 2, 3), "S": f32(1), "C": f32(1)}, "3 numbers, not a multiple"),
        ({"scores": "S", "label": "C"}, {"S": f32(1, 1), "C": f32(1)}, "'S' has 2 elements for 1 boxes"),
        ({"scores": "S", "label": "C"}, {"S": f32(1), "C": f32(1, 1)}, "'C' has 2 elements for 1 boxes"),
        ({"scores": "S"}, {"S": f32(1)}, "'S' has 1 elements for 1 boxes; it should have 2"),
        ({"scores": "S", "label": "C"}, {"S": f32(1), "C": f32(2)}, "'C' has 2; it should be 0 … 1"),
        ({"label": "C", "labels": []}, {"C": f32(2)}, "'C' has the number 2, but 'box' has no labels"),
        ({"scores": "S", "labels": ["cat"]}, {"S": f32(-3.5)}, "'S' has the score -3.5; scores are 0 … 1"),
        ({"scores": "S", "label": "C"}, {"S": f32(1), "C": f32(0.5)}, "'C' has 0.5"),
        ({"scores": "S", "label": "C"}, {"S": f32(3), "C": f32(0)}, "'S' has the score 3"),
        ({"label": "C"}, {}, "there is no output 'C'; there are B"),
        ({"label": "C", "size": "SIZE"}, {"C": f32(0), "SIZE": f32(0, 5)}, "'SIZE' is"),
        ({"label": "C", "scores": "S"}, {"C": f32(0), "S": np.array(["x"], object)}, "'S' has text, not numbers"),
    ],
)
def test_outputs_that_are_not_as_declared(more: dict[str, Any], outputs: dict[str, Array], said: str) -> None:
    """The message names the output, its value, and what it should be."""
    with pytest.raises(OutputMismatch, match=said):
        predict({**BOX, **more}, {"B": f32([0, 0, 1, 1]), **outputs})


@pytest.mark.parametrize("data", [{}, {"w": "wide", "h": 1}, {"w": 0, "h": 1}, {"w": True, "h": 1}])
def test_a_task_without_its_size(data: dict[str, Any]) -> None:
    """Pixels need it."""
    rule = {**BOX, "labels": ["cat"], "units": "pixel", "size": {"width_field": "w", "height_field": "h"}}

    with pytest.raises(InvalidRequest, match="field 'w'"):
        predict(rule, {"B": f32([0, 0, 1, 1])}, data=data)


# --- texts, and several rules ---

TEXT = {"type": "textarea", "from_name": "words", "to_name": "image", "text": "T"}


def test_texts() -> None:
    """Each element is one, empty ones are left out."""
    outputs = {"T": np.array([["é".encode(), b"", b"\xff"]], object), "S": f32(0.5)}

    made = predict({**TEXT, "score": "S"}, outputs)

    assert made.result[0]["value"] == {"text": ["é", "\ufffd"]}
    assert (made.result[0]["type"], made.score) == ("textarea", 0.5)
    assert predict(TEXT, {"T": np.array([b""], object)}).result == []
    with pytest.raises(OutputMismatch, match="2 elements; it should be one score"):
        predict({**TEXT, "score": "S"}, outputs | {"S": f32(0, 1)})
    with pytest.raises(OutputMismatch, match="values of float32, not text"):
        predict({**TEXT, "text": "S"}, outputs)


@pytest.mark.parametrize(("score", "expected"), [("mean", 0.5), ("min", 0.2), ("max", 0.8)])
def test_the_score_of_several(score: str, expected: float) -> None:
    """Of all results that have one."""
    mapping = Mapping(
        name="n", model="m", score=score, results=[SCORES, TEXT, {**BOX, "labels": ["cat"], "scores": "S"}]
    )
    outputs = {
        "P": f32(0, 0.2, 0.5),
        "T": np.array([b"x"], object),
        "B": f32([0, 0, 1, 1], [0, 0, 1, 0.5]),
        "S": f32(0.8, 0.2),
    }

    made = mapping.prediction_of({"data": {}}, outputs, "m")

    assert len(made.result) == 4
    assert made.score == pytest.approx(expected)


def test_a_failed_response() -> None:
    """There is no prediction."""
    response = Response(request_id="r", failure=Failure("inference_failed", "it broke"))

    with pytest.raises(InferenceFailed, match="it broke"):
        Mapping(name="n", model="m", results=[SCORES]).prediction({"data": {}}, response)
