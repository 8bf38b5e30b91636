"""The label config of a Label Studio project: XML → its controls. Written by users: no DTD, no entities, bounded."""

from dataclasses import dataclass, replace
from functools import lru_cache
from xml.parsers import expat

from qinfer.errors import InvalidRequest

MAX_CHARACTERS = 2**20
"""The longest label config that is read."""

_MAX_DEPTH = 100
_MAX_ELEMENTS = 50_000
_REMEMBERED = 32
_LABELS = frozenset({"Label", "Choice"})
_NOT_CONTROLS = frozenset({"Filter"})


@dataclass(frozen=True, slots=True)
class Control:
    """A control of a label config: what labels are made with.

    Attributes:
        name: Its `name`, the `from_name` of results.
        type: Its tag in lower case, such as `choices`: the `type` of results.
        to_names: The objects that it labels.
        labels: The labels that it offers, in order: each one's alias, or else its value.
        is_dynamic: Whether the labels are in the tasks, so that any may be right.
        is_multiple: Whether more than one may be chosen.
    """

    name: str
    type: str
    to_names: tuple[str, ...]
    labels: tuple[str, ...] = ()
    is_dynamic: bool = False
    is_multiple: bool = False


@dataclass(frozen=True, slots=True)
class LabelConfig:
    """A label config; made by `parse_label_config`.

    Attributes:
        controls: Name → control.
        objects: Name of an object, such as an image → the field of a task's data that it shows.
    """

    controls: dict[str, Control]
    objects: dict[str, str]


@lru_cache(maxsize=_REMEMBERED)
def parse_label_config(xml: str) -> LabelConfig:
    """Reads a label config; the last ones read are remembered, as Label Studio sends it with every call.

    Args:
        xml: The text; empty = no controls.

    Raises:
        InvalidRequest: It is no XML, too long or too deep, or has a DTD or entities.
    """
    if len(xml) > MAX_CHARACTERS:
        raise InvalidRequest(f"the label config has {len(xml)} characters; at most {MAX_CHARACTERS} are read")
    if not xml.strip():
        return LabelConfig({}, {})
    reader = _Reader()
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = _refuse_dtd
    parser.EntityDeclHandler = _refuse_dtd
    try:
        parser.Parse(xml.encode(errors="replace"), True)
    except expat.ExpatError as error:
        raise InvalidRequest(f"the label config is no XML: {error}") from None
    return reader.config()


def _refuse_dtd(*_: object) -> None:
    raise InvalidRequest("the label config has a DTD or entities, which are not read; remove <!DOCTYPE …>")


class _Reader:
    """Gathers the controls and objects of one label config."""

    def __init__(self) -> None:
        self._open: list[str] = []  # for each open element the control that its labels are of; empty = none
        self._elements = 0
        self._controls: dict[str, Control] = {}
        self._labels: dict[str, list[str]] = {}
        self._objects: dict[str, str] = {}

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """Takes the start of an element."""
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
        """Takes the end of an element."""
        self._open.pop()

    def config(self) -> LabelConfig:
        """Returns what there is."""
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
