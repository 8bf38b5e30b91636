"""The settings of the trace extension."""

from typing import Literal, Self

from pydantic import Field, model_validator

from qinfer.core.settings_section import Section


class TraceSettings(Section):
    """Triton's traces."""

    file: str = Field(
        "",
        description="Trace file of the trace extension, and the prefix of the names of further files, such as "
        "/var/log/qinfer/trace.json; its directory must exist. Empty = no such traces. Clients cannot change it.",
    )
    level: Literal["OFF", "TIMESTAMPS", "TENSORS"] = Field(
        "OFF", description="Trace level at the start (Triton's --trace-config level); clients may change it."
    )
    rate: int = Field(1000, ge=0, lt=2**32, description="One in this many requests is traced at the start.")
    count: int = Field(-1, ge=-1, lt=2**31, description="Traces that each gateway makes at the start; -1 = unlimited.")

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if self.level != "OFF" and not self.file:
            raise ValueError("QINFER_TRACE__LEVEL needs QINFER_TRACE__FILE: traces are written to it")
        return self
