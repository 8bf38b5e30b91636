"""The rules of a mapping, checked against models and label configs; `results` applies them.

docs/reference/labeling-mappings.md has the fields. The label config of a Label Studio project is XML written by users:
it is parsed without DTD and entities, and bounded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Annotated, Literal
from xml.parsers import expat

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec

MAX_CHARACTERS = 2**20

_MAX_DEPTH = 100
_MAX_ELEMENTS = 50_000
_REMEMBERED = 32
_LABELS = frozenset({"Label", "Choice"})
_NOT_CONTROLS = frozenset({"Filter"})


@dataclass(frozen=True, slots=True)
class Control:
    """A control of a label config, with which labels are made.

    `name` is the `from_name` of results, and `type`, its tag in lower case, their `type`. `labels` are aliases or
    values in order; if `is_dynamic`, tasks define them.
    """

    name: str
    type: str
    to_names: tuple[str, ...]
    labels: tuple[str, ...] = ()
    is_dynamic: bool = False
    is_multiple: bool = False


@dataclass(frozen=True, slots=True)
class LabelConfig:
    """`objects`: the name of an object, such as an image → the field of a task that it shows."""

    controls: dict[str, Control]
    objects: dict[str, str]


@lru_cache(maxsize=_REMEMBERED)
def parse_label_config(xml: str) -> LabelConfig:
    """Parses a label config; caches recent configs, because Label Studio sends one with every call."""
    if len(xml) > MAX_CHARACTERS:
        raise InvalidRequest(f"the label config has {len(xml)} characters; at most {MAX_CHARACTERS} are read")
    if not xml.strip():
        return LabelConfig({}, {})
    reader = _LabelConfigParser()
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = _refuse_dtd
    parser.EntityDeclHandler = _refuse_dtd
    try:
        parser.Parse(xml.encode(errors="replace"), True)
    except expat.ExpatError as error:
        raise InvalidRequest(f"the label config is not XML: {error}") from None
    return reader.config()


def _refuse_dtd(*_: object) -> None:
    raise InvalidRequest("the label config has a DTD or entities, which are not read; remove <!DOCTYPE …>")


class _LabelConfigParser:
    def __init__(self) -> None:
        self._open: list[str] = []  # for each open element, the control that its labels belong to, or empty
        self._elements = 0
        self._controls: dict[str, Control] = {}
        self._labels: dict[str, list[str]] = {}
        self._objects: dict[str, str] = {}

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._elements += 1
        if self._elements > _MAX_ELEMENTS or len(self._open) >= _MAX_DEPTH:
            raise InvalidRequest(
                f"the label config is too large; at most {_MAX_ELEMENTS} elements, {_MAX_DEPTH} within one another"
            )
        inside = self._open[-1] if self._open else ""
        name, value = attributes.get("name", ""), attributes.get("value", "")
        if name and "toName" in attributes and tag not in _NOT_CONTROLS:
            self._controls[name] = _control(tag, name, attributes)
            self._labels[name] = []
            inside = name
        elif tag in _LABELS:
            if inside and (label := attributes.get("alias") or value):
                self._labels[inside].append(label)
        elif name and (shown := attributes.get("valueList") or value):
            self._objects[name] = shown.removeprefix("$")
        self._open.append(inside)

    def end(self, tag: str) -> None:
        self._open.pop()

    def config(self) -> LabelConfig:
        controls = {name: replace(each, labels=tuple(self._labels[name])) for name, each in self._controls.items()}
        return LabelConfig(controls, self._objects)


def _control(tag: str, name: str, attributes: dict[str, str]) -> Control:
    return Control(
        name,
        tag.lower(),
        tuple(part.strip() for part in attributes["toName"].split(",")),
        is_dynamic=attributes.get("value", "").startswith("$") or "apiUrl" in attributes,
        is_multiple=attributes.get("choice") == "multiple",
    )


Activation = Literal["none", "softmax", "sigmoid"]
BoxFormat = Literal["xyxy", "xywh", "cxcywh", "yxyx"]
Units = Literal["pixel", "fraction", "percent"]

_SHOWN = 10


class ImageSize(BaseModel):
    """The size of a task's image: by an output of two numbers (`order`), by pixels, or by fields of the task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    output: str = ""
    order: Literal["hw", "wh"] = "hw"
    width: Annotated[int, Field(ge=0)] = 0
    height: Annotated[int, Field(ge=0)] = 0
    width_field: str = ""
    height_field: str = ""

    @model_validator(mode="after")
    def _one_way(self) -> "ImageSize":
        pairs = (self.width, self.height), (self.width_field, self.height_field)
        if sum([bool(self.output), *(all(pair) for pair in pairs)]) != 1 or any(any(p) != all(p) for p in pairs):
            raise ValueError("say one of: output, or width and height, or width_field and height_field")
        return self


