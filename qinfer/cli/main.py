"""The command line: `qinfer up | example | infer | submit | jobs | label | bridge | status | workers | models | …`.

Command modules hold options and help texts only, and import the rest when they run, so that `qinfer --help` is fast.
"""

from collections.abc import Callable
from typing import Annotated

import typer

from qinfer import __version__
from qinfer.cli import (
    apps,
    backends,
    bridge,
    dlq,
    endpoints,
    example,
    infer,
    keys,
    models,
    recorded,
    requests,
    status,
    workers,
)
from qinfer.cli.analyze import command as analyze
from qinfer.cli.checks import doctor, healthcheck
from qinfer.cli.console import Commands, ErrorsAsText
from qinfer.cli.jobs import compare, jobs, label
from qinfer.cli.local import up
from qinfer.cli.scaling import autoscale

app = Commands(
    name="qinfer",
    help="A durable, queue-backed inference server that speaks NVIDIA Triton's protocol.",
    epilog="Start with: qinfer up --model-repository ./models",
    cls=ErrorsAsText,
    no_args_is_help=True,
    # Boxes cut the names of options at 80 columns.
    rich_markup_mode=None,
    # Locals may hold a password.
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_commands: list[tuple[Callable[..., None] | typer.Typer, str, str | None]] = [
    (up.up, up.EXAMPLE, "Run everything on this machine."),
    (up.dev, up.DEV_EXAMPLE, "Develop models: reload on save, breakpoint() in this terminal."),
    (apps.new, apps.NEW_EXAMPLE, "Begin with an app: a function as a model, and its test."),
    (apps.build, apps.BUILD_EXAMPLE, "Make a model repository of an app."),
    (example.example, example.EXAMPLE, "Write an example: a model with inputs, or alerts."),
    (autoscale.autoscale, autoscale.EXAMPLE, "Run as many workers as the waiting work needs."),
    (infer.infer, infer.INFER_EXAMPLE, None),
    (jobs.submit, jobs.SUBMIT_EXAMPLE, "Submit a bulk job: a model scores files."),
    (jobs.app, "jobs", "Manage bulk jobs: list, show, preview, wait, cancel, resume, delete."),
    (compare.compare, compare.EXAMPLE, "Compare two versions of a model on files."),
    (label.label, label.EXAMPLE, "Write pre-annotations from the output of a bulk job."),
    (bridge.bridge, bridge.EXAMPLE, "Move messages from a queue to a model, and predictions back."),
    (status.status, status.STATUS_EXAMPLE, "Show models, lanes, workers and gateways."),
    (status.queues, status.QUEUES_EXAMPLE, "Show the lanes and their work."),
    (workers.app, "workers", "Workers: show, drain, and the end of a worker's log."),
    (doctor.doctor, doctor.EXAMPLE, "Check the installation, and show remedies for problems."),
    (models.app, "models", "Manage models: check, sync with a repository, list, load, unload."),
    (backends.app, "backends", None),
    (endpoints.app, "endpoints", None),
    (keys.app, "keys", "Manage API keys: new, list, rotate, revoke."),
    (requests.app, "requests", "Stored requests: list, show; cancel, purge, replay many."),
    (dlq.app, "dlq", "Manage dead letters: list, show, replay, remove."),
    (healthcheck.app, "healthcheck", "Health check for this host or container."),
    (infer.bench, infer.BENCH_EXAMPLE, "Load-test a model."),
    (recorded.record, recorded.EXAMPLE, "Record a model's real requests for load tests."),
    (analyze.analyze, analyze.EXAMPLE, "Find a model's best configuration by measurements."),
]
"""Command and example, or group and name; and a shorter help text."""

for _command, _text, _short in _commands:
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_text, short_help=_short)
    else:
        app.command(_command.__name__, epilog=_text, short_help=_short)(_command)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  (typer's callback)
    if wanted:
        print(f"qinfer {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A durable, queue-backed inference server that speaks NVIDIA Triton's protocol."""


if __name__ == "__main__":
    app()
