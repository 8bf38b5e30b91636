"""Settings: typed, validated at start, read from the environment by composition roots only.

`QINFER_` prefix, sections nested by `__`: `QINFER_REDIS__URL=redis://queue:6379/0`, `QINFER_HTTP__PORT=8000`.
"""

from qinfer.settings.loading import (
    API_KEY_VARIABLE,
    PREFIX,
    Settings,
    driver_variables,
    load_settings,
    unknown_variables,
    variable_names,
)
from qinfer.settings.sections import (
    AuthSettings,
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
    WebhookSettings,
    WorkerSettings,
)

__all__ = [
    "API_KEY_VARIABLE",
    "PREFIX",
    "AuthSettings",
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
    "WebhookSettings",
    "WorkerSettings",
    "driver_variables",
    "load_settings",
    "unknown_variables",
    "variable_names",
]