def _named(value: object) -> object:
    return {"output": value} if isinstance(value, str) else value


class _Rule(BaseModel):
    """The control of the label config, in other tools the question or field, and the object that it labels."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    from_name: Annotated[str, Field(min_length=1)]
    to_name: Annotated[str, Field(min_length=1)]


class _LabelRule(_Rule):
    """The fields of rules that give labels.

    Attributes:
        label: An output with the class: text, or numbers that count `labels` from 0.
        rename: Label of the model → label of the label config.
    """

    labels: tuple[str, ...] = ()
    label: str = ""
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    activation: Activation = "none"
    rename: dict[str, str] = Field(default_factory=dict)
    unknown: Literal["fail", "drop"] = "fail"


class ChoicesRule(_LabelRule):
    """Choices: the classes of a text, an image or a task.

    `scores` has one score for each of `labels`, `score` those of the labels that `label` names.
    """

    type: Literal["choices"]
    scores: str = ""
    score: str = ""
    top: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _one_source(self) -> "ChoicesRule":
        if bool(self.scores) == bool(self.label):
            raise ValueError("say one of: scores (with labels), or label (with score)")
        if self.scores and not self.labels:
            raise ValueError("scores need labels: the model's classes in its order")
        if self.score and not self.label:
            raise ValueError("score needs label; without label use scores")
        return self

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that it uses."""
        return tuple(name for name in (self.scores, self.label, self.score) if name)


class RectanglesRule(_LabelRule):
    """Labeled rectangles on an image.

    `scores` has one score for each box, or without `label` one for each box and label.
    """

    type: Literal["rectanglelabels"]
    boxes: Annotated[str, Field(min_length=1)]
    format: BoxFormat = "xyxy"
    units: Units = "pixel"
    size: Annotated[ImageSize | None, BeforeValidator(_named)] = None
    resized_to: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    scores: str = ""
    top: Annotated[int, Field(ge=1)] = 300
    category_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> "RectanglesRule":
        if self.units == "pixel" and not (self.size or self.resized_to):
            raise ValueError("units: pixel needs size, or resized_to")
        if not self.label and not self.labels:
            raise ValueError("say labels, or label, or both")
        if not self.label and len(self.labels) > 1 and not self.scores:
            raise ValueError("several labels need label, or scores with one for each box and label")
        if self.scores and self.activation == "softmax" and (self.label or len(self.labels) == 1):
            raise ValueError("softmax needs scores with one for each box and label; one for each box takes sigmoid")
        if self.category_ids and len(self.category_ids) != len(self.labels):
            raise ValueError(f"category_ids has {len(self.category_ids)} ids for {len(self.labels)} labels")
        return self

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that it uses."""
        size = self.size.output if self.size else ""
        return tuple(name for name in (self.boxes, self.scores, self.label, size) if name)


class TextRule(_Rule):
    """Text that the model writes: each element of the output `text` that is not empty; `score` is one number."""

    type: Literal["textarea"]
    text: Annotated[str, Field(min_length=1)]
    score: str = ""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that it uses."""
        return tuple(name for name in (self.text, self.score) if name)


