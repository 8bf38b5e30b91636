"""Parses the label config of a Label Studio project, XML written by users: without DTD and entities, and bounded."""

from dataclasses import dataclass, replace
from functools import lru_cache
from xml.parsers import expat

from qinfer.errors import InvalidRequest

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
