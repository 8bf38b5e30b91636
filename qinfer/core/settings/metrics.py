"""What metrics are served, and where."""

from pydantic import BaseModel, ConfigDict, Field, field_validator

_QUANTILES = "0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001"


class MetricsSettings(BaseModel):
    """Where metrics are read, and Triton's that can be chosen; give gateways and workers the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="Serve metrics on a port of their own (Triton's --allow-metrics).")
    host: str = Field("", description="Address to bind; empty = that of HTTP.")
    port: int = Field(8002, ge=0, le=65535, description="Port; 0 picks a free one and prints it.")
    counter_latencies: bool = Field(
        True,
        description="Show the counters `nv_inference_*_duration_us` (Triton's --metrics-config; the next three, too).",
    )
    summary_latencies: bool = Field(
        False, description="Show the `nv_inference_*_summary_us` summaries; workers count latencies for them."
    )
    summary_quantiles: str = Field(
        _QUANTILES,
        description="Their quantiles, each with an error as in Triton; the error is ignored: qinfer's is fixed.",
    )
    histogram_latencies: bool = Field(
        False, description="Show `nv_inference_first_response_histogram_ms`; workers count for it."
    )

    @field_validator("summary_quantiles")
    @classmethod
    def _check_quantiles(cls, text: str) -> str:
        quantiles_of(text)
        return text

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The quantiles of the summaries; none where these are not shown."""
        return quantiles_of(self.summary_quantiles) if self.summary_latencies else ()


def quantiles_of(text: str) -> tuple[float, ...]:
    """Reads quantiles as Triton's `summary_quantiles` has them: `0.5:0.05,0.9:0.01`.

    Raises:
        ValueError: One of them is no quantile.
    """
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
