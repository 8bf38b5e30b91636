"""The section of traces; OpenTelemetry's own variables (`OTEL_…`) are no settings of qinfer's."""

from pydantic import Field

from qinfer.core.settings.sections import _Section


class TraceSettings(_Section):
    """Triton's traces."""

    file: str = Field(
        "",
        description="Where the trace extension writes its traces, and what the names of further files begin with, such "
        "as /var/log/qinfer/trace.json; its directory must be there. Empty = no such traces. Clients can't change it.",
    )
