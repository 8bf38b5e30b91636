"""Base of the sections of the settings."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section: its fields are set once, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
