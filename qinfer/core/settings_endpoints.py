"""The settings of endpoints and their shadows."""

from pydantic import Field

from qinfer.core.settings_section import Section


class EndpointSettings(Section):
    """Endpoints: names that stand for several models or versions (`/v1/endpoints`)."""

    path: str = Field(
        "",
        description="Directory of declarations of endpoints, one file (YAML, TOML, JSON) each; a gateway stores "
        "each new content of a file when it starts. Empty = endpoints are declared by the API only.",
    )
    max_shadows: int = Field(
        256, gt=0, description="Maximum shadows in flight in one gateway; further ones are dropped and counted."
    )
    max_shadow_bytes: int = Field(
        64 * 2**20, gt=0, description="Maximum bytes of inputs and outputs of the shadows in flight in one gateway."
    )
    sample_bytes: int = Field(
        65_536,
        ge=0,
        description="Bytes of samples of disagreement that a gateway keeps of a shadow target; 0 = no samples.",
    )
    redact_samples: bool = Field(
        False, description="Keep no values in samples of disagreement, which may be secret; only where outputs differ."
    )
