"""The reference pages of the alerts: one for each, made of its rule, and one with all, made of them and of outages.

The times of the table of outages were recorded from real ones by tests/support/record_outages.py.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml"
RECORDED = ROOT / "tests" / "data" / "outages"

HEAD = """
# Alerts

The rules are in `deploy/prometheus/rules`; [monitor](../how-to/monitor.md#alerts) says how to use them. Each alert
has a page, to which its annotation `runbook_url` leads.

| severity | meaning |
|---|---|
| `critical` | act at once: callers get errors or no answer |
| `warning` | act within the day: the situation gets worse, or does not end by itself |
| `info` | no urgency |
"""
OUTAGES_HEAD = """
## What fires when

Each outage was brought about under load, with two gateways and two workers, for jobs and messages with a bulk worker or
a bridge, for replicas and nodes with those, and watched by Prometheus with these rules, scraping every 15 seconds.
`tests/support/record_outages.py` repeats it; the tests of the rules run on what it recorded. The installation had been
healthy for a minute and a half: after hours of health QinferObjectiveBurnsFast takes longer, nine minutes where every
request fails at a target of 0.99.

| outage | callers got | alerts, and after how many seconds each fired |
|---|---|---|
"""
PAGE_END = "`deploy/prometheus/rules/recording.yml` records what has a colon in its name. [All alerts](../alerts.md)."
OUTAGES = {
    "workers_killed": "all workers are killed",
    "load_failure": "a new model cannot be loaded, and callers ask for it",
    "failed_rollout": "a new configuration cannot be loaded, the old one serves",
    "slow_model": "a new configuration takes two seconds",
    "hang_10": "one request hangs in a model whose execution limit is 10 s",
    "hang_60": "one request hangs in a model whose execution limit is 60 s",
    "hang_300": "one request hangs in a model whose execution limit is 300 s",
    "hangs_again": "each minute a request hangs in a model whose execution limit is 10 s",
    "redis_full": "Redis has no memory left",
    "redis_gone": "Redis is killed",
    "redis_disk_full": "the disk of Redis' append-only file is full",
    "redis_save_fails": "the folder of Redis' snapshots is gone, and `save` lines ask for them",
    "redis_rewrite_fails": "the folder of Redis' files is gone, and a rewrite of the append-only file begins",
    "redis_memory_high": "another program fills 87 % of Redis' memory",
    "redis_evicts": "Redis is made a cache (`allkeys-lru`) with less memory than it uses",
    "redis_replica_lost": "the only replica of Redis is killed",
    "redis_replica_hangs": "the only replica of Redis hangs, its connections open",
    "redis_connections": "another program takes all connections of Redis (`maxclients`)",
    "redis_node_down": "one of three nodes of a Redis cluster is killed, and has no replica",
    "stuck_job": "a bulk job comes to a row at which its model hangs",
    "dead_bridge": "the only bridge is killed, messages keep coming",
    "healthy": "none, for an hour: six times all workers and gateways are replaced, and one worker more comes and goes",
}
"""Name of a recording → what happens in it."""


def alert_pages(notice: str) -> dict[str, str]:
    """Returns file name and text of every page of alerts."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    names = [rule["alert"] for rule in rules]
    pages = {f"alerts/{rule['alert']}.md": notice + _page(rule, names) for rule in rules}
    return pages | {"alerts.md": notice + _index(rules)}


def _index(rules: list[dict[str, Any]]) -> str:
    lines = [HEAD, "| alert | severity | after | says |", "|---|---|---|---|"]
    for rule in rules:
        name, says = rule["alert"], _plain(rule["annotations"]["summary"])
        lines.append(f"| [{name}](alerts/{name}.md) | `{rule['labels']['severity']}` | {_after(rule)} | {says} |")
    lines.append(OUTAGES_HEAD.rstrip("\n"))
    for name, what in OUTAGES.items():
        if (file := RECORDED / f"{name}.json").exists():
            found = json.loads(file.read_text())
            fired = ", ".join(f"[{alert}](alerts/{alert}.md) {s}" for alert, s in found["fired_after_s"].items())
            lines.append(f"| {what} | {_statuses(found['statuses'])} | {fired or 'none'} |")
    return "\n".join(lines) + "\n"


def _statuses(statuses: dict[str, int]) -> str:
    told = {status if status != "0" else "nothing": count for status, count in statuses.items()}
    return ", ".join(f"{'once' if count == 1 else f'{count:,} times'} {status}" for status, count in told.items())


def _page(rule: dict[str, Any], names: list[str]) -> str:
    notes = rule["annotations"]
    return "\n".join(
        [
            f"\n# {rule['alert']}\n",
            f"{rule['labels']['severity'].capitalize()}, {_after(rule)}. {_plain(notes['summary'])}\n",
            f"{_plain(notes['description'])}\n",
            "## What to do\n",
            f"{_linked(notes['runbook'], names)}\n",
            "## The rule\n",
            f"```\n{rule['expr'].strip()}\n```\n",
            f"{PAGE_END}\n",
        ]
    )


def _after(rule: dict[str, Any]) -> str:
    return f"after {rule['for']}" if "for" in rule else "at once"


def _plain(text: str) -> str:
    """Returns a text of Prometheus' templates as people read it: labels as `model`, the value as `…`."""
    text = re.sub(r"\{\{ with printf .*? query -\}\}\s*(.*?)\{\{ end \}\}", r"\1", text)
    text = re.sub(r'\{\{ \. \| first \| label "(\w+)" \}\}', r"`\1`", text)
    text = re.sub(r"\{\{ *\$labels\.(\w+) *\}\}", r"`\1`", text)
    return re.sub(r"\{\{[^}]*\}\}", "…", text).replace("|", "\\|").strip()


def _linked(text: str, names: list[str]) -> str:
    """Returns a text in which the names of other alerts are links to their pages."""
    return re.sub(r"Qinfer[A-Z]\w+", lambda name: f"[{name[0]}]({name[0]}.md)" if name[0] in names else name[0], text)
