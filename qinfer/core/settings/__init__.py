"""Settings: typed, validated at start, read from the environment by composition roots only.

`QINFER_` prefix, sections nested by `__`: `QINFER_REDIS__URL=redis://queue:6379/0`, `QINFER_HTTP__PORT=8000`.
"""

import difflib
import json
import os
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableValue

from qinfer.core.settings.sections import (
    AuthSettings,
    AutoscaleSettings,
    BulkSettings,
    GrpcSettings,
    HttpSettings,
    LabelingSettings,
    LimitSettings,
    LogSettings,
    MetricsSettings,
    RedisSettings,
    RepositorySettings,
    RequestSettings,
    StoreSettings,
    TraceSettings,
    WebhookSettings,
    WorkerSettings,
)
from qinfer.errors import SettingsError

__all__ = [
    "PREFIX",
    "AuthSettings",
    "AutoscaleSettings",
    "BulkSettings",
    "GrpcSettings",
    "HttpSettings",
    "LabelingSettings",
    "LimitSettings",
    "LogSettings",
    "MetricsSettings",
    "RedisSettings",
    "RepositorySettings",
    "RequestSettings",
    "Settings",
    "StoreSettings",
    "TraceSettings",
    "WebhookSettings",
    "WorkerSettings",
    "load_settings",
    "unknown_variables",
    "variable_names",
]


PREFIX = "QINFER_"

_OF_COMMANDS = "QINFER_API_KEY"
"""The key that commands present (`qinfer.cli.console`); no setting, for it must not reach the programs."""


class Settings(BaseSettings):
    """Everything that can be set; each section's fields say what they mean."""

    model_config = SettingsConfigDict(env_prefix="QINFER_", env_nested_delimiter="__", frozen=True, extra="forbid")

    redis: RedisSettings = Field(default_factory=RedisSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    grpc: GrpcSettings = Field(default_factory=GrpcSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    requests: RequestSettings = Field(default_factory=RequestSettings)
    webhooks: WebhookSettings = Field(default_factory=WebhookSettings)
    stores: StoreSettings = Field(default_factory=StoreSettings)
    bulk: BulkSettings = Field(default_factory=BulkSettings)
    labeling: LabelingSettings = Field(default_factory=LabelingSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    repository: RepositorySettings = Field(default_factory=RepositorySettings)
    autoscale: AutoscaleSettings = Field(default_factory=AutoscaleSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    trace: TraceSettings = Field(default_factory=TraceSettings)
    allow_client_shm: bool = Field(
        False, description="Clients on this host may pass tensors by system shared memory (--allow-client-shm)."
    )
    server_id: str = Field("triton", description="The server name in GET /v2 (Triton's --id).")


def load_settings() -> Settings:
    """Reads the settings from the environment.

    Raises:
        SettingsError: A variable is unknown or its value wrong; every such variable is named.
    """
    problems = unknown_variables(os.environ)
    if problems:
        raise SettingsError("; ".join(problems))
    try:
        return Settings()
    except UnreadableValue as error:
        raise SettingsError(_not_json(os.environ) or f"{error}; sections and lists are written as JSON") from None
    except ValidationError as error:
        problems = [
            f"{PREFIX}{'__'.join(str(p).upper() for p in e['loc'])}: {e['msg']}, got {e['input']!r}"
            for e in error.errors()
        ]
        raise SettingsError("; ".join(problems)) from None


def _not_json(environment: Mapping[str, str]) -> str:
    """Names the lists that are no JSON: pydantic-settings tells the section only. Values stay out, some are secret."""
    wrong = []
    for section, field in Settings.model_fields.items():
        for name, inner in getattr(field.annotation, "model_fields", {}).items():
            variable = f"{PREFIX}{section}__{name}".upper()
            if variable in environment and "tuple" in str(inner.annotation):
                try:
                    json.loads(environment[variable])
                except ValueError:
                    wrong.append(f"""{variable}: a list is written as JSON, such as '["first", "second"]'""")
    return "; ".join(wrong)


def variable_names() -> list[str]:
    """Returns the environment variable of every setting: `QINFER_REDIS__URL`, …, `QINFER_SERVER_ID`."""
    names = []
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            names += [f"{PREFIX}{name}__{inner}".upper() for inner in section.model_fields]
        else:
            names.append(f"{PREFIX}{name}".upper())
    return names


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Returns a message for each unknown `QINFER_…` variable; without its value, which may be secret.

    pydantic-settings looks only for the variables it knows: a misspelt one would silently leave the default.
    """
    known = variable_names()
    sections = {name.partition("__")[0] for name in known}  # a whole section may be given as JSON: QINFER_HTTP={…}
    problems = []
    for name in sorted(names):
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in known or upper in sections or upper == _OF_COMMANDS:
            continue
        nearest = difflib.get_close_matches(upper, known, n=1, cutoff=0.0)
        problems.append(f"unknown setting {name}; did you mean {nearest[0]}?")
    return problems
