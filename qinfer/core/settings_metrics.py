"""The settings of metrics: Triton's, and the latency objectives of models."""

from pydantic import Field, field_validator

from qinfer.core.settings_section import Section

_QUANTILES = "0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001"


class MetricsSettings(Section):
    """Metrics: their port, and Triton's optional metrics; gateways and workers need the same values."""

    enabled: bool = Field(True, description="Serve metrics on a separate port (Triton's --allow-metrics).")
    host: str = Field("", description="Address to bind; empty = that of HTTP.")
    port: int = Field(8002, ge=0, le=65535, description="Port; 0 picks a free one and prints it.")
    counter_latencies: bool = Field(
        True,
        description="Show the counters `nv_inference_*_duration_us` (Triton's --metrics-config, as the next three).",
    )
    summary_latencies: bool = Field(
        False, description="Show the summaries, `nv_*_summary_*`; workers and gateways count latencies for them."
    )
    summary_quantiles: str = Field(
        _QUANTILES,
        description="Quantiles of the summaries, each with an error as in Triton; the error has no effect.",
    )
    histogram_latencies: bool = Field(
        False, description="Show `nv_inference_first_response_histogram_ms`; workers count for it."
    )

    slo_latency_s: float = Field(
        1.0,
        gt=0,
        description="Seconds within which a request should be answered, waits included; a model's "
        "`qinfer.slo_latency_s` overrides it. See [objectives](../how-to/monitor.md#objectives).",
    )
    slo_target: float = Field(
        0.99,
        gt=0,
        lt=1,
        description="The share of requests that should be answered without a server error, and in that time; a model's "
        "`qinfer.slo_target` overrides it.",
    )

    tenants: int = Field(
        0,
        ge=0,
        le=1000,
        description="Tenants with metrics of their own in each gateway, where callers have keys; further ones share "
        "the label `(others)`. 0 = no metrics by tenant.",
    )

    @field_validator("summary_quantiles")
    @classmethod
    def _check_quantiles(cls, text: str) -> str:
        quantiles_of(text)
        return text

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The summaries' quantiles."""
        return quantiles_of(self.summary_quantiles) if self.summary_latencies else ()


def quantiles_of(text: str) -> tuple[float, ...]:
    """Parses quantiles such as `0.5:0.05,0.9:0.01`."""
    found: list[float] = []
    for part in text.split(","):
        words = part.split(":")
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 2 or not all(0 <= number <= 1 for number in numbers):
            raise ValueError(f"'{part.strip()[:40]}' is no quantile with its error, each from 0 to 1, such as 0.9:0.01")
        found.append(numbers[0])
    return tuple(dict.fromkeys(found))
