"""Prometheus' configuration, rules and alerts: valid, tested by promtool, and about metrics that there are."""

import copy
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from qinfer.core.settings import unknown_variables
from qinfer.errors import ErrorCode
from qinfer.jobs.job import TERMINAL, JobState
from tests.support.deploy.deployments import DEPLOY, ROOT, assert_runs, tool
from tests.support.deploy.manifest_rules import is_command
from tests.support.deploy.promql import metric_of, uses_of, wrong_with

PROMETHEUS = DEPLOY / "prometheus"
CASES = yaml.safe_load((PROMETHEUS / "tests" / "alerts_test.yml").read_text())
RULES = [PROMETHEUS / "rules" / name for name in ("recording.yml", "alerts.yml")]
GROUPS = [yaml.safe_load(path.read_text())["groups"] for path in RULES]
RECORDED, ALERTS = ([rule for group in groups for rule in group["rules"]] for groups in GROUPS)
NAMES = [rule["alert"] for rule in ALERTS]
PAGES = ROOT / "docs" / "reference" / "alerts"
PARAMETERS = (ROOT / "docs" / "reference" / "model-config.md").read_text()
CODE = "".join(path.read_text() for part in ("qinfer", "api", "workers") for path in (ROOT / part).rglob("*.py"))


def promtool(*words: str | Path) -> None:
    environment = os.environ | {"GOGC": "400"}  # to collect garbage more often takes a fifth of its time
    command = [tool("promtool", "promtool"), *words]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr


def run_cases(file: Path, document: Mapping[str, Any]) -> None:
    """Has promtool run cases; groups in their order, so that alerts see what was recorded at the same instant."""
    order = [group["name"] for groups in GROUPS for group in groups]
    more = {"rule_files": [str(path) for path in RULES], "group_eval_order": order}
    file.write_text(yaml.safe_dump({**document, **more}))
    promtool("test", "rules", file)


def cases_of(alert: str) -> list[dict[str, Any]]:
    return [case for case in CASES["tests"] if case["name"].startswith(f"{alert}:")]


def test_the_configuration_is_valid() -> None:
    """Prometheus takes it with its rules."""
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.slow
@pytest.mark.parametrize("alert", NAMES)
def test_the_alerts_do_what_they_should(alert: str, tmp_path: Path) -> None:
    """Each case of the unit tests has exactly the alerts that it names."""
    run_cases(tmp_path / "cases.yml", {**CASES, "tests": cases_of(alert)})


def test_each_alert_is_seen_to_fire_and_to_be_silent() -> None:
    """No alert without a case for either; a case that names none asserts that none fires."""
    fires: set[str] = set()
    silent: set[str] = set()
    for case in CASES["tests"]:
        about = case["name"].partition(":")[0]
        samples = case["promql_expr_test"][0]["exp_samples"]
        (fires if samples else silent).add(about)
        assert [sample["labels"] for sample in samples] in ([], [f'{{alertname="{about}"}}'])

    assert fires == silent == set(NAMES)


@pytest.mark.parametrize("rule", [*RECORDED, *ALERTS], ids=lambda rule: rule.get("alert") or rule["record"])
def test_expressions_name_what_is_measured(rule: dict[str, Any]) -> None:
    """Each metric is one of qinfer's, with these labels, and is used as its kind is."""
    found = [wrong_with(use, {each["record"] for each in RECORDED}) for use in uses_of(rule["expr"])]

    assert found
    assert [wrong for wrong in found if wrong] == []


