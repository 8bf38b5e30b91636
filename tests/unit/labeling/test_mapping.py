"""Mapping files: read, chosen by model and project, checked against models and label configs."""

from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import InvalidRequest, SettingsError
from qinfer.labeling.mapping import Mapping, Mappings, load_mapping, load_mappings
from qinfer.labeling.rules import ChoicesRule, parse_label_config
from qinfer.models.spec import ModelSpec, TensorSpec

CHOICE = {"type": "choices", "from_name": "mood", "to_name": "text", "scores": "PROBS", "labels": ["neg", "pos"]}
BOX = {
    "type": "rectanglelabels",
    "from_name": "box",
    "to_name": "image",
    "boxes": "BOXES",
    "units": "fraction",
    "labels": ["cat", "dog"],
    "label": "CLASS",
    "scores": "S",
}
TEXT = {"type": "textarea", "from_name": "words", "to_name": "image", "text": "CAPTION"}
SPEC = ModelSpec(
    name="m",
    backend="onnxruntime",
    max_batch_size=8,
    inputs=(
        TensorSpec(name="TEXT", datatype="BYTES", dims=(1,)),
        TensorSpec(name="LIMIT", datatype="FP32", dims=(1,), optional=True),
    ),
    outputs=(
        TensorSpec(name="PROBS", datatype="FP32", dims=(2,)),
        TensorSpec(name="BOXES", datatype="FP32", dims=(-1, 4)),
        TensorSpec(name="CLASS", datatype="INT64", dims=(-1,)),
        TensorSpec(name="S", datatype="FP32", dims=(-1,)),
        TensorSpec(name="CAPTION", datatype="BYTES", dims=(1,)),
    ),
)
CONFIG = parse_label_config(
    '<View><Choices name="mood" toName="text"><Choice value="neg"/><Choice value="pos"/></Choices>'
    '<RectangleLabels name="box" toName="image"><Label value="cat"/></RectangleLabels>'
    '<TextArea name="words" toName="image"/></View>'
)


def mapping(*results: dict[str, Any], **fields: Any) -> Mapping:
    given = {"name": "n", "model": "m", "inputs": {"TEXT": {"field": "text"}}, "results": results or (CHOICE,)}
    return Mapping(**{**given, **fields})


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


YAML = """
model: m
project: 12
inputs: {TEXT: {field: $text}}
results:
  - {type: choices, from_name: mood, to_name: text, scores: PROBS, labels: [0, 1]}
"""
TOML = """
name = "other"
model = "m"
[inputs.TEXT]
field = "text"
kind = "text"
[[results]]
type = "textarea"
from_name = "words"
to_name = "text"
text = "CAPTION"
"""


def test_files_of_both_kinds(tmp_path: Path) -> None:
    """The name is the file's unless it says another; digits are labels too."""
    write(tmp_path / "first.yaml", YAML)
    write(tmp_path / "second.toml", TOML)
    write(tmp_path / "README.md", "not a mapping")

    found = load_mappings(tmp_path)

    assert [each.name for each in found] == ["first", "other"]
    assert (found.for_model("m", 12).name, found.for_model("m", 13).name, found.for_model("m").name) == (
        "first",
        "other",
        "other",
    )
    rule = found.for_model("m", 12).results[0]
    assert isinstance(rule, ChoicesRule)
    assert rule.labels == ("0", "1")
    assert found.for_model("m", 12).inputs["TEXT"].field == "text"


def test_labels_stay_what_was_typed(tmp_path: Path) -> None:
    """What YAML takes for truth values, octal numbers and dates is text; nothing is nothing."""
    typed = "no, yes, 007, 1.10, 2026-01-31, 1_000, 12:30, 'null', \"\""
    path = write(tmp_path / "m.yaml", YAML.replace("0, 1", typed).replace("labels:", "threshold: 0.5, labels:"))

    (rule,) = load_mapping(path).results

    assert isinstance(rule, ChoicesRule)
    assert rule.labels == ("no", "yes", "007", "1.10", "2026-01-31", "1_000", "12:30", "null", "")
    assert rule.threshold == 0.5


