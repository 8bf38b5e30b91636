"""Pure parts of the console: tensors for people, figures, findings, and files of others with their hashes."""

import hashlib
import json
import math
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest

from qinfer.core.api_keys import why_no_console
from qinfer.core.settings import AuthSettings, HttpSettings, Settings
from qinfer.core.settings_sections import ConsoleSettings
from qinfer.errors import InvalidRequest
from qinfer.models.readiness import ModelStatus
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.models.state import WorkerRecord
from qinfer.observe.stats import QUEUE_BUCKETS_S
from qinfer.scaling.work import VersionWork
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer_api.console.attention import findings
from qinfer_api.console.boxes import detected_boxes
from qinfer_api.console.history import SeriesCounts, quantile
from qinfer_api.console.pages.try_it import read_input_text
from qinfer_api.console.render import ago, count, depth_root, nbytes, percent, seconds
from qinfer_api.console.tensors import MOST_ELEMENTS, png, view_of
from scripts.console_files import SOURCE, TARGET

PACKAGES: list[dict[str, Any]] = json.loads(SOURCE.read_text())
OWN = {"SOURCE.json", "boxes.js", "console.css", "console.js", "icon.svg", "live.js", "theme.js"}


@pytest.mark.parametrize(("name", "file"), [pair for one in PACKAGES for pair in one["files"].items()])
def test_a_file_of_others_has_its_hash(name: str, file: dict[str, str]) -> None:
    assert hashlib.sha256((TARGET / name).read_bytes()).hexdigest() == file["sha256"]


