"""Writes the reference pages that are made from the code: settings, commands, metrics, HTTP, keys, alerts and more.

A test compares the files with what this would write, so that they can't rot.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, SecretStr

from qinfer.cli.console import usage_of
from qinfer.cli.main import app
from qinfer.core.settings import Settings
from qinfer.models.config import check as config_check
from qinfer.models.config import to_spec as config_spec
from qinfer.models.config.optimization import BACKENDS, EFFECTS
from scripts.reference_alerts import alert_pages
from scripts.reference_http import http_page
from scripts.reference_keys import keys_page
from scripts.reference_metrics import metrics_page

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
NOTICE = "<!-- Made by scripts/generate_reference.py; `make docs` writes it anew. -->\n"
SETTINGS_HEAD = """
# Settings

Every program reads its settings from environment variables, once, at its start. If a value is invalid, the program ends
with a message that names the variable, the accepted values, and the value unless it may contain a secret. Options of
`qinfer up` take precedence. Each program that it starts gets the settings that it reads, the variables of runtimes,
stores and traces (`CUDA_*`, `AWS_*`, `OTEL_*` and similar), and those of `QINFER_PASS_ENV`.

Lists are JSON: `QINFER_WORKER__MODELS='["digits", "bert-*"]'`.
"""
CLI_HEAD = """
# Command line

This page is generated from `qinfer --help`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed |
| 64 | refused: wrong usage, a wrong setting, an unknown model, a wrong input, or not allowed |
| 66 | an input of a bulk job does not exist, or no file matches its pattern |
| 69 | the server can't be reached, is overloaded, or can't do it now: the same command may work later |
| 128 + n | stopped by signal n, such as 130 by Ctrl-C |

With `--json` a command prints JSON on stdout, also when it fails:
`{"error": {"code": "unreachable", "message": "…", "exit_code": 69}}`. The text of the error is on stderr in any case.
"""
MODEL_CONFIG_HEAD = """
# Model configuration

`config.pbtxt` has Triton's format: the text of a `ModelConfig` message. Every field of the message is in one of these
tables; the name of a message stands for all of its fields. Missing fields are completed from the model file ([model
repositories](../how-to/model-repositories.md)).
"""
OPTIMIZATION_HEAD = """## optimization

Fields of `optimization` have these effects. A model that sets a field without effect (-) is loaded, and the worker logs
`optimization has no effect` once, with the field; so it does for an accelerator that can't run on the machine, and for
one of the other kind of device. A load fails only if answers would be of another precision, or for an accelerator that
the backend `onnxruntime` does not know, as in Triton.
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
            lines += [f"```\n{_usage(path, command)}\n```\n"] if _runs_alone(command) else []
            lines += ["| option | default | meaning |", "|---|---|---|", *parameters, ""]
        if command.epilog:
            lines += [f"```\n{command.epilog.partition(': ')[2]}\n```\n"]
    return "\n".join(lines)


def model_config_page() -> str:
    """Returns the text of `model-config.md`."""
    lines = [NOTICE + MODEL_CONFIG_HEAD]
    for title, table in (
        ("## Honoured\n", config_check.SUPPORTED),
        ("## Accepted without effect\n\nThese fields affect at most the speed of a model.\n", config_check.HINTS),
        ("## Refused\n\nA model that sets one is not loaded; the error names the field.\n", config_check.REFUSED),
    ):
        lines += [title, "| field | meaning |", "|---|---|"]
        lines += [f"| `{path}` | {_cell(why)} |" for path, why in table.items()]
        lines.append("")
    columns: dict[tuple[str, ...], list[str]] = {}
    """Effects, in the order of the fields → the backends that have them."""
    for backend in BACKENDS:
        columns.setdefault(tuple(_cell(of.get(backend, "-")) for of in EFFECTS.values()), []).append(backend)
    titles = [", ".join(backends) for backends in columns.values()]
    lines += [OPTIMIZATION_HEAD, f"| field | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    lines += [f"| `{field}` | {' | '.join(cells)} |" for field, *cells in zip(EFFECTS, *columns, strict=True)]
    lines += ["", "## qinfer's own parameters\n", "These parameters go into the map `parameters`.\n"]
    lines += ["| parameter | value | meaning |", "|---|---|---|"]
    lines += [
        f"| `{key}` | {config_spec.value_of(key)} | {meaning} |" for key, meaning in config_spec.PARAMETERS.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the pages."""
    for name, text in pages().items():
        (REFERENCE / name).parent.mkdir(exist_ok=True)
        (REFERENCE / name).write_text(text)
        print(f"docs: wrote {(REFERENCE / name).resolve()}")


def pages() -> dict[str, str]:
    """Returns path from docs/reference/, and text, of every generated page."""
    return {
        "settings.md": settings_page(),
        "cli.md": cli_page(),
        "metrics.md": metrics_page(NOTICE),
        "model-config.md": model_config_page(),
        "http-operations.md": http_page(NOTICE),
        "../builders/redis-keys.md": keys_page(NOTICE),
        **alert_pages(NOTICE),
    }


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


def _runs_alone(command: Any) -> bool:
    return not getattr(command, "commands", None) or command.invoke_without_command


def _usage(path: str, command: Any) -> str:
    arguments = [usage_of(one) for one in command.params if one.param_type_name == "argument"]
    return " ".join([path, "[OPTIONS]", *arguments])


def _parameters(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        if parameter.name in {"help", "install_completion", "show_completion"} or getattr(parameter, "hidden", False):
            continue
        is_option = parameter.param_type_name == "option"
        names = [*parameter.opts, *parameter.secondary_opts] if is_option else [usage_of(parameter)]
        default = parameter.default
        is_told = not (default is None or default is False or default == "" or callable(default))
        meaning = getattr(parameter, "help", None) or ""
        if parameter.envvar:
            meaning += f" Also: `{parameter.envvar}`."
        shown = " / ".join(f"`{name}`" for name in names)
        rows.append(f"| {shown} | {f'`{default}`' if is_told else ''} | {_cell(meaning)} |")
    return rows


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