def test_values_of_labels_are_words_of_the_code() -> None:
    """Reasons are error codes, states are states of a job, and those that are said to end do not count as stuck."""
    for rule in [*RECORDED, *ALERTS]:
        for use in uses_of(rule["expr"]):
            words = {label: set(value.split("|")) for label, value in use.matchers}
            assert words.get("reason", set()) <= {code.value for code in ErrorCode}
            if use.name == "qinfer_jobs":
                assert words["state"] <= {state.value for state in JobState} - {state.value for state in TERMINAL}


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_alerts_say_what_to_do(rule: dict[str, Any]) -> None:
    """Each has a severity, a summary, a description, a runbook whose commands are there, and a page."""
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook", "runbook_url"}
    for command in re.findall(r"`(qinfer [a-z ]+[a-z])", rule["annotations"]["runbook"]):
        if command.split()[1] not in ("bridge", "dlq", "endpoints", "jobs"):  # which need an argument
            assert_runs(command.split())
    assert rule["annotations"]["runbook_url"] == f"http://127.0.0.1:8080/reference/alerts/{rule['alert']}.html"
    assert (PAGES / f"{rule['alert']}.md").exists()


@pytest.mark.parametrize(
    "alert",
    ["QinferBacklogOld", "QinferSaturated", "QinferRequestsRefused", "QinferMostRefused", "QinferRequestsExpire"],
)
def test_alerts_of_a_flood_name_its_tenant(alert: str, tmp_path: Path) -> None:
    """Where gateways count by tenant; promtool tells what it got in place of nothing."""
    found = next(each for each in cases_of(alert) if each["promql_expr_test"][0]["exp_samples"])
    case = copy.deepcopy(found)
    rates = {"acme": "0+9x300", "globex": "0+3x300"}
    series = 'qinfer_tenant_requests_total{model="m",process="a",tenant="%s"}'
    case["input_series"] += [{"series": series % name, "values": values} for name, values in rates.items()]
    (expected,) = case.pop("promql_expr_test")
    case["alert_rule_test"] = [{"eval_time": expected["eval_time"], "alertname": alert, "exp_alerts": []}]

    with pytest.raises(AssertionError, match="Most requests come from tenant acme"):
        run_cases(tmp_path / "cases.yml", {**CASES, "tests": [case]})


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_runbooks_lead_to_what_is_there(rule: dict[str, Any]) -> None:
    """Commands, settings, parameters of models, metrics, lines of logs, and other alerts."""
    text = " ".join(rule["annotations"].values())
    commands = re.findall(r"`((?:qinfer|python -m) [^`]+)`", re.sub(r"(--[a-z]+) [a-z]+", r"\1", text))
    settings = set(re.findall(r"QINFER_[A-Z_]+", text))
    parameters = set(re.findall(r"\bqinfer\.[a-z_]+", text))
    metrics = set(re.findall(r"\bqinfer_[a-z_]+", text)) - {"qinfer_workers"}

    assert [command for command in commands if not is_command(command.split())] == []
    assert unknown_variables(settings) == []
    assert {name for name in parameters if f"`{name}`" not in PARAMETERS} == set()
    assert {name for name in metrics if metric_of(name) is None} == set()
    lines = set(re.findall(r'"([a-z ]+)"', " ".join(rule["annotations"]["runbook"].split())))
    assert {line for line in lines if f'"{line}"' not in CODE} == set()
    assert set(re.findall(r"\bQinfer[A-Z]\w+", text)) <= set(NAMES)


def test_there_are_no_pages_of_other_alerts() -> None:
    """An alert that is gone has no page."""
    assert {page.stem for page in PAGES.iterdir()} == set(NAMES)


def test_the_installation_is_scraped_once() -> None:
    """Shared series come from one address, those of bridges too; each gateway's own from all."""
    jobs = {
        job["job_name"]: job for job in yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    }

    assert set(jobs) == {"qinfer-cluster", "qinfer-gateways", "prometheus"}
    assert jobs["qinfer-cluster"]["params"] == {"scope": ["cluster"]}
    assert len(jobs["qinfer-cluster"]["static_configs"][0]["targets"]) == 1
    assert jobs["qinfer-gateways"]["params"] == {"scope": ["process"]}
    assert jobs["qinfer-gateways"]["dns_sd_configs"][0]["names"] == ["gateway"]