def test_a_byte_order_mark(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    for name, text in (("a.yaml", YAML), ("b.toml", TOML)):
        assert load_mapping(write(tmp_path / name, "\ufeff" + text)).model == "m"


def test_a_mapping_that_would_fill_the_memory(tmp_path: Path) -> None:
    """Aliases of lists are shared; merged keys would be copied, twice as many each time."""
    lists = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    merged = "".join(f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))

    with pytest.raises(SettingsError, match=r"field 'results.0'.*field 'a29': there is no such field"):
        load_mapping(write(tmp_path / "m.yaml", f"a0: &a0 [x]\n{lists}results: *a29"))
    with pytest.raises(SettingsError, match=r"line 3: merge keys \(<<\) are not read"):
        load_mapping(write(tmp_path / "m.yaml", f"a0: &a0 {{x: 1}}\n{merged}model: m"))
    with pytest.raises(SettingsError, match=r"the tag 'tag:yaml.org,2002:merge' is not read"):
        load_mapping(write(tmp_path / "m.yaml", "a: &a {x: 1}\nb: {!!merge x: *a}"))


def test_a_model_without_a_mapping() -> None:
    """The error says which have one."""
    with pytest.raises(InvalidRequest, match=r"no labeling mapping for model 'x' and project 3.*models: m"):
        Mappings([mapping()]).for_model("x", 3)
    with pytest.raises(InvalidRequest, match="models: none"):
        Mappings().for_model("x")


def test_two_for_the_same() -> None:
    """Which one would be meant is not guessed."""
    with pytest.raises(SettingsError, match="'n' and 'o' are both for model 'm' and any project"):
        Mappings([mapping(), mapping(name="o")])
    with pytest.raises(SettingsError, match="'n' and 'o' are both for model 'm' and project 2"):
        Mappings([mapping(project=[1, 2]), mapping(name="o", project=[2, 3])])
    with pytest.raises(SettingsError, match="two mappings have the name 'n'"):
        Mappings([mapping(), mapping(model="other")])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\nresults: []", "field 'results'"),
        ("model: m\nresult: []", "field 'results': it is missing; field 'result': there is no such field"),
        ("- 1", "has no fields"),
        ("", "has no fields"),
        ("model: [", "can't be read"),
        ("model: !!python/object/apply:os.system ['true']", "can't be read"),
        (YAML.replace("choices", "choice"), "field 'results.0': Input tag 'choice'"),
        (YAML.replace("scores: PROBS", "scores: PROBS, label: L"), "one of: scores"),
        (YAML.replace(", labels: [0, 1]", ""), "scores need labels"),
        (YAML.replace("[0, 1]", "[null, a]"), "labels.0': expected a text, not null$"),
        (YAML.replace("type: choices, ", ""), "field 'results.0': it has no type, such as choices$"),
        (YAML.replace("12", "twelve"), "field 'project.0': expected a whole number, not 'twelve'"),
        (YAML.replace("12", "9" * 5000), "field 'project.0': expected a whole number"),
        (YAML + "name: my map", "field 'name': .*, not 'my map'"),
        (YAML + "model: other", "line 7: 'model' appears twice"),
        (YAML.replace("text,", "text, to_name: image,"), "line 6: 'to_name' appears twice"),
        (YAML.replace("  -", "\t-"), "line 6: .*; indent with spaces"),
        (YAML + "? [a]\n: 1", "unhashable"),
        (YAML + "null: 1", "field 'None'"),
        ("model: m\nresults: &a [*a]", "recursive"),
        ("[" * 5000, "can't be read"),
        (YAML.replace("field: $text", "field: text, kind: picture"), "inputs.TEXT.kind"),
        (YAML + YAML[YAML.index("  - ") :], "two of the results are for the control 'mood'"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, said: str) -> None:
    """The message names file and field."""
    with pytest.raises(SettingsError, match=said) as raised:
        load_mapping(write(tmp_path / "my.yaml", text))
    assert "my.yaml" in raised.value.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"units": "pixel"}, "units: pixel needs size"),
        ({"label": "", "labels": []}, "say labels, or label"),
        ({"label": "", "scores": ""}, "several labels need label, or scores"),
        ({"category_ids": [1]}, "1 ids for 2 labels"),
        ({"activation": "softmax"}, "softmax needs scores with one for each box and label"),
        ({"label": "", "labels": ["cat"], "activation": "softmax"}, "softmax needs scores"),
        ({"size": {"width": 3}}, "say one of: output, or width and height"),
        ({"size": {"output": "S", "width_field": "w", "height_field": "h"}}, "say one of"),
    ],
)
def test_boxes_that_mean_nothing(changes: dict[str, Any], said: str) -> None:
    """What would fail with every task is refused at once."""
    with pytest.raises(ValueError, match=said):
        mapping({**BOX, **changes})


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """So are directories; a file has a limit."""
    with pytest.raises(SettingsError, match="No such file"):
        load_mapping(tmp_path / "none.yaml")
    with pytest.raises(SettingsError, match="directory of mappings"):
        load_mappings(tmp_path / "none")
    with pytest.raises(SettingsError, match="larger than"):
        load_mapping(write(tmp_path / "big.yaml", " " * (5 * 2**20)))


