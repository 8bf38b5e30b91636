"""Settings: typed, validated at start, read from the environment by composition roots only.

`QINFER_` prefix, sections nested by `__`: `QINFER_REDIS__URL=redis://queue:6379/0`, `QINFER_HTTP__PORT=8000`.
"""

from qinfer.core.settings.loading import (
    PREFIX,
    Settings,
    load_settings,
    unknown_variables,
    variable_names,
)
from qinfer.core.settings.metrics import MetricsSettings
from qinfer.core.settings.sections import (
    AuthSettings,
    AutoscaleSettings,
    BulkSettings,
    GrpcSettings,
    HttpSettings,
    LabelingSettings,
    LimitSettings,
    LogSettings,
    RedisSettings,
    RepositorySettings,
    RequestSettings,
    StoreSettings,
    WebhookSettings,
    WorkerSettings,
)
from qinfer.core.settings.tracing import TraceSettings

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
