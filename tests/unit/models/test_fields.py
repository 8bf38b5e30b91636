"""Every field of Triton's ModelConfig message is honoured, a hint, or refused; and the reference page says so."""

from collections.abc import Iterator
from typing import Any

import pytest

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.check import HINTS, REFUSED, SUPPORTED, is_set
from qinfer.models.config.config import ModelConfig, normalise, parse
from scripts import generate_reference

TABLES = (SUPPORTED, HINTS, REFUSED)
ONNX = """
backend: "onnxruntime"
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


def paths(descriptor: Any, prefix: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the paths of all fields that hold values; a map's are those of its values."""
    for field in descriptor.fields:
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            message = message.fields_by_name["value"].message_type
        if message is None or message.full_name in above:
            yield prefix + field.name
        else:
            yield from paths(message, f"{prefix}{field.name}.", (*above, message.full_name))


def tables_of(path: str) -> list[str]:
    """Returns the entries, of whichever table, that a field falls under."""
    return [entry for table in TABLES for entry in table if f"{path}.".startswith(f"{entry}.")]


def test_each_field_is_in_one_table() -> None:
    """A field that a later version of the message adds is in none."""
    wrong = {path: tables_of(path) for path in paths(ModelConfig.DESCRIPTOR) if len(tables_of(path)) != 1}

    assert wrong == {}


def test_each_entry_is_a_field() -> None:
    """An entry that is misspelt would refuse nothing."""
    known = list(paths(ModelConfig.DESCRIPTOR))

    assert [e for table in TABLES for e in table if not any(f"{path}.".startswith(f"{e}.") for path in known)] == []


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("", "runtime", False),
        ('runtime: "x"', "runtime", True),
        ("response_cache { }", "response_cache.enable", False),
        ("response_cache { enable: true }", "response_cache.enable", True),
        ("sequence_batching { }", "sequence_batching", True),
        ("batch_input { }", "batch_input", True),
        ("input { } input { allow_ragged_batch: true }", "input.allow_ragged_batch", True),
        ('cc_model_filenames { key: "8.0" value: "a" }', "cc_model_filenames", True),
        ('model_warmup { inputs { key: "x" value { zero_data: true } } }', "model_warmup.inputs.zero_data", True),
        ('model_warmup { inputs { key: "x" value { } } }', "model_warmup.inputs.zero_data", False),
    ],
)
def test_is_set(text: str, path: str, *, expected: bool) -> None:
    """Through repeated fields, maps and messages; a default counts as not set."""
    assert is_set(parse(text), path) is expected


@pytest.mark.parametrize("path", REFUSED)
def test_a_refusal_names_the_field(path: str) -> None:
    """Whatever is in that table is refused, with its reason."""
    config = parse(ONNX)
    _set(config, path.split("."))

    with pytest.raises(ModelLoadFailed, match=f"'{path}' is not supported by this server: "):
        normalise(config, "m")


def test_the_reference_page_is_up_to_date() -> None:
    """`make docs` was run after the last change of the tables."""
    page = "model-config.md"

    assert (generate_reference.REFERENCE / page).read_text() == generate_reference.pages()[page]


def _set(message: Any, path: list[str]) -> None:
    field = message.DESCRIPTOR.fields_by_name[path[0]]
    value = getattr(message, path[0])
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value["8.0"] = "model.onnx"
    elif field.is_repeated and field.message_type is not None:
        inner = value[0] if value else value.add()
        if path[1:]:
            _set(inner, path[1:])
    elif field.is_repeated:
        value.append("text")
    elif field.message_type is not None:
        value.SetInParent()
        if path[1:]:
            _set(value, path[1:])
    else:
        setattr(message, path[0], type(value)("1") if isinstance(value, str) else type(value)(1))