def test_a_mapping_that_fits() -> None:
    """Neither the model nor the label config has anything against it."""
    mapping(CHOICE, {**BOX, "rename": {"dog": "cat"}}, TEXT).check(SPEC, CONFIG)


@pytest.mark.parametrize(
    ("results", "inputs", "said"),
    [
        ({**CHOICE, "scores": "LOGITS"}, None, "model 'm' has no output 'LOGITS'; it has 'PROBS', 'BOXES'"),
        ({**CHOICE, "labels": ["a"]}, None, "'PROBS' has 2 scores, and 'mood' 1 labels"),
        ({**CHOICE, "scores": "CAPTION"}, None, "'CAPTION' has text"),
        ({**TEXT, "text": "PROBS"}, None, "'PROBS' has FP32"),
        ({**BOX, "boxes": "PROBS"}, None, "not a multiple of 4"),
        ({**BOX, "labels": []}, None, "needs labels that they index"),
        ({**CHOICE, "from_name": "x"}, None, "no control 'x'; it has 'mood'"),
        ({**CHOICE, "to_name": "image"}, None, "control 'mood' labels 'text', not 'image'"),
        ({**TEXT, "from_name": "mood", "to_name": "text"}, None, "is choices in the label config, and textarea in"),
        ({**CHOICE, "top": 2}, None, "takes one choice"),
        (BOX, None, "control 'box' has no label 'dog'; it has 'cat'"),
        (CHOICE, {}, "input 'TEXT' of model 'm' has no field"),
        (CHOICE, {"TEXT": {"field": "t"}, "X": {"field": "x"}}, "no input 'X'; it has TEXT, LIMIT"),
        (CHOICE, {"TEXT": {"field": "t"}, "LIMIT": {"field": "x"}}, "input 'LIMIT' is FP32: kind text needs BYTES"),
        (CHOICE, {"TEXT": {"field": "t"}, "LIMIT": {"field": "x", "kind": "file"}}, "kind file needs BYTES or UINT8"),
    ],
)
def test_a_mapping_that_does_not_fit(results: dict[str, Any], inputs: dict[str, Any] | None, said: str) -> None:
    """Set-up says what to change, before there are tasks."""
    wrong = mapping(results) if inputs is None else mapping(results, inputs=inputs)

    with pytest.raises(InvalidRequest, match=f"mapping 'n' does not fit: .*{said}"):
        wrong.check(SPEC, CONFIG)


def test_labels_that_may_be_unknown() -> None:
    """Those of tasks are not known, and those that are dropped need not be."""
    dynamic = parse_label_config('<View><Choices name="mood" toName="text" value="$options"/></View>')

    mapping(CHOICE).check(label_config=dynamic)
    mapping({**BOX, "unknown": "drop"}).check(label_config=CONFIG)
    mapping({**BOX, "labels": ["cat", ""]}).check(label_config=CONFIG)
    mapping({**BOX, "rename": {"dog": ""}}).check(label_config=CONFIG)