def test_every_file_of_others_is_named() -> None:
    named = {name for one in PACKAGES for name in one["files"]}

    assert {path.name for path in TARGET.iterdir()} == named | OWN
    assert all(one["licence"] and one["integrity"].startswith("sha512-") for one in PACKAGES)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "\u2013"), (0.0, "0 s"), (0.0000123, "12.3 µs"), (0.0456, "45.6 ms"), (7, "7 s"), (150, "2.50 min"),
     (7200, "2 h"), (400_000, "4.63 days"), (math.inf, "∞"), (math.nan, "\u2013")],
)  # fmt: skip
def test_a_duration_has_three_digits(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_figures_are_short() -> None:
    assert [count(0.123), count(12.34), count(999), count(1234567)] == ["0.12", "12.3", "999", "1\u2009234\u2009567"]
    assert [nbytes(512), nbytes(38_000_000)] == ["512 B", "36.2 MiB"]
    assert [percent(0.0123), percent(None)] == ["1.23 %", "\u2013"]
    assert [ago(100.0, 100.5), ago(100.0, 160.0), ago(0.0)] == ["now", "1 min ago", "\u2013"]


@pytest.mark.parametrize(
    ("path", "root"), [("/", "./"), ("/models", "./"), ("/models/a", "../"), ("/letters/a/1", "../../")]
)
def test_addresses_lead_back_from_any_depth(path: str, root: str) -> None:
    assert depth_root(path) == root


def test_a_quantile_is_within_its_bucket() -> None:
    answered = [0] * (len(QUEUE_BUCKETS_S) + 1)
    answered[3], answered[6] = 90, 10

    assert QUEUE_BUCKETS_S[2] < quantile(answered, 0.5) <= QUEUE_BUCKETS_S[3]
    assert QUEUE_BUCKETS_S[5] < quantile(answered, 0.99) <= QUEUE_BUCKETS_S[6]
    assert math.isnan(quantile([0, 0], 0.5))


def test_numbers_are_cut() -> None:
    view = view_of(from_numpy("x", np.arange(1000, dtype=np.int64)))

    assert view.left_out == 1000 - MOST_ELEMENTS
    assert view.numbers.startswith("0, 1, 2")
    assert not view.image


def test_scores_with_labels_become_classes() -> None:
    view = view_of(from_numpy("p", np.array([[0.1, 0.7, 0.2]], np.float32)), ("ant", "bee", "cow"))

    assert [(one.label, one.part) for one in view.classes] == [("bee", 20), ("cow", 6), ("ant", 3)]


@pytest.mark.parametrize("shape", [(1, 12, 10), (12, 10, 3), (1, 3, 12, 10)])
def test_an_image_becomes_a_png(shape: tuple[int, ...]) -> None:
    view = view_of(from_numpy("image", np.linspace(0, 1, math.prod(shape), dtype=np.float32).reshape(shape)))

    assert view.image.startswith("data:image/png;base64,iVBORw0KGgo")


def test_a_png_has_its_pixels() -> None:
    content = png(np.array([[0, 255], [7, 8]], np.uint8))
    begin = content.index(b"IDAT") + 4
    length = int.from_bytes(content[begin - 8 : begin - 4], "big")

    assert zlib.decompress(content[begin : begin + length]) == b"\0\x00\xff\0\x07\x08"


def test_damaged_bytes_are_told() -> None:
    assert view_of(Tensor("t", "BYTES", (1,), b"\xff\0\0\0ab")).problem
    assert view_of(Tensor("t", "FP32", (3,), b"\0" * 8)).problem


SPEC = ModelSpec(name="m", backend="stub", max_batch_size=8, inputs=(), outputs=())


@pytest.mark.parametrize(
    ("datatype", "dims", "text", "values", "shape"),
    [
        ("FP32", (4,), "1, 2.5, 3, 4", [1, 2.5, 3, 4], (1, 4)),
        ("FP32", (2,), "[[1, 2], [3, 4]]", [1, 2, 3, 4], (2, 2)),
        ("INT64", (-1,), "7 8 9", [7, 8, 9], (1, 3)),
        ("BOOL", (1,), "true", [True], (1, 1)),
        ("BYTES", (1,), "one text\nof two lines", [b"one text\nof two lines"], (1, 1)),
        ("BYTES", (-1,), "a\nb", [b"a", b"b"], (1, 2)),
        ("BYTES", (-1,), "a\u2028b\r\nc\n", ["a\u2028b".encode(), b"c"], (1, 2)),
    ],
)
def test_a_form_becomes_a_tensor(
    datatype: str, dims: tuple[int, ...], text: str, values: list[Any], shape: tuple[int, ...]
) -> None:
    tensor = read_input_text(TensorSpec(name="x", datatype=datatype, dims=dims), SPEC, text)

    assert tensor.shape == shape
    assert to_numpy(tensor).reshape(-1).tolist() == values


@pytest.mark.parametrize(
    ("datatype", "text"),
    [("FP32", "one"), ("FP32", '["a"]'), ("FP32", "1, 2, 3"), ("UINT8", "300, 1"), ("INT64", "0.5, 1"), ("FP32", "")],
)
def test_a_wrong_form_names_its_input(datatype: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match="'x'"):
        read_input_text(TensorSpec(name="x", datatype=datatype, dims=(2,)), SPEC, text)


def test_findings_are_told_with_the_critical_first() -> None:
    counts = {"": SeriesCounts(9), "m:1": SeriesCounts(5, [5, *[0] * len(QUEUE_BUCKETS_S)])}
    work = (
        VersionWork(model="m", version=1, requests=3),
        VersionWork(model="n", version=1, oldest_age_s=70, workers=("w",)),
    )

    found = findings([ModelStatus(model="a/b", generation=1, error="no files")], [], work, counts, {"m": 2, "n": 0})

    assert [one.level for one in found] == ["critical"] * 3 + ["warning"] * 3
    assert {one.page for one in found} == {"workers", "models/a%2Fb", "queues", "models/m", "letters"}
    assert findings([], [WorkerRecord(id="w", started_at=0.0, models={})], (), {}, {}) == []


def test_the_console_is_off_where_strangers_could_use_it() -> None:
    def settings(**sections: Any) -> Settings:
        return Settings(**sections)

    assert not why_no_console(settings())
    assert not why_no_console(
        settings(http=HttpSettings(host="0.0.0.0"), auth=AuthSettings(mode="keys", keys_file="k"))
    )
    assert "API keys" in why_no_console(settings(http=HttpSettings(host="0.0.0.0"), auth=AuthSettings(mode="none")))
    assert "API keys" in why_no_console(settings(http=HttpSettings(allow_hosts=("*",))))
    assert "QINFER_CONSOLE__ENABLED" in why_no_console(settings(console=ConsoleSettings(enabled=False)))


def test_a_gateway_loads_no_templates_before_the_console_is_opened() -> None:
    names = ("jinja2", "qinfer_api.console.site")
    code = f"import sys, qinfer_api.app; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


EDGES = np.array([[[10, 20, 30, 40], [1, 2, 3, 4]]], np.float32)


def test_boxes_are_found_by_name_with_scores_and_classes_beside_them() -> None:
    found = detected_boxes(
        [
            from_numpy("boxes", EDGES),
            from_numpy("scores", np.array([[0.3, 0.9]], np.float32)),
            from_numpy("labels", np.array([[1, 7]], np.int64)),
            from_numpy("num", np.array([[2]], np.int32)),
        ],
        {"labels": ("cat", "dog")},
    )

    assert found is not None
    assert [(box.label, round(box.score or 0, 2), box.place) for box in found.boxes] == [
        ("7", 0.9, (1, 2, 3, 4)), ("dog", 0.3, (10, 20, 30, 40)),
    ]  # fmt: skip
    assert (found.form, found.are_fractions, found.total) == ("xyxy", False, 2)


def test_boxes_are_found_by_shape() -> None:
    yolo = np.array([[[0.1, 0.1, 0.5, 0.5, 0.8, 1], [np.nan, 0, 0, 0, 0, 0]]], np.float32)
    by_class = np.array([[0.1, 0.7], [0.6, 0.2]], np.float32)

    six = detected_boxes([from_numpy("output0", yolo)], {"output0": ("ant", "bee")})
    four = detected_boxes([from_numpy("a", EDGES[..., ::-1].copy()), from_numpy("prob", by_class)], {})

    assert six is not None
    assert four is not None
    assert [(box.label, box.place[2]) for box in six.boxes] == [("bee", 0.5)]
    assert six.are_fractions
    assert [(box.label, box.colour) for box in four.boxes] == [("1", 0), ("0", 1)]
    assert four.form == "cxcywh"


@pytest.mark.parametrize("shape", [(1, 4), (1, 6), (2, 3, 6), (1, 5, 5), (8,)])
def test_other_outputs_have_no_boxes(shape: tuple[int, ...]) -> None:
    assert detected_boxes([from_numpy("probabilities", np.zeros(shape, np.float32))], {}) is None


def test_boxes_of_no_row_and_texts_as_classes() -> None:
    texts = from_numpy("classes", np.array([b"cat"], dtype=object))

    empty = detected_boxes([from_numpy("detection_boxes", np.zeros((1, 0, 4), np.float32))], {})
    named = detected_boxes([from_numpy("detection_boxes", EDGES[0, :1]), texts], {})

    assert empty is not None
    assert (empty.boxes, empty.form) == ([], "yxyx")
    assert named is not None
    assert [(box.label, box.score) for box in named.boxes] == [("cat", None)]


def test_texts_of_the_classification_extension_become_classes() -> None:
    ranked = view_of(from_numpy("p", np.array([b"0.75:2:cow", b"0.25:0:ant"], dtype=object)))
    times = view_of(from_numpy("p", np.array([b"12:30", b"0.25:0"], dtype=object)))

    assert [(one.label, one.part) for one in ranked.classes] == [("cow", 20), ("ant", 7)]
    assert times.classes == ()
