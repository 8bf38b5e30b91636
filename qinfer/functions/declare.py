"""`@qinfer.model` and the types for its hints; imports nothing heavy, because each app imports it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import isclass
from typing import Any, TypeVar, overload

T = TypeVar("T", bound=Callable[..., Any])

_MARK = "__qinfer_model__"
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The arguments of `@qinfer.model`."""

    name: str
    output: str = "output"
    max_batch_size: int = 32
    max_delay_ms: float = 0.0
    timeout_s: float = 0.0
    idle_s: float = 1.0
    instances: int = 1


class State(dict[str, Any]):
    """The state of one sequence, empty at its first request; an argument of this type makes a sequence model.

    It is in the memory of the model's process, and ends with the sequence.
    """


@overload
def model(target: T, /) -> T: ...
@overload
def model(
    *,
    name: str = "",
    output: str = "output",
    max_batch_size: int = 32,
    max_delay_ms: float = 0.0,
    timeout_s: float = 0.0,
    idle_s: float = 1.0,
    instances: int = 1,
) -> Callable[[T], T]: ...
def model(target: Any = None, /, **options: Any) -> Any:
    """Declares a function, or a class with a method `predict`, as a model; its type hints are the inputs and outputs.

    The decorated object is unchanged, so that it can be called and tested as any other.

    Args:
        target: The function or class.
        **options: The arguments below.
        name: The model's name; by default that of the function, or of the class in snake case.
        output: The name of the only output, if the result is neither a TypedDict nor a class with fields.
        max_batch_size: The most items of a batch.
        max_delay_ms: The longest wait for a batch to fill, in milliseconds.
        timeout_s: The timeout of a request without one; 0 = the server's.
        idle_s: The longest pause between two requests of a sequence, after which its state is gone.
        instances: The number of processes, each with an instance of the model.

    Returns:
        The function or class.

    Raises:
        TypeError: An option is unknown, or the target is neither a function nor a class.
        ValueError: A number is out of its range, or a name is not usable.
    """
    known = [field.name for field in fields(ModelOptions)]
    for key in options:
        if key not in known:
            raise TypeError(f"@qinfer.model has no option '{key}'; it has {', '.join(known)}")

    def mark(target: Any) -> Any:
        if not callable(target):
            raise TypeError(f"@qinfer.model stands above a function or a class, got {type(target).__name__}")
        name = options.get("name") or model_name(target)
        setattr(target, _MARK, _validated(ModelOptions(**{**options, "name": name})))
        return target

    return mark if target is None else mark(target)


def model_name(target: Any) -> str:
    """Returns the default name of a model: `TextEmbed` → `text_embed`."""
    name: str = target.__name__
    return _CAPITAL.sub("_", name).lower() if isclass(target) else name


def rename(target: Any, name: str) -> None:
    """Gives a decorated function or class another name, or raises `ValueError` if it is not usable."""
    setattr(target, _MARK, _validated(replace(target.__dict__[_MARK], name=name)))


def options_of(target: Any) -> ModelOptions | None:
    """Returns the options of a decorated function or class; a subclass does not inherit them."""
    found = getattr(target, "__dict__", {}).get(_MARK)
    return found if isinstance(found, ModelOptions) else None


def _validated(options: ModelOptions) -> ModelOptions:
    for name in (options.name, options.output):
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise ValueError(f"a name has letters, digits, '_', '-' and '.', and begins with no '.', got {name!r}")
    limits = {"max_batch_size": 1, "instances": 1, "max_delay_ms": 0, "timeout_s": 0, "idle_s": 0.001}
    for field, least in limits.items():
        value: Any = getattr(options, field)
        kind: Any = int if least == 1 else int | float
        if not isinstance(value, kind) or isinstance(value, bool) or not least <= value < 2**31:
            what = "an integer of " if kind is int else ""
            raise ValueError(f"{field} of model '{options.name}' must be {what}{least} or more, got {value!r}")
    return options
