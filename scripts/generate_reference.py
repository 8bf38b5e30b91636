"""Writes the reference pages that are made from the code: settings, command line, metrics.

A test compares the files with what this would write, so that they can't rot.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, SecretStr

from qinfer.cli.main import app
from qinfer.observability import stats, triton_metrics
from qinfer.observability.bridge_metrics import BridgeCollector, RouteTally
from qinfer.observability.host import HostUse
from qinfer.observability.metrics import GatewayTally, Snapshot, WorkerLoad
from qinfer.repository import config_fields, config_spec
from qinfer.settings import Settings

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
NOTICE = "<!-- Made by scripts/generate_reference.py; `make docs` writes it anew. -->\n"
SETTINGS_HEAD = """
# Settings

Every program reads its settings from environment variables, once, at its start. A wrong value ends it with a message
that names the variable, the value, and what is accepted. `qinfer up` hands its own environment on to the programs that
it starts, and sets on top of it what its options say.

Lists are JSON: `QINFER_WORKER__MODELS='["digits", "bert-*"]'`.
"""
CLI_HEAD = """
# Command line

Made from `qinfer --help`. Every command exits with 0 when it did what was asked, 1 when it failed, 2 when it was used
wrongly.
"""
METRICS_HEAD = """
# Metrics

`GET /metrics` on any gateway, in Prometheus' text format: on the port of `QINFER_METRICS__PORT` and on that of HTTP.

Metrics marked *shared* come from Redis and are about all workers and queues: every gateway shows the same numbers, so
combine gateways with `max`. The others are about the gateway that is asked: combine them with `sum`.

Scale workers by `qinfer_backlog_requests`: what waits and what is in flight. The mean batch size is
`rate(qinfer_batch_size_rows_sum[1m]) / rate(qinfer_batch_size_rows_count[1m])`.
"""
TRITON_METRICS_HEAD = """
## Triton's names

The same numbers once more, under the names that Triton's users have dashboards for. Those of models are *shared*, and
there from 0 on as long as a version is to be loaded. They count what the whole installation did since the version was
first loaded: a reload or a restart does not set them back. Durations are those of requests that succeeded.

`nv_inference_pending_request_count` is what is in the queue less what executed at the workers' last heartbeats, up to a
second ago; `nv_model_load_duration_secs` is that of the worker in which the last load took longest. CPU and
memory are those of the machine of the gateway that is asked, on Linux; the CPU's is since the scrape before.

There are no summaries and no `nv_inference_first_response_histogram_ms`, which Triton has only on request: the
histograms above tell more. Nor are there metrics of the GPU, of pinned memory or of a cache.
"""
TRITON_REASONS_HEAD = """
The reasons of `nv_inference_request_failure`, by the code of the error, which is the reason of qinfer's own metrics.
For codes that a model may give its own errors it matters whether a worker counted the failure or a gateway.

| reason | codes |
|---|---|"""
BRIDGE_METRICS_HEAD = """
## Bridge

A [bridge](../how-to/bridge-a-queue.md) serves metrics of its own: `GET /metrics` on the port that its file names. They
are about that process: combine bridges with `sum`.
"""
MODEL_CONFIG_HEAD = """
# Model configuration

`config.pbtxt` is Triton's: the text of a `ModelConfig` message. Every field of the message is in one of these tables.
What is missing is completed from the model file ([model repositories](../how-to/model-repositories.md)).