Rule = Annotated[ChoicesRule | RectanglesRule | TextRule, Field(discriminator="type")]


def wanted_outputs(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Returns the outputs that rules use, each once."""
    return tuple(dict.fromkeys(name for rule in rules for name in rule.outputs))


def allowed_labels(rule: Rule, label_config: LabelConfig | None) -> frozenset[str] | None:
    """Returns the labels of the rule's control; `None` = any may be valid."""
    control = label_config.controls.get(rule.from_name) if label_config else None
    return frozenset(control.labels) if control and control.labels and not control.is_dynamic else None


def rule_problems(rule: Rule, spec: ModelSpec | None, label_config: LabelConfig | None) -> Iterator[str]:
    """Yields why a rule does not fit a model or a label config."""
    if spec is not None:
        outputs = {output.name: output for output in spec.outputs}
        for name in rule.outputs:
            if name not in outputs:
                yield f"model '{spec.name}' has no output '{name}'; it has {_some(outputs)}"
            elif problem := _output_problem(rule, name, outputs[name]):
                yield problem
    if label_config is not None:
        control = label_config.controls.get(rule.from_name)
        if control is None:
            yield f"the label config has no control '{rule.from_name}'; it has {_some(label_config.controls)}"
        else:
            yield from _control_problems(rule, control, allowed_labels(rule, label_config))


def _output_problem(rule: Rule, name: str, output: TensorSpec) -> str:
    is_text = output.datatype == "BYTES"
    if is_text and not (isinstance(rule, TextRule) and name == rule.text) and name != getattr(rule, "label", ""):
        return f"output '{name}' has text, where '{rule.from_name}' needs numbers"
    if isinstance(rule, TextRule) and name == rule.text and not is_text:
        return f"output '{name}' has {output.datatype}, where '{rule.from_name}' needs text (BYTES)"
    if not is_text and not isinstance(rule, TextRule) and name == rule.label and not rule.labels:
        return f"output '{name}' has numbers: '{rule.from_name}' needs labels that they index"
    count = -1 if -1 in output.dims else prod(output.dims)
    if isinstance(rule, ChoicesRule) and name == rule.scores and count not in {-1, len(rule.labels)}:
        return f"output '{name}' has {count} scores, and '{rule.from_name}' {len(rule.labels)} labels"
    if isinstance(rule, RectanglesRule) and name == rule.boxes and count % 4 and count != -1:
        return f"output '{name}' has {count} numbers, not a multiple of 4"
    return ""


def _control_problems(rule: Rule, control: Control, allowed: frozenset[str] | None) -> Iterator[str]:
    if control.type != rule.type:
        yield f"control '{rule.from_name}' is {control.type} in the label config, and {rule.type} in the mapping"
    if rule.to_name not in control.to_names:
        yield f"control '{rule.from_name}' labels {_some(control.to_names)}, not '{rule.to_name}'"
    if isinstance(rule, ChoicesRule) and rule.top > 1 and control.type == "choices" and not control.is_multiple:
        yield f"control '{rule.from_name}' takes one choice: set top: 1, or choice=\"multiple\" in the label config"
    if allowed is None or isinstance(rule, TextRule) or rule.unknown == "drop":
        return
    named = [rule.rename.get(label, label) for label in rule.labels] or list(rule.rename.values())
    if wrong := [label for label in named if label and label not in allowed]:
        yield (
            f"control '{rule.from_name}' has no label {_some(wrong)}; it has {_some(sorted(allowed))}: "
            "rename them, or set unknown: drop"
        )


def _some(names: Iterable[str]) -> str:
    listed = [f"'{name[:60]}'" for name in names]
    shown = ", ".join(listed[:_SHOWN]) or "none"
    return f"{shown} and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else shown
