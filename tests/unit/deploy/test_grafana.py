"""Grafana's dashboards and provisioning: whole, and about metrics that there are."""

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from qinfer.observe import catalogue
from tests.support.deploy.deployments import DEPLOY, compose, tool
from tests.support.deploy.promql import uses_of, wrong_with

GRAFANA = DEPLOY / "grafana"
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in (GRAFANA / "dashboards").glob("*.json")
}
RECORDED = {
    rule["record"]
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules" / "recording.yml").read_text())["groups"]
    for rule in group["rules"]
}
KINDS = {"row", "timeseries", "stat", "heatmap", "table"}
BUILT_IN = {"__rate_interval": "5m"}


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARDS[name]["panels"] if panel["type"] != "row"]


def variables(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DASHBOARDS[name]["templating"]["list"]
    return found


def expressions(name: str) -> list[str]:
    """Returns every query of a dashboard, its annotations' and variables' among them."""
    board = DASHBOARDS[name]
    asked = [target["expr"] for panel in panels(name) for target in panel["targets"]]
    asked += [each["expr"] for each in board["annotations"]["list"]]
    queries = [variable["query"]["query"] for variable in variables(name) if variable["type"] == "query"]
    return asked + [re.sub(r"^label_values\((.*), \w+\)$", r"\1", query) for query in queries]


def filled(expression: str) -> str:
    """Returns a query as Prometheus gets it."""
    return re.sub(r"\$(\w+)", lambda match: BUILT_IN.get(match[1], "x"), expression)


@pytest.fixture(params=DASHBOARDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_promtool_parses_each_query(name: str, tmp_path: Path) -> None:
    """Prometheus' own parser takes them all."""
    rules = [
        {"record": "parsed", "expr": filled(each), "labels": {"n": str(n)}} for n, each in enumerate(expressions(name))
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": name, "rules": rules}]}))

    found = subprocess.run(
        [tool("promtool", "promtool"), "check", "rules", tmp_path / "rules.yml"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.returncode == 0, found.stdout + found.stderr


def test_queries_name_what_is_measured(name: str) -> None:
    """Each metric is one of qinfer's, with these labels, and is used as its kind is."""
    asked = [filled(each) for each in expressions(name)]

    assert [wrong for each in asked for use in uses_of(each) if (wrong := wrong_with(use, RECORDED))] == []
    assert all(uses_of(each) for each in asked)


def test_queries_use_variables_that_there_are(name: str) -> None:
    """A `$word` is a variable of the dashboard, or one of Grafana's own."""
    known = {variable["name"] for variable in variables(name)} | set(BUILT_IN)

    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARDS[name]))) <= known | {"__all"}


def test_panels_are_whole(name: str) -> None:
    """Each has a kind that Grafana brings, a title, a description, a unit, queries with letters, the data source."""
    for panel in panels(name):
        assert panel["type"] in KINDS
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))
        assert letters
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_do_not_overlap(name: str) -> None:
    """They have numbers of their own, and lie side by side on the 24 columns."""
    board = DASHBOARDS[name]["panels"]
    places = [panel["gridPos"] for panel in board]

    assert len({panel["id"] for panel in board}) == len(board)
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0 for place in places)
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]


def test_the_overview_shows_what_an_operator_looks_for() -> None:
    """Throughput, errors, latency, backlog, age, work, workers, batches, devices, sequences, jobs, bridges."""
    shown = " ".join(expressions("overview"))
    wanted = [
        "qinfer_requests_total",
        "qinfer_request_failures_total",
        "qinfer_request_duration_seconds_bucket",
        "qinfer_backlog_requests",
        "qinfer_backlog_oldest_age_seconds",
        "qinfer_backlog_work_seconds",
        "qinfer_worker_up",
        "qinfer_batch_size_rows_sum",
        "qinfer_batch_fill_ratio_sum",
        "qinfer_device_memory_used_bytes",
        "qinfer_device_utilization_ratio",
        "qinfer_dead_letters",
        "qinfer_sequences_waiting",
        "qinfer_jobs",
        "qinfer_job_rows_total",
        "qinfer_bridge_connected",
    ]

    assert [metric for metric in wanted if metric not in shown] == []
    assert all("by (version" in each or "model_ready" in each or "ALERTS" in each for each in expressions("versions"))


def test_the_dashboard_of_tenants_is_by_tenant() -> None:
    """What they ask, how they are served, and what they are refused; each query is of the chosen ones."""
    asked = expressions("tenants")[: len(panels("tenants"))]

    assert all('tenant=~"$tenant"' in each for each in asked)
    assert {use.name for each in asked for use in uses_of(filled(each))} == {
        "qinfer_tenant_requests_total",
        "qinfer_tenant_request_failures_total",
        "qinfer_tenant_request_duration_seconds_bucket",
        "qinfer_tenant_requests_in_flight",
    }


def test_the_dashboard_of_redis_shows_all_that_its_nodes_tell() -> None:
    """Each metric of nodes; each query is of the chosen ones."""
    asked = [target["expr"] for panel in panels("redis") for target in panel["targets"]]

    assert all('node=~"$node"' in each for each in asked)
    assert {use.name for each in asked for use in uses_of(filled(each))} == {
        info.name for info in catalogue.ALL if info.name.startswith("qinfer_redis_")
    }


def test_dashboards_can_be_provisioned() -> None:
    """They have addresses of their own, and the files of the provisioning lead to them and to Prometheus."""
    service = compose()["services"]["grafana"]
    mounts = dict(volume.removesuffix(":ro").split(":")[:2][::-1] for volume in service["volumes"])
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "qinfer.yml").read_text())["providers"][0]
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    default = DASHBOARDS["overview"]["templating"]["list"][0]["current"]

    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    assert len({board["uid"] for board in DASHBOARDS.values()}) == len(DASHBOARDS) == 5
    assert all(board["schemaVersion"] >= 39 and board["title"] for board in DASHBOARDS.values())
    assert (source["uid"], source["name"]) == (default["value"], default["text"])
    assert source["url"] == "http://prometheus:9090"