A message that is named stands for all of its fields.
"""


def settings_page() -> str:
    """Returns the text of `settings.md`."""
    lines = [NOTICE + SETTINGS_HEAD]
    loose = {name: field for name, field in Settings.model_fields.items() if not _is_section(field.annotation)}
    sections = {name: field for name, field in Settings.model_fields.items() if name not in loose}
    if loose:
        lines += ["## General\n", *_settings_table("QINFER_", loose)]
    for name, field in sections.items():
        section: Any = field.annotation
        lines += [
            f"## {name}\n",
            f"{section.__doc__}\n",
            *_settings_table(f"QINFER_{name.upper()}__", section.model_fields),
        ]
    return "\n".join(lines)


def cli_page() -> str:
    """Returns the text of `cli.md`."""
    lines = [NOTICE + CLI_HEAD]
    for path, command in _commands(typer.main.get_command(app), "qinfer"):
        lines += [f"## {path}\n", f"{_help(command)}\n"]
        if parameters := _parameters(command):
            lines += ["| option | default | meaning |", "|---|---|---|", *parameters, ""]
        if command.epilog:
            lines += [f"```\n{command.epilog.partition(': ')[2]}\n```\n"]
    return "\n".join(lines)


def metrics_page() -> str:
    """Returns the text of `metrics.md`: each metric is asked what it is, with one series of its own."""
    tally, key = GatewayTally(), ("digits", 1)
    tally.answered(*key, 0.0)
    tally.failed(*key, "")
    snapshot = Snapshot(
        stats={key: {f"{stats.FAILURES}reason": 1}},
        depth={(*key, "p1"): 0},
        ready={key: True},
        workers={"worker": WorkerLoad(device="cpu", executing=0)},
        load_s={key: 0.0},
        host=HostUse(0.0, 0, 0),
    )
    lines = [METRICS_HEAD, "| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in (*tally.collect(), *snapshot.collect()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(label for label in family.samples[0].labels if label != "le")
        lines.append(f"| `{name}` | {family.type} | {labels} | {_cell(family.documentation)} |")
    lines += [TRITON_METRICS_HEAD, "| metric | type | labels | meaning |", "|---|---|---|---|"]
    for triton in snapshot.of_triton():
        labels = ", ".join(label for label, _ in triton.samples[0].labels)
        lines.append(f"| `{triton.name}` | {triton.kind} | {labels} | {_cell(triton.text)} |")
    lines += [TRITON_REASONS_HEAD, *_reasons()]
    lines += [BRIDGE_METRICS_HEAD, "| metric | type | labels | meaning |", "|---|---|---|---|"]
    one = {"": 1}
    route = RouteTally("route", refused=one, replied=one, unroutable=one, connected={"": True})
    for family in BridgeCollector([route]).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(family.samples[0].labels)
        lines.append(f"| `{name}` | {family.type} | {labels} | {_cell(family.documentation)} |")
    return NOTICE + "\n".join(lines) + "\n"


def model_config_page() -> str:
    """Returns the text of `model-config.md`."""
    lines = [NOTICE + MODEL_CONFIG_HEAD]
    for title, table in (
        ("## Honoured\n", config_fields.SUPPORTED),
        ("## Accepted without effect\n\nThey change how fast a model runs at most.\n", config_fields.HINTS),
        ("## Refused\n\nA model that sets one is not loaded; the error names the field.\n", config_fields.REFUSED),
    ):
        lines += [title, "| field | |", "|---|---|", *(f"| `{path}` | {_cell(why)} |" for path, why in table.items())]
        lines.append("")
    lines += ["## qinfer's own parameters\n", "They go into the map `parameters`.\n"]
    lines += ["| parameter | value | meaning |", "|---|---|---|"]
    lines += [
        f"| `{key}` | {config_spec.value_of(key)} | {config_spec.PARAMETERS[key]} |"
        for key in config_spec.KNOWN_PARAMETERS
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the pages."""
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
        print(f"docs: wrote docs/reference/{name}")


def pages() -> dict[str, str]:
    """Returns file name and text of every generated page."""
    return {
        "settings.md": settings_page(),
        "cli.md": cli_page(),
        "metrics.md": metrics_page(),
        "model-config.md": model_config_page(),
    }


def _reasons() -> list[str]:
    """Returns a row for each of Triton's reasons, with the codes that lead to it."""
    rows = []
    for reason in triton_metrics.Reason:
        codes = [
            f"`{code}`" + ("" if of.worker is of.gateway else f" ({'worker' if of.worker is reason else 'gateway'})")
            for code, of in triton_metrics.REASONS.items()
            if reason in of
        ]
        rest = ["all others"] if reason is triton_metrics.Reason.OTHER else []
        rows.append(f"| {reason} | {', '.join([*codes, *rest])} |")
    return rows


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _settings_table(prefix: str, fields: dict[str, Any]) -> list[str]:
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in fields.items():
        rows.append(f"| `{prefix}{name.upper()}` | {_default(field.default)} | {_cell(field.description or '')} |")
    return [*rows, ""]


def _default(value: Any) -> str:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, tuple):
        value = str(list(value)).replace("'", '"')
    return f"`{value}`" if value != "" else "(empty)"


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Walks the commands; they are `Any` because some versions of typer bring a click of their own."""
    if not command.hidden:
        yield path, command
        for name, child in getattr(command, "commands", {}).items():
            yield from _commands(child, f"{path} {name}")


def _help(command: Any) -> str:
    return (command.help or "").strip()


def _parameters(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        if parameter.name in {"help", "install_completion", "show_completion"} or getattr(parameter, "hidden", False):
            continue
        is_option = parameter.param_type_name == "option"
        names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
        default = "" if parameter.default in {None, "", False} or callable(parameter.default) else parameter.default
        meaning = getattr(parameter, "help", None) or ""
        if parameter.envvar:
            meaning += f" Also: `{parameter.envvar}`."
        shown = " / ".join(f"`{name}`" for name in names)
        rows.append(f"| {shown} | {default and f'`{default}`'} | {_cell(meaning)} |")
    return rows


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
