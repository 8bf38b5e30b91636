"""Plain words for wrong values of settings and documents, in place of pydantic's texts."""

from collections.abc import Callable
from typing import Any

from pydantic_core import ErrorDetails

_WHOLE, _NUMBER, _LIST, _MAPPING = "a whole number", "a number", "a list", "a mapping of names to values"
_EXPECTED: dict[str, str] = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "dict_type": _MAPPING,
    "mapping_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
}
_BOUNDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than": lambda of: f"more than {_plain(of['gt'])}",
    "greater_than_equal": lambda of: f"at least {_plain(of['ge'])}",
    "less_than": lambda of: f"less than {_plain(of['lt'])}",
    "less_than_equal": lambda of: f"at most {_plain(of['le'])}",
    "string_too_short": lambda of: f"at least {_format_count(of['min_length'], 'character', 'characters')}",
    "string_too_long": lambda of: f"at most {_format_count(of['max_length'], 'character', 'characters')}",
    "string_pattern_mismatch": lambda of: f"a text of the form {of['pattern']}",
    "too_short": lambda of: f"at least {_format_count(of['min_length'], 'entry', 'entries')}",
    "too_long": lambda of: f"at most {_format_count(of['max_length'], 'entry', 'entries')}",
    "literal_error": lambda of: str(of["expected"]),
    "enum": lambda of: str(of["expected"]),
}
_OTHERS = {"missing": "it is missing", "extra_forbidden": "there is no such field"}


def explain(problem: ErrorDetails) -> str:
    """Returns the fault: `expected at least 0`, `it is missing`, or qinfer's own text."""
    kind = problem["type"]
    if (text := _OTHERS.get(kind)) is not None:
        return text
    expected = _EXPECTED.get(kind)
    if expected is None and kind in _BOUNDS:
        expected = _BOUNDS[kind](problem.get("ctx", {}))
    if expected is not None:
        return f"expected {expected}"
    return problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")


def _plain(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _format_count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"
