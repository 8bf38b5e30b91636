"""The settings of the rate limiter, in the form of Triton's `--rate-limit` and `--rate-limit-resource`."""

from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from qinfer.core.settings_section import Section

_FORM = "'<resource_name>:<count>:<device>' or '<resource_name>:<count>'"
_MAX_DIGITS = 10


class Maximum(NamedTuple):
    """A resource's units; without a `device`, of each device."""

    name: str
    units: int
    device: int | None = None


class RateLimitSettings(Section):
    """The rate limiter, of models whose instances need resources; each worker has its own."""

    mode: Literal["off", "execution_count"] = Field(
        "off",
        description="`execution_count`: an instance executes only while it holds the resources that its configuration "
        "names (Triton's --rate-limit).",
    )
    resources: tuple[str, ...] = Field(
        (),
        description="Units of each worker's resources, as NAME:COUNT or NAME:COUNT:DEVICE; global resources ignore the "
        "device. By default, a resource has as many units as the largest need (Triton's --rate-limit-resource).",
    )

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            maximum_of(text)
        return texts

    @property
    def maxima(self) -> tuple[Maximum, ...]:
        """The maxima in `resources`."""
        return tuple(map(maximum_of, self.resources))


def maximum_of(text: str) -> Maximum:
    """Parses one `--rate-limit-resource`."""
    name, *numbers = text.split(":")
    if not name or not 1 <= len(numbers) <= 2 or not all(map(_is_count, numbers)):
        raise ValueError(f"--rate-limit-resource option format is {_FORM}. Got {text[:80]}")
    return Maximum(name, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
