"""The environments of programs, helpers and models: what each is given, and what is kept from it."""

import json

import pytest
from pydantic import BaseModel, SecretStr

from qinfer.core.processes import (
    BULK_WORKER,
    GATEWAY,
    WORKER,
    ProgramRole,
    helper_environment,
    model_environment,
    program_environment,
    system_environment,
    without_settings,
)
from qinfer.core.settings import Settings, variable_names

PLAIN = {"PATH": "/bin", "LC_ALL": "C", "PYTHONPATH": "/code", "CUDA_VISIBLE_DEVICES": "0"}
CREDENTIALS = {"AWS_SECRET_ACCESS_KEY": "a", "https_proxy": "http://user:b@proxy", "OTEL_EXPORTER_OTLP_HEADERS": "c"}
OTHERS = {"ACME_DB_PASSWORD": "d", "HF_TOKEN": "e", "QINFER_API_KEY": "f"}


def settings_of(role: ProgramRole) -> set[str]:
    """Returns the settings that a program gets of all that there are."""
    return set(program_environment(role, dict.fromkeys(variable_names(), "{}")))


def test_every_setting_is_the_gateways() -> None:
    """A new section is given to the gateway; whether workers read it as well has to be decided."""
    assert settings_of(GATEWAY) == set(variable_names())


def test_secrets_of_the_gateway_are_not_the_workers() -> None:
    """Each secret setting is here, so that a new one is thought about."""
    secret = {
        f"QINFER_{section}__{name}".upper()
        for section, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for name, inner in field.annotation.model_fields.items()
        if inner.annotation is SecretStr
    }
    of_redis = {"QINFER_REDIS__URL", "QINFER_REDIS__SENTINEL_PASSWORD"}

    assert secret & settings_of(WORKER) == of_redis
    assert secret & settings_of(BULK_WORKER) == of_redis | {"QINFER_BULK__BROKER_URL"}
    of_gateways = {"QINFER_WEBHOOKS__SECRET", "QINFER_LABELING__TOKEN", "QINFER_CONSOLE__PROMETHEUS_URL"}
    assert secret - settings_of(BULK_WORKER) == of_gateways
    for role in (WORKER, BULK_WORKER):
        sections = {name.split("__")[0] for name in settings_of(role)}
        assert not sections & {"QINFER_HTTP", "QINFER_GRPC", "QINFER_AUTH"}


@pytest.mark.parametrize("role", [GATEWAY, WORKER, BULK_WORKER])
def test_a_program_gets_credentials_of_stores_and_what_the_operator_passes(role: ProgramRole) -> None:
    base = PLAIN | CREDENTIALS | OTHERS

    assert program_environment(role, base) == PLAIN | CREDENTIALS
    assert program_environment(role, base, ["ACME_*"]) == PLAIN | CREDENTIALS | {"ACME_DB_PASSWORD": "d"}


def test_a_section_as_json_goes_without_what_is_withheld() -> None:
    base = {
        "QINFER_BULK": json.dumps({"Broker_Url": "redis://:secret@h", "enabled": True}),
        "qinfer_redis": '{"url": "redis://h"}',
    }

    assert program_environment(WORKER, base) == {
        "QINFER_BULK": '{"enabled": true}',
        "qinfer_redis": '{"url": "redis://h"}',
    }
    assert program_environment(BULK_WORKER, base) == base
    for broken in ("{", "[1]", "1"):
        assert program_environment(WORKER, {"QINFER_BULK": broken}) == {}


def test_a_model_gets_no_settings_and_no_credentials() -> None:
    """Not even by a pattern that matches everything."""
    base = PLAIN | CREDENTIALS | OTHERS | {"QINFER_REDIS__URL": "g", "qinfer_redis__url": "h"}

    assert model_environment(base) == PLAIN
    assert model_environment(base, ["HF_TOKEN"]) == PLAIN | {"HF_TOKEN": "e"}
    assert model_environment(base, ["*"]) == PLAIN | CREDENTIALS | {"ACME_DB_PASSWORD": "d", "HF_TOKEN": "e"}


def test_helpers_get_the_systems_variables_and_the_one_for_debuggers() -> None:
    base = PLAIN | CREDENTIALS | {"QINFER_REDIS__URL": "g", "qinfer_allow_inspection": "true"}
    system = {name: PLAIN[name] for name in ("PATH", "LC_ALL", "PYTHONPATH")}

    assert helper_environment(base) == system | {"qinfer_allow_inspection": "true"}
    assert system_environment(base) == system
    assert without_settings(base) == PLAIN | CREDENTIALS | {"qinfer_allow_inspection": "true"}
