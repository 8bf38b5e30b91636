"""Files of pre-annotations, compared with golden ones: what tools read must not change by accident."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qinfer.errors import InvalidRequest
from qinfer.labeling.exports import FORMATS, Task
from qinfer.labeling.mapping import Mapping

GOLDEN = Path(__file__).parent / "golden" / "labeling"
CHOICE = {"type": "choices", "from_name": "mood", "to_name": "text", "scores": "P", "labels": ["neg", "pos"]}
BOX = {
    "type": "rectanglelabels",
    "from_name": "box",
    "to_name": "image",
    "boxes": "B",
    "labels": ["cat", "dog"],
    "label": "C",
    "scores": "S",
    "size": {"width_field": "width", "height_field": "height"},
}
TEXT = {"type": "textarea", "from_name": "words", "to_name": "image", "text": "T", "score": "TS"}
CLASSES = Mapping(name="n", model="m", inputs={"TEXT": {"field": "body"}}, results=[CHOICE])
TOPICS = Mapping(name="n", model="m", inputs={"TEXT": {"field": "body"}}, results=[{**CHOICE, "top": 2}, TEXT])
BOXES = Mapping(name="n", model="m", inputs={"IMAGE": {"field": "file", "kind": "file"}}, results=[BOX])
WORDS = Mapping(name="n", model="m", inputs={"IMAGE": {"field": "file", "kind": "file"}}, results=[TEXT])


def outputs(sure: float, boxes: int) -> dict[str, Any]:
    return {
        "P": np.array([1 - sure, sure], np.float32),
        "T": np.array(["a „quote“\n"], object),
        "TS": np.array([sure], np.float32),
        "B": np.array([[10, 20, 110.5, 60], [0, 0, 640, 480]], np.float32)[:boxes],
        "C": np.array([1, 0], np.int64)[:boxes],
        "S": np.array([sure, sure / 2], np.float32)[:boxes],
    }


def tasks(mapping: Mapping, *, key: str = "") -> list[Task]:
    """Returns two tasks of text and an image, of which one has no boxes."""
    found = []
    for number, (sure, boxes) in enumerate([(0.75, 2), (0.5, 0)], 1):
        data: dict[str, Any] = {"body": f"text {number}", "id": 6 + number, "ok": True, "empty": None}
        data |= {"file": f"images/{number}.png", "width": 640, "height": 480}
        name: str | int = data.get(key, number)
        prediction = mapping.prediction_of({"id": name, "data": data}, outputs(sure, boxes), "m:1")
        found.append(Task(number, name, data, prediction))
    return found


def written(name: str, mapping: Mapping, *, key: str = "", as_array: bool = False) -> str:
    """Returns the file of the two tasks."""
    kind = FORMATS[name].as_array() if as_array else FORMATS[name]
    assert [*kind.problems(mapping)] == []
    start, end = kind.frame
    lines = [kind.encode(mapping, task) for task in tasks(mapping, key=key)]
    return (start + kind.separator.join(filter(None, lines)) + end).decode()


@pytest.mark.parametrize(
    ("name", "golden", "mapping"),
    [
        ("label-studio", "label-studio-choices", CLASSES),
        ("label-studio", "label-studio-boxes", BOXES),
        ("label-studio", "label-studio-topics", TOPICS),
        ("argilla", "argilla-choices", CLASSES),
        ("argilla", "argilla-topics", TOPICS),
        ("prodigy", "prodigy-choices", CLASSES),
        ("prodigy", "prodigy-boxes", BOXES),
        ("prodigy", "prodigy-text", WORDS),
        ("coco", "coco", BOXES),
        ("fiftyone", "fiftyone-boxes", BOXES),
        ("fiftyone", "fiftyone-choices", CLASSES),
    ],
)
def test_golden_files(name: str, golden: str, mapping: Mapping) -> None:
    """Each format, of each kind of result that it has."""
    suffix = "jsonl" if FORMATS[name].layout == "lines" else "json"

    made = written(name, mapping, key="id" if name in {"coco", "argilla"} else "")

    assert made == (GOLDEN / f"{golden}.{suffix}").read_text()


def test_lines_as_one_array() -> None:
    """Some tools import arrays only."""
    lines = written("label-studio", CLASSES).splitlines()

    assert json.loads(written("label-studio", CLASSES, as_array=True)) == [json.loads(line) for line in lines]
    assert FORMATS["coco"].as_array() is FORMATS["coco"]


@pytest.mark.parametrize(
    ("name", "results", "said"),
    [
        ("argilla", [BOX], "argilla has no question for boxes on images: leave 'box' out"),
        ("coco", [CHOICE], "coco has boxes only"),
        ("coco", [{**BOX, "labels": []}], "'box' needs labels"),
        ("coco", [{**BOX, "size": None, "units": "fraction"}], "coco has boxes in pixels: 'box' needs size"),
        ("coco", [BOX, {**BOX, "from_name": "other"}], "'other' needs category_ids"),
        ("prodigy", [{**BOX, "size": None, "units": "fraction"}], "prodigy has boxes in pixels"),
        ("prodigy", [CHOICE, {**CHOICE, "from_name": "other"}], "prodigy has one choice in a task"),
        ("prodigy", [TEXT, {**TEXT, "from_name": "other"}], "prodigy has one text in a task"),
        ("fiftyone", [TEXT], "has neither rectanglelabels nor choices"),
        ("fiftyone", [{**CHOICE, "top": 2}], "one class for an image: set top: 1 for 'mood'"),
        ("fiftyone", [CHOICE, BOX], "one kind of label in a file"),
    ],
)
def test_what_a_format_can_not_hold(name: str, results: list[dict[str, Any]], said: str) -> None:
    """That is known before the first row."""
    mapping = Mapping(name="n", model="m", results=results)

    assert any(said in problem for problem in FORMATS[name].problems(mapping))


def test_category_ids_of_coco() -> None:
    """The mapping's own, where a dataset counts with gaps; a label without one is refused."""
    gaps = Mapping(name="n", model="m", results=[{**BOX, "category_ids": [17, 18]}])
    named = Mapping(name="n", model="m", results=[BOX])
    unknown = outputs(0.75, 1) | {"C": np.array(["bird"], object)}
    data = {"width": 640, "height": 480}

    (first, _) = json.loads(b"[" + FORMATS["coco"].encode(gaps, tasks(gaps)[0]) + b"]")
    assert first["category_id"] == 18
    prediction = named.prediction_of({"data": data}, unknown, "m:1")
    with pytest.raises(InvalidRequest, match="label 'bird' has no category id"):
        FORMATS["coco"].encode(named, Task(1, 1, data, prediction))


def test_options_of_prodigy_have_no_background() -> None:
    """A label that is left out is none to choose."""
    background = Mapping(name="n", model="m", results=[{**CHOICE, "labels": ["", "pos"]}])

    (task, _) = tasks(background)

    assert json.loads(FORMATS["prodigy"].encode(background, task))["options"] == [{"id": "pos", "text": "pos"}]


def test_fiftyone_needs_the_name_of_an_image() -> None:
    """A key column's is taken as it is."""
    (task, _) = tasks(CLASSES)

    assert FORMATS["fiftyone"].encode(CLASSES, task._replace(key="a/b")).startswith(b'"a/b":')
    for data in ({"x": 1}, {"_file": "file:///data/rows.csv"}):
        with pytest.raises(InvalidRequest, match="--id"):
            FORMATS["fiftyone"].encode(CLASSES, task._replace(data=data))
